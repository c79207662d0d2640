# SPDX-License-Identifier: Apache-2.0
"""Produce: appends one record batch per partition; each partition has its own result.

There is one replica, so the append satisfies every value of `acks`. With acks=0 there is no response. If a partition
fails then, the broker closes the connection, so that the client notices.

If a log of the request is still being opened, the whole request waits, and later requests of the connection wait behind
it. Otherwise the first of several pipelined batches would fail, and the next one, when the log is open, would fail
with OUT_OF_ORDER_SEQUENCE_NUMBER. Then librdkafka continues with a new producer epoch, and duplicates of batches of the
old epoch are not recognised. In Kafka all logs are open before the broker accepts requests.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from kcoord.server.api.api_table import CloseConnection, RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.leader_hint import leader_endpoint
from kcoord.server.api.opening_logs import ends_before
from kcoord.server.api.transactional_produce import Batch, Outcome, transactional_batch
from kcoord.server.broker import Broker
from kcoord.server.quota_use import throttle_of_produce
from kcoord.server.replies import Reply, map_reply
from kcoord.topics.log_opening import Opening
from kcoord.topics.store import ACKS_ALL, VALID_ACKS
from kcoord.topics.validation import RecordsRejectedError, single_batch
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ProduceRequest, ProduceResponse
from kcoord_protocol.uuid import uuid_to_string

API_KEY = ApiKey.PRODUCE
VERSIONS = range(0, 14)
"""Versions below 3 are listed for old clients that reject a broker without them, but not served, as in Kafka 4."""
_TOPIC_IDS_SINCE_VERSION: Final = 13
_LEADER_HINTS_SINCE_VERSION: Final = 10

LONGEST_WAIT_SECONDS: Final = 20.0
"""Opening a log of 2,000,000 batches takes 10 s. Clients wait 30 s for a response by default, and a client that waits
less has a shorter timeout in its request.
"""

_NO_LEADER_HINT: Final = ProduceResponse.LeaderIdAndEpoch()
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
"""Errors whose result has no log start offset: the log was not looked at, or the error does not concern it."""


def handle(
    broker: Broker, context: RequestContext, request: ProduceRequest
) -> Reply[ProduceResponse | CloseConnection | None]:
    if broker.quotas is None:
        return _handle(broker, context, request)
    throttle_ms = throttle_of_produce(broker.quotas, context)
    reply = _handle(broker, context, request)
    return map_reply(reply, partial(_throttled, context, throttle_ms)) if throttle_ms else reply


def _throttled(
    context: RequestContext, throttle_ms: int, response: ProduceResponse | CloseConnection | None
) -> ProduceResponse | CloseConnection | None:
    """Notes the time in the response, and mutes the connection."""
    if isinstance(response, ProduceResponse):
        response.throttle_time_ms = throttle_ms
    if context.client is not None:
        context.client.throttle(throttle_ms)
    return response


def _handle(
    broker: Broker, context: RequestContext, request: ProduceRequest
) -> Reply[ProduceResponse | CloseConnection | None]:
    _name_partitions_once(request)
    batches = _transactional_batches(broker, context, request)
    if batches and not _may_use(context.rights, request.transactional_id):
        raise KafkaError(Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    writable: set[str] | None = None
    if context.rights is not None:
        names = [name for topic in request.topic_data if (name := _name_of(broker, context, topic)) is not None]
        writable = context.rights.allowed(AclOperation.WRITE, ResourceType.TOPIC, names)
        batches = [batch for batch in batches if batch.topic in writable]
    opening = _opening(broker, context, request, writable)
    if opening is None:
        return _append(broker, context, request, batches, writable)
    if context.client is not None:
        context.client.keeps_order = True
    return broker.spawn(_append_later(broker, context, request, batches, writable, opening))


def _opening(
    broker: Broker, context: RequestContext, request: ProduceRequest, writable: set[str] | None
) -> Opening[object] | None:
    """Begins to open the logs of the request. Returns an opening that has not ended, None if there is none."""
    opening: Opening[object] | None = None
    for topic in request.topic_data:
        name = _name_of(broker, context, topic)
        if name is None or (writable is not None and name not in writable):
            continue
        for partition in topic.partition_data:
            opening = broker.topics.opening(name, partition.index, context.now_ms) or opening
    return opening


async def _append_later(
    broker: Broker,
    context: RequestContext,
    request: ProduceRequest,
    batches: list[Batch],
    writable: set[str] | None,
    opening: Opening[object] | None,
) -> ProduceResponse | CloseConnection | None:
    """Waits for the logs. After the longest wait, the partitions whose log is not open fail."""
    end = asyncio.get_running_loop().time() + min(request.timeout_ms / 1000, LONGEST_WAIT_SECONDS)
    while opening is not None and await ends_before(opening, end):
        context.now_ms = broker.now_ms()
        opening = _opening(broker, context, request, writable)
    reply = _append(broker, context, request, batches, writable)
    return await reply if asyncio.isfuture(reply) else reply


def _append(
    broker: Broker, context: RequestContext, request: ProduceRequest, batches: list[Batch], writable: set[str] | None
) -> Reply[ProduceResponse | CloseConnection | None]:
    """Appends the batches. The coordinator of their transaction agrees first, if they have one."""
    if not batches or request.transactional_id is None:
        return _produce_all(broker, context, request, {}, writable)
    reply = broker.transactional_produce.run(
        context,
        request.transactional_id,
        batches,
        lambda agreed: _produce_all(broker, context, request, agreed, writable),
    )
    return None if request.acks == 0 else reply


def _may_use(rights: Rights | None, transactional_id: str | None) -> bool:
    if transactional_id is None:
        return False
    return rights is None or rights.allows(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id)


def _name_partitions_once(request: ProduceRequest) -> None:
    """Merges topics and partitions that the request names more than once.

    The last records of a partition count, as in Kafka 4.3.1.
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
    broker: Broker, context: RequestContext, request: ProduceRequest, agreed: Outcome, writable: set[str] | None
) -> ProduceResponse | CloseConnection | None:
    response = ProduceResponse(
        responses=[_produce_topic(broker, context, request, topic, agreed, writable) for topic in request.topic_data]
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
    writable: set[str] | None,
) -> ProduceResponse.TopicProduceResponse:
    name = _name_of(broker, context, topic)
    if writable is not None and name is not None and name not in writable:
        error = KafkaError(Errors.TOPIC_AUTHORIZATION_FAILED)
        return ProduceResponse.TopicProduceResponse(
            name=topic.name,
            topic_id=topic.topic_id,
            partition_responses=[_failure(partition.index, error) for partition in topic.partition_data],
        )
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
    """Appends the batch of a partition.

    `agreed` has the transaction coordinator's decision on the first batches of a transaction.
    """
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
        current_leader=_NO_LEADER_HINT,
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
    """Adds the current leader and its address to the results of partitions that another broker leads (KIP-951)."""
    for topic in response.responses:
        for partition in topic.partition_responses:
            if partition.error_code != Errors.NOT_LEADER_OR_FOLLOWER:
                continue
            name = topic.name or broker.topics.topic_name(topic.topic_id) or ""
            leader_id, leader_epoch = broker.topics.leader_of(name, partition.index)
            partition.current_leader = ProduceResponse.LeaderIdAndEpoch(leader_id=leader_id, leader_epoch=leader_epoch)
            endpoint = leader_endpoint(broker, leader_id, context.listener_name)
            if endpoint is not None and all(node.node_id != leader_id for node in response.node_endpoints):
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
