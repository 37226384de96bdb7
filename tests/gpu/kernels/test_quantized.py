"""Products with quantised weights, interpreted, against products with the values that the weights mean."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.models.quantized_layers import dequantized
from workers.gpu.kernels import quantized
from workers.gpu.kernels.quantized import FEW, Form, product
from workers.quantization import schemes
from workers.quantization.layout import LaidOut, for_gpus
from workers.quantization.weight import BLOCK, Code, QuantizedWeight

pytestmark = pytest.mark.usefixtures("one_thread")

ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Most that a result may be off, relative to the largest: sums are rounded once, to the dtype of the activations."""
dtypes = st.sampled_from(list(ERRORS))
BYTES = (Code.INT8, Code.FP8)
"""Codes of a byte each."""


def some(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bytes_below(most: int, seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def weight_of(seed: int, code: Code, shape: tuple[int, int], group: int, has_zeros: bool = True) -> QuantizedWeight:
    """Return a random weight; *group* 0: all inputs."""
    outputs, inputs = shape
    group = group or inputs
    scales_NG = some(seed, outputs, -(-inputs // group)).abs() * 0.02 + 0.001
    if code is Code.FP4:
        return QuantizedWeight(
            code, bytes_below(16, seed, *shape), 110 + bytes_below(20, seed, *scales_NG.shape), None, group
        )
    if code is Code.INT4:
        zeros_NG = bytes_below(16, seed + 1, *scales_NG.shape) if has_zeros else None
        return QuantizedWeight(code, bytes_below(16, seed, *shape), scales_NG, zeros_NG, group)
    plain_NK = some(seed, *shape)
    codes_NK = (schemes.int8 if code is Code.INT8 else schemes.fp8)(plain_NK).codes_NK
    return QuantizedWeight(code, codes_NK, scales_NG, None, group)


def multiply(x_MK: torch.Tensor, weight: QuantizedWeight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    laid_out = for_gpus(weight)
    parts = laid_out.codes, laid_out.scales, laid_out.zeros
    return product(x_MK, None, *parts, bias_N, weight.shape[0], weight.group, int(weight.code))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected).abs().amax()
    assert error <= ERRORS[found.dtype] * expected.abs().amax()


@dataclass(frozen=True)
class Case:
    """A product."""

    seed: int
    code: Code
    dtype: torch.dtype
    rows: int
    shape: tuple[int, int]
    group: int
    has_zeros: bool
    has_bias: bool

    def check(self) -> None:
        weight = weight_of(self.seed, self.code, self.shape, self.group, self.has_zeros)
        x_MK = some(self.seed + 1, self.rows, self.shape[1]).to(self.dtype)
        bias_N = some(self.seed + 2, self.shape[0]).to(self.dtype) if self.has_bias else None
        expected = x_MK.double() @ dequantized(weight).double().T
        found = multiply(x_MK, weight, bias_N)
        assert found.dtype == self.dtype
        close(found, expected if bias_N is None else expected + bias_N.double())


cases = st.builds(
    Case,
    st.integers(0, 99),
    st.sampled_from(Code),
    dtypes,
    st.integers(1, 64),
    st.tuples(st.integers(1, 140), st.integers(1, 300)),
    st.sampled_from([0, 32, 64, 96, 128, 256]),
    st.booleans(),
    st.booleans(),
)


@given(cases)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_products_are_those_of_the_values(case: Case) -> None:
    case.check()


@pytest.mark.full
@given(cases)
@settings(max_examples=400, deadline=None)
def test_products_are_those_of_the_values_in_full(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("code", Code)
def test_inputs_are_divided_into_spans(code: Code) -> None:
    """1,200 inputs have two spans, the second of which ends within a step and within a block of 32."""
    assert Form(1, 0, 70, 1200, 128, 10).spans == 2
    Case(3, code, torch.float32, 3, (70, 1200), 128, has_zeros=True, has_bias=True).check()


def test_spans_do_not_depend_on_rows_and_cover_all_inputs() -> None:
    for inputs in (1, 100, 1024, 2880, 14336):
        spans = {
            (form.span, form.spans) for rows in range(1, FEW + 1) for form in [Form(rows, 0, 1024, inputs, inputs, 1)]
        }
        ((span, count),) = spans
        assert span % quantized.STEP == 0
        assert span * (count - 1) < inputs <= span * count
    assert Form(1, 0, 4096, 4096, 4096, 1).spans == 4
    assert Form(FEW + 1, 0, 4096, 4096, 4096, 1).spans == Form(1, 0, 128_256, 4096, 4096, 1).spans == 1


@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("dtype", ERRORS)
def test_every_code_is_exact(code: Code, dtype: torch.dtype) -> None:
    """Rows of an identity matrix read one input each; NaN of e4m3 is not a weight."""
    codes_NK = torch.arange(256, dtype=torch.uint8).view(4, 64)
    if code in {Code.INT4, Code.FP4}:
        codes_NK = codes_NK & 15
    if code is Code.FP8:
        codes_NK = torch.where(codes_NK & 0x7F == 0x7F, 0, codes_NK).to(torch.uint8)
    scales_NG = torch.tensor([[1.0, 0.5], [2.0, 1.0], [4.0, 0.25], [1.0, 1.0]])
    if code is Code.FP4:
        scales_NG = (127 + torch.log2(scales_NG)).to(torch.uint8)
    weight = QuantizedWeight(code, codes_NK, scales_NG, None, 32)
    for rows in (range(16), range(64)):
        found = multiply(torch.eye(64, dtype=dtype)[rows], weight)
        assert torch.equal(found.float(), dequantized(weight).T[rows])


def test_scales_of_mxfp4_may_be_very_small_or_large() -> None:
    weight = replace(
        weight_of(0, Code.FP4, (3, 64), 32), scales_NG=torch.tensor([[0, 1], [2, 230], [127, 230]]).to(torch.uint8)
    )
    found = multiply(torch.eye(64)[:8], weight)
    assert torch.equal(found, dequantized(weight).T[:8])


@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("rows", [FEW, 70])
@pytest.mark.usefixtures("dots_in_order")
def test_a_row_does_not_depend_on_the_others_of_its_form(code: Code, rows: int) -> None:
    weight, x_MK = weight_of(5, code, (66, 288), 32), some(6, rows, 288)
    together_MN = multiply(x_MK, weight)
    x_MK[1], x_MK[-1] = torch.nan, 1e30
    kept = [row for row in range(rows) if row not in {1, rows - 1}]
    assert torch.equal(multiply(x_MK, weight)[kept], together_MN[kept])
    if rows == FEW:
        assert torch.equal(multiply(x_MK[2:5], weight), together_MN[2:5])
    else:
        assert torch.equal(multiply(x_MK[2:40], weight), together_MN[2:40])


def test_a_slice_of_the_inputs_keeps_its_groups() -> None:
    """As a rank has it: from the middle of a group of 64 on."""
    whole, x_MK = weight_of(9, Code.INT4, (20, 256), 64), some(9, 3, 256)
    weight = whole.inputs([(96, 256)])
    assert weight.group == 32
    close(multiply(x_MK[:, 96:], weight), x_MK[:, 96:].double() @ dequantized(whole)[:, 96:].double().T)


def test_rows_with_a_stride_and_no_rows() -> None:
    weight, wide_MX = weight_of(7, Code.INT8, (20, 64), 0), some(8, 3, 100)
    assert torch.equal(multiply(wide_MX[:, :64], weight), multiply(wide_MX[:, :64].contiguous(), weight))
    assert torch.equal(multiply(wide_MX[:, :64].T.contiguous().T, weight), multiply(wide_MX[:, :64], weight))
    assert multiply(wide_MX[:0, :64], weight).shape == (0, 20)


def stacked(weights: list[QuantizedWeight]) -> LaidOut:
    each = [for_gpus(weight) for weight in weights]
    zeros = [one.zeros for one in each if one.zeros is not None]
    codes, scales = torch.stack([one.codes for one in each]), torch.stack([one.scales for one in each])
    return LaidOut(codes, scales, torch.stack(zeros) if zeros else None)


@pytest.mark.parametrize("code", [Code.INT4, Code.FP4, *(pytest.param(code, marks=pytest.mark.full) for code in BYTES)])
@pytest.mark.parametrize(("tokens", "repeats"), [(1, 3), (5, 1), (9, 2), (70, 3)])
def test_rows_have_the_weights_of_their_experts(code: Code, tokens: int, repeats: int) -> None:
    """Up to 5 rows each is by itself; more are grouped, in tiles of 16 and, above 80, of 64. One expert has no rows."""
    weights = [weight_of(seed, code, (66, 96), 32) for seed in range(5)]
    rows = tokens * repeats
    ids_S = torch.randint(0, 4, (rows,), generator=torch.Generator().manual_seed(tokens))
    ids_S[rows // 2] = 5  # of no expert
    if rows > 5:
        ids_S[0] = -1
    x_RK, bias_EN, laid_out = some(1, tokens, 96), some(2, 5, 66), stacked(weights)
    laid_out.scales[4] = 255 if code is Code.FP4 else torch.nan
    parts = laid_out.codes, laid_out.scales, laid_out.zeros
    found = product(x_RK, ids_S, *parts, bias_EN, 66, 32, int(code))
    expected = torch.zeros(rows, 66, dtype=torch.float64)
    for row, expert in enumerate(ids_S.tolist()):
        if 0 <= expert < 5:
            values_NK = dequantized(weights[expert]).double()
            expected[row] = values_NK @ x_RK[row // repeats].double() + bias_EN[expert].double()
    close(found, expected)
    assert not found[ids_S == 5].any()


def test_a_single_expert_has_no_spans() -> None:
    """1,200 inputs have two spans in a linear layer; rows of no expert are 0."""
    weight, x_RK, bias_EN = weight_of(4, Code.INT4, (66, 1200), 128), some(1, 3, 1200), some(2, 1, 66)
    laid_out = stacked([weight])
    parts = laid_out.codes, laid_out.scales, laid_out.zeros
    found = product(x_RK, torch.tensor([0, 1, 0]), *parts, bias_EN, 66, 128, int(Code.INT4))
    assert not found[1].any()
    close(found[[0, 2]], x_RK[[0, 2]].double() @ dequantized(weight).double().T + bias_EN.double())


def test_experts_of_one_row_and_in_groups_give_the_same() -> None:
    laid_out = stacked([weight_of(seed, Code.INT4, (66, 96), 32) for seed in range(4)])
    x_RK, ids_S = some(1, 12, 96), torch.arange(12) % 4

    def multiplied(first: int, last: int) -> torch.Tensor:
        parts = laid_out.codes, laid_out.scales, laid_out.zeros
        return product(x_RK[first:last], ids_S[first:last], *parts, None, 66, 32, int(Code.INT4))

    assert torch.equal(multiplied(0, 12)[4:8], multiplied(4, 8))


def test_a_weight_takes_the_memory_of_its_codes_and_scales() -> None:
    """Outputs are padded to multiples of 64, inputs to multiples of 32."""
    for code, bits in {Code.INT8: 8, Code.FP8: 8, Code.INT4: 4, Code.FP4: 4}.items():
        laid_out = for_gpus(weight_of(0, code, (70, 300), 128 if code is Code.INT4 else 32 if code is Code.FP4 else 0))
        assert laid_out.codes.nbytes == 128 * 320 * bits // 8
        groups = {Code.INT4: 3, Code.FP4: -(-300 // BLOCK)}.get(code, 1)
        assert laid_out.scales.nbytes == 128 * groups * (1 if code is Code.FP4 else 4)
