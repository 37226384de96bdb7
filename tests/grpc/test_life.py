"""Calls that end early, servers that are full, closed or dying, keys, certificates, health and reflection."""

import contextlib
import queue
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.serving.tls import TlsFiles, tls_files
from protos import slipstream_v1_pb2 as pb
from protos import slipstream_v1_pb2_grpc as stubs
from protos.errors import ConfigError
from runtime.frontend.admission import QueueLimits
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.channel import ThreadChannel
from runtime.frontend.pacing import Aggregate
from runtime.frontend.stream_queue import ReadingLimits
from runtime.grpc import server as grpc_server
from runtime.metrics.prometheus import Metrics
from tests.support.serving import fake_engine
from tests.support.serving.certificates import Authority
from tests.support.serving.fake_engine import expected, local_engine
from tests.support.serving.grpc_server import SERVICE, Served, answer, request, serving

LONG = 100_000
ENDLESS = request("endless", LONG - 100)
Code = grpc.StatusCode
INSIDES = ("\n", "Traceback", "0x", ".py", "/secret", "Error")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(local_engine(max_model_len=LONG)) as running:
        yield running


def failure(work: Callable[[], Any], code: Code) -> grpc.RpcError:
    """Return how *work* fails: with *code*, and one line that tells nothing of the server's insides."""
    with pytest.raises(grpc.RpcError) as caught:
        work()
    details = caught.value.details()
    assert caught.value.code() == code, details
    assert not [word for word in INSIDES if word in details], details
    return caught.value


def checked(channel: grpc.Channel, service: str, timeout_s: float = 20) -> int:
    asked = health_pb2.HealthCheckRequest(service=service)
    return int(health_pb2_grpc.HealthStub(channel).Check(asked, timeout=timeout_s).status)


# Calls that end early


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
    """Return a fake engine with options of its own."""
    channel = ThreadChannel(lambda inbox, say: fake_engine.build(inbox, say, LONG))
    metrics = Metrics("fake")
    engine = AsyncEngine(channel, fake_engine.make_preprocessor, metrics, **options)
    metrics.follow(engine.stats)
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
        assert "wait to be read" in error.details()


def test_a_message_that_nobody_takes_is_given_up() -> None:
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
        assert error.details() == "the engine has stopped and cannot answer; its log says why"
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
            assert error.details() == "the server failed on this request; its log says more"
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


# Health, reflection, keys


def watched(channel: grpc.Channel, service: str) -> "queue.Queue[int]":
    """Return what `Watch` tells, as it comes."""
    told: queue.Queue[int] = queue.Queue()
    stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))

    def read() -> None:
        with contextlib.suppress(grpc.RpcError):
            for news in stream:
                told.put(news.status)

    threading.Thread(target=read, daemon=True).start()
    return told


def test_health_of_names_that_are_served(served: Served) -> None:
    with served.channel() as channel:
        assert (checked(channel, ""), checked(channel, SERVICE)) == (SERVING, SERVING)
        failure(lambda: checked(channel, "nobody"), Code.NOT_FOUND)


def test_a_client_that_knows_only_reflection(served: Served) -> None:
    with served.channel() as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
        asked = message_factory.GetMessageClass(method.input_type)
        told = message_factory.GetMessageClass(method.output_type)
        assert method.server_streaming
        assert asked is not pb.GenerateRequest
        generate = channel.unary_stream(f"/{SERVICE}/Generate", asked.SerializeToString, told.FromString)
        message = asked(text="by reflection", sampling={"max_tokens": 12, "temperature": 0.0})
        *_, last = generate(message)
        assert last.complete.text == expected("by reflection", 12)
        assert pool.FindEnumTypeByName("slipstream.v1.FinishReason").values_by_number[2].name == "FINISH_REASON_LENGTH"


def test_keys_open_everything_but_health() -> None:
    with serving(local_engine(), keys=("first-key", "second-key")) as locked, locked.channel() as channel:
        stub = stubs.GenerationServiceStub(channel)
        for given in ((), (("authorization", "Bearer wrong"),), (("authorization", "first-key"),)):
            failure(lambda given=given: list(stub.Generate(request("x"), metadata=given)), Code.UNAUTHENTICATED)
            failure(
                lambda given=given: stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=given), Code.UNAUTHENTICATED
            )
        failure(lambda: ProtoReflectionDescriptorDatabase(channel).get_services(), Code.UNAUTHENTICATED)
        failure(lambda: list(channel.unary_stream("/no.Such/Method")(b"")), Code.UNAUTHENTICATED)
        assert checked(channel, SERVICE) == SERVING
        for key in ("first-key", "second-key"):
            metadata = (("authorization", f"Bearer {key}"),)
            _, (end,) = answer(stub.Generate(request("x", 4), metadata=metadata))
            assert end.text == expected("x", 4)


