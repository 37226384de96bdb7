"""Log lines, as text or as JSON, and the line that tells how a request went."""

import json
import logging
import sys
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from protos.config.engine import LogFormat
from protos.messages import SpeculationStats

log = logging.getLogger("slipstream")

OURS = ("slipstream", "protos", "proposers", "workers", "runtime", "cluster")
HTTP_REQUEST_ID: ContextVar[str] = ContextVar("http_request_id", default="")
"""The `x-request-id` of the HTTP request that is being answered here; empty outside of one."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, what `extra={"fields": {...}}` holds, and any traceback."""

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


def log_to_stderr(log_format: LogFormat = "text", level: int = logging.INFO) -> None:
    """Let our log lines from *level* on reach standard error; of others, only warnings. The first call counts."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(handlers=[handler])
    for name in OURS:
        logging.getLogger(name).setLevel(level)


@dataclass(frozen=True)
class Ended:
    """How one request went. Times are in seconds from its arrival, None where it never came so far."""

    request_id: str
    http_request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    queued_s: float | None
    first_token_s: float | None
    last_token_s: float
    speculation: SpeculationStats | None


def log_ended(ended: Ended) -> None:
    """Log how a request went, and nothing of what it said."""
    stats = ended.speculation or SpeculationStats()
    fields = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in asdict(ended).items()
        if name != "speculation" and value is not None
    }
    fields |= {"num_draft_tokens": stats.proposed, "num_accepted_draft_tokens": stats.accepted}
    first = "no token" if ended.first_token_s is None else f"first token after {ended.first_token_s:.3f} s"
    log.info(
        "request %s ended (%s): %d prompt + %d output tokens, %s, last after %.3f s, accepted %d of %d guesses",
        ended.request_id,
        ended.finish_reason,
        ended.num_prompt_tokens,
        ended.num_output_tokens,
        first,
        ended.last_token_s,
        stats.accepted,
        stats.proposed,
        extra={"fields": fields},
    )
