"""The items of an input as messages, and what is refused by name."""

from typing import Any

import pytest

from protos.errors import InvalidRequestError
from runtime.http.responses_api.items import messages_of
from tests.support.serving.http_server import Served
from tests.support.serving.openai_responses import PAINT_TOOL, answered

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "1"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(role: str, content: Any, **rest: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **rest}


def text(content: str, kind: str = "input_text") -> dict[str, Any]:
    return (
        {"type": kind, "text": content, "annotations": []} if kind == "output_text" else {"type": kind, "text": content}
    )


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


USER, ASSISTANT = said("user", parts("a")), said("assistant", parts("a"))
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "1"}
ANSWER = said("assistant", [text("a", "output_text")], type="message", id="msg_1")
TRANSLATIONS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("a", [USER]),
    ([said("user", "a")], [USER]),
    ([ANSWER], [ASSISTANT]),
    ([said("assistant", [{"type": "refusal", "refusal": "a"}])], [ASSISTANT]),
    ([said("user", "a"), said("user", [text("b")]), ANSWER], [said("user", parts("a", "b")), ASSISTANT]),
    (
        [said("assistant", "a"), REASONING, CALL, CALL | {"call_id": "c2"}, RESULT],
        [said("assistant", parts("a"), tool_calls=[call("c1"), call("c2")]), TOOL],
    ),
    (
        [CALL, ANSWER, CALL | {"call_id": "c2"}, REASONING, ANSWER, RESULT, CALL],
        [
            said("assistant", parts("a", "a"), tool_calls=[call("c1"), call("c2")]),
            TOOL,
            said("assistant", [], tool_calls=[call("c1")]),
        ],
    ),
    ([said("user", "a"), CALL], [USER, said("assistant", [], tool_calls=[call("c1")])]),
    ([RESULT | {"output": [text("1")]}], [TOOL]),
]


@pytest.mark.parametrize(("given", "messages"), TRANSLATIONS)
def test_items_become_messages(given: Any, messages: list[dict[str, Any]]) -> None:
    assert messages_of(given, None) == messages_of(given, "") == messages
    assert messages_of(given, "Be brief.") == [said("system", parts("Be brief.")), *messages]


def test_successive_instructions_are_one_turn() -> None:
    developer = said("developer", [text("a")], type="message", id=None, status=None)
    given = [developer, said("system", "b"), said("user", "a"), developer]
    first = parts("a", "b")
    assert messages_of(given, None) == [said("developer", first), USER, said("developer", parts("a"))]
    assert messages_of(given, "c")[0] == said("system", parts("c") + first)


IMAGE = {"type": "input_image", "image_url": "data:,"}
REFUSED: list[tuple[Any, str]] = [
    ([], "at least one item"),
    ([REASONING], r"input must have at least one item other than reasoning, got \[{'type': 'reasoning'"),
    ([{}], r"input\[0\] has type None"),
    ([{"type": "web_search_call", "id": "x"}], r"input\[0\] has type 'web_search_call'"),
    ([said("user", "a"), {"type": "item_reference", "id": "x"}], r"input\[1\] is an item_reference, .* not stored"),
    ([said("tool", "a")], r"role must be one of user, assistant, system, developer, got 'tool'"),
    ([said("user", 5)], r"input\[0\].content must be text or a list of parts, got 5"),
    ([said("user", [text("a"), IMAGE])], r"input\[0\].content\[1\] has type 'input_image'"),
    ([said("user", [{"type": "input_file", "file_id": "x"}])], "'input_file'"),
    ([said("user", ["a"])], r"input\[0\].content\[0\] has type 'a'"),
    ([said("user", [{"type": ["a"]}])], r"has type \['a'\]"),
    ([said("user", [{"type": "input_text"}])], r"content\[0\].text must be text, got None"),
    ([CALL | {"arguments": {}}], r"input\[0\].arguments must be text, got {}"),
    ([CALL | {"call_id": None}], r"input\[0\].call_id must be text, got None"),
    ([RESULT | {"output": [IMAGE]}], r"input\[0\].output\[0\] has type 'input_image'"),
    ([RESULT | {"output": None}], r"input\[0\].output must be text or a list"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words[-20:] for _, words in REFUSED])
