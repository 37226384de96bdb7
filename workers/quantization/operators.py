"""Products with quantised weights as operators of torch.

Compiled graphs call them, as they call attention's: torch does not trace into them.
"""

import torch

from workers.quantization import native
from workers.quantization.weight import Code, LaidOut


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
        ids_S: int64, the weight of each row of the result; rows are 0 where it is of none.
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
    library.impl("linear", native.linear, "CPU")  # type: ignore[no-untyped-call]
    library.impl("experts", native.experts, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("slipstream_quantized::linear", _shape, lib=library)
    torch.library.register_fake("slipstream_quantized::experts", _experts_shape, lib=library)
    return library


_LIBRARY = _define()
