"""Tiny random checkpoints, as in `synthetic`, of the formats that have attention layers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.models import tiny_models
from tests.support.models.synthetic import Noise, Synthetic, Tensors, config_of, layer, llama_config, stored


def eagle(
    target: Path, *, seed: int = 0, bias: bool = True, says_bias: bool = False, embedding: bool = False, **options: Any
) -> Synthetic:
    """EAGLE as its authors write it; the config has `bias` only with *says_bias* or if there is none."""
    noise, config = Noise(seed), llama_config(target, **options)
    hidden = config["hidden_size"]
    tensors: Tensors = {"fc.weight": noise.weight(hidden, 2 * hidden)}
    if bias:
        tensors["fc.bias"] = noise.weight(hidden)
    if embedding:
        tensors["embed_tokens.weight"] = noise.weight(config["vocab_size"], hidden)
    tensors |= layer(noise, "layers.0.", config)
    del tensors["layers.0.input_layernorm.weight"]
    return Synthetic(
        {**config, **({"bias": bias} if says_bias or not bias else {})}, tensors, "pytorch_model.bin", "eagle"
    )


def eagle_vllm(target: Path, *, seed: int = 0, bias: bool = False, **options: Any) -> Synthetic:
    """EAGLE as vLLM's conversion script writes it: a nested config, and tensors that are not used."""
    made, noise = eagle(target, seed=seed, bias=bias, embedding=True, **options), Noise(seed + 1)
    hidden, vocab = made.config["hidden_size"], made.config["vocab_size"]
    nested = {key: value for key, value in made.config.items() if key != "bias"}
    config = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": nested, "truncated_vocab_size": vocab}
    unused = {
        "lm_head.weight": noise.weight(vocab, hidden),
        "model.norm.weight": noise.norm(hidden),
        "model.layers.0.input_layernorm.weight": noise.norm(hidden),
    }
    prefixed = made.renamed(lambda name: name if name.startswith("fc.") else f"model.{name}")
    return Synthetic({**config, **({"bias": True} if bias else {})}, {**prefixed.tensors, **unused}, method="eagle")


def maps(vocab: int, kept: int, seed: int) -> Tensors:
    """Return `d2t` and `t2d` of *kept* random ids of *vocab*."""
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:kept].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(kept), "t2d": known}


def eagle3(
    target: Path,
    *,
    seed: int = 0,
    kept: int | None = 48,
    layers: int = 1,
    inputs_of: tuple[int, ...] = (),
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    embedding: bool = False,
    qk_norm: bool = False,
    **options: Any,
) -> Synthetic:
    """EAGLE-3 as its authors write it, with others' options; `midlayer` and no layer ids unless *inputs_of*."""
    noise, theirs = Noise(seed), config_of(target)
    config = llama_config(
        target,
        **{
            "num_hidden_layers": layers,
            "draft_vocab_size": kept or theirs["vocab_size"],
            "architectures": ["LlamaForCausalLMEagle3"],
            **options,
        },
    )
    hidden, vocab, features = config["hidden_size"], theirs["vocab_size"], 3 * theirs["hidden_size"]
    tensors: Tensors = {
        "fc.weight": noise.weight(hidden, features),
        "norm.weight": noise.norm(hidden),
        "lm_head.weight": noise.weight(config["draft_vocab_size"], hidden),
    }
    tensors |= layer(noise, "midlayer.", config, reads=2 * hidden, qk_norm=qk_norm)
    tensors["midlayer.hidden_norm.weight"] = noise.norm(hidden)
    for i in range(1, layers):
        tensors |= layer(noise, f"layers.{i}.", config, qk_norm=qk_norm)
    if kept:
        tensors |= maps(vocab, kept, seed)
    if embedding or hidden != theirs["hidden_size"]:
        tensors["embed_tokens.weight"] = noise.weight(vocab, hidden)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": noise.norm(theirs["hidden_size"]) for i in range(3)}
    if norm_before_fc:
        tensors["input_norm.weight"] = noise.norm(features)
    flags = {"fc_norm": fc_norm, "norm_before_fc": norm_before_fc}
    ids = {"eagle_aux_hidden_state_layer_ids": list(inputs_of)} if inputs_of else {}
    return Synthetic(
        {**config, **{key: True for key, value in flags.items() if value}, **ids}, tensors, method="eagle3"
    )


def p_eagle(target: Path, *, seed: int = 0, mask: int = 5, **options: Any) -> Synthetic:
    """P-EAGLE as its authors write it: an EAGLE-3 head with a mask."""
    head = eagle3(target, seed=seed, **options)
    features = head.tensors["fc.weight"].shape[1]
    made = head.holding({"mask_hidden": Noise(seed + 1).weight(1, 1, features)}).having(
        ptd_token_id=mask, parallel_drafting=True
    )
    return Synthetic(made.config, made.tensors, made.file, "p_eagle")


