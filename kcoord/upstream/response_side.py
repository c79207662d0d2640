# SPDX-License-Identifier: Apache-2.0
"""The half of a SplicedPath that takes the responses of the upstream. `kcoord.upstream.splice` has the whole theory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from kcoord.security.relayed_login import RelayedLogin
from kcoord.server.net.muting import Mute
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath
from kcoord.upstream.gateway import Gateway
from kcoord.upstream.link import UpstreamLink
from kcoord.upstream.rewriting import rewriting
from kcoord_protocol.api_keys import ApiKey, response_class
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.framing import decode_response_header
from kcoord_protocol.messages import SaslAuthenticateResponse, SaslHandshakeResponse

LOGIN_KEYS: Final = frozenset({ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE})
MAX_REWRITTEN_BYTES: Final = 256 << 20
"""The largest response that is decoded: Metadata of a very large cluster."""
_LENGTH_BYTES: Final = 4
_TAKES_NO_RESPONSE: Final = Mute.SLOW_READER | Mute.SENDING | Mute.HELD | Mute.EARLIER_RESPONSE

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


PASSED = Forwarded()
"""Stands for each response that is passed on as it is. Such entries are in the same order in all queues."""


class ResponseSide(RequestPath):
    """Passes responses to the client's transport, in the order of the requests."""

    def __init__(
        self, settings: PathSettings, gateway: Gateway, node_id: int | None, on_response: Callable[[], None]
    ) -> None:
        self._link: UpstreamLink | None = None
        super().__init__(settings, on_response)
        self._gateway = gateway
        self._node_id = node_id
        self._write: Write = _write_nowhere
        self._end: Callable[[], None] = _end_nothing
        self._left = 0
        """Number of bytes of the current request that still have to be passed on."""
        self._expected: deque[Forwarded] = deque()
        self._response_rest = b""
        self._response_left = 0
        self._response = bytearray()
        self._response_missing = 0

    def attach(self, transport: asyncio.Transport) -> None:
        """Gives the path the client's transport, for responses that are passed on."""
        self._write, self._end = transport.write, transport.close

    def mute(self, reason: Mute) -> None:
        super().mute(reason)
        self._follow_client()

    def unmute(self, reason: Mute) -> None:
        super().unmute(reason)
        self._follow_client()

    def close(self) -> None:
        super().close()
        self._write, self._end = _write_nowhere, _end_nothing
        self._expected.clear()
        if self._link is not None:
            self._link.close()

    # --- the link -----------------------------------------------------------------------------------------------------

    def link_changed(self) -> None:
        """Follows `is_blocked` of the link."""
        if self._link is not None and self._link.is_blocked:
            self.mute(Mute.LINK)
        else:
            self.unmute(Mute.LINK)
        self._on_response()

    def link_lost(self, link: UpstreamLink, reason: str) -> None:
        """Closes the client connection. On kcoord's own port, a link that nothing waits for is opened again later.

        A client that has a part of a response waits for its rest, and would take the next response for that.
        """
        is_logging_in = isinstance(self._sasl, RelayedLogin) and not self._sasl.is_complete
        if self._expected or self._left or not link.was_open or is_logging_in:
            self._fail_responses(reason)
        elif self._node_id is None and not self._response_left:
            self._link = None
            self.link_changed()
        else:
            # Brokers close idle connections, so that is no event for the log.
            self._end()

    def _follow_client(self) -> None:
        """Reads responses only while the client takes them, and while none of kcoord's own is before them."""
        if self._link is not None:
            self._link.pause_reading(bool(self._reasons & _TAKES_NO_RESPONSE))

    # --- responses ----------------------------------------------------------------------------------------------------

    def respond(self, data: bytes) -> None:
        """Passes on bytes of the upstream, as many as possible in one write."""
        if self._response_rest:
            data = self._response_rest + data
            self._response_rest = b""
        if self._reasons & Mute.EARLIER_RESPONSE:
            self._response_rest = data
            return
        start, end = 0, len(data)
        if self._response_left > end:
            self._response_left -= end
            self._emit(data, 0, end)
            return
        position = self._response_left
        if position:
            self._response_left = 0
            self._exchanges.popleft()
        elif self._response_missing:
            start = position = self._collect_response(data)
        expected, exchanges = self._expected, self._exchanges
        while position < end:
            if exchanges and exchanges[0].data is not None:
                # Responses of kcoord that waited for the ones before.
                self._emit(data, start, position)
                self._write(self.take_output())
                start = position
            length = int.from_bytes(data[position : position + _LENGTH_BYTES], signed=True)
            is_next = bool(expected) and expected[0] is PASSED and exchanges[0] is PASSED and length >= _LENGTH_BYTES
            if end - position < _LENGTH_BYTES or not (is_next or self._can_begin_response(length)):
                self._response_rest = data[position:]
                break
            behind = position + _LENGTH_BYTES + length
            if not is_next:
                self._emit(data, start, position)
                self._response_missing = length
                position += _LENGTH_BYTES
                start = position = position + self._collect_response(data[position:])
                continue
            expected.popleft()
            if behind > end:
                self._response_left = behind - end
                behind = end
            else:
                exchanges.popleft()
            position = behind
        self._emit(data, start, position)
        if self._exchanges and self._exchanges[0].data is not None:
            # Responses of kcoord that waited for the ones before.
            self._write(self.take_output())
        if self.is_muted:
            self._follow_reasons()
            self._on_response()

    def _collect_response(self, data: bytes) -> int:
        """Adds bytes to the response that is collected. Returns how many belong to it."""
        size = min(self._response_missing, len(data))
        self._response += memoryview(data)[:size]
        self._response_missing -= size
        if not self._response_missing:
            frame = bytes(self._response)
            self._response.clear()
            self._rewrite(self._expected.popleft(), frame)
        return size

    def _can_begin_response(self, length: int) -> bool:
        """Returns whether the next response may be taken now. If not, the path holds, or is stopped."""
        if not self._expected or length < _LENGTH_BYTES:
            self._fail_responses(f"the upstream sent a response of {length} bytes that no request waits for")
            return False
        entry = self._expected[0]
        if entry is not PASSED and length > MAX_REWRITTEN_BYTES:
            self._fail_responses(f"the upstream sent a response of {length} bytes, which is too large to be decoded")
            return False
        # If the first entry of both queues is passed on, it is the same one.
        if self._exchanges[0] is not entry:
            self.mute(Mute.EARLIER_RESPONSE)
            return False
        return True

    def _fail_responses(self, reason: str) -> None:
        self._expected.clear()
        self._refuse(reason)
        self._on_response()

    def _continue_responses(self) -> None:
        """Passes on the responses that were held, if the one before them has left."""
        if output := self.take_output():
            self._write(output)
        if self._expected and self._exchanges and self._exchanges[0] is self._expected[0]:
            self.unmute(Mute.EARLIER_RESPONSE)
            self.respond(b"")

    def _emit(self, data: bytes, start: int, end: int) -> None:
        """Writes responses that are passed on. Responses of kcoord before them leave first."""
        if start < end:
            if self._output:
                self._write(self.take_output())
            self._write(data if end - start == len(data) else memoryview(data)[start:end])

    def _rewrite(self, entry: Forwarded, frame: bytes) -> None:
        """Rewrites a response, now or when kcoord knows what it shows or changes."""
        assert entry.key is not None
        if isinstance(self._sasl, RelayedLogin) and entry.key in LOGIN_KEYS:
            self._login_answered(self._sasl, entry, frame)
            return
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
                self._on_response()

        async def finish_after(preparation: Awaitable[None]) -> None:
            try:
                await preparation
            finally:
                # The upstream has done what the client asked for, whatever kcoord knows of it.
                finish()

        if response.prepare is None:
            finish()
        else:
            self._broker.spawn(finish_after(response.prepare()))

    def _login_answered(self, login: RelayedLogin, entry: Forwarded, frame: bytes) -> None:
        """Passes the upstream's answer to a request of the login on to the client."""
        assert entry.key is not None
        version, is_again, now_ms = entry.upstream_version, login.principal is not None, self._broker.now_ms()
        try:
            _, position = decode_response_header(frame, entry.key, version)
            answer = response_class(entry.key).decode(frame[position:], version)
        except DecodeError as error:
            self._fail_responses(f"the upstream sent a malformed response to {entry.key.name} v{version}: {error}")
            return
        assert isinstance(answer, SaslHandshakeResponse | SaslAuthenticateResponse)
        step = login.answered(answer, now_ms)
        # The response to a login that fails is the farewell of the path.
        entry.data = step.output if step.failure is None else b""
        if step.failure is not None:
            self._fail_login(login, step, now_ms, is_again=is_again)
        elif login.is_complete:
            self._complete_login(login, now_ms, is_again=is_again)
        self.unmute(Mute.LOGIN)
        self._on_response()
