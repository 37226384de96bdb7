"""The gRPC server. It reports its health from the start, and answers calls once it is opened."""

from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health as health_service
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import slipstream_v1_pb2_grpc as stubs
from protos.errors import ConfigError
from runtime.frontend.client import EngineClient
from runtime.grpc.health import SERVICE, EngineHealth
from runtime.grpc.service import GenerationService
from runtime.grpc.servicer import ApiKeyInterceptor, GenerationServicer
from runtime.http.server.limits import ConnectionLimits, GuardOptions

MIB = 1024 * 1024
LARGEST_REQUEST, LARGEST_RESPONSE = 4 * MIB, 64 * MIB
"""In bytes. Parsing holds the event loop: 4 MiB hold a million token ids, but also two million empty messages."""
LARGEST_METADATA = 16 * 1024
"""In bytes."""
IDLE_S = 300
"""A connection without calls is closed after this long."""
CALLS_AT_ONCE = 4096
"""Calls of one connection; more wait at the client."""
PING_EVERY_S, PONG_WITHIN_S, PINGS_APART_S = 60, 20, 10
CLOSING_S = 1.0
"""Time for calls other than Generate to end, such as `Watch` of the health."""

OPTIONS = (
    ("grpc.max_receive_message_length", LARGEST_REQUEST),
    ("grpc.max_send_message_length", LARGEST_RESPONSE),
    # Fail if the port is in use, instead of sharing it.
    ("grpc.so_reuseport", 0),
    # Detect clients that have vanished; accept their keep-alive pings during long silences.
    ("grpc.keepalive_time_ms", 1000 * PING_EVERY_S),
    ("grpc.keepalive_timeout_ms", 1000 * PONG_WITHIN_S),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000 * PINGS_APART_S),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000 * PINGS_APART_S),
    # Clients connect again by themselves; a `Watch` counts as a call.
    ("grpc.max_connection_idle_ms", 1000 * IDLE_S),
    ("grpc.max_concurrent_streams", CALLS_AT_ONCE),
    ("grpc.max_metadata_size", LARGEST_METADATA),
)


class GrpcServer:
    """Serves `slipstream.v1`, `grpc.health.v1` and reflection. Belongs to the event loop it was made on.

    Args:
        guard: API keys.
        credentials: for TLS; None for plaintext connections.
        limits: limits on connections and on slow readers.
    """

    def __init__(self, guard: GuardOptions, credentials: Any, limits: ConnectionLimits) -> None:
        self._credentials = credentials
        self._servicer = GenerationServicer(limits.stall_s)
        self.health = EngineHealth()
        self._server = aio.server(interceptors=(ApiKeyInterceptor(guard),), options=(*OPTIONS, *_limiting(limits)))
        stubs.add_GenerationServiceServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, self._server)
        names = (SERVICE, health_service.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    @property
    def num_running(self) -> int:
        """Number of running calls, without health and reflection."""
        return self._servicer.num_running

    async def start(self, host: str, port: int) -> int:
        """Listen, without answering yet; return the port, which the system chooses if *port* is 0.

        Raises:
            ConfigError: the address is in use, or is not an address of this machine.
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

    async def open(self, service: GenerationService, engine: EngineClient) -> None:
        """Answer calls from now on. `health.follow` reports later changes of *engine*."""
        self._servicer.open(service)
        await self.health.update(engine)

    async def stop(self, grace_s: float = CLOSING_S) -> None:
        """Refuse new calls, and cancel running ones after *grace_s* seconds."""
        await self._server.stop(grace_s)


def _limiting(limits: ConnectionLimits) -> tuple[tuple[str, int], ...]:
    """Return the options of gRPC for *limits*. A connection above the limit is closed at once."""
    return (
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", round(1000 * limits.head_timeout_s)),
    )


def tls_credentials(cert: bytes, key: bytes, client_ca: bytes | None = None) -> Any:
    """Return TLS credentials from PEM. With *client_ca*, clients must present a certificate that it signed."""
    return grpc.ssl_server_credentials([(key, cert)], client_ca, require_client_auth=client_ca is not None)
