# SPDX-License-Identifier: Apache-2.0
"""OffsetForLeaderEpoch: the end offset of a leader epoch. Consumers use it to detect log truncation (KIP-320)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.fan_out import filled
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse

API_KEY = ApiKey.OFFSET_FOR_LEADER_EPOCH
VERSIONS = range(2, 5)

PARTITIONS_PER_TURN: Final = 1_000
"""A request for more partitions takes several turns of the event loop."""


def handle(
    broker: Broker, context: RequestContext, request: OffsetForLeaderEpochRequest
) -> Reply[OffsetForLeaderEpochResponse]:
    allowed = _describable_topics(context.rights, request) if context.rights is not None else None
    response = OffsetForLeaderEpochResponse()
    return filled(broker, response, _fill(broker, context, request, allowed, response))


def _fill(
    broker: Broker,
    context: RequestContext,
    request: OffsetForLeaderEpochRequest,
    allowed: set[str] | None,
    response: OffsetForLeaderEpochResponse,
) -> Iterator[int]:
    """Fills the response, and yields the number of partitions so far after each PARTITIONS_PER_TURN."""
    count = 0
    for topic in request.topics:
        result = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult(topic=topic.topic)
        response.topics.append(result)
        for partition in topic.partitions:
            if allowed is None or topic.topic in allowed:
                end = _look_up(broker, context, topic.topic, partition)
            else:
                end = OffsetForLeaderEpochResponse.EpochEndOffset(
                    error_code=Errors.TOPIC_AUTHORIZATION_FAILED, partition=partition.partition
                )
            result.partitions.append(end)
            count += 1
            if count % PARTITIONS_PER_TURN == 0:
                yield count


def _describable_topics(rights: Rights, request: OffsetForLeaderEpochRequest) -> set[str]:
    names = [topic.topic for topic in request.topics]
    if rights.allows_cluster(AclOperation.CLUSTER_ACTION, logs_denial=False):
        return set(names)
    return rights.allowed(AclOperation.DESCRIBE, ResourceType.TOPIC, names)


def _look_up(
    broker: Broker, context: RequestContext, topic: str, partition: OffsetForLeaderEpochRequest.OffsetForLeaderPartition
) -> OffsetForLeaderEpochResponse.EpochEndOffset:
    try:
        epoch, end_offset = broker.topics.end_offset_for_epoch(
            topic,
            partition.partition,
            partition.leader_epoch,
            current_leader_epoch=partition.current_leader_epoch,
            now_ms=context.now_ms,
        )
    except KafkaError as error:
        return OffsetForLeaderEpochResponse.EpochEndOffset(error_code=error.error, partition=partition.partition)
    return OffsetForLeaderEpochResponse.EpochEndOffset(
        partition=partition.partition, leader_epoch=epoch, end_offset=end_offset
    )


def error_response(
    request: OffsetForLeaderEpochRequest, error: KafkaError, version: int
) -> OffsetForLeaderEpochResponse:
    code: Errors = error.error
    return OffsetForLeaderEpochResponse(
        topics=[
            OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult(
                topic=topic.topic,
                partitions=[
                    OffsetForLeaderEpochResponse.EpochEndOffset(error_code=code, partition=partition.partition)
                    for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )
