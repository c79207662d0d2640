# SPDX-License-Identifier: Apache-2.0
"""The path of a client's requests in front of an upstream: answered here, or passed on and back without decoding.

Theory of operation. A SplicedPath is a RequestPath (`kcoord.server.net.request_path` has the contract with its driver)
with a second side: an UpstreamLink, the one connection to a broker of the upstream that belongs to this client
connection. All of it runs in the event loop.

Requests. `receive` cuts the client's bytes at frames. The first twelve bytes of a frame have its length, API and
version, which decide how it is treated:

* *Answered here*: the frame is collected and goes the way of every RequestPath: fast path, API table, handler.
* *Passed on*: the bytes go to the link as they arrive, without waiting for the end of the frame. A Produce with acks=0
  has no response, so its fields up to acks are read first.
* *Rewritten* (`kcoord.upstream.rewriting`): the frame is collected and passed on as a whole, because the version may
  have to be changed.
* *Chosen*: the frame is collected and decoded; then it is answered here or passed on like a rewritten one.

The link is opened by the first request that is passed on. A client that only sends requests of groups has none.

Responses. `_exchanges` has an entry for each request that is not answered yet, in the order of the requests; a
Forwarded stands for a response of the upstream. The upstream answers in order, so `_expected`, the Forwarded entries
that have no response yet, tells whose response comes next. The link passes the bytes of a response to `_respond`:

* If its entry is the first of `_exchanges`, the bytes go straight to the client's transport, as they arrive. They never
  wait for the end of the frame.
* If a request that is answered here is before it, the path *holds*: it keeps the bytes, and stops reading the link and
  the client until that response has left.
* A response to be rewritten is collected, and becomes the `data` of its entry.

So every response leaves in the order of its request, and correlation ids need no change.

Backpressure. Each side reads only while the other one takes bytes. If the link's transport asks for a pause
(`pause_writing`), or while the link is being opened, the path is muted, so the driver stops reading the client. If the
client's transport asks for it, the driver calls `pause`, and the link stops reading the upstream. So a connection keeps
at most one read of each side beyond the transports' own high-water marks. Frames that are collected are bounded: from
the client by kcoord.request.max.bytes, from the upstream by MAX_REWRITTEN_BYTES.

End. If the upstream closes the link or cannot be reached, the client connection is closed: a client treats that like a
broker that closes its connection. Only on kcoord's own port, where requests may go to any broker of the upstream, a
link that was idle is replaced when it is needed again. If the client closes first, requests that it has sent completely
still reach the upstream, and its link is closed. Bytes that are no request, or no response, close both.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias, cast

from kcoord.config import Kip1327Form
from kcoord.server.api.api_table import KEY_AND_VERSION
from kcoord.server.net.foreign_protocol import guess_protocol
from kcoord.server.net.request_path import FRAMES_PER_TURN, PathSettings, RequestPath
from kcoord.upstream.gateway import Gateway
from kcoord.upstream.link import UpstreamLink
from kcoord.upstream.produce_acks import produce_acks
from kcoord.upstream.rewriting import REWRITTEN_APIS, rewriting
from kcoord.upstream.versions import CAPS, CHOSEN_APIS, CREATION_TIME_VERSIONS, forwarded_versions, is_for_kcoord
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.framing import decode_request_header

MAX_REWRITTEN_BYTES: Final = 256 << 20
"""The largest response that is decoded: Metadata of a very large cluster."""
_START: Final = struct.Struct(">ihhi")
"""Length, API key, version and correlation id."""
_LENGTH_BYTES: Final = 4
_MOST_BEFORE_ACKS: Final = 1 << 17
"""More bytes than a client id and a transactional id can have."""
_SHORT: Final = struct.Struct(">h")
_COLLECTED_APIS: Final = REWRITTEN_APIS | CHOSEN_APIS

Write: TypeAlias = Callable[[bytes | memoryview], None]


def _write_nowhere(data: bytes | memoryview) -> None:
    """Replaces the client's transport before it is known and after it is gone."""


def _end_nothing() -> None:
    """Replaces the close of the client's transport."""


