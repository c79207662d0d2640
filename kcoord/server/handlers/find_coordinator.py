# SPDX-License-Identifier: Apache-2.0
"""FindCoordinator: which broker serves a group or a transactional id. The first question makes the internal topic, as
in Kafka: without it no shard is active.

v0-v3 ask for one key, v4+ for several. Share coordinators do not exist here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcoord.server.broker import map_reply
from protocol.api_keys import ApiKey
from protocol.errors import Errors, KafkaError
from protocol.messages import FindCoordinatorRequest, FindCoordinatorResponse

if TYPE_CHECKING:
    from kcoord.server.broker import Broker, Reply
    from kcoord.server.request_context import RequestContext

API_KEY = ApiKey.FIND_COORDINATOR
VERSIONS = range(0, 7)

FIRST_VERSION_WITH_KEYS = 4

GROUP = 0
TRANSACTION = 1

GROUP_METADATA_TOPIC = "__consumer_offsets"
_TOPICS = {GROUP: GROUP_METADATA_TOPIC, TRANSACTION: "__transaction_state"}

NO_NODE_ID = -1


def handle(broker: Broker, context: RequestContext, request: FindCoordinatorRequest) -> Reply[FindCoordinatorResponse]:
    topic = _TOPICS.get(request.key_type)
    if topic is None:
        raise KafkaError(Errors.INVALID_REQUEST, f"There is no coordinator of type {request.key_type}.")
    keys = _keys(request, context.api_version)
    if not keys or topic in broker.image.topics:
        return _found(broker, context, keys)
    created = broker.metadata.run(
        lambda machine, operation_context: machine.ensure_internal_topic(operation_context, topic),
        context.operation_context(),
    )
    return map_reply(created, lambda _: _found(broker, context, keys))


def _keys(request: FindCoordinatorRequest, version: int) -> list[str]:
    return request.coordinator_keys if version >= FIRST_VERSION_WITH_KEYS else [request.key]


def _found(broker: Broker, context: RequestContext, keys: list[str]) -> FindCoordinatorResponse:
    """All shards are served by this one broker; it is named by the address of the listener that was asked."""
    endpoint = broker.endpoint(context.listener_name)
    if context.api_version < FIRST_VERSION_WITH_KEYS:
        return FindCoordinatorResponse(node_id=broker.node_id, host=endpoint.host, port=endpoint.port)
    return FindCoordinatorResponse(
        coordinators=[
            FindCoordinatorResponse.Coordinator(
                key=key, node_id=broker.node_id, host=endpoint.host, port=endpoint.port, error_message=""
            )
            for key in keys
        ]
    )


def error_response(request: FindCoordinatorRequest, error: KafkaError, version: int) -> FindCoordinatorResponse:
    message = error.message or error.error.description
    if version < FIRST_VERSION_WITH_KEYS:
        return FindCoordinatorResponse(
            error_code=error.error, error_message=message, node_id=NO_NODE_ID, host="", port=NO_NODE_ID
        )
    return FindCoordinatorResponse(
        coordinators=[
            FindCoordinatorResponse.Coordinator(
                key=key, node_id=NO_NODE_ID, host="", port=NO_NODE_ID, error_code=error.error, error_message=message
            )
            for key in request.coordinator_keys
        ]
    )
