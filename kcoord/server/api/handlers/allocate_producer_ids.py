# SPDX-License-Identifier: Apache-2.0
"""AllocateProducerIds (KIP-730): the controller reserves producer ids for another worker. Clients cannot ask for it."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.replies import Reply, map_reply
from kcoord.server.broker import Broker
from kcoord.server.shards.metadata_operations import AllocateProducerIds
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import AllocateProducerIdsRequest, AllocateProducerIdsResponse

API_KEY = ApiKey.ALLOCATE_PRODUCER_IDS
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: AllocateProducerIdsRequest
) -> Reply[AllocateProducerIdsResponse]:
    reserved = broker.metadata.run(AllocateProducerIds(request.broker_id), context.operation_context())
    return map_reply(
        reserved,
        lambda block: AllocateProducerIdsResponse(producer_id_start=block.first_id, producer_id_len=block.size),
    )


def error_response(request: AllocateProducerIdsRequest, error: KafkaError, version: int) -> AllocateProducerIdsResponse:
    return AllocateProducerIdsResponse(error_code=error.error)
