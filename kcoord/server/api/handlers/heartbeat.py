# SPDX-License-Identifier: Apache-2.0
"""Heartbeat of the classic protocol."""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import HeartbeatRequest, HeartbeatResponse

API_KEY = ApiKey.HEARTBEAT
VERSIONS = range(0, 5)


def handle(broker: Broker, context: RequestContext, request: HeartbeatRequest) -> Reply[HeartbeatResponse]:
    if context.rights is not None:
        context.rights.require(AclOperation.READ, ResourceType.GROUP, request.group_id)
    return broker.groups.call(request.group_id, GroupCoordinatorShard.heartbeat, request, context.operation_context())


def error_response(request: HeartbeatRequest, error: KafkaError, version: int) -> HeartbeatResponse:
    if error.error is Errors.COORDINATOR_LOAD_IN_PROGRESS:
        # As Kafka does: the member keeps its session, which starts again after the load. aiokafka 0.14 would never use
        # its group again after this error.
        return HeartbeatResponse()
    return HeartbeatResponse(error_code=error.error)
