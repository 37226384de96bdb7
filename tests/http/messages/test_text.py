"""Text through Anthropic's client: whole, streamed and asynchronous answers, and what ends them."""

import asyncio
from typing import Any

import anthropic
import httpx
import pytest

from tests.http.messages.conftest import CONTEXT
from tests.support.serving.anthropic_answers import (
    in_order,
    named_events,
    strict_count,
    strict_message,
)
from tests.support.serving.fake_engine import expected
from tests.support.serving.http_server import Served

HELLO = "Hello, you. Twice?"


def asked(text: str = HELLO, **options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"say: {text}<end>"}
    return {"model": "fake", "messages": [message], "max_tokens": 200, **options}


def test_an_answer(client: anthropic.Anthropic) -> None:
    answer = strict_message(client.messages.create(**asked()))
    assert answer.id.startswith("msg_")
    assert (answer.model, answer.role, answer.stop_reason, answer.stop_sequence) == (
        "fake",
        "assistant",
        "end_turn",
        None,
    )
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == HELLO
    assert answer.usage.output_tokens > 1


def test_a_streamed_answer_is_the_same(client: anthropic.Anthropic) -> None:
    events = in_order(client.messages.create(**asked(), stream=True))
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert len(deltas) > 2
    assert "".join(deltas) == HELLO
    start, end = events[0].message, events[-2]
    assert (start.content, start.stop_reason) == ([], None)
    assert end.delta.stop_reason == "end_turn"
    whole = client.messages.create(**asked()).usage
    assert start.usage.input_tokens == end.usage.input_tokens
    assert end.usage.output_tokens == whole.output_tokens


def test_the_stream_helper(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**asked()) as stream:
        assert "".join(stream.text_stream) == HELLO
        final = strict_message(stream.get_final_message())
    assert final.stop_reason == "end_turn"
    assert stream.get_final_text() == HELLO


def test_the_asynchronous_client(served: Served) -> None:
    async def ask() -> None:
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*[client.messages.create(**asked(f"number {i}")) for i in range(6)])
            assert [strict_message(answer).content[0].text for answer in answers] == [f"number {i}" for i in range(6)]  # type: ignore[union-attr]
            async with client.messages.stream(**asked()) as stream:
                assert await stream.get_final_text() == HELLO
            assert (await client.messages.count_tokens(model="fake", messages=asked()["messages"])).input_tokens > 10

    asyncio.run(ask())


def test_the_events_as_they_are_sent(served: Served) -> None:
    answer = served.post("/v1/messages", **asked("ab"), stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    events = named_events(answer.text)
    names = [name for name, _ in events]
    assert names == [data["type"] for _, data in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[1][1] == {"type": "ping"}


@pytest.mark.parametrize("stream", [False, True])
def test_what_ends_an_answer(client: anthropic.Anthropic, stream: bool) -> None:
    def ended(**options: Any) -> tuple[str | None, str | None, str]:
        if not stream:
            answer = strict_message(client.messages.create(**asked(**options)))
        else:
            with client.messages.stream(**asked(**options)) as helper:
                answer = helper.get_final_message()
        text = "".join(block.text for block in answer.content if block.type == "text")
        return answer.stop_reason, answer.stop_sequence, text

    assert ended(stop_sequences=["??", "you"]) == ("stop_sequence", "you", "Hello, ")
    assert ended(max_tokens=5) == ("max_tokens", None, "Hello")
    assert ended(stop_sequences=[]) == ("end_turn", None, HELLO)
    assert ended(stop_sequences=["Hello"]) == ("stop_sequence", "Hello", "")


@pytest.mark.parametrize("recommended", [None, 5])
def test_a_limit_that_the_context_has_no_room_for(
    client: anthropic.Anthropic, served: Served, recommended: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length that the checkpoint recommends is for requests without a limit."""
    monkeypatch.setattr(served.engine.preprocessor, "_default_max_tokens", recommended)
    messages: Any = [{"role": "user", "content": f"{recommended}, on and on"}]
    answer = strict_message(client.messages.create(model="fake", messages=messages, max_tokens=8000))
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.input_tokens + answer.usage.output_tokens == CONTEXT


def test_sampling_options_have_their_effect(client: anthropic.Anthropic, served: Served) -> None:
    prompt: Any = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 12}
    options: Any = {"temperature": 0.7, "top_p": 0.9, "top_k": 7}
    asked: list[dict[str, Any]] = []
    engine, prepare = served.engine, served.engine.prepare

    async def recorded(text: Any, params: Any, request_id: str) -> Any:
        asked.append({name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "seed", "max_tokens")})
        return await prepare(text, params, request_id)

    engine.prepare = recorded  # type: ignore[method-assign]
    try:
        answer = client.messages.create(**prompt, extra_body={**options, "seed": 5})  # not in the newest client
    finally:
        engine.prepare = prepare  # type: ignore[method-assign]
    assert asked == [{**options, "seed": 5, "max_tokens": 12}]
    assert answer.content[0].text == expected("[user] x\n[bot]", 12)  # type: ignore[union-attr]


def test_tokens_from_the_prefix_cache_are_counted_apart(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "the quick brown fox " * 12}]
    count = strict_count(client.messages.count_tokens(model="fake", messages=messages))
    first, second = (client.messages.create(model="fake", messages=messages, max_tokens=2).usage for _ in range(2))
    assert (first.input_tokens, first.cache_read_input_tokens) == (count, 0)
    assert second.cache_read_input_tokens
    assert second.cache_read_input_tokens > 16
    assert second.input_tokens + second.cache_read_input_tokens == count
    *_, end, _ = client.messages.create(model="fake", messages=messages, max_tokens=2, stream=True)
    assert end.usage.cache_read_input_tokens == second.cache_read_input_tokens  # type: ignore[union-attr]


def test_speculation_is_reported_where_it_is_asked_for(client: anthropic.Anthropic) -> None:
    body = {"per_request_spec_decode_metrics": "summary", "speculative_config": {"num_speculative_tokens": 2}}
    answer = strict_message(client.messages.create(**asked(), extra_body=body))
    assert (answer.model_extra or {})["metrics"]["speculative_decoding"]["num_spec_tokens"] == 2
    *_, end, _ = in_order(client.messages.create(**asked(), extra_body=body, stream=True))
    assert end.model_extra["metrics"] == (answer.model_extra or {})["metrics"]


def test_a_client_that_goes_away_ends_its_request(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "on and on"}], "max_tokens": 4000, "model": "fake"}
    with httpx.stream("POST", served.url + "/v1/messages", json={**body, "stream": True}, timeout=60) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + "/v1/messages", json=body, timeout=0.2)
    served.idle()
