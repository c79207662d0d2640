# SPDX-License-Identifier: Apache-2.0
"""WriteTxnMarkers: ends transactions in single partitions, as an administrator does with one whose coordinator is gone
(KIP-664).
"""

from __future__ import annotations

from typing import Final

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.transaction.metadata import EPOCH_BUMPING_VERSION
from kcoord.runtime.result import CoordinatorResult, OperationContext, Producer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord.topics.partition import Marker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.messages import WriteTxnMarkersRequest, WriteTxnMarkersResponse

Wanted = WriteTxnMarkersRequest.WritableTxnMarker
Result = WriteTxnMarkersResponse.WritableTxnMarkerResult
TopicResult = WriteTxnMarkersResponse.WritableTxnMarkerTopicResult

API_KEY = ApiKey.WRITE_TXN_MARKERS
VERSIONS = range(1, 3)

_NONE: Final = Errors.NONE


def handle(broker: Broker, context: RequestContext, request: WriteTxnMarkersRequest) -> Reply[WriteTxnMarkersResponse]:
    replies = [_write_all(broker, context, marker) for marker in request.markers]
    return map_reply(gather_replies(replies), lambda results: WriteTxnMarkersResponse(markers=results))


def _write_all(broker: Broker, context: RequestContext, wanted: Wanted) -> Reply[Result]:
    partitions = [(topic.name, index) for topic in wanted.topics for index in topic.partition_indexes]
    replies = [_write(broker, context, wanted, topic, index) for topic, index in partitions]

    def result(errors: list[Errors]) -> Result:
        by_topic: dict[str, TopicResult] = {}
        for (topic, index), error in zip(partitions, errors, strict=True):
            found = by_topic.setdefault(topic, WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(name=topic))
            found.partitions.append(
                WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult(partition_index=index, error_code=error)
            )
        return WriteTxnMarkersResponse.WritableTxnMarkerResult(
            producer_id=wanted.producer_id, topics=list(by_topic.values())
        )

    return map_reply(gather_replies(replies), result)


def _write(broker: Broker, context: RequestContext, wanted: Wanted, topic: str, index: int) -> Reply[Errors]:
    producer = Producer(wanted.producer_id, wanted.producer_epoch)
    try:
        if topic == GROUP_METADATA_TOPIC and index in broker.groups.shard_ids:
            return map_reply(
                _end_in_group_shard(broker, context, wanted, producer, index),
                lambda _: _NONE,
                lambda error: error.error,
            )
        bumps_epoch = wanted.transaction_version >= EPOCH_BUMPING_VERSION
        marker = Marker(producer, wanted.coordinator_epoch, wanted.transaction_result, bumps_epoch)
        broker.topics.write_marker(topic, index, marker, context.now_ms)
    except KafkaError as error:
        return error.error
    return _NONE


def _end_in_group_shard(
    broker: Broker, context: RequestContext, wanted: Wanted, producer: Producer, shard_id: int
) -> Reply[None]:
    def operation(
        shard: GroupCoordinatorShard, operation_context: OperationContext, wanted: Wanted
    ) -> CoordinatorResult[None]:
        return shard.end_transaction(
            operation_context, producer, wanted.coordinator_epoch, committed=wanted.transaction_result
        )

    return broker.groups.call_shard(shard_id, operation, wanted, context.operation_context())


def error_response(request: WriteTxnMarkersRequest, error: KafkaError, version: int) -> WriteTxnMarkersResponse:
    return WriteTxnMarkersResponse(
        markers=[
            WriteTxnMarkersResponse.WritableTxnMarkerResult(
                producer_id=marker.producer_id,
                topics=[
                    WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(
                        name=topic.name,
                        partitions=[
                            WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult(
                                partition_index=index, error_code=error.error
                            )
                            for index in topic.partition_indexes
                        ],
                    )
                    for topic in marker.topics
                ],
            )
            for marker in request.markers
        ]
    )