class Forwarded:
    """A request that was passed on. `data` is set if its response was rewritten."""

    __slots__ = ("client_version", "data", "key", "upstream_version")

    def __init__(self, key: ApiKey | None = None, upstream_version: int = 0, client_version: int = 0) -> None:
        self.key = key
        """The API whose response is rewritten, None if it is passed on as it is."""
        self.upstream_version = upstream_version
        self.client_version = client_version
        self.data: bytes | None = None

    def abandon(self) -> None:
        """Does nothing: the upstream has the request."""


class SplicedPath(RequestPath):
    """The path of one client connection; the module describes it. `node_id`: the broker that its port stands for."""

    def __init__(
        self, settings: PathSettings, gateway: Gateway, node_id: int | None, on_answer: Callable[[], None]
    ) -> None:
        self._link: UpstreamLink | None = None
        self._is_holding = False
        super().__init__(settings, on_answer)
        self._gateway = gateway
        self._node_id = node_id
        self._write: Write = _write_nowhere
        self._end: Callable[[], None] = _end_nothing
        self._rest = b""
        """Bytes of the client after the last frame that was begun."""
        self._left = 0
        """Number of bytes of the current frame that still have to be passed on."""
        self._collected = bytearray()
        self._missing = 0
        """Number of bytes that the frame in `_collected` still lacks."""
        self._completed = 0
        self._expected: deque[Forwarded] = deque()
        self._response_rest = b""
        self._response_left = 0
        self._response = bytearray()
        self._response_missing = 0
        self._forwarded = forwarded_versions(gateway.versions_of(node_id))
        self._serve(gateway.table(node_id))

    def attach(self, transport: asyncio.Transport) -> None:
        """Gives the path the client's transport, for responses that are passed on."""
        self._write, self._end = transport.write, transport.close

    # --- called by the driver -----------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> int:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        before = self._completed
        self._scan(data)
        self.has_unfinished_frame = bool(self._left or self._missing or (self._rest and not self.is_muted))
        if self._output:
            self._on_answer()
        return self._completed - before

    def process(self) -> None:
        if self._is_holding:
            self._continue_responses()
        if self._rest and not self.is_muted:
            data, self._rest = self._rest, b""
            self._scan(data)

    def pause(self, is_paused: bool) -> None:
        super().pause(is_paused)
        self._follow_client()

    def stop(self) -> None:
        super().stop()
        self._rest = b""

    def close(self) -> None:
        super().close()
        self._write, self._end = _write_nowhere, _end_nothing
        self._expected.clear()
        if self._link is not None:
            self._link.close()

    def _mute_or_unmute(self) -> None:
        super()._mute_or_unmute()
        if self._is_holding or (self._link is not None and self._link.is_blocked):
            self.is_muted = True

    # --- requests -----------------------------------------------------------------------------------------------------

    def _scan(self, data: bytes) -> None:
        """Works on the frames in `data`. Keeps the rest if the path becomes muted, or if a header is incomplete."""
        position, end, turns = 0, len(data), FRAMES_PER_TURN
        while position < end:
            if self._left:
                size = min(self._left, end - position)
                assert self._link is not None
                self._link.write(data if size == end else memoryview(data)[position : position + size])
                self._left -= size
                self._completed += not self._left
            elif self._missing:
                size = min(self._missing, end - position)
                self._collected += memoryview(data)[position : position + size]
                self._missing -= size
                if not self._missing:
                    frame = bytes(self._collected)
                    self._collected.clear()
                    self._take(frame)
            elif self.is_stopped:
                return
            elif self.is_muted or not turns or end - position < _START.size:
                if not turns and not self.is_muted:
                    self.needs_turn = True
                    self._mute_or_unmute()
                self._rest = data[position:]
                return
            else:
                turns -= 1
                size = self._begin(data, position)
                if size < 0:
                    self._rest = data[position:]
                    return
            position += size

    def _begin(self, data: bytes, position: int) -> int:
        """Decides about the frame at `position`. Returns how many bytes are done, -1 if more have to arrive first."""
        length: int
        length, key, version, _ = _START.unpack_from(data, position)
        streams = not self._must_log_in and self._is_forwarded(key, version) and key not in _COLLECTED_APIS
        most_bytes = self._settings.max_frame_bytes if streams else self._most_collected_bytes
        if not _START.size - _LENGTH_BYTES <= length <= most_bytes:
            hint = guess_protocol(data)
            self._refuse(f"request of {length} bytes with api key {key}, allowed are {most_bytes}{hint}")
            return len(data)
        if streams:
            return self._begin_forward(data, position, length, key, version)
        start = position + _LENGTH_BYTES
        if len(data) - start >= length:
            self._take(data[start : start + length])
            return _LENGTH_BYTES + length
        self._missing = length
        return _LENGTH_BYTES

    def _is_forwarded(self, key: int, version: int) -> bool:
        versions = self._forwarded.get(key)
        return versions is not None and (version in versions or self._is_creation_time(key, version))

    def _is_creation_time(self, key: int, version: int) -> bool:
        """Returns whether this is the version of KIP-1327, and the upstream has the one before it."""
        added = CREATION_TIME_VERSIONS.get(cast("ApiKey", key))
        return version == added and self._forwarded[key].stop == added and self.apis.form is Kip1327Form.CREATION_TIME

    @property
    def _must_log_in(self) -> bool:
        """True while the client logs in, also again. Requests are not passed on then."""
        return self._sasl is not None and not self._sasl.is_complete

    @property
    def _most_collected_bytes(self) -> int:
        settings = self._settings
        if settings.sasl is not None and self._must_log_in:
            return settings.sasl().max_token_bytes
        return settings.max_request_bytes

    def _begin_forward(self, data: bytes, position: int, length: int, key: int, version: int) -> int:
        """Begins to pass a frame on. `_scan` does the rest."""
        has_response = True
        if key == ApiKey.PRODUCE:
            acks = produce_acks(data, position + _START.size, version)
            if acks is None:
                if len(data) - position < min(length + _LENGTH_BYTES, _MOST_BEFORE_ACKS):
                    return -1
                self._refuse(f"malformed PRODUCE v{version} request: its end is before acks")
                return len(data)
            has_response = acks != 0
        if not self._session_continues(data[position + _LENGTH_BYTES : position + _START.size]):
            return len(data)
        self._open_link()
        if has_response:
            self._expect(Forwarded())
        self._left = length + _LENGTH_BYTES
        return 0

    def _session_continues(self, start: bytes) -> bool:
        """Returns whether the client's SASL session, if it has an end, is not over."""
        if self._sasl is None or self._sasl.session_end_ms is None:
            return True
        step = self._sasl.receive(start, self._broker.now_ms())
        if step is None:
            return True
        self._refuse(step.failure or "the client has to log in again")
        return False

    def _open_link(self) -> UpstreamLink:
        if self._link is None:
            self.client.has_begun = True
            self._link = UpstreamLink(self)
            self._mute_or_unmute()
            self._broker.spawn(self._link.open(self._gateway, self._node_id))
            self._follow_client()
        return self._link

    def _expect(self, entry: Forwarded) -> None:
        self._exchanges.append(entry)
        self._expected.append(entry)
        if len(self._exchanges) >= self._most_exchanges:
            self._mute_or_unmute()

    def _take(self, frame: bytes) -> None:
        """Answers a whole frame, or passes it on."""
        self._completed += 1
        key, version = KEY_AND_VERSION.unpack_from(frame)
        if self._must_log_in or not self._is_forwarded(key, version) or self._is_for_kcoord(frame, key, version):
            self._enter(frame, self._broker.now_ms())
            return
        if self.is_stopped or not self._session_continues(frame[: _START.size - _LENGTH_BYTES]):
            return
        upstream_version = min(version, CAPS.get(ApiKey(key), version))
        link = self._open_link()
        self._expect(Forwarded(ApiKey(key) if key in REWRITTEN_APIS else None, upstream_version, version))
        if upstream_version != version:
            frame = frame[:2] + _SHORT.pack(upstream_version) + frame[4:]
        link.write(len(frame).to_bytes(_LENGTH_BYTES) + frame)

    def _is_for_kcoord(self, frame: bytes, key: int, version: int) -> bool:
        if key not in CHOSEN_APIS:
            return False
        try:
            _, offset = decode_request_header(frame)
            request, _ = request_class(key).decode_prefix(frame, offset, version)
        except DecodeError as error:
            self._refuse(f"malformed {ApiKey(key).name} v{version} request: {error}")
            return False
        return is_for_kcoord(request, self._broker.node_id)

    # --- the link -----------------------------------------------------------------------------------------------------

    def link_changed(self) -> None:
        """Follows `is_blocked` of the link."""
        self._mute_or_unmute()
        self._on_answer()

    def link_lost(self, link: UpstreamLink, reason: str) -> None:
        """Closes the client connection. On kcoord's own port, a link that nothing waits for is opened again later."""
        if self._expected or self._left or not link.was_open:
            self._fail_responses(reason)
        elif self._node_id is None:
            self._link = None
            self.link_changed()
        else:
            # Brokers close idle connections, so that is no event for the log.
            self._end()

    def _follow_client(self) -> None:
        """Reads responses only while the client takes them, and while none of kcoord's own is before them."""
        if self._link is not None:
            self._link.pause_reading(self._is_paused or self._is_holding)

    # --- responses ----------------------------------------------------------------------------------------------------

    def respond(self, data: bytes) -> None:
        """Passes on bytes of the upstream."""
        if self._response_rest:
            data = self._response_rest + data
            self._response_rest = b""
        if self._is_holding:
            self._response_rest = data
            return
        position, end = 0, len(data)
        while position < end:
            if self._response_left:
                size = min(self._response_left, end - position)
                self._emit(data if size == end else memoryview(data)[position : position + size])
                self._response_left -= size
                if not self._response_left:
                    self._exchanges.popleft()
                    self._after_response()
            elif self._response_missing:
                size = min(self._response_missing, end - position)
                self._response += memoryview(data)[position : position + size]
                self._response_missing -= size
                if not self._response_missing:
                    frame = bytes(self._response)
                    self._response.clear()
                    self._rewrite(self._expected.popleft(), frame)
            elif end - position < _LENGTH_BYTES:
                self._response_rest = data[position:]
                return
            else:
                begun = self._begin_response(int.from_bytes(data[position : position + _LENGTH_BYTES], signed=True))
                if begun is None:
                    self._response_rest = data[position:]
                    return
                size = begun
            position += size

    def _begin_response(self, length: int) -> int | None:
        """Decides about the next response. Returns how many bytes are done, None if none can be taken now."""
        if not self._expected or length < _LENGTH_BYTES:
            self._fail_responses(f"the upstream sent a response of {length} bytes that no request waits for")
            return None
        entry = self._expected[0]
        if entry.key is not None:
            if length > MAX_REWRITTEN_BYTES:
                self._fail_responses(f"the upstream sent {length} bytes as the response to {entry.key.name}")
                return None
            self._response_missing = length
            return _LENGTH_BYTES
        if self._exchanges[0] is not entry:
            self._hold(is_holding=True)
            return None
        self._expected.popleft()
        self._response_left = length + _LENGTH_BYTES
        return 0

    def _fail_responses(self, reason: str) -> None:
        self._expected.clear()
        self._refuse(reason)
        self._on_answer()

    def _hold(self, *, is_holding: bool) -> None:
        self._is_holding = is_holding
        self._mute_or_unmute()
        self._follow_client()

    def _continue_responses(self) -> None:
        """Passes on the responses that were held, if the one before them has left."""
        if output := self.take_output():
            self._write(output)
        if self._expected and self._exchanges and self._exchanges[0] is self._expected[0]:
            self._hold(is_holding=False)
            self.respond(b"")

    def _emit(self, data: bytes | memoryview) -> None:
        if self._output:
            self._write(self.take_output())
        self._write(data)

    def _after_response(self) -> None:
        """Sends the responses that waited for this one, and takes further requests if that is possible now."""
        if self._exchanges and self._exchanges[0].data is not None:
            self._write(self.take_output())
        if self.is_muted:
            self._mute_or_unmute()
            self._on_answer()

    def _rewrite(self, entry: Forwarded, frame: bytes) -> None:
        """Rewrites a response, now or when the metadata image has the topics that it names."""
        assert entry.key is not None
        try:
            response = rewriting(frame, entry.key, entry.upstream_version, entry.client_version, self._gateway)
        except DecodeError as error:
            self._fail_responses(
                f"the upstream sent a malformed response to {entry.key.name} v{entry.upstream_version}: {error}"
            )
            return

        def finish() -> None:
            if not self._is_closed:
                entry.data = response.finish()
                self._on_answer()

        if not response.looks and not self._gateway.lacks(response.needed):
            finish()
            return

        async def finish_later() -> None:
            await self._gateway.until_known(response.needed)
            finish()

        self._broker.spawn(finish_later())
