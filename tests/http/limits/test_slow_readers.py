"""Clients that read their stream slowly or not at all."""

import asyncio
import socket
import time
from typing import Any

import pytest

from protos.errors import (
    SlowReaderError,
)
from protos.messages import TokenLogprobs, TokenOutput
from protos.sampling import SamplingParams
from runtime.frontend.stream_queue import MAX_SEPARATE, ReadingLimits, StreamQueue, merge_outputs
from runtime.http.options import SafetyOptions
from tests.support.serving.guarded_server import guarded, guarded_engine, settled

LONG = 20_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def outputs(count: int, **fields: Any) -> list[TokenOutput]:
    return [TokenOutput("a", [i], chr(97 + i % 26), **fields) for i in range(count)]


def test_unread_outputs_are_joined() -> None:
    async def check() -> None:
        delivery = StreamQueue({"a": 0, "b": 1}, ReadingLimits())
        for output in outputs(1000):
            delivery.put(output)
        delivery.put(TokenOutput("b", [7], "x", finish_reason="stop"))
        delivery.put(TokenOutput("a", [], "end", finish_reason="length", num_cached_tokens=3))
        taken = []
        while delivery.open:
            taken.append(await delivery.take())
        mine = [delta.output for delta in taken if delta.index == 0]
        assert len(taken) <= MAX_SEPARATE + 2
        assert [i for output in mine for i in output.token_ids] == list(range(1000))
        assert "".join(output.text for output in mine) == "".join(o.text for o in outputs(1000)) + "end"
        assert (mine[-1].finish_reason, mine[-1].num_cached_tokens) == ("length", 3)

    asyncio.run(check())


def test_joined_outputs_keep_everything() -> None:
    entry = TokenLogprobs([1], [0.0], [1])
    first = TokenOutput("a", [1], "x", [entry], [entry], num_cached_tokens=2)
    both = merge_outputs(first, TokenOutput("a", [2], "y", [entry]))
    assert both == TokenOutput("a", [1, 2], "xy", [entry, entry], [entry], num_cached_tokens=2)
    known = {"request_id", "token_ids", "text", "logprobs", "prompt_logprobs", "finish_reason", "stop_reason",
             "num_cached_tokens", "speculation", "error", "retry_after_s", "step", "queued_s"}  # fmt: skip
    assert set(TokenOutput.__struct_fields__) == known, (
        "define in runtime.frontend.stream_queue how a new field is merged"
    )


def test_a_reader_too_slow_loses_its_stream() -> None:
    async def check() -> None:
        engine = guarded_engine(SafetyOptions(), LONG)
        engine._streams._reading = ReadingLimits(max_unread=200, patience_s=0.1)
        await engine.start()
        stream = engine.stream(await engine.prepare("endless", SamplingParams(max_tokens=LONG - 100), "slow"))
        first = await anext(stream)
        assert first.output.token_ids
        await asyncio.sleep(0.5)
        await settled(engine)  # aborted without a read
        with pytest.raises(SlowReaderError, match="limit is 200"):
            async for _ in stream:
                pass
        await engine.close()

    asyncio.run(check())


def test_a_reader_is_not_too_slow_for_what_one_step_brings() -> None:
    async def check() -> None:
        queue = StreamQueue({"a": 0, "b": 1}, ReadingLimits(max_unread=200))
        entries = [TokenLogprobs([1] * 150, [0.0] * 150, [1] * 150)]
        for name in ("a", "b"):
            queue.put(TokenOutput(name, prompt_logprobs=entries, finish_reason="length"))
        assert [(await queue.take()).output.request_id for _ in range(2)] == ["a", "b"]

    asyncio.run(check())


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with guarded(LONG, read_timeout=1.0) as served:
        body = b'{"prompt": "endless", "max_tokens": %d, "stream": true, "logprobs": 5}' % (LONG - 100)
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(HEAD % len(body) + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
            served.idle()  # long before all 19,900 tokens, and without a byte read
            assert time.monotonic() - began < 60
        text = served.get("/metrics").text
        assert 'finished_reason="length",model_name="fake"} 0.0' in text
