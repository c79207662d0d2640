# SPDX-License-Identifier: Apache-2.0
"""Requests that take several turns of the event loop, because they name or list many things.

Most are requests to several shards of a coordinator: they name ids, or list what all shards have. The ids are those of
groups, or transactional ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from kcoord.metadata.delta import CoordinatorMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord.server.shards.shard_service import ShardService
from kcoord_protocol.errors import KafkaError

C = TypeVar("C", bound=CoordinatorMachine)
T = TypeVar("T")

NAMED_PER_TURN: Final = 50
"""A request that names more ids takes several turns of the event loop, and several operations."""
LISTED_PER_TURN: Final = 2_000
"""The number of ids that are listed, or assigned to their shards, in one turn."""


def ask_each_shard(
    broker: Broker,
    service: ShardService[C],
    context: RequestContext,
    ids: list[str],
    operation: Callable[[C, OperationContext, list[str]], CoordinatorResult[list[T]]],
    id_of: Callable[[T], str],
    failed: Callable[[str, KafkaError], T],
    *,
    repeats: bool = True,
) -> Reply[list[T]]:
    """Returns one result per id, in the order of the request.

    A shard that cannot answer fails only its own ids. With `repeats`, an id that the request names twice gets two
    results.
    """
    by_shard: dict[int, list[str]] = {}
    distinct = list(dict.fromkeys(ids))

    def assign(some: list[str]) -> None:
        for key in some:
            by_shard.setdefault(service.shard_of(key), []).append(key)

    def ask(shard_id: int, some: list[str]) -> Reply[list[T]]:
        return _ask(service, context, shard_id, some, operation, failed)

    async def ask_in_turns() -> list[list[T]]:
        for start in range(0, len(distinct), LISTED_PER_TURN):
            assign(distinct[start : start + LISTED_PER_TURN])
            await asyncio.sleep(0)
        replies = []
        for shard_id, of_shard in by_shard.items():
            for start in range(0, len(of_shard), NAMED_PER_TURN):
                replies.append(ask(shard_id, of_shard[start : start + NAMED_PER_TURN]))
                await asyncio.sleep(0)
        answers = gather_replies(replies)
        return await answers if asyncio.isfuture(answers) else answers

    def merge(answers: list[list[T]]) -> list[T]:
        answer_by_id = {id_of(answer): answer for part in answers for answer in part}
        return [answer_by_id[key] for key in (ids if repeats else distinct) if key in answer_by_id]

    if len(distinct) > NAMED_PER_TURN:
        return map_reply(broker.spawn(ask_in_turns()), merge)
    assign(distinct)
    return map_reply(gather_replies([ask(shard_id, of_shard) for shard_id, of_shard in by_shard.items()]), merge)


def _ask(
    service: ShardService[C],
    context: RequestContext,
    shard_id: int,
    ids: list[str],
    operation: Callable[[C, OperationContext, list[str]], CoordinatorResult[list[T]]],
    failed: Callable[[str, KafkaError], T],
) -> Reply[list[T]]:
    def on_error(error: KafkaError) -> list[T]:
        return [failed(key, error) for key in ids]

    try:
        reply = service.call_shard(shard_id, operation, ids, context.operation_context())
    except KafkaError as error:
        return on_error(error)
    return map_reply(reply, lambda answers: answers, on_error)


def filled(broker: Broker, response: T, steps: Iterator[object]) -> Reply[T]:
    """Returns the response when all steps have filled it. Each step but the first has a turn of its own."""

    async def fill_in_turns() -> T:
        for _ in steps:
            await asyncio.sleep(0)
        return response

    return broker.spawn(fill_in_turns()) if next(steps, None) is not None else response


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
