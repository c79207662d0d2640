# SPDX-License-Identifier: Apache-2.0
"""The controller's side of following its log: every durable batch is sent to the other workers at once, and an answer
about a change leaves when all of them have applied it.

So whoever was told that a topic exists finds it at every worker. A worker that is being started knows everything before
it takes connections, so nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import cached_property
from typing import Final, TypeVar

from kcoord.metadata.creation_order import CreationOrder
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.runtime.shard_log import Append, Load
from kcoord.server.shards.metadata_service import METADATA_SHARD, Follower, LocalMetadataService, monotonic_ms
from kcoord.server.workers.peer_frames import FrameKind, encode_hold, encode_offset
from kcoord.storage.log import Log

_logger = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")

APPLY_SECONDS: Final = 5.0
"""How long an answer waits for a worker that does not say that it is up to date."""
_SEND_BYTES: Final = 1 << 20


class MetadataFollowers:
    """All workers that follow `log`, and the answers that wait for them."""

    def __init__(self, log: Log, order: CreationOrder[Follower]) -> None:
        self.log = log
        self._order = order
        self._followers: list[Follower] = []
        self._holding: dict[int, asyncio.Future[None]] = {}
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def add(self, offset: int, write: Callable[[bytes], None], newest_ms: int | None = None) -> Follower:
        """A worker that knows everything below `offset`. With `newest_ms`, the latest creation time of its groups, it
        takes part in the order of creation times.
        """
        follower = Follower(write, offset, offset)
        self._followers.append(follower)
        if newest_ms is not None:
            # Before the log: with that the worker may begin to take clients.
            for ticket, limit_ms in self._order.join(follower, newest_ms, monotonic_ms()).items():
                write(encode_hold(FrameKind.HOLD, ticket, limit_ms))
        self._send(follower)
        return follower

    def remove(self, follower: Follower) -> None:
        if follower in self._followers:
            self._followers.remove(follower)
        self._order.lose(follower, monotonic_ms())
        self._release()
        for ticket in list(self._holding):
            self._check_held(ticket)

    # --- the order of creation times ----------------------------------------------------------------------------------

    async def hold(self, ticket: int) -> None:
        """Asks all workers for the latest creation time of their groups; ends when they have answered."""
        if not self._order.waiting(ticket):
            return
        held = self._holding[ticket] = asyncio.get_running_loop().create_future()
        try:
            for follower in self._order.waiting(ticket):
                follower.write(encode_hold(FrameKind.HOLD, ticket))
            await held
        finally:
            del self._holding[ticket]

    def held(self, follower: Follower, ticket: int, newest_ms: int) -> None:
        """The answer of a worker."""
        self._order.answer(follower, ticket, newest_ms, monotonic_ms())
        self._check_held(ticket)

    def _check_held(self, ticket: int) -> None:
        held = self._holding.get(ticket)
        if held is not None and not held.done() and not self._order.waiting(ticket):
            held.set_result(None)

    def release(self, ticket: int) -> None:
        """Behind the batches of the operation, if it made any."""
        for follower in self._followers:
            follower.write(encode_hold(FrameKind.RELEASE, ticket))

    # --- the log ------------------------------------------------------------------------------------------------------

    def applied(self, follower: Follower, offset: int) -> None:
        follower.applied_offset = offset
        self._release()

    def publish(self) -> None:
        """The log has grown, durably."""
        for follower in self._followers:
            self._send(follower)

    def _send(self, follower: Follower) -> None:
        """What is missing, in frames of a bounded size; an empty one tells a new follower that it is up to date."""
        end_offset = self.log.end_offset
        parts: list[bytes] = []
        size = 0
        for _, data in self.log.batches(follower.sent_offset):
            parts.append(data)
            size += len(data)
            if size >= _SEND_BYTES:
                follower.write(encode_offset(FrameKind.BATCHES, end_offset, b"".join(parts)))
                parts, size = [], 0
        follower.sent_offset = max(end_offset, follower.sent_offset)
        follower.write(encode_offset(FrameKind.BATCHES, end_offset, b"".join(parts)))

    def when_applied(self) -> asyncio.Future[None] | None:
        """Ends when all have applied what is durable now; None where they have."""
        offset = self.log.end_offset
        if all(follower.applied_offset >= offset for follower in self._followers):
            return None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((offset, future))
        asyncio.get_running_loop().call_later(APPLY_SECONDS, self._give_up, future)
        return future

    def _give_up(self, future: asyncio.Future[None]) -> None:
        if not future.done():
            _logger.warning("A worker has not applied a change of the metadata within %.0f s", APPLY_SECONDS)
            future.set_result(None)

    def _release(self) -> None:
        applied = min((follower.applied_offset for follower in self._followers), default=None)
        still: list[tuple[int, asyncio.Future[None]]] = []
        for offset, future in self._waiting:
            if future.done():
                continue
            if applied is None or applied >= offset:
                future.set_result(None)
            else:
                still.append((offset, future))
        self._waiting = still


class ControllerMetadataService(LocalMetadataService):
    """Serves `Broker.metadata` in the controller of several workers."""

    @cached_property
    def followers(self) -> MetadataFollowers:
        return MetadataFollowers(self._logs.open(METADATA_SHARD), self._order)

    async def _hold(self, ticket: int) -> None:
        await self.followers.hold(ticket)

    def _release(self, ticket: int) -> None:
        self.followers.release(ticket)

    def _run(
        self,
        operation: Callable[[MetadataMachine, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> asyncio.Future[T]:
        durable = super()._run(operation, request, context)
        target: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def pass_on(_: object) -> None:
            if target.done():
                return
            error = durable.exception()
            if error is not None:
                target.set_exception(error)
            else:
                target.set_result(durable.result())

        def on_durable(done: asyncio.Future[T]) -> None:
            if done.cancelled():
                target.cancel()
                return
            waiting = self.followers.when_applied() if done.exception() is None else None
            if waiting is None:
                pass_on(None)
            else:
                waiting.add_done_callback(pass_on)

        durable.add_done_callback(on_durable)
        return target

    def on_append_durable(self, append: Append) -> None:
        super().on_append_durable(append)
        self.followers.publish()

    def on_active(self, load: Load) -> None:
        super().on_active(load)
        self.followers.log = self._logs.open(METADATA_SHARD)
        self.followers.publish()
