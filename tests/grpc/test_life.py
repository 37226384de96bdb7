"""Calls that end early, and servers that are full, draining, dying or given bad messages."""

import time
from typing import Any

import pytest

from protos import slipstream_v1_pb2 as pb
from protos import slipstream_v1_pb2_grpc as stubs
from runtime.frontend.admission import QueueLimits
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.pacing import Aggregate
from runtime.frontend.stream_queue import ReadingLimits
from runtime.grpc import server as grpc_server
from runtime.metrics.prometheus import Metrics
from tests.support.serving import fake_engine
from tests.support.serving.fake_engine import expected, local_engine
from tests.support.serving.grpc_checks import NOT_SERVING, SERVING, Code, checked, failure, watched
from tests.support.serving.grpc_server import SERVICE, Served, answer, request, serving
from tests.support.serving.thread_channel import ThreadChannel

LONG = 100_000
ENDLESS = request("endless", LONG - 100)


def test_cancelling_frees_what_the_call_held(served: Served) -> None:
    with served.stub() as stub:
        call = stub.Generate(ENDLESS)
        next(call)
        served.run(served.busy())
        assert served.engine.stats().generated_tokens < LONG // 2
        call.cancel()
        served.run(served.idle())
        assert served.engine.stats().kv_usage == 0
        assert answer(stub.Generate(request("still there", 4)))[1][0].text == expected("still there", 4)


def test_a_vanished_client_frees_what_its_call_held(served: Served) -> None:
    with served.stub() as stub:
        call = stub.Generate(ENDLESS)
        next(call)
        served.run(served.busy())
    served.run(served.idle())
    assert served.engine.stats().kv_usage == 0


def test_the_clients_deadline_and_its_own_time_out(served: Served) -> None:
    with served.stub() as stub:
        failure(lambda: list(stub.Generate(ENDLESS, timeout=0.3)), Code.DEADLINE_EXCEEDED)
        served.run(served.idle())
        limited = request("endless", LONG - 100, timeout_ms=200)
        error = failure(lambda: list(stub.Generate(limited)), Code.DEADLINE_EXCEEDED)
        assert "0.2 s" in error.details()
        served.run(served.idle())
        assert answer(stub.Generate(request("x", 4, timeout_ms=60_000), timeout=60))[1][0].text == expected("x", 4)


def test_a_deadline_counts_while_a_request_waits(served: Served) -> None:
    with served.stub() as stub:
        running = [stub.Generate(ENDLESS) for _ in range(4)]  # as many as there are slots
        for call in running:
            next(call)
        failure(lambda: list(stub.Generate(request("late", 4, timeout_ms=300))), Code.DEADLINE_EXCEEDED)
        for call in running:
            call.cancel()
    served.run(served.idle())


def engine_with(**options: Any) -> AsyncEngine:
    """Return a fake engine with *options* of `AsyncEngine`."""
    channel = ThreadChannel(lambda inbox, say: fake_engine.build(inbox, say, LONG))
    metrics = Metrics("fake")
    engine = AsyncEngine(channel, fake_engine.make_preprocessor, metrics, **options)
    metrics.use_stats(engine.stats)
    return engine


def test_a_client_that_does_not_read_is_given_up() -> None:
    limits = ReadingLimits(max_unread=500)
    with serving(engine_with(reading=limits)) as slow, slow.stub(("grpc.http2.bdp_probe", 0)) as stub:
        call = stub.Generate(request("endless", LONG - 100, logprobs=5))  # soon more than is on its way
        next(call)
        slow.run(slow.busy())
        slow.run(slow.idle())  # well before all tokens are made
        assert slow.engine.stats().generated_tokens < LONG // 2
        error = failure(lambda: list(call), Code.DEADLINE_EXCEEDED)
        assert "are unread" in error.details()


def test_a_message_that_is_never_read_is_given_up() -> None:
    with serving(engine_with(), stall_s=0.5) as slow, slow.stub(("grpc.http2.bdp_probe", 0)) as stub:
        call = stub.Generate(request("endless", LONG - 100, logprobs=5))
        next(call)
        slow.run(slow.busy())
        slow.run(slow.idle())
        assert slow.engine.stats().generated_tokens < LONG // 2
        error = failure(lambda: list(call), Code.DEADLINE_EXCEEDED)
        assert error.details() == "nothing of the answer was read for 0.5 s"


