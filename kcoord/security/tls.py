# SPDX-License-Identifier: Apache-2.0
"""TLS contexts out of Kafka's ssl.* settings: keys, certificates, versions, cipher suites, authentication of clients.

Keys and certificates are PEM (in files or in the settings themselves) or PKCS12. JKS is not read: no maintained library
reads it, and Java's keytool converts it.
"""

from __future__ import annotations

import os
import re
import secrets
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
    pkcs12,
)

CLIENT_AUTH = {"none": ssl.CERT_NONE, "requested": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_SECRETS = frozenset(
    {
        "ssl.key.password",
        "ssl.keystore.certificate.chain",
        "ssl.keystore.key",
        "ssl.keystore.password",
        "ssl.truststore.certificates",
        "ssl.truststore.password",
    }
)
_STORE_TYPES = ("JKS", "PKCS12", "PEM")
_PREFERRED = frozenset({"TLS_AES_256_GCM_SHA384"})
"""The suite of TLS 1.3 on which a listener agrees with every client that offers it."""
_SUITES_OF_TLS_1_3 = _PREFERRED | {"TLS_AES_128_GCM_SHA256", "TLS_CHACHA20_POLY1305_SHA256"}
_WRONG_KIND = "the private key is of a kind that is not accepted; allowed: RSA, EC, Ed25519, Ed448"
_JKS_MAGIC = b"\xfe\xed\xfe\xed"
_PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z ]+ )?PRIVATE KEY-----.*?-----END ([A-Z ]+ )?PRIVATE KEY-----", re.DOTALL)
_SUITE = re.compile(r"TLS_(?P<exchange>[A-Z_]+?)_WITH_(?P<cipher>[A-Z0-9_]+?)(?P<cbc>_CBC)?_(?P<hash>SHA[0-9]*)")


SigningKey: TypeAlias = RSAPrivateKey | EllipticCurvePrivateKey | Ed25519PrivateKey | Ed448PrivateKey
"""The kinds of keys that TLS 1.2 and 1.3 accept."""


class TlsConfigError(ValueError):
    """A setting that cannot be used. The text names the key and, unless it is secret, the value."""


@dataclass(slots=True, frozen=True)
class TlsSettings:
    """The values of the ssl.* keys. `names` has the names by which errors call keys that have a prefix."""

    values: Mapping[str, str | Sequence[str] | None] = field(repr=False)
    names: Mapping[str, str]

    def text(self, key: str) -> str | None:
        """Returns the value of a key, None if it is not set or empty."""
        value = self.values.get(key)
        return value if isinstance(value, str) and value else None

    def entries(self, key: str) -> list[str]:
        """Returns the entries of a list."""
        value = self.values.get(key) or ()
        entries = value.split(",") if isinstance(value, str) else value
        return [stripped for entry in entries if (stripped := entry.strip())]

    def error(self, key: str, problem: str) -> TlsConfigError:
        """Returns the error for the value of a key. The values of secrets are not shown."""
        value = self.values.get(key)
        shown = value if value is None or isinstance(value, str) else ",".join(value)
        if shown and key in _SECRETS:
            shown = "[hidden]"
        return TlsConfigError(f"Invalid value {shown} for configuration {self.names.get(key, key)}: {problem}")

    @property
    def files(self) -> list[str]:
        """The files with keys and certificates."""
        return [
            location
            for key in ("ssl.keystore.location", "ssl.truststore.location")
            if (location := self.text(key)) is not None
        ]


@dataclass(slots=True, frozen=True)
class KeyEntry:
    """A private key with its certificate and those of the authorities that issued it."""

    key: SigningKey
    certificate: x509.Certificate
    issuers: Sequence[x509.Certificate]

    @property
    def subject(self) -> x509.Name:
        """The distinguished name of the certificate."""
        return self.certificate.subject

    @property
    def alternative_names(self) -> frozenset[x509.GeneralName]:
        """The subject alternative names of the certificate."""
        try:
            extension = self.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            return frozenset()
        return frozenset(extension.value)


def server_context(settings: TlsSettings, entry: KeyEntry) -> ssl.SSLContext:
    """Returns the context of a listener with this key; raises TlsConfigError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, settings, entry)
    client_auth = settings.text("ssl.client.auth") or "none"
    if client_auth not in CLIENT_AUTH:
        raise settings.error("ssl.client.auth", f"allowed: {', '.join(CLIENT_AUTH)}")
    context.verify_mode = CLIENT_AUTH[client_auth]
    if context.verify_mode is not ssl.CERT_NONE:
        _trust(context, settings, ssl.Purpose.CLIENT_AUTH)
    return context


def client_context(settings: TlsSettings) -> ssl.SSLContext:
    """Returns the context of a client; raises TlsConfigError.

    Names are checked against certificates unless ssl.endpoint.identification.algorithm is empty.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, settings, load_key_entry(settings))
    algorithm = settings.values.get("ssl.endpoint.identification.algorithm", "https")
    if algorithm not in ("https", "HTTPS", "", None):
        raise settings.error("ssl.endpoint.identification.algorithm", "allowed: https, or empty")
    context.check_hostname = bool(algorithm)
    _trust(context, settings, ssl.Purpose.SERVER_AUTH)
    return context


