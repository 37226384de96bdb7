"""Limits of the HTTP server."""

import re
from dataclasses import dataclass, field

from protos.errors import ConfigError
from runtime.frontend.keys import Keys
from runtime.http.server.sites import Sites

REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
"""What a client may send as the id of its request."""


@dataclass(frozen=True)
class GuardOptions:
    """API keys, web pages, and limits on request bodies.

    `max_body_bytes_in_flight` applies to all bodies that are being read; `runtime.http.bodies` limits a single one.
    `salts_by_key` separates the caches of different API keys. `sites` are the web pages that may send requests.
    """

    keys: Keys = field(default_factory=Keys)
    body_timeout_s: float = 60.0
    salts_by_key: bool = True
    max_body_bytes_in_flight: int = 256 * 1024 * 1024
    sites: Sites = field(default_factory=Sites)

    def __post_init__(self) -> None:
        if self.body_timeout_s <= 0:
            raise ConfigError(f"body_timeout_s must be more than 0, got {self.body_timeout_s:g}")


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on connections.

    `max_head_bytes` and `max_headers` limit one request's line and headers, `head_timeout_s` the time they take to
    arrive. A connection whose client receives nothing for `stall_s` is closed.
    """

    max_connections: int = 4096
    max_head_bytes: int = 64 * 1024
    max_headers: int = 128
    head_timeout_s: float = 20.0
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ConfigError(f"max_connections must be at least 1, got {self.max_connections}")
