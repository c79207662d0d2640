# SPDX-License-Identifier: Apache-2.0
"""The path of a connection's requests: bytes of request frames in, bytes of response frames out, in request order.

Theory of operation. A RequestPath has no socket, no transport and no clock, and runs in the thread of its driver. A
connection of the server drives one, and so can a simulation or a test. The contract with the driver:

* `receive(data)` accepts bytes of the client, split anywhere. It works on at most FRAMES_PER_TURN complete requests:
  fast paths, API table and handlers included. The handlers see `broker.now_ms()`.
* `take_output()` removes and returns the framed responses that may leave now. Responses leave in the order of their
  requests: a response that is ready early waits for the earlier ones. `take_pieces()` does the same, but returns pieces
  if parts of files are among the responses. So a driver with a socket need not read them.
* `receive` may leave responses to take. The path calls `on_response()` if a response becomes ready later: a handler
  returned a future, or a fast path waits until its records are durable. The driver then calls `take_output()` soon, and
  `process()` after that, because requests may have waited for a free place in the queue.
* A muted path works on no further request. `kcoord.server.net.muting` has the reasons. For those of its own, the driver
  calls `mute` and `unmute`. The path keeps bytes that it receives meanwhile, so a driver that bounds memory stops
  reading while `is_muted`.
* `needs_turn` means that more requests wait than one turn may process: FRAMES_PER_TURN, or fewer if their responses are
  large or they take longer than LONGEST_TURN_MS. The driver takes the output, serves its other connections, ends
  Mute.NEXT_TURN and calls `process()`.
* A client above its quota is throttled (KIP-219). Its response leaves at once, and the path is muted until the driver
  ends that after the time. The driver asks for the time by `take_throttle_ms()` if `is_muted`.
* `close_reason` is set once the connection must be closed: the client sent bytes that are no request, or a handler
  asked for it (CloseConnection). The path is then stopped. The driver sends `take_output()` and closes.
  If `close_delay_ms` is not 0, the driver closes after that time, and sends `take_farewell()` just before.
* `close()` reports that the client is gone. Long polls end; nothing is sent any more.

Handlers and fast paths see the requests in the order of their arrival. A handler that returns a response, or the future
of one shard operation, has done its work by then, so later requests see it. A handler that returns a task may act
later, beside the requests that follow. So does a large InstallAssignment, which a thread decodes.

A frame meets, in this order: the fast path of its API; the API table, which knows the versions that this client is
served; header and body decoding; the handler. An unknown API, a version that is not served and a malformed body stop
the path; only ApiVersions is answered in any version. A defect in a handler costs one request an error response. If the
broker has an authorizer, `_take_general_path` gives each request the rights of its client, which the handler checks.
`kcoord.server.fast.guarded` describes how the fast paths follow the ACLs.

If some clients have a quota on the time of requests, each frame first meets a look-up of its client
(`kcoord.server.request_quota`). A client with such a quota has no fast paths.

On a listener with SASL a frame first meets the login (`kcoord.security.login_states`), until that is complete, and
after that if the session has an end. The path chooses at its creation where frames enter. So a listener without SASL
does no work for it.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from kcoord.server.api.api_table import (
    ApiTable,
    BoundApi,
    Client,
    CloseConnection,
    DeferredResponse,
    Exchange,
    RequestContext,
    WaitingResponse,
    ignore_throttle,
)
from kcoord.server.api.pieces import Pieces, encode_in_pieces, read_pieces
from kcoord.server.fast.fast_path import FastPath
from kcoord.server.large_responses import free
from kcoord.server.net.foreign_protocol import guess_protocol
from kcoord.server.net.muting import Mute
from kcoord.server.net.path_settings import PathSettings
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.errors import DecodeError, FramingError
from kcoord_protocol.framing import FrameReader, decode_request_header
from kcoord_protocol.message import Message

if TYPE_CHECKING:
    from kcoord.security.login_states import LoginStates, SaslStep
    from kcoord.server.request_quota import RequestUse

MAX_IN_FLIGHT_REQUESTS = 64
"""Number of unanswered requests at which a connection is muted. Kafka mutes after one request; clients rarely send more
than five.
"""

LARGE_REQUEST_BYTES = 64 * 1024
"""Larger requests of some APIs are decoded in a thread. A megabyte takes 20 to 100 ms."""
_HANDLED_IN_ORDER = frozenset(
    {
        *(ApiKey.ALTER_PARTITION_REASSIGNMENTS, ApiKey.CREATE_TOPICS, ApiKey.DESCRIBE_TRANSACTIONS),
        *(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, ApiKey.ELECT_LEADERS, ApiKey.OFFSET_FOR_LEADER_EPOCH),
        *(ApiKey.UPDATE_FEATURES, ApiKey.WRITE_TXN_MARKERS),
    }
)
"""If a thread decodes such a request, a thread encodes its response and frees it, and later requests wait for that.

