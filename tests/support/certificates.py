# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests: an authority, and the keys that it certifies, as files in the forms that Kafka reads."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)
from cryptography.x509.oid import NameOID

from kcoord.testing.certificates import SIGNS_CERTIFICATES

DAYS = datetime.timedelta(days=1)


def common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _encryption(password: str | None) -> KeySerializationEncryption:
    return NoEncryption() if password is None else BestAvailableEncryption(password.encode())


@dataclass(frozen=True)
class Identity:
    """A private key with its certificate and that of its authority."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    authority: x509.Certificate

    def key_pem(self, password: str | None = None) -> str:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, _encryption(password)).decode()

    @property
    def chain_pem(self) -> str:
        return "".join(part.public_bytes(Encoding.PEM).decode() for part in (self.certificate, self.authority))

    def write_pem(self, path: Path, password: str | None = None) -> str:
        path.write_text(self.key_pem(password) + self.chain_pem)
        return str(path)

    def write_pkcs12(self, path: Path, password: str) -> str:
        data = pkcs12.serialize_key_and_certificates(
            b"broker", self.key, self.certificate, [self.authority], _encryption(password)
        )
        path.write_bytes(data)
        return str(path)


class Authority:
    """A certificate authority of its own key."""

    def __init__(self, name: str = "Test Authority") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(common_name(name), self.key, common_name(name))
        self.certificate = builder.add_extension(SIGNS_CERTIFICATES, critical=True).sign(self.key, hashes.SHA256())

    def issue(self, subject: x509.Name | str, *names: str, lifetime: datetime.timedelta = 31 * DAYS) -> Identity:
        """Returns a new key whose certificate has these subject alternative names: hosts and addresses.

        The `lifetime` of the certificate began a day ago.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        name = common_name(subject) if isinstance(subject, str) else subject
        builder = self._builder(name, key, self.certificate.subject, lifetime, ca=False)
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(list(map(_general_name, names))), critical=False
            )
        return Identity(key, builder.sign(self.key, hashes.SHA256()), self.certificate)

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def write_pem(self, path: Path) -> str:
        path.write_text(self.pem)
        return str(path)

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        issuer: x509.Name,
        lifetime: datetime.timedelta = 31 * DAYS,
        *,
        ca: bool = True,
    ) -> x509.CertificateBuilder:
        began = datetime.datetime.now(datetime.UTC) - DAYS
        # Clients that check strictly, as Python 3.13 does by default, want both key identifiers.
        own, issuers = x509.SubjectKeyIdentifier, x509.AuthorityKeyIdentifier
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(began)
            .not_valid_after(began + lifetime)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(own.from_public_key(key.public_key()), critical=False)
            .add_extension(issuers.from_issuer_public_key(self.key.public_key()), critical=False)
        )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
