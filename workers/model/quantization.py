"""How the weights of a model are held: as its checkpoint stores them, quantised while they are loaded, or as values."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from protos.config.engine import ModelConfig
from protos.errors import ConfigError, ModelError
from workers.native.build import KernelUnavailableError
from workers.quantization import products
from workers.quantization.experts import QuantizedExperts
from workers.quantization.linear import QuantizedLinear
from workers.quantization.schemes import SCHEMES
from workers.quantization.weight import QuantizedWeight
from workers.weights.keeping import AsStored, AsValues, Keeper, OnTheFly
from workers.weights.quantized.formats import format_of


def check_quantization(config: ModelConfig, described: Mapping[str, Any], device: torch.device) -> None:
    """Raise an error if the weights cannot be read, or not be quantised as *config* asks.

    Args:
        config: the model.
        described: its `config.json`.
        device: of the weights.

    Raises:
        ModelError: the format is not supported, or is another one than *config* states.
        ConfigError: quantised products do not run here.
    """
    wanted, stored = config.quantization, described.get("quantization_config")
    try:
        format_of(stored)
    except ModelError as error:
        raise ModelError(f"{config.model} cannot be served: {error}") from error
    method = str(stored["quant_method"]) if stored else None
    if wanted is None or wanted == method:
        return
    if method is not None:
        raise ModelError(f"quantization is {wanted!r}, but {config.model} is stored quantised ({method}); leave it out")
    if config.batch_invariant:
        raise ConfigError(
            f"quantization is {wanted!r}, but batch_invariant computes with weights in the model's dtype; "
            "leave one of the two out"
        )
    scheme_of(wanted, config.model, device)


def scheme_of(wanted: str, name: str, device: torch.device) -> Callable[[torch.Tensor], QuantizedWeight]:
    """Return the function that quantises a weight as *wanted*.

    Raises:
        ModelError: it is the method of a published format, and *name* is not stored so.
        ConfigError: quantised products do not run on *device*.
    """
    if wanted not in SCHEMES:
        raise ModelError(
            f"quantization is {wanted!r}, but {name} is not stored so; {', '.join(SCHEMES)} quantise it while loading"
        )
    reason = unavailable(device)
    if reason is not None:
        raise ConfigError(f"quantization is {wanted!r}, but {reason}; leave it out")
    return SCHEMES[wanted]


def unavailable(device: torch.device) -> str | None:
    """Return why layers cannot compute with quantised weights on *device*; None if they can."""
    if device.type == "cuda":
        return None if find_spec("triton") else "products with quantised weights need triton on a GPU"
    try:
        products.kernel()
    except KernelUnavailableError as error:
        return f"products with quantised weights need a C++ compiler: {error}"
    return None


def keeper_of(config: ModelConfig, described: Mapping[str, Any], device: torch.device) -> Keeper:
    """Return what decides how each weight is held. The configuration was checked."""
    if described.get("quantization_config"):
        return AsValues() if config.batch_invariant or unavailable(device) else AsStored()
    return AsValues() if config.quantization is None else OnTheFly(SCHEMES[config.quantization])


def quantization_notes(
    config: ModelConfig, described: Mapping[str, Any], model: nn.Module, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """Return a line for the user that says which weights are quantised in memory."""
    stored = described.get("quantization_config")
    if not stored and config.quantization is None:
        return []
    counted = _counted(model)
    if not stored:
        return [f"weights are quantised to {config.quantization}: {counted}"]
    reason = "batch_invariant" if config.batch_invariant else unavailable(device)
    return [
        f"weights are stored quantised ({stored['quant_method']}): {counted} stay so, the others are computed with as "
        f"{dtype}" + (f" ({reason})" if reason else "")
    ]


def _counted(model: nn.Module) -> str:
    """Return how many layers of each kind are quantised."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | QuantizedLinear)]
    kept = sum(isinstance(layer, QuantizedLinear) for layer in layers)
    counted = f"{kept} of {len(layers)} linear layers"
    whole = len({name.rpartition(".")[0] for name, weight in model.named_parameters() if _is_of_experts(name, weight)})
    quantised = sum(isinstance(layer, QuantizedExperts) for layer in model.modules())
    if whole + quantised == 0:
        return counted
    return f"{counted} and the experts of {quantised} of {whole + quantised} layers"


def _is_of_experts(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim == 3 and name.split(".")[-2] == "experts"
