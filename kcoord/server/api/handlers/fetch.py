# SPDX-License-Identifier: Apache-2.0
"""Fetch: answers at once where there is enough data, else when data comes or `max_wait_ms` has passed (long poll)."""

from __future__ import annotations

from functools import partial
from typing import Final

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.leader_hint import leader_endpoint
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
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
    reply = broker.fetches.fetch(request, context.api_version)
    if context.api_version < _LEADER_HINTS_SINCE_VERSION:
        return reply
    return map_reply(reply, partial(_add_leader_hints, broker, context))


def _add_leader_hints(broker: Broker, context: RequestContext, response: FetchResponse) -> FetchResponse:
    """Adds the addresses of the leaders that failed partitions point to."""
    leaders = {
        partition.current_leader.leader_id
        for topic in response.responses
        for partition in topic.partitions
        if partition.error_code in _HINTED_ERRORS
    }
    for leader_id in sorted(leaders):
        endpoint = leader_endpoint(broker, leader_id, context.listener_name)
        if endpoint is not None:
            host, port, rack = endpoint
            response.node_endpoints.append(
                FetchResponse.NodeEndpoint(node_id=leader_id, host=host, port=port, rack=rack)
            )
    return response


def error_response(request: FetchRequest, error: KafkaError, version: int) -> FetchResponse:
    """From version 7 the response has an error of its own; before version 13, each partition carries it."""
    if version >= _TOPIC_IDS_SINCE_VERSION:
        return FetchResponse(error_code=error.error)
    return FetchResponse(
        error_code=error.error if version >= _SESSIONS_SINCE_VERSION else Errors.NONE,
        responses=[
            FetchResponse.FetchableTopicResponse(
                topic=topic.topic,
                partitions=[_failed(partition.partition, error.error) for partition in topic.partitions],
            )
            for topic in request.topics
        ],
    )


def _failed(index: int, error: Errors) -> FetchResponse.PartitionData:
    return FetchResponse.PartitionData(
        partition_index=index, error_code=error, high_watermark=-1, aborted_transactions=None, records=b""
    )
