# SPDX-License-Identifier: Apache-2.0
"""CreatePartitions, decided by the metadata machine. The response leaves when every worker has the new partitions."""

from __future__ import annotations

from typing import Final

from kcoord.metadata.collect import once
from kcoord.metadata.machine import MetadataMachine
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.timeouts import check_timeout
from kcoord.server.broker import Broker
from kcoord.server.mutation_quota import MutationQuota, operation_context, throttled
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import CreatePartitionsRequest, CreatePartitionsResponse

API_KEY = ApiKey.CREATE_PARTITIONS
VERSIONS = range(0, 4)
_STRICT_QUOTA_SINCE_VERSION: Final = 3

Result = CreatePartitionsResponse.CreatePartitionsTopicResult


def handle(
    broker: Broker, context: RequestContext, request: CreatePartitionsRequest
) -> Reply[CreatePartitionsResponse]:
    names = once(topic.name for topic in request.topics)
    if names:
        check_timeout(request.timeout_ms)
    refused: list[Result] = []
    if context.rights is not None:
        not_allowed = names - context.rights.allowed(AclOperation.ALTER, ResourceType.TOPIC, names)
        refused = [
            Result(name=name, error_code=Errors.TOPIC_AUTHORIZATION_FAILED, error_message=None)
            for name in sorted(not_allowed)
        ]
        request.topics = [topic for topic in request.topics if topic.name not in not_allowed]
        if not request.topics:
            return CreatePartitionsResponse(results=refused)
    quota = MutationQuota.of(broker, context, _STRICT_QUOTA_SINCE_VERSION)

    def complete(response: CreatePartitionsResponse) -> CreatePartitionsResponse:
        response.results += refused
        return throttled(context, quota, response)

    reply = broker.metadata.call(MetadataMachine.create_partitions, request, operation_context(context, quota))
    return map_reply(reply, complete)


def error_response(request: CreatePartitionsRequest, error: KafkaError, version: int) -> CreatePartitionsResponse:
    return CreatePartitionsResponse(
        results=[
            Result(name=topic.name, error_code=error.error, error_message=error.message) for topic in request.topics
        ]
    )
