"""Metrics as Python objects, and statistics in the documents."""

import re
from dataclasses import fields
from pathlib import Path

from msgspec import structs

from protos.outputs import SpeculativeDecodingMetrics
from protos.stats import STEP_TOKENS, EngineStats, PhaseTimes
from runtime.metrics.snapshot import Counter, Gauge, Histogram, Vector, snapshot

STATS = EngineStats(
    steps=3,
    drafting_rounds=2,
    proposed=6,
    accepted=4,
    accepted_per_pos=(2, 1, 1),
    kv_usage=0.25,
    step_tokens=(1, 2, *[0] * (len(STEP_TOKENS) - 1)),
    fed_tokens=9,
    draft_changes={"lost": 2},
    speculation_changes={"batch": 1},
)
LABELS = {"model_name": "m", "engine": "0"}
DOCUMENT = Path(__file__).parents[2] / "docs/speculation.md"


def test_metrics_have_the_names_kinds_and_values_of_vllms() -> None:
    found = {metric.name: metric for metric in snapshot(lambda: STATS, "m")}
    assert found["vllm:spec_decode_num_drafts"] == Counter("vllm:spec_decode_num_drafts", LABELS, 2)
    assert found["vllm:spec_decode_num_draft_tokens"] == Counter("vllm:spec_decode_num_draft_tokens", LABELS, 6)
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert found[per_position] == Vector(per_position, LABELS, [2, 1, 1])
    assert found["vllm:kv_cache_usage_perc"] == Gauge("vllm:kv_cache_usage_perc", LABELS, 0.25)
    tokens = found["vllm:iteration_tokens_total"]
    assert isinstance(tokens, Histogram)
    assert (tokens.count, tokens.sum, tokens.labels) == (3, 9, LABELS)
    assert [tokens.buckets[bound] for bound in ("1.0", "8.0", "+Inf")] == [1, 3, 3]
    lost = {**LABELS, "reason": "lost"}
    assert Counter("slipstream_draft_service_changes", lost, 2) in snapshot(lambda: STATS, "m")


def test_without_speculation_there_are_metrics_too() -> None:
    found = {metric.name: metric for metric in snapshot(EngineStats, "m")}
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert found[name] == Vector(name, {}, [])


def test_every_field_and_metric_is_documented() -> None:
    section = DOCUMENT.read_text().partition("\n## Statistics\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`([\w:]+)`", section))
    names = {field.name for field in fields(SpeculativeDecodingMetrics)}
    names |= {field.name for kind in (EngineStats, PhaseTimes) for field in structs.fields(kind)}
    names |= {metric.name for metric in snapshot(lambda: STATS, "m")}
    assert not names - documented
    assert {"output.speculation", "LLM.stats()", "LLM.get_metrics()"} <= set(re.findall(r"`([\w.()]+)`", section))
