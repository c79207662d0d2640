# SPDX-License-Identifier: Apache-2.0
"""Computes a group's target assignment and the records that carry it: one per member whose assignment changed, then
the epoch.

All of them go into one atomic batch (KIP-848 Target Assignment), so a reader never sees half an assignment.

In three steps, so that the second can be done elsewhere: `TargetInput` is cut out of the group, `compute` is a pure
function of it, and `install` makes the records that still fit. The first and the last cost about the same for however
many members: copies of dictionaries, and records that are bytes already (`encode`). What takes long is a Task: the
operation that asks for it goes on with the old target, as within the assignment interval, and the shell starts the task
once the records of this turn are replayed. So one computation serves all who joined meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from kcoord.coordinator.group import records
from kcoord.coordinator.group.assignor import ASSIGNORS, MemberSpec
from kcoord.coordinator.group.consumer.group import (
    ConsumerGroup,
    ResolvedRegularExpression,
    partition_counts,
    subscription_of,
)
from kcoord.coordinator.group.consumer.member import Assignment, ConsumerGroupMember
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, EncodedRecords
from kcoord_protocol.record_batch import encode_records

_US_PER_MEMBER: Final = 4.0
_US_PER_PARTITION: Final = 0.5
_HETEROGENEOUS_FACTOR: Final = 3
_SHARE_OF_INTERVAL: Final = 100
_LEAST_INLINE_US: Final = 1000
"""Rough costs, measured with `make bench ARGS=assignors`, and what a computation may cost inside a request: a hundredth
of the assignment interval, but never less than this.
"""

_NOTHING: Final[Assignment] = {}

SerializedRecord: TypeAlias = tuple[bytes | None, bytes | None]


@dataclass(slots=True)
class ComputeTarget:
    """The work of a task: the target assignment of a group, from the state in which the task finds it."""

    group_id: str


@dataclass(slots=True)
class TargetInput:
    """All that a target assignment depends on, as it was. Nothing in it changes: any thread may look at it."""

    group_id: str
    group_epoch: int
    creation_time_ms: int
    assignor: str
    members: Mapping[str, ConsumerGroupMember]
    targets: Mapping[str, Assignment]
    inherited: Mapping[str, Assignment]
    """What a member that is about to change begins with, instead of what is in `targets`."""
    resolved_regexes: Mapping[str, ResolvedRegularExpression]
    image: MetadataImage
    partition_counts: Mapping[bytes, int]
    cost_us: float
    """Roughly what `compute` will take."""

    def target_of(self, member_id: str) -> Assignment:
        """The member's target up to now."""
        inherited = self.inherited.get(member_id)
        return self.targets.get(member_id, _NOTHING) if inherited is None else inherited


@dataclass(slots=True)
class ComputedTarget:
    """The value of that task. `changed` are the members whose target is another one; `records` say so, in order."""

    group_id: str
    group_epoch: int
    creation_time_ms: int
    changed: dict[str, Assignment]
    instance_ids: Mapping[str, str]
    """Of the static members among the changed ones."""
    records: list[CoordinatorRecord]
    encoded: bytes | None = None
    """The records as a batch holds them, if a background thread was so kind."""


