# SPDX-License-Identifier: Apache-2.0
"""Answers that are there at once, or later.

Most requests are answered in the turn of the event loop in which they arrive. So a handler returns a plain response,
and a future only if something must be waited for: the disk, another member, another worker. The functions here work on
both, and make no future for what is there already.
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
"""A later reply finds its future by the token of the operation's context. No two operations have the same."""

Reply: TypeAlias = T | asyncio.Future[T]
"""A response, or a future of it."""


def internal_operation_context(now_ms: int) -> OperationContext:
    """The context of an operation that no client asked for."""
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
    """Applies `function` to the answer now, or when it comes; `on_error` turns a later KafkaError into an answer."""
    if not asyncio.isfuture(reply):
        return function(reply)
    source = cast("asyncio.Future[T]", reply)
    target: asyncio.Future[U] = source.get_loop().create_future()

    def abandon(abandoned: asyncio.Future[U]) -> None:
        """Whoever waits no longer ends a long poll; work of several steps (a task) goes on."""
        if abandoned.cancelled() and not isinstance(source, asyncio.Task):
            source.cancel()

    def finish(done: asyncio.Future[T]) -> None:
        if target.done():
            if not done.cancelled():
                done.exception()  # seen: asyncio would report an error that nobody asked for
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


def gather_replies(replies: list[Reply[T]]) -> Reply[list[T]]:
    """All answers in order, at once where none has to be waited for."""
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
