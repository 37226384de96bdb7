"""IBM's MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): `ibm-ai-platform/*-accelerator` and similar ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proposers.formats.shared.layout import Fitted, Shape, Shapes, TensorLayout, refuse, taken
from proposers.formats.shared.values import (
    Config,
    check_unquantised,
    check_vocabulary,
    check_width,
    flag,
    integer,
    target_of,
)

if TYPE_CHECKING:
    import torch

FORMAT = "mlp_speculator"
RULES = ((r"^(model\.)?speculator\.", ""),)


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorSpec(Fitted):
    """An MLP speculator.

    Attributes:
        width: of the target's states (`emb_dim`).
        inner: width between its layers.
        num_heads: tokens it was trained to predict (`n_predict`); the weights of the sums depend on it.
        vocab_size: the target's.
        tied: heads share their weights, all but the first projection.
        scale_input: the target's states are normalised first.
    """

    width: int
    inner: int
    num_heads: int
    vocab_size: int
    tied: bool
    scale_input: bool


def read(config: Config, target_config: Config, shapes: Shapes) -> MLPSpeculatorSpec:
    """Check a checkpoint by its config and the shapes of its tensors.

    Raises:
        ModelError: it does not fit the target, or is inconsistent; names the tensor and both shapes.
    """
    check_unquantised(FORMAT, config)
    target = target_of(target_config)
    vocab_size = integer(FORMAT, config, "vocab_size")
    width = integer(FORMAT, config, "emb_dim")
    inner = integer(FORMAT, config, "inner_dim", default=0) or width
    num_heads = integer(FORMAT, config, "n_predict")
    tied = flag(FORMAT, config, "tie_weights", default=False)
    check_vocabulary(FORMAT, vocab_size, target)
    check_width(FORMAT, "emb_dim", width, target)
    if num_heads < 1:
        refuse(FORMAT, "n_predict in its config must be at least 1, got 0")
    wanted = _wanted(vocab_size, width, inner, num_heads)
    required = {name: shape for name, shape in wanted.items() if not tied or name == shared(name)}
    stored = TensorLayout(FORMAT, required, wanted).fit(shapes, RULES)
    return MLPSpeculatorSpec(
        stored=stored,
        width=width,
        inner=inner,
        num_heads=num_heads,
        vocab_size=vocab_size,
        tied=tied,
        scale_input=flag(FORMAT, config, "scale_input", default=False),
    )


def load(spec: MLPSpeculatorSpec, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return, for every head i: `emb.{i}.weight [V, inner]`, `proj.{i}.weight [inner, width if i == 0 else inner]`,
    `ln.{i}.weight`, `ln.{i}.bias [inner]` and `head.{i}.weight [V, inner]`.

    Tied weights are the same tensors under several names.

    Raises:
        ModelError: weights that are tied are stored several times, and differ.
    """
    found = taken(spec, tensors)
    if not spec.tied:
        return found
    for name in [name for name in found if name != shared(name)]:
        if not found[name].equal(found[shared(name)]):
            refuse(FORMAT, f"{spec.stored[name]} differs from {spec.stored[shared(name)]}, but tie_weights is true")
    return {name: found[shared(name)] for name in _wanted(spec.vocab_size, spec.width, spec.inner, spec.num_heads)}


def _wanted(vocab_size: int, width: int, inner: int, num_heads: int) -> dict[str, Shape]:
    wanted: dict[str, Shape] = {}
    for i in range(num_heads):
        wanted[f"emb.{i}.weight"] = (vocab_size, inner)
        wanted[f"proj.{i}.weight"] = (inner, inner if i else width)
        wanted[f"ln.{i}.weight"] = wanted[f"ln.{i}.bias"] = (inner,)
        wanted[f"head.{i}.weight"] = (vocab_size, inner)
    return wanted


def shared(name: str) -> str:
    """Return the name under which tied checkpoints store *name*: head 0's, or head 1's for later projections."""
    part, index, leaf = name.split(".")
    return f"{part}.{min(int(index), 1 if part == 'proj' else 0)}.{leaf}"
