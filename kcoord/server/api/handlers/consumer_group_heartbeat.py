# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupHeartbeat (KIP-848), handled by the group's shard.

v2 adds the group's creation time (KIP-1327). Connections of the form `creation-time` get it in v1, too, as a tagged
field.
"""

from __future__ import annotations

from functools import partial

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.features import GROUP_VERSION
from kcoord.server.api.api_table import RequestContext, creation_time_tag, has_creation_time_tag
from kcoord.server.api.authorization import Rights
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

API_KEY = ApiKey.CONSUMER_GROUP_HEARTBEAT
VERSIONS = range(0, 3)


def handle(
    broker: Broker, context: RequestContext, request: ConsumerGroupHeartbeatRequest
) -> Reply[ConsumerGroupHeartbeatResponse]:
    check_consumer_protocol(broker)
    if context.rights is not None:
        _check_rights(context.rights, request)
    # Only the first heartbeat in v0 may come without a member id. It is the only case in which the shard uses a new id.
    candidate_id = broker.uuids.take_text() if not request.member_id else ""
    operation_context = context.operation_context(candidate_id)
    if context.rights is not None:
        operation_context.describable = partial(
            context.rights.allowed, AclOperation.DESCRIBE, ResourceType.TOPIC, logs_denial=False
        )
    reply = broker.groups.call(
        request.group_id,
        GroupCoordinatorShard.consumer_group_heartbeat,
        request,
        operation_context,
    )
    return map_reply(reply, _with_creation_time_tag) if has_creation_time_tag(context) else reply


def _check_rights(rights: Rights, request: ConsumerGroupHeartbeatRequest) -> None:
    """Raises KafkaError unless the client may join the group, and knows all topics that it names.

    As in Kafka, the errors have no message.
    """
    if not rights.allows(AclOperation.READ, ResourceType.GROUP, request.group_id):
        raise KafkaError(Errors.GROUP_AUTHORIZATION_FAILED)
    names = set(request.subscribed_topic_names or ())
    if len(rights.allowed(AclOperation.DESCRIBE, ResourceType.TOPIC, names)) < len(names):
        raise KafkaError(Errors.TOPIC_AUTHORIZATION_FAILED)


def check_consumer_protocol(broker: Broker) -> None:
    """Raises UNSUPPORTED_VERSION if KIP-848 is switched off.

    `group.version` or `group.coordinator.rebalance.protocols` switches it off.

    As in Kafka, the APIs stay listed, and the error has no message.
    """
    enabled = "consumer" in broker.config.group_coordinator_rebalance_protocols
    if not enabled or broker.image.features.get(GROUP_VERSION, 0) < 1:
        raise KafkaError(Errors.UNSUPPORTED_VERSION)


def _with_creation_time_tag(response: ConsumerGroupHeartbeatResponse) -> ConsumerGroupHeartbeatResponse:
    response.unknown_tagged_fields = creation_time_tag(response.group_creation_time_ms)
    return response


def error_response(
    request: ConsumerGroupHeartbeatRequest, error: KafkaError, version: int
) -> ConsumerGroupHeartbeatResponse:
    return ConsumerGroupHeartbeatResponse(error_code=error.error, error_message=error.message)
