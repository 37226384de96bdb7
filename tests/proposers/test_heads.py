"""Medusa, Hydra, MLP-speculator and ReDrafter guess what the published mathematics says, from public checkpoints."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from proposers import registry
from proposers.recurrent import RecurrentProposer
from proposers.shared.heads import HeadsProposer
from proposers.shared.static_tree import StaticTree
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.errors import ConfigError
from tests.support.models.dense_runner import DenseRunner, FakeParts, Text
from tests.support.models.published import Weights, linear, rms

V, H = 61, 12
TARGET = {"model_type": "llama", "vocab_size": V, "hidden_size": H, "num_hidden_layers": 4, "num_attention_heads": 3,
          "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 20, "max_position_embeddings": 128,
          "rms_norm_eps": 1e-5, "rope_theta": 5000.0}  # fmt: skip
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2), (2,), (0, 1, 0))
KS = (9, 2, 4, 1)
LENGTHS = (5, 1 + 1, 9, 3)
Path = tuple[int, ...]
LogitsBehind = Callable[[Path], torch.Tensor]


def some(*shape: int, seed: int = 0, spread: float = 0.5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))) * spread


def weights(**shapes: tuple[int, ...]) -> Weights:
    return {name: some(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def named(shapes: dict[str, tuple[int, ...]]) -> Weights:
    return weights(**shapes)


class Scene:
    """A module built from a checkpoint, and rows of unlike lengths that want unlike numbers of tokens."""

    def __init__(
        self, method: str, config: dict[str, Any], stored: Weights, *, warmth: float, k: int = 9, **speculative: Any
    ) -> None:
        self.embedding, self.head = some(V, H, seed=91), some(V, H, seed=92)
        self.config = SpeculativeConfig(method=method, num_speculative_tokens=k, model="here", **speculative)
        parts = FakeParts(stored, config, TARGET, self.embedding, self.head)
        self.proposer_class: Any = registry.load(method)
        self.texts = [
            Text([(7 * i + 3 * s) % V for i in range(n)], some(n - 1, H, seed=50 + s)) for s, n in enumerate(LENGTHS)
        ]
        self.noise_SKV = some(len(KS), 9, V, seed=93, spread=1.0) * warmth
        self.runner = DenseRunner(self.proposer_class.build(self.config, parts), self.texts, self.noise_SKV)

    def propose(self) -> list[Draft]:
        proposer = self.proposer_class.create(self.config, self.runner)
        return proposer.propose([DraftRow(slot, k) for slot, k in enumerate(KS)])

    def state(self, slot: int) -> torch.Tensor:
        features = self.texts[slot].features
        assert features is not None
        return features[-1]


def paths_of(draft: Draft) -> list[Path]:
    """The path to each node of a chain or a tree."""
    found: list[Path] = []
    for node, token in enumerate(draft.tokens):
        parent = draft.parents[node] if draft.parents else node - 1
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def path_of(choice: Path, behind: LogitsBehind, noise_KV: torch.Tensor) -> Path:
    """Follow a choice: at each depth the guess of that rank."""
    path: Path = ()
    for depth, rank in enumerate(choice):
        scores = behind(path).log_softmax(-1) + noise_KV[depth]
        path = (*path, int(scores.sort(descending=True).indices[rank]))
    return path


def check(scene: Scene, behind: Callable[[int, Path], torch.Tensor], choices: tuple[Path, ...]) -> None:
    """Every row holds the paths of its first choices, and nothing else."""
    for slot, draft in enumerate(scene.propose()):
        wanted = [path_of(choice, partial(behind, slot), scene.noise_SKV[slot]) for choice in choices[: KS[slot]]]
        assert paths_of(draft) == wanted
        assert all(parent < node for node, parent in enumerate(draft.parents))


def chain(length: int) -> tuple[Path, ...]:
    return tuple((0,) * depth for depth in range(1, length + 1))


warm = pytest.mark.parametrize("warmth", [0.0, 1.0], ids=["greedy", "drawn"])


# MLP-speculator

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


def mlp_logits(stored: Weights, state: torch.Tensor, tokens: Path, *, tied: bool, scaled: bool) -> torch.Tensor:
    def weight(part: str, i: int, leaf: str = "weight") -> torch.Tensor:
        return stored[f"speculator.{part}.{min(i, int(part == 'proj')) if tied else i}.{leaf}"]

    state_weight = 0.5 ** (0.5 / HEADS)
    token_weight = math.sqrt((1 - state_weight**2) * INNER / 2)
    if scaled:
        state = rms(state, torch.ones(H)) / math.sqrt(2)
    for i, token in enumerate(tokens):
        mixed = weight("proj", i) @ state * state_weight + weight("emb", i)[token] * token_weight
        normed = rms(mixed, weight("ln", i)) + weight("ln", i, "bias")
        state = normed * 0.5 * (1 + torch.erf(normed / math.sqrt(2)))
    return weight("head", len(tokens) - 1) @ state


@warm
@pytest.mark.parametrize(("tied", "scaled"), [(False, False), (True, True)])
@pytest.mark.parametrize("tree", [None, TREE])
def test_mlp_speculator(tied: bool, scaled: bool, warmth: float, tree: tuple[Path, ...] | None) -> None:
    config, stored = mlp_checkpoint(tied=tied, scaled=scaled)
    scene = Scene("mlp_speculator", config, stored, warmth=warmth, speculative_token_tree=tree)

    def behind(slot: int, path: Path) -> torch.Tensor:
        tokens = (scene.texts[slot].tokens[-1], *path)
        return mlp_logits(stored, scene.state(slot), tokens, tied=tied, scaled=scaled)

    check(scene, behind, chain(HEADS) if tree is None else StaticTree.of(TREE, HEADS, 0.9).choices)


def test_fewer_tokens_than_were_trained_leave_the_weights_alone() -> None:
    config, stored = mlp_checkpoint(tied=False, scaled=False)
    scene = Scene("mlp_speculator", config, stored, warmth=0.0, k=2)

    def behind(slot: int, path: Path) -> torch.Tensor:
        tokens = (scene.texts[slot].tokens[-1], *path)
        return mlp_logits(stored, scene.state(slot), tokens, tied=False, scaled=False)

    check(scene, behind, chain(2))


def test_more_tokens_than_heads_are_cut_and_said(caplog: pytest.LogCaptureFixture) -> None:
    config, stored = mlp_checkpoint(tied=False, scaled=False)
    drafts = Scene("mlp_speculator", config, stored, warmth=0.0, k=9).propose()
    assert [len(draft) for draft in drafts] == [min(k, HEADS) for k in KS]
    assert "mlp_speculator checkpoint has 4 heads" in caplog.text


# Medusa


def medusa_checkpoint(output: str) -> tuple[dict[str, Any], Weights]:
    """Three heads of two blocks; outputs of their own, as vLLM converts them truncated, or the target's."""
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


