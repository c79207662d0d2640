# SPDX-License-Identifier: Apache-2.0
"""OffsetFetch: one group (v1-v7) or several (v8+); topic ids become names and back (v10). Each group's shard answers
for itself.

The coordinator is always asked in the form of v8+, so that there is one way through the core.
"""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
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
    unknown: list[RequestTopics] = []
    if by_id and group.topics is not None:
        asked, unknown = _names_for_ids(broker.image, group)

    def operation(
        shard: GroupCoordinatorShard, operation_context: OperationContext, asked: RequestGroup
    ) -> CoordinatorResult[ResponseGroup]:
        return shard.fetch_offsets(operation_context, asked, require_stable)

    def finish(answer: ResponseGroup) -> ResponseGroup:
        if by_id:
            _ids_for_names(broker.image, answer)
        if answer.error_code:
            return _failed(group, Errors(answer.error_code), version)
        answer.topics.extend(_empty(topic, Errors.UNKNOWN_TOPIC_ID) for topic in unknown)
        return answer

    def on_error(error: KafkaError) -> ResponseGroup:
        return _failed(group, error.error, version)

    try:
        reply = broker.groups.call(group.group_id, operation, asked, context.operation_context())
        return map_reply(reply, finish, on_error)
    except KafkaError as error:
        return on_error(error)


def _names_for_ids(image: MetadataImage, group: RequestGroup) -> tuple[RequestGroup, list[RequestTopics]]:
    known: list[RequestTopics] = []
    unknown: list[RequestTopics] = []
    for topic in group.topics or ():
        image_topic = image.topics_by_id.get(topic.topic_id)
        if image_topic is None:
            unknown.append(topic)
        else:
            topic.name = image_topic.name
            known.append(topic)
    asked = OffsetFetchRequest.OffsetFetchRequestGroup(
        group_id=group.group_id, member_id=group.member_id, member_epoch=group.member_epoch, topics=known
    )
    return asked, unknown


def _ids_for_names(image: MetadataImage, answer: ResponseGroup) -> None:
    """Offsets of a topic that is gone have no id to be told by: they are left out, as in Kafka 4.3.1."""
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
    """A failed group has no topics, but v1, which has no error of its own, tells it in every partition."""
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
