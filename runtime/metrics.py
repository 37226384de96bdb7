"""What Prometheus scrapes and the log sums up.

Every figure of the engine appears twice: under vLLM's name (`vllm:...`), which dashboards already scrape,
and under ours (`slipstream_...`). Label values come from sets known in advance, never from a request.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from protos.messages import Request, TokenOutput
from runtime.stats import EngineStats

log = logging.getLogger("slipstream")

SUMMARY_EVERY_S = 10.0
PREFIXES = ("vllm:", "slipstream_")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
METHODS = ("GET", "POST", "HEAD", "OPTIONS")
OTHER = "other"

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LATENCY_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(slots=True)
class _Clock:
    """When one request came, and when it last gained tokens."""

    submitted: float
    last: float
    num_prompt_tokens: int
    num_output_tokens: int = 0


class _Snapshot(Collector):
    """The controller's own figures, taken when scraped."""

    def __init__(self, stats: Callable[[], EngineStats], labels: dict[str, str]) -> None:
        self._stats = stats
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield self._gauge("num_requests_running", "Requests that have a slot", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a slot", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all", stats.kv_usage)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits)
        yield self._counter("num_preemptions", "Requests put back to be recomputed", stats.preemptions)
        yield self._counter("spec_decode_num_drafts", "Rows that were given a draft", stats.drafting_rounds)
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens scored", stats.proposed)
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted", stats.accepted)
        yield self._per_position(stats.accepted_per_pos)
        yield self._by_reason("draft_service_changes", "Times the draft worker came into service or went out of it",
                              stats.draft_changes)
        yield self._by_reason("spec_decode_changes", "Times speculation changed with the batch size",
                              stats.guess_changes)
        yield self._counter("target_losses", "Times the target group was lost and rebuilt", stats.target_losses)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _per_position(self, accepted: tuple[int, ...]) -> Metric:
        text = "Draft tokens accepted, by position in the draft"
        family = CounterMetricFamily(
            "spec_decode_num_accepted_tokens_per_pos", text, labels=[*self._labels, "position"]
        )
        for position, count in enumerate(accepted):
            family.add_metric([*self._labels.values(), str(position)], count)
        return family

    def _by_reason(self, name: str, text: str, changes: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, f"{text}, by reason", labels=[*self._labels, "reason"])
        for reason, count in changes.items():
            family.add_metric([*self._labels.values(), reason], count)
        return family


class _Published(Collector):
    """Gives every metric of a registry its public names, and leaves out creation times."""

    def __init__(self, inner: CollectorRegistry, prefixes: tuple[str, ...]) -> None:
        self._inner = inner
        self._prefixes = prefixes

    def collect(self) -> Iterable[Metric]:
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


@dataclass(slots=True)
class _Interval:
    """Totals at the last summary line."""

    at: float = field(default_factory=time.monotonic)
    prompt: int = 0
    generated: int = 0
    finished: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


