# SPDX-License-Identifier: Apache-2.0
"""CreateTopics: the metadata machine decides, with random topic ids from here. Answered when the topics are durable."""

from __future__ import annotations

from kcoord.metadata.collect import once
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.timeouts import check_timeout
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC
from kcoord_protocol.messages import CreateTopicsRequest, CreateTopicsResponse

API_KEY = ApiKey.CREATE_TOPICS
VERSIONS = range(2, 8)


def handle(broker: Broker, context: RequestContext, request: CreateTopicsRequest) -> Reply[CreateTopicsResponse]:
    if once(topic.name for topic in request.topics) - {CLUSTER_METADATA_TOPIC}:
        check_timeout(request.timeout_ms)
    topic_ids = broker.uuids.take_topic_ids(len(request.topics))

    def create(
        machine: MetadataMachine, context: OperationContext, request: CreateTopicsRequest
    ) -> CoordinatorResult[CreateTopicsResponse]:
        return machine.create_topics(context, request, topic_ids)

    return broker.metadata.call(create, request, context.operation_context())


def error_response(request: CreateTopicsRequest, error: KafkaError, version: int) -> CreateTopicsResponse:
    return CreateTopicsResponse(
        topics=[
            CreateTopicsResponse.CreatableTopicResult(
                name=topic.name, error_code=error.error, error_message=error.message, configs=[]
            )
            for topic in request.topics
        ]
    )
