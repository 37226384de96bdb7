"""Tool calls through Anthropic's client, chosen by the model; the fake model generates the text given in the prompt."""

from typing import Any

import anthropic
import pytest

from tests.support.serving.anthropic_answers import client_of, in_order, strict_count, strict_message
from tests.support.serving.fake_engine import Scripted, local_engine
from tests.support.serving.http_server import Served, serving

PAINT: dict[str, Any] = {
    "name": "paint",
    "description": "Paint it.",
    "input_schema": {"type": "object", "properties": {"color": {"type": "string"}}, "required": ["color"]},
}
WAIT: dict[str, Any] = {"type": "custom", "name": "wait", "input_schema": {"type": "object"}}
TOOLS: Any = [PAINT, {**WAIT, "cache_control": {"type": "ephemeral"}}]
RED = '<tool_call>\n{"name": "paint", "arguments": {"color": "red"}}\n</tool_call>'
RED_CALL = ("paint", {"color": "red"})
LONG = '<tool_call>{"name": "wait", "arguments": {"n": 123456789012345678901234567890}}</tool_call>'


def asked(text: str, **options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"say: {text}<end>"}
    return {"model": "fake", "messages": [message], "tools": TOOLS, "max_tokens": 400, **options}


def shape(message: anthropic.types.Message) -> list[Any]:
    """Return the texts and calls of *message* in their order."""
    return [
        block.text if block.type == "text" else (block.name, block.input)
        for block in message.content
        if block.type in ("text", "tool_use")
    ]


CASES: list[tuple[str, list[Any], str]] = [
    ("Let me see.\n" + RED, ["Let me see.", RED_CALL], "tool_use"),
    (RED + LONG, [RED_CALL, ("wait", {"n": 123456789012345678901234567890})], "tool_use"),
    ("One. " + RED + "Two. " + RED, ["One.", RED_CALL, "Two.", RED_CALL], "tool_use"),
    ("No call at all.", ["No call at all."], "end_turn"),
    ("<tool_call>\nf(x=1)\n</tool_call>", ["<tool_call>\nf(x=1)\n</tool_call>"], "end_turn"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected", "reason"), CASES, ids=[case[0][:8] for case in CASES])
def test_calls_and_text_keep_their_order(
    client: anthropic.Anthropic, text: str, expected: list[Any], reason: str
) -> None:
    answer = strict_message(client.messages.create(**asked(text)))
    assert (shape(answer), answer.stop_reason) == (expected, reason)
    ids = [block.id for block in answer.content if block.type == "tool_use"]
    assert len({*ids}) == len(ids)
    assert all(each.startswith("toolu_") for each in ids)
    in_order(client.messages.create(**asked(text), stream=True))
    with client.messages.stream(**asked(text)) as stream:
        assert (shape(stream.get_final_message()), stream.get_final_message().stop_reason) == (expected, reason)


def test_at_most_one_call_where_several_are_not_wanted(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = strict_message(client.messages.create(**asked(RED + LONG, tool_choice=choice)))
    assert shape(answer) == [RED_CALL]


def test_a_call_that_was_cut_off_is_text(client: anthropic.Anthropic) -> None:
    answer = strict_message(client.messages.create(**asked(RED, max_tokens=30)))
    assert answer.stop_reason == "max_tokens"
    assert RED.startswith(shape(answer)[0])


def test_none_means_that_the_model_is_not_told(client: anthropic.Anthropic) -> None:
    answer = strict_message(client.messages.create(**asked(RED, tool_choice={"type": "none"})))
    assert (shape(answer), answer.stop_reason) == ([RED], "end_turn")
    counts = [
        strict_count(client.messages.count_tokens(**{k: v for k, v in asked("x", **more).items() if k != "max_tokens"}))
        for more in ({}, {"tool_choice": {"type": "none"}})
    ]
    assert counts[0] > counts[1] + 100


def test_a_round_trip(client: anthropic.Anthropic, served: Served) -> None:
    """The client's own blocks go back as they came, with the tool's result after them."""
    first = client.messages.create(**asked("Let me see.\n" + RED))
    call = first.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "It is red."}]}
    messages: Any = [
        *asked("Let me see.\n" + RED)["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "say: Well done.<end>"}]},
    ]
    options: Any = {"model": "fake", "messages": messages, "tools": TOOLS}
    answer = strict_message(client.messages.create(**options, max_tokens=50))
    assert shape(answer) == ["Well done."]
    assert strict_count(client.messages.count_tokens(**options)) == answer.usage.input_tokens + (
        answer.usage.cache_read_input_tokens or 0
    )


def test_the_beta_client_runs_tools(client: anthropic.Anthropic) -> None:
    """The client's own loop: it calls the function, sends the result, and ends with the answer to it."""
    painted: list[str] = []

    @anthropic.beta_tool
    def paint(color: str) -> str:
        """Paint it.

        Args:
            color: The color.
        """
        painted.append(color)
        return f"say: It is {color}.<end>"

    messages: Any = asked(RED)["messages"]
    runner = client.beta.messages.tool_runner(
        model="fake", max_tokens=200, tools=[paint], messages=messages, betas=["context-management-2025-06-27"]
    )
    final = runner.until_done()
    assert painted == ["red"]
    assert [block.text for block in final.content if block.type == "text"] == ["It is red."]


def test_a_server_that_was_not_told_to_let_the_model_choose() -> None:
    with serving(local_engine(max_model_len=4096, kind=Scripted)) as plain, client_of(plain.url) as client:
        with pytest.raises(anthropic.BadRequestError, match="--enable-auto-tool-choice and --tool-call-parser"):
            client.messages.create(**asked(RED))
        answer = client.messages.create(**asked("Hi.", tool_choice={"type": "none"}))
        assert shape(answer) == ["Hi."]
        assert (
            strict_count(client.messages.count_tokens(model="fake", messages=asked("x")["messages"], tools=TOOLS)) > 100
        )


def test_a_named_or_required_call_is_asked_of_the_grammar(client: anthropic.Anthropic, served: Served) -> None:
    """The fake model follows no grammar; what a real one makes of it is tested with the structured output."""
    schemas: list[Any] = []
    engine, prepare = served.engine, served.engine.prepare

    async def recorded(text: Any, params: Any, request_id: str) -> Any:
        schemas.append(params.structured_outputs and params.structured_outputs.json)
        return await prepare(text, params, request_id)

    engine.prepare = recorded  # type: ignore[method-assign]
    try:
        named = client.messages.create(**asked('{"color": "red"}', tool_choice={"type": "tool", "name": "paint"}))
        cut = client.messages.create(
            **asked('{"color": "red"}', tool_choice={"type": "tool", "name": "paint"}, max_tokens=14)
        )
    finally:
        engine.prepare = prepare  # type: ignore[method-assign]
    assert (shape(named), named.stop_reason) == ([RED_CALL], "tool_use")
    assert shape(cut)[0][0] == "paint"
    assert (strict_message(cut).stop_reason, shape(cut)[0][1]) == ("max_tokens", {})
    assert all("color" in str(schema) for schema in schemas)
