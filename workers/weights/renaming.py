"""How names in checkpoints differ from those of the model's parameters, as `transformers` converts them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Parts = Mapping[str, tuple[str, ...]]

USUAL_PARTS: Parts = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
HEADS: Mapping[str, tuple[str, str]] = {"gpt_neox": ("embed_out.", "lm_head.")}
"""By model_type, the head's name in checkpoints and in the model, which `transformers` renames elsewhere."""


@dataclass(frozen=True)
class Renaming:
    """The names of one checkpoint.

    Attributes:
        stored: the name in the checkpoint of each of the model's names that differs.
        parts: by the name of an experts' weight, the weights of one expert whose rows are joined in it.
    """

    stored: Mapping[str, str]
    parts: Parts


def read_renaming(model_type: str, names: Iterable[str]) -> Renaming:
    """Return the renaming for a checkpoint with the tensors *names*, whose parts may be those of quantised weights."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: PLC0415 - slow to import

    transforms = get_checkpoint_conversion_mapping(model_type) or []
    renaming = [one for one in transforms if not getattr(one, "operations", None)]
    joining = [one for one in transforms if getattr(one, "operations", None)]
    weights = {f"{name.rpartition('.')[0]}.weight" for name in names}
    pairs = ((_renamed(name, renaming, HEADS.get(model_type)), name) for name in weights.union(names))
    return Renaming({name: stored for name, stored in pairs if name != stored}, _parts(joining))


def _renamed(name: str, renaming: Iterable[Any], head: tuple[str, str] | None) -> str:
    for one in renaming:
        name, _ = one.rename_source_key(name)
    return name if head is None or not name.startswith(head[0]) else head[1] + name.removeprefix(head[0])


def _parts(joining: Iterable[Any]) -> Parts:
    """Return the parts of experts that are stored one by one, such as `.experts.*.w1.weight`."""
    found: dict[str, tuple[str, ...]] = {}
    for one in joining:
        parts = [source.rpartition(".*.")[2].removesuffix(".weight") for source in one.source_patterns]
        if all(".experts.*." in source.replace("\\", "") for source in one.source_patterns):
            found[one.target_patterns[0].rpartition(".")[2]] = tuple(parts)
    return found or USUAL_PARTS
