# SPDX-License-Identifier: Apache-2.0
"""InitProducerId: a new producer id for an idempotent producer, or the next epoch for a transactional producer.

New ids come from blocks that the metadata log reserves, so an id is never used twice. v6, which is not final in Kafka
4.3.1, may ask for two-phase commits (KIP-939). They are rejected as by a broker that does not allow them.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext, Producer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights, denied
from kcoord.server.api.handlers.allocate_producer_ids import allocate
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import AllocateProducerIdsRequest, InitProducerIdRequest, InitProducerIdResponse

API_KEY = ApiKey.INIT_PRODUCER_ID
VERSIONS = range(0, 7)

_NO_PRODUCER_ID: Final = -1
_NO_EPOCH: Final = -1
_ALLOCATE_VERSION: Final = 0
_FENCED_SINCE_VERSION: Final = 4
"""Older clients know INVALID_PRODUCER_EPOCH instead."""


def handle(broker: Broker, context: RequestContext, request: InitProducerIdRequest) -> Reply[InitProducerIdResponse]:
    if context.rights is not None:
        _check_rights(context.rights, request.transactional_id)
    if (request.producer_id == _NO_PRODUCER_ID) != (request.producer_epoch == _NO_EPOCH):
        raise KafkaError(Errors.INVALID_REQUEST)
    if request.enable2_pc:
        raise KafkaError(Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "Two-phase commit is not allowed.")
    if request.keep_prepared_txn:
        raise KafkaError(Errors.UNSUPPORTED_VERSION, "There are no transactions of two-phase commits to be kept.")
    if request.transactional_id is not None and not broker.transactions.needs_producer_id(request.transactional_id):
        return _initialize(broker, context, request, request.transactional_id, None)
    producer_id = broker.topics.producer_ids.take()
    if producer_id is None:
        return broker.spawn(_take_from_new_block(broker, context, request))
    return _with_id(broker, context, request, producer_id)


def _check_rights(rights: Rights, transactional_id: str | None) -> None:
    """Raises KafkaError unless the client may write in this transaction, or to any topic if there is no transaction."""
    if transactional_id is not None:
        rights.require(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id)
    elif not rights.allows_cluster(AclOperation.IDEMPOTENT_WRITE, logs_denial=False) and not rights.allows_any(
        AclOperation.WRITE, ResourceType.TOPIC
    ):
        raise denied(ResourceType.CLUSTER)


def _with_id(
    broker: Broker, context: RequestContext, request: InitProducerIdRequest, producer_id: int
) -> Reply[InitProducerIdResponse]:
    if request.transactional_id is not None:
        return _initialize(broker, context, request, request.transactional_id, producer_id)
    return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)


def _initialize(
    broker: Broker,
    context: RequestContext,
    request: InitProducerIdRequest,
    transactional_id: str,
    producer_id: int | None,
) -> Reply[InitProducerIdResponse]:
    expected = None
    if request.producer_id != _NO_PRODUCER_ID:
        expected = Producer(request.producer_id, request.producer_epoch)

    def operation(
        shard: TransactionCoordinatorShard, operation_context: OperationContext, request: InitProducerIdRequest
    ) -> CoordinatorResult[InitProducerIdResponse]:
        return shard.init_producer_id(
            operation_context, transactional_id, request.transaction_timeout_ms, expected, producer_id
        )

    return broker.transactions.call(transactional_id, operation, request, context.operation_context())


async def _take_from_new_block(
    broker: Broker, context: RequestContext, request: InitProducerIdRequest
) -> InitProducerIdResponse:
    reply = _with_id(broker, context, request, await take_producer_id(broker, context))
    return await reply if asyncio.isfuture(reply) else reply


async def take_producer_id(broker: Broker, context: RequestContext) -> int:
    """Returns the next producer id. All requests that find the block used up wait for the same new block."""
    ids = broker.topics.producer_ids
    while (producer_id := ids.take()) is None:
        if ids.pending is None:
            ids.pending = broker.spawn(_reserve_block(broker, context))
        await asyncio.shield(ids.pending)
    return producer_id


async def _reserve_block(broker: Broker, context: RequestContext) -> None:
    ids = broker.topics.producer_ids
    try:
        operation_context = context.operation_context()
        operation_context.api_version = _ALLOCATE_VERSION
        request = AllocateProducerIdsRequest(broker_id=broker.node_id)
        response = await broker.metadata.call(allocate, request, operation_context)
        if response.error_code:
            raise KafkaError(Errors(response.error_code), "The controller did not allocate producer ids.")
        ids.add_block(response.producer_id_start, response.producer_id_len)
    finally:
        ids.pending = None


def error_response(request: InitProducerIdRequest, error: KafkaError, version: int) -> InitProducerIdResponse:
    code = error.error
    if code is Errors.PRODUCER_FENCED and version < _FENCED_SINCE_VERSION:
        code = Errors.INVALID_PRODUCER_EPOCH
    return InitProducerIdResponse(error_code=code, producer_id=_NO_PRODUCER_ID, producer_epoch=_NO_EPOCH)