The handlers keep no list of structs of a request after the response.
"""
_DECODED_IN_A_THREAD = _HANDLED_IN_ORDER | {ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT}

BULK_KEYS = frozenset({int(ApiKey.PRODUCE)})
"""APIs whose requests carry records, so that only `socket.request.max.bytes` bounds them."""

FRAMES_PER_TURN = 64
"""Number of requests that one connection may process before other connections get their turn and responses are written.
"""

LONGEST_TURN_MS = 6
"""Time after which a request without a fast path ends the turn of its connection if MANY_REQUESTS wait behind it.

50 members that join over one connection take 4 ms on a quiet machine. If a thread computes their assignment meanwhile,
the event loop has the GIL for half of the time, and heartbeats of other connections would wait for twice as long. A
turn that ends costs a write to the log and a write to the client.
"""

MANY_REQUESTS = 10
"""Fewer requests than these are not worth a turn of their own: they cost less than the turn does.

If members join over many connections, more turns would also compute more target assignments.
"""

MAX_READY_BYTES = 1 << 20
"""Number of bytes of responses in memory at which a turn ends. One response may be larger."""

_REQUEST_START = struct.Struct(">hhi")


class RequestPath:
    """The requests and responses of one connection; the module describes the contract with the driver."""

    def __init__(
        self, settings: PathSettings, on_response: Callable[[], None], remote_host: str = "", remote_port: int = 0
    ) -> None:
        self._settings = settings
        self._broker = settings.broker
        self._on_response = on_response
        self._reader = FrameReader(settings.max_frame_bytes, settings.max_request_bytes, BULK_KEYS)
        self._frames: deque[bytes] = deque()
        self._exchanges: deque[WaitingResponse] = deque()
        self._output: list[bytes] = []
        self._ready_bytes = 0
        """At least the bytes in memory of the responses that are ready. Those that were taken may still be counted."""
        self._has_file_slices = False
        """True if parts of files are in `_output`, too."""
        self._is_closed = False
        self.client = Client(
            self._broker.apis.form, settings.listener_name, remote_host, remote_port, settings.principal
        )
        self.client.throttle = self._throttle
        self._reasons = 0
        """The bits of the reasons for muting (`Mute`) that hold."""
        self._throttle_ms = 0
        self.is_muted = False
        """Follows `_reasons` and what `Mute` says beside them; an attribute, because it is read far more often."""
        self.has_unfinished_frame = False
        """True if the last bytes that were received end within a frame."""
        self.close_reason: str | None = None
        self.close_delay_ms = 0
        self._farewell = b""
        self._enter: Callable[[bytes, int], None] = self._process_frame
        self._sasl: LoginStates | None = None
        if settings.new_login is not None:
            self._sasl = settings.new_login()
            max_bytes = self._sasl.max_token_bytes
            self._reader.allow(max_bytes, max_bytes, ())
            self._enter = self._process_with_sasl
        self._serve(self._broker.apis)

    def _serve(self, apis: ApiTable) -> None:
        """Serves `apis` from now on. The fast paths forget what they learned, since it may not hold for these APIs."""
        self.apis = apis
        self._fast_paths = self._settings.new_fast_paths(apis, self.client, self._on_response)

    # --- called by the driver -----------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> int:
        """Accepts bytes of the client, works on complete requests, and returns how many requests `data` completed."""
        try:
            frames = self._reader.feed(data)
        except FramingError as error:
            self._frames.extend(error.frames)
            self.process()
            self._refuse(f"{error}{guess_protocol(data)}")
            return len(error.frames)
        self.has_unfinished_frame = self._reader.has_unfinished_frame
        self._frames.extend(frames)
        self.process()
        return len(frames)

    def process(self) -> None:
        """Works on waiting requests until the path is muted."""
        frames, exchanges = self._frames, self._exchanges
        if not frames or self.is_muted:
            return
        now_ms = self._broker.now_ms()
        left = FRAMES_PER_TURN
        while frames and left and not self._reasons and len(exchanges) < MAX_IN_FLIGHT_REQUESTS:
            if self._ready_bytes >= MAX_READY_BYTES and self._is_full():
                break
            self._enter(frames.popleft(), now_ms)
            left -= 1
        if len(exchanges) >= MAX_IN_FLIGHT_REQUESTS:
            self.is_muted = True
        elif frames and not self._reasons:
            self.mute(Mute.NEXT_TURN)

    @property
    def needs_turn(self) -> bool:
        """True if the driver has to end Mute.NEXT_TURN soon."""
        return bool(self._reasons & Mute.NEXT_TURN)

    @property
    def is_stopped(self) -> bool:
        """True if the path accepts no request any more."""
        return bool(self._reasons & Mute.STOPPED)

    def mute(self, reason: Mute) -> None:
        """Works on no further request while the reason holds."""
        self._reasons |= reason
        self.is_muted = True

    def unmute(self, reason: Mute) -> None:
        """Ends a reason for muting. The others are unaffected."""
        self._reasons &= ~reason
        self._follow_reasons()

    def _follow_reasons(self) -> None:
        self.is_muted = self._reasons != 0 or len(self._exchanges) >= MAX_IN_FLIGHT_REQUESTS or self._is_full()

    def take_throttle_ms(self) -> int:
        """Returns for how long the client is throttled from now on, 0 if nothing has changed since the last call."""
        throttle_ms, self._throttle_ms = self._throttle_ms, 0
        return throttle_ms

    def _throttle(self, throttle_ms: int) -> None:
        self._throttle_ms = max(self._throttle_ms, throttle_ms)
        self.mute(Mute.THROTTLED)

    def _end_order(self, _: asyncio.Future[object]) -> None:
        self.client.keeps_order = False
        self.unmute(Mute.ORDER)

    def _is_full(self) -> bool:
        """Returns whether responses of MAX_READY_BYTES are in memory.

        Counting only what is added, and all of it again at the limit, costs less than following what is taken.
        """
        if self._ready_bytes >= MAX_READY_BYTES:
            ready = [exchange.data for exchange in self._exchanges if exchange.data is not None]
            self._ready_bytes = _bytes_in_memory(cast("Pieces", self._output)) + sum(map(_bytes_in_memory, ready))
        return self._ready_bytes >= MAX_READY_BYTES

    def take_output(self) -> bytes:
        """Removes and returns the framed responses that may leave now, empty if there are none."""
        output = self.take_pieces()
        return output if isinstance(output, bytes) else read_pieces(output)

    def take_pieces(self) -> bytes | Pieces:
        """Removes and returns what `take_output` returns: as pieces if parts of files are among it."""
        output, exchanges = self._output, self._exchanges
        while exchanges and (data := exchanges[0].data) is not None:
            if type(data) is bytes:
                output.append(data)
            else:
                self._put(data)
            exchanges.popleft()
        if not output:
            return b""
        self._output = []
        if self.is_muted:
            self._follow_reasons()
        if self._has_file_slices:
            self._has_file_slices = False
            return cast("Pieces", output)
        return output[0] if len(output) == 1 else b"".join(output)

    def _put(self, data: bytes | Pieces) -> None:
        if isinstance(data, bytes):
            self._output.append(data)
        else:
            self._output += cast("list[bytes]", data)
            self._has_file_slices = True

    def take_farewell(self) -> bytes:
        """Removes and returns the last response, which leaves after `close_delay_ms`. Empty if there is none.

        It is dropped if an earlier request has no response yet, since clients expect the order of their requests.
        """
        farewell, self._farewell = self._farewell, b""
        return b"" if self._exchanges else farewell

    def stop(self) -> None:
        """Accepts no further requests and drops those that wait; those in flight are still answered."""
        self._frames.clear()
        self.mute(Mute.STOPPED)

    def close(self) -> None:
        """Ends the long polls of a client that is gone."""
        self.stop()
        self._is_closed = True
        self._output.clear()
        for exchange in self._exchanges:
            exchange.abandon()
        self._exchanges.clear()
        # All refer to the driver or the path. Without these cycles both are freed now, not by the garbage collector.
        self._fast_paths = {}
        self._on_response = _ignore_response
        self._enter = _ignore_frame
        self.client.throttle = ignore_throttle
        facts = self.client.facts
        if facts is not None and facts.instance_id is not None:
            self._broker.client_telemetry.disconnected(facts.instance_id)

    @property
    def must_log_in(self) -> bool:
        """True until the client has authenticated with SASL for the first time, if it has to."""
        return self._sasl is not None and self._sasl.principal is None

    @property
    def queued(self) -> int:
        """Number of requests that were received and are not processed yet."""
        return len(self._frames)

    @property
    def is_working(self) -> bool:
        """True if the broker works on a request. One that waits behind a throttle, perhaps for days, does not count."""
        return bool(self._exchanges)

    @property
    def in_flight(self) -> int:
        """Number of requests that were received and are not answered yet."""
        return len(self._exchanges) + len(self._frames)

    # --- one request --------------------------------------------------------------------------------------------------

    def _process_with_sasl(self, frame: bytes, now_ms: int) -> None:
        """Lets the authentication answer a frame, or serves it if the authentication allows that."""
        sasl = self._sasl
        assert sasl is not None
        was_complete, is_again = sasl.is_complete, sasl.principal is not None
        step = sasl.receive(frame, now_ms)
        if step is None:
            self._process_frame(frame, now_ms)
            if not was_complete and self.client.begins_with_api_versions:
                sasl.versions_answered()
        elif step.failure is not None:
            self._fail_login(sasl, step, now_ms, is_again=is_again)
        else:
            if step.output:
                self._send(frame, step.output)
            if sasl.is_complete:
                self._complete_login(sasl, now_ms, is_again=is_again)

    def _fail_login(self, sasl: LoginStates, step: SaslStep, now_ms: int, *, is_again: bool) -> None:
        """Stops the path. The client gets the last response after the delay."""
        assert step.failure is not None
        self._refuse(step.failure)
        self.close_delay_ms, self._farewell = step.delay_ms, step.output
        if step.is_authentication:
            self._note_login(sasl.mechanism, step.failure, now_ms, is_again=is_again)

    def _complete_login(self, sasl: LoginStates, now_ms: int, *, is_again: bool) -> None:
        """Serves the requests of a client that has logged in."""
        assert sasl.principal is not None
        self.client.principal = sasl.principal
        self.client.is_token_authenticated = sasl.is_token_authenticated
        self._reader.allow(self._settings.max_frame_bytes, self._settings.max_request_bytes, BULK_KEYS)
        if sasl.session_end_ms is None:
            self._enter = self._process_frame
        self._note_login(sasl.mechanism, None, now_ms, is_again=is_again)

    def handshake_ended(self, *, succeeded: bool) -> None:
        """Counts a TLS handshake. On a listener with SASL a handshake that succeeds ends no authentication."""
        if not succeeded or self._sasl is None:
            self._settings.logins["successful_authentication" if succeeded else "failed_authentication"] += 1

    def _note_login(self, mechanism: str, failure: str | None, now_ms: int, *, is_again: bool) -> None:
        outcome = "successful" if failure is None else "failed"
        self._settings.logins[f"{outcome}_{'re' if is_again else ''}authentication"] += 1
        if self._broker.audit is not None:
            self._broker.audit.login(self.client, self._settings.listener_name, now_ms, mechanism, failure)

    def _process_frame(self, frame: bytes, now_ms: int) -> None:
        """Answers a request by its fast path if possible, otherwise on the general path."""
        if self._broker.request_quota is not None and (self._sasl is None or self._sasl.is_complete):
            use = self._broker.request_quota.begin(self.client.principal, frame)
            if use is not None:
                self._take_general_path(frame, now_ms, None, use)
                return
        fast_path = self._fast_paths.get(frame[1]) if len(frame) > _REQUEST_START.size else None
        if fast_path is not None:
            response = fast_path.respond(frame, now_ms)
            if response is not None:
                if type(response) is bytes and not self._exchanges:
                    self._output.append(response)
                    self._ready_bytes += len(response)
                elif type(response) is DeferredResponse:
                    self._exchanges.append(response)
                else:
                    self._send(frame, response)
                return
        self._take_general_path(frame, now_ms, fast_path)

    def _take_general_path(
        self, frame: bytes, now_ms: int, fast_path: FastPath | None, use: RequestUse | None = None
    ) -> None:
        """Decodes the request in a frame and calls the handler of its API. `use` counts the time that this takes."""
        bound = self.apis.bound(frame[:4])
        if bound is None:
            self._refuse_unserved(frame)
            return
        if bound.key is not ApiKey.API_VERSIONS:
            self.client.has_begun = True
        authorizer, audit = self._broker.authorizer, self._broker.audit
        rights = None
        if authorizer is not None:
            rights = self.client.rights(authorizer, bound.key, is_audited=audit is not None)
        is_large = len(frame) > LARGE_REQUEST_BYTES and bound.key in _DECODED_IN_A_THREAD
        try:
            header, body_at = decode_request_header(frame)
            exchange = Exchange(bound, frame, body_at, header.correlation_id, rights)
            if fast_path is not None and fast_path.learns_before_handler:
                learned = fast_path.learn(exchange, now_ms)
                if learned is not None:
                    self._send(frame, learned)
                    return
            # A large request stays empty until a thread has decoded it.
            exchange.request = request_class(bound.key)() if is_large else exchange.decode()
        except DecodeError as error:
            self._refuse(_malformed(bound, error))
            return
        context = RequestContext(
            bound.key,
            bound.version,
            header.correlation_id,
            header.client_id or "",
            self.client,
            now_ms,
            rights=rights,
            frame_bytes=len(frame),
            use=use,
        )
        response: object
        if is_large:
            self.client.keeps_order = bound.key in _HANDLED_IN_ORDER
            response = asyncio.ensure_future(self._decode_and_respond(exchange, frame, context))
        else:
            response = self._respond(exchange, context)
        if asyncio.isfuture(response):
            self._await_response(exchange, response, use)
        elif data := self._complete(exchange, response, use):
            if self._exchanges:
                self._exchanges.append(exchange)
            else:
                self._put(data)
            if fast_path is not None and not fast_path.learns_before_handler:
                fast_path.learn(exchange, now_ms)
        if self.client.form is not self.apis.form:
            self._serve(self.apis.in_form(self.client.form))
        # `now_ms` is the beginning of the turn. Requests with a fast path are short, so they do not read the clock.
        if len(self._frames) >= MANY_REQUESTS and self._broker.now_ms() - now_ms >= LONGEST_TURN_MS:
            self.mute(Mute.NEXT_TURN)

    def _respond(self, exchange: Exchange, context: RequestContext) -> object:
        """Calls the handler. The audit log, if there is one, gets the request and the response."""
        audit = self._broker.audit
        # The handler may change its request.
        change = audit.change_of(context, exchange.request) if audit is not None else None
        response = exchange.bound.respond(self._broker, context, exchange.request)
        if audit is not None:
            audit.answered(context, change, response)
        return response

    async def _decode_and_respond(self, exchange: Exchange, frame: bytes, context: RequestContext) -> object:
        """Decodes a large request in a thread, so that other requests do not wait for that, and calls the handler."""
        bound, loop = exchange.bound, asyncio.get_running_loop()
        try:
            decoded = await loop.run_in_executor(None, bound.decode_prefix, frame, exchange.body_at, bound.version)
        except DecodeError as error:
            return CloseConnection(_malformed(bound, error))
        request = exchange.request = decoded[0]
        answer = self._respond(exchange, context)
        response = await answer if asyncio.isfuture(answer) else answer

        if bound.key in _HANDLED_IN_ORDER:
            await loop.run_in_executor(None, free, request)
            if isinstance(response, Message):
                message = response
                return await self._broker.made_in_thread(lambda: message, bound.version)
        return response

    def _await_response(self, exchange: Exchange, response: asyncio.Future[object], use: RequestUse | None) -> None:
        """Queues a request whose response has to wait."""
        if use is not None:
            use.pause()
        exchange.future = response
        # The frame may be large, and the response does not need it.
        exchange.frame = b""
        self._exchanges.append(exchange)
        if self.client.keeps_order:
            self.mute(Mute.ORDER)
            response.add_done_callback(self._end_order)
        response.add_done_callback(partial(self._settled, exchange, use))

    def _settled(self, exchange: Exchange, use: RequestUse | None, future: asyncio.Future[object]) -> None:
        """Completes a request whose response has waited; the client may be gone by now."""
        if self._is_closed:
            if not future.cancelled():
                # Marks the exception as retrieved; asyncio would otherwise log it.
                future.exception()
            if use is not None:
                # Else a client could work without limit by closing its connections.
                use.throttle_ms(self._broker.now_ms())
            return
        if use is not None:
            use.resume()
        self._complete(exchange, exchange.bound.response_of(future, exchange.request), use)
        self._on_response()

    def _complete(self, exchange: Exchange, response: object, use: RequestUse | None) -> bytes | Pieces:
        """Returns the framed response, which becomes `Exchange.data`. It is empty if the client gets none."""
        exchange.response = response
        data: bytes | Pieces = b""
        if use is not None:
            use.throttle(response, self._broker.now_ms(), self.client.throttle)
        if isinstance(response, CloseConnection):
            self._refuse(response.reason)
        elif response is not None:
            bound, pieces = exchange.bound, None
            if bound.key is ApiKey.FETCH:
                pieces = encode_in_pieces(exchange.correlation_id, bound.version, response)
            data = pieces or bound.encode(exchange.correlation_id, response, exchange.request)
            self._ready_bytes += _bytes_in_memory(data)
        if use is not None:
            use.finish(self._broker.now_ms())
        exchange.data = data
        return data

    def _send(self, frame: bytes, response: bytes | DeferredResponse) -> None:
        """Queues a response that was made without a handler."""
        if isinstance(response, DeferredResponse):
            self._exchanges.append(response)
            return
        self._ready_bytes += len(response)
        if self._exchanges:
            waiting = DeferredResponse(frame, response, self.apis, self._on_response)
            waiting.data = response
            self._exchanges.append(waiting)
        else:
            self._output.append(response)

    def _refuse_unserved(self, frame: bytes) -> None:
        """Stops the path for an unknown API or version.

        Only ApiVersions is answered, so that clients can find a common version.
        """
        if len(frame) < _REQUEST_START.size:
            self._refuse(f"a request of {len(frame)} bytes is too short for a header")
            return
        key, version, correlation_id = _REQUEST_START.unpack_from(frame)
        if key == ApiKey.API_VERSIONS:
            from kcoord.server.api.handlers.api_versions import unsupported_version_response

            self._send(frame, unsupported_version_response(self._broker, correlation_id))
            return
        try:
            name = ApiKey(key).name
        except ValueError:
            name = f"api key {key}"
        self._refuse(f"{name} v{version} is not served{guess_protocol(frame)}")

    def _refuse(self, reason: str) -> None:
        """Stops the path: bytes after an invalid request cannot be trusted. Responses that are ready still leave."""
        self.stop()
        if self.close_reason is None:
            self.close_reason = reason


def _malformed(bound: BoundApi, error: DecodeError) -> str:
    return f"malformed {bound.key.name} v{bound.version} request: {error}"


def _bytes_in_memory(data: bytes | Pieces) -> int:
    """Returns the size of a response without parts of files, which only the driver reads."""
    return len(data) if isinstance(data, bytes) else sum(len(piece) for piece in data if isinstance(piece, bytes))


def _ignore_response() -> None:
    """Replaces `on_response` when the client is gone."""


def _ignore_frame(frame: bytes, now_ms: int) -> None:
    """Replaces the entry of frames when the client is gone."""