def test_paced_messages_have_one_size() -> None:
    with serving(local_engine(), pacing=Aggregate(0.02, 512)) as paced, paced.stub() as stub:
        messages = list(stub.Generate(request("on and on", 200)))
        (end,) = answer(messages)[1]
        assert end.text == expected("on and on", 200) == "".join(message.chunk.text for message in messages)
        *chunks, last_chunk, complete = messages
        assert len(chunks) > 2
        assert {message.ByteSize() for message in chunks} == {512}
        assert (last_chunk.ByteSize() + complete.ByteSize()) % 512 == 0
        # An answer in one piece is sent as it is.
        (whole,) = stub.Generate(request("on and on", 20, stream=False))
        assert not whole.padding


# Servers that are full, closed or dying


def test_a_full_queue_refuses_at_once() -> None:
    with serving(engine_with(queue=QueueLimits(max_waiting_requests=1))) as full, full.stub() as stub:
        running = []
        for _ in range(4):  # one after the other: until it has a token, each waits
            running.append(stub.Generate(ENDLESS))
            next(running[-1])
        waiting = stub.Generate(request("waits", 4))
        while not full.engine.stats().num_waiting:
            time.sleep(0.01)
        error = failure(lambda: list(stub.Generate(request("one too many", 4))), Code.RESOURCE_EXHAUSTED)
        pushback = dict(error.trailing_metadata())["grpc-retry-pushback-ms"]
        assert 0 < int(pushback) <= 60_000
        for call in running:
            call.cancel()
        assert answer(waiting)[1][0].text == expected("waits", 4)


def test_before_loading_and_while_draining() -> None:
    with serving(local_engine(max_model_len=LONG), is_loaded=False) as early, early.channel() as channel:
        stub, told = stubs.GenerationServiceStub(channel), watched(channel, SERVICE)
        assert told.get(timeout=60) == NOT_SERVING
        assert checked(channel, "") == SERVING
        error = failure(lambda: stub.GetServerInfo(pb.GetServerInfoRequest()), Code.UNAVAILABLE)
        assert "loaded" in error.details()
        failure(lambda: list(stub.Generate(request("x"))), Code.UNAVAILABLE)
        early.run(early.load(fake_engine.tokenizer()))
        assert told.get(timeout=60) == SERVING
        in_flight = stub.Generate(request("on and on", 500))
        next(in_flight)
        early.engine.drain()
        assert told.get(timeout=60) == NOT_SERVING
        assert checked(channel, "") == SERVING
        error = failure(lambda: list(stub.Generate(request("x"))), Code.UNAVAILABLE)
        assert "about to stop" in error.details()
        assert stub.GetServerInfo(pb.GetServerInfoRequest()).state == pb.SERVER_STATE_DRAINING
        assert answer(in_flight)[1][0].usage.completion_tokens == 500


def test_an_engine_that_dies() -> None:
    with serving(local_engine(max_model_len=LONG)) as doomed, doomed.channel() as channel:
        stub, told = stubs.GenerationServiceStub(channel), watched(channel, "")
        assert told.get(timeout=60) == SERVING
        in_flight = stub.Generate(ENDLESS)
        next(in_flight)
        error = failure(lambda: list(stub.Generate(request("raise", 4))), Code.UNAVAILABLE)
        assert error.details() == "the engine has stopped and cannot answer; see its log"
        failure(lambda: list(in_flight), Code.UNAVAILABLE)
        assert told.get(timeout=60) == NOT_SERVING
        assert checked(channel, SERVICE) == NOT_SERVING
        assert stub.GetServerInfo(pb.GetServerInfoRequest()).state == pb.SERVER_STATE_DEAD


def test_what_goes_wrong_inside_stays_inside(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such luck at /secret/path.py\nTraceback")

    monkeypatch.setattr(served.engine, "prepare", broken)
    monkeypatch.setattr(served.engine, "tokenize", broken)
    with served.stub() as stub:
        for call in (lambda: list(stub.Generate(request("x"))), lambda: stub.Tokenize(pb.TokenizeRequest(text="x"))):
            error = failure(call, Code.INTERNAL)
            assert error.details() == "the server failed on this request; see its log"
    assert "/secret/path.py" in caplog.text


def test_what_is_no_message_and_what_is_too_long(served: Served) -> None:
    with served.channel() as channel:
        for method in ("Generate", "Tokenize"):
            call = channel.unary_stream(f"/{SERVICE}/{method}")
            for data in (b"\xff\xff\xff", b"\x1a\x01\xff"):  # neither a message, nor text in UTF-8
                failure(lambda call=call, data=data: list(call(data)), Code.INVALID_ARGUMENT)
        generate = channel.unary_stream(f"/{SERVICE}/Generate")
        failure(lambda: list(generate(b"x" * (grpc_server.LARGEST_REQUEST + 1))), Code.RESOURCE_EXHAUSTED)
        failure(lambda: list(channel.unary_stream(f"/{SERVICE}/Gone")(b"")), Code.UNIMPLEMENTED)
        assert checked(channel, "") == SERVING
