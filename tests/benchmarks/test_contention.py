"""Busy processes end with the benchmark; quota groups are made as both versions of cgroups want it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.shared.contention import QuotaGroup, busy_processes
from workers.threads import process_seconds


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def until_gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_running(pid)


def test_busy_processes_compute_until_the_block_ends() -> None:
    with busy_processes(2) as pids:
        end = time.monotonic() + 10
        while any(process_seconds(pid) < 0.05 for pid in pids):
            assert time.monotonic() < end
            time.sleep(0.02)
    assert len(set(pids)) == 2 and not any(map(is_running, pids))


def test_busy_processes_end_with_a_benchmark_that_is_killed() -> None:
    code = (
        "import time\nfrom benchmarks.shared.contention import busy_processes\n"
        "with busy_processes(1) as pids:\n    print(*pids, flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        assert is_running(pid)
        benchmark.send_signal(signal.SIGKILL)
    assert until_gone(pid)


VERSIONS = {
    "1": ("4:cpu,cpuacct:/pod\n0::/\n", "cpu/pod", ("cpu.cfs_quota_us",), {"cpu.cfs_quota_us": "50000"}),
    "2": ("0::/pod\n", "pod", ("cgroup.subtree_control",), {"cpu.max": "50000 100000"}),
}


def mounted(root: Path, version: str) -> Path:
    """Write what the kernel shows of a process's group; return the group's folder."""
    line, where, files, _ = VERSIONS[version]
    group = root / "sys/fs/cgroup" / where
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)
    for name in ("cgroup.procs", *files):
        (group / name).write_text("")
    return group


@pytest.mark.parametrize("version", VERSIONS)
def test_a_group_has_the_quota_and_its_processes_come_back(version: str, tmp_path: Path) -> None:
    group = mounted(tmp_path, version)
    quota = QuotaGroup(0.5, tmp_path)
    (inner,) = (path for path in group.iterdir() if path.is_dir())
    written = VERSIONS[version][3]
    assert {name: (inner / name).read_text() for name in written} == written
    with quota.around(os.getpid()):
        assert (inner / "cgroup.procs").read_text() == str(os.getpid())
    assert (group / "cgroup.procs").read_text() == str(os.getpid())


def test_where_no_group_can_be_made_the_reason_is_told(tmp_path: Path) -> None:
    group = mounted(tmp_path, "1")
    (group / f"slipstream-benchmark-{os.getpid()}").touch()
    with pytest.raises(OSError, match="File exists"):
        QuotaGroup(0.5, tmp_path)
    (group / "cgroup.procs").unlink()  # a folder that is no cgroup
    with pytest.raises(OSError, match="no cgroup with a cpu controller"):
        QuotaGroup(0.5, tmp_path)
