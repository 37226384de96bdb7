"""A quantised weight, and how it is sliced."""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
import torch.nn.functional as F

BLOCK = 32
"""Inputs that are decoded together; a group has a multiple of them."""


class Code(IntEnum):
    """What a code is; the numbers are those of `native/quantized.h` and of `workers.gpu.kernels.codes`."""

    INT8 = 0
    INT4 = 1
    FP8 = 2
    FP4 = 3


PACKED = frozenset({Code.INT4, Code.FP4})
"""Codes of which kernels read two a byte."""


def scales_of_blocks(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> tuple[torch.Tensor, int]:
    """Return the scales `[N, G]` of a weight `[N, K]` with one for each block of a x b, and the inputs that share one.

    *scale* is `[ceil(N / a), ceil(K / b)]`. Each is stored once for each row of its block.
    """
    return scale.repeat_interleave(block[0], 0)[: shape[0]], min(block[1], shape[1])


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[N, K]` of N outputs and K inputs; `(code - zero) * scale` is its value.

    Attributes:
        code: what the codes are.
        codes_NK: one byte each: int8, uint8 from 0 to 15 for INT4, float8_e4m3fn, uint8 of e2m1 for FP4.
        scales_NG: float32, one for each group of `group` consecutive inputs, the last of which may be smaller. For FP4
            uint8: powers of two as e8m0, the exponent plus 127 (OCP Microscaling).
        zeros_NG: uint8, for INT4 only.
        group: K where there is one group.
    """

    code: Code
    codes_NK: torch.Tensor
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor | None
    group: int

    @staticmethod
    def of_mxfp4(packed: torch.Tensor, scales_NG: torch.Tensor, group: int) -> "QuantizedWeight":
        """Return an mxfp4 weight of *packed* numbers, `[N, ...]` uint8, two a byte: the low half is the first."""
        codes_NK = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        return QuantizedWeight(Code.FP4, codes_NK, scales_NG, None, group)

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes_NK.shape[0], self.codes_NK.shape[1]

    @property
    def form(self) -> tuple[Code, int, tuple[int, ...], tuple[int, ...]]:
        """What weights have in common that are laid out alike."""
        return self.code, self.group, self.shape, tuple(self.scales_NG.shape)

    @property
    def is_suitable(self) -> bool:
        """Whether kernels take it: blocks of inputs have one scale."""
        return self.scales_NG.shape[1] == 1 or self.group % BLOCK == 0

    @property
    def is_complete(self) -> bool:
        """Whether there are as many scales and zero points as groups."""
        wanted = (self.shape[0], -(-self.shape[1] // self.group))
        zeros = wanted if self.zeros_NG is None else tuple(self.zeros_NG.shape)
        return tuple(self.scales_NG.shape) == zeros == wanted

    @property
    def described(self) -> str:
        """Its sizes, for messages."""
        zeros = "" if self.zeros_NG is None else f", zero points {list(self.zeros_NG.shape)}"
        return f"codes {list(self.shape)}, scales {list(self.scales_NG.shape)}{zeros}, groups of {self.group}"

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Return it on *device*."""
        zeros = None if self.zeros_NG is None else self.zeros_NG.to(device)
        return replace(self, codes_NK=self.codes_NK.to(device), scales_NG=self.scales_NG.to(device), zeros_NG=zeros)

    def outputs(self, ranges: Seq[tuple[int, int]], length: int) -> "QuantizedWeight":
        """Return the outputs in *ranges*, followed by outputs of 0 up to *length*."""
        kept_N = torch.cat([torch.arange(start, stop) for start, stop in ranges])
        extra = length - len(kept_N)
        zeros = None if self.zeros_NG is None else F.pad(self.zeros_NG[kept_N], (0, 0, 0, extra))
        codes_NK = _padded_rows(self.codes_NK[kept_N], extra)
        return replace(self, codes_NK=codes_NK, scales_NG=_padded_rows(self.scales_NG[kept_N], extra), zeros_NG=zeros)

    def joined(self, other: "QuantizedWeight") -> "QuantizedWeight | None":
        """Return the outputs of both, those of *other* last; None if their codes, inputs or groups differ."""
        mine, its = self.form, other.form
        if (mine[:2], mine[2][1], mine[3][1]) != (its[:2], its[2][1], its[3][1]):
            return None
        zeros = None
        if self.zeros_NG is not None and other.zeros_NG is not None:
            zeros = torch.cat([self.zeros_NG, other.zeros_NG])
        codes_NK = torch.cat([self.codes_NK.view(torch.uint8), other.codes_NK.view(torch.uint8)])
        scales_NG = torch.cat([self.scales_NG, other.scales_NG])
        return replace(self, codes_NK=codes_NK.view(self.codes_NK.dtype), scales_NG=scales_NG, zeros_NG=zeros)

    def inputs(self, ranges: Seq[tuple[int, int]]) -> "QuantizedWeight":
        """Return the inputs in *ranges*; groups become smaller where a range begins or ends within one."""
        total = self.shape[1]
        ends = [end for pair in ranges for end in pair if end != total]
        group = math.gcd(self.group, *ends) if self.scales_NG.shape[1] > 1 else 1
        kept_K = torch.cat([torch.arange(start, stop) for start, stop in ranges])
        firsts_G = kept_K[::group] // self.group if self.scales_NG.shape[1] > 1 else torch.zeros(1, dtype=torch.int64)
        return replace(
            self,
            codes_NK=self.codes_NK[:, kept_K],
            scales_NG=self.scales_NG[:, firsts_G],
            zeros_NG=None if self.zeros_NG is None else self.zeros_NG[:, firsts_G],
            group=group if self.scales_NG.shape[1] > 1 else len(kept_K),
        )


def _padded_rows(rows_NX: torch.Tensor, extra: int) -> torch.Tensor:
    return torch.cat([rows_NX, rows_NX.new_zeros(extra, rows_NX.shape[1])]) if extra else rows_NX
