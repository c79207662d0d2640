# SPDX-License-Identifier: Apache-2.0
"""Replies: responses that are ready now, or futures of responses.

Most requests are answered in the turn of the event loop in which they arrive. So a handler returns a plain response. It
returns a future only if the response has to wait for the disk, another member or another worker. The functions here
accept both, and make no future if the response is ready.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar, cast, overload

from kcoord.runtime.result import OperationContext
from kcoord_protocol.errors import KafkaError

T = TypeVar("T")
U = TypeVar("U")

reply_tokens: Final = itertools.count(1)
"""Unique tokens of operations. The runtime keeps a deferred reply under the token of its operation."""

Reply: TypeAlias = T | asyncio.Future[T]
"""A response, or a future of a response."""


def internal_operation_context(now_ms: int) -> OperationContext:
    """Returns the context of an operation that no client requested."""
    return OperationContext(now_ms=now_ms, token=next(reply_tokens))


@overload
def map_reply(
    reply: asyncio.Future[T], function: Callable[[T], U], on_error: Callable[[KafkaError], U] | None = None
) -> asyncio.Future[U]: ...


@overload
def map_reply(
    reply: Reply[T], function: Callable[[T], U], on_error: Callable[[KafkaError], U] | None = None
) -> Reply[U]: ...


def map_reply(
    reply: Reply[T], function: Callable[[T], U], on_error: Callable[[KafkaError], U] | None = None
) -> Reply[U]:
    """Applies `function` to the response, now or when it is ready.

    `on_error` turns a KafkaError of the future into a response. If the returned future is cancelled, `reply` is
    cancelled, too, unless it is a task.
    """
    if not asyncio.isfuture(reply):
        return function(reply)
    source = cast("asyncio.Future[T]", reply)
    target: asyncio.Future[U] = source.get_loop().create_future()

    def abandon(abandoned: asyncio.Future[U]) -> None:
        """Ends a long poll that no client waits for any more. A task (work of several steps) continues."""
        if abandoned.cancelled() and not isinstance(source, asyncio.Task):
            source.cancel()

    def finish(done: asyncio.Future[T]) -> None:
        if target.done():
            if not done.cancelled():
                # Marks the error as retrieved, since asyncio would log it otherwise.
                done.exception()
            return
        if done.cancelled():
            target.cancel()
            return
        try:
            error = done.exception()
            if error is None:
                target.set_result(function(done.result()))
            elif on_error is not None and isinstance(error, KafkaError):
                target.set_result(on_error(error))
            else:
                target.set_exception(error)
        except Exception as failure:
            target.set_exception(failure)

    source.add_done_callback(finish)
    target.add_done_callback(abandon)
    return target


@overload
def chain_reply(reply: asyncio.Future[T], function: Callable[[T], Reply[U]]) -> asyncio.Future[U]: ...


@overload
def chain_reply(reply: Reply[T], function: Callable[[T], Reply[U]]) -> Reply[U]: ...


def chain_reply(reply: Reply[T], function: Callable[[T], Reply[U]]) -> Reply[U]:
    """Applies `function` to the response, now or when it is ready. The function may return a future, too."""
    if not asyncio.isfuture(reply):
        return function(reply)

    async def both() -> U:
        result = function(await reply)
        return await result if asyncio.isfuture(result) else result

    return asyncio.ensure_future(both())


def gather_replies(replies: list[Reply[T]]) -> Reply[list[T]]:
    """Returns all responses in order: a list if all of them are ready, otherwise a future.

    The future fails with the error of the first reply in the list that failed.
    """
    if not any(asyncio.isfuture(reply) for reply in replies):
        return cast("list[T]", replies)
    target: asyncio.Future[list[T]] = asyncio.get_running_loop().create_future()
    waiting = [reply for reply in replies if asyncio.isfuture(reply)]
    missing = len(waiting)

    def finish(_: asyncio.Future[T]) -> None:
        nonlocal missing
        missing -= 1
        if missing or target.done():
            return
        try:
            target.set_result([reply.result() if asyncio.isfuture(reply) else reply for reply in replies])
        except Exception as error:
            target.set_exception(error)

    for future in waiting:
        future.add_done_callback(finish)
    return target
