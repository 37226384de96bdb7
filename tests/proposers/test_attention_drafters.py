"""EAGLE and EAGLE-3: what they draft equals the published mathematics, computed anew for every token."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from proposers.eagle import EagleProposer
from proposers.eagle3 import Eagle3Proposer
from tests.support.models.drafter_world import (
    CONFIG,
    HEAD,
    HEADS,
    SILENT_THETA,
    Behind,
    H,
    K,
    V,
    World,
    assert_chains,
    assert_trees,
    layer_shapes,
    random_tensors,
    world,
)
from tests.support.models.published import Drafted, Weights, attention, causal, linear, mlp, rms

# --- EAGLE-1 and EAGLE-2 ---


def eagle_tensors(*, bias: bool, layers: int = 1) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H)}
    if bias:
        shapes["fc.bias"] = (H,)
    for i in range(layers):
        shapes |= layer_shapes(f"layers.{i}")
        if i:
            shapes[f"layers.{i}.input_layernorm.weight"] = (H,)
    return random_tensors(shapes)


def eagle_behind(made: World, weights: Weights, layers: int = 1) -> Behind:
    def behind(slot: int, drafted: Drafted) -> torch.Tensor:
        tokens, given = made.texts[slot][1:] + drafted, made.features[slot]
        states = given
        while True:  # one draft state after another, each computed over the whole text
            count = len(states)
            h = linear(weights, "fc", torch.cat([made.embedding[tokens[:count]], states], -1))
            for i in range(layers):
                x = rms(h, weights[f"layers.{i}.input_layernorm.weight"]) if i else h
                h = h + attention(
                    weights,
                    f"layers.{i}.self_attn",
                    x,
                    list(range(count)),
                    causal(count),
                    head_dim=H // HEADS,
                    theta=SILENT_THETA,
                )
                normed = rms(h, weights[f"layers.{i}.post_attention_layernorm.weight"])
                h = h + mlp(weights, f"layers.{i}.mlp", normed)
            if count == len(tokens):
                return h[-1] @ made.head.T
            states = torch.cat([states, h[-1:]])

    return behind


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("layers", [1, 2])
def test_eagle_drafts_what_is_published(heat: float, layers: int) -> None:
    made, weights = world(H, heat=heat), eagle_tensors(bias=True, layers=layers)
    module = EagleProposer.build(CONFIG, made.parts(weights, {**HEAD, "num_hidden_layers": layers}))
    assert_chains(EagleProposer(made.runner(module), 1, K), made, eagle_behind(made, weights, layers))


def test_eagle_2_grows_the_tree_of_best_scores() -> None:
    made, weights = world(H), eagle_tensors(bias=True)
    module = EagleProposer.build(CONFIG, made.parts(weights, HEAD))
    assert_trees(EagleProposer(made.runner(module), 3, 4), made, eagle_behind(made, weights), 3, 4)


# --- EAGLE-3 ---


@dataclass(frozen=True)
class Variant:
    """An EAGLE-3 checkpoint: the places of its norms, and its optional tensors."""

    config: dict[str, Any] = field(default_factory=dict)
    layers: int = 1
    prefix: str = "midlayer"
    drafted: int = 24
    qk_norm: bool = False
    own_embedding: bool = False
    norms: tuple[str, ...] = ()

    def has(self, key: str) -> bool:
        return bool(self.config.get(key))

    def tensors(self) -> Weights:
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (H, 3 * H),
            "norm.weight": (H,),
            "lm_head.weight": (self.drafted, H),
            **dict.fromkeys(self.norms, (H,)),
        }
        for i in range(self.layers):
            prefix = f"layers.{i}" if i else self.prefix
            shapes |= layer_shapes(prefix, H if i else 2 * H) | {f"{prefix}.input_layernorm.weight": (H,)}
            if self.qk_norm:
                shapes |= dict.fromkeys(
                    (f"{prefix}.self_attn.q_norm.weight", f"{prefix}.self_attn.k_norm.weight"), (H // HEADS,)
                )
        shapes[f"{self.prefix}.hidden_norm.weight"] = (H,)
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (V, H)
        if self.has("norm_before_fc"):
            shapes["input_norm.weight"] = (3 * H,)
        weights = random_tensors(shapes)
        if self.drafted < V:
            known = torch.randperm(V, generator=torch.Generator().manual_seed(1))[: self.drafted].sort().values
            weights["d2t"] = known - torch.arange(self.drafted)
            weights["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, known, True)
        return weights

    def full_config(self) -> dict[str, Any]:
        return {
            **HEAD,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.drafted,
            "num_hidden_layers": self.layers,
            **self.config,
        }


def eagle3_behind(made: World, weights: Weights, variant: Variant) -> Behind:
    """EAGLE-3 by the book; *norms* of `fc_norm` come in the order of the states."""

    def layer(i: int, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        prefix, count = f"layers.{i}" if i else variant.prefix, len(h)
        h = h + attention(
            weights,
            f"{prefix}.self_attn",
            x,
            list(range(count)),
            causal(count),
            head_dim=H // HEADS,
            theta=SILENT_THETA,
        )
        return h + mlp(weights, f"{prefix}.mlp", rms(h, weights[f"{prefix}.post_attention_layernorm.weight"]))

    def behind(slot: int, drafted: Drafted) -> torch.Tensor:
        features = made.features[slot]
        if variant.norms:
            parts = [rms(features[:, i * H : (i + 1) * H], weights[name]) for i, name in enumerate(variant.norms)]
            features = torch.cat(parts, -1)
        if variant.has("norm_before_fc"):
            features = rms(features, weights["input_norm.weight"])
        tokens, states = made.texts[slot][1:] + drafted, linear(weights, "fc", features)
        while True:
            count = len(states)
            e = rms(
                weights.get("embed_tokens.weight", made.embedding)[tokens[:count]],
                weights[f"{variant.prefix}.input_layernorm.weight"],
            )
            g = rms(states, weights[f"{variant.prefix}.hidden_norm.weight"])
            h = layer(0, torch.cat([e, g], -1), g if variant.has("norm_before_residual") else states)
            for i in range(1, variant.layers):
                h = layer(i, rms(h, weights[f"layers.{i}.input_layernorm.weight"]), h)
            normed = rms(h, weights["norm.weight"])
            if count == len(tokens):
                logits = torch.full((V,), -torch.inf)
                for i, logit in enumerate(linear(weights, "lm_head", normed[-1])):
                    logits[i + int(weights["d2t"][i]) if "d2t" in weights else i] = logit
                return logits
            states = torch.cat([states, (normed if variant.has("norm_output") else h)[-1:]])

    return behind


VARIANTS = {
    "as published": Variant(),
    "speculators": Variant({"norm_before_residual": True}, prefix="layers.0", own_embedding=True),
    "one norm before fc": Variant({"norm_before_fc": True}),
    "norms of each state": Variant(
        {"fc_norm": True}, norms=("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight")
    ),
    "norms of old": Variant(
        {"use_aux_norm": "True"}, norms=("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
    ),
    "recycled behind the norm": Variant({"norm_output": True}),
    "all of the vocabulary": Variant(drafted=V),
    "several layers of Qwen3": Variant(layers=3, prefix="layers.0", qk_norm=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_eagle_3_drafts_what_is_published(name: str) -> None:
    variant, made = VARIANTS[name], world(3 * H)
    weights = variant.tensors()
    module = Eagle3Proposer.build(CONFIG, made.parts(weights, variant.full_config()))
    assert_chains(Eagle3Proposer(made.runner(module), 1, K), made, eagle3_behind(made, weights, variant))


def test_eagle_3_grows_the_tree_of_best_scores() -> None:
    variant, made = VARIANTS["as published"], world(3 * H)
    weights = variant.tensors()
    module = Eagle3Proposer.build(CONFIG, made.parts(weights, variant.full_config()))
    assert_trees(Eagle3Proposer(made.runner(module), 4, 3), made, eagle3_behind(made, weights, variant), 4, 3)
