"""Engines of one checkout, which may be of an earlier commit: run as a script with its folder in `PYTHONPATH`.

Commands and answers are lines of JSON. Imports what earlier commits have, too. With a second argument, engines run on a
GPU that is pretended (`tests.support.gpu`), with their rounds as graphs, and the device then takes no time.
"""

import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple, Protocol
from unittest import mock

import numpy as np
import numpy.typing as npt

import slipstream
from benchmarks.shared.sides import ForwardClock
from runtime.core.scheduler import Scheduler
from slipstream import LLM, SamplingParams

Command = dict[str, Any]
ON_GPU = "gpu"
WAKING_S = 0.0003
"""A sleeping process wakes up later than asked by this at most, mostly."""


class Clock(Protocol):
    """Counts seconds that are not the host's."""

    seconds: float

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Count until the block ends."""
        ...


class PacedDevice:
    """A device on which every graph takes as long, one after another, and which accepts all draft tokens.

    Args:
        graph_s: seconds of a graph.
    """

    seconds = 0.0

    def __init__(self, graph_s: float = 0.0) -> None:
        self._graph_s, self._done_at = graph_s, 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Launch and copy nothing until the block ends."""
        from workers.gpu.graphs import GraphSet  # noqa: PLC0415 - earlier commits have none
        from workers.gpu.staging import ResultArea, StagingArea  # noqa: PLC0415

        with (
            mock.patch.object(GraphSet, "launch", lambda *_: self._launch()),
            mock.patch.object(StagingArea, "send", lambda *_: None),
            mock.patch.object(ResultArea, "send", lambda _area, size: _Result(size, self._done_at)),
        ):
            yield

    def _launch(self) -> None:
        self._done_at = max(self._done_at, time.perf_counter()) + self._graph_s


class _Result(NamedTuple):
    """Stands for `workers.gpu.staging.SentResult`: so many numbers, which are there at this time."""

    size: int
    done_at: float

    def receive(self, _group: object = None) -> npt.NDArray[np.int64]:
        """Wait for the numbers."""
        while (left_s := self.done_at - time.perf_counter()) > 0:
            time.sleep(max(0.0, left_s - WAKING_S))
        return _result(self.size)


@functools.cache
def _result(size: int) -> npt.NDArray[np.int64]:
    """Return a result of so many numbers: see `workers.gpu.target_step.TargetStep`."""
    from benchmarks.commits import ROWS  # noqa: PLC0415 - earlier commits have none
    from workers.gpu.sizes import LINE  # noqa: PLC0415

    lines_RX = np.zeros((ROWS, size // ROWS), np.int64)
    num_queries = lines_RX.shape[1] // LINE
    lines_RX[:, num_queries] = (1 << (num_queries - 1)) - 1
    lines_RX[:, 2 * num_queries] = num_queries - 1
    return lines_RX.ravel()


@contextlib.contextmanager
def rounds_of(clock: Clock) -> Iterator[list[float]]:
    """Yield the seconds of each round without those of *clock*, which runs until the block ends."""
    schedule, times, seconds = Scheduler.schedule, list[float](), list[float]()

    def timed(*args: Any) -> Any:
        times.append(time.perf_counter() - clock.seconds)
        seconds.extend(after - before for before, after in pairwise(times[-2:]))
        return schedule(*args)

    with clock.running(), mock.patch.object(Scheduler, "schedule", timed):
        yield seconds


def generate(engine: LLM, command: Command, clock: Clock) -> Command:
    """Return the number of tokens that all rows of *command* got, the seconds, and the host's of a median round."""
    prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
    params = SamplingParams(temperature=0.0, max_tokens=command["tokens"], ignore_eos=True, detokenize=False)
    with rounds_of(clock) as rounds:
        began = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
    tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
    return {"tokens": tokens, "seconds": seconds, "round": statistics.median(rounds)}


@contextlib.contextmanager
def on_gpu() -> Iterator[Command]:
    """Let torch see a GPU; yield options of engines on it, which capture few sizes of rounds."""
    from benchmarks.commits import ROWS  # noqa: PLC0415 - earlier commits have none

    machine, engine = (import_module(f"tests.support.gpu.{name}") for name in ("machine", "engine"))
    with machine.pretended_gpu(), engine.only(ROWS, "greedy"):
        yield {"device": "cuda", "dtype": "float32", "skip_self_check": True, "num_gpu_blocks_override": 32 * ROWS}


@contextlib.contextmanager
def on_cpu() -> Iterator[Command]:
    """Yield options of engines on CPUs."""
    yield {"device": "cpu", "kv_cache_memory_bytes": 1 << 28}


def main() -> None:
    """Load the engines that the first argument describes by name, then answer each command with a line."""
    is_on_gpu = sys.argv[2:] == [ON_GPU]
    with (on_gpu if is_on_gpu else on_cpu)() as common:
        common |= {"enable_prefix_caching": False, "skip_tokenizer_init": True, "disable_log_stats": True}
        engines = {name: LLM(**common, **options) for name, options in json.loads(sys.argv[1]).items()}
        print(json.dumps(slipstream.__file__), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            clock = PacedDevice() if is_on_gpu else ForwardClock()
            print(json.dumps(generate(engines[command["engine"]], command, clock)), flush=True)


if __name__ == "__main__":
    main()
