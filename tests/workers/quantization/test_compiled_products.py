"""Compiled graphs compute products with quantised weights as eager does, with the kernel alone where it loads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workers.compile import Weights
from workers.compiled.graphs import Input, compile_graph, load_graph
from workers.native.build import KernelUnavailableError
from workers.quantization.experts import stack
from workers.quantization.linear import QuantizedLinear
from workers.quantization.products import SHIM
from workers.quantization.schemes import SCHEMES, int4

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, EXPERTS = 96, 3
SOME_IDS = torch.tensor([2, 0, 1, 1, 2, 0, 0])


class Layers(torch.nn.Module):
    """A layer of each scheme, one of them with a bias, and experts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weights = iter(torch.randn(len(SCHEMES) + EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        bias = torch.nn.Parameter(torch.randn(WIDTH).to(dtype), requires_grad=False)
        self.layers = torch.nn.ModuleList([QuantizedLinear(scheme(next(weights))) for scheme in SCHEMES.values()])
        self.layers[0].bias = bias
        self.experts = stack((int4(weight) for weight in weights), EXPERTS)

    def forward(self, x_MK: torch.Tensor) -> torch.Tensor:
        """Return `[M, K]`."""
        for layer in self.layers:
            x_MK = torch.relu(layer(x_MK))
        assert self.experts is not None
        ids_M = SOME_IDS.repeat(2)[: x_MK.shape[0]].to(torch.int32)
        found: torch.Tensor = self.experts(x_MK, ids_M, None)
        return found


def compiled(folder: Path, layers: Layers, x_MK: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the results of the compiled layers for the first rows of *x_MK*."""
    entry = folder / "entry"
    entry.mkdir()
    with torch.no_grad():
        compile_graph(entry, "graph", layers, [Input.of(x_MK, 0)], Weights(x_MK.dtype, 1 << 16, 1 << 30), single=False)
        graph = load_graph(entry, "graph")
        return [graph(x_MK[:size].contiguous())[0] for size in sizes]


@pytest.mark.parametrize(
    "has_shim",
    [pytest.param(True, id="the kernel alone"), pytest.param(False, marks=pytest.mark.full, id="by the operator")],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=str)
def test_graphs_equal_eager_to_the_bit(
    dtype: torch.dtype, has_shim: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_shim:

        def missing() -> None:
            raise KernelUnavailableError("this torch lacks it")

        monkeypatch.setattr("workers.compiled.graphs.SHIMS", [replace(SHIM, load=missing)])
    layers, sizes = Layers(dtype), (2, 3, 7)
    x_MK = torch.randn(7, WIDTH).to(dtype)
    for size, found_MK in zip(sizes, compiled(tmp_path, layers, x_MK, sizes), strict=True):
        assert torch.equal(found_MK, layers(x_MK[:size]))
    assert (tmp_path / "entry" / "graph.json").exists() != has_shim, "Python is called for what has no shim"
