# SPDX-License-Identifier: Apache-2.0
"""The only constructors of coordinator records.

Record types, keys and values are Kafka's (`schemas/coordinator_records`); a tombstone deletes what its key names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final

from kcoord.coordinator.group.consumer.group import (
    Assignment,
    ClassicMemberMetadata,
    ConsumerGroup,
    ConsumerGroupMember,
    EpochAssignment,
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
    GroupMetadataKey,
    OffsetCommitKey,
    OffsetCommitValue,
)
from kcoord_protocol.uuid import ZERO_UUID


class EpochReason(Enum):
    """Why a consumer group's epoch was bumped; written beside it for those who audit the log."""

    JOIN = "join"
    LEAVE = "leave"
    FENCED = "fenced"
    SUBSCRIPTION = "subscription"
    METADATA = "metadata"
    ASSIGNOR = "assignor"
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
"""Our own tagged fields of ConsumerGroupMetadataValue: an EpochReason as text, and an int64 in ms. Kafka skips both."""


def new_group_epoch_record(
    group_id: str,
    epoch: int,
    metadata_hash: int,
    creation_time_ms: int,
    reason: EpochReason | None,
    empty_since_ms: int = -1,
) -> CoordinatorRecord:
    """The epoch of a consumer group; `creation_time_ms` is KIP-1327's, -1 where it was never recorded.

    `empty_since_ms` is set where the group loses its last member with this epoch: KIP-211 counts from then. In a
    snapshot nobody knows the reason any more.
    """
    value = ConsumerGroupMetadataValue(epoch=epoch, metadata_hash=metadata_hash, creation_time_ms=creation_time_ms)
    tags = [(EPOCH_REASON_TAG, reason.value.encode())] if reason is not None else []
    if empty_since_ms >= 0:
        tags.append((EMPTY_SINCE_TAG, empty_since_ms.to_bytes(8, "big")))
    value.unknown_tagged_fields = tuple(tags)
    return CoordinatorRecord(ConsumerGroupMetadataKey(group_id=group_id), value)


def new_empty_since_record(group: ConsumerGroup, empty_since_ms: int) -> CoordinatorRecord:
    """The epoch as it is, and since when the group is empty. The reason stays in the record before."""
    return new_group_epoch_record(
        group.group_id, group.group_epoch, group.metadata_hash, group.creation_time_ms, None, empty_since_ms
    )


def is_migration(value: ConsumerGroupMetadataValue) -> bool:
    """Whether the epoch is the generation of a classic group that was converted."""
    return (EPOCH_REASON_TAG, _MIGRATION) in value.unknown_tagged_fields


def empty_since_from(value: ConsumerGroupMetadataValue) -> int:
    """When the group lost its last member; -1 where the record does not say."""
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


def new_target_assignment_epoch_record(group_id: str, assignment_epoch: int, timestamp_ms: int) -> CoordinatorRecord:
    value = ConsumerGroupTargetAssignmentMetadataValue(
        assignment_epoch=assignment_epoch, assignment_timestamp=timestamp_ms
    )
    return CoordinatorRecord(ConsumerGroupTargetAssignmentMetadataKey(group_id=group_id), value)


def new_target_assignment_epoch_tombstone(group_id: str, reason: TombstoneReason) -> CoordinatorRecord:
    return CoordinatorRecord(ConsumerGroupTargetAssignmentMetadataKey(group_id=group_id), None, reason=reason.value)


def new_target_assignment_record(group_id: str, member_id: str, assignment: Assignment) -> CoordinatorRecord:
    """Topics ascend by id and partitions by number, so that equal assignments give equal bytes."""
    topic_partitions = [
        ConsumerGroupTargetAssignmentMemberValue.TopicPartition(topic_id=topic_id, partitions=sorted(partitions))
        for topic_id, partitions in sorted(assignment.items())
    ]
    return CoordinatorRecord(
        ConsumerGroupTargetAssignmentMemberKey(group_id=group_id, member_id=member_id),
        ConsumerGroupTargetAssignmentMemberValue(topic_partitions=topic_partitions),
    )


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
    return CoordinatorRecord(
        ConsumerGroupCurrentMemberAssignmentKey(group_id=group_id, member_id=member.member_id), value
    )


def _partitions_with_epochs(
    assignment: EpochAssignment,
) -> list[ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions]:
    topics = []
    for topic_id, epochs in sorted(assignment.items()):
        partitions = sorted(epochs)
        topics.append(
            ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions(
                topic_id=topic_id, partitions=partitions, assignment_epochs=[epochs[p] for p in partitions]
            )
        )
    return topics


def new_current_assignment_tombstone(group_id: str, member_id: str, reason: TombstoneReason) -> CoordinatorRecord:
    return CoordinatorRecord(
        ConsumerGroupCurrentMemberAssignmentKey(group_id=group_id, member_id=member_id), None, reason=reason.value
    )


def new_regular_expression_record(
    group_id: str, regular_expression: str, topics: Iterable[str], version: int, timestamp_ms: int
) -> CoordinatorRecord:
    """What a subscribed regular expression matched at version `version` of the metadata image."""
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
    """Everything a consumer group knows of one member, in the order in which it may go."""
    return [
        new_current_assignment_tombstone(group_id, member_id, reason),
        new_target_assignment_tombstone(group_id, member_id, reason),
        new_member_subscription_tombstone(group_id, member_id, reason),
    ]


def new_consumer_group_tombstones(
    group_id: str, regular_expressions: Iterable[str], reason: TombstoneReason
) -> list[CoordinatorRecord]:
    """Everything an empty consumer group has left besides its offsets."""
    return [
        new_target_assignment_epoch_tombstone(group_id, reason),
        *(new_regular_expression_tombstone(group_id, regex, reason) for regex in sorted(regular_expressions)),
        new_group_epoch_tombstone(group_id, reason),
    ]


def new_offset_commit_record(group_id: str, topic: str, partition: int, offset: CommittedOffset) -> CoordinatorRecord:
    """The value has the lowest version that holds everything: 1 with an expire timestamp, 4 with a topic id, else 3."""
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


def target_assignment_from(value: ConsumerGroupTargetAssignmentMemberValue) -> Assignment:
    return {topic.topic_id: frozenset(topic.partitions) for topic in value.topic_partitions}


def epoch_assignment_from(
    topics: Iterable[ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions], member_epoch: int
) -> EpochAssignment:
    """Partitions written without assignment epochs (before Kafka 4.3) count as assigned at the member's epoch."""
    assignment: dict[bytes, Mapping[int, int]] = {}
    for topic in topics:
        epochs = topic.assignment_epochs or [member_epoch] * len(topic.partitions)
        assignment[topic.topic_id] = dict(zip(topic.partitions, epochs, strict=True))
    return assignment


def classic_metadata_from(value: ConsumerGroupMemberMetadataValue) -> ClassicMemberMetadata | None:
    stored = value.classic_member_metadata
    if stored is None:
        return None
    protocols = tuple((protocol.name, protocol.metadata) for protocol in stored.supported_protocols)
    return ClassicMemberMetadata(stored.session_timeout_ms, protocols)
