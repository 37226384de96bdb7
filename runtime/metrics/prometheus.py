"""Prometheus metrics of one frontend, and its summary line.

Metrics that vLLM has too are published twice: under vLLM's name (`vllm:...`), which dashboards already scrape, and
under ours (`slipstream_...`). Label values come from fixed sets, never from a request.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.samples import Sample

from protos.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineStalledError,
    NoRoomError,
    OverloadedError,
    SlipstreamError,
    SlowReaderError,
)
from protos.messages import Request, TokenOutput
from protos.stats import EngineStats
from runtime.metrics.logs import HTTP_REQUEST_ID, RequestEnd, Totals, summary_line
from runtime.metrics.metric_families import OwnCollector, PrefixCollector, SharedCollector

log = logging.getLogger("slipstream")

SUMMARY_EVERY_S = 10.0
OWN = ("slipstream_",)
SHARED = ("vllm:", *OWN)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
TURNED_AWAY_AS: dict[type[SlipstreamError], str] = {
    DrainingError: "draining",
    EngineStalledError: "engine_stalled",
    NoRoomError: "no_room",
    OverloadedError: "overloaded",
    SlowReaderError: "slow_reader",
    DeadlineExceededError: "deadline_exceeded",
}
TURNED_AWAY = tuple(TURNED_AWAY_AS.values())
METHODS = ("GET", "POST", "HEAD", "OPTIONS")
OTHER = "other"

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LATENCY_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(slots=True)
class _RequestTimes:
    """When one request arrived, and when it got its first and last tokens."""

    request: Request
    submitted: float
    first: float
    last: float
    http_request_id: str
    num_output_tokens: int = 0

    def end(self, output: TokenOutput | None, reason: str) -> RequestEnd:
        """Return the times and counts of the ended request; *output* is None if there was no last one."""
        return RequestEnd(
            self.request.request_id,
            self.http_request_id,
            reason,
            len(self.request.prompt_token_ids),
            self.num_output_tokens,
            None if output is None else output.queued_s,
            self.first - self.submitted if self.num_output_tokens else None,
            self.last - self.submitted,
            None if output is None else output.speculation,
        )


class Metrics:
    """All metrics of one frontend. Everything but scraping runs on its event loop.

    Args:
        model_name: label of every engine metric, from the configuration.
        stats: returns the controller's newest snapshot.
        on_end: called with each ended request.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats] = EngineStats,
        on_end: Callable[[RequestEnd], None] | None = None,
    ) -> None:
        self._stats, self._on_end = stats, on_end
        self._times: dict[str, _RequestTimes] = {}
        self._before, self._totals = Totals(), Totals()
        labels = {"model_name": model_name, "engine": "0"}
        shared, own, self._registry = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
        shared.register(SharedCollector(self._newest, labels))
        own.register(OwnCollector(self._newest, labels))
        self._make_counters(shared, labels)
        self._make_histograms(shared, labels)
        self._http = Counter(
            "http_requests", "HTTP requests by route template", ["method", "route", "status"], registry=own
        )
        turned_away = Counter(
            "requests_turned_away", "Requests refused or dropped, by reason", [*labels, "reason"], registry=own
        )
        self._turned_away = {reason: turned_away.labels(**labels, reason=reason) for reason in TURNED_AWAY}
        self._registry.register(PrefixCollector(shared, SHARED))
        self._registry.register(PrefixCollector(own, OWN))

    def _make_counters(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        names = list(labels)
        self._prompt_tokens = Counter("prompt_tokens", "Prompt tokens received", names, registry=registry).labels(
            **labels
        )
        self._generation_tokens = Counter("generation_tokens", "Tokens generated", names, registry=registry).labels(
            **labels
        )
        success = Counter(
            "request_success", "Requests ended, by reason", [*names, "finished_reason"], registry=registry
        )
        self._success = {reason: success.labels(**labels, finished_reason=reason) for reason in FINISH_REASONS}

    def _make_histograms(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, list(labels), buckets=buckets, registry=registry).labels(**labels)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_S)
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Time per token: a step's time divided among its tokens", INTER_TOKEN_S
        )
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the last token", LATENCY_S)
        self._queued = histogram("request_queue_time_seconds", "Waiting for a slot", LATENCY_S)
        self._prefill = histogram("request_prefill_time_seconds", "From the slot to the first token", LATENCY_S)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last", LATENCY_S)
        self._inference = histogram("request_inference_time_seconds", "From the slot to the last token", LATENCY_S)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a request's tokens after the first", TOKEN_S
        )
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._request_generation = histogram("request_generation_tokens", "Tokens generated for a request", TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "The most tokens a request may generate", TOKENS)

    def use_stats(self, stats: Callable[[], EngineStats]) -> None:
        """Read the controller's statistics from *stats* from now on."""
        self._stats = stats

    def _newest(self) -> EngineStats:
        return self._stats()

    def submitted(self, request: Request) -> None:
        """Count a request that was sent to the controller."""
        now, length = time.monotonic(), len(request.prompt_token_ids)
        self._times[request.request_id] = _RequestTimes(request, now, now, now, HTTP_REQUEST_ID.get())
        self._prompt_tokens.inc(length)
        self._max_tokens.observe(request.max_tokens)
        self._totals.prompt += length

    def received(self, output: TokenOutput) -> None:
        """Count new tokens of a request, or its end."""
        times = self._times.get(output.request_id)
        if times is None:
            return
        if output.token_ids:
            self._gained(times, len(output.token_ids))
        if output.finish_reason is not None:
            self._ended(times, output, output.finish_reason)

    def _gained(self, times: _RequestTimes, count: int) -> None:
        now = time.monotonic()
        if times.num_output_tokens == 0:
            times.first = now
            self._ttft.observe(now - times.submitted)
        else:
            for _ in range(count):
                self._inter_token.observe((now - times.last) / count)
        times.last = now
        times.num_output_tokens += count
        self._generation_tokens.inc(count)
        self._totals.generated += count

    def dropped(self, request_id: str, reason: str) -> None:
        """Count a request that ends without a last output: its caller left (abort), or the engine has ended (error)."""
        times = self._times.get(request_id)
        if times is not None:
            self._ended(times, None, reason)

    def _ended(self, times: _RequestTimes, output: TokenOutput | None, reason: str) -> None:
        del self._times[times.request.request_id]
        self._success.get(reason, self._success["error"]).inc()
        self._totals.finished += 1
        if output is not None and reason in ("stop", "length"):
            self._measure(times, output.queued_s)
        if self._on_end is not None:
            self._on_end(times.end(output, reason))

    def _measure(self, times: _RequestTimes, queued_s: float | None) -> None:
        """Observe the times and lengths of a request that was answered."""
        self._latency.observe(time.monotonic() - times.submitted)
        self._request_prompt.observe(len(times.request.prompt_token_ids))
        self._request_generation.observe(times.num_output_tokens)
        self._decode.observe(times.last - times.first)
        if times.num_output_tokens > 1:
            self._per_token.observe((times.last - times.first) / (times.num_output_tokens - 1))
        if queued_s is not None:
            self._queued.observe(queued_s)
            self._prefill.observe(max(0.0, times.first - times.submitted - queued_s))
            self._inference.observe(max(0.0, times.last - times.submitted - queued_s))

    def turned_away(self, error: SlipstreamError) -> None:
        """Count a request that was refused, or dropped while it ran."""
        for kind, reason in TURNED_AWAY_AS.items():
            if isinstance(error, kind):
                self._turned_away[reason].inc()
                return

    def answered(self, method: str, route: str | None, status: int) -> None:
        """Count an answered HTTP request. *route* is the matching route template, None without one."""
        known = method if method in METHODS else OTHER
        self._http.labels(known, route or OTHER, f"{status // 100}xx").inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """Yield the help text of each family under our own name, with each of its samples."""
        for family in self._registry.collect():
            if family.name.startswith(OWN):
                for sample in family.samples:
                    yield family.documentation, sample

    def summary(self) -> str | None:
        """Return the summary line since the last call, None if nothing happened."""
        before, now = self._before, replace(self._totals, at=time.monotonic(), stats=self._stats())
        self._before = now
        busy = now.stats.num_running + now.stats.num_waiting + len(self._times)
        if not busy and (now.prompt, now.generated) == (before.prompt, before.generated):
            return None
        return summary_line(now, before)


async def log_summaries(metrics: Metrics) -> None:
    """Log the summary line every `SUMMARY_EVERY_S` if anything happened; runs until cancelled."""
    while True:
        await asyncio.sleep(SUMMARY_EVERY_S)
        line = metrics.summary()
        if line is not None:
            log.info(line)
