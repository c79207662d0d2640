# SPDX-License-Identifier: Apache-2.0
"""WriteTxnMarkers: ends transactions in single partitions.

Coordinators on other workers send it, and administrators that abort a transaction without a coordinator (KIP-664).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.transaction.metadata import EPOCH_BUMPING_VERSION
from kcoord.runtime.result import CoordinatorResult, OperationContext, Producer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.fan_out import filled
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, chain_reply, gather_replies, map_reply
from kcoord.server.shards.transaction_service import MARKERS_AT_A_TIME
from kcoord.topics.partition import Marker
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.messages import WriteTxnMarkersRequest, WriteTxnMarkersResponse

RequestMarker = WriteTxnMarkersRequest.WritableTxnMarker
Result = WriteTxnMarkersResponse.WritableTxnMarkerResult
TopicResult = WriteTxnMarkersResponse.WritableTxnMarkerTopicResult
PartitionResult = WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult

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
    response = WriteTxnMarkersResponse()
    waiting: list[Reply[None]] = []

    def wait(response: WriteTxnMarkersResponse) -> Reply[WriteTxnMarkersResponse]:
        return map_reply(gather_replies(waiting), lambda _: response)

    return chain_reply(filled(broker, response, _write_all(broker, context, request, response, waiting)), wait)


def _write_all(
    broker: Broker,
    context: RequestContext,
    request: WriteTxnMarkersRequest,
    response: WriteTxnMarkersResponse,
    waiting: list[Reply[None]],
) -> Iterator[int]:
    """Fills the response, and yields the number of markers so far after each MARKERS_AT_A_TIME.

    `waiting` gets the results that are not in the response yet.
    """
    count = 0
    for marker in request.markers:
        result = Result(producer_id=marker.producer_id)
        response.markers.append(result)
        by_topic: dict[str, TopicResult] = {}
        for name, index in ((topic.name, index) for topic in marker.topics for index in topic.partition_indexes):
            if name not in by_topic:
                by_topic[name] = TopicResult(name=name)
                result.topics.append(by_topic[name])
            partition = PartitionResult(partition_index=index)
            by_topic[name].partitions.append(partition)
            noted = map_reply(_write(broker, context, marker, name, index), partial(_note, partition))
            if noted is not None:
                waiting.append(noted)
            count += 1
            if count % MARKERS_AT_A_TIME == 0:
                yield count


def _note(partition: PartitionResult, error: Errors) -> None:
    partition.error_code = error


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
