"""Collectors that turn the controller's statistics into Prometheus families, and the published names of families."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from protos.stats import STEP_TOKENS, DraftChange, EngineStats, Outage, SpeculationChange, SpeculationState

Stats = Callable[[], EngineStats]
TARGET_STATES = ("serving", "starting", "no_room", "refusing")
"""Rebuilt ones: being started; waiting for room in the cluster, and requests with them; refusing requests meanwhile."""


class _Families:
    """Makes families with the same labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names, self._values = list(labels), list(labels.values())

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """Return a gauge."""
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """Return a counter."""
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def counters(self, name: str, text: str, labels: Sequence[str], values: Mapping[Sequence[str], float]) -> Metric:
        """Return a counter with more labels; the keys of *values* are the values of *labels*."""
        family = CounterMetricFamily(name, text, labels=[*self._names, *labels])
        for more, count in values.items():
            family.add_metric([*self._values, *more], count)
        return family

    def states(self, name: str, text: str, states: Sequence[str], now: str) -> Metric:
        """Return a gauge that is 1 for the current state and 0 for the others."""
        family = GaugeMetricFamily(name, text, labels=[*self._names, "state"])
        for state in states:
            family.add_metric([*self._values, state], float(state == now))
        return family

    def histogram(self, name: str, text: str, bounds: Sequence[int], counts: Sequence[int], total: float) -> Metric:
        """Return a histogram; *counts* has one more entry than *bounds*, for values above the last."""
        family = HistogramMetricFamily(name, text, labels=self._names)
        sums = accumulate(counts or [0] * (len(bounds) + 1))
        buckets = [*zip([*map(float, bounds), "+Inf"], sums, strict=True)]
        family.add_metric(self._values, [(str(bound), count) for bound, count in buckets], total)
        return family


class SharedCollector(Collector):
    """The controller's statistics that vLLM has too, read when scraped."""

    def __init__(self, stats: Stats, labels: Mapping[str, str]) -> None:
        self._stats, self._make = stats, _Families(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each statistic."""
        stats, make = self._stats(), self._make
        yield make.gauge("num_requests_running", "Requests that have a slot", stats.num_running)
        yield make.gauge("num_requests_waiting", "Requests that wait for a slot", stats.num_waiting)
        yield make.gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all", stats.kv_usage)
        yield make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries)
        yield make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits)
        yield make.counter("num_preemptions", "Requests put back to be recomputed", stats.preemptions)
        yield make.histogram(
            "iteration_tokens_total",
            "Tokens fed by a step, draft tokens included",
            STEP_TOKENS,
            stats.step_tokens,
            stats.fed_tokens,
        )
        yield make.counter("spec_decode_num_drafts", "Rows that had a draft", stats.drafting_rounds)
        yield make.counter("spec_decode_num_draft_tokens", "Draft tokens scored", stats.proposed)
        yield make.counter("spec_decode_num_accepted_tokens", "Draft tokens accepted", stats.accepted)
        yield make.counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft",
            ["position"],
            {(str(j),): count for j, count in enumerate(stats.accepted_per_pos)},
        )


class OwnCollector(Collector):
    """The controller's statistics that only Slipstream has, read when scraped."""

    def __init__(self, stats: Stats, labels: Mapping[str, str]) -> None:
        self._stats, self._make = stats, _Families(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each statistic."""
        stats, make = self._stats(), self._make
        yield make.counter("steps", "Steps committed", stats.steps)
        yield make.counter("step_seconds", "Seconds of all steps, from planning to committing", stats.steps_s)
        yield make.counters(
            "phase_seconds",
            "Seconds of steps that each side spent on a phase; idle is the rest",
            ["side", "phase"],
            phase_seconds(stats),
        )
        yield make.counter(
            "spec_decode_late_drafts", "Rounds whose draft missed its deadline", stats.phases.late_drafts
        )
        yield make.counter(
            "spec_decode_draft_failures", "Times a proposer in the controller process failed", stats.draft_failures
        )
        yield make.counters(
            "draft_service_changes",
            "Times the draft worker entered or left service, by reason",
            ["reason"],
            _keyed(get_args(DraftChange), stats.draft_changes),
        )
        yield make.counters(
            "spec_decode_changes",
            "Times the policy switched speculation on or off or changed its table's K, by reason",
            ["reason"],
            _keyed(get_args(SpeculationChange), stats.speculation_changes),
        )
        yield make.gauge(
            "spec_decode_num_speculative_tokens", "Most draft tokens per row now", stats.num_speculative_tokens
        )
        if stats.predicted_speedup is not None:
            yield make.gauge(
                "spec_decode_predicted_speedup",
                "Speed-up over plain decoding that the adaptive policy expects now",
                stats.predicted_speedup,
            )
        yield make.states(
            "spec_decode_state", "State of speculation now", get_args(SpeculationState), stats.speculation
        )
        yield make.counter("target_losses", "Times the target group was lost and rebuilt", stats.target_losses)
        yield make.states("target_state", "State of the target group now", TARGET_STATES, target_state(stats.outage))
        yield make.gauge(
            "target_outage_seconds",
            "Seconds since the target group was lost, 0 while it serves",
            0.0 if stats.outage is None else max(0.0, time.time() - stats.outage.since),
        )
        yield make.counter(
            "spec_decode_step_seconds",
            "Seconds of steps with drafts in which every row decoded, if step costs were measured",
            stats.speculative_s,
        )
        yield make.counter(
            "spec_decode_plain_step_seconds",
            "Estimated seconds of plain steps for the same tokens, by measured step costs",
            stats.plain_s,
        )


def _keyed(reasons: Iterable[str], changes: Mapping[str, int]) -> dict[Sequence[str], float]:
    """Return *changes*, with 0 for all other *reasons*: Prometheus sees no increase up to a first sample."""
    return {(reason,): count for reason, count in {**dict.fromkeys(reasons, 0), **changes}.items()}


def target_state(outage: Outage | None) -> str:
    """Return which of `TARGET_STATES` the target group is in."""
    if outage is None:
        return "serving"
    if outage.retry_after_s is not None:
        return "refusing"
    return "no_room" if outage.lacks else "starting"


def phase_seconds(stats: EngineStats) -> dict[Sequence[str], float]:
    """Return seconds by side and phase; the phases of a side add up to all steps."""
    phases = stats.phases
    on_target = phases.transfer_s + phases.score_s + phases.verify_s
    return {
        ("target", "score"): phases.score_s,
        ("target", "verify"): phases.verify_s,
        ("target", "transfer"): phases.transfer_s,
        ("target", "idle"): max(0.0, stats.steps_s - on_target),
        ("draft", "propose"): phases.propose_s,
        ("draft", "idle"): max(0.0, stats.steps_s - phases.propose_s) if stats.speculation != "off" else 0.0,
    }


class PrefixCollector(Collector):
    """Publishes every metric of a registry under its prefixes, without creation times."""

    def __init__(self, inner: CollectorRegistry, prefixes: tuple[str, ...]) -> None:
        self._inner = inner
        self._prefixes = prefixes

    def collect(self) -> Iterable[Metric]:
        """Yield each family once per prefix."""
        for family in self._inner.collect():
            for prefix in self._prefixes:
                yield _renamed(family, prefix)


def _renamed(family: Metric, prefix: str) -> Metric:
    renamed = Metric(prefix + family.name, family.documentation, family.type)
    renamed.samples = [
        Sample(prefix + sample.name, sample.labels, sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return renamed
