# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupDescribe (KIP-848): asks each group's shard and answers in the order of the request; v2 adds KIP-1327's
creation time. Connections of the form `creation-time` get it in v1, too, as a tagged field of each group.
"""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext, creation_time_tag, has_creation_time_tag
from kcoord.server.api.fan_out import ask_each_shard
from kcoord.server.api.handlers.consumer_group_heartbeat import check_consumer_protocol
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse

DescribedGroup = ConsumerGroupDescribeResponse.DescribedGroup

API_KEY = ApiKey.CONSUMER_GROUP_DESCRIBE
VERSIONS = range(0, 3)

GROUP_OPERATIONS = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
"""READ, DELETE, DESCRIBE, DESCRIBE_CONFIGS and ALTER_CONFIGS: all that a group knows, which is what everybody may
without an authorizer.
"""


def handle(
    broker: Broker, context: RequestContext, request: ConsumerGroupDescribeRequest
) -> Reply[ConsumerGroupDescribeResponse]:
    check_consumer_protocol(broker)

    def failed(group_id: str, error: KafkaError) -> DescribedGroup:
        return ConsumerGroupDescribeResponse.DescribedGroup(
            group_id=group_id, error_code=error.error, error_message=error.message
        )

    def respond(groups: list[DescribedGroup]) -> ConsumerGroupDescribeResponse:
        if request.include_authorized_operations:
            for group in groups:
                if group.error_code == 0:
                    group.authorized_operations = GROUP_OPERATIONS
        if has_creation_time_tag(context):
            for group in groups:
                group.unknown_tagged_fields = creation_time_tag(group.group_creation_time_ms)
        return ConsumerGroupDescribeResponse(groups=groups)

    answers = ask_each_shard(
        broker,
        context,
        request.group_ids,
        GroupCoordinatorShard.consumer_group_describe,
        lambda group: group.group_id,
        failed,
    )
    return map_reply(answers, respond)


def error_response(
    request: ConsumerGroupDescribeRequest, error: KafkaError, version: int
) -> ConsumerGroupDescribeResponse:
    return ConsumerGroupDescribeResponse(
        groups=[
            ConsumerGroupDescribeResponse.DescribedGroup(
                group_id=group_id, error_code=error.error, error_message=error.message
            )
            for group_id in request.group_ids
        ]
    )
