# SPDX-License-Identifier: Apache-2.0
"""Assignors that run in a member of the group (KIP-848 "New PartitionAssignor interface").

The coordinator chooses a member, which computes the target assignment of the whole group and installs it. Topics have
names here. The requests have topic ids, and the consumer translates them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kcoord.client.types import TopicPartition

CLASSIC_VERSION: Final = -1
"""The version of metadata that members of the classic protocol send, which they call user data."""


class Metadata(NamedTuple):
    """Bytes that assignors exchange, in a format of their own with a version of its own."""

    version: int
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class AssignorMetadata:
    """What a member sends to the assignor of the group. A reason other than 0 requests a new assignment."""

    metadata: Metadata
    reason: int = 0
    """0 to 127; the meaning of the numbers from 1 on is up to the assignor."""


class OfferedAssignor(NamedTuple):
    """An assignor that a member offers, with its versions, and with the metadata and the reason of the member."""

    name: str
    minimum_version: int
    maximum_version: int
    reason: int
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class AssignmentMemberSpec:
    """A member of the group."""

    instance_id: str | None
    """`group_instance_id`; None for a dynamic member."""
    rack_id: str | None
    """`client_rack`; None if the member has none."""
    subscribed_topics: frozenset[str]
    """The existing topics to which the member subscribes, by name or by regular expression."""
    reason: int
    metadata: Metadata
    target_partitions: frozenset[TopicPartition]
    """The present target assignment."""


@dataclass(frozen=True, slots=True)
class AssignmentTopicMetadata:
    """A topic to which at least one member subscribes."""

    topic_id: bytes
    num_partitions: int
    racks: Sequence[frozenset[str]] = ()
    """The racks of the replicas, by partition. Empty if the broker does not send them."""


@dataclass(frozen=True, slots=True)
class AssignmentSpec:
    """The group at one group epoch: members by member id, topics by name."""

    group_id: str
    group_epoch: int
    members: Mapping[str, AssignmentMemberSpec]
    topics: Mapping[str, AssignmentTopicMetadata]


@dataclass(frozen=True, slots=True)
class MemberAssignment:
    """The target assignment of a member, and bytes for its assignor."""

    target_partitions: Collection[TopicPartition] = ()
    metadata: Metadata | None = None
    """None in a result of `assign`: no bytes, in the version of the metadata that the member sent. None in
    `on_assignment`: the assignment has no metadata, for example because the broker computed it.
    """


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """The result of an assignor. A member that is missing gets no partition."""

    members: Mapping[str, MemberAssignment] = field(default_factory=dict)
    error: int = 0
    """0 to 127. Every member gets an error other than 0 in `on_assignment`. With such an error and without `members`
    all members keep their targets.
    """


class PartitionAssignor(ABC):
    """Computes target assignments in a member of the group. Each consumer has its own object.

    All members of a group should offer the assignor, in versions that overlap. If one of them offers no common
    assignor, the broker computes the assignment instead.

    The consumer calls all methods in its own thread, except `assign`.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which the assignors of all members are compared."""

    minimum_version: int = 0
    """The lowest version of metadata that this object reads. -1 accepts members of the classic protocol."""
    maximum_version: int = 0
    """The highest version of metadata that this object reads."""

    def configure(self, settings: Mapping[str, object]) -> None:
        """Called once, when the consumer is created, with all its settings by name."""
        return

    def metadata(self) -> AssignorMetadata:
        """Returns what the member sends to the assignor of the group. By default no bytes.

        Called by `Consumer.subscribe` and `Consumer.update_assignor_metadata`, and after partitions were lost. A change
        makes the coordinator request a new assignment.
        """
        return AssignorMetadata(Metadata(self.maximum_version))

    @abstractmethod
    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        """Assigns each partition of each topic to exactly one subscriber of the topic.

        Runs in a thread, so it may take as long as `max_poll_interval_ms` of this consumer. If it raises an exception,
        `poll` raises an AssignorException, and the coordinator asks another member. Equal specs should give equal
        results, since every difference moves partitions.
        """

    def on_assignment(self, error: int, assignment: MemberAssignment, group_epoch: int) -> None:
        """Called within `poll`, once per epoch of the member and before `on_partitions_assigned`.

        If the consumer has several assignors, only the one that computed the assignment is called. All are called if
        the broker computed it.

        `assignment` is the whole target of the member. Other members may still have to release some of its partitions,
        so only the rebalance listener shows which partitions the member owns. `error` comes from the assignor; -2 means
        that no member could compute an assignment, so that the broker did.
        """
        return


__all__ = [
    "CLASSIC_VERSION",
    "AssignmentMemberSpec",
    "AssignmentSpec",
    "AssignmentTopicMetadata",
    "AssignorMetadata",
    "GroupAssignment",
    "MemberAssignment",
    "Metadata",
    "OfferedAssignor",
    "PartitionAssignor",
]
