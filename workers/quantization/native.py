"""Products with quantised weights on CPUs, in C++ (`native/quantized.cpp`)."""

import ctypes
from functools import cache

import torch

from workers.native.build import NO_CONTRACTION, load_function
from workers.native.dtypes import DTYPE_CODES
from workers.quantization.weight import LaidOut


class _Quantized(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "codes", "scales", "zeros", "bias", "ids", "y")]
    _fields_ += [
        (name, ctypes.c_int64)
        for name in ("rows", "columns", "size", "repeats", "experts", "x_stride", "group", "groups", "kind", "code")
    ]
    _fields_ += [("threads", ctypes.c_int64)]


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
    """See `workers.quantization.operators`."""
    y = x.new_empty(*x.shape[:-1], columns)
    rows_MK = x.reshape(-1, x.shape[-1])
    _multiply(rows_MK, None, LaidOut(codes, scales, zeros), bias_N, y.view(-1, columns), 1, group, code)
    return y


def experts(  # noqa: PLR0917 - the operator's schema
    x_RK: torch.Tensor,
    ids_S: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias_EN: torch.Tensor | None,
    columns: int,
    group: int,
    code: int,
) -> torch.Tensor:
    """See `workers.quantization.operators`."""
    y_SN = x_RK.new_empty(len(ids_S), columns)
    _multiply(x_RK, ids_S.contiguous(), LaidOut(codes, scales, zeros), bias_EN, y_SN, len(codes), group, code)
    return y_SN


def _multiply(  # noqa: PLR0917
    x_RK: torch.Tensor,
    ids_S: torch.Tensor | None,
    weight: LaidOut,
    bias: torch.Tensor | None,
    y_SN: torch.Tensor,
    experts: int,
    group: int,
    code: int,
) -> None:
    """Write the products into *y_SN*, whose rows are as many as those of *x_RK* or a multiple."""
    if x_RK.stride(1) != 1:
        x_RK = x_RK.contiguous()
    call = _Quantized(
        x_RK.data_ptr(),
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        None if weight.zeros is None else weight.zeros.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if ids_S is None else ids_S.data_ptr(),
        y_SN.data_ptr(),
        y_SN.shape[0],
        y_SN.shape[1],
        x_RK.shape[1],
        len(y_SN) // max(1, len(x_RK)),
        experts,
        x_RK.stride(0),
        group,
        weight.scales.shape[-2],
        DTYPE_CODES[x_RK.dtype],
        code,
        torch.get_num_threads(),
    )
    kernel()(ctypes.byref(call))
