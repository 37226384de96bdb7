"""Products with quantised weights: their values, their rows, and their slices."""

import copy
from collections.abc import Callable

import pytest
import torch

from tests.support.models.quantized_layers import DTYPES, dequantized, values
from workers.quantization.linear import QuantizedEmbedding, QuantizedLinear
from workers.quantization.schemes import SCHEMES, int8
from workers.quantization.weight import PACKED, Code, QuantizedWeight

pytestmark = pytest.mark.usefixtures("one_thread")

Scheme = Callable[[torch.Tensor], QuantizedWeight]
ERRORS = {"int8": 1 / 127, "int4": 1 / 6, "fp8": 1 / 8}
"""Largest error of a weight, relative to the largest weight of its row."""
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest error of a result, by the dtype to which it is rounded."""


@pytest.fixture(params=SCHEMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def weight(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))


def every_code(code: Code) -> QuantizedWeight:
    """Return a weight `[16, 256]` in groups of 64 that has all codes of a format but for NaN."""
    codes_K = torch.arange(256, dtype=torch.uint8)
    if code in PACKED:
        codes_K %= 16
    elif code is Code.FP8:
        codes_K[[0x7F, 0xFF]] = 0
    codes_NK = torch.stack([codes_K.roll(n) for n in range(16)]).view(DTYPES.get(code, torch.uint8))
    scales_NG = torch.rand(16, 4, generator=torch.Generator().manual_seed(1)) + 0.5
    if code is Code.FP4:
        scales_NG = (scales_NG * 8 + 120).to(torch.uint8)
    zeros_NG = torch.arange(16, dtype=torch.uint8)[:, None].repeat(1, 4) if code is Code.INT4 else None
    return QuantizedWeight(code, codes_NK, scales_NG, zeros_NG, 64)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("code", Code)
def test_every_code_is_decoded(code: Code, dtype: torch.dtype) -> None:
    """Few rows read weights as they are stored, many rows as they were decoded into memory."""
    weight_NK = every_code(code)
    layer, wanted_KN = QuantizedLinear(weight_NK), dequantized(weight_NK).T.to(dtype)
    rows_KK = torch.eye(256, dtype=dtype)
    assert torch.equal(layer(rows_KK), wanted_KN)
    assert torch.equal(torch.cat([layer(rows_XK) for rows_XK in rows_KK.split(3)]), wanted_KN)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("shape", [(33, 300), (4, 32), (130, 256)])
def test_a_layer_multiplies_with_the_values_it_holds(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    plain_NK = weight(*shape)
    bias_N = torch.nn.Parameter(torch.arange(shape[0]).to(dtype), requires_grad=False)
    layer = QuantizedLinear(SCHEMES[name](plain_NK), bias_N)
    held_NK = values(layer)
    assert ((held_NK - plain_NK).abs().amax(1) <= ERRORS[name] * plain_NK.abs().amax(1)).all()
    for rows in (1, 2, 7):
        x_MK = torch.randn(rows, shape[1]).to(dtype)
        wanted_MN = x_MK.double() @ held_NK.double().T + bias_N
        torch.testing.assert_close(layer(x_MK).double(), wanted_MN, rtol=RELATIVE[dtype], atol=1e-4)


@pytest.mark.parametrize("dtype", RELATIVE)
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