def test_each_key_has_caches_of_its_own() -> None:
    prompt = "the quick brown fox jumps over the lazy dog and then some more of it, on and on and on"

    def cached(stub: Any, key: str, salt: str = "") -> int:
        metadata = (("authorization", f"Bearer {key}"),)
        _, (end,) = answer(stub.Generate(request(prompt, 2, cache_salt=salt), metadata=metadata))
        return int(end.usage.cached_tokens)

    with serving(local_engine(), keys=("first", "second")) as locked, locked.stub() as stub:
        assert cached(stub, "first") == 0
        assert cached(stub, "first") > 0
        assert cached(stub, "second") == 0
        assert cached(stub, "first", "salted") == 0
        assert cached(stub, "first", "salted") > 0


# TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours", "ours")


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    own = authority.sign("server")
    found = tls_files(("cert", "key"), str(own.cert), str(own.key), str(authority.cert))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def secured(files: TlsFiles) -> Iterator[Served]:
    plain = TlsFiles(files.cert, files.key)
    with serving(local_engine(), grpc_tls=files, http_tls=plain) as running:
        yield running


def asked_with(served: Served, credentials: grpc.ChannelCredentials) -> str:
    """Return an answer over TLS. Raises `RpcError`."""
    with grpc.secure_channel(served.address, credentials) as channel:
        _, (end,) = answer(stubs.GenerationServiceStub(channel).Generate(request("safe", 5), timeout=20))
        return str(end.text)


def test_mutual_tls(secured: Served, authority: Authority, tmp_path: Path) -> None:
    ca, known = authority.cert.read_bytes(), authority.sign("client")
    stranger = Authority(tmp_path / "theirs", "theirs")
    assert asked_with(secured, grpc.ssl_channel_credentials(ca, *known.pair)) == expected("safe", 5)
    for wrong in (
        grpc.ssl_channel_credentials(ca),  # no certificate of its own
        grpc.ssl_channel_credentials(ca, *stranger.sign("client").pair),
        grpc.ssl_channel_credentials(stranger.cert.read_bytes(), *known.pair),  # does not know the server
    ):
        failure(lambda wrong=wrong: asked_with(secured, wrong), Code.UNAVAILABLE)
    with secured.stub() as plain:
        failure(lambda: list(plain.Generate(request("x"), timeout=20)), Code.UNAVAILABLE)
    assert asked_with(secured, grpc.ssl_channel_credentials(ca, *known.pair)) == expected("safe", 5)


def test_https(secured: Served, authority: Authority) -> None:
    assert secured.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=str(authority.cert))
    body = {"prompt": "safe", "max_tokens": 5, "temperature": 0}
    told = httpx.post(secured.url + "/v1/completions", json=body, verify=trusting)
    assert told.json()["choices"][0]["text"] == expected("safe", 5)
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(secured.url + "/health")


def test_certificates_are_checked_before_anything_is_loaded(authority: Authority, tmp_path: Path) -> None:
    one, other = authority.sign("one"), authority.sign("other")
    names = ("grpc_tls_cert", "grpc_tls_key")
    assert tls_files(names, None, None) is None
    with pytest.raises(ConfigError, match="both grpc_tls_cert and grpc_tls_key"):
        tls_files(names, str(one.cert), None)
    with pytest.raises(ConfigError, match="both grpc_tls_cert and grpc_tls_key"):
        tls_files(names, None, None, str(authority.cert))
    with pytest.raises(ConfigError, match="No such file"):
        tls_files(names, str(one.cert), str(tmp_path / "gone.pem"))
    with pytest.raises(ConfigError, match=r"(?i)mismatch"):
        tls_files(names, str(one.cert), str(other.key))
    (tmp_path / "empty.pem").touch()
    with pytest.raises(ConfigError, match="client certificate authority"):
        tls_files(names, str(one.cert), str(one.key), str(tmp_path / "empty.pem"))


# Silence


@pytest.mark.full
def test_clients_that_ping_through_a_long_silence_are_not_sent_away(served: Served) -> None:
    pings = (
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
    )
    with served.channel(*pings) as channel:
        told = watched(channel, SERVICE)
        assert told.get(timeout=20) == SERVING
        with pytest.raises(queue.Empty):
            told.get(timeout=65)
        assert checked(channel, SERVICE) == SERVING
