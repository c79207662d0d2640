# SPDX-License-Identifier: Apache-2.0
"""Settings of security that kcoord cannot follow are rejected; other keys of a secured broker's file are accepted."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig, ConfigError
from kcoord.config.principals import parse_super_users
from kcoord.config.security import foreign_principal_builders, ineffective_settings
from kcoord.config.workers import worker_properties

AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
KAFKAS_BUILDER = "org.apache.kafka.common.security.authenticator.DefaultKafkaPrincipalBuilder"


SASL = {
    "listeners": "USERS://:9092",
    "listener.security.protocol.map": "USERS:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN",
}


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        (
            {"authorizer.class.name": "org.example.Authorizer"},
            f"org.example.Authorizer for configuration authorizer.class.name: .*set {AUTHORIZER}",
        ),
        ({"super.users": "User:admin;admin"}, "User:admin;admin for configuration super.users: .* but got admin;"),
        ({"super.users": "User:"}, "User: for configuration super.users: .* but got User:;"),
        (
            {"ssl.engine.factory.class": "org.example.Engines"},
            "for configuration ssl.engine.factory.class: .*no classes",
        ),
        *[
            ({key: "org.example.Own"}, f"org.example.Own for configuration {key}: .*no classes")
            for key in (
                "alter.config.policy.class.name",
                "client.quota.callback.class",
                "create.topic.policy.class.name",
            )
        ],
        *[
            (
                SASL | {"sasl.enabled.mechanisms": "OAUTHBEARER", key: "org.example.Own"},
                f"org.example.Own for configuration {key}: .*no classes .*BrokerJwtValidator",
            )
            for key in (
                "sasl.oauthbearer.jwt.validator.class",
                "listener.name.users.oauthbearer.sasl.oauthbearer.jwt.validator.class",
            )
        ],
        *[
            (
                {"config.providers": "env, file", key: "x ${file:/pw:x}"},
                rf"value \[hidden\] for configuration {key}: .*\$\{{file:",
            )
            for key in ("ssl.key.password", "listener.name.users.plain.sasl.jaas.config")
        ],
        (
            {"listeners": "SASL_PLAINTEXT://:9093"},
            "GSSAPI for configuration sasl.enabled.mechanisms: GSSAPI is not offered, and SASL_PLAINTEXT://:9093 is "
            "a listener with SASL; set sasl.enabled.mechanisms to one or more of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512",
        ),
        ({"listeners": "PLAINTEXT://:1,SASL_SSL://:2"}, "GSSAPI is not offered, and SASL_SSL://:2 is a listener"),
        (
            {"listeners": "CLIENTS://:9092", "listener.security.protocol.map": "CLIENTS:SASL_PLAINTEXT"},
            "GSSAPI is not offered, and CLIENTS://:9092",
        ),
        ({"listener.security.protocol.map": "PLAINTEXT:SASL_SSL"}, "GSSAPI is not offered"),
        (
            SASL | {"sasl.enabled.mechanisms": "PLAIN,DIGEST-MD5"},
            "value PLAIN,DIGEST-MD5 .*DIGEST-MD5 is not offered",
        ),
        (SASL | {"sasl.enabled.mechanisms": ""}, "there is no mechanism"),
        (SASL | {"sasl.enabled.mechanisms": "plain"}, "plain is not offered"),
        (
            SASL | {"listener.name.users.sasl.enabled.mechanisms": "GSSAPI"},
            "configuration listener.name.users.sasl.enabled.mechanisms: GSSAPI is not offered",
        ),
        *[
            (
                SASL | {f"{prefix}{key}": "org.example.Own"},
                f"org.example.Own for configuration {prefix}{key}: .*no classes",
            )
            for key in ("sasl.server.callback.handler.class", "sasl.login.class", "sasl.login.callback.handler.class")
            for prefix in ("", "listener.name.users.", "listener.name.users.plain.")
        ],
        (
            SASL | {"connections.max.idle.ms": "100"},
            "value 100 for configuration connection.failed.authentication.delay.ms: it must be less than .*.100.",
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


def test_kafkas_settings_of_listeners_and_classes_are_accepted() -> None:
    properties = {
        "authorizer.class.name": AUTHORIZER,
        "principal.builder.class": KAFKAS_BUILDER,
        "listeners": "CLIENTS://:9092,CONTROLLER://:9093",
        "listener.security.protocol.map": "CLIENTS:PLAINTEXT,CONTROLLER:SSL",
        "controller.listener.names": "CONTROLLER",
    }
    config = BrokerConfig.from_properties(properties)
    assert [str(listener) for listener in config.open_listeners] == ["CLIENTS://:9092"]
    BrokerConfig.from_properties({"principal.builder.class": "", "authorizer.class.name": ""})


def test_other_keys_of_a_secured_broker_are_accepted() -> None:
    without_effect = {
        "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
        "security.inter.broker.protocol": "PLAINTEXT",
        "config.providers": "file",
        "config.providers.file.class": "org.apache.kafka.common.config.provider.FileConfigProvider",
    }
    of_listeners_with_sasl = {
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "sasl.oauthbearer.jwks.endpoint.url": "https://keys.example",
        "sasl.oauthbearer.jwt.validator.class": "org.apache.kafka.common.security.oauthbearer.BrokerJwtValidator",
        "listener.name.internal.scram-sha-512.sasl.jaas.config": "x required;",
        "listener.name.internal.sasl.server.callback.handler.class": "org.example.Own",
        "connections.max.reauth.ms": "3600000",
        "ssl.key.password": "${env:PW} is a password if no provider has the name env",
    }
    config = BrokerConfig.from_properties(without_effect | of_listeners_with_sasl)
    assert sorted(config.ignored) == sorted(without_effect)
    assert config.unknown == []


def test_the_mechanisms_of_a_listener() -> None:
    config = BrokerConfig.from_properties(
        SASL
        | {"listener.name.users.sasl.enabled.mechanisms": "SCRAM-SHA-512, PLAIN", "sasl.enabled.mechanisms": "GSSAPI"}
    )
    (listener,) = config.open_listeners
    assert config.sasl_mechanisms(listener) == ["SCRAM-SHA-512", "PLAIN"]
    BrokerConfig.from_properties(SASL | {"connections.max.idle.ms": "-1"})
    with pytest.raises(ConfigError, match="GSSAPI is not offered"):
        config.with_dynamic({"listener.name.users.sasl.enabled.mechanisms": "GSSAPI"})


def test_a_key_of_a_mechanism_counts_before_that_of_its_listener() -> None:
    key = "connections.max.reauth.ms"
    config = BrokerConfig.from_properties(
        SASL
        | {"sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256", key: "1"}
        | {f"listener.name.users.{key}": "2", f"listener.name.users.plain.{key}": "3", f"plain.{key}": "4"}
    )
    (listener,) = config.open_listeners
    assert [config.value_for_listener(listener, key, mechanism) for mechanism in ("PLAIN", "SCRAM-SHA-256")] == [3, 2]
    changed = config.with_dynamic({f"listener.name.users.scram-sha-256.{key}": "5"})
    assert changed.value_for_listener(listener, key, "SCRAM-SHA-256") == 5
    assert changed.value_for_listener(listener, key) == 2


def test_a_dynamic_principal_builder_is_rejected_too() -> None:
    config = BrokerConfig.from_properties({})
    config.with_dynamic({"principal.builder.class": KAFKAS_BUILDER})
    for name in ("principal.builder.class", "listener.name.plaintext.principal.builder.class"):
        with pytest.raises(ConfigError, match=name):
            config.with_dynamic({name: "org.example.Names"})


def test_a_setting_of_one_worker_is_rejected_before_any_worker_starts() -> None:
    properties = {"group.coordinator.threads": "2", "kcoord.worker.1.ssl.engine.factory.class": "org.example.Engines"}
    with pytest.raises(ConfigError, match=r"ssl\.engine\.factory\.class"):
        BrokerConfig.from_properties(properties)
    properties["kcoord.worker.1.ssl.engine.factory.class"] = ""
    config = BrokerConfig.from_properties(properties)
    assert not BrokerConfig.from_properties(worker_properties(config, 1)).ssl_engine_factory_class


def test_all_workers_have_the_same_authorizer() -> None:
    for name in ("authorizer.class.name", "super.users", "allow.everyone.if.no.acl.found"):
        with pytest.raises(ConfigError, match="all workers must have the same value"):
            BrokerConfig.from_properties({"group.coordinator.threads": "2", f"kcoord.worker.1.{name}": ""})


FIXED = "kcoord.listener.principals"
TWO_LISTENERS = {
    "listeners": "A://:1,B://:2",
    "listener.security.protocol.map": "A:PLAINTEXT,B:PLAINTEXT,C:SSL,CONTROLLER:PLAINTEXT",
}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A", "'A' is not NAME=Type:name"),
        ("A=alice", "expected a string in format principalType:principalName but got alice"),
        ("A=User:", "but got User:"),
        ("A=:alice", "but got :alice"),
        ("X=User:alice", r"X is not among listeners \(A, B\)"),
        ("=User:alice", " is not among listeners"),
        ("A=User:alice,a=User:bob", "A occurs twice"),
    ],
)
def test_principals_of_listeners_that_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"Invalid value {text} for configuration {FIXED}: .*{problem}"):
        BrokerConfig.from_properties({**TWO_LISTENERS, FIXED: text})


def test_only_listeners_with_plaintext_have_fixed_principals() -> None:
    with pytest.raises(ConfigError, match="the security protocol of C is SSL, but only listeners with PLAINTEXT"):
        BrokerConfig.from_properties({**TWO_LISTENERS, "listeners": "A://:1,C://:3", FIXED: "C=User:alice"})


def test_principals_of_listeners() -> None:
    assert BrokerConfig.from_properties({}).listener_principals == {}
    config = BrokerConfig.from_properties({**TWO_LISTENERS, FIXED: "a = User:alice, B=Group:O=x"})
    assert config.listener_principals == {"A": "User:alice", "B": "Group:O=x"}
    with pytest.raises(ConfigError, match="all workers must have the same value"):
        BrokerConfig.from_properties({"group.coordinator.threads": "2", f"kcoord.worker.1.{FIXED}": ""})


def test_a_foreign_principal_builder_is_accepted_if_its_listeners_have_fixed_principals() -> None:
    builder = {"principal.builder.class": "org.example.Names"}
    both = {**TWO_LISTENERS, FIXED: "A=User:alice,B=User:bob"}
    config = BrokerConfig.from_properties({**both, **builder})
    assert foreign_principal_builders(config) == builder
    with pytest.raises(ConfigError, match=r"give each listener that it is for a principal in kcoord\.listener"):
        BrokerConfig.from_properties({**TWO_LISTENERS, **builder, FIXED: "A=User:alice"})
    of_a = {"listener.name.a.principal.builder.class": "org.example.Names"}
    BrokerConfig.from_properties({**TWO_LISTENERS, **of_a, FIXED: "A=User:alice"})
    with pytest.raises(ConfigError, match=r"listener\.name\.a\.principal\.builder\.class"):
        BrokerConfig.from_properties({**TWO_LISTENERS, **of_a, FIXED: "B=User:bob"})
    assert foreign_principal_builders(BrokerConfig.from_properties({})) == {}


def test_super_users() -> None:
    assert parse_super_users("") == frozenset()
    assert parse_super_users(" User:a ;; Group:CN=b,O=c ;") == {"User:a", "Group:CN=b,O=c"}


def test_a_listener_has_its_own_settings_of_tls_before_those_of_all() -> None:
    config = BrokerConfig.from_properties(
        {
            "listeners": "A://:1,B://:2",
            "listener.security.protocol.map": "A:SSL,B:SSL",
            "ssl.client.auth": "requested",
            "ssl.keystore.type": "PEM",
            "listener.name.a.ssl.client.auth": "required",
        }
    )
    first, second = config.open_listeners
    assert config.ignored == []
    assert config.value_for_listener(first, "ssl.client.auth") == "required"
    assert config.value_for_listener(second, "ssl.client.auth") == "requested"
    assert config.value_for_listener(first, "ssl.keystore.type") == "PEM"
    assert config.name_for_listener(first, "ssl.client.auth") == "listener.name.a.ssl.client.auth"
    changed = config.with_dynamic({"listener.name.b.ssl.client.auth": "none"})
    assert changed.value_for_listener(second, "ssl.client.auth") == "none"
    with pytest.raises(ConfigError, match=r"Invalid value maybe for configuration ssl\.client\.auth"):
        BrokerConfig.from_properties({"listener.name.a.ssl.client.auth": "maybe"})


def test_settings_that_protect_nothing() -> None:
    properties = TWO_LISTENERS | {
        "listeners": "A://:1,C://:3",
        "controller.listener.names": "CONTROLLER",
        "listener.name.a.ssl.client.auth": "required",
        "listener.name.x.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.c.ssl.client.auth": "required",
        "listener.name.c.plain.sasl.jaas.config": "x required;",
        "listener.name.controller.ssl.client.auth": "required",
        "listener.name.x.max.connections": "5",
        "super.users": "User:admin",
        "ssl.client.auth": "required",
    }
    assert ineffective_settings(BrokerConfig.from_properties(properties)) == {
        "listener.name.a.ssl.client.auth": "the security protocol of A is PLAINTEXT",
        "listener.name.x.sasl.enabled.mechanisms": "no listener has the name X",
        "listener.name.c.plain.sasl.jaas.config": "the security protocol of C is SSL",
        "super.users": "authorizer.class.name is not set",
    }
    with_authorizer = {"authorizer.class.name": AUTHORIZER, "super.users": "User:admin"}
    assert ineffective_settings(BrokerConfig.from_properties(with_authorizer)) == {}


def test_a_key_of_oauthbearer_is_checked_and_has_an_effect() -> None:
    key = "sasl.oauthbearer.clock.skew.seconds"
    properties = SASL | {"sasl.enabled.mechanisms": "OAUTHBEARER", f"listener.name.users.oauthbearer.{key}": "7"}
    config = BrokerConfig.from_properties(properties)
    (listener,) = config.open_listeners
    assert config.value_for_listener(listener, key, "OAUTHBEARER") == 7
    assert (config.ignored, config.unknown) == ([], [])
    with pytest.raises(ConfigError, match=r"sasl\.oauthbearer\.clock\.skew\.seconds: Not a number of type INT"):
        BrokerConfig.from_properties(properties | {f"listener.name.users.oauthbearer.{key}": "x"})
