"""Certificates and keys of a server, checked before the engine is loaded."""

import base64
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protos.errors import ConfigError

EDWARDS_KEYS = (bytes.fromhex("302a300506032b6570032100"), bytes.fromhex("3043300506032b6571033a00"))
"""How the public keys of Ed25519 and Ed448 begin in a certificate (RFC 8410)."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: a certificate chain, its private key, and the CA of the certificates that clients must present."""

    cert: str
    key: str
    client_ca: str | None = None

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Return the contents: certificate chain, key, and client CA or None."""
        client_ca = None if self.client_ca is None else Path(self.client_ca).read_bytes()
        return Path(self.cert).read_bytes(), Path(self.key).read_bytes(), client_ca


def tls_files(
    names: tuple[str, str], cert: str | None, key: str | None, client_ca: str | None = None
) -> TlsFiles | None:
    """Return the TLS files, checked; None if none is given. *names* are the options, for error messages.

    Raises:
        ConfigError: a file is missing or cannot be read, or the key does not match the certificate.
    """
    if cert is None or key is None:
        if (cert, key, client_ca) != (None, None, None):
            raise ConfigError(f"TLS needs both {names[0]} and {names[1]}: the server's certificate and its private key")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # The empty password prevents a prompt on the terminal for an encrypted key.
    _check(f"{names[0]} {cert} with {names[1]} {key}", lambda: context.load_cert_chain(cert, key, lambda: b""))
    if client_ca is not None:
        _check(f"the client certificate authority {client_ca}", lambda: context.load_verify_locations(client_ca))
    return TlsFiles(cert, key, client_ca)


def check_for_grpc(files: TlsFiles) -> None:
    """Raise `ConfigError` for a key that OpenSSL, and so HTTPS, takes, but no client of gRPC."""
    _, _, own = Path(files.cert).read_bytes().partition(b"-----BEGIN CERTIFICATE-----")
    certificate = base64.b64decode(own.partition(b"-----END")[0])
    if any(key in certificate for key in EDWARDS_KEYS):
        raise ConfigError(f"gRPC clients take no Ed25519 or Ed448 key: {files.cert} needs one of ECDSA or RSA")


def _check(what: str, load: Callable[[], None]) -> None:
    try:
        load()
    except OSError as error:  # includes ssl.SSLError
        reason = error.strerror or getattr(error, "reason", None) or type(error).__name__
        raise ConfigError(f"cannot use {what}: {reason}") from None
