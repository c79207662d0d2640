# SPDX-License-Identifier: Apache-2.0
"""The answers of DescribeConfigs: values, sources, synonyms and flags, as observed in Kafka 4.3.1."""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.config import BrokerConfig
from kcoord.metadata import describe, records
from kcoord.metadata.describe import ConfigOrigin, DescribedConfig
from kcoord.metadata.image import ImageBuilder, MetadataImage

NO_METADATA = MetadataImage.empty()


def image_with(*configs: tuple[int, str, str, str]) -> MetadataImage:
    return ImageBuilder.of([records.new_config_record(*config) for config in configs])


def by_name(entries: list[DescribedConfig]) -> Mapping[str, DescribedConfig]:
    entries_by_name = {entry.name: entry for entry in entries}
    assert len(entries_by_name) == len(entries)
    return entries_by_name


def test_topic_keys_at_their_defaults() -> None:
    entries = describe.topic_config_entries(BrokerConfig.from_properties({}), NO_METADATA, {})
    assert len(entries) == 37
    assert [entry.name for entry in entries] == sorted(entry.name for entry in entries)
    assert {entry.source for entry in entries} == {ConfigOrigin.DEFAULT_CONFIG}
    assert not any(entry.read_only or entry.is_sensitive for entry in entries)
    described = by_name(entries)
    assert described["retention.ms"].value == "604800000"
    assert described["min.cleanable.dirty.ratio"].value == "0.5"
    assert described["leader.replication.throttled.replicas"].value == ""
    assert described["cleanup.policy"].synonyms == [("log.cleanup.policy", "delete", ConfigOrigin.DEFAULT_CONFIG)]
    assert described["retention.ms"].type == 5
    assert described["remote.storage.enable"].synonyms == []


def test_every_layer_of_a_topic_key() -> None:
    config = BrokerConfig.from_properties({"log.retention.ms": "4", "log.retention.hours": "3"})
    image = image_with((4, "", "log.retention.ms", "6"), (4, "1", "log.retention.ms", "5"))
    config.apply_dynamic(image.effective_broker_configs(1))
    retention = by_name(describe.topic_config_entries(config, image, {"retention.ms": "1000"}))["retention.ms"]
    assert (retention.value, retention.source) == ("1000", ConfigOrigin.DYNAMIC_TOPIC_CONFIG)
    assert retention.synonyms == [
        ("retention.ms", "1000", ConfigOrigin.DYNAMIC_TOPIC_CONFIG),
        ("log.retention.ms", "5", ConfigOrigin.DYNAMIC_BROKER_CONFIG),
        ("log.retention.ms", "6", ConfigOrigin.DYNAMIC_DEFAULT_BROKER_CONFIG),
        ("log.retention.ms", "4", ConfigOrigin.STATIC_BROKER_CONFIG),
        ("log.retention.hours", "3", ConfigOrigin.STATIC_BROKER_CONFIG),
        ("log.retention.hours", "168", ConfigOrigin.DEFAULT_CONFIG),
    ]
    retention = by_name(describe.topic_config_entries(config, image, {}))["retention.ms"]
    assert (retention.value, retention.source) == ("5", ConfigOrigin.DYNAMIC_BROKER_CONFIG)


def test_an_internal_topic_key_is_listed_if_the_topic_sets_it() -> None:
    config = BrokerConfig.from_properties({})
    entries = describe.topic_config_entries(config, NO_METADATA, {"internal.segment.bytes": "100"})
    assert len(entries) == 38


def test_broker_keys() -> None:
    config = BrokerConfig.from_properties({"broker.id": "1", "num.partitions": "1", "ssl.key.password": "secret"})
    image = image_with((4, "", "log.cleaner.threads", "2"), (4, "", "nope.nope", "x"), (4, "1", "its.own", "x"))
    config.apply_dynamic(image.effective_broker_configs(1))
    described = by_name(describe.broker_config_entries(config, image))
    assert described["num.partitions"].synonyms == [
        ("num.partitions", "1", ConfigOrigin.STATIC_BROKER_CONFIG),
        ("num.partitions", "1", ConfigOrigin.DEFAULT_CONFIG),
    ]
    assert described["num.partitions"].read_only
    threads = described["log.cleaner.threads"]
    assert (threads.value, threads.source, threads.read_only) == ("2", 3, False)
    password = described["ssl.key.password"]
    assert (password.value, password.is_sensitive) == (None, True)
    assert password.synonyms == [("ssl.key.password", None, ConfigOrigin.STATIC_BROKER_CONFIG)]
    assert described["log.retention.ms"].value is None
    assert described["node.id"].synonyms[0] == ("broker.id", "1", ConfigOrigin.STATIC_BROKER_CONFIG)
    assert described["log.cleaner.io.max.bytes.per.second"].value == "1.7976931348623157E308"
    assert "group.consumer.regex.refresh.interval.ms" not in described
    assert (described["nope.nope"].value, described["nope.nope"].is_sensitive, described["nope.nope"].source) == (
        None,
        True,
        3,
    )
    assert described["its.own"].source == ConfigOrigin.DYNAMIC_BROKER_CONFIG


