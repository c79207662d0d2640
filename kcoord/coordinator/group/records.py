# SPDX-License-Identifier: Apache-2.0
"""Constructs the records of the group coordinator; no other module does.

Record types, keys and values are Kafka's (`schemas/coordinator_records`). A tombstone deletes its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

from kcoord.coordinator.group.consumer.client_assignors import ClientAssignor
from kcoord.coordinator.group.consumer.group import (
    NO_METADATA,
    Assignment,
    ClassicMemberMetadata,
    ConsumerGroup,
    ConsumerGroupMember,
    EpochAssignment,
    TargetMetadata,
)
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerGroupRegularExpressionKey,
    ConsumerGroupRegularExpressionValue,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataKey,
    ConsumerGroupTargetAssignmentMetadataValue,
    GroupImportKey,
    GroupImportValue,
    GroupMetadataKey,
    OffsetCommitKey,
    OffsetCommitValue,
)
from kcoord_protocol.uuid import ZERO_UUID

if TYPE_CHECKING:
    from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest


class EpochReason(Enum):
    """Why a consumer group's epoch grew. It is written beside the epoch, for audits of the log."""

    JOIN = "join"
    LEAVE = "leave"
    FENCED = "fenced"
    SUBSCRIPTION = "subscription"
    METADATA = "metadata"
    ASSIGNOR = "assignor"
    RACK = "rack"
    MIGRATION = "migration"


_MIGRATION: Final = EpochReason.MIGRATION.value.encode()


class TombstoneReason(Enum):
    """Why something was deleted; a record header of the tombstone."""

    EXPIRED = "expired"
    OFFSET_DELETE = "offset-delete"
    GROUP_DELETE = "group-delete"
    TOPIC_DELETE = "topic-delete"
    LEAVE = "leave"
    FENCED = "fenced"
    REPLACED = "replaced"
    UNSUBSCRIBED = "unsubscribed"
    MIGRATION = "migration"


EPOCH_REASON_TAG: Final = 1000
EMPTY_SINCE_TAG: Final = 1001
"""kcoord's own tagged fields of ConsumerGroupMetadataValue: an EpochReason as text and a time in ms as int64.

Kafka skips both.
"""


def new_group_epoch_record(
    group_id: str,
    epoch: int,
    metadata_hash: int,
    creation_time_ms: int,
    reason: EpochReason | None,
    empty_since_ms: int = -1,
) -> CoordinatorRecord:
    """Returns the record of a consumer group's epoch.

    `creation_time_ms` is KIP-1327's, -1 if it was never recorded. `empty_since_ms` is set if the group loses its last
    member with this epoch, because KIP-211 counts from then. `reason` is None in a snapshot, which does not keep it.
    """
    value = ConsumerGroupMetadataValue(epoch=epoch, metadata_hash=metadata_hash, creation_time_ms=creation_time_ms)
    tags = [(EPOCH_REASON_TAG, reason.value.encode())] if reason is not None else []
    if empty_since_ms >= 0:
        tags.append((EMPTY_SINCE_TAG, empty_since_ms.to_bytes(8, "big")))
    value.unknown_tagged_fields = tuple(tags)
    return CoordinatorRecord(ConsumerGroupMetadataKey(group_id=group_id), value)


def next_group_epoch_record(
    group: ConsumerGroup, epoch: int, metadata_hash: int, reason: EpochReason | None, empty_since_ms: int = -1
) -> CoordinatorRecord:
    """Returns the record that raises the epoch of a group."""
    assert epoch > group.group_epoch, f"G-1: the epoch of group {group.group_id} is {group.group_epoch}, not {epoch}"
    return new_group_epoch_record(group.group_id, epoch, metadata_hash, group.creation_time_ms, reason, empty_since_ms)


def new_empty_since_record(group: ConsumerGroup, empty_since_ms: int) -> CoordinatorRecord:
    """Returns a record with the same epoch and the time since the group is empty.

    It has no reason; the record before it has.
    """
    return new_group_epoch_record(
        group.group_id, group.group_epoch, group.metadata_hash, group.creation_time_ms, None, empty_since_ms
    )


def is_migration(value: ConsumerGroupMetadataValue) -> bool:
    """True if the epoch is the generation of a classic group that was upgraded."""
    return (EPOCH_REASON_TAG, _MIGRATION) in value.unknown_tagged_fields


