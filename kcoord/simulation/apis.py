# SPDX-License-Identifier: Apache-2.0
"""The three APIs that the model clients use, from bytes to operation and back; handlers of the server do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias, cast

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.result import CoordinatorResult, OperationContext
from kcoord.simulation.network import Request
from protocol.api_keys import ApiKey
from protocol.errors import KafkaError
from protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    Message,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)

HEARTBEAT_VERSION: Final = 1
OFFSET_COMMIT_VERSION: Final = 9
OFFSET_FETCH_VERSION: Final = 9

Operation: TypeAlias = Callable[[GroupCoordinatorShard, OperationContext], CoordinatorResult[object]]


def decode(request: Request) -> Operation:
    """What the request asks of a shard."""
    match request.api_key:
        case ApiKey.CONSUMER_GROUP_HEARTBEAT:
            heartbeat = ConsumerGroupHeartbeatRequest.decode(request.body, request.api_version)
            return cast("Operation", lambda shard, context: shard.consumer_group_heartbeat(context, heartbeat))
        case ApiKey.OFFSET_COMMIT:
            commit = OffsetCommitRequest.decode(request.body, request.api_version)
            return cast("Operation", lambda shard, context: shard.commit_offset(context, commit))
        case ApiKey.OFFSET_FETCH:
            fetch = OffsetFetchRequest.decode(request.body, request.api_version)
            return cast("Operation", lambda shard, context: shard.fetch_offsets(context, fetch.groups[0], False))
        case _:
            raise AssertionError(f"no client sends {request.api_key.name}")


def encode_response(request: Request, value: object) -> bytes:
    return _response(request, value).encode(request.api_version)


def _response(request: Request, value: object) -> Message:
    match value:
        case ConsumerGroupHeartbeatResponse() | OffsetCommitResponse():
            return value
        case OffsetFetchResponse.OffsetFetchResponseGroup():
            return OffsetFetchResponse(groups=[value])
        case KafkaError():
            return _error_response(request, value)
        case _:
            raise AssertionError(f"{request.api_key.name} was answered with {value!r}")


def _error_response(request: Request, error: KafkaError) -> Message:
    match request.api_key:
        case ApiKey.CONSUMER_GROUP_HEARTBEAT:
            return ConsumerGroupHeartbeatResponse(error_code=error.error, error_message=error.message)
        case ApiKey.OFFSET_COMMIT:
            commit = OffsetCommitRequest.decode(request.body, request.api_version)
            return OffsetCommitResponse(topics=[_failed_topic(topic, error) for topic in commit.topics])
        case _:
            group = OffsetFetchResponse.OffsetFetchResponseGroup(group_id=request.group_id, error_code=error.error)
            return OffsetFetchResponse(groups=[group])


def _failed_topic(
    topic: OffsetCommitRequest.OffsetCommitRequestTopic, error: KafkaError
) -> OffsetCommitResponse.OffsetCommitResponseTopic:
    partitions = [
        OffsetCommitResponse.OffsetCommitResponsePartition(
            partition_index=partition.partition_index, error_code=error.error
        )
        for partition in topic.partitions
    ]
    return OffsetCommitResponse.OffsetCommitResponseTopic(name=topic.name, partitions=partitions)
