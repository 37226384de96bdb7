"""Limits of tokenization, request headers, bodies and connections."""

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from protos.errors import (
    InvalidRequestError,
    OverloadedError,
)
from runtime.text.tokenizer_pool import TokenizerPool
from tests.support.processes import wait_until
from tests.support.serving import fake_engine
from tests.support.serving.guarded_server import guarded

LONG = 20_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def test_tokenising_is_bounded_in_time_and_number() -> None:
    async def check() -> None:
        tokenising = TokenizerPool(longest_s=0.3, num_threads=2)
        assert await tokenising.run(max, 3, 4) == 4
        with pytest.raises(ZeroDivisionError):
            await tokenising.run(divmod, 1, 0)
        asked = [tokenising.run(time.sleep, 1.0) for _ in range(3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in found] == [InvalidRequestError, InvalidRequestError, OverloadedError]
        with pytest.raises(OverloadedError):
            await tokenising.run(max, 3, 4)  # both threads are still asleep
        await asyncio.sleep(1.0)
        assert await tokenising.run(max, 3, 4) == 4

    asyncio.run(check())


def test_long_texts_are_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def encode(self: Any, *args: Any, **options: Any) -> list[int]:
        threads.add(threading.current_thread().name)
        return [5]

    with guarded() as served:
        kind = type(fake_engine.tokenizer())
        monkeypatch.setattr(kind, "encode", encode)
        long = "ab " * LONG
        bodies = [{"prompt": [5], "prediction": {"type": "content", "content": long}}, {"prompt": [5]}]
        for body in bodies:
            assert served.post(max_tokens=2, **body).status_code == 200
        assert threads == {"slipstream-tokenise"}
        assert served.post("/tokenize", prompt="x").status_code == 200
        assert threads == {"slipstream-tokenise"}


# Connections


def test_heads_are_bounded_in_size_number_and_time() -> None:
    with guarded(header_timeout=0.5) as served:
        huge = b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 500_000
        many = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(1000)) + b"\r\n"
        whole = b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n"
        for data in (huge, many, whole, b"GET /" + b"a" * 500_000):
            assert served.raw(data).startswith(b"HTTP/1.1 431 "), data[:40]
        assert b'"code":"headers_too_large"' in served.raw(many)
        for data in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: b"):
            answer = served.raw(data)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"header_timeout"' in answer
        assert served.raw(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert served.get("/health", headers={"x-a": "a" * 30_000}).status_code == 200
        for _ in range(2):  # the time of a second head begins with its first byte
            assert served.get("/health").status_code == 200
            time.sleep(0.8)


def test_bodies_must_come_in_time() -> None:
    with guarded(body_timeout=0.5) as served:
        answer = served.raw(HEAD % 1000 + b"{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in answer


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n%b\r\n0\r\n"
KEY = b"Authorization: Bearer secret\r\n"


def test_trailers_are_no_headers_and_bounded() -> None:
    with guarded(api_key=["secret"], header_timeout=60) as served:
        answer = served.raw(CHUNKED % b"Connection: close\r\n" + KEY + b"X-Request-Id: mine\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"mine" not in answer
        for trailers in (b"X-A: b\r\n" * 40_000, b"X-A: " + b"a" * 400_000):  # neither ends
            for key in (KEY, b""):
                answer = served.raw(CHUNKED % key + trailers)
                assert answer.count(b"HTTP/1.1") <= 1  # it may have been answered before they came


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
"""What Java's client sends with the first request on a connection."""


@pytest.mark.parametrize("cut", [0, 40, None])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_requests_that_offer_another_protocol_keep_their_body(is_chunked: bool, cut: int | None) -> None:
    body = b'{"prompt": [5], "max_tokens": 2}'
    head = HEAD.removesuffix(b"\r\n") % len(body) + OFFER + b"\r\n"
    if is_chunked:
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n" + OFFER + b"Connection: close\r\n\r\n"
    with guarded() as served, socket.create_connection(("127.0.0.1", served.port), 60) as connection:
        sent = head + body + health  # the second one is pipelined
        at = len(head) if cut is None else cut
        connection.sendall(sent[:at])
        time.sleep(0.1)
        connection.sendall(sent[at:])
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert received.count(b"HTTP/1.1 200 ") == 2, received
    assert received.count(b'"object":"text_completion"') == 1


def test_a_malformed_body_is_told_so_once() -> None:
    bad = CHUNKED.removesuffix(b"0\r\n") % b"Content-Type: application/json\r\n" + b"no size\r\n"
    with guarded() as served:
        assert served.raw(bad).startswith(b"HTTP/1.1 400 ")
        body = b'{"prompt": "x", "max_tokens": 200, "stream": true}'
        behind = served.raw(HEAD % len(body) + body + bad)  # the first request's answer is not over
        assert b"HTTP/1.1 400 " not in behind


def test_the_rest_of_a_body_must_come_in_time_after_the_answer() -> None:
    with guarded(api_key=["secret"], header_timeout=0.5) as served:
        for data in (HEAD % 1000 + b"{", CHUNKED % b"" + b"X-A: b\r\n"):
            assert served.raw(data).startswith(b"HTTP/1.1 401 ")  # until the server closes the connection


def test_a_bad_request_after_a_good_one_is_told_so() -> None:
    good = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with guarded() as served:
        for bad in (b"GET http://[::x/ HTTP/1.1\r\nHost: x\r\n\r\n", b"nonsense\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", served.port)) as connection:
                connection.sendall(good)
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
                connection.sendall(bad)
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


def test_pipelined_requests_may_be_divided_anywhere() -> None:
    body = b'{"prompt": [5], "max_tokens": 1}' + b" " * 90_000
    request = HEAD % len(body) + body
    last = request.replace(b"Host: x", b"Host: x\r\nConnection: close")
    with guarded() as served, socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(request + last[:40])
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.sendall(last[40:])
        received = b""
        while part := connection.recv(1 << 16):
            received += part
        assert received.count(b"HTTP/1.1 200 ") == 1


def test_one_connection_too_many_is_told_so() -> None:
    with guarded(max_connections=3) as served:
        held = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3)]

        def asked() -> bytes:
            return served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

        wait_until(lambda: asked().startswith(b"HTTP/1.1 503 "), what="three connections")
        assert b'"code":"too_many_connections"' in asked()
        for connection in held:
            connection.close()
        wait_until(lambda: served.get("/health").status_code == 200, what="room for a connection")
