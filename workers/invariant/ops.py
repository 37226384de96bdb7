"""Operators whose results for a row do not depend on the rows beside it, nor on how many there are.

They compute what torch's of the same names do, in an order of operations that is fixed for each number. On CPUs they
are `workers.invariant.native`, on GPUs `workers.invariant.torch`.
"""

import torch

from workers.invariant import native
from workers.invariant import torch as tiled

SHARDS = 8
"""Sums of matrix products have so many parts, added up as a tree of neighbours. A row-parallel layer leaves each of T
ranks SHARDS / T of them: a power of two, of which T is a divisor."""

GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback"})
"""What torch and transformers call a product of rows with the weights of their experts."""

KINDS_OF_EACH = ("exp", "silu", "sigmoid", "tanh", "gelu_erf", "gelu_tanh", "cos", "sin", "rsqrt")
"""What `each` computes, in the order of the table in `native/invariant.cpp`."""


def _define() -> torch.library.Library:
    library = torch.library.Library("slipstream_invariant", "DEF")  # type: ignore[no-untyped-call]
    for schema, on_cpu, on_gpu, shape in (
        # x [..., K] times weight [N, K], plus bias [N]: [..., N]. Partial: fp32, without rounding.
        (
            "linear(Tensor x, Tensor weight, Tensor? bias, int shards, bool is_partial) -> Tensor",
            native.linear,
            tiled.linear,
            _linear_shape,
        ),
        # x [M, K], of which rows ends[e - 1] .. ends[e] are multiplied by weight[e] of [E, K, N]: [M, N], or partial.
        (
            "grouped(Tensor x, Tensor weight, Tensor ends, int shards, bool is_partial) -> Tensor",
            native.grouped,
            tiled.grouped,
            _grouped_shape,
        ),
        ("each(Tensor x, int what) -> Tensor", native.each, tiled.each, _same_shape),
        # Over the last dimension, which stays as one.
        ("mean(Tensor x) -> Tensor", native.mean, tiled.mean, _mean_shape),
        ("softmax(Tensor x) -> Tensor", native.softmax, tiled.softmax, _same_shape),
        (
            "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> Tensor",
            native.layer_norm,
            tiled.layer_norm,
            _same_shape,
        ),
    ):
        name = schema.partition("(")[0]
        library.define(schema)  # type: ignore[no-untyped-call]
        library.impl(name, on_cpu, "CPU")  # type: ignore[no-untyped-call]
        library.impl(name, on_gpu, "CUDA")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"slipstream_invariant::{name}", shape, lib=library)
    return library


def _linear_shape(
    x: torch.Tensor, weight_NK: torch.Tensor, _bias: torch.Tensor | None, _shards: int, is_partial: bool
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight_NK.shape[0], dtype=torch.float32 if is_partial else x.dtype)


def _grouped_shape(
    x_MK: torch.Tensor, weight_EKN: torch.Tensor, _ends: torch.Tensor, _shards: int, is_partial: bool
) -> torch.Tensor:
    return x_MK.new_empty(x_MK.shape[0], weight_EKN.shape[2], dtype=torch.float32 if is_partial else x_MK.dtype)


def _same_shape(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _mean_shape(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], 1)


_LIBRARY = _define()

linear = torch.ops.slipstream_invariant.linear
grouped = torch.ops.slipstream_invariant.grouped
each = torch.ops.slipstream_invariant.each
mean = torch.ops.slipstream_invariant.mean
softmax = torch.ops.slipstream_invariant.softmax
layer_norm = torch.ops.slipstream_invariant.layer_norm

ON_CPU = {
    torch.ops.slipstream_invariant.linear.default: native.linear,
    torch.ops.slipstream_invariant.grouped.default: native.grouped,
    torch.ops.slipstream_invariant.each.default: native.each,
    torch.ops.slipstream_invariant.mean.default: native.mean,
    torch.ops.slipstream_invariant.softmax.default: native.softmax,
    torch.ops.slipstream_invariant.layer_norm.default: native.layer_norm,
}
"""What a traced graph calls instead, without the detour over torch's dispatcher."""


def what(name: str) -> int:
    """Return the number of *name* for `each`."""
    return KINDS_OF_EACH.index(name)
