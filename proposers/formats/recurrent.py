"""Apple's ReDrafter (Cheng et al. 2024, arXiv 2403.09919): a recurrent head over the target's last state."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proposers.formats.shared.layout import Fitted, Shape, Shapes, TensorLayout, taken
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

FORMAT = "recurrent"
TARGETS_OWN = r"^(llm|base_model)\."


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(Fitted):
    """A recurrent drafter.

    Attributes:
        width: of the target's states and embedding, and of the recurrent state.
        exit: width before the head.
        num_blocks: residual blocks before the head.
        is_rnn: the recurrence has learned matrices; else embeddings are summed.
        has_input: `input_proj` projects the two states, `2 width`, to `exit`; else they are used directly.
        vocab_size: the target's.
    """

    width: int
    exit: int
    num_blocks: int
    is_rnn: bool
    has_input: bool
    vocab_size: int


def read(config: Config, target_config: Config, shapes: Shapes) -> RecurrentSpec:
    """Check a checkpoint by its config and the shapes of its tensors.

    Raises:
        ModelError: it does not fit the target, or is inconsistent; names the tensor and both shapes.
    """
    check_unquantised(FORMAT, config)
    target = target_of(target_config)
    width = integer(FORMAT, config, "hidden_size")
    vocab_size = integer(FORMAT, config, "vocab_size")
    check_vocabulary(FORMAT, vocab_size, target)
    check_width(FORMAT, "hidden_size", width, target)
    exit_width = integer(FORMAT, config, "exit_dim", default=2 * width)
    spec = RecurrentSpec(
        stored={},
        width=width,
        exit=exit_width,
        num_blocks=integer(FORMAT, config, "num_draft_layers"),
        is_rnn=flag(FORMAT, config, "rnn", default=False),
        has_input=exit_width != 2 * width,
        vocab_size=vocab_size,
    )
    return replace(spec, stored=_layout(spec).fit(shapes, _rules(spec.num_blocks)))


def load(spec: RecurrentSpec, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return `blocks.{j}.weight [E, E]`, `blocks.{j}.bias [E]`, `head.weight [V, E]`; where there is an input, its
    `input_proj.weight [E, 2H]`, `input_proj.bias [E]`; for a learned recurrence `rnn_u.weight [H, H]`, `rnn_u.bias [H]`
    and `rnn_w.weight [H, H]`.
    """
    return taken(spec, tensors)


def _rules(num_blocks: int) -> tuple[tuple[str, str], ...]:
    return (
        (r"^(model\.)?(drafter\.)?", ""),
        (rf"^lm_head\.{num_blocks}\.", "head."),
        (r"^lm_head\.(\d+)\.linear\.", r"blocks.\1."),
    )


def _layout(spec: RecurrentSpec) -> TensorLayout:
    width, exit_width = spec.width, spec.exit
    required: dict[str, Shape] = {"head.weight": (spec.vocab_size, exit_width)}
    for j in range(spec.num_blocks):
        required |= {f"blocks.{j}.weight": (exit_width, exit_width), f"blocks.{j}.bias": (exit_width,)}
    if spec.has_input:
        required |= {"input_proj.weight": (exit_width, 2 * width), "input_proj.bias": (exit_width,)}
    if spec.is_rnn:
        required |= {"rnn_u.weight": (width, width), "rnn_u.bias": (width,), "rnn_w.weight": (width, width)}
    return TensorLayout(FORMAT, required, unused=(TARGETS_OWN,))
