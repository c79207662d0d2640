# SPDX-License-Identifier: Apache-2.0
"""The fast path of OffsetFetch v8 and later: equal bytes are not decoded again, and answered out of the packed rows.

Invariant: what a frame decodes to depends on its bytes alone, so those behind the correlation id are the key of what
was decoded. The answer is made anew each time (see `coordinator.group.offsets.packed_fetch`), or the request goes the
general way: it asks for several groups, or for something that the rows do not hold.
`kcoord.fast.paths.enable=false` switches it off, for debugging.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kcoord.coordinator.group.offsets.packed_fetch import FIRST_VERSION, PackedFetch
from kcoord.server.net.exchange import ExchangeOwner, KnownExchange
from kcoord_protocol.messages import OffsetFetchRequest

if TYPE_CHECKING:
    from kcoord.server.api.api_table import BoundApi
    from kcoord.server.broker import Broker

MAX_ENTRIES: Final = 64
MAX_FRAME_BYTES: Final = 4096
"""What one connection may have remembered; a real consumer needs one or two entries."""

_BEFORE_ID: Final = 4
_AFTER_ID: Final = 8
_ONE_GROUP: Final = b"\0\0\0\0\0\2"
"""No tags in the header, no throttle time, one group."""
_NO_TAGS: Final = b"\0"
_AROUND_BYTES: Final = 4 + len(_ONE_GROUP) + len(_NO_TAGS)


class FetchMemo:
    """The fetches of one connection."""

    __slots__ = ("_broker", "_entries", "_owner")

    def __init__(self, broker: Broker, owner: ExchangeOwner) -> None:
        self._broker = broker
        self._owner = owner
        self._entries: dict[bytes, tuple[bytes, PackedFetch, bool]] = {}

    def answer(self, frame: bytes, now_ms: int) -> bytes | KnownExchange | None:
        """The framed answer; an exchange where it rests on what is still to be written."""
        entry = self._entries.get(frame[_AFTER_ID:])
        if entry is None or not frame.startswith(entry[0]):
            return None
        return self._answer(frame, entry[1], entry[2])

    def _answer(self, frame: bytes, fetch: PackedFetch, require_stable: bool) -> bytes | KnownExchange | None:
        groups = self._broker.groups
        found = groups.fetch_packed(fetch, require_stable)
        if found is None:
            return None
        group, must_wait = found
        size = (len(group) + _AROUND_BYTES).to_bytes(4, "big")
        answer = b"".join((size, frame[_BEFORE_ID:_AFTER_ID], _ONE_GROUP, group, _NO_TAGS))
        if must_wait:
            exchange = KnownExchange(self._owner, frame, answer)
            if groups.wait(fetch.group_id, exchange):
                return exchange
        return answer

    def learn(self, frame: bytes, request: object, bound: BoundApi) -> bytes | KnownExchange | None:
        """Answers a request that was decoded, if it can go the fast way, and remembers it if it is not too long."""
        assert isinstance(request, OffsetFetchRequest)
        if bound.version < FIRST_VERSION or len(request.groups) != 1:
            return None
        fetch = PackedFetch(request.groups[0], bound.version)
        if len(frame) <= MAX_FRAME_BYTES:
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            self._entries[frame[_AFTER_ID:]] = frame[:_BEFORE_ID], fetch, request.require_stable
        return self._answer(frame, fetch, request.require_stable)
