"""Errors in Anthropic's format, as its client raises them: of the routes, and of what stands before them."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from runtime.http.errors import ApiError, error_response
from tests.support.serving.anthropic_answers import client_of, named_events, strict_error
from tests.support.serving.fake_engine import local_engine
from tests.support.serving.guarded_server import Guarded, guarded
from tests.support.serving.http_server import Served, serving

KEY = "sk-one"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER: Any = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_tokens": -1}, "max_tokens must be at least 1"),
    ({"max_tokens": "5"}, "max_tokens must be a valid integer, got '5'"),
    ({"max_tokens": 10**30}, "max_tokens must be at most"),
    ({"messages": []}, "messages must have at least 1 item"),
    ({"messages": "x"}, "messages must be a valid list, got 'x'"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image', which is not supported"),
    ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "f",
                                                             "input": {}}]}]}, "its tool_result must follow"),
    ({"messages": [{"role": "user", "content": "x " * 5000}]}, "prompt has"),
    ({"system": 5}, "system"),
    ({"temperature": -1}, "temperature must be at least 0"),
    ({"top_p": 0}, "top_p must be greater than 0"),
    ({"top_k": "a"}, "top_k"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences must have at most 64 items"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "a"}, "stop_sequences must be a valid list"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     "tools[0] is of type 'web_search_20250305', which is not supported"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124', which is not supported"),
    ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "'mcp_toolset', which is not supported"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "must match"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0] needs an input_schema of type 'object'"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0]['defer_loading'] must be one of False"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0]['input_examples'] is unknown"),
    ({"tools": [TOOL, TOOL], "tool_choice": {"type": "any"}}, "'f' twice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names 'g'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice of type 'tool' needs name"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice of type 'any' takes no name"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice['type'] must be one of 'auto', 'any'"),
    ({"tools": [TOOL]}, "--enable-auto-tool-choice"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"output_config": {"format": SCHEMA}, "tools": [TOOL]}, "do not go together"),
    ({"output_config": {"format": SCHEMA}, "output_format": SCHEMA}, "exclude each other"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "what"}}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config"),
    ({"output_config": {"task_budget": 5}}, "output_config['task_budget'] is unknown"),
    ({"mcp_servers": [{"type": "url", "url": "http://127.0.0.1:1", "name": "x"}]}, "mcp_servers is not supported"),
    ({"container": "c1"}, "container is not supported"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management is not supported"),
    ({"thread": {"type": "create"}}, "thread is not supported: send the whole conversation"),
    ({"speed": "fast"}, "speed is not supported, got 'fast'"),
    ({"max_token": 5}, "unknown field 'max_token', did you mean 'max_tokens'?"),
    ({"speculative_config": {"num_speculative_tokens": 9}}, "at most 4"),
]  # fmt: skip
IGNORED: dict[str, Any] = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "cache_control": {"type": "ephemeral"},
    "inference_geo": "eu",
    "diagnostics": None,
    "thread": None,
    "container": None,
    "mcp_servers": [],
    "speed": "standard",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "low"},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
}


@pytest.fixture(scope="module")
def plain() -> Iterator[Guarded]:
    with guarded() as running:
        yield running


@pytest.mark.parametrize(("body", "words"), BAD, ids=[words[:24] for _, words in BAD])
def test_bad_fields(plain: Guarded, body: dict[str, Any], words: str) -> None:
    whole = {"messages": USER, "max_tokens": 4, **body}
    for stream in (False, True):
        answer = plain.post(MESSAGES, **{**whole, "stream": stream})
        assert answer.status_code == 400, answer.text
        kind, message = strict_error(answer)
        assert kind == "invalid_request_error"
        assert words in message
        assert len(message) < 400


def test_fields_without_effect(plain: Guarded) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
    body = {"messages": USER, "max_tokens": 4}
    answers = [
        plain.client.post(MESSAGES + "?beta=true", json=body | more, headers=headers).json() for more in ({}, IGNORED)
    ]
    assert answers[0]["content"] == answers[1]["content"]


def test_the_client_sees_its_own_error_types(served: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="gone", messages=USER, max_tokens=4)
    assert (unknown.value.type, unknown.value.status_code) == ("not_found_error", 404)
    assert unknown.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="gone", messages=USER)
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(model="fake", messages=USER, max_tokens=-1)
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError), client.messages.stream(model="fake", messages=USER, max_tokens=-1):
        pass


def test_what_other_statuses_mean(plain: Guarded) -> None:
    assert strict_error(plain.get(MESSAGES))[0] == "invalid_request_error"
    assert plain.get(MESSAGES).status_code == 405
    text = plain.client.post(MESSAGES, content=b"{}", headers={"content-type": "text/plain"})
    assert (text.status_code, strict_error(text)[0]) == (415, "invalid_request_error")
    for path in (MESSAGES, COUNT):
        large = plain.client.post(path, content=b" " * (33 * 1024 * 1024), headers={"content-type": "application/json"})
        assert (large.status_code, strict_error(large)[0]) == (413, "request_too_large")
    late = plain.post(MESSAGES, messages=USER, max_tokens=400, timeout=1e-3)
    assert (late.status_code, strict_error(late)[0]) == (408, "timeout_error")
    assert late.headers["x-should-retry"] == "false"
    failed = plain.post(MESSAGES, messages=[{"role": "user", "content": "this is not a number"}], max_tokens=4)
    assert (failed.status_code, strict_error(failed)) == (
        500,
        ("api_error", "the request failed: the logits are NaN"),
    )
    assert plain.post("/v1/messages/batches").json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("status", "code", "sent", "kind"),
    [
        (403, None, 403, "permission_error"),
        (429, "overloaded", 429, "rate_limit_error"),
        (503, "draining", 529, "overloaded_error"),
        (503, "engine_dead", 503, "api_error"),
        (504, None, 504, "timeout_error"),
    ],
)
def test_statuses_and_types(status: int, code: str | None, sent: int, kind: str) -> None:
    answer = error_response(ApiError(status, "so", code=code), MESSAGES)
    assert answer.status_code == sent
    assert f'"type":"{kind}"'.encode() in bytes(answer.body)
    assert error_response(ApiError(status, "so", code=code), "/v1/completions").status_code == status


# What stands before the routes


@pytest.fixture(scope="module")
def locked() -> Iterator[Guarded]:
    with guarded(api_key=(KEY, "sk-two")) as running:
        yield running


def test_keys(locked: Guarded) -> None:
    for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
        answer = locked.client.post(MESSAGES, json={"messages": USER, "max_tokens": 2}, headers=headers)
        assert answer.status_code == 200
    both = {"authorization": "Bearer none", "x-api-key": KEY}
    assert locked.get("/v1/models", headers=both).status_code == 200
    for headers in ({}, {"x-api-key": "sk-three"}, {"authorization": f"Basic {KEY}"}, {"x-api-key": f"Bearer {KEY}"}):
        answer = locked.client.post(MESSAGES, json={}, headers=headers)
        assert (answer.status_code, strict_error(answer)[0]) == (401, "authentication_error")
    with client_of(locked.url, api_key=KEY) as client:
        assert client.messages.create(model="fake", messages=USER, max_tokens=2).usage.output_tokens == 2
        assert client.messages.count_tokens(model="fake", messages=USER).input_tokens > 0
    with client_of(locked.url, api_key="sk-three") as client, pytest.raises(anthropic.AuthenticationError) as refused:
        client.messages.create(model="fake", messages=USER, max_tokens=2)
    assert refused.value.type == "authentication_error"


def test_caches_are_separate_per_key_in_either_header(locked: Guarded) -> None:
    def cached(**headers: str) -> int:
        body = {"messages": [{"role": "user", "content": "the quick brown fox " * 12}], "max_tokens": 1}
        answer = locked.client.post(
            MESSAGES, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        return int(answer.json()["usage"]["cache_read_input_tokens"])

    assert cached(x_api_key=KEY) == 0
    assert cached(authorization=f"Bearer {KEY}") > 0
    assert cached(x_api_key="sk-two") == 0


@pytest.mark.usefixtures("slow")
def test_a_full_queue() -> None:
    with guarded(20_000, max_waiting_tokens=50) as served, client_of(served.url) as client:
        long: Any = [{"role": "user", "content": "a b c d e f g h i j k l m n"}]
        streams: list[Any] = []
        with pytest.raises(anthropic.RateLimitError) as refused:
            while len(streams) < 20:  # there are four slots
                streams.append(client.messages.create(model="fake", messages=long, max_tokens=500, stream=True))
        assert refused.value.type == "rate_limit_error"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()


def test_a_server_that_stops() -> None:
    with guarded() as served, client_of(served.url) as client:
        served.drain()
        with pytest.raises(anthropic.OverloadedError, match="stop"):
            client.messages.create(model="fake", messages=USER, max_tokens=2)


def test_an_engine_that_dies_in_a_stream() -> None:
    with serving(local_engine(max_model_len=100_000)) as doomed, client_of(doomed.url) as client:
        endless: Any = [{"role": "user", "content": "endless"}]
        stream = client.messages.create(model="fake", messages=endless, max_tokens=50_000, stream=True)
        next(stream)
        with pytest.raises(anthropic.ServiceUnavailableError) as dead:
            client.messages.create(model="fake", messages=[{"role": "user", "content": "raise"}], max_tokens=4)
        assert dead.value.type == "api_error"
        with pytest.raises(anthropic.APIStatusError, match="the engine has stopped"):
            list(stream)


def test_an_error_in_a_stream_is_its_last_event(plain: Guarded) -> None:
    body = {"messages": [{"role": "user", "content": "there is no way on"}], "max_tokens": 4, "stream": True}
    answer: httpx.Response = plain.post(MESSAGES, **body)
    (name, data), *_ = reversed(named_events(answer.text))
    assert name == data["type"] == "error"
    assert data["error"]["type"] == "invalid_request_error"
    assert data["request_id"] == answer.headers["request-id"]
