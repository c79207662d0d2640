# SPDX-License-Identifier: Apache-2.0
"""The subscription of a consumer, and the state of each assigned partition. Pure.

A partition has a position, or its `Phase` says what it needs to get one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from kcoord.client.errors import IllegalStateException
from kcoord.client.reset_policy import ResetPolicy
from kcoord.client.types import NO_LEADER_EPOCH, OffsetAndMetadata, TopicPartition


class SubscriptionType(Enum):
    """The source of the assignment: none, the group, or the application. They exclude each other."""

    NONE = "none"
    GROUP = "topics or a pattern"
    ASSIGNED = "assigned by the user"


class Phase(Enum):
    """The phases of a partition, named after its next need. The module `positions` explains them."""

    COMMITTED = "its committed offset"
    CLASSIFICATION = "a decision where to begin"
    LOOK_UP = "the offset that a policy stands for"
    FETCH = "records"


@dataclass(slots=True)
class PartitionState:
    """The state of an assigned partition.

    Each change of the position that is not made by reading begins a new `generation`. Responses to requests of an older
    generation are dropped.
    """

    topic_id: bytes
    phase: Phase = Phase.COMMITTED
    position: int = -1
    leader_epoch: int = NO_LEADER_EPOCH
    generation: object = field(default_factory=object)
    is_paused: bool = False
    is_fenced_off: bool = False
    is_out_of_range: bool = False
    look_up_timestamp: int = 0
    decided: str = ""

    @property
    def has_position(self) -> bool:
        """Whether the position is known."""
        return self.phase is Phase.FETCH

    @property
    def is_fetchable(self) -> bool:
        """Whether records may be fetched and returned: there is a position, and nothing pauses the partition."""
        return self.phase is Phase.FETCH and not self.is_paused and not self.is_fenced_off

    def jump(self, offset: int, leader_epoch: int = NO_LEADER_EPOCH) -> None:
        """Sets the position to `offset`."""
        self.phase = Phase.FETCH
        self.position, self.leader_epoch = offset, leader_epoch
        self.is_out_of_range = False
        self.begin_generation()

    def look_up(self, policy: ResetPolicy, now_ms: int, group_creation_time_ms: int = -1) -> None:
        """Starts to look up the offset of a policy. Fixes its time now, so that a retry gets the same offset."""
        self.phase = Phase.LOOK_UP
        self.look_up_timestamp = policy.timestamp(now_ms, group_creation_time_ms)
        self.begin_generation()

    def out_of_range(self) -> None:
        """Starts a reset, because the log does not have the position."""
        self.phase = Phase.CLASSIFICATION
        self.is_out_of_range = True
        self.begin_generation()

    def begin_generation(self) -> None:
        """Makes responses to earlier requests void."""
        self.generation = object()


class SubscriptionState:
    """The subscription and the assignment of one consumer."""

    def __init__(self) -> None:
        self.type = SubscriptionType.NONE
        self.topics: frozenset[str] = frozenset()
        self._partitions: dict[TopicPartition, PartitionState] = {}

    # The subscription.

    def subscribe(self, topics: Collection[str]) -> None:
        """Subscribes by topic names, or by a pattern if there are none."""
        if self.type is SubscriptionType.ASSIGNED:
            raise IllegalStateException("partitions were assigned by the user; unsubscribe first")
        self.type, self.topics = SubscriptionType.GROUP, frozenset(topics)

    def assign_from_user(self, partitions: Mapping[TopicPartition, bytes]) -> None:
        """Replaces the assignment. Partitions that were assigned before keep their state."""
        if self.uses_group:
            raise IllegalStateException("the consumer is subscribed to topics; unsubscribe first")
        self.type = SubscriptionType.ASSIGNED
        self._partitions = {
            partition: self._partitions.get(partition, PartitionState(topic_id))
            for partition, topic_id in partitions.items()
        }

    def unsubscribe(self) -> None:
        self.type, self.topics = SubscriptionType.NONE, frozenset()
        self._partitions = {}

    @property
    def uses_group(self) -> bool:
        return self.type is SubscriptionType.GROUP

    # The assignment.

    def add(self, partitions: Mapping[TopicPartition, bytes], *, fenced_off: bool) -> None:
        """Adds partitions that the group assigned. While they are fenced off, nothing is fetched from them."""
        for partition, topic_id in partitions.items():
            self._partitions[partition] = PartitionState(topic_id, is_fenced_off=fenced_off)

    def fence_off(self, partitions: Iterable[TopicPartition], fenced_off: bool = True) -> None:
        """Stops fetching and returning records of partitions. With `fenced_off` false, allows both again."""
        for partition in partitions:
            if partition in self._partitions:
                self._partitions[partition].is_fenced_off = fenced_off

    def remove(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            self._partitions.pop(partition, None)

    @property
    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._partitions)

    def items(self) -> list[tuple[TopicPartition, PartitionState]]:
        return list(self._partitions.items())

    def get(self, partition: TopicPartition) -> PartitionState | None:
        return self._partitions.get(partition)

    def __getitem__(self, partition: TopicPartition) -> PartitionState:
        state = self._partitions.get(partition)
        if state is None:
            raise IllegalStateException(f"{partition} is not assigned to this consumer")
        return state

    def paused(self) -> frozenset[TopicPartition]:
        return frozenset(partition for partition, state in self._partitions.items() if state.is_paused)

    def consumed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Returns the offsets to commit: the position of each partition that has one."""
        return {
            partition: OffsetAndMetadata(state.position, "", state.leader_epoch)
            for partition, state in self._partitions.items()
            if state.has_position
        }
