"""Every family, fed in uneven chunks over paged KV, against the plain `transformers` forward."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, build
from transformers import AutoModelForCausalLM

from protos.config import ModelConfig
from protos.messages import NewSequence, Row, RoundPlan, Sampling
from workers.batch import Batch
from workers.loader import load
from workers.runner import ModelRunner
from workers.slots import SlotTable

BLOCK = 4
SLOTS = 4
LENGTHS = (37, 21, 31, 9)
PREFIX = 8
"""Rows 0 and 2 share their first PREFIX tokens, and the blocks that hold them."""

CHUNKS = (
    ((0, 8), (1, 5), (3, 1)),
    ((1, 1), (0, 17)),
    ((2, 3), (3, 2), (0, 1), (1, 6)),
    ((0, 1), (1, 1), (2, 1), (3, 1)),
    ((2, 18), (3, 1)),
    ((0, 5), (1, 5), (3, 4)),
    ((0, 5), (1, 3), (2, 1)),
)
"""Rounds of (slot, tokens); row 2 starts behind the shared prefix."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sequences(vocab: int = 96) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    rows = [rng.integers(3, vocab, n) for n in LENGTHS]
    rows[2][:PREFIX] = rows[0][:PREFIX]
    return rows


def fill(slots: SlotTable, rows: list[np.ndarray], num_blocks: int, block: int = BLOCK) -> None:
    """Give every row scattered blocks, descending ids included; row 2 shares row 0's prefix blocks."""
    free = list(np.random.default_rng(2).permutation(num_blocks))
    tables = [[int(free.pop()) for _ in range(-(-len(row) // block))] for row in rows]
    if len(rows) > 2:
        tables[2][: PREFIX // block] = tables[0][: PREFIX // block]
    new = [NewSequence(i, row.tolist(), len(row), Sampling(seed=0)) for i, row in enumerate(rows)]
    grown = [
        Row(i, 0, 1, len(row), new_block_ids=table, new_block_versions=[0] * len(table))
        for i, (row, table) in enumerate(zip(rows, tables, strict=True))
    ]
    slots.apply(RoundPlan(0, grown, new))


def paged_logits(runner: ModelRunner, rows: list[np.ndarray]) -> list[torch.Tensor]:
    """Feed CHUNKS and return each row's logits, `[tokens fed, V]`."""
    done = np.array([0, 0, PREFIX, 0])
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    for chunk in CHUNKS:
        slots_R = np.array([slot for slot, _ in chunk])
        lengths_R = np.array([length for _, length in chunk])
        batch = Batch.from_history(runner.slots.tokens, slots_R, done[slots_R], lengths_R)
        logits = runner.forward(batch, np.arange(len(batch.tokens_T)))
        for slot, part in zip(slots_R, logits.split(lengths_R.tolist()), strict=True):
            parts[slot].append(part.clone())
        done[slots_R] += lengths_R
    assert done.tolist() == list(LENGTHS)
    return [torch.cat(part) for part in parts]


def make_runner(folder: Path, rows: list[np.ndarray], num_blocks: int = 40) -> ModelRunner:
    loaded = load(ModelConfig(model=str(folder), device="cpu"))
    slots = SlotTable(SLOTS, 64, BLOCK)
    fill(slots, rows, num_blocks)
    return ModelRunner(loaded, slots, num_blocks, BLOCK)


def reference_logits(folder: Path, rows: list[np.ndarray], attention: str) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        return [model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0] for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_equal_the_plain_forward(family: str, tmp_path: Path) -> None:
    rows = sequences()
    folder = build(family, tmp_path)
    ours = paged_logits(make_runner(folder, rows), rows)
    theirs = reference_logits(folder, rows, "eager")
    for slot, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        wanted = reference[PREFIX:] if slot == 2 else reference
        assert torch.isfinite(mine).all()
        assert (mine - wanted).abs().max() <= 2e-5 * max(1.0, wanted.abs().max().item()), (family, slot)
