# SPDX-License-Identifier: Apache-2.0
"""DeleteTopics: the metadata machine decides. Answered when the removal is durable."""

from __future__ import annotations

from kcoord.metadata.collect import once
from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.topics import requested_deletions
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.timeouts import check_timeout
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import DeleteTopicsRequest, DeleteTopicsResponse
from kcoord_protocol.uuid import ZERO_UUID

API_KEY = ApiKey.DELETE_TOPICS
VERSIONS = range(1, 7)


def handle(broker: Broker, context: RequestContext, request: DeleteTopicsRequest) -> Reply[DeleteTopicsResponse]:
    named = once((state.name, state.topic_id) for state in requested_deletions(request, context.api_version))
    if any((name is None) != (topic_id == ZERO_UUID) for name, topic_id in named):
        check_timeout(request.timeout_ms)
    return broker.metadata.call(MetadataMachine.delete_topics, request, context.operation_context())


def error_response(request: DeleteTopicsRequest, error: KafkaError, version: int) -> DeleteTopicsResponse:
    return DeleteTopicsResponse(
        responses=[
            DeleteTopicsResponse.DeletableTopicResult(
                name=state.name, topic_id=state.topic_id, error_code=error.error, error_message=error.message
            )
            for state in requested_deletions(request, version)
        ]
    )
