"""Tiny targets made of tensors: texts, their hidden states, and the expected drafts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from protos.config.engine import SpeculativeConfig
from protos.draft import DraftRow
from tests.support.models import published
from tests.support.models.dense_runner import DenseRunner, FakeParts, Text
from tests.support.models.published import Drafted, Weights

V, H, HEADS, KV_HEADS, INNER = 40, 16, 4, 2, 24
THETA = 20.0
SILENT_THETA = 10000.0
"""Base of an EAGLE draft's rotary positions if its config states none, as in EAGLE's `cnets.py`."""
K = 5
TARGET = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "rope_theta": THETA,
}
HEAD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}
CONFIG = SpeculativeConfig(method="eagle", num_speculative_tokens=K)


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Weights:
    """Return weights with a large spread, so that attention is far from uniform; norms near one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * drawn if "norm" in name else 0.4 * drawn
    return tensors


def layer_shapes(prefix: str, reads: int = H, head_dim: int = H // HEADS) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * head_dim, reads),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * head_dim, reads),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * head_dim, reads),
        f"{prefix}.self_attn.o_proj.weight": (H, HEADS * head_dim),
        f"{prefix}.mlp.gate_proj.weight": (INNER, H),
        f"{prefix}.mlp.up_proj.weight": (INNER, H),
        f"{prefix}.mlp.down_proj.weight": (H, INNER),
        f"{prefix}.post_attention_layernorm.weight": (H,),
    }


@dataclass
class World:
    """Random texts, their hidden states, and the noise of each."""

    embedding: torch.Tensor
    head: torch.Tensor
    texts: list[list[int]]
    features: list[torch.Tensor]
    noise: torch.Tensor

    def parts(self, stored: Weights, config: dict[str, Any]) -> FakeParts:
        return FakeParts(stored, config, TARGET, self.embedding, self.head)

    def runner(self, module: Any) -> DenseRunner:
        texts = [Text(tokens, features) for tokens, features in zip(self.texts, self.features, strict=True)]
        return DenseRunner(module, texts, self.noise)


def world(width: int, seed: int = 3, heat: float = 1.0, counts: tuple[int, ...] = (2, 7, 12)) -> World:
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(V, (count,), generator=generator).tolist() for count in counts]
    uniform = torch.rand(len(texts), K + 1, V, generator=generator)
    return World(
        embedding=torch.randn(V, H, generator=generator),
        head=torch.randn(V, H, generator=generator),
        texts=texts,
        features=[torch.randn(len(tokens) - 1, width, generator=generator) for tokens in texts],
        noise=-torch.log(-torch.log(uniform)) * heat,
    )


ROWS = [DraftRow(0, 2), DraftRow(1, K), DraftRow(2, 3)]
Behind = Callable[[int, Drafted], torch.Tensor]


def assert_chains(proposer: Any, made: World, behind: Behind) -> None:
    for row, draft in zip(ROWS, proposer.propose(ROWS), strict=True):
        wanted = published.chain(lambda drafted, slot=row.slot: behind(slot, drafted), made.noise[row.slot], row.k)
        assert list(draft.tokens) == wanted
        assert draft.is_chain


def assert_trees(proposer: Any, made: World, behind: Behind, width: int, depth: int) -> None:
    rounds = [[DraftRow(0, 7), DraftRow(1, 14), DraftRow(2, 3)], [DraftRow(2, 1), DraftRow(0, 6)]]
    drafts = [draft for rows in rounds for draft in proposer.propose(rows)]
    for row, draft in zip([row for rows in rounds for row in rows], drafts, strict=True):
        wanted = published.dynamic_tree(
            lambda drafted, slot=row.slot: behind(slot, drafted),
            made.noise[row.slot],
            k=row.k,
            width=width,
            depth=depth,
        )
        assert len(draft.tokens) == row.k
        assert published.paths(draft.tokens, draft.parents) == wanted
