# SPDX-License-Identifier: Apache-2.0
"""Requests of a connection whose answers are not yet on their way. `data` None: not known yet; empty: none is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kcoord.runtime.outbox import Waiter
from kcoord_protocol.errors import KafkaError

if TYPE_CHECKING:
    from kcoord.server.api.api_table import BoundApi
    from kcoord_protocol.messages import Message


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Instead of a response: the client wants none, and has to hear that the request failed."""

    reason: str


class Exchange:
    """A request that took the general way; its answer is encoded when the response is known."""

    __slots__ = ("bound", "correlation_id", "data", "future", "request")

    def __init__(
        self, bound: BoundApi, correlation_id: int, request: Message, future: asyncio.Future[object] | None = None
    ) -> None:
        self.bound = bound
        self.correlation_id = correlation_id
        self.request = request
        self.future = future
        self.data: bytes | None = None

    def abandon(self) -> None:
        """The client is gone: ends a long poll. Work of several steps (a task) goes on, it may be half done."""
        if self.future is not None and not isinstance(self.future, asyncio.Task):
            self.future.cancel()


class ExchangeOwner(Protocol):
    """What a KnownExchange asks of its connection."""

    def on_answer(self) -> None:
        """An exchange has got its data."""

    def error_answer(self, frame: bytes, error: KafkaError) -> bytes:
        """The framed answer to a request that failed."""


class KnownExchange(Waiter):
    """A request whose answer is known, and leaves when something is durable."""

    __slots__ = ("_answer", "_frame", "_owner", "data", "on_settled")

    def __init__(self, owner: ExchangeOwner, frame: bytes, answer: bytes) -> None:
        self._owner = owner
        self._frame = frame
        self._answer = answer
        self.data: bytes | None = None
        self.on_settled: Callable[[], None] | None = None
        """For those who measure."""

    def abandon(self) -> None:
        """What was appended stays so."""

    def settle(self) -> None:
        self.data = self._answer
        if self.on_settled is not None:
            self.on_settled()
        self._owner.on_answer()

    def fail(self, error: KafkaError) -> None:
        self._answer = self._owner.error_answer(self._frame, error)
        self.settle()