def medusa_logits(scene: Scene, stored: Weights, output: str, state: torch.Tensor, head: int) -> torch.Tensor:
    for j in range(2):
        name = f"medusa_heads.blocks.{head}.layers.{j}" if output == "truncated" else f"{head}.{j}.linear"
        inner = linear(stored, name, state)
        state = state + inner * torch.sigmoid(inner)
    if output == "target":
        return scene.head @ state
    if output == "own":
        return stored[f"{head}.2.weight"] @ state
    logits = torch.full((V,), -torch.inf)
    for row, token in enumerate(stored["token_map"].tolist()):
        logits[token] = stored[f"lm_heads.{head}.weight"][row] @ state
    return logits


@warm
@pytest.mark.parametrize("output", ["own", "target", "truncated"])
@pytest.mark.parametrize("tree", [None, chain(3), TREE], ids=["usual", "chain", "given"])
def test_medusa(output: str, warmth: float, tree: tuple[Path, ...] | None) -> None:
    config, stored = medusa_checkpoint(output)
    scene = Scene("medusa", config, stored, warmth=warmth, speculative_token_tree=tree)

    def behind(slot: int, path: Path) -> torch.Tensor:
        return medusa_logits(scene, stored, output, scene.state(slot), len(path))

    wanted = StaticTree.best(9, 3, 0.8) if tree is None else StaticTree.of(tree, 3, 0.8)
    check(scene, behind, wanted.choices)


# Hydra


def hydra_checkpoint(arch: str, *, grounded: bool, stored_once: bool) -> tuple[dict[str, Any], Weights]:
    """Three heads of three blocks, of which the later two are one module."""
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
    """Make a block behind the first of those that repeat the same as it, or leave it out."""
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


def hydra_logits(stored: Weights, arch: str, read: torch.Tensor, head: int) -> torch.Tensor:
    is_prefix = arch == "prefix-mlp"
    for k in range(3):
        name = f"hydra_mlp.{head}.{2 * k + 1 if is_prefix else k}"
        while f"{name}.linear.weight" not in stored:
            name = f"hydra_mlp.{head}.{int(name.split('.')[2]) - (2 if is_prefix else 1)}"
        inner = linear(stored, f"{name}.linear", read)
        passed = linear(stored, f"{name}.res_connection", read) if len(inner) != len(read) else read
        read = passed + inner * torch.sigmoid(inner)
    return linear(stored, f"hydra_lm_head.{head}" + (".1" if is_prefix else ""), read)


