"""The gRPC server of `slipstream serve`."""

from dataclasses import dataclass

from cluster.serving.frontend import ServerContext, bound
from cluster.serving.startup_info import url_host
from cluster.serving.tls import TlsFiles
from runtime.frontend.client import EngineClient
from runtime.grpc.server import GrpcServer, tls_credentials
from runtime.grpc.service import GenerationService
from runtime.http.render import TokenTexts
from runtime.http.server.limits import ConnectionLimits, GuardOptions

CLOSING_S = 1.0
"""Time for calls that do not end by themselves, such as health watches."""


@dataclass(frozen=True)
class GrpcOptions:
    """The address and certificates of the gRPC server."""

    host: str = "0.0.0.0"
    port: int = 9000
    tls: TlsFiles | None = None


class GrpcFrontend:
    """See `cluster.serving.frontend.Frontend`. Serves health checks from `start` on.

    Args:
        options: address and certificates.
        guard: API keys and limits.
        limits: limits on connections; a client that reads nothing of its answer for `stall_s` is cut off.
    """

    def __init__(self, options: GrpcOptions, guard: GuardOptions, limits: ConnectionLimits) -> None:
        self._options = options
        self._limits = limits
        self._guard = guard
        self._port = options.port
        self._server: GrpcServer | None = None
        self._engine: EngineClient | None = None

    @property
    def num_running(self) -> int:
        """See `Frontend`."""
        return 0 if self._server is None else self._server.num_running

    @property
    def address(self) -> str:
        """See `Frontend`."""
        kind = "gRPC" if self._options.tls is None else "gRPC with TLS"
        return f"{kind} on {url_host(self._options.host)}:{self._port}"

    async def start(self) -> None:
        """See `Frontend`."""
        with bound(self._options.host, self._options.port, "grpc_port, or -1 for no gRPC"):
            pass  # raises a clear error, which gRPC does not
        tls = self._options.tls
        credentials = None if tls is None else tls_credentials(*tls.read())
        server = GrpcServer(self._guard, credentials, self._limits)
        self._port = await server.start(self._options.host, self._options.port)
        self._server = server

    async def open(self, context: ServerContext) -> None:
        """See `Frontend`."""
        assert self._server is not None, "not started"
        self._engine = context.engine
        await self._server.open(
            GenerationService(context.engine, TokenTexts(context.tokenizer), context.options), context.engine
        )

    async def serve(self) -> None:
        """See `Frontend`."""
        assert self._server is not None, "not started"
        assert self._engine is not None, "not open"
        await self._server.health.follow(self._engine)

    async def publish_health(self) -> None:
        """See `Frontend`."""
        if self._server is not None and self._engine is not None:
            await self._server.health.update(self._engine)

    async def stop(self, *, at_once: bool) -> None:
        """See `Frontend`."""
        if self._server is not None:
            await self._server.stop(0 if at_once else CLOSING_S)
