# SPDX-License-Identifier: Apache-2.0
"""OffsetCommit: rejects unknown topics and partitions, and passes the rest to the group's shard.

A request without any known partition does not reach the coordinator, so its group and member are not checked. This was
observed in Kafka 4.3.1, which serves versions 2 to 10. v1 has a commit time for each offset (KIP-211). v10 has topic
ids, which are mapped to names here.
"""

from __future__ import annotations

from copy import copy

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.split_topics import merge, name_topics, split_topics
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetCommitRequest, OffsetCommitResponse

RequestTopic = OffsetCommitRequest.OffsetCommitRequestTopic
ResponseTopic = OffsetCommitResponse.OffsetCommitResponseTopic

API_KEY = ApiKey.OFFSET_COMMIT
VERSIONS = range(1, 11)

FIRST_VERSION_WITH_TOPIC_IDS = 10


def handle(broker: Broker, context: RequestContext, request: OffsetCommitRequest) -> Reply[OffsetCommitResponse]:
    if context.rights is not None:
        context.rights.require(AclOperation.READ, ResourceType.GROUP, request.group_id)
    by_id = context.api_version >= FIRST_VERSION_WITH_TOPIC_IDS
    if by_id:
        name_topics(broker.image, request.topics)
    accepted, refused = split_topics(broker.image, request.topics, _answer, by_id=by_id, rights=context.rights)
    if not accepted:
        return OffsetCommitResponse(topics=refused)
    if not refused:
        return _commit(broker, context, request)
    rest = copy(request)
    rest.topics = accepted

    def complete(response: OffsetCommitResponse) -> OffsetCommitResponse:
        return OffsetCommitResponse(topics=merge(refused, response.topics, lambda topic: (topic.name, topic.topic_id)))

    def on_error(error: KafkaError) -> OffsetCommitResponse:
        return complete(error_response(rest, error, context.api_version))

    try:
        return map_reply(_commit(broker, context, rest), complete, on_error)
    except KafkaError as error:
        return on_error(error)


def _commit(broker: Broker, context: RequestContext, request: OffsetCommitRequest) -> Reply[OffsetCommitResponse]:
    return broker.groups.call(
        request.group_id, GroupCoordinatorShard.commit_offset, request, context.operation_context()
    )


def _answer(topic: RequestTopic, partitions: list[int], error: Errors) -> ResponseTopic:
    return OffsetCommitResponse.OffsetCommitResponseTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=[
            OffsetCommitResponse.OffsetCommitResponsePartition(partition_index=index, error_code=error)
            for index in partitions
        ],
    )


def error_response(request: OffsetCommitRequest, error: KafkaError, version: int) -> OffsetCommitResponse:
    code = Errors.INVALID_COMMIT_OFFSET_SIZE if error.error is Errors.MESSAGE_TOO_LARGE else error.error
    return OffsetCommitResponse(
        topics=[_answer(topic, [p.partition_index for p in topic.partitions], code) for topic in request.topics]
    )
