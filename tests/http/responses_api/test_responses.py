"""`POST /v1/responses` through the OpenAI client; every response and event is validated against its types."""

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.support.serving.fake_engine import tokenizer
from tests.support.serving.http_server import Served
from tests.support.serving.openai_answers import strict
from tests.support.serving.openai_responses import PAINT_TOOL, WAIT_TOOL, answered, assembled, forms, kinds, streamed
from tests.support.serving.openai_structured_checks import Verdict

PAINT = '{"color": "red", "is_sure": true}'
CALL = f'<tool_call>\n{{"name": "paint", "arguments": {PAINT}}}\n</tool_call>'
WAIT = '<tool_call>{"name": "wait", "arguments": {"long": "1"}}</tool_call>'
TOOLS: Any = [PAINT_TOOL, WAIT_TOOL]
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def asked(text: str, /, **options: Any) -> dict[str, Any]:
    return {"model": "fake", "input": f"say: {text}<end>", **options}


def prompt_of(served: Served, messages: list[dict[str, Any]], **options: Any) -> int:
    answer = served.post("/tokenize", messages=messages, **options)
    return int(answer.json()["count"])


def test_text(served: Served) -> None:
    answer = strict(served.client.responses.create(**asked("Hello.")))
    assert (answer.output_text, answer.status, answer.model) == ("Hello.", "completed", "fake")
    assert answer.id.startswith("resp_")
    (message,) = answer.output
    assert message.type == "message"
    assert (message.status, message.id.startswith("msg_")) == ("completed", True)
    assert answer.usage is not None
    assert answer.usage.input_tokens == prompt_of(served, [{"role": "user", "content": "say: Hello.<end>"}])
    assert answer.usage.output_tokens == len(tokenizer().encode("Hello.")) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    again = strict(served.client.responses.create(**asked("Hello.")))
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == answer.usage.input_tokens // 16 * 16


def test_a_stream_has_the_events_of_the_api(served: Served) -> None:
    events = streamed(served, **asked("Hello there."))
    assert kinds(events) == TEXT_EVENTS
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.usage) == ("in_progress", [], None)
    assert (last.id, last.output_text) == (first.id, "Hello there.")
    assert assembled(events) == [item.to_dict() | {"content": [item.content[0].to_dict() | {"logprobs": None}]}
                                 for item in last.output]  # fmt: skip
    whole = answered(served, **asked("Hello there."))
    assert whole.usage is not None
    assert (last.usage.input_tokens, last.usage.output_tokens) == (whole.usage.input_tokens, whole.usage.output_tokens)


def test_the_helper_gathers_a_stream(served: Served) -> None:
    with served.client.responses.stream(**asked("Hello.")) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == "Hello."


def test_the_async_client(served: Served) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.client.base_url, api_key="none") as client:
            answer = await client.responses.create(**asked("Hello."))
            events = [event async for event in await client.responses.create(**asked("Hello."), stream=True)]
        return [answer.output_text, events[-1].response.output_text]

    assert asyncio.run(ask()) == ["Hello."] * 2


def test_an_answer_that_was_cut_off(served: Served) -> None:
    answer = strict(served.client.responses.create(**asked("Hello there.", max_output_tokens=3)))
    assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.completed_at, answer.max_output_tokens) == (None, 3)
    events = streamed(served, **asked("Hello there.", max_output_tokens=3))
    assert kinds(events) == [*TEXT_EVENTS[:-1], "response.incomplete"]
    assert events[-1].response.output_text == answer.output_text


def test_an_answer_without_text_is_an_empty_message(served: Served) -> None:
    assert forms(answered(served, **asked("")).output) == [""]
    assert kinds(streamed(served, **asked(""))) == [kind for kind in TEXT_EVENTS if "delta" not in kind]


def test_options_are_repeated(served: Served) -> None:
    tools = [tool | {"allowed_callers": ["direct"], "output_schema": {"type": "string"}} for tool in TOOLS]
    given: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "user": "me",
        "temperature": 0.5,
        "top_p": 0.5,
        "truncation": "disabled",
        "parallel_tool_calls": False,
        "tools": TOOLS,
        "tool_choice": "none",
        "text": {"format": {"type": "text"}},
    }
    ignored: dict[str, Any] = {
        "store": False,
        "background": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "max_tool_calls": 3,
        "previous_response_id": None,
    }
    answer = strict(served.client.responses.create(**asked("Hello.", **(given | {"tools": tools}), **ignored)))
    shown = answer.to_dict()
    shown["tools"] = [{name: tool[name] for name in mine} for tool, mine in zip(shown["tools"], TOOLS, strict=True)]
    assert {name: shown[name] for name in given} == given


def test_log_probabilities(served: Served) -> None:
    include: Any = ["message.output_text.logprobs"]
    answer = answered(served, **asked("Hello.", include=include, top_logprobs=2))
    (part,) = answer.output[0].content  # type: ignore[union-attr]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(each.token for each in part.logprobs) == "Hello.<eos>"
    assert all(bytes(each.bytes).decode() == each.token for each in part.logprobs)
    assert {len(each.top_logprobs) for each in part.logprobs} == {2}
    events = streamed(served, **asked("Hello.", include=include, top_logprobs=2))
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [each.logprob for each in done.logprobs] == [each.logprob for each in part.logprobs]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(each.token for event in deltas for each in event.logprobs) == "Hello."
    bare = answered(served, **asked("Hello.", include=include))
    assert [each.top_logprobs for each in bare.output[0].content[0].logprobs] == [[]] * len(part.logprobs)  # type: ignore[union-attr, arg-type]


