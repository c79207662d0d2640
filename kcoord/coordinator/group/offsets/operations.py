# SPDX-License-Identifier: Apache-2.0
"""OffsetCommit, TxnOffsetCommit, OffsetFetch and OffsetDelete (KIP-496): who may, what is recorded, what is answered
per partition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import records
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.operations import check_generation, check_member
from kcoord.coordinator.group.consumer.group import ConsumerGroup, ConsumerGroupMember
from kcoord.coordinator.group.group import Group, GroupState, heartbeat_timer
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset, CommittedOffsets
from kcoord.coordinator.group.offsets.transactional_offsets import TransactionalOffsets
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext, Producer, Schedule
from kcoord.runtime.verification import Verifications
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    OffsetCommitResponse,
    OffsetDeleteResponse,
    OffsetFetchResponse,
    TxnOffsetCommitResponse,
)
from kcoord_protocol.uuid import ZERO_UUID

if TYPE_CHECKING:
    from kcoord_protocol.messages import (
        OffsetCommitRequest,
        OffsetDeleteRequest,
        OffsetFetchRequest,
        TxnOffsetCommitRequest,
    )

INVALID_OFFSET = -1
NO_LEADER_EPOCH = -1

FIRST_TXN_VERSION_OF_CONSUMER_GROUPS: Final = 6
"""TxnOffsetCommit names topics by id and has the errors of consumer groups from this version on (KIP-1319)."""

PartitionCheck: TypeAlias = Callable[[bytes, int], None]
"""Topic id and partition; raises STALE_MEMBER_EPOCH where the member may not commit for that partition."""

FetchPartition: TypeAlias = OffsetFetchResponse.OffsetFetchResponsePartitions


def commit_offset(
    config: BrokerConfig,
    image: MetadataImage,
    group: Group | None,
    context: OperationContext,
    request: OffsetCommitRequest,
) -> CoordinatorResult[OffsetCommitResponse]:
    """One record per accepted partition. A refused member fails the request; too much metadata fails its partition
    alone.
    """
    check = may_commit(group, context.api_version, request)
    response = OffsetCommitResponse()
    result = CoordinatorResult(response, is_refusable=True)
    if isinstance(group, ClassicGroup) and (member := group.members.get(request.member_id)) is not None:
        # A commit proves that a classic member is alive, like a heartbeat.
        deadline_ms = context.now_ms + member.session_timeout_ms
        result.timers.append(Schedule(heartbeat_timer(group.group_id, member.member_id), deadline_ms))
    for topic in request.topics:
        known = image.topics.get(topic.name)
        topic_id = topic.topic_id if topic.topic_id != ZERO_UUID else known.id if known is not None else ZERO_UUID
        answers = []
        for partition in topic.partitions:
            # Version 1 says when; later ones leave that to the broker (KIP-211).
            commit_ms = context.now_ms if partition.commit_timestamp < 0 else partition.commit_timestamp
            expire_ms = -1 if request.retention_time_ms < 0 else context.now_ms + request.retention_time_ms
            record = _offset_record(
                config, request.group_id, topic.name, topic_id, partition, check, commit_ms, expire_ms
            )
            if record is not None:
                result.records.append(record)
            answers.append(
                OffsetCommitResponse.OffsetCommitResponsePartition(
                    partition_index=partition.partition_index,
                    error_code=Errors.OFFSET_METADATA_TOO_LARGE if record is None else Errors.NONE,
                )
            )
        response.topics.append(
            OffsetCommitResponse.OffsetCommitResponseTopic(name=topic.name, topic_id=topic.topic_id, partitions=answers)
        )
    return result


def _offset_record(
    config: BrokerConfig,
    group_id: str,
    topic: str,
    topic_id: bytes,
    partition: OffsetCommitRequest.OffsetCommitRequestPartition
    | TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition,
    check: PartitionCheck | None,
    commit_ms: int,
    expire_ms: int = -1,
) -> CoordinatorRecord | None:
    """Returns the record of one partition, or None if its metadata is too large. Raises what `check` raises."""
    metadata = partition.committed_metadata or ""
    if len(metadata.encode()) > config.offset_metadata_max_bytes:
        return None
    if check is not None:
        check(topic_id, partition.partition_index)
    offset = CommittedOffset(
        partition.committed_offset, partition.committed_leader_epoch, metadata, commit_ms, expire_ms, topic_id
    )
    return records.new_offset_commit_record(group_id, topic, partition.partition_index, offset)


def may_commit(group: Group | None, api_version: int, request: OffsetCommitRequest) -> PartitionCheck | None:
    """Raises where the request as a whole is refused; returns a check per partition for a commit with an older
    epoch.
    """
    epoch = request.generation_id_or_member_epoch
    if group is None:
        if epoch >= 0:
            if api_version >= 9:
                raise KafkaError(Errors.GROUP_ID_NOT_FOUND, f"Group {request.group_id} does not exist.")
            raise KafkaError(Errors.ILLEGAL_GENERATION, f"Group {request.group_id} does not exist.")
        return None
    if epoch < 0 and group.is_empty():
        return None
    if isinstance(group, ClassicGroup):
        _check_classic_commit(group, request)
        return None
    assert isinstance(group, ConsumerGroup)
    member = group.members.get(request.member_id)
    if member is None:
        raise KafkaError(Errors.UNKNOWN_MEMBER_ID, f"Group {request.group_id} has no member {request.member_id}.")
    if member.classic is None and api_version < 9:
        raise KafkaError(
            Errors.UNSUPPORTED_VERSION,
            "A member of the consumer protocol commits with version 9 or later of OffsetCommit.",
        )
    return _epoch_check(member, epoch)


def _check_classic_commit(group: ClassicGroup, request: OffsetCommitRequest) -> None:
    """A member of the present generation, and not between its join and the generation's assignment."""
    check_member(group, request.member_id, request.group_instance_id)
    check_generation(group, request.generation_id_or_member_epoch)
    if group.state is GroupState.COMPLETING_REBALANCE:
        raise KafkaError(Errors.REBALANCE_IN_PROGRESS, f"Group {group.group_id} is rebalancing.")


