"""The batch size above which speculation does not pay, from synthetic step costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.config.engine import SpeculativeConfig
from protos.messages import StepCosts
from runtime.policy.batch_size import derive_threshold, speedup, with_threshold
from runtime.policy.interpolation import interpolate

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def costs(flat_to: int, draft: float = 0.1) -> StepCosts:
    """Return costs that are constant up to *flat_to* tokens and proportional beyond."""
    target = {size: max(1.0, size / flat_to) for size in SIZES}
    return StepCosts(target, {size: draft * seconds for size, seconds in target.items()} if draft else {})


def test_drafting_pays_while_tokens_are_free() -> None:
    assert derive_threshold(costs(flat_to=10**6), 4, 128) is None
    assert speedup(costs(flat_to=10**6), 4, 1) == pytest.approx((1 - 0.7**5) / 0.3 / 1.4)


def test_drafting_stops_where_tokens_cost() -> None:
    limit = derive_threshold(costs(flat_to=64), 4, 128)
    assert limit is not None
    assert 64 // 5 < limit < 64
    assert speedup(costs(flat_to=64), 4, limit) >= 1 > speedup(costs(flat_to=64), 4, limit + 1)


def test_a_single_request_gets_what_was_asked_for() -> None:
    assert derive_threshold(costs(flat_to=1, draft=1.0), 4, 64) == 1


def test_draft_tokens_beside_the_controller_cost_nothing() -> None:
    free, paid = derive_threshold(costs(64, draft=0.0), 4, 256), derive_threshold(costs(64), 4, 256)
    assert free is not None
    assert paid is not None
    assert free > paid


@given(st.dictionaries(st.integers(1, 512), st.floats(1e-4, 10.0), min_size=1), st.integers(1, 2048))
def test_costs_between_sizes_lie_between_their_costs(seconds: dict[int, float], tokens: int) -> None:
    found = interpolate(seconds, tokens)
    if tokens <= max(seconds):
        assert min(seconds.values()) * 0.999 <= found <= max(seconds.values()) * 1.001
    else:
        assert found == pytest.approx(seconds[max(seconds)] * tokens / max(seconds))
    if tokens in seconds:
        assert found == seconds[tokens]


def configured(**options: object) -> SpeculativeConfig:
    return SpeculativeConfig(method="any", num_speculative_tokens=4, **options)  # type: ignore[arg-type]


def test_the_users_own_threshold_stands() -> None:
    for mine in (configured(disable_by_batch_size=3), configured(num_speculative_tokens_per_batch_size=((1, 9, 2),))):
        config, line = with_threshold(mine, costs(64), 128)
        assert config == mine
        assert "as configured" in line


def test_a_threshold_is_derived_and_said() -> None:
    config, line = with_threshold(configured(), costs(64), 128)
    assert config.disable_by_batch_size == derive_threshold(costs(64), 4, 128)
    assert f"off above {config.disable_by_batch_size} decoding rows" in line
    assert with_threshold(configured(), None, 128)[0].disable_by_batch_size is None
    assert "up to 128" in with_threshold(configured(), costs(10**6), 128)[1]
