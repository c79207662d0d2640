# SPDX-License-Identifier: Apache-2.0
"""SyncGroup of the classic protocol: the response waits until the leader of the group has sent the assignments."""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import SyncGroupRequest, SyncGroupResponse

API_KEY = ApiKey.SYNC_GROUP
VERSIONS = range(0, 6)

PROTOCOL_VERSION = 5
"""The first version in which the request names the protocol, which the coordinator compares with the group's."""


def handle(broker: Broker, context: RequestContext, request: SyncGroupRequest) -> Reply[SyncGroupResponse]:
    if context.api_version >= PROTOCOL_VERSION and None in (request.protocol_type, request.protocol_name):
        raise KafkaError(Errors.INCONSISTENT_GROUP_PROTOCOL, "ProtocolType and ProtocolName must be given.")
    if context.rights is not None:
        context.rights.require(AclOperation.READ, ResourceType.GROUP, request.group_id)

    return broker.groups.call(request.group_id, GroupCoordinatorShard.sync_group, request, context.operation_context())


def error_response(request: SyncGroupRequest, error: KafkaError, version: int) -> SyncGroupResponse:
    return SyncGroupResponse(error_code=error.error)
