"""Chains: one token behind another, sampled by the target's own pipeline and noise."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from protos.interfaces import DraftRow
from protos.learned import DraftRunner
from protos.messages import Draft

LogitsBehind = Callable[[Seq[DraftRow], torch.Tensor, int], torch.Tensor]
"""(rows, the drafted ids `[R]` they end in, step) -> logits `[R, V]` behind them; at step 0 there are no ids yet."""


def draft_chains(runner: DraftRunner, rows: Seq[DraftRow], logits_behind: LogitsBehind, most: int) -> list[Draft]:
    """Return a chain of `min(row.k, most)` tokens for each row.

    Args:
        runner: samples.
        rows: who wants how many.
        logits_behind: called once a step. A row leaves the batch when it has its tokens, and the rows stand by how
            many they want: those of a step are always the first ones of the step before.
        most: the longest chain there is.
    """
    order = sorted(range(len(rows)), key=lambda i: -rows[i].k)
    ranked = [rows[i] for i in order]
    columns: list[list[int]] = []
    ids = torch.empty(0, dtype=torch.int64)
    for step in range(min(most, ranked[0].k if ranked else 0)):
        active = ranked[: sum(row.k > step for row in ranked)]
        ids = runner.sample(active, logits_behind(active, ids[: len(active)], step), step)
        columns.append(ids.tolist())
    drafts = [Draft(())] * len(rows)
    for place, i in enumerate(order):
        drafts[i] = Draft(tuple(column[place] for column in columns[: rows[i].k]))
    return drafts
