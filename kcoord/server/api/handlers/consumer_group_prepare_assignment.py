# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupPrepareAssignment (KIP-848): gives a member that computes a target the state of its group."""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.handlers.consumer_group_heartbeat import check_consumer_protocol
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ConsumerGroupPrepareAssignmentRequest, ConsumerGroupPrepareAssignmentResponse

API_KEY = ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: ConsumerGroupPrepareAssignmentRequest
) -> Reply[ConsumerGroupPrepareAssignmentResponse]:
    check_consumer_protocol(broker)
    if context.rights is not None:
        context.rights.require(AclOperation.READ, ResourceType.GROUP, request.group_id)
    return broker.groups.call(
        request.group_id, GroupCoordinatorShard.prepare_assignment, request, context.operation_context()
    )


def error_response(
    request: ConsumerGroupPrepareAssignmentRequest, error: KafkaError, version: int
) -> ConsumerGroupPrepareAssignmentResponse:
    return ConsumerGroupPrepareAssignmentResponse(error_code=error.error, error_message=error.message)
