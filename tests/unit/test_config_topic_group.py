# SPDX-License-Identifier: Apache-2.0
"""Topic and group settings: the sources of a value, and values that are rejected."""

from __future__ import annotations

import pytest

from kcoord.config import (
    BROKER_KEYS,
    GROUP_KEYS,
    TOPIC_KEYS,
    BrokerConfig,
    ConfigError,
    GroupConfig,
    TopicConfig,
    check_group_configs,
    check_topic_configs,
)

HOUR_MS = 3_600_000


def broker(**properties: str) -> BrokerConfig:
    return BrokerConfig.from_properties({name.replace("_", "."): value for name, value in properties.items()})


def test_synonyms_are_broker_keys_with_the_same_default() -> None:
    defaults = TopicConfig.resolve(broker(), {})
    for name, key in TOPIC_KEYS.items():
        assert all(broker_key in BROKER_KEYS for broker_key, _ in key.synonyms)
        assert defaults.values[name] == key.default, name


@pytest.mark.parametrize(
    ("properties", "retention_ms"),
    [
        ({}, 168 * HOUR_MS),
        ({"log_retention_hours": "1"}, HOUR_MS),
        ({"log_retention_hours": "1", "log_retention_minutes": "2"}, 120_000),
        ({"log_retention_hours": "1", "log_retention_minutes": "2", "log_retention_ms": "3"}, 3),
        ({"log_retention_hours": "-1"}, -1),
        ({"log_retention_ms": "-1"}, -1),
    ],
)
def test_retention_by_the_brokers_three_keys(properties: dict[str, str], retention_ms: int) -> None:
    assert TopicConfig.resolve(broker(**properties), {}).retention_ms == retention_ms


def test_topic_configs_win() -> None:
    config = TopicConfig.resolve(
        broker(log_retention_ms="5", log_cleanup_policy="compact", log_roll_hours="2"),
        {"retention.ms": "6", "cleanup.policy": "delete", "segment.bytes": "2000000"},
    )
    assert (config.retention_ms, config.segment_bytes, config.segment_ms) == (6, 2_000_000, 2 * HOUR_MS)
    assert config.is_deleted
    assert not config.is_compacted


def test_internal_segment_size() -> None:
    assert TopicConfig.resolve(broker(), {"internal.segment.bytes": "100"}).effective_segment_bytes == 100
    assert TopicConfig.resolve(broker(), {}).effective_segment_bytes == 1 << 30


def test_unusable_stored_values_count_as_not_set() -> None:
    config = TopicConfig.resolve(broker(), {"retention.ms": "soon", "gone.in.this.release": "1"})
    assert config.retention_ms == 168 * HOUR_MS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention.ms", "-2"),
        ("segment.bytes", "1048575"),
        ("cleanup.policy", "shred"),
        ("compression.type", "brotli"),
        ("compression.gzip.level", "0"),
        ("min.cleanable.dirty.ratio", "1.1"),
        ("leader.replication.throttled.replicas", "x"),
        ("no.such.key", "1"),
    ],
)
def test_bad_topic_configs(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        check_topic_configs(broker(), {name: value})


@pytest.mark.parametrize("value", ["", "*", "0:1", "0:1,12:3"])
def test_throttled_replicas(value: str) -> None:
    check_topic_configs(broker(), {"leader.replication.throttled.replicas": value})


def test_compaction_lags_fit_together() -> None:
    with pytest.raises(ConfigError, match=r"min\.compaction\.lag\.ms"):
        check_topic_configs(broker(), {"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "9"})


def test_group_defaults_are_the_values_of_the_broker() -> None:
    config = GroupConfig.resolve(broker(group_consumer_session_timeout_ms="46000"), {})
    assert config.consumer_session_timeout_ms == 46000
    assert config.consumer_heartbeat_interval_ms == 5000
    assert config.consumer_assignment_interval_ms == 1000
    assert config.values["share.isolation.level"] == "read_uncommitted"


def test_group_values_are_moved_into_the_current_limits() -> None:
    stored = {"consumer.session.timeout.ms": "50000", "consumer.heartbeat.interval.ms": "x", "unknown": "1"}
    config = GroupConfig.resolve(broker(group_consumer_max_session_timeout_ms="48000"), stored)
    assert config.consumer_session_timeout_ms == 48000
    assert config.consumer_heartbeat_interval_ms == 5000
    config = GroupConfig.resolve(broker(), {"consumer.session.timeout.ms": "1"})
    assert config.consumer_session_timeout_ms == 45000


@pytest.mark.parametrize(
    "name", [name for name in GROUP_KEYS if name.endswith((".timeout.ms", "heartbeat.interval.ms"))]
)
def test_group_values_outside_the_limits_name_both_limits(name: str) -> None:
    kind, _, setting = name.partition(".")
    lowest, highest = (broker().value(f"group.{kind}.{limit}.{setting}") for limit in ("min", "max"))
    for value in ("2", "999999999"):
        with pytest.raises(ConfigError) as caught:
            check_group_configs(broker(), {name: value})
        assert str(caught.value) == f"{name} must be in the range {lowest} to {highest} inclusive."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("consumer.session.timeout.ms", "0"),
        ("consumer.session.timeout.ms", "long"),
        ("streams.num.standby.replicas", "3"),
        ("share.auto.offset.reset", "by_duration:5m"),
        ("share.auto.offset.reset", "by_duration:P"),
        ("share.auto.offset.reset", "by_duration:PT"),
        ("group.consumer.session.timeout.ms", "50000"),
    ],
)
def test_bad_group_configs(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        check_group_configs(broker(), {name: value})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("consumer.assignor.offload.enable", "false", "maybe"),
        ("errors.deadletterqueue.copy.record.enable", "true", "1"),
        ("errors.deadletterqueue.topic.name", "dlq", "__dlq"),
        ("share.assignor.offload.enable", "false", "x"),
        ("streams.acceptable.recovery.lag", "99999999999", "-1"),
        ("streams.assignor.name", "sticky", "foo"),
        ("streams.assignor.offload.enable", "true", ""),
        ("streams.num.warmup.replicas", "20", "21"),
        ("streams.rack.aware.assignment.tags", "a, b", "a,,b"),
        ("streams.rack.aware.assignment.tags", "", "a,a"),
        ("streams.task.offset.interval.ms", "15000", "14999"),
    ],
)
def test_group_configs_of_kafka_4_4(name: str, good: str, bad: str) -> None:
    """Kafka 4.4.0 accepts and rejects these values. 4.3.1 does not know the keys."""
    check_group_configs(broker(), {name: good})
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        check_group_configs(broker(), {name: bad})
    with pytest.raises(ConfigError, match="Unknown group config name"):
        check_group_configs(broker(kcoord_release="4.3"), {name: good})


@pytest.mark.parametrize(
    "value", ["latest", "earliest", "by_duration:P1D", "by_duration:P1DT2H3M4.5S", "by_duration:PT5M"]
)
def test_share_offset_reset(value: str) -> None:
    check_group_configs(broker(), {"share.auto.offset.reset": value})


def test_group_session_timeout_exceeds_heartbeat_interval() -> None:
    limits = broker(group_consumer_min_session_timeout_ms="1000")
    with pytest.raises(ConfigError, match="must be greater than"):
        check_group_configs(limits, {"consumer.session.timeout.ms": "5000"})