def _context(protocol: int, settings: TlsSettings, entry: KeyEntry | None) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    versions = _enabled_versions(settings)
    context.minimum_version, context.maximum_version = min(versions), max(versions)
    _set_cipher_suites(context, settings)
    if entry is not None:
        try:
            _load_cert_chain(context, entry)
        except OSError as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            key = "ssl.keystore.location" if settings.text("ssl.keystore.location") else "ssl.keystore.key"
            raise settings.error(key, f"key and certificate cannot be used together: {reason}") from None
    return context


def _enabled_versions(settings: TlsSettings) -> list[ssl.TLSVersion]:
    names = settings.entries("ssl.enabled.protocols") or list(_VERSIONS)
    unknown = [name for name in names if name not in _VERSIONS]
    if unknown:
        allowed = f"{unknown[0]} is not offered; allowed: {', '.join(_VERSIONS)}"
        raise settings.error("ssl.enabled.protocols", allowed)
    return [_VERSIONS[name] for name in names]


# --- cipher suites ----------------------------------------------------------------------------------------------------


def _set_cipher_suites(context: ssl.SSLContext, settings: TlsSettings) -> None:
    """Restricts the suites of TLS 1.2; without a suite of TLS 1.3, that version is not offered.

    Python cannot restrict the suites of TLS 1.3. A listener checks them after the handshake (`is_suite_allowed`), and a
    client allows all of them or none.
    """
    names = settings.entries("ssl.cipher.suites")
    if not names:
        return
    available = {cipher["name"] for cipher in ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).get_ciphers()}
    older: list[str] = []
    for name in names:
        openssl_name = openssl_suite(name)
        if not name.startswith("TLS_") or openssl_name not in available:
            problem = f"the TLS library does not offer {name}; allowed: names such as TLS_AES_256_GCM_SHA384"
            raise settings.error("ssl.cipher.suites", problem)
        if openssl_name != name:
            older.append(openssl_name)
    if older:
        context.set_ciphers(":".join(older))
    newer = {name for name in names if openssl_suite(name) == name}
    if newer and not newer >= (_PREFERRED if context.protocol == ssl.PROTOCOL_TLS_SERVER else _SUITES_OF_TLS_1_3):
        problem = "the TLS library offers the suites of TLS 1.3 together; name all of them, or none"
        raise settings.error("ssl.cipher.suites", problem)
    if len(older) == len(names):
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    elif not older:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    if context.minimum_version > context.maximum_version:
        problem = "no suite is of a version in ssl.enabled.protocols"
        raise settings.error("ssl.cipher.suites", problem)


def openssl_suite(name: str) -> str:
    """Returns OpenSSL's name of a suite that Java calls `name`. Suites of TLS 1.3 have one name."""
    match = _SUITE.fullmatch(name)
    if match is None:
        return name
    exchange = "" if match["exchange"] == "RSA" else match["exchange"].replace("_", "-") + "-"
    cipher = re.sub(r"AES_([0-9]+)", r"AES\1", match["cipher"]).replace("_", "-")
    mac = "" if cipher == "CHACHA20-POLY1305" else f"-{match['hash']}"
    return f"{exchange}{cipher}{mac}"


def is_suite_allowed(settings: TlsSettings, openssl_name: str) -> bool:
    """Returns whether ssl.cipher.suites, if it is set, has the suite that a handshake agreed on."""
    names = settings.entries("ssl.cipher.suites")
    return not names or openssl_name in map(openssl_suite, names)


# --- keys and certificates --------------------------------------------------------------------------------------------


def load_key_entry(settings: TlsSettings) -> KeyEntry | None:
    """Returns the key of ssl.keystore.*, None if none is configured; raises TlsConfigError."""
    store_type = _store_type(settings, "ssl.keystore.type", settings.text("ssl.keystore.type"))
    location = settings.text("ssl.keystore.location")
    if store_type == "PEM":
        return _pem_key_entry(settings, location)
    for key in ("ssl.keystore.key", "ssl.keystore.certificate.chain"):
        if settings.text(key) is not None:
            raise settings.error(key, "it needs ssl.keystore.type=PEM")
    if location is None:
        return None
    store = _load_pkcs12(settings, "keystore", location, settings.text("ssl.keystore.password"))
    if store.key is None or store.cert is None:
        raise settings.error("ssl.keystore.location", "the file has no private key with a certificate")
    if not isinstance(store.key, SigningKey):
        raise settings.error("ssl.keystore.location", _WRONG_KIND)
    return KeyEntry(store.key, store.cert.certificate, [issuer.certificate for issuer in store.additional_certs])


