"""The number of threads follows the cores that other processes leave free; what the user sets wins."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster import SPIN_ITERATIONS
from protos.messages import RoundPlan, WorkerInfo
from protos.worker_messages import RoundDone
from tests.support.engine_arguments import parse
from workers import threads as counting
from workers.target_rank import TargetRank, UniExecutor
from workers.threads import CALM_S, MAX_CALM_S, PERIOD_S, TRIAL_S, CpuSample, ThreadCount, choose_threads, cpu_quota


class EmptyRank:
    """Runs rounds without rows."""

    def run(self, plan: RoundPlan) -> RoundDone:
        return RoundDone(plan.round, [], 0.0, 0.0, 0.0)

    def feed_back(self, plan: RoundPlan, done: RoundDone) -> None:
        pass


class Machine:
    """Cores that are shared fairly between our threads and busy neighbours, and a clock."""

    def __init__(self, cores: int, most: int | None = None, quota: float = math.inf) -> None:
        self.cores, self.quota = cores, quota
        self.now = self.busy_s = self.own_s = 0.0
        self.changes: list[int] = []
        self.threads = ThreadCount(most or cores, self.changes.append, self.sample)

    def sample(self) -> CpuSample:
        return CpuSample(self.now, self.cores, self.quota, self.busy_s, self.own_s)

    def run(self, seconds: float, neighbours: float, *, own_weight: float = 1.0) -> int:
        """Decode beside so many busy neighbours; return the number of threads at the end."""
        for _ in range(round(seconds / PERIOD_S)):
            ours = self.threads.count * own_weight
            each = min(1.0, self.cores / (neighbours + ours))
            own = min(self.threads.count, ours * each)
            self.now += PERIOD_S
            self.own_s += PERIOD_S * own
            self.busy_s += PERIOD_S * min(self.cores, neighbours + own)
            self.threads.revise()
        return self.threads.count


@pytest.mark.parametrize(
    ("cores", "neighbours", "count"), [(2, 0, 2), (2, 1, 1), (2, 2, 1), (4, 1, 3), (4, 3, 1), (16, 1, 15), (2, 0.2, 2)]
)
def test_threads_leave_cores_to_busy_neighbours_and_come_back(cores: int, neighbours: float, count: int) -> None:
    machine = Machine(cores)
    assert machine.run(3, neighbours) == count
    assert machine.run(27, neighbours) == count and len(machine.changes) <= 2
    assert machine.run(CALM_S + PERIOD_S, 0) == cores


def test_a_neighbour_is_noticed_within_half_a_second() -> None:
    machine = Machine(2)
    machine.run(5, 0)
    assert machine.run(0.5, 1) == 1


def test_neighbours_of_lower_priority_are_displaced() -> None:
    machine = Machine(2)
    machine.run(5, 2)
    assert machine.run(TRIAL_S, 2, own_weight=50.0) == 2
    assert machine.run(600, 2, own_weight=50.0) == 2 and machine.changes == [1, 2]


def test_a_trial_beside_neighbours_of_equal_priority_is_short() -> None:
    machine = Machine(2)
    machine.run(5, 2)
    machine.changes.clear()
    slow = sum(machine.run(PERIOD_S, 2) == 2 for _ in range(round(600 / PERIOD_S)))
    assert slow * PERIOD_S <= 600 / TRIAL_S


def test_neighbours_that_come_and_go_change_the_number_less_and_less_often() -> None:
    machine = Machine(2)
    for _ in range(100):
        machine.run(2 * CALM_S, 1)
        machine.run(2 * CALM_S, 0)
    assert len(machine.changes) <= 10 + 2 * 400 / TRIAL_S
    assert machine.run(MAX_CALM_S + 1, 0) == 2


@given(st.integers(1, 64), st.lists(st.tuples(st.floats(0.25, 20), st.floats(0, 80)), max_size=20))
def test_the_number_stays_within_its_limits_and_settles(cores: int, loads: list[tuple[float, float]]) -> None:
    machine = Machine(cores)
    for seconds, neighbours in loads:
        assert 1 <= machine.run(seconds, neighbours) <= cores
    settled = machine.run(2 * MAX_CALM_S, 0)
    assert settled == cores and machine.changes[-1:] in ([], [cores])


def test_a_pause_is_no_measurement() -> None:
    machine = Machine(2)
    machine.now += 60
    machine.busy_s += 120  # while the models were compiled, by other processes
    machine.threads.revise()
    assert not machine.changes


def test_a_quota_limits_the_number_while_serving() -> None:
    machine = Machine(4)
    machine.quota = 1.5
    assert machine.run(1, 0) == 1
    machine.quota = math.inf
    assert machine.run(2 * CALM_S, 0) == 4


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


V1 = "9:memory:/pod\n4:cpu,cpuacct:/pod/app\n0::/\n"
CGROUPS = {
    "version 2": ({"proc/self/cgroup": "0::/pod/app\n", "sys/fs/cgroup/pod/app/cpu.max": "50000 100000\n"}, 0.5),
    "version 2, no limit": ({"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": "max 100000\n"}, math.inf),
    "the smallest of the groups around it": (
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/app/cpu.max": "800000 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        },
        1.5,
    ),
    "the container's root, with the host's path": (
        {"proc/self/cgroup": "0::/kubepods/pod7/app\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
        2.0,
    ),
    "version 1": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/pod/app/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/pod/app/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "25000\n",
            "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "50000\n",
        },
        0.5,
    ),
    "no files": ({}, math.inf),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_the_quota_of_every_kind_of_cgroup_is_read(case: str, tmp_path: Path) -> None:
    files, quota = CGROUPS[case]
    assert cpu_quota(_write(tmp_path, files)) == quota


def test_busy_time_is_that_of_the_usable_cores(tmp_path: Path) -> None:
    stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 20 30 400 50 6 4 40 7 7\ncpu1 1 0 0 0 0 0 0 0\ncpu10 5 0 0 0 0 0 0 0\n"
    _write(tmp_path, {"proc/stat": stat})
    assert counting.busy_seconds(frozenset({0}), tmp_path) == 200 / os.sysconf("SC_CLK_TCK")
    assert counting.busy_seconds(frozenset({1, 10}), tmp_path) == 6 / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the numbers that torch is set to; none was set by the user."""
    for name in counting.USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    numbers: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    with torch._inductor.config.patch({"cpp.dynamic_threads": False}):
        yield numbers


