"""Log lines as JSON, and the line about an ended request."""

import json
import logging

import pytest

from protos.messages import SpeculationStats
from runtime.metrics.logs import HTTP_REQUEST_ID, JsonFormatter, RequestEnd, log_request_end

ENDED = RequestEnd("cmpl-1", "from-client", "stop", 12, 34, 0.25, 0.5, 2.0, SpeculationStats(9, 45, 25))


def formatted(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [json.loads(JsonFormatter().format(record)) for record in caplog.records]


def test_a_json_line_has_fields_and_the_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "slipstream"):
        log_request_end(ENDED)
    [line] = formatted(caplog)
    assert line["level"] == "INFO"
    assert (line["request_id"], line["http_request_id"], line["finish_reason"]) == ("cmpl-1", "from-client", "stop")
    assert (line["num_prompt_tokens"], line["num_output_tokens"]) == (12, 34)
    assert (line["queued_s"], line["first_token_s"], line["last_token_s"]) == (0.25, 0.5, 2.0)
    assert (line["num_draft_tokens"], line["num_accepted_draft_tokens"]) == (45, 25)
    assert str(line["time"]).endswith("+00:00")
    assert "cmpl-1" in str(line["message"])


def test_lines_written_while_a_request_is_answered_name_it(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("slipstream")
    token = HTTP_REQUEST_ID.set("r-7")
    try:
        log.warning('two\nlines, "quoted", %s', "naïve")
        raise ValueError("no such thing")
    except ValueError:
        inside = formatted(caplog)
        log.exception("failed")
    finally:
        HTTP_REQUEST_ID.reset(token)
    log.warning("outside")
    assert inside[0]["http_request_id"] == "r-7"
    assert inside[0]["message"] == 'two\nlines, "quoted", naïve'
    lines = formatted(caplog)
    assert "ValueError: no such thing" in str(lines[1]["error"])
    assert "http_request_id" not in lines[2]
    assert all("\n" not in JsonFormatter().format(record) for record in caplog.records)
