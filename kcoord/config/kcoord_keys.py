# SPDX-License-Identifier: Apache-2.0
"""Broker keys that Kafka does not have; all begin with `kcoord.`."""

from __future__ import annotations

from kcoord.config.key import ConfigKey, ConfigType, Importance, ListOf, Matches, OneOf, UpdateMode, at_least, between
from kcoord.config.kip1327 import DEFAULT_REVISIONS, REVISION_ENTRY

FEATURE_LEVELS = ("group.version=0", "group.version=1", *(f"transaction.version={level}" for level in range(3)))

KCOORD_KEYS: tuple[ConfigKey, ...] = (
    ConfigKey(
        "kcoord.assignor.inline.ms",
        ConfigType.INT,
        10,
        at_least(0),
        Importance.LOW,
        "A target assignment that is expected to take longer is computed in the background; until it is there, members "
        "keep the old one. Nor may it hold a request up for more than 1 % of the assignment interval, or 1 ms.",
    ),
    ConfigKey(
        "kcoord.bootstrap.features",
        ConfigType.LIST,
        [],
        ListOf(FEATURE_LEVELS),
        Importance.LOW,
        "Feature levels of a new cluster that differ from the highest, as `kafka-storage format --feature` sets them.",
    ),
    ConfigKey(
        "kcoord.client.telemetry.endpoint",
        ConfigType.STRING,
        "",
        Matches(r"(https?://\S+)?", "an http or https URL, or empty"),
        Importance.LOW,
        "Where metrics go that clients push (KIP-714): an OpenTelemetry collector's OTLP/HTTP address, such as "
        "http://127.0.0.1:4318/v1/metrics. Empty: clients are not asked for any, unless metric.reporters says so.",
    ),
    ConfigKey(
        "kcoord.fast.paths.enable",
        ConfigType.BOOLEAN,
        True,
        None,
        Importance.LOW,
        "Let heartbeats, offset commits and offset fetches that repeat earlier ones take short cuts; off, each takes "
        "the full path, for debugging.",
    ),
    ConfigKey(
        "kcoord.kip1327.enable",
        ConfigType.BOOLEAN,
        True,
        None,
        Importance.MEDIUM,
        "Offer the API versions that KIP-1327 adds (creation times of groups and partitions); false means "
        "kcoord.kip1327.revisions=*:off.",
    ),
    ConfigKey(
        "kcoord.kip1327.revisions",
        ConfigType.LIST,
        DEFAULT_REVISIONS,
        Matches(REVISION_ENTRY, "entries of software-name:form or *:form, form off, creation-time or new-partitions"),
        Importance.LOW,
        "Which form of KIP-1327 each client is served, by the exact name of its software in ApiVersions v3 and later. "
        "The first entry that matches decides; * matches every client, and alone matches clients that give no name; "
        "a client that no entry matches is served off.",
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
        "kcoord.max.id.bytes",
        ConfigType.INT,
        4096,
        at_least(1),
        Importance.LOW,
        "Longest id of a new group, member or instance, in UTF-8.",
    ),
    ConfigKey(
        "kcoord.metrics.host",
        ConfigType.STRING,
        "127.0.0.1",
        None,
        Importance.LOW,
        "The address of the metrics page; 0.0.0.0 for all.",
    ),
    ConfigKey(
        "kcoord.metrics.port",
        ConfigType.INT,
        -1,
        between(-1, 65535),
        Importance.MEDIUM,
        "The port of the metrics page for Prometheus (`/metrics`); -1 for none, 0 for any that is free.",
    ),
    ConfigKey(
        "kcoord.offsets.expiration.policy",
        ConfigType.STRING,
        "kip211",
        OneOf(("kip211", "kafka")),
        Importance.MEDIUM,
        "From when offsets of consumer-protocol groups age: kip211 once the group is empty, kafka from their commit.",
    ),
    ConfigKey(
        "kcoord.partition.max.groups",
        ConfigType.INT,
        20_000,
        at_least(1),
        Importance.MEDIUM,
        "Most groups in one partition of __consumer_offsets; a request that would make one more is refused.",
        update_mode=UpdateMode.CLUSTER_WIDE,
    ),
    ConfigKey(
        "kcoord.release",
        ConfigType.STRING,
        "4.4",
        OneOf(("4.4", "4.3")),
        Importance.MEDIUM,
        "The release of Apache Kafka that the broker behaves like: versions of the APIs, epochs, errors and configs.",
    ),
    ConfigKey(
        "kcoord.request.max.bytes",
        ConfigType.INT,
        4 << 20,
        at_least(1024),
        Importance.MEDIUM,
        "Largest request that carries no records; Produce is limited by socket.request.max.bytes alone.",
    ),
    ConfigKey(
        "kcoord.response.buffer.max.bytes",
        ConfigType.LONG,
        256 << 20,
        at_least(1 << 20),
        Importance.LOW,
        "Most bytes of answers that a client may leave unread before its connection is closed.",
    ),
    ConfigKey(
        "kcoord.worker.ports",
        ConfigType.LIST,
        [],
        None,
        Importance.MEDIUM,
        "Ports of the first listener, one for each worker process; by default the ports that follow the listener's. "
        "`kcoord.worker.N.KEY` sets any other key for worker N alone, counted from 0.",
    ),
    ConfigKey(
        "kcoord.worker.racks",
        ConfigType.LIST,
        [],
        None,
        Importance.LOW,
        "Racks of the worker processes, in their order; by default all are in broker.rack.",
    ),
)