class Metrics:
    """All figures of one front end. Everything but scraping happens on its event loop.

    Args:
        model_name: the label of every engine metric; comes from the configuration.
        stats: returns the controller's newest snapshot.
    """

    def __init__(self, model_name: str, stats: Callable[[], EngineStats] = EngineStats) -> None:
        self._stats = stats
        self._clocks: dict[str, _Clock] = {}
        self._interval = _Interval()
        self._totals = _Interval()
        labels = {"model_name": model_name, "engine": "0"}
        engine, self._registry = CollectorRegistry(), CollectorRegistry()
        engine.register(_Snapshot(self._newest, labels))
        self._make_counters(engine, labels)
        self._make_histograms(engine, labels)
        http = CollectorRegistry()
        self._http = Counter(
            "http_requests", "HTTP requests by route template", ["method", "route", "status"], registry=http
        )
        self._registry.register(_Published(engine, PREFIXES))
        self._registry.register(_Published(http, PREFIXES[1:]))

    def _make_counters(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        names = list(labels)
        self._prompt_tokens = Counter("prompt_tokens", "Prompt tokens taken", names, registry=registry).labels(**labels)
        self._generation_tokens = Counter(
            "generation_tokens", "Tokens generated", names, registry=registry
        ).labels(**labels)
        success = Counter(
            "request_success", "Requests ended, by reason", [*names, "finished_reason"], registry=registry
        )
        self._success = {reason: success.labels(**labels, finished_reason=reason) for reason in FINISH_REASONS}

    def _make_histograms(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, list(labels), buckets=buckets, registry=registry).labels(**labels)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_S)
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Time a token took, the step's time shared by its tokens", INTER_TOKEN_S
        )
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the last token", LATENCY_S)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._request_generation = histogram("request_generation_tokens", "Tokens generated for a request", TOKENS)

    def follow(self, stats: Callable[[], EngineStats]) -> None:
        """Take the controller's figures from *stats* from now on."""
        self._stats = stats

    def _newest(self) -> EngineStats:
        return self._stats()

    def submitted(self, request: Request) -> None:
        """A request was handed to the controller."""
        now, length = time.monotonic(), len(request.prompt_token_ids)
        self._clocks[request.request_id] = _Clock(now, now, length)
        self._prompt_tokens.inc(length)
        self._totals.prompt += length

    def received(self, output: TokenOutput) -> None:
        """A request gained tokens or ended."""
        clock = self._clocks.get(output.request_id)
        if clock is None:
            return
        if output.token_ids:
            self._gained(clock, len(output.token_ids))
        if output.finish_reason is not None:
            self._ended(output.request_id, output.finish_reason)

    def _gained(self, clock: _Clock, count: int) -> None:
        now = time.monotonic()
        if clock.num_output_tokens == 0:
            self._ttft.observe(now - clock.submitted)
        else:
            for _ in range(count):
                self._inter_token.observe((now - clock.last) / count)
        clock.last = now
        clock.num_output_tokens += count
        self._generation_tokens.inc(count)
        self._totals.generated += count

    def aborted(self, request_id: str) -> None:
        """Nobody listens to this request any more."""
        if request_id in self._clocks:
            self._ended(request_id, "abort")

    def _ended(self, request_id: str, reason: str) -> None:
        clock = self._clocks.pop(request_id)
        self._success.get(reason, self._success["error"]).inc()
        self._totals.finished += 1
        if reason in ("stop", "length"):
            self._latency.observe(time.monotonic() - clock.submitted)
            self._request_prompt.observe(clock.num_prompt_tokens)
            self._request_generation.observe(clock.num_output_tokens)

    def answered(self, method: str, route: str | None, status: int) -> None:
        """An HTTP request was answered. *route* is the template that matched it, None for none."""
        known = method if method in METHODS else OTHER
        self._http.labels(known, route or OTHER, f"{status // 100}xx").inc()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def summary(self) -> str | None:
        """Return what happened since the last call in one line, or None if nothing did."""
        now, last, totals, stats = time.monotonic(), self._interval, self._totals, self._stats()
        self._interval = _Interval(now, totals.prompt, totals.generated, totals.finished, stats)
        busy = stats.num_running + stats.num_waiting + len(self._clocks)
        if not busy and (totals.prompt, totals.generated) == (last.prompt, last.generated):
            return None
        seconds = max(now - last.at, 1e-9)
        line = (
            f"{stats.num_running} running, {stats.num_waiting} waiting, {totals.finished - last.finished} finished, "
            f"prompt {(totals.prompt - last.prompt) / seconds:.1f} tokens/s, "
            f"generation {(totals.generated - last.generated) / seconds:.1f} tokens/s, "
            f"KV cache {stats.kv_usage:.0%}"
        )
        return line + _hits(stats, last.stats) + _acceptance(stats, last.stats)


def _hits(now: EngineStats, before: EngineStats) -> str:
    queries = now.prefix_queries - before.prefix_queries
    return f", prefix hits {(now.prefix_hits - before.prefix_hits) / queries:.0%}" if queries else ""


def _acceptance(now: EngineStats, before: EngineStats) -> str:
    drafts, proposed = now.drafting_rounds - before.drafting_rounds, now.proposed - before.proposed
    if not drafts or not proposed:
        return ""
    accepted = now.accepted - before.accepted
    return f", accepted {accepted / drafts:.1f} of {proposed / drafts:.1f} guesses ({accepted / proposed:.0%})"


async def log_summaries(metrics: Metrics) -> None:
    """Log what happened every `SUMMARY_EVERY_S`, where anything did; runs until cancelled."""
    while True:
        await asyncio.sleep(SUMMARY_EVERY_S)
        line = metrics.summary()
        if line is not None:
            log.info(line)