def empty_since_from(value: ConsumerGroupMetadataValue) -> int:
    """Returns when the group lost its last member; -1 if the record does not say."""
    return next(
        (int.from_bytes(data, "big") for tag, data in value.unknown_tagged_fields if tag == EMPTY_SINCE_TAG), -1
    )


def new_group_epoch_tombstone(group_id: str, reason: TombstoneReason) -> CoordinatorRecord:
    return CoordinatorRecord(ConsumerGroupMetadataKey(group_id=group_id), None, reason=reason.value)


def new_member_subscription_record(group_id: str, member: ConsumerGroupMember) -> CoordinatorRecord:
    value = ConsumerGroupMemberMetadataValue(
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.subscribed_topic_names),
        subscribed_topic_regex=member.subscribed_topic_regex,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        server_assignor=member.server_assignor,
        classic_member_metadata=_classic_metadata(member.classic),
    )
    if member.client_assignors:
        value.client_assignors = [
            ConsumerGroupMemberMetadataValue.ClientAssignor(
                name=assignor.name,
                minimum_version=assignor.minimum_version,
                maximum_version=assignor.maximum_version,
                reason=assignor.reason,
                metadata_version=assignor.metadata_version,
                metadata_bytes=assignor.metadata,
            )
            for assignor in member.client_assignors
        ]
    return CoordinatorRecord(ConsumerGroupMemberMetadataKey(group_id=group_id, member_id=member.member_id), value)


def _classic_metadata(
    classic: ClassicMemberMetadata | None,
) -> ConsumerGroupMemberMetadataValue.ClassicMemberMetadata | None:
    if classic is None:
        return None
    return ConsumerGroupMemberMetadataValue.ClassicMemberMetadata(
        session_timeout_ms=classic.session_timeout_ms,
        supported_protocols=[
            ConsumerGroupMemberMetadataValue.ClassicProtocol(name=name, metadata=metadata)
            for name, metadata in classic.protocols
        ],
    )


def new_member_subscription_tombstone(group_id: str, member_id: str, reason: TombstoneReason) -> CoordinatorRecord:
    return CoordinatorRecord(
        ConsumerGroupMemberMetadataKey(group_id=group_id, member_id=member_id), None, reason=reason.value
    )


def new_target_assignment_epoch_record(
    group_id: str, assignment_epoch: int, timestamp_ms: int, assignor: str = "", assigned_by: str = ""
) -> CoordinatorRecord:
    """Returns the record of the assignment epoch.

    `assignor` and `assigned_by` are the client-side assignor and the member that computed the target assignment. They
    are empty if the broker did.
    """
    value = ConsumerGroupTargetAssignmentMetadataValue(
        assignment_epoch=assignment_epoch,
        assignment_timestamp=timestamp_ms,
        assignor=assignor,
        assignor_side=int(bool(assigned_by)),
        assigned_by=assigned_by,
    )
    return CoordinatorRecord(ConsumerGroupTargetAssignmentMetadataKey(group_id=group_id), value)


def next_assignment_epoch_record(
    group_id: str, assignment_epoch: int, group_epoch: int, timestamp_ms: int, assignor: str = "", assigned_by: str = ""
) -> CoordinatorRecord:
    """Returns the record that ends a new target assignment. `group_epoch` includes the records before this one."""
    assert assignment_epoch <= group_epoch, (
        f"G-2: the assignment epoch {assignment_epoch} of group {group_id} is above its group epoch {group_epoch}"
    )
    return new_target_assignment_epoch_record(group_id, assignment_epoch, timestamp_ms, assignor, assigned_by)


def new_target_assignment_epoch_tombstone(group_id: str, reason: TombstoneReason) -> CoordinatorRecord:
    return CoordinatorRecord(ConsumerGroupTargetAssignmentMetadataKey(group_id=group_id), None, reason=reason.value)


def new_target_assignment_record(
    group_id: str, member_id: str, assignment: Assignment, metadata: TargetMetadata = NO_METADATA
) -> CoordinatorRecord:
    """Returns a member's target record. Topics and partitions are sorted, so that equal targets give equal bytes."""
    shared: dict[int, list[int]] = {}
    topic_partitions = [
        ConsumerGroupTargetAssignmentMemberValue.TopicPartition(
            topic_id=topic_id,
            partitions=shared.get(id(partitions)) or shared.setdefault(id(partitions), sorted(partitions)),
        )
        for topic_id, partitions in sorted(assignment.items())
    ]
    value = ConsumerGroupTargetAssignmentMemberValue(topic_partitions=topic_partitions)
    if metadata is not NO_METADATA:
        value.error, value.metadata_version, value.metadata_bytes = metadata
    return CoordinatorRecord(ConsumerGroupTargetAssignmentMemberKey(group_id=group_id, member_id=member_id), value)