@warm
@pytest.mark.parametrize(
    ("arch", "grounded", "stored_once"),
    [
        ("mlp", True, True),
        ("mlp", True, False),
        ("mlp", False, True),
        ("prefix-mlp", True, False),
    ],
)
@pytest.mark.parametrize("tree", [None, chain(3), TREE], ids=["usual", "chain", "given"])
def test_hydra(arch: str, grounded: bool, stored_once: bool, warmth: float, tree: tuple[Path, ...] | None) -> None:
    config, stored = hydra_checkpoint(arch, grounded=grounded, stored_once=stored_once)
    scene = Scene("hydra", config, stored, warmth=warmth, speculative_token_tree=tree)

    def behind(slot: int, path: Path) -> torch.Tensor:
        state = scene.state(slot)
        if arch == "prefix-mlp":
            features = scene.texts[slot].features
            assert features is not None
            state = prefix_model()(inputs_embeds=features[None], use_cache=False).last_hidden_state[0, -1]
        tokens = (scene.texts[slot].tokens[-1], *path)
        read = torch.cat([state, *(scene.embedding[token] for token in tokens)]) if grounded else state
        return hydra_logits(stored, arch, read, len(path))

    wanted = StaticTree.best(9, 3, 0.9) if tree is None else StaticTree.of(tree, 3, 0.9)
    check(scene, behind, wanted.choices)


# ReDrafter

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


def redrafter_logits(scene: Scene, stored: Weights, slot: int, path: Path, *, rnn: bool) -> torch.Tensor:
    state = torch.zeros(H)
    for token in (scene.texts[slot].tokens[-1], *path):
        if rnn:
            inner = stored["rnn_w.weight"] @ scene.embedding[token] + linear(stored, "rnn_u", state)
            state = inner * torch.sigmoid(inner)
        else:
            state = state + scene.embedding[token]
    read = torch.cat([scene.state(slot), state])
    if "input_proj.weight" in stored:
        read = linear(stored, "input_proj", read)
    for j in range(2):
        inner = linear(stored, f"lm_head.{j}.linear", read)
        read = read + inner * torch.sigmoid(inner)
    logits = stored["lm_head.2.weight"] @ read
    logits = logits - logits.max()
    return torch.where(logits >= logits.sort(descending=True).values[49], logits, -torch.inf)


def beam_nodes(behind: LogitsBehind, noise_KV: torch.Tensor, *, width: int, length: int, k: int) -> set[Path]:
    """Beam search over log-probabilities; among a beam's children only the *width* best by the noise take part."""
    beams: dict[Path, float] = {(): 0.0}
    nodes: dict[Path, float] = {}
    for depth in range(length):
        grown: dict[Path, float] = {}
        for path, score in beams.items():
            log_q = behind(path).log_softmax(-1)
            for token in (log_q + noise_KV[depth]).sort(descending=True).indices[:width].tolist():
                grown[(*path, token)] = score + float(log_q[token])
        beams = dict(sorted(grown.items(), key=lambda item: -item[1])[:width])
        nodes |= beams
    return set(sorted(nodes, key=lambda path: -nodes[path])[:k])


@warm
@pytest.mark.parametrize(("rnn", "exit_dim"), [(True, EXIT), (False, 2 * H)])
@pytest.mark.parametrize("width", [1, 3, 10])
def test_redrafter(rnn: bool, exit_dim: int, width: int, warmth: float) -> None:
    config, stored = redrafter_checkpoint(rnn=rnn, exit_dim=exit_dim)
    scene = Scene("recurrent", config, stored, warmth=warmth)
    proposer = RecurrentProposer(scene.runner, StaticTree.chain(9), width, length=3)
    drafts = proposer.propose([DraftRow(slot, k) for slot, k in enumerate(KS)])
    for slot, draft in enumerate(drafts):
        behind = partial(redrafter_logits, scene, stored, slot, rnn=rnn)
        wanted = beam_nodes(behind, scene.noise_SKV[slot], width=width, length=3, k=KS[slot])
        assert set(paths_of(draft)) == wanted
        assert len(paths_of(draft)) == len(wanted)


@warm
def test_redrafter_drafts_chains_of_any_length(warmth: float) -> None:
    config, stored = redrafter_checkpoint(rnn=True, exit_dim=EXIT)
    scene = Scene("recurrent", config, stored, warmth=warmth, speculative_token_tree=chain(9))
    check(scene, partial(redrafter_logits, scene, stored, rnn=True), chain(9))


# All of them

CHECKPOINTS: dict[str, tuple[dict[str, Any], Weights]] = {
    "mlp_speculator": mlp_checkpoint(tied=False, scaled=False),
    "medusa": medusa_checkpoint("own"),
    "hydra": hydra_checkpoint("mlp", grounded=True, stored_once=True),
    "recurrent": redrafter_checkpoint(rnn=True, exit_dim=EXIT),
}


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_what_they_are_fed(method: str) -> None:
    config, _ = CHECKPOINTS[method]
    proposer: type[HeadsProposer] = registry.load(method)  # type: ignore[assignment]
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=3, model="here")
    assert proposer.features_of(speculative, config, TARGET).needs == "last"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=method):
        proposer.create(speculative, None)


def test_a_hydra_prefix_is_fed_everything() -> None:
    config, _ = hydra_checkpoint("prefix-mlp", grounded=True, stored_once=True)
    speculative = SpeculativeConfig(method="hydra", num_speculative_tokens=3, model="here")
    assert registry.load("hydra").features_of(speculative, config, TARGET).needs == "all"  # type: ignore[attr-defined]
