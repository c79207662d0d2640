# SPDX-License-Identifier: Apache-2.0
"""The connections of a listener: transports, flow control and idle closing around a RequestPath.

Theory of operation. Everything here runs in the event loop; no other thread calls it.

A KafkaConnection is the asyncio protocol of one socket. Its RequestPath turns request bytes into response bytes and
keeps their order. The connection moves the bytes, and follows the state of the path after each step (`_follow_path`).
A connection is in one of these states:

* *Refused*: `Connections.admit` finds that a limit on connections is reached. The transport is aborted at once.
* *Reading*: `data_received` passes bytes to the path, which works on complete requests before it returns.
* *Muted*: the path works on no further request, and the transport does not read, so TCP slows the client down.
  `_continue` or `_take_turn` ends this state: it first works on the requests that wait, and then resumes reading.
  `kcoord.server.net.muting` has the reasons.
* *Stopped*: no request is accepted any more, but responses may still leave. The listener stops a connection at
  shutdown. A path stops itself if the client sends bytes that are no Kafka request, or if a handler asks for it. The
  connection then closes with one log line, and no other connection is affected. If an authentication failed, it closes
  after `connection.failed.authentication.delay.ms`, which makes guessing slow, and the client gets the error then.
* *Lost*: `connection_lost` closes the path. Long polls of the client end; nothing is sent any more. Operations that
  have begun are neither stopped nor undone.

Responses leave in request order. Those that are ready when the bytes of a read are processed are written then. The path
announces all others (`_flush_soon`), and those of one turn of the event loop leave in one write. The transport of
uvloop sends what was written after all readable sockets were read. If parts of files are among the responses, a
PieceSender sends them, and all responses after them until everything is sent.
`Connections.max_unread_bytes` bounds the responses that a client leaves unread. Muting keeps new requests out; the
bound is for the responses of requests that were already in flight.

A connection keeps nothing on disk. If the process dies, a request without a response may or may not have taken effect.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from typing import TypeAlias, cast

from kcoord.server.api.pieces import Pieces
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.muting import Mute
from kcoord.server.net.piece_sender import PieceSender
from kcoord.server.net.request_path import RequestPath

_logger = logging.getLogger(__name__)

_REPORTS_PER_SECOND = 10
_IDLE_SWEEPS_PER_TIMEOUT = 10
_SHORTEST_SWEEP_SECONDS = 0.05
_LONGEST_SWEEP_SECONDS = 30.0

NewPath: TypeAlias = Callable[[Callable[[], None]], RequestPath]
"""Makes the request path of a connection out of its `on_response`."""


class ReportLimiter:
    """Logs warnings that any client can cause, at most _REPORTS_PER_SECOND. Later logs how many it left out."""

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
    """The connections of one listener.

    It limits their number and rate, logs refused bytes, closes idle connections, and closes all in an orderly way.

    `new_path` may be replaced before the first connection. `max_unread_bytes` bounds the responses that a client leaves
    unread; a client above it is disconnected. `login_timeout_seconds` is the time in which a client has to log in if
    its path demands that.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        new_path: NewPath,
        max_unread_bytes: int,
        login_timeout_seconds: float,
    ) -> None:
        self.new_path = new_path
        self.max_unread_bytes = max_unread_bytes
        self.login_timeout_seconds = login_timeout_seconds
        self._limits = limits
        self._limiter = ReportLimiter()
        self._connections: dict[KafkaConnection, None] = {}
        """An ordered set, so that every run closes connections in the same order."""
        self._sweep: asyncio.TimerHandle | None = None
        # All connections share these methods: one that was idle for long finds them in the processor's cache.
        loop = asyncio.get_running_loop()
        self.time: Callable[[], float] = loop.time
        self.call_soon: Callable[[Callable[[], None]], object] = loop.call_soon

    def open(self) -> KafkaConnection:
        """Returns the protocol for a newly accepted socket."""
        return KafkaConnection(self)

    # --- called by a connection ---------------------------------------------------------------------------------------

    def admit(self, connection: KafkaConnection, host: str, descriptor: int) -> bool:
        """Counts the connection; returns False, with a log line, if a limit is reached.

        Holds a connection that came faster than max.connection.creation.rate, and one that will be closed because its
        address is above connection_creation_rate.
        """
        now_seconds = asyncio.get_running_loop().time()
        refusal = self._limits.refusal(host, now_seconds, descriptor)
        if refusal is not None:
            self.report(f"{connection.peer}: connection refused, {refusal}")
            return False
        self._connections[connection] = None
        delay_seconds = self._limits.delay_seconds(host, now_seconds)
        if delay_seconds:
            self.report(f"{connection.peer}: closing, connection_creation_rate of its address is exceeded")
            connection.close_after(delay_seconds)
            return True
        wait_seconds = self._limits.wait_seconds(now_seconds)
        if wait_seconds:
            connection.hold(wait_seconds)
        return True

    def forget(self, connection: KafkaConnection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._limits.release(connection.path.client.remote_host)

    def report(self, text: str) -> None:
        self._limiter.report(asyncio.get_running_loop().time(), text)

    # --- called by the listener ---------------------------------------------------------------------------------------

    def close_idle_after(self, idle_seconds: float) -> None:
        """Starts the idle sweep. Zero or a negative time means that idle connections stay open."""
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
        """Ends the idle sweep. Connections accept no further requests, and still answer those in flight."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in self._connections:
            connection.stop_reading()

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()

    def close_answered(self) -> None:
        """Closes the connections without requests in flight, so that their clients look for another broker."""
        for connection in list(self._connections):
            if not connection.path.in_flight:
                connection.close()

    def abort(self) -> None:
        """Ends all connections at once; unanswered requests get no response."""
        for connection in list(self._connections):
            connection.abort()

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[KafkaConnection]:
        """Iterates over the present connections. They may be closed meanwhile."""
        return iter(list(self._connections))

    @property
    def queued(self) -> int:
        """Number of requests that were received and are not processed yet, for metrics."""
        return sum(connection.path.queued for connection in self._connections)

    @property
    def in_flight(self) -> int:
        """Number of requests that are not answered yet."""
        return sum(connection.in_flight for connection in self._connections)


class KafkaConnection(asyncio.Protocol):
    """One client connection; the module describes its states.

    The owner calls `close_if_idle`, `hold`, `stop_reading`, `close` and `abort`; the event loop calls the rest.
    """

    def __init__(self, owner: Connections) -> None:
        self._owner = owner
        self.path = owner.new_path(self._flush_soon)
        self._transport: asyncio.Transport | None = None
        self._time, self._call_soon = owner.time, owner.call_soon
        self._flush_scheduled = False
        self._turn_scheduled = False
        self._write_paused = False
        self._sender: PieceSender | None = None
        """Not None while parts of files, or responses after them, are not sent."""
        self._closes_when_sent = False
        self._reading_paused = False
        self._throttled_until = 0.0
        self._is_closing = False
        self.peer = "?"
        self.last_active = 0.0
        self._frame_started: float | None = None
        self._unread_bytes = 0
        self._last_taken = 0.0
        self._timers: dict[tuple[object, ...], asyncio.TimerHandle] = {}
        """The timers by what they call. A throttle may last for days, so they are cancelled with the connection."""

    # --- called by the event loop -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        host, port = (transport.get_extra_info("peername") or ("?", 0))[:2]
        self.path.client.locate(str(host), int(port))
        self.peer = f"{host}:{port}"
        self.last_active = self._time()
        own_socket, descriptor = transport.get_extra_info("socket"), 0
        if own_socket is not None:
            own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            descriptor = own_socket.fileno()
        if not self._owner.admit(self, str(host), descriptor):
            self._transport.abort()
        elif self.path.must_log_in:
            self._call_later(self._owner.login_timeout_seconds, self._end_login)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._sender is not None:
            self._sender.close()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.path.close()
        self._owner.forget(self)

    def data_received(self, data: bytes) -> None:
        path = self.path
        if path.is_muted and path.is_stopped:
            return
        self.last_active = now = self._time()
        completed = path.receive(data)
        if not path.has_unfinished_frame:
            self._frame_started = None
        elif completed or self._frame_started is None:
            self._frame_started = now
        # A write may unmute the path. Reading is paused before that, so that requests that wait are processed after it.
        if path.is_muted:
            self._follow_path(is_reading=True)
        self._flush()

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._sender is not None:
            self._sender.pause()
        self._mute(Mute.SLOW_READER)

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._sender is not None:
            self._sender.resume()
        self._unmute(Mute.SLOW_READER)

    # --- called by the listener ---------------------------------------------------------------------------------------

    def close_if_idle(self, now: float, idle_seconds: float) -> bool:
        """Closes the connection, and returns True, if for `idle_seconds` one of these is true:

        * The client sent nothing and the broker works on no request of it.
        * The client did not finish a frame.
        * The client read nothing of the responses that wait for it.
        """
        transport = self._transport
        if transport is None:
            return False
        unread_bytes = transport.get_write_buffer_size()
        if self._sender is not None:
            unread_bytes += self._sender.unsent_bytes
        if unread_bytes < self._unread_bytes or (unread_bytes and not self._unread_bytes):
            self._last_taken = now
        self._unread_bytes = unread_bytes
        if unread_bytes and now - self._last_taken > idle_seconds:
            # An orderly close would first send everything. If the peer is gone, TCP retries for a quarter of an hour.
            transport.abort()
            return True
        quiet = now - max(self.last_active, self._last_taken) > idle_seconds and not self.path.is_working
        stalled = self._frame_started is not None and now - self._frame_started > idle_seconds
        if quiet or stalled:
            transport.close()
            return True
        return False

    def hold(self, seconds: float) -> None:
        """Mutes the connection for `seconds`: it was made faster than max.connection.creation.rate."""
        self._mute(Mute.HELD)
        self._call_later(seconds, self._unmute, Mute.HELD)

    def close_after(self, seconds: float) -> None:
        """Mutes the connection, and closes it after `seconds`: its address is above connection_creation_rate."""
        self._mute(Mute.HELD)
        self._call_later(seconds, self.close)

    def stop_reading(self) -> None:
        """Accepts no further requests; those in flight are still answered."""
        self.path.stop()
        self._pause_or_resume_reading()

    def close(self) -> None:
        """Writes the responses that are ready, and closes once they are sent."""
        if self._transport is None:
            return
        self._flush()
        if farewell := self.path.take_farewell():
            self._write(self._transport, farewell)
        if self._sender is None:
            self._transport.close()
        else:
            self._closes_when_sent = True

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def in_flight(self) -> int:
        """The number of requests that are not answered yet. Parts of files that are being sent count as one."""
        return self.path.in_flight + (self._sender is not None)

    @property
    def is_quiet(self) -> bool:
        """True if no request is in flight or was received in part."""
        return not self.in_flight and not self.path.has_unfinished_frame

    # --- following the path -------------------------------------------------------------------------------------------

    def _mute(self, reason: Mute) -> None:
        self.path.mute(reason)
        self._pause_or_resume_reading()

    def _unmute(self, reason: Mute) -> None:
        self.path.unmute(reason)
        self._continue()

    def _continue(self) -> None:
        """Works on waiting requests, writes the responses, and resumes reading if the path is no longer muted."""
        self.path.process()
        self._flush()
        self._follow_path()

    def _await_turn(self) -> None:
        self._call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn_scheduled = False
        self._unmute(Mute.NEXT_TURN)

    def _follow_path(self, *, is_reading: bool = False) -> None:
        """Closes, schedules a turn, pauses or resumes reading, as the state of the path demands.

        The event loop runs what `call_soon` has scheduled before it looks for readable sockets. So a read schedules a
        turn for the time after that: otherwise bytes that arrived during the read would wait for that turn, too.
        """
        path = self.path
        if path.close_reason is not None and not self._is_closing:
            self._is_closing = True
            self._owner.report(f"{self.peer}: closing, {path.close_reason}")
            if path.close_delay_ms:
                self._call_later(path.close_delay_ms / 1000, self.close)
            else:
                self.close()
        if throttle_ms := path.take_throttle_ms():
            self._throttle(throttle_ms / 1000)
        # A write may have unmuted a path with requests that wait, for which no response may be left to come.
        if (path.needs_turn or (path.queued and not path.is_muted)) and not self._turn_scheduled:
            self._turn_scheduled = True
            self._call_soon(self._await_turn if is_reading else self._take_turn)
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

    # --- timers -------------------------------------------------------------------------------------------------------

    def _call_later(self, seconds: float, method: Callable[..., None], *arguments: object) -> None:
        """Calls a method after `seconds`, unless the connection is lost before. Replaces an earlier timer for it."""
        if self._transport is None:
            return
        timer = self._timers.get((method, *arguments))
        if timer is not None:
            timer.cancel()
        self._timers[method, *arguments] = asyncio.get_running_loop().call_later(seconds, method, *arguments)

    def _end_login(self) -> None:
        """Ends the connection if the client has not logged in. It gets no response, since it has not asked for one."""
        if self._transport is not None and self.path.must_log_in and not self._is_closing:
            seconds = self._owner.login_timeout_seconds
            self._owner.report(f"{self.peer}: closing, the client has not logged in after {seconds:g} s")
            self._transport.abort()

    def _throttle(self, seconds: float) -> None:
        """Ends the throttle of the path after `seconds`, unless a longer one follows."""
        until = self._time() + seconds
        if until > self._throttled_until:
            self._throttled_until = until
            self._call_later(seconds, self._unmute, Mute.THROTTLED)

    # --- output -------------------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        """Schedules the write for the next turn, with all responses that become ready in this one.

        A client that wakes up for each single response costs more than one turn.
        """
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._call_soon(self._flush_and_continue)

    def _flush_and_continue(self) -> None:
        self._flush_scheduled = False
        self._flush()
        if self._reading_paused or self.path.is_muted:
            self._continue()

    def _flush(self) -> None:
        data = self.path.take_pieces()
        if data and self._transport is not None:
            self._write(self._transport, data)

    def _write(self, transport: asyncio.Transport, data: bytes | Pieces) -> None:
        if self._sender is None and type(data) is bytes:
            transport.write(data)
        else:
            self._send_pieces(transport, data)
        if self._write_paused or self._sender is not None:
            unread_bytes = transport.get_write_buffer_size()
            unread_bytes += self._sender.memory_bytes if self._sender is not None else 0
            limit_bytes = self._owner.max_unread_bytes
            if unread_bytes > limit_bytes:
                self._owner.report(f"{self.peer}: closing, more than {limit_bytes} bytes of responses are not read")
                transport.abort()

    def _send_pieces(self, transport: asyncio.Transport, data: bytes | Pieces) -> None:
        """Sends pieces, or data after them. Mutes the path until all are sent."""
        is_new = self._sender is None
        # The transport may call `pause_writing` within the first `send`.
        sender = self._sender = self._sender or PieceSender(
            transport, self._on_sent, self._on_failed_send, is_paused=self._write_paused
        )
        if sender.send(data):
            self._sender = None
        elif is_new:
            self._mute(Mute.SENDING)

    def _on_sent(self) -> None:
        self._sender = None
        if self._closes_when_sent and self._transport is not None:
            self._transport.close()
        self._unmute(Mute.SENDING)

    def _on_failed_send(self, reason: str | None) -> None:
        if reason is not None:
            self._owner.report(f"{self.peer}: closing, {reason}")
        self.abort()
