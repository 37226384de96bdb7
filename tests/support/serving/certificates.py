"""Certificates for tests: an authority and its certificates."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Signed:
    """PEM files of one certificate and its key."""

    cert: Path
    key: Path

    @property
    def pair(self) -> tuple[bytes, bytes]:
        """Key and chain, as grpc takes them."""
        return self.key.read_bytes(), self.cert.read_bytes()


class Authority:
    """A certificate authority for the loopback, in *folder*."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        issued = self._builder(name, self._key.public_key())
        issued = issued.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._certificate = issued.sign(self._key, hashes.SHA256())
        self.cert = folder / "ca.pem"
        self.cert.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, key: Key | None = None) -> Signed:
        """Return a certificate for *name* at the loopback, and its key: *key*, or a new one."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        here = x509.SubjectAlternativeName(
            [
                x509.DNSName("localhost"),
                x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            ]
        )
        made = self._builder(name, key.public_key()).add_extension(here, critical=False)
        signed = Signed(self._folder / f"{name}.pem", self._folder / f"{name}-key.pem")
        signed.cert.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        signed.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return signed

    def _builder(self, name: str, key: PublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self._name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
