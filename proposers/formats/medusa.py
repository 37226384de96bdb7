"""Medusa heads (Cai et al. 2024, arXiv 2401.10774), in the formats of four tools.

* `FasterDecoding/medusa-*` (and the heads of TGI): `{head}.{block}.linear.*`, and the output layer numbered after
  the last block; Medusa-2 checkpoints contain them under `medusa_head.`, with the whole target.
* TGI's second version: blocks only; every head uses the target's own head.
* vLLM's conversion: `blocks.{head}.layers.{block}.*`, `lm_heads.{head}.weight` or one `lm_head.weight`, and perhaps a
  `token_map` of the ids of a truncated vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from proposers.formats.shared.layout import Fitted, Shape, Shapes, TensorLayout, numbered, refuse, renamed, taken
from proposers.formats.shared.values import Config, check_unquantised, check_vocabulary, check_width, integer, target_of

if TYPE_CHECKING:
    import torch

FORMAT = "medusa"
_HEADS = r"^(model\.)?(medusa_heads?\.)?"
RULES = (
    (_HEADS + r"(?=\d|blocks\.|lm_heads?\.|token_map$)", ""),
    (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.\2."),
    (r"^(\d+)\.\d+\.weight$", r"heads.\1.weight"),
    (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"blocks.\1.\2."),
    (r"^lm_heads\.", "heads."),
    (r"^lm_head\.", "head."),
)
TARGETS_OWN = (r"^(model|transformer)\.", r"^head\.weight$")

Output = Literal["own", "shared", "target"]


@dataclass(frozen=True, kw_only=True)
class MedusaSpec(Fitted):
    """Medusa heads.

    Attributes:
        width: of the target's states.
        num_heads: head i (from 0) predicts the token i + 2 positions after the state's own.
        num_blocks: residual blocks of a head.
        has_bias: blocks have biases.
        output: the output layer: each head's own, a shared one, or the target's head.
        vocab_size: the target's.
        head_size: rows of own or shared outputs; fewer than `vocab_size` if the vocabulary is truncated.
    """

    width: int
    num_heads: int
    num_blocks: int
    has_bias: bool
    output: Output
    vocab_size: int
    head_size: int


def read(config: Config, target_config: Config, shapes: Shapes) -> MedusaSpec:
    """Check a checkpoint by its config and the shapes of its tensors.

    Published configs often state fewer heads than there are: the tensors decide.

    Raises:
        ModelError: it does not fit the target, or is inconsistent; names the tensor and both shapes.
    """
    check_unquantised(FORMAT, config)
    target = target_of(target_config)
    check_vocabulary(FORMAT, integer(FORMAT, config, "vocab_size", default=target.vocab_size), target)
    check_width(FORMAT, "hidden_size", integer(FORMAT, config, "hidden_size", default=target.hidden), target)
    names = renamed(FORMAT, shapes, RULES)
    num_blocks = integer(FORMAT, config, "medusa_num_layers", "num_hidden_layers", default=1)
    num_heads = max(
        integer(FORMAT, config, "medusa_num_heads", "num_heads", default=1), numbered(names, r"blocks\.(\d+)\.")
    )
    head_size = integer(FORMAT, config, "truncated_vocab_size", default=target.vocab_size)
    spec = MedusaSpec(
        stored={},
        width=target.hidden,
        num_heads=num_heads,
        num_blocks=num_blocks,
        has_bias=any(name.startswith("blocks.") and name.endswith(".bias") for name in names),
        output=_output(names),
        vocab_size=target.vocab_size,
        head_size=head_size,
    )
    unused = TARGETS_OWN if _is_whole_model(names) else ()
    return replace(spec, stored=_layout(spec, unused).fit(shapes, RULES))


def load(spec: MedusaSpec, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return `blocks.{head}.{block}.weight [H, H]` and `.bias [H]`, and by `output`: `heads.{head}.weight [Vh, H]`,
    `head.weight [Vh, H]` or nothing; with a truncated vocabulary also `target_ids`, the target's id of each row, int64.

    Raises:
        ModelError: ids in the token map are outside of the vocabulary, or repeated.
    """
    found = taken(spec, tensors)
    if "token_map" in found:
        from proposers.formats.shared.vocabulary import checked_ids  # noqa: PLC0415 - only here is torch needed

        found["target_ids"] = checked_ids(FORMAT, "token_map", found.pop("token_map"), spec.vocab_size)
    return found


def _output(names: Mapping[str, str]) -> Output:
    if any(name.startswith("heads.") for name in names):
        return "own"
    return "shared" if "head.weight" in names and not _is_whole_model(names) else "target"


def _is_whole_model(names: Mapping[str, str]) -> bool:
    """Whether the checkpoint contains the target as well, so that `lm_head` is the target's."""
    return any(stored.startswith("medusa_head.") for stored in names.values())


def _layout(spec: MedusaSpec, unused: tuple[str, ...]) -> TensorLayout:
    width, heads = spec.width, range(spec.num_heads)
    required: dict[str, Shape] = {}
    for i in heads:
        for block in range(spec.num_blocks):
            required[f"blocks.{i}.{block}.weight"] = (width, width)
            if spec.has_bias:
                required[f"blocks.{i}.{block}.bias"] = (width,)
    if spec.output == "own":
        required.update({f"heads.{i}.weight": (spec.head_size, width) for i in heads})
    if spec.output == "shared":
        required["head.weight"] = (spec.head_size, width)
    if spec.head_size < spec.vocab_size:
        required["token_map"] = (spec.head_size,)
    elif spec.head_size > spec.vocab_size:
        refuse(FORMAT, f"truncated_vocab_size is {spec.head_size}, but the target's vocabulary has {spec.vocab_size}")
    return TensorLayout(FORMAT, required, unused=unused)
