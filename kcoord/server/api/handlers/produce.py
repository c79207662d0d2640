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
from typing import Final, TypeAlias

from kcoord.server.api.api_table import CloseConnection, RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.leader_hint import leader_endpoint
from kcoord.server.api.opening_logs import ends_before
from kcoord.server.api.transactional_produce import Agreed, Batch, transactional_batches
from kcoord.server.broker import Broker
from kcoord.server.quota_use import throttle_of_produce
from kcoord.server.replies import Reply, map_reply
from kcoord.topics.log_opening import Opening
from kcoord.topics.store import ACKS_ALL, VALID_ACKS
from kcoord.topics.validation import RecordsRejectedError, single_batch
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.batch_header import Buffer
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
"""Errors of an append whose result has no log start offset: the log was not looked at, or is not concerned."""

Outcome: TypeAlias = ProduceResponse | CloseConnection | None
"""The response, if the client gets one. Else a failure closes the connection."""


def handle(broker: Broker, context: RequestContext, request: ProduceRequest) -> Reply[Outcome]:
    if broker.quotas is None:
        return _Produce(broker, context, request).run()
    throttle_ms = throttle_of_produce(broker.quotas, context)
    reply = _Produce(broker, context, request).run()
    return map_reply(reply, partial(_throttled, context, throttle_ms)) if throttle_ms else reply


def _throttled(context: RequestContext, throttle_ms: int, outcome: Outcome) -> Outcome:
    """Notes the time in the response, and mutes the connection."""
    if isinstance(outcome, ProduceResponse):
        outcome.throttle_time_ms = throttle_ms
    context.client.throttle(throttle_ms)
    return outcome


