# SPDX-License-Identifier: Apache-2.0
"""AddOffsetsToTxn: adds a group's partition of `__consumer_offsets` to a producer's transaction."""

from __future__ import annotations

import asyncio
from typing import Final

from kcoord.runtime.result import Producer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.auto_create import ensure_internal_topic
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.messages import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse

API_KEY = ApiKey.ADD_OFFSETS_TO_TXN
VERSIONS = range(0, 5)

_FENCED_SINCE_VERSION: Final = 2
"""Older clients know INVALID_PRODUCER_EPOCH instead."""
_CLIENT_TRANSACTION_VERSION: Final = 0
"""Producers that send this request do not get a new epoch with every transaction."""


def handle(broker: Broker, context: RequestContext, request: AddOffsetsToTxnRequest) -> Reply[AddOffsetsToTxnResponse]:
    if context.rights is not None:
        context.rights.require(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id)
        context.rights.require(AclOperation.READ, ResourceType.GROUP, request.group_id)
    if GROUP_METADATA_TOPIC in broker.image.topics:
        return _add(broker, context, request)
    return broker.spawn(_add_to_new_topic(broker, context, request))


async def _add_to_new_topic(
    broker: Broker, context: RequestContext, request: AddOffsetsToTxnRequest
) -> AddOffsetsToTxnResponse:
    """Creates `__consumer_offsets` first, so that the group's partition exists."""
    await ensure_internal_topic(broker, context, GROUP_METADATA_TOPIC)
    reply = _add(broker, context, request)
    return await reply if asyncio.isfuture(reply) else reply


def _add(broker: Broker, context: RequestContext, request: AddOffsetsToTxnRequest) -> Reply[AddOffsetsToTxnResponse]:
    producer = Producer(request.producer_id, request.producer_epoch)
    partitions = {GROUP_METADATA_TOPIC: frozenset((broker.groups.shard_of(request.group_id),))}

    added = broker.transactions.add_partitions(
        request.transactional_id,
        producer,
        partitions,
        _CLIENT_TRANSACTION_VERSION,
        context.operation_context(),
    )
    return map_reply(added, lambda _: AddOffsetsToTxnResponse())


def error_response(request: AddOffsetsToTxnRequest, error: KafkaError, version: int) -> AddOffsetsToTxnResponse:
    code = error.error
    if code is Errors.PRODUCER_FENCED and version < _FENCED_SINCE_VERSION:
        code = Errors.INVALID_PRODUCER_EPOCH
    return AddOffsetsToTxnResponse(error_code=code)
