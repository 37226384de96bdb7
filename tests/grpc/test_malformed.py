"""Messages that cannot be parsed, or are too large, to every method."""

import random
from collections.abc import Iterator

import grpc
import pytest

from protos import slipstream_v1_pb2 as pb
from runtime.grpc.parsing import MAX_CHAT_MESSAGES, MAX_REPEATED
from tests.support.serving.fake_engine import expected
from tests.support.serving.grpc_checks import SERVING, Code, checked, failure
from tests.support.serving.grpc_server import SERVICE, Served, answer, request

HEALTH = "/grpc.health.v1.Health"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
UNARY = (f"{HEALTH}/Check", *(f"/{SERVICE}/{name}" for name in ("Tokenize", "Detokenize", "GetModelInfo")))
STREAMED = (f"{HEALTH}/Watch", f"/{SERVICE}/Generate")
MALFORMED = (b"\xff\xff\xff", b"\x0a\xff", b"\x00", b"\x0a\x02\xc3\x28")
SEED = 7


@pytest.fixture(scope="module")
def channel(served: Served) -> Iterator[grpc.Channel]:
    with served.channel() as opened:
        yield opened


@pytest.fixture(autouse=True)
def undisturbed(channel: grpc.Channel) -> Iterator[None]:
    """Health and generation work after each test."""
    yield
    assert checked(channel, SERVICE) == SERVING


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_messages_are_refused_as_such(channel: grpc.Channel, data: bytes) -> None:
    for method in UNARY:
        failure(lambda method=method: channel.unary_unary(method)(data, timeout=20), Code.INVALID_ARGUMENT)
    for method in STREAMED:
        failure(lambda method=method: list(channel.unary_stream(method)(data, timeout=20)), Code.INVALID_ARGUMENT)
    failure(lambda: list(channel.stream_stream(REFLECTION)(iter([data]), timeout=20)), Code.INVALID_ARGUMENT)


def test_random_messages_never_show_the_insides(channel: grpc.Channel) -> None:
    drawn = random.Random(SEED)
    codes = set()
    for _ in range(200):
        data = bytes(drawn.choice((0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x3A, drawn.randrange(256))) for _ in range(9))
        for call in (
            lambda data=data: [channel.unary_unary(UNARY[0])(data, timeout=20)],
            lambda data=data: list(channel.stream_stream(REFLECTION)(iter([data]), timeout=20)),
        ):
            try:
                call()
            except grpc.RpcError as error:
                codes.add(error.code())
                assert "Unexpected" not in error.details(), error.details()
    assert Code.INVALID_ARGUMENT in codes
    assert codes <= {Code.INVALID_ARGUMENT, Code.NOT_FOUND}


def test_messages_with_too_many_entries_are_refused(channel: grpc.Channel, served: Served) -> None:
    many = MAX_REPEATED + 1
    requests = (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * many)),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * (MAX_CHAT_MESSAGES + 1))),
        request("x", allowed_token_ids=[5] * many),
        request("x", allowed_token_ids=[5] * 1000),  # more than the vocabulary has
        request("x", stop_token_ids=[5] * many),
        request("x", stop=[""] * many),
        request("x", prediction=pb.Prediction(token_ids=pb.TokenIds(ids=[5] * many))),
    )
    with served.stub() as stub:
        for message in requests:
            error = failure(lambda message=message: list(stub.Generate(message, timeout=60)), Code.INVALID_ARGUMENT)
            assert "at most" in error.details()
        failure(lambda: stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * many), timeout=60), Code.INVALID_ARGUMENT)
        failure(lambda: list(stub.Generate(request("a" * 5_000_000), timeout=60)), Code.RESOURCE_EXHAUSTED)
        _, (end,) = answer(stub.Generate(request("x", 4, allowed_token_ids=[*range(200)])))
        assert end.text == expected("x", 4)


@pytest.mark.parametrize("number", [4, -1, 2**31 - 1])
def test_numbers_that_an_enumeration_does_not_define_are_refused(served: Served, number: int) -> None:
    with served.stub() as stub:
        message = request("x", 4, per_request_spec_decode_metrics=number)
        error = failure(lambda: list(stub.Generate(message, timeout=60)), Code.INVALID_ARGUMENT)
    assert error.details().startswith("per_request_spec_decode_metrics must be one of SPEC_DECODE_METRICS_UNSPECIFIED")
    assert error.details().endswith(f"got {number}")
