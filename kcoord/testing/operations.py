# SPDX-License-Identifier: Apache-2.0
"""Operations on groups that only tests have: set a target assignment, or expire a member's session.

Both are ordinary operations of the group's shard: they return records, and the replay of these records changes the
state. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kcoord.coordinator.group import records
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer.group import Assignment, ConsumerGroup
from kcoord.coordinator.group.group import heartbeat_timer, session_timer
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord_protocol.errors import Errors, KafkaError

TopicPartitions = Mapping[str, Iterable[int]]
"""Topic name -> partitions."""


class ControllableShard(GroupCoordinatorShard):
    """A group shard with the operations that only tests use."""

    def override_target_assignment(
        self, context: OperationContext, group_id: str, assignments: Mapping[str, TopicPartitions]
    ) -> CoordinatorResult[int]:
        """Sets the target assignment of some members under a new group epoch, and returns the epoch.

        Other members lose these partitions and keep the rest of their targets. The assignor computes a new target
        after the next change of the group's members, subscriptions or topics.
        """
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup):
            raise KafkaError(Errors.GROUP_ID_NOT_FOUND, f"there is no consumer group {group_id}")
        named = {
            self._member_id(group, name): _assignment(self._image, partitions)
            for name, partitions in assignments.items()
        }
        _check_disjoint(named)
        targets = _with_named(group, named)
        epoch = group.group_epoch + 1
        result = CoordinatorResult(
            epoch,
            [records.next_group_epoch_record(group, epoch, group.metadata_hash, None)],
        )
        for member_id, target in targets.items():
            if group.target_assignment_of(member_id) != target:
                result.records.append(records.new_target_assignment_record(group_id, member_id, target))
        result.records.append(records.next_assignment_epoch_record(group_id, epoch, epoch, context.now_ms))
        return result

    def expire_session(self, context: OperationContext, group_id: str, name: str) -> CoordinatorResult[None]:
        """Fires the session timer of a member now, whatever the clock says."""
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup | ClassicGroup):
            raise KafkaError(Errors.GROUP_ID_NOT_FOUND, f"there is no group {group_id}")
        timer = session_timer if isinstance(group, ConsumerGroup) else heartbeat_timer
        return self.fire_timer(context, timer(group_id, self._member_id(group, name)))

    def _member_id(self, group: ConsumerGroup | ClassicGroup, name: str) -> str:
        """Returns the id of the member with this member id, or the single member with this instance id or client id."""
        if name in group.members:
            return name
        for attribute in ("instance_id", "client_id"):
            member_ids = [
                member_id for member_id, member in group.members.items() if getattr(member, attribute) == name
            ]
            if len(member_ids) == 1:
                return member_ids[0]
        members = ", ".join(sorted(group.members)) or "no members"
        raise KafkaError(
            Errors.UNKNOWN_MEMBER_ID, f"group {group.group_id} has no single member {name}; it has {members}"
        )


def _assignment(image: MetadataImage, partitions_by_topic: TopicPartitions) -> Assignment:
    assignment: dict[bytes, frozenset[int]] = {}
    for name, partitions in partitions_by_topic.items():
        topic = image.topics.get(name)
        if topic is None:
            raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        chosen = frozenset(partitions)
        for partition in sorted(chosen):
            if not 0 <= partition < len(topic.partitions):
                raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name} has no partition {partition}")
        if chosen:
            assignment[topic.id] = chosen
    return assignment


def _check_disjoint(named: Mapping[str, Assignment]) -> None:
    seen: dict[tuple[bytes, int], str] = {}
    for member_id, assignment in named.items():
        for topic_id, partitions in assignment.items():
            for partition in sorted(partitions):
                other = seen.setdefault((topic_id, partition), member_id)
                if other != member_id:
                    raise KafkaError(
                        Errors.INVALID_REQUEST,
                        f"partition {partition} of a topic is assigned to {other} and {member_id}",
                    )


def _with_named(group: ConsumerGroup, named: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """Returns the targets of all members. Members that are not named keep theirs without these partitions."""
    taken: dict[bytes, frozenset[int]] = {}
    for assignment in named.values():
        for topic_id, partitions in assignment.items():
            taken[topic_id] = taken.get(topic_id, frozenset()) | partitions
    targets = {}
    for member_id in group.members:
        target = named.get(member_id)
        targets[member_id] = _without(taken, group.target_assignment_of(member_id)) if target is None else target
    return targets


def _without(taken: Mapping[bytes, frozenset[int]], target: Assignment) -> Assignment:
    left = {topic_id: partitions - taken.get(topic_id, frozenset()) for topic_id, partitions in target.items()}
    return {topic_id: partitions for topic_id, partitions in left.items() if partitions}
