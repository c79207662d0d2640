# SPDX-License-Identifier: Apache-2.0
"""OffsetDelete (KIP-496): rejects unknown topics and partitions, and passes the rest to the group's shard."""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.split_topics import merge, split_topics
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetDeleteRequest, OffsetDeleteResponse

API_KEY = ApiKey.OFFSET_DELETE
VERSIONS = range(0, 1)


def handle(broker: Broker, context: RequestContext, request: OffsetDeleteRequest) -> Reply[OffsetDeleteResponse]:
    if context.rights is not None:
        context.rights.require(AclOperation.DELETE, ResourceType.GROUP, request.group_id)
    # Kafka's response has an unknown topic also if the request names no partitions for it.
    request.topics, unknown = split_topics(broker.image, request.topics, _answer, rights=context.rights)

    def complete(response: OffsetDeleteResponse) -> OffsetDeleteResponse:
        if not response.error_code:
            response.topics = merge(unknown, response.topics, lambda topic: topic.name)
        return response

    reply = broker.groups.call(
        request.group_id, GroupCoordinatorShard.delete_offsets, request, context.operation_context()
    )
    return map_reply(reply, complete)


def _answer(
    topic: OffsetDeleteRequest.OffsetDeleteRequestTopic, partitions: list[int], error: Errors
) -> OffsetDeleteResponse.OffsetDeleteResponseTopic:
    return OffsetDeleteResponse.OffsetDeleteResponseTopic(
        name=topic.name,
        partitions=[
            OffsetDeleteResponse.OffsetDeleteResponsePartition(partition_index=index, error_code=error)
            for index in partitions
        ],
    )


def error_response(request: OffsetDeleteRequest, error: KafkaError, version: int) -> OffsetDeleteResponse:
    return OffsetDeleteResponse(error_code=error.error)
