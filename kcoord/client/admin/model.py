# SPDX-License-Identifier: Apache-2.0
"""The parameters and results of the admin client. Times and epochs that a broker does not know are None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from kcoord.client.assignors import OfferedAssignor
from kcoord.client.reset_policy import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from kcoord.client.types import Node, TopicPartition
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.uuid import ZERO_UUID, uuid_to_string

_NOT_ASKED = -(1 << 31)


def authorized_operations(bits: int) -> frozenset[AclOperation] | None:
    """Returns the operations of a bit set, None if the request did not ask for them."""
    if bits == _NOT_ASKED:
        return None
    return frozenset(operation for operation in AclOperation if operation > AclOperation.ALL and bits >> operation & 1)


def known_time(time_ms: int) -> int | None:
    """Returns a creation time (KIP-1327), None if the broker does not know it (-1)."""
    return time_ms if time_ms >= 0 else None


@dataclass(slots=True)
class NewTopic:
    """A topic to create. -1 stands for the broker's default.

    If `assignments` are given, they name the replicas of each partition, and the two numbers do not count.
    """

    name: str
    num_partitions: int = -1
    replication_factor: int = -1
    assignments: Mapping[int, Sequence[int]] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class NewPartitions:
    """The total number of partitions that a topic shall have, and the replicas of the new partitions.

    Without `assignments` the broker places the new partitions.
    """

    total_count: int
    assignments: Sequence[Sequence[int]] | None = None


@dataclass(slots=True)
class CreatedTopic:
    """A topic that was created. Numbers and configs are None if the broker is too old to return them."""

    name: str
    topic_id: bytes = ZERO_UUID
    num_partitions: int | None = None
    replication_factor: int | None = None
    configs: dict[str, str | None] | None = None


@dataclass(slots=True)
class TopicListing:
    """A topic in the result of `list_topics`."""

    name: str
    topic_id: bytes
    is_internal: bool


@dataclass(slots=True)
class TopicPartitionInfo:
    """A partition of a described topic.

    `creation_time_ms` is None if the broker does not support KIP-1327, or if the partition was created before the
    broker did. The two lists of KIP-966 are None on brokers without it.
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
        """The topic id in base64, as Kafka's tools print it."""
        return uuid_to_string(self.topic_id)


@dataclass(slots=True)
class ClusterDescription:
    """The brokers of the cluster and its controller."""

    cluster_id: str
    controller: Node | None
    nodes: list[Node]
    authorized_operations: frozenset[AclOperation] | None = None


@dataclass(slots=True)
class GroupListing:
    """A group in the result of `list_groups`.

    State and type are empty if the broker is too old to return them. The protocol type of a group that only has
    committed offsets is empty.
    """

    group_id: str
    protocol_type: str
    state: str
    group_type: str

    @property
    def is_simple(self) -> bool:
        """Whether the group only has committed offsets: no member has given it a protocol type."""
        return not self.protocol_type


class AssignmentMetadata(NamedTuple):
    """What a client-side assignor gave to a member with an assignment: an error, and bytes with their version."""

    error: int = 0
    version: int = -1
    data: bytes = b""


_NO_METADATA: Final = AssignmentMetadata()


@dataclass(slots=True)
class MemberDescription:
    """A member of a group. Fields that only the consumer protocol has are None for members of classic groups."""

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
    """Whether the metadata of this member of a classic group is not in the consumer's format. Brokers treat such a
    member as subscribed to every topic (KIP-496).
    """
    assignment_metadata: AssignmentMetadata = _NO_METADATA
    """Of the current assignment."""
    target_metadata: AssignmentMetadata = _NO_METADATA
    """Of the target assignment."""
    client_assignors: tuple[OfferedAssignor, ...] = ()
    """The client-side assignors of the member, best first."""


@dataclass(slots=True)
class ConsumerGroupDescription:
    """A group of either protocol.

    `group_creation_time_ms` is None for classic groups, on brokers without KIP-1327, and for groups that were created
    before the broker supported KIP-1327.
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
    failed_computations: int = 0
    """How often the assignor has failed since the last target assignment; brokers other than kcoord never say."""
    assignor_error: str | None = None
    """Why the assignor failed the last time."""
    is_assigned_by_member: bool = False
    """Whether a member computes the next target assignment, with a client-side assignor (KIP-848)."""
    computing_member_id: str | None = None
    """The member that the coordinator has asked to compute."""
    computing_until_ms: int | None = None
    """When the coordinator stops waiting for that member and asks another one."""


class OffsetSpec(NamedTuple):
    """The offset to look up: one of the four special ones below, or the first record at or after a time."""

    timestamp: int

    @classmethod
    def latest(cls) -> OffsetSpec:
        """The end of the log: the offset of the next record."""
        return cls(LATEST_TIMESTAMP)

    @classmethod
    def earliest(cls) -> OffsetSpec:
        """The first offset of the log."""
        return cls(EARLIEST_TIMESTAMP)

    @classmethod
    def max_timestamp(cls) -> OffsetSpec:
        """The record with the largest timestamp (KIP-734)."""
        return cls(-3)

    @classmethod
    def earliest_local(cls) -> OffsetSpec:
        """The first offset on the broker's own disks (KIP-405)."""
        return cls(-4)

    @classmethod
    def for_timestamp(cls, timestamp_ms: int) -> OffsetSpec:
        """The first record at or after this time."""
        if timestamp_ms < 0:
            raise ValueError(f"timestamp_ms: {timestamp_ms} must not be negative")
        return cls(timestamp_ms)


class ConfigResourceType(IntEnum):
    """The kinds of resources that have configs."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class ConfigResource(NamedTuple):
    """A topic, broker or group. A broker with an empty name stands for the default of all brokers."""

    type: ConfigResourceType
    name: str


class ConfigSource(IntEnum):
    """The level at which a config's value is set."""

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
    """A key that sets the value, unless a synonym before it in the list is set."""

    name: str
    value: str | None
    source: ConfigSource


@dataclass(slots=True)
class ConfigEntry:
    """One config of a resource."""

    name: str
    value: str | None
    source: ConfigSource
    is_read_only: bool = False
    is_sensitive: bool = False
    synonyms: tuple[ConfigSynonym, ...] = ()
    documentation: str | None = None

    @property
    def is_default(self) -> bool:
        """Whether the value is the built-in default."""
        return self.source is ConfigSource.DEFAULT_CONFIG


class UpgradeType(IntEnum):
    """The changes of a feature's level that the broker may make. A safe downgrade loses no metadata."""

    UPGRADE = 1
    SAFE_DOWNGRADE = 2
    UNSAFE_DOWNGRADE = 3


class FeatureUpdate(NamedTuple):
    """A new level of a feature. Level 0 disables the feature."""

    max_version_level: int
    upgrade_type: UpgradeType = UpgradeType.UPGRADE


@dataclass(slots=True)
class FeatureMetadata:
    """The levels of the cluster's features.

    `finalized` maps features to their level, and `finalized_epoch` is the epoch of these levels. `supported` maps
    features to the lowest and the highest level that the broker supports.
    """

    finalized: dict[str, int]
    finalized_epoch: int | None
    supported: dict[str, tuple[int, int]]


class AlterConfigOpType(IntEnum):
    """How to change a config. APPEND and SUBTRACT are for configs that are lists."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class AlterConfigOp(NamedTuple):
    """One change of a config. `value` is None for DELETE."""

    name: str
    value: str | None = None
    operation: AlterConfigOpType = AlterConfigOpType.SET
