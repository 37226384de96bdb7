"""Products with quantised weights: their values, their rows, and their slices."""

import copy
from collections.abc import Callable

import pytest
import torch

from tests.support.models.quantized_layers import dequantized, values
from workers.quantization.linear import QuantizedEmbedding, QuantizedLinear
from workers.quantization.schemes import SCHEMES, int8
from workers.quantization.weight import QuantizedWeight

pytestmark = pytest.mark.usefixtures("one_thread")

Scheme = Callable[[torch.Tensor], QuantizedWeight]
ERRORS = {"int8": 1 / 127, "int4": 1 / 6, "fp8": 1 / 8}
"""Largest error of a weight, relative to the largest weight of its row."""


@pytest.fixture(params=SCHEMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def weight(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(33, 300), (4, 32), (130, 256)])
def test_a_layer_multiplies_with_the_values_it_holds(name: str, shape: tuple[int, int]) -> None:
    plain_NK = weight(*shape)
    bias_N = torch.nn.Parameter(torch.arange(shape[0]).float(), requires_grad=False)
    layer = QuantizedLinear(SCHEMES[name](plain_NK), bias_N)
    held_NK = values(layer)
    assert ((held_NK - plain_NK).abs().amax(1) <= ERRORS[name] * plain_NK.abs().amax(1)).all()
    for rows in (1, 2, 7):
        x_MK = torch.randn(rows, shape[1])
        wanted_MN = x_MK.double() @ held_NK.double().T + bias_N
        torch.testing.assert_close(layer(x_MK).double(), wanted_MN, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_does_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    layer = QuantizedLinear(SCHEMES[name](weight(37, 288)))
    x_MK = torch.randn(9, 288).to(dtype)
    together_MN = layer(x_MK)
    assert together_MN.dtype == dtype
    assert torch.equal(together_MN, torch.cat([layer(x_1K) for x_1K in x_MK.split(1)]))
    assert torch.equal(together_MN[2:7], layer(x_MK[2:7]))


def test_slices_hold_the_values_of_the_whole(name: str) -> None:
    whole = SCHEMES[name](weight(20, 384))
    rows = whole.outputs([(4, 9), (12, 14)], 8)
    assert torch.equal(dequantized(rows)[:5], dequantized(whole)[4:9])
    assert torch.equal(dequantized(rows)[5:7], dequantized(whole)[12:14])
    assert not dequantized(rows)[7:].any()
    columns = whole.inputs([(192, 384)])
    assert columns.is_suitable
    assert torch.equal(dequantized(columns), dequantized(whole)[:, 192:])
    assert torch.equal(values(QuantizedLinear(columns)), dequantized(columns))


def test_an_embedding_has_the_rows_of_its_head() -> None:
    head = QuantizedLinear(int8(weight(50, 40)))
    embedding = QuantizedEmbedding(head, torch.float32)
    ids = torch.tensor([[0, 3, 49], [17, 4, 4]])
    assert torch.equal(embedding(ids), values(head)[ids])


def test_parameters_that_are_set_later_are_used() -> None:
    """What a layer keeps for its calls must not outlast them."""
    layer, x_MK = QuantizedLinear(int8(weight(8, 64))), torch.randn(2, 64)
    before_MN = layer(x_MK)
    layer.bias = torch.nn.Parameter(torch.arange(8.0), requires_grad=False)
    torch.testing.assert_close(layer(x_MK), before_MN + layer.bias)
    layer.scales = torch.nn.Parameter(2 * layer.scales, requires_grad=False)
    torch.testing.assert_close(layer(x_MK), 2 * before_MN + layer.bias)
    twin = copy.deepcopy(layer)
    layer._apply(lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor)
    torch.testing.assert_close(layer(x_MK), 4 * before_MN + layer.bias)
    torch.testing.assert_close(twin(x_MK), 2 * before_MN + layer.bias / 2)
