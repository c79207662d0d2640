# SPDX-License-Identifier: Apache-2.0
"""CreateTopics, decided by the metadata machine; the topic ids are drawn here.

The response leaves when every worker has the new topics.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from kcoord.metadata.collect import once
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.timeouts import check_timeout
from kcoord.server.broker import LARGE_RESPONSE_ITEMS, Broker
from kcoord.server.mutation_quota import MutationQuota, operation_context, throttled
from kcoord.server.replies import Reply, chain_reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC
from kcoord_protocol.messages import CreateTopicsRequest, CreateTopicsResponse

API_KEY = ApiKey.CREATE_TOPICS
VERSIONS = range(2, 8)
_STRICT_QUOTA_SINCE_VERSION: Final = 6

Result = CreateTopicsResponse.CreatableTopicResult

_NOT_ALLOWED: Final = KafkaError(Errors.TOPIC_AUTHORIZATION_FAILED, "Authorization failed.")


def handle(broker: Broker, context: RequestContext, request: CreateTopicsRequest) -> Reply[CreateTopicsResponse]:
    names = once(topic.name for topic in request.topics) - {CLUSTER_METADATA_TOPIC}
    if names:
        check_timeout(request.timeout_ms)
    refused: list[Result] = []
    if context.rights is not None:
        not_allowed = names - _creatable(context.rights, names)
        refused = [_failed(name, _NOT_ALLOWED) for name in sorted(not_allowed)]
        request.topics = [topic for topic in request.topics if topic.name not in not_allowed]
        if not request.topics:
            return CreateTopicsResponse(topics=refused)
    topic_ids = broker.uuids.take_topic_ids(len(request.topics))
    quota = MutationQuota.of(broker, context, _STRICT_QUOTA_SINCE_VERSION)

    def create(
        machine: MetadataMachine, context: OperationContext, request: CreateTopicsRequest
    ) -> CoordinatorResult[CreateTopicsResponse]:
        return machine.create_topics(context, request, topic_ids)

    def complete(response: CreateTopicsResponse) -> Reply[CreateTopicsResponse]:
        if context.rights is not None:
            _hide_configs(context.rights, response)
            response.topics += refused
        reply: Reply[CreateTopicsResponse] = response
        if sum(len(topic.configs or ()) for topic in response.topics) > LARGE_RESPONSE_ITEMS:
            reply = broker.spawn(broker.made_in_thread(lambda: response, context.api_version))
        return map_reply(reply, partial(throttled, context, quota))

    return chain_reply(broker.metadata.call(create, request, operation_context(context, quota)), complete)


def _creatable(rights: Rights, names: set[str]) -> set[str]:
    if rights.allows_cluster(AclOperation.CREATE, logs_denial=False):
        return names
    return rights.allowed(AclOperation.CREATE, ResourceType.TOPIC, names)


def _hide_configs(rights: Rights, response: CreateTopicsResponse) -> None:
    """Removes the configs of the new topics whose configs the client may not describe."""
    created = [result for result in response.topics if not result.error_code]
    names = [result.name for result in created]
    visible = rights.allowed(AclOperation.DESCRIBE_CONFIGS, ResourceType.TOPIC, names, logs_denial=False)
    for result in created:
        if result.name not in visible:
            result.topic_config_error_code = Errors.TOPIC_AUTHORIZATION_FAILED
            result.num_partitions = result.replication_factor = -1
            result.configs = []


def _failed(name: str, error: KafkaError) -> Result:
    return Result(name=name, error_code=error.error, error_message=error.message, configs=[])


def error_response(request: CreateTopicsRequest, error: KafkaError, version: int) -> CreateTopicsResponse:
    return CreateTopicsResponse(topics=[_failed(topic.name, error) for topic in request.topics])