def test_what_is_not_supported_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        messages_of(given, None)
    assert caught.value.param == "input"


def test_tokens_are_those_of_the_chat(served: Served) -> None:
    items = [said("user", "a"), said("assistant", [text("b", "output_text")]), CALL, RESULT]
    answer = answered(served, input=items, instructions="c", max_output_tokens=1)
    chat = {
        "messages": [
            said("system", "c"),
            said("user", "a"),
            said("assistant", "b", tool_calls=[call("c1")]),
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ]
    }
    assert answer.usage is not None
    assert answer.usage.input_tokens == served.post("/tokenize", **chat).json()["count"]


LONG = "y" * 900
"""More than 900 tokens; four fit the context of 4096."""


def turns(count: int) -> list[dict[str, Any]]:
    call_and_result = [CALL, RESULT]
    return [
        item for i in range(count) for item in (said("user", f"{i} {LONG}"), *call_and_result, said("assistant", "b"))
    ]


def test_the_oldest_turns_are_left_out_where_a_conversation_is_too_long(served: Served) -> None:
    options: dict[str, Any] = {"instructions": "c", "max_output_tokens": 50, "truncation": "auto"}
    whole = answered(served, input=turns(4), **options)
    cut = answered(served, input=turns(40), **options)
    assert whole.usage is not None
    assert cut.usage is not None
    expected = served.post("/tokenize", messages=messages_of(turns(40)[-4 * 4 :], "c")).json()["count"]
    assert whole.usage.input_tokens < cut.usage.input_tokens == expected <= 4096 - 50
    more = served.post("/tokenize", messages=messages_of(turns(40)[-5 * 4 :], "c")).json()["count"]
    assert more > 4096 - 50
    refused = served.post("/v1/responses", input=turns(40), **(options | {"truncation": "disabled"}))
    assert refused.status_code == 400
    assert "4096" in refused.json()["error"]["message"]
    users = [said("user", f"{i} {LONG}") for i in range(9)]  # one message
    cut = answered(served, input=users, **options)
    assert cut.usage is not None
    expected = served.post("/tokenize", messages=messages_of(users[-4:], "c")).json()["count"]
    assert cut.usage.input_tokens == expected
    hopeless = served.post("/v1/responses", input=[*turns(2), said("user", LONG * 5)], **options)
    assert (hopeless.status_code, hopeless.json()["error"]["param"]) == (400, "input")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"store": True}, "store", "leave it out or set it to false"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
    ({"conversation": "conv_1"}, "conversation", "not stored"),
    ({"background": True}, "background", "use stream"),
    ({"prompt": {"id": "p"}}, "prompt", "not stored"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] has type 'web_search'"),
    ({"tools": [PAINT_TOOL, {"type": "mcp", "server_label": "x"}]}, "tools", "tools[1] has type 'mcp'"),
    ({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools", "'code_interpreter'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools[0]['name']"),
    ({"tools": [PAINT_TOOL, PAINT_TOOL]}, "tools", "twice"),
    ({"tools": [PAINT_TOOL], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice", "'no'"),
    ({"tools": [PAINT_TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "must be none, auto, required or"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs name and schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text", "must be one of"),
    (
        {"tools": [PAINT_TOOL], "text": {"format": {"type": "json_object"}}},
        "tools",
        "text.format and structured_outputs do not go together with tools",
    ),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens must be at most"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs must be at most 20"),
    ({"top_logprobs": -1}, "top_logprobs", "top_logprobs must be at least 0"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"max_tokens": 5}, "max_tokens", "unknown field"),
    ({"n": 2}, "n", "unknown field"),
    ({"metadata": {"a": 1}}, "metadata", "metadata"),
    ({"input": [CALL | {"arguments": "[1]"}]}, "input", "JSON object"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[f"{p}-{w[-12:]}" for _, p, w in BAD])
def test_bad_fields(served: Served, body: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        answer = served.post("/v1/responses", **({"input": "x", "stream": stream} | body))
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error
        assert words in error["message"], error
        assert len(error["message"]) < 400
