"""API keys: who may ask at all. Used for HTTP headers and gRPC metadata alike."""

import base64
import hashlib
import hmac
from collections.abc import Iterable
from contextvars import ContextVar

from protos.errors import ConfigError

SCHEME = "bearer"
TENANT_PREFIX = b"tenant:"
LONGEST = 4096
"""Longer values are refused unread: no key is that long."""


TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Whose request is being answered: part of what separates caches, beside the request's own `cache_salt`."""


class Keys:
    """The keys that are accepted; without any, everybody is.

    Only digests are kept, so that keys show neither in a dump of the configuration nor by the time a comparison takes.

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
        """Return what stands for the key in *authorization* and tells nothing of it; empty where no keys are needed."""
        return hashlib.sha256(TENANT_PREFIX + _digest(bearer(authorization))).hexdigest()[:32] if self._digests else ""

    def accepts(self, authorization: str | None) -> bool:
        """Whether *authorization*, `Bearer KEY`, opens this server. Takes as long for every key of a length."""
        if not self._digests:
            return True
        given = _digest(bearer(authorization))
        return sum(hmac.compare_digest(given, each) for each in self._digests) > 0  # every key is compared

    def accepts_password(self, authorization: str | None) -> bool:
        """Whether *authorization*, `Basic ...` as browsers send it, has a key as its password."""
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
    """Return the key in *authorization*, empty for none."""
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
