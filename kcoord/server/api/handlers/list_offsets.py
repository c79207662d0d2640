# SPDX-License-Identifier: Apache-2.0
"""ListOffsets: offsets by position or timestamp.

Each partition has its own error. Later versions know more special timestamps. A partition that a request names more
than once gets one result with INVALID_REQUEST, as in Kafka 4.3.1. The response waits a while for logs that are still
being opened, because librdkafka does not retry its query of the watermarks. A thread searches batches of very many
records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.opening_logs import ends_before
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord.topics.fetch_manager import READ_COMMITTED, check_isolation_level
from kcoord.topics.log_opening import LogBeingOpenedError
from kcoord.topics.offset_queries import SPECIAL_TIMESTAMP_VERSIONS, FoundOffset, OffsetSearchError
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ListOffsetsRequest, ListOffsetsResponse

API_KEY = ApiKey.LIST_OFFSETS
VERSIONS = range(1, 12)

_CONSUMER_REPLICA_ID: Final = -1

_Search: TypeAlias = tuple[ListOffsetsResponse.ListOffsetsPartitionResponse, Callable[[], FoundOffset]]
"""The result of a partition, and the search that finds it."""

LONGEST_WAIT_SECONDS: Final = 2.0
"""Later requests of the connection wait, too, and some clients send their heartbeats on the same connection."""


def handle(broker: Broker, context: RequestContext, request: ListOffsetsRequest) -> Reply[ListOffsetsResponse]:
    check_isolation_level(request.isolation_level)
    try:
        return _answer(broker, context, request)
    except LogBeingOpenedError as error:
        return broker.spawn(_answer_later(broker, context, request, error))


async def _answer_later(
    broker: Broker, context: RequestContext, request: ListOffsetsRequest, error: LogBeingOpenedError
) -> ListOffsetsResponse:
    """Waits for logs that another thread opens. After the longest wait the whole request fails with the error."""
    end = asyncio.get_running_loop().time() + LONGEST_WAIT_SECONDS
    opening = error.opening
    while await ends_before(opening, end):
        context.now_ms = broker.now_ms()
        openings = [
            broker.topics.opening(topic.name, partition.partition_index, context.now_ms)
            for topic in request.topics
            for partition in topic.partitions
        ]
        last = next(filter(None, reversed(openings)), None)
        if last is not None:
            opening = last
            continue
        try:
            reply = _answer(broker, context, request)
        except LogBeingOpenedError as next_error:
            # The log of a coordinator.
            opening = next_error.opening
        else:
            return await reply if asyncio.isfuture(reply) else reply
    raise error


def _answer(broker: Broker, context: RequestContext, request: ListOffsetsRequest) -> Reply[ListOffsetsResponse]:
    allowed = None
    if context.rights is not None:
        names = [topic.name for topic in request.topics]
        allowed = context.rights.allowed(AclOperation.DESCRIBE, ResourceType.TOPIC, names)
    asked: dict[str, dict[int, ListOffsetsRequest.ListOffsetsPartition | None]] = {}
    for topic in request.topics:
        partitions = asked.setdefault(topic.name, {})
        for partition in topic.partitions:
            is_repeated = partition.partition_index in partitions
            partitions[partition.partition_index] = None if is_repeated else partition
    searches: list[_Search] = []
    response = ListOffsetsResponse(
        topics=[
            ListOffsetsResponse.ListOffsetsTopicResponse(
                name=name,
                partitions=[
                    _failure(index, Errors.TOPIC_AUTHORIZATION_FAILED)
                    if allowed is not None and name not in allowed
                    else _failure(index, Errors.INVALID_REQUEST)
                    if partition is None
                    else _look_up(broker, context, request, name, partition, searches)
                    for index, partition in partitions.items()
                ],
            )
            for name, partitions in asked.items()
            if partitions
        ]
    )
    return broker.spawn(_search(broker, response, searches)) if searches else response


async def _search(broker: Broker, response: ListOffsetsResponse, searches: list[_Search]) -> ListOffsetsResponse:
    """Makes the searches, and fills in their results."""
    for result, find in searches:
        try:
            position = await broker.found_in_thread(find)
        except KafkaError as error:
            result.error_code = error.error
        else:
            result.timestamp, result.offset, result.leader_epoch = position
    return response


def _look_up(
    broker: Broker,
    context: RequestContext,
    request: ListOffsetsRequest,
    topic: str,
    partition: ListOffsetsRequest.ListOffsetsPartition,
    searches: list[_Search],
) -> ListOffsetsResponse.ListOffsetsPartitionResponse:
    first_version = SPECIAL_TIMESTAMP_VERSIONS.get(partition.timestamp, VERSIONS.stop)
    if partition.timestamp < 0 and context.api_version < first_version:
        return _failure(partition.partition_index, Errors.UNSUPPORTED_VERSION)
    try:
        offset = broker.topics.find_offset(
            topic,
            partition.partition_index,
            partition.timestamp,
            current_leader_epoch=partition.current_leader_epoch,
            read_committed=request.isolation_level == READ_COMMITTED and request.replica_id == _CONSUMER_REPLICA_ID,
            now_ms=context.now_ms,
        )
    except LogBeingOpenedError:
        raise
    except OffsetSearchError as search:
        searches.append((result := _failure(partition.partition_index, Errors.NONE), search.find))
        return result
    except KafkaError as error:
        return _failure(partition.partition_index, error.error)
    return ListOffsetsResponse.ListOffsetsPartitionResponse(
        partition_index=partition.partition_index,
        timestamp=offset.timestamp,
        offset=offset.offset,
        leader_epoch=offset.leader_epoch,
    )


def _failure(index: int, error: Errors) -> ListOffsetsResponse.ListOffsetsPartitionResponse:
    return ListOffsetsResponse.ListOffsetsPartitionResponse(partition_index=index, error_code=error)


def error_response(request: ListOffsetsRequest, error: KafkaError, version: int) -> ListOffsetsResponse:
    return ListOffsetsResponse(
        topics=[
            ListOffsetsResponse.ListOffsetsTopicResponse(
                name=topic.name,
                partitions=[_failure(partition.partition_index, error.error) for partition in topic.partitions],
            )
            for topic in request.topics
        ]
    )
