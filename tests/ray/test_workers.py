"""A worker group of Ray actors: bundles, messages, immediate detection of exits, and released resources."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.ray import diagnostics as ray_doctor
from cluster.ray.cluster import available_resources, cluster_resources
from cluster.ray.placement import BundleLayout, Placement, PlacementTimeout, place
from cluster.ray.spares import Spares
from cluster.ray.workers import RayWorkerGroup, RunningActor
from protos.errors import PlacementError
from protos.worker_messages import Allocate, Died, Heartbeat, Placed, Progress, Stop, WorkerId
from tests.support.distributed.messages import PATIENCE_S, Messages, until
from tests.support.processes import is_running, wait_gone, wait_until

ROOT = Path(__file__).parents[2]
RANKS = [WorkerId("target", 0), WorkerId("target", 1)]
DRAFT = WorkerId("draft")
Make = Callable[..., RayWorkerGroup]
EVERYBODY = BundleLayout(2, has_draft=True, worker={"CPU": 1.0, "GPU": 1.0}, strategy="STRICT_PACK")


def is_given_back() -> bool:
    total, free = cluster_resources(), available_resources()
    return all(free.get(name, 0.0) == total[name] for name in ("CPU", "GPU"))


@pytest.fixture
def make(ray_cluster: Any) -> Iterator[Make]:
    groups: list[RayWorkerGroup] = []
    placements: list[Placement] = []

    def make(body: str, plan: BundleLayout = EVERYBODY, spares: int = 0) -> RayWorkerGroup:
        placements.append(place(plan, PlacementTimeout(PATIENCE_S), lambda line: None))
        waiting = Spares(placements[-1], spares)
        groups.append(RayWorkerGroup(placements[-1], f"tests.support.distributed.bodies:{body}", waiting))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
    for placement in placements:
        placement.remove()
    wait_until(is_given_back, what="resources given back")


def pids_of(messages: Messages) -> dict[WorkerId, int]:
    return {worker: message.pid for worker, message in messages if isinstance(message, Placed)}


def test_workers_fill_the_bundles_and_stop_when_told(make: Make) -> None:
    group = make("echo")
    group.start([*RANKS, DRAFT])
    pids = pids_of(until(group, Placed, Placed, Placed))
    assert set(pids) == {*RANKS, DRAFT}
    assert len(set(pids.values())) == 3
    assert cluster_resources()["GPU"] - available_resources()["GPU"] == 3
    group.send(RANKS[1], Allocate(4, 64))
    assert until(group, Progress) == [(RANKS[1], Progress("Allocate"))]
    group.send(DRAFT, Stop())
    assert until(group, Progress, Died) == [(DRAFT, Progress("goodbye")), (DRAFT, Died("its loop ended"))]
    group.close()
    assert not any(map(is_running, pids.values()))


def test_a_sigkill_is_noticed_within_a_second(make: Make) -> None:
    group = make("echo")
    group.start([*RANKS, DRAFT])
    pids = pids_of(until(group, Placed, Placed, Placed))
    os.kill(pids[RANKS[1]], signal.SIGKILL)
    started = time.monotonic()
    ((worker, death),) = until(group, Died)
    assert time.monotonic() - started < 1.0
    assert worker == RANKS[1]
    assert isinstance(death, Died)
    assert "its process ended" in death.reason


def test_a_worker_that_raises_is_told_with_its_reason(make: Make) -> None:
    group = make("raise_at_once")
    group.start([DRAFT])
    assert until(group, Died) == [(DRAFT, Died("it failed: RuntimeError: cannot even begin"))]


def test_a_frozen_worker_is_killed_and_replaced_in_its_bundle(make: Make) -> None:
    group = make("beat")
    group.start([RANKS[0], DRAFT])
    pids = pids_of(until(group, Placed, Placed))
    os.kill(pids[DRAFT], signal.SIGSTOP)
    group.kill([DRAFT])
    assert not is_running(pids[DRAFT])
    replacement = WorkerId("draft", incarnation=1)
    group.start([replacement])
    messages = until(group, Placed)
    while {worker for worker, message in messages if isinstance(message, Heartbeat)} < {RANKS[0], replacement}:
        messages += group.receive(1.0)
    assert {worker for worker, _ in messages} == {RANKS[0], replacement}
    assert not any(isinstance(message, Died) for _, message in messages)
    assert is_running(pids[RANKS[0]])


def test_target_ranks_that_are_started_again_prefer_bundles_whose_workers_have_come(make: Make) -> None:
    """Ray takes longer to notice that a machine is gone: a worker that is started there says nothing."""
    group = make("echo")
    group.start([RANKS[1]])
    until(group, Placed)
    group.start([RANKS[0]])
    group.kill(RANKS)  # at once: rank 0 has not come
    again = WorkerId("target", 0, 1)
    group.start([again])
    until(group, Placed)
    assert group._bundles[again] == EVERYBODY.bundle_of(RANKS[1])
    group.kill([again])
    both = [WorkerId("target", rank, 2) for rank in range(2)]
    group.start(both)
    until(group, Placed, Placed)
    group.kill(both)
    group.start([WorkerId("target", 0, 3)])
    until(group, Placed)
    assert group._bundles[WorkerId("target", 0, 3)] == EVERYBODY.bundle_of(RANKS[0])


def test_a_spare_becomes_a_target_rank_with_the_devices_of_the_lost_one(make: Make) -> None:
    group = make("tell_devices", spares=1)
    group.start([*RANKS, DRAFT])
    first = dict(until(group, Placed, Placed, Placed))
    taken = cluster_resources()["GPU"] - available_resources()["GPU"]
    group.prepare_spare()
    group.kill([DRAFT])
    group.start([WorkerId("draft", incarnation=1)])  # a draft does not use up the spare
    until(group, Placed)
    assert cluster_resources()["GPU"] - available_resources()["GPU"] == taken
    (spare,) = group._spares._waiting
    pid = spare.prepared.result(PATIENCE_S)
    group.kill([RANKS[1]])
    replacement = WorkerId("target", 1, 1)
    group.start([replacement])
    ((worker, message),) = until(group, Placed)
    assert isinstance(message, Placed)
    assert (worker, message.pid) == (replacement, pid)
    lost = first[RANKS[1]]
    assert isinstance(lost, Placed)
    assert message.visible_devices == lost.visible_devices
    group.prepare_spare()
    (another,) = group._spares._waiting
    os.kill(another.prepared.result(PATIENCE_S), signal.SIGKILL)
    wait_gone([another.prepared.result()])
    group.kill([RANKS[0]])
    group.start([WorkerId("target", 0, 1)])
    ((worker, message),) = until(group, Placed)
    assert worker == WorkerId("target", 0, 1), "without a spare that runs, a process is started"
    group.prepare_spare()
    left = group._spares._waiting[0].prepared.result(PATIENCE_S)
    group.close()
    wait_gone([left])


def test_a_frozen_worker_can_be_left_to_its_end(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    released, ends = threading.Event(), RunningActor.wait_gone

    def held(actor: RunningActor) -> None:
        assert released.wait(60)
        ends(actor)

    monkeypatch.setattr(RunningActor, "wait_gone", held)
    group = make("beat")
    group.start([DRAFT])
    pid = pids_of(until(group, Placed))[DRAFT]
    os.kill(pid, signal.SIGSTOP)
    group.kill([DRAFT], waits=False)
    assert is_running(pid), "its end was not awaited"
    released.set()
    wait_gone([pid], 4)


def test_workers_die_with_who_made_them(ray_cluster: Any) -> None:
    placement = place(EVERYBODY, PlacementTimeout(PATIENCE_S), lambda line: None)

    class Owner:
        def hire(self) -> dict[str, int]:
            self.group = RayWorkerGroup(placement, "tests.support.distributed.bodies:beat")
            self.group.start([*RANKS, DRAFT])
            pids = pids_of(until(self.group, Placed, Placed, Placed))
            return {"owner": os.getpid(), **{str(worker): pid for worker, pid in pids.items()}}

    owner = ray_cluster.remote(Owner).options(**placement.options(0, "owner")).remote()
    pids = ray_cluster.get(owner.hire.remote(), timeout=PATIENCE_S)
    assert len(pids) == 4
    os.kill(pids["owner"], signal.SIGKILL)
    wait_gone(list(pids.values()))
    placement.remove()
    wait_until(is_given_back)


def test_what_is_waited_for_is_told_with_the_numbers(ray_cluster: Any) -> None:
    plan = BundleLayout(12, has_draft=True, worker={"CPU": 1.0, "GPU": 1.0}, strategy="STRICT_PACK")
    said: list[str] = []
    with pytest.raises(PlacementError, match=r"needs 13 GPUs and 14 CPUs on one node, the cluster has 8 GPUs and 16 C"):
        place(plan, PlacementTimeout(60.0, may_grow=False), said.append)
    started = time.monotonic()
    with pytest.raises(PlacementError, match="no room within 3 s"):
        place(plan, PlacementTimeout(3.0), said.append)
    assert time.monotonic() - started < 10
    assert len(said) == 1
    assert said[0].startswith("waiting for room in the Ray cluster: needs 13 GPUs")
    with pytest.raises(PlacementError, match="stopped while waiting"):
        place(plan, PlacementTimeout(60.0, is_wanted=lambda: False), said.append)
    wait_until(is_given_back)


def test_the_doctor_tells_what_the_cluster_has(ray_cluster: Any) -> None:
    text = ray_doctor.examine(2, has_draft=True, device="auto")
    assert text.startswith(f"using the Ray that this process has joined: Ray {ray_cluster.__version__}, 1 node(s), ")
    assert "of 8 GPUs free" in text
    assert ray_doctor.summary() == ray_doctor.resources()
    with pytest.raises(PlacementError, match="needs 9 GPUs and 10 CPUs on one node, the cluster has 8 GPUs"):
        ray_doctor.examine(8, has_draft=True, device="auto")
    assert ray_cluster.is_initialized()


JOIN = """
from cluster.ray.cluster import Membership
Membership(2)
"""
STUMBLE = """
import ray._private.services
def stumble(*given, **named):
    raise OSError("in the middle of the start")
ray._private.services.get_node = stumble
"""


def joining(before: str = "", **variables: str) -> list[str]:
    """Return the stderr of a process that cannot join."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-W", "error", "-c", before + JOIN]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.returncode == 1
    return ran.stderr.strip().splitlines()


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    said = joining(RAY_ADDRESS="127.0.0.1:9")
    assert "PlacementError: joining the Ray cluster at 127.0.0.1:9 failed: no answer there" in said[-1]
    assert "PlacementError: RAY_ADDRESS is ray://a:1: workers must reach" in joining(RAY_ADDRESS="ray://a:1")[-1]


def test_a_ray_that_does_not_start_leaves_nothing_to_remark_on() -> None:
    said = joining(STUMBLE, RAY_ADDRESS="")
    assert "PlacementError: starting Ray on this machine failed: " in said[-1]
    assert "in the middle of the start" in said[-1]
    assert not any("ResourceWarning" in line or "Exception ignored" in line for line in said)
