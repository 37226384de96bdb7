"""How a model is split over ranks: the style of each module, from the model's own plan and a table of ours."""

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from protos.errors import ModelError
from workers.weights.families import TESTED


class Style(Enum):
    """What a rank holds of a module, and what ranks exchange when it runs."""

    COLUMNS = auto()
    """Some of the outputs, which the next ROWS module takes as they are. In attention: whole heads."""
    ROWS = auto()
    """The weights of some of the inputs; outputs are summed over ranks."""
    GATHERED = auto()
    """Some of the outputs; they are gathered, so that every rank sees all."""
    SPLIT_INPUT = auto()
    """ROWS, for inputs that every rank has whole: each takes its own."""
    QKV = auto()
    """COLUMNS of queries, keys and values that lie behind one another in one weight."""
    EXPERTS = auto()
    """Some of each expert's inner width: gates, then ups `[E, 2 I, H]`, and downs `[E, H, I]`; outputs are summed."""
    EXPERTS_PAIRED = auto()
    """The same for gates and ups that alternate, `[E, H, 2 I]`, and downs `[E, I, H]`, with biases."""
    HEADS = auto()
    """A parameter with one row a query head."""
    KV_HEADS = auto()
    """A parameter with one row a key/value head."""
    WHOLE = auto()
    """Everything; ranks do the same work."""


Plan = Mapping[str, Style]
"""Style by name of a module or parameter below the base model, with `*` for numbers; what is absent is WHOLE."""

THEIRS: Mapping[str, Style] = {
    "colwise": Style.COLUMNS,
    "rowwise": Style.ROWS,
    "colwise_gather_output": Style.GATHERED,
    "colwise_rep": Style.GATHERED,  # its older name
    "rowwise_split_input": Style.SPLIT_INPUT,
    "rowwise_rep": Style.SPLIT_INPUT,  # its older name
    "replicated_with_grad_allreduce": Style.WHOLE,
}
"""The styles of transformers' plans that are obeyed. Experts are recognised by their name."""

_SEPARATE_HEADS: Plan = {
    "layers.*.self_attn.q_proj": Style.COLUMNS,
    "layers.*.self_attn.k_proj": Style.COLUMNS,
    "layers.*.self_attn.v_proj": Style.COLUMNS,
    "layers.*.self_attn.o_proj": Style.ROWS,
}
_GATED: Plan = {
    "layers.*.mlp.gate_proj": Style.COLUMNS,
    "layers.*.mlp.up_proj": Style.COLUMNS,
    "layers.*.mlp.down_proj": Style.ROWS,
}
_GPT2_LIKE: Plan = {
    "h.*.attn.c_attn": Style.QKV,
    "h.*.attn.c_proj": Style.ROWS,
    "h.*.mlp.c_fc": Style.COLUMNS,
    "h.*.mlp.c_proj": Style.ROWS,
}

OURS: Mapping[str, Plan] = {
    # No plan at all.
    "stablelm": {**_SEPARATE_HEADS, **_GATED},
    "gpt2": _GPT2_LIKE,
    "gpt_bigcode": _GPT2_LIKE,
    "opt": {
        "decoder.layers.*.self_attn.q_proj": Style.COLUMNS,
        "decoder.layers.*.self_attn.k_proj": Style.COLUMNS,
        "decoder.layers.*.self_attn.v_proj": Style.COLUMNS,
        "decoder.layers.*.self_attn.out_proj": Style.ROWS,
        "decoder.layers.*.fc1": Style.COLUMNS,
        "decoder.layers.*.fc2": Style.ROWS,
    },
    "gpt_oss": {
        **_SEPARATE_HEADS,
        "layers.*.self_attn.sinks": Style.HEADS,
        "layers.*.mlp.experts": Style.EXPERTS_PAIRED,
    },
    # A plan that leaves something out.
    "deepseek_v3": {
        "layers.*.self_attn.q_proj": Style.COLUMNS,
        "layers.*.self_attn.q_b_proj": Style.COLUMNS,
        "layers.*.self_attn.kv_b_proj": Style.COLUMNS,
        "layers.*.self_attn.o_proj": Style.ROWS,
    },
    "cohere": {"layers.*.self_attn.q_norm": Style.HEADS, "layers.*.self_attn.k_norm": Style.KV_HEADS},
}
"""By model_type, what is added to the model's own plan."""

LOCAL_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "stablelm": ("num_heads", "num_key_value_heads"),
    "opt": ("num_heads",),
    "gpt2": ("split_size",),
    "gpt_bigcode": ("num_heads", "embed_dim"),
}
"""By model_type, the attributes of its attention that count heads, or the width of all heads, on this rank."""


def plan_for(config: Any, kind: str, name: str) -> Plan:
    """Return the plan of a model.

    Args:
        config: its `transformers` config.
        kind: its model_type.
        name: what the user called it, for messages.

    Raises:
        ModelError: it has no plan, or one that we cannot obey.
    """
    plan = {**_own_plan(config, kind, name), **OURS.get(kind, {})}
    if kind == "gpt_bigcode" and not config.multi_query:
        plan["h.*.attn.c_attn"] = Style.COLUMNS  # each head's query, key and value lie together
    if not plan:
        raise ModelError(f"{name}: model_type {kind!r} has no plan for tensor parallelism; use tensor_parallel_size=1")
    return plan


def _own_plan(config: Any, kind: str, name: str) -> dict[str, Style]:
    plan: dict[str, Style] = {}
    for pattern, style in (config.base_model_tp_plan or {}).items():
        experts = re.match(r".*\.experts(?=\.|$)", pattern)
        if experts:
            plan[experts.group()] = Style.EXPERTS
        elif style in THEIRS:
            plan[pattern] = THEIRS[style]
        elif pattern != "embed_tokens":  # which is split by its rows for every model
            raise ModelError(
                f"{name}: model_type {kind!r} asks for the unknown tensor-parallel style {style!r} at "
                f"{pattern}; use tensor_parallel_size=1"
            )
    if Style.EXPERTS in plan.values() and kind not in TESTED:
        raise ModelError(
            f"{name}: how model_type {kind!r} lays out its experts is not known, so they cannot be split; "
            "use tensor_parallel_size=1"
        )
    return plan


def style_of(plan: Plan, name: str) -> Style:
    """Return the style of the module or parameter *name*, counted from the base model."""
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), Style.WHOLE)
