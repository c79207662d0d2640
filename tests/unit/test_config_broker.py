# SPDX-License-Identifier: Apache-2.0
"""BrokerConfig: attributes, Kafka's own properties files, cross-checks, listeners, dynamic configs."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig, ConfigError, Listener, SecurityProtocol
from tests.support.calls import count_calls

KRAFT_SERVER_PROPERTIES = {
    "process.roles": "broker,controller",
    "node.id": "7",
    "controller.quorum.bootstrap.servers": "localhost:9093",
    "listeners": "PLAINTEXT://:9092,CONTROLLER://:9093",
    "inter.broker.listener.name": "PLAINTEXT",
    "advertised.listeners": "PLAINTEXT://localhost:9092,CONTROLLER://localhost:9093",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT",
    "num.network.threads": "3",
    "num.io.threads": "8",
    "log.dirs": "/tmp/kraft-combined-logs",
    "offsets.topic.replication.factor": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "log.retention.hours": "168",
    "log.segment.bytes": "1073741824",
}
"""The keys of the properties file in Kafka's distribution."""


def refused(**properties: str) -> str:
    with pytest.raises(ConfigError) as caught:
        BrokerConfig.from_properties({name.replace("_", "."): value for name, value in properties.items()})
    return str(caught.value)


def test_defaults() -> None:
    config = BrokerConfig.from_properties({})
    assert config.open_listeners == [Listener("PLAINTEXT", "127.0.0.1", 9092, SecurityProtocol.PLAINTEXT)]
    assert config.data_folders == ["./kcoord-data"]
    assert config.node_id == 1
    assert config.group_coordinator_threads == 1
    assert config.group_consumer_assignors == ["uniform", "range"]
    assert config.kcoord_log_flush_policy == "fsync"
    assert config.kcoord_kip1327_enable is True
    assert config.log_retention_ms is None
    assert not config.explicit
    assert not config.ignored


def test_kafkas_properties_file_loads() -> None:
    config = BrokerConfig.from_properties(KRAFT_SERVER_PROPERTIES)
    assert config.node_id == 7
    assert [str(listener) for listener in config.open_listeners] == ["PLAINTEXT://:9092"]
    assert [str(listener) for listener in config.client_advertised_listeners] == ["PLAINTEXT://localhost:9092"]
    assert config.data_folders == ["/tmp/kraft-combined-logs"]
    assert "num.io.threads" in config.ignored
    assert "controller.quorum.bootstrap.servers" in config.ignored
    assert not config.unknown


@pytest.mark.parametrize("name", ["log.dirs", "log.dir"])
def test_a_data_folder_is_needed(name: str) -> None:
    assert f"configuration {name}: at least one log directory" in refused(**{name.replace(".", "_"): ""})


def test_keys_of_plugins_and_unknown_keys_are_accepted() -> None:
    properties = {"metrics.jmx.include": "a", "listener.name.ssl.ssl.keystore.location": "x", "no.such.key": "1"}
    config = BrokerConfig.from_properties(properties)
    assert config.ignored == ["metrics.jmx.include"]
    assert config.unknown == ["no.such.key"]


def test_keys_without_effect_are_checked() -> None:
    assert "num.io.threads" in refused(num_io_threads="0")


def test_broker_id_counts_if_node_id_is_not_set() -> None:
    assert BrokerConfig.from_properties({"broker.id": "5"}).node_id == 5
    assert BrokerConfig.from_properties({"broker.id": "5", "node.id": "5"}).node_id == 5
    assert "Invalid value -1 for configuration node.id" in refused(broker_id="-1")


def test_broker_id_and_node_id_cannot_differ() -> None:
    assert refused(broker_id="5", node_id="6") == (
        "Invalid value 6 for configuration node.id: it must be the same as broker.id (5), which is its older name"
    )


