"""Loads a checkpoint, or one rank's slices of it, into a model on the meta device."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workers.weights.building import on_meta
from workers.weights.experts import quantize_experts
from workers.weights.finding import check_left_over, find_all
from workers.weights.keeping import AsValues, Keeper
from workers.weights.partition import TensorSlice
from workers.weights.quantizing import quantize_linears
from workers.weights.reader import Checkpoint, StoredWeight, are_equal, open_checkpoint, read_slice

Slices = Mapping[str, TensorSlice | None]
"""The slice of each parameter that is split, by its full name in the model; None: zeros on this rank."""


@dataclass(frozen=True)
class WeightLoader:
    """Reads *slices* of *checkpoint* as *dtype* to *device*. `name`: the model as the user named it.

    *keeper* decides which weights are held quantised.
    """

    name: str
    checkpoint: Checkpoint
    slices: Slices
    dtype: torch.dtype
    device: torch.device
    keeper: Keeper

    def load(self, model: Any) -> None:
        """Set every parameter and buffer of *model*; weights that are tied stay tied.

        Raises:
            ModelError: weights are missing, have another shape than the config states, or belong to another model.
        """
        self._untie(model)
        quantize_linears(model, self.checkpoint, self.slices, self.keeper, self.device)
        quantize_experts(model, self.checkpoint, self.slices, self.keeper, self.device)
        self._compute_buffers(model)
        kept = _kept_in_fp32(model, self.dtype)
        tensors = {full: tensor for full, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta}
        found = find_all(self.name, tensors, self.checkpoint)
        check_left_over(self.name, model, self.checkpoint.unread())
        ready: dict[int, torch.Tensor] = {}  # by the identity of the meta tensor, which tied weights share
        for full, stored in found.items():
            tensor = tensors[full]
            dtype = torch.float32 if any(part.search(full) for part in kept) else tensor.dtype
            ready[id(tensor)] = self._like(tensor, self._read(full, stored, dtype))
        for full, tensor in tensors.items():
            _set(model, full, ready[id(tensor)])

    def _untie(self, model: Any) -> None:
        """Give the head a weight of its own if the checkpoint has another than the embedding, as `from_pretrained`."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is None or head.weight is not embedding.weight:
            return
        names = {module: name for name, module in model.named_modules()}
        stored = [self.checkpoint.find(f"{names[module]}.weight") for module in (head, embedding)]
        if not are_equal(*stored):
            head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
            model.config.tie_word_embeddings = False

    def _read(self, full: str, stored: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
        if full in self.slices and self.slices[full] is None:
            return torch.zeros(stored.shape, dtype=dtype, device=self.device)
        return read_slice(stored, self.slices.get(full), dtype).to(self.device)

    @staticmethod
    def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(local, requires_grad=False) if isinstance(tensor, nn.Parameter) else local

    def _compute_buffers(self, model: Any) -> None:
        """Compute buffers that are not stored, such as rotary frequencies, with transformers' code for meta models."""
        stored = set(model.state_dict())
        owners: list[tuple[nn.Module, list[str]]] = []
        for name, module in model.named_modules():
            keys = [key for key, _ in module.named_buffers(recurse=False) if f"{name}.{key}" not in stored]
            for key in keys:
                module.register_buffer(key, torch.empty_like(module.get_buffer(key), device="cpu"), persistent=False)
            if keys:
                owners.append((module, keys))
        # The base model computes the buffers of its layers in falcon_h1.
        for module in (*(owner for owner, _ in owners), *((model.base_model,) if owners else ())):
            model._init_weights(module)
        for module, keys in owners:
            for key in keys:
                module.register_buffer(key, module.get_buffer(key).to(self.device), persistent=False)


def _kept_in_fp32(model: Any, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """Return patterns of weights that stay fp32 in a half-precision model, by the same rule as `from_pretrained`."""
    kept: set[str] = set()
    if dtype in {torch.float16, torch.bfloat16}:
        kept |= {*(model._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        kept |= {*(model._keep_in_fp32_modules or ())}
    return [re.compile(rf"(^|\.){re.escape(part)}(\.|$)") for part in sorted(kept)]


def _set(model: Any, full: str, tensor: torch.Tensor) -> None:
    owner, _, key = full.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(key, tensor)
    else:
        module.register_buffer(key, tensor)


def load_whole(  # noqa: PLR0917
    folder: Path, name: str, config: Any, dtype: torch.dtype, device: torch.device, keeper: Keeper
) -> Any:
    """Return a causal LM with all its weights, in eval mode, without gradients.

    Args:
        folder: the checkpoint.
        name: the model as the user named it.
        config: its `transformers` config.
        dtype: of the weights.
        device: of the weights.
        keeper: decides which weights are held quantised.

    Raises:
        ModelError: weights are missing, of the wrong shape or damaged.
    """
    model = on_meta(config, dtype)
    fill(model, folder, name, {}, dtype, device, keeper)
    return model.eval().requires_grad_(False)


def fill(  # noqa: PLR0917
    model: Any,
    folder: Path,
    name: str,
    slices: Slices,
    dtype: torch.dtype,
    device: torch.device,
    keeper: Keeper | None = None,
) -> None:
    """Set every weight of *model*, which is on the meta device, from the checkpoint in *folder*. See `WeightLoader`.

    Without a *keeper*, weights that are stored quantised are dequantised.
    """
    with open_checkpoint(folder, model.config, model.base_model_prefix) as checkpoint:
        WeightLoader(name, checkpoint, slices, dtype, device, keeper or AsValues()).load(model)
