"""How many draft tokens a row gets."""

import pytest

from protos.config.engine import SpeculativeConfig
from protos.errors import ConfigError
from protos.messages import RoundPlan, Row, StepCosts, Verdict
from runtime.policy.base import FinishedStep, NoSpeculation, Policy
from runtime.policy.batch_size import FORGOTTEN_ROUNDS, WAY_ROUNDS, BatchSizePolicy, with_threshold
from tests.support.scheduling import decoding


def series(policy: Policy, sizes: list[int]) -> list[int]:
    """Return K after each step of that many decoding rows."""
    found = []
    for size in sizes:
        policy.begin_step([decoding(key) for key in range(size)])
        found.append(policy.num_draft_tokens(decoding(0)))
    return found


def configured(**options: object) -> Policy:
    return BatchSizePolicy(SpeculativeConfig(method="any", **{"num_speculative_tokens": 5, **options}))


def test_fixed_k_at_every_batch_size() -> None:
    assert series(configured(), [0, 1, 500]) == [5, 5, 5]


def test_not_configured_is_zero() -> None:
    assert series(NoSpeculation(), [1]) == [0]


def test_a_request_may_want_none() -> None:
    policy = configured()
    policy.begin_step([decoding(0)])
    assert policy.num_draft_tokens(decoding(0, speculate=False)) == 0
    assert policy.num_draft_tokens(decoding(0)) == 5


def test_off_above_the_limit_and_on_again_when_it_has_been_calm() -> None:
    policy = configured(disable_by_batch_size=10)
    assert series(policy, [10, 11]) == [5, 0]
    assert series(policy, [9] * 40) == [0] * 40
    assert series(policy, [8] * 15 + [9] + [8] * 15) == [0] * 31
    assert series(policy, [8, 10, 11]) == [5, 5, 0]
    assert policy.changes == {"batch_size_rose": 2, "batch_size_fell": 1}


def test_a_limit_of_one_comes_back_too() -> None:
    assert series(configured(disable_by_batch_size=1), [1, 2, *[1] * 16]) == [5, *[0] * 16, 5]


def test_it_is_foreseen_that_speculation_comes_back() -> None:
    policy, foreseen = configured(disable_by_batch_size=10), []
    for size in (11, *[4] * 16):
        policy.begin_step([decoding(key) for key in range(size)])
        foreseen.append((policy.stays_plain, policy.current))
    assert foreseen == [*[(True, 0)] * 15, (False, 0), (False, 5)]


def test_table_of_batch_sizes() -> None:
    policy = configured(num_speculative_tokens_per_batch_size=((1, 2, 5), (5, 8, 2), (9, 16, 0)))
    assert series(policy, [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 1000]) == [5, 5, 5, 5, 5, 2, 2, 0, 0, 0, 0]
    assert policy.changes == {"batch_size_table": 2}


def test_table_and_limit_together() -> None:
    policy = configured(num_speculative_tokens_per_batch_size=((1, 2, 4), (3, 9, 3)), disable_by_batch_size=4)
    assert series(policy, [1, 4, 5, 3]) == [4, 3, 0, 0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (((2, 3, 1),), "must begin with a range from batch size 1"),
        ((), "must begin with a range from batch size 1"),
        (((1, 4, 3), (4, 5, 1)), r"range \[4, 5, 1\] must rise and start after 4"),
        (((1, 4, 3), (6, 5, 1)), r"range \[6, 5, 1\] must rise"),
        (((1, 4, 6),), r"K = 6 is outside 0\.\.5"),
        (((1, 4, -1),), r"K = -1 is outside 0\.\.5"),
    ],
)
def test_tables_that_make_no_sense(table: tuple[tuple[int, int, int], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(num_speculative_tokens_per_batch_size=table)


def test_a_switch_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "runtime.policy.batch_size")
    series(configured(disable_by_batch_size=1), [1, 2, *[1] * 16])
    assert [record.message for record in caplog.records] == [
        "speculation is off: 2 rows decode (batch_size_rose)",
        "speculation is on again: 1 rows decode (batch_size_fell)",
    ]


def test_a_way_of_drafts_that_was_long_once_is_measured_again() -> None:
    """While there are no drafts nothing shows that it is short again."""
    flat = StepCosts({1: 0.01, 512: 0.012}, {1: 0.001, 64: 0.001})
    config = SpeculativeConfig(method="any", num_speculative_tokens=4)

    def derive(costs: StepCosts) -> tuple[SpeculativeConfig, str]:
        return with_threshold(config, costs, 64)

    policy = BatchSizePolicy(derive(flat)[0], derive, flat)
    plan = RoundPlan(0, [Row(slot, 1, 1, 2, 4) for slot in range(8)])
    verdicts = [Verdict(slot, (1,), 4) for slot in range(8)]

    def rounds(number: int, way_s: float) -> int:
        """Return in how many there are drafts."""
        drafting = 0
        for _ in range(number):
            drafting += series(policy, [8]) > [0]
            draft_s = (0.004 + way_s) * (policy.current > 0)
            policy.end_step(FinishedStep(plan, verdicts if policy.current else [], 8, draft_s, 0.01 + draft_s))
        return drafting

    assert rounds(2 * WAY_ROUNDS, 0.05) < 2 * WAY_ROUNDS
    assert rounds(FORGOTTEN_ROUNDS // 2, 0.0) == 0
    assert rounds(FORGOTTEN_ROUNDS, 0.0) > FORGOTTEN_ROUNDS // 4
    assert rounds(100, 0.0) == 100
