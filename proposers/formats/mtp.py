"""Heads for multi-token prediction, part of the target's own checkpoint (DeepSeek-AI 2024, arXiv 2412.19437).

Storage formats:

* DeepSeek-V3, GLM-4.5: as layers after the last, `model.layers.{n + i}.*`, with `enorm`, `hnorm`, `eh_proj`,
  `shared_head` and perhaps copies of embedding and head.
* MiMo: `model.mtp_layers.{i}.*`; the state comes before the embedding.
* Qwen3-Next: `mtp.*`; layers share one projection and one norm, and norms multiply by 1 + weight.
* `speculators`: `mtp_layers.0.*` in a checkpoint of its own, with MiMo's names; the embedding comes before the state.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from proposers.formats import speculators
from proposers.formats.shared.layout import (
    COMPUTED,
    Fitted,
    Rules,
    Shape,
    Shapes,
    TensorLayout,
    numbered,
    refuse,
    renamed,
)
from proposers.formats.shared.values import (
    Config,
    TargetDims,
    check_unquantised,
    check_vocabulary,
    integer,
    number,
    target_of,
    text_config,
)

if TYPE_CHECKING:
    import torch

FORMAT = "mtp"
Style = Literal["appended", "mimo", "qwen", "speculators"]
PREFIXES: Mapping[Style, str] = {"mimo": "model.mtp_layers.", "qwen": "mtp.", "speculators": "mtp_layers."}
NAMED_AS_MIMO: Rules = (
    (r"^(\d+)\.token_layernorm\.", r"layers.\1.embed_norm."),
    (r"^(\d+)\.hidden_layernorm\.", r"layers.\1.state_norm."),
    (r"^(\d+)\.input_proj\.", r"layers.\1.proj."),
    (r"^(\d+)\.final_layernorm\.", r"layers.\1.norm."),
    (r"^(\d+)\.", r"layers.\1.block."),
)
RULES: Mapping[Style, Rules] = {
    "appended": (
        (r"^(\d+)\.enorm\.", r"layers.\1.embed_norm."),
        (r"^(\d+)\.hnorm\.", r"layers.\1.state_norm."),
        (r"^(\d+)\.eh_proj\.", r"layers.\1.proj."),
        (r"^(\d+)\.shared_head\.norm\.", r"layers.\1.norm."),
        (r"^(\d+)\.shared_head\.head\.", r"layers.\1.head."),
        (r"^(\d+)\.embed_tokens\.", r"layers.\1.embed_tokens."),
        (r"^(\d+)\.", r"layers.\1.block."),
    ),
    "mimo": NAMED_AS_MIMO,
    "speculators": NAMED_AS_MIMO,
    "qwen": (
        (r"^pre_fc_norm_embedding\.", "shared.embed_norm."),
        (r"^pre_fc_norm_hidden\.", "shared.state_norm."),
        (r"^fc\.", "shared.proj."),
        (r"^norm\.", "shared.norm."),
        (r"^layers\.(\d+)\.", r"layers.\1.block."),
    ),
}
QWEN_ONE_PLUS = ("qwen3_next", "qwen3_5")
"""Families whose norms multiply by 1 + weight."""
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True, kw_only=True)
class MtpSpec(Fitted):
    """MTP heads.

    Attributes:
        hidden: width of the target's states.
        num_layers: number of heads; draft token k is predicted by head k modulo this.
        vocab_size: the target's.
        state_first: the projection reads state, embedding; else embedding, state.
        feeds_back_normed: the states fed back are those after the head's last norm.
        one_step: trained to draft one token only.
        blanks_first: the embedding at position 0 is zero.
        one_plus: norms multiply by 1 + weight.
        own_embedding, own_head: each layer has its own; else the target's is used.
        eps: of its norms.
        block: the tensors of one decoder layer, as `transformers` has them.
    """

    hidden: int
    num_layers: int
    vocab_size: int
    state_first: bool
    feeds_back_normed: bool
    one_step: bool
    blanks_first: bool
    one_plus: bool
    own_embedding: bool
    own_head: bool
    eps: float
    block: Shapes


def num_heads(config: Config) -> int:
    """Return the number of heads in a config, 0 for none; raises `ModelError` if it is not a number."""
    plain = _plain(config)
    default = 1 if plain.get("model_type") == "qwen3_next" else 0
    return integer(FORMAT, plain, *COUNTS, default=default)


def is_whole(config: Config) -> bool:
    """Whether *config* is of a whole model with heads, rather than of heads alone."""
    return integer(FORMAT, _plain(config), "num_hidden_layers", "n_layer", default=0) > max(1, num_heads(config))


def _plain(config: Config) -> Config:
    return text_config(speculators.flattened(config))


def prefixes(config: Config) -> tuple[str, ...]:
    """Return the name prefixes of the heads' tensors in the checkpoint of *config*'s model."""
    plain = _plain(config)
    first, count = integer(FORMAT, plain, "num_hidden_layers", "n_layer"), num_heads(config)
    return (*(f"model.layers.{first + i}." for i in range(count)), *PREFIXES.values())


def read(config: Config, target_config: Config, shapes: Shapes) -> MtpSpec:
    """Check the heads by the model's config and the shapes of its tensors, of which only those of heads are read.

    Raises:
        ModelError: there are none, or they do not fit the model; names the tensor and both shapes.
    """
    if config != target_config:  # else they were dequantised as the target's own weights
        check_unquantised(FORMAT, config)
    plain, target = speculators.flattened(config), target_of(target_config)
    check_vocabulary(FORMAT, integer(FORMAT, plain, "vocab_size"), target)
    heads = {name: shape for name, shape in shapes.items() if name.startswith(prefixes(config))}
    if not heads:
        refuse(FORMAT, f"it holds no heads: no tensor begins with {', '.join(prefixes(config))}")
    style = _style(heads)
    rules = (*_numbering(style, plain), *RULES[style])
    names = renamed(FORMAT, heads, rules)
    spec = _spec(plain, target, style, names)
    return replace(spec, stored=_layout(spec, style, names).fit(heads, rules))


def load(spec: MtpSpec, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return for each head i `layers.{i}.embed_norm.weight`, `.state_norm.weight`, `.norm.weight [H]`, `.proj.weight
    [H, 2H]`, `.block.*` with the names and shapes of `spec.block`, and perhaps `.embed_tokens.weight` and
    `.head.weight [V, H]`. Experts that are stored one by one are stacked; tensors shared by heads are the same object.
    """
    import torch  # noqa: PLC0415 - `read` needs no torch

    found = {name: tensors[stored] for name, stored in spec.stored.items()}
    shared = {name.removeprefix("shared."): found.pop(name) for name in list(found) if name.startswith("shared.")}
    for i in range(spec.num_layers):
        found |= {f"layers.{i}.{name}": tensor for name, tensor in shared.items()}
        for name, shape in spec.block.items():
            full = f"layers.{i}.block.{name}"
            if full not in found:
                experts = (_expert(full, e) for e in range(shape[0]))
                found[full] = torch.stack([torch.cat([found.pop(part) for part in parts]) for parts in experts])
    return found


