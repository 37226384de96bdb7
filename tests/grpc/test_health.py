"""The health service and reflection."""

import queue

import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from protos import slipstream_v1_pb2 as pb
from tests.support.serving.fake_engine import expected
from tests.support.serving.grpc_checks import SERVING, Code, checked, failure, watched
from tests.support.serving.grpc_server import SERVICE, Served


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
