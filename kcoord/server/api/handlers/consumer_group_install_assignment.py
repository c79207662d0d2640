# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupInstallAssignment (KIP-848): installs the target assignment that a member has computed."""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.handlers.consumer_group_heartbeat import check_consumer_protocol
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ConsumerGroupInstallAssignmentRequest, ConsumerGroupInstallAssignmentResponse

API_KEY = ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: ConsumerGroupInstallAssignmentRequest
) -> Reply[ConsumerGroupInstallAssignmentResponse]:
    check_consumer_protocol(broker)
    if context.rights is not None:
        context.rights.require(AclOperation.READ, ResourceType.GROUP, request.group_id)
    return broker.groups.call(
        request.group_id, GroupCoordinatorShard.install_assignment, request, context.operation_context()
    )


def error_response(
    request: ConsumerGroupInstallAssignmentRequest, error: KafkaError, version: int
) -> ConsumerGroupInstallAssignmentResponse:
    return ConsumerGroupInstallAssignmentResponse(error_code=error.error, error_message=error.message)
