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

Logins. If clients log in at the upstream (`kcoord.security.relayed_login`), the link is opened by the SaslHandshake,
and requests of the login are passed on in their order, like others. The path is muted until each of them is answered.
The link then belongs to the user of the client. If it is lost, it is not replaced: the client connection is closed when
the client needs the link again.

Responses (`kcoord.upstream.response_side`). `_exchanges` has an entry for each request that is not answered yet, in the
order of the requests; a Forwarded stands for a response of the upstream. The upstream answers in order, so `_expected`,
the Forwarded entries that have no response yet, tells whose response comes next. The link passes the bytes of responses
to `respond`:

* If its entry is the first of `_exchanges`, the bytes go straight to the client's transport, as they arrive. They never
  wait for the end of the frame.
* If the response to an earlier request has not left yet, the path *holds*: it keeps the bytes, and stops reading the
  link and the client until then.
* A response to be rewritten is collected, and becomes the `data` of its entry. So there is one of them at a time.

So every response leaves in the order of its request, and correlation ids need no change.

Backpressure. Each side reads only while the other one takes bytes. If the link's transport asks for a pause
(`pause_writing`), or while the link is being opened, the path is muted, so the driver stops reading the client. If the
client's transport asks for it, the driver mutes the path, and the link stops reading the upstream. So a connection
keeps at most one read of each side beyond the transports' own high-water marks. Frames that are collected are bounded:
from the client by kcoord.request.max.bytes, from the upstream by MAX_REWRITTEN_BYTES.

End. If the upstream closes the link or cannot be reached, the client connection is closed: a client treats that like a
broker that closes its connection. Only on kcoord's own port, where requests may go to any broker of the upstream, a
link that was idle is replaced when it is needed again. If the client closes first, requests that it has sent completely
still reach the upstream, and its link is closed. Bytes that are no request, or no response, close both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, cast

from kcoord.config import Kip1327Form
from kcoord.security.relayed_login import RelayedLogin
from kcoord.server.api.api_table import KEY_AND_VERSION
from kcoord.server.net.foreign_protocol import guess_protocol
from kcoord.server.net.muting import Mute
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import FRAMES_PER_TURN, MAX_IN_FLIGHT_REQUESTS
from kcoord.upstream.gateway import Gateway
from kcoord.upstream.link import UpstreamLink
from kcoord.upstream.produce_acks import produce_acks
from kcoord.upstream.response_side import PASSED, Forwarded, ResponseSide
from kcoord.upstream.rewriting import REWRITTEN_APIS
from kcoord.upstream.versions import CAPS, CHOSEN_APIS, CREATION_TIME_VERSIONS, forwarded_versions, is_for_kcoord
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.framing import decode_request_header, encode_request
from kcoord_protocol.messages import CreateTopicsRequest

_START: Final = struct.Struct(">ihhi")
"""Length, API key, version and correlation id."""
_LENGTH_BYTES: Final = 4
_MOST_BEFORE_ACKS: Final = 1 << 17
"""More bytes than a client id and a transactional id can have."""
_SHORT: Final = struct.Struct(">h")
_COLLECTED_APIS: Final = REWRITTEN_APIS | CHOSEN_APIS


class _Way(Enum):
    """How a frame is treated; the module describes the ways."""

    STREAMED = auto()
    PRODUCED = auto()
    """Passed on as it arrives, but the field acks is read first."""
    COLLECTED = auto()


