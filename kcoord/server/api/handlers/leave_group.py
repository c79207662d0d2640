# SPDX-License-Identifier: Apache-2.0
"""LeaveGroup of the classic protocol. Before v3 a request names one member, whose error is the response's error."""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import LeaveGroupRequest, LeaveGroupResponse

API_KEY = ApiKey.LEAVE_GROUP
VERSIONS = range(0, 6)

BATCH_VERSION = 3


def handle(broker: Broker, context: RequestContext, request: LeaveGroupRequest) -> Reply[LeaveGroupResponse]:
    if context.rights is not None:
        context.rights.require(AclOperation.READ, ResourceType.GROUP, request.group_id)
    if context.api_version < BATCH_VERSION:
        request.members = [LeaveGroupRequest.MemberIdentity(member_id=request.member_id)]

    reply = broker.groups.call(
        request.group_id, GroupCoordinatorShard.leave_group, request, context.operation_context()
    )
    return map_reply(reply, lambda response: _for_version(response, context.api_version))


def _for_version(response: LeaveGroupResponse, version: int) -> LeaveGroupResponse:
    if version < BATCH_VERSION and response.members:
        return LeaveGroupResponse(error_code=response.members[0].error_code)
    return response


def error_response(request: LeaveGroupRequest, error: KafkaError, version: int) -> LeaveGroupResponse:
    return LeaveGroupResponse(error_code=error.error)