class _Produce:
    """One request, with its transactional batches and the topics that its client may write to."""

    __slots__ = ("_batches", "_broker", "_context", "_request", "_writable")

    def __init__(self, broker: Broker, context: RequestContext, request: ProduceRequest) -> None:
        self._broker = broker
        self._context = context
        self._request = request
        self._batches: list[Batch] = []
        self._writable: set[str] | None = None
        """None if the client may write to all topics."""

    def run(self) -> Reply[Outcome]:
        context, request = self._context, self._request
        _name_partitions_once(request)
        batches = self._transactional_batches()
        if batches and not _may_use(context.rights, request.transactional_id):
            raise KafkaError(Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        if context.rights is not None:
            names = [name for topic in request.topic_data if (name := self._name_of(topic)) is not None]
            self._writable = context.rights.allowed(AclOperation.WRITE, ResourceType.TOPIC, names)
        if batches:
            self._batches = self._batches_of_producer(batches)
        opening = self._open_logs()
        if opening is None:
            return self._append()
        context.client.keeps_order = True
        return self._broker.spawn(self._append_later(opening))

    def _transactional_batches(self) -> list[Batch]:
        batches = []
        for topic in self._request.topic_data:
            name = self._name_of(topic) or ""
            batches += transactional_batches(name, topic.partition_data, self._context.api_version)
        return batches

    def _batches_of_producer(self, batches: list[Batch]) -> list[Batch]:
        """Returns the batches that have a producer and that may be appended. Only these can join the transaction.

        A transactional batch without a producer is appended as if it were not transactional.
        """
        topics, writable = self._broker.topics, self._writable
        batches = [
            batch
            for batch in batches
            if batch.producer.producer_id >= 0
            and batch.is_single
            and (writable is None or batch.topic in writable)
            and topics.has_partition(batch.topic, batch.partition)
        ]
        if len({batch.producer for batch in batches}) > 1:
            raise KafkaError(
                Errors.INVALID_PRODUCER_ID_MAPPING, "Transactional records contained more than one producer ID"
            )
        return batches

    def _name_of(self, topic: ProduceRequest.TopicProduceData) -> str | None:
        if self._context.api_version < _TOPIC_IDS_SINCE_VERSION:
            return topic.name
        return self._broker.topics.topic_name(topic.topic_id)

    def _open_logs(self) -> Opening[object] | None:
        """Begins to open the logs of the request. Returns an opening that has not ended, None if there is none."""
        opening: Opening[object] | None = None
        for topic in self._request.topic_data:
            name = self._name_of(topic)
            if name is None or (self._writable is not None and name not in self._writable):
                continue
            for partition in topic.partition_data:
                opening = self._broker.topics.opening(name, partition.index, self._context.now_ms) or opening
        return opening

    async def _append_later(self, opening: Opening[object] | None) -> Outcome:
        """Waits for the logs. After the longest wait, the partitions whose log is not open fail."""
        seconds = min(self._request.timeout_ms / 1000, LONGEST_WAIT_SECONDS)
        end = asyncio.get_running_loop().time() + seconds
        while opening is not None and await ends_before(opening, end):
            self._context.now_ms = self._broker.now_ms()
            opening = self._open_logs()
        # A topic of the request may have been created meanwhile, so its batches are looked at again.
        self._batches = self._batches_of_producer(self._transactional_batches())
        reply = self._append()
        return await reply if asyncio.isfuture(reply) else reply

    def _append(self) -> Reply[Outcome]:
        """Appends the batches. The coordinator of their transaction agrees first, if they have one."""
        request = self._request
        if not self._batches or request.transactional_id is None:
            return self._append_all({})
        reply = self._broker.transactional_produce.run(
            self._context, request.transactional_id, self._batches, self._append_all
        )
        return None if request.acks == 0 else reply

    def _append_all(self, agreed: Agreed) -> Outcome:
        """Appends the batches.

        `agreed` has the transaction coordinator's decision on the first batches of a transaction.
        """
        request = self._request
        response = ProduceResponse(responses=[self._append_to_topic(topic, agreed) for topic in request.topic_data])
        if request.acks == 0:
            return _close_on_error(response)
        if self._context.api_version >= _LEADER_HINTS_SINCE_VERSION:
            self._add_leader_hints(response)
        return response

    def _append_to_topic(
        self, topic: ProduceRequest.TopicProduceData, agreed: Agreed
    ) -> ProduceResponse.TopicProduceResponse:
        name = self._name_of(topic)
        if self._writable is not None and name is not None and name not in self._writable:
            return _failed_topic(topic, KafkaError(Errors.TOPIC_AUTHORIZATION_FAILED))
        return ProduceResponse.TopicProduceResponse(
            name=topic.name,
            topic_id=topic.topic_id,
            partition_responses=[
                self._append_to_partition(name, partition, agreed) for partition in topic.partition_data
            ],
        )

    def _append_to_partition(
        self, topic: str | None, partition: ProduceRequest.PartitionProduceData, agreed: Agreed
    ) -> ProduceResponse.PartitionProduceResponse:
        topics, context, acks = self._broker.topics, self._context, self._request.acks
        batch: Buffer | None = None
        try:
            if topic is None:
                raise KafkaError(Errors.UNKNOWN_TOPIC_ID)
            verified = agreed.get((topic, partition.index)) if agreed else None
            if isinstance(verified, KafkaError):
                raise verified
            batch = single_batch(partition.records, context.api_version)
            if acks not in VALID_ACKS:
                raise KafkaError(Errors.INVALID_REQUIRED_ACKS, f"acks must be -1, 0 or 1, not {acks}.")
            appended = topics.append(
                topic,
                partition.index,
                batch,
                requires_all=acks == ACKS_ALL,
                now_ms=context.now_ms,
                verified=verified,
            )
        except KafkaError as error:
            # No other variable may refer to the error. Through its traceback that would keep the batch, and a file of
            # the log, until the garbage collector comes.
            if topic is not None and not topics.has_partition(topic, partition.index):
                # Kafka looks for the partition before it looks at the batch.
                return _failure(partition.index, KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION), -1)
            start_offset = -1
            # Without a batch to append the log was not looked at.
            if topic is not None and batch is not None and error.error not in _WITHOUT_START_OFFSET:
                start_offset = topics.log_start_offset(topic, partition.index)
            return _failure(partition.index, error, start_offset)
        return ProduceResponse.PartitionProduceResponse(
            index=partition.index,
            base_offset=appended.base_offset,
            log_append_time_ms=appended.log_append_time_ms,
            log_start_offset=appended.log_start_offset,
            current_leader=_NO_LEADER_HINT,
        )

    def _add_leader_hints(self, response: ProduceResponse) -> None:
        """Adds the current leader and its address to the results of partitions that another broker leads (KIP-951)."""
        broker = self._broker
        for topic in response.responses:
            for partition in topic.partition_responses:
                if partition.error_code != Errors.NOT_LEADER_OR_FOLLOWER:
                    continue
                name = topic.name or broker.topics.topic_name(topic.topic_id) or ""
                leader_id, leader_epoch = broker.topics.leader_of(name, partition.index)
                partition.current_leader = ProduceResponse.LeaderIdAndEpoch(
                    leader_id=leader_id, leader_epoch=leader_epoch
                )
                endpoint = leader_endpoint(broker, leader_id, self._context.client.listener_name)
                if endpoint is not None and all(node.node_id != leader_id for node in response.node_endpoints):
                    host, port, rack = endpoint
                    response.node_endpoints.append(
                        ProduceResponse.NodeEndpoint(node_id=leader_id, host=host, port=port, rack=rack)
                    )


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


def _close_on_error(response: ProduceResponse) -> CloseConnection | None:
    for topic in response.responses:
        for partition in topic.partition_responses:
            if partition.error_code:
                what = f"{topic.name or uuid_to_string(topic.topic_id)}-{partition.index}"
                return CloseConnection(f"a Produce with acks=0 failed: {what} {Errors(partition.error_code).name}")
    return None


def _failed_topic(topic: ProduceRequest.TopicProduceData, error: KafkaError) -> ProduceResponse.TopicProduceResponse:
    return ProduceResponse.TopicProduceResponse(
        name=topic.name,
        topic_id=topic.topic_id,
        partition_responses=[_failure(partition.index, error) for partition in topic.partition_data],
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


def error_response(request: ProduceRequest, error: KafkaError, version: int) -> ProduceResponse | CloseConnection:
    if request.acks == 0:
        return CloseConnection(f"a Produce with acks=0 failed: {error.error.name}")
    return ProduceResponse(responses=[_failed_topic(topic, error) for topic in request.topic_data])
