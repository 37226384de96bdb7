"""Which format the weights of a checkpoint have, by the `quantization_config` of its `config.json`.

Weights are dequantised when they are loaded. Activations are not quantised, also where the config asks for it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from protos.errors import ModelError
from workers.weights.quantized.fp8 import Fp8
from workers.weights.quantized.gptq import Gptq
from workers.weights.quantized.stored import QuantizedFormat

Described = Mapping[str, Any]
OLD_AUTO_GPTQ = ("auto_round:gptq", "auto_round:gptq:exllamav2", "auto_round:auto_gptq:exllamav2")
"""What AutoRound called the packing `auto_round:auto_gptq` with kernels in 2024."""
UNQUANTIZED_BITS = 16
"""Layers of so many bits are not quantised."""


def format_of(described: Described | None) -> QuantizedFormat | None:
    """Return the format of a `quantization_config`; None if there is none.

    Raises:
        ModelError: it is not supported, or damaged; names the method and the value.
    """
    if not described:
        return None
    method = str(described.get("quant_method") or ("mlx" if _is_mlx(described) else "unknown"))
    reader = READERS.get(method)
    if reader is None:
        raise ModelError(f"its weights are quantised ({method}); supported are {', '.join(sorted(READERS))}")
    try:
        return reader(described)
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
        raise ModelError(f"its quantization_config ({method}) cannot be read: {reason}") from error


def _is_mlx(described: Described) -> bool:
    """Whether it is of a checkpoint for MLX, which names no method."""
    return {"group_size", "bits"} <= described.keys()


def _fp8(described: Described) -> QuantizedFormat:
    block = described.get("weight_block_size")
    if block is None:
        return Fp8(None)
    rows, columns = (int(size) for size in block)
    return Fp8((rows, columns))


def _modelopt(described: Described) -> QuantizedFormat:
    algorithm = described.get("quant_algo") or described.get("quantization", {}).get("quant_algo")
    if algorithm != "FP8":
        raise ValueError(f"quant_algo is {algorithm!r}, but only 'FP8' is supported")
    return Fp8(None)


def _gptq(described: Described) -> QuantizedFormat:
    bits = int(described["bits"])
    if bits not in {2, 4, 8}:
        raise ValueError(f"bits is {bits}, but only 2, 4 and 8 are supported")
    layout = described.get("checkpoint_format") or "gptq"
    if layout not in {"gptq", "gptq_v2"}:
        raise ValueError(f"checkpoint_format is {layout!r}, but only 'gptq' and 'gptq_v2' are supported")
    for name, own in (described.get("dynamic") or {}).items():
        _check_same(f"dynamic[{name!r}]", own or {}, described)
    return Gptq(bits, int(described["group_size"]), zero_shift=0 if layout == "gptq_v2" else 1)


def _check_same(where: str, own: Described, described: Described) -> None:
    """Raise `ValueError` if some layers are quantised in another way; a few that are not quantised at all are fine."""
    others = {key: own[key] for key in ("bits", "group_size") if own.get(key, described[key]) != described[key]}
    if others and int(own.get("bits", described["bits"])) < UNQUANTIZED_BITS:
        raise ValueError(f"{where} has {others}, but all quantised layers must have the same")


def _awq(described: Described) -> QuantizedFormat:
    from workers.weights.quantized.compressed import Awq  # noqa: PLC0415 - slow to import

    bits, version = int(described.get("bits", 4)), str(described.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ValueError(f"bits is {bits} and version {version!r}, but only 4 and 'gemm' are supported")
    return Awq(int(described.get("group_size", 128)), zero_point=bool(described.get("zero_point", True)))


def _auto_round(described: Described) -> QuantizedFormat:
    """AutoRound's own checkpoints are packed as GPTQ's or AWQ's are."""
    packing = str(described.get("packing_format") or described.get("backend") or "auto_round:auto_gptq")
    for name, own in (described.get("extra_config") or {}).items():
        _check_same(f"extra_config[{name!r}]", own, described)
    if packing in {"auto_round:auto_gptq", *OLD_AUTO_GPTQ}:
        return _gptq(described)
    if packing in {"auto_round", "auto_round:gptqmodel"}:
        return _gptq({**described, "checkpoint_format": "gptq_v2"})
    if packing == "auto_round:auto_awq":
        return _awq({**described, "zero_point": not described["sym"]})
    raise ValueError(f"packing_format {packing!r} is not supported")


def _mxfp4(_: Described) -> QuantizedFormat:
    from workers.weights.quantized.mxfp4 import Mxfp4  # noqa: PLC0415 - slow to import

    return Mxfp4()


def _compressed_tensors(described: Described) -> QuantizedFormat:
    from workers.weights.quantized.compressed import read_config  # noqa: PLC0415 - slow to import

    sparsity = described.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ValueError(f"the sparse format {sparsity['format']!r} is not supported")
    if described.get("transform_config"):
        raise ValueError("transform_config (rotated weights) is not supported")
    return read_config(described)


READERS: Mapping[str, Callable[[Described], QuantizedFormat]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
}
"""By `quant_method`."""