@pytest.mark.parametrize("kind", ["consumer", "share", "streams"])
@pytest.mark.parametrize(
    ("setting", "low", "high"),
    [
        ("session.timeout.ms", 45000, 60000),
        ("heartbeat.interval.ms", 5000, 15000),
        ("assignment.interval.ms", 0, 15000),
    ],
)
def test_defaults_lie_between_the_limits(kind: str, setting: str, low: int, high: int) -> None:
    name = f"group.{kind}.{setting}"
    BrokerConfig.from_properties({name: str(high)})
    with pytest.raises(ConfigError, match=f"{high + 1} for configuration {name}: .*group.{kind}.max"):
        BrokerConfig.from_properties({name: str(high + 1)})
    if low:
        with pytest.raises(ConfigError, match=f"{low - 1} for configuration {name}: .*group.{kind}.min"):
            BrokerConfig.from_properties({name: str(low - 1)})
    with pytest.raises(ConfigError, match=f"group.{kind}.max.{setting}"):
        BrokerConfig.from_properties({f"group.{kind}.min.{setting}": str(high + 1)})


def test_heartbeat_interval_is_less_than_session_timeout() -> None:
    properties = {
        "group.consumer.min.session.timeout.ms": "5000",
        "group.consumer.session.timeout.ms": "5000",
    }
    with pytest.raises(ConfigError, match=r"group\.consumer\.heartbeat\.interval\.ms: it must be less than"):
        BrokerConfig.from_properties(properties)


def test_assignors() -> None:
    assert "best is not uniform, range, uniform-rack" in refused(group_consumer_assignors="uniform,best")
    assert "a..b:C is not" in refused(group_consumer_assignors="a..b:C")
    assert "twice" in refused(
        group_consumer_assignors="range,org.apache.kafka.coordinator.group.assignor.RangeAssignor"
    )
    assert "group.consumer.assignors" in refused(group_consumer_assignors="")
    assert "group.share.assignors" in refused(group_share_assignors="simple,other")


def test_the_classic_protocol_cannot_be_disabled() -> None:
    message = refused(group_coordinator_rebalance_protocols="consumer")
    assert "group.coordinator.rebalance.protocols: Disabling the 'classic' protocol is not supported." in message


def test_limits() -> None:
    assert "socket.request.max.bytes" in refused(queued_max_request_bytes="1000")
    assert "-1 (no limit)" in refused(log_retention_ms="0")
    assert "log.roll.ms: it must be at least 1" in refused(log_roll_ms="0")
    assert "log.roll.jitter.ms: it must be at least 0" in refused(log_roll_jitter_ms="-1")
    assert "more than 1048576" in refused(log_cleaner_dedupe_buffer_size="1048576")
    assert "overrides" in refused(max_connections_per_ip="0")
    assert "host:count" in refused(max_connections_per_ip_overrides="localhost")
    BrokerConfig.from_properties({"max.connections.per.ip": "0", "max.connections.per.ip.overrides": "[::1]:5,a:1"})


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("PLAINTEXT://:9092", "", 9092),
        ("plaintext://0.0.0.0:0", "0.0.0.0", 0),
        ("PLAINTEXT://[::1]:9092", "::1", 9092),
        ("PLAINTEXT://[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        (" PLAINTEXT://kafka.example-1.org:1 ", "kafka.example-1.org", 1),
    ],
)
def test_listener(text: str, host: str, port: int) -> None:
    config = BrokerConfig.from_properties({"listeners": text})
    assert config.open_listeners == [Listener("PLAINTEXT", host, port, SecurityProtocol.PLAINTEXT)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no listener"),
        ("127.0.0.1:9092", "NAME://host:port"),
        ("PLAINTEXT://127.0.0.1", "NAME://host:port"),
        ("PLAINTEXT://::1:9092", "NAME://host:port"),
        ("PLAINTEXT://a:65536", "between 0 and 65535"),
        ("PLAINTEXT://a:-1", "between 0 and 65535"),
        ("FOO://a:1", "no security protocol for FOO"),
        ("PLAINTEXT://a:1,PLAINTEXT://a:2", "a different name"),
        ("PLAINTEXT://a:1,SSL://a:1", "a different port"),
    ],
)
def test_bad_listeners(text: str, problem: str) -> None:
    message = refused(listeners=text)
    assert "configuration listeners" in message
    assert problem in message


