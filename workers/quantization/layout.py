"""How quantised weights are laid out in memory: for CPUs (`native/codes.h`), and for GPUs (`workers.gpu.kernels`)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from workers.quantization.weight import BLOCK, PACKED, Code, QuantizedWeight

PANEL = 4
"""Outputs whose codes alternate on CPUs, block by block."""
TILE = 64
"""Outputs of one program on GPUs."""


class LaidOut(NamedTuple):
    """A weight as the kernels of its device read it, padded with outputs and inputs of 0.

    Blocks of 32 inputs stay together: 32 bytes, or 16 with INT4 and FP4, the first 16 codes in the low halves.

    Attributes:
        codes: uint8 `[N / 4, K / 32, 4, bytes]` on CPUs, which read panels of 4 outputs; `[K / 32, N, bytes]` on GPUs,
            with N a multiple of 64: a block of any number of outputs is one piece of memory.
        scales: float32, uint8 for FP4, `[N / 4, G, 4]` on CPUs and `[G, N]` on GPUs.
        zeros: uint8 of the same shape; None but for INT4.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


def lay_out(weight: QuantizedWeight) -> LaidOut:
    """Return *weight* as the kernels of the device that it is on read it."""
    return for_cpus(weight) if weight.codes_NK.device.type == "cpu" else for_gpus(weight)


def for_cpus(weight: QuantizedWeight) -> LaidOut:
    """Return *weight* in panels of outputs."""
    more = -weight.shape[0] % PANEL
    codes_NBI = _blocks(weight, more)
    codes = codes_NBI.view(-1, PANEL, *codes_NBI.shape[1:]).transpose(1, 2).contiguous()
    zeros = None if weight.zeros_NG is None else _panels(weight.zeros_NG, more)
    return LaidOut(codes, _panels(_scales(weight), more), zeros)


def for_gpus(weight: QuantizedWeight) -> LaidOut:
    """Return *weight* with what all outputs have in one place together."""
    more = -weight.shape[0] % TILE
    codes = _blocks(weight, more).transpose(0, 1).clone(memory_format=torch.contiguous_format)
    zeros = None if weight.zeros_NG is None else _columns(weight.zeros_NG, more)
    return LaidOut(codes, _columns(_scales(weight), more), zeros)


def _scales(weight: QuantizedWeight) -> torch.Tensor:
    return weight.scales_NG if weight.code is Code.FP4 else weight.scales_NG.float()


def _blocks(weight: QuantizedWeight, more: int) -> torch.Tensor:
    """Return the codes in blocks of inputs, packed, with *more* outputs."""
    codes_NK = F.pad(weight.codes_NK.view(torch.uint8), (0, -weight.shape[1] % BLOCK, 0, more))
    codes_NBI = codes_NK.view(len(codes_NK), -1, BLOCK)
    if weight.code not in PACKED:
        return codes_NBI
    low, high = codes_NBI.view(*codes_NBI.shape[:2], 2, -1).unbind(2)
    return low | high << 4


def _panels(numbers_NG: torch.Tensor, more: int) -> torch.Tensor:
    padded_NG = F.pad(numbers_NG, (0, 0, 0, more))
    return padded_NG.view(-1, PANEL, padded_NG.shape[1]).transpose(1, 2).contiguous()


def _columns(numbers_NG: torch.Tensor, more: int) -> torch.Tensor:
    """Return `[G, N]`; a copy, since `contiguous` keeps the strides of a single group: such bytes are no words."""
    return F.pad(numbers_NG, (0, 0, 0, more)).T.clone(memory_format=torch.contiguous_format)


def rows_of(codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the values `[..., K]`, padding included, of the outputs *ids* of a laid-out INT8 weight with one group."""
    if codes.device.type == "cpu":
        panel, row = ids // PANEL, ids % PANEL
        codes_XBI, scales_X = codes.transpose(1, 2)[panel, row], scales[panel, 0, row]
    else:
        codes_XBI, scales_X = codes[:, ids].movedim(0, -2), scales[0, ids]
    return codes_XBI.contiguous().view(torch.int8).flatten(-2).float() * scales_X.unsqueeze(-1)
