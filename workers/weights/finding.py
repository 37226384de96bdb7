"""Where each tensor of a model is in its checkpoint: none may be missing, and none of a decoder layer left over."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from protos.errors import ModelError
from workers.weights.wrapped import PREFIXES

if TYPE_CHECKING:
    from workers.weights.reader import Checkpoint, StoredWeight

NOT_READ = re.compile(
    r"rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|\.(?:attn|attention|self_attn)\.(?:bias|masked_bias)|(?:^|[._])(?:k|v|q|kv|prob_output|kv_cache)_scale"
    r"|input_scale|activation_scale|input_zero_point|output_scale|\.(?:k|v|q)_zero_point"
)
"""In decoder layers: rotary frequencies and causal masks, which are computed; scales of activations and KV cache."""

QUANTIZED = re.compile(r"\.(?:qweight|weight_packed|weight_scale|weight_scale_inv)$")
"""Parts of quantised weights."""

LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(?P<layer>\d+)$")
"""The path of a decoder layer."""


def find_all(name: str, tensors: Mapping[str, torch.Tensor], checkpoint: "Checkpoint") -> dict[str, "StoredWeight"]:
    """Return the stored weight of each tensor of a model; of tensors that are tied, of the first that is stored.

    Args:
        name: the model as the user named it.
        tensors: on the meta device, by their full names; tied weights are the same tensor.
        checkpoint: is only asked for names and shapes.

    Raises:
        ModelError: weights are missing, or have another shape than the config states.
    """
    found: dict[int, tuple[str, StoredWeight]] = {}
    for full, tensor in tensors.items():
        stored = None if id(tensor) in found else checkpoint.find(full)
        if stored is None:
            continue
        if tuple(tensor.shape) != stored.shape:
            raise ModelError(
                f"{name}: {full} should be {list(tensor.shape)}, but the checkpoint has {list(stored.shape)}"
            )
        found[id(tensor)] = full, stored
    missing = [full for full, tensor in tensors.items() if id(tensor) not in found]
    if missing:
        raise missing_error(name, missing, checkpoint.unread())
    return dict(found.values())


def missing_error(name: str, missing: Collection[str], others: Iterable[str]) -> ModelError:
    """Return the error for weights that are *missing*; *others* are the tensors that were not read."""
    reason = f"{len(missing)} weights are missing from the checkpoint, the first is {min(missing)}"
    return ModelError(f"{name}: {reason}{_hint(others)}")


def _hint(names: Iterable[str]) -> str:
    """Return what to add to an error if the tensors *names* are parts of quantised weights."""
    if not any(map(QUANTIZED.search, names)):
        return ""
    return "; it has quantised weights, but no quantization_config in its config.json that says how to read them"


def check_left_over(name: str, model: Any, names: Iterable[str]) -> None:
    """Raise an error if tensors that were not read belong to a decoder layer of *model*: it would compute otherwise.

    Vision towers, heads for multi-token prediction, and what else is beside the decoder layers may stay unread.

    Args:
        name: the model as the user named it.
        model: the model itself; its ends alone, without layers, leave all of them over.
        names: of the tensors in the checkpoint that were not read.

    Raises:
        ModelError: names the first.
    """
    own = {int(match["layer"]) for path, _ in model.named_modules() if (match := LAYER.search(path)) is not None}
    layers = _layers_of(model)
    ignored = [NOT_READ, *(re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ())]
    left = sorted(
        stored
        for stored in names
        if (match := layers.match(stored)) is not None
        and int(match["layer"]) in own
        and not any(pattern.search(stored) for pattern in ignored)
    )
    if left:
        raise ModelError(
            f"{name}: the checkpoint has {len(left)} tensors in its decoder layers that model_type "
            f"{model.config.model_type!r} does not have, the first is {left[0]}{_hint(left)}"
        )


def _layers_of(model: Any) -> re.Pattern[str]:
    """Return a pattern of names of tensors in decoder layers, as checkpoints have them."""
    base = model.base_model_prefix + "."
    prefixes = ("", base, "backbone.", f"language_model.{base}", *PREFIXES)
    return re.compile(rf"(?:{'|'.join(map(re.escape, prefixes))})(?:layers|h)\.(?P<layer>\d+)\.")
