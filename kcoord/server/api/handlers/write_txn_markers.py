# SPDX-License-Identifier: Apache-2.0
"""WriteTxnMarkers: ends transactions in single partitions.

Coordinators on other workers send it, and administrators that abort a transaction without a coordinator (KIP-664).
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
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.messages import WriteTxnMarkersRequest, WriteTxnMarkersResponse

RequestMarker = WriteTxnMarkersRequest.WritableTxnMarker
Result = WriteTxnMarkersResponse.WritableTxnMarkerResult
TopicResult = WriteTxnMarkersResponse.WritableTxnMarkerTopicResult

API_KEY = ApiKey.WRITE_TXN_MARKERS
VERSIONS = range(1, 3)

_NONE: Final = Errors.NONE


def handle(broker: Broker, context: RequestContext, request: WriteTxnMarkersRequest) -> Reply[WriteTxnMarkersResponse]:
    rights = context.rights
    if rights is not None and not rights.allows_cluster(AclOperation.ALTER, logs_denial=False):
        rights.require_cluster(AclOperation.CLUSTER_ACTION)
    if context.use is not None:
        # As in Kafka, the quota on time does not count what brokers may send each other.
        context.use.is_exempt = True
    replies = [_write_all(broker, context, marker) for marker in request.markers]
    return map_reply(gather_replies(replies), lambda results: WriteTxnMarkersResponse(markers=results))


def _write_all(broker: Broker, context: RequestContext, request_marker: RequestMarker) -> Reply[Result]:
    partitions = [(topic.name, index) for topic in request_marker.topics for index in topic.partition_indexes]
    replies = [_write(broker, context, request_marker, topic, index) for topic, index in partitions]

    def result(errors: list[Errors]) -> Result:
        by_topic: dict[str, TopicResult] = {}
        for (topic, index), error in zip(partitions, errors, strict=True):
            topic_result = by_topic.setdefault(topic, WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(name=topic))
            topic_result.partitions.append(
                WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult(partition_index=index, error_code=error)
            )
        return WriteTxnMarkersResponse.WritableTxnMarkerResult(
            producer_id=request_marker.producer_id, topics=list(by_topic.values())
        )

    return map_reply(gather_replies(replies), result)


def _write(
    broker: Broker, context: RequestContext, request_marker: RequestMarker, topic: str, index: int
) -> Reply[Errors]:
    producer = Producer(request_marker.producer_id, request_marker.producer_epoch)
    try:
        if topic == GROUP_METADATA_TOPIC and index in broker.groups.shard_ids:
            return map_reply(
                _end_in_group_shard(broker, context, request_marker, producer, index),
                lambda _: _NONE,
                lambda error: error.error,
            )
        bumps_epoch = request_marker.transaction_version >= EPOCH_BUMPING_VERSION
        marker = Marker(producer, request_marker.coordinator_epoch, request_marker.transaction_result, bumps_epoch)
        broker.topics.write_marker(topic, index, marker, context.now_ms)
    except KafkaError as error:
        return error.error
    return _NONE


def _end_in_group_shard(
    broker: Broker, context: RequestContext, request_marker: RequestMarker, producer: Producer, shard_id: int
) -> Reply[None]:
    def operation(
        shard: GroupCoordinatorShard, operation_context: OperationContext, marker: RequestMarker
    ) -> CoordinatorResult[None]:
        return shard.end_transaction(
            operation_context, producer, marker.coordinator_epoch, committed=marker.transaction_result
        )

    return broker.groups.call_shard(shard_id, operation, request_marker, context.operation_context())


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
