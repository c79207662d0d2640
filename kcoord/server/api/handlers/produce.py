# SPDX-License-Identifier: Apache-2.0
"""Produce: one record batch per partition, each with its own result. There is one replica, so every `acks` is
satisfied by the append.

With acks=0 nothing is answered. Where something fails the connection is closed, so that the client hears of it.
"""

from __future__ import annotations

from typing import Final

from kcoord.server.api.api_table import CloseConnection, RequestContext
from kcoord.server.api.leader_hint import leader_endpoint
from kcoord.server.api.transactional_produce import Batch, Outcome, transactional_batch
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord.topics.store import ACKS_ALL, VALID_ACKS
from kcoord.topics.validation import RecordsRejectedError, single_batch
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ProduceRequest, ProduceResponse
from kcoord_protocol.uuid import uuid_to_string

API_KEY = ApiKey.PRODUCE
VERSIONS = range(0, 14)
"""Versions below 3 are listed, for old clients that refuse a broker without them, and not served (as Kafka 4 does)."""
_TOPIC_IDS_SINCE_VERSION: Final = 13
_LEADER_HINTS_SINCE_VERSION: Final = 10

_WITHOUT_START_OFFSET: Final = (
    Errors.UNKNOWN_TOPIC_OR_PARTITION,
    Errors.UNKNOWN_TOPIC_ID,
    Errors.NOT_LEADER_OR_FOLLOWER,
    Errors.MESSAGE_TOO_LARGE,
    Errors.RECORD_LIST_TOO_LARGE,
    Errors.CORRUPT_MESSAGE,
    Errors.KAFKA_STORAGE_ERROR,
    Errors.INVALID_REQUIRED_ACKS,
)
"""Errors that come before a partition's log is looked at, or that say nothing about it."""


def handle(
    broker: Broker, context: RequestContext, request: ProduceRequest
) -> Reply[ProduceResponse | CloseConnection | None]:
    _name_partitions_once(request)
    batches = _transactional_batches(broker, context, request)
    if not batches:
        return _produce_all(broker, context, request, {})
    if request.transactional_id is None:
        raise KafkaError(Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    reply = broker.transactional_produce.run(
        context,
        request.transactional_id,
        batches,
        lambda agreed: _produce_all(broker, context, request, agreed),
    )
    return None if request.acks == 0 else reply


def _name_partitions_once(request: ProduceRequest) -> None:
    """Merge topics and partitions that the request names more than once. The last records of a partition count, as in
    Kafka 4.3.1.
    """
    topics: dict[tuple[str, bytes], ProduceRequest.TopicProduceData] = {}
    for topic in request.topic_data:
        first = topics.setdefault((topic.name, topic.topic_id), topic)
        if first is not topic:
            first.partition_data.extend(topic.partition_data)
    request.topic_data = list(topics.values())
    for topic in request.topic_data:
        partitions = {partition.index: partition for partition in topic.partition_data}
        topic.partition_data = list(partitions.values())


def _transactional_batches(broker: Broker, context: RequestContext, request: ProduceRequest) -> list[Batch]:
    batches = []
    for topic in request.topic_data:
        name = _name_of(broker, context, topic)
        for partition in topic.partition_data if name is not None else ():
            batch = transactional_batch(name or "", partition.index, partition.records)
            if batch is not None:
                batches.append(batch)
    return batches


def _name_of(broker: Broker, context: RequestContext, topic: ProduceRequest.TopicProduceData) -> str | None:
    return topic.name if context.api_version < _TOPIC_IDS_SINCE_VERSION else broker.topics.topic_name(topic.topic_id)


def _produce_all(
    broker: Broker, context: RequestContext, request: ProduceRequest, agreed: Outcome
) -> ProduceResponse | CloseConnection | None:
    response = ProduceResponse(
        responses=[_produce_topic(broker, context, request, topic, agreed) for topic in request.topic_data]
    )
    if request.acks == 0:
        return _close_on_error(response)
    if context.api_version >= _LEADER_HINTS_SINCE_VERSION:
        _add_leader_hints(broker, context, response)
    return response


def _close_on_error(response: ProduceResponse) -> CloseConnection | None:
    for topic in response.responses:
        for partition in topic.partition_responses:
            if partition.error_code:
                what = f"{topic.name or uuid_to_string(topic.topic_id)}-{partition.index}"
                return CloseConnection(f"a Produce with acks=0 failed: {what} {Errors(partition.error_code).name}")
    return None


def _produce_topic(
    broker: Broker,
    context: RequestContext,
    request: ProduceRequest,
    topic: ProduceRequest.TopicProduceData,
    agreed: Outcome,
) -> ProduceResponse.TopicProduceResponse:
    name = _name_of(broker, context, topic)
    return ProduceResponse.TopicProduceResponse(
        name=topic.name,
        topic_id=topic.topic_id,
        partition_responses=[
            _produce(broker, context, request.acks, name, partition, agreed) for partition in topic.partition_data
        ],
    )


def _produce(
    broker: Broker,
    context: RequestContext,
    acks: int,
    topic: str | None,
    partition: ProduceRequest.PartitionProduceData,
    agreed: Outcome,
) -> ProduceResponse.PartitionProduceResponse:
    """`agreed` has what the transaction coordinator says about the first batches of a transaction."""
    try:
        if topic is None:
            raise KafkaError(Errors.UNKNOWN_TOPIC_ID)
        if not broker.topics.has_partition(topic, partition.index):
            raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION)
        verified = agreed.get((topic, partition.index)) if agreed else None
        if isinstance(verified, KafkaError):
            raise verified
        batch = single_batch(partition.records, context.api_version)
        if acks not in VALID_ACKS:
            raise KafkaError(Errors.INVALID_REQUIRED_ACKS, f"acks must be -1, 0 or 1, not {acks}.")
        appended = broker.topics.append(
            topic,
            partition.index,
            batch,
            requires_all=acks == ACKS_ALL,
            now_ms=context.now_ms,
            verified=verified,
        )
    except KafkaError as error:
        start_offset = -1
        if topic is not None and error.error not in _WITHOUT_START_OFFSET:
            start_offset = broker.topics.log_start_offset(topic, partition.index)
        return _failure(partition.index, error, start_offset)
    return ProduceResponse.PartitionProduceResponse(
        index=partition.index,
        base_offset=appended.base_offset,
        log_append_time_ms=appended.log_append_time_ms,
        log_start_offset=appended.log_start_offset,
    )


