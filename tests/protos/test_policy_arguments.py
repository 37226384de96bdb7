"""`speculative_config["policy"]`, and what each policy reads."""

import pytest

from protos.config.engine import EngineConfig, ModelConfig, SpeculativeConfig, from_json, to_json
from protos.config.speculation import read
from protos.errors import ConfigError

TABLE = [[1, 4, 3], [5, 64, 0]]


def configured(keys: dict[str, object]) -> SpeculativeConfig:
    found = read({"method": "draft_model", "model": "d", "num_speculative_tokens": 4, **keys}, None)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "adaptive"),
        ({"disable_by_batch_size": 4}, "threshold"),
        ({"num_speculative_tokens_per_batch_size": TABLE}, "schedule"),
        ({"policy": "adaptive"}, "adaptive"),
        ({"policy": "fixed"}, "fixed"),
        ({"policy": "threshold", "disable_by_batch_size": 4}, "threshold"),
    ],
)
def test_the_policy_follows_from_what_is_given(keys: dict[str, object], name: str) -> None:
    assert configured(keys).policy_name == name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy": "clever"}, "'adaptive', 'bandit', 'threshold', 'schedule' or 'fixed'"),
        ({"policy": "adaptive", "disable_by_batch_size": 4}, "policy 'adaptive' has no use for .*'threshold' reads: 4"),
        ({"policy": "fixed", "num_speculative_tokens_per_batch_size": TABLE}, "has no use for .*'schedule' reads"),
        ({"policy": "schedule"}, "policy 'schedule' needs num_speculative_tokens_per_batch_size"),
    ],
)
def test_policies_that_contradict_what_is_given(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(keys)


@pytest.mark.parametrize("given", [0, 0.4, 1, "0.4"])
def test_a_confidence_threshold_is_a_probability(given: float | str) -> None:
    assert configured({"assistant_confidence_threshold": given}).assistant_confidence_threshold == float(given)


def test_it_may_be_learnt_and_is_off_by_default() -> None:
    assert configured({}).assistant_confidence_threshold is None
    found = configured({"assistant_confidence_threshold": "auto"})
    assert found.assistant_confidence_threshold == "auto"
    engine = EngineConfig(model=ModelConfig("m"), speculative=found)
    assert from_json(to_json(engine)) == engine


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"assistant_confidence_threshold": 1.5},
            "must be a number from 0 to 1, or 'auto', got 1.5",
        ),
        ({"assistant_confidence_threshold": -0.1}, "from 0 to 1, or 'auto', got -0.1"),
        (
            {"assistant_confidence_threshold": "low"},
            "from 0 to 1, or 'auto', got 'low'",
        ),
        (
            {"assistant_confidence_threshold": 0.4, "method": "medusa"},
            "is for draft_model, eagle, eagle3, mtp, self_window, which draft token by token; got medusa",
        ),
        (
            {"assistant_confidence_threshold": "auto", "draft_shape": "tree"},
            "assistant_confidence_threshold 'auto' with rejection_sample_method 'coupled' is for chains",
        ),
        (
            {"assistant_confidence_threshold": 0.4, "draft_shape": "tree", "rejection_sample_method": "block"},
            "assistant_confidence_threshold 0.4 with rejection_sample_method 'block' is for chains",
        ),
    ],
)
def test_confidence_thresholds_that_cannot_be_used(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(keys)
