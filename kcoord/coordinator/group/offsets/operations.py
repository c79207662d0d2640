# SPDX-License-Identifier: Apache-2.0
"""OffsetCommit, TxnOffsetCommit, OffsetFetch and OffsetDelete (KIP-496): permission, records, and errors per partition.

**Commit.** The request is checked first. A member must have the group's generation or its own member epoch. A client
that is no member may commit only while the group is empty. Each accepted partition becomes one record. Replay makes it
the committed offset at once, and the client gets its response when the log has the record. The order of records in the
log decides between two commits of one partition. A rejected commit changes nothing.

**Commit in a transaction.** The records carry the producer. Replay keeps their offsets pending until the transaction's
marker (`transactional_offsets`). The first commit of a transaction is verified with the transaction coordinator
(KIP-890): the server takes a ticket, asks, and commits with the ticket. A marker that arrives meanwhile invalidates the
ticket, so a late commit cannot open a transaction again.

**Fetch.** A fetch reads what is replayed. A client that requires stable offsets gets UNSTABLE_OFFSET_COMMIT for
partitions with pending offsets.

**Deletion.** A tombstone deletes the committed offset and what is pending before it. Tombstones come from OffsetDelete,
from DeleteGroups and deleted topics (`deletion`), and from expiry (`expiration`).

After a crash, replay of the log gives the same committed and pending offsets. Acknowledged commits are in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    Message,
    OffsetCommitKey,
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
"""The first version of TxnOffsetCommit with topic ids and the errors of consumer groups (KIP-1319)."""

LATEST_MS: Final = 2**63 - 1
"""The latest time that a record can have, for retention times that reach beyond it."""

PartitionCheck: TypeAlias = Callable[[bytes, int], None]
"""Takes topic id and partition; raises STALE_MEMBER_EPOCH if the member may not commit for that partition."""

FetchPartition: TypeAlias = OffsetFetchResponse.OffsetFetchResponsePartitions


def commit_offset(
    config: BrokerConfig,
    image: MetadataImage,
    group: Group | None,
    context: OperationContext,
    request: OffsetCommitRequest,
) -> CoordinatorResult[OffsetCommitResponse]:
    """Returns one record per accepted partition.

    If the member may not commit, the request fails. Metadata that is too large fails only its partition.
    """
    check = may_commit(group, context.api_version, request)
    response = OffsetCommitResponse()
    result = CoordinatorResult(response, is_refusable=True)
    if isinstance(group, ClassicGroup) and (member := group.members.get(request.member_id)) is not None:
        # A commit proves that a classic member is alive, like a heartbeat.
        deadline_ms = context.now_ms + member.session_timeout_ms
        result.timers.append(Schedule(heartbeat_timer(group.group_id, member.member_id), deadline_ms))
    for topic in request.topics:
        existing = image.topics.get(topic.name)
        topic_id = topic.topic_id
        if topic_id == ZERO_UUID and existing is not None:
            topic_id = existing.id
        answers = []
        for partition in topic.partitions:
            # Only version 1 has a commit timestamp, and only versions 2 to 4 have a retention time (KIP-211).
            commit_ms = context.now_ms if partition.commit_timestamp < 0 else partition.commit_timestamp
            expire_ms = -1
            if request.retention_time_ms >= 0:
                expire_ms = min(context.now_ms + request.retention_time_ms, LATEST_MS)
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
    if _java_length(metadata) > config.offset_metadata_max_bytes:
        return None
    if check is not None:
        check(topic_id, partition.partition_index)
    offset = CommittedOffset(
        partition.committed_offset, partition.committed_leader_epoch, metadata, commit_ms, expire_ms, topic_id
    )
    return records.new_offset_commit_record(group_id, topic, partition.partition_index, offset)


def _java_length(text: str) -> int:
    """Returns the number of UTF-16 code units, which Kafka compares with offset.metadata.max.bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def may_commit(group: Group | None, api_version: int, request: OffsetCommitRequest) -> PartitionCheck | None:
    """Raises if the whole request is rejected; returns a check per partition for a commit with an older epoch."""
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
            f"OffsetCommit v{api_version} does not support members of the consumer protocol; v9 and later do.",
        )
    return _epoch_check(member, epoch)


def _check_classic_commit(group: ClassicGroup, request: OffsetCommitRequest) -> None:
    """Raises unless the member is in the present generation and that generation has its assignments."""
    check_member(group, request.member_id, request.group_instance_id)
    check_generation(group, request.generation_id_or_member_epoch)
    if group.state is GroupState.COMPLETING_REBALANCE:
        raise KafkaError(Errors.REBALANCE_IN_PROGRESS, f"Group {group.group_id} is rebalancing.")


