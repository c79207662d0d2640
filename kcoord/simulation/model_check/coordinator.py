# SPDX-License-Identifier: Apache-2.0
"""The real state machine of a shard, made from the compacted log of a state for each step.

Every explored state is therefore also a state after a compaction and a restart.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.consumer.assignment import metadata_hash
from kcoord.coordinator.group.group import rebalance_timer, session_timer
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import ImageBuilder, MetadataImage
from kcoord.runtime.result import CoordinatorRecord, OperationContext
from kcoord.simulation.model_check.model import (
    GROUP_ID,
    NOTHING,
    TOPIC,
    TOPIC_ID,
    Entry,
    Log,
    ModelRequest,
    Partitions,
    Response,
)
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupMetadataValue,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataValue,
    Message,
    PartitionRecord,
    TopicRecord,
)

_CONTEXT: Final = OperationContext(1_000, 1, "client", "/127.0.0.1")
_REBALANCE_TIMEOUT_MS: Final = 5_000


@cache
def _config() -> BrokerConfig:
    return BrokerConfig.from_properties({"group.consumer.assignment.interval.ms": "0"})


@cache
def _image(partitions: int) -> MetadataImage:
    builder = ImageBuilder(MetadataImage.empty())
    builder.replay(CoordinatorRecord(None, TopicRecord(name=TOPIC, topic_id=TOPIC_ID)))
    for partition in range(partitions):
        value = PartitionRecord(partition_id=partition, topic_id=TOPIC_ID, replicas=[1], isr=[1], leader=1)
        builder.replay(CoordinatorRecord(None, value))
    return builder.build()


@cache
def metadata_hash_of(partitions: int) -> int:
    """Returns the metadata hash in the group's record once the group has seen that many partitions."""
    return metadata_hash(_image(partitions), [TOPIC])


def restore(log: Log, partitions: int) -> GroupCoordinatorShard:
    """Returns the state machine that the log replays to."""
    shard = GroupCoordinatorShard(_config(), _image(partitions))
    for entry in log.values():
        shard.replay(entry.record)
    return shard


def heartbeat(shard: GroupCoordinatorShard, member_id: str, request: ModelRequest, log: Log) -> tuple[Response, Log]:
    """Sends a heartbeat. Returns the response and the log after it."""
    message = ConsumerGroupHeartbeatRequest(group_id=GROUP_ID, member_id=member_id, member_epoch=request.epoch)
    if request.full:
        message.rebalance_timeout_ms = _REBALANCE_TIMEOUT_MS
        message.subscribed_topic_names = [TOPIC]
    if request.owned is not None:
        message.topic_partitions = _topic_partitions(request.owned)
    try:
        result = shard.consumer_group_heartbeat(_CONTEXT, message)
    except KafkaError as error:
        return Response(error.error, 0, None), log
    return _response(result.response), appended(log, result.records)


def expire_session(shard: GroupCoordinatorShard, member_id: str, log: Log) -> Log:
    return appended(log, shard.fire_timer(_CONTEXT, session_timer(GROUP_ID, member_id)).records)


def expire_rebalance(shard: GroupCoordinatorShard, member_id: str, log: Log) -> Log:
    return appended(log, shard.fire_timer(_CONTEXT, rebalance_timer(GROUP_ID, member_id)).records)


def _topic_partitions(owned: Partitions) -> list[ConsumerGroupHeartbeatRequest.TopicPartitions]:
    if not owned:
        return []
    return [ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=TOPIC_ID, partitions=sorted(owned))]


def _response(response: ConsumerGroupHeartbeatResponse) -> Response:
    assignment = response.assignment
    if assignment is None:
        return Response(Errors.NONE, response.member_epoch, None)
    partitions = [partition for topic in assignment.topic_partitions for partition in topic.partitions]
    return Response(Errors.NONE, response.member_epoch, frozenset(partitions) if partitions else NOTHING)


def appended(log: Log, records: list[CoordinatorRecord]) -> Log:
    """Returns the log with these records appended and compacted."""
    if not records:
        return log
    after = dict(log)
    for record in records:
        assert record.key is not None
        key = type(record.key).__name__, getattr(record.key, "member_id", "")
        after.pop(key, None)
        if record.value is not None:
            after[key] = Entry(record, _canon(record.value))
    return after


def _canon(value: Message) -> tuple[object, ...]:
    """Returns the fields of a record that can matter.

    Member epochs are shifted, because -1 and -2 have the same hash in Python.
    """
    match value:
        case ConsumerGroupCurrentMemberAssignmentValue():
            return (
                value.member_epoch + 3,
                value.previous_member_epoch + 3,
                value.state,
                with_epochs(value.assigned_partitions),
                with_epochs(value.partitions_pending_revocation),
            )
        case ConsumerGroupTargetAssignmentMemberValue():
            return tuple(partition for topic in value.topic_partitions for partition in topic.partitions)
        case ConsumerGroupMetadataValue():
            return value.epoch, value.metadata_hash
        case ConsumerGroupTargetAssignmentMetadataValue():
            return (value.assignment_epoch,)
        case _:
            return (True,)


def with_epochs(
    topics: list[ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions],
) -> tuple[tuple[int, int], ...]:
    """Returns pairs of a partition and the epoch at which it was assigned to the member."""
    return tuple(
        pair
        for topic in topics
        for pair in zip(topic.partitions, topic.assignment_epochs or [0] * len(topic.partitions), strict=True)
    )