def new_target_assignment_tombstone(group_id: str, member_id: str, reason: TombstoneReason) -> CoordinatorRecord:
    return CoordinatorRecord(
        ConsumerGroupTargetAssignmentMemberKey(group_id=group_id, member_id=member_id), None, reason=reason.value
    )


def new_current_assignment_record(group_id: str, member: ConsumerGroupMember) -> CoordinatorRecord:
    value = ConsumerGroupCurrentMemberAssignmentValue(
        member_epoch=member.member_epoch,
        previous_member_epoch=member.previous_member_epoch,
        state=member.state,
        assigned_partitions=_partitions_with_epochs(member.assigned),
        partitions_pending_revocation=_partitions_with_epochs(member.pending_revocation),
    )
    if member.metadata is not NO_METADATA:
        value.error, value.metadata_version, value.metadata_bytes = member.metadata
    return CoordinatorRecord(
        ConsumerGroupCurrentMemberAssignmentKey(group_id=group_id, member_id=member.member_id), value
    )


def _partitions_with_epochs(
    assignment: EpochAssignment,
) -> list[ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions]:
    shared: dict[int, tuple[list[int], list[int]]] = {}
    topics = []
    for topic_id, epochs in sorted(assignment.items()):
        partitions, values = shared.get(id(epochs)) or shared.setdefault(id(epochs), _columns(epochs))
        topics.append(
            ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions(
                topic_id=topic_id, partitions=partitions, assignment_epochs=values
            )
        )
    return topics


