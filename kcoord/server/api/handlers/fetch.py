# SPDX-License-Identifier: Apache-2.0
"""Fetch: answers at once if there is enough data, else when data arrives or `max_wait_ms` has passed (long poll)."""

from __future__ import annotations

from functools import partial
from typing import Final

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.leader_hint import leader_endpoint
from kcoord.server.broker import Broker
from kcoord.server.quota_use import throttle_of_fetch
from kcoord.server.replies import Reply, map_reply
from kcoord.topics.fetch_manager import ReadableTopics, error_data, replica_id
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import FetchRequest, FetchResponse

API_KEY = ApiKey.FETCH
VERSIONS = range(4, 19)

_LEADER_HINTS_SINCE_VERSION: Final = 16
_SESSIONS_SINCE_VERSION: Final = 7
_TOPIC_IDS_SINCE_VERSION: Final = 13
_HINTED_ERRORS: Final = (Errors.NOT_LEADER_OR_FOLLOWER, Errors.FENCED_LEADER_EPOCH)


def handle(broker: Broker, context: RequestContext, request: FetchRequest) -> Reply[FetchResponse]:
    readable = None if context.rights is None else _readable_topics(context.rights, request, context.api_version)
    throttle = None if broker.quotas is None else throttle_of_fetch(broker, broker.quotas, context, request)
    reply = broker.fetches.fetch(request, context.api_version, readable, throttle)
    if context.api_version < _LEADER_HINTS_SINCE_VERSION:
        return reply
    return map_reply(reply, partial(_add_leader_hints, broker, context))


def _readable_topics(rights: Rights, request: FetchRequest, version: int) -> ReadableTopics:
    """Returns a function that returns the topics that the client may read: all or none if it is a broker."""
    if replica_id(request, version) < 0:
        return partial(rights.allowed, AclOperation.READ, ResourceType.TOPIC)
    is_broker = rights.allows_cluster(AclOperation.CLUSTER_ACTION)
    return lambda topics: topics if is_broker else set()


def _add_leader_hints(broker: Broker, context: RequestContext, response: FetchResponse) -> FetchResponse:
    """Adds the addresses of the leaders that the results of failed partitions name (KIP-951)."""
    leaders = {
        partition.current_leader.leader_id
        for topic in response.responses
        for partition in topic.partitions
        if partition.error_code in _HINTED_ERRORS
    }
    for leader_id in sorted(leaders):
        endpoint = leader_endpoint(broker, leader_id, context.client.listener_name)
        if endpoint is not None:
            host, port, rack = endpoint
            response.node_endpoints.append(
                FetchResponse.NodeEndpoint(node_id=leader_id, host=host, port=port, rack=rack)
            )
    return response


def error_response(request: FetchRequest, error: KafkaError, version: int) -> FetchResponse:
    """Returns the error response. From v7 on the response itself has the error; before v13 every partition has it."""
    if version >= _TOPIC_IDS_SINCE_VERSION:
        return FetchResponse(error_code=error.error)
    return FetchResponse(
        error_code=error.error if version >= _SESSIONS_SINCE_VERSION else Errors.NONE,
        responses=[
            FetchResponse.FetchableTopicResponse(
                topic=topic.topic,
                partitions=[error_data(partition.partition, error.error) for partition in topic.partitions],
            )
            for topic in request.topics
        ],
    )
