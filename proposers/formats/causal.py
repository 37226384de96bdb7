"""The tensors of a `transformers` causal model or of one of its layers, from the config alone."""

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from proposers.formats.shared.layout import Shapes, refuse
from proposers.formats.shared.values import Config

STANDS_FOR = {"mimo": "qwen2"}
"""Model types missing in `transformers`, and the types that have the same layers."""


def model_config(title: str, config: Config, **instead: Any) -> Any:
    """Return the `transformers` config (which has no useful static type) of *config*, with the changes *instead*.

    Raises:
        ModelError: there is no such model, or the config does not fit it.
    """
    given = {key: value for key, value in {**config, **instead}.items() if key not in ("model_type", "auto_map")}
    kind = str(config.get("model_type", ""))
    try:
        return AutoConfig.for_model(STANDS_FOR.get(kind, kind), **given)
    except (KeyError, ValueError, TypeError, StrictDataclassError) as error:
        refuse(title, f"its config describes no model that can be built: {' '.join(str(error).split())[:200]}")


def model_shapes(title: str, config: Config) -> tuple[Shapes, Shapes]:
    """Return the tensors of the model of *config*: those that must be stored, and those tied to them.

    Raises:
        ModelError: there is no such model.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(title, config))
    first: dict[int, str] = {}
    stored: dict[str, tuple[int, ...]] = {}
    tied: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_new = first.setdefault(id(tensor), name) == name
        (stored if is_new else tied)[name] = tuple(tensor.shape)
    return stored, tied


def last_layer_shapes(title: str, config: Config) -> Shapes:
    """Return the tensors of the last decoder layer of *config*'s model; no more layers than necessary are made.

    Raises:
        ModelError: there is no such model, or its layers are not known.
    """
    few = int(config.get("first_k_dense_replace") or 0) + 1
    instead: dict[str, Any] = {"num_hidden_layers": few, "layer_types": ["full_attention"] * few}
    if config.get("mlp_layer_types"):  # as newer transformers saves what `first_k_dense_replace` said
        instead["mlp_layer_types"] = [config["mlp_layer_types"][-1]] * few
    short = model_config(title, config, **instead)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(short).base_model
    return {name: tuple(tensor.shape) for name, tensor in base.layers[-1].state_dict().items()}
