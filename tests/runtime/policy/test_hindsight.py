"""Drafts that are looked up and not scored."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from proposers.ngram import NgramProposer
from protos.draft import NO_DRAFT, Draft
from protos.messages import RoundPlan, Row, Verdict
from runtime.core.sequence import Sequence as EngineSequence
from runtime.policy.acceptance import DecodingRows, Sources
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.base import FinishedStep
from runtime.policy.choosers import ChainChooser, Chosen
from runtime.policy.exploration import FEWEST_ROUNDS, MOST_ROWS, Hindsight, LookUp
from runtime.policy.round_costs import RoundCostModel
from tests.support.distributed.fake_worker import make_request
from tests.support.policy_simulation import flat, warmed_up
from tests.support.scheduling import decoding, make_scheduler

LIMIT = 4
NGRAM = Sources(("ngram",), has_worker=False)
CASCADE = Sources(("ngram", "draft_model"))


class Recorder(ChainChooser):
    """Notes what it is to learn."""

    def __init__(self, sources: Sources) -> None:
        super().__init__(LIMIT, sources)
        self.seen: list[tuple[int, int, tuple[int, ...], int]] = []

    def record(self, verdict: Verdict, row: object, asked: Sequence[int], source: int) -> None:
        self.seen.append((verdict.proposed, len(verdict.path), tuple(asked), source))


def hindsight(chooser: Recorder, look_up: LookUp | None, sources: Sources = NGRAM) -> Hindsight:
    return Hindsight(look_up, LIMIT, chooser, DecodingRows(LIMIT, sources, may_branch=False), lambda: 0.0)


def finding(draft: Draft, source: int = 1) -> LookUp:
    return lambda sequences, limit: [(source, draft) for _ in sequences]


def chosen(k: int) -> Chosen:
    choice = Chosen(LIMIT, 2)
    choice.use_everywhere(k)
    return choice


def grow(sequence: EngineSequence, token_ids: Sequence[int]) -> None:
    sequence.token_ids += token_ids
    sequence.num_computed += len(token_ids)


def run(looks: Hindsight, sequence: EngineSequence, tokens: Sequence[int], *, k: int = 0) -> list[int]:
    """Let *tokens* come, one in each round; return after which of them drafts promise something."""
    promising = []
    for number, token in enumerate(tokens):
        if looks.look_if_due([sequence], chosen(k), 0.001):
            promising.append(number)
        grow(sequence, [token])
    return promising


@pytest.mark.parametrize(
    ("draft", "proposed", "accepted"),
    [
        (Draft((5, 6, 7, 8)), 4, 4),
        (Draft((5, 6, 9)), 3, 2),
        (Draft((9, 6)), 2, 0),
        (Draft((9, 5, 6, 7), (-1, -1, 1, 1)), 4, 2),
        (Draft((5, 6, 6), (-1, 0, 0), (False, True, False)), 2, 2),
        (Draft((5, 6, 7), (-1, 0, 1), (False, True, True)), 1, 1),
    ],
)
def test_a_draft_that_is_not_scored_is_learnt_from_once_the_tokens_came(
    draft: Draft, proposed: int, accepted: int
) -> None:
    chooser = Recorder(NGRAM)
    looks = hindsight(chooser, finding(draft))
    promising = run(looks, decoding(0), [5, 6, 7, 8, *range(20, 26)])
    assert chooser.seen == [(proposed, accepted, (0, LIMIT), 1)]
    assert promising == [FEWEST_ROUNDS] * (accepted > 0)
    assert looks.promises == (accepted > 0)


@pytest.mark.parametrize("options", [{"speculate": False}, {"method": "draft_model"}])
def test_of_requests_that_want_no_such_drafts_nothing_is_learnt(options: dict[str, Any]) -> None:
    chooser = Recorder(CASCADE)
    looks = hindsight(chooser, finding(Draft((5, 6, 7, 8))), CASCADE)
    assert run(looks, decoding(0, **options), [5, 6, 7, 8, *range(20, 26)]) == []
    assert chooser.seen == []


def test_where_nothing_is_found_that_is_learnt_too() -> None:
    chooser = Recorder(CASCADE)
    looks = hindsight(chooser, finding(NO_DRAFT, source=2), CASCADE)
    run(looks, decoding(0), range(10))
    assert chooser.seen == [(0, 0, (0, LIMIT, 0), 2)], "of the draft worker, nothing"
    assert not looks.promises and not looks.is_current


def test_rows_that_get_drafts_are_not_looked_up_and_few_of_many_others() -> None:
    asked: list[int] = []

    def look_up(sequences: Sequence[EngineSequence], limit: int) -> list[tuple[int, Draft] | None]:
        asked.append(len(sequences))
        return [(1, NO_DRAFT)] * len(sequences)

    looks = hindsight(Recorder(NGRAM), look_up)
    rows = [decoding(key) for key in range(2 * MOST_ROWS)]
    for k in [1] * 10 + [0] * 10:
        looks.look_if_due(rows, chosen(k), 0.001)
    assert asked == [MOST_ROWS]


def test_rows_are_looked_up_in_turn_and_what_is_known_of_others_is_kept() -> None:
    asked = set[int]()

    def look_up(sequences: Sequence[EngineSequence], limit: int) -> list[tuple[int, Draft] | None]:
        asked.update(one.key for one in sequences)
        return [(1, NO_DRAFT)] * len(sequences)

    rows, chooser = DecodingRows(LIMIT, NGRAM, may_branch=False), Recorder(NGRAM)
    looks = Hindsight(look_up, LIMIT, chooser, rows, lambda: 0.0)
    running = [decoding(key) for key in range(3 * MOST_ROWS + 5)]
    rows.of(running)[1].acceptances[1].add(4, 3)
    for number in range(5 * FEWEST_ROUNDS):
        looks.look_if_due(running, chosen(0), 0.001)
        for one in running:
            grow(one, [number])
    assert asked == set(range(len(running)))
    assert len(chooser.seen) == 4 * MOST_ROWS
    looks.look_if_due(running, chosen(1), 0.001)
    assert rows.of(running)[1].acceptances[1].accepted == 3


def test_without_look_ups_there_is_no_hindsight() -> None:
    looks = hindsight(Recorder(NGRAM), None)
    assert run(looks, decoding(0), range(20)) == []
    assert not looks.is_current


def test_looking_drafts_up_takes_a_small_share_of_the_time() -> None:
    clock = iter(map(float, range(10_000)))
    rows = DecodingRows(LIMIT, NGRAM, may_branch=False)
    looks = Hindsight(finding(NO_DRAFT), LIMIT, Recorder(NGRAM), rows, clock_of(clock))
    run(looks, decoding(0), range(600))
    assert next(clock) <= 4, "of 1 s each, in rounds of 1 ms"


def clock_of(ticks: Iterator[float]) -> Callable[[], float]:
    return lambda: next(ticks)


def test_the_controllers_proposers_draft_for_rows_without_draft_tokens() -> None:
    scheduler = make_scheduler(proposers=[NgramProposer(1, 2)])
    assert scheduler.proposers is not None
    repeating, other, predicted = decoding(1), decoding(2), decoding(3, prediction_token_ids=(7, 8))
    grow(repeating, [3, 4, 5, 2, 3])
    grow(predicted, [3, 4, 2])
    found = scheduler.proposers.look_up([repeating, other, predicted], 2)
    assert found == [(1, Draft((4, 5))), (2, NO_DRAFT), (1, Draft((3, 4)))]
    assert scheduler.proposers.look_up([repeating], 4) == [(1, Draft((4, 5, 2, 3)))]


def test_nothing_is_said_of_a_long_prompt_before_it_is_indexed() -> None:
    """That takes two slices, one in each look-up."""
    proposers = make_scheduler(proposers=[NgramProposer(1, 2)]).proposers
    assert proposers is not None
    prompt = [3, 4, 5] * 1000
    sequence = EngineSequence(make_request("a", prompt), [*prompt], 4000, None, len(prompt) - 1, slot=0, key=1)
    proposers.begin(sequence)
    found = [proposers.look_up([sequence], 2) for _ in range(3)]
    assert found == [[None], [None], [(1, Draft((3, 4)))]]


def speculating_rounds(look_up: LookUp | None, before: int, after: int) -> tuple[int, int]:
    """Return in how many rounds there are drafts before a request begins to repeat itself, and after."""
    model = RoundCostModel(warmed_up(flat), 64 * (LIMIT + 1), 64, LIMIT, NGRAM)
    clock = clock_of(0.0001 * number for number in count())  # each thing that is timed takes 0.1 ms
    policy = AdaptivePolicy(LIMIT, ChainChooser(LIMIT, NGRAM), model, sources=NGRAM, look_up=look_up, clock=clock)
    sequence, counts = decoding(1), []
    sequence.max_len = 1 << 20
    for rounds, right in ((before, False), (after, True)):
        counts.append(0)
        for number in range(rounds):
            policy.begin_step([sequence])
            k = policy.num_draft_tokens(sequence, 1)
            counts[-1] += k > 0
            num_tokens = 1 + k * right
            verdict = Verdict(1, (7,) * num_tokens, k, range(k * right))
            seconds = flat(1 + k) * (1 + 0.05 * (number % 3))
            row = Row(1, 1, 1, 2, k, source=1)
            policy.end_step(FinishedStep(RoundPlan(0, [row]), [verdict], num_tokens, 0.00002, seconds, 0.00002))
            grow(sequence, [7 if right else 20 + number] * num_tokens)
    return counts[0], counts[1]


def test_drafts_come_soon_after_a_request_begins_to_repeat_itself() -> None:
    """Without look-ups it depends on when draft tokens are tried again: that may be hundreds of rounds later."""
    found = finding(Draft((7,) * LIMIT))
    looked_up = [speculating_rounds(found, before, 120) for before in (600, 1000, 1400)]
    assert all(after >= 90 for _, after in looked_up)
    assert all(before <= 160 for before, _ in looked_up), "wrong drafts are no reason"
    assert min(speculating_rounds(None, before, 120)[1] for before in (600, 1000, 1400)) < 40
