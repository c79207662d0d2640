# SPDX-License-Identifier: Apache-2.0
"""A worker's view of the metadata log, which the controller writes.

Theory of operation
-------------------
The worker connects to the controller and sends FOLLOW with the offset that it needs next. The controller sends BATCHES,
with the end offset of its log (`kcoord.server.workers.peer_frames`). The worker replays them. When it has reached that
end offset, it publishes the image and acknowledges with APPLIED. So images that lie between two ends are never
published.

* `start` ends when the worker has published everything that the controller's log had when it was asked.
* Requests that change metadata are sent to the controller, which runs the operation.
* While the controller is being restarted, the newest image stays in use. Groups, offsets and topics are served.
  Requests that change metadata fail with NOT_CONTROLLER, which clients retry. The worker tries to connect every
  `RECONNECT_SECONDS`.
* A worker that has missed a change must not continue. If a batch cannot be replayed, or if the controller's log ends
  before what this worker has applied, `give_up` is called, and the supervisor restarts the worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar, cast

from kcoord.config import BrokerConfig
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import MetadataSerde
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.metadata_service import MetadataOperation
from kcoord.server.workers.peer_frames import (
    FrameKind,
    decode_offset,
    decode_time,
    encode_follow,
    encode_hold,
    encode_offset,
    kind_of,
)
from kcoord.server.workers.peer_link import PeerConnection, Peers
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import Message
from kcoord_protocol.record_batch import decode_entries, iter_headers

_logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)
T = TypeVar("T")

RECONNECT_SECONDS: Final = 0.1


class OutOfStep(Exception):
    """The controller's log ends before what this worker has applied. Only a restart of this worker helps."""


class MetadataFollower:
    """Serves `Broker.metadata` in all workers but the controller.

    `give_up` is called with the error if this object cannot follow the log any more.
    """

    def __init__(
        self,
        config: BrokerConfig,
        peers: Peers,
        controller_id: int,
        controller_path: str,
        give_up: Callable[[BaseException], None],
        group_times: GroupTimes,
    ) -> None:
        self._machine = MetadataMachine(config)
        self._serde = MetadataSerde()
        self._peers = peers
        self._controller_id = controller_id
        self._controller_path = controller_path
        self.publishers: list[Callable[[MetadataImage], None]] = []
        self._give_up = give_up
        self._group_times = group_times
        self._broker_id = config.node_id
        self._next_offset = 0
        self._synchronized: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def image(self) -> MetadataImage:
        return self._machine.image

    @property
    def end_offset(self) -> int:
        return self._next_offset

    async def start(self) -> None:
        """Begins to follow; returns when this worker has published what the controller's log had when it was asked."""
        self._task = asyncio.ensure_future(self._follow())
        await asyncio.wait((self._task, self._synchronized), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._give_up(error)

    def call(self, operation: MetadataOperation[R, T], request: R, context: OperationContext) -> asyncio.Future[T]:
        """Sends the request to the controller, which runs the operation."""
        return asyncio.ensure_future(cast("Awaitable[T]", self._ask(request, context)))

    async def _ask(self, request: Message, context: OperationContext) -> Message:
        try:
            return await self._peers.ask(
                self._controller_id,
                request,
                context.api_version,
                client_id=context.client_id,
                client_host=context.client_host,
                principal=context.principal,
            )
        except KafkaError as error:
            raise KafkaError(Errors.NOT_CONTROLLER, f"The controller cannot be reached: {error.message}") from None

    # --- following ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, connection = await loop.create_unix_connection(
                    lambda: _FollowerConnection(self._take, self._group_times), self._controller_path
                )
                newest_ms = self._group_times.newest_ms()
                connection.write(encode_follow(self._next_offset, self._broker_id, os.getpid(), newest_ms))
                await connection.lost
            except OSError as error:
                _logger.debug("Connecting to the controller at %s failed: %s", self._controller_path, error)
            else:
                if connection.failure is not None:
                    raise connection.failure
            await asyncio.sleep(RECONNECT_SECONDS)

    def _take(self, frame: bytes) -> int | None:
        """Replays the batches of a frame. Returns the offset to acknowledge, or None if more batches follow at once."""
        end_offset, data = decode_offset(frame)
        if end_offset < self._next_offset:
            raise OutOfStep(
                f"the controller's metadata log ends at offset {end_offset}, but this worker has applied it up to "
                f"{self._next_offset}"
            )
        self._replay(data)
        if self._next_offset < end_offset:
            return None
        for publish in self.publishers:
            publish(self.image)
        if not self._synchronized.done():
            self._synchronized.set_result(None)
        return self._next_offset

    def _replay(self, data: bytes) -> None:
        for position, header in iter_headers(data):
            self._next_offset = header.next_offset
            if header.is_control:
                continue
            for _, key, value in decode_entries(data, position):
                record = self._serde.deserialize(key, value)
                if record is not None:
                    self._machine.replay(record)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _FollowerConnection(PeerConnection):
    """One connection to the controller. `take` is `MetadataFollower._take`; its error becomes `failure`."""

    def __init__(self, take: Callable[[bytes], int | None], group_times: GroupTimes) -> None:
        super().__init__()
        self._take = take
        self._group_times = group_times
        self._answering: dict[int, asyncio.Task[None]] = {}
        # Operations in flight when an earlier connection ended. The controller does not send their RELEASE any more.
        self._stale_tickets = group_times.limits.tickets
        self.failure: Exception | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for task in self._answering.values():
            task.cancel()

    def frame_received(self, frame: bytes) -> None:
        if self.failure is not None:
            return
        kind = kind_of(frame)
        if kind is FrameKind.BATCHES:
            self._receive_batches(frame)
        else:
            ticket, data = decode_offset(frame)
            self._order_creation_times(kind, ticket, decode_time(data))

    def _order_creation_times(self, kind: FrameKind, ticket: int, limit_ms: int | None) -> None:
        """Follows the controller's operations that create partitions (`kcoord.metadata.creation_order`)."""
        self._stale_tickets.discard(ticket)
        if kind is FrameKind.RELEASE:
            self._group_times.limits.release(ticket)
            if ticket in self._answering:
                self._answering.pop(ticket).cancel()
        elif limit_ms is not None:
            self._group_times.limits.hold(ticket, limit_ms)
        else:
            self._answering[ticket] = asyncio.ensure_future(self._answer(ticket))

    async def _answer(self, ticket: int) -> None:
        await self._group_times.loaded()
        newest_ms = self._group_times.newest_ms()
        self._group_times.limits.hold(ticket, newest_ms)
        self.write(encode_hold(FrameKind.HELD, ticket, newest_ms))

    def _receive_batches(self, frame: bytes) -> None:
        try:
            applied_offset = self._take(frame)
        except Exception as error:
            # A worker that missed a change must not continue.
            self.failure = error
            self.close()
            return
        if applied_offset is not None:
            while self._stale_tickets:
                # The log is replayed to its end, so the partitions of these operations are known here. The controller
                # has sent HOLD again for operations that are still in flight.
                self._group_times.limits.release(self._stale_tickets.pop())
            self.write(encode_offset(FrameKind.APPLIED, applied_offset))
