"""What models see of a conversation: content blocks as messages of the chat template."""

from collections.abc import Mapping
from typing import Any

import pytest

from protos.errors import InvalidRequestError
from runtime.http.messages.conversation import chat_messages, is_prefilled
from tests.support.serving.fake_engine import tokenizer
from tests.support.serving.http_server import Served

CALL = {"type": "tool_use", "id": "t1", "name": "paint", "input": {"color": "red"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "done"}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def seen(system: Any, messages: list[Any]) -> str:
    """Return the prompt of the fake model's template, without the mark of the answer."""
    return str(tokenizer().apply_chat_template(_joined(chat_messages(messages, system)), tokenize=False))


def _joined(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the parts of each message, as the chat path does before templates get them."""
    return [
        turn | {"content": turn["content"] if isinstance(turn["content"], str) else "\n".join(_texts(turn["content"]))}
        for turn in turns
    ]


def _texts(parts: list[Mapping[str, str]]) -> list[str]:
    return [part["text"] for part in parts]


CASES: list[tuple[str, Any, list[Any], str]] = [
    ("text", None, [{"role": "user", "content": "hi"}], "[user] hi\n"),
    ("system", "be", [user(text("hi"))], "[system] be\n[user] hi\n"),
    ("empty system", "", [user(text("hi"))], "[user] hi\n"),
    ("blocks", [text("a", cache_control={"type": "ephemeral"}), text("b")], [user(text("x"), text("y"))],
     "[system] a\nb\n[user] x\ny\n"),
    ("system later", "a", [user(text("x")), {"role": "system", "content": "b"}], "[system] a\n[user] x\n[system] b\n"),
    ("one role twice", None, [user(text("x")), user(text("y")), assistant(text("z"), text("w"))],
     "[user] x\ny\n[assistant] z\nw\n"),
    ("thinking", None, [assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, text("z")),
                        assistant({"type": "redacted_thinking", "data": "x"})], "[assistant] z\n"),
    ("call", None, [assistant(text("z"), CALL), user(RESULT, text("so"))],
     '[assistant] z[call] {"color": "red"}\n[tool] done\n[user] so\n'),
    ("only a call", None, [assistant(CALL)], '[assistant] [call] {"color": "red"}\n'),
    ("two results", None, [user(RESULT, {**RESULT, "content": [text("a"), text("b")], "is_error": True})],
     "[tool] done\n[tool] a\nb\n"),
    ("empty result", None, [user({"type": "tool_result", "tool_use_id": "t"})], "[tool] \n"),
    ("begun with nothing", None, [user(text("x")), assistant()], "[user] x\n"),
    ("begun with empty text", None, [user(text("x")), {"role": "assistant", "content": ""}], "[user] x\n"),
    ("documented fields of the client", None, [assistant(text("z", citations=None, parsed_output=None))],
     "[assistant] z\n"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("system", "messages", "prompt"), [case[1:] for case in CASES], ids=[each[0] for each in CASES]
)
def test_what_the_model_sees(system: Any, messages: list[Any], prompt: str) -> None:
    assert seen(system, messages) == prompt


def test_calls_keep_their_ids() -> None:
    turns = chat_messages([assistant(CALL), user(RESULT)], None)
    assert turns[0]["tool_calls"] == [
        {"id": "t1", "type": "function", "function": {"name": "paint", "arguments": {"color": "red"}}}
    ]
    assert turns[1] == {"role": "tool", "tool_call_id": "t1", "content": "done"}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/secret"}}
BAD: list[tuple[Any, list[Any], str]] = [
    (None, [user(IMAGE)], "messages[0].content[0] is of type 'image', which is not supported"),
    (None, [user(text("x"), {"type": "document", "source": {}})], "messages[0].content[1] is of type 'document'"),
    (None, [user({"type": "search_result"})], "'search_result'"),
    (None, [assistant({"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}})], "'server_tool_use'"),
    (None, [assistant({"type": "mcp_tool_use"})], "'mcp_tool_use'"),
    (None, [user({**RESULT, "content": [IMAGE]})], "messages[0].content[0].content[0] is of type 'image'"),
    ([IMAGE], [user(text("x"))], "system[0] is of type 'image'"),
    (5, [], "system must be text or a list of blocks, got 5"),
    (None, [user(CALL)], "'tool_use', which is not supported in a message of role user"),
    (None, [assistant(RESULT)], "'tool_result', which is not supported in a message of role assistant"),
    (None, [user({"type": "thinking"})], "'thinking', which is not supported in a message of role user"),
    (None, [{"role": "tool", "content": "x"}], "messages[0]: role must be one of user, assistant, system, got 'tool'"),
    (None, [{"role": ["user"], "content": "x"}], "role must be one of"),
    (None, [{"role": "user"}], "messages[0].content must be text or a list of blocks, got None"),
    (None, [{"role": "user", "content": {"type": "text"}}], "messages[0].content must be text or a list"),
    (None, [user(), user(text("x"))], "messages[0] must have content"),
    (None, [{"role": "user", "content": ""}], "messages[0] must have content"),
    (None, [user("x")], "messages[0].content[0] must be an object with a type, got 'x'"),
    (None, [user({"type": 5})], "must be an object with a type"),
    (None, [user({"type": "text"})], "of type 'text' needs text, which is text, got None"),
    (None, [assistant({**CALL, "input": "{}"})], "of type 'tool_use' needs input, which is an object, got '{}'"),
    (None, [assistant({**CALL, "id": None})], "needs id, which is text, got None"),
    (None, [user({"type": "tool_result", "content": "x"})], "needs tool_use_id, which is text"),
]


@pytest.mark.parametrize(("system", "messages", "words"), BAD, ids=[case[2][-24:] for case in BAD])
def test_what_is_refused(system: Any, messages: list[Any], words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat_messages(messages, system)
    assert words in str(refused.value)
    assert refused.value.param == ("system" if words.startswith("system") else "messages")


def test_an_answer_that_is_begun_is_continued(served: Served) -> None:
    assert is_prefilled(chat_messages([user(text("x")), assistant(text("y"))], None))
    assert not is_prefilled(chat_messages([assistant(text("y")), user(RESULT)], None))
    with pytest.raises(InvalidRequestError, match="its tool_result must follow"):
        is_prefilled(chat_messages([assistant(CALL)], None))
    counts = [
        served.post("/v1/messages/count_tokens", messages=messages).json()["input_tokens"]
        for messages in ([user(text("x")), assistant(text("begun"))], [user(text("x")), user(text("begun"))])
    ]
    prompt = tokenizer().encode("[user] x\n[assistant] begun")
    assert counts[0] == len(prompt)
    assert counts[1] == len(tokenizer().encode("[user] x\nbegun\n[bot]"))


def test_an_answer_that_begins_with_nothing_is_a_new_one(served: Served) -> None:
    begun = [[], [{"role": "assistant", "content": ""}], [assistant()], [assistant(text(" "))]]
    counts = [
        served.post("/v1/messages/count_tokens", messages=[user(text("x")), *more]).json()["input_tokens"]
        for more in begun
    ]
    assert counts == [len(tokenizer().encode("[user] x\n[bot]"))] * 4
    answers = [
        served.post("/v1/messages", messages=[user(text("x")), *more], max_tokens=3).json()["content"] for more in begun
    ]
    assert answers == answers[:1] * 4
