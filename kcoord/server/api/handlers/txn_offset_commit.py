# SPDX-License-Identifier: Apache-2.0
"""TxnOffsetCommit: commits offsets in a transaction. They count when the producer commits the transaction.

The group's partition of `__consumer_offsets` has to be part of the transaction. From v5 on (KIP-890) this request adds
it; before, the producer has to send AddOffsetsToTxn. v6 has topic ids instead of names (KIP-1319). Unknown topics and
partitions are rejected here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kcoord.coordinator.group.offsets.operations import FIRST_TXN_VERSION_OF_CONSUMER_GROUPS
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext, Producer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.split_topics import merge, name_topics, split_topics
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.messages import TxnOffsetCommitRequest, TxnOffsetCommitResponse

Topics = list[TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic]
Commit = Callable[[Broker, RequestContext, TxnOffsetCommitRequest], Reply[TxnOffsetCommitResponse]]

API_KEY = ApiKey.TXN_OFFSET_COMMIT
VERSIONS = range(0, 7)

_LOADING_SINCE_VERSION: Final = 2
"""Older clients know COORDINATOR_NOT_AVAILABLE instead of COORDINATOR_LOAD_IN_PROGRESS."""
_ABORTABLE_SINCE_VERSION: Final = 4
_ADDS_PARTITION_SINCE_VERSION: Final = 5

_COORDINATOR_IS_AWAY: Final = (
    Errors.NOT_COORDINATOR,
    Errors.COORDINATOR_NOT_AVAILABLE,
    Errors.COORDINATOR_LOAD_IN_PROGRESS,
)


def handle(broker: Broker, context: RequestContext, request: TxnOffsetCommitRequest) -> Reply[TxnOffsetCommitResponse]:
    return handle_with(broker, context, request, _commit)


def handle_with(
    broker: Broker, context: RequestContext, request: TxnOffsetCommitRequest, commit: Commit
) -> Reply[TxnOffsetCommitResponse]:
    """Handles a request; `commit` commits the offsets of the topics that exist."""
    if context.rights is not None:
        context.rights.require(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id)
        context.rights.require(AclOperation.READ, ResourceType.GROUP, request.group_id)
    by_id = context.api_version >= FIRST_TXN_VERSION_OF_CONSUMER_GROUPS
    if by_id:
        name_topics(broker.image, request.topics)
    request.topics, unknown = split_topics(broker.image, request.topics, _topic, by_id=by_id, rights=context.rights)
    # Kafka's response has an unknown topic only if the request names partitions for it.
    unknown = [topic for topic in unknown if topic.partitions]
    if not request.topics:
        return TxnOffsetCommitResponse(topics=unknown)
    try:
        if not request.group_id:
            raise KafkaError(Errors.INVALID_GROUP_ID, "The group id must not be empty.")
        reply = commit(broker, context, request)
    except KafkaError as error:
        reply = error_response(request, error, context.api_version)
    if not unknown:
        return reply
    return map_reply(
        reply,
        lambda response: TxnOffsetCommitResponse(topics=_merge(unknown, response)),
        lambda error: TxnOffsetCommitResponse(
            topics=_merge(unknown, error_response(request, error, context.api_version))
        ),
    )


def _commit(broker: Broker, context: RequestContext, request: TxnOffsetCommitRequest) -> Reply[TxnOffsetCommitResponse]:
    shard_id = broker.groups.shard_of(request.group_id)
    producer = Producer(request.producer_id, request.producer_epoch)
    ticket = broker.groups.start_verification(shard_id, producer)
    if ticket is None:
        return _commit_verified(broker, context, request, shard_id, None)
    adds = context.api_version >= _ADDS_PARTITION_SINCE_VERSION
    if not adds and not broker.config.transaction_partition_verification_enable:
        try:
            return _commit_verified(broker, context, request, shard_id, ticket)
        finally:
            broker.groups.finish_verification(shard_id, producer, ticket)
    return broker.spawn(_agree_and_commit(broker, context, request, shard_id, producer, ticket))


async def _agree_and_commit(
    broker: Broker,
    context: RequestContext,
    request: TxnOffsetCommitRequest,
    shard_id: int,
    producer: Producer,
    ticket: int,
) -> TxnOffsetCommitResponse:
    """Asks the transaction coordinator first, and commits the offsets after its agreement is durable.

    Otherwise a crash could leave pending offsets without a coordinator that ends them.
    """
    try:
        await _agree(broker, context, request, shard_id, producer)
        reply = _commit_verified(broker, context, request, shard_id, ticket)
        return await reply if asyncio.isfuture(reply) else reply
    finally:
        broker.groups.finish_verification(shard_id, producer, ticket)


async def _agree(
    broker: Broker, context: RequestContext, request: TxnOffsetCommitRequest, shard_id: int, producer: Producer
) -> None:
    try:
        reply = broker.transactions.agree(
            request.transactional_id,
            producer,
            {GROUP_METADATA_TOPIC: frozenset((shard_id,))},
            context.operation_context(),
            adds=context.api_version >= _ADDS_PARTITION_SINCE_VERSION,
        )
        errors = await reply if asyncio.isfuture(reply) else reply
    except KafkaError as error:
        if error.error is Errors.PRODUCER_FENCED:
            raise KafkaError(Errors.INVALID_PRODUCER_EPOCH, error.message) from None
        if error.error in _COORDINATOR_IS_AWAY:
            raise KafkaError(Errors.COORDINATOR_LOAD_IN_PROGRESS, error.message) from None
        raise
    code = errors.get((GROUP_METADATA_TOPIC, shard_id), Errors.NONE)
    if code is Errors.TRANSACTION_ABORTABLE and context.api_version < _ABORTABLE_SINCE_VERSION:
        code = Errors.INVALID_TXN_STATE
    if code is not Errors.NONE:
        raise KafkaError(code, f"The offsets of group {request.group_id} are not part of the transaction.")


def _commit_verified(
    broker: Broker,
    context: RequestContext,
    request: TxnOffsetCommitRequest,
    shard_id: int,
    ticket: int | None,
) -> Reply[TxnOffsetCommitResponse]:
    def operation(
        shard: GroupCoordinatorShard, operation_context: OperationContext, request: TxnOffsetCommitRequest
    ) -> CoordinatorResult[TxnOffsetCommitResponse]:
        return shard.commit_transactional_offsets(operation_context, request, ticket)

    return broker.groups.call_shard(shard_id, operation, request, context.operation_context())


def _topic(
    topic: TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic, partitions: list[int], error: Errors
) -> TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic:
    return TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=[
            TxnOffsetCommitResponse.TxnOffsetCommitResponsePartition(partition_index=index, error_code=error)
            for index in partitions
        ],
    )


def _merge(unknown: Topics, response: TxnOffsetCommitResponse) -> Topics:
    return merge(unknown, response.topics, lambda topic: (topic.name, topic.topic_id))


def error_response(request: TxnOffsetCommitRequest, error: KafkaError, version: int) -> TxnOffsetCommitResponse:
    code = error.error
    if code is Errors.COORDINATOR_LOAD_IN_PROGRESS and version < _LOADING_SINCE_VERSION:
        code = Errors.COORDINATOR_NOT_AVAILABLE
    return TxnOffsetCommitResponse(
        topics=[_topic(topic, [p.partition_index for p in topic.partitions], code) for topic in request.topics]
    )
