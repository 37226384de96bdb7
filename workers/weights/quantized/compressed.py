"""Weights in the formats of the `compressed-tensors` library, which dequantises them, and AWQ by way of those."""

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_name
from loguru import logger

from protos.errors import ModelError
from workers.quantization.weight import Code, QuantizedWeight, scales_of_blocks
from workers.weights.quantized.stored import DequantizedWeight, StoredTensors

PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale",
         "weight_g_idx")  # fmt: skip
"""What the library's formats store for one module."""

FP8 = torch.float8_e4m3fn
CODES: Mapping[tuple[str, int], Code] = {
    ("int", 4): Code.INT4, ("int", 8): Code.INT8, ("float", 4): Code.FP4, ("float", 8): Code.FP8,
}  # fmt: skip
"""By type and number of bits."""
STRATEGIES = frozenset({"tensor", "channel", "group", "block"})

logger.disable("compressed_tensors")


@dataclass(frozen=True)
class CompressedTensors:
    """See the module. `schemes`: in the order of the checkpoint's config."""

    schemes: Seq[QuantizationScheme]

    def find(self, name: str, tensors: StoredTensors) -> DequantizedWeight | None:
        """See `QuantizedFormat`. Raises `ModelError` if no group of the config covers a quantised module."""
        module, _, key = name.rpartition(".")
        if key != "weight" or f"{module}.weight_scale" not in tensors:
            return None
        scheme = self._scheme_of(module)
        return DequantizedWeight(
            name,
            _shape(module, tensors),
            lambda: _values(module, scheme, tensors),
            lambda: _codes(_parts(module, tensors), scheme, _shape(module, tensors)),
        )

    def _scheme_of(self, module: str) -> QuantizationScheme:
        """As in the library, the module's name comes before patterns, and those before its class."""
        found = [(_precision(module, target), scheme) for scheme in self.schemes for target in scheme.targets]
        best = max((precision for precision, _ in found), default=0)
        if best:
            return next(scheme for precision, scheme in found if precision == best)
        raise ModelError(f"{module} is stored quantised, but no group of quantization_config covers it")


def _precision(module: str, target: str) -> int:
    """Return how precisely *target* names *module*, a linear layer; 0: not at all."""
    if target.startswith("re:"):
        return 2 if match_name(module, target) else 0
    return 3 if match_name(module, target) else int(target == "Linear")


def read_config(described: Mapping[str, Any]) -> CompressedTensors:
    """Return the format of a `quantization_config`. Raises `ValueError` where the library cannot read it."""
    config = QuantizationConfig.model_validate(_without_order(described))
    schemes = list(config.config_groups.values())
    for scheme in schemes:
        scheme.format = scheme.format or infer_module_format(torch.nn.Linear, scheme)
    return CompressedTensors(schemes)