def _style(heads: Shapes) -> Style:
    first = next(iter(heads))
    return next((style for style, prefix in PREFIXES.items() if first.startswith(prefix)), "appended")


def _numbering(style: Style, config: Config) -> Rules:
    """Return rules that make names begin with the number of their head."""
    if style != "appended":
        return ((f"^{re.escape(PREFIXES[style])}", ""),)
    first = integer(FORMAT, config, "num_hidden_layers")
    return tuple((rf"^model\.layers\.{first + i}\.", f"{i}.") for i in range(num_heads(config)))


def _spec(config: Config, target: TargetDims, style: Style, names: Mapping[str, str]) -> MtpSpec:
    from proposers.formats.causal import last_layer_shapes  # noqa: PLC0415 - reading the config needs no torch

    stored = numbered(names, r"layers\.(\d+)\.")
    kind = str(config.get("model_type"))
    return MtpSpec(
        stored={},
        hidden=target.hidden,
        num_layers=num_heads(config) or stored,
        vocab_size=target.vocab_size,
        state_first=style == "mimo",
        feeds_back_normed=style in {"qwen", "speculators"} or kind.startswith(("deepseek", "glm")),
        one_step=style == "mimo",
        blanks_first=style in {"appended", "mimo"},
        one_plus=style == "qwen" or (style == "speculators" and kind.startswith(QWEN_ONE_PLUS)),
        own_embedding="layers.0.embed_tokens.weight" in names,
        own_head="layers.0.head.weight" in names,
        eps=number(FORMAT, config, "rms_norm_eps", 1e-6),
        block=last_layer_shapes(FORMAT, config),
    )


def _layout(spec: MtpSpec, style: Style, names: Mapping[str, str]) -> TensorLayout:
    required: dict[str, Shape] = {}
    for i in range(spec.num_layers):
        required |= _glue("shared." if style == "qwen" else f"layers.{i}.", spec.hidden)
        for name, shape in spec.block.items():
            required |= _stored_as(f"layers.{i}.block.{name}", shape, names)
        if spec.own_embedding:
            required[f"layers.{i}.embed_tokens.weight"] = (spec.vocab_size, spec.hidden)
        if spec.own_head:
            required[f"layers.{i}.head.weight"] = (spec.vocab_size, spec.hidden)
    return TensorLayout(FORMAT, required, unused=(COMPUTED,))


def _glue(prefix: str, hidden: int) -> dict[str, Shape]:
    """Return the tensors of a layer's norms, projection, embedding and head."""
    norms = {f"{prefix}{name}.weight": (hidden,) for name in ("embed_norm", "state_norm", "norm")}
    return {**norms, f"{prefix}proj.weight": (hidden, 2 * hidden)}


def _stored_as(name: str, shape: Shape, names: Mapping[str, str]) -> dict[str, Shape]:
    """Return how a tensor of a layer is stored: experts separately, unless they are stacked already."""
    match = EXPERTS.match(name)
    if match is None or name in names:
        return {name: shape}
    count, rows, columns = shape
    parts = len(_expert(name, 0))
    return {part: (rows // parts, columns) for e in range(count) for part in _expert(name, e)}


def _expert(name: str, expert: int) -> tuple[str, ...]:
    """Return the tensors that are concatenated in expert number *expert* of the stacked tensor *name*."""
    experts, _, kind = name.rpartition(".")
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return tuple(f"{experts}.{expert}.{kind}.weight" for kind in kinds)
