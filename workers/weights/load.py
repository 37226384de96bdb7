"""Fills a model that was made on the meta device with one rank's part of a checkpoint."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from protos.errors import ModelError
from workers.weights.partition import Cut
from workers.weights.reader import Checkpoint, Stored, read_cut

Cuts = Mapping[str, Cut | None]
"""Cut of each parameter that is not whole, by the model's full name; None: zeros on this rank."""


@dataclass(frozen=True)
class Filler:
    """Reads what *cuts* say out of *checkpoint*, as *dtype*, to *device*. `name` is what the user called the model."""

    name: str
    checkpoint: Checkpoint
    cuts: Cuts
    dtype: torch.dtype
    device: torch.device

    def fill(self, model: Any) -> None:
        """Give every parameter and buffer of *model* its values here; weights that are tied stay tied.

        Raises:
            ModelError: weights are missing, or of another shape than the config says.
        """
        self._compute_buffers(model)
        kept = _kept_in_fp32(model, self.dtype)
        tensors = model.state_dict(keep_vars=True)
        ready: dict[int, torch.Tensor] = {}  # by the identity of the meta tensor, which tied weights share
        for full, tensor in tensors.items():
            stored = None if id(tensor) in ready else self.checkpoint.find(full)
            if stored is not None:
                dtype = torch.float32 if any(part.search(full) for part in kept) else tensor.dtype
                ready[id(tensor)] = self._as(tensor, self._read(full, tensor, stored, dtype))
        missing = sorted(full for full, tensor in tensors.items() if id(tensor) not in ready)
        if missing:
            raise ModelError(
                f"{self.name}: {len(missing)} weights are missing from the checkpoint, the first is {missing[0]}"
            )
        for full, tensor in tensors.items():
            _set(model, full, ready[id(tensor)])

    def _read(self, full: str, tensor: torch.Tensor, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
        if tuple(tensor.shape) != stored.shape:
            raise ModelError(
                f"{self.name}: {full} should be {list(tensor.shape)}, but the checkpoint has {list(stored.shape)}"
            )
        if full in self.cuts and self.cuts[full] is None:
            return torch.zeros(stored.shape, dtype=dtype, device=self.device)
        return read_cut(stored, self.cuts.get(full), dtype).to(self.device)

    @staticmethod
    def _as(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(local, requires_grad=False) if isinstance(tensor, nn.Parameter) else local

    def _compute_buffers(self, model: Any) -> None:
        """Compute what is not stored, rotary frequencies above all, with transformers' own code for meta models."""
        stored = set(model.state_dict())
        for name, module in model.named_modules():
            keys = [key for key, _ in module.named_buffers(recurse=False) if f"{name}.{key}" not in stored]
            for key in keys:
                module.register_buffer(key, torch.empty_like(module.get_buffer(key), device="cpu"), persistent=False)
            if keys:
                model._init_weights(module)
            for key in keys:
                module.register_buffer(key, module.get_buffer(key).to(self.device), persistent=False)


def _kept_in_fp32(model: Any, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """Return patterns of weights that stay fp32 in a half-precision model, as `from_pretrained` decides it."""
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
