"""Proposers in the controller process."""

from collections.abc import Sequence

import pytest
from msgspec import structs

from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.interfaces import DraftService, SequenceListener
from protos.messages import Abort, Request
from runtime.core.sequence import Sequence as EngineSequence
from runtime.policy.batch_size import BatchSizePolicy
from tests.support.distributed.fake_worker import make_request
from tests.support.scheduling import OFF, fixed_k, make_scheduler, make_verdicts, started


class Scripted:
    """A proposer that always returns the same draft, or fails without one."""

    on_worker = False

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.requested = tokens, []

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self.requested += [(row.k, list(row.token_ids)) for row in rows]
        if not self.tokens:
            raise ValueError("no tokens")
        return [Draft(self.tokens) for _ in rows]


def test_drafts_made_beside_the_controller_ride_in_the_plan() -> None:
    proposer = Scripted(5, 6)
    scheduler = started(make_request("a", [1, 2]), proposers=[proposer])
    (row,) = scheduler.schedule(fixed_k(4)).rows
    assert (row.draft, row.k, proposer.requested) == (Draft((5, 6)), 2, [(4, [1, 2, 0])])


@pytest.mark.parametrize(
    ("tokens", "usable"), [((5, 6, 7, 8, 9), (5, 6, 7)), ((5, 10, 6), (5,)), ((-1,), None), ((), None)]
)
def test_a_bad_draft_costs_draft_tokens_and_nothing_else(
    tokens: tuple[int, ...], usable: tuple[int, ...] | None
) -> None:
    scheduler = started(make_request("a", [1, 2]), proposers=[Scripted(*tokens)])
    (row,) = scheduler.schedule(fixed_k(3)).rows
    assert row.draft == (Draft(usable) if usable else None)
    assert row.k == len(usable or ())
    assert scheduler.stats().draft_failures == (not tokens)


class Listening(Scripted, SequenceListener):
    """A proposer that records how it is called as a `SequenceListener`."""

    def __init__(self, *tokens: int) -> None:
        super().__init__(*tokens)
        self.calls: list[tuple[object, ...]] = []

    def begin(self, key: int, request: Request) -> None:
        self.calls.append(("begin", key, request.request_id))

    def grow(self, key: int, token_ids: Sequence[int], probed: Sequence[int]) -> None:
        self.calls.append(("grow", key, tuple(token_ids), tuple(probed)))

    def end(self, key: int, token_ids: Sequence[int]) -> None:
        self.calls.append(("end", key, tuple(token_ids)))

    def prepare(self) -> None:
        self.calls.append(("prepare",))


class WithoutWorker(BatchSizePolicy):
    """Leaves the draft worker out, and asks the proposers in the controller process."""

    worker: int | None = None

    def num_draft_tokens(self, sequence: EngineSequence, source: int | None = None) -> int:
        return 0 if source is not None and source == self.worker else super().num_draft_tokens(sequence, source)


def test_proposers_prepare_while_the_worker_is_left_out() -> None:
    listener = Listening(5, 6)
    policy = WithoutWorker(SpeculativeConfig(method="any", num_speculative_tokens=2))
    scheduler = started(make_request("a", [1, 2]), proposers=[listener], has_worker=True)
    policy.worker = scheduler._worker_source
    plan = scheduler.schedule(policy)
    assert (plan.rows[0].k, plan.speculates) == (2, False)
    listener.calls.clear()
    scheduler.commit(plan, make_verdicts(plan, [5, 7]))
    assert ("prepare",) in listener.calls


def test_a_follower_is_told_of_every_sequence_from_arrival_to_end() -> None:
    listener = Listening(5, 6)
    scheduler = make_scheduler(proposers=[listener])
    scheduler.admit([make_request("a", [1, 2], max_tokens=2), make_request("b", [3])])
    plan = scheduler.schedule(OFF)
    scheduler.commit(plan, make_verdicts(plan, [0], [4]))
    plan = scheduler.schedule(fixed_k(2))
    verdicts = [structs.replace(verdict, probed=[8]) for verdict in make_verdicts(plan, [5, 7], [5], proposed=1)]
    scheduler.commit(plan, verdicts)
    scheduler.admit([Abort(("b",))])
    assert listener.calls == [
        ("begin", 1, "a"),
        ("begin", 2, "b"),
        ("grow", 1, (0,), ()),
        ("grow", 2, (4,), ()),
        # Tokens after the end of a sequence are not reported.
        ("grow", 1, (5,), (8,)),
        ("end", 1, (1, 2, 0, 5)),
        ("grow", 2, (5,), (8,)),
        ("prepare",),
        ("end", 2, (3, 4, 5)),
    ]


