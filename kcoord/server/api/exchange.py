# SPDX-License-Identifier: Apache-2.0
"""A request of a connection and its response, until the response may leave.

Two kinds wait in the queue of a request path: an `Exchange` was handed to its handler, whose answer may be a future; a
`DeferredResponse` comes from a fast path, is already encoded, and waits for its records to be durable. `data` of both
is None while the response is not known, and empty if the client gets none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kcoord.runtime.outbox import Waiter
from kcoord.server.api.api_table import ApiTable, BoundApi
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import Message


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Instead of a response: the client expects none, and the broker reports the failure by closing."""

    reason: str


class Exchange:
    """A request that is decoded and handled, with its response once that is known."""

    __slots__ = ("body_at", "bound", "correlation_id", "data", "frame", "future", "request", "response")

    request: Message

    def __init__(self, bound: BoundApi, frame: bytes, body_at: int, correlation_id: int) -> None:
        self.bound = bound
        self.frame = frame
        self.body_at = body_at
        self.correlation_id = correlation_id
        self.response: object = None
        self.future: asyncio.Future[object] | None = None
        self.data: bytes | None = None

    def decode(self) -> Message:
        """Decodes the body of the frame; raises DecodeError."""
        self.request = self.bound.decode_prefix(self.frame, self.body_at, self.bound.version)[0]
        return self.request

    def abandon(self) -> None:
        """The client is gone: ends a long poll. Work of several steps (a task) continues, since it may be half done."""
        if self.future is not None and not isinstance(self.future, asyncio.Task):
            self.future.cancel()


class DeferredResponse(Waiter):
    """An encoded response that leaves when its shard calls `settle`. If the shard fails, an error leaves instead."""

    __slots__ = ("_apis", "_frame", "_on_answer", "_response", "data", "on_settled")

    def __init__(self, frame: bytes, response: bytes, apis: ApiTable, on_answer: Callable[[], None]) -> None:
        self._frame = frame
        self._response = response
        self._apis = apis
        self._on_answer = on_answer
        self.data: bytes | None = None
        self.on_settled: Callable[[], None] | None = None
        """Set by metrics only."""

    def abandon(self) -> None:
        """Does nothing: records already appended are not withdrawn."""

    def settle(self) -> None:
        self.data = self._response
        if self.on_settled is not None:
            self.on_settled()
        self._on_answer()

    def fail(self, error: KafkaError) -> None:
        self._response = self._apis.error_response(self._frame, error)
        self.settle()
