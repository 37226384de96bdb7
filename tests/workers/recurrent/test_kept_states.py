"""States kept for the prefix cache: written while a chunk runs, read by rows of other slots."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.models.tiny_models import build
from tests.support.recurrent.rows import BLOCK, runner_of, sequences
from tests.support.recurrent.tiny_hybrids import HYBRIDS
from tests.workers.model.test_models import reference_logits
from tests.workers.recurrent.test_rows import QUICK, close
from workers.attention.batch import Batch
from workers.model.runner import ModelRunner
from workers.recurrent.kept_states import KeptStates

pytestmark = pytest.mark.usefixtures("one_thread")

NO_STATE = -1
Kept = tuple[int, int, int]
"""Row, position and number of a state that is kept."""


def feed(
    runner: ModelRunner, rows: list[tuple[int, int, int]], *kept: Kept, begin: list[int] | None = None
) -> list[torch.Tensor]:
    """Feed rows, each a slot, a start and a length, with the states that they begin with; return their logits."""
    slots_R, starts_R, lengths_R = np.array(rows).T.copy()
    of_N, positions_N, numbers_N = np.array(kept, np.int64).reshape(-1, 3).T
    states = KeptStates(np.array(begin or [NO_STATE] * len(rows)), of_N, positions_N, numbers_N)
    batch = replace(Batch.from_history(runner.slots.tokens, slots_R, starts_R, lengths_R), kept_states=states)
    logits = runner.forward(batch, np.arange(len(batch.tokens_T))).clone()
    return list(logits.split(lengths_R.tolist()))


def share(runner: ModelRunner, source: int, slot: int, length: int) -> None:
    """Give a slot the tokens of another, and the blocks of its first *length* tokens."""
    slots = runner.slots
    slots.tokens[slot], slots.known_len[slot] = slots.tokens[source], slots.known_len[source]
    slots.blocks[slot, : length // BLOCK] = slots.blocks[source, : length // BLOCK]


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.full) for family in HYBRIDS]
)
def test_rows_that_begin_with_kept_states_equal_the_plain_forward(family: str, tmp_path: Path) -> None:
    rows = sequences()
    folder = build(family, tmp_path)
    theirs = reference_logits(folder, rows, "eager")
    runner = runner_of(folder, rows, prefix_states=4)
    first = feed(runner, [(0, 0, 37), (1, 0, 13)], (0, 4, 2), (0, 20, 0), (0, 36, 1), (1, 12, 3))
    close(first, [theirs[0], theirs[1][:13]])
    for start, number in ((36, 1), (20, 0), (4, 2)):
        share(runner, 0, 2, start)
        again = feed(runner, [(1, 13, 1), (2, start, 37 - start)], begin=[NO_STATE, number])
        close(again[1:], [theirs[0][start:]])
    share(runner, 1, 3, 12)
    (later,) = feed(runner, [(3, 12, 9)], begin=[3])
    close([later], [theirs[1][12:]])


def test_a_state_may_be_overwritten_by_a_row_of_the_forward_that_reads_it(tmp_path: Path) -> None:
    rows = sequences()
    folder = build("qwen3_next", tmp_path)
    theirs = reference_logits(folder, rows, "eager")
    runner = runner_of(folder, rows, prefix_states=1)
    feed(runner, [(0, 0, 37)], (0, 20, 0))
    share(runner, 0, 2, 20)
    found = feed(runner, [(1, 0, 21), (2, 20, 17)], (0, 8, 0), begin=[NO_STATE, 0])
    close(found, [theirs[1], theirs[0][20:]])
    share(runner, 1, 3, 8)
    close(feed(runner, [(3, 8, 13)], begin=[0]), [theirs[1][8:]])


def test_a_state_after_a_token_that_was_not_drafted_is_left_as_it_was(tmp_path: Path) -> None:
    rows = sequences()
    folder = build("lfm2", tmp_path)
    theirs = reference_logits(folder, rows, "eager")
    runner = runner_of(folder, rows, prefix_states=1)
    feed(runner, [(0, 0, 37)], (0, 20, 0))
    feed(runner, [(1, 0, 21)], (0, 24, 0))
    share(runner, 0, 2, 20)
    close(feed(runner, [(2, 20, 17)], begin=[0]), [theirs[0][20:]])
