# SPDX-License-Identifier: Apache-2.0
"""Rejects settings of security features that this broker does not have.

If the broker ignored such a setting, a cluster would be open although its owner believes it to be protected. The broker
therefore does not start with such a setting. All of these checks are here.
"""

from __future__ import annotations

from kcoord.config.broker_settings import BrokerSettings
from kcoord.config.key import ConfigError, ConfigValue
from kcoord.config.keys import BROKER_KEYS
from kcoord.config.listeners import Listener, key_of_listener
from kcoord.config.principals import parse_listener_principals, parse_super_users

STANDARD_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
_PRINCIPAL_BUILDER = "principal.builder.class"
_DEFAULT_PRINCIPAL_BUILDER = BROKER_KEYS[_PRINCIPAL_BUILDER].default
_ENABLED_MECHANISMS = "sasl.enabled.mechanisms"
_SASL_CLASSES = ("sasl.login.callback.handler.class", "sasl.login.class", "sasl.server.callback.handler.class")
_CLASSES = (
    "alter.config.policy.class.name",
    "client.quota.callback.class",
    "create.topic.policy.class.name",
    "ssl.engine.factory.class",
    *_SASL_CLASSES,
)
_BEARER_PACKAGE = "org.apache.kafka.common.security.oauthbearer."
_BEARER_CLASSES = (
    f"{_BEARER_PACKAGE}OAuthBearerLoginCallbackHandler",
    f"{_BEARER_PACKAGE}OAuthBearerValidatorCallbackHandler",
    f"{_BEARER_PACKAGE}secured.OAuthBearerLoginCallbackHandler",
    f"{_BEARER_PACKAGE}secured.OAuthBearerValidatorCallbackHandler",
)
"""Kafka's classes for signed tokens, which brokers of Kafka must set. kcoord does for OAUTHBEARER what they do."""
_JWT_VALIDATOR = "sasl.oauthbearer.jwt.validator.class"
_JWT_VALIDATORS = (f"{_BEARER_PACKAGE}BrokerJwtValidator", f"{_BEARER_PACKAGE}DefaultJwtValidator")
_FAILURE_DELAY = "connection.failed.authentication.delay.ms"

SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
"""The mechanisms that a listener can offer."""


def check_security(config: BrokerSettings) -> None:
    """Raises ConfigError for a setting of security that this broker cannot follow."""
    _check_placeholders(config)
    _check_authorizer(config.authorizer_class_name)
    parse_super_users(config.super_users)
    parse_listener_principals(config.kcoord_listener_principals, config.open_listeners)
    for listener in config.open_listeners:
        if listener.security_protocol.has_sasl and not config.passes_logins:
            _check_sasl(config, listener)
    for name in _CLASSES:
        _check_class(name, config.value(name))
    _check_jwt_validator(config, None)
    for name, value in foreign_principal_builders(config).items():
        if not _has_fixed_principals(config, name):
            raise ConfigError(
                f"Invalid value {value} for configuration {name}: kcoord loads no classes of Kafka's plug-ins; leave "
                f"it out, set {_DEFAULT_PRINCIPAL_BUILDER}, or give each listener that it is for a principal in "
                "kcoord.listener.principals"
            )


def foreign_principal_builders(config: BrokerSettings) -> dict[str, str]:
    """Returns the settings of principal.builder.class with another class than Kafka's own, by their keys."""
    settings = {_PRINCIPAL_BUILDER: config.principal_builder_class}
    for name, value in {**config.explicit, **config.dynamic}.items():
        if key_of_listener(name) == _PRINCIPAL_BUILDER:
            settings[name] = value
    return {name: value for name, value in settings.items() if value.strip() not in ("", _DEFAULT_PRINCIPAL_BUILDER)}


def ineffective_settings(config: BrokerSettings) -> dict[str, str]:
    """Returns settings that protect nothing, by their keys with the reason. A name may be misspelt, for example."""
    reasons: dict[str, str] = {}
    listeners = {listener.name.lower(): listener.security_protocol for listener in config.open_listeners}
    controllers = {name.lower() for name in config.controller_listener_names}
    for name in config.explicit:
        key, listener = key_of_listener(name), name.split(".")[2:3]
        if name in ("super.users", "allow.everyone.if.no.acl.found") and not config.authorizer_class_name:
            reasons[name] = "authorizer.class.name is not set"
        elif key is None or not key.startswith(("sasl.", "ssl.")) or listener[0] in controllers:
            continue
        elif (protocol := listeners.get(listener[0])) is None:
            reasons[name] = f"no listener has the name {listener[0].upper()}"
        elif not (protocol.has_tls if key.startswith("ssl.") else protocol.has_sasl):
            reasons[name] = f"the security protocol of {listener[0].upper()} is {protocol.name}"
    return reasons


