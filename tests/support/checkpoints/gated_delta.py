"""Tensors and configs of Qwen3-Next and Qwen3.5: layers with a gated delta net, every fourth with attention."""

from typing import Any

from tests.support.checkpoints.dense import config
from tests.support.checkpoints.tensors import NORMS, Tensors, ends, experts, gated, linear, norms

DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
}  # fmt: skip
KEYS, VALUES, HEADS = 16 * 128, 32 * 128, 32
QWEN3_NEXT = config("qwen3_next", 2048, 5120, 48, 16, 2, 151936, 262144, head_dim=256, rope_theta=10000000) | DELTA | {
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16}
TEXT = config("qwen3_5_text", 4096, 12288, 32, 16, 4, 248320, 262144, head_dim=256) | DELTA
MOE_TEXT = config("qwen3_5_moe_text", 2048, 0, 40, 16, 2, 248320, 262144, head_dim=256) | DELTA | {
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
del MOE_TEXT["intermediate_size"]


def _whole(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": kind, "torch_dtype": "bfloat16", "text_config": text | {"mtp_num_hidden_layers": 1},
        "image_token_id": 248056, "tie_word_embeddings": False,
        "vision_config": VISION | {"out_hidden_size": text["hidden_size"]},
    }  # fmt: skip


QWEN35, QWEN35_MOE = _whole("qwen3_5", TEXT), _whole("qwen3_5_moe", MOE_TEXT)


def _mixer(at: str, c: dict[str, Any], *, is_full: bool, names: tuple[tuple[str, int], ...]) -> Tensors:
    """*names*: the projections of the gated delta net, with the number of their outputs."""
    hidden = c["hidden_size"]
    if is_full:
        heads, kv = c["num_attention_heads"] * 256, c["num_key_value_heads"] * 256
        at += "self_attn."
        tensors = linear(f"{at}q_proj", 2 * heads, hidden) | linear(f"{at}k_proj", kv, hidden)
        tensors |= linear(f"{at}v_proj", kv, hidden) | linear(f"{at}o_proj", hidden, heads)
        return tensors | norms(at, 256, "q_norm", "k_norm")
    at += "linear_attn."
    tensors = linear(f"{at}out_proj", hidden, VALUES) | norms(at, 128, "norm")
    for name, outputs in names:
        tensors |= linear(f"{at}{name}", outputs, hidden)
    tensors |= {f"{at}conv1d.weight": (2 * KEYS + VALUES, 1, 4)}
    return tensors | {f"{at}A_log": (HEADS,), f"{at}dt_bias": (HEADS,)}


NEXT = (("in_proj_qkvz", 2 * KEYS + 2 * VALUES), ("in_proj_ba", 2 * HEADS))
LATER = (("in_proj_qkv", 2 * KEYS + VALUES), ("in_proj_z", VALUES), ("in_proj_b", HEADS), ("in_proj_a", HEADS))


def _sparse(at: str, c: dict[str, Any], stored: Tensors) -> Tensors:
    hidden = c["hidden_size"]
    tensors = linear(f"{at}gate", c["num_experts"], hidden) | linear(f"{at}shared_expert_gate", 1, hidden)
    return tensors | gated(f"{at}shared_expert.", hidden, 512) | stored


def _singly(at: str, c: dict[str, Any]) -> Tensors:
    return _sparse(at, c, experts(f"{at}experts.", c["num_experts"], c["hidden_size"], 512))


def _together(at: str, c: dict[str, Any]) -> Tensors:
    count, hidden = c["num_experts"], c["hidden_size"]
    stored = {f"{at}experts.gate_up_proj": (count, 1024, hidden), f"{at}experts.down_proj": (count, hidden, 512)}
    return _sparse(at, c, stored)


def _dense(at: str, c: dict[str, Any]) -> Tensors:
    return gated(at, c["hidden_size"], c["intermediate_size"])


def _layers(prefix: str, c: dict[str, Any], names: tuple[tuple[str, int], ...], mlp: Any) -> Tensors:
    hidden, tensors = c["hidden_size"], ends(c, prefix)
    for layer in range(c["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        tensors |= _mixer(at, c, is_full=layer % 4 == 3, names=names)
        tensors |= mlp(f"{at}mlp.", c) | norms(at, hidden, *NORMS)
    tensors |= linear("mtp.fc", hidden, 2 * hidden) | norms("mtp.layers.0.", hidden, *NORMS)
    tensors |= norms("mtp.", hidden, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return tensors | _mixer("mtp.layers.0.", c, is_full=True, names=()) | mlp("mtp.layers.0.mlp.", c)


def _visual() -> Tensors:
    tensors: Tensors = {"model.visual.pos_embed.weight": (2304, 1152)}
    for block in range(27):
        at = f"model.visual.blocks.{block}."
        tensors |= linear(f"{at}attn.qkv", 3 * 1152, 1152, bias=True) | linear(f"{at}attn.proj", 1152, 1152, bias=True)
        tensors |= linear(f"{at}mlp.linear_fc1", 4304, 1152, bias=True)
        tensors |= linear(f"{at}mlp.linear_fc2", 1152, 4304, bias=True)
    return tensors


def qwen3_next() -> Tensors:
    return _layers("model.", QWEN3_NEXT, NEXT, _singly)


def qwen3_5() -> Tensors:
    return _layers("model.language_model.", TEXT, LATER, _dense) | _visual()


def qwen3_5_moe() -> Tensors:
    return _layers("model.language_model.", MOE_TEXT, LATER, _together) | _visual()
