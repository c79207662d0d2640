# SPDX-License-Identifier: Apache-2.0
"""Client connections: the transport, flow control and idle closing around a RequestPath, and all connections of a
listener.

The responses that became known in one turn of the event loop leave in one write. A connection that reads its responses
too slowly, or has too much under way, is not read from until that changes. Bytes that are no Kafka request close this
connection only, with one log line.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import TypeAlias, cast

from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.request_path import RequestPath

_logger = logging.getLogger(__name__)

_REPORTS_PER_SECOND = 10
_IDLE_SWEEPS_PER_TIMEOUT = 10
_SHORTEST_SWEEP_SECONDS = 0.05
_LONGEST_SWEEP_SECONDS = 30.0

NewPath: TypeAlias = Callable[[Callable[[], None]], RequestPath]
"""Makes the request path of a connection out of its `on_answer`."""


class ReportLimiter:
    """Log lines that strangers can cause, at most so many per second; the number of those left out is told later."""

    __slots__ = ("_count", "_second", "_suppressed")

    def __init__(self) -> None:
        self._second = -1
        self._count = 0
        self._suppressed = 0

    def report(self, now_seconds: float, text: str) -> None:
        second = int(now_seconds)
        if second != self._second:
            if self._suppressed:
                _logger.warning("%d more lines about refused connections were left out", self._suppressed)
            self._second, self._count, self._suppressed = second, 0, 0
        self._count += 1
        if self._count > _REPORTS_PER_SECOND:
            self._suppressed += 1
        else:
            _logger.warning("%s", text)


class Connections:
    """The connections of one listener: limits on their number and rate, log lines about refused bytes, the idle sweep,
    orderly closing. `new_path` may be replaced before the first connection.

    `max_unread_bytes`: responses that a client may leave unread. Muting keeps honest clients far below: this bounds
    what was under way.
    """

    def __init__(self, limits: ConnectionLimits, new_path: NewPath, max_unread_bytes: int) -> None:
        self.new_path = new_path
        self.max_unread_bytes = max_unread_bytes
        self._limits = limits
        self._limiter = ReportLimiter()
        self._connections: dict[KafkaConnection, None] = {}
        """A set that keeps their order, so that all of them are closed in the same order in every run."""
        self._sweep: asyncio.TimerHandle | None = None

    def open(self) -> asyncio.Protocol:
        """For a client whose connection was accepted."""
        return KafkaConnection(self)

    # --- what a connection asks ---------------------------------------------------------------------------------------

    def admit(self, connection: KafkaConnection, host: str) -> bool:
        """Counts the connection, unless it is one too many; one that comes too early reads nothing for a while."""
        refusal = self._limits.refusal(host)
        if refusal is not None:
            self.report(f"{connection.peer}: connection refused, {refusal}")
            return False
        self._connections[connection] = None
        wait_seconds = self._limits.wait_seconds(asyncio.get_running_loop().time())
        if wait_seconds:
            connection.hold(wait_seconds)
        return True

    def forget(self, connection: KafkaConnection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._limits.release(connection.path.client.remote_host)

    def report(self, text: str) -> None:
        self._limiter.report(asyncio.get_running_loop().time(), text)

    # --- what the listener asks ---------------------------------------------------------------------------------------

    def close_idle_after(self, idle_seconds: float) -> None:
        """Closes idle connections from now on; never if there is no such time."""
        if idle_seconds > 0:
            delay = min(max(idle_seconds / _IDLE_SWEEPS_PER_TIMEOUT, _SHORTEST_SWEEP_SECONDS), _LONGEST_SWEEP_SECONDS)
            self._sweep = asyncio.get_running_loop().call_later(delay, self._close_idle, idle_seconds)

    def _close_idle(self, idle_seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self._connections):
            if connection.close_if_idle(now, idle_seconds):
                _logger.debug("%s: closing, idle longer than connections.max.idle.ms", connection.peer)
        self.close_idle_after(idle_seconds)

    def stop_reading(self) -> None:
        """Ends the idle sweep, and takes no further requests."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in self._connections:
            connection.stop_reading()

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()

    def abort(self) -> None:
        """Ends all connections at once, also those that wait for an answer that is not to come."""
        for connection in list(self._connections):
            connection.abort()

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def queued(self) -> int:
        """Requests that were read and wait to be processed, for metrics."""
        return sum(connection.path.queued for connection in self._connections)

    @property
    def in_flight(self) -> int:
        """Requests that are not answered yet."""
        return sum(connection.path.in_flight for connection in self._connections)