def _without_order(described: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out `actorder`, of which newer versions of the library do not know all values: `weight_g_idx` says it."""
    whole = copy.deepcopy(dict(described))
    groups = whole.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            group["weights"].pop("actorder", None)
    return whole


def _shape(module: str, tensors: StoredTensors) -> tuple[int, ...]:
    if f"{module}.weight_shape" in tensors:
        return tuple(tensors.read(f"{module}.weight_shape").tolist())
    if f"{module}.weight" in tensors:
        return tensors.shape(f"{module}.weight")
    rows, packed = tensors.shape(f"{module}.weight_packed")
    return rows, packed * 2  # fp4: two a byte


def _values(module: str, scheme: QuantizationScheme, tensors: StoredTensors) -> torch.Tensor:
    return _decompressed(_parts(module, tensors), scheme, _shape(module, tensors))


def _parts(module: str, tensors: StoredTensors) -> dict[str, torch.Tensor]:
    return {key: tensors.read(f"{module}.{key}") for key in PARTS if f"{module}.{key}" in tensors}


def _codes(
    parts: dict[str, torch.Tensor], scheme: QuantizationScheme, shape: tuple[int, ...]
) -> QuantizedWeight | None:
    """Integers of 4 and 8 bits, fp8 and mxfp4, with a scale for each output, group of consecutive inputs or block."""
    weights = scheme.weights
    if weights is None or len(shape) != 2 or not parts.keys().isdisjoint(("weight_g_idx", "weight_global_scale")):
        return None
    code = CODES.get((str(getattr(weights.type, "value", weights.type)), weights.num_bits))
    strategy = str(getattr(weights.strategy, "value", weights.strategy))
    lacks_zeros = not weights.symmetric and "weight_zero_point" not in parts  # which dequantising reports
    if code is None or strategy not in STRATEGIES or lacks_zeros:
        return None
    if code is Code.FP4:  # nvfp4 has scales of fp8
        packed, scales = parts["weight_packed"], parts["weight_scale"]
        group = weights.group_size or shape[1]
        return QuantizedWeight.of_mxfp4(packed, scales, group) if scales.dtype == torch.uint8 else None
    scales_OG, group = _scales(parts["weight_scale"].float(), strategy, weights, (shape[0], shape[1]))
    codes_OI = _unpacked(parts, weights.num_bits, shape)
    if code is Code.FP8:
        return QuantizedWeight(code, codes_OI, scales_OG, None, group) if codes_OI.dtype == FP8 else None
    zeros_OG = _zero_points(parts, weights.num_bits, tuple(scales_OG.shape))
    if code is Code.INT8:
        return None if zeros_OG.any() else QuantizedWeight(code, codes_OI, scales_OG, None, group)
    return QuantizedWeight(code, (codes_OI + 8).to(torch.uint8), scales_OG, (zeros_OG + 8).to(torch.uint8), group)


def _scales(
    scale: torch.Tensor, strategy: str, weights: QuantizationArgs, shape: tuple[int, int]
) -> tuple[torch.Tensor, int]:
    """Return the scales `[O, G]`, and how many inputs share one."""
    outputs, inputs = shape
    if strategy == "block" and weights.block_structure:
        rows, columns = weights.block_structure
        return scales_of_blocks(scale, (rows, columns), shape)
    if strategy == "group" and weights.group_size:
        return scale, weights.group_size
    scale_O1 = scale.reshape(-1, 1)
    return scale_O1.expand(outputs, 1).contiguous() if strategy == "tensor" else scale_O1, inputs


def _unpacked(parts: dict[str, torch.Tensor], bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    if "weight_packed" not in parts:
        return parts["weight"]
    codes: torch.Tensor = unpack_from_int32(parts["weight_packed"], bits, torch.Size(shape))
    return codes


def _zero_points(parts: dict[str, torch.Tensor], bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return signed zero points, `[O, G]`; they are packed where weights are."""
    zeros = parts.get("weight_zero_point")
    if zeros is None:
        return torch.zeros(shape, dtype=torch.int8)
    if zeros.dtype == torch.int32:
        zeros = unpack_from_int32(zeros, bits, torch.Size(shape), packed_dim=0)
    return zeros.reshape(shape)


def _decompressed(parts: dict[str, torch.Tensor], scheme: QuantizationScheme, shape: tuple[int, ...]) -> torch.Tensor:
    """Raises `ValueError` if there are not as many scales as groups: the library would spread them."""
    rows, columns = shape
    size = scheme.weights.group_size if scheme.weights else None
    wanted = (rows, -(-columns // size)) if size and size > 0 else None
    found = tuple(parts["weight_scale"].shape)
    if wanted is not None and found != wanted:
        raise ValueError(f"its scales are {list(found)}, but groups of {size} in {list(shape)} make {list(wanted)}")
    if scheme.weights is not None and "weight_g_idx" in parts and (parts["weight_g_idx"] >= 0).all():
        return _in_any_order(parts, scheme.weights.num_bits, shape)
    if parts["weight_scale"].dtype in {torch.float16, torch.bfloat16}:  # the library would round the values to it
        parts = {**parts, "weight_scale": parts["weight_scale"].float()}
    compressor = BaseCompressor.get_value_from_registry(str(getattr(scheme.format, "value", scheme.format)))
    values: torch.Tensor = compressor.decompress(parts, scheme)["weight"]
    return values


def _in_any_order(parts: dict[str, torch.Tensor], bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Dequantise integers whose inputs belong to the groups in `weight_g_idx` (GPTQ with `actorder="group"`)."""
    scales_OG = parts["weight_scale"].float()
    zeros_OG = _zero_points(parts, bits, tuple(scales_OG.shape)).float()
    groups_I = parts["weight_g_idx"].long()
    return (_unpacked(parts, bits, shape).float() - zeros_OG[:, groups_I]) * scales_OG[:, groups_I]


class Awq:
    """AWQ weights (Lin et al. 2023) in AutoAWQ's "gemm" layout: `qweight`, `qzeros` and `scales`, 4 bits."""

    def __init__(self, group_size: int, *, zero_point: bool) -> None:
        self._converter = AutoAWQConverter(group_size=group_size, zero_point=zero_point)
        self._scheme = next(iter(self._converter.update_config(None).config_groups.values()))

    def find(self, name: str, tensors: StoredTensors) -> DequantizedWeight | None:
        """See `QuantizedFormat`."""
        module, _, key = name.rpartition(".")
        packed = f"{module}.qweight"
        if key != "weight" or packed not in tensors:
            return None
        inputs, columns = tensors.shape(packed)
        shape = columns * 8, inputs
        return DequantizedWeight(
            name,
            shape,
            lambda: _decompressed(self._parts(module, tensors), self._scheme, shape),
            lambda: _codes(self._parts(module, tensors), self._scheme, shape),
        )

    def _parts(self, module: str, tensors: StoredTensors) -> dict[str, torch.Tensor]:
        names = [f"{module}.{key}" for key in ("qweight", "qzeros", "scales")]
        converted = self._converter.process({name: tensors.read(name) for name in names if name in tensors})
        return {name.removeprefix(f"{module}."): tensor for name, tensor in converted.items()}