def _columns(epochs: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Returns the partitions in order, and their epochs."""
    partitions = sorted(epochs)
    values = [*epochs.values()]
    # A large assignment usually has one epoch, or its partitions are in order. Then no lookups are necessary.
    if values.count(values[0] if values else 0) < len(values) and partitions != [*epochs]:
        values = [epochs[partition] for partition in partitions]
    return partitions, values


def new_current_assignment_tombstone(group_id: str, member_id: str, reason: TombstoneReason) -> CoordinatorRecord:
    return CoordinatorRecord(
        ConsumerGroupCurrentMemberAssignmentKey(group_id=group_id, member_id=member_id), None, reason=reason.value
    )


def new_regular_expression_record(
    group_id: str, regular_expression: str, topics: Iterable[str], version: int, timestamp_ms: int
) -> CoordinatorRecord:
    """Returns the record of the topics that a regular expression matched at `version` of the metadata image."""
    value = ConsumerGroupRegularExpressionValue(topics=sorted(topics), version=version, timestamp=timestamp_ms)
    return CoordinatorRecord(
        ConsumerGroupRegularExpressionKey(group_id=group_id, regular_expression=regular_expression), value
    )


def new_regular_expression_tombstone(
    group_id: str, regular_expression: str, reason: TombstoneReason
) -> CoordinatorRecord:
    return CoordinatorRecord(
        ConsumerGroupRegularExpressionKey(group_id=group_id, regular_expression=regular_expression),
        None,
        reason=reason.value,
    )


def new_classic_group_tombstone(group_id: str, reason: TombstoneReason) -> CoordinatorRecord:
    return CoordinatorRecord(GroupMetadataKey(group=group_id), None, reason=reason.value)


def new_member_tombstones(group_id: str, member_id: str, reason: TombstoneReason) -> list[CoordinatorRecord]:
    """Returns the tombstones of all records of one member, in Kafka's order: the subscription is the last."""
    return [
        new_current_assignment_tombstone(group_id, member_id, reason),
        new_target_assignment_tombstone(group_id, member_id, reason),
        new_member_subscription_tombstone(group_id, member_id, reason),
    ]


def new_consumer_group_tombstones(
    group_id: str, regular_expressions: Iterable[str], reason: TombstoneReason
) -> list[CoordinatorRecord]:
    """Returns the tombstones of all records of a consumer group without members, except its offsets."""
    return [
        new_target_assignment_epoch_tombstone(group_id, reason),
        *(new_regular_expression_tombstone(group_id, regex, reason) for regex in sorted(regular_expressions)),
        new_group_epoch_tombstone(group_id, reason),
    ]


def new_offset_commit_record(group_id: str, topic: str, partition: int, offset: CommittedOffset) -> CoordinatorRecord:
    """Returns the record of a committed offset.

    Its version is the lowest that has all fields: 1 with an expire timestamp, 4 with a topic id, else 3.
    """
    version = 1 if offset.expire_timestamp_ms >= 0 else 4 if offset.topic_id != ZERO_UUID else 3
    value = OffsetCommitValue(
        offset=offset.offset,
        leader_epoch=offset.leader_epoch if version >= 3 else -1,
        metadata=offset.metadata,
        commit_timestamp=offset.commit_timestamp_ms,
        expire_timestamp=offset.expire_timestamp_ms,
        topic_id=offset.topic_id if version >= 4 else ZERO_UUID,
    )
    return CoordinatorRecord(OffsetCommitKey(group=group_id, topic=topic, partition=partition), value, version)


def new_offset_commit_tombstone(
    group_id: str, topic: str, partition: int, reason: TombstoneReason
) -> CoordinatorRecord:
    return CoordinatorRecord(
        OffsetCommitKey(group=group_id, topic=topic, partition=partition), None, reason=reason.value
    )


def new_group_import_record(group_id: str) -> CoordinatorRecord:
    """Returns the record after which the offsets of a group are not imported any more (`imports`)."""
    return CoordinatorRecord(GroupImportKey(group=group_id), GroupImportValue())


def new_group_import_tombstone(group_id: str) -> CoordinatorRecord:
    return CoordinatorRecord(GroupImportKey(group=group_id), None)


def attribute(tombstones: Iterable[CoordinatorRecord], principal: str) -> None:
    """Notes in tombstones the principal whose request deletes. It becomes a record header."""
    for tombstone in tombstones:
        tombstone.principal = principal


def target_assignment_from(value: ConsumerGroupTargetAssignmentMemberValue) -> Assignment:
    shared: dict[int, frozenset[int]] = {}
    return {
        topic.topic_id: shared.get(id(topic.partitions))
        or shared.setdefault(id(topic.partitions), frozenset(topic.partitions))
        for topic in value.topic_partitions
    }


def assignment_metadata_from(
    value: ConsumerGroupTargetAssignmentMemberValue | ConsumerGroupCurrentMemberAssignmentValue,
) -> TargetMetadata:
    if not value.error and value.metadata_version == NO_METADATA.version and not value.metadata_bytes:
        return NO_METADATA
    return TargetMetadata(value.error, value.metadata_version, value.metadata_bytes)


def client_assignors_from(
    assignors: Sequence[ConsumerGroupMemberMetadataValue.ClientAssignor | ConsumerGroupHeartbeatRequest.ClientAssignor]
    | None,
) -> tuple[ClientAssignor, ...]:
    """Returns the client-side assignors of a record or a request; none if it has no list."""
    if not assignors:
        return ()
    return tuple(
        ClientAssignor(
            assignor.name,
            assignor.minimum_version,
            assignor.maximum_version,
            assignor.reason,
            assignor.metadata_version,
            assignor.metadata_bytes,
        )
        for assignor in assignors
    )


def epoch_assignment_from(
    topics: Iterable[ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions], member_epoch: int
) -> EpochAssignment:
    """Returns the partitions with their assignment epochs.

    Records of Kafka before 4.3 have no assignment epochs; they count as the member's epoch.
    """
    assignment: dict[bytes, Mapping[int, int]] = {}
    shared: dict[tuple[int, int], Mapping[int, int]] = {}
    for topic in topics:
        partitions, epochs = topic.partitions, topic.assignment_epochs
        lists = id(partitions), id(epochs)
        if lists not in shared:
            shared[lists] = _epochs_by_partition(partitions, epochs, member_epoch)
        assignment[topic.topic_id] = shared[lists]
    return assignment


def _epochs_by_partition(partitions: list[int], epochs: list[int] | None, member_epoch: int) -> Mapping[int, int]:
    if not epochs or epochs.count(epochs[0]) == len(epochs) == len(partitions):
        # A member that gets many partitions gets most of them at once.
        return dict.fromkeys(partitions, epochs[0] if epochs else member_epoch)
    return dict(zip(partitions, epochs, strict=True))


def classic_metadata_from(value: ConsumerGroupMemberMetadataValue) -> ClassicMemberMetadata | None:
    stored = value.classic_member_metadata
    if stored is None:
        return None
    protocols = tuple((protocol.name, protocol.metadata) for protocol in stored.supported_protocols)
    return ClassicMemberMetadata(stored.session_timeout_ms, protocols)