class KafkaConnection(asyncio.Protocol):
    """See the module's text. The owner calls `close_if_idle`, `stop_reading` and `close`; the event loop calls the
    rest.
    """

    def __init__(self, owner: Connections) -> None:
        self._owner = owner
        self.path = owner.new_path(self._flush_soon)
        self._transport: asyncio.Transport | None = None
        self._time: Callable[[], float] = time.monotonic
        self._call_soon: Callable[[Callable[[], None]], object] = asyncio.get_running_loop().call_soon
        self._flush_scheduled = False
        self._turn_scheduled = False
        self._write_paused = False
        self._reading_paused = False
        self._held = False
        self._is_closing = False
        self.peer = "?"
        self.last_active = 0.0
        self._frame_started: float | None = None
        self._unread_bytes = 0
        self._last_taken = 0.0

    # --- called by the event loop -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        host, port = (transport.get_extra_info("peername") or ("?", 0))[:2]
        self.path.client.locate(str(host), int(port))
        self.peer = f"{host}:{port}"
        self._time = asyncio.get_running_loop().time
        self.last_active = self._time()
        own_socket = transport.get_extra_info("socket")
        if own_socket is not None:
            own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not self._owner.admit(self, str(host)):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.path.close()
        self._owner.forget(self)

    def data_received(self, data: bytes) -> None:
        path = self.path
        if path.is_stopped:
            return
        self.last_active = now = self._time()
        completed = path.receive(data)
        if not path.has_unfinished_frame:
            self._frame_started = None
        elif completed or self._frame_started is None:
            self._frame_started = now
        if path.is_muted:
            self._follow_path()

    def pause_writing(self) -> None:
        self._write_paused = True
        self.path.pause(self._write_paused or self._held)
        self._pause_or_resume_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self.path.pause(self._write_paused or self._held)
        self._continue()

    # --- called by the listener ---------------------------------------------------------------------------------------

    def close_if_idle(self, now: float, idle_seconds: float) -> bool:
        """Closes a connection that sent nothing, did not finish a frame, or took nothing of its responses, for too
        long. A connection that waits for the broker is not idle.
        """
        transport = self._transport
        if transport is None:
            return False
        unread_bytes = transport.get_write_buffer_size()
        if unread_bytes < self._unread_bytes or (unread_bytes and not self._unread_bytes):
            self._last_taken = now
        self._unread_bytes = unread_bytes
        if unread_bytes and now - self._last_taken > idle_seconds:
            # In good order it would be closed when all is sent, and the peer may be gone: TCP tries for a quarter of an
            # hour.
            transport.abort()
            return True
        quiet = now - max(self.last_active, self._last_taken) > idle_seconds and not self.path.in_flight
        stalled = self._frame_started is not None and now - self._frame_started > idle_seconds
        if quiet or stalled:
            transport.close()
            return True
        return False

    def hold(self, seconds: float) -> None:
        """Reads nothing for a while: connections are made faster than max.connection.creation.rate."""
        self._held = True
        self.path.pause(self._write_paused or self._held)
        self._pause_or_resume_reading()
        asyncio.get_running_loop().call_later(seconds, self._release)

    def _release(self) -> None:
        self._held = False
        self.path.pause(self._write_paused or self._held)
        self._continue()

    def stop_reading(self) -> None:
        """Takes no further requests; those under way are still answered."""
        self.path.stop()
        self._pause_or_resume_reading()

    def close(self) -> None:
        """Closes after what is written."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- what the path wants ------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Works on requests that waited, and writes the responses."""
        self.path.process()
        self._flush()
        self._follow_path()

    def _take_turn(self) -> None:
        self._turn_scheduled = False
        self.path.next_turn()
        self._flush()
        self._follow_path()

    def _follow_path(self) -> None:
        """Does what the path needs after it has worked: close, take a turn later, read or not."""
        path = self.path
        if path.close_reason is not None and not self._is_closing:
            self._is_closing = True
            self._owner.report(f"{self.peer}: closing, {path.close_reason}")
            self.close()
        if path.needs_turn and not self._turn_scheduled:
            self._turn_scheduled = True
            self._call_soon(self._take_turn)
        if path.is_muted is not self._reading_paused:
            self._pause_or_resume_reading()

    def _pause_or_resume_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        pause = self.path.is_muted
        if pause and not self._reading_paused:
            self._transport.pause_reading()
        elif not pause and self._reading_paused:
            self._transport.resume_reading()
        self._reading_paused = pause

    # --- output -------------------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        """Writes when all connections of this turn were read: a client that is woken by each answer costs more than a
        turn.
        """
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._call_soon(self._flush_and_continue)

    def _flush_and_continue(self) -> None:
        self._flush_scheduled = False
        self._flush()
        if self._reading_paused or self.path.close_reason is not None:
            self._continue()

    def _flush(self) -> None:
        data = self.path.take_output()
        if not data or self._transport is None:
            return
        self._transport.write(data)
        if not self._write_paused:
            return
        limit_bytes = self._owner.max_unread_bytes
        if self._transport.get_write_buffer_size() > limit_bytes:
            self._owner.report(f"{self.peer}: closing, more than {limit_bytes} bytes of answers are not read")
            self._transport.abort()
