"""`LLM`: offline generation with vLLM's signatures, in the caller's thread or on Ray."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from cluster import shadowing
from cluster.engine import make_engine
from cluster.serving.startup_info import served_names
from cluster.settings import engine_config
from protos.config.engine import EngineConfig
from protos.errors import EngineDeadError, InvalidRequestError, failure
from protos.messages import Request, TokenOutput
from protos.outputs import RequestOutput
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams
from protos.stats import EngineStats
from protos.validation import shown
from runtime.frontend.outputs import OutputCollector, decoder
from runtime.text.prompts import Prompt, adds_special_tokens, as_prompts, check_unused
from runtime.text.sampling_defaults import default_max_tokens, sampling_defaults

if TYPE_CHECKING:
    from runtime.metrics.snapshot import Metric

logger = logging.getLogger("slipstream")

Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]
Progress = bool | Callable[..., Any]

TURN_S = 0.01  # a thread that waits for its turn to step looks this often for what others' steps have brought


class LLM:
    """Generates text with a model, for one thread or for several, which share steps. `LLM()` loads the demo pair.

    Args:
        model: Hub id or folder.
        arguments: vLLM's engine arguments; `slipstream env` lists them with their values.

    Raises:
        ConfigError, ModelError: names the value and the limit.
        PlacementError: the Ray cluster has no room for the workers.
    """

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        shadowing.check()
        self._start(engine_config({"model": model, **arguments}), logger.info)

    @classmethod
    def from_config(cls, config: EngineConfig, report: ProgressCallback = logger.info) -> "LLM":
        """Build from a parsed configuration; *report* is called with a line for each stage of loading."""
        llm = cls.__new__(cls)
        llm._start(config, report)
        return llm

    def _start(self, config: EngineConfig, report: ProgressCallback) -> None:
        self.config = config
        self._sampling_defaults = sampling_defaults(config.model)
        if default_max_tokens(config.model) is not None:
            self._sampling_defaults["max_tokens"] = None
        self._engine = make_engine(config, report)
        self._preprocessor = self._engine.preprocessor
        self._names = map(str, itertools.count())
        self._arrived: dict[str, deque[TokenOutput]] = {}  # outputs by running request, not yet read by its caller
        self._decode = decoder(self._engine.tokenizer)

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt and return the results in the prompts' order.

        Args:
            prompts: text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": [...]}`, or a list of these.
            sampling_params: one for all, or one for each prompt; `get_default_sampling_params()` if None.
            use_tqdm: whether to show a progress bar, or a function that makes one.
            lora_request: as in vLLM; must be None.
            priority: as in vLLM; must be None or zeros.
            tokenization_kwargs: as in vLLM, `add_special_tokens` alone; default True.

        Raises:
            InvalidRequestError: a prompt or parameter is invalid; nothing was scheduled.
            EngineDeadError, NoRoomError: the engine failed; or lost its targets and finds no room, but may later.
        """
        single = [] if isinstance(prompts, list | tuple) and not prompts else as_prompts(prompts)
        check_unused(lora_request, priority, len(single))
        adds = adds_special_tokens(tokenization_kwargs, default=True)
        if not single:
            return []
        params = self._params_per_prompt(sampling_params, len(single))
        encode = self._preprocessor.encode
        encoded = [encode(one, some, add_special_tokens=adds) for one, some in zip(single, params, strict=True)]
        return self._complete(encoded, params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered by the model's chat template or by *chat_template*.

        Raises:
            InvalidRequestError: there is no template, or a message or parameter is invalid.
        """
        check_unused(lora_request)
        if adds_special_tokens(tokenization_kwargs, default=False):
            wrong = "tokenization_kwargs: add_special_tokens must be False: the template has them, got True"
            raise InvalidRequestError(wrong, "tokenization_kwargs")
        is_one = not messages or isinstance(messages, str) or isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else list(messages)
        params = self._params_per_prompt(sampling_params, len(conversations))
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        chat = self._preprocessor.chat
        encoded = [chat(one, some, **options) for one, some in zip(conversations, params, strict=True)]
        return self._complete(encoded, params, use_tqdm)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Generator[TokenOutput]:
        """Yield the output of each step for one prompt; closing the iterator early aborts the request.

        Raises:
            InvalidRequestError: a parameter is invalid (`n` must be 1); raised before the first output.
        """
        params = sampling_params or self.get_default_sampling_params()
        if params.n != 1:
            raise InvalidRequestError(f"n must be 1 for a stream, got {params.n}", "n")
        return self._drive(self._preprocessor.requests(prompt, params, next(self._names)))

    def get_tokenizer(self) -> Any:
        """Return the transformers tokenizer; None with `skip_tokenizer_init`."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of `generate` and `chat`: the recommendations of the model's checkpoint.

        `max_tokens` None means the recommended length, or up to the end of the context.
        """
        return SamplingParams(**self._sampling_defaults)

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters and gauges."""
        return self._engine.stats()

    def get_metrics(self) -> "list[Metric]":
        """Return the same figures as `stats` as metrics: vLLM's, under its names, and our own."""
        from runtime.metrics.snapshot import snapshot  # noqa: PLC0415 - only needed here

        return snapshot(self.stats, served_names(self.config)[0])

    def shutdown(self) -> None:
        """Free models and memory, and end all processes; requests from then on are refused. May be called twice."""
        self._engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _params_per_prompt(self, params: Params, count: int) -> Sequence[SamplingParams]:
        """Return the parameters of each of *count* prompts."""
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * count
        if not isinstance(params, list | tuple) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, or a list of them, got {shown(params)}", "sampling_params"
            )
        if len(params) != count:
            wrong = f"sampling_params must have {count} entries, as prompts, got {len(params)}"
            raise InvalidRequestError(wrong, "sampling_params")
        return params

    def _complete(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: Progress
    ) -> list[RequestOutput]:
        names = [next(self._names) for _ in prompts]
        requests_per_prompt = [
            self._preprocessor.requests(prompt, some, name)
            for prompt, some, name in zip(prompts, params, names, strict=True)
        ]
        collectors = [
            OutputCollector(name, prompt.text, requests, self._decode)
            for name, prompt, requests in zip(names, prompts, requests_per_prompt, strict=True)
        ]
        collector_of = {
            request.request_id: collector
            for requests, collector in zip(requests_per_prompt, collectors, strict=True)
            for request in requests
        }
        requests = [request for requests in requests_per_prompt for request in requests]
        with _ProgressBar(use_tqdm, len(prompts)) as bar, closing(self._drive(requests)) as outputs:
            for output in outputs:
                collector = collector_of[output.request_id]
                collector.add(output)
                bar.update(len(output.token_ids), collector.finished)
        return [collector.result() for collector in collectors]

    def _drive(self, requests: Sequence[Request]) -> Generator[TokenOutput]:
        """Yield the outputs of *requests* until all have ended; abort those still running if the caller stops early.

        Several iterators may be active, read in turns or by threads: each step's outputs are kept for their owner.
        """
        running = {request.request_id for request in requests}
        arrived: deque[TokenOutput] = deque()
        self._arrived.update(dict.fromkeys(running, arrived))
        try:
            self._engine.put(requests)
            while running:
                if not arrived:
                    self._step(arrived)
                    continue
                output = arrived.popleft()
                if output.retry_after_s is not None:
                    raise failure(str(output.error), output.retry_after_s)
                if output.finish_reason is not None:
                    running.discard(output.request_id)
                    del self._arrived[output.request_id]
                yield output
        except (GeneratorExit, KeyboardInterrupt):
            self._engine.abort(tuple(running), self._distribute)
            raise
        finally:
            for name in running:
                del self._arrived[name]

    def _step(self, arrived: deque[TokenOutput]) -> None:
        """Run a step, unless another thread's has brought outputs into *arrived* meanwhile."""
        if not self._engine.turn.acquire(timeout=TURN_S):
            return
        try:
            if not arrived:
                self._distribute(self._engine.step())
        except EngineDeadError:
            self._distribute(self._engine.final_outputs)  # for the other active iterators
            raise
        finally:
            self._engine.turn.release()
        if self._engine.has_aborts():  # they came during the step
            with suppress(EngineDeadError):  # the next step raises it, too
                self._engine.abort((), self._distribute)

    def _distribute(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self._arrived.get(output.request_id, deque()).append(output)  # unless its caller has stopped reading


class _ProgressBar:
    """A progress bar over prompts that also shows tokens per second; does nothing if *use_tqdm* is False."""

    def __init__(self, use_tqdm: Progress, num_prompts: int) -> None:
        self._bar = None
        self._num_tokens = 0
        self._started = time.monotonic()
        if use_tqdm:
            from tqdm import tqdm  # noqa: PLC0415 - only where a bar is shown

            make: Callable[..., Any] = tqdm if use_tqdm is True else use_tqdm
            self._bar = make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True)

    def __enter__(self) -> "_ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, num_tokens: int, finished: bool) -> None:
        """Add tokens, and one prompt if *finished*."""
        self._num_tokens += num_tokens
        if self._bar is None or not finished:
            return
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{self._num_tokens / seconds:.1f} tokens/s", refresh=False)
        self._bar.update(1)
