"""Compiled graphs attend as eager models do: by the kernel alone, and by the operator where that does not suffice."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from protos.layers import LayerShape
from tests.workers.attention.test_attention import cache, normal, rows_of
from workers.attention.backend import run_with
from workers.attention.batch import AttentionMetadata
from workers.attention.native import SHIM, NativeAttention
from workers.attention.row_groups import CHUNK
from workers.attention.torch import TorchAttention
from workers.compile import Weights
from workers.compiled.graphs import Input, compile_graph, load_graph

HEADS, KV_HEADS, SIZE = 4, 2, 24
SHORT, LONG = [(30, 5), (0, 1), (64, 3)], [(30, 5), (0, CHUNK + 1)]

Graph = Callable[..., list[torch.Tensor]]


class Attends(torch.nn.Module):
    """A layer with a window, a cap and sinks in fp32, and one with sinks in bf16, which the kernel does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sinks", torch.linspace(-1, 1, HEADS))
        self.register_buffer("rounded", torch.linspace(1, -1, HEADS).bfloat16())

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return both outputs, `[T, heads, 2 * size]`, for queries, keys and values `[T, heads, size]`."""
        given = [each.transpose(0, 1).unsqueeze(0) for each in inputs]
        outputs = [
            torch.ops.slipstream.paged_attention(*given, sinks, 0, 0.2, window, softcap, False, False)
            for sinks, window, softcap in ((self.sinks, 20, 5.0), (self.rounded, 0, 0.0))
        ]
        return torch.cat(outputs, 3)[0]


def inputs(tokens: int) -> list[torch.Tensor]:
    shapes = enumerate((HEADS, KV_HEADS, KV_HEADS))
    return [normal(heads, tokens, SIZE, torch.float32, seed)[0].transpose(0, 1).contiguous() for seed, heads in shapes]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("graphs") / "entry"
    folder.mkdir()
    examples = [Input.of(each, 0) for each in inputs(7)]
    with torch.no_grad():
        compile_graph(folder, "attends", Attends(), examples, Weights(torch.float32, 1 << 16, 1 << 30), single=False)
    assert (folder / "attends.shims").read_text() == str(SHIM.operator)
    return folder


@pytest.fixture
def graph(compiled: Path) -> Graph:
    return load_graph(compiled, "attends")


def attended(
    call: Callable[..., torch.Tensor],
    backend: type[NativeAttention | TorchAttention],
    rows: AttentionMetadata,
    more: int,
) -> torch.Tensor:
    """Return what *call* returns for *rows*, and so many tokens of padding."""
    made = backend(cache(LayerShape(KV_HEADS, SIZE, SIZE), rows.blocks_SB.size, torch.float32))
    made.plan(rows)
    tokens = int(rows.lengths_R.sum())
    with torch.no_grad():
        return run_with(made, lambda: call(*inputs(tokens + more)), tokens)


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short rows", "a long row"])
@pytest.mark.parametrize("backend", [NativeAttention, TorchAttention])
def test_graphs_attend_as_eager_does(
    backend: type[NativeAttention | TorchAttention], lengths: list[tuple[int, int]], more: int, graph: Graph
) -> None:
    rows = rows_of(lengths)
    expected = attended(Attends(), backend, rows, more)
    assert torch.equal(attended(lambda *given: graph(*given)[0], backend, rows, more), expected)
    assert not expected[len(expected) - more :].any()


def test_the_kernel_is_called_without_python(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the layer whose sinks it does not read is Python's."""
    calls: list[int] = []
    attend = NativeAttention.attend

    def counted(self: NativeAttention, layer: int, *given: torch.Tensor) -> torch.Tensor:
        calls.append(layer)
        return attend(self, layer, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeAttention, "attend", counted)
    attended(lambda *given: graph(*given)[0], NativeAttention, rows_of(SHORT), 0)
    assert len(calls) == 1


def test_a_graph_runs_only_within_a_forward(graph: Graph) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError):
        graph(*inputs(7))


def test_each_thread_has_a_forward_of_its_own(compiled: Path) -> None:
    """The kernel must not write into the cache of another thread's forward. Each thread has a graph of its own."""
    several = [rows_of([(10 * i, 1 + i), (5, 3)]) for i in range(4)]
    expected = [attended(Attends(), NativeAttention, rows, 0) for rows in several]
    graphs = [load_graph(compiled, "attends") for _ in several]

    def many(i: int) -> bool:
        found = (attended(lambda *given: graphs[i](*given)[0], NativeAttention, several[i], 0) for _ in range(50))
        return all(torch.equal(each, expected[i]) for each in found)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(many, range(4)))
