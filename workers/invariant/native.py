"""The operators of `workers.invariant.ops` on CPUs, in C++ (`native/invariant.cpp`)."""

import ctypes
from functools import cache

import torch

from protos.errors import ConfigError
from workers.native.build import NO_CONTRACTION, load_function
from workers.native.dtypes import DTYPE_CODES

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class _Linear(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in ("x", "w", "bias", "y", "ends")]
    _fields_ += [
        (name, _INTEGER)
        for name in (
            "rows",
            "columns",
            "size",
            "x_stride",
            "w_stride",
            "w_expert",
            "experts",
            "shards",
            "kind",
            "is_partial",
            "threads",
        )
    ]


class _Each(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in ("x", "y")]
    _fields_ += [(name, _INTEGER) for name in ("count", "kind", "function", "threads")]


class _Rowwise(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in ("x", "weight", "bias", "y")]
    _fields_ += [(name, _INTEGER) for name in ("rows", "size", "kind", "threads")]
    _fields_ += [("epsilon", ctypes.c_float)]


@cache
def _function(name: str) -> "ctypes._NamedFuncPointer":
    return load_function("invariant", f"slipstream_{name}", NO_CONTRACTION)


def check_available() -> None:
    """Build the operators. Raises `KernelUnavailableError` if that fails."""
    for name in ("linear", "each", "mean", "softmax", "layer_norm"):
        _function(name)


def linear(
    x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, shards: int, is_partial: bool
) -> torch.Tensor:
    """See `workers.invariant.ops`."""
    x, weight_NK = _rows(x), _rows(weight_NK)
    columns, size = weight_NK.shape
    y = x.new_empty(*x.shape[:-1], columns, dtype=torch.float32 if is_partial else x.dtype)
    bias = None if bias_N is None else bias_N.contiguous()
    call = _Linear(
        x.data_ptr(),
        weight_NK.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        None,
        y.numel() // max(1, columns),
        columns,
        size,
        x.stride(-2) if x.ndim > 1 else size,
        weight_NK.stride(0),
        0,
        1,
        shards,
        _kind(x),
        is_partial,
        torch.get_num_threads(),
    )
    _function("linear")(ctypes.byref(call))
    return y


def grouped(
    x_MK: torch.Tensor, weight_EKN: torch.Tensor, ends_E: torch.Tensor, shards: int, is_partial: bool
) -> torch.Tensor:
    """See `workers.invariant.ops`."""
    x_MK, weight_ENK, ends_E = x_MK.contiguous(), weight_EKN.mT, ends_E.to(torch.int32).contiguous()
    if weight_ENK.stride(2) != 1:
        weight_ENK = weight_ENK.contiguous()
    experts, columns, size = weight_ENK.shape
    y_MN = x_MK.new_empty(x_MK.shape[0], columns, dtype=torch.float32 if is_partial else x_MK.dtype)
    call = _Linear(
        x_MK.data_ptr(),
        weight_ENK.data_ptr(),
        None,
        y_MN.data_ptr(),
        ends_E.data_ptr(),
        x_MK.shape[0],
        columns,
        size,
        size,
        weight_ENK.stride(1),
        weight_ENK.stride(0),
        experts,
        shards,
        _kind(x_MK),
        is_partial,
        torch.get_num_threads(),
    )
    _function("linear")(ctypes.byref(call))
    return y_MN


def each(x: torch.Tensor, function: int) -> torch.Tensor:
    """See `workers.invariant.ops`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    call = _Each(x.data_ptr(), y.data_ptr(), x.numel(), _kind(x), function, torch.get_num_threads())
    _function("each")(ctypes.byref(call))
    return y


def mean(x: torch.Tensor) -> torch.Tensor:
    """See `workers.invariant.ops`."""
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], 1)
    _run("mean", _rowwise(x, y))
    return y


def softmax(x: torch.Tensor) -> torch.Tensor:
    """See `workers.invariant.ops`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _run("softmax", _rowwise(x, y))
    return y


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """See `workers.invariant.ops`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    call = _rowwise(x, y)
    kept = [None if part is None else part.contiguous() for part in (weight, bias)]
    call.weight, call.bias = (None if part is None else part.data_ptr() for part in kept)
    call.epsilon = epsilon
    _run("layer_norm", call)
    return y


def _kind(x: torch.Tensor) -> int:
    if x.dtype not in DTYPE_CODES:
        raise ConfigError(f"batch_invariant: the model computes in {x.dtype}, of float32, bfloat16 and float16")
    return DTYPE_CODES[x.dtype]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return *x* with a contiguous last dimension; a matrix may keep its row stride."""
    if x.ndim == 2 and (x.stride(1) == 1 or x.shape[1] == 1) and x.stride(0) >= x.shape[1]:
        return x
    return x.contiguous()


def _rowwise(x: torch.Tensor, y: torch.Tensor) -> _Rowwise:
    size = x.shape[-1]
    return _Rowwise(
        x.data_ptr(), None, None, y.data_ptr(), x.numel() // max(1, size), size, _kind(x), torch.get_num_threads()
    )


def _run(name: str, call: _Rowwise) -> None:
    _function(name)(ctypes.byref(call))
