"""The adaptive policy where drafts come from several sources: predictions, look-ups, and a draft worker."""

import pytest

from protos.draft import PREDICTION
from runtime.policy.acceptance import ASSUMED, PRIOR_TRIALS, AcceptanceModel, RequestAcceptance, Sources
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.choosers import ChainChooser, TreeChooser
from runtime.policy.round_costs import RoundCostModel
from tests.support.policy_simulation import LIMIT, Seconds, Simulation, cheap, fixed_rate, flat, steep, warmed_up
from tests.support.scheduling import decoding

LOOKUP = Sources(("ngram",), has_worker=False)
CASCADE = Sources(("ngram", "draft_model"), has_worker=True)
NGRAM, WORKER = 1, 2
NOTHING = {PREDICTION: (0.0, 0.0), NGRAM: (0.0, 0.0)}


def engine(sources: Sources, target: Seconds = flat, *, may_branch: bool = False) -> Simulation:
    chooser = TreeChooser(LIMIT, sources) if may_branch else ChainChooser(LIMIT, sources)
    costs = RoundCostModel(warmed_up(target), 64 * (LIMIT + 1), 64, LIMIT, sources)
    policy = AdaptivePolicy(LIMIT, chooser, costs, sources=sources, may_branch=may_branch, clock=lambda: 0.0)
    return Simulation(policy, target, cheap, sources=sources, looked_up=NOTHING)


@pytest.mark.parametrize("may_branch", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("right", [True, False])
def test_while_all_else_is_off_a_prediction_is_drafted_from_as_long_as_it_is_right(
    right: bool, may_branch: bool
) -> None:
    """Rows that begin then are no exception."""
    simulation = engine(LOOKUP, lambda tokens: 0.002 + 0.0002 * tokens, may_branch=may_branch)
    simulation.run([0.0] * 8, 600)
    assert not simulation.policy.current
    simulation.predicted = {8}
    simulation.looked_up = {PREDICTION: (0.95 if right else 0.02, 1.0), NGRAM: (0.0, 1.0)}
    simulation.used.clear()
    ks = [0] * 9
    for _ in range(40):
        simulation.run([0.0] * 9, 1)
        ks = [total + k for total, k in zip(ks, simulation.ks, strict=True)]
    assert (simulation.used[PREDICTION] >= 30) == right
    trials = ks[0]  # two draft tokens for every row
    assert ks[8] > trials + 60 if right else ks[8] < trials + 30


def test_in_a_cascade_that_is_off_a_prediction_does_not_wake_the_draft_worker() -> None:
    simulation = engine(CASCADE)
    simulation.run([0.0] * 4, 600)
    simulation.predicted, simulation.looked_up = {4}, {**NOTHING, PREDICTION: (0.95, 0.7)}
    policy, on_worker, from_prediction = simulation.policy, 0, 0
    for _ in range(200):
        simulation.run([0.0] * 5, 1)
        on_worker += policy.num_draft_tokens(decoding(4), WORKER) > 0
        from_prediction += policy.num_draft_tokens(decoding(4), PREDICTION) > 0
    assert from_prediction > 190
    assert on_worker < 20  # in trials


@pytest.mark.parametrize(("lookup", "worker", "expected"), [(0.9, 0.5, NGRAM), (0.2, 0.8, WORKER), (0.0, 0.0, None)])
def test_in_a_cascade_the_method_is_chosen_that_pays(lookup: float, worker: float, expected: int | None) -> None:
    """The look-up always finds something. In the order of the cascade alone, the draft worker would never be asked."""
    simulation = engine(CASCADE)
    simulation.looked_up = {**NOTHING, NGRAM: (lookup, 1.0)}
    rates = [worker] * 4
    simulation.run(rates, 400)
    simulation.used.clear()
    speed = simulation.run(rates, 1000)
    best = max(
        fixed_rate(0, rates, flat, cheap),
        *(fixed_rate(k, rates, flat, cheap) for k in range(1, LIMIT + 1)),
        *(fixed_rate(k, [lookup] * 4, flat, lambda rows: 0.0) for k in range(1, LIMIT + 1)),
    )
    assert speed >= 0.96 * best
    used = max((NGRAM, WORKER), key=simulation.used.__getitem__)
    assert (used if simulation.used[used] > 3000 else None) == expected


@pytest.mark.parametrize("seed", range(6))
def test_a_cascade_is_faster_than_each_of_its_methods(seed: int) -> None:
    """The look-up finds drafts in three rounds of ten; the draft worker drafts in the others."""
    speeds = {}
    for name, sources, worker in (("cascade", CASCADE, 0.7), ("ngram", LOOKUP, 0.0), ("draft_model", Sources(), 0.7)):
        simulation = engine(sources)
        simulation.random.seed(seed)
        simulation.looked_up = {**NOTHING, NGRAM: (0.9, 0.3)}
        simulation.run([worker] * 2, 400)
        speeds[name] = simulation.run([worker] * 2, 1000)
    assert speeds["cascade"] > 1.03 * max(speeds["ngram"], speeds["draft_model"])


def test_where_nothing_was_found_nothing_is_known_of_what_would_have_been() -> None:
    model = AcceptanceModel(2)
    for _ in range(40):
        model.observe(RequestAcceptance(), 2, 0, 0)
    model.refresh()
    assert model.drafted[0] == pytest.approx(PRIOR_TRIALS / (PRIOR_TRIALS + 40))
    assert model.rates[0] / model.drafted[0] == pytest.approx(ASSUMED)
    for _ in range(400):
        model.observe(RequestAcceptance(), 2, 2, 0)
    model.refresh()
    assert model.rates[0] == pytest.approx(0, abs=0.05)


def test_fewer_tokens_of_a_draft_in_hand_are_verified_where_fewer_pay() -> None:
    asked = {}
    for target in (flat, steep):
        simulation = engine(LOOKUP, target)
        simulation.looked_up = {**NOTHING, NGRAM: (0.9, 1.0)}
        simulation.run([0.0], 300)
        asked[target] = simulation.policy.num_draft_tokens(decoding(0), NGRAM)
    assert asked[flat] == LIMIT
    assert 0 < asked[steep] < LIMIT


def test_a_cascade_without_its_draft_worker_goes_by_what_look_ups_bring_meanwhile() -> None:
    """They were right until then, and are wrong now."""
    simulation = engine(CASCADE)
    simulation.looked_up = {**NOTHING, NGRAM: (0.95, 0.9)}
    simulation.run([0.8] * 4, 600)
    simulation.looked_up, simulation.is_down = {**NOTHING, NGRAM: (0.0, 0.9)}, True
    simulation.run([0.8] * 4, 300)
    plain = fixed_rate(0, [0.0] * 4, flat, cheap)
    assert simulation.run([0.8] * 4, 600) > 0.97 * plain
    simulation.is_down = False
    simulation.run([0.8] * 4, 600)
    assert simulation.run([0.8] * 4, 600) > 1.5 * plain


@pytest.mark.parametrize("may_branch", [False, True], ids=["chain", "tree"])
def test_of_a_draft_worker_that_is_down_nothing_is_learnt(may_branch: bool) -> None:
    simulation = engine(CASCADE, may_branch=may_branch)
    simulation.looked_up = {**NOTHING, NGRAM: (0.9, 1.0)}
    simulation.run([0.8] * 4, 300)
    policy = simulation.policy
    assert policy.num_draft_tokens(decoding(0), NGRAM)
    simulation.is_down = True
    simulation.run([0.8] * 4, 100)
    assert policy.num_draft_tokens(decoding(0), NGRAM)
    assert not policy.num_draft_tokens(decoding(0), WORKER)