def test_in_a_cascade_the_first_with_a_draft_supplies_it_and_a_worker_the_rest() -> None:
    silent, second = Scripted(-1), Scripted(5)
    requests = [make_request("a", [1, 2]), make_request("b", [3])]
    scheduler = started(*requests, proposers=[silent, second])
    assert [row.draft for row in scheduler.schedule(fixed_k(3)).rows] == [Draft((5,))] * 2
    assert (len(silent.requested), len(second.requested)) == (2, 2)
    for has_worker, k in ((True, 3), (False, 0)):
        scheduler = started(*requests, proposers=[silent], has_worker=has_worker)
        assert [(row.draft, row.k) for row in scheduler.schedule(fixed_k(3)).rows] == [(None, k)] * 2


def test_proposers_beside_the_controller_do_without_a_draft_that_is_down() -> None:
    down = DraftService(is_up=False, epoch=1)
    scheduler = started(make_request("a", [1, 2]), proposers=[Scripted(5)], has_worker=True)
    assert scheduler.schedule(fixed_k(3), down).rows[0].draft == Draft((5,))
    scheduler = started(make_request("a", [1, 2]), proposers=[Scripted(-1)], has_worker=True)
    assert scheduler.schedule(fixed_k(3), down).rows[0].k == 0


def test_a_follower_that_fails_costs_draft_tokens_and_nothing_else() -> None:
    class Failing(Listening):
        def begin(self, key: int, request: Request) -> None:
            raise ValueError("not today")

    scheduler = started(make_request("a", [1, 2]), proposers=[Failing(5)])
    assert scheduler.schedule(fixed_k(3)).rows[0].draft == Draft((5,))
    assert scheduler.stats().draft_failures == 1


class BySource(BatchSizePolicy):
    """At most so many draft tokens of each row from each source."""

    def __init__(self, *most: int) -> None:
        super().__init__(SpeculativeConfig(method="any", num_speculative_tokens=max(most)))
        self._most = most

    def num_draft_tokens(self, sequence: Sequence, source: int | None = None) -> int:
        return max(self._most) if source is None else self._most[source]


def test_what_the_user_predicts_is_drafted_before_any_method_is_asked() -> None:
    proposer = Scripted(8)
    requests = [make_request("a", [1, 2], prediction_token_ids=(0, 5, 6, 7)), make_request("b", [3])]
    scheduler = started(*requests, proposers=[proposer])
    plan = scheduler.schedule(fixed_k(2))
    assert [(row.draft, row.source) for row in plan.rows] == [(Draft((5, 6)), 0), (Draft((8,)), 1)]
    scheduler.commit(plan, make_verdicts(plan, [3], [3]))
    assert [row.draft for row in scheduler.schedule(fixed_k(2)).rows] == [Draft((8,))] * 2  # it went another way


def test_only_predictions_are_drafted_from_where_the_policy_allows_no_other_source() -> None:
    proposer = Scripted(8)
    requests = [make_request("a", [1, 2], prediction_token_ids=(0, 5, 6, 7)), make_request("b", [3])]
    scheduler = started(*requests, proposers=[proposer], has_worker=True)
    plan = scheduler.schedule(BySource(3, 0, 0))
    assert [(row.draft, row.k) for row in plan.rows] == [(Draft((5, 6, 7)), 3), (None, 0)]
    assert (proposer.requested, plan.speculates) == ([], False)  # for the draft worker


def test_a_draft_in_hand_is_cut_to_what_the_policy_wants_of_its_source() -> None:
    proposer = Scripted(5, 6, 7, 8)
    scheduler = started(make_request("a", [1, 2]), proposers=[proposer], has_worker=True)
    (row,) = scheduler.schedule(BySource(0, 2, 4)).rows
    assert (row.draft, row.k, row.source) == (Draft((5, 6)), 2, 1)
    scheduler = started(make_request("a", [1, 2]), proposers=[Scripted(-1)], has_worker=True)
    (row,) = scheduler.schedule(BySource(0, 4, 3)).rows
    assert (row.draft, row.k, row.source) == (None, 3, 2)
