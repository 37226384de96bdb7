"""Limits of the HTTP server."""

import re
from dataclasses import dataclass, field

from protos.errors import ConfigError
from runtime.frontend.keys import Keys

REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
"""What a client may send as the id of its request."""


@dataclass(frozen=True)
class GuardOptions:
    """Who may ask, and how much may be on its way in.

    `max_body_bytes_in_flight` is over all bodies that are being read and checked; one body alone is limited elsewhere.
    `salts_by_key` keeps what the caches hold of one key's requests from those of another.
    """

    keys: Keys = field(default_factory=Keys)
    body_timeout_s: float = 60.0
    salts_by_key: bool = True
    max_body_bytes_in_flight: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.body_timeout_s <= 0:
            raise ConfigError(f"body_timeout_s must be more than 0, got {self.body_timeout_s:g}")


@dataclass(frozen=True)
class ConnectionLimits:
    """What one client may do to the connections of all.

    `max_head_bytes` and `max_headers` are of one request's line and headers, `head_timeout_s` how long they may take.
    A connection whose client takes nothing it was sent for `stall_s` is cut.
    """

    max_connections: int = 4096
    max_head_bytes: int = 64 * 1024
    max_headers: int = 128
    head_timeout_s: float = 20.0
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ConfigError(f"max_connections must be at least 1, got {self.max_connections}")
