# SPDX-License-Identifier: Apache-2.0
"""Settings of security features that kcoord lacks are rejected; other keys of a secured broker's file are accepted."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig, ConfigError
from kcoord.config.workers import worker_properties

AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
KAFKAS_BUILDER = "org.apache.kafka.common.security.authenticator.DefaultKafkaPrincipalBuilder"


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        (
            {"authorizer.class.name": AUTHORIZER},
            f"{AUTHORIZER} for configuration authorizer.class.name: .*no authorizer",
        ),
        ({"listeners": "SSL://:9093"}, "SSL://:9093 for configuration listeners: .*is SSL, but only PLAINTEXT"),
        ({"listeners": "PLAINTEXT://:1,SASL_SSL://:2"}, "the security protocol of SASL_SSL://:2 is SASL_SSL"),
        (
            {"listeners": "CLIENTS://:9092", "listener.security.protocol.map": "CLIENTS:SASL_PLAINTEXT"},
            "the security protocol of CLIENTS://:9092 is SASL_PLAINTEXT",
        ),
        (
            {"listener.security.protocol.map": "PLAINTEXT:SSL"},
            "the security protocol of PLAINTEXT://127.0.0.1:9092 is SSL",
        ),
        (
            {"principal.builder.class": "org.example.Names"},
            "org.example.Names for configuration principal.builder.class",
        ),
        (
            {"listener.name.plaintext.principal.builder.class": "org.example.Names"},
            "org.example.Names for configuration listener.name.plaintext.principal.builder.class",
        ),
    ],
)
def test_settings_of_missing_security_features_are_rejected(properties: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        BrokerConfig.from_properties(properties)


def test_kafkas_settings_without_security_are_accepted() -> None:
    properties = {
        "authorizer.class.name": "",
        "principal.builder.class": KAFKAS_BUILDER,
        "listeners": "CLIENTS://:9092,CONTROLLER://:9093",
        "listener.security.protocol.map": "CLIENTS:PLAINTEXT,CONTROLLER:SSL",
        "controller.listener.names": "CONTROLLER",
    }
    config = BrokerConfig.from_properties(properties)
    assert [str(listener) for listener in config.open_listeners] == ["CLIENTS://:9092"]
    BrokerConfig.from_properties({"principal.builder.class": ""})


def test_other_keys_of_a_secured_broker_have_no_effect() -> None:
    properties = {
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
        "sasl.oauthbearer.jwks.endpoint.url": "https://keys.example",
        "ssl.keystore.location": "/etc/kafka/keystore.jks",
        "ssl.client.auth": "required",
        "listener.name.internal.ssl.keystore.location": "/etc/kafka/internal.jks",
        "listener.name.internal.scram-sha-512.sasl.jaas.config": "x required;",
        "connections.max.reauth.ms": "3600000",
        "super.users": "User:admin",
        "security.inter.broker.protocol": "PLAINTEXT",
    }
    config = BrokerConfig.from_properties(properties)
    assert sorted(config.ignored) == sorted(properties)
    assert config.unknown == []


def test_a_dynamic_principal_builder_is_rejected_too() -> None:
    config = BrokerConfig.from_properties({})
    config.with_dynamic({"principal.builder.class": KAFKAS_BUILDER})
    for name in ("principal.builder.class", "listener.name.plaintext.principal.builder.class"):
        with pytest.raises(ConfigError, match=name):
            config.with_dynamic({name: "org.example.Names"})


def test_a_setting_of_one_worker_is_rejected_before_any_worker_starts() -> None:
    properties = {"group.coordinator.threads": "2", "kcoord.worker.1.authorizer.class.name": AUTHORIZER}
    with pytest.raises(ConfigError, match=r"authorizer\.class\.name"):
        BrokerConfig.from_properties(properties)
    properties["kcoord.worker.1.authorizer.class.name"] = ""
    config = BrokerConfig.from_properties(properties)
    assert BrokerConfig.from_properties(worker_properties(config, 1)).authorizer_class_name == ""
