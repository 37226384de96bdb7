"""What HTTP and gRPC servers have in common, for the service that runs both."""

import contextlib
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
    """What answers are made with. The engine has been started."""

    engine: EngineClient
    tokenizer: Decoder
    metrics: Metrics
    options: ServerOptions


class Frontend(Protocol):
    """A server for one protocol. It takes its address, opens, serves, and stops, in this order."""

    @property
    def num_running(self) -> int:
        """Calls that are being answered."""
        ...

    @property
    def address(self) -> str:
        """Where it listens, for people to read."""
        ...

    async def start(self) -> None:
        """Take the address before anything is loaded. Raises `ConfigError` where it cannot be had."""
        ...

    async def open(self, parts: ServerContext) -> None:
        """Take calls from now on."""
        ...

    async def serve(self) -> None:
        """Answer until told to stop, or cancelled."""
        ...

    async def look(self) -> None:
        """Tell whoever watches over the server the engine's state as it is now."""
        ...

    async def stop(self, *, at_once: bool) -> None:
        """End; answers in flight are given no time where it is to be *at_once*, and a moment otherwise."""
        ...


@contextlib.contextmanager
def bound(host: str, port: int, option: str = "port") -> Iterator[socket.socket]:
    """Take an address; *option* is the one that chooses another.

    Raises:
        ConfigError: the address is taken, or is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without its protocol, asyncio would not turn off Nagle's algorithm, and each answer would wait 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another host or {option}") from None
        yield listener
