"""Which web pages may use the server, and under which host names.

A page of another site can make a visitor's browser send requests to a server that only the visitor reaches. Browsers
say so in `sec-fetch-site` and `origin`, which pages cannot set. If an attacker's name is made to resolve to this
machine (DNS rebinding), the page counts as of the same origin, but the `host` header has the attacker's name.
"""

import ipaddress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from starlette.types import Scope

from protos.errors import ConfigError

ANY = "*"
LONGEST_SHOWN = 100
PAGE = "/"
"""Links on other sites may lead to it."""


class ForeignRequestError(Exception):
    """Another site sent a request. `code` says how that was recognised."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Sites:
    """Origins whose pages may send requests, and names that the `host` header may have.

    `origins` are as browsers send them, such as `https://chat.example`; `*` is any. `hosts` are names without a port;
    `*` is any. Without `hosts`, only a server that `is_local`, bound to the loopback, checks the name. `localhost` and
    IP addresses are always accepted.
    """

    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    is_local: bool = False

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin not in (ANY, "null") and not _is_origin(origin):
                raise ConfigError(
                    f"allowed_origins must be origins such as https://chat.example, or *, got {_shown(origin)}"
                )
        for host in self.hosts:
            if host != ANY and (not host or set(host) & set(" /@:,")):
                raise ConfigError(f"allowed_hosts must be host names without port, or *, got {_shown(host)}")

    def bound_to(self, host: str) -> "Sites":
        """Return the rules of a server that listens on *host*, whose name it also accepts."""
        return replace(self, hosts=(*self.hosts, host) if self.hosts else (), is_local=is_loopback(host))

    def check(self, scope: Scope, path: str) -> None:
        """Raise `ForeignRequestError` for a request of a foreign page, or under a foreign host name."""
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        host = headers.get(b"host")
        if host is not None and not self._accepts_host(host):
            raise ForeignRequestError(
                "host_not_allowed",
                f"the host name {_shown(host)} is not accepted: use localhost or an address, or start the server with "
                "--allowed-hosts",
            )
        if not self._accepts_page(scope["method"], path, headers, host or ""):
            raise ForeignRequestError(
                "origin_not_allowed",
                f"requests of web pages from {_shown(headers.get(b'origin', 'other sites'))} are not accepted: start "
                "the server with --allowed-origins",
            )

    def _accepts_host(self, given: str) -> bool:
        if ANY in self.hosts or not (self.hosts or self.is_local):
            return True
        name = _hostname(given)
        return name in {each.lower() for each in self.hosts} or name.endswith(".localhost") or _is_address(name)

    def _accepts_page(self, method: str, path: str, headers: dict[bytes, str], host: str) -> bool:
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", "").lower()
        if ANY in self.origins or origin in self.origins or site in ("same-origin", "none"):
            return True
        if origin is not None:  # older browsers, and pages without TLS, send no `sec-fetch-site`
            return origin.lower().partition("://")[2] == host.lower() and site in ("", "same-site")
        return site != "cross-site" or (path == PAGE and method in ("GET", "HEAD"))


def is_loopback(host: str) -> bool:
    """Whether a server that listens on *host* is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_origin(text: str) -> bool:
    parts = urlsplit(text)
    return bool(parts.scheme and parts.netloc) and text == f"{parts.scheme}://{parts.netloc}"


def _hostname(given: str) -> str:
    """Return the name or address in a `host` header, without its port; empty if malformed."""
    try:
        return (urlsplit(f"//{given}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


def _shown(text: str) -> str:
    return repr(text[:LONGEST_SHOWN])
