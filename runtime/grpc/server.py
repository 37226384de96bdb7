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
from runtime.http.server.limits import GuardOptions

MIB = 1024 * 1024
LARGEST_REQUEST, LARGEST_RESPONSE = 4 * MIB, 64 * MIB
"""In bytes. Parsing holds the event loop: 4 MiB hold a million token ids, but also two million empty messages."""
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
)


class GrpcServer:
    """Serves `slipstream.v1`, `grpc.health.v1` and reflection. Belongs to the event loop it was made on.

    Args:
        guard: API keys.
        credentials: for TLS; None for plaintext connections.
        stall_s: seconds a client may read nothing of its answer.
    """

    def __init__(self, guard: GuardOptions, credentials: Any, stall_s: float) -> None:
        self._credentials = credentials
        self._servicer = GenerationServicer(stall_s)
        self.health = EngineHealth()
        self._server = aio.server(interceptors=(ApiKeyInterceptor(guard),), options=OPTIONS)
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


def tls_credentials(cert: bytes, key: bytes, client_ca: bytes | None = None) -> Any:
    """Return TLS credentials from PEM. With *client_ca*, clients must present a certificate that it signed."""
    return grpc.ssl_server_credentials([(key, cert)], client_ca, require_client_auth=client_ca is not None)
