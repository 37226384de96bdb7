"""Refused requests of the OpenAI API, and an engine that dies."""

from typing import Any

import httpx
import openai
import pytest

from tests.support.serving.fake_engine import local_engine
from tests.support.serving.http_server import Served, serving
from tests.support.serving.metric_series import settled_series

LONG = 100_000
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "prompt is required"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "must not be empty"),
    ({"prompt": {"a": 1}}, "prompt", "must be text"),
    ({"prompt": [1, "a"]}, "prompt", "must be text"),
    ({"prompt": [True]}, "prompt", "must be text"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [300]}, "prompt", "ids are from 0 to 299"),
    ({"prompt": "x", "max_tokens": LONG}, "max_tokens", f"{LONG}"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens", "-1"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"prompt": "x", "temperature": "hot"}, "temperature", "'hot'"),
    ({"prompt": "x", "temperature": -1}, "temperature", "at least 0"),
    ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "x", "n": 10**6}, "n", "at most 128"),
    ({"prompt": "x", "best_of": 3}, "best_of", "use n"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    ({"prompt": "x", "logprobs": 10**6}, "logprobs", "at most 20"),
    ({"prompt": "x", "logprobs": -1}, "logprobs", "at least 0"),
    ({"prompt": "x", "stop": ["a"] * 1000}, "stop", "at most 64"),
    ({"prompt": "x", "stop": ["a", 1]}, "stop", "1"),
    ({"prompt": "x", "logit_bias": {"5": 1000}}, "logit_bias", "at most 100"),
    ({"prompt": "x", "logit_bias": {"five": 1}}, "logit_bias", "integer"),
    ({"prompt": "x", "logit_bias": {"400": 1}}, "logit_bias", "400"),
    ({"prompt": "x", "allowed_token_ids": [999]}, "allowed_token_ids", "999"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "valid boolean, got 1"),
    ({"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "stream_options", "is unknown, got True"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=true"),
    ({"prompt": "x", "temprature": 1}, "temprature", "did you mean 'temperature'"),
    ({"prompt": "x", "seed": 2**65}, "seed", "at most"),
    ({"prompt": "x", "priority": 3}, "priority", "not supported, got 3"),
    ({"prompt": "x", "tools": [{}]}, "tools", "use chat completions"),
    ({"prompt": "x", "add_special_tokens": 0}, "add_special_tokens", "valid boolean, got 0"),
    ({"prompt": "x", "speculative_config": {"num_speculative_tokens": 9}}, "speculative_config", "at most 4"),
    ({"prompt": "x", "speculative_config": {"num_speculative_tokens": 0}}, "speculative_config", "enabled: false"),
    ({"prompt": "x", "speculative_config": {"method": "ngram"}}, "speculative_config", "(draft_model), got 'ngram'"),
    ({"prompt": "x", "speculative_config": {"methods": "ngram"}}, "speculative_config", "unknown, got 'ngram'"),
    ({"prompt": "x", "prediction": "text"}, "prediction", "prediction must be an object"),
    ({"prompt": "x", "prediction": {"type": "content"}}, "prediction", "prediction['content'] is required"),
    ({"prompt": "x", "prediction": {"type": "content", "content": 5}}, "prediction", "prediction['content'] must be"),
    ({"prompt": "x", "per_request_spec_decode_metrics": "all"}, "per_request_spec_decode_metrics", "'detailed'"),
    ({"prompt": ["x"] * 2000}, "prompt", "at most 1024"),
    ({"prompt": "x", "structured_outputs": {"regex": "["}}, "structured_outputs", "structured_outputs: "),
    ({"prompt": "x", "guided_choice": [""]}, "guided_choice", "guided_choice: choice must not hold an empty text"),
    (
        {"prompt": "x", "response_format": {"type": "text"}, "structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
        "structured_outputs: ",
    ),
    (
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [2**60 + 1]}}}},
        "response_format",
        "response_format: json has the integer",
    ),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[f"{p}-{w[:12]}" for _, p, w in BAD])
def test_bad_fields(served: Served, body: dict[str, Any], param: str, words: str) -> None:
    answer = served.post(**body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    code = "context_length_exceeded" if body.get("max_tokens") == LONG else None
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"model": "fake", "prompt": "x", "temperature": NaN}', "application/json", 400),
        (b'{"model": "fake", "prompt": "x", "temperature": Infinity}', "application/json", 400),
        (b'{"model": "fake", "prompt": "x", "temperature": 1e999}', "application/json", 400),
        (b'{"model": "fake", "prompt": "\\ud800"}', "application/json", 400),
        (b'{"model": "fake", "prompt": "\xff"}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"model": "fake", "prompt": "x"}', "text/plain", 415),
        (b'{"model": "fake", "prompt": "x"}', "application/json; charset=utf-8", 200),
        (b'{"model": "gone", "prompt": "x"}', "application/json", 404),
        (b'{"prompt": "' + b"x" * (33 * 1024 * 1024) + b'"}', "application/json", 413),
    ],
    ids=["cut", "empty", "list", "nan", "infinity", "too big a number", "surrogate", "not utf-8", "deep", "text",
         "charset", "unknown model", "too long"],
)  # fmt: skip
def test_bad_bodies(served: Served, content: bytes, kind: str, status: int) -> None:
    answer = httpx.post(served.url + "/v1/completions", content=content, headers={"content-type": kind})
    assert answer.status_code == status, answer.text[:300]
    if status != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/v1/embeddings", 404, "no such route; GET /openapi.json lists those there are"),
        ("GET", "/v1/completions", 405, "this route takes POST alone"),
    ],
)
def test_unknown_routes_and_methods(served: Served, method: str, path: str, status: int, message: str) -> None:
    answer = httpx.request(method, served.url + path)
    assert answer.status_code == status
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == message


def test_the_client_sees_its_own_error_types(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        served.client.completions.create(model="gone", prompt="x")
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        served.client.completions.create(model="fake", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"


def test_random_names_make_no_series(served: Served) -> None:
    def metrics() -> str:
        return httpx.get(served.url + "/metrics").text

    def junk(client: httpx.Client, number: int) -> None:
        client.post("/v1/completions", json={"model": f"model-{number}", "prompt": "x"})
        client.get(f"/scan/{number}.php")
        client.get(f"/v1/models/{number}")
        client.request(f"METHOD{number}", "/health")

    with httpx.Client(base_url=served.url) as client:
        metrics()
        junk(client, 0)
        before = settled_series(metrics)
        for number in range(1, 250):
            junk(client, number)
    assert settled_series(metrics) == before
    assert len(before) < 1000


def test_a_dead_engine(served: Served) -> None:
    del served
    with serving(local_engine()) as doomed:
        with pytest.raises(openai.InternalServerError) as dead:
            doomed.client.completions.create(model="fake", prompt="raise", max_tokens=4)
        assert dead.value.status_code == 503
        assert dead.value.code == "engine_dead"
        assert "path" not in dead.value.message
        assert httpx.get(doomed.url + "/health").status_code == 503
        assert doomed.post(prompt="x").status_code == 503
        assert httpx.get(doomed.url + "/metrics").status_code == 200


def test_an_engine_that_dies_in_a_stream() -> None:
    with serving(local_engine(max_model_len=LONG)) as doomed:
        stream = doomed.client.completions.create(model="fake", prompt="endless", max_tokens=LONG // 2, stream=True)
        next(stream)
        assert doomed.post(prompt="raise").status_code == 503
        with pytest.raises(openai.APIError, match="the engine has stopped"):
            list(stream)
