# SPDX-License-Identifier: Apache-2.0
"""The fast path of OffsetFetch v8 and later: equal bytes are not decoded again, and are answered from packed rows.

Only the decoded request is remembered; its key is the frame's bytes after the correlation id. The response is made
again for each request, from the current rows of the group (`coordinator.group.offsets.packed_fetch`). It may contain
committed offsets that are not durable yet, and then waits for them.

A request takes the general path if it names several groups, asks for something that the rows do not hold, or if the
group's shard is not active.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kcoord.coordinator.group.offsets.packed_fetch import FIRST_VERSION, PackedFetch
from kcoord.server.api.api_table import ApiTable, DeferredResponse, Exchange
from kcoord.server.api.authorization import Rights
from kcoord.server.fast.fast_path import AFTER_ID, BEFORE_ID, FastPath, FastResponse, TopicName, framed_response
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import OffsetFetchRequest

if TYPE_CHECKING:
    from kcoord.server.shards.group_service import GroupService

MAX_ENTRIES: Final = 64
MAX_FRAME_BYTES: Final = 4096
"""Bounds on what one connection remembers; a real consumer needs one or two entries."""

_ONE_GROUP: Final = b"\0\0\0\0\0\2"
"""No tags in the header, no throttle time, one group."""
_NO_TAGS: Final = b"\0"
_AROUND_BYTES: Final = AFTER_ID - BEFORE_ID + len(_ONE_GROUP) + len(_NO_TAGS)


class OffsetFetchFastPath(FastPath):
    """Remembers the offset fetches of one connection."""

    __slots__ = ("_apis", "_entries", "_groups", "_on_response", "_topic_name")

    keys = (ApiKey.OFFSET_FETCH,)
    learns_before_handler = True

    def __init__(
        self, groups: GroupService, apis: ApiTable, on_response: Callable[[], None], topic_name: TopicName
    ) -> None:
        self._groups = groups
        self._topic_name = topic_name
        self._apis = apis
        self._on_response = on_response
        self._entries: dict[bytes, tuple[bytes, PackedFetch, bool]] = {}

    def respond(self, frame: bytes, now_ms: int) -> FastResponse:
        entry = self._entries.get(frame[AFTER_ID:])
        if entry is None or not frame.startswith(entry[0]):
            return None
        return self._respond(frame, entry[1], entry[2])

    def _respond(self, frame: bytes, fetch: PackedFetch, require_stable: bool) -> FastResponse:
        """Returns the response; a DeferredResponse if it contains offsets that are not durable yet."""
        groups = self._groups
        packed = groups.fetch_packed(fetch, require_stable)
        if packed is None:
            return None
        group, must_wait = packed
        size = (len(group) + _AROUND_BYTES).to_bytes(4, "big")
        response = framed_response(frame, size, _ONE_GROUP, group, _NO_TAGS)
        if must_wait:
            deferred = DeferredResponse(frame, response, self._apis, self._on_response)
            if groups.wait(fetch.group_id, deferred):
                return deferred
        return response

    def learn(self, exchange: Exchange, now_ms: int) -> FastResponse:
        """Answers the request if the rows suffice, and remembers it if its frame is at most MAX_FRAME_BYTES long."""
        if exchange.bound.version < FIRST_VERSION:
            return None
        request = exchange.decode()
        assert isinstance(request, OffsetFetchRequest)
        if len(request.groups) != 1:
            return None
        if exchange.rights is not None and not self._may_fetch(exchange.rights, request.groups[0]):
            return None
        frame = exchange.frame
        fetch = PackedFetch(request.groups[0], exchange.bound.version)
        if len(frame) <= MAX_FRAME_BYTES:
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            self._entries[frame[AFTER_ID:]] = frame[:BEFORE_ID], fetch, request.require_stable
        return self._respond(frame, fetch, request.require_stable)

    def _may_fetch(self, rights: Rights, group: OffsetFetchRequest.OffsetFetchRequestGroup) -> bool:
        """Returns whether the client may describe the group and the topics, all of which are named and exist."""
        if group.topics is None:
            return False
        names = [topic.name or self._topic_name(topic.topic_id) for topic in group.topics]
        return rights.allows(AclOperation.DESCRIBE, ResourceType.GROUP, group.group_id, logs_denial=False) and all(
            name is not None and rights.allows(AclOperation.DESCRIBE, ResourceType.TOPIC, name, logs_denial=False)
            for name in names
        )
