# SPDX-License-Identifier: Apache-2.0
"""An authority for one test broker: it certifies the key of the broker, and the keys of its clients. Writes no file."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_DAY: Final = datetime.timedelta(days=1)
_DAYS_VALID: Final = 30
_NAME: Final = "kcoord.testing"
_LOCALHOST: Final = x509.SubjectAlternativeName(
    [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.IPAddress(ipaddress.ip_address("::1")),
    ]
)
SIGNS_CERTIFICATES: Final = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
"""The key usage of an authority. Clients that check strictly, as Python 3.13 does by default, want it."""


@dataclass(slots=True, frozen=True)
class IssuedKey:
    """A private key, and its certificate with that of the authority, as PEM."""

    key_pem: str = field(repr=False)
    chain_pem: str


class Authority:
    """A new authority. Nobody else has its key, so a broker and its clients know each other by it."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_NAME, self._key, ca=True).add_extension(SIGNS_CERTIFICATES, critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.pem = self._certificate.public_bytes(Encoding.PEM).decode()
        self._clients: dict[str, IssuedKey] = {}

    def new_server(self) -> IssuedKey:
        """Returns a new key with a certificate for this machine."""
        return self._issue("localhost", _LOCALHOST)

    def client(self, name: str) -> IssuedKey:
        """Returns the key of a client whose certificate has the subject CN=name: a new key for a new name."""
        if name not in self._clients:
            self._clients[name] = self._issue(name)
        return self._clients[name]

    def _issue(self, subject: str, names: x509.SubjectAlternativeName | None = None) -> IssuedKey:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(subject, key, ca=False)
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        return IssuedKey(key_pem, certificate + self.pem)

    def _builder(self, subject: str, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> x509.CertificateBuilder:
        def name_of(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.datetime.now(datetime.UTC)
        # The same clients want both key identifiers.
        own, issuers = x509.SubjectKeyIdentifier, x509.AuthorityKeyIdentifier
        return (
            x509.CertificateBuilder()
            .subject_name(name_of(subject))
            .issuer_name(name_of(_NAME))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAYS_VALID * _DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(own.from_public_key(key.public_key()), critical=False)
            .add_extension(issuers.from_issuer_public_key(self._key.public_key()), critical=False)
        )
