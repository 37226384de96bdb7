"""Checks of structured output and forced tool calls: functions of Anthropic's client and a model's name."""

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from tests.support.serving.anthropic_answers import in_order, strict_message
from tests.support.serving.openai_structured_checks import OTHER, ROOM, WIDE, Verdict

AnthropicCheck = Callable[[anthropic.Anthropic, str], None]
PAINT, WAIT = (
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in (WIDE, OTHER)
)
USER: Any = [{"role": "user", "content": "say something"}]


def asked(model: str, seed: int, **options: Any) -> Any:
    return {"model": model, "messages": USER, "max_tokens": ROOM, "extra_body": {"seed": seed}, **options}


def a_parsed_message(client: anthropic.Anthropic, model: str) -> None:
    answer = client.messages.parse(**asked(model, 5, output_format=Verdict))
    assert isinstance(strict_message(answer).content[0].parsed_output, Verdict)  # type: ignore[union-attr]
    assert answer.stop_reason == "end_turn"
    with client.messages.stream(**asked(model, 5, output_format=Verdict)) as stream:
        assert stream.get_final_message().parsed_output == answer.parsed_output
    old = client.beta.messages.parse(**asked(model, 5, output_format=Verdict))
    assert old.parsed_output == answer.parsed_output


def an_async_parsed_message(client: anthropic.Anthropic, model: str) -> None:
    async def ask() -> object:
        async with anthropic.AsyncAnthropic(base_url=client.base_url, api_key=client.api_key, timeout=120) as other:
            return (await other.messages.parse(**asked(model, 6, output_format=Verdict))).parsed_output

    assert isinstance(asyncio.run(ask()), Verdict)


def a_message_of_a_schema(client: anthropic.Anthropic, model: str) -> None:
    form = {"type": "json_schema", "schema": Verdict.model_json_schema()}
    for options in ({"output_config": {"format": form}}, {"extra_body": {"seed": 7, "output_format": form}}):
        answer = strict_message(client.messages.create(**asked(model, 7) | options))
        Verdict.model_validate_json(answer.content[0].text)  # type: ignore[union-attr]


def a_call_of_one_tool(client: anthropic.Anthropic, model: str) -> None:
    options = asked(model, 3, tools=[WAIT, PAINT], tool_choice={"type": "tool", "name": "paint"})
    answer = strict_message(client.messages.create(**options))
    (call,) = answer.content
    assert call.type == "tool_use"
    assert (call.name, answer.stop_reason) == ("paint", "tool_use")
    Verdict.model_validate(call.input)
    events = in_order(client.messages.create(**options, stream=True))
    assert sum(event.type == "content_block_delta" for event in events) > 1
    with client.messages.stream(**options) as stream:
        (same,) = stream.get_final_message().content
    assert same.type == "tool_use"
    assert (same.name, same.input) == (call.name, call.input)
    cut = strict_message(client.messages.create(**options | {"max_tokens": 3}))
    assert cut.stop_reason == "max_tokens"
    assert [block.type for block in cut.content] == ["tool_use"]


def any_one_call(client: anthropic.Anthropic, model: str) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = strict_message(client.messages.create(**asked(model, 4, tools=[WAIT, PAINT], tool_choice=choice)))
    (call,) = answer.content
    assert call.type == "tool_use"
    assert call.name in {"paint", "wait"}
    assert answer.stop_reason == "tool_use"


def a_tool_that_cannot_be_called(client: anthropic.Anthropic, model: str) -> None:
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "no such type"}}}}
    with pytest.raises(anthropic.BadRequestError, match="tools cannot be called as they are described"):
        client.messages.create(**asked(model, 1, tools=[tool], tool_choice={"type": "any"}))


MESSAGES: tuple[AnthropicCheck, ...] = (
    a_parsed_message,
    an_async_parsed_message,
    a_message_of_a_schema,
    a_call_of_one_tool,
    any_one_call,
    a_tool_that_cannot_be_called,
)
"""For real models whose chat template takes tools."""
