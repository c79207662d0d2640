# SPDX-License-Identifier: Apache-2.0
"""Replies: responses that are ready now, or futures of responses.

Most requests are answered in the turn of the event loop in which they arrive. So a handler returns a plain response. It
returns a future only if the response has to wait for the disk, another member or another worker. The functions here
accept both, and make no future if the response is ready.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, TypeVar, cast, overload

from kcoord.runtime.result import OperationContext
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.message import Message, Struct
from kcoord_protocol.primitives import encode_uvarint

T = TypeVar("T")
U = TypeVar("U")

_INT32: Final = struct.Struct(">i")

_FREED_AT_ONCE: Final = 500
_ENCODED_AT_ONCE: Final = 2_000

reply_tokens: Final = itertools.count(1)
"""Unique tokens of operations. The runtime keeps a deferred reply under the token of its operation."""

Reply: TypeAlias = T | asyncio.Future[T]
"""A response, or a future of a response."""


class EncodedResponse:
    """A response that a thread has encoded already, since it is large.

    If its version has ThrottleTimeMs, that is the first field.
    """

    __slots__ = ("_body", "_has_throttle_time", "throttle_time_ms")

    def __init__(self, body: bytes, *, has_throttle_time: bool = True) -> None:
        self._body = body
        self._has_throttle_time = has_throttle_time
        self.throttle_time_ms = 0

    def encode(self, version: int) -> bytes:
        """Returns the body. It has the version in which the thread has encoded it."""
        if not self._has_throttle_time:
            return self._body
        return _INT32.pack(self.throttle_time_ms) + self._body[_INT32.size :]

    def copy(self) -> EncodedResponse:
        """Returns the same response for another client."""
        return EncodedResponse(self._body, has_throttle_time=self._has_throttle_time)


def encode_in_parts(message: Message, version: int) -> bytes:
    """Encodes a message part by part if it has a long list of structs.

    Joining the fields of 100,000 structs at once would keep the GIL for 30 ms. So a thread would block the event loop.
    """
    fields: Sequence[str] = message.__slots__
    lists = {field: items for field in fields if type(items := getattr(message, field)) is list}
    name = max(lists, key=lambda name: len(lists[name]))
    items = lists[name]
    if len(items) <= _ENCODED_AT_ONCE:
        return message.encode(version)

    def encode(part: list[object]) -> bytes:
        setattr(message, name, part)
        return message.encode(version)

    is_flexible = version in message.flexible_versions
    empty, single = encode([]), encode(items[:1])
    # Both are equal up to the last byte of the count: the only or the fourth one.
    at = next(at for at, (left, right) in enumerate(zip(empty, single, strict=False)) if left != right)
    at -= 0 if is_flexible else _INT32.size - 1

    def count(number: int) -> bytes:
        return encode_uvarint(number + 1) if is_flexible else _INT32.pack(number)

    tail = empty[at + len(count(0)) :]
    parts = [empty[:at], count(len(items))]
    for start in range(0, len(items), _ENCODED_AT_ONCE):
        part = items[start : start + _ENCODED_AT_ONCE]
        encoded = encode(part)
        parts.append(encoded[at + len(count(len(part))) : len(encoded) - len(tail)])
    setattr(message, name, items)
    return b"".join([*parts, tail])


def free(message: Struct) -> None:
    """Empties the lists of messages in a message, a few items at a time. Other lists may belong to other objects.

    Freeing a large list at once would keep the GIL for up to 30 ms. So a thread would block the event loop.
    """
    for name in message.__slots__:
        items = getattr(message, name)
        if type(items) is list and items and isinstance(items[0], Struct):
            if len(items) <= _FREED_AT_ONCE:
                for item in items:
                    free(item)
            while items:
                del items[-_FREED_AT_ONCE:]


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
