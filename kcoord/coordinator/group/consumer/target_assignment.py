# SPDX-License-Identifier: Apache-2.0
"""Computes a group's target assignment and the records that carry it: one per member whose assignment changed, then
the epoch.

All of them go into one atomic batch (KIP-848 Target Assignment), so a reader never sees half an assignment.
"""

from __future__ import annotations

from dataclasses import dataclass

from kcoord.coordinator.group import records
from kcoord.coordinator.group.assignor import Assignor, MemberSpec
from kcoord.coordinator.group.consumer.group import ConsumerGroup, partition_counts
from kcoord.coordinator.group.consumer.member import Assignment, ConsumerGroupMember
from kcoord.coordinator.result import CoordinatorRecord
from kcoord.metadata.image import MetadataImage


@dataclass(slots=True)
class TargetAssignment:
    """A computed target: its records, and the part of the member that asked, which it needs before they are
    replayed.
    """

    records: list[CoordinatorRecord]
    of_member: Assignment


def build_target_assignment(
    group: ConsumerGroup,
    group_epoch: int,
    assignor: Assignor,
    image: MetadataImage,
    updated: ConsumerGroupMember,
    now_ms: int,
) -> TargetAssignment:
    """The target of `group_epoch` for the members with `updated` in its place; a replaced static member keeps its
    target.
    """
    replaced = group.replaced_by(updated)
    counts = partition_counts(image, group.subscribed_topic_names(changed=updated))
    specs = {}
    subscriptions: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
    for member_id, member in group.members_with(updated).items():
        key = (member.subscribed_topic_names, member.subscribed_topic_regex)
        topic_ids = subscriptions.get(key)
        if topic_ids is None:
            topic_ids = subscriptions[key] = topic_ids_of(group, member, image)
        source = replaced if member is updated else member
        specs[member_id] = MemberSpec(
            instance_id=member.instance_id,
            rack_id=member.rack_id,
            subscribed_topic_ids=topic_ids,
            assigned={} if source is None else group.target_assignment_of(source.member_id),
        )
    assigned = assignor.assign(specs, counts)
    changed: list[CoordinatorRecord] = []
    of_member: Assignment = {}
    for member_id, topics in assigned.items():
        target = {topic_id: frozenset(partitions) for topic_id, partitions in topics.items()}
        if member_id == updated.member_id:
            of_member = target
        if group.target_assignment.get(member_id) != target:
            changed.append(records.new_target_assignment_record(group.group_id, member_id, target))
    changed.append(records.new_target_assignment_epoch_record(group.group_id, group_epoch, now_ms))
    return TargetAssignment(changed, of_member)


def topic_ids_of(group: ConsumerGroup, member: ConsumerGroupMember, image: MetadataImage) -> frozenset[bytes]:
    """The ids of the existing topics that the member subscribes to."""
    topics = (image.topics.get(name) for name in group.subscription_of(member))
    return frozenset(topic.id for topic in topics if topic is not None)
