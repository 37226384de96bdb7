"""Kernels' entry points for tests whose tensors are on the CPU: computed on a GPU, which results come back from."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* with its tensors, also those in mappings, named tuples and dataclasses, moved to a GPU.

    Strides stay. What it writes into its arguments is copied back.
    """

    @functools.wraps(function)
    def moved(*arguments: Any) -> Any:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        found = function(*(_mapped(each, lambda tensor: _sent(tensor, pairs)) for each in arguments))
        for here, there in pairs:
            if 0 not in here.stride():  # numbers that several places share are not written
                here.copy_(there)
        return _mapped(found, lambda tensor: tensor.cpu())

    return moved


def _mapped(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, tuple):
        parts = [_mapped(part, move) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Mapping):
        return {name: _mapped(part, move) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _mapped(getattr(value, name), move) for name in names})
    return value


def _sent(tensor: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
    there = whole.to("cuda").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    pairs.append((tensor, there))
    return there
