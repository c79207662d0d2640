# SPDX-License-Identifier: Apache-2.0
"""OffsetCommit: topic ids become names (v10), what the metadata image does not know is answered here, the rest by the
group's shard.

A request without any known partition never reaches the coordinator, so its group and member are not checked: observed
in Kafka 4.3.1, which serves versions 2 to 10. Version 1 is KIP-211's: it brings a commit time for each offset.
"""

from __future__ import annotations

from copy import copy

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.known_partitions import merge, split_topics
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetCommitRequest, OffsetCommitResponse

RequestTopic = OffsetCommitRequest.OffsetCommitRequestTopic
ResponseTopic = OffsetCommitResponse.OffsetCommitResponseTopic

API_KEY = ApiKey.OFFSET_COMMIT
VERSIONS = range(1, 11)

FIRST_VERSION_WITH_TOPIC_IDS = 10


def handle(broker: Broker, context: RequestContext, request: OffsetCommitRequest) -> Reply[OffsetCommitResponse]:
    by_id = context.api_version >= FIRST_VERSION_WITH_TOPIC_IDS
    known, refused = split_topics(broker.image, request.topics, _answer, by_id=by_id)
    if not known:
        return OffsetCommitResponse(topics=refused)
    if not refused:
        return _commit(broker, context, request)
    rest = copy(request)
    rest.topics = known

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
