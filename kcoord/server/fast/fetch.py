# SPDX-License-Identifier: Apache-2.0
"""The fast path of OffsetFetch v8 and later: equal bytes are not decoded again, and answered out of the packed rows.

Invariant: what a frame decodes to depends on its bytes alone, so those behind the correlation id are the key of what
was decoded. The answer is made anew each time (see `coordinator.group.offsets.packed_fetch`), or the request goes the
general way: it asks for several groups, or for something that the rows do not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kcoord.coordinator.group.offsets.packed_fetch import FIRST_VERSION, PackedFetch
from kcoord.server.api.api_table import ApiTable, DeferredResponse, Exchange
from kcoord.server.fast.fast_path import AFTER_ID, BEFORE_ID, FastAnswer, FastPath, response_to
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import OffsetFetchRequest

if TYPE_CHECKING:
    from kcoord.server.shards.group_service import GroupService

MAX_ENTRIES: Final = 64
MAX_FRAME_BYTES: Final = 4096
"""What one connection may have remembered; a real consumer needs one or two entries."""

_ONE_GROUP: Final = b"\0\0\0\0\0\2"
"""No tags in the header, no throttle time, one group."""
_NO_TAGS: Final = b"\0"
_AROUND_BYTES: Final = AFTER_ID - BEFORE_ID + len(_ONE_GROUP) + len(_NO_TAGS)


class FetchFastPath(FastPath):
    """The fetches of one connection."""

    __slots__ = ("_apis", "_entries", "_groups", "_on_answer")

    keys = (ApiKey.OFFSET_FETCH,)
    learns_before_handler = True

    def __init__(self, groups: GroupService, apis: ApiTable, on_answer: Callable[[], None]) -> None:
        self._groups = groups
        self._apis = apis
        self._on_answer = on_answer
        self._entries: dict[bytes, tuple[bytes, PackedFetch, bool]] = {}

    def answer(self, frame: bytes, now_ms: int) -> FastAnswer:
        entry = self._entries.get(frame[AFTER_ID:])
        if entry is None or not frame.startswith(entry[0]):
            return None
        return self._answer(frame, entry[1], entry[2])

    def _answer(self, frame: bytes, fetch: PackedFetch, require_stable: bool) -> FastAnswer:
        """A response that contains records which are not written yet waits for them."""
        groups = self._groups
        packed = groups.fetch_packed(fetch, require_stable)
        if packed is None:
            return None
        group, must_wait = packed
        size = (len(group) + _AROUND_BYTES).to_bytes(4, "big")
        response = response_to(frame, size, _ONE_GROUP, group, _NO_TAGS)
        if must_wait:
            deferred = DeferredResponse(frame, response, self._apis, self._on_answer)
            if groups.wait(fetch.group_id, deferred):
                return deferred
        return response

    def learn(self, exchange: Exchange, now_ms: int) -> FastAnswer:
        """Answers the request if it can go the fast way, and remembers it if it is not too long."""
        if exchange.bound.version < FIRST_VERSION:
            return None
        request = exchange.decode()
        assert isinstance(request, OffsetFetchRequest)
        if len(request.groups) != 1:
            return None
        frame = exchange.frame
        fetch = PackedFetch(request.groups[0], exchange.bound.version)
        if len(frame) <= MAX_FRAME_BYTES:
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            self._entries[frame[AFTER_ID:]] = frame[:BEFORE_ID], fetch, request.require_stable
        return self._answer(frame, fetch, request.require_stable)
