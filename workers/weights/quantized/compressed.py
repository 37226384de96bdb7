"""Weights in the formats of the `compressed-tensors` library, which dequantises them, and AWQ by way of those."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_name
from loguru import logger

from protos.errors import ModelError
from workers.weights.quantized.stored import DequantizedWeight, StoredTensors

PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale",
         "weight_g_idx")  # fmt: skip
"""What the library's formats store for one module."""

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
        return DequantizedWeight(name, _shape(module, tensors), lambda: _values(module, scheme, tensors))

    def _scheme_of(self, module: str) -> QuantizationScheme:
        for scheme in self.schemes:
            if "Linear" in scheme.targets or any(match_name(module, target) for target in scheme.targets):
                return scheme
        raise ModelError(f"{module} is stored quantised, but no group of quantization_config covers it")


def read_config(described: Mapping[str, Any]) -> CompressedTensors:
    """Return the format of a `quantization_config`. Raises `ValueError` where the library cannot read it."""
    config = QuantizationConfig.model_validate(dict(described))
    schemes = list(config.config_groups.values())
    for scheme in schemes:
        scheme.format = scheme.format or infer_module_format(torch.nn.Linear, scheme)
    return CompressedTensors(schemes)


def _shape(module: str, tensors: StoredTensors) -> tuple[int, ...]:
    if f"{module}.weight_shape" in tensors:
        return tuple(tensors.read(f"{module}.weight_shape").tolist())
    if f"{module}.weight" in tensors:
        return tensors.shape(f"{module}.weight")
    rows, packed = tensors.shape(f"{module}.weight_packed")
    return rows, packed * 2  # fp4: two a byte


def _values(module: str, scheme: QuantizationScheme, tensors: StoredTensors) -> torch.Tensor:
    parts = {key: tensors.read(f"{module}.{key}") for key in PARTS if f"{module}.{key}" in tensors}
    return _decompressed(parts, scheme, _shape(module, tensors))


def _decompressed(parts: dict[str, torch.Tensor], scheme: QuantizationScheme, shape: tuple[int, ...]) -> torch.Tensor:
    """Raises `ValueError` if there are not as many scales as groups: the library would spread them."""
    rows, columns = shape
    size = scheme.weights.group_size if scheme.weights else None
    wanted = (rows, -(-columns // size)) if size and size > 0 else None
    found = tuple(parts["weight_scale"].shape)
    if wanted is not None and found != wanted:
        raise ValueError(f"its scales are {list(found)}, but groups of {size} in {list(shape)} make {list(wanted)}")
    compressor = BaseCompressor.get_value_from_registry(str(getattr(scheme.format, "value", scheme.format)))
    values: torch.Tensor = compressor.decompress(parts, scheme)["weight"]
    return values


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
        return DequantizedWeight(name, (columns * 8, inputs), lambda: self._values(module, tensors))

    def _values(self, module: str, tensors: StoredTensors) -> torch.Tensor:
        names = [f"{module}.{key}" for key in ("qweight", "qzeros", "scales")]
        converted = self._converter.process({name: tensors.read(name) for name in names if name in tensors})
        parts = {name.removeprefix(f"{module}."): tensor for name, tensor in converted.items()}
        outputs = tensors.shape(names[0])[1] * 8
        return _decompressed(parts, self._scheme, (outputs, tensors.shape(names[0])[0]))
