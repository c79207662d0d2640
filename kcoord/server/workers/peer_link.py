# SPDX-License-Identifier: Apache-2.0
"""Connections from this worker to other workers: sends requests and matches their responses.

The first request to a worker opens the connection, and so does the first request after that worker was restarted.
Requests that wait on a broken connection fail. Only their sender knows whether they may be sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Final, TypeAlias, cast

from kcoord.server.workers.peer_frames import MAX_FRAME_BYTES, FrameKind, PeerRequest, decode_response, kind_of
from kcoord_protocol.api_keys import ApiKey, response_class
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.framing import FrameReader
from kcoord_protocol.messages import Message

_logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 30.0
"""Upper bound for any request to another worker, so that a hung worker cannot block forever.

It is longer than any such request takes.
"""


Spawn: TypeAlias = Callable[[Coroutine[object, object, Message]], asyncio.Future[Message]]
"""Starts a task and keeps a reference to it until it ends."""


class PeerConnection(asyncio.Protocol):
    """One connection to another worker. `lost` is done when the connection has ended."""

    def __init__(self) -> None:
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError("the connection to the worker was lost"))
        if not self.lost.done():
            self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            self.frame_received(frame)

    def frame_received(self, frame: bytes) -> None:
        """Takes in a response. A subclass also takes other frames."""
        if kind_of(frame) is FrameKind.RESPONSE:
            correlation_id, body = decode_response(frame)
            future = self._waiting.pop(correlation_id, None)
            if future is not None and not future.done():
                future.set_result(body)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Sends a frame, or nothing if the connection has ended."""
        if self._transport is not None:
            self._transport.write(data)

    def ask(self, request: PeerRequest) -> asyncio.Future[bytes]:
        """Sends a request. The future ends with the body of the response, or with ConnectionError if none comes."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self.is_open:
            future.set_exception(ConnectionResetError("the connection to the worker was lost"))
            return future
        self._waiting[request.correlation_id] = future
        self.write(request.encode())
        return future

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Peers:
    """The other workers, by broker id. `paths` are the paths of their sockets."""

    def __init__(self, paths: Mapping[int, str], spawn: Spawn) -> None:
        self._paths = paths
        self._spawn = spawn
        self._connections: dict[int, asyncio.Task[PeerConnection]] = {}
        self._correlation_ids = itertools.count(1)

    def ask(
        self,
        broker_id: int,
        request: Message,
        version: int,
        *,
        client_id: str = "",
        client_host: str = "",
        principal: str = "",
    ) -> asyncio.Future[Message]:
        """Sends a request to another worker.

        The future ends with the response, or with BROKER_NOT_AVAILABLE if the worker does not respond.
        """
        peer_request = PeerRequest(
            next(self._correlation_ids),
            request.api_key,
            version,
            client_id,
            client_host,
            principal,
            request.encode(version),
        )
        return self._spawn(self._ask(broker_id, peer_request))

    async def _ask(self, broker_id: int, request: PeerRequest) -> Message:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                connection = await self._connection(broker_id)
                body = await connection.ask(request)
        except (OSError, TimeoutError) as error:
            name = ApiKey(request.api_key).name
            reason = str(error) or f"no response within {ANSWER_SECONDS:.0f} s"
            _logger.warning("Broker %d did not respond to %s: %s", broker_id, name, reason)
            raise KafkaError(Errors.BROKER_NOT_AVAILABLE, f"Broker {broker_id} is being started.") from None
        return response_class(request.api_key).decode(body, request.version)

    async def _connection(self, broker_id: int) -> PeerConnection:
        task = self._connections.get(broker_id)
        if task is not None and task.done() and (task.exception() is not None or not task.result().is_open):
            task = None
        if task is None:
            task = self._connections[broker_id] = asyncio.ensure_future(self._connect(broker_id))
        return await asyncio.shield(task)

    async def _connect(self, broker_id: int) -> PeerConnection:
        if broker_id not in self._paths:
            raise ConnectionRefusedError(f"broker {broker_id} does not exist")
        _, connection = await asyncio.get_running_loop().create_unix_connection(PeerConnection, self._paths[broker_id])
        return connection

    def close(self) -> None:
        for task in self._connections.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
            else:
                task.cancel()
