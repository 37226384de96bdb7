"""A tiny model under `batch_invariant`, and the ways to compute logits that must give the same bits."""

from pathlib import Path

import numpy as np
import torch

from protos.config.engine import ModelConfig
from protos.draft import Draft
from protos.messages import NewSequence, RoundPlan, Row, Sampling
from tests.support.distributed.ranks import in_memory
from workers.distributed.groups import Group
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.slots import SlotTable
from workers.target import Scoring

VOCAB, BLOCK, ROWS, LENGTH = 97, 4, 32, 37


TREE = (Draft((0,) * 9, (-1, -1, 0, 2, 1, 2, 3, 6, 0)), (0, 2, 3, 6, 7))
"""A tree, and the nodes of the branch with the tokens that are accepted."""


Table = dict[str, torch.Tensor]


class Model:
    """A runner over `ROWS` sequences, all of which have their blocks."""

    def __init__(self, folder: Path, dtype: str = "bfloat16", group: Group | None = None, **options: object) -> None:
        loaded = load(ModelConfig(model=str(folder), device="cpu", dtype=dtype, batch_invariant=True, **options), group)
        self.slots = SlotTable(ROWS, 64, BLOCK, 16)
        rng = np.random.default_rng(3)
        self.texts = rng.integers(3, VOCAB, (ROWS, LENGTH))
        each = -(-(LENGTH + 16) // BLOCK)
        tables = rng.permutation(ROWS * each).reshape(ROWS, each)
        new = [NewSequence(i, text.tolist(), LENGTH, Sampling(seed=0)) for i, text in enumerate(self.texts)]
        grown = [
            Row(i, 0, 1, LENGTH, new_block_ids=table.tolist(), new_block_versions=[0] * each)
            for i, table in enumerate(tables)
        ]
        self.slots.apply(RoundPlan(0, grown, new))
        self.runner = ModelRunner(loaded, self.slots, ROWS * each, BLOCK)

    def feed(self, parts: list[tuple[int, int, int]], drafts: dict[int, Draft] | None = None) -> list[torch.Tensor]:
        """Feed (row, first, count) with drafts after some rows' last tokens; return the logits of each, `[X, V]`."""
        rows = [Row(row, first, count, first + count, samples=True) for row, first, count in parts]
        drafts_R = [(drafts or {}).get(row.slot, Draft(())) for row in rows]
        for row, draft in zip(rows, drafts_R, strict=True):
            if draft.tokens:
                self.slots.write_draft(row.slot, draft.tokens)
        batch = Scoring.of(rows, drafts_R, self.slots.tokens).batch
        logits = self.runner.forward(batch, np.arange(len(batch.tokens_T)))
        return [part.clone() for part in logits.split(batch.lengths_R.tolist())]

    def known(self, length: int) -> None:
        """Set the known length of row 0."""
        self.slots.known_len[0] = length


def bits(logits: torch.Tensor) -> torch.Tensor:
    return logits.contiguous().view(torch.int32)


def ways(model: Model) -> Table:
    """Return row 0's logits by how they were computed, `[LENGTH, V]` or the last of these."""
    found = {"prefill": model.feed([(0, 0, LENGTH)])[0]}
    sizes = (8, 1, 13, 2, 7)
    ends = np.cumsum(sizes).tolist()
    chunks = [model.feed([(0, end - size, size)])[0] for end, size in zip(ends, sizes, strict=True)]
    found["chunks, then decode"] = torch.cat([*chunks, *(model.feed([(0, at, 1)])[0] for at in range(31, LENGTH))])
    for count in (7, ROWS):
        others = [(row, 0, 1 + row % 6) for row in range(1, count)]
        prefilled = model.feed([*others[:3], (0, 0, 20), *others[3:]])[3]
        decoded = []
        for at in range(20, 22):
            others = [(row, (1 + row % 6) + at - 20, 1) for row in range(1, count)]
            decoded.append(model.feed([*others, (0, at, 1)])[-1])
        found[f"among {count}"] = torch.cat([prefilled, *decoded])
    return {**found, **verified(model)}


def verified(model: Model) -> Table:
    """The same in verification: of chains with some accepted draft tokens, and of a tree."""
    found = {}
    for right, count in ((3, 5), (12, 16)):
        model.feed([(0, 0, 20)])
        model.known(21)
        draft = Draft((*model.texts[0, 21 : 21 + right].tolist(), *[5] * (count - right)))
        logits = model.feed([(1, 0, 3), (0, 20, 1)], {0: draft})[1]
        found[f"{count} draft tokens"] = logits[: right + 1]
    tree, branch = TREE
    tokens = list(tree.tokens)
    for depth, node in enumerate(branch):
        tokens[node] = int(model.texts[0, 25 + depth])
    model.slots.tokens[0, :LENGTH] = model.texts[0]
    model.feed([(0, 0, 22)])
    model.known(25)
    logits = model.feed([(0, 22, 3), (2, 0, 1)], {0: Draft(tuple(tokens), tree.parents)})[0]
    found["tree"] = logits[[0, 1, 2, *(3 + node for node in branch)]]
    model.slots.tokens[0, :LENGTH] = model.texts[0]
    return found


FIRST = {"tree": 22}
"""The first position of logits that do not begin at 0."""


def check(found: Table, expected_LV: torch.Tensor) -> None:
    for name, logits in found.items():
        first = FIRST.get(name, 20 if "draft tokens" in name else 0)
        wanted = expected_LV[first : first + len(logits)]
        assert torch.equal(bits(logits), bits(wanted)), f"{name}: {(logits != wanted).any(1).sum()} positions differ"


def on_two_ranks(folder: Path, *, is_listed: bool = False) -> None:
    expected = Model(folder).feed([(0, 0, LENGTH)])[0]

    def work(group: Group) -> Table:
        model = Model(folder, group=group)
        if is_listed:
            assert "operators traced in" in model.runner.warm_up()
        whole = model.feed([(0, 0, LENGTH)])[0]
        several = model.feed([(1, 0, 5), (0, 0, 30), (3, 0, 2)])[1]
        decoded = [model.feed([(0, at, 1)])[0] for at in range(30, LENGTH)]
        return {"prefill": whole, "among": torch.cat([several, *decoded])}

    check(in_memory(2, work)[0], expected)
