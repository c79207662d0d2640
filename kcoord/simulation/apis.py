# SPDX-License-Identifier: Apache-2.0
"""The APIs that model clients use, from bytes to an operation on a shard and back; handlers of the server do the same.

Requests of transactions need both coordinators: those are in `transactions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.simulation.network import Request
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    Message,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)

HEARTBEAT_VERSION: Final = 1
OFFSET_COMMIT_VERSION: Final = 9
OFFSET_FETCH_VERSION: Final = 9

Operation: TypeAlias = Callable[[GroupCoordinatorShard, OperationContext], CoordinatorResult[object]]


@dataclass(slots=True)
class Api:
    """`operation` is what a request asks of its group's shard; `response` and `failed` make the answer of its value or
    error.
    """

    request: type[Message]
    operation: Callable[[Message], Operation]
    response: Callable[[object, int], Message]
    failed: Callable[[Message, KafkaError], Message]


def operation_of(request: Request, message: Message) -> Operation:
    """What the request asks of a shard."""
    return APIS[request.api_key].operation(message)


def response_of(request: Request, message: Message, value: object) -> Message:
    """The answer to a request, of what its operation returned or raised."""
    api = APIS[request.api_key]
    if isinstance(value, KafkaError):
        return api.failed(message, value)
    return api.response(value, request.api_version)


def _call(name: str) -> Callable[[Message], Operation]:
    """The operation that takes the whole request."""

    def operation(message: Message) -> Operation:
        return cast("Operation", lambda shard, context: getattr(shard, name)(context, message))

    return operation


def _commit_failed(message: Message, error: KafkaError) -> Message:
    assert isinstance(message, OffsetCommitRequest)
    return OffsetCommitResponse(topics=[_failed_topic(topic, error) for topic in message.topics])


def _failed_topic(
    topic: OffsetCommitRequest.OffsetCommitRequestTopic, error: KafkaError
) -> OffsetCommitResponse.OffsetCommitResponseTopic:
    partitions = [
        OffsetCommitResponse.OffsetCommitResponsePartition(
            partition_index=partition.partition_index, error_code=error.error
        )
        for partition in topic.partitions
    ]
    return OffsetCommitResponse.OffsetCommitResponseTopic(name=topic.name, partitions=partitions)


def _fetch(message: Message) -> Operation:
    assert isinstance(message, OffsetFetchRequest)
    group, stable = message.groups[0], message.require_stable
    return cast("Operation", lambda shard, context: shard.fetch_offsets(context, group, stable))


def _fetch_failed(message: Message, error: KafkaError) -> Message:
    assert isinstance(message, OffsetFetchRequest)
    group = OffsetFetchResponse.OffsetFetchResponseGroup(group_id=message.groups[0].group_id, error_code=error.error)
    return OffsetFetchResponse(groups=[group])


def _join_response(value: object, version: int) -> Message:
    assert isinstance(value, JoinGroupResponse)
    if version < 7 and value.protocol_name is None:
        value.protocol_name = ""
    return value


def _list(message: Message) -> Operation:
    assert isinstance(message, ListGroupsRequest)
    states, types = message.states_filter, message.types_filter
    return cast("Operation", lambda shard, context: shard.list_groups(context, states, types))


def _describe(message: Message) -> Operation:
    assert isinstance(message, ConsumerGroupDescribeRequest)
    return cast("Operation", lambda shard, context: shard.consumer_group_describe(context, message.group_ids))


def _describe_classic(message: Message) -> Operation:
    assert isinstance(message, DescribeGroupsRequest)
    return cast("Operation", lambda shard, context: shard.describe_groups(context, message.groups))


def _delete(message: Message) -> Operation:
    assert isinstance(message, DeleteGroupsRequest)
    return cast("Operation", lambda shard, context: shard.delete_groups(context, message.groups_names))


def _delete_failed(message: Message, error: KafkaError) -> Message:
    assert isinstance(message, DeleteGroupsRequest)
    results = [
        DeleteGroupsResponse.DeletableGroupResult(group_id=group_id, error_code=error.error)
        for group_id in message.groups_names
    ]
    return DeleteGroupsResponse(results=results)


def _join_failed(message: Message, error: KafkaError) -> Message:
    return JoinGroupResponse(error_code=error.error, generation_id=-1, protocol_name="", member_id="")


def _heartbeat_failed(message: Message, error: KafkaError) -> Message:
    return ConsumerGroupHeartbeatResponse(error_code=error.error, error_message=error.message)


def _code(response: type[Message]) -> Callable[[Message, KafkaError], Message]:
    """An answer that is its error code and nothing else."""
    return lambda message, error: response(error_code=error.error)


def _as_it_is(value: object, version: int) -> Message:
    return cast("Message", value)


def _in(response: type[Message], field: str) -> Callable[[object, int], Message]:
    return lambda value, version: response(**{field: value})


def _one_group(value: object, version: int) -> Message:
    return OffsetFetchResponse(groups=[cast("OffsetFetchResponse.OffsetFetchResponseGroup", value)])


APIS: Final[Mapping[ApiKey, Api]] = {
    ApiKey.CONSUMER_GROUP_HEARTBEAT: Api(
        ConsumerGroupHeartbeatRequest, _call("consumer_group_heartbeat"), _as_it_is, _heartbeat_failed
    ),
    ApiKey.JOIN_GROUP: Api(JoinGroupRequest, _call("join_group"), _join_response, _join_failed),
    ApiKey.SYNC_GROUP: Api(SyncGroupRequest, _call("sync_group"), _as_it_is, _code(SyncGroupResponse)),
    ApiKey.HEARTBEAT: Api(HeartbeatRequest, _call("heartbeat"), _as_it_is, _code(HeartbeatResponse)),
    ApiKey.LEAVE_GROUP: Api(LeaveGroupRequest, _call("leave_group"), _as_it_is, _code(LeaveGroupResponse)),
    ApiKey.OFFSET_COMMIT: Api(OffsetCommitRequest, _call("commit_offset"), _as_it_is, _commit_failed),
    ApiKey.OFFSET_FETCH: Api(OffsetFetchRequest, _fetch, _one_group, _fetch_failed),
    ApiKey.OFFSET_DELETE: Api(OffsetDeleteRequest, _call("delete_offsets"), _as_it_is, _code(OffsetDeleteResponse)),
    ApiKey.DELETE_GROUPS: Api(DeleteGroupsRequest, _delete, _in(DeleteGroupsResponse, "results"), _delete_failed),
    ApiKey.LIST_GROUPS: Api(ListGroupsRequest, _list, _in(ListGroupsResponse, "groups"), _code(ListGroupsResponse)),
    ApiKey.CONSUMER_GROUP_DESCRIBE: Api(
        ConsumerGroupDescribeRequest,
        _describe,
        _in(ConsumerGroupDescribeResponse, "groups"),
        lambda message, error: ConsumerGroupDescribeResponse(),
    ),
    ApiKey.DESCRIBE_GROUPS: Api(
        DescribeGroupsRequest,
        _describe_classic,
        _in(DescribeGroupsResponse, "groups"),
        lambda message, error: DescribeGroupsResponse(),
    ),
}
