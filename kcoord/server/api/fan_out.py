# SPDX-License-Identifier: Apache-2.0
"""Requests that name several groups: one operation per shard, with the results in the order of the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord_protocol.errors import KafkaError

T = TypeVar("T")


def ask_each_shard(
    broker: Broker,
    context: RequestContext,
    group_ids: list[str],
    operation: Callable[[GroupCoordinatorShard, OperationContext, list[str]], CoordinatorResult[list[T]]],
    group_id_of: Callable[[T], str],
    failed: Callable[[str, KafkaError], T],
    *,
    repeats: bool = True,
) -> Reply[list[T]]:
    """Returns one result per group id, in the order of the request.

    A shard that cannot answer fails only its own groups. With `repeats`, an id that the request names twice gets two
    results.
    """
    by_shard: dict[int, list[str]] = {}
    distinct = list(dict.fromkeys(group_ids))
    for group_id in distinct:
        by_shard.setdefault(broker.groups.shard_of(group_id), []).append(group_id)
    replies = [_ask(broker, context, shard_id, ids, operation, failed) for shard_id, ids in by_shard.items()]

    def merge(answers: list[list[T]]) -> list[T]:
        answer_by_id = {group_id_of(answer): answer for part in answers for answer in part}
        return [answer_by_id[group_id] for group_id in (group_ids if repeats else distinct) if group_id in answer_by_id]

    return map_reply(gather_replies(replies), merge)


def _ask(
    broker: Broker,
    context: RequestContext,
    shard_id: int,
    group_ids: list[str],
    operation: Callable[[GroupCoordinatorShard, OperationContext, list[str]], CoordinatorResult[list[T]]],
    failed: Callable[[str, KafkaError], T],
) -> Reply[list[T]]:
    def on_error(error: KafkaError) -> list[T]:
        return [failed(group_id, error) for group_id in group_ids]

    try:
        reply = broker.groups.call_shard(shard_id, operation, group_ids, context.operation_context())
    except KafkaError as error:
        return on_error(error)
    return map_reply(reply, lambda answers: answers, on_error)