def _epoch_check(member: ConsumerGroupMember, epoch: int, stale: Errors | None = None) -> PartitionCheck | None:
    """Checks the epoch of a commit; returns a check per partition if it is older than the member's.

    An older epoch is accepted for partitions that the member has owned since then (observed in Kafka 4.3.1). Else the
    error is `stale`, by default that of the member's protocol.
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
        f"Member {member.member_id} is at epoch {member.member_epoch}, but the request has epoch {epoch}.",
    )


def commit_transactional_offsets(
    config: BrokerConfig,
    image: MetadataImage,
    group: Group | None,
    context: OperationContext,
    request: TxnOffsetCommitRequest,
) -> CoordinatorResult[TxnOffsetCommitResponse]:
    """Returns one record of the producer's transaction per accepted partition, otherwise as `commit_offset`.

    Without a producer, which only passes if transactions are not verified, the offsets count at once, as in Kafka.
    """
    check = _may_commit_in_transaction(group, context.api_version, request)
    producer = Producer(request.producer_id, request.producer_epoch) if request.producer_id >= 0 else None
    response = TxnOffsetCommitResponse()
    result = CoordinatorResult(response, is_refusable=True)
    for topic in request.topics:
        existing = image.topics.get(topic.name)
        topic_id = existing.id if existing is not None else ZERO_UUID
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


def present_records(
    offsets: CommittedOffsets, pending: TransactionalOffsets, keys: Iterable[Message]
) -> list[CoordinatorRecord]:
    """Returns records of the committed offsets of these partitions, and tombstones if there are none.

    Leaves out partitions with pending offsets, which a plain record would supersede.
    """
    present: list[CoordinatorRecord] = []
    for key in keys:
        if isinstance(key, OffsetCommitKey) and not pending.is_pending(key.group, key.topic, key.partition):
            offset = offsets.get(key.group, key.topic, key.partition)
            present.append(
                CoordinatorRecord(key, None)
                if offset is None
                else records.new_offset_commit_record(key.group, key.topic, key.partition, offset)
            )
    return present


def _may_commit_in_transaction(
    group: Group | None, api_version: int, request: TxnOffsetCommitRequest
) -> PartitionCheck | None:
    """Raises if the whole request is rejected; returns a check per partition for a commit with an older epoch.

    Generation, member id and instance id are optional here (KIP-447). They are checked if the request has any. Before
    version 6 both types of groups have the errors of classic groups (observed in Kafka 4.3.1 and 4.4.0).
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
    """Returns the committed offsets of the requested partitions, or of all if `topics` is null; -1 if there is none.

    If the topic id is not the committed one, the topic was created again, and its old offsets are not returned.
    `pending` is given if the client requires stable offsets (KIP-447): partitions with pending offsets get an error.
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


def _same_topic(committed: bytes, requested: bytes) -> bool:
    return committed == requested or ZERO_UUID in (committed, requested)


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
    """Raises unless the request has no member, or a member of the group with its present epoch."""
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
    """Raises INVALID_TXN_STATE unless the producer's transaction is open in this log or is verified.

    It is verified if the transaction coordinator agreed and no marker came since the ticket was taken.
    """
    epoch = pending.check_epoch(request.producer_id, request.producer_epoch)
    is_verified = ticket is not None and verifications.holds(request.producer_id, ticket)
    if epoch != request.producer_epoch and not is_verified:
        raise KafkaError(
            Errors.INVALID_TXN_STATE,
            f"Producer {request.producer_id} has no open transaction in this partition of __consumer_offsets.",
        )


def delete_offsets(
    image: MetadataImage,
    group: Group | None,
    offsets: CommittedOffsets,
    pending: TransactionalOffsets,
    request: OffsetDeleteRequest,
    principal: str,
) -> CoordinatorResult[OffsetDeleteResponse]:
    """Deletes offsets (KIP-496) for a principal, with one error code per partition.

    A partition of a subscribed topic is rejected. A missing offset is no error. Pending offsets are deleted too.
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
        existing = image.topics.get(topic.name)
        subscribed = group.is_subscribed_to(topic.name)
        answers = []
        for requested in topic.partitions:
            partition = requested.partition_index
            error = Errors.NONE
            if existing is None or not 0 <= partition < len(existing.partitions):
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
    records.attribute(deleted, principal)
    return CoordinatorResult(response, deleted, is_refusable=True)
