# SPDX-License-Identifier: Apache-2.0
"""OffsetDelete (KIP-496): unknown topics and partitions are answered here from the metadata image, the rest by the
group's shard.
"""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.server.api.replies import Reply, map_reply
from kcoord.server.api.request_context import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetDeleteRequest, OffsetDeleteResponse

Topics = list[OffsetDeleteResponse.OffsetDeleteResponseTopic]

API_KEY = ApiKey.OFFSET_DELETE
VERSIONS = range(0, 1)


def handle(broker: Broker, context: RequestContext, request: OffsetDeleteRequest) -> Reply[OffsetDeleteResponse]:
    unknown = _take_unknown(broker.image, request)

    def merge(response: OffsetDeleteResponse) -> OffsetDeleteResponse:
        return response if response.error_code else _merge(unknown, response)

    reply = broker.groups.call(
        request.group_id, GroupCoordinatorShard.delete_offsets, request, context.operation_context()
    )
    return map_reply(reply, merge)


def _take_unknown(image: MetadataImage, request: OffsetDeleteRequest) -> Topics:
    """Removes what the image does not know from the request and returns its answers."""
    unknown: Topics = []
    known = []
    for topic in request.topics:
        image_topic = image.topics.get(topic.name)
        count = len(image_topic.partitions) if image_topic is not None else 0
        missing = [p.partition_index for p in topic.partitions if not 0 <= p.partition_index < count]
        if missing or image_topic is None:
            # Kafka names an unknown topic also if the request names no partition of it.
            unknown.append(_topic(topic.name, missing, Errors.UNKNOWN_TOPIC_OR_PARTITION))
            topic.partitions = [p for p in topic.partitions if 0 <= p.partition_index < count]
        if topic.partitions:
            known.append(topic)
    request.topics = known
    return unknown


def _topic(name: str, partitions: list[int], error: Errors) -> OffsetDeleteResponse.OffsetDeleteResponseTopic:
    return OffsetDeleteResponse.OffsetDeleteResponseTopic(
        name=name,
        partitions=[
            OffsetDeleteResponse.OffsetDeleteResponsePartition(partition_index=index, error_code=error)
            for index in partitions
        ],
    )


def _merge(unknown: Topics, response: OffsetDeleteResponse) -> OffsetDeleteResponse:
    topics = {topic.name: topic for topic in unknown}
    for topic in response.topics:
        if topic.name in topics:
            topics[topic.name].partitions.extend(topic.partitions)
        else:
            topics[topic.name] = topic
    response.topics = list(topics.values())
    return response


def error_response(request: OffsetDeleteRequest, error: KafkaError, version: int) -> OffsetDeleteResponse:
    return OffsetDeleteResponse(error_code=error.error)
