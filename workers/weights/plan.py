"""How a model is split over ranks: the style of each module, from transformers' plan for it and a table here."""

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from protos.errors import ModelError
from workers.weights.families import TESTED


class Style(Enum):
    """The part of a module that a rank holds, and the collective that follows it."""

    COLUMNS = auto()
    """Some of the outputs, which are inputs of the next ROWS module. In attention: whole heads."""
    ROWS = auto()
    """The weights of some of the inputs; outputs are summed over ranks."""
    GATHERED = auto()
    """Some of the outputs; they are gathered on all ranks."""
    SPLIT_INPUT = auto()
    """ROWS, for inputs that every rank computes whole: each takes its own columns."""
    QKV = auto()
    """COLUMNS of queries, keys and values that are concatenated in one weight."""
    EXPERTS = auto()
    """Some of each expert's inner width: gates, then ups `[E, 2 I, H]`, and downs `[E, H, I]`; outputs are summed."""
    EXPERTS_PAIRED = auto()
    """The same for gates and ups that alternate, `[E, H, 2 I]`, and downs `[E, I, H]`, with biases."""
    EXPERTS_UNGATED = auto()
    """The same for ups `[E, I, H]` and downs `[E, H, I]`, without gates."""
    HEADS = auto()
    """A parameter with one row a query head."""
    KV_HEADS = auto()
    """A parameter with one row a key/value head."""
    WHOLE = auto()
    """All of it; every rank computes the same."""


Plan = Mapping[str, Style]
"""Style by name of a module or parameter in the base model, with `*` for numbers. Names not listed are WHOLE."""

TRANSFORMERS_STYLES: Mapping[str, Style] = {
    "colwise": Style.COLUMNS,
    "rowwise": Style.ROWS,
    "colwise_gather_output": Style.GATHERED,
    "colwise_rep": Style.GATHERED,  # its older name
    "rowwise_split_input": Style.SPLIT_INPUT,
    "rowwise_rep": Style.SPLIT_INPUT,  # its older name
    "replicated_with_grad_allreduce": Style.WHOLE,
    "mla_kv_a_proj": Style.WHOLE,  # its latents are shared by all heads
}
"""The supported styles of transformers' plans. Experts are recognised by their name."""
EMBEDDINGS = frozenset({"embed_tokens", "embeddings"})

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
_LFM2: Plan = {
    **_SEPARATE_HEADS,
    "layers.*.self_attn.out_proj": Style.ROWS,
    "layers.*.feed_forward.w1": Style.COLUMNS,
    "layers.*.feed_forward.w3": Style.COLUMNS,
    "layers.*.feed_forward.w2": Style.ROWS,
}
_MAMBA_ATTENTION: Plan = {
    **_SEPARATE_HEADS,
    "layers.*.feed_forward.gate_proj": Style.COLUMNS,
    "layers.*.feed_forward.up_proj": Style.COLUMNS,
    "layers.*.feed_forward.down_proj": Style.ROWS,
}
_GPT2_LIKE: Plan = {
    "h.*.attn.c_attn": Style.QKV,
    "h.*.attn.c_proj": Style.ROWS,
    "h.*.mlp.c_fc": Style.COLUMNS,
    "h.*.mlp.c_proj": Style.ROWS,
}

EXTRA_PLANS: Mapping[str, Plan] = {
    # transformers has no plan.
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
    "lfm2": _LFM2,
    "lfm3": {**_LFM2, "layers.*.self_attn.g_proj": Style.COLUMNS},
    "bamba": _MAMBA_ATTENTION,
    "falcon_h1": _MAMBA_ATTENTION,
    # transformers' plan is incomplete.
    "lfm2_moe": _LFM2,
    "jamba": _MAMBA_ATTENTION,
    "granitemoehybrid": _SEPARATE_HEADS,
    "nemotron_h": {
        "layers.*.mixer.q_proj": Style.COLUMNS,
        "layers.*.mixer.k_proj": Style.COLUMNS,
        "layers.*.mixer.v_proj": Style.COLUMNS,
        "layers.*.mixer.o_proj": Style.ROWS,
        "layers.*.mixer.up_proj": Style.COLUMNS,
        "layers.*.mixer.down_proj": Style.ROWS,
        "layers.*.mixer.experts": Style.EXPERTS_UNGATED,
        "layers.*.mixer.shared_experts.up_proj": Style.COLUMNS,
        "layers.*.mixer.shared_experts.down_proj": Style.ROWS,
    },
    "deepseek_v3": {
        "layers.*.self_attn.q_proj": Style.COLUMNS,
        "layers.*.self_attn.q_b_proj": Style.COLUMNS,
        "layers.*.self_attn.kv_b_proj": Style.COLUMNS,
        "layers.*.self_attn.o_proj": Style.ROWS,
    },
    "cohere": {"layers.*.self_attn.q_norm": Style.HEADS, "layers.*.self_attn.k_norm": Style.KV_HEADS},
}
"""By model_type, additions to transformers' plan."""

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
        name: the model as the user named it, for messages.

    Raises:
        ModelError: it has no plan, or an unsupported one.
    """
    plan = {**_transformers_plan(config, kind, name), **EXTRA_PLANS.get(kind, {})}
    if kind == "gpt_bigcode" and not config.multi_query:
        plan["h.*.attn.c_attn"] = Style.COLUMNS  # each head's query, key and value are adjacent
    if not plan:
        raise ModelError(f"{name}: model_type {kind!r} has no plan for tensor parallelism; use tensor_parallel_size=1")
    return plan


def _transformers_plan(config: Any, kind: str, name: str) -> dict[str, Style]:
    plan: dict[str, Style] = {}
    for pattern, style in (config.base_model_tp_plan or {}).items():
        experts = re.match(r".*\.experts(?=\.|$)", pattern)
        if experts:
            plan[experts.group()] = Style.EXPERTS
        elif style in TRANSFORMERS_STYLES:
            plan[pattern] = TRANSFORMERS_STYLES[style]
        elif pattern not in EMBEDDINGS:  # which are split by their rows for every model
            raise ModelError(
                f"{name}: model_type {kind!r} has the unknown tensor-parallel style {style!r} at "
                f"{pattern}; use tensor_parallel_size=1"
            )
    if Style.EXPERTS in plan.values() and kind not in TESTED:
        raise ModelError(
            f"{name}: how model_type {kind!r} lays out its experts is not known, so they cannot be split; "
            "use tensor_parallel_size=1"
        )
    return plan


def style_of(plan: Plan, name: str) -> Style:
    """Return the style of the module or parameter *name* of the base model."""
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), Style.WHOLE)
