# SPDX-License-Identifier: Apache-2.0
"""One client connection: bytes in, frames to the API table, bytes out in request order.

Several requests of a connection may be under way; their answers leave in the order of the requests, joined into one
write per turn of the event loop. A connection that reads its answers too slowly, or has too much under way, is not read
from until that changes. Bytes that are no Kafka request close this connection only, with one log line.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from kcoord.server.api.request_context import RequestContext
from kcoord.server.fast.commit_memo import CommitMemo
from kcoord.server.fast.fetch_memo import FetchMemo
from kcoord.server.fast.heartbeat_memo import HEARTBEAT_KEYS, HeartbeatMemo
from kcoord.server.fast.metadata_answers import METADATA_KEYS, MetadataAnswers
from kcoord.server.net.exchange import CloseConnection, Exchange, KnownExchange
from kcoord.server.net.foreign_protocol import guess_protocol
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import DecodeError, FramingError, KafkaError
from kcoord_protocol.framing import FrameReader
from kcoord_protocol.headers import decode_request_header

if TYPE_CHECKING:
    from kcoord.server.api.api_table import ApiTable, BoundApi
    from kcoord.server.broker import Broker
    from kcoord.server.observe.client_telemetry import ClientFacts
    from kcoord_protocol.messages import HeartbeatResponse, Message

MAX_IN_FLIGHT_REQUESTS = 64
"""Requests of one connection that may be unanswered before it is muted. Kafka mutes after one; clients rarely send more
than five.
"""

BULK_KEYS = frozenset({int(ApiKey.PRODUCE)})
"""Requests whose size is the size of the records that they carry."""

FRAMES_PER_TURN = 64
"""Requests of one connection that are worked on before the others get their turn, and before answers are written."""

ANONYMOUS = "User:ANONYMOUS"

_REQUEST_START = struct.Struct(">hhi")


class ConnectionOwner(Protocol):
    """What a connection asks of its listener."""

    @property
    def listener_name(self) -> str: ...

    @property
    def broker(self) -> Broker: ...

    @property
    def max_frame_bytes(self) -> int: ...

    @property
    def max_request_bytes(self) -> int:
        """The same for requests that carry no records."""

    @property
    def max_unread_bytes(self) -> int:
        """Answers that a client may leave unread. Muting keeps honest clients far below: this bounds what was under
        way.
        """

    @property
    def has_fast_paths(self) -> bool:
        """Whether requests that are like earlier ones may take short cuts."""

    @property
    def metadata_answers(self) -> MetadataAnswers | None:
        """The answers that all connections of the listener share; None where each is made anew."""

    def admit(self, connection: KafkaConnection, host: str) -> bool: ...

    def forget(self, connection: KafkaConnection) -> None: ...

    def report(self, text: str) -> None: ...


class KafkaConnection(asyncio.Protocol):
    """See the module's text. The owner calls `close_if_idle`, `stop_reading` and `close`; the event loop calls the
    rest.
    """

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._broker = owner.broker
        self.apis = owner.broker.apis
        self._heartbeats: HeartbeatMemo | None = None
        self._commits: CommitMemo | None = None
        self._fetches: FetchMemo | None = None
        self._short_cuts: dict[int, HeartbeatMemo | CommitMemo | FetchMemo] = {}
        if owner.has_fast_paths:
            self._open_short_cuts()
        self._metadata_answers = owner.metadata_answers
        self._reader = FrameReader(owner.max_frame_bytes, owner.max_request_bytes, BULK_KEYS)
        self._transport: asyncio.Transport | None = None
        self._time: Callable[[], float] = time.monotonic
        self._call_soon: Callable[[Callable[[], None]], object] = asyncio.get_running_loop().call_soon
        self._frames: deque[bytes] = deque()
        self._exchanges: deque[Exchange | KnownExchange] = deque()
        self._output: list[bytes] = []
        self._flush_scheduled = False
        self._write_paused = False
        self._reading_paused = False
        self._stopped = False
        self._held = False
        self._waits_for_turn = False
        self.peer = "?"
        self.client_host = "/?"
        self.remote_host = ""
        self.remote_port = 0
        self.software = ("", "")
        self.begins_with_api_versions = False
        self._has_begun = False
        self.facts: ClientFacts | None = None
        self.last_active = 0.0
        self._frame_started: float | None = None
        self._unread_bytes = 0
        self._last_taken = 0.0

    def identify(self, software_name: str, software_version: str) -> None:
        """Chooses the form of KIP-1327; answers that were remembered in another form are forgotten."""
        self.software = (software_name, software_version)
        if not self._has_begun:
            self._has_begun = self.begins_with_api_versions = True
        form = self._broker.config.kip1327_form(software_name)
        if form is not self.apis.form:
            self._use_apis(self._broker.apis.in_form(form))
            if self._heartbeats is not None:
                self._heartbeats.forget_all()

    def _use_apis(self, apis: ApiTable) -> None:
        self.apis = apis

    def _open_short_cuts(self) -> None:
        """By the low byte of the API key; the memos compare all of it."""
        self._heartbeats = HeartbeatMemo()
        self._commits = CommitMemo(self._broker, self)
        self._fetches = FetchMemo(self._broker, self)
        self._short_cuts = {
            **dict.fromkeys(HEARTBEAT_KEYS, self._heartbeats),
            ApiKey.OFFSET_COMMIT: self._commits,
            ApiKey.OFFSET_FETCH: self._fetches,
        }

    # --- called by the event loop -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername") or ("?", 0)
        self.remote_host = str(address[0])
        self.remote_port = int(address[1])
        self.peer = f"{self.remote_host}:{self.remote_port}"
        self.client_host = f"/{self.remote_host}"
        self._time = asyncio.get_running_loop().time
        self.last_active = self._time()
        own_socket = transport.get_extra_info("socket")
        if own_socket is not None:
            own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not self._owner.admit(self, self.remote_host):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._frames.clear()
        self._output.clear()
        for exchange in self._exchanges:
            exchange.abandon()
        self._exchanges.clear()
        # They know this connection: without that cycle it is freed now, not when the collector comes round.
        self._heartbeats = self._commits = self._fetches = None
        self._short_cuts = {}
        if self.facts is not None and self.facts.instance_id is not None:
            self._broker.client_telemetry.disconnected(self.facts.instance_id)
        self._owner.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._stopped:
            return
        self.last_active = now = self._time()
        try:
            frames = self._reader.feed(data)
        except FramingError as error:
            self._frames.extend(error.frames)
            self._process_frames()
            self._refuse(f"{error}{guess_protocol(data)}")
            return
        if not self._reader.buffered_bytes:
            self._frame_started = None
        elif frames or self._frame_started is None:
            self._frame_started = now
        self._frames.extend(frames)
        self._process_frames()
        if self._output:
            # When all connections of this turn were read: a client that is woken by each answer costs more than a turn.
            self._flush_soon()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._pause_or_resume_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._process_frames()
        self._flush()

    # --- called by the listener ---------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests that were taken and are not answered yet."""
        return len(self._exchanges) + len(self._frames)

    @property
    def queued(self) -> int:
        """Requests that were read and wait to be processed."""
        return len(self._frames)

    def close_if_idle(self, now: float, idle_seconds: float) -> bool:
        """Closes a connection that sent nothing, did not finish a frame, or took nothing of its answers, for too long;
        one that waits for us is not idle.
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
        quiet = now - max(self.last_active, self._last_taken) > idle_seconds and not self.in_flight
        stalled = self._frame_started is not None and now - self._frame_started > idle_seconds
        if quiet or stalled:
            transport.close()
            return True
        return False

    def hold(self, seconds: float) -> None:
        """Reads nothing for a while: connections are made faster than max.connection.creation.rate."""
        self._held = True
        self._pause_or_resume_reading()
        asyncio.get_running_loop().call_later(seconds, self._release)

    def _release(self) -> None:
        self._held = False
        self._take_turn()

    def stop_reading(self) -> None:
        """Takes no further requests; those under way are still answered."""
        self._stopped = True
        self._frames.clear()
        self._pause_or_resume_reading()

    def close(self) -> None:
        """Closes after what is written."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _process_frames(self) -> None:
        frames, exchanges = self._frames, self._exchanges
        if frames and not self._muted():
            now_ms = self._broker.now_ms()
            left = FRAMES_PER_TURN
            # Of what mutes, only these two can come while frames are processed; a refusal takes the frames away.
            while frames and left and len(exchanges) < MAX_IN_FLIGHT_REQUESTS:
                self._process(frames.popleft(), now_ms)
                left -= 1
            if frames and not left and not self._muted():
                self._waits_for_turn = True
                self._call_soon(self._take_turn)
        # Whatever else mutes has paused reading by itself.
        if self._reading_paused or self._waits_for_turn or len(exchanges) >= MAX_IN_FLIGHT_REQUESTS:
            self._pause_or_resume_reading()

    def _take_turn(self) -> None:
        self._waits_for_turn = False
        self._process_frames()
        self._flush()

    def _muted(self) -> bool:
        return (
            self._write_paused
            or self._stopped
            or self._held
            or self._waits_for_turn
            or len(self._exchanges) >= MAX_IN_FLIGHT_REQUESTS
        )

    def _process(self, frame: bytes, now_ms: int) -> None:
        """The short cuts first: each of them answers as the general way would, or not at all."""
        if len(frame) > _REQUEST_START.size:
            short_cut = self._short_cuts.get(frame[1])
            answer: bytes | KnownExchange | None = None
            if short_cut is not None:
                answer = short_cut.answer(frame, now_ms)
            elif (
                frame[1] in METADATA_KEYS
                and self._metadata_answers is not None
                # The answers are shared with connections that are served other versions.
                and self.apis.bound(frame[:4]) is not None
            ):
                answer = self._metadata_answers.answer(frame, self._broker.image)
                self._has_begun = True
            if answer is not None:
                if type(answer) is bytes and not self._exchanges:
                    self._output.append(answer)
                else:
                    self._send_known(frame, answer)
                return
        self._process_generally(frame, now_ms)

    def _send_known(self, frame: bytes, answer: bytes | KnownExchange) -> None:
        """Answers leave in the order of their requests."""
        if isinstance(answer, KnownExchange):
            self._exchanges.append(answer)
        elif not self._exchanges:
            self._output.append(answer)
        else:
            exchange = KnownExchange(self, frame, answer)
            exchange.data = answer
            self._exchanges.append(exchange)

    def _process_generally(self, frame: bytes, now_ms: int) -> None:
        bound = self.apis.bound(bytes(frame[:4]))
        if bound is None:
            self._process_unserved(frame)
            return
        if bound.key is not ApiKey.API_VERSIONS:
            self._has_begun = True
        try:
            header, offset = decode_request_header(frame)
            if self._commits is not None and bound.key is ApiKey.OFFSET_COMMIT:
                committed = self._commits.learn(frame, offset, bound, now_ms)
                if committed is not None:
                    self._exchanges.append(committed)
                    return
            request, _ = bound.decode_prefix(frame, offset, bound.version)
        except DecodeError as error:
            self._refuse(f"malformed {bound.key.name} v{bound.version} request: {error}")
            return
        if self._fetches is not None and bound.key is ApiKey.OFFSET_FETCH:
            fetched = self._fetches.learn(frame, request, bound)
            if fetched is not None:
                self._send_known(frame, fetched)
                return
        context = RequestContext(
            bound.key,
            bound.version,
            header.correlation_id,
            header.client_id or "",
            self.client_host,
            self._owner.listener_name,
            ANONYMOUS,
            now_ms,
            self,
        )
        response = bound.respond(self._broker, context, request)
        if asyncio.isfuture(response):
            exchange = Exchange(bound, header.correlation_id, request, response)
            self._exchanges.append(exchange)
            response.add_done_callback(partial(self._settled, exchange))
        elif isinstance(response, CloseConnection):
            self._refuse(response.reason)
        elif response is not None:
            answer = self._answer(bound, header.correlation_id, response, request)
            self._remember(bound, frame, request, response, answer)

    def _remember(self, bound: BoundApi, frame: bytes, request: Message, response: object, answer: bytes) -> None:
        """What was answered at once may be answered again."""
        if bound.key in HEARTBEAT_KEYS:
            if self._heartbeats is not None and not cast("HeartbeatResponse", response).error_code:
                self._heartbeats.remember(self._broker.groups, frame, request, answer)
        elif bound.key in METADATA_KEYS and self._metadata_answers is not None:
            self._metadata_answers.remember(frame, self._broker.image, response, answer)

    def _answer(self, bound: BoundApi, correlation_id: int, response: object, request: Message) -> bytes:
        data = bound.encode(correlation_id, response, request)
        if not self._exchanges:
            self._output.append(data)
            return data
        exchange = Exchange(bound, correlation_id, request)
        exchange.data = data
        self._exchanges.append(exchange)
        return data

    def _settled(self, exchange: Exchange, future: asyncio.Future[object]) -> None:
        """An answer came that had to be waited for; the client may be gone by now."""
        if self._transport is None:
            if not future.cancelled():
                future.exception()  # seen: asyncio would report an error that nobody asked for
            return
        response = exchange.bound.settle(future, exchange.request)
        if isinstance(response, CloseConnection):
            exchange.data = b""
            self.on_answer()
            self._refuse(response.reason)
            return
        data = b"" if response is None else exchange.bound.encode(exchange.correlation_id, response, exchange.request)
        exchange.data = data
        self.on_answer()

    # --- called by exchanges ------------------------------------------------------------------------------------------

    def on_answer(self) -> None:
        self._flush_soon()

    def error_answer(self, frame: bytes, error: KafkaError) -> bytes:
        bound = self.apis.bound(frame[:4])
        assert bound is not None, "a request that took a short cut is one that is served"
        header, offset = decode_request_header(frame)
        request, _ = bound.decode_prefix(frame, offset, bound.version)
        return bound.encode(header.correlation_id, bound.fail(request, error), request)

    def _process_unserved(self, frame: bytes) -> None:
        """An unknown API or version ends the connection; only ApiVersions is answered, so that clients can find a
        common version.
        """
        if len(frame) < _REQUEST_START.size:
            self._refuse(f"a request of {len(frame)} bytes is too short for a header")
            return
        key, version, correlation_id = _REQUEST_START.unpack_from(frame)
        if key == ApiKey.API_VERSIONS:
            from kcoord.server.api.handlers.api_versions import unsupported_version_answer

            self._send_known(frame, unsupported_version_answer(self._broker, correlation_id))
            return
        try:
            name = ApiKey(key).name
        except ValueError:
            name = f"api key {key}"
        self._refuse(f"{name} v{version} is not served{guess_protocol(frame)}")

    # --- output -------------------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._call_soon(self._flush_and_continue)

    def _flush_and_continue(self) -> None:
        self._flush_scheduled = False
        self._flush()
        if self._frames:
            self._process_frames()
            self._flush()
        elif self._reading_paused:
            self._pause_or_resume_reading()

    def _flush(self) -> None:
        output, exchanges = self._output, self._exchanges
        while exchanges and (data := exchanges[0].data) is not None:
            output.append(data)
            exchanges.popleft()
        if not output or self._transport is None:
            return
        data = output[0] if len(output) == 1 else b"".join(output)
        output.clear()
        self._transport.write(data)
        if not self._write_paused:
            return
        limit_bytes = self._owner.max_unread_bytes
        if self._transport.get_write_buffer_size() > limit_bytes:
            self._owner.report(f"{self.peer}: closing, more than {limit_bytes} bytes of answers are not read")
            self._transport.abort()

    def _pause_or_resume_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        pause = self._muted()
        if pause and not self._reading_paused:
            self._transport.pause_reading()
        elif not pause and self._reading_paused:
            self._transport.resume_reading()
        self._reading_paused = pause

    def _refuse(self, reason: str) -> None:
        """Sends the answers that are known, then closes: nothing after such bytes can be trusted."""
        self._frames.clear()
        self._stopped = True
        self._owner.report(f"{self.peer}: closing, {reason}")
        if self._transport is not None:
            self._flush()
            self._transport.close()
