"""The pretended GPU refuses what a real one does, and counts what the host waits for."""

import numpy as np
import pytest
import torch

from tests.support.gpu.graphs import IllegalCaptureError
from tests.support.gpu.machine import Machine, pretended_gpu
from tests.support.gpu.pretend import DeviceMixError
from workers.distributed.groups import Solo
from workers.gpu.graphs import GraphCapturer, GraphSet
from workers.gpu.staging import ResultArea, StagingArea

CUDA = torch.device("cuda", 0)


def test_copies_kernels_and_waits_are_told_apart() -> None:
    with pretended_gpu() as machine:
        there = torch.arange(6).to(CUDA, non_blocking=True)
        assert machine.reset().budget() == {
            "kernels": 0, "graphs": 0, "to_device": 1, "blocking": 0, "to_host": 0, "syncs": 0,
        }  # fmt: skip
        assert (there.view(2, 3) + 1).sum().item() == 21
        counts = machine.reset()
        assert counts.kernels == {"add": 1, "sum": 1}
        assert counts.syncs.total() == 1
        torch.arange(6).to(CUDA)
        assert machine.reset().blocking.total() == 1
        assert there[there > 3].tolist() == [4, 5]
        assert machine.reset().syncs.total() == 2


def test_devices_do_not_mix() -> None:
    with pretended_gpu():
        there = torch.ones(3, device=CUDA)
        with pytest.raises(DeviceMixError, match="add"):
            there + torch.ones(3)


def test_a_result_is_not_there_before_the_host_waits() -> None:
    with pretended_gpu():
        there, here = torch.ones(3, device=CUDA), torch.zeros(3, pin_memory=True)
        here.copy_(there, non_blocking=True)
        assert here.tolist() == [0.0, 0.0, 0.0]
        torch.cuda.synchronize()
        assert here.tolist() == [1.0, 1.0, 1.0]


def test_staged_memory_must_not_change_before_the_copy_is_done() -> None:
    with pretended_gpu():
        staging, results = StagingArea(8, CUDA), ResultArea(1, CUDA)
        first, second = staging.next_mirror(), staging.next_mirror()
        staging.send(first, 8)
        staging.mirrors[second].numpy()[:] = 1  # the other mirror may be written
        results.receive(1)
        staging.send(first, 8)
        staging.mirrors[first].numpy()[:] = 2
        with pytest.raises(RuntimeError, match="changed before"):
            results.receive(1)


def counting(machine: Machine) -> tuple[torch.Tensor, GraphSet[int]]:
    """Return a counter on the device, and a set of graphs that has one, which adds 2 to it."""
    counter = torch.zeros(4, device=CUDA)

    def program() -> None:
        counter.add_(torch.ones(4, device=CUDA) * 2)

    graphs: GraphSet[int] = GraphSet("test", GraphCapturer(CUDA, Solo()))
    graphs.capture({1: program}, lambda _key: None, lambda _line: None)
    counter.zero_()
    machine.reset()
    return counter, graphs


def test_a_graph_repeats_what_was_captured_on_the_same_memory() -> None:
    with pretended_gpu() as machine:
        counter, graphs = counting(machine)
        for _ in range(3):
            graphs.launch(1)
        counts = machine.reset()
        assert (counts.graphs, counts.kernels.total()) == (3, 0)
        counter += 1
        assert counter.tolist() == [7.0] * 4
        assert machine.capture.modes == ["thread_local"]
        machine.capture.graphs[0].reads_only([counter])
        with pytest.raises(IllegalCaptureError, match="may be freed"):
            machine.capture.graphs[0].reads_only([])


def reads(values: torch.Tensor) -> None:
    values.sum().item()


def copies(values: torch.Tensor) -> None:
    values.copy_(torch.from_numpy(np.ones(4, np.float32)))


def selects(values: torch.Tensor) -> None:
    values[values > 0].sum()


@pytest.mark.parametrize("illegal", [reads, copies, selects])
def test_what_cannot_be_captured_runs_eager_and_says_so_once(illegal: object, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(illegal)
    with pretended_gpu():
        values = torch.zeros(4, device=CUDA)
        graphs: GraphSet[str] = GraphSet("target", GraphCapturer(CUDA, Solo()))
        programs = {"legal": values.zero_, "illegal": lambda: illegal(values), "next": values.zero_}
        lines: list[str] = []
        graphs.capture(programs, lambda _key: None, lines.append)  # type: ignore[arg-type]
    assert "legal" in graphs
    assert len(graphs) == 1
    assert [record.getMessage().split(": ")[:2] for record in caplog.records] == [
        ["target", "only 1 CUDA graphs of 3, the rest runs eager"]
    ]
    assert [line.split(" in ")[0] for line in lines] == ["target: 1 CUDA graphs"]
