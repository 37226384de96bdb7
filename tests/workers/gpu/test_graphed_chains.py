"""A draft model that is alone in its process drafts with one graph what it drafts without, whatever was accepted."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.settings import engine_config
from protos.draft import Draft
from protos.messages import NewSequence, RoundPlan, Row, Sampling
from protos.worker_messages import Allocate
from tests.support.gpu.counts import Counts
from tests.support.gpu.engine import only
from tests.support.gpu.machine import pretended_gpu
from tests.support.models.tiny_models import build
from workers.build import make_draft
from workers.draft.engine import DraftEngine
from workers.draft.load import load_draft
from workers.gpu.graphed_chains import GraphedChains
from workers.model.loader import pick_device

K, BLOCKS, ROWS = 4, 48, 3
SAMPLING = [Sampling(seed=5, temperature=0.0), Sampling(seed=6), Sampling(seed=7, temperature=0.8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


def make_engine(model: Path, device: str) -> DraftEngine:
    speculative = {"method": "draft_model", "model": str(model), "num_speculative_tokens": K, "policy": "fixed"}
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": ROWS, "max_model_len": 64}
    options |= {"speculative_config": speculative, "enforce_eager": device == "cpu", "device": device}
    config = engine_config({"model": str(model), **options})
    draft = load_draft(config, None, print)
    assert draft is not None
    allocate = Allocate(num_blocks=BLOCKS, max_model_len=64, vocab_size=96)
    return make_draft(config, draft, allocate, pick_device(device), lambda _line: None)[0]


def rounds(engine: DraftEngine, sampling: list[Sampling], after: Callable[[], None]) -> list[list[Draft]]:
    """Draft for some rounds, in which random parts of drafts are accepted, and rows join and skip."""
    rng, found = random.Random(3), []
    known = [rng.choices(range(3, 90), k=3 + 5 * slot) for slot in range(ROWS)]
    sent = [0] * ROWS
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
                    k=K - (number + slot) % 3,
                    new_token_ids=known[slot][sent[slot] :],
                    new_block_ids=list(blocks),
                    new_block_versions=[1] * len(blocks),
                )
            )
            sent[slot] = len(known[slot])
        plan = RoundPlan(number, rows, new, speculates=True)
        engine.worker.slots.apply(plan)
        drafts = engine.propose(plan, rows).drafts
        found.append(list(drafts))
        after()
        for row, draft in zip(rows, drafts, strict=True):
            known[row.slot] += [*draft.tokens[: rng.randrange(len(draft) + 1)], rng.randrange(3, 90)]
        if 1 not in slots:
            known[1] += [rng.randrange(3, 90)] * 2  # the target went on without the draft
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.5], ids=["graphs", "penalties: no graph"])
def test_drafts_are_those_of_the_ordinary_path(model: Path, penalty: float) -> None:
    sampling = [Sampling(each.seed, each.temperature, presence_penalty=penalty) for each in SAMPLING]
    expected = rounds(make_engine(model, "cpu"), sampling, lambda: None)
    counts: list[Counts] = []
    with pretended_gpu() as machine, only(ROWS, "greedy", "drawn"):
        engine = make_engine(model, "cuda")
        assert isinstance(engine.proposer, GraphedChains)
        machine.reset()
        found = rounds(engine, sampling, lambda: counts.append(machine.reset()))
    assert found == expected
    assert all(len(draft) for drafts in found for draft in drafts)
    budget: dict[str, Any] = {"kernels": 0, "graphs": 1, "to_device": 1, "blocking": 0, "to_host": 1, "syncs": 1}
    graphed = [each for each in counts if each.budget() == budget]
    assert len(graphed) == 0 if penalty else len(graphed) >= 5  # the others feed prompts, and what rows missed
    assert max(each.syncs.total() for each in counts) == 1 or penalty
