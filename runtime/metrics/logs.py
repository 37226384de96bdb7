"""Log lines as text or JSON, the line about each ended request, and the periodic summary line."""

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from protos.config.engine import LogFormat
from protos.messages import SpeculationStats
from protos.stats import EngineStats

log = logging.getLogger("slipstream")

LONGEST_KEY, MAX_KEYS = 200, 1000
"""Characters of a text, and texts, that `RepeatFilter` keeps."""
OURS = ("slipstream", "protos", "proposers", "workers", "runtime", "cluster")
HTTP_REQUEST_ID: ContextVar[str] = ContextVar("http_request_id", default="")
"""The `x-request-id` of the HTTP request being answered; empty outside of one."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, `extra={"fields": {...}}`, and any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if http_request_id := HTTP_REQUEST_ID.get():
            line["http_request_id"] = http_request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class LogLimit:
    """Lets one line of a kind through every `period_s` seconds, for events that clients cause. Counts the others."""

    def __init__(self, period_s: float = 10.0) -> None:
        self._period_s = period_s
        self._next_at = 0.0
        self._num_left_out = 0

    def log(self, write: Callable[..., None], text: str, *values: object) -> None:
        """Call *write* with the line and *values*, or count it."""
        now = time.monotonic()
        if now < self._next_at:
            self._num_left_out += 1
            return
        more = f" ({self._num_left_out} more such events)" if self._num_left_out else ""
        self._next_at, self._num_left_out = now + self._period_s, 0
        write(text + more, *values)


class RepeatFilter(logging.Filter):
    """Bounds what other libraries log of clients: `burst` lines of one text in `period_s` seconds."""

    def __init__(self, burst: int = 10, period_s: float = 10.0) -> None:
        super().__init__()
        self._burst, self._period_s = burst, period_s
        self._began: dict[tuple[str, str], float] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether *record* is written."""
        key = (record.name, str(record.msg)[:LONGEST_KEY])
        now = time.monotonic()
        if now - self._began.get(key, -self._period_s) >= self._period_s:
            if len(self._began) >= MAX_KEYS:
                self._began.clear()
                self._counts.clear()
            self._began[key], self._counts[key] = now, 0
        self._counts[key] += 1
        return self._counts[key] <= self._burst or record.name.partition(".")[0] in OURS


def log_to_stderr(log_format: LogFormat = "text", level: int = logging.INFO) -> None:
    """Log to standard error: our own loggers from *level*, others from WARNING. Only the first call has an effect."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    handler.addFilter(RepeatFilter())
    logging.basicConfig(handlers=[handler])
    for name in OURS:
        logging.getLogger(name).setLevel(level)


@dataclass(frozen=True)
class RequestEnd:
    """The times and counts of an ended request. Times are in seconds from its arrival, None if it ended before."""

    request_id: str
    http_request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    queued_s: float | None
    first_token_s: float | None
    last_token_s: float
    speculation: SpeculationStats | None


def log_request_end(end: RequestEnd) -> None:
    """Log the times and counts of an ended request, never its text."""
    stats = end.speculation or SpeculationStats()
    fields = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in asdict(end).items()
        if name != "speculation" and value is not None
    }
    fields |= {"num_draft_tokens": stats.proposed, "num_accepted_draft_tokens": stats.accepted}
    first = "no token" if end.first_token_s is None else f"first token after {end.first_token_s:.3f} s"
    log.info(
        "request %s ended (%s): %d prompt + %d output tokens, %s, last after %.3f s, accepted %d of %d draft tokens",
        end.request_id,
        end.finish_reason,
        end.num_prompt_tokens,
        end.num_output_tokens,
        first,
        end.last_token_s,
        stats.accepted,
        stats.proposed,
        extra={"fields": fields},
    )


@dataclass(slots=True)
class Totals:
    """What one frontend counted up to a moment, and the controller's snapshot of that moment."""

    at: float = field(default_factory=time.monotonic)
    prompt: int = 0
    generated: int = 0
    finished: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


def summary_line(now: Totals, before: Totals) -> str:
    """Return the summary line for the time between two snapshots."""
    seconds = max(now.at - before.at, 1e-9)
    stats = now.stats
    line = (
        f"{stats.num_running} running, {stats.num_waiting} waiting, {now.finished - before.finished} finished, "
        f"prompt {(now.prompt - before.prompt) / seconds:.1f} tokens/s, "
        f"generation {(now.generated - before.generated) / seconds:.1f} tokens/s, "
        f"KV cache {stats.kv_usage:.0%}"
    )
    return line + _prefix_hits(stats, before.stats) + _speculation(stats, before.stats)


def _prefix_hits(now: EngineStats, before: EngineStats) -> str:
    queries = now.prefix_queries - before.prefix_queries
    return f", prefix hits {(now.prefix_hits - before.prefix_hits) / queries:.0%}" if queries else ""


def _prediction(now: EngineStats) -> str:
    return "" if now.predicted_speedup is None else f", predicted {now.predicted_speedup:.2f}x"


def _speculation(now: EngineStats, before: EngineStats) -> str:
    """Return acceptance, the estimated speed-up over plain decoding, K, and the draft's share of the time."""
    drafts, proposed = now.drafting_rounds - before.drafting_rounds, now.proposed - before.proposed
    if not drafts or not proposed:
        return {"paused": f", speculation paused{_prediction(now)}", "no_draft": ", no draft"}.get(now.speculation, "")
    accepted = now.accepted - before.accepted
    line = f", accept {accepted / drafts:.1f}/{proposed / drafts:.1f}, {accepted / proposed:.0%}"
    speculative_s, plain_s = now.speculative_s - before.speculative_s, now.plain_s - before.plain_s
    if speculative_s > 0:
        line += f", est. speed-up {plain_s / speculative_s:.2f}x"
    line += _prediction(now)
    line += f", K={now.num_speculative_tokens}"
    steps_s, propose_s = now.steps_s - before.steps_s, now.phases.propose_s - before.phases.propose_s
    return line + (f", draft {propose_s / steps_s:.0%} of step" if steps_s > 0 and propose_s > 0 else "")
