# SPDX-License-Identifier: Apache-2.0
"""APIs of groups whose requests wait until their groups are loaded and imported (`kcoord.upstream.group_imports`).

If a request names several groups, a group that cannot be imported fails alone. The handler answers for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from copy import copy
from typing import Final

from kcoord.server.api.api_table import Api, ErrorFunction, HandleFunction, RequestContext
from kcoord.server.broker import Broker
from kcoord.upstream.group_imports import GroupImports
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    JoinGroupRequest,
    Message,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    TxnOffsetCommitRequest,
)

IMPORTING_APIS: Final = frozenset(
    {
        ApiKey.FIND_COORDINATOR,
        ApiKey.JOIN_GROUP,
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        ApiKey.OFFSET_COMMIT,
        ApiKey.OFFSET_FETCH,
        ApiKey.OFFSET_DELETE,
        ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.DESCRIBE_GROUPS,
        ApiKey.CONSUMER_GROUP_DESCRIBE,
        ApiKey.DELETE_GROUPS,
    }
)
"""The APIs of groups, without those that only members use: their responses do not depend on offsets, and a group
without members has no such member.
"""
_GROUP: Final = 0
"""The type of groups in FindCoordinator."""


class ImportingApi(Api):
    """An API that imports the groups of its requests before its handler."""

    __slots__ = ("_api", "_imports")

    def __init__(self, api: Api, imports: GroupImports) -> None:
        super().__init__(api.key, api.versions)
        self._api = api
        self._imports = imports

    def functions(self) -> tuple[HandleFunction, ErrorFunction]:
        handle, error_response = self._api.functions()
        imports = self._imports

        def importing(broker: Broker, context: RequestContext, request: Message) -> object:
            due = [
                group_id
                for group_id in _group_ids(request)
                if imports.must_wait(group_id, creates=_creates(request)) and _may_describe(context, group_id)
            ]
            if not due:
                return handle(broker, context, request)
            return broker.spawn(after_import(broker, context, request, due))

        async def after_import(broker: Broker, context: RequestContext, request: Message, due: list[str]) -> object:
            with imports.waiting(due):
                failures = await _settle(imports, request, due)
                left = [group_id for group_id in _group_ids(request) if group_id not in failures]
                if not left:
                    raise next(iter(failures.values()))
                context.now_ms = broker.now_ms()
                reply = handle(broker, context, _only(request, left) if failures else request)
            response = await reply if asyncio.isfuture(reply) else reply
            for group_id, failure in failures.items():
                _add(response, error_response(_only(request, [group_id]), failure, context.api_version))
            return response

        return importing, error_response


async def _settle(imports: GroupImports, request: Message, due: list[str]) -> Mapping[str, KafkaError]:
    """Imports the groups. Returns the errors of those that cannot be imported."""
    steps = [imports.settle(group_id, creates=_creates(request)) for group_id in due]
    failures: dict[str, KafkaError] = {}
    for group_id, failure in zip(due, await asyncio.gather(*steps, return_exceptions=True), strict=True):
        if isinstance(failure, KafkaError):
            if isinstance(request, FindCoordinatorRequest):
                failure = KafkaError(Errors.COORDINATOR_NOT_AVAILABLE, failure.message)
            failures[group_id] = failure
        elif failure is not None:
            raise failure
    return failures


def _may_describe(context: RequestContext, group_id: str) -> bool:
    """Returns whether the client may know of the group. If not, the handler rejects the request."""
    rights = context.rights
    return rights is None or rights.allows(AclOperation.DESCRIBE, ResourceType.GROUP, group_id, logs_denial=False)


def _creates(request: Message) -> bool:
    """Returns whether a request may create its group."""
    return isinstance(
        request, ConsumerGroupHeartbeatRequest | JoinGroupRequest | OffsetCommitRequest | TxnOffsetCommitRequest
    )


def _group_ids(request: Message) -> list[str]:
    """Returns the groups that a request names."""
    match request:
        case FindCoordinatorRequest():
            keys = request.coordinator_keys or [request.key]
            return list(dict.fromkeys(keys)) if request.key_type == _GROUP else []
        case OffsetFetchRequest() if request.groups:
            return list(dict.fromkeys(group.group_id for group in request.groups))
        case DescribeGroupsRequest():
            return list(dict.fromkeys(request.groups))
        case ConsumerGroupDescribeRequest():
            return list(dict.fromkeys(request.group_ids))
        case DeleteGroupsRequest():
            return list(dict.fromkeys(request.groups_names))
        case (
            OffsetFetchRequest()
            | JoinGroupRequest()
            | ConsumerGroupHeartbeatRequest()
            | OffsetCommitRequest()
            | OffsetDeleteRequest()
            | TxnOffsetCommitRequest()
        ):
            return [request.group_id]
    raise AssertionError(f"{request.message_name} names no groups")


def _only(request: Message, group_ids: Collection[str]) -> Message:
    """Returns a request about several groups for these groups only."""
    part = copy(request)
    match part:
        case FindCoordinatorRequest():
            part.coordinator_keys = [key for key in part.coordinator_keys if key in group_ids]
        case OffsetFetchRequest():
            part.groups = [group for group in part.groups if group.group_id in group_ids]
        case DescribeGroupsRequest():
            part.groups = [group_id for group_id in part.groups if group_id in group_ids]
        case ConsumerGroupDescribeRequest():
            part.group_ids = [group_id for group_id in part.group_ids if group_id in group_ids]
        case DeleteGroupsRequest():
            part.groups_names = [group_id for group_id in part.groups_names if group_id in group_ids]
    return part


def _add(response: object, failed: Message) -> None:
    """Adds the results of groups that failed to a response about several groups."""
    match response, failed:
        case FindCoordinatorResponse(), FindCoordinatorResponse():
            response.coordinators += failed.coordinators
        case OffsetFetchResponse(), OffsetFetchResponse():
            response.groups += failed.groups
        case DescribeGroupsResponse(), DescribeGroupsResponse():
            response.groups += failed.groups
        case ConsumerGroupDescribeResponse(), ConsumerGroupDescribeResponse():
            response.groups += failed.groups
        case DeleteGroupsResponse(), DeleteGroupsResponse():
            response.results += failed.results
        case _:
            raise AssertionError(f"{failed.message_name} has no list of groups")
