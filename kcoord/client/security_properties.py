# SPDX-License-Identifier: Apache-2.0
"""TLS and SASL from Kafka's properties: `security.protocol`, and the `ssl.*` and `sasl.*` keys.

Keys and certificates are those that a broker reads: PEM and PKCS12. The mechanisms are PLAIN and SCRAM. A property that
this client does not support raises ConfigException. So a connection is never less secure than the properties say.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Mapping
from typing import Final

from kcoord.client.errors import ConfigException
from kcoord.client.scram import ScramExchange
from kcoord.client.security import RequestSender, Security
from kcoord.security.jaas import JaasError, parse_login_module
from kcoord.security.scram_messages import HASHES, ScramError
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
        "ssl.cipher.suites",
        "ssl.enabled.protocols",
        "ssl.endpoint.identification.algorithm",
        "ssl.key.password",
        "ssl.keystore.certificate.chain",
        "ssl.keystore.key",
        "ssl.keystore.location",
        "ssl.keystore.password",
        "ssl.keystore.type",
        "ssl.truststore.certificates",
        "ssl.truststore.location",
        "ssl.truststore.password",
        "ssl.truststore.type",
        "sasl.mechanism",
        "sasl.jaas.config",
    }
)
_PROTOCOLS: Final = (PLAINTEXT, "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_PLAIN: Final = "PLAIN"
_JAVAS_MECHANISM: Final = "GSSAPI"
_NONCE_BYTES: Final = 18


def security_of(properties: Mapping[str, str]) -> Security | None:
    """Returns the security that the properties ask for, None for PLAINTEXT."""
    protocol = properties.get(SECURITY_PROTOCOL, PLAINTEXT).upper()
    if protocol not in _PROTOCOLS:
        raise ConfigException(f"{SECURITY_PROTOCOL}: {protocol!r} is not one of {', '.join(_PROTOCOLS)}")
    if protocol == PLAINTEXT:
        return None
    context = _ssl_context(properties) if protocol.endswith("SSL") else None
    return PropertiesSecurity(context, _login_of(properties) if protocol.startswith("SASL") else None)


class _Login:
    """A user and password, and the SASL mechanism to use."""

    def __init__(self, mechanism: str, user: str, password: str) -> None:
        self.mechanism = mechanism
        self.user = user
        self.password = password


class PropertiesSecurity:
    """A `Security` with TLS if there is a context, and with SASL if there is a login."""

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
            await _exchange(sender, f"\0{login.user}\0{login.password}".encode())
            return
        nonce = secrets.token_urlsafe(_NONCE_BYTES)
        exchange = ScramExchange(login.mechanism, login.user, login.password, nonce)
        try:
            exchange.verify(await _exchange(sender, exchange.final(await _exchange(sender, exchange.first()))))
        except ScramError as error:
            raise KafkaError(Errors.SASL_AUTHENTICATION_FAILED, f"{login.mechanism}: {error}") from error


async def _exchange(sender: RequestSender, message: bytes) -> bytes:
    """Sends one message of the mechanism. Returns the broker's message."""
    answer = await sender.call(SaslAuthenticateRequest(auth_bytes=message), SaslAuthenticateResponse)
    if answer.error_code:
        raise KafkaError(Errors(answer.error_code), answer.error_message)
    return answer.auth_bytes


# --- TLS --------------------------------------------------------------------------------------------------------------


def _ssl_context(properties: Mapping[str, str]) -> ssl.SSLContext:
    # Most clients have no TLS, and do not load what certificates need.
    from kcoord.security.tls import TlsConfigError, TlsSettings, client_context

    try:
        return client_context(TlsSettings(properties, {}))
    except TlsConfigError as error:
        raise ConfigException(str(error)) from error


# --- SASL -------------------------------------------------------------------------------------------------------------


def _login_of(properties: Mapping[str, str]) -> _Login:
    mechanism = properties.get("sasl.mechanism", _JAVAS_MECHANISM)
    if mechanism != _PLAIN and mechanism not in HASHES:
        raise ConfigException(f"sasl.mechanism: {mechanism!r} is not one of {', '.join((_PLAIN, *HASHES))}")
    try:
        options = parse_login_module(properties.get("sasl.jaas.config", "")).options
    except JaasError as error:
        raise ConfigException(f"sasl.jaas.config: {error}") from error
    if "username" not in options or "password" not in options:
        raise ConfigException('sasl.jaas.config: must have a login module with username="..." and password="..."')
    return _Login(mechanism, options["username"], options["password"])
