# SPDX-License-Identifier: Apache-2.0
"""FindCoordinator: the broker that coordinates a group or a transactional id.

As in Kafka, the first request creates the internal topic; without the topic no shard is active. v0 to v3 have one key,
v4 and later several. There are no share coordinators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import ERRORS
from kcoord.server.api.auto_create import ensure_internal_topic
from kcoord.server.api.leader_hint import leader_endpoint
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC
from kcoord_protocol.messages import FindCoordinatorRequest, FindCoordinatorResponse

Coordinator = FindCoordinatorResponse.Coordinator

API_KEY = ApiKey.FIND_COORDINATOR
VERSIONS = range(0, 7)

FIRST_VERSION_WITH_KEYS = 4

GROUP = 0
TRANSACTION = 1

_RESOURCE_TYPES = {GROUP: ResourceType.GROUP, TRANSACTION: ResourceType.TRANSACTIONAL_ID}
_TOPICS = {GROUP: GROUP_METADATA_TOPIC, TRANSACTION: TRANSACTION_STATE_TOPIC}

NO_NODE_ID = -1


def respond(
    context: RequestContext,
    request: FindCoordinatorRequest,
    group_coordinator: Callable[[str], tuple[int, str, int] | None],
) -> FindCoordinatorResponse:
    """Answers a request about groups. `group_coordinator` returns node id, host and port, None if there is none."""

    def coordinator(key: str) -> Coordinator:
        address = group_coordinator(key)
        return _unavailable(key) if address is None else _found(key, *address)

    keys = _keys(request, context.api_version)
    return _lookup(context, GROUP, keys, _allowed(context, GROUP, keys), coordinator)


def handle(broker: Broker, context: RequestContext, request: FindCoordinatorRequest) -> Reply[FindCoordinatorResponse]:
    topic = _TOPICS.get(request.key_type)
    if topic is None:
        raise KafkaError(Errors.INVALID_REQUEST)
    keys = _keys(request, context.api_version)
    kind = request.key_type
    allowed = _allowed(context, kind, keys)
    coordinator = partial(_coordinator, broker, context, kind)
    if not allowed or topic in broker.image.topics:
        return _lookup(context, kind, keys, allowed, coordinator)
    created = ensure_internal_topic(broker, context, topic)
    return map_reply(created, lambda _: _lookup(context, kind, keys, allowed, coordinator))


def _allowed(context: RequestContext, kind: int, keys: list[str]) -> set[str]:
    if context.rights is None:
        return set(keys)
    return context.rights.allowed(AclOperation.DESCRIBE, _RESOURCE_TYPES[kind], keys)


def _keys(request: FindCoordinatorRequest, version: int) -> list[str]:
    return request.coordinator_keys if version >= FIRST_VERSION_WITH_KEYS else [request.key]


def _lookup(
    context: RequestContext, kind: int, keys: list[str], allowed: set[str], coordinator: Callable[[str], Coordinator]
) -> FindCoordinatorResponse:
    error, message = ERRORS[_RESOURCE_TYPES[kind]]
    coordinators = [coordinator(key) if key in allowed else _failed(key, error, message) for key in keys]
    if context.api_version >= FIRST_VERSION_WITH_KEYS:
        for result in coordinators:
            # Kafka has a message for the error of a whole response only.
            result.error_message = ""
        return FindCoordinatorResponse(coordinators=coordinators)
    only = coordinators[0]
    return FindCoordinatorResponse(
        error_code=only.error_code,
        error_message=only.error_message,
        node_id=only.node_id,
        host=only.host,
        port=only.port,
    )


def _coordinator(broker: Broker, context: RequestContext, kind: int, key: str) -> Coordinator:
    """Returns the leader of the key's partition, with its address on the client's listener."""
    shard_id = (broker.groups if kind == GROUP else broker.transactions).shard_of(key)
    partition = broker.image.partition(_TOPICS[kind], shard_id)
    leader = partition.leader if partition is not None else NO_NODE_ID
    endpoint = leader_endpoint(broker, leader, context.client.listener_name)
    if endpoint is None:
        return _unavailable(key)
    host, port, _ = endpoint
    return _found(key, leader, host, port)


def _found(key: str, node_id: int, host: str, port: int) -> Coordinator:
    # Kafka, too, has the name of the error as its message if there is none.
    return FindCoordinatorResponse.Coordinator(key=key, node_id=node_id, host=host, port=port, error_message="NONE")


def _unavailable(key: str) -> Coordinator:
    return _failed(key, Errors.COORDINATOR_NOT_AVAILABLE, "The coordinator is not available.")


def _failed(key: str, error: Errors, message: str) -> Coordinator:
    return FindCoordinatorResponse.Coordinator(
        key=key, node_id=NO_NODE_ID, host="", port=NO_NODE_ID, error_code=error, error_message=message
    )


def error_response(request: FindCoordinatorRequest, error: KafkaError, version: int) -> FindCoordinatorResponse:
    message = error.message or error.error.description
    if version < FIRST_VERSION_WITH_KEYS:
        return FindCoordinatorResponse(
            error_code=error.error, error_message=message, node_id=NO_NODE_ID, host="", port=NO_NODE_ID
        )
    return FindCoordinatorResponse(
        coordinators=[_failed(key, error.error, message) for key in request.coordinator_keys]
    )
