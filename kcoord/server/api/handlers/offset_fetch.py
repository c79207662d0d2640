# SPDX-License-Identifier: Apache-2.0
"""OffsetFetch: the committed offsets of one group (v1 to v7) or several groups (v8 and later).

Each group is answered by its shard, with its own error. v10 maps topic ids to names and back. The coordinator always
gets the request in the form of v8, so that it has only one form to handle.
"""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetFetchRequest, OffsetFetchResponse

RequestGroup = OffsetFetchRequest.OffsetFetchRequestGroup
RequestTopics = OffsetFetchRequest.OffsetFetchRequestTopics
ResponseGroup = OffsetFetchResponse.OffsetFetchResponseGroup
ResponseTopics = OffsetFetchResponse.OffsetFetchResponseTopics

API_KEY = ApiKey.OFFSET_FETCH
VERSIONS = range(1, 11)

FIRST_VERSION_WITH_TOP_LEVEL_ERROR = 2
FIRST_VERSION_WITH_GROUPS = 8
FIRST_VERSION_WITH_TOPIC_IDS = 10

UNKNOWN_OFFSET = -1


def handle(broker: Broker, context: RequestContext, request: OffsetFetchRequest) -> Reply[OffsetFetchResponse]:
    version = context.api_version
    replies = [_fetch(broker, context, group, request.require_stable) for group in _groups(request, version)]
    return map_reply(gather_replies(replies), lambda groups: _response(groups, version))


def _groups(request: OffsetFetchRequest, version: int) -> list[RequestGroup]:
    if version >= FIRST_VERSION_WITH_GROUPS:
        return request.groups
    topics = None
    if request.topics is not None:
        topics = [
            OffsetFetchRequest.OffsetFetchRequestTopics(name=topic.name, partition_indexes=topic.partition_indexes)
            for topic in request.topics
        ]
    return [OffsetFetchRequest.OffsetFetchRequestGroup(group_id=request.group_id, topics=topics)]


def _fetch(broker: Broker, context: RequestContext, group: RequestGroup, require_stable: bool) -> Reply[ResponseGroup]:
    version = context.api_version
    by_id = version >= FIRST_VERSION_WITH_TOPIC_IDS
    asked = group
    refused: list[ResponseTopics] = []
    if by_id and group.topics is not None:
        asked, unknown = _names_for_ids(broker.image, group)
        refused = [_empty(topic, Errors.UNKNOWN_TOPIC_ID) for topic in unknown]

    def operation(
        shard: GroupCoordinatorShard, operation_context: OperationContext, asked: RequestGroup
    ) -> CoordinatorResult[ResponseGroup]:
        return shard.fetch_offsets(operation_context, asked, require_stable)

    def finish(answer: ResponseGroup) -> ResponseGroup:
        if context.rights is not None and group.topics is None:
            visible = _describable(context.rights, [topic.name for topic in answer.topics])
            answer.topics = [topic for topic in answer.topics if topic.name in visible]
        if by_id:
            _ids_for_names(broker.image, answer)
        answer.topics.extend(refused)
        return answer

    def on_error(error: KafkaError) -> ResponseGroup:
        return _failed(group, error.error, version)

    try:
        if context.rights is not None:
            context.rights.require(AclOperation.DESCRIBE, ResourceType.GROUP, group.group_id)
            if asked.topics is not None:
                asked, hidden = _without_hidden_topics(context.rights, asked, asked.topics)
                refused += hidden
        reply = broker.groups.call(group.group_id, operation, asked, context.operation_context())
        return map_reply(reply, finish, on_error)
    except KafkaError as error:
        return on_error(error)


def _describable(rights: Rights, names: list[str]) -> set[str]:
    return rights.allowed(AclOperation.DESCRIBE, ResourceType.TOPIC, names)


def _without_hidden_topics(
    rights: Rights, group: RequestGroup, topics: list[RequestTopics]
) -> tuple[RequestGroup, list[ResponseTopics]]:
    """Returns the request with the topics that the client may describe, and the results of the others."""
    visible = _describable(rights, [topic.name for topic in topics])
    hidden = [_empty(topic, Errors.TOPIC_AUTHORIZATION_FAILED) for topic in topics if topic.name not in visible]
    return _with_topics(group, [topic for topic in topics if topic.name in visible]), hidden


def _with_topics(group: RequestGroup, topics: list[RequestTopics]) -> RequestGroup:
    return OffsetFetchRequest.OffsetFetchRequestGroup(
        group_id=group.group_id, member_id=group.member_id, member_epoch=group.member_epoch, topics=topics
    )


def _names_for_ids(image: MetadataImage, group: RequestGroup) -> tuple[RequestGroup, list[RequestTopics]]:
    named: list[RequestTopics] = []
    unknown: list[RequestTopics] = []
    for topic in group.topics or ():
        image_topic = image.topics_by_id.get(topic.topic_id)
        if image_topic is None:
            unknown.append(topic)
        else:
            topic.name = image_topic.name
            named.append(topic)
    return _with_topics(group, named), unknown


def _ids_for_names(image: MetadataImage, answer: ResponseGroup) -> None:
    """Sets the topic ids.

    v10 identifies topics by id only, so the offsets of deleted topics are omitted, as in Kafka 4.3.1.
    """
    topics = []
    for topic in answer.topics:
        image_topic = image.topics.get(topic.name)
        if image_topic is not None:
            topic.topic_id = image_topic.id
            topics.append(topic)
    answer.topics = topics


def _empty(topic: RequestTopics, error: Errors) -> ResponseTopics:
    return OffsetFetchResponse.OffsetFetchResponseTopics(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=[
            OffsetFetchResponse.OffsetFetchResponsePartitions(
                partition_index=index,
                committed_offset=UNKNOWN_OFFSET,
                committed_leader_epoch=-1,
                metadata="",
                error_code=error,
            )
            for index in topic.partition_indexes
        ],
    )


def _failed(group: RequestGroup, error: Errors, version: int) -> ResponseGroup:
    """Returns the result of a group that failed. v1 has no error field for it, so every partition has the error."""
    if version >= FIRST_VERSION_WITH_TOP_LEVEL_ERROR:
        return OffsetFetchResponse.OffsetFetchResponseGroup(group_id=group.group_id, error_code=error)
    topics = [_empty(topic, error) for topic in group.topics or ()]
    return OffsetFetchResponse.OffsetFetchResponseGroup(group_id=group.group_id, topics=topics)


def _response(groups: list[ResponseGroup], version: int) -> OffsetFetchResponse:
    if version >= FIRST_VERSION_WITH_GROUPS:
        return OffsetFetchResponse(groups=groups)
    return OffsetFetchResponse(
        topics=[_old_topic(topic) for topic in groups[0].topics], error_code=groups[0].error_code
    )


def _old_topic(topic: ResponseTopics) -> OffsetFetchResponse.OffsetFetchResponseTopic:
    return OffsetFetchResponse.OffsetFetchResponseTopic(
        name=topic.name,
        partitions=[
            OffsetFetchResponse.OffsetFetchResponsePartition(
                partition_index=partition.partition_index,
                committed_offset=partition.committed_offset,
                committed_leader_epoch=partition.committed_leader_epoch,
                metadata=partition.metadata,
                error_code=partition.error_code,
            )
            for partition in topic.partitions
        ],
    )


def error_response(request: OffsetFetchRequest, error: KafkaError, version: int) -> OffsetFetchResponse:
    return _response([_failed(group, error.error, version) for group in _groups(request, version)], version)
