"""API keys in HTTP headers and gRPC metadata."""

import base64
import hashlib
import hmac
from collections.abc import Iterable
from contextvars import ContextVar

from protos.errors import ConfigError

SCHEME = "bearer"
TENANT_PREFIX = b"tenant:"
LONGEST = 4096
"""Longer header values are truncated: no key is that long."""


TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Identifies the API key of the current request. Separates caches, together with the request's `cache_salt`."""


class Keys:
    """The accepted keys; without any, every request is accepted.

    Only digests are kept, so that neither a dump of the configuration nor the time of a comparison reveals a key.

    Raises:
        ConfigError: a key is empty, or could not be sent in a header.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(_checked(key)) for key in keys)

    def __repr__(self) -> str:
        return f"Keys({len(self._digests)} key(s))"

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: str | None) -> str:
        """Return a digest that identifies the key in *authorization*; empty if no keys are configured."""
        return hashlib.sha256(TENANT_PREFIX + _digest(bearer(authorization))).hexdigest()[:32] if self._digests else ""

    def accepts(self, authorization: str | None) -> bool:
        """Whether *authorization*, `Bearer KEY`, has an accepted key. Takes equal time for keys of equal length."""
        if not self._digests:
            return True
        given = _digest(bearer(authorization))
        return sum(hmac.compare_digest(given, each) for each in self._digests) > 0  # every key is compared

    def accepts_password(self, authorization: str | None) -> bool:
        """Whether *authorization*, `Basic ...` as browsers send it, has an accepted key as password."""
        return self.accepts(f"{SCHEME} {_password(authorization)}")


def _password(authorization: str | None) -> str:
    scheme, _, encoded = (authorization or "")[:LONGEST].partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(encoded.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def bearer(authorization: str | None) -> str:
    """Return the key in *authorization*, empty if there is none."""
    scheme, _, key = (authorization or "")[:LONGEST].partition(" ")
    return key.strip() if scheme.lower() == SCHEME else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _checked(key: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or key != key.strip() or len(key) > LONGEST // 2:
        raise ConfigError(
            f"api_key must be 1 to {LONGEST // 2} printable ASCII characters without spaces around them, "
            f"got {len(key)} character(s)"
        )
    return key