def takes_long(
    group: ConsumerGroup, image: MetadataImage, updated: ConsumerGroupMember, interval_ms: int, inline_ms: int
) -> bool:
    """Whether the computation is one for the background. A group's first target never is: its members would have none.

    `inline_ms` is the most that a request may be held up for.
    """
    if group.assignment_epoch == 0:
        return False
    counts = partition_counts(image, group.subscribed_topic_names(changed=updated))
    cost_us = _cost_us(len(group.members), counts, is_homogeneous=group.is_homogeneous)
    return cost_us > min(inline_ms * 1000, max(interval_ms * 1000 // _SHARE_OF_INTERVAL, _LEAST_INLINE_US))


def _cost_us(members: int, partition_counts: Mapping[bytes, int], *, is_homogeneous: bool) -> float:
    cost_us = members * _US_PER_MEMBER + sum(partition_counts.values()) * _US_PER_PARTITION
    return cost_us if is_homogeneous else cost_us * _HETEROGENEOUS_FACTOR


def target_input(
    group: ConsumerGroup,
    group_epoch: int,
    assignor: str,
    image: MetadataImage,
    updated: ConsumerGroupMember | None = None,
) -> TargetInput:
    """The target of `group_epoch` is for the members with `updated` in its place, whose records are still to come; a
    replaced static member keeps its target.
    """
    members = dict(group.members)
    inherited: Mapping[str, Assignment] = {}
    if updated is not None:
        replaced = group.replaced_by(updated)
        members = group.members_with(updated)
        inherited = {
            updated.member_id: _NOTHING if replaced is None else group.target_assignment_of(replaced.member_id)
        }
    counts = partition_counts(image, group.subscribed_topic_names(changed=updated))
    return TargetInput(
        group.group_id,
        group_epoch,
        group.creation_time_ms,
        assignor,
        members,
        dict(group.target_assignment),
        inherited,
        dict(group.resolved_regexes),
        image,
        counts,
        _cost_us(len(members), counts, is_homogeneous=group.is_homogeneous),
    )


def _member_specs(work: TargetInput) -> dict[str, MemberSpec]:
    specs: dict[str, MemberSpec] = {}
    subscriptions: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
    for member_id, member in work.members.items():
        key = (member.subscribed_topic_names, member.subscribed_topic_regex)
        topic_ids = subscriptions.get(key)
        if topic_ids is None:
            topic_ids = subscriptions[key] = topic_ids_of(member, work.resolved_regexes, work.image)
        specs[member_id] = MemberSpec(member.instance_id, member.rack_id, topic_ids, work.target_of(member_id))
    return specs


def compute(work: TargetInput) -> ComputedTarget:
    """Runs the assignor. An assignor that keeps a member's target gives the same object back, mostly.

    Members that no record gives a target yet get one even if it is empty, as in Kafka.
    """
    specs = _member_specs(work)
    assigned = ASSIGNORS[work.assignor].assign(specs, work.partition_counts)
    changed: dict[str, Assignment] = {}
    instance_ids: dict[str, str] = {}
    for member_id, target in assigned.items():
        member = specs[member_id]
        if member_id in work.targets and (target is member.assigned or target == member.assigned):
            continue
        changed[member_id] = target
        if member.instance_id is not None:
            instance_ids[member_id] = member.instance_id
    made = [
        records.new_target_assignment_record(work.group_id, member_id, target) for member_id, target in changed.items()
    ]
    return ComputedTarget(work.group_id, work.group_epoch, work.creation_time_ms, changed, instance_ids, made)


def encode(computed: ComputedTarget, serialize: Callable[[CoordinatorRecord], SerializedRecord]) -> None:
    """What would be a long pause for the event loop: the records become bytes."""
    for record in computed.records:
        record.serialized = serialize(record)
    computed.encoded = _encoded(computed.records)


def _encoded(made: list[CoordinatorRecord]) -> bytes:
    return encode_records([record.serialized for record in made if record.serialized is not None])


def epoch_record(work: TargetInput, now_ms: int) -> CoordinatorRecord:
    """Ends the records of a computed target."""
    return records.new_target_assignment_epoch_record(work.group_id, work.group_epoch, now_ms)


def install(group: ConsumerGroup, computed: ComputedTarget, now_ms: int) -> CoordinatorResult[None]:
    """The records of a target that was computed while the group went on; none where it came too late altogether.

    Members that left meanwhile are left out, and one that took the place of a static member gets its target. The group
    epoch has grown in both cases or will, so the next heartbeat asks for a newer target.
    """
    is_same = computed.creation_time_ms == group.creation_time_ms and computed.group_epoch <= group.group_epoch
    if not is_same or computed.group_epoch <= group.assignment_epoch:
        return CoordinatorResult(None)
    made, changed, encoded = computed.records, computed.changed, computed.encoded
    gone = [member_id for member_id in changed if member_id not in group.members]
    if gone:
        kept = [record for record, member_id in zip(made, changed, strict=True) if member_id in group.members]
        made, encoded = kept, None if encoded is None else _encoded(kept)
        changed = {member_id: target for member_id, target in changed.items() if member_id in group.members}
    last: list[CoordinatorRecord] = []
    for member_id in gone:
        successor = group.static_member(computed.instance_ids.get(member_id, ""))
        if successor is not None:
            target = computed.changed[member_id]
            last.append(records.new_target_assignment_record(group.group_id, successor.member_id, target))
    last.append(records.new_target_assignment_epoch_record(group.group_id, computed.group_epoch, now_ms))
    if not encoded:
        return CoordinatorResult(None, [*made, *last])
    # The group is the one that the replay of the records would look up, and `last` raises its version.
    replay = partial(group.target_assignment.update, changed)
    return CoordinatorResult(None, last, encoded=EncodedRecords(len(made), encoded, replay))


def topic_ids_of(
    member: ConsumerGroupMember, resolved_regexes: Mapping[str, ResolvedRegularExpression], image: MetadataImage
) -> frozenset[bytes]:
    """The ids of the existing topics that the member subscribes to."""
    topics = (image.topics.get(name) for name in subscription_of(member, resolved_regexes))
    return frozenset(topic.id for topic in topics if topic is not None)
