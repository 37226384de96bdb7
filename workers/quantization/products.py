"""Products with quantised weights as an operator of torch.

They are computed in C++ on CPUs (`native/quantized.h`), and by Triton's kernels on GPUs (`workers.gpu.kernels`).
Compiled graphs call it, as they call attention's: torch does not trace into it.
"""

import ctypes
from functools import cache
from typing import Any

import torch

from workers.native.build import NO_CONTRACTION, load_for_graphs, load_function
from workers.native.dtypes import DTYPE_CODES
from workers.native.shims import SHIMS, Shim
from workers.quantization.layout import LaidOut
from workers.quantization.weight import Code


class _Quantized(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "codes", "scales", "zeros", "bias", "ids", "y")]
    _fields_ += [
        (name, ctypes.c_int64)
        for name in ("rows", "columns", "size", "repeats", "experts", "x_stride", "group", "groups", "kind", "code")
    ]
    _fields_ += [("threads", ctypes.c_int64)]


@cache
def kernel() -> "ctypes._NamedFuncPointer":
    """Return the kernel of CPUs, built if need be. Raises `KernelUnavailableError`."""
    return load_function("quantized", "slipstream_quantized", NO_CONTRACTION)


class LinearOnCpu:
    """The product with one weight on a CPU: what no call changes is filled in once.

    Args:
        weight: is kept as long as this.
        bias_N: as *weight*, or None.
        columns: N.
        group: inputs that share a scale.
        code: what the codes are.
    """

    def __init__(self, weight: LaidOut, bias_N: torch.Tensor | None, columns: int, group: int, code: Code) -> None:
        self._kept = weight, bias_N
        self._columns, self._kernel = columns, kernel()
        self._shared = _Quantized(
            codes=weight.codes.data_ptr(),
            scales=weight.scales.data_ptr(),
            zeros=None if weight.zeros is None else weight.zeros.data_ptr(),
            bias=None if bias_N is None else bias_N.data_ptr(),
            columns=columns,
            repeats=1,
            experts=1,
            group=group,
            groups=weight.scales.size(-2),
            code=int(code),
        )

    def __deepcopy__(self, _memo: object) -> None:
        """Return None: the copy of a layer has copies of the weights."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the products `[..., N]` of `[..., K]`, plus the bias, in the dtype of *x*."""
        x_MK = x.reshape(-1, x.shape[-1])
        if x_MK.stride(1) != 1:
            x_MK = x_MK.contiguous()
        num_rows, size = x_MK.shape
        y_MN = x_MK.new_empty(num_rows, self._columns)
        call = _Quantized.from_buffer_copy(self._shared)  # other threads may call, too
        call.x, call.y = x_MK.data_ptr(), y_MN.data_ptr()
        call.rows, call.size, call.x_stride = num_rows, size, x_MK.stride(0)
        call.kind, call.threads = DTYPE_CODES[x.dtype], torch.get_num_threads()
        self._kernel(ctypes.byref(call))
        return y_MN.view(*x.shape[:-1], self._columns)


def linear(  # noqa: PLR0917
    x: torch.Tensor, weight: LaidOut, bias_N: torch.Tensor | None, columns: int, group: int, code: Code
) -> torch.Tensor:
    """Return the products `[..., N]` of `[..., K]` with a weight of *columns* N, plus the bias, in the dtype of *x*."""
    x_MK = x.reshape(-1, x.shape[-1])
    found_MN = _product(x_MK, None, weight.codes, weight.scales, weight.zeros, bias_N, columns, group, int(code))
    return found_MN.view(*x.shape[:-1], columns)


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
    return _product(
        x_RK, ids_S.long().contiguous(), weight.codes, weight.scales, weight.zeros, bias_EN, columns, group, int(code)
    )


def runs_on_cpu(x: torch.Tensor) -> bool:
    """Whether a product of *x* runs now, on a CPU. Torch's dispatcher is left out then: there are many in a step."""
    return type(x) is torch.Tensor and x.is_cpu and not torch.compiler.is_compiling()


def _product(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Call the operator, or the kernel alone."""
    if runs_on_cpu(x):
        return _on_cpu(x, *arguments)
    found: torch.Tensor = torch.ops.slipstream_quantized.product(x, *arguments)
    return found


def _on_cpu(  # noqa: PLR0917 - the operator's schema
    x_RK: torch.Tensor,
    ids_S: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    columns: int,
    group: int,
    code: int,
) -> torch.Tensor:
    """See `experts`. Without *ids_S* there is one weight, and a row of the result for each of *x_RK*."""
    if x_RK.stride(1) != 1:
        x_RK = x_RK.contiguous()
    num_inputs, size = x_RK.shape
    num_rows, num_experts = num_inputs, 1
    if ids_S is not None:
        num_rows, num_experts = len(ids_S), len(codes)
    y_SN = x_RK.new_empty(num_rows, columns)
    call = _Quantized(
        x_RK.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if ids_S is None else ids_S.data_ptr(),
        y_SN.data_ptr(),
        num_rows,
        columns,
        size,
        num_rows // max(1, num_inputs),
        num_experts,
        x_RK.stride(0),
        group,
        scales.size(-2),
        DTYPE_CODES[x_RK.dtype],
        code,
        torch.get_num_threads(),
    )
    kernel()(ctypes.byref(call))
    return y_SN


def on_gpu(*arguments: Any) -> torch.Tensor:
    """See `experts`. What *arguments* are is stated by the operator's schema."""
    from workers.gpu.kernels.quantized import product  # noqa: PLC0415 - triton may be missing

    return product(*arguments)


def _shape(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    _codes: torch.Tensor,
    _scales: torch.Tensor,
    _zeros: torch.Tensor | None,
    _bias: torch.Tensor | None,
    columns: int,
    _group: int,
    _code: int,
) -> torch.Tensor:
    return x.new_empty((x if ids is None else ids).shape[0], columns)


def _define() -> torch.library.Library:
    library = torch.library.Library("slipstream_quantized", "DEF")  # type: ignore[no-untyped-call]
    library.define(  # type: ignore[no-untyped-call]
        "product(Tensor x, Tensor? ids, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, int columns, "
        "int group, int code) -> Tensor"
    )
    library.impl("product", _on_cpu, "CPU")  # type: ignore[no-untyped-call]
    library.impl("product", on_gpu, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake("slipstream_quantized::product", _shape, lib=library)
    return library


_LIBRARY = _define()
SHIM = Shim(
    torch.ops.slipstream_quantized.product.default,
    "AOTITorchError aoti_torch_cpu_product(AtenTensorHandle x, const AtenTensorHandle* ids, AtenTensorHandle codes, "
    "AtenTensorHandle scales, const AtenTensorHandle* zeros, const AtenTensorHandle* bias, int64_t columns, "
    "int64_t group, int64_t code, AtenTensorHandle* y)",
    lambda: load_for_graphs("quantized_shim", NO_CONTRACTION),
)
SHIMS.append(SHIM)
