# SPDX-License-Identifier: Apache-2.0
"""UnregisterBroker (KIP-631), decided by the metadata machine. A broker that starts again registers again."""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import UnregisterBrokerRequest, UnregisterBrokerResponse

API_KEY = ApiKey.UNREGISTER_BROKER
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: UnregisterBrokerRequest
) -> Reply[UnregisterBrokerResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.ALTER)
    return broker.metadata.call(_unregister, request, context.operation_context())


def _unregister(
    machine: MetadataMachine, context: OperationContext, request: UnregisterBrokerRequest
) -> CoordinatorResult[UnregisterBrokerResponse]:
    return CoordinatorResult(UnregisterBrokerResponse(), machine.unregister_broker(context, request.broker_id).records)


def error_response(request: UnregisterBrokerRequest, error: KafkaError, version: int) -> UnregisterBrokerResponse:
    return UnregisterBrokerResponse(error_code=error.error, error_message=error.message)
