# SPDX-License-Identifier: Apache-2.0
"""The SASL settings of a listener, from the configuration: at the start, and again when a dynamic config changes.

An error stops the start. A later change that cannot be used is refused; if it comes from the metadata log, it is logged
and the old settings stay in use. Each handshake asks for the settings, so changed users and mechanisms hold for new
connections, and for existing ones when they authenticate again.

The keys of the identity provider for OAUTHBEARER are read at the start, which they block, and then in the background
(`kcoord.server.jwks`).

Everything here runs in the event loop.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kcoord.config import BrokerConfig, ConfigError, Listener
from kcoord.config.broker_settings import BrokerSettings
from kcoord.config.key import ConfigValue
from kcoord.security.jaas import BEARER_MODULE, PLAIN_MODULE, SCRAM_MODULE, JaasError, parse_login_module
from kcoord.security.plain import PlainUsers
from kcoord.security.sasl import OAUTHBEARER, PLAIN, SaslSettings
from kcoord.security.scram import CredentialLookup, Decoys, TokenLogin

if TYPE_CHECKING:
    from kcoord.security.oauthbearer import BearerSettings
    from kcoord.server.jwks import JwksSource

_logger = logging.getLogger(__name__)

_JAAS = "sasl.jaas.config"
_USER = "user_"
_BEARER = "sasl.oauthbearer."
_URL = "sasl.oauthbearer.jwks.endpoint.url"
_ALLOWED = "org.apache.kafka.sasl.oauthbearer.allowed."
_NONCE_BYTES = 18


@dataclass(slots=True, frozen=True)
class _Logins:
    """The settings that come from the configuration."""

    mechanisms: list[str]
    users: PlainUsers
    max_reauth_ms: Mapping[str, int]
    max_token_bytes: int
    failure_delay_ms: int


class ListenerLogins:
    """The SASL settings of one listener. The constructor raises ConfigError if they cannot be used.

    `credentials` finds the users of SCRAM. `decoys` returns what users without a credential get. `tokens` finds
    delegation tokens (SaslSettings).
    """

    def __init__(
        self,
        config: BrokerConfig,
        listener: Listener,
        credentials: CredentialLookup,
        decoys: Callable[[], Decoys],
        tokens: Callable[[str, str, int], TokenLogin | None] | None = None,
    ) -> None:
        self._config = config
        self._listener = listener
        self._credentials = credentials
        self._decoys = decoys
        self._tokens = tokens
        self._dynamic = config.dynamic
        self._keys: JwksSource | None = None
        self._bearer: BearerSettings | None = None
        self._logins = _logins_of(config, listener)
        if OAUTHBEARER in self._logins.mechanisms:
            self._keys, self._bearer = _bearer_of(config, listener)

    def settings(self) -> SaslSettings:
        """Returns the settings for a handshake."""
        if self._config.dynamic is not self._dynamic:
            self._dynamic = self._config.dynamic
            try:
                self._logins = self._changed(self._config)
            except ConfigError as error:
                _logger.error("Listener %s keeps its users: %s", self._listener.name, error)
        logins = self._logins
        return SaslSettings(
            logins.mechanisms,
            logins.users,
            self._credentials,
            logins.max_reauth_ms,
            logins.max_token_bytes,
            logins.failure_delay_ms,
            _new_nonce,
            self._decoys(),
            self._bearer,
            self._tokens,
        )

    def begin(self) -> None:
        """Reads what the metadata log has from before the start. Raises ConfigError if that cannot be used.

        The settings of the start may let in users who were removed since.
        """
        self._dynamic = self._config.dynamic
        self._logins = self._changed(self._config)
        if self._keys is not None:
            self._keys.start()

    def stop(self) -> None:
        """Ends what runs in the background."""
        if self._keys is not None:
            self._keys.stop()

    def check(self, changed: BrokerSettings) -> None:
        """Raises ConfigError if the listener could not use the settings of `changed`."""
        self._changed(changed)

    def _changed(self, changed: BrokerSettings) -> _Logins:
        logins = _logins_of(changed, self._listener)
        if OAUTHBEARER in logins.mechanisms and self._bearer is None:
            name = changed.name_for_listener(self._listener, "sasl.enabled.mechanisms")
            raise ConfigError(
                f"Invalid value {','.join(logins.mechanisms)} for configuration {name}: {OAUTHBEARER} can be added "
                "only by a restart, since its other settings are read at the start"
            )
        return logins


def _new_nonce() -> str:
    return secrets.token_urlsafe(_NONCE_BYTES)


def _logins_of(config: BrokerSettings, listener: Listener) -> _Logins:
    mechanisms = config.sasl_mechanisms(listener)
    users: dict[str, str] = {}
    for mechanism in mechanisms:
        name = f"listener.name.{listener.name.lower()}.{mechanism.lower()}.{_JAAS}"
        # As in Kafka, a line without a mechanism in its key does not count, since it may be of any mechanism.
        is_set = config.name_for_listener(listener, _JAAS, mechanism) == name
        text = config.value_for_listener(listener, _JAAS, mechanism) if is_set else None
        assert text is None or isinstance(text, str)
        if mechanism == PLAIN:
            users = _users_of(name, text)
        elif text is not None:
            options = _options_of(name, text, BEARER_MODULE if mechanism == OAUTHBEARER else SCRAM_MODULE)
            if any(option.startswith("unsecured") for option in options):
                raise _error(name, text, "unsecured tokens are not accepted; remove the options that begin with it")
    return _Logins(
        mechanisms,
        PlainUsers(users),
        {
            mechanism: _number(config.value_for_listener(listener, "connections.max.reauth.ms", mechanism))
            for mechanism in mechanisms
        },
        _number(config.value_for_listener(listener, "sasl.server.max.receive.size")),
        config.connection_failed_authentication_delay_ms,
    )


def _bearer_of(config: BrokerSettings, listener: Listener) -> tuple[JwksSource, BearerSettings]:
    """Returns the keys and the rules of OAUTHBEARER; raises ConfigError if they are not safe or cannot be read."""
    from kcoord.security.oauthbearer import BearerSettings, TokenRules
    from kcoord.server.jwks import JwksError, JwksSettings, JwksSource

    def value(name: str) -> ConfigValue:
        return config.value_for_listener(listener, name, OAUTHBEARER)

    audiences, issuer = value("sasl.oauthbearer.expected.audience"), value("sasl.oauthbearer.expected.issuer")
    for claim, expected, is_free in (
        ("audience", audiences, value("sasl.oauthbearer.allow.unverified.audience")),
        ("issuer", issuer, value("sasl.oauthbearer.allow.unverified.issuer")),
    ):
        if not expected and not is_free and config.is_kafka_4_4:
            raise ConfigError(
                f"Invalid value {expected} for configuration {_BEARER}expected.{claim}: tokens of any {claim} would be "
                f"accepted; set it, or set {_BEARER}allow.unverified.{claim}=true"
            )
    url_name = config.name_for_listener(listener, _URL, OAUTHBEARER)
    url = _allowed_url(config, url_name, value(_URL))
    settings = JwksSettings(
        url,
        _number(value("sasl.oauthbearer.jwks.endpoint.refresh.ms")),
        _number(value("sasl.oauthbearer.jwks.endpoint.retry.backoff.ms")),
        _number(value("sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms")),
    )
    try:
        keys = JwksSource(settings)
    except JwksError as error:
        raise ConfigError(f"Invalid value {url} for configuration {url_name}: {error}") from None
    assert isinstance(audiences, list)
    rules = TokenRules(
        audiences,
        None if issuer is None else str(issuer),
        _number(value("sasl.oauthbearer.clock.skew.seconds")),
        str(value("sasl.oauthbearer.scope.claim.name")),
        str(value("sasl.oauthbearer.sub.claim.name")),
    )
    return keys, BearerSettings(rules, lambda: keys.keys, keys.missing)


def _allowed_url(config: BrokerSettings, name: str, url: ConfigValue) -> str:
    """Returns the address of the keys. Raises ConfigError unless the administrator has allowed it."""
    if not url:
        raise ConfigError(
            f"Invalid value {url} for configuration {name}: {OAUTHBEARER} needs the keys that sign tokens"
        )
    parts = urlsplit(str(url))
    if parts.scheme not in ("https", "file"):
        raise ConfigError(f"Invalid value {url} for configuration {name}: its scheme must be https or file")
    urls = config.value("org.apache.kafka.sasl.oauthbearer.allowed.urls")
    files = config.value("org.apache.kafka.sasl.oauthbearer.allowed.files")
    assert isinstance(urls, list) and isinstance(files, list)
    if url not in urls and not (parts.scheme == "file" and url2pathname(parts.path) in files):
        kind = "urls" if parts.scheme == "https" else "files"
        raise ConfigError(f"{name}: {url} is not allowed. Update {_ALLOWED}{kind} to allow it")
    return str(url)


def _users_of(name: str, text: str | None) -> dict[str, str]:
    """Returns the passwords of the users of PLAIN; raises ConfigError if there are none."""
    options = {} if text is None else _options_of(name, text, PLAIN_MODULE)
    users = {option.removeprefix(_USER): value for option, value in options.items() if option.startswith(_USER)}
    if not users:
        raise _error(name, text, f'PLAIN has no users; set it to {PLAIN_MODULE} required {_USER}NAME="PASSWORD";')
    if "" in users or "" in users.values():
        raise _error(name, text, "a user has an empty name or an empty password")
    return users


def _options_of(name: str, text: str, class_name: str) -> Mapping[str, str]:
    try:
        module = parse_login_module(text)
    except JaasError as error:
        raise _error(name, text, str(error)) from None
    if module.class_name != class_name:
        raise _error(name, text, f"the login module must be {class_name}")
    return module.options


def _error(name: str, text: str | None, problem: str) -> ConfigError:
    return ConfigError(f"Invalid value {None if text is None else '[hidden]'} for configuration {name}: {problem}")


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value