def _has_fixed_principals(config: BrokerSettings, name: str) -> bool:
    """Returns whether all listeners have a fixed principal that the principal builder class `name` is for."""
    names = [
        listener.name
        for listener in config.open_listeners
        if name in (_PRINCIPAL_BUILDER, f"listener.name.{listener.name.lower()}.{_PRINCIPAL_BUILDER}")
    ]
    # Without an open listener nobody says which principals it has.
    return bool(names) and config.listener_principals.keys() >= set(names)


def _check_placeholders(config: BrokerSettings) -> None:
    """Raises ConfigError if a value has a placeholder of config.providers, which would itself be a password, say."""
    settings = {**config.explicit, **config.dynamic}
    for provider in filter(None, map(str.strip, settings.get("config.providers", "").split(","))):
        for name, value in settings.items():
            if f"${{{provider}:" in value:
                raise ConfigError(
                    f"Invalid value [hidden] for configuration {name}: kcoord does not replace the placeholders "
                    f"${{{provider}:...}} of config.providers; give the value itself"
                )


def _check_authorizer(class_name: str) -> None:
    if class_name not in ("", STANDARD_AUTHORIZER):
        raise ConfigError(
            f"Invalid value {class_name} for configuration authorizer.class.name: kcoord loads no classes of Kafka's "
            f"plug-ins; set {STANDARD_AUTHORIZER}, or leave it empty to let every client do everything"
        )


def _check_sasl(config: BrokerSettings, listener: Listener) -> None:
    """Raises ConfigError if a listener with SASL cannot authenticate clients as the settings demand."""
    mechanisms = config.sasl_mechanisms(listener)
    not_offered = [mechanism for mechanism in mechanisms if mechanism not in SASL_MECHANISMS]
    if not_offered or not mechanisms:
        problem = f"{not_offered[0]} is not offered" if not_offered else "there is no mechanism"
        raise ConfigError(
            f"Invalid value {','.join(mechanisms)} for configuration "
            f"{config.name_for_listener(listener, _ENABLED_MECHANISMS)}: {problem}, and {listener} is a listener with "
            f"SASL; set {_ENABLED_MECHANISMS} to one or more of {', '.join(SASL_MECHANISMS)}"
        )
    for name in _SASL_CLASSES:
        for mechanism in mechanisms:
            value = config.value_for_listener(listener, name, mechanism)
            if mechanism != "OAUTHBEARER" or value not in _BEARER_CLASSES:
                _check_class(config.name_for_listener(listener, name, mechanism), value)
    _check_jwt_validator(config, listener)
    delay_ms, idle_ms = config.connection_failed_authentication_delay_ms, config.connections_max_idle_ms
    if 0 <= idle_ms <= delay_ms:
        raise ConfigError(
            f"Invalid value {delay_ms} for configuration {_FAILURE_DELAY}: it must be less than "
            f"connections.max.idle.ms ({idle_ms}), so that clients get the error"
        )


def _check_jwt_validator(config: BrokerSettings, listener: Listener | None) -> None:
    """Raises ConfigError for a class that may accept fewer tokens than kcoord, of all listeners or of one."""
    name, value = _JWT_VALIDATOR, config.value(_JWT_VALIDATOR)
    if listener is not None:
        name = config.name_for_listener(listener, _JWT_VALIDATOR, "OAUTHBEARER")
        value = config.value_for_listener(listener, _JWT_VALIDATOR, "OAUTHBEARER")
    if value not in _JWT_VALIDATORS:
        raise ConfigError(
            f"Invalid value {value} for configuration {name}: kcoord loads no classes of Kafka's plug-ins; set one of "
            f"{', '.join(_JWT_VALIDATORS)}, whose checks kcoord makes itself"
        )


def _check_class(name: str, value: ConfigValue) -> None:
    if value:
        raise ConfigError(
            f"Invalid value {value} for configuration {name}: kcoord loads no classes of Kafka's plug-ins; leave it out"
        )