def _pem_key_entry(settings: TlsSettings, location: str | None) -> KeyEntry | None:
    if settings.text("ssl.keystore.password") is not None:
        problem = "a keystore in PEM form has no password, only its key may have one: ssl.key.password"
        raise settings.error("ssl.keystore.password", problem)
    key, chain = settings.text("ssl.keystore.key"), settings.text("ssl.keystore.certificate.chain")
    if location is not None:
        if key is not None or chain is not None:
            problem = "it cannot be set beside ssl.keystore.key and ssl.keystore.certificate.chain"
            raise settings.error("ssl.keystore.location", problem)
        name, pem = "ssl.keystore.location", _read(settings, "ssl.keystore.location", location)
        certificates = _pem_certificates(settings, name, pem)
    elif key is None and chain is None:
        return None
    elif key is None or chain is None:
        missing = "ssl.keystore.key" if key is None else "ssl.keystore.certificate.chain"
        raise settings.error(missing, "key and certificate chain must be set together")
    else:
        name, pem = "ssl.keystore.key", key.encode()
        certificates = _pem_certificates(settings, "ssl.keystore.certificate.chain", chain.encode())
    key_pem = _PRIVATE_KEY.search(pem)
    if key_pem is None:
        raise settings.error(name, "there is no private key in PEM form")
    password = settings.text("ssl.key.password")
    try:
        private_key = load_pem_private_key(key_pem[0], None if password is None else password.encode())
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        # The library's texts say what is wrong with a key or a password, and show neither.
        raise settings.error(name, f"the private key cannot be read with this ssl.key.password: {error}") from None
    if not isinstance(private_key, SigningKey):
        raise settings.error(name, _WRONG_KIND)
    return KeyEntry(private_key, certificates[0], certificates[1:])


def _trust(context: ssl.SSLContext, settings: TlsSettings, purpose: ssl.Purpose) -> None:
    """Trusts the authorities of ssl.truststore.*, or those of the system if none are configured."""
    store_type = _store_type(settings, "ssl.truststore.type", settings.text("ssl.truststore.type"))
    location, pem = settings.text("ssl.truststore.location"), settings.text("ssl.truststore.certificates")
    if pem is not None and (store_type != "PEM" or location is not None):
        problem = "it needs ssl.truststore.type=PEM, and no ssl.truststore.location"
        raise settings.error("ssl.truststore.certificates", problem)
    if location is None and pem is None:
        context.load_default_certs(purpose)
        return
    if pem is not None:
        certificates = _pem_certificates(settings, "ssl.truststore.certificates", pem.encode())
    elif store_type == "PEM":
        assert location is not None
        data = _read(settings, "ssl.truststore.location", location)
        certificates = _pem_certificates(settings, "ssl.truststore.location", data)
    else:
        assert location is not None
        store = _load_pkcs12(settings, "truststore", location, settings.text("ssl.truststore.password"))
        certificates = [entry.certificate for entry in store.additional_certs]
        if not certificates:
            raise settings.error("ssl.truststore.location", "the file has no certificates")
    context.load_verify_locations(cadata=b"".join(entry.public_bytes(Encoding.DER) for entry in certificates))


def _store_type(settings: TlsSettings, key: str, value: str | None) -> str:
    store_type = (value or "JKS").upper()
    if store_type not in _STORE_TYPES:
        raise settings.error(key, f"allowed: {', '.join(_STORE_TYPES)}")
    return store_type


def _read(settings: TlsSettings, key: str, location: str) -> bytes:
    try:
        with open(location, "rb") as file:
            return file.read()
    except OSError as error:
        raise settings.error(key, f"the file cannot be read: {error.strerror}") from None


def _load_pkcs12(
    settings: TlsSettings, store: str, location: str, password: str | None
) -> pkcs12.PKCS12KeyAndCertificates:
    """Reads a PKCS12 file. Java's type JKS reads such a file too."""
    key = f"ssl.{store}.location"
    data = _read(settings, key, location)
    if data.startswith(_JKS_MAGIC):
        convert = f"keytool -importkeystore -srckeystore {location} -destkeystore {location}.p12 -deststoretype PKCS12"
        raise settings.error(key, f"the file is in Java's JKS format, which is not read; convert it: {convert}")
    if data.lstrip().startswith(b"-----BEGIN"):
        raise settings.error(key, f"the file is in PEM form; set ssl.{store}.type=PEM")
    try:
        return pkcs12.load_pkcs12(data, None if password is None else password.encode())
    except (ValueError, UnsupportedAlgorithm):
        problem = f"it is no PKCS12 file, or ssl.{store}.password is not its password"
        raise settings.error(key, problem) from None


def _pem_certificates(settings: TlsSettings, key: str, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise settings.error(key, "there is no certificate in PEM form") from None


def _load_cert_chain(context: ssl.SSLContext, entry: KeyEntry) -> None:
    """Gives a key to a context, which reads keys from files only.

    The file is private, the key in it is encrypted with a random password, and the file is deleted at once.
    """
    password = secrets.token_bytes(32).hex().encode()
    key = entry.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
    chain = [entry.certificate, *entry.issuers]
    handle, path = tempfile.mkstemp(prefix="kcoord-tls-")
    try:
        with open(handle, "wb") as file:
            file.write(key + b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain))
        context.load_cert_chain(path, password=password)
    finally:
        os.unlink(path)
