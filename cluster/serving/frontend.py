"""The interface of the HTTP and the gRPC server, for the service that runs both."""

import contextlib
import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from protos.errors import ConfigError
from runtime.frontend.client import EngineClient
from runtime.http.context import ServerOptions
from runtime.http.render import Decoder
from runtime.metrics.prometheus import Metrics


@dataclass(frozen=True)
class ServerContext:
    """What a server needs to answer requests. The engine has been started."""

    engine: EngineClient
    tokenizer: Decoder
    metrics: Metrics
    options: ServerOptions


class Frontend(Protocol):
    """A server for one protocol. Methods are called in the order `start`, `open`, `serve`, `stop`."""

    @property
    def num_running(self) -> int:
        """Number of requests being answered."""
        ...

    @property
    def address(self) -> str:
        """The address it listens on, for the log."""
        ...

    async def start(self) -> None:
        """Bind the address, before anything is loaded. Raises `ConfigError` if that fails."""
        ...

    async def open(self, context: ServerContext) -> None:
        """Accept requests from now on."""
        ...

    async def serve(self) -> None:
        """Answer requests until stopped or cancelled."""
        ...

    async def publish_health(self) -> None:
        """Publish the engine's current state to health watchers."""
        ...

    async def stop(self, *, at_once: bool) -> None:
        """Stop; running answers get a short time to end, or none if *at_once*."""
        ...


@contextlib.contextmanager
def bound(host: str, port: int, option: str = "port") -> Iterator[socket.socket]:
    """Bind an address; the error message names *option* as the way to choose another.

    Raises:
        ConfigError: the address is in use, or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm, a delay of 40 ms, only if the protocol is given.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        with not_taken(host, port, option):
            _bind(listener, host, port)
        yield listener


def _bind(listener: socket.socket, host: str, port: int) -> None:
    """Bind for this socket alone, so that another server that is started meanwhile ends before it loads anything.

    That fails for a minute after an earlier server had connections. With SO_REUSEADDR it does not, but two sockets may
    then be bound to an address until one of them listens.
    """
    try:
        listener.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))


def listen(listener: socket.socket, backlog: int) -> None:
    """Accept connections. Raises `ConfigError` if another server has the address by now."""
    host, port, *_ = listener.getsockname()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its connections keep no later server out
    with not_taken(host, port):
        listener.listen(backlog)


@contextlib.contextmanager
def not_taken(host: str, port: int, option: str = "port") -> Iterator[None]:
    """Turn an error of the system about an address into a `ConfigError` that names *option* as the way to another."""
    try:
        yield
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another host or {option}") from None
