"""A draft in a process of its own that is killed or stopped while its target works."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

from cluster import assemble
from cluster.gpu_check.answers import OFF, Check, answered, arguments, assert_same, params, prompts
from cluster.gpu_check.models import SHAPES, save_pair
from cluster.settings import engine_config
from cluster.transport.process_workers import ProcessWorkerGroup
from protos.config.engine import EngineConfig
from protos.messages import Request, Sampling
from protos.progress import ProgressCallback
from protos.worker_messages import WorkerId
from runtime.core.controller import Controller, LocalInbox
from runtime.supervision.distributed_executor import DistributedExecutor

COUNT, LENGTH, MAX_TOKENS = 4, 24, 200
AFTER_STEPS = (3, 10, 25)
"""The draft is lost after so many rounds in turn: each time another one has taken its place, if it is fast enough."""


def checks(device: str, folder: Path, report: ProgressCallback) -> Iterator[Check]:
    """Yield each check's name and what runs it."""
    given = _Undisturbed(device, folder / "faults", report)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        yield f"the draft gets {number.name}", partial(_lose_draft, given, number)


@dataclass
class _Undisturbed:
    """A pair, what it is asked, and its answers without speculation."""

    device: str
    folder: Path
    report: ProgressCallback

    def __post_init__(self) -> None:
        self.asked = prompts(COUNT, LENGTH, SHAPES["tiny"].values["vocab_size"])

    @cached_property
    def pair(self) -> tuple[Path, Path]:
        return save_pair("tiny", "tiny-draft", 0.8, "cpu", self.folder)

    @cached_property
    def answers(self) -> list[tuple[int, ...]]:
        return answered({**self.arguments(), **OFF}, self.asked, MAX_TOKENS, 0.0, self.report)[0]

    def arguments(self) -> dict[str, Any]:
        return arguments(self.device, model=str(self.pair[0]))

    def speculative(self) -> EngineConfig:
        draft = {"model": str(self.pair[1]), "num_speculative_tokens": 4, "placement": "dedicated", "policy": "fixed"}
        return engine_config({**self.arguments(), "enforce_eager": True, "speculative_config": draft})


def _lose_draft(given: _Undisturbed, number: signal.Signals) -> str:
    expected = given.answers
    group, inbox = ProcessWorkerGroup(), LocalInbox()
    built = assemble.build(given.speculative(), inbox, given.report, make_executor=_executor_of(group))
    inbox.put([_request(i, ids) for i, ids in enumerate(given.asked)])
    run = _LossRun(built.controller, group, number)
    began = time.monotonic()
    try:
        run.drive()
    finally:
        built.shutdown()
    assert run.lost, "no draft ran"
    assert_same([run.tokens[str(i)] for i in range(COUNT)], expected, number.name)
    took = f"{time.monotonic() - began:.1f} s, longest step {run.longest_s:.2f} s"
    return f"{len(run.lost)} lost, all tokens equal after {took}"


@dataclass
class _LossRun:
    """Drives *controller*, and sends the signal *number* to its draft meanwhile."""

    controller: Controller
    group: ProcessWorkerGroup
    number: signal.Signals
    tokens: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    lost: set[int] = field(default_factory=set)
    longest_s: float = 0.0

    def drive(self) -> None:
        for steps in count(1):
            began = time.monotonic()
            for output in self.controller.step():
                self.tokens[output.request_id] += output.token_ids
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            if not self.controller.scheduler.num_unfinished:
                return
            if steps in AFTER_STEPS:
                self._signal()

    def _signal(self) -> None:
        pid = _draft_of(self.group)
        if pid is not None and pid not in self.lost:
            os.kill(pid, self.number)
            self.lost.add(pid)


def _executor_of(group: ProcessWorkerGroup) -> Callable[[EngineConfig, ProgressCallback], DistributedExecutor]:
    def make(config: EngineConfig, report: ProgressCallback) -> DistributedExecutor:
        return DistributedExecutor(group, config, report, may_share_devices=True)

    return make


def _request(number: int, ids: tuple[int, ...]) -> Request:
    return Request(str(number), ids, params(number, MAX_TOKENS), Sampling(0, 0.0), MAX_TOKENS)


def _draft_of(group: ProcessWorkerGroup) -> int | None:
    """Return the id of the draft's process; None if there is none now."""
    pids = (group.pid(WorkerId("draft", 0, incarnation)) for incarnation in range(len(AFTER_STEPS) + 1))
    return next((pid for pid in pids if pid is not None), None)
