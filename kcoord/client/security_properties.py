# SPDX-License-Identifier: Apache-2.0
"""TLS and SASL by Kafka's properties: `security.protocol`, and the `ssl.*` and `sasl.*` keys that go with it.

Certificates are PEM (`ssl.truststore.type=PEM`), since Java's own formats cannot be read here. Mechanisms are PLAIN and
SCRAM. What cannot be done is a ConfigException: a connection is never less secure than the properties say.
"""

from __future__ import annotations

import re
import secrets
import ssl
from collections.abc import Mapping
from typing import Final

from kcoord.client.errors import ConfigException
from kcoord.client.scram import MECHANISMS, ScramError, ScramExchange
from kcoord.client.security import RequestSender, Security
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

SECURITY_PROTOCOL: Final = "security.protocol"
PLAINTEXT: Final = "PLAINTEXT"
USED_KEYS: Final = frozenset(
    {
        "ssl.truststore.type",
        "ssl.truststore.location",
        "ssl.truststore.certificates",
        "ssl.keystore.type",
        "ssl.keystore.location",
        "ssl.key.password",
        "ssl.endpoint.identification.algorithm",
        "ssl.enabled.protocols",
        "sasl.mechanism",
        "sasl.jaas.config",
    }
)
_PROTOCOLS: Final = (PLAINTEXT, "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_PLAIN: Final = "PLAIN"
_PEM: Final = "PEM"
_JAVAS_STORE_TYPE: Final = "JKS"
_JAVAS_MECHANISM: Final = "GSSAPI"
_TLS_VERSIONS: Final = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_JAAS_OPTION: Final = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_NONCE_BYTES: Final = 18


def security_of(properties: Mapping[str, str]) -> Security | None:
    """What the properties ask for, None for PLAINTEXT."""
    protocol = properties.get(SECURITY_PROTOCOL, PLAINTEXT).upper()
    if protocol not in _PROTOCOLS:
        raise ConfigException(f"{SECURITY_PROTOCOL}: {protocol!r} is none of {', '.join(_PROTOCOLS)}")
    if protocol == PLAINTEXT:
        return None
    context = _ssl_context(properties) if protocol.endswith("SSL") else None
    return PropertiesSecurity(context, _login_of(properties) if protocol.startswith("SASL") else None)


class _Login:
    """A user by one of the mechanisms."""

    def __init__(self, mechanism: str, user: str, password: str) -> None:
        self.mechanism = mechanism
        self.user = user
        self.password = password


class PropertiesSecurity:
    """A Security for TLS with this context, if there is one, and for this login, if there is one."""

    def __init__(self, context: ssl.SSLContext | None, login: _Login | None) -> None:
        self._context = context
        self._login = login

    def ssl_context(self) -> ssl.SSLContext | None:
        return self._context

    async def authenticate(self, sender: RequestSender) -> None:
        login = self._login
        if login is None:
            return
        shake = await sender.call(SaslHandshakeRequest(mechanism=login.mechanism), SaslHandshakeResponse)
        if shake.error_code:
            offered = ", ".join(shake.mechanisms)
            raise KafkaError(Errors(shake.error_code), f"sasl.mechanism={login.mechanism}: the broker offers {offered}")
        if login.mechanism == _PLAIN:
            await _say(sender, f"\0{login.user}\0{login.password}".encode())
            return
        nonce = secrets.token_urlsafe(_NONCE_BYTES)
        exchange = ScramExchange(login.mechanism, login.user, login.password, nonce)
        try:
            exchange.verify(await _say(sender, exchange.final(await _say(sender, exchange.first()))))
        except ScramError as error:
            raise KafkaError(Errors.SASL_AUTHENTICATION_FAILED, f"{login.mechanism}: {error}") from error


async def _say(sender: RequestSender, message: bytes) -> bytes:
    """Returns the broker's answer to one message of the mechanism."""
    answer = await sender.call(SaslAuthenticateRequest(auth_bytes=message), SaslAuthenticateResponse)
    if answer.error_code:
        raise KafkaError(Errors(answer.error_code), answer.error_message)
    return answer.auth_bytes


# --- TLS --------------------------------------------------------------------------------------------------------------


def _ssl_context(properties: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    location, certificates = properties.get("ssl.truststore.location"), properties.get("ssl.truststore.certificates")
    if location or certificates:
        _require_pem(properties, "truststore")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cafile=location or None, cadata=certificates or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigException(f"ssl.truststore.location={location}: {error}") from error
    _load_key(context, properties)
    if not properties.get("ssl.endpoint.identification.algorithm", "https").strip():
        context.check_hostname = False
    versions = [name.strip() for name in properties.get("ssl.enabled.protocols", "").split(",") if name.strip()]
    if versions:
        unknown = [name for name in versions if name not in _TLS_VERSIONS]
        if unknown:
            raise ConfigException(f"ssl.enabled.protocols: {unknown[0]!r} is none of {', '.join(_TLS_VERSIONS)}")
        context.minimum_version = min(_TLS_VERSIONS[name] for name in versions)
        context.maximum_version = max(_TLS_VERSIONS[name] for name in versions)
    return context


def _load_key(context: ssl.SSLContext, properties: Mapping[str, str]) -> None:
    """The client's own certificate, if the broker is to know the client by it."""
    if properties.get("ssl.keystore.key") or properties.get("ssl.keystore.certificate.chain"):
        raise ConfigException("ssl.keystore.key: give a PEM file instead, ssl.keystore.location")
    location = properties.get("ssl.keystore.location")
    if not location:
        return
    _require_pem(properties, "keystore")
    try:
        context.load_cert_chain(location, password=properties.get("ssl.key.password") or "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigException(f"ssl.keystore.location={location}: {error}") from error


def _require_pem(properties: Mapping[str, str], store: str) -> None:
    key = f"ssl.{store}.type"
    kind = properties.get(key, _JAVAS_STORE_TYPE)
    if kind.upper() != _PEM:
        raise ConfigException(f"{key}={kind} cannot be read here: write the certificates as PEM, and set {key}=PEM")


# --- SASL -------------------------------------------------------------------------------------------------------------


def _login_of(properties: Mapping[str, str]) -> _Login:
    mechanism = properties.get("sasl.mechanism", _JAVAS_MECHANISM)
    if mechanism != _PLAIN and mechanism not in MECHANISMS:
        raise ConfigException(f"sasl.mechanism: {mechanism!r} is none of {', '.join((_PLAIN, *MECHANISMS))}")
    jaas = properties.get("sasl.jaas.config", "")
    options = {name: re.sub(r"\\(.)", r"\1", text) for name, text in _JAAS_OPTION.findall(jaas)}
    if "username" not in options or "password" not in options:
        raise ConfigException('sasl.jaas.config: a login module with username="..." and password="..." is needed')
    return _Login(mechanism, options["username"], options["password"])
