"""Checks of structured outputs and tool calls: functions of a client and a model's name."""

import asyncio
import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.support.serving.openai_answers import USER, Check, strict


class Verdict(pydantic.BaseModel):
    """A schema whose answers are bounded."""

    model_config = pydantic.ConfigDict(extra="forbid")

    color: Literal["red", "green"]
    is_sure: bool


WIDE: dict[str, Any] = {"type": "function", "function": {"name": "paint", "parameters": Verdict.model_json_schema()}}
OTHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "wait",
        "description": "Do nothing.",
        "parameters": {
            "type": "object",
            "properties": {"long": {"enum": ["1", "2"]}},
            "required": ["long"],
            "additionalProperties": False,
        },
    },
}
ROOM = 700
"""Tokens enough for any such answer, white space included."""


def a_parsed_answer(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": USER, "max_tokens": ROOM, "response_format": Verdict, "seed": 5}
    answer = strict(client.chat.completions.parse(**asked))
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def an_async_parsed_answer(client: openai.OpenAI, model: str) -> None:
    async def ask() -> object:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, timeout=120) as other:
            answer = await other.chat.completions.parse(
                model=model, messages=USER, max_tokens=ROOM, response_format=Verdict, temperature=0
            )
        return strict(answer).choices[0].message.parsed

    assert isinstance(asyncio.run(ask()), Verdict)


def any_object(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=USER, max_tokens=40, response_format={"type": "json_object"}, temperature=0
    )
    assert (strict(answer).choices[0].message.content or "").lstrip().startswith("{")


def a_call_by_name(client: openai.OpenAI, model: str) -> None:
    asked: Any = {
        "model": model,
        "messages": USER,
        "max_tokens": ROOM,
        "tools": [OTHER, WIDE],
        "seed": 3,
        "tool_choice": {"type": "function", "function": {"name": "paint"}},
    }
    (choice,) = strict(client.chat.completions.create(**asked)).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "paint"
    Verdict.model_validate_json(call.function.arguments)
    deltas = [strict(chunk).choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert {part.index for part in parts} == {0}
    assert [part.function.name for part in parts if part.function and part.function.name] == ["paint"]
    assert [part.id is not None for part in parts] == [True] + [False] * (len(parts) - 1)
    assert "".join(part.function.arguments or "" for part in parts if part.function) == call.function.arguments


def a_required_call(client: openai.OpenAI, model: str) -> None:
    asked: Any = {
        "model": model,
        "messages": USER,
        "max_tokens": ROOM,
        "tools": [OTHER, WIDE],
        "seed": 4,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    (choice,) = strict(client.chat.completions.create(**asked)).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name in {"paint", "wait"}
    with client.chat.completions.stream(**asked) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, event.arguments) for event in events] == [(call.function.name, call.function.arguments)]
    assert final.choices[0].finish_reason == "tool_calls"


def a_call_without_parameters(client: openai.OpenAI, model: str) -> None:
    """A function that has none is called with none; a call that is cut off is no text."""
    tool: Any = {"type": "function", "function": {"name": "now"}}
    asked: Any = {"model": model, "messages": USER, "tools": [tool], "temperature": 1.3}
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        answer = strict(client.chat.completions.create(**asked, tool_choice=choice, max_tokens=ROOM, seed=1))
        call = (answer.choices[0].message.tool_calls or ())[0]
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "now", {})
    cut = strict(client.chat.completions.create(**asked, tool_choice="required", max_tokens=5)).choices[0]
    assert not cut.message.content
    assert not cut.message.tool_calls
    assert cut.finish_reason == "length"


def a_call_that_cannot_be_described(client: openai.OpenAI, model: str) -> None:
    parameters = {"properties": {"a": {"type": "no such type"}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match="tools cannot be called as they are described") as refused:
        client.chat.completions.create(model=model, messages=USER, tools=[tool], tool_choice="required")
    assert refused.value.param == "tools"


def a_parsed_call(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=USER,
        max_tokens=ROOM,
        tools=[openai.pydantic_function_tool(Verdict)],
        temperature=0,
        tool_choice={"type": "function", "function": {"name": "Verdict"}},
    )
    (call,) = strict(answer).choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Verdict)


def a_form_and_tools_at_once(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="do not go together"):
        client.chat.completions.create(
            model=model, messages=USER, tools=[OTHER], tool_choice="required", response_format={"type": "json_object"}
        )  # type: ignore[call-overload]


STRUCTURED: tuple[Check, ...] = (
    a_call_without_parameters,
    a_parsed_answer,
    an_async_parsed_answer,
    any_object,
    a_call_by_name,
    a_required_call,
    a_parsed_call,
    a_call_that_cannot_be_described,
    a_form_and_tools_at_once,
)
"""For real models whose chat template takes tools."""
