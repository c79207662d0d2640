# SPDX-License-Identifier: Apache-2.0
"""Rejects settings of security features that this broker does not have.

If the broker ignored such a setting, a cluster would be open although its owner believes it to be protected. The broker
therefore does not start with such a setting. All of these checks are here.
"""

from __future__ import annotations

from kcoord.config.broker_settings import BrokerSettings
from kcoord.config.key import ConfigError
from kcoord.config.keys import BROKER_KEYS
from kcoord.config.listeners import SecurityProtocol, key_of_listener

_PRINCIPAL_BUILDER = "principal.builder.class"
_DEFAULT_PRINCIPAL_BUILDER = BROKER_KEYS[_PRINCIPAL_BUILDER].default


def check_security(config: BrokerSettings) -> None:
    """Raises ConfigError for a setting that asks for authorization, encryption or authentication."""
    if config.authorizer_class_name:
        raise ConfigError(
            f"Invalid value {config.authorizer_class_name} for configuration authorizer.class.name: "
            "kcoord has no authorizer, so every client may do everything; leave it empty"
        )
    for listener in config.open_listeners:
        if listener.security_protocol is not SecurityProtocol.PLAINTEXT:
            raise ConfigError(
                f"Invalid value {','.join(config.listeners)} for configuration listeners: the security protocol of "
                f"{listener} is {listener.security_protocol.name}, but only PLAINTEXT is served"
            )
    _check_principal_builder(_PRINCIPAL_BUILDER, config.principal_builder_class)
    for name, value in {**config.explicit, **config.dynamic}.items():
        if key_of_listener(name) == _PRINCIPAL_BUILDER:
            _check_principal_builder(name, value)


def _check_principal_builder(name: str, value: str) -> None:
    if value.strip() not in ("", _DEFAULT_PRINCIPAL_BUILDER):
        raise ConfigError(
            f"Invalid value {value} for configuration {name}: kcoord loads no classes of Kafka's plug-ins, and every "
            f"client is User:ANONYMOUS; leave it out, or set {_DEFAULT_PRINCIPAL_BUILDER}"
        )
