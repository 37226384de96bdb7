"""One side of a check: an engine with or without speculation, driven request by request."""

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from cluster.check.answers import Answer, Growing
from cluster.engine import make_engine
from protos.config.engine import EngineConfig
from protos.errors import SlipstreamError
from protos.messages import Request, TokenLogprobs, TokenOutput
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams
from runtime.text.preprocessor import Prompt

Floats = npt.NDArray[np.float64]
Ids = tuple[int, ...]
Tick = Callable[[], None]

LAWS_AT_ONCE = 16
LAW = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class RunJob:
    """One request: token ids and how to sample behind them."""

    token_ids: Ids
    params: SamplingParams


class Counts(msgspec.Struct, frozen=True):
    """Draft tokens of an engine so far."""

    proposed: int
    accepted: int

    @property
    def rejected(self) -> int:
        """How many were scored for nothing."""
        return self.proposed - self.accepted


class EngineRun:
    """An engine for the time of a `with` block; nothing of it is left behind.

    Args:
        config: what it is built from.
        say: told, in a line each, what is being done.

    Raises:
        ConfigError, ModelError, PlacementError: as engines do.
    """

    def __init__(self, config: EngineConfig, say: ProgressCallback) -> None:
        self._engine = make_engine(config, say)
        self._num_requests = 0
        self.dtype = self._engine.info.dtype

    def __enter__(self) -> "EngineRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.shutdown()
        del self._engine
        gc.collect()  # models hang in cycles, and the other side needs their memory
        torch.cuda.empty_cache()  # nothing where there is no device

    @property
    def counts(self) -> Counts:
        """What was proposed and accepted so far."""
        stats = self._engine.stats()
        return Counts(stats.proposed, stats.accepted)

    def encode(self, prompts: Seq[Any], params: SamplingParams) -> list[Ids]:
        """Return the token ids of *prompts* (text, ids, or dictionaries of either); raises `InvalidRequestError`."""
        return [self._engine.preprocessor.encode(prompt, params).token_ids for prompt in prompts]

    def text(self, token_ids: Seq[int]) -> str:
        """Return the text of *token_ids*, or the ids where there is no tokenizer."""
        tokenizer = self._engine.tokenizer
        return str(list(token_ids)) if tokenizer is None else str(tokenizer.decode(list(token_ids)))

    def answers(self, jobs: Seq[RunJob], tick: Tick) -> list[Answer]:
        """Return the answers to *jobs*, in order; *tick* is called for each that has come."""
        growing: dict[str, Growing] = {}
        done: dict[str, Answer] = {}
        names = self._put(jobs, wants_steps=True)
        growing = {name: Growing() for name in names}
        while len(done) < len(names):
            for output in self._engine.step():
                growing[output.request_id].add(output)
                if output.finish_reason is not None:
                    done[output.request_id] = growing[output.request_id].done(output.error or output.finish_reason)
                    tick()
        return [done[name] for name in names]

    def laws(self, contexts: Seq[Ids], tick: Tick) -> Iterator[Floats]:
        """Yield the log-probabilities of the raw logits behind each of *contexts*, float64 `[V]`.

        Raises:
            SlipstreamError: the engine could not tell one.
        """
        for first in range(0, len(contexts), LAWS_AT_ONCE):
            names = self._put([RunJob(ids, LAW) for ids in contexts[first : first + LAWS_AT_ONCE]], wants_steps=False)
            told: dict[str, Floats] = {}
            while len(told) < len(names):
                for output in self._engine.step():
                    told[output.request_id] = _law(output)
                    tick()
            yield from (told[name] for name in names)

    def _put(self, jobs: Seq[RunJob], *, wants_steps: bool) -> list[str]:
        requests = [self._request(job, wants_steps) for job in jobs]
        self._engine.put(requests)
        return [request.request_id for request in requests]

    def _request(self, job: RunJob, wants_steps: bool) -> Request:
        name = str(self._num_requests)
        self._num_requests += 1
        (request,) = self._engine.preprocessor.requests(Prompt(None, job.token_ids), job.params, name)
        return msgspec.structs.replace(request, wants_steps=wants_steps)


def _law(output: TokenOutput) -> Floats:
    if not output.logprobs:
        raise SlipstreamError(f"the engine told no law: {output.error or output.finish_reason}")
    told: TokenLogprobs = output.logprobs[0]
    law_V = np.empty(len(told.token_ids) - 1)  # the chosen token is named twice
    law_V[told.token_ids] = told.logprobs
    return law_V
