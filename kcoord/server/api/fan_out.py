# SPDX-License-Identifier: Apache-2.0
"""Requests to several shards of a coordinator: such a request names groups, or lists what all shards have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord_protocol.errors import KafkaError

T = TypeVar("T")

GROUPS_PER_TURN: Final = 50
"""A request that names more groups takes several turns of the event loop, and several operations."""
LISTED_PER_TURN: Final = 2_000


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

    def ask(shard_id: int, ids: list[str]) -> Reply[list[T]]:
        return _ask(broker, context, shard_id, ids, operation, failed)

    async def ask_in_turns() -> list[list[T]]:
        replies = []
        for shard_id, ids in by_shard.items():
            for start in range(0, len(ids), GROUPS_PER_TURN):
                replies.append(ask(shard_id, ids[start : start + GROUPS_PER_TURN]))
                await asyncio.sleep(0)
        answers = gather_replies(replies)
        return await answers if asyncio.isfuture(answers) else answers

    def merge(answers: list[list[T]]) -> list[T]:
        answer_by_id = {group_id_of(answer): answer for part in answers for answer in part}
        return [answer_by_id[group_id] for group_id in (group_ids if repeats else distinct) if group_id in answer_by_id]

    if len(distinct) > GROUPS_PER_TURN:
        return map_reply(broker.spawn(ask_in_turns()), merge)
    return map_reply(gather_replies([ask(shard_id, ids) for shard_id, ids in by_shard.items()]), merge)


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


async def list_in_turns(
    shard_ids: Iterable[int],
    ids_of: Callable[[int], Reply[list[str]]],
    list_some: Callable[[int, list[str]], Reply[list[T]]],
) -> list[list[T]]:
    """Returns what each shard lists. Each list takes several turns, so ids may come and go meanwhile, as in Kafka.

    `ids_of` returns all ids of a shard, and `list_some` lists those of a shard that still exist.
    """
    parts: list[list[T]] = []
    for shard_id in list(shard_ids):
        ids = await _soon(ids_of(shard_id))
        part: list[T] = []
        for start in range(0, len(ids), LISTED_PER_TURN):
            listed = await _soon(list_some(shard_id, ids[start : start + LISTED_PER_TURN]))
            part += listed
            await asyncio.sleep(0)
        parts.append(part)
    return parts


async def _soon(reply: Reply[T]) -> T:
    return await reply if asyncio.isfuture(reply) else reply
