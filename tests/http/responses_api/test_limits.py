"""Limits and aborts of `POST /v1/responses` are those of the other endpoints."""

import json
import re

import httpx

from tests.support.processes import wait_until
from tests.support.serving.guarded_server import guarded
from tests.support.serving.http_server import Served
from tests.support.serving.openai_responses import PATH, answered


def num_aborted(served: Served) -> float:
    (value,) = re.findall(
        r'^vllm:request_success_total{.*"abort".*} (.*)$', httpx.get(served.url + "/metrics").text, re.M
    )
    return float(value)


def test_a_stream_that_is_not_read_on_is_aborted(served: Served) -> None:
    before = num_aborted(served)
    with httpx.stream("POST", served.url + PATH, json={"input": "x", "stream": True}) as answer:
        assert next(answer.iter_lines()) == "event: response.created"
    served.idle()
    wait_until(lambda: num_aborted(served) == before + 1, what="the abort")


def test_salts_separate_caches(served: Served) -> None:
    def cached(**options: str) -> int:
        answer = answered(served, input="the quick brown fox " * 10, max_output_tokens=1, **options)
        assert answer.usage is not None
        return answer.usage.input_tokens_details.cached_tokens

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0


def test_a_draining_server_refuses_before_it_reads_the_body() -> None:
    with guarded() as served:
        served.drain()
        wait_until(lambda: served.get("/health").status_code == 503, what="draining")
        for content in (b"{", json.dumps({"input": "x", "stream": True}).encode()):
            answer = served.client.post(PATH, content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
