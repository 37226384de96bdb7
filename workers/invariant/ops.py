"""Operators whose results for a row do not depend on the other rows, nor on their number.

They compute the same as torch's operators of these names, with a fixed order of operations for each number. The
implementation for CPUs is `workers.invariant.native`, that for GPUs `workers.invariant.torch`.
"""

import torch

from workers.invariant import native
from workers.invariant import torch as tiled

SHARDS = 8
"""Sums of row-parallel layers are computed in so many shards, which are then added pairwise, as a tree. Each of T ranks
computes SHARDS / T of them; T is a power of two up to SHARDS."""

GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback"})
"""Names in torch and transformers of a product of rows with the weights of their experts."""

FUNCTIONS = ("exp", "silu", "sigmoid", "tanh", "gelu_erf", "gelu_tanh", "cos", "sin", "rsqrt")
"""Functions that `each` applies to every number, in the order of the table in `native/invariant.cpp`."""


def _define() -> torch.library.Library:
    library = torch.library.Library("slipstream_invariant", "DEF")  # type: ignore[no-untyped-call]
    for schema, on_cpu, on_gpu, shape in (
        # x [..., K] times weight [N, K], plus bias [N]: [..., N]. With is_partial: fp32, not rounded.
        (
            "linear(Tensor x, Tensor weight, Tensor? bias, int shards, bool is_partial) -> Tensor",
            native.linear,
            tiled.linear,
            _linear_shape,
        ),
        # x [M, K]; rows ends[e - 1] .. ends[e] - 1 are multiplied by weight[e] of [E, K, N]: [M, N].
        (
            "grouped(Tensor x, Tensor weight, Tensor ends, int shards, bool is_partial) -> Tensor",
            native.grouped,
            tiled.grouped,
            _grouped_shape,
        ),
        ("each(Tensor x, int function) -> Tensor", native.each, tiled.each, _same_shape),
        # Over the last dimension; mean keeps it, with size 1.
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
"""The implementation that a traced graph calls directly, without torch's dispatcher."""


def function_index(name: str) -> int:
    """Return the index of the function *name*, for `each`."""
    return FUNCTIONS.index(name)
