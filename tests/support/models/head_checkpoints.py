"""Tiny checkpoints of Medusa, Hydra, MLP speculators and recurrent drafters."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel

from tests.support.models.published import Weights

V, H = 61, 12
TARGET = {"model_type": "llama", "vocab_size": V, "hidden_size": H, "num_hidden_layers": 4, "num_attention_heads": 3,
          "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 20, "max_position_embeddings": 128,
          "rms_norm_eps": 1e-5, "rope_theta": 5000.0}  # fmt: skip


def some(*shape: int, seed: int = 0, spread: float = 0.5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))) * spread


def weights(**shapes: tuple[int, ...]) -> Weights:
    return {name: some(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def named(shapes: dict[str, tuple[int, ...]]) -> Weights:
    return weights(**shapes)


HEADS, INNER = 4, 10


def mlp_checkpoint(*, tied: bool, scaled: bool) -> tuple[dict[str, Any], Weights]:
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": H,
        "inner_dim": INNER,
        "n_predict": HEADS,
        "vocab_size": V,
        "tie_weights": tied,
        "scale_input": str(scaled),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(HEADS):
        shapes |= {
            f"speculator.emb.{i}.weight": (V, INNER),
            f"speculator.head.{i}.weight": (V, INNER),
            f"speculator.proj.{i}.weight": (INNER, INNER if i else H),
            f"speculator.ln.{i}.weight": (INNER,),
            f"speculator.ln.{i}.bias": (INNER,),
        }
    kept = ("emb.0", "head.0", "ln.0", "proj.0", "proj.1")
    return config, named(
        {name: shape for name, shape in shapes.items() if not tied or name.split(".", 1)[1].rsplit(".", 1)[0] in kept}
    )


def medusa_checkpoint(output: str) -> tuple[dict[str, Any], Weights]:
    """Three heads of two blocks, with own output layers, truncated ones (as vLLM converts them) or the target's."""
    heads, rows = 3, 40 if output == "truncated" else V
    block = "medusa_heads.blocks.{}.layers.{}" if output == "truncated" else "{}.{}.linear"
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(2):
            shapes |= {f"{block.format(i, j)}.weight": (H, H), f"{block.format(i, j)}.bias": (H,)}
        if output != "target":
            shapes[f"lm_heads.{i}.weight" if output == "truncated" else f"{i}.2.weight"] = (rows, H)
    stored = named(shapes)
    if output == "truncated":
        stored["token_map"] = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:rows]
        return {
            "num_heads": heads,
            "num_hidden_layers": 2,
            "truncated_vocab_size": rows,
            "vocab_size": V,
            "hidden_size": H,
            "medusa_fc_bias": True,
        }, stored
    return {"medusa_num_heads": heads, "medusa_num_layers": 2, "base_model_name_or_path": "base"}, stored


def hydra_checkpoint(arch: str, *, grounded: bool, stored_once: bool) -> tuple[dict[str, Any], Weights]:
    """Three heads of three blocks; the later two are the same module."""
    heads, blocks = 3, 3
    is_prefix = arch == "prefix-mlp"
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for k in range(blocks):
            name = f"hydra_mlp.{i}.{2 * k + 1 if is_prefix else k}"
            wide = H * (i + 2) if grounded and not k else H
            shapes |= {f"{name}.linear.weight": (H, wide), f"{name}.linear.bias": (H,)}
            if wide != H:
                shapes |= {f"{name}.res_connection.weight": (H, wide), f"{name}.res_connection.bias": (H,)}
        output = f"hydra_lm_head.{i}" + (".1" if is_prefix else "")
        shapes |= {f"{output}.weight": (V, H), f"{output}.bias": (V,)}
    stored = named(shapes)
    if is_prefix:
        stored |= {f"prefix_embeding_layer.{name}": weight for name, weight in prefix_model().state_dict().items()}
    for name in list(stored):
        if name.startswith("hydra_mlp."):
            repeat_of(stored, name, first=(3 if is_prefix else 1) if grounded else int(is_prefix), once=stored_once)
    return {
        "hydra_num_heads": heads,
        "hydra_num_layers": blocks,
        "hydra_head_arch": arch,
        "grounded_heads": grounded,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "base",
    }, stored


def repeat_of(stored: Weights, name: str, *, first: int, once: bool) -> None:
    """Store blocks that repeat the first one again, or leave them out."""
    _, head, index, rest = name.split(".", 3)
    if int(index) > first:
        stored[name] = stored[f"hydra_mlp.{head}.{first}.{rest}"]
        if once:
            del stored[name]


def prefix_model() -> LlamaModel:
    config = LlamaConfig(**{**TARGET, "num_hidden_layers": 1}, attn_implementation="eager")
    model = LlamaModel(config).eval().requires_grad_(False)
    for i, (_, weight) in enumerate(sorted(model.named_parameters())):
        weight.copy_(some(*weight.shape, seed=200 + i) + (1.0 if weight.ndim == 1 else 0.0))
    return model


EXIT = 18


def redrafter_checkpoint(*, rnn: bool, exit_dim: int) -> tuple[dict[str, Any], Weights]:
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": V,
        "hidden_size": H,
        "exit_dim": exit_dim,
        "num_draft_layers": 2,
        "num_lookback_tokens": 4,
        "rnn": rnn,
    }
    shapes: dict[str, tuple[int, ...]] = {"lm_head.2.weight": (V, exit_dim)}
    for j in range(2):
        shapes |= {f"lm_head.{j}.linear.weight": (exit_dim, exit_dim), f"lm_head.{j}.linear.bias": (exit_dim,)}
    if exit_dim != 2 * H:
        shapes |= {"input_proj.weight": (exit_dim, 2 * H), "input_proj.bias": (exit_dim,)}
    if rnn:
        shapes |= {"rnn_u.weight": (H, H), "rnn_u.bias": (H,), "rnn_w.weight": (H, H)}
    return config, named(shapes)


CHECKPOINTS: dict[str, tuple[dict[str, Any], Weights]] = {
    "mlp_speculator": mlp_checkpoint(tied=False, scaled=False),
    "medusa": medusa_checkpoint("own"),
    "hydra": hydra_checkpoint("mlp", grounded=True, stored_once=True),
    "recurrent": redrafter_checkpoint(rnn=True, exit_dim=EXIT),
}