def test_keys_for_one_listener_and_keys_of_plugins() -> None:
    """Kafka 4.3.1 described the same keys and values in this way."""
    config = BrokerConfig.from_properties(
        {
            "listener.name.internal.ssl.keystore.location": "/x",
            "listener.name.internal.ssl.keystore.password": "pw",
            "some.plugins.key": "5",
            "num.partitions": "1",
        }
    )
    image = image_with(
        (4, "1", "listener.name.internal.ssl.keystore.location", "/y"),
        (4, "1", "listener.name.internal.max.connections", "5"),
        (4, "", "listener.name.internal.max.connections", "6"),
        (4, "1", "listener.name.internal.num.partitions", "5"),
        (4, "1", "listener.name.internal.plain.sasl.jaas.config", "x required;"),
        (4, "1", "sasl.jaas.config", "x required;"),
        (4, "1", "listener.name.internal.no.such.key", "5"),
    )
    config.apply_dynamic(image.effective_broker_configs(1))
    described = by_name(describe.broker_config_entries(config, image))

    def shown(name: str) -> tuple[object, ...]:
        entry = described[name]
        assert entry.read_only
        assert entry.doc is None
        return entry.value, entry.is_sensitive, entry.type, entry.source, entry.synonyms

    prefix = "listener.name.internal."
    location, password = prefix + "ssl.keystore.location", prefix + "ssl.keystore.password"
    assert shown(location) == ("/y", False, 2, 2, [(location, "/y", 2), (location, "/x", 4)])
    assert shown(password) == (None, True, 9, 4, [(password, None, 4)])
    connections, partitions = prefix + "max.connections", prefix + "num.partitions"
    assert shown(connections) == (
        "5",
        False,
        3,
        2,
        [(connections, "5", 2), (connections, "6", 3), ("max.connections", "20000", 5)],
    )
    assert shown(partitions) == (
        "5",
        False,
        3,
        2,
        [(partitions, "5", 2), ("num.partitions", "1", 4), ("num.partitions", "1", 5)],
    )
    jaas, unknown = prefix + "plain.sasl.jaas.config", prefix + "no.such.key"
    assert shown(jaas) == (None, True, 9, 2, [(jaas, None, 2), ("sasl.jaas.config", None, 2)])
    assert shown(unknown) == (None, True, 0, 2, [(unknown, None, 2)])
    assert shown("some.plugins.key") == (None, True, 0, 4, [("some.plugins.key", None, 4)])
    (cluster_wide,) = describe.cluster_config_entries(image)
    assert (cluster_wide.name, cluster_wide.value, cluster_wide.read_only) == (connections, "6", True)
    assert cluster_wide.synonyms == [(connections, "6", ConfigOrigin.DYNAMIC_DEFAULT_BROKER_CONFIG)]


def test_cluster_wide_dynamic_configs() -> None:
    image = image_with((4, "", "log.retention.ms", "6"), (4, "", "nope.nope", "x"), (4, "1", "log.retention.ms", "5"))
    retention, unknown = describe.cluster_config_entries(image)
    assert (retention.name, retention.value, retention.source, retention.read_only) == (
        "log.retention.ms",
        "6",
        3,
        False,
    )
    assert retention.synonyms == [("log.retention.ms", "6", ConfigOrigin.DYNAMIC_DEFAULT_BROKER_CONFIG)]
    assert (unknown.name, unknown.value, unknown.type, unknown.read_only) == ("nope.nope", None, 0, True)


