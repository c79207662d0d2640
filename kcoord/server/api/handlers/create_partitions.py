# SPDX-License-Identifier: Apache-2.0
"""CreatePartitions: the metadata machine decides. Answered when the partitions are durable."""

from __future__ import annotations

from kcoord.metadata.collect import once
from kcoord.metadata.machine import MetadataMachine
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.timeouts import check_timeout
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import CreatePartitionsRequest, CreatePartitionsResponse

API_KEY = ApiKey.CREATE_PARTITIONS
VERSIONS = range(0, 4)


def handle(
    broker: Broker, context: RequestContext, request: CreatePartitionsRequest
) -> Reply[CreatePartitionsResponse]:
    if once(topic.name for topic in request.topics):
        check_timeout(request.timeout_ms)
    return broker.metadata.call(MetadataMachine.create_partitions, request, context.operation_context())


def error_response(request: CreatePartitionsRequest, error: KafkaError, version: int) -> CreatePartitionsResponse:
    return CreatePartitionsResponse(
        results=[
            CreatePartitionsResponse.CreatePartitionsTopicResult(
                name=topic.name, error_code=error.error, error_message=error.message
            )
            for topic in request.topics
        ]
    )