def test_speculation_statistics(served: Served) -> None:
    options = {"per_request_spec_decode_metrics": "summary", "token_origins": True}
    for metrics in (
        answered(served, **asked("Hello there.", **options)).to_dict()["metrics"],
        streamed(served, **asked("Hello there.", **options))[-1].response.to_dict()["metrics"],
    ):
        assert isinstance(metrics, dict)
        assert metrics["speculative_decoding"]["num_spec_steps"] > 0
        text = "".join(token["text"] for step in metrics["token_origins"] for token in step["tokens"])
        assert text.removesuffix("<eos>") == "Hello there."


# Tools


def test_a_call(served: Served) -> None:
    answer = strict(served.client.responses.create(**asked("Let me see.\n" + CALL, tools=TOOLS)))
    assert answer.status == "completed"
    assert forms(answer.output) == ["Let me see.", ("paint", PAINT)]
    call = answer.output[1]
    assert call.type == "function_call"
    assert (call.call_id[:5], (call.id or "")[:3], call.status) == ("call_", "fc_", "completed")


ORDERS = {
    "text first": "Hm. " + CALL + "\n" + WAIT + "\n",
    "text last": CALL + " Done.",
    "no text": CALL,
    "text between": WAIT + "\nAnd " + CALL,
}


@pytest.mark.parametrize("text", ORDERS.values(), ids=ORDERS)
def test_text_and_calls_keep_their_order(served: Served, text: str) -> None:
    events = streamed(served, **asked(text, tools=TOOLS))
    last = events[-1].response
    assert [item.get("arguments", item.get("content")) for item in assembled(events)] == [
        item.arguments if item.type == "function_call" else [item.content[0].to_dict() | {"logprobs": None}]
        for item in last.output
    ]
    assert forms(last.output) == forms(answered(served, **asked(text, tools=TOOLS)).output)
    slow = {"speculative_config": {"enabled": False}}
    assert forms(last.output) == forms(answered(served, **asked(text, tools=TOOLS, **slow)).output)


def test_the_helper_gathers_calls(served: Served) -> None:
    with served.client.responses.stream(**asked("Hm. " + CALL + WAIT, tools=TOOLS)) as stream:
        done = [event.item for event in stream if event.type == "response.output_item.done"]
        final = stream.get_final_response()
    assert forms(done) == forms(final.output) == ["Hm.", ("paint", PAINT), ("wait", '{"long": "1"}')]


def test_a_round_trip_of_a_call(served: Served) -> None:
    items: list[Any] = [{"role": "user", "content": f"say: Hm. {CALL}<end>"}]
    first = served.client.responses.create(model="fake", input=items, tools=TOOLS)
    items += first.output
    call = first.output[1]
    assert call.type == "function_call"
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "say: It is red.<end>"})
    second = strict(served.client.responses.create(model="fake", input=items, tools=TOOLS))
    assert second.output_text == "It is red."
    as_chat = {"type": "function", "function": {"name": "paint", "arguments": PAINT}, "id": call.call_id}
    messages = [
        items[0],
        {"role": "assistant", "content": "Hm.", "tool_calls": [as_chat]},
        {"role": "tool", "content": "say: It is red.<end>", "tool_call_id": call.call_id},
    ]
    chat_tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    assert second.usage is not None
    assert second.usage.input_tokens == prompt_of(served, messages, tools=chat_tools)


def test_a_call_that_was_cut_off_can_be_sent_back(served: Served) -> None:
    items: list[Any] = [{"role": "user", "content": f"say: {PAINT}<end>"}]
    choice: Any = {"type": "function", "name": "paint"}
    options: Any = {"model": "fake", "tools": TOOLS, "tool_choice": choice, "max_output_tokens": 25}
    (call,) = served.client.responses.create(input=items, **options).output
    assert call.type == "function_call"
    assert call.status == "incomplete"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": []}
    items += [call, result, {"role": "user", "content": "say: Well.<end>"}]
    assert answered(served, input=[each if isinstance(each, dict) else each.to_dict() for each in items], tools=TOOLS)


def test_at_most_one_call_where_several_are_not_wanted(served: Served) -> None:
    options = asked(CALL + WAIT, tools=TOOLS, parallel_tool_calls=False)
    assert forms(answered(served, **options).output) == [("paint", PAINT)]
    assert forms(streamed(served, **options)[-1].response.output) == [("paint", PAINT)]


def test_parsed_calls(served: Served) -> None:
    tool = openai.pydantic_function_tool(Verdict, name="paint")["function"]
    answer = served.client.responses.parse(**asked(CALL, tools=[{"type": "function", **tool}]))
    (call,) = answer.output
    assert call.type == "function_call"
    assert call.parsed_arguments == json.loads(PAINT)


def test_a_parsed_answer(served: Served) -> None:
    answer = served.client.responses.parse(**asked(PAINT, text_format=Verdict))
    assert answer.output_parsed == Verdict.model_validate_json(PAINT)
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


# Errors


def test_errors_are_the_clients_own(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported") as refused:
        served.client.responses.create(**asked("x", previous_response_id="resp_1"))
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        served.client.responses.create(**(asked("x") | {"model": "no"}))
    with pytest.raises(openai.NotFoundError):
        served.client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match="max_output_tokens must be at most"):
        served.client.responses.create(**asked("x", max_output_tokens=10**9))
