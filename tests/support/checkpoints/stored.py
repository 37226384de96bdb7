"""How published checkpoints store quantised linear layers: names, shapes and dtypes."""

import re
from collections.abc import Callable
from typing import Any

import torch

from tests.support.checkpoints.tensors import Tensors

LINEAR = re.compile(r".*layers\.\d+\..*(?:_proj|\.w[123]|_proj_with_mqa)\.weight")
"""Linear layers inside decoder layers."""


class Headers:
    """What an open safetensors file tells about its tensors, and the values of the few that are read."""

    def __init__(self, tensors: Tensors, dtypes: dict[str, str], values: dict[str, list[int]]) -> None:
        self.tensors, self._dtypes, self._values = tensors, dtypes, values

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> "Header":
        return Header(self.tensors[name], self._dtypes.get(name, "BF16"))

    def get_tensor(self, name: str) -> torch.Tensor:
        return torch.tensor(self._values[name])


class Header:
    """One tensor's."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self._shape, self._dtype = shape, dtype

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype


Packed = tuple[Tensors, dict[str, str], dict[str, list[int]]]
Pack = Callable[[str, int, int], Packed]
"""Of a module's name, outputs and inputs: the tensors stored, and dtypes and values where they matter."""


def headers(tensors: Tensors, pack: Pack | None = None, kept: str = r"$^") -> Headers:
    """Return the headers of a checkpoint whose linear layers are stored by *pack*, except those that match *kept*."""
    shapes: Tensors = {}
    dtypes: dict[str, str] = {}
    values: dict[str, list[int]] = {}
    for name, shape in tensors.items():
        if pack is None or not LINEAR.fullmatch(name) or re.search(kept, name):
            shapes[name] = shape
            continue
        outputs, inputs = shape
        more, kinds, known = pack(name.removesuffix(".weight"), outputs, inputs)
        shapes |= more
        dtypes |= kinds
        values |= known
    return Headers(shapes, dtypes, values)


def fp8_blocks(module: str, outputs: int, inputs: int) -> Packed:
    """DeepSeek-V3's: blocks of 128 x 128."""
    scales = (-(-outputs // 128), -(-inputs // 128))
    shapes: Tensors = {f"{module}.weight": (outputs, inputs), f"{module}.weight_scale_inv": scales}
    return shapes, {f"{module}.weight": "F8_E4M3", f"{module}.weight_scale_inv": "F32"}, {}


def fp8_static(module: str, outputs: int, inputs: int) -> Packed:
    """compressed-tensors' float-quantized: a scale for the weight and one for the inputs."""
    shapes: Tensors = {
        f"{module}.weight": (outputs, inputs),
        f"{module}.weight_scale": (1,),
        f"{module}.input_scale": (1,),
    }
    return shapes, {f"{module}.weight": "F8_E4M3"}, {}


def fp8_rows(module: str, outputs: int, inputs: int) -> Packed:
    """compressed-tensors' float-quantized: a scale for each output; inputs are scaled as they come."""
    shapes: Tensors = {f"{module}.weight": (outputs, inputs), f"{module}.weight_scale": (outputs, 1)}
    return shapes, {f"{module}.weight": "F8_E4M3"}, {}


def awq(module: str, outputs: int, inputs: int) -> Packed:
    """AutoAWQ's "gemm": 8 outputs an integer, groups of 128 inputs."""
    shapes: Tensors = {
        f"{module}.qweight": (inputs, outputs // 8),
        f"{module}.qzeros": (inputs // 128, outputs // 8),
        f"{module}.scales": (inputs // 128, outputs),
    }
    return shapes, {f"{module}.qweight": "I32", f"{module}.qzeros": "I32", f"{module}.scales": "F16"}, {}


def gptq(module: str, outputs: int, inputs: int) -> Packed:
    """AutoGPTQ's: 8 inputs an integer, groups of 128 inputs; every layer has a bias, of zeros if need be."""
    shapes: Tensors = {
        f"{module}.qweight": (inputs // 8, outputs),
        f"{module}.qzeros": (inputs // 128, outputs // 8),
        f"{module}.scales": (inputs // 128, outputs),
        f"{module}.g_idx": (inputs,),
        f"{module}.bias": (outputs,),
    }
    kinds = {f"{module}.qweight": "I32", f"{module}.qzeros": "I32", f"{module}.g_idx": "I32", f"{module}.scales": "F16"}
    return shapes, kinds, {f"{module}.bias": [0] * 8}


def w4a16(module: str, outputs: int, inputs: int) -> Packed:
    """compressed-tensors' pack-quantized: 8 inputs an integer, groups of 128 inputs, symmetric."""
    shapes: Tensors = {
        f"{module}.weight_packed": (outputs, inputs // 8),
        f"{module}.weight_scale": (outputs, inputs // 128),
        f"{module}.weight_shape": (2,),
    }
    return shapes, {f"{module}.weight_packed": "I32"}, {f"{module}.weight_shape": [outputs, inputs]}


def described(method: str, **more: Any) -> dict[str, Any]:
    """Return a `quantization_config`."""
    return {"quant_method": method, **more}


def compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return described(
        "compressed-tensors", format=kind, config_groups={"group_0": group}, ignore=["lm_head"],
        kv_cache_scheme=None, quantization_status="compressed",
    )  # fmt: skip
