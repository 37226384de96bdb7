"""`slipstream doctor`: a sound machine passes, and a failed check names its remedy."""

from collections.abc import Iterator

import pytest
import torch

from cluster import doctor
from cluster.cli import main as cli
from cluster.doctor import DRAFT, TARGET, CheckFailedError, DoctorOptions, Examination, ProbeProcesses
from protos.doctor_messages import Measure
from protos.errors import ConfigError
from protos.worker_messages import WorkerId
from tests.support.distributed.ranks import Board, ThreadGroup, in_memory
from tests.support.processes import is_running
from workers.distributed.groups import Group, GroupError
from workers.process.diagnostics import broadcast, check, measure

CPU = torch.device("cpu")


@pytest.fixture
def opened_probes() -> Iterator[list[ProbeProcesses]]:
    opened: list[ProbeProcesses] = []
    yield opened
    for probes in opened:
        probes.group.close()


def probes(opened_probes: list[ProbeProcesses], body: str = doctor.BODY) -> ProbeProcesses:
    opened_probes.append(ProbeProcesses.open(body))
    return opened_probes[-1]


def test_a_sound_machine(opened_probes: list[ProbeProcesses]) -> None:
    place = probes(opened_probes)
    examination = Examination(DoctorOptions(device="cpu"), place)
    found = {name: check() for name, check in examination.checks()}
    assert list(found) == ["devices", "tp group", "pair group", "pair after a kill"]
    assert found["devices"] == f"torch {torch.__version__}, on the CPU: 2 target rank(s) and a draft"
    assert found["tp group"].startswith("2 rank(s) over shared memory (above 1 MiB gloo), formed in ")
    assert "broadcast of 1 KiB" in found["tp group"]
    assert found["pair group"].startswith("target rank 0 and the draft over gloo, formed in ")
    assert "one way of 1 KiB" in found["pair group"]
    assert "the death was noticed after" in found["pair after a kill"]
    workers = [TARGET, WorkerId("target", 1), WorkerId("draft", incarnation=1)]
    pids = [pid for worker in workers if (pid := place.group.pid(worker)) is not None]
    place.group.close()
    assert len(pids) == 3
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("wanted", "what", "remedy"),
    [
        (DoctorOptions(world=3), "3 target ranks need as many devices, there are 2", doctor.TOO_FEW),
        (DoctorOptions(), "target rank 0: group tp on cuda:0: no way", doctor.NCCL),
        (DoctorOptions(world=2), "group tp on cuda:[01]: no way", doctor.NCCL),
        (DoctorOptions(device="cpu"), "group tp on cpu: no way", doctor.GLOO),
    ],
)
def test_what_is_wrong_comes_with_a_remedy(
    opened_probes: list[ProbeProcesses], wanted: DoctorOptions, what: str, remedy: str
) -> None:
    with pytest.raises(CheckFailedError, match=what) as caught:
        for _, check_one in Examination(
            wanted, probes(opened_probes, "tests.support.distributed.bodies:two_devices")
        ).checks():
            check_one()
    assert caught.value.remedy == remedy


def test_devices_that_are_left_over_go_to_the_draft(opened_probes: list[ProbeProcesses]) -> None:
    examination = Examination(DoctorOptions(), probes(opened_probes, "tests.support.distributed.bodies:two_devices"))
    checks = examination.checks()
    text = next(checks)[1]()
    assert text == "2 x A; torch 2.0, CUDA 13.0, NCCL 2.30; target ranks on 1 of 2"
    assert [name for name, _ in checks] == ["tp group", "pair group", "pair after a kill"]
    full = Examination(DoctorOptions(world=2), probes(opened_probes, "tests.support.distributed.bodies:two_devices"))
    checks = full.checks()
    assert next(checks)[1]().endswith("none is left for a draft of its own, so no pair is checked")
    assert [name for name, _ in checks] == ["tp group"]
    assert not full.has_draft


def test_a_process_that_does_not_start(opened_probes: list[ProbeProcesses]) -> None:
    with pytest.raises(CheckFailedError, match=r"draft: its process ended \(exit code 1\)") as caught:
        probes(opened_probes, "tests.support.distributed.bodies:raise_at_once").start([DRAFT])
    assert caught.value.remedy == doctor.START


class Corrupting(ThreadGroup):
    """Loses a byte on the way."""

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        super().broadcast(tensor, src)
        if self.rank != src:
            tensor[7] += 1
        return tensor


def test_bytes_that_arrive_changed() -> None:
    board = Board(2)

    def work(group: Group) -> None:
        check(Corrupting(board, group.rank, 2), broadcast, torch.empty(64, dtype=torch.uint8), 1)

    with pytest.raises(GroupError, match="1 of 64 bytes from rank 1 arrived changed at rank 0"):
        in_memory(2, work)


def test_an_operation_is_timed() -> None:
    order = Measure("tp", "broadcast", 64, 20)
    seconds = in_memory(3, lambda group: measure(group, CPU, order))
    assert len(seconds) == 3
    assert min(seconds) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are devices here")
def test_the_command_fails_where_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.app(["doctor", "--device", "cuda", "--no-ray"], standalone_mode=False) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"WRONG devices: torch {torch.__version__} sees no CUDA device to mend it: see whether `nvidia-smi`" in shown
    assert shown.endswith("1 check(s) failed")
    with pytest.raises(ConfigError, match="device must be one of auto, cpu, cuda, got 'tpu'"):
        cli.app(["doctor", "--device", "tpu"], standalone_mode=False)