def speculators(made: Synthetic, target: Path, *, tokens: int = 3, **top: Any) -> Synthetic:
    """*made*, an EAGLE-3, P-EAGLE or DFlash head, as `speculators` writes it, with *target* as its verifier."""
    kind = {"eagle3": "eagle3", "p_eagle": "peagle", "dflash": "dflash"}[made.method]
    own = (
        "draft_vocab_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "block_size",
        "eagle_aux_hidden_state_layer_ids",
        "target_hidden_size",
    )
    moved = {key: value for key, value in made.config.items() if key in own}
    layers = {key: value for key, value in made.config.items() if key not in (*own, "architectures", "dflash_config")}
    if kind == "peagle":
        moved["mask_token_id"] = layers.pop("ptd_token_id")
        layers.pop("parallel_drafting")
    if kind == "dflash":
        nested = made.config["dflash_config"]
        moved |= {
            "mask_token_id": nested["mask_token_id"],
            "aux_hidden_state_layer_ids": [i + 1 for i in nested["target_layer_ids"]],
        }
    config = {
        "architectures": [f"{kind.title()}DraftModel"], "speculators_model_type": kind, "speculators_version": "0.4.0",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1,
                                  "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": str(target), "architectures": config_of(target).get("architectures")},
        },
        "transformer_layer_config": layers, "embed_requires_grad": False, **moved, **top,
    }  # fmt: skip
    renamed = made.renamed(lambda name: name.replace("midlayer.", "layers.0."))
    return Synthetic(config, renamed.tensors, method=made.method)


def dflash(
    target: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    block: int = 4,
    target_layers: tuple[int, ...] = (0, 1),
    mask: int = 5,
    **options: Any,
) -> Synthetic:
    """As the authors write it."""
    noise, theirs = Noise(seed), config_of(target)
    config = llama_config(
        target,
        num_hidden_layers=layers,
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        head_dim=8,
        num_target_layers=theirs["num_hidden_layers"],
        block_size=block,
        dflash_config={"mask_token_id": mask, "target_layer_ids": list(target_layers)},
        **options,
    )
    hidden = config["hidden_size"]
    tensors: Tensors = {
        "fc.weight": noise.weight(hidden, len(target_layers) * theirs["hidden_size"]),
        "hidden_norm.weight": noise.norm(hidden),
        "norm.weight": noise.norm(hidden),
    }
    for i in range(layers):
        tensors |= layer(noise, f"layers.{i}.", config, qk_norm=True)
    return Synthetic(config, tensors, method="dflash")


def pard(target: Path, folder: Path, *, seed: int = 0, mask: int = 5, noise: float = 0.05) -> Path:
    """A perturbed copy of the target with a mask token, written to *folder*."""
    tiny_models.perturb(target, folder, seed=seed, noise=noise)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pard_token": mask}))
    return folder


def with_mtp(
    family: str, folder: Path, *, seed: int = 0, heads: int = 1, own_ends: bool = True, **options: Any
) -> Path:
    """A tiny target of *family* (deepseek_v3, glm4_moe; qwen2 as MiMo) with heads in its checkpoint."""
    tiny_models.build(family, folder, **{"num_nextn_predict_layers": heads, **options})
    config, tensors, noise = config_of(folder), stored(folder), Noise(seed)
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    names = [name.removeprefix(last) for name in tensors if name.startswith(last)]
    for i in range(heads):
        tensors |= _mimo_head(noise, i, config) if family == "qwen2" else _nextn_head(noise, i, config, own_ends)
        prefix = f"model.mtp_layers.{i}." if family == "qwen2" else f"model.layers.{config['num_hidden_layers'] + i}."
        for name in names:
            like = tensors[last + name]
            is_norm = like.ndim == 1 and name.endswith("norm.weight")
            tensors[prefix + name] = noise.norm(like.shape[0]) if is_norm else noise.weight(*like.shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _nextn_head(noise: Noise, head: int, config: dict[str, Any], own_ends: bool) -> Tensors:
    hidden, prefix = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] + head}."
    tensors = {
        "enorm.weight": noise.norm(hidden),
        "hnorm.weight": noise.norm(hidden),
        "eh_proj.weight": noise.weight(hidden, 2 * hidden),
        "shared_head.norm.weight": noise.norm(hidden),
    }
    if own_ends:
        tensors |= {
            name: noise.weight(config["vocab_size"], hidden)
            for name in ("embed_tokens.weight", "shared_head.head.weight")
        }
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _mimo_head(noise: Noise, head: int, config: dict[str, Any]) -> Tensors:
    hidden, prefix = config["hidden_size"], f"model.mtp_layers.{head}."
    tensors = {
        name: noise.norm(hidden)
        for name in ("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")
    }
    return {
        prefix + name: tensor
        for name, tensor in {**tensors, "input_proj.weight": noise.weight(hidden, 2 * hidden)}.items()
    }
