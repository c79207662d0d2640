# SPDX-License-Identifier: Apache-2.0
"""AddPartitionsToTxn: adds partitions to a producer's transaction, either all partitions of the transaction or none.

Producers send v0 to v3, for one transaction. Brokers send v4 and later, for several transactions, and may only verify
that the transaction has the partitions (KIP-890).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcoord.coordinator.transaction.metadata import EPOCH_BUMPING_VERSION, Partitions, partitions_of
from kcoord.runtime.result import Producer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import INTERNAL_TOPICS
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
        if context.rights is not None:
            transactional_id = request.v3_and_below_transactional_id
            context.rights.require(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id)
        return map_reply(
            _add(broker, context, _only_transaction(request)),
            lambda topics: AddPartitionsToTxnResponse(results_by_topic_v3_and_below=topics),
        )
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.CLUSTER_ACTION)
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
    hidden: set[str] = set()
    if version < _BATCHED_SINCE_VERSION:
        hidden = _not_writable(context.rights, topics)
    errors = {
        (topic.name, partition): Errors.TOPIC_AUTHORIZATION_FAILED
        if topic.name in hidden
        else Errors.UNKNOWN_TOPIC_OR_PARTITION
        for topic in topics
        for partition in topic.partitions
        if topic.name in hidden or broker.image.partition(topic.name, partition) is None
    }
    if version >= _BATCHED_SINCE_VERSION or errors:
        topics = _named_once(topics)
    if errors:
        return _results(topics, lambda topic, partition: errors.get((topic, partition), Errors.OPERATION_NOT_ATTEMPTED))
    try:
        return map_reply(
            _ask(broker, context, transaction),
            lambda error_of: _results(topics, error_of),
            lambda error: _failed(topics, error, version),
        )
    except KafkaError as error:
        return _failed(topics, error, version)


def _not_writable(rights: Rights | None, topics: Topics) -> set[str]:
    """Returns the topics that the client may not write to. Nobody may write to internal topics in a transaction."""
    names = {topic.name for topic in topics}
    if rights is None:
        return names & INTERNAL_TOPICS
    return names - rights.allowed(AclOperation.WRITE, ResourceType.TOPIC, names - INTERNAL_TOPICS)


def _named_once(topics: Topics) -> Topics:
    """Returns the topics without repeated partitions.

    Kafka 4.3.1 answers a repeated partition repeatedly only up to v3, and only if it knows all partitions.
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
