# SPDX-License-Identifier: Apache-2.0
"""InitProducerId for idempotent producers: the next id of a block that the metadata log has reserved.

Transactional ids belong to a transaction coordinator. There is none, so they get COORDINATOR_NOT_AVAILABLE.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from protocol.api_keys import ApiKey
from protocol.errors import Errors, KafkaError
from protocol.messages import InitProducerIdRequest, InitProducerIdResponse

if TYPE_CHECKING:
    from kcoord.server.broker import Broker, Reply
    from kcoord.server.request_context import RequestContext

API_KEY = ApiKey.INIT_PRODUCER_ID
VERSIONS = range(0, 6)

_NO_PRODUCER_ID = -1
_NO_EPOCH = -1


def handle(broker: Broker, context: RequestContext, request: InitProducerIdRequest) -> Reply[InitProducerIdResponse]:
    if (request.producer_id == _NO_PRODUCER_ID) != (request.producer_epoch == _NO_EPOCH):
        raise KafkaError(Errors.INVALID_REQUEST)
    if request.transactional_id is not None:
        return _init_transactional(request)
    producer_id = broker.topics.producer_ids.take()
    if producer_id is None:
        return broker.spawn(_take_from_new_block(broker, context))
    return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)


def _init_transactional(request: InitProducerIdRequest) -> InitProducerIdResponse:
    """Where the transaction coordinator comes in."""
    if not request.transactional_id:
        raise KafkaError(Errors.INVALID_REQUEST)
    raise KafkaError(Errors.COORDINATOR_NOT_AVAILABLE)


async def _take_from_new_block(broker: Broker, context: RequestContext) -> InitProducerIdResponse:
    """Everybody who finds the block used up waits for the same new one."""
    ids = broker.topics.producer_ids
    while (producer_id := ids.take()) is None:
        if ids.pending is None:
            ids.pending = broker.spawn(_reserve_block(broker, context))
        await asyncio.shield(ids.pending)
    return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)


async def _reserve_block(broker: Broker, context: RequestContext) -> None:
    ids = broker.topics.producer_ids
    try:
        block = await broker.metadata.run(
            lambda machine, operation: machine.allocate_producer_ids(operation, broker.node_id),
            context.operation_context(),
        )
        ids.add_block(block.first_id, block.size)
    finally:
        ids.pending = None


def error_response(request: InitProducerIdRequest, error: KafkaError, version: int) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=error.error, producer_id=_NO_PRODUCER_ID, producer_epoch=_NO_EPOCH)
