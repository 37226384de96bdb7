"""A worker group of child processes: messages, deaths noticed at once, and no process left over."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.transport.process_workers import ProcessWorkerGroup
from protos.worker_messages import Allocate, Died, Heartbeat, Placed, Progress, Stop, WorkerFailed, WorkerId
from tests.support.distributed.messages import until
from tests.support.processes import is_running, wait_gone

ROOT = Path(__file__).parents[2]
RANKS = [WorkerId("target", 0), WorkerId("target", 1)]
DRAFT = WorkerId("draft")


@pytest.fixture
def make() -> Iterator[Callable[[str], ProcessWorkerGroup]]:
    groups = []

    def make(body: str) -> ProcessWorkerGroup:
        groups.append(ProcessWorkerGroup(f"tests.support.distributed.bodies:{body}"))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def test_workers_report_where_they_are_and_stop_on_request(make: Callable[[str], ProcessWorkerGroup]) -> None:
    group = make("echo")
    group.start([*RANKS, DRAFT])
    where = dict(until(group, Placed, Placed, Placed))
    assert {worker: message.pid for worker, message in where.items()} == {w: group.pid(w) for w in [*RANKS, DRAFT]}
    group.send(RANKS[1], Allocate(4, 64))
    assert until(group, Progress) == [(RANKS[1], Progress("Allocate"))]
    group.send(DRAFT, Stop())
    ended = Died("its process ended (exit code 0)")
    assert until(group, Progress, Died) == [(DRAFT, Progress("goodbye")), (DRAFT, ended)]


def test_modules_are_left_out_of_the_collections_of_workers(make: Callable[[str], ProcessWorkerGroup]) -> None:
    group = make("tell_frozen")
    group.start([DRAFT])
    assert (DRAFT, Progress("True")) in until(group, Progress)


@pytest.mark.parametrize(("body", "how"), [("leave", "exit code 3"), ("shoot_oneself", "signal SIGKILL")])
def test_a_death_is_reported_within_a_second(make: Callable[[str], ProcessWorkerGroup], body: str, how: str) -> None:
    group = make(body)
    group.start([DRAFT])
    until(group, Placed)
    group.send(DRAFT, Stop())
    started = time.monotonic()
    messages = until(group, Died)
    assert time.monotonic() - started < 1.0
    assert messages[-1] == (DRAFT, Died(f"its process ended ({how})"))
    if body == "leave":
        assert messages[0] == (DRAFT, WorkerFailed("something is wrong", "ModelError"))


def test_a_body_that_raises_ends_its_process(make: Callable[[str], ProcessWorkerGroup]) -> None:
    group = make("raise_at_once")
    group.start([DRAFT])
    assert until(group, Died)[-1] == (DRAFT, Died("its process ended (exit code 1)"))


def test_the_killed_are_gone_and_silent_and_can_be_replaced(make: Callable[[str], ProcessWorkerGroup]) -> None:
    group = make("beat")
    group.start([RANKS[0], DRAFT])
    until(group, Placed, Placed, Heartbeat)
    pid = group.pid(DRAFT)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # a frozen one too
    group.kill([DRAFT])
    assert not is_running(pid)
    replacement = WorkerId("draft", incarnation=1)
    group.start([replacement])
    messages = until(group, Placed)
    while len(messages) < 20:
        messages += group.receive(1.0)
    assert {worker for worker, _ in messages} == {RANKS[0], replacement}
    assert not any(isinstance(message, Died) for _, message in messages)


PARENT = """
import sys, time
sys.path[:0] = {path!r}
from cluster.transport.process_workers import ProcessWorkerGroup
from protos.worker_messages import Placed, WorkerId
group = ProcessWorkerGroup("tests.support.distributed.bodies:beat")
group.start([WorkerId("target", 0), WorkerId("draft")])
pids = []
while len(pids) < 2:
    pids += [message.pid for _, message in group.receive(1.0) if isinstance(message, Placed)]
print(*pids, flush=True)
time.sleep(600)
"""


def test_workers_die_with_their_parent_even_when_frozen() -> None:
    code = PARENT.format(path=[str(ROOT)])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
        wait_gone(pids)


def test_closing_twice_leaves_no_process(make: Callable[[str], ProcessWorkerGroup]) -> None:
    group = make("echo")
    group.start(RANKS)
    until(group, Placed)
    pids = [pid for worker in RANKS if (pid := group.pid(worker)) is not None]
    group.close()
    group.close()
    assert len(pids) == 2
    assert not any(map(is_running, pids))
