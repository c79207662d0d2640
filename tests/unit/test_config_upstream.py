# SPDX-License-Identifier: Apache-2.0
"""The settings of a broker in front of an upstream."""

from __future__ import annotations

import pytest

from kcoord.client.security_properties import BEARER_KEYS, SECURITY_PROTOCOL, USED_KEYS
from kcoord.config import BROKER_KEYS, BrokerConfig, ConfigError, ConfigType
from kcoord.config.upstream import UPSTREAM_PREFIX, parse_upstream_ports, upstream_security


def config(**settings: str) -> BrokerConfig:
    """Returns a configuration; underscores in the names stand for dots."""
    own = {key.replace("_", "."): value for key, value in settings.items()}
    return BrokerConfig.from_properties({"kcoord.upstream.bootstrap.servers": "a:9092,[::1]:9093", **own})


def test_ports_follow_from_node_ids_alone() -> None:
    ports = parse_upstream_ports(["9100-9109", "1007:9999"])
    assert [ports.port_of(node_id) for node_id in (0, 9, 10, 1003, 1007)] == [9100, 9109, 9100, 9103, 9999]
    assert parse_upstream_ports(["5:9000"]).port_of(4) is None
    assert parse_upstream_ports(["0"]).port_of(17) == 0


def test_the_node_id_is_not_one_of_the_upstream_by_default() -> None:
    assert BrokerConfig.from_properties({}).node_id == 1
    assert config().node_id == 1_000_000
    assert config(node_id="7").node_id == 7
    assert config(broker_id="8").node_id == 8


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kcoord_upstream_bootstrap_servers": "a"}, "kcoord.upstream.bootstrap.servers: 'a' is not host:port"),
        ({"kcoord_upstream_bootstrap_servers": "a:70000"}, "'a:70000' is not host:port"),
        ({"kcoord_upstream_ports": "x"}, "kcoord.upstream.ports: 'x' is neither LOWEST-HIGHEST nor ID:PORT"),
        ({"kcoord_upstream_ports": "a:1"}, "'a:1' is neither"),
        ({"kcoord_upstream_ports": ""}, "kcoord.upstream.ports: give at least one port"),
        ({"kcoord_upstream_ports": "9-8"}, "'9-8' has no port"),
        ({"kcoord_upstream_ports": "1-2,5-6"}, "there can be one range of ports"),
        ({"kcoord_upstream_ports": "1:70000"}, "70000 is above 65535"),
        (
            {"kcoord_upstream_heartbeat_interval_ms": "3334"},
            "3334 for configuration kcoord.upstream.heartbeat.interval.ms: it must be at most a third of "
            "kcoord.upstream.session.timeout.ms (10000)",
        ),
        ({"kcoord_upstream_ports": "9090-9095"}, "the port 9092 is that of listeners=PLAINTEXT://127.0.0.1:9092"),
        ({"group_coordinator_threads": "2"}, "configuration group.coordinator.threads: with kcoord.upstream"),
        ({"kcoord_worker_ports": "9092,9093"}, "configuration kcoord.worker.ports: with kcoord.upstream"),
        (
            {"authorizer_class_name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"},
            "configuration authorizer.class.name: with kcoord.upstream",
        ),
        ({"delegation_token_secret_key": "hush"}, "Invalid value [hidden] for configuration delegation.token"),
        (
            {
                "listeners": "PLAINTEXT://:9092,OTHER://:9093",
                "listener_security_protocol_map": "PLAINTEXT:PLAINTEXT,OTHER:PLAINTEXT",
            },
            "configuration listeners: with kcoord.upstream.bootstrap.servers, only one listener is possible",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**settings)
    assert problem in str(error.value)


def test_security_settings_are_those_of_clients() -> None:
    """Each key of the client has a key here, and the other way round. No secret is shown."""
    own = {
        name.removeprefix(UPSTREAM_PREFIX): key for name, key in BROKER_KEYS.items() if name.startswith(UPSTREAM_PREFIX)
    }
    security = {name for name in own if name.startswith(("security.", "sasl.", "ssl."))}
    assert security == {SECURITY_PROTOCOL, *USED_KEYS, *BEARER_KEYS}
    for name in security:
        like = BROKER_KEYS.get(name)
        if like is not None and like.type is ConfigType.PASSWORD:
            assert own[name].type is ConfigType.PASSWORD, name


def test_security_settings_lose_their_prefix() -> None:
    settings = config(kcoord_upstream_security_protocol="SSL", kcoord_upstream_ssl_truststore_location="/t")
    assert upstream_security(settings) == {"security.protocol": "SSL", "ssl.truststore.location": "/t"}


PASS_THROUGH = {
    "kcoord_upstream_authentication": "pass-through",
    "kcoord_upstream_security_protocol": "SASL_SSL",
    "listeners": "SASL_PLAINTEXT://127.0.0.1:9092",
}


def test_logins_are_passed_on() -> None:
    assert config(**PASS_THROUGH).passes_logins
    assert not config().passes_logins
    authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    assert config(**PASS_THROUGH, authorizer_class_name=authorizer).passes_logins


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kcoord_upstream_authentication": "own-users"}, "own-users for configuration kcoord.upstream.authentication"),
        (
            {"kcoord_upstream_security_protocol": "SSL"},
            "SSL for configuration kcoord.upstream.security.protocol: it must be SASL_PLAINTEXT or SASL_SSL",
        ),
        (
            {"listeners": "PLAINTEXT://127.0.0.1:9092"},
            "configuration listeners: its security protocol must be SASL_PLAINTEXT or SASL_SSL",
        ),
        (
            {"sasl_enabled_mechanisms": "PLAIN"},
            "PLAIN for configuration sasl.enabled.mechanisms: with kcoord.upstream.authentication=pass-through the "
            "upstream decides about logins; leave it out",
        ),
        ({"connections_max_reauth_ms": "1000"}, "1000 for configuration connections.max.reauth.ms: with"),
        (
            {"listener.name.users.plain.sasl.jaas.config": "x required user_a='b';"},
            "[hidden] for configuration listener.name.users.plain.sasl.jaas.config: with",
        ),
    ],
)
def test_settings_that_do_not_fit_to_logins_that_are_passed_on(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**{**PASS_THROUGH, **settings})
    assert problem in str(error.value)


def test_logins_can_be_passed_on_only_to_an_upstream() -> None:
    with pytest.raises(ConfigError, match=r"set kcoord\.upstream\.bootstrap\.servers, too"):
        BrokerConfig.from_properties({"kcoord.upstream.authentication": "pass-through"})
