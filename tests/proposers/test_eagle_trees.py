"""EAGLE-2's trees, token by token and parent by parent, against the authors' procedure.

The procedure (EAGLE's `cnets.py`, `topK_genrate`): the best `top_k` first tokens are fed as one level. `depth` times, a
level of `top_k` nodes is fed, each gives its `top_k` best children, and the `top_k` children with the highest sums of
log-probabilities are the next level. All children that were ever found are then ranked by these sums, and the best
`total_token - 1` are kept. A tree therefore has up to `depth` + 1 levels, and `top_k` * `depth` nodes are fed.
"""

from collections.abc import Callable
from pathlib import Path as Folder
from typing import Any

import numpy as np
import pytest
import torch

from cluster import assemble
from proposers.eagle import EagleProposer
from proposers.shared.dynamic_tree import TreeShape
from protos.config.engine import SpeculativeConfig
from protos.config.speculation import read
from protos.draft import Draft, DraftRow
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox
from tests.proposers.test_attention_drafters import eagle_behind, eagle_tensors
from tests.support.distributed.engine import Engine, configure
from tests.support.models import synthetic_layers, tiny_models
from tests.support.models.drafter_world import HEAD, H, World, world

Path = tuple[int, ...]
LogitsAfter = Callable[[Path], np.ndarray]
SHAPES = [(60, 7, 10), (60, 5, 10), (24, 4, 6), (9, 3, 4), (12, 2, 3)]
"""The authors' total_token, depth and top_k."""


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    shifted_V = logits_V - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def authors_tree(
    logits_after: LogitsAfter, total_token: int, depth: int, top_k: int, threshold: float = 0.0
) -> dict[Path, float]:
    """Return the paths of the tree with their sums of log-probabilities.

    What the authors do not have: below a node whose own probability is less than *threshold* there is none.
    """
    sums: dict[Path, float] = {}

    def children(path: Path) -> dict[Path, float]:
        log_p_V = log_softmax(logits_after(path).astype(np.float64))
        best = np.argsort(-log_p_V)[:top_k]
        return {(*path, int(token)): sums.get(path, 0.0) + log_p_V[token] for token in best}

    level = children(())
    sums |= level
    for _ in range(depth):
        found: dict[Path, float] = {}
        for path in level:
            if np.exp(sums[path] - sums.get(path[:-1], 0.0)) >= threshold:
                found |= children(path)
        sums |= found
        level = dict(sorted(found.items(), key=lambda item: -item[1])[:top_k])
    return dict(sorted(sums.items(), key=lambda item: -item[1])[: total_token - 1])


def shape_of(total_token: int, depth: int, top_k: int) -> dict[str, Any]:
    """Return the authors' shape under this engine's keys."""
    return {"num_speculative_tokens": total_token - 1, "num_steps": depth + 1, "eagle_topk": top_k}


