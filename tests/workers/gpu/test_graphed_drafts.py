"""A draft model that is alone in its process drafts with one graph what it drafts without, whatever was accepted."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.settings import engine_config
from protos.draft import Draft
from protos.messages import NewSequence, RoundPlan, Row, Sampling
from protos.worker_messages import Allocate
from tests.support.gpu.counts import Counts
from tests.support.gpu.engine import lasting_tensors, only
from tests.support.gpu.machine import interpreted_kernels, pretended_gpu
from tests.support.models import synthetic_layers
from tests.support.models.tiny_models import build
from workers.build import make_draft
from workers.draft.engine import DraftEngine
from workers.draft.load import load_draft
from workers.features import Features
from workers.gpu.drafts.graphed_drafts import GraphedDrafts
from workers.gpu.sizes import SamplerKind
from workers.model.loader import pick_device

BLOCKS, ROWS = 48, 3
SAMPLING = [Sampling(seed=5, temperature=0.0), Sampling(seed=6), Sampling(seed=7, temperature=0.8)]
LIMITED = [*SAMPLING[:2], Sampling(seed=7, temperature=0.9, top_p=0.7, top_k=12)]
GREEDY = [Sampling(seed=seed, temperature=0.0) for seed in (5, 6, 7)]
CHAIN = {"num_speculative_tokens": 4}
TREE = {"num_speculative_tokens": 8, "eagle_topk": 3, "num_steps": 4}
WIDE = {"num_speculative_tokens": 20, "eagle_topk": 24, "num_steps": 4}
"""Feeds more nodes than a word has bits, and than rows have room for."""
CONFIDENT = {**TREE, "assistant_confidence_threshold": 0.02}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_layers.eagle(model).write(tmp_path_factory.mktemp("head"))


def make_engine(model: Path, device: str, shape: dict[str, Any]) -> DraftEngine:
    speculative = {"method": "draft_model", "model": str(model), "policy": "fixed", **shape}
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": ROWS, "max_model_len": 64}
    options |= {"speculative_config": speculative, "enforce_eager": device == "cpu", "device": device}
    config = engine_config({"model": str(model), **options})
    draft = load_draft(config, None, print)
    assert draft is not None
    allocate = Allocate(num_blocks=BLOCKS, max_model_len=64, vocab_size=96)
    return make_draft(config, draft, allocate, pick_device(device), lambda _line: None)[0]


def path(draft: Draft, rng: random.Random) -> list[int]:
    """Return the tokens on a random path of a draft, which may be empty."""
    node, tokens, parents = rng.randrange(-1, len(draft)), list[int](), draft.node_parents()
    while node >= 0:
        tokens.insert(0, draft.tokens[node])
        node = parents[node]
    return tokens


def send_features(engine: DraftEngine, slot: int, first: int, end: int) -> None:
    """Give the draft features of a slot's positions, which depend on nothing but slot and position."""
    generator = torch.Generator().manual_seed(slot)
    states_NF = torch.randn(80, engine.width, generator=generator)[first:end].to(engine.worker.forward.loaded.device)
    generation = int(engine.worker.slots.generation[slot])
    engine.worker.receive(Features(np.array([[slot, generation, first, end - first]]), states_NF))


def rounds(
    engine: DraftEngine, sampling: list[Sampling], after: Callable[[], None], most: int = 4
) -> list[list[Draft]]:
    """Draft for some rounds, in which random parts of drafts are accepted, and rows join and skip."""
    rng, found = random.Random(3), []
    known = [rng.choices(range(3, 90), k=3 + 5 * slot) for slot in range(ROWS)]
    sent, fed = [0] * ROWS, [0] * ROWS
    for number in range(9):
        slots = [slot for slot in range(ROWS) if number >= slot and (slot != 1 or number not in {4, 5})]
        new = [
            NewSequence(slot, known[slot], len(known[slot]), sampling[slot], slot + 1)
            for slot in slots
            if not sent[slot]
        ]
        rows = []
        for slot in slots:
            blocks = range(slot * 5, slot * 5 + 5) if not sent[slot] else ()
            rows.append(
                Row(
                    slot,
                    len(known[slot]) - 1,
                    1,
                    len(known[slot]),
                    k=most - (number + slot) % 3,
                    new_token_ids=known[slot][sent[slot] :],
                    new_block_ids=list(blocks),
                    new_block_versions=[1] * len(blocks),
                )
            )
            sent[slot] = len(known[slot])
        plan = RoundPlan(number, rows, new, speculates=True)
        engine.worker.slots.apply(plan)
        for row in rows if engine.width else ():
            send_features(engine, row.slot, fed[row.slot], row.known_len - 1)
            fed[row.slot] = row.known_len - 1
        after()
        drafts = engine.propose(plan, rows).drafts
        found.append(list(drafts))
        after()
        for row, draft in zip(rows, drafts, strict=True):
            known[row.slot] += [*path(draft, rng), rng.randrange(3, 90)]
        if 1 not in slots:
            known[1] += [rng.randrange(3, 90)] * 2  # the target went on without the draft
    return found