def test_ipv4_and_ipv6_listeners_may_share_a_port() -> None:
    protocols = "A:PLAINTEXT,B:PLAINTEXT"
    config = BrokerConfig.from_properties(
        {"listeners": "A://127.0.0.1:1,B://[::1]:1", "listener.security.protocol.map": protocols}
    )
    assert [str(listener) for listener in config.open_listeners] == ["A://127.0.0.1:1", "B://[::1]:1"]


def test_bad_protocol_map() -> None:
    assert "NAME:PROTOCOL" in refused(listener_security_protocol_map="PLAINTEXT:NONE")
    assert "occurs twice" in refused(listener_security_protocol_map="A:SSL,a:SSL")


def test_advertised_listeners_must_be_reachable_and_listened_on() -> None:
    assert "cannot connect to 0.0.0.0" in refused(advertised_listeners="PLAINTEXT://0.0.0.0:9092")
    assert "not among listeners" in refused(advertised_listeners="SSL://a:9092")
    assert "inter.broker.listener.name" in refused(inter_broker_listener_name="SSL")


def test_addresses_that_clients_get() -> None:
    config = BrokerConfig.from_properties({"listeners": "PLAINTEXT://0.0.0.0:0"})
    bound = {"PLAINTEXT": Listener("PLAINTEXT", "0.0.0.0", 4711, SecurityProtocol.PLAINTEXT)}
    assert [str(listener) for listener in config.advertised(bound, "box")] == ["PLAINTEXT://box:4711"]
    config = BrokerConfig.from_properties(
        {"listeners": "PLAINTEXT://:0", "advertised.listeners": "PLAINTEXT://outside:0"}
    )
    assert [str(listener) for listener in config.advertised(bound, "box")] == ["PLAINTEXT://outside:4711"]


def test_a_key_that_is_no_longer_dynamic_has_its_static_value_again() -> None:
    config = BrokerConfig.from_properties({"log.retention.ms": "5000"})
    config.apply_dynamic({"log.retention.ms": "9000", "message.max.bytes": "77"})
    assert (config.log_retention_ms, config.message_max_bytes) == (9000, 77)
    assert config.value("log.retention.ms") == 9000
    config.apply_dynamic({"message.max.bytes": "78"})
    assert (config.log_retention_ms, config.message_max_bytes) == (5000, 78)


def test_unusable_dynamic_configs_are_left_out() -> None:
    config = BrokerConfig.from_properties({})
    config.apply_dynamic({"message.max.bytes": "many", "group.consumer.assignment.interval.ms": "99999", "x": "1"})
    assert config.message_max_bytes == 1048588
    assert config.group_consumer_assignment_interval_ms == 1000
    assert config.dynamic == {"x": "1"}


@pytest.mark.parametrize("name", ["max.connections", "max.connection.creation.rate"])
def test_no_dynamic_config_keeps_all_clients_away(name: str) -> None:
    """Nobody could connect to undo it. Kafka 4.3.1 rejects it, too, but accepts 0 in the properties file."""
    config = BrokerConfig.from_properties({name: "0"})
    with pytest.raises(ConfigError, match=f"Invalid value 0 for configuration {name}: it must be at least 1"):
        config.with_dynamic({name: "0"})
    assert config.with_dynamic({name: "1"}).value(name) == 1
    config.apply_dynamic({name: "0", "message.max.bytes": "77"})
    assert config.dynamic == {"message.max.bytes": "77"}


def test_dynamic_configs_that_fit_are_checked_once() -> None:
    """One check reads all keys of the broker, so a check for each dynamic config would pause the event loop."""
    config = BrokerConfig.from_properties({})

    def calls(count: int) -> int:
        return count_calls(lambda: config.apply_dynamic({f"k{number}": "1" for number in range(count)}))

    assert calls(100) < 2 * calls(1)


def test_with_dynamic_does_not_change_the_original() -> None:
    config = BrokerConfig.from_properties({})
    assert config.with_dynamic({"message.max.bytes": "5"}).message_max_bytes == 5
    assert config.message_max_bytes == 1048588
    with pytest.raises(ConfigError):
        config.with_dynamic({"message.max.bytes": "-5"})