def _epoch_check(member: ConsumerGroupMember, epoch: int, stale: Errors | None = None) -> PartitionCheck | None:
    """A commit with an older epoch is good for the partitions that the member has owned since (observed in Kafka
    4.3.1). `stale` is the error otherwise, by default that of the member's protocol.
    """
    if epoch == member.member_epoch:
        return None
    if epoch > member.member_epoch:
        raise _stale(member, epoch, stale)

    def check(topic_id: bytes, partition: int) -> None:
        since = member.assignment_epoch_of(topic_id, partition)
        if since is None or epoch < since:
            raise _stale(member, epoch, stale)

    return check


def _stale(member: ConsumerGroupMember, epoch: int, error: Errors | None = None) -> KafkaError:
    return KafkaError(
        error or (Errors.STALE_MEMBER_EPOCH if member.classic is None else Errors.ILLEGAL_GENERATION),
        f"Member {member.member_id} is at epoch {member.member_epoch}, the request says {epoch}.",
    )


def commit_transactional_offsets(
    config: BrokerConfig,
    image: MetadataImage,
    group: Group | None,
    context: OperationContext,
    request: TxnOffsetCommitRequest,
) -> CoordinatorResult[TxnOffsetCommitResponse]:
    """Like OffsetCommit, in records of the producer's transaction."""
    check = _may_commit_in_transaction(group, context.api_version, request)
    producer = Producer(request.producer_id, request.producer_epoch)
    response = TxnOffsetCommitResponse()
    result = CoordinatorResult(response, is_refusable=True)
    for topic in request.topics:
        known = image.topics.get(topic.name)
        topic_id = known.id if known is not None else ZERO_UUID
        answers = []
        for partition in topic.partitions:
            record = _offset_record(config, request.group_id, topic.name, topic_id, partition, check, context.now_ms)
            if record is not None:
                record.producer = producer
                result.records.append(record)
            answers.append(
                TxnOffsetCommitResponse.TxnOffsetCommitResponsePartition(
                    partition_index=partition.partition_index,
                    error_code=Errors.OFFSET_METADATA_TOO_LARGE if record is None else Errors.NONE,
                )
            )
        response.topics.append(
            TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic(
                name=topic.name, topic_id=topic.topic_id, partitions=answers
            )
        )
    return result


