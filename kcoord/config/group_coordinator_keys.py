# SPDX-License-Identifier: Apache-2.0
"""Broker keys of the group coordinator and of committed offsets."""

from __future__ import annotations

from kcoord.config.key import (
    INT_MAX,
    ConfigKey,
    ConfigType,
    Importance,
    ListOf,
    OneOf,
    UpdateMode,
    at_least,
    between,
)

STRING = ConfigType.STRING
INT = ConfigType.INT
SHORT = ConfigType.SHORT
LONG = ConfigType.LONG
LIST = ConfigType.LIST
HIGH = Importance.HIGH
MEDIUM = Importance.MEDIUM
CLUSTER_WIDE = UpdateMode.CLUSTER_WIDE

GROUP_COORDINATOR_KEYS: tuple[ConfigKey, ...] = (
    ConfigKey(
        "group.consumer.assignment.interval.ms",
        INT,
        1000,
        at_least(0),
        MEDIUM,
        "Least time between two target assignments computed for the same consumer group; joins and leaves in "
        "between are answered by one computation.",
        update_mode=CLUSTER_WIDE,
    ),
    ConfigKey(
        "group.consumer.assignor.offload.enable",
        ConfigType.BOOLEAN,
        True,
        None,
        MEDIUM,
        "Compute target assignments that take long in the background; off, the request that asks for one waits for it.",
        internal=True,
        first_release="4.4",
    ),
    ConfigKey(
        "group.consumer.assignors",
        LIST,
        ["uniform", "range"],
        ListOf(allow_empty=False),
        MEDIUM,
        "Server-side assignors that consumer groups may use, best first; the first is used when members name "
        "none. Known here: uniform, range, each by this name or by the name of Kafka's class.",
    ),
    ConfigKey(
        "group.consumer.heartbeat.interval.ms",
        INT,
        5000,
        at_least(1),
        MEDIUM,
        "How often members of consumer groups are told to send a heartbeat.",
    ),
    ConfigKey(
        "group.consumer.max.assignment.interval.ms",
        INT,
        15000,
        at_least(0),
        MEDIUM,
        "Largest value of the group config consumer.assignment.interval.ms.",
    ),
    ConfigKey(
        "group.consumer.max.heartbeat.interval.ms",
        INT,
        15000,
        at_least(1),
        MEDIUM,
        "Largest value of the group config consumer.heartbeat.interval.ms.",
    ),
    ConfigKey(
        "group.consumer.max.session.timeout.ms",
        INT,
        60000,
        at_least(1),
        MEDIUM,
        "Largest value of the group config consumer.session.timeout.ms.",
    ),
    ConfigKey(
        "group.consumer.max.size",
        INT,
        INT_MAX,
        at_least(1),
        MEDIUM,
        "Most members that one consumer group may have.",
    ),
    ConfigKey(
        "group.consumer.migration.policy",
        STRING,
        "bidirectional",
        OneOf(("DISABLED", "DOWNGRADE", "UPGRADE", "BIDIRECTIONAL"), ignore_case=True),
        MEDIUM,
        "Which conversions of groups with live members between the classic and the consumer protocol are allowed.",
    ),
    ConfigKey(
        "group.consumer.min.assignment.interval.ms",
        INT,
        0,
        at_least(0),
        MEDIUM,
        "Smallest value of the group config consumer.assignment.interval.ms.",
    ),
    ConfigKey(
        "group.consumer.min.heartbeat.interval.ms",
        INT,
        5000,
        at_least(1),
        MEDIUM,
        "Smallest value of the group config consumer.heartbeat.interval.ms.",
    ),
    ConfigKey(
        "group.consumer.min.session.timeout.ms",
        INT,
        45000,
        at_least(1),
        MEDIUM,
        "Smallest value of the group config consumer.session.timeout.ms.",
    ),
    ConfigKey(
        "group.consumer.regex.refresh.interval.ms",
        INT,
        600000,
        at_least(10000),
        MEDIUM,
        "How often subscribed regular expressions are matched with the topic names again.",
        internal=True,
    ),
    ConfigKey(
        "group.consumer.session.timeout.ms",
        INT,
        45000,
        at_least(1),
        MEDIUM,
        "A member of a consumer group that is silent for this long is removed.",
    ),
    ConfigKey(
        "group.coordinator.append.linger.ms",
        INT,
        -1,
        at_least(-1),
        MEDIUM,
        "How long a write of the coordinator waits for others to join it; -1 waits only while others keep coming, 0 "
        "never.",
    ),
    ConfigKey(
        "group.coordinator.background.threads",
        INT,
        2,
        at_least(1),
        HIGH,
        "Threads for work that must not delay requests, such as matching regular expressions.",
    ),
    ConfigKey(
        "group.coordinator.rebalance.protocols",
        LIST,
        ["classic", "consumer", "streams"],
        ListOf(("consumer", "classic", "share", "streams")),
        MEDIUM,
        "Group protocols that are enabled: classic must be among them, consumer can be left out. Groups of the other "
        "kinds are not served.",
    ),
    ConfigKey(
        "group.coordinator.threads",
        INT,
        1,
        at_least(1),
        HIGH,
        "Workers that share the coordinator's partitions; each one is a process with a port of its own.",
    ),
    ConfigKey(
        "group.initial.rebalance.delay.ms",
        INT,
        3000,
        None,
        MEDIUM,
        "How long the first rebalance of an empty classic group waits for more members.",
    ),
    ConfigKey(
        "group.max.session.timeout.ms",
        INT,
        1800000,
        None,
        MEDIUM,
        "Largest session timeout that a member of a classic group may ask for.",
    ),
    ConfigKey("group.max.size", INT, INT_MAX, at_least(1), MEDIUM, "Most members that one classic group may have."),
    ConfigKey(
        "group.min.session.timeout.ms",
        INT,
        6000,
        None,
        MEDIUM,
        "Smallest session timeout that a member of a classic group may ask for.",
    ),
    ConfigKey("offset.metadata.max.bytes", INT, 4096, None, HIGH, "Longest metadata text of one committed offset."),
    ConfigKey(
        "offsets.commit.timeout.ms",
        INT,
        5000,
        at_least(1),
        HIGH,
        "A request whose write to the coordinator's log is not done after this time is answered with "
        "COORDINATOR_NOT_AVAILABLE; this is looked at once a second.",
    ),
    ConfigKey(
        "offsets.retention.check.interval.ms",
        LONG,
        600000,
        at_least(1),
        HIGH,
        "How often expired offsets are looked for.",
    ),
    ConfigKey(
        "offsets.retention.minutes",
        INT,
        10080,
        at_least(1),
        HIGH,
        "How long committed offsets are kept once nothing protects them any more (KIP-211).",
    ),
    ConfigKey(
        "offsets.topic.compression.codec",
        INT,
        0,
        between(0, 4),
        HIGH,
        "Compression of what the coordinator writes: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd. Markers of transactions "
        "are not compressed.",
    ),
    ConfigKey(
        "offsets.topic.num.partitions",
        INT,
        50,
        at_least(1),
        HIGH,
        "Partitions of the coordinator's log, which are the shards of all groups. Must not change once there is data.",
    ),
    ConfigKey(
        "offsets.topic.replication.factor",
        SHORT,
        1,
        at_least(1),
        HIGH,
        "Replicas of the coordinator's log, at most one for each worker. They are nominal: one copy is kept.",
    ),
    ConfigKey(
        "offsets.topic.segment.bytes",
        INT,
        104857600,
        at_least(1),
        HIGH,
        "Segment size of the coordinator's log; small segments make compaction and loading quick.",
    ),
)
