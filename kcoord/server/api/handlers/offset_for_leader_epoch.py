# SPDX-License-Identifier: Apache-2.0
"""OffsetForLeaderEpoch: where a leader epoch ended, by which a consumer notices that the log it read was truncated
(KIP-320).
"""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse

API_KEY = ApiKey.OFFSET_FOR_LEADER_EPOCH
VERSIONS = range(2, 5)


def handle(
    broker: Broker, context: RequestContext, request: OffsetForLeaderEpochRequest
) -> OffsetForLeaderEpochResponse:
    return OffsetForLeaderEpochResponse(
        topics=[
            OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult(
                topic=topic.topic,
                partitions=[_look_up(broker, context, topic.topic, partition) for partition in topic.partitions],
            )
            for topic in request.topics
        ]
    )


def _look_up(
    broker: Broker, context: RequestContext, topic: str, wanted: OffsetForLeaderEpochRequest.OffsetForLeaderPartition
) -> OffsetForLeaderEpochResponse.EpochEndOffset:
    try:
        epoch, end_offset = broker.topics.end_offset_for_epoch(
            topic,
            wanted.partition,
            wanted.leader_epoch,
            current_leader_epoch=wanted.current_leader_epoch,
            now_ms=context.now_ms,
        )
    except KafkaError as error:
        return OffsetForLeaderEpochResponse.EpochEndOffset(error_code=error.error, partition=wanted.partition)
    return OffsetForLeaderEpochResponse.EpochEndOffset(
        partition=wanted.partition, leader_epoch=epoch, end_offset=end_offset
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
