# SPDX-License-Identifier: Apache-2.0
"""EndTxn: commits or aborts a transaction. The response leaves when the decision is durable; markers are written later.

From v5 on (KIP-890) every end bumps the producer's epoch. The response has the producer id and epoch for the next
transaction.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kcoord.coordinator.transaction.end_transaction import EndRequest
from kcoord.coordinator.transaction.metadata import EPOCH_BUMPING_VERSION
from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext, Producer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.handlers.init_producer_id import take_producer_id
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import EndTxnRequest, EndTxnResponse

API_KEY = ApiKey.END_TXN
VERSIONS = range(0, 6)

_FENCED_SINCE_VERSION: Final = 2
"""Older clients know INVALID_PRODUCER_EPOCH instead."""
_BUMPS_EPOCH_SINCE_VERSION: Final = 5


def handle(broker: Broker, context: RequestContext, request: EndTxnRequest) -> Reply[EndTxnResponse]:
    if context.rights is not None:
        context.rights.require(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id)
    bumps_epoch = context.api_version >= _BUMPS_EPOCH_SINCE_VERSION
    if not bumps_epoch or not broker.transactions.needs_producer_id(request.transactional_id):
        return _end(broker, context, request, None)
    producer_id = broker.topics.producer_ids.take()
    if producer_id is None:
        return broker.spawn(_end_with_new_block(broker, context, request))
    return _end(broker, context, request, producer_id)


async def _end_with_new_block(broker: Broker, context: RequestContext, request: EndTxnRequest) -> EndTxnResponse:
    reply = _end(broker, context, request, await take_producer_id(broker, context))
    return await reply if asyncio.isfuture(reply) else reply


def _end(
    broker: Broker, context: RequestContext, request: EndTxnRequest, producer_id: int | None
) -> Reply[EndTxnResponse]:
    bumps_epoch = context.api_version >= _BUMPS_EPOCH_SINCE_VERSION
    end = EndRequest(
        Producer(request.producer_id, request.producer_epoch),
        request.committed,
        bumps_epoch,
        EPOCH_BUMPING_VERSION if bumps_epoch else 0,
        producer_id,
    )

    def operation(
        shard: TransactionCoordinatorShard, operation_context: OperationContext, end: EndRequest
    ) -> CoordinatorResult[Producer]:
        return shard.end_transaction(operation_context, request.transactional_id, end)

    ended = broker.transactions.call(request.transactional_id, operation, end, context.operation_context())
    return map_reply(
        ended, lambda producer: EndTxnResponse(producer_id=producer.producer_id, producer_epoch=producer.producer_epoch)
    )


def error_response(request: EndTxnRequest, error: KafkaError, version: int) -> EndTxnResponse:
    code = error.error
    if code is Errors.PRODUCER_FENCED and version < _FENCED_SINCE_VERSION:
        code = Errors.INVALID_PRODUCER_EPOCH
    return EndTxnResponse(error_code=code)
