# SPDX-License-Identifier: Apache-2.0
"""What a test may do to a group that no client can: give it a target assignment, or let a member's session end.

Both are ordinary operations of the group's shard: records out, replay in. Pure.
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
    """A shard that also does what only a test asks for."""

    def override_target_assignment(
        self, context: OperationContext, group_id: str, wanted: Mapping[str, TopicPartitions]
    ) -> CoordinatorResult[int]:
        """A new group epoch whose target gives each named member what is wanted for it; returns the epoch.

        Nobody else is to have these partitions, so others lose them; what else they have they keep. The next change of
        the group's members, subscriptions or topics lets the assignor decide again.
        """
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup):
            raise KafkaError(Errors.GROUP_ID_NOT_FOUND, f"there is no consumer group {group_id}")
        named = {
            self._member_id(group, name): _assignment(self._image, partitions) for name, partitions in wanted.items()
        }
        _check_disjoint(named)
        targets = _with_named(group, named)
        epoch = group.group_epoch + 1
        result = CoordinatorResult(
            epoch,
            [records.new_group_epoch_record(group_id, epoch, group.metadata_hash, group.creation_time_ms, None)],
        )
        for member_id, target in targets.items():
            if group.target_assignment_of(member_id) != target:
                result.records.append(records.new_target_assignment_record(group_id, member_id, target))
        result.records.append(records.new_target_assignment_epoch_record(group_id, epoch, context.now_ms))
        return result

    def expire_session(self, context: OperationContext, group_id: str, name: str) -> CoordinatorResult[None]:
        """The member was silent for its session timeout, whatever the clock says."""
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup | ClassicGroup):
            raise KafkaError(Errors.GROUP_ID_NOT_FOUND, f"there is no group {group_id}")
        timer = session_timer if isinstance(group, ConsumerGroup) else heartbeat_timer
        return self.fire_timer(context, timer(group_id, self._member_id(group, name)))

    def _member_id(self, group: ConsumerGroup | ClassicGroup, name: str) -> str:
        """The member of a member id, an instance id, or a client id that only one member has."""
        if name in group.members:
            return name
        for attribute in ("instance_id", "client_id"):
            found = [member_id for member_id, one in group.members.items() if getattr(one, attribute) == name]
            if len(found) == 1:
                return found[0]
        known = ", ".join(sorted(group.members)) or "no members"
        raise KafkaError(
            Errors.UNKNOWN_MEMBER_ID, f"group {group.group_id} has no single member {name}; it has {known}"
        )


def _assignment(image: MetadataImage, wanted: TopicPartitions) -> Assignment:
    assignment: dict[bytes, frozenset[int]] = {}
    for name, partitions in wanted.items():
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
                        Errors.INVALID_REQUEST, f"partition {partition} of a topic is given to {other} and {member_id}"
                    )


def _with_named(group: ConsumerGroup, named: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """The targets of all members: those that are named, and what is left of the others'."""
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