BUDGET = {"kernels": 0, "graphs": 1, "to_device": 1, "blocking": 0, "to_host": 1, "syncs": 1}


def compare(
    model: Path, sampling: list[Sampling], shape: dict[str, Any], *kinds: SamplerKind, has_kernels: bool = False
) -> list[Counts]:
    """Draft with graphs and on a CPU, compare the drafts, and return what each round asked of the device."""
    most = shape["num_speculative_tokens"]
    expected = rounds(make_engine(model, "cpu", shape), sampling, lambda: None, most)
    counts: list[Counts] = []
    kernels = interpreted_kernels() if has_kernels else contextlib.nullcontext()
    with pretended_gpu() as machine, kernels, only(ROWS, *kinds):
        engine = make_engine(model, "cuda", shape)
        assert isinstance(engine.proposer, GraphedDrafts)
        found = rounds(engine, sampling, lambda: counts.append(machine.reset()), most)
    counts = counts[1::2]  # those of drafting, without those of features that arrive
    assert found == expected
    assert all(len(draft) for drafts in found for draft in drafts)
    static = lasting_tensors(engine)
    for graph in machine.capture.graphs:
        graph.reads_only(static)
    return counts


def test_penalties_of_chains_are_those_of_the_ordinary_path(model: Path) -> None:
    sampling = [Sampling(each.seed, each.temperature, presence_penalty=2.0) for each in SAMPLING]
    counts = compare(model, sampling, CHAIN, "drawn", has_kernels=True)
    assert sum(each.budget() == BUDGET for each in counts) >= 3


@pytest.mark.parametrize("penalty", [0.0, 0.5], ids=["graphs", "penalties without kernels"])
def test_chains_are_those_of_the_ordinary_path(model: Path, penalty: float) -> None:
    sampling = [Sampling(each.seed, each.temperature, presence_penalty=penalty) for each in SAMPLING]
    counts = compare(model, sampling, CHAIN, "greedy", "drawn")
    graphed = [each for each in counts if each.budget() == BUDGET]
    assert len(graphed) == 0 if penalty else len(graphed) >= 5  # the others feed prompts, and what rows missed
    assert max(each.syncs.total() for each in counts) == 1 or penalty


@pytest.mark.parametrize(
    ("sampling", "shape", "kind"),
    [
        (GREEDY, TREE, "greedy"),
        (SAMPLING, TREE, "drawn"),
        (LIMITED, TREE, "limited"),
        (GREEDY, WIDE, "greedy"),
        (SAMPLING, CONFIDENT, "drawn"),
        (LIMITED, {**TREE, "num_steps": 1}, "limited"),
    ],
    ids=["greedy", "drawn", "limited", "wide", "threshold", "one level"],
)
def test_trees_are_those_of_the_ordinary_path(
    model: Path, sampling: list[Sampling], shape: dict[str, Any], kind: SamplerKind
) -> None:
    counts = compare(model, sampling, shape, "greedy", "drawn", kind)
    assert sum(each.budget() == BUDGET for each in counts) >= 5
    assert max(each.syncs.total() for each in counts) == 1


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_that_read_features_are_those_of_the_ordinary_path(
    model: Path, head: Path, shape: dict[str, Any]
) -> None:
    """Features that arrive from another process are copied to where the graph reads them: once for each row."""
    counts = compare(model, SAMPLING, {"method": "eagle", "model": str(head), **shape}, "greedy", "drawn")
    graphed = [each for each in counts if each.graphs == 1]
    assert len(graphed) >= 5
    assert min(each.kernels.total() for each in graphed) <= ROWS
    assert max(each.syncs.total() for each in graphed) == 1
