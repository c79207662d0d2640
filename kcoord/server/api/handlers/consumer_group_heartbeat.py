# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupHeartbeat (KIP-848): the group's shard decides everything; v2 adds the creation times of KIP-1327.

Connections of the form `creation-time` get the group's creation time in v1, too, as a tagged field.
"""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.features import GROUP_VERSION
from kcoord.server.api.api_table import RequestContext, creation_time_tag, has_creation_time_tag
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

API_KEY = ApiKey.CONSUMER_GROUP_HEARTBEAT
VERSIONS = range(0, 3)


def handle(
    broker: Broker, context: RequestContext, request: ConsumerGroupHeartbeatRequest
) -> Reply[ConsumerGroupHeartbeatResponse]:
    check_consumer_protocol(broker)

    # A member without an id can only be a first heartbeat of v0, the one case in which the shard makes an id.
    candidate_id = broker.uuids.take_text() if not request.member_id else ""
    reply = broker.groups.call(
        request.group_id,
        GroupCoordinatorShard.consumer_group_heartbeat,
        request,
        context.operation_context(candidate_id),
    )
    return map_reply(reply, _with_creation_time_tag) if has_creation_time_tag(context) else reply


def check_consumer_protocol(broker: Broker) -> None:
    """KIP-848 can be switched off by feature level or setting; as in Kafka the APIs stay listed and answer so,
    without a text.
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
