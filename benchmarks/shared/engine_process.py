"""An engine in a process of its own, with its own environment: commands and answers are lines of JSON.

python -m benchmarks.shared.engine_process '{"target": ..., "speculative": null, "threads": null}'
"""

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import torch

from benchmarks.shared.json_process import JsonProcess
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.workload import Item
from protos.config.engine import EngineConfig
from workers.threads import ThreadCount, choose_threads

Command = dict[str, Any]


class EngineProcess(JsonProcess):
    """An engine in a child process.

    Args:
        target: folder of the model.
        speculative: configuration; None: off.
        threads: their number; None: the engine chooses it.
        variables: of the environment, in addition to this process's without the numbers of threads in it.
    """

    def __init__(
        self, target: Path, speculative: Command | None, threads: int | None, variables: Mapping[str, str]
    ) -> None:
        config = {"target": str(target), "speculative": speculative, "threads": threads}
        super().__init__("the engine", [sys.executable, "-m", __name__, json.dumps(config)], variables)

    def decode(self, items: Sequence[Item], settle_s: float) -> tuple[list[float], list[int]]:
        """Decode for *settle_s* seconds, then *items* one by one; return the seconds and threads `[B]` of each.

        The engine chooses the number of threads anew at the beginning.
        """
        answer = self.ask({"items": [[list(item.prompt), item.max_tokens] for item in items], "settle_s": settle_s})
        return answer["seconds"], answer["threads"]


def serve(config: Command, commands: Sequence[str] | IO[str], answers: IO[str]) -> None:
    """Load the engine, then answer each of *commands* with a line."""
    engine, threads = load(config)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in commands:
        command = json.loads(line)
        items = [Item(tuple(prompt), tokens) for prompt, tokens in command["items"]]
        if threads is not None:
            threads.forget()
        until = time.perf_counter() + command["settle_s"]
        while time.perf_counter() < until:
            engine.all(items[:1])
        print(json.dumps(timed(engine, items)), file=answers, flush=True)


def load(config: Command) -> tuple[DemoEngine, ThreadCount | None]:
    """Return the engine, and what revises its number of threads; None if that is fixed."""
    chosen: list[ThreadCount | None] = []

    def choose(engine_config: EngineConfig) -> ThreadCount | None:
        chosen.append(choose_threads(engine_config))
        return chosen[-1]

    with patch("workers.build.choose_threads", choose):
        engine = DemoEngine(Path(config["target"]), config["speculative"], threads=config["threads"])
    return engine, chosen[0]


def timed(engine: DemoEngine, items: Sequence[Item]) -> dict[str, Any]:
    """Return the seconds of each item, and the number of threads after it."""
    seconds: list[float] = []
    threads: list[int] = []
    for item in items:
        began = time.perf_counter()
        engine.all([item])
        seconds.append(time.perf_counter() - began)
        threads.append(torch.get_num_threads())
    return {"seconds": seconds, "threads": threads}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        serve(json.loads(sys.argv[1]), sys.stdin, sys.__stdout__ or sys.stdout)
