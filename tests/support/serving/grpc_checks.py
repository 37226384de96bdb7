"""Checks of gRPC errors and health, for tests."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

Code = grpc.StatusCode
INSIDES = ("\n", "Traceback", "0x", ".py", "/secret", "Error")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def failure(work: Callable[[], Any], code: Code) -> grpc.RpcError:
    """Return the error of *work*; check for *code* and one line without internal details."""
    with pytest.raises(grpc.RpcError) as caught:
        work()
    details = caught.value.details()
    assert caught.value.code() == code, details
    assert not [word for word in INSIDES if word in details], details
    return caught.value


def checked(channel: grpc.Channel, service: str, timeout_s: float = 20) -> int:
    asked = health_pb2.HealthCheckRequest(service=service)
    return int(health_pb2_grpc.HealthStub(channel).Check(asked, timeout=timeout_s).status)


def watched(channel: grpc.Channel, service: str) -> "queue.Queue[int]":
    """Return a queue of the statuses that `Watch` streams."""
    told: queue.Queue[int] = queue.Queue()
    stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))

    def read() -> None:
        with contextlib.suppress(grpc.RpcError):
            for news in stream:
                told.put(news.status)

    threading.Thread(target=read, daemon=True).start()
    return told
