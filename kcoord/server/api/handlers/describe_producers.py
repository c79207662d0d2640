# SPDX-License-Identifier: Apache-2.0
"""DescribeProducers (KIP-664): the producer state of partitions, with open transactions."""

from __future__ import annotations

from kcoord.metadata.names import check_topic_name
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.topics.producer_state import ProducerEntry
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeProducersRequest, DescribeProducersResponse

API_KEY = ApiKey.DESCRIBE_PRODUCERS
VERSIONS = range(0, 1)


def handle(broker: Broker, context: RequestContext, request: DescribeProducersRequest) -> DescribeProducersResponse:
    return DescribeProducersResponse(
        topics=[
            DescribeProducersResponse.TopicResponse(
                name=topic.name,
                partitions=[_describe(broker, context, topic.name, index) for index in topic.partition_indexes],
            )
            for topic in request.topics
        ]
    )


def _describe(
    broker: Broker, context: RequestContext, topic: str, index: int
) -> DescribeProducersResponse.PartitionResponse:
    try:
        check_topic_name(topic)
        if context.rights is not None:
            context.rights.require(AclOperation.READ, ResourceType.TOPIC, topic)
        if not broker.topics.has_partition(topic, index):
            # Kafka has no text for an unknown partition of a topic that exists.
            exists = topic in broker.image.topics
            text = None if exists else Errors.UNKNOWN_TOPIC_OR_PARTITION.description
            raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION, text)
        entries = broker.topics.active_producers(topic, index, context.now_ms)
    except KafkaError as error:
        return DescribeProducersResponse.PartitionResponse(
            partition_index=index, error_code=error.error, error_message=error.message
        )
    return DescribeProducersResponse.PartitionResponse(
        partition_index=index, active_producers=[_state(entry) for entry in entries]
    )


def _state(entry: ProducerEntry) -> DescribeProducersResponse.ProducerState:
    first_offset = entry.current_transaction_first_offset
    return DescribeProducersResponse.ProducerState(
        producer_id=entry.producer_id,
        producer_epoch=entry.producer_epoch,
        last_sequence=entry.last_sequence,
        last_timestamp=entry.last_timestamp_ms,
        coordinator_epoch=entry.coordinator_epoch,
        current_txn_start_offset=-1 if first_offset is None else first_offset,
    )


def error_response(request: DescribeProducersRequest, error: KafkaError, version: int) -> DescribeProducersResponse:
    return DescribeProducersResponse(
        topics=[
            DescribeProducersResponse.TopicResponse(
                name=topic.name,
                partitions=[
                    DescribeProducersResponse.PartitionResponse(
                        partition_index=index, error_code=error.error, error_message=error.message
                    )
                    for index in topic.partition_indexes
                ],
            )
            for topic in request.topics
        ]
    )
