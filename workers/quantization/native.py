"""Products with quantised weights on CPUs, in C++ (`native/quantized.cpp`)."""

import ctypes
from functools import cache

import torch

from workers.native.build import NO_CONTRACTION, load_function
from workers.native.dtypes import DTYPE_CODES


class _Quantized(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "codes", "scales", "zeros", "bias", "y")]
    _fields_ += [
        (name, ctypes.c_int64)
        for name in ("rows", "columns", "size", "x_stride", "group", "groups", "kind", "code", "threads")
    ]


@cache
def kernel() -> "ctypes._NamedFuncPointer":
    """Return the kernel, built if need be. Raises `KernelUnavailableError`."""
    return load_function("quantized", "slipstream_quantized", NO_CONTRACTION)


def linear(  # noqa: PLR0917 - the operator's schema
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    columns: int,
    group: int,
    code: int,
) -> torch.Tensor:
    """See `workers.quantization.linear`."""
    rows_MK = x.reshape(-1, x.shape[-1])
    if rows_MK.stride(1) != 1:
        rows_MK = rows_MK.contiguous()
    y = x.new_empty(*x.shape[:-1], columns)
    call = _Quantized(
        rows_MK.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        y.data_ptr(),
        rows_MK.shape[0],
        columns,
        rows_MK.shape[1],
        rows_MK.stride(0),
        group,
        scales.shape[1],
        DTYPE_CODES[x.dtype],
        code,
        torch.get_num_threads(),
    )
    kernel()(ctypes.byref(call))
    return y
