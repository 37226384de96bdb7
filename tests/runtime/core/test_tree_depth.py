"""Trees near the end of an answer: their depth is limited by the tokens still to come, their number of nodes is not."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.lookahead import LookaheadProposer, LookaheadShape
from protos.draft import Draft, DraftRow
from protos.messages import WorkerInfo
from tests.support.distributed.fake_worker import FakeWorker, contents, extend, make_request, target_token
from tests.support.scheduling import fixed_k, make_scheduler

INFO = WorkerInfo(num_blocks=64, block_size=16, max_model_len=512, vocab_size=10, speculates=True)
NODES, LEVELS = 59, 8
"""EAGLE-2's trees as published: 60 nodes with the root, and 8 levels of draft tokens."""


class Scripted:
    """Trees of 59 nodes whose last ones are right: as many as a script has for each step, one below the other."""

    on_worker = False

    def __init__(self, script: Sequence[int]) -> None:
        self.script, self.rows = list(script), []

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self.rows += rows
        return [self._one(row, self.script[len(self.rows) - 1]) for row in rows]

    def _one(self, row: DraftRow, right: int) -> Draft:
        path, prefix = [], contents(row.token_ids)[-1]
        for _ in range(min(right, row.depth)):
            path.append(target_token(prefix))
            prefix = extend(prefix, path[-1])
        num_wrong = NODES - len(path)
        first = target_token(contents(row.token_ids)[-1])
        wrong = [(first + 1 + node % 8) % 10 for node in range(num_wrong)]
        below = [-1, *range(num_wrong, NODES - 1)][: len(path)]
        return Draft((*wrong, *path), (*[-1] * num_wrong, *below))


def steps_of(script: Sequence[int], tokens: int) -> tuple[int, list[int]]:
    """Return the steps of an answer of *tokens* in this engine, and the accepted tokens of each step."""
    proposer = Scripted(script)
    scheduler = make_scheduler(INFO, [proposer], max_num_batched_tokens=256)
    worker = FakeWorker(INFO, 8)
    scheduler.admit([make_request("a", [1, 2, 3], tokens, eos_ids=())])
    steps, accepted = 0, []
    while scheduler.num_unfinished:
        plan = scheduler.schedule(fixed_k(NODES))
        verdicts = worker.run(plan)
        outputs = scheduler.commit(plan, verdicts)
        accepted += [len(verdict.path) for verdict in verdicts]
        assert sum(len(verdict.token_ids) for verdict in verdicts) == sum(len(one.token_ids) for one in outputs)
        steps += 1
    return steps, accepted


@given(st.lists(st.integers(0, LEVELS), min_size=64, max_size=64), st.integers(2, 64))
@settings(max_examples=50, deadline=None)
def test_an_answer_takes_the_steps_that_its_acceptances_add_up_to(script: list[int], tokens: int) -> None:
    """The arithmetic of EAGLE's loop: a step adds its accepted tokens and one more, until there are enough."""
    totals = accumulate(right + 1 for right in script)
    wanted = next(step for step, total in enumerate(totals, 1) if total >= tokens)
    assert steps_of(script, tokens)[0] == wanted


def test_the_last_nodes_of_a_tree_are_accepted_however_near_the_end_is() -> None:
    assert steps_of([LEVELS] * 9, 9 + 4) == (2, [LEVELS, 3])


@pytest.mark.parametrize(("left", "nodes", "depth"), [(40, 59, 39), (5, 59, 4), (2, 59, 1), (1, 0, 0)])
def test_nodes_are_limited_by_the_step_and_levels_by_the_tokens_to_come(left: int, nodes: int, depth: int) -> None:
    proposer = Scripted([0])
    scheduler = make_scheduler(INFO, [proposer], max_num_batched_tokens=256)
    scheduler.admit([make_request("a", [1, 2, 3], left, eos_ids=())])
    (row,) = scheduler.schedule(fixed_k(NODES)).rows
    assert (row.k, row.depth) == (nodes, depth)
    assert [(row.k, row.depth) for row in proposer.rows] == [(nodes, depth)] * bool(nodes)


def test_a_chain_is_as_short_as_its_depth() -> None:
    scheduler = make_scheduler(INFO)
    scheduler.admit([make_request("a", [1, 2, 3], 5, eos_ids=())])
    plan = scheduler.schedule(fixed_k(9, draft_shape="chain"))
    scheduler.commit(plan, FakeWorker(INFO, 8).run(plan))
    (row,) = scheduler.schedule(fixed_k(9, draft_shape="chain")).rows
    assert (row.k, row.depth) == (3, 3)


def test_lookahead_has_its_window_until_the_last_token_but_one() -> None:
    shape = LookaheadShape(7, 4, 7)
    scheduler = make_scheduler(INFO, [LookaheadProposer(shape)], max_num_batched_tokens=256)
    worker, windows = FakeWorker(INFO, 8), []
    scheduler.admit([make_request("a", [1, 2, 3, 1, 2], 30, eos_ids=())])
    while scheduler.num_unfinished:
        plan = scheduler.schedule(fixed_k(56))
        draft = plan.rows[0].draft
        windows.append((plan.rows[0].depth, sum(draft.probes) if draft else 0))
        for depth, probe in zip(draft.depths(), draft.probes, strict=True) if draft and draft.probes else ():
            assert probe or depth <= plan.rows[0].depth
        scheduler.commit(plan, worker.run(plan))
    full = [probes for depth, probes in windows[4:] if depth > 0]
    assert full and set(full) == {shape.columns * shape.levels}