@pytest.mark.parametrize(("quota", "count"), [(0.5, 1), (1.5, 1), (3.8, 4), (math.inf, 8)])
def test_the_quota_limits_the_number_at_start(
    quota: float, count: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "cpu_quota", lambda *root: quota)
    threads = choose_threads(parse())
    assert threads is not None and threads.count == count and chosen == [count]


def test_the_users_number_is_used_as_it_is(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_threads(parse(num_threads=3)) is None
    assert chosen == [3]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert choose_threads(parse()) is None
    assert chosen == [3]


def test_an_engine_revises_the_number_between_rounds() -> None:
    machine = Machine(2)
    executor = UniExecutor(WorkerInfo(1, 16, 64, 8), cast("TargetRank", EmptyRank()), machine.threads)
    plan = RoundPlan(round=0, rows=())
    executor.run(plan)
    assert not machine.changes  # time.monotonic() is past `due` already, but nothing was taken
    machine.now, machine.busy_s, machine.own_s = 1.0, 2.0, 1.0
    executor.run(plan)
    assert machine.changes == [1]


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, SPIN_ITERATIONS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_waiting_threads_spin_for_a_bounded_time_unless_the_user_decides(given: dict[str, str], found: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}
    code = "import os, sys, cluster; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **given}, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [found, "False"]


def test_the_time_of_a_process_is_found_after_any_name(tmp_path: Path) -> None:
    stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 2 3 4 250 150 9 9 20 0\n"
    assert counting.process_seconds(7, _write(tmp_path, {"proc/7/stat": stat})) == 400 / os.sysconf("SC_CLK_TCK")
    assert counting.process_seconds(8, tmp_path) == 0.0


def test_another_process_is_not_taken_for_ours() -> None:
    before = counting.sample_cpu()
    code = "import time\nend = time.process_time() + 1\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    after = counting.sample_cpu()
    assert (after.busy_s - before.busy_s) - (after.own_s - before.own_s) > 0.8
