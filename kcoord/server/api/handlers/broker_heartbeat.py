# SPDX-License-Identifier: Apache-2.0
"""BrokerHeartbeat (KIP-631), for the controller only and not from clients: takes a broker out of service, or back."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.replies import Reply, map_reply
from kcoord.server.broker import Broker
from kcoord.server.shards.metadata_operations import FenceBroker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import BrokerHeartbeatRequest, BrokerHeartbeatResponse

API_KEY = ApiKey.BROKER_HEARTBEAT
VERSIONS = range(0, 1)


def handle(broker: Broker, context: RequestContext, request: BrokerHeartbeatRequest) -> Reply[BrokerHeartbeatResponse]:
    operation = FenceBroker(request.broker_id, request.want_fence)
    fenced = broker.metadata.run(operation, context.operation_context())
    return map_reply(fenced, lambda is_fenced: BrokerHeartbeatResponse(is_caught_up=True, is_fenced=is_fenced))


def error_response(request: BrokerHeartbeatRequest, error: KafkaError, version: int) -> BrokerHeartbeatResponse:
    return BrokerHeartbeatResponse(error_code=error.error)