def _may_commit_in_transaction(
    group: Group | None, api_version: int, request: TxnOffsetCommitRequest
) -> PartitionCheck | None:
    """Raises if the request as a whole is refused; returns a check per partition for a commit with an older epoch.

    Group metadata is optional here (KIP-447): it is checked if any of it is given. Before version 6 the errors are
    those of classic groups for groups of both types (observed in Kafka 4.3.1 and 4.4.0).
    """
    generation, member_id = request.generation_id_or_member_epoch, request.member_id
    knows_consumer_groups = api_version >= FIRST_TXN_VERSION_OF_CONSUMER_GROUPS
    if group is None:
        if generation >= 0:
            error = Errors.GROUP_ID_NOT_FOUND if knows_consumer_groups else Errors.ILLEGAL_GENERATION
            raise KafkaError(error, f"Group {request.group_id} does not exist.")
        return None
    if generation < 0 and (group.is_empty() or (not member_id and request.group_instance_id is None)):
        return None
    if isinstance(group, ClassicGroup):
        check_member(group, member_id, request.group_instance_id)
        check_generation(group, generation)
        return None
    assert isinstance(group, ConsumerGroup)
    member = group.members.get(member_id)
    if member is None:
        raise KafkaError(Errors.UNKNOWN_MEMBER_ID, f"Group {request.group_id} has no member {member_id}.")
    stale = None if knows_consumer_groups else Errors.ILLEGAL_GENERATION
    return _epoch_check(member, generation, stale)


def fetch_offsets(
    group: Group | None,
    offsets: CommittedOffsets,
    pending: TransactionalOffsets | None,
    request: OffsetFetchRequest.OffsetFetchRequestGroup,
) -> OffsetFetchResponse.OffsetFetchResponseGroup:
    """The committed offsets of the partitions asked for, or of all where `topics` is null; -1 where there is none.

    A topic id that is not the one that was committed with means a topic made again: its offsets are not answered.
    `pending` is given where only a stable answer will do (KIP-447): partitions in transactions under way have none.
    """
    may_fetch(group, request)
    response = OffsetFetchResponse.OffsetFetchResponseGroup(group_id=request.group_id)
    committed = offsets.of_group(request.group_id)
    if request.topics is None:
        for name, partitions in sorted(committed.items()):
            answers = [
                _unstable(partition)
                if pending and pending.is_pending(request.group_id, name, partition)
                else _fetched(partition, offset)
                for partition, offset in sorted(partitions.items())
            ]
            ids = {offset.topic_id for offset in partitions.values()}
            response.topics.append(
                OffsetFetchResponse.OffsetFetchResponseTopics(
                    name=name, topic_id=ids.pop() if len(ids) == 1 else ZERO_UUID, partitions=answers
                )
            )
        return response
    for topic in request.topics:
        partitions = committed.get(topic.name, {})
        answers = []
        for partition in topic.partition_indexes:
            if pending and pending.is_pending(request.group_id, topic.name, partition):
                answers.append(_unstable(partition))
                continue
            offset = partitions.get(partition)
            if offset is not None and not _same_topic(offset.topic_id, topic.topic_id):
                offset = None
            answers.append(_fetched(partition, offset))
        response.topics.append(
            OffsetFetchResponse.OffsetFetchResponseTopics(name=topic.name, topic_id=topic.topic_id, partitions=answers)
        )
    return response


def _same_topic(committed: bytes, asked: bytes) -> bool:
    return committed == asked or ZERO_UUID in (committed, asked)


