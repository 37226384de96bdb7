"""Prometheus metrics: names and values; the summary line."""

from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from protos.messages import Request, Sampling, SpeculationStats, TokenOutput
from protos.sampling import SamplingParams
from protos.stats import STEP_TOKENS, EngineStats, PhaseTimes
from runtime.metrics.logs import RequestEnd
from runtime.metrics.prometheus import Metrics


def request(name: str, num_prompt: int = 3) -> Request:
    return Request(name, tuple(range(num_prompt)), SamplingParams(), Sampling(seed=0), max_tokens=8)


def scraped(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return sample values by name and by the label that distinguishes samples of one name."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            rest = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[sample.name, next(iter(rest.values()), "")] = sample.value
    return found


def own_labels(labels: dict[str, str]) -> list[str]:
    """Return the labels that distinguish samples of one name, sorted by label name."""
    return [value for name, value in sorted(labels.items()) if name not in ("model_name", "engine")]


def test_requests_are_counted_under_both_prefixes() -> None:
    metrics = Metrics("m")
    for name in ("a", "b", "c"):
        metrics.submitted(request(name))
    metrics.received(TokenOutput("a", [1, 2]))
    metrics.received(TokenOutput("a", [3, 4, 5], finish_reason="stop", queued_s=0.0))
    metrics.received(TokenOutput("b", [1], finish_reason="length"))
    metrics.dropped("c", "abort")
    metrics.dropped("a", "abort")
    metrics.received(TokenOutput("gone", [1], finish_reason="stop"))
    found = scraped(metrics)
    for prefix in ("vllm:", "slipstream_"):
        assert found[prefix + "prompt_tokens_total", ""] == 9
        assert found[prefix + "generation_tokens_total", ""] == 6
        by_reason = {reason: found[prefix + "request_success_total", reason] for reason in ("stop", "length", "abort")}
        assert by_reason == {"stop": 1, "length": 1, "abort": 1}
        assert found[prefix + "time_to_first_token_seconds_count", ""] == 2
        assert found[prefix + "inter_token_latency_seconds_count", ""] == 3
        assert found[prefix + "e2e_request_latency_seconds_count", ""] == 2
        assert found[prefix + "request_generation_tokens_sum", ""] == 6
        assert found[prefix + "request_params_max_tokens_count", ""] == 3
        assert found[prefix + "request_decode_time_seconds_count", ""] == 2
        assert found[prefix + "request_time_per_output_token_seconds_count", ""] == 1
        for name in ("queue", "prefill", "inference"):
            assert found[f"{prefix}request_{name}_time_seconds_count", ""] == 1
    assert not any(name.endswith("_created") for name, _ in found)


def test_the_controllers_figures_have_vllms_names() -> None:
    stats = EngineStats(
        drafting_rounds=10, proposed=40, accepted=25, accepted_per_pos=(10, 8, 5, 2), preemptions=1,
        prefix_queries=100, prefix_hits=60, num_running=3, num_waiting=2, kv_usage=0.25,
        step_tokens=(1, 2, *[0] * (len(STEP_TOKENS) - 2), 4), fed_tokens=70_000,
    )  # fmt: skip
    found = scraped(Metrics("m", lambda: stats))
    for prefix in ("vllm:", "slipstream_"):
        assert found[prefix + "num_requests_running", ""] == 3
        assert found[prefix + "num_requests_waiting", ""] == 2
        assert found[prefix + "kv_cache_usage_perc", ""] == 0.25
        assert found[prefix + "prefix_cache_queries_total", ""] == 100
        assert found[prefix + "prefix_cache_hits_total", ""] == 60
        assert found[prefix + "num_preemptions_total", ""] == 1
        assert found[prefix + "spec_decode_num_drafts_total", ""] == 10
        assert found[prefix + "spec_decode_num_draft_tokens_total", ""] == 40
        assert found[prefix + "spec_decode_num_accepted_tokens_total", ""] == 25
        per_position = [found[prefix + "spec_decode_num_accepted_tokens_per_pos_total", str(j)] for j in range(4)]
        assert per_position == [10, 8, 5, 2]
        below = [found[prefix + "iteration_tokens_total_bucket", bound] for bound in ("1.0", "8.0", "16384.0", "+Inf")]
        assert below == [1, 3, 3, 7]
        assert found[prefix + "iteration_tokens_total_sum", ""] == 70_000


def test_figures_of_our_own_have_only_our_name() -> None:
    stats = EngineStats(
        steps=5,
        steps_s=10.0,
        phases=PhaseTimes(2.0, 0.5, 4.0, 1.0, late_drafts=3),
        draft_failures=6,
        draft_changes={"lost": 2},
        speculation_changes={"batch_size_rose": 3},
        target_losses=1,
        num_speculative_tokens=4,
        predicted_speedup=1.25,
        speculation="on",
        speculative_s=8.0,
        plain_s=12.0,
    )
    text = Metrics("m", lambda: stats).render().decode()
    found = {
        (sample.name.removeprefix("slipstream_"), *own_labels(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["draft_service_changes_total", "lost"] == 2
    assert found["draft_service_changes_total", "revived"] == 0, "Prometheus sees no increase up to a first sample"
    assert found["spec_decode_changes_total", "batch_size_rose"] == 3
    reasons = ("batch_size_fell", "batch_size_table", "pays", "does_not_pay", "rose", "fell")
    assert [found["spec_decode_changes_total", reason] for reason in reasons] == [0] * len(reasons)
    assert found["target_losses_total",] == 1
    assert found["spec_decode_late_drafts_total",] == 3
    assert found["spec_decode_draft_failures_total",] == 6
    assert found["spec_decode_num_speculative_tokens",] == 4
    assert found["spec_decode_predicted_speedup",] == 1.25
    states = {state: found["spec_decode_state", state] for state in ("off", "on", "paused", "no_draft")}
    assert states == {"off": 0, "on": 1, "paused": 0, "no_draft": 0}
    sides: dict[str, float] = {"target": 0.0, "draft": 0.0}
    for (name, *labels), value in found.items():
        if name == "phase_seconds_total":
            sides[labels[1]] += value
    assert sides == {"target": 10.0, "draft": 10.0}, "what a side does and its idling are all there is"
    assert found["phase_seconds_total", "idle", "target"] == 4.5
    assert "vllm:phase_seconds" not in text


def test_labels_come_from_known_sets() -> None:
    metrics = Metrics("m")
    for number in range(100):
        metrics.answered(f"VERB{number}", None, 400 + number % 10)
        metrics.submitted(request(f"r{number}"))
        metrics.received(TokenOutput(f"r{number}", finish_reason=f"reason {number}"))
    found = scraped(metrics)
    assert found["slipstream_http_requests_total", "other"] == 100
    assert found["vllm:request_success_total", "error"] == 100
    assert sum(name == "vllm:request_success_total" for name, _ in found) == 4


def test_the_summary_tells_what_happened_since_the_last_one() -> None:
    stats = EngineStats()
    metrics = Metrics("m")
    metrics.use_stats(lambda: stats)
    assert metrics.summary() is None
    metrics.submitted(request("a"))
    metrics.received(TokenOutput("a", [1, 2], finish_reason="stop"))
    stats = EngineStats(
        drafting_rounds=2,
        proposed=10,
        accepted=6,
        prefix_queries=4,
        prefix_hits=1,
        steps_s=4.0,
        phases=PhaseTimes(0.44),
        speculative_s=2.0,
        plain_s=3.8,
        num_speculative_tokens=5,
        predicted_speedup=1.75,
    )
    line = metrics.summary()
    assert line is not None
    assert "1 finished" in line
    assert "prefix hits 25%" in line
    assert "accept 3.0/5.0, 60%, est. speed-up 1.90x, predicted 1.75x, K=5, draft 11% of step" in line
    assert metrics.summary() is None
    metrics.submitted(request("b"))
    metrics.received(TokenOutput("b", [1], finish_reason="stop"))
    stats = structs.replace(stats, speculation="paused", predicted_speedup=1.0)
    assert (metrics.summary() or "").endswith(", speculation paused, predicted 1.00x")


def test_how_a_request_went_is_told_once() -> None:
    ends: list[RequestEnd] = []
    metrics = Metrics("m", on_end=ends.append)
    for name in ("a", "b"):
        metrics.submitted(request(name))
    metrics.received(TokenOutput("a", [1, 2]))
    metrics.received(TokenOutput("a", [3], finish_reason="stop", speculation=SpeculationStats(2, 6, 1), queued_s=0.5))
    metrics.dropped("a", "abort")
    metrics.dropped("b", "abort")
    answered, aborted = ends
    assert (answered.request_id, answered.finish_reason, answered.queued_s) == ("a", "stop", 0.5)
    assert (answered.num_prompt_tokens, answered.num_output_tokens) == (3, 3)
    assert answered.speculation == SpeculationStats(2, 6, 1)
    assert answered.first_token_s is not None
    assert 0 <= answered.first_token_s <= answered.last_token_s
    assert (aborted.finish_reason, aborted.first_token_s, aborted.speculation) == ("abort", None, None)
