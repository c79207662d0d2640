# SPDX-License-Identifier: Apache-2.0
"""DeleteTopics, decided by the metadata machine. The response leaves when every worker has removed the topics."""

from __future__ import annotations

from typing import Final

from kcoord.metadata.collect import once
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.topics import requested_deletions
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights, denied
from kcoord.server.api.timeouts import check_timeout
from kcoord.server.broker import Broker
from kcoord.server.mutation_quota import MutationQuota, operation_context, throttled
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DeleteTopicsRequest, DeleteTopicsResponse
from kcoord_protocol.uuid import ZERO_UUID

API_KEY = ApiKey.DELETE_TOPICS
VERSIONS = range(1, 7)
_STRICT_QUOTA_SINCE_VERSION: Final = 5

Result = DeleteTopicsResponse.DeletableTopicResult
Key = tuple[str | None, bytes]
"""The name of a topic and no id, or its id and no name."""


def handle(broker: Broker, context: RequestContext, request: DeleteTopicsRequest) -> Reply[DeleteTopicsResponse]:
    named = once((state.name, state.topic_id) for state in requested_deletions(request, context.api_version))
    valid = {key for key in named if (key[0] is None) != (key[1] == ZERO_UUID)}
    if valid:
        check_timeout(request.timeout_ms)
    refused: list[Result] = []
    if context.rights is not None and not context.rights.allows_cluster(AclOperation.DELETE, logs_denial=False):
        refusals = _refusals(context.rights, broker.image, valid)
        refused = list(refusals.values())
        request.topics = [topic for topic in request.topics if (topic.name, topic.topic_id) not in refusals]
        request.topic_names = [name for name in request.topic_names if (name, ZERO_UUID) not in refusals]
        if not request.topics and not request.topic_names:
            return DeleteTopicsResponse(responses=refused)
    quota = MutationQuota.of(broker, context, _STRICT_QUOTA_SINCE_VERSION)

    def complete(response: DeleteTopicsResponse) -> DeleteTopicsResponse:
        response.responses += refused
        return throttled(context, quota, response)

    reply = broker.metadata.call(MetadataMachine.delete_topics, request, operation_context(context, quota))
    return map_reply(reply, complete)


def _refusals(rights: Rights, image: MetadataImage, keys: set[Key]) -> dict[Key, Result]:
    """Returns the results of the topics that the client may not delete, by name or id as the request has them.

    They reveal no name that the client may not describe. Topics that this broker does not know yet are among them,
    since the controller, which checks no rights, could know them already.
    """
    topics = {
        (name, topic_id): image.topics_by_id.get(topic_id) if name is None else image.topics.get(name)
        for name, topic_id in keys
    }
    names = {topic.name if topic is not None else name or "" for (name, _), topic in topics.items()}
    describable = rights.allowed(AclOperation.DESCRIBE, ResourceType.TOPIC, names)
    deletable = rights.allowed(AclOperation.DELETE, ResourceType.TOPIC, names)
    refusals: dict[Key, Result] = {}
    for (name, topic_id), topic in topics.items():
        shown = name
        if name is not None and name not in describable:
            error = denied(ResourceType.TOPIC)
        elif topic is None:
            code = Errors.UNKNOWN_TOPIC_ID if name is None else Errors.UNKNOWN_TOPIC_OR_PARTITION
            error = KafkaError(code, code.description)
        elif topic.name not in deletable:
            error = denied(ResourceType.TOPIC)
            shown = topic.name if topic.name in describable else None
        else:
            continue
        refusals[name, topic_id] = Result(
            name=shown, topic_id=topic_id, error_code=error.error, error_message=error.message
        )
    return refusals


def error_response(request: DeleteTopicsRequest, error: KafkaError, version: int) -> DeleteTopicsResponse:
    return DeleteTopicsResponse(
        responses=[
            Result(name=state.name, topic_id=state.topic_id, error_code=error.error, error_message=error.message)
            for state in requested_deletions(request, version)
        ]
    )
