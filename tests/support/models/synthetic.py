"""Tiny random checkpoints of every format, as public tools write them: names, shapes, config, kind of file.

Each function takes the folder of a target and keyword options, and returns a `Synthetic`, which can be written to a
folder unchanged or damaged.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
SPREAD = 0.25


@dataclass(frozen=True)
class Synthetic:
    """A checkpoint: its config, its tensors by stored name, and its file name."""

    config: dict[str, Any]
    tensors: Tensors
    file: str = "model.safetensors"
    method: str = ""

    def write(self, folder: Path) -> Path:
        """Write the checkpoint; return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.file.endswith(".safetensors"):
            save_file({name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}, folder / self.file)
        else:
            torch.save(self.tensors, folder / self.file)
        return folder

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, as readers expect them."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def renamed(self, rename: Callable[[str], str]) -> "Synthetic":
        """Return a copy under other names."""
        return replace(self, tensors={rename(name): tensor for name, tensor in self.tensors.items()})

    def without(self, *names: str) -> "Synthetic":
        """Return a copy without some tensors."""
        return replace(self, tensors={name: t for name, t in self.tensors.items() if name not in names})

    def having(self, **config: Any) -> "Synthetic":
        """Return a copy with other values in the config."""
        return replace(self, config={**self.config, **config})

    def holding(self, tensors: Tensors) -> "Synthetic":
        """Return a copy with tensors added or replaced."""
        return replace(self, tensors={**self.tensors, **tensors})


class Noise:
    """Random weights, reproducible by seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int, spread: float = SPREAD) -> torch.Tensor:
        """Normal around 0."""
        return torch.randn(shape, generator=self._generator) * spread

    def norm(self, size: int) -> torch.Tensor:
        """Normal around 1."""
        return 1 + self.weight(size, spread=0.1)


def config_of(target: Path) -> dict[str, Any]:
    """Return the target's config, with a `hidden_size`."""
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    return {"hidden_size": config.get("n_embd"), "num_hidden_layers": config.get("n_layer"), **config}


def layer(
    noise: Noise,
    prefix: str,
    config: dict[str, Any],
    *,
    reads: int | None = None,
    qk_norm: bool = False,
    bias: bool = False,
) -> Tensors:
    """Return a Llama layer of *config*, with query and key norms or biases if requested."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    wide = reads or hidden
    tensors = {
        "input_layernorm.weight": noise.norm(hidden),
        "post_attention_layernorm.weight": noise.norm(hidden),
        "self_attn.q_proj.weight": noise.weight(queries, wide),
        "self_attn.k_proj.weight": noise.weight(keys, wide),
        "self_attn.v_proj.weight": noise.weight(keys, wide),
        "self_attn.o_proj.weight": noise.weight(hidden, queries),
        "mlp.gate_proj.weight": noise.weight(inner, hidden),
        "mlp.up_proj.weight": noise.weight(inner, hidden),
        "mlp.down_proj.weight": noise.weight(hidden, inner),
    }
    if qk_norm:
        tensors |= {f"self_attn.{part}_norm.weight": noise.norm(head) for part in "qk"}
    if bias:
        tensors |= {f"self_attn.{part}_proj.bias": noise.weight(queries if part == "q" else keys) for part in "qkv"}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def llama_config(target: Path, **options: Any) -> dict[str, Any]:
    """Return the config of a small Llama with the target's width and vocabulary."""
    theirs = config_of(target)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": theirs["hidden_size"],
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": theirs["vocab_size"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **options,
    }


def medusa(target: Path, *, seed: int = 0, heads: int = 4, blocks: int = 1, own_heads: bool = True) -> Synthetic:
    """Medusa as FasterDecoding writes it; without *own_heads* as TGI's second version."""
    theirs, noise = config_of(target), Noise(seed)
    hidden, vocab = theirs["hidden_size"], theirs["vocab_size"]
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{i}.{j}.linear.weight"] = noise.weight(hidden, hidden)
            tensors[f"{i}.{j}.linear.bias"] = noise.weight(hidden)
        if own_heads:
            tensors[f"{i}.{blocks}.weight"] = noise.weight(vocab, hidden)
    config = {"base_model_name_or_path": str(target), "medusa_num_heads": heads, "medusa_num_layers": blocks}
    file = "medusa_lm_head.pt" if own_heads else "medusa_lm_head.safetensors"
    return Synthetic(config, tensors, file, "medusa")


def medusa_vllm(
    target: Path, *, seed: int = 0, heads: int = 3, blocks: int = 1, kept: int | None = None, shared: bool = False
) -> Synthetic:
    """Medusa as vLLM's conversion script writes it, with *kept* ids in the vocabulary; one head if *shared*."""
    theirs, noise = config_of(target), Noise(seed)
    hidden, vocab = theirs["hidden_size"], theirs["vocab_size"]
    size = kept or vocab
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"medusa_heads.blocks.{i}.layers.{j}.weight"] = noise.weight(hidden, hidden)
        if not shared:
            tensors[f"medusa_heads.lm_heads.{i}.weight"] = noise.weight(size, hidden)
    if shared:
        tensors["medusa_heads.lm_head.weight"] = noise.weight(size, hidden)
    if kept:
        tensors["medusa_heads.token_map"] = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:kept]
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_heads": heads,
        "num_hidden_layers": blocks,
        "truncated_vocab_size": size,
        "original_lm_head": shared,
        "medusa_fc_bias": False,
    }
    return Synthetic(config, tensors, method="medusa")


