"""Quantised copies of tiny checkpoints, each with the plain checkpoint of the values that it stands for.

The packing of AWQ, GPTQ, mxfp4 and fp8 is written down here from the formats' descriptions; compressed-tensors'
checkpoints are made by its own library.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Returns what is stored for a weight `[O, I]`, by the end of its name after the module's, and the weight it means."""

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's "gemm" layout: nibble number i of an integer, lowest first, holds output AWQ_ORDER[i] of its eight."""


def fp8_blocks(rows: int, columns: int) -> Quantize:
    """DeepSeek's fp8: a scale for each block, the last ones cut off."""

    def quantize(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = torch.zeros(-(-weight_OI.shape[0] // rows), -(-weight_OI.shape[1] // columns))
        values, meant = torch.zeros_like(weight_OI, dtype=torch.float8_e4m3fn), torch.zeros_like(weight_OI)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                where = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale[i, j] = weight_OI[where].abs().max() / 448
                values[where] = (weight_OI[where] / scale[i, j]).to(torch.float8_e4m3fn)
                meant[where] = values[where].float() * scale[i, j]
        return {"weight": values, "weight_scale_inv": scale}, meant

    return quantize


def fp8_rows(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A scale for each row, as FBGEMM's."""
    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 448
    values = (weight_OI / scale_O1).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale_O1}, values.float() * scale_O1


def fp8_tensor(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale, and one of the inputs', which weights do not need."""
    scale = weight_OI.abs().max() / 448
    values = (weight_OI / scale).to(torch.float8_e4m3fn)
    stored = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return stored, values.float() * scale


def gptq(bits: int, group: int, *, zero_shift: int = 1, in_order: bool = True) -> Quantize:
    """GPTQ with zero points; not *in_order*: inputs belong to shuffled groups (`desc_act`)."""

    def quantize(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight_OI.shape[1]
        group_I = torch.arange(inputs) // group
        if not in_order:
            group_I = group_I[torch.randperm(inputs, generator=torch.Generator().manual_seed(0))]
        weight_OI = weight_OI.clone()
        weight_OI[::3] = weight_OI[::3].abs()  # zero points of 0, too
        values_OI, scales_OG, zeros_OG = _asymmetric(weight_OI, group_I, bits)
        meant = (values_OI - zeros_OG[:, group_I]) * scales_OG[:, group_I]
        stored = {
            "qweight": _packed(values_OI.T, bits, dim=0),
            "qzeros": _packed(zeros_OG.T, bits, dim=1) - zero_shift * int("1".zfill(bits) * (32 // bits), 2),
            "scales": scales_OG.T.contiguous(),
            "g_idx": group_I.int(),
        }
        return stored, meant

    return quantize


def awq(group: int) -> Quantize:
    """AWQ, "gemm"."""

    def quantize(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group_I = torch.arange(weight_OI.shape[1]) // group
        values_OI, scales_OG, zeros_OG = _asymmetric(weight_OI, group_I, 4)
        meant = (values_OI - zeros_OG[:, group_I]) * scales_OG[:, group_I]
        stored = {
            "qweight": _packed(_shuffled(values_OI.T), 4, dim=1),
            "qzeros": _packed(_shuffled(zeros_OG.T), 4, dim=1),
            "scales": scales_OG.T.contiguous(),
        }
        return stored, meant

    return quantize


def mxfp4(values_EIO: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Experts of gpt-oss: 32 inputs share a power of two; stored with the outputs first."""
    values_EOGW = values_EIO.transpose(1, 2).unflatten(2, (-1, 32))
    exponent_EOG = (values_EOGW.abs().amax(-1) / 6).log2().ceil().int()
    scaled = values_EOGW / exponent_EOG.float().exp2()[..., None]
    code = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    meant = (FP4[code] * scaled.sign() * exponent_EOG.float().exp2()[..., None]).flatten(2).transpose(1, 2)
    nibbles = (code | (scaled < 0).int() << 3).to(torch.uint8)
    blocks = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return {"blocks": blocks, "scales": (exponent_EOG + 127).to(torch.uint8)}, meant


def compressed(weights: dict[str, Any], *, inputs: dict[str, Any] | None = None, kind: str) -> Quantize:
    """A format of compressed-tensors, packed by its library. *weights* and *inputs* are its `QuantizationArgs`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=QuantizationArgs(**inputs) if inputs else None, format=kind
    )

    def quantize(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = args.block_structure or (1, args.group_size or weight_OI.shape[1])
        blocks = weight_OI.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale_OG, zero_OG = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        parts = {"weight": weight_OI, "weight_scale": scale_OG, "weight_zero_point": zero_OG}
        compressor = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress(parts, scheme)
        return stored, compressor.decompress(dict(stored), scheme)["weight"]

    return quantize


def quantized(source: Path, folder: Path, quantize: Quantize, config: dict[str, Any], ends: tuple[str, ...]) -> Path:
    """Write into *folder* a copy of *source* whose weights with these *ends* are quantised.

    Returns the folder of the plain checkpoint that it means, beside it.
    """
    plain = folder.with_name(f"{folder.name}-meant")
    for new in (folder, plain):
        shutil.copytree(source, new)
    stored, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(ends):
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = quantize(tensor)
        stored |= {_beside(name, part): value.contiguous() for part, value in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    whole = {name: tensor.contiguous() for name, tensor in meant.items()}
    save_file(whole, plain / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": config}))
    return plain


def _beside(name: str, part: str) -> str:
    module, _, key = name.rpartition(".")
    return f"{module}.{part}" if key == "weight" else f"{name}_{part}"


def _asymmetric(
    weight_OI: torch.Tensor, group_I: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers `[O, I]`, scales and zero points `[O, G]`."""
    top = (1 << bits) - 1
    groups = [weight_OI[:, group_I == g] for g in range(int(group_I.max()) + 1)]
    low = torch.stack([group.amin(1).clamp(max=0) for group in groups], 1)
    high = torch.stack([group.amax(1) for group in groups], 1)
    scales_OG = (high - low) / top
    zeros_OG = (-low / scales_OG).round().clamp(0, top).int()
    values_OI = (weight_OI / scales_OG[:, group_I] + zeros_OG[:, group_I]).round().clamp(0, top).int()
    return values_OI, scales_OG, zeros_OG


def _packed(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack integers into int32 along *dim*, lowest bits first."""
    rows = values.movedim(dim, -1).long().unflatten(-1, (-1, 32 // bits))
    packed = sum(rows[..., i] << bits * i for i in range(32 // bits))
    assert isinstance(packed, torch.Tensor)
    return packed.movedim(-1, dim).to(torch.int32).contiguous()


def _shuffled(values_NO: torch.Tensor) -> torch.Tensor:
    return values_NO.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)
