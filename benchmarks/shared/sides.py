"""Slipstream as one side of a comparison, and a clock for its model forwards."""

import inspect
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from benchmarks.shared.workload import Item, SamplingSettings
from cluster.engine import LocalEngine
from slipstream import LLM, SamplingParams
from workers.attention.backend import AttentionBackend, run_with
from workers.target_rank import UniExecutor

CACHE_BYTES = 1 << 30
COMPILED_EVERY_S = 0.02
"""How often it is seen whether models are compiled."""
GREEDY = SamplingSettings(0.0)
Result = TypeVar("Result")


class DemoEngine:
    """An `LLM` that generates exactly the requested number of tokens, without prefix caching.

    It is ready when its models run compiled: compilers beside it would disturb whatever is measured.

    With None for *threads* the engine chooses their number. Further options are those of `LLM`.
    """

    def __init__(
        self,
        model: Path,
        speculative_config: dict[str, Any] | None,
        *,
        threads: int | None,
        enforce_eager: bool = False,
        **options: Any,
    ) -> None:
        self.llm = LLM(
            model=str(model),
            speculative_config=speculative_config,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=CACHE_BYTES,
            num_threads=threads,
            enforce_eager=enforce_eager,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **options,
        )
        self._await_compiled()

    def _await_compiled(self) -> None:
        engine = self.llm._engine
        assert isinstance(engine, LocalEngine) and isinstance(engine.assembled.executor, UniExecutor)
        later = engine.assembled.executor._later
        while isinstance(later, Generator) and inspect.getgeneratorstate(later) != inspect.GEN_CLOSED:
            engine.step()  # without requests, it swaps in what is compiled
            time.sleep(COMPILED_EVERY_S)

    def one(self, item: Item, sampling: SamplingSettings) -> int:
        """Run one request alone; return the number of tokens."""
        return self.all([item], sampling)

    def all(self, items: Sequence[Item], sampling: SamplingSettings = GREEDY) -> int:
        """Run all *items* at once; return the number of tokens."""
        return sum(map(len, self.tokens(items, sampling)))

    def tokens(self, items: Sequence[Item], sampling: SamplingSettings = GREEDY) -> list[list[int]]:
        """Run all *items* at once; return the tokens of each."""
        outputs = self.llm.generate(_prompts(items), _params(items, sampling), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(self, items: Sequence[Item], sampling: SamplingSettings = GREEDY) -> Iterator[int]:
        """Run all *items* at once; yield how many tokens each step adds to each of them."""
        preprocessor = self.llm._preprocessor
        requests = [
            request
            for index, (prompt, params) in enumerate(zip(_prompts(items), _params(items, sampling), strict=True))
            for request in preprocessor.requests(preprocessor.encode(prompt, params), params, str(index))
        ]
        for output in self.llm._drive(requests):
            yield len(output.token_ids)


def _prompts(items: Sequence[Item]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(item.prompt)} for item in items]


def _params(items: Sequence[Item], sampling: SamplingSettings) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=(item.sampling or sampling).temperature,
            top_p=(item.sampling or sampling).top_p,
            seed=index,
            ignore_eos=True,
            max_tokens=item.max_tokens,
            detokenize=False,
        )
        for index, item in enumerate(items)
    ]


class ForwardClock:
    """Seconds spent in model modules, attention included, of target and draft together."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count every forward until the block ends."""

        def timed(backend: AttentionBackend, forward: Callable[[], Result], num_tokens: int) -> Result:
            began = time.perf_counter()
            try:
                return run_with(backend, forward, num_tokens)
            finally:
                self.seconds += time.perf_counter() - began

        with patch("workers.model.runner.run_with", timed):
            yield


def share_outside(work: Callable[[], int]) -> float:
    """Return the part of the time of *work* that was not spent in model forwards."""
    clock = ForwardClock()
    with clock.running():
        began = time.perf_counter()
        work()
        total = time.perf_counter() - began
    return 1.0 - clock.seconds / total
