# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupHeartbeat for connections of the form `new-partitions`, a later revision of KIP-1327.

v2 is v1 with one more field: each topic of the assignment lists its partitions that are newer than the group. No
response has a creation time.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

from kcoord.metadata.image import MetadataImage
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.handlers import consumer_group_heartbeat
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatNewPartitionsResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    Message,
)

FIRST_VERSION_WITH_NEW_PARTITIONS = 2

Response: TypeAlias = ConsumerGroupHeartbeatResponse | ConsumerGroupHeartbeatNewPartitionsResponse


def handle(broker: Broker, context: RequestContext, request: ConsumerGroupHeartbeatRequest) -> Reply[Message]:
    reply = consumer_group_heartbeat.handle(broker, context, request)
    return map_reply(reply, lambda response: _in_layout_of(context.api_version, response, broker.image))


def error_response(request: ConsumerGroupHeartbeatRequest, error: KafkaError, version: int) -> Message:
    return _in_layout_of(version, consumer_group_heartbeat.error_response(request, error, version), None)


def _in_layout_of(version: int, response: ConsumerGroupHeartbeatResponse, image: MetadataImage | None) -> Response:
    if version < FIRST_VERSION_WITH_NEW_PARTITIONS:
        return response
    later = ConsumerGroupHeartbeatNewPartitionsResponse(
        throttle_time_ms=response.throttle_time_ms,
        error_code=response.error_code,
        error_message=response.error_message,
        member_id=response.member_id,
        member_epoch=response.member_epoch,
        heartbeat_interval_ms=response.heartbeat_interval_ms,
    )
    if response.assignment is not None and image is not None:
        later.assignment = _assignment(response.assignment, response.group_creation_time_ms, image)
    return later


def _assignment(
    assignment: ConsumerGroupHeartbeatResponse.Assignment, group_creation_time_ms: int, image: MetadataImage
) -> ConsumerGroupHeartbeatNewPartitionsResponse.Assignment:
    is_new = partial(_is_new, image, group_creation_time_ms)
    return ConsumerGroupHeartbeatNewPartitionsResponse.Assignment(
        topic_partitions=[
            ConsumerGroupHeartbeatNewPartitionsResponse.TopicPartitions(
                topic_id=topic.topic_id,
                partitions=topic.partitions,
                new_partitions=[partition for partition in topic.partitions if is_new(topic.topic_id, partition)],
            )
            for topic in assignment.topic_partitions
        ]
    )


def _is_new(image: MetadataImage, group_creation_time_ms: int, topic_id: bytes, partition: int) -> bool:
    """Returns whether the partition was created after the group; False if a time is unknown or the topic is deleted."""
    topic = image.topics_by_id.get(topic_id)
    if topic is None or partition >= len(topic.partitions) or group_creation_time_ms < 0:
        return False
    return topic.partitions[partition].creation_time_ms > group_creation_time_ms
