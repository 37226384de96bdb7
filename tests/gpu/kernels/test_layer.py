"""The kernels of decoder layers, interpreted, against the modules of `transformers`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from workers.gpu.kernels.layer import add_rms_norm, rms_norm, rotate_, swiglu
from workers.gpu.kernels.linear import linear

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = 1e-5
UNITS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Most that a result may be off, relative to the largest: one rounding in the last place of a factor."""
dtypes = st.sampled_from(list(UNITS))
tokens = st.integers(1, 4)


def some(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    error = (found.double() - expected.double()).abs().amax()
    assert error <= UNITS[expected.dtype] * expected.double().abs().amax()


def norm(weight: torch.Tensor, kind: type[nn.Module] = LlamaRMSNorm) -> nn.Module:
    module = kind(len(weight), EPS)
    module.weight.data = weight
    return module.requires_grad_(False)


@given(st.integers(0, 99), dtypes, tokens, st.sampled_from([1, 24, 64, 200]))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_norms(seed: int, dtype: torch.dtype, count: int, size: int) -> None:
    hidden, added, weight = (some(seed + i, dtype, *shape) for i, shape in enumerate([(count, size)] * 2 + [(size,)]))
    close(rms_norm(hidden, weight, EPS), norm(weight)(hidden))
    total, normed = add_rms_norm(hidden, added, weight, EPS)
    assert torch.equal(total, hidden + added)
    close(normed, norm(weight)(hidden + added))


@given(st.integers(0, 99), dtypes, tokens, st.sampled_from([2, 6, 64, 128]), st.integers(1, 4), st.booleans())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_rotation(  # noqa: PLR0917
    seed: int, dtype: torch.dtype, count: int, size: int, kv_heads: int, has_norms: bool
) -> None:
    heads = 2 * kv_heads
    qkv = some(seed, dtype, count, (heads + 2 * kv_heads) * size)
    angles = some(seed + 1, torch.float32, count, size // 2).repeat(1, 2) * 50
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = some(seed + 2, dtype, size), some(seed + 3, dtype, size)
    query, key, value = qkv.view(count, -1, size).split([heads, kv_heads, kv_heads], 1)
    if has_norms:
        query, key = (norm(weight, Qwen3RMSNorm)(part) for weight, part in zip(weights, (query, key), strict=True))
    expected = [*apply_rotary_pos_emb(query, key, cos, sin), value.clone()]
    rotate_(qkv, cos, sin, (heads, kv_heads), (*weights, EPS) if has_norms else None)
    close(qkv.view(count, -1, size), torch.cat(expected, 1))
    assert torch.equal(qkv.view(count, -1, size)[:, -kv_heads:], expected[2])


@given(st.integers(0, 99), dtypes, tokens, st.sampled_from([1, 48, 130, 1500]))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_swiglu(seed: int, dtype: torch.dtype, count: int, size: int) -> None:
    gate_up = some(seed, dtype, count, 2 * size) * 4
    gate, up = gate_up.split(size, 1)
    close(swiglu(gate_up), F.silu(gate) * up)


def test_numbers_that_are_not_finite_stay_in_their_token() -> None:
    hidden = some(0, torch.float32, 3, 64)
    hidden[1, 5] = torch.nan
    found = rms_norm(hidden, torch.ones(64), EPS)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@given(
    st.integers(0, 99),
    dtypes,
    st.sampled_from([1, 2]),
    st.sampled_from([(3, 512), (70, 600), (16, 2048), (9, 8704)]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_linear_layers_of_one_token(  # noqa: PLR0917
    seed: int, dtype: torch.dtype, count: int, shape: tuple[int, int], has_bias: bool, has_added: bool
) -> None:
    """Two tokens, and rows of few inputs, are left to torch."""
    outputs, size = shape
    given_TK, weight_NK = some(seed, dtype, count, size), some(seed + 1, dtype, outputs, size)
    bias_N = some(seed + 2, dtype, outputs) if has_bias else None
    added_TN = some(seed + 3, dtype, count, outputs) if has_added else None
    expected_TN = F.linear(given_TK.double(), weight_NK.double(), None if bias_N is None else bias_N.double())
    if added_TN is not None:
        expected_TN += added_TN.double()
    close(linear(given_TK, weight_NK, bias_N, added_TN), expected_TN.to(dtype))