def test_group_keys() -> None:
    config = BrokerConfig.from_properties({"group.consumer.heartbeat.interval.ms": "6000"})
    image = image_with((32, "g", "consumer.session.timeout.ms", "50000"))
    described = by_name(describe.group_config_entries(config, image, "g"))
    assert len(described) == 22
    assert described["consumer.session.timeout.ms"].synonyms == [
        ("consumer.session.timeout.ms", "50000", ConfigOrigin.GROUP_CONFIG),
        ("group.consumer.session.timeout.ms", "45000", ConfigOrigin.DEFAULT_CONFIG),
    ]
    heartbeat = described["consumer.heartbeat.interval.ms"]
    assert (heartbeat.value, heartbeat.source) == ("6000", ConfigOrigin.STATIC_BROKER_CONFIG)
    assert described["share.isolation.level"].synonyms == [
        ("share.isolation.level", "read_uncommitted", ConfigOrigin.DEFAULT_CONFIG)
    ]
    unknown_group = describe.group_config_entries(BrokerConfig.from_properties({}), image, "nobody")
    assert {entry.source for entry in unknown_group} == {ConfigOrigin.DEFAULT_CONFIG}


def test_the_group_key_of_client_side_assignors() -> None:
    """It has the broker's key of the same name as its default, and is left out if the broker does not serve them."""
    name = "kcoord.client.assignor.fallback"
    enabled = BrokerConfig.from_properties({"kcoord.client.assignors.enable": "true", name: "server"})
    described = by_name(describe.group_config_entries(enabled, NO_METADATA, "g"))
    assert described[name].synonyms == [
        (name, "server", ConfigOrigin.STATIC_BROKER_CONFIG),
        (name, "wait", ConfigOrigin.DEFAULT_CONFIG),
    ]
    assert described[name].value == "server"
    disabled = BrokerConfig.from_properties({})
    assert name not in by_name(describe.group_config_entries(disabled, NO_METADATA, "g"))
    image = image_with((32, "g", name, "server"))
    assert by_name(describe.group_config_entries(disabled, image, "g"))[name].value == "server"


def test_group_keys_of_kafka_4_4() -> None:
    """Observed in Kafka 4.4.0: internal keys are listed only if the group sets them."""
    image = image_with((32, "g", "streams.num.warmup.replicas", "5"), (32, "g", "streams.assignor.name", "sticky"))
    described = by_name(describe.group_config_entries(BrokerConfig.from_properties({}), image, "g"))
    assert described["streams.num.warmup.replicas"].synonyms == [
        ("streams.num.warmup.replicas", "5", ConfigOrigin.GROUP_CONFIG),
        ("group.streams.num.warmup.replicas", "2", ConfigOrigin.DEFAULT_CONFIG),
    ]
    assert described["streams.assignor.name"].synonyms == [
        ("streams.assignor.name", "sticky", ConfigOrigin.GROUP_CONFIG),
        ("group.streams.assignors", "sticky", ConfigOrigin.DEFAULT_CONFIG),
    ]
    assert "consumer.assignor.offload.enable" not in described
    unset = by_name(describe.group_config_entries(BrokerConfig.from_properties({}), image, "nobody"))
    assert unset["streams.assignor.name"].value == "sticky"
    assert (unset["errors.deadletterqueue.topic.name"].value, unset["streams.rack.aware.assignment.tags"].type) == (
        "",
        7,
    )
    old = by_name(describe.group_config_entries(BrokerConfig.from_properties({"kcoord.release": "4.3"}), image, "g"))
    assert (len(old), "streams.num.warmup.replicas" in old) == (18, False)


def test_broker_and_topic_keys_by_release() -> None:
    for release, is_there in (("4.3", False), ("4.4", True)):
        config = BrokerConfig.from_properties({"kcoord.release": release})
        topic = by_name(describe.topic_config_entries(config, NO_METADATA, {}))
        assert ("max.decompressed.message.bytes" in topic) == is_there
        described = by_name(describe.broker_config_entries(config, NO_METADATA))
        assert ("group.streams.assignors" in described) == is_there
        assert "group.streams.num.warmup.replicas" not in described


def test_client_metrics_keys() -> None:
    image = image_with((16, "cm", "interval.ms", "1000"))
    described = by_name(describe.client_metrics_entries(image, "cm"))
    assert list(described) == ["interval.ms", "match", "metrics"]
    assert (described["interval.ms"].value, described["interval.ms"].source) == (
        "1000",
        ConfigOrigin.CLIENT_METRICS_CONFIG,
    )
    assert (described["match"].value, described["match"].source) == ("", ConfigOrigin.DEFAULT_CONFIG)
    assert by_name(describe.client_metrics_entries(image, "other"))["interval.ms"].value == "300000"
