"""The gRPC server: listens, tells its health from the start, and answers once it is opened."""

from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health as health_service
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import slipstream_v1_pb2_grpc as stubs
from protos.errors import ConfigError
from runtime.frontend.client import EngineClient
from runtime.grpc.answering import Answering
from runtime.grpc.health import SERVICE, EngineHealth
from runtime.grpc.servicer import Gate, GenerationServicer
from runtime.http.server.limits import GuardOptions

MIB = 1024 * 1024
LARGEST_REQUEST, LARGEST_RESPONSE = 32 * MIB, 64 * MIB  # bytes
PING_EVERY_S, PONG_WITHIN_S, PINGS_APART_S = 60, 20, 10
CLOSING_S = 1.0
"""Calls that are no answers, such as those that watch the health, have this long to end."""

OPTIONS = (
    ("grpc.max_receive_message_length", LARGEST_REQUEST),
    ("grpc.max_send_message_length", LARGEST_RESPONSE),
    # A port in use is an error, not a port to share.
    ("grpc.so_reuseport", 0),
    # Clients that vanished are found out; those that ping through a long silence are not sent away for it.
    ("grpc.keepalive_time_ms", 1000 * PING_EVERY_S),
    ("grpc.keepalive_timeout_ms", 1000 * PONG_WITHIN_S),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000 * PINGS_APART_S),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000 * PINGS_APART_S),
)


class GrpcServer:
    """Serves `slipstream.v1`, `grpc.health.v1` and reflection. Belongs to the event loop it was made on.

    Args:
        guard: who may call.
        credentials: of TLS; None for plain connections.
        stall_s: how long a client may read nothing of its answer.
    """

    def __init__(self, guard: GuardOptions, credentials: Any, stall_s: float) -> None:
        self._credentials = credentials
        self._servicer = GenerationServicer(stall_s)
        self.health = EngineHealth()
        self._server = aio.server(interceptors=(Gate(guard),), options=OPTIONS)
        stubs.add_GenerationServiceServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, self._server)
        names = (SERVICE, health_service.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    @property
    def num_running(self) -> int:
        """Calls that are being answered; those to health and reflection do not count."""
        return self._servicer.num_running

    async def start(self, host: str, port: int) -> int:
        """Listen, not answering yet; return the port, which *port* 0 leaves to the system.

        Raises:
            ConfigError: the address is taken, or is none of this machine's.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._bind(address)
        except RuntimeError:
            raise ConfigError(f"cannot listen on {address} for gRPC; choose another host or port") from None
        await self.health.begin()
        await self._server.start()
        return bound

    def _bind(self, address: str) -> int:
        if self._credentials is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, self._credentials))

    async def open(self, answering: Answering, engine: EngineClient) -> None:
        """Answer from now on; `health.follow` tells what becomes of *engine* later."""
        self._servicer.open(answering)
        await self.health.look(engine)

    async def stop(self, grace_s: float = CLOSING_S) -> None:
        """Take no more calls, and end those that run after *grace_s* seconds."""
        await self._server.stop(grace_s)


def tls_credentials(cert: bytes, key: bytes, client_ca: bytes | None = None) -> Any:
    """Return what makes a server's connections TLS, from PEM; with *client_ca*, clients must show its certificates."""
    return grpc.ssl_server_credentials([(key, cert)], client_ca, require_client_auth=client_ca is not None)
