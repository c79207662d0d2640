# SPDX-License-Identifier: Apache-2.0
"""AllocateProducerIds (KIP-730): the controller reserves producer ids for another worker. Not served to clients."""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import AllocateProducerIdsRequest, AllocateProducerIdsResponse

API_KEY = ApiKey.ALLOCATE_PRODUCER_IDS
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: AllocateProducerIdsRequest
) -> Reply[AllocateProducerIdsResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.CLUSTER_ACTION)
    return broker.metadata.call(allocate, request, context.operation_context())


def allocate(
    machine: MetadataMachine, context: OperationContext, request: AllocateProducerIdsRequest
) -> CoordinatorResult[AllocateProducerIdsResponse]:
    """Reserves a block of producer ids for a broker (KIP-730)."""
    result = machine.allocate_producer_ids(context, request.broker_id)
    block = result.response
    return CoordinatorResult(
        AllocateProducerIdsResponse(producer_id_start=block.first_id, producer_id_len=block.size), result.records
    )


def error_response(request: AllocateProducerIdsRequest, error: KafkaError, version: int) -> AllocateProducerIdsResponse:
    return AllocateProducerIdsResponse(error_code=error.error)
