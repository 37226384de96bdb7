"""Requests with a common prefix go to the same replica."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.ray_serve import affinity
from cluster.ray_serve.affinity import (
    BLOCK_CHARS,
    MAX_BLOCKS,
    MAX_BODY_BYTES,
    PrefixHeader,
    PrefixOwners,
    keys_in,
    keys_of,
    session_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray's
LONG = "a system prompt that many have " * 40


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_requests_that_begin_alike_share_keys() -> None:
    one = keys_of(body(prompt=LONG + "and a question", temperature=0.5))
    other = keys_of(body(prompt=LONG + "and quite another question " * 30))
    common = len(LONG) // BLOCK_CHARS
    assert one[:common] == other[:common]
    assert one != other
    assert len(set(other)) == len(other)
    assert keys_of(body(prompt=LONG + "and a question", cache_salt="tenant"))[0] not in one  # another's cache


def test_conversations_prompts_and_ids_have_keys() -> None:
    said = [{"role": "system", "content": LONG}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    turn = [*said, {"role": "assistant", "content": "good day"}, {"role": "user", "content": LONG}]
    first, second = keys_of(body(messages=said)), keys_of(body(messages=turn))
    assert first
    assert second[: len(first)] == first
    short, long = (keys_of(body(instructions=LONG, input=given)) for given in ("hello", said))
    assert len(short) < len(long)
    assert long[: len(short)] == short
    blocks = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    short, long = (keys_of(body(system=blocks, messages=given)) for given in (said[1:], turn))
    assert long[: len(short)] == short
    assert keys_of(body(system=LONG, messages=said)) == keys_of(body(system=blocks, messages=said))
    assert keys_of(body(input=LONG)) == keys_of(body(prompt=LONG))
    assert keys_of(body(prompt=[LONG, "other"])) == keys_of(body(prompt=LONG))
    assert keys_of(body(prompt=list(range(500))))
    assert keys_of(body(prompt=[list(range(500))])) == keys_of(body(prompt=list(range(500))))
    assert len(keys_of(body(prompt="x" * BLOCK_CHARS * MAX_BLOCKS * 2))) == MAX_BLOCKS


@pytest.mark.parametrize("bad", [
    b"", b"{", b"[1]", b'{"prompt": 3}', b'{"messages": {"role": {}}}', b"\xff\xfe", b'{"prompt": "short"}',
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"prompt": [null, true]}', b'{"messages": [1, [2], "x"]}',
])  # fmt: skip
def test_what_has_no_beginning_has_no_keys(bad: bytes) -> None:
    assert keys_of(bad) == []


def test_bodies_that_the_replica_refuses_are_not_parsed_by_the_proxy() -> None:
    text = b'{"prompt": "%s", "metadata": [%s]}'
    assert keys_of(text % (b"x" * 1000, b",".join([b"[]"] * 1000)))
    assert keys_of(text % (b"x" * 1000, b",".join([b"[]"] * 70_000))) == []


def test_the_longest_beginning_decides() -> None:
    owners = PrefixOwners(max_keys=4)
    owners.learn(["a", "b"], "one")
    owners.learn(["a"], "two")
    assert owners.of(["a", "b", "c"], {"one", "two"}) == {"one"}
    assert owners.of(["a", "x"], {"one", "two"}) == {"one", "two"}
    assert owners.of(["a", "b"], {"two"}) == {"two"}
    assert owners.of(["y"], {"one"}) == set()
    owners.keep({"two"})
    assert owners.of(["a", "b"], {"one", "two"}) == {"two"}
    owners.learn(["p", "q", "r", "s"], "two")
    assert owners.of(["a"], {"two"}) == set()  # the oldest are forgotten


def test_sessions_and_digests_travel_in_one_header() -> None:
    assert keys_in(session_of(["00ff", "11ee"])) == ["00ff", "11ee"]
    assert keys_in("a client's own session") == ["a client's own session"]
    assert keys_in("") == []
    assert len(keys_in(session_of(["k"] * 1000))) == MAX_BLOCKS


def passed_on(
    parts: list[bytes], headers: list[tuple[bytes, bytes]], path: str = "/v1/completions"
) -> tuple[Any, bytes]:
    """Send a request through the middleware; return the headers and the body that come out."""
    seen: dict[str, Any] = {}
    messages: Iterator[Message] = iter(
        [
            {"type": "http.request", "body": part, "more_body": index < len(parts) - 1}
            for index, part in enumerate(parts)
        ]
    )

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        raise AssertionError("the middleware answers nothing")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen["headers"], whole, more = scope["headers"], b"", True
        while more:
            message = await receive()
            whole += message.get("body", b"")
            more = message.get("more_body", False)
        seen["body"] = whole

    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(PrefixHeader(app)(scope, receive, send))
    return dict(seen["headers"]), seen["body"]


def test_the_header_is_written_and_the_body_is_as_it_was() -> None:
    sent = body(prompt=LONG)
    headers, got = passed_on([sent[:100], sent[100:300], sent[300:]], [(b"host", b"x")])
    assert keys_in(headers[b"x-session-id"].decode()) == keys_of(sent)
    assert got == sent


def test_other_requests_are_left_alone() -> None:
    sent = body(prompt=LONG)
    assert passed_on([sent], [(b"x-session-id", b"mine")]) == ({b"x-session-id": b"mine"}, sent)
    assert passed_on([sent], [(b"x_session_id", b"mine")]) == ({b"x_session_id": b"mine"}, sent)
    assert passed_on([sent], [], "/tokenize") == ({}, sent)
    huge = [b" " * (MAX_BODY_BYTES // 2)] * 4 + [sent]
    assert passed_on(huge, []) == ({}, b"".join(huge))


@pytest.mark.parametrize(("name", "limit"), [("READ_S", 0.05), ("MAX_HELD_BYTES", 0)])
def test_slow_bodies_and_too_many_are_left_to_the_replica(
    name: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers before they are whole, and the proxy holds nothing of them afterwards."""
    monkeypatch.setattr(affinity, name, limit)
    first = {"type": "http.request", "body": b"{", "more_body": True}
    sent, seen = [first], []

    async def receive() -> Message:
        return sent.pop() if sent else await asyncio.Future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["headers"], await receive()))

    async def send(message: Message) -> None:
        raise AssertionError("the middleware answers nothing")

    middleware = PrefixHeader(app)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(middleware(scope, receive, send))
    assert seen == [([], first)]
    assert middleware._num_held == 0
