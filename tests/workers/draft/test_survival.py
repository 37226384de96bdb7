"""What is learnt of confidences: how often tokens survive, and when a further one pays."""

import random

import numpy as np
import pytest

from protos.messages import NewSequence, Sampling
from workers.draft.survival import MEMORY_TRIALS, LearntStop, SurvivalRates
from workers.slots import SlotTable

FIRST = (1, 2, 3)


def learnt(truth: dict[float, float], trials: int, seed: int = 0, rates: SurvivalRates | None = None) -> SurvivalRates:
    """Return what is learnt from single tokens of these confidences, which survive that often."""
    rates, dice = rates or SurvivalRates(), random.Random(seed)
    for _ in range(trials):
        confidence = dice.choice([*truth])
        rates.add(rates.bins(np.array([confidence])).tolist(), int(dice.random() < truth[confidence]))
        rates.refresh()
    return rates


def of(rates: SurvivalRates, confidence: float) -> float:
    return float(rates.rate_B[rates.bins(np.array([confidence]))[0]])


def test_a_draft_that_believes_too_little_or_too_much_is_corrected() -> None:
    truth = {0.05: 0.4, 0.3: 0.3, 0.9: 0.6}
    rates = learnt(truth, 3000)
    for confidence, survival in truth.items():
        assert of(rates, confidence) == pytest.approx(survival, abs=0.06)
    assert rates.mean == pytest.approx(1.3 / 3, abs=0.04)


def test_before_anything_was_seen_the_draft_is_believed() -> None:
    rates = SurvivalRates()
    for confidence in (0.02, 0.2, 0.5, 0.8, 0.98):
        assert of(rates, confidence) == pytest.approx(confidence, abs=0.1)


def test_what_changed_is_followed() -> None:
    rates = learnt({0.5: 0.9}, int(MEMORY_TRIALS))
    learnt({0.5: 0.1}, 2 * int(MEMORY_TRIALS), 1, rates)
    assert of(rates, 0.5) < 0.3


def test_confidences_beyond_the_histogram_and_those_that_are_no_numbers() -> None:
    rates = SurvivalRates()
    assert rates.bins(np.array([np.nan, 0.0, 1.0])).tolist() == [0, 0, len(rates.rate_B) - 1]


def stop_of(slots: SlotTable, tokens: tuple[int, ...], confidences: tuple[float, ...], least: float) -> list[bool]:
    """Let one sequence draft *tokens*; return after each whether it goes on, and what was learnt, as `tried`."""
    stop = LearntStop(slots)
    stop.least = least
    stop.begin()
    found = []
    for token, confidence in zip(tokens, confidences, strict=True):
        stop.take(np.array([0]), np.array([token]), np.array([confidence]))
        found += stop.goes_on([0])
    return found


@pytest.fixture
def slots() -> SlotTable:
    table = SlotTable(2, 16, 4)
    table._join(NewSequence(0, FIRST, 3, Sampling(0), 1))
    return table


def test_a_chain_ends_where_its_path_is_too_improbable(slots: SlotTable) -> None:
    confidences = (0.95, 0.9, 0.85, 0.5)
    paths = np.cumprod([of(SurvivalRates(), each) for each in confidences])
    for least in (0.0, 0.3, 0.6, 0.99):
        found = stop_of(slots, (1, 2, 3, 4), confidences, least)
        assert found == [path >= least for path in paths]


@pytest.mark.parametrize(
    ("emitted", "tried", "survived"),
    [
        ((7, 8, 9, 5), 3, 3),
        ((7, 8, 4), 3, 2),
        ((4,), 1, 0),
        ((7,), 1, 1),  # the round ended there: of later tokens nothing is known
        ((), 0, 0),
    ],
)
def test_what_a_round_shows(slots: SlotTable, emitted: tuple[int, ...], tried: int, survived: int) -> None:
    stop = LearntStop(slots)
    stop.begin()
    for token in (7, 8, 9):
        stop.take(np.array([0]), np.array([token]), np.array([0.5]))
    slots.tokens[0, 3 : 3 + len(emitted)] = emitted
    slots.known_len[0] = 3 + len(emitted)
    stop.begin()
    assert (stop.rates._tried_B.sum(), stop.rates._survived_B.sum()) == (tried, survived)
    stop.begin()
    assert stop.rates._tried_B.sum() == tried


def test_another_sequence_in_the_slot_shows_nothing(slots: SlotTable) -> None:
    stop = LearntStop(slots)
    stop.begin()
    stop.take(np.array([0]), np.array([7]), np.array([0.5]))
    slots._join(NewSequence(0, (*FIRST, 7, 7), 5, Sampling(0), 2))
    stop.begin()
    assert stop.rates._tried_B.sum() == 0
