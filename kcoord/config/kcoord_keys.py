# SPDX-License-Identifier: Apache-2.0
"""Broker keys that Kafka does not have; all begin with `kcoord.`."""

from __future__ import annotations

from kcoord.config.key import ConfigKey, ConfigType, Importance, ListOf, OneOf

FEATURE_LEVELS = ("group.version=0", "group.version=1", *(f"transaction.version={level}" for level in range(3)))

KCOORD_KEYS: tuple[ConfigKey, ...] = (
    ConfigKey(
        "kcoord.bootstrap.features",
        ConfigType.LIST,
        [],
        ListOf(FEATURE_LEVELS),
        Importance.LOW,
        "Feature levels of a new cluster that differ from the highest, as `kafka-storage format --feature` sets them.",
    ),
    ConfigKey(
        "kcoord.heartbeat.memo.enable",
        ConfigType.BOOLEAN,
        True,
        None,
        Importance.LOW,
        "Answer repeated heartbeats from memory; off, every heartbeat takes the full path, for debugging.",
    ),
    ConfigKey(
        "kcoord.kip1327.enable",
        ConfigType.BOOLEAN,
        True,
        None,
        Importance.MEDIUM,
        "Offer the API versions that KIP-1327 adds (creation times of groups and partitions).",
    ),
    ConfigKey(
        "kcoord.log.flush.policy",
        ConfigType.STRING,
        "fsync",
        OneOf(("fsync", "os")),
        Importance.HIGH,
        "When a write is acknowledged: fsync waits for the disk, os leaves writing to the system as Kafka does.",
    ),
    ConfigKey(
        "kcoord.metadata.cache.enable",
        ConfigType.BOOLEAN,
        True,
        None,
        Importance.LOW,
        "Answer repeated Metadata and DescribeTopicPartitions requests from memory; off, each is made anew.",
    ),
    ConfigKey(
        "kcoord.offsets.expiration.policy",
        ConfigType.STRING,
        "kip211",
        OneOf(("kip211", "kafka")),
        Importance.MEDIUM,
        "From when offsets of consumer-protocol groups age: kip211 once the group is empty, kafka from their commit.",
    ),
)
