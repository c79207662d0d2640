# SPDX-License-Identifier: Apache-2.0
"""BrokerHeartbeat (KIP-631): takes a broker out of service, or back into it.

`kcoord workers` sends it to a worker, which forwards it to the controller. It is not served to clients.
"""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import BrokerHeartbeatRequest, BrokerHeartbeatResponse

API_KEY = ApiKey.BROKER_HEARTBEAT
VERSIONS = range(0, 1)


def handle(broker: Broker, context: RequestContext, request: BrokerHeartbeatRequest) -> Reply[BrokerHeartbeatResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.CLUSTER_ACTION)
    return broker.metadata.call(_fence, request, context.operation_context())


def _fence(
    machine: MetadataMachine, context: OperationContext, request: BrokerHeartbeatRequest
) -> CoordinatorResult[BrokerHeartbeatResponse]:
    """Takes a broker out of service, or back into it."""
    result = machine.fence_broker(context, request.broker_id, request.want_fence)
    return CoordinatorResult(BrokerHeartbeatResponse(is_caught_up=True, is_fenced=result.response), result.records)


def error_response(request: BrokerHeartbeatRequest, error: KafkaError, version: int) -> BrokerHeartbeatResponse:
    return BrokerHeartbeatResponse(error_code=error.error)
