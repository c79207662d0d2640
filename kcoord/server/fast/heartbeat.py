# SPDX-License-Identifier: Apache-2.0
"""The fast path of steady heartbeats: the same bytes as before, answered with the same bytes as before.

Heartbeats of a member differ in nothing but the correlation id. So the other bytes are the key, and a response is
repeated as long as `SteadyReply.repeat` proves that a full run would give it too (see `coordinator.group.steady`).
Each connection has its own: what else a response depends on, the client's address, is the same for all of its requests.
The form of KIP-1327 may change when the client names its software again; the request path then starts with new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from kcoord.server.api.api_table import Exchange
from kcoord.server.fast.fast_path import AFTER_ID, BEFORE_ID, FastPath, Template
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, HeartbeatRequest

if TYPE_CHECKING:
    from kcoord.server.shards.group_service import GroupService, SteadyReply
    from kcoord_protocol.messages import HeartbeatResponse

MAX_ENTRIES: Final = 1024
"""Members that one connection may have a response remembered for; a real consumer needs one."""


class HeartbeatFastPath(FastPath):
    """See the module's text."""

    __slots__ = ("_entries", "_groups")

    keys = (ApiKey.HEARTBEAT, ApiKey.CONSUMER_GROUP_HEARTBEAT)

    def __init__(self, groups: GroupService) -> None:
        self._groups = groups
        self._entries: dict[bytes, tuple[bytes, SteadyReply, Template]] = {}

    def answer(self, frame: bytes, now_ms: int) -> bytes | None:
        entry = self._entries.get(frame[AFTER_ID:])
        if entry is None:
            return None
        start, reply, template = entry
        if frame.startswith(start) and reply.repeat(now_ms):
            return template.answer_to(frame)
        del self._entries[frame[AFTER_ID:]]
        return None

    def learn(self, exchange: Exchange, now_ms: int) -> None:
        """Remembers the response, if it is no error and the member is steady."""
        request, response = exchange.request, cast("HeartbeatResponse", exchange.response)
        assert isinstance(request, ConsumerGroupHeartbeatRequest | HeartbeatRequest)
        assert exchange.data is not None
        reply = None if response.error_code else self._groups.steady(request.group_id, request.member_id)
        if reply is None:
            return
        if len(self._entries) >= MAX_ENTRIES:
            self._entries.clear()
        frame = exchange.frame
        self._entries[frame[AFTER_ID:]] = (frame[:BEFORE_ID], reply, Template(exchange.data))
