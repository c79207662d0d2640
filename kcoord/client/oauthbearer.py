# SPDX-License-Identifier: Apache-2.0
"""The client's side of OAUTHBEARER (RFC 7628, KIP-768) from Kafka's properties.

Theory of operation. A `BearerLogin` belongs to the settings of a client, and all its connections share one token. Each
authentication asks for the present token:

* Before the refresh time the token is used. Kafka's rule gives that time: sasl.login.refresh.window.factor of the
  token's life plus a random part, sasl.login.refresh.buffer.seconds before its end, at the earliest after
  sasl.login.refresh.min.period.seconds.
* After the refresh time a new token is requested, once for all connections that wait for it, in a thread. If that
  fails, the old token stays in use until its end, and the next request follows RETRY_SECONDS later.
* Without a token, the request is repeated with the backoff of sasl.login.retry.backoff.ms, in all for about
  sasl.login.retry.backoff.max.ms. Then the authentication fails.

No task runs in the background. A connection authenticates again at 85 to 95 % of its session
(`kcoord.client.connection`), and a session ends with its token. With the default settings that is after the refresh
time, so the next session begins with a new token.

The client reads the times of a token but does not check its signature: only the broker has the keys.

An address must be in the environment variable ALLOWED_URLS, or a file in ALLOWED_FILES. They correspond to the system
properties of Kafka's client. The properties themselves cannot allow an address: who may write a client's properties
could otherwise make it read any file, or send its secret to any host.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from joserfc import jws
from joserfc.errors import JoseError

from kcoord.client.errors import ConfigException
from kcoord.client.token_endpoint import TokenEndpoint, TokenRequestError, read_token_file
from kcoord.security.jaas import BEARER_MODULE, LoginModule
from kcoord.security.oauthbearer import ACKNOWLEDGEMENT
from kcoord.security.tls import TlsConfigError, TlsSettings, client_context
from kcoord_protocol.errors import Errors, KafkaError

ALLOWED_URLS: Final = "KCOORD_ORG_APACHE_KAFKA_SASL_OAUTHBEARER_ALLOWED_URLS"
ALLOWED_FILES: Final = "KCOORD_ORG_APACHE_KAFKA_SASL_OAUTHBEARER_ALLOWED_FILES"
"""Environment variables with commas between the entries. A broker has keys of the same names."""

RETRY_SECONDS: Final = 10
_URL: Final = "sasl.oauthbearer.token.endpoint.url"
_DEFAULT_TIMEOUT_MS: Final = 10_000
_EXTENSION: Final = "extension_"
_EXTENSION_NAME: Final = re.compile(r"[A-Za-z]+")
_EXTENSION_VALUE: Final = re.compile(r"[\x21-\x7E \t\r\n]+")
_PACKAGE: Final = "org.apache.kafka.common.security.oauthbearer."
_CLASSES: Final = {
    "sasl.login.callback.handler.class": ("OAuthBearerLoginCallbackHandler", "secured.OAuthBearerLoginCallbackHandler"),
    "sasl.oauthbearer.jwt.retriever.class": (
        "DefaultJwtRetriever",
        "ClientCredentialsJwtRetriever",
        "FileJwtRetriever",
    ),
    "sasl.oauthbearer.jwt.validator.class": ("DefaultJwtValidator", "ClientJwtValidator"),
}
"""The classes that do what this client does."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """A token, and its validity in milliseconds since 1970."""

    text: str = field(repr=False)
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class RefreshRules:
    """The sasl.login.refresh.* and sasl.login.retry.* settings."""

    window_factor: float = 0.8
    window_jitter: float = 0.05
    min_period_ms: int = 60_000
    buffer_ms: int = 300_000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 10_000

    def refresh_ms(self, token: Token, now_ms: int, chance: float) -> int:
        """Returns when to request the next token after this one, which has just come. `chance` is from 0 to 1."""
        share = self.window_factor + self.window_jitter * chance
        if now_ms + self.min_period_ms + self.buffer_ms > token.end_ms:
            return now_ms + int((token.end_ms - now_ms) * share)
        proposed_ms = token.start_ms + int((token.end_ms - token.start_ms) * share)
        return max(min(proposed_ms, token.end_ms - self.buffer_ms), now_ms + self.min_period_ms)


def parse_token(text: str, now_ms: int) -> Token:
    """Returns a JSON Web Token with its times; raises TokenRequestError. A token without `iat` begins now."""
    try:
        claims = json.loads(jws.extract_compact(text.encode("ascii")).payload)
    except (JoseError, ValueError, RecursionError):
        claims = None
    if not isinstance(claims, dict):
        raise TokenRequestError("the token is not a signed JSON Web Token", is_retriable=False)
    start_ms, end_ms = _time_ms(claims.get("iat")), _time_ms(claims.get("exp"))
    if end_ms is None:
        raise TokenRequestError("the claim exp of the token is not a time in seconds", is_retriable=False)
    if end_ms <= now_ms:
        raise TokenRequestError("the token has expired; check the clocks and where it is from", is_retriable=False)
    return Token(text, now_ms if start_ms is None else start_ms, end_ms)


def _time_ms(seconds: object) -> int | None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1 << 43:
        return None
    return int(seconds * 1000)


class BearerLogin:
    """A login with tokens; the module describes when it requests them. `source` blocks and returns a token."""

    mechanism: Final = "OAUTHBEARER"

    def __init__(
        self,
        source: Callable[[], str],
        extensions: Mapping[str, str],
        rules: RefreshRules,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._source = source
        self._extensions = extensions
        self._rules = rules
        self._now_ms = now_ms
        self._chance = chance
        self._token: Token | None = None
        self._refresh_ms = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    async def log_in(self, send: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Authenticates a connection. `send` sends a message, and returns the broker's answer or raises its error."""
        token = await self._present_token()
        fields = "".join(f"{name}={value}\x01" for name, value in self._extensions.items())
        try:
            challenge = await send(f"n,,\x01auth=Bearer {token.text}\x01{fields}\x01".encode())
            if challenge:
                # The broker refuses the token, and answers the acknowledgement of that with an error.
                await send(ACKNOWLEDGEMENT)
                raise KafkaError(Errors.SASL_AUTHENTICATION_FAILED, challenge.decode("utf-8", "replace"))
        except KafkaError as error:
            if error.error is Errors.SASL_AUTHENTICATION_FAILED and self._token is token:
                self._token = None
            raise

    async def _present_token(self) -> Token:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # A lock belongs to one event loop. Programs may use the same settings in several, one after another.
            self._loop, self._lock = loop, asyncio.Lock()
        async with self._lock:
            now_ms, token = self._now_ms(), self._token
            if token is not None and now_ms < min(self._refresh_ms, token.end_ms):
                return token
            try:
                is_needed = token is None or now_ms >= token.end_ms
                text = await (self._request_patiently() if is_needed else asyncio.to_thread(self._source))
                now_ms = self._now_ms()
                token = parse_token(text, now_ms)
                self._refresh_ms = self._rules.refresh_ms(token, now_ms, self._chance())
            except TokenRequestError as error:
                if token is None or self._now_ms() >= token.end_ms:
                    raise KafkaError(Errors.SASL_AUTHENTICATION_FAILED, f"there is no token: {error}") from error
                _log.warning("there is no new token; the old one stays in use until its end: %s", error)
                self._refresh_ms = self._now_ms() + RETRY_SECONDS * 1000
            self._token = token
            return token

    async def _request_patiently(self) -> str:
        """Requests a token. Repeats the request while it may succeed, with a growing delay."""
        rules = self._rules
        waited_ms, delay_ms = 0, rules.retry_backoff_ms
        while True:
            try:
                return await asyncio.to_thread(self._source)
            except TokenRequestError as error:
                if not error.is_retriable or waited_ms >= rules.retry_backoff_max_ms:
                    raise
            delay_ms = max(min(delay_ms, rules.retry_backoff_max_ms - waited_ms), 1)
            await asyncio.sleep(delay_ms / 1000)
            waited_ms += delay_ms
            delay_ms *= 2


