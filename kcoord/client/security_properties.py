# SPDX-License-Identifier: Apache-2.0
"""TLS and SASL from Kafka's properties: `security.protocol`, and the `ssl.*` and `sasl.*` keys.

Keys and certificates are those that a broker reads: PEM and PKCS12. The mechanisms are PLAIN, SCRAM and OAUTHBEARER. A
property that this client does not support raises ConfigException. So a connection is never less secure than the
properties say.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from kcoord.client.errors import ConfigException
from kcoord.client.results import error_of
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

if TYPE_CHECKING:
    from kcoord.client.oauthbearer import BearerLogin

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
BEARER_KEYS: Final = frozenset(
    {
        "sasl.login.callback.handler.class",
        "sasl.login.connect.timeout.ms",
        "sasl.login.read.timeout.ms",
        "sasl.login.refresh.buffer.seconds",
        "sasl.login.refresh.min.period.seconds",
        "sasl.login.refresh.window.factor",
        "sasl.login.refresh.window.jitter",
        "sasl.login.retry.backoff.max.ms",
        "sasl.login.retry.backoff.ms",
        "sasl.oauthbearer.client.credentials.client.id",
        "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.header.urlencode",
        "sasl.oauthbearer.jwt.retriever.class",
        "sasl.oauthbearer.jwt.validator.class",
        "sasl.oauthbearer.scope",
        "sasl.oauthbearer.token.endpoint.url",
    }
)
"""The further keys of OAUTHBEARER."""
_PROTOCOLS: Final = (PLAINTEXT, "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_PLAIN: Final = "PLAIN"
_OAUTHBEARER: Final = "OAUTHBEARER"
_JAVAS_MECHANISM: Final = "GSSAPI"
_NONCE_BYTES: Final = 18

Send: TypeAlias = Callable[[bytes], Awaitable[bytes]]
"""Sends one message of the mechanism. Returns the broker's message, or raises its error."""


def security_of(properties: Mapping[str, str]) -> Security | None:
    """Returns the security that the properties ask for, None for PLAINTEXT."""
    protocol = properties.get(SECURITY_PROTOCOL, PLAINTEXT).upper()
    if protocol not in _PROTOCOLS:
        raise ConfigException(f"{SECURITY_PROTOCOL}: {protocol!r} is not one of {', '.join(_PROTOCOLS)}")
    if protocol == PLAINTEXT:
        return None
    context = _ssl_context(properties) if protocol.endswith("SSL") else None
    return PropertiesSecurity(context, _login_of(properties) if protocol.startswith("SASL") else None)


class _PasswordLogin:
    """A login with user and password, by PLAIN or SCRAM. With `is_token` they are those of a delegation token."""

    def __init__(self, mechanism: str, user: str, password: str, *, is_token: bool = False) -> None:
        self.mechanism = mechanism
        self._user = user
        self._password = password
        self._is_token = is_token

    async def log_in(self, send: Send) -> None:
        if self.mechanism == _PLAIN:
            await send(f"\0{self._user}\0{self._password}".encode())
            return
        nonce = secrets.token_urlsafe(_NONCE_BYTES)
        exchange = ScramExchange(self.mechanism, self._user, self._password, nonce, is_token=self._is_token)
        try:
            exchange.verify(await send(exchange.final(await send(exchange.first()))))
        except ScramError as error:
            raise KafkaError(Errors.SASL_AUTHENTICATION_FAILED, f"{self.mechanism}: {error}") from error


class PropertiesSecurity:
    """A `Security` with TLS if there is a context, and with SASL if there is a login."""

    def __init__(self, context: ssl.SSLContext | None, login: _PasswordLogin | BearerLogin | None) -> None:
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
            text = f"sasl.mechanism={login.mechanism}: the broker offers {offered}"
            raise KafkaError(error_of(shake.error_code), text)
        await login.log_in(partial(_exchange, sender))


async def _exchange(sender: RequestSender, message: bytes) -> bytes:
    """Sends one message of the mechanism. Returns the broker's message."""
    answer = await sender.call(SaslAuthenticateRequest(auth_bytes=message), SaslAuthenticateResponse)
    if answer.error_code:
        raise KafkaError(error_of(answer.error_code), answer.error_message)
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


def _login_of(properties: Mapping[str, str]) -> _PasswordLogin | BearerLogin:
    mechanism = properties.get("sasl.mechanism", _JAVAS_MECHANISM)
    mechanisms = (_PLAIN, *HASHES, _OAUTHBEARER)
    if mechanism not in mechanisms:
        raise ConfigException(f"sasl.mechanism: {mechanism!r} is not one of {', '.join(mechanisms)}")
    try:
        module = parse_login_module(properties.get("sasl.jaas.config", ""))
    except JaasError as error:
        raise ConfigException(f"sasl.jaas.config: {error}") from error
    if mechanism == _OAUTHBEARER:
        # Most clients do not load what tokens need.
        from kcoord.client.oauthbearer import bearer_login_of

        return bearer_login_of(properties, module)
    options = module.options
    if "username" not in options or "password" not in options:
        raise ConfigException('sasl.jaas.config: must have a login module with username="..." and password="..."')
    is_token = options.get("tokenauth", "").lower() == "true"
    if is_token and mechanism == _PLAIN:
        raise ConfigException(
            'sasl.jaas.config: tokenauth="true" needs a mechanism of SCRAM, but sasl.mechanism is PLAIN'
        )
    return _PasswordLogin(mechanism, options["username"], options["password"], is_token=is_token)


def is_used(key: str, properties: Mapping[str, str]) -> bool:
    """Returns whether `security_of` uses a key of these properties."""
    return key in USED_KEYS or (key in BEARER_KEYS and properties.get("sasl.mechanism") == _OAUTHBEARER)
