"""What the module of a learned proposer is built from: its checkpoint, and the target's embedding and head.

Checkpoints are safetensors, or files of `torch.save`, which are read without running code in them.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions

from protos.errors import ModelError
from workers.attention.backend import NAME
from workers.model.capture import decoder_layers
from workers.weights.building import on_meta
from workers.weights.described import read_language_config
from workers.weights.files import open_file
from workers.weights.finding import NOT_READ
from workers.weights.load import fill
from workers.weights.quantized.formats import format_of
from workers.weights.quantized.stored import QuantizedFormat, parts_of
from workers.weights.reader import open_tensors

NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
"""Files that trainers write next to the weights."""

Head = Callable[[torch.Tensor], torch.Tensor]


class TargetEnds(Protocol):
    """The target's first and last layer: its input embedding and its head."""

    def embedding(self) -> nn.Module:
        """Return the input embedding."""
        ...

    def head(self) -> Head:
        """Return the head; see `protos.draft_module.DraftWeights`."""
        ...


class LoadedEnds:
    """Those of a target that is loaded in this process."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def embedding(self) -> nn.Module:
        """See `TargetEnds`."""
        embedding: nn.Module = self._model.get_input_embeddings()
        return embedding

    def head(self) -> Head:
        """See `TargetEnds`."""
        return LogitsHead(self._model)


class CheckpointEnds:
    """Those of the target's checkpoint, of which only they are read.

    Args:
        folder: the checkpoint.
        name: of the target, as the user gave it.
        dtype: of the weights.
        device: of the weights.
    """

    def __init__(self, folder: Path, name: str, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._name, self._dtype, self._device = folder, name, dtype, device

    def embedding(self) -> nn.Module:
        """See `TargetEnds`. Raises `ModelError` if the checkpoint lacks it."""
        return LoadedEnds(self._ends).embedding()

    def head(self) -> Head:
        """See `TargetEnds`. Raises `ModelError` if the checkpoint lacks it."""
        return LoadedEnds(self._ends).head()

    @cached_property
    def _ends(self) -> Any:
        """The target without its layers."""
        model = on_meta(read_language_config(self._folder), self._dtype)
        layers = decoder_layers(model)
        del layers[:]
        fill(model, self._folder, self._name, {}, self._dtype, self._device)
        return model.eval().requires_grad_(False)


class LogitsHead:
    """The head of a causal LM, run by the LM's own code, with its caps and scales."""

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        name = next(name for name, module in model.named_modules() if module is decoder)
        self._model = _with(model, name.split("."), _Identity())

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[..., V]` for states `[..., H]`."""
        states_1NH = states.reshape(1, -1, states.shape[-1])
        logits_1NV: torch.Tensor = self._model(inputs_embeds=states_1NH, use_cache=False).logits
        return logits_1NV.float().reshape(*states.shape[:-1], -1)


class _Identity(nn.Module):
    """Replaces a decoder: returns its input."""

    def forward(self, *_ids: Any, inputs_embeds: torch.Tensor, **_others: Any) -> Any:
        return MoEModelOutputWithPastAndCrossAttentions(
            last_hidden_state=inputs_embeds
        )  # has the fields of all decoder outputs


def _with(module: nn.Module, path: list[str], replacement: nn.Module) -> nn.Module:
    """Return a copy of *module* that shares everything with it but the submodule at *path*."""
    if not path:
        return replacement
    twin = copy.copy(module)
    child = module.get_submodule(path[0])
    twin._modules = {**module._modules, path[0]: _with(child, path[1:], replacement)}
    return twin


@dataclass(frozen=True)
class DraftCheckpoint:
    """See `protos.draft_module.DraftWeights`. `source` is the folder that tensors are read from."""

    folder: Path | None
    source: Path
    config: Mapping[str, Any]
    target_config: Mapping[str, Any]
    ends: TargetEnds
    dtype: torch.dtype
    device: torch.device
    attention: str = NAME

    def tensors(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """See `DraftWeights`. Raises `ModelError` if files are damaged, or contain anything but tensors."""
        quantized = format_of(self.config.get("quantization_config")) if self.config == self.target_config else None
        found = (
            read_tensors(self.source, prefix)
            if quantized is None
            else read_values(self.source, prefix, quantized, self.dtype)
        )
        return {name.removeprefix(prefix): tensor for name, tensor in found}

    def embedding(self) -> nn.Module:
        """See `DraftWeights`."""
        return self.ends.embedding()

    def head(self) -> Head:
        """See `DraftWeights`."""
        return self.ends.head()


def read_tensors(folder: Path, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a checkpoint whose names begin with *prefix*; from safetensors, if there are any.

    Raises:
        ModelError: there are no weights, files are damaged, or contain anything but tensors.
    """
    safe = sorted(folder.glob("*.safetensors"))
    saved = [
        path for path in sorted((*folder.glob("*.bin"), *folder.glob("*.pt"))) if not path.name.startswith(NOT_WEIGHTS)
    ]
    if not safe and not saved:
        raise ModelError(f"{folder}: there are no weights (*.safetensors, *.bin, *.pt)")
    for path in safe or saved:
        with open_file(path) as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - no mapping
            yield from ((name, file.get_tensor(name)) for name in names)


def read_values(
    folder: Path, prefix: str, quantized: QuantizedFormat, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `read_tensors`, from safetensors; weights that are stored quantised are dequantised to *dtype*."""
    with open_tensors(folder) as tensors:
        names = [name for name in tensors.files if name.startswith(prefix)]
        parts: set[str] = set()
        for weight in sorted({f"{name.rpartition('.')[0]}.weight" for name in names}):
            found = quantized.find(weight, tensors)
            if found is not None:
                parts.update(parts_of(weight, tensors))
                yield weight, found.read(0, 0, found.shape[0]).to(dtype)
        for name in names:
            if name not in parts and not NOT_READ.search(name):
                yield name, tensors.read(name)
