# SPDX-License-Identifier: Apache-2.0
"""What the consumer reads: the subscription, and of each assigned partition how far it is. Pure.

A partition has a position, or it is known what is missing for one: the committed offset, a decision, a look-up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from kcoord.client.errors import IllegalStateException
from kcoord.client.reset_policy import ResetPolicy
from kcoord.client.types import NO_LEADER_EPOCH, OffsetAndMetadata, TopicPartition


class SubscriptionType(Enum):
    """How partitions come to the consumer; one way excludes the others."""

    NONE = "none"
    GROUP = "topics or a pattern"
    ASSIGNED = "assigned by the user"


class Phase(Enum):
    """What a partition needs next."""

    COMMITTED = "its committed offset"
    CLASSIFICATION = "a decision where to begin"
    LOOK_UP = "the offset that a policy stands for"
    FETCH = "records"


@dataclass(slots=True)
class PartitionState:
    """One assigned partition. With every jump it has another `generation`: what was asked for before it is void."""

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
        return self.phase is Phase.FETCH

    @property
    def is_fetchable(self) -> bool:
        return self.phase is Phase.FETCH and not self.is_paused and not self.is_fenced_off

    def jump(self, offset: int, leader_epoch: int = NO_LEADER_EPOCH) -> None:
        """Reads on from `offset`."""
        self.phase = Phase.FETCH
        self.position, self.leader_epoch = offset, leader_epoch
        self.is_out_of_range = False
        self.begin_generation()

    def look_up(self, policy: ResetPolicy, now_ms: int, group_creation_time_ms: int = -1) -> None:
        """Finds the offset of a policy; its time is fixed now, so that a retry asks for the same."""
        self.phase = Phase.LOOK_UP
        self.look_up_timestamp = policy.timestamp(now_ms, group_creation_time_ms)
        self.begin_generation()

    def out_of_range(self) -> None:
        """The log does not have the position."""
        self.phase = Phase.CLASSIFICATION
        self.is_out_of_range = True
        self.begin_generation()

    def begin_generation(self) -> None:
        self.generation = object()


class SubscriptionState:
    """The subscription and the assignment of one consumer."""

    def __init__(self) -> None:
        self.type = SubscriptionType.NONE
        self.topics: frozenset[str] = frozenset()
        self._partitions: dict[TopicPartition, PartitionState] = {}

    # The subscription.

    def subscribe(self, topics: Collection[str]) -> None:
        """By names, or without them by a pattern."""
        if self.type is SubscriptionType.ASSIGNED:
            raise IllegalStateException("partitions were assigned by the user; unsubscribe first")
        self.type, self.topics = SubscriptionType.GROUP, frozenset(topics)

    def assign_from_user(self, partitions: Mapping[TopicPartition, bytes]) -> None:
        if self.uses_group:
            raise IllegalStateException("the consumer is subscribed to topics; unsubscribe first")
        self.type = SubscriptionType.ASSIGNED
        self._partitions = {
            each: self._partitions.get(each, PartitionState(topic_id)) for each, topic_id in partitions.items()
        }

    def unsubscribe(self) -> None:
        self.type, self.topics = SubscriptionType.NONE, frozenset()
        self._partitions = {}

    @property
    def uses_group(self) -> bool:
        return self.type is SubscriptionType.GROUP

    # The assignment.

    def add(self, partitions: Mapping[TopicPartition, bytes], *, fenced_off: bool) -> None:
        """Partitions from the group; fenced off until the listener has seen them."""
        for partition, topic_id in partitions.items():
            self._partitions[partition] = PartitionState(topic_id, is_fenced_off=fenced_off)

    def fence_off(self, partitions: Iterable[TopicPartition], fenced_off: bool = True) -> None:
        """Fetches nothing from partitions that are about to go."""
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
        """What to commit: the position of every partition that has one."""
        return {
            partition: OffsetAndMetadata(state.position, "", state.leader_epoch)
            for partition, state in self._partitions.items()
            if state.has_position
        }
