"""Early stop by costs: the least survival, and the speed that drafts reach which end by it, on a simulated engine."""

import random
from dataclasses import dataclass, field, replace
from itertools import count
from unittest import mock

import numpy as np
import pytest

from protos.messages import NewSequence, RoundPlan, Row, Sampling, Verdict
from runtime.policy.acceptance import DecodingRow, RequestAcceptance
from runtime.policy.base import FinishedStep, NoSpeculation
from runtime.policy.choosers import ChainChooser
from runtime.policy.round_costs import FIRST_LEVEL, RoundCostModel
from runtime.policy.stopping import StoppingPolicy
from tests.support.scheduling import decoding
from workers.draft.survival import LearntStop
from workers.slots import SlotTable

LIMIT, STEP_S, SCORE_S, DRAFT_S = 8, 0.004, 0.0001, 0.001


def test_a_draft_token_pays_if_it_brings_more_than_the_engine_does_meanwhile() -> None:
    policy = StoppingPolicy(NoSpeculation(), RoundCostModel(None, 64, 8, LIMIT))
    policy.begin_step([decoding(0), decoding(1)])
    assert policy.least_survival == 0.0
    plan = RoundPlan(0, [Row(0, 1, 1, 2, 4), Row(1, 1, 1, 2, 4)])
    verdicts = [Verdict(slot, (1, 1, 1), 4, (0, 1)) for slot in range(2)]
    for _ in range(50):
        policy.end_step(FinishedStep(plan, verdicts, 6, draft_s=(FIRST_LEVEL + 3) * 0.002, seconds=0.020))
        policy.begin_step([decoding(0), decoding(1)])
    # A draft step of 2 ms for two rows, at 300 tokens a second; that the target takes longer was not seen.
    assert policy.least_survival == pytest.approx(0.001 * 300, rel=0.05)


@dataclass
class Simulation:
    """One row: tokens have a confidence of 0.9 or 0.2, and survive in 95 or 30 of 100 cases."""

    threshold: float | None
    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.policy = StoppingPolicy(NoSpeculation(), RoundCostModel(None, 64, 8, LIMIT))
        self.slots = SlotTable(1, 64, 16)
        self.slots._join(NewSequence(0, (1,), 1, Sampling(0), 1))
        self.stop = LearntStop(self.slots)

    def run(self, rounds: int) -> float:
        """Return tokens per second."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(rounds):
            self._round()
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _round(self) -> None:
        self.slots.known_len[0] = max(1, self.slots.known_len[0])
        self.policy.begin_step([decoding(0)])
        self.stop.least = self.policy.least_survival
        self.stop.begin()
        self.slots.known_len[0] = 1
        survives, k = [], 0
        while k < LIMIT:
            confidence = self.dice.choice((0.9, 0.2))
            survives.append(self.dice.random() < (0.95 if confidence > 0.5 else 0.3))
            k += 1
            self.stop.take(np.array([0]), np.array([k]), np.array([confidence]))
            goes_on = self.stop.goes_on([0])[0] if self.threshold is None else confidence >= self.threshold
            if not goes_on:
                break
        accepted = survives.index(False) if False in survives else k
        self.slots.tokens[0, 1 : 2 + accepted] = [*range(1, accepted + 1), 99]
        self.slots.known_len[0] = 2 + accepted
        draft_s = k * DRAFT_S
        seconds = STEP_S + SCORE_S * k + draft_s
        verdict = Verdict(0, (1,) * (accepted + 1), k, range(accepted))
        plan = RoundPlan(0, [Row(0, 1, 1, 2, LIMIT)])
        self.policy.end_step(FinishedStep(plan, [verdict], accepted + 1, draft_s, seconds))
        self.seconds += seconds
        self.tokens += accepted + 1
        self.drafted += k


@pytest.mark.parametrize("disturbed", [0, 120])
def test_the_first_round_with_drafts_and_one_that_was_disturbed_decide_little(disturbed: int) -> None:
    """In the first one the draft reads the prompt."""
    simulation = Simulation(None)
    end, rounds = simulation.policy.end_step, count()

    def longer(step: FinishedStep) -> None:
        more_s = 0.05 * (next(rounds) == disturbed)
        end(replace(step, draft_s=step.draft_s + more_s, seconds=step.seconds + more_s))

    with mock.patch.object(simulation.policy, "end_step", longer):
        simulation.run(200)
    undisturbed = Simulation(None)
    undisturbed.run(200)
    assert simulation.run(1000) > 0.98 * undisturbed.run(1000)


def test_what_is_learnt_is_about_as_fast_as_the_best_threshold_and_faster_than_none() -> None:
    found = {}
    for threshold in (None, 0.0, 0.5, 1.0):
        simulation = Simulation(threshold)
        simulation.run(200)
        found[threshold] = simulation.run(1000)
    best = max(found[threshold] for threshold in (0.0, 0.5, 1.0))
    assert found[None] > 1.1 * found[0.0]
    assert found[None] > 0.98 * best


def test_a_token_that_was_not_drafted_counts_as_one_that_was_not_accepted() -> None:
    """So the policy "adaptive" expects of a longer draft what it really brings."""
    model = RoundCostModel(None, 64, 8, 2)
    wanted = {}
    for num_asked in (1, 2):
        chooser = ChainChooser(2)
        row = DecodingRow((2,), (RequestAcceptance(),))
        for _ in range(400):
            chooser.record(Verdict(0, (1, 1), 1, (0,)), row, (num_asked,), 0)
        chooser.choose([row], model.of(1))
        wanted[num_asked] = chooser._models[0].rates[1]
    assert wanted[2] < 0.1
    assert wanted[1] > 0.6