def paths_of(draft: Draft) -> list[Path]:
    found: list[Path] = []
    for token, parent in zip(draft.tokens, draft.node_parents(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def greedy_world(spread: float = 1.0) -> World:
    made = world(H, heat=0.0)
    made.head *= spread
    made.noise = torch.zeros(len(made.texts), 16, made.noise.shape[2])
    return made


def proposer_of(made: World, weights: dict[str, torch.Tensor], shape: dict[str, Any]) -> EagleProposer:
    config = SpeculativeConfig(method="eagle", **shape)
    return EagleProposer.create(config, made.runner(EagleProposer.build(config, made.parts(weights, HEAD))))


@pytest.mark.parametrize("spread", [0.003, 0.03, 0.3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_has_the_tokens_and_parents_of_the_authors(shape: tuple[int, int, int], spread: float) -> None:
    """With a small *spread* of the logits, trees are wide; with a large one, deep."""
    made, weights = greedy_world(spread), eagle_tensors(bias=True)
    behind, rows = eagle_behind(made, weights), [DraftRow(slot, shape[0] - 1) for slot in range(len(made.texts))]
    drafts = proposer_of(made, weights, shape_of(*shape)).propose(rows)
    for slot, draft in enumerate(drafts):
        wanted = authors_tree(lambda path, slot=slot: behind(slot, list(path)).numpy(), *shape)
        assert len(draft) == shape[0] - 1
        assert set(paths_of(draft)) == set(wanted)


@pytest.mark.parametrize("threshold", [0.2, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nodes_of_low_confidence_get_no_children(
    shape: tuple[int, int, int], threshold: float, monkeypatch: Any
) -> None:
    made, weights = greedy_world(0.3), eagle_tensors(bias=True)
    behind, rows = eagle_behind(made, weights), [DraftRow(slot, shape[0] - 1) for slot in range(len(made.texts))]
    proposer, fed = proposer_of(made, weights, shape_of(*shape) | {"assistant_confidence_threshold": threshold}), []
    grow = proposer.runner.grow
    monkeypatch.setattr(
        proposer.runner, "grow", lambda rows, level: fed.append(len(level.tokens_N)) or grow(rows, level)
    )
    for slot, draft in enumerate(proposer.propose(rows)):
        wanted = authors_tree(lambda path, slot=slot: behind(slot, list(path)).numpy(), *shape, threshold)
        assert set(paths_of(draft)) == set(wanted)
    assert sum(fed) < len(rows) * shape[1] * shape[2]
    assert 0 not in fed


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_draft_is_fed_top_k_nodes_of_each_level(shape: tuple[int, int, int], monkeypatch: Any) -> None:
    made, weights = greedy_world(), eagle_tensors(bias=True)
    proposer, fed = proposer_of(made, weights, shape_of(*shape)), []
    grow = proposer.runner.grow
    monkeypatch.setattr(
        proposer.runner, "grow", lambda rows, level: fed.append(len(level.tokens_N)) or grow(rows, level)
    )
    proposer.propose([DraftRow(1, shape[0] - 1)])
    assert fed == [shape[2]] * shape[1]


def test_beams_are_narrowed_to_the_room_in_the_cache() -> None:
    shape = TreeShape(10, 8)
    rooms = np.array([1000, 70, 69, 21, 8])
    assert shape.num_fed(np.full(5, shape.depth_of(DraftRow(0, 59))), rooms).tolist() == [10, 10, 9, 3, 1]
    assert shape.num_fed(np.array([shape.depth_of(DraftRow(0, 59, depth=3))]), np.array([59])).tolist() == [10]


def test_places_for_drafting_are_those_of_all_nodes_fed() -> None:
    def places(**keys: Any) -> int:
        config = read(keys, None)
        assert config is not None
        return config.draft_places

    eagle = {"method": "eagle", "model": "m"}
    assert places(**eagle, **shape_of(60, 7, 10)) == 70
    assert places(**eagle, num_speculative_tokens=5, draft_shape="chain") == 5
    assert places(**eagle, num_speculative_tokens=3, eagle_topk=4, num_steps=6) == 8
    assert places(method="recurrent", model="m", num_speculative_tokens=20, eagle_topk=10, num_steps=5) == 20


@pytest.mark.parametrize("block_size", [4, 16])
def test_an_engine_has_room_for_ten_beams_at_eight_levels(tmp_path: Folder, block_size: int, monkeypatch: Any) -> None:
    target = tiny_models.build("llama", tmp_path / "target", vocab_size=60)
    draft = synthetic_layers.eagle(target).write(tmp_path / "draft")
    speculative = {"method": "eagle", "model": str(draft), **shape_of(60, 7, 10)}
    config = configure(
        (target, target),
        speculative_config=speculative,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=200,
        block_size=block_size,
        max_model_len=128,
    )
    engine = Engine(assemble.build(config, LocalInbox(), report=lambda line: None))
    worker = engine.built.executor.rank.source.worker
    grow, fed = worker.grow, []
    monkeypatch.setattr(
        worker, "grow", lambda rows, level: fed.append(level.row_N.bincount().tolist()) or grow(rows, level)
    )
    engine.put(
        *[
            Request(str(i), tuple(range(3, 9 + i)), SamplingParams(ignore_eos=True), Sampling(i, 0.0), 30)
            for i in range(2)
        ]
    )
    engine.finish()
    engine.built.shutdown()
    assert {count for level in fed[:7] for count in level} == {10}
    assert len(fed[:7]) == 7
