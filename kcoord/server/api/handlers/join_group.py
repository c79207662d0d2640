# SPDX-License-Identifier: Apache-2.0
"""JoinGroup of the classic protocol: the response may wait until the other members have joined, too."""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import JoinGroupRequest, JoinGroupResponse

API_KEY = ApiKey.JOIN_GROUP
VERSIONS = range(0, 10)

NULL_PROTOCOL_VERSION = 7
"""The first version in which the protocol name may be null."""


def handle(broker: Broker, context: RequestContext, request: JoinGroupRequest) -> Reply[JoinGroupResponse]:
    if context.rights is not None:
        context.rights.require(AclOperation.READ, ResourceType.GROUP, request.group_id)
    reply = broker.groups.call(
        request.group_id, GroupCoordinatorShard.join_group, request, context.operation_context(broker.uuids.take_text())
    )
    return map_reply(reply, lambda response: _for_version(response, context.api_version))


def _for_version(response: JoinGroupResponse, version: int) -> JoinGroupResponse:
    # As in Kafka, a member that calls its protocol "" reads null if the version has null.
    response.protocol_name = response.protocol_name or ("" if version < NULL_PROTOCOL_VERSION else None)
    return response


def error_response(request: JoinGroupRequest, error: KafkaError, version: int) -> JoinGroupResponse:
    response = JoinGroupResponse(error_code=error.error, generation_id=-1, protocol_name=None, member_id="")
    return _for_version(response, version)
