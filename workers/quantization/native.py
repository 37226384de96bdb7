"""Products with quantised weights on CPUs, in C++ (`native/quantized.cpp`), as operators of torch.

Compiled graphs call them, as they call attention's: torch does not trace into them.
"""

import ctypes
from functools import cache

import torch

from workers.native.build import NO_CONTRACTION, load_function
from workers.native.dtypes import DTYPE_CODES
from workers.quantization.weight import Code, LaidOut


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


def linear(  # noqa: PLR0917
    x: torch.Tensor, weight: LaidOut, bias_N: torch.Tensor | None, columns: int, group: int, code: Code
) -> torch.Tensor:
    """Return the products `[..., N]` of `[..., K]` with a weight of *columns* N, plus the bias, in the dtype of *x*."""
    found: torch.Tensor = torch.ops.slipstream_quantized.linear(
        x, weight.codes, weight.scales, weight.zeros, bias_N, columns, group, int(code)
    )
    return found


def experts(  # noqa: PLR0917
    x_RK: torch.Tensor,
    ids_S: torch.Tensor,
    weight: LaidOut,
    bias_EN: torch.Tensor | None,
    columns: int,
    group: int,
    code: Code,
) -> torch.Tensor:
    """Return products with one of several weights for each row, `[S, N]`.

    Args:
        x_RK: each row is used for S / R consecutive rows of the result.
        ids_S: the weight of each row of the result; rows are 0 where it is of none.
        weight: E weights, stacked.
        bias_EN: in the dtype of *x_RK*, or None.
        columns: N.
        group: inputs that share a scale.
        code: what the codes are.
    """
    found: torch.Tensor = torch.ops.slipstream_quantized.experts(
        x_RK, ids_S, weight.codes, weight.scales, weight.zeros, bias_EN, columns, group, int(code)
    )
    return found


def _linear(  # noqa: PLR0917 - the operator's schema
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    columns: int,
    group: int,
    code: int,
) -> torch.Tensor:
    """See `linear`."""
    y = x.new_empty(*x.shape[:-1], columns)
    rows_MK = x.reshape(-1, x.shape[-1])
    _multiply(rows_MK, None, LaidOut(codes, scales, zeros), bias_N, y.view(-1, columns), 1, group, code)
    return y


def _experts(  # noqa: PLR0917 - the operator's schema
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
    """See `experts`."""
    y_SN = x_RK.new_empty(len(ids_S), columns)
    _multiply(x_RK, ids_S.long().contiguous(), LaidOut(codes, scales, zeros), bias_EN, y_SN, len(codes), group, code)
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


def _shape(
    x: torch.Tensor,
    _codes: torch.Tensor,
    _scales: torch.Tensor,
    _zeros: torch.Tensor | None,
    _bias: torch.Tensor | None,
    columns: int,
    _group: int,
    _code: int,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], columns)


def _experts_shape(
    x: torch.Tensor,
    ids: torch.Tensor,
    _codes: torch.Tensor,
    _scales: torch.Tensor,
    _zeros: torch.Tensor | None,
    _bias: torch.Tensor | None,
    columns: int,
    _group: int,
    _code: int,
) -> torch.Tensor:
    return x.new_empty(ids.shape[0], columns)


WEIGHT = "Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, int columns, int group, int code"


def _define() -> torch.library.Library:
    library = torch.library.Library("slipstream_quantized", "DEF")  # type: ignore[no-untyped-call]
    library.define(f"linear(Tensor x, {WEIGHT}) -> Tensor")  # type: ignore[no-untyped-call]
    library.define(f"experts(Tensor x, Tensor ids, {WEIGHT}) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("linear", _linear, "CPU")  # type: ignore[no-untyped-call]
    library.impl("experts", _experts, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("slipstream_quantized::linear", _shape, lib=library)
    torch.library.register_fake("slipstream_quantized::experts", _experts_shape, lib=library)
    return library


_LIBRARY = _define()
