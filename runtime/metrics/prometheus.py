"""What Prometheus scrapes and the log sums up.

Figures that vLLM has, too, appear twice: under its name (`vllm:...`), which dashboards already scrape, and under ours
(`slipstream_...`). Label values come from sets known in advance, never from a request.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.samples import Sample

from protos.errors import DeadlineExceededError, DrainingError, OverloadedError, SlipstreamError, SlowReaderError
from protos.messages import Request, TokenOutput
from protos.stats import EngineStats
from runtime.metrics.logs import HTTP_REQUEST_ID, Ended
from runtime.metrics.metric_families import OwnSnapshot, Published, SharedSnapshot
from runtime.metrics.summary import Totals, summarised

log = logging.getLogger("slipstream")

SUMMARY_EVERY_S = 10.0
OWN = ("slipstream_",)
SHARED = ("vllm:", *OWN)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
TURNED_AWAY_AS: dict[type[SlipstreamError], str] = {
    DrainingError: "draining",
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
class _Clock:
    """When one request came, and when it first and last gained tokens."""

    request: Request
    submitted: float
    first: float
    last: float
    http_request_id: str
    num_output_tokens: int = 0

    def ended(self, output: TokenOutput | None, reason: str) -> Ended:
        """Return how the request went; without an *output* nobody waited for the end."""
        return Ended(
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
    """All figures of one front end. Everything but scraping happens on its event loop.

    Args:
        model_name: the label of every engine metric; comes from the configuration.
        stats: returns the controller's newest snapshot.
        tell: told how each request went, once it has ended.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats] = EngineStats,
        tell: Callable[[Ended], None] | None = None,
    ) -> None:
        self._stats, self._tell = stats, tell
        self._clocks: dict[str, _Clock] = {}
        self._before, self._totals = Totals(), Totals()
        labels = {"model_name": model_name, "engine": "0"}
        shared, own, self._registry = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
        shared.register(SharedSnapshot(self._newest, labels))
        own.register(OwnSnapshot(self._newest, labels))
        self._make_counters(shared, labels)
        self._make_histograms(shared, labels)
        self._http = Counter(
            "http_requests", "HTTP requests by route template", ["method", "route", "status"], registry=own
        )
        self._registry.register(Published(shared, SHARED))
        self._registry.register(Published(own, OWN))

    def _make_counters(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        names = list(labels)
        self._prompt_tokens = Counter("prompt_tokens", "Prompt tokens taken", names, registry=registry).labels(**labels)
        self._generation_tokens = Counter("generation_tokens", "Tokens generated", names, registry=registry).labels(
            **labels
        )
        success = Counter(
            "request_success", "Requests ended, by reason", [*names, "finished_reason"], registry=registry
        )
        self._success = {reason: success.labels(**labels, finished_reason=reason) for reason in FINISH_REASONS}
        turned_away = Counter(
            "requests_turned_away", "Requests refused or given up, by reason", [*names, "reason"], registry=registry
        )
        self._turned_away = {reason: turned_away.labels(**labels, reason=reason) for reason in TURNED_AWAY}

    def _make_histograms(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, list(labels), buckets=buckets, registry=registry).labels(**labels)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_S)
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Time a token took, the step's time shared by its tokens", INTER_TOKEN_S
        )
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the last token", LATENCY_S)
        self._queued = histogram("request_queue_time_seconds", "Waiting for a slot", LATENCY_S)
        self._prefill = histogram("request_prefill_time_seconds", "From the slot to the first token", LATENCY_S)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last", LATENCY_S)
        self._inference = histogram("request_inference_time_seconds", "From the slot to the last token", LATENCY_S)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a request's tokens behind the first", TOKEN_S
        )
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._request_generation = histogram("request_generation_tokens", "Tokens generated for a request", TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "The most tokens a request may generate", TOKENS)

    def follow(self, stats: Callable[[], EngineStats]) -> None:
        """Take the controller's figures from *stats* from now on."""
        self._stats = stats

    def _newest(self) -> EngineStats:
        return self._stats()

    def submitted(self, request: Request) -> None:
        """A request was handed to the controller."""
        now, length = time.monotonic(), len(request.prompt_token_ids)
        self._clocks[request.request_id] = _Clock(request, now, now, now, HTTP_REQUEST_ID.get())
        self._prompt_tokens.inc(length)
        self._max_tokens.observe(request.max_tokens)
        self._totals.prompt += length

    def received(self, output: TokenOutput) -> None:
        """A request gained tokens or ended."""
        clock = self._clocks.get(output.request_id)
        if clock is None:
            return
        if output.token_ids:
            self._gained(clock, len(output.token_ids))
        if output.finish_reason is not None:
            self._ended(clock, output, output.finish_reason)

    def _gained(self, clock: _Clock, count: int) -> None:
        now = time.monotonic()
        if clock.num_output_tokens == 0:
            clock.first = now
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
        clock = self._clocks.get(request_id)
        if clock is not None:
            self._ended(clock, None, "abort")

    def _ended(self, clock: _Clock, output: TokenOutput | None, reason: str) -> None:
        del self._clocks[clock.request.request_id]
        self._success.get(reason, self._success["error"]).inc()
        self._totals.finished += 1
        if output is not None and reason in ("stop", "length"):
            self._measure(clock, output.queued_s)
        if self._tell is not None:
            self._tell(clock.ended(output, reason))

    def _measure(self, clock: _Clock, queued_s: float | None) -> None:
        """Count the times and lengths of a request that got its answer."""
        self._latency.observe(time.monotonic() - clock.submitted)
        self._request_prompt.observe(len(clock.request.prompt_token_ids))
        self._request_generation.observe(clock.num_output_tokens)
        self._decode.observe(clock.last - clock.first)
        if clock.num_output_tokens > 1:
            self._per_token.observe((clock.last - clock.first) / (clock.num_output_tokens - 1))
        if queued_s is not None:
            self._queued.observe(queued_s)
            self._prefill.observe(max(0.0, clock.first - clock.submitted - queued_s))
            self._inference.observe(max(0.0, clock.last - clock.submitted - queued_s))

    def turned_away(self, error: SlipstreamError) -> None:
        """A request was refused before it was scheduled, or given up for its time or its reader."""
        for kind, reason in TURNED_AWAY_AS.items():
            if isinstance(error, kind):
                self._turned_away[reason].inc()
                return

    def answered(self, method: str, route: str | None, status: int) -> None:
        """An HTTP request was answered. *route* is the template that matched it, None for none."""
        known = method if method in METHODS else OTHER
        self._http.labels(known, route or OTHER, f"{status // 100}xx").inc()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """Yield every sample once, under our own name, with what its family is about."""
        for family in self._registry.collect():
            if family.name.startswith(OWN):
                for sample in family.samples:
                    yield family.documentation, sample

    def summary(self) -> str | None:
        """Return what happened since the last call in one line, or None if nothing did."""
        before, now = self._before, replace(self._totals, at=time.monotonic(), stats=self._stats())
        self._before = now
        busy = now.stats.num_running + now.stats.num_waiting + len(self._clocks)
        if not busy and (now.prompt, now.generated) == (before.prompt, before.generated):
            return None
        return summarised(now, before)


async def log_summaries(metrics: Metrics) -> None:
    """Log what happened every `SUMMARY_EVERY_S`, where anything did; runs until cancelled."""
    while True:
        await asyncio.sleep(SUMMARY_EVERY_S)
        line = metrics.summary()
        if line is not None:
            log.info(line)