def _fetched(partition: int, offset: CommittedOffset | None) -> FetchPartition:
    if offset is None:
        return OffsetFetchResponse.OffsetFetchResponsePartitions(
            partition_index=partition,
            committed_offset=INVALID_OFFSET,
            committed_leader_epoch=NO_LEADER_EPOCH,
            metadata="",
        )
    return OffsetFetchResponse.OffsetFetchResponsePartitions(
        partition_index=partition,
        committed_offset=offset.offset,
        committed_leader_epoch=offset.leader_epoch,
        metadata=offset.metadata,
    )


def _unstable(partition: int) -> FetchPartition:
    answer = _fetched(partition, None)
    answer.error_code = Errors.UNSTABLE_OFFSET_COMMIT
    return answer


def may_fetch(group: Group | None, request: OffsetFetchRequest.OffsetFetchRequestGroup) -> None:
    """A request that names no member may always read; one that does must be a member at its present epoch."""
    if not isinstance(group, ConsumerGroup) or (request.member_id is None and request.member_epoch < 0):
        return
    member = group.members.get(request.member_id or "")
    if member is None:
        raise KafkaError(Errors.UNKNOWN_MEMBER_ID, f"Group {request.group_id} has no member {request.member_id}.")
    if request.member_epoch != member.member_epoch:
        raise _stale(member, request.member_epoch)


def check_transaction(
    pending: TransactionalOffsets, verifications: Verifications, request: TxnOffsetCommitRequest, ticket: int | None
) -> None:
    """Raises unless the producer's transaction is open in this log, or its beginning was agreed with the transaction
    coordinator since the ticket was taken.
    """
    epoch = pending.check_epoch(request.producer_id, request.producer_epoch)
    agreed = ticket is not None and verifications.holds(request.producer_id, ticket)
    if epoch != request.producer_epoch and not agreed:
        raise KafkaError(Errors.INVALID_TXN_STATE, f"Producer {request.producer_id} has no transaction under way here.")


def delete_offsets(
    image: MetadataImage,
    group: Group | None,
    offsets: CommittedOffsets,
    pending: TransactionalOffsets,
    request: OffsetDeleteRequest,
) -> CoordinatorResult[OffsetDeleteResponse]:
    """KIP-496: partitions of subscribed topics are refused one by one, the others deleted; an absent offset is no
    error. What transactions under way have pending is deleted as well.
    """
    if not request.group_id:
        raise KafkaError(Errors.INVALID_GROUP_ID, "The group id must not be empty.")
    if group is None:
        raise KafkaError(Errors.GROUP_ID_NOT_FOUND, f"Group {request.group_id} does not exist.")
    if not group.is_empty() and group.protocol_type != "consumer":
        raise KafkaError(Errors.NON_EMPTY_GROUP, f"Group {request.group_id} has members of type {group.protocol_type}.")
    response = OffsetDeleteResponse()
    deleted: list[CoordinatorRecord] = []
    for topic in request.topics:
        known = image.topics.get(topic.name)
        subscribed = group.is_subscribed_to(topic.name)
        answers = []
        for requested in topic.partitions:
            partition = requested.partition_index
            error = Errors.NONE
            if known is None or not 0 <= partition < len(known.partitions):
                error = Errors.UNKNOWN_TOPIC_OR_PARTITION
            elif subscribed:
                error = Errors.GROUP_SUBSCRIBED_TO_TOPIC
            elif offsets.get(request.group_id, topic.name, partition) is not None or pending.is_pending(
                request.group_id, topic.name, partition
            ):
                deleted.append(
                    records.new_offset_commit_tombstone(
                        request.group_id, topic.name, partition, records.TombstoneReason.OFFSET_DELETE
                    )
                )
            answers.append(
                OffsetDeleteResponse.OffsetDeleteResponsePartition(partition_index=partition, error_code=error)
            )
        if answers:
            response.topics.append(OffsetDeleteResponse.OffsetDeleteResponseTopic(name=topic.name, partitions=answers))
    return CoordinatorResult(response, deleted, is_refusable=True)
