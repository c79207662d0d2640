# SPDX-License-Identifier: Apache-2.0
"""The controller's side of the metadata log: sends it to the other workers, and delays responses until they applied it.

Theory of operation
-------------------
A change of the metadata takes these steps, all in the event loop of the controller:

1. The operation runs, and its batch is written to the metadata log.
2. When the batch is durable, the controller publishes the new image and sends the batch to all followers.
3. The response to the client waits until each follower has sent APPLIED for that offset. A client that learns that a
   topic was created therefore finds it at every worker.

A follower that does not send APPLIED delays a response by at most `APPLY_SECONDS`. If the change concerns ACLs,
credentials or delegation tokens, the controller then kills the process of that follower, before the response leaves. So
a worker that hangs does not continue with ACLs that were changed. The supervisor starts it again. After other changes
the follower may continue: it serves the old metadata until it has read the new one.

A follower whose connection breaks delays nothing, nor does a worker that is being started. A worker that starts applies
the whole log before it accepts clients. A worker that runs serves with its newest image until it has connected again.
So after the start of the controller, responses also wait for workers that have not connected yet: they may run since an
earlier controller. If a response stops waiting after `APPLY_SECONDS`, later responses do not wait for these workers. A
worker that hangs for so long after a crash of the controller may use old ACLs until it has connected.

If the controller crashes between two steps, durable batches stay in the log. The followers get them when they connect
again. A batch is sent only after it is durable, so a follower can be ahead of the log only if the log was damaged. The
follower then restarts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from typing import Final, TypeVar

from kcoord.metadata.creation_order import CreationOrder
from kcoord.runtime.result import OperationContext
from kcoord.runtime.shard_log import Append, Load
from kcoord.server.shards.metadata_service import (
    METADATA_SHARD,
    Follower,
    LocalMetadataService,
    MetadataOperation,
    monotonic_ms,
)
from kcoord.server.workers.peer_frames import FrameKind, encode_hold, encode_offset
from kcoord.storage.log import Log
from kcoord_protocol.messages import (
    AlterUserScramCredentialsRequest,
    CreateAclsRequest,
    DeleteAclsRequest,
    ExpireDelegationTokenRequest,
    RenewDelegationTokenRequest,
)

_logger = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")

APPLY_SECONDS: Final = 5.0
"""The longest time that a response waits for a follower."""
SECURITY_CHANGES: Final = (
    CreateAclsRequest,
    DeleteAclsRequest,
    AlterUserScramCredentialsRequest,
    RenewDelegationTokenRequest,
    ExpireDelegationTokenRequest,
)
"""The requests after whose response no worker may serve with the old metadata."""
_SEND_BYTES: Final = 1 << 20


class MetadataFollowers:
    """All workers that follow `log`, and the responses that wait for them."""

    def __init__(self, log: Log, order: CreationOrder[Follower]) -> None:
        self.log = log
        self._order = order
        self._followers: list[Follower] = []
        self._holding: dict[int, asyncio.Future[None]] = {}
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._absent: set[int] = set()
        """The broker ids of workers that may run, and that have not connected since the start of the controller."""

    def expect(self, broker_ids: Iterable[int]) -> None:
        """Makes responses wait for workers that have not connected yet. Called when the workers can connect."""
        self._absent.update(broker_ids)

    def add(
        self,
        broker_id: int,
        offset: int,
        write: Callable[[bytes], None],
        newest_ms: int,
        *,
        process_id: int,
    ) -> Follower:
        """Adds a worker that has applied everything before `offset`, and sends it the rest of the log.

        `newest_ms` is the latest creation time of its groups.
        """
        follower = Follower(broker_id, process_id, write, offset, offset)
        self._followers.append(follower)
        self._absent.discard(broker_id)
        # HOLD must arrive before the log: the worker may accept clients as soon as it has applied the log.
        for ticket, limit_ms in self._order.join(follower, broker_id, newest_ms, monotonic_ms()).items():
            write(encode_hold(FrameKind.HOLD, ticket, limit_ms))
        self._send(follower)
        return follower

    def remove(self, follower: Follower) -> None:
        """Removes a worker whose connection has ended. Nothing waits for it any more."""
        if follower in self._followers:
            self._followers.remove(follower)
        self._order.lose(follower, monotonic_ms())
        self._release_responses()
        for ticket in list(self._holding):
            self._check_held(ticket)

    # --- the order of creation times ----------------------------------------------------------------------------------

    def hold(self, ticket: int) -> None:
        """Asks all workers for the latest creation time of their groups. Called when the operation begins.

        `add` asks workers that connect later. No worker is asked twice: its second answer would raise its limit.
        """
        for follower in self._order.waiting(ticket):
            follower.write(encode_hold(FrameKind.HOLD, ticket))

    async def all_held(self, ticket: int) -> None:
        """Waits until all workers have answered.

        After the start of the controller, it also waits for workers that have not connected yet.
        """
        if not self._order.is_waiting(ticket):
            return
        held = self._holding[ticket] = asyncio.get_running_loop().create_future()
        try:
            await held
        finally:
            del self._holding[ticket]

    def held(self, follower: Follower, ticket: int, newest_ms: int) -> None:
        """Takes in the answer of a worker to HOLD."""
        self._order.answer(follower, ticket, newest_ms, monotonic_ms())
        self._check_held(ticket)

    def _check_held(self, ticket: int) -> None:
        held = self._holding.get(ticket)
        if held is not None and not held.done() and not self._order.is_waiting(ticket):
            held.set_result(None)

    def release(self, ticket: int) -> None:
        """Sends RELEASE. Called after the batches of the operation, if it made any, were sent."""
        for follower in self._followers:
            follower.write(encode_hold(FrameKind.RELEASE, ticket))
        # If the operation has stopped waiting for workers that did not connect, the other operations do, too.
        for other_ticket in list(self._holding):
            self._check_held(other_ticket)

    # --- the log ------------------------------------------------------------------------------------------------------

    def applied(self, follower: Follower, offset: int) -> None:
        """Takes in APPLIED, and releases the responses that waited for it."""
        follower.applied_offset = offset
        self._release_responses()

    def send_batches(self) -> None:
        """Sends the new batches to all followers. Called when the log has grown durably."""
        for follower in self._followers:
            self._send(follower)

    def _send(self, follower: Follower) -> None:
        """Sends the batches that the follower has not got yet, in frames of about `_SEND_BYTES`.

        If there are none, an empty frame is sent: a new follower learns from it that it has applied the whole log.
        """
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

    def when_applied(self, *, is_security: bool) -> asyncio.Future[None] | None:
        """Returns a future that ends when all workers have applied the current log; None if they have already.

        It also ends after `APPLY_SECONDS`. If `is_security`, followers that have not applied the log are killed then.
        """
        offset = self.log.end_offset
        if not self._absent and all(follower.applied_offset >= offset for follower in self._followers):
            return None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((offset, future))
        asyncio.get_running_loop().call_later(APPLY_SECONDS, self._give_up, future, offset, is_security)
        return future

    def _give_up(self, future: asyncio.Future[None], offset: int, is_security: bool) -> None:
        if future.done():
            return
        for follower in self._followers:
            if follower.applied_offset >= offset:
                continue
            if is_security:
                _logger.error(
                    "Broker %d has not applied a change of its security within %.0f s: its worker is killed",
                    follower.broker_id,
                    APPLY_SECONDS,
                )
                _kill(follower.process_id)
            else:
                _logger.warning(
                    "Broker %d has not applied a metadata change within %.0f s: the response is sent without it",
                    follower.broker_id,
                    APPLY_SECONDS,
                )
        if self._absent:
            _logger.warning(
                "The brokers %s have not connected within %.0f s: responses are sent without them",
                sorted(self._absent),
                APPLY_SECONDS,
            )
            self._absent.clear()
        future.set_result(None)
        self._release_responses()

    def _release_responses(self) -> None:
        if self._absent:
            return
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


def _kill(process_id: int) -> None:
    # The process still has its connection, so no other process can have its id. In tests, workers share a process.
    if process_id != os.getpid():
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


class ControllerMetadataService(LocalMetadataService):
    """Serves `Broker.metadata` in the controller, if there are several workers."""

    @cached_property
    def followers(self) -> MetadataFollowers:
        return MetadataFollowers(self._logs.open(METADATA_SHARD), self._order)

    async def _await_group_times(self, ticket: int) -> None:
        # The workers are asked first, so that they answer while the groups of this process are loaded.
        self.followers.hold(ticket)
        await self._group_times.loaded()
        await self.followers.all_held(ticket)

    def _release(self, ticket: int) -> None:
        self.followers.release(ticket)

    def _run(self, operation: MetadataOperation[R, T], request: R, context: OperationContext) -> asyncio.Future[T]:
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
            is_security = isinstance(request, SECURITY_CHANGES)
            waiting = self.followers.when_applied(is_security=is_security) if done.exception() is None else None
            if waiting is None:
                pass_on(None)
            else:
                waiting.add_done_callback(pass_on)

        durable.add_done_callback(on_durable)
        return target

    def on_append_durable(self, append: Append) -> None:
        super().on_append_durable(append)
        self.followers.send_batches()

    def on_active(self, load: Load) -> None:
        super().on_active(load)
        self.followers.log = self._logs.open(METADATA_SHARD)
        self.followers.send_batches()
