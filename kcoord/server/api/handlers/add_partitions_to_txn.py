# SPDX-License-Identifier: Apache-2.0
"""AddPartitionsToTxn: partitions become part of a producer's transaction, all of a request or none.

v0-v3 come from producers, for one transaction. v4+ come from brokers, for several, and may also just ask (KIP-890).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcoord.coordinator.transaction.metadata import EPOCH_BUMPING_VERSION, Partitions, partitions_of
from kcoord.runtime.result import Producer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import AddPartitionsToTxnRequest, AddPartitionsToTxnResponse

API_KEY = ApiKey.ADD_PARTITIONS_TO_TXN
VERSIONS = range(0, 6)

_BATCHED_SINCE_VERSION: Final = 4
_FENCED_SINCE_VERSION: Final = 2
"""Older clients know INVALID_PRODUCER_EPOCH instead."""

Topics = list[AddPartitionsToTxnRequest.AddPartitionsToTxnTopic]
TopicResults = list[AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult]
ErrorOf = Callable[[str, int], Errors]


def handle(
    broker: Broker, context: RequestContext, request: AddPartitionsToTxnRequest
) -> Reply[AddPartitionsToTxnResponse]:
    if context.api_version < _BATCHED_SINCE_VERSION:
        return map_reply(
            _add(broker, context, _only_transaction(request)),
            lambda topics: AddPartitionsToTxnResponse(results_by_topic_v3_and_below=topics),
        )
    ids = [transaction.transactional_id for transaction in request.transactions]
    replies = [_add(broker, context, transaction) for transaction in request.transactions]
    return map_reply(
        gather_replies(replies),
        lambda answers: AddPartitionsToTxnResponse(
            results_by_transaction=[
                AddPartitionsToTxnResponse.AddPartitionsToTxnResult(
                    transactional_id=transactional_id, topic_results=topics
                )
                for transactional_id, topics in zip(ids, answers, strict=True)
            ]
        ),
    )


def _only_transaction(
    request: AddPartitionsToTxnRequest,
) -> AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction:
    return AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction(
        transactional_id=request.v3_and_below_transactional_id,
        producer_id=request.v3_and_below_producer_id,
        producer_epoch=request.v3_and_below_producer_epoch,
        topics=request.v3_and_below_topics,
    )


def _add(
    broker: Broker, context: RequestContext, transaction: AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction
) -> Reply[TopicResults]:
    topics, version = transaction.topics, context.api_version
    unknown = {
        (topic.name, partition)
        for topic in topics
        for partition in topic.partitions
        if broker.image.partition(topic.name, partition) is None
    }
    if version >= _BATCHED_SINCE_VERSION or unknown:
        topics = _named_once(topics)
    if unknown:
        return _results(
            topics,
            lambda topic, partition: (
                Errors.UNKNOWN_TOPIC_OR_PARTITION if (topic, partition) in unknown else Errors.OPERATION_NOT_ATTEMPTED
            ),
        )
    try:
        return map_reply(
            _ask(broker, context, transaction),
            lambda error_of: _results(topics, error_of),
            lambda error: _failed(topics, error, version),
        )
    except KafkaError as error:
        return _failed(topics, error, version)


def _named_once(topics: Topics) -> Topics:
    """The topics without partitions that come again. Kafka 4.3.1 answers duplicates again only up to v3, and only if it
    knows all partitions of the request.
    """
    partitions: dict[str, dict[int, None]] = {}
    for topic in topics:
        partitions.setdefault(topic.name, {}).update(dict.fromkeys(topic.partitions))
    return [
        AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=name, partitions=list(indexes))
        for name, indexes in partitions.items()
    ]


def _ask(
    broker: Broker, context: RequestContext, transaction: AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction
) -> Reply[ErrorOf]:
    producer = Producer(transaction.producer_id, transaction.producer_epoch)
    partitions: Partitions = partitions_of((topic.name, topic.partitions) for topic in transaction.topics)
    version = EPOCH_BUMPING_VERSION if context.api_version >= _BATCHED_SINCE_VERSION else 0
    operation_context = context.operation_context()

    if transaction.verify_only:
        verified = broker.transactions.agree(
            transaction.transactional_id, producer, partitions, operation_context, adds=False
        )
        return map_reply(verified, lambda errors: lambda topic, partition: errors[topic, partition])
    added = broker.transactions.add_partitions(
        transaction.transactional_id, producer, partitions, version, operation_context
    )
    return map_reply(added, lambda _: lambda topic, partition: Errors.NONE)


def _results(topics: Topics, error_of: ErrorOf) -> TopicResults:
    return [
        AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult(
            name=topic.name,
            results_by_partition=[
                AddPartitionsToTxnResponse.AddPartitionsToTxnPartitionResult(
                    partition_index=partition, partition_error_code=error_of(topic.name, partition)
                )
                for partition in topic.partitions
            ],
        )
        for topic in topics
    ]


def _failed(topics: Topics, error: KafkaError, version: int) -> TopicResults:
    code = error.error
    if code is Errors.PRODUCER_FENCED and version < _FENCED_SINCE_VERSION:
        code = Errors.INVALID_PRODUCER_EPOCH
    return _results(topics, lambda topic, partition: code)


def error_response(request: AddPartitionsToTxnRequest, error: KafkaError, version: int) -> AddPartitionsToTxnResponse:
    if version >= _BATCHED_SINCE_VERSION:
        return AddPartitionsToTxnResponse(error_code=error.error)
    return AddPartitionsToTxnResponse(
        results_by_topic_v3_and_below=_failed(request.v3_and_below_topics, error, version)
    )