# --- properties -------------------------------------------------------------------------------------------------------


def bearer_login_of(
    properties: Mapping[str, str], module: LoginModule, environment: Mapping[str, str] = os.environ
) -> BearerLogin:
    """Returns the login that the properties describe; raises ConfigException."""
    if module.class_name != BEARER_MODULE or any(option.startswith("unsecured") for option in module.options):
        raise ConfigException(
            f"sasl.jaas.config: OAUTHBEARER needs {BEARER_MODULE} without options that begin with unsecured"
        )
    for key, names in _CLASSES.items():
        if key in properties and properties[key].removeprefix(_PACKAGE) not in names:
            raise ConfigException(f"{key}: {properties[key]} is not one of {', '.join(_PACKAGE + n for n in names)}")
    extensions = _extensions_of(module.options)
    rules = _rules_of(properties)
    url = _allowed_url(properties.get(_URL, "").strip(), environment)
    if urlsplit(url).scheme == "file":
        return BearerLogin(partial(read_token_file, url), extensions, rules)
    return BearerLogin(_endpoint_of(properties, module.options, url).request_token, extensions, rules)


def _endpoint_of(properties: Mapping[str, str], options: Mapping[str, str], url: str) -> TokenEndpoint:
    def value(key: str, option: str) -> str:
        """Kafka 4.1 and later prefer the key; earlier releases have the option of the login module only."""
        return (properties.get(key) or options.get(option) or "").strip()

    client_id = value("sasl.oauthbearer.client.credentials.client.id", "clientId")
    client_secret = value("sasl.oauthbearer.client.credentials.client.secret", "clientSecret")
    for key, text in (("id", client_id), ("secret", client_secret)):
        if not text:
            raise ConfigException(f"sasl.oauthbearer.client.credentials.client.{key}: {url} needs it")
    urlencode = properties.get("sasl.oauthbearer.header.urlencode", "false").lower()
    if urlencode not in ("true", "false"):
        raise ConfigException(f"sasl.oauthbearer.header.urlencode: {urlencode!r} is neither true nor false")
    try:
        # As in Kafka, the ssl.* options of the login module are for the provider, those of the client for the brokers.
        context = client_context(TlsSettings(options, {}))
    except TlsConfigError as error:
        raise ConfigException(f"sasl.jaas.config: {error}") from error
    return TokenEndpoint(
        url,
        client_id,
        client_secret,
        value("sasl.oauthbearer.scope", "scope"),
        context,
        _number(properties, "sasl.login.connect.timeout.ms", _DEFAULT_TIMEOUT_MS, 1, 1 << 31) / 1000,
        _number(properties, "sasl.login.read.timeout.ms", _DEFAULT_TIMEOUT_MS, 1, 1 << 31) / 1000,
        urlencode == "true",
    )


