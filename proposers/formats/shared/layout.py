"""The tensors that a checkpoint must have, with names and shapes, and the errors if it does not."""

import re
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from protos.errors import ModelError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Rules = Seq[tuple[str, str]]
"""Patterns of stored names and their canonical replacements, applied one after another."""

QUANTISED = re.compile(
    r"\.(weight_packed|weight_scale|weight_scale_inv|weight_zero_point|weight_shape|qweight|qzeros|"
    r"scales|g_idx|input_scale|absmax|quant_map)$"
)
COMPUTED = r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
"""Buffers in old checkpoints that are computed from the configuration."""


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of one checkpoint, by canonical name.

    Attributes:
        format: its name in messages.
        required: tensors that must exist.
        optional: tensors that may exist.
        unused: patterns of other tensors in public checkpoints, which are ignored.
    """

    format: str
    required: Shapes
    optional: Shapes = field(default_factory=dict)
    unused: Collection[str] = (COMPUTED,)

    def fit(self, shapes: Shapes, rules: Rules = ()) -> dict[str, str]:
        """Return canonical -> stored name of every tensor that is used.

        Raises:
            ModelError: one is missing, unexpected, repeated, or of another shape; names it and both shapes.
        """
        found = renamed(self.format, shapes, rules)
        unused = re.compile("|".join(self.unused) or "$^")
        used = {name: stored for name, stored in found.items() if name in self.wanted or not unused.search(name)}
        for name, stored in used.items():
            self._check(name, stored, shapes[stored])
        for name, shape in self.required.items():
            if name not in used:
                refuse(self.format, f"{name} should be {list(shape)}, but the checkpoint has no such tensor")
        return used

    @property
    def wanted(self) -> Shapes:
        """All tensors, required and optional."""
        return {**self.optional, **self.required}

    def _check(self, name: str, stored: str, shape: Shape) -> None:
        wanted = self.wanted.get(name)
        if wanted is None:
            refuse(self.format, f"{stored} {list(shape)} has no place in this format: it should have no such tensor")
        if shape != wanted:
            refuse(self.format, f"{stored} should be {list(wanted)}, but the checkpoint has {list(shape)}")


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Base of the specs that readers return: `stored` maps each tensor's canonical name to the checkpoint's own."""

    stored: Mapping[str, str]


def renamed(title: str, shapes: Iterable[str], rules: Rules) -> dict[str, str]:
    """Return canonical -> stored name; raises `ModelError` if two tensors have one name, or one is quantised."""
    found: dict[str, str] = {}
    for stored in shapes:
        if QUANTISED.search(stored):
            refuse(title, f"{stored} is part of quantised weights, which are not supported; use the unquantised ones")
        name = stored
        for pattern, instead in rules:
            name = re.sub(pattern, instead, name)
        if name in found:
            refuse(title, f"{found[name]} and {stored} are both {name}; it should be there once")
        found[name] = stored
    return found


def taken(spec: Fitted, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return the tensors of *spec* under their canonical names."""
    return {name: tensors[stored] for name, stored in spec.stored.items()}


def refuse(title: str, what: str) -> NoReturn:
    """Raise the `ModelError` of a checkpoint for *title*."""
    raise ModelError(f"the {title} checkpoint cannot be used: {what}")


def numbered(names: Iterable[str], pattern: str) -> int:
    """Return one more than the highest number that the first group of *pattern* finds in *names*, 0 without any."""
    matches = (re.match(pattern, name) for name in names)
    return max((int(match[1]) + 1 for match in matches if match), default=0)
