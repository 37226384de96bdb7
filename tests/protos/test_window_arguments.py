"""`draft_kv_window` and `draft_kv_sinks`."""

import pytest

from protos.config import arguments
from protos.config.engine import EngineConfig, ModelConfig, SpeculativeConfig, from_json, to_json
from protos.config.kv_window import KVWindow
from protos.config.speculation import read
from protos.errors import ConfigError
from tests.support.engine_arguments import parse


def configured(keys: dict[str, object]) -> SpeculativeConfig:
    found = read({"method": "draft_model", "model": "d", "num_speculative_tokens": 4, **keys}, None)
    assert found is not None
    return found


def test_a_window_has_sinks() -> None:
    assert configured({}).kv_window is None
    assert configured({"draft_kv_window": 512}).kv_window == KVWindow(512, 4)
    found = configured({"draft_kv_window": "512", "draft_kv_sinks": 0})
    assert found.kv_window == KVWindow(512, 0)
    engine = EngineConfig(model=ModelConfig("m"), speculative=found)
    assert from_json(to_json(engine)) == engine


def test_sglang_has_names_for_them() -> None:
    found = parse(speculative_model="d", speculative_draft_window_size=64, speculative_draft_sink_size=2).speculative
    assert found is not None and found.kv_window == KVWindow(64, 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"draft_kv_window": 0}, "draft_kv_window must be at least 1, got 0"),
        ({"draft_kv_window": 8, "draft_kv_sinks": -1}, "draft_kv_sinks must be at least 0, got -1"),
        ({"draft_kv_sinks": 4}, "draft_kv_sinks needs draft_kv_window, got draft_kv_sinks 4 alone"),
        ({"draft_kv_window": 8, "method": "medusa"}, "draft_kv_window is for draft_model, eagle, .*; got medusa"),
        ({"draft_kv_window": 8, "method": "ngram", "model": None}, "whose drafts read a KV cache; got ngram"),
    ],
)
def test_windows_that_make_no_sense(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(keys)


def own(target: tuple[str, str | None] | None = ("t", None), **keys: object) -> SpeculativeConfig | None:
    return read({"method": "self_window", **keys}, None, target=target)


def test_the_target_drafts_for_itself() -> None:
    found = own(draft_kv_window=256)
    assert found is not None
    assert (found.method, found.model, found.kv_window) == ("self_window", None, KVWindow(256, 4))
    assert own(draft_kv_window=256, model="t") == found
    cascade = own(draft_kv_window=256, method=["suffix", "self-window"])
    assert cascade is not None and cascade.methods == ("suffix", "self_window")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "method 'self_window' needs draft_kv_window"),
        ({"draft_kv_window": 8, "model": "d"}, "'self_window' drafts with the target, t, got model 'd'; leave it out"),
        ({"draft_kv_window": 8, "parallel_drafting": True}, "not possible with method 'self_window'"),
    ],
)
def test_what_a_target_that_drafts_cannot_have(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        own(**keys)


@pytest.mark.parametrize(("ranks", "placement"), [(1, "colocated"), (2, "dedicated")])
def test_on_ray_it_stays_with_the_target_unless_that_is_split(ranks: int, placement: str) -> None:
    found = arguments.parse(
        {
            "model": "m",
            "speculative_config": {"method": "self_window", "draft_kv_window": 8},
            "tensor_parallel_size": ranks,
            "distributed_executor_backend": "ray",
        }
    ).speculative
    assert found is not None and found.placement == placement
