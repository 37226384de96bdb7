"""The Llama-like decoder layer that most drafts are made of: its dimensions, tensors, and rotary positions."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from proposers.formats.shared.layout import Shape, refuse
from proposers.formats.shared.values import Config, TargetDims, flag, integer, number, section

MLA = "kv_lora_rank"


@dataclass(frozen=True, kw_only=True)
class LayerDims:
    """A decoder layer with gated MLP and grouped attention.

    Attributes:
        hidden: width of the residual stream.
        inner: width of the MLP.
        heads, kv_heads, head_dim: of the attention.
        qkv_bias, o_bias, mlp_bias: which linears have biases.
        qk_norm: queries and keys are normalised, each head by `[head_dim]` weights.
        eps: of its RMS norms.
        act: activation of the MLP, by its name in `transformers`.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eps: float
    act: str

    def tensors(self, prefix: str, reads: int | None = None) -> dict[str, Shape]:
        """Return name -> shape of a layer whose queries, keys and values read *reads* inputs (default: `hidden`)."""
        wide, queries, keys = reads or self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        wanted: dict[str, Shape] = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (queries, wide),
            "self_attn.k_proj.weight": (keys, wide),
            "self_attn.v_proj.weight": (keys, wide),
            "self_attn.o_proj.weight": (self.hidden, queries),
            "mlp.gate_proj.weight": (self.inner, self.hidden),
            "mlp.up_proj.weight": (self.inner, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.inner),
        }
        biased = {
            "q_proj": self.qkv_bias,
            "k_proj": self.qkv_bias,
            "v_proj": self.qkv_bias,
            "o_proj": self.o_bias,
            "gate_proj": self.mlp_bias,
            "up_proj": self.mlp_bias,
            "down_proj": self.mlp_bias,
        }
        for name, shape in list(wanted.items()):
            *path, _ = name.split(".")
            if biased.get(path[-1]):
                wanted[".".join((*path, "bias"))] = shape[:1]
        if self.qk_norm:
            wanted |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        return {prefix + name: shape for name, shape in wanted.items()}


def layer_dims(title: str, config: Config, names: Collection[str]) -> LayerDims:
    """Read the dimensions of a checkpoint's layers.

    Args:
        title: the checkpoint's name in messages.
        config: its config.
        names: canonical names of its tensors; biases and norms that configs do not state are detected by them.

    Raises:
        ModelError: a value is missing, or the layers are of another kind.
    """
    if config.get(MLA):
        refuse(title, f"its layers have latent attention ({MLA} {config[MLA]}), which is not supported for this format")
    heads = integer(title, config, "num_attention_heads")
    hidden = integer(title, config, "hidden_size")
    qkv_bias = flag(title, config, "attention_bias", "qkv_bias", default=False)
    return LayerDims(
        hidden=hidden,
        inner=integer(title, config, "intermediate_size"),
        heads=heads,
        kv_heads=integer(title, config, "num_key_value_heads", default=heads),
        head_dim=integer(title, config, "head_dim", default=hidden // heads),
        qkv_bias=qkv_bias or any(name.endswith(".self_attn.q_proj.bias") for name in names),
        o_bias=any(name.endswith(".self_attn.o_proj.bias") for name in names),
        mlp_bias=any(name.endswith(".mlp.down_proj.bias") for name in names),
        qk_norm=any(name.endswith(".self_attn.q_norm.weight") for name in names),
        eps=number(title, config, "rms_norm_eps", 1e-6),
        act=str(config.get("hidden_act") or "silu"),
    )


def rope_of(config: Config, target_config: Config | None = None) -> dict[str, Any]:
    """Return rotary parameters in the format of `transformers` 5 (`rope_type`, `rope_theta`, ...).

    Missing values are those of *target_config* if it is given, else theta 10000 without scaling, as in `LlamaConfig`.
    """
    theirs = {} if target_config is None else _written(target_config)
    own = _written(config)
    if not own:
        return {"rope_type": "default", "rope_theta": 10000.0, **theirs}
    return {"rope_type": "default", "rope_theta": theirs.get("rope_theta", 10000.0), **own}


def _written(config: Config) -> dict[str, Any]:
    """Return the rotary parameters of *config* in any of the known formats; empty if there are none."""
    found = dict(section(config, "rope_parameters")) or dict(section(config, "rope_scaling"))
    if any(isinstance(value, Mapping) for value in found.values()):  # one for each type of layer
        found = dict(section(found, "full_attention"))
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    if config.get("rope_theta") is not None:
        found.setdefault("rope_theta", float(config["rope_theta"]))
    if not found and "rope_scaling" in config:
        found["rope_type"] = "default"
    found.pop("partial_rotary_factor", None)  # of the target's heads, if inherited
    return {key: value for key, value in found.items() if value is not None}


def context_of(title: str, config: Config, target: TargetDims) -> int:
    """Return the context length of a head: at least the target's.

    Published heads state 2048 because they were trained on such short texts; their positions are rotary, and a limit
    there would end speculation early.
    """
    return max(integer(title, config, "max_position_embeddings", default=0), target.max_model_len)