def _extensions_of(options: Mapping[str, str]) -> dict[str, str]:
    """Returns the SASL extensions (KIP-342): the options `extension_NAME` of the login module."""
    extensions = {
        option.removeprefix(_EXTENSION): value for option, value in options.items() if option.startswith(_EXTENSION)
    }
    for name, value in extensions.items():
        if name == "auth" or not _EXTENSION_NAME.fullmatch(name):
            raise ConfigException(f"sasl.jaas.config: Extension name {name} is invalid")
        if not _EXTENSION_VALUE.fullmatch(value):
            raise ConfigException(f"sasl.jaas.config: the value of the extension {name} is invalid")
    return extensions


def _rules_of(properties: Mapping[str, str]) -> RefreshRules:
    refresh, retry = "sasl.login.refresh.", "sasl.login.retry."
    return RefreshRules(
        _number(properties, f"{refresh}window.factor", 0.8, 0.5, 1.0),
        _number(properties, f"{refresh}window.jitter", 0.05, 0.0, 0.25),
        int(_number(properties, f"{refresh}min.period.seconds", 60, 0, 900) * 1000),
        int(_number(properties, f"{refresh}buffer.seconds", 300, 0, 3600) * 1000),
        int(_number(properties, f"{retry}backoff.ms", 100, 0, 1 << 31)),
        int(_number(properties, f"{retry}backoff.max.ms", 10_000, 0, 1 << 31)),
    )


def _number(properties: Mapping[str, str], key: str, default: float, lowest: float, highest: float) -> float:
    text = properties.get(key)
    try:
        number = default if text is None else float(text)
    except ValueError:
        raise ConfigException(f"{key}: {text!r} is not a number") from None
    if not lowest <= number <= highest:
        raise ConfigException(f"{key}: {text} is not between {lowest} and {highest}")
    return number


def _allowed_url(url: str, environment: Mapping[str, str]) -> str:
    """Returns the address of the tokens. Raises ConfigException unless the environment allows it."""
    try:
        parts = urlsplit(url)
        # A malformed port is an error here, not at each login.
        is_valid = parts.scheme == "file" or (parts.scheme == "https" and bool(parts.hostname) and parts.port != 0)
    except ValueError:
        is_valid = False
    if not is_valid or not url.isascii() or "@" in parts.netloc:
        raise ConfigException(f"{_URL}: must be an https or file address without a user, not {_shown(url)}")

    def allowed(variable: str) -> list[str]:
        return [entry.strip() for entry in environment.get(variable, "").split(",")]

    is_file = parts.scheme == "file" and url2pathname(parts.path) in allowed(ALLOWED_FILES)
    if url not in allowed(ALLOWED_URLS) and not is_file:
        variable = ALLOWED_FILES if parts.scheme == "file" else ALLOWED_URLS
        entry = url2pathname(parts.path) if parts.scheme == "file" else url
        raise ConfigException(f"{_URL}: {url} is not allowed; add {entry} to the environment variable {variable}")
    return url


def _shown(url: str) -> str:
    """Returns an address for an error, without a password that it may have."""
    return repr(url if "@" not in url else "an address with a user")