def _failure(index: int, error: KafkaError, start_offset: int = -1) -> ProduceResponse.PartitionProduceResponse:
    record_errors = error.record_errors if isinstance(error, RecordsRejectedError) else []
    return ProduceResponse.PartitionProduceResponse(
        index=index,
        error_code=error.error,
        base_offset=-1,
        log_start_offset=start_offset,
        record_errors=[
            ProduceResponse.BatchIndexAndErrorMessage(batch_index=position, batch_index_error_message=text)
            for position, text in record_errors
        ],
        error_message=error.message,
    )


def _add_leader_hints(broker: Broker, context: RequestContext, response: ProduceResponse) -> None:
    """Tells a client that came to the wrong broker which one is right."""
    for topic in response.responses:
        for partition in topic.partition_responses:
            if partition.error_code != Errors.NOT_LEADER_OR_FOLLOWER:
                continue
            name = topic.name or broker.topics.topic_name(topic.topic_id) or ""
            leader_id, leader_epoch = broker.topics.leader_of(name, partition.index)
            partition.current_leader = ProduceResponse.LeaderIdAndEpoch(leader_id=leader_id, leader_epoch=leader_epoch)
            endpoint = leader_endpoint(broker, leader_id, context.listener_name)
            if endpoint is not None and all(known.node_id != leader_id for known in response.node_endpoints):
                host, port, rack = endpoint
                response.node_endpoints.append(
                    ProduceResponse.NodeEndpoint(node_id=leader_id, host=host, port=port, rack=rack)
                )


def error_response(request: ProduceRequest, error: KafkaError, version: int) -> ProduceResponse | CloseConnection:
    if request.acks == 0:
        return CloseConnection(f"a Produce with acks=0 failed: {error.error.name}")
    return ProduceResponse(
        responses=[
            ProduceResponse.TopicProduceResponse(
                name=topic.name,
                topic_id=topic.topic_id,
                partition_responses=[_failure(partition.index, error) for partition in topic.partition_data],
            )
            for topic in request.topic_data
        ]
    )
