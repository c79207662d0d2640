# SPDX-License-Identifier: Apache-2.0
"""The way of a connection's requests: bytes of request frames in, bytes of response frames out, in request order.

A RequestPath has no socket, no transport and no clock. A server's connection drives one, and so can a simulation or a
test. The contract with the driver:

* `receive(data)` takes bytes of the client, cut anywhere. It works on the requests that are complete, at most
  FRAMES_PER_TURN of them: API table, handler and fast paths included. The handlers see `broker.now_ms()`.
* `take_output()` returns the framed responses that may leave now, and forgets them. Responses leave in the order of
  their requests: one that is known early waits for the earlier ones.
* The path calls `on_answer()` if `receive` leaves responses to take, and if a response becomes known later: a handler
  returned a future, or a fast path waited for its records to be durable. The driver calls `take_output()` soon, and
  `process()` after that, since requests may have waited for it.
* The path is muted, that is, it works on no further request, while the driver says so (`pause`: the client does not
  read, or came too early), while MAX_IN_FLIGHT_REQUESTS are unanswered, while `needs_turn`, and after `stop()`. Bytes
  received meanwhile are kept, so a driver that wants bounds stops reading while `is_muted`.
* `needs_turn` means that more requests wait than one turn may take. The driver serves its other connections first and
  then calls `next_turn()`.
* `close_reason` is set once the connection must be closed: the client sent something that is no request, or a handler
  wants it (CloseConnection). The path is stopped then. The driver sends `take_output()` and closes.
* `close()` tells the path that the client is gone. Long polls end; nothing is sent any more.

A frame meets, in this order: the fast path of its API; the API table, which knows what this client is served; header
and body decoding; the handler. Authentication and authorization belong between the table and the handler, in
`_process_generally`, and their outcome belongs to the keys of the fast paths.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kcoord.server.api.api_table import ApiTable, Client, CloseConnection, DeferredResponse, Exchange, RequestContext
from kcoord.server.fast.commit import CommitFastPath
from kcoord.server.fast.fast_path import FastPath
from kcoord.server.fast.fetch import FetchFastPath
from kcoord.server.fast.heartbeat import HeartbeatFastPath
from kcoord.server.fast.metadata import MetadataAnswers, MetadataFastPath
from kcoord.server.net.foreign_protocol import guess_protocol
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import DecodeError, FramingError
from kcoord_protocol.framing import FrameReader, decode_request_header

if TYPE_CHECKING:
    from kcoord.server.broker import Broker

MAX_IN_FLIGHT_REQUESTS = 64
"""Requests of one connection that may be unanswered before it is muted. Kafka mutes after one; clients rarely send more
than five.
"""

BULK_KEYS = frozenset({int(ApiKey.PRODUCE)})
"""Requests whose size is the size of the records that they carry."""

FRAMES_PER_TURN = 64
"""Requests of one connection that are worked on before the others get their turn, and before responses are written."""

ANONYMOUS = "User:ANONYMOUS"

_REQUEST_START = struct.Struct(">hhi")


@dataclass(slots=True)
class PathSettings:
    """What the request paths of all connections of one listener share."""

    broker: Broker
    listener_name: str
    max_frame_bytes: int
    max_request_bytes: int
    """The same for requests that carry no records."""
    has_fast_paths: bool
    metadata_answers: MetadataAnswers | None
    """None if each Metadata response is made by the handler."""

    @classmethod
    def of(cls, broker: Broker, listener_name: str) -> PathSettings:
        """As the configuration of the broker says."""
        config = broker.config
        return cls(
            broker,
            listener_name,
            config.socket_request_max_bytes,
            min(config.kcoord_request_max_bytes, config.socket_request_max_bytes),
            config.kcoord_fast_paths_enable,
            MetadataAnswers() if config.kcoord_metadata_cache_enable else None,
        )


class RequestPath:
    """See the module's text."""

    def __init__(
        self, settings: PathSettings, on_answer: Callable[[], None], remote_host: str = "", remote_port: int = 0
    ) -> None:
        self._settings = settings
        self._broker = settings.broker
        self._on_answer = on_answer
        self._reader = FrameReader(settings.max_frame_bytes, settings.max_request_bytes, BULK_KEYS)
        self._frames: deque[bytes] = deque()
        self._exchanges: deque[Exchange | DeferredResponse] = deque()
        self._output: list[bytes] = []
        self._is_paused = False
        self._is_closed = False
        self.client = Client(self._broker.apis.form, remote_host, remote_port)
        self.is_muted = False
        self.is_stopped = False
        self.needs_turn = False
        self.has_unfinished_frame = False
        """Whether the client has sent a part of a frame only."""
        self.close_reason: str | None = None
        self._serve(self._broker.apis)

    def _serve(self, apis: ApiTable) -> None:
        """Serves these APIs from now on. What the fast paths learned of others is forgotten."""
        self.apis = apis
        self._fast_paths = self._new_fast_paths()

    def _new_fast_paths(self) -> dict[int, FastPath]:
        """By the low byte of the API key."""
        settings, groups = self._settings, self._broker.groups
        fast_paths: list[FastPath] = []
        if settings.has_fast_paths:
            fast_paths += (
                HeartbeatFastPath(groups),
                CommitFastPath(groups, self.apis, self._on_answer),
                FetchFastPath(groups, self.apis, self._on_answer),
            )
        if settings.metadata_answers is not None:
            fast_paths.append(MetadataFastPath(settings.metadata_answers, self._broker, self.apis, self.client))
        return {key & 0xFF: fast_path for fast_path in fast_paths for key in fast_path.keys}

    # --- called by the driver -----------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> int:
        """Takes bytes of the client and works on the requests that are complete. Returns how many `data` completed."""
        try:
            frames = self._reader.feed(data)
        except FramingError as error:
            self._frames.extend(error.frames)
            self.process()
            self._refuse(f"{error}{guess_protocol(data)}")
            return len(error.frames)
        self.has_unfinished_frame = self._reader.buffered_bytes > 0
        self._frames.extend(frames)
        self.process()
        if self._output:
            self._on_answer()
        return len(frames)

    def process(self) -> None:
        """Works on requests that wait, as far as the path is not muted."""
        frames, exchanges = self._frames, self._exchanges
        if not frames or self.is_muted:
            return
        now_ms = self._broker.now_ms()
        left = FRAMES_PER_TURN
        # Only exchanges can mute the path inside the loop; a refusal empties `frames`.
        while frames and left and len(exchanges) < MAX_IN_FLIGHT_REQUESTS:
            self._process(frames.popleft(), now_ms)
            left -= 1
        if frames and not left and len(exchanges) < MAX_IN_FLIGHT_REQUESTS:
            self.needs_turn = True
        if frames or len(exchanges) >= MAX_IN_FLIGHT_REQUESTS:
            self._mute_or_unmute()

    def next_turn(self) -> None:
        """Continues after `needs_turn`."""
        self.needs_turn = False
        self._mute_or_unmute()
        self.process()

    def pause(self, is_paused: bool) -> None:
        """Mutes the path for a reason that the driver knows, or no longer so."""
        self._is_paused = is_paused
        self._mute_or_unmute()

    def _mute_or_unmute(self) -> None:
        """`is_muted` is an attribute: it is read far more often than it changes."""
        self.is_muted = (
            self._is_paused or self.is_stopped or self.needs_turn or len(self._exchanges) >= MAX_IN_FLIGHT_REQUESTS
        )

    def take_output(self) -> bytes:
        """The framed responses that may leave now, empty if there are none."""
        output, exchanges = self._output, self._exchanges
        while exchanges and (data := exchanges[0].data) is not None:
            output.append(data)
            exchanges.popleft()
        if not output:
            return b""
        if self.is_muted:
            self._mute_or_unmute()
        data = output[0] if len(output) == 1 else b"".join(output)
        output.clear()
        return data

    def stop(self) -> None:
        """Takes no further requests; those under way are still answered."""
        self._frames.clear()
        self.is_stopped = self.is_muted = True

    def close(self) -> None:
        """The client is gone."""
        self.stop()
        self._is_closed = True
        self._output.clear()
        for exchange in self._exchanges:
            exchange.abandon()
        self._exchanges.clear()
        # They refer to the driver: without that cycle it is freed now, not by the garbage collector.
        self._fast_paths = {}
        self._on_answer = _ignore_answer
        facts = self.client.facts
        if facts is not None and facts.instance_id is not None:
            self._broker.client_telemetry.disconnected(facts.instance_id)

    @property
    def queued(self) -> int:
        """Requests that were received and wait to be processed."""
        return len(self._frames)

    @property
    def in_flight(self) -> int:
        """Requests that were received and are not answered yet."""
        return len(self._exchanges) + len(self._frames)

    # --- one request --------------------------------------------------------------------------------------------------

    def _process(self, frame: bytes, now_ms: int) -> None:
        fast_path = self._fast_paths.get(frame[1]) if len(frame) > _REQUEST_START.size else None
        if fast_path is not None:
            answer = fast_path.answer(frame, now_ms)
            if answer is not None:
                if type(answer) is bytes and not self._exchanges:
                    self._output.append(answer)
                else:
                    self._send(frame, answer)
                return
        self._process_generally(frame, now_ms, fast_path)

    def _process_generally(self, frame: bytes, now_ms: int, fast_path: FastPath | None) -> None:
        bound = self.apis.bound(frame[:4])
        if bound is None:
            self._process_unserved(frame)
            return
        if bound.key is not ApiKey.API_VERSIONS:
            self.client.has_begun = True
        try:
            header, offset = decode_request_header(frame)
            exchange = Exchange(bound, frame, offset, header.correlation_id)
            if fast_path is not None and fast_path.learns_before_handler:
                answer = fast_path.learn(exchange, now_ms)
                if answer is not None:
                    self._send(frame, answer)
                    return
            request = exchange.decode()
        except DecodeError as error:
            self._refuse(f"malformed {bound.key.name} v{bound.version} request: {error}")
            return
        context = RequestContext(
            bound.key,
            bound.version,
            header.correlation_id,
            header.client_id or "",
            self.client.address,
            self._settings.listener_name,
            ANONYMOUS,
            now_ms,
            self.client,
        )
        response = bound.respond(self._broker, context, request)
        if asyncio.isfuture(response):
            exchange.future = response
            exchange.frame = b""  # it may be large, and is not needed any more
            self._exchanges.append(exchange)
            response.add_done_callback(partial(self._settled, exchange))
        elif isinstance(response, CloseConnection):
            self._refuse(response.reason)
        elif response is not None:
            self._answer(exchange, response)
            if fast_path is not None and not fast_path.learns_before_handler:
                fast_path.learn(exchange, now_ms)
        if self.client.form is not self.apis.form:
            self._serve(self._broker.apis.in_form(self.client.form))

    def _answer(self, exchange: Exchange, response: object) -> None:
        exchange.response = response
        data = exchange.data = exchange.bound.encode(exchange.correlation_id, response, exchange.request)
        if self._exchanges:
            self._exchanges.append(exchange)
        else:
            self._output.append(data)

    def _send(self, frame: bytes, answer: bytes | DeferredResponse) -> None:
        """Queues a response that no handler made."""
        if isinstance(answer, DeferredResponse):
            self._exchanges.append(answer)
        elif self._exchanges:
            response = DeferredResponse(frame, answer, self.apis, self._on_answer)
            response.data = answer
            self._exchanges.append(response)
        else:
            self._output.append(answer)

    def _settled(self, exchange: Exchange, future: asyncio.Future[object]) -> None:
        """A response came that had to be waited for; the client may be gone by now."""
        if self._is_closed:
            if not future.cancelled():
                future.exception()  # seen: asyncio would report an error that nobody asked for
            return
        response = exchange.bound.settle(future, exchange.request)
        if isinstance(response, CloseConnection):
            exchange.data = b""
            self._refuse(response.reason)
        elif response is None:
            exchange.data = b""
        else:
            exchange.data = exchange.bound.encode(exchange.correlation_id, response, exchange.request)
        self._on_answer()

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

            self._send(frame, unsupported_version_answer(self._broker, correlation_id))
            return
        try:
            name = ApiKey(key).name
        except ValueError:
            name = f"api key {key}"
        self._refuse(f"{name} v{version} is not served{guess_protocol(frame)}")

    def _refuse(self, reason: str) -> None:
        """Nothing after such bytes can be trusted; the responses that are known still leave."""
        self.stop()
        if self.close_reason is None:
            self.close_reason = reason


def _ignore_answer() -> None:
    """For responses that become known when the client is gone."""
