# SPDX-License-Identifier: Apache-2.0
"""OffsetCommit: topic ids become names (v10), what the metadata image does not know is answered here, the rest by the
group's shard.

A request without any known partition never reaches the coordinator, so its group and member are not checked: observed
in Kafka 4.3.1, which serves versions 2 to 10. Version 1 is KIP-211's: it brings a commit time for each offset.
"""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.server.api.replies import Reply, map_reply
from kcoord.server.api.request_context import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetCommitRequest, OffsetCommitResponse

RequestTopic = OffsetCommitRequest.OffsetCommitRequestTopic
ResponseTopic = OffsetCommitResponse.OffsetCommitResponseTopic

API_KEY = ApiKey.OFFSET_COMMIT
VERSIONS = range(1, 11)

FIRST_VERSION_WITH_TOPIC_IDS = 10


def handle(broker: Broker, context: RequestContext, request: OffsetCommitRequest) -> Reply[OffsetCommitResponse]:
    if context.api_version >= FIRST_VERSION_WITH_TOPIC_IDS:
        _fill_names(broker.image, request)
    known, refused = _split(broker.image, request, by_id=context.api_version >= FIRST_VERSION_WITH_TOPIC_IDS)
    if not known:
        return OffsetCommitResponse(topics=refused)
    if not refused:
        return _commit(broker, context, request)
    rest = _with_topics(request, known)

    def merge(response: OffsetCommitResponse) -> OffsetCommitResponse:
        return OffsetCommitResponse(topics=_merge(refused, response.topics))

    def on_error(error: KafkaError) -> OffsetCommitResponse:
        return merge(error_response(rest, error, context.api_version))

    try:
        return map_reply(_commit(broker, context, rest), merge, on_error)
    except KafkaError as error:
        return on_error(error)


def _commit(broker: Broker, context: RequestContext, request: OffsetCommitRequest) -> Reply[OffsetCommitResponse]:
    return broker.groups.call(
        request.group_id, GroupCoordinatorShard.commit_offset, request, context.operation_context()
    )


def _fill_names(image: MetadataImage, request: OffsetCommitRequest) -> None:
    for topic in request.topics:
        image_topic = image.topics_by_id.get(topic.topic_id)
        topic.name = image_topic.name if image_topic is not None else ""


def _split(
    image: MetadataImage, request: OffsetCommitRequest, *, by_id: bool
) -> tuple[list[RequestTopic], list[ResponseTopic]]:
    """What the coordinator may store, and the answers for the rest."""
    known: list[RequestTopic] = []
    refused: list[ResponseTopic] = []
    for topic in request.topics:
        image_topic = image.topics.get(topic.name)
        if image_topic is None:
            error = Errors.UNKNOWN_TOPIC_ID if by_id and not topic.name else Errors.UNKNOWN_TOPIC_OR_PARTITION
            refused.append(_answer(topic, [p.partition_index for p in topic.partitions], error))
            continue
        count = len(image_topic.partitions)
        missing = [p.partition_index for p in topic.partitions if not 0 <= p.partition_index < count]
        if missing:
            refused.append(_answer(topic, missing, Errors.UNKNOWN_TOPIC_OR_PARTITION))
            topic = _with_partitions(topic, [p for p in topic.partitions if 0 <= p.partition_index < count])
        if topic.partitions:
            known.append(topic)
    return known, refused


def _with_partitions(
    topic: RequestTopic, partitions: list[OffsetCommitRequest.OffsetCommitRequestPartition]
) -> RequestTopic:
    return OffsetCommitRequest.OffsetCommitRequestTopic(name=topic.name, topic_id=topic.topic_id, partitions=partitions)


def _with_topics(request: OffsetCommitRequest, topics: list[RequestTopic]) -> OffsetCommitRequest:
    return OffsetCommitRequest(
        group_id=request.group_id,
        generation_id_or_member_epoch=request.generation_id_or_member_epoch,
        member_id=request.member_id,
        group_instance_id=request.group_instance_id,
        retention_time_ms=request.retention_time_ms,
        topics=topics,
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


def _merge(refused: list[ResponseTopic], answered: list[ResponseTopic]) -> list[ResponseTopic]:
    merged = {(topic.name, topic.topic_id): topic for topic in refused}
    for topic in answered:
        present = merged.get((topic.name, topic.topic_id))
        if present is None:
            merged[topic.name, topic.topic_id] = topic
        else:
            present.partitions.extend(topic.partitions)
    return list(merged.values())


def success_response(request: OffsetCommitRequest) -> OffsetCommitResponse:
    """Everything was committed."""
    return error_response(request, KafkaError(Errors.NONE), FIRST_VERSION_WITH_TOPIC_IDS)


def error_response(request: OffsetCommitRequest, error: KafkaError, version: int) -> OffsetCommitResponse:
    code = Errors.INVALID_COMMIT_OFFSET_SIZE if error.error is Errors.MESSAGE_TOO_LARGE else error.error
    return OffsetCommitResponse(
        topics=[_answer(topic, [p.partition_index for p in topic.partitions], code) for topic in request.topics]
    )