class SplicedPath(ResponseSide):
    """The path of one client connection; the module describes it. `node_id`: the broker that its port stands for."""

    def __init__(
        self, settings: PathSettings, gateway: Gateway, node_id: int | None, on_response: Callable[[], None]
    ) -> None:
        super().__init__(settings, gateway, node_id, on_response)
        self._rest = b""
        """Bytes of the client after the last frame that was begun."""
        self._collected = bytearray()
        self._missing = 0
        """Number of bytes that the frame in `_collected` still lacks."""
        self._completed = 0
        self._forwarded = forwarded_versions(gateway.versions_of(node_id))
        self._ways: dict[bytes, _Way] = {}
        """The ways of frames that the client has sent, by API and version."""
        self._produce_starts: dict[bytes, bytes] = {}
        """The bytes from the client id to acks of the last Produce with a response, by API and version."""
        self._serve(gateway.table(node_id))

    # --- called by the driver -----------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> int:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        before = self._completed
        self._scan(data)
        self.has_unfinished_frame = bool(self._left or self._missing or (self._rest and not self.is_muted))
        if self._output:
            self._on_response()
        return self._completed - before

    def process(self) -> None:
        if self._reasons & Mute.EARLIER_RESPONSE:
            self._continue_responses()
        if self._rest and not self.is_muted:
            data, self._rest = self._rest, b""
            self._scan(data)

    def stop(self) -> None:
        super().stop()
        self._rest = b""

    # --- requests -----------------------------------------------------------------------------------------------------

    def _scan(self, data: bytes) -> None:
        """Works on the frames in `data`. Keeps the rest if the path becomes muted, or if a header is incomplete.

        The bytes from `start` to `position` are passed on in one write, which is cheaper than a write for each frame.
        """
        start, end = 0, len(data)
        if self._left > end:
            self._left -= end
            self._pass_on(data, 0, end)
            return
        position = self._left
        if position:
            self._left = 0
            self._completed += 1
        elif self._missing:
            start = position = self._collect(data)
        turns = FRAMES_PER_TURN
        while position < end:
            if self.is_muted or not turns or end - position < _START.size:
                self._keep(data, position, needs_turn=not turns)
                break
            turns -= 1
            length = int.from_bytes(data[position : position + _LENGTH_BYTES], signed=True)
            key_and_version = data[position + _LENGTH_BYTES : position + 8]
            way = (self._ways.get(key_and_version) if self._sasl is None else None) or self._way(key_and_version)
            most_bytes = self._most_collected_bytes if way is _Way.COLLECTED else self._settings.max_frame_bytes
            if not _START.size - _LENGTH_BYTES <= length <= most_bytes:
                self._refuse(f"request of {length} bytes, allowed are {most_bytes}{guess_protocol(data)}")
                break
            behind = position + _LENGTH_BYTES + length
            if way is _Way.COLLECTED:
                self._pass_on(data, start, position)
                start = position = self._begin_collected(data, position, length)
                continue
            has_response = way is _Way.STREAMED or self._wants_response(key_and_version, data, position, behind)
            if has_response is None:
                break
            if self._sasl is not None and not self._session_continues(data[position + 4 : position + _START.size]):
                break
            if self._link is None:
                if not self._may_open_link():
                    break
                self._open_link()
            if has_response:
                self._expect(PASSED)
            if behind > end:
                self._left = behind - end
                behind = end
            else:
                self._completed += 1
            position = behind
        if start < position:
            self._pass_on(data, start, position)

    def _keep(self, data: bytes, position: int, *, needs_turn: bool) -> None:
        if self.is_stopped:
            return
        self._rest = data[position:]
        if needs_turn and not self.is_muted:
            self.mute(Mute.NEXT_TURN)

    def _pass_on(self, data: bytes, start: int, end: int) -> None:
        if start < end:
            assert self._link is not None
            self._link.write(data if end - start == len(data) else memoryview(data)[start:end])

    def _way(self, key_and_version: bytes) -> _Way:
        if self._must_log_in:
            return _Way.COLLECTED
        way = self._ways.get(key_and_version)
        if way is None:
            key, version = KEY_AND_VERSION.unpack(key_and_version)
            way = _Way.COLLECTED
            if self._is_forwarded(key, version) and key not in _COLLECTED_APIS:
                way = _Way.PRODUCED if key == ApiKey.PRODUCE else _Way.STREAMED
                self._ways[key_and_version] = way
        return way

    def _wants_response(self, key_and_version: bytes, data: bytes, position: int, behind: int) -> bool | None:
        """Returns whether the Produce at `position` has a response, None if it is not clear yet or malformed."""
        client_id_at = position + _START.size
        start = self._produce_starts.get(key_and_version, b"")
        if start and client_id_at + len(start) <= behind and data.startswith(start, client_id_at):
            return True
        _, version = KEY_AND_VERSION.unpack(key_and_version)
        try:
            acks = produce_acks(data[:behind], client_id_at, version)
        except ValueError as error:
            self._refuse(f"malformed PRODUCE v{version} request: {error}")
            return None
        if acks is None:
            if len(data) < behind and len(data) - position < _MOST_BEFORE_ACKS:
                self._rest = data[position:]
            else:
                self._refuse(f"malformed PRODUCE v{version} request: its end is before acks")
            return None
        if acks[0]:
            self._produce_starts[key_and_version] = data[client_id_at : acks[1]]
        return acks[0] != 0

    def _begin_collected(self, data: bytes, position: int, length: int) -> int:
        """Takes the frame at `position`, or begins to collect it. Returns the position after its bytes."""
        start = position + _LENGTH_BYTES
        if len(data) - start >= length:
            self._take(data[start : start + length])
            return start + length
        self._missing = length
        return start + self._collect(data[start:])

    def _collect(self, data: bytes) -> int:
        """Adds bytes to the frame that is collected. Returns how many belong to it."""
        size = min(self._missing, len(data))
        self._collected += memoryview(data)[:size]
        self._missing -= size
        if not self._missing:
            frame = bytes(self._collected)
            self._collected.clear()
            self._take(frame)
        return size

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
        if self._sasl is not None and self._must_log_in:
            return self._sasl.max_token_bytes
        return self._settings.max_request_bytes

    def _session_continues(self, start: bytes) -> bool:
        """Returns whether the client's SASL session, if it has an end, is not over."""
        if self._sasl is None or self._sasl.session_end_ms is None:
            return True
        step = self._sasl.receive(start, self._broker.now_ms())
        if step is None:
            return True
        self._refuse(step.failure or "the client has to log in again")
        return False

    # --- logins that are passed on ------------------------------------------------------------------------------------

    def _process_with_sasl(self, frame: bytes, now_ms: int) -> None:
        super()._process_with_sasl(frame, now_ms)
        request = self._sasl.take_request() if isinstance(self._sasl, RelayedLogin) else None
        if request is None:
            return
        key, version = ApiKey(request.api_key), self._gateway.login_version(self._node_id, request)
        link = self._open_link()
        self._expect(Forwarded(key, version, version))
        link.write(encode_request(key, version, 0, self._gateway.upstream.client_id, request.encode(version)))
        self.mute(Mute.LOGIN)

    def _may_open_link(self) -> bool:
        """Returns whether requests may use a new link. A client that logs in at the upstream has to log in again."""
        if not isinstance(self._sasl, RelayedLogin):
            return True
        self._refuse("the upstream has closed the connection in which the client was logged in")
        return False

    def _open_link(self) -> UpstreamLink:
        if self._link is None:
            self.client.has_begun = True
            self._link = UpstreamLink(self)
            self.mute(Mute.LINK)
            self._broker.spawn(self._link.open(self._gateway, self._node_id))
        return self._link

    def _expect(self, entry: Forwarded) -> None:
        self._exchanges.append(entry)
        self._expected.append(entry)
        if len(self._exchanges) >= MAX_IN_FLIGHT_REQUESTS:
            self.is_muted = True

    def _take(self, frame: bytes) -> None:
        """Answers a whole frame, or passes it on."""
        self._completed += 1
        key, version = KEY_AND_VERSION.unpack_from(frame)
        if self._must_log_in or not self._is_forwarded(key, version) or self._is_for_kcoord(frame, key, version):
            self._gateway.ownership.check()
            self._enter(frame, self._broker.now_ms())
            return
        if self.is_stopped or not self._session_continues(frame[:8]):
            return
        if self._link is None and not self._may_open_link():
            return
        upstream_version = min(version, CAPS.get(ApiKey(key), version))
        link = self._open_link()
        is_rewritten = key in REWRITTEN_APIS and not _only_validates(frame, key, version)
        self._expect(Forwarded(ApiKey(key), upstream_version, version) if is_rewritten else PASSED)
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


def _only_validates(frame: bytes, key: int, version: int) -> bool:
    """Returns whether a request creates no topics, although its response names them as if they were created."""
    if key != ApiKey.CREATE_TOPICS:
        return False
    try:
        _, offset = decode_request_header(frame)
        request, _ = CreateTopicsRequest.decode_prefix(frame, offset, version)
    except DecodeError:
        # The upstream rejects the request.
        return False
    return request.validate_only
