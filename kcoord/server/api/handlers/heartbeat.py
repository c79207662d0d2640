# SPDX-License-Identifier: Apache-2.0
"""Heartbeat of the classic protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import HeartbeatRequest, HeartbeatResponse

if TYPE_CHECKING:
    from kcoord.coordinator.group.shard import GroupCoordinatorShard
    from kcoord.runtime.result import CoordinatorResult, OperationContext
    from kcoord.server.api.request_context import RequestContext
    from kcoord.server.broker import Broker, Reply

API_KEY = ApiKey.HEARTBEAT
VERSIONS = range(0, 5)


def handle(broker: Broker, context: RequestContext, request: HeartbeatRequest) -> Reply[HeartbeatResponse]:
    def operation(
        shard: GroupCoordinatorShard, operation_context: OperationContext
    ) -> CoordinatorResult[HeartbeatResponse]:
        return shard.heartbeat(operation_context, request)

    return broker.groups.run(request.group_id, operation, context.operation_context(candidate=False))


def error_response(request: HeartbeatRequest, error: KafkaError, version: int) -> HeartbeatResponse:
    return HeartbeatResponse(error_code=error.error)