def mlp_speculator(
    target: Path, *, seed: int = 0, heads: int = 3, inner: int = 24, tied: bool = False, scale: bool = False
) -> Synthetic:
    """An MLP speculator as IBM writes it."""
    theirs, noise = config_of(target), Noise(seed)
    width, vocab = theirs["hidden_size"], theirs["vocab_size"]
    tensors: Tensors = {}
    for i in range(heads):
        if i == 0 or not tied:
            tensors |= {
                f"speculator.emb.{i}.weight": noise.weight(vocab, inner, spread=1.0),
                f"speculator.head.{i}.weight": noise.weight(vocab, inner),
                f"speculator.ln.{i}.weight": noise.norm(inner),
                f"speculator.ln.{i}.bias": noise.weight(inner),
            }
        if i < 2 or not tied:
            tensors[f"speculator.proj.{i}.weight"] = noise.weight(inner, inner if i else width)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": width,
        "inner_dim": inner,
        "n_predict": heads,
        "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4, 3][:heads],
        "vocab_size": vocab,
        "tie_weights": tied,
        "scale_input": scale,
    }
    return Synthetic(config, tensors, method="mlp_speculator")


def hydra(
    target: Path, *, seed: int = 0, heads: int = 3, blocks: int = 2, prefix: bool = False, grounded: bool = True
) -> Synthetic:
    """Hydra as its authors write it: blocks after the first are one module, which a state dict holds several times."""
    theirs, noise = config_of(target), Noise(seed)
    hidden, vocab = theirs["hidden_size"], theirs["vocab_size"]
    tensors: Tensors = {}
    for i in range(heads):
        repeated = {"linear.weight": noise.weight(hidden, hidden), "linear.bias": noise.weight(hidden)}
        reads = (i + 2) * hidden
        wide = {
            "linear.weight": noise.weight(hidden, reads),
            "linear.bias": noise.weight(hidden),
            "res_connection.weight": noise.weight(hidden, reads),
            "res_connection.bias": noise.weight(hidden),
        }
        for k in range(blocks):
            place = 2 * k + 1 if prefix else k
            parts = wide if grounded and k == 0 else repeated
            tensors |= {f"hydra_mlp.{i}.{place}.{name}": tensor for name, tensor in parts.items()}
        output = f"hydra_lm_head.{i}.{'1.' if prefix else ''}"
        tensors |= {f"{output}weight": noise.weight(vocab, hidden), f"{output}bias": noise.weight(vocab)}
    if prefix:
        tensors |= layer(noise, "prefix_embeding_layer.layers.0.", theirs)
        tensors |= {
            "prefix_embeding_layer.norm.weight": noise.norm(hidden),
            "prefix_embeding_layer.embed_tokens.weight": noise.weight(vocab, hidden),
        }
    config = {
        "base_model_name_or_path": str(target),
        "hydra_num_heads": heads,
        "hydra_num_layers": blocks,
        "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
        "grounded_heads": grounded,
        "hidden_state_offset": 0,
    }
    return Synthetic(config, tensors, "hydra_lm_head.pt", "hydra")


def recurrent(
    target: Path, *, seed: int = 0, blocks: int = 2, exit_dim: int | None = None, rnn: bool = True
) -> Synthetic:
    """ReDrafter as Apple writes it."""
    theirs, noise = config_of(target), Noise(seed)
    hidden, vocab = theirs["hidden_size"], theirs["vocab_size"]
    width = exit_dim or 2 * hidden
    tensors: Tensors = {}
    if width != 2 * hidden:
        tensors |= {"input_proj.weight": noise.weight(width, 2 * hidden), "input_proj.bias": noise.weight(width)}
    for j in range(blocks):
        tensors |= {
            f"lm_head.{j}.linear.weight": noise.weight(width, width),
            f"lm_head.{j}.linear.bias": noise.weight(width),
        }
    tensors[f"lm_head.{blocks}.weight"] = noise.weight(vocab, width)
    if rnn:
        tensors |= {
            "rnn_u.weight": noise.weight(hidden, hidden),
            "rnn_u.bias": noise.weight(hidden),
            "rnn_w.weight": noise.weight(hidden, hidden),
        }
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "exit_dim": width,
        "num_draft_layers": blocks,
        "num_lookback_tokens": 8,
        "rnn": rnn,
    }
    return Synthetic(config, tensors, method="recurrent")


def stored(folder: Path) -> Tensors:
    """Return the tensors of a folder's only safetensors file."""
    return load_file(folder / "model.safetensors")
