"""Products of activations with quantised weights, which are read as they are stored (`workers.quantization.layout`).

One kernel has two forms. For few rows, a tile has 16, and the inputs are divided into spans where the outputs alone
have too few tiles to read memory at full speed; a second kernel adds what the spans found. For many, a tile has 64.
Weights are the left matrix: they go from memory to registers, where they are decoded, and from there into tensor cores.
Within one form, the sum of a row has the same terms in the same order whatever the other rows are.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from workers.gpu.kernels.quantized_kernels import ALONE, GROUPED, ONE, join_kernel, product_kernel
from workers.gpu.kernels.shape import power_of_two
from workers.quantization.layout import TILE
from workers.quantization.weight import BLOCK, PACKED

FEW = 16
"""Most rows, for each expert where there are some, of the form for few rows."""
MANY = 64
"""Rows of a tile of the other form."""
STEP = 128
"""Inputs of one step: their codes are in flight together."""
PROGRAMS = 264
"""Spans are added until there are so many programs: two for each processor of an H100."""
SPAN = 4 * STEP
"""Inputs of the shortest span."""
WARPS = 4
"""Warps of a program: what multiplies 64 outputs."""
JOINED = 512
"""Outputs of one program that adds spans."""


@dataclass(frozen=True)
class Form:
    """How a product is divided, by sizes that the host knows.

    Attributes:
        rows: of the result.
        experts: weights, of which each row has one; 0: all rows have the same.
        columns, inputs: N and K of a weight.
        group: inputs that share a scale.
        groups: number of them.
    """

    rows: int
    experts: int
    columns: int
    inputs: int
    group: int
    groups: int

    @property
    def is_few(self) -> bool:
        """Whether it is the form for few rows."""
        return self.rows <= FEW * max(1, self.experts)

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return FEW if self.is_few else MANY

    @property
    def part(self) -> int:
        """Inputs that are multiplied at once: they have one scale."""
        return STEP if self.groups == 1 else min(STEP, self.group & -self.group)

    @property
    def span(self) -> int:
        """Inputs of a span, which depend on the form and the sizes of the weight alone."""
        if not self.is_few or self.experts:
            return self.inputs
        spans = max(1, min(PROGRAMS // -(-self.columns // TILE), self.inputs // SPAN))
        return -(-self.inputs // (spans * STEP)) * STEP

    @property
    def spans(self) -> int:
        """Number of spans."""
        return -(-self.inputs // self.span)

    def constants(self, code: int, kind: int, *, has_zeros: bool, has_bias: bool) -> dict[str, Any]:
        """Return what the kernel is compiled for."""
        return {
            "CODE": code,
            "BYTES": BLOCK // 2 if code in PACKED else BLOCK,
            "KIND": kind,
            "N": TILE,
            "M": self.tile,
            "PART": self.part,
            "PARTS": STEP // self.part,
            "HAS_GROUPS": self.groups > 1,
            "HAS_ZEROS": has_zeros,
            "HAS_BIAS": has_bias and self.spans == 1,
            "IS_EVEN": self.inputs % STEP == 0,
            "STAGES": 4 if self.is_few else 3,
        }


class Routes(NamedTuple):
    """Which rows each expert has. See `quantized_kernels.rows_of_tile`."""

    kind: int
    tiles: int
    ids_S: torch.Tensor | None = None
    order_S: torch.Tensor | None = None
    bounds_E1: torch.Tensor | None = None
    tiles_E: torch.Tensor | None = None


def routes_of(ids_S: torch.Tensor | None, form: Form) -> Routes:
    """Return the tiles of rows. Their number follows from sizes; those that are left over do nothing."""
    if ids_S is None:
        return Routes(ONE.value, -(-form.rows // form.tile))
    if form.rows <= form.experts:  # most experts have one row at most
        return Routes(ALONE.value, form.rows, ids_S)
    sorted_S, order_S = ids_S.sort(stable=True)
    bounds_E1 = torch.searchsorted(sorted_S, torch.arange(form.experts + 1, device=ids_S.device), out_int32=True)
    tiles_E = ((bounds_E1.diff() + (form.tile - 1)) // form.tile).cumsum(0, dtype=torch.int32)
    most = min(form.experts, form.rows) + form.rows // form.tile
    return Routes(GROUPED.value, most, ids_S, order_S, bounds_E1, tiles_E)


def product(
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
    """See `workers.quantization.products`: one weight, or one for each row by *ids_S*."""
    x_RK = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
    rows = len(x_RK if ids_S is None else ids_S)
    form = Form(rows, 0 if ids_S is None else len(codes), columns, x_RK.shape[1], group, scales.shape[-2])
    # Rows of no expert are 0.
    output_RN = x_RK.new_empty(rows, columns) if ids_S is None else x_RK.new_zeros(rows, columns)
    if rows == 0:
        return output_RN
    spans = form.spans
    sums = output_RN if spans == 1 else x_RK.new_empty(spans, rows, columns, dtype=torch.float32)
    kind, tiles, *routes = routes_of(None if ids_S is None else ids_S.long().contiguous(), form)
    product_kernel[(-(-columns // TILE), tiles, spans)](
        x_RK,
        codes,
        _as_words(scales),
        _as_words(zeros),
        bias,
        sums,
        *routes,
        rows,
        form.inputs,
        columns,
        scales.shape[-1],
        x_RK.stride(0),
        form.group,
        form.groups,
        form.span,
        rows // len(x_RK),
        max(1, form.experts),
        **form.constants(code, kind, has_zeros=zeros is not None, has_bias=bias is not None),
        num_warps=WARPS,
    )
    if spans > 1:
        block = min(JOINED, power_of_two(columns))
        join_kernel[(-(-columns // block), rows)](
            sums, bias, output_RN, rows, columns, SPANS=spans, HAS_BIAS=bias is not None, BLOCK=block
        )
    return output_RN


def _as_words(numbers: torch.Tensor | None) -> torch.Tensor | None:
    """Return bytes as words of 32 bits, without a copy; other numbers as they are."""
    return numbers.view(torch.int32) if numbers is not None and numbers.dtype == torch.uint8 else numbers
