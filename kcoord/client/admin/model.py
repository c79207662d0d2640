# SPDX-License-Identifier: Apache-2.0
"""What the admin client takes and returns. Times and epochs that a broker does not know are None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kcoord.client.reset_policy import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from kcoord.client.types import Node, TopicPartition
from kcoord_protocol.uuid import ZERO_UUID, uuid_to_string

_NOT_ASKED = -(1 << 31)


class AclOperation(IntEnum):
    """What one may do; a broker tells it as a set of bits."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


def authorized_operations(bits: int) -> frozenset[AclOperation] | None:
    """The set behind the bits, None where it was not asked for."""
    if bits == _NOT_ASKED:
        return None
    return frozenset(operation for operation in AclOperation if bits >> operation & 1)


def known_time(time_ms: int) -> int | None:
    """A creation time (KIP-1327), None where the broker does not know it."""
    return time_ms if time_ms >= 0 else None


@dataclass(slots=True)
class NewTopic:
    """A topic to create; -1 lets the broker choose. Assignments name the replicas of each partition instead."""

    name: str
    num_partitions: int = -1
    replication_factor: int = -1
    assignments: Mapping[int, Sequence[int]] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class NewPartitions:
    """How many partitions a topic shall have, and where the new ones go."""

    total_count: int
    assignments: Sequence[Sequence[int]] | None = None


@dataclass(slots=True)
class CreatedTopic:
    """What was made. Counts and configs are None where the broker is too old to tell."""

    name: str
    topic_id: bytes = ZERO_UUID
    num_partitions: int | None = None
    replication_factor: int | None = None
    configs: dict[str, str | None] | None = None


@dataclass(slots=True)
class TopicListing:
    """A topic in a list."""

    name: str
    topic_id: bytes
    is_internal: bool


@dataclass(slots=True)
class TopicPartitionInfo:
    """A partition. `creation_time_ms` is None where the broker does not support KIP-1327 or the partition is older than
    that; the two lists of KIP-966 are None on brokers without it.
    """

    partition: int
    leader: Node | None
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    offline_replicas: list[int]
    creation_time_ms: int | None = None
    eligible_leader_replicas: list[int] | None = None
    last_known_elr: list[int] | None = None


@dataclass(slots=True)
class TopicDescription:
    """A topic and its partitions, in order."""

    name: str
    topic_id: bytes
    is_internal: bool
    partitions: list[TopicPartitionInfo]
    authorized_operations: frozenset[AclOperation] | None = None

    @property
    def topic_id_text(self) -> str:
        """The id as Kafka's tools print it."""
        return uuid_to_string(self.topic_id)


@dataclass(slots=True)
class ClusterDescription:
    """The brokers."""

    cluster_id: str
    controller: Node | None
    nodes: list[Node]
    authorized_operations: frozenset[AclOperation] | None = None


@dataclass(slots=True)
class GroupListing:
    """A group in a list. State and type are empty on brokers that do not tell them; a group that only has offsets has
    no protocol type.
    """

    group_id: str
    protocol_type: str
    state: str
    group_type: str

    @property
    def is_simple(self) -> bool:
        return not self.protocol_type


@dataclass(slots=True)
class MemberDescription:
    """A member. What only the consumer protocol has is None for members of classic groups."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    host: str
    assignment: frozenset[TopicPartition]
    rack_id: str | None = None
    member_epoch: int | None = None
    target_assignment: frozenset[TopicPartition] | None = None
    subscribed_topic_names: tuple[str, ...] = ()
    subscribed_topic_regex: str | None = None
    upgraded: bool | None = None
    has_unreadable_subscription: bool = False
    """A member of a classic group whose metadata is none of the consumer's formats. Brokers treat it as subscribed to
    every topic (KIP-496).
    """


@dataclass(slots=True)
class ConsumerGroupDescription:
    """A group of either protocol. `group_creation_time_ms` is None for classic groups, on brokers without KIP-1327, and
    for groups that are older than that.
    """

    group_id: str
    group_type: str
    state: str
    protocol_type: str
    assignor: str
    members: list[MemberDescription]
    coordinator: Node
    group_epoch: int | None = None
    target_assignment_epoch: int | None = None
    group_creation_time_ms: int | None = None
    authorized_operations: frozenset[AclOperation] | None = None


class OffsetSpec(NamedTuple):
    """What to look up: one of the four kinds below, or the first record at or after a time."""

    timestamp: int

    @classmethod
    def latest(cls) -> OffsetSpec:
        return cls(LATEST_TIMESTAMP)

    @classmethod
    def earliest(cls) -> OffsetSpec:
        return cls(EARLIEST_TIMESTAMP)

    @classmethod
    def max_timestamp(cls) -> OffsetSpec:
        return cls(-3)

    @classmethod
    def earliest_local(cls) -> OffsetSpec:
        return cls(-4)

    @classmethod
    def for_timestamp(cls, timestamp_ms: int) -> OffsetSpec:
        if timestamp_ms < 0:
            raise ValueError("a timestamp is not negative")
        return cls(timestamp_ms)


class ConfigResourceType(IntEnum):
    """What has configs."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class ConfigResource(NamedTuple):
    """A topic, broker or group; a broker with an empty name stands for the default of all brokers."""

    type: ConfigResourceType
    name: str


class ConfigSource(IntEnum):
    """Where a value comes from."""

    UNKNOWN = 0
    DYNAMIC_TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5
    DYNAMIC_BROKER_LOGGER_CONFIG = 6
    CLIENT_METRICS_CONFIG = 7
    GROUP_CONFIG = 8


class ConfigSynonym(NamedTuple):
    """A key that gives the value if the ones before it are not set."""

    name: str
    value: str | None
    source: ConfigSource


@dataclass(slots=True)
class ConfigEntry:
    """One setting of a resource."""

    name: str
    value: str | None
    source: ConfigSource
    is_read_only: bool = False
    is_sensitive: bool = False
    synonyms: tuple[ConfigSynonym, ...] = ()
    documentation: str | None = None

    @property
    def is_default(self) -> bool:
        return self.source is ConfigSource.DEFAULT_CONFIG


class UpgradeType(IntEnum):
    """Which changes of a feature's level the broker may make; a safe downgrade loses no metadata."""

    UPGRADE = 1
    SAFE_DOWNGRADE = 2
    UNSAFE_DOWNGRADE = 3


class FeatureUpdate(NamedTuple):
    """A new level of a feature; 0 disables the feature."""

    max_version_level: int
    upgrade_type: UpgradeType = UpgradeType.UPGRADE


@dataclass(slots=True)
class FeatureMetadata:
    """Levels of the finalized features, the epoch of these levels, and the levels that the broker supports (lowest,
    highest), by feature.
    """

    finalized: dict[str, int]
    finalized_epoch: int | None
    supported: dict[str, tuple[int, int]]


class AlterConfigOpType(IntEnum):
    """What to do with a setting; the last two are for lists."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class AlterConfigOp(NamedTuple):
    """One change of a setting."""

    name: str
    value: str | None = None
    operation: AlterConfigOpType = AlterConfigOpType.SET
