# SPDX-License-Identifier: Apache-2.0
"""The fast path of steady heartbeats: heartbeats that change nothing but the member's session timer."""

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
"""Number of responses that one connection remembers; a real consumer needs one."""


class HeartbeatFastPath(FastPath):
    """Repeats the responses to the heartbeats of one connection.

    Heartbeats of a steady member differ only in the correlation id, so the other bytes are the key. A response is
    repeated as long as the shard, the group and the metadata image have not changed, so that the handler would give it
    too (`coordinator.group.steady`). `SteadyReply.repeat` checks this, and also restarts the member's session timeout.

    A response also depends on the client's address, which all requests of a connection share. It depends on the form of
    KIP-1327, too. That changes if the client names other software; the request path then starts with new fast paths.
    """

    __slots__ = ("_entries", "_groups")

    keys = (ApiKey.HEARTBEAT, ApiKey.CONSUMER_GROUP_HEARTBEAT)

    def __init__(self, groups: GroupService) -> None:
        self._groups = groups
        self._entries: dict[bytes, tuple[bytes, SteadyReply, Template]] = {}

    def respond(self, frame: bytes, now_ms: int) -> bytes | None:
        entry = self._entries.get(frame[AFTER_ID:])
        if entry is None:
            return None
        start, reply, template = entry
        if frame.startswith(start) and reply.repeat(now_ms):
            return template.response_to(frame)
        del self._entries[frame[AFTER_ID:]]
        return None

    def learn(self, exchange: Exchange, now_ms: int) -> None:
        """Remembers the response if it has no error and the member is steady."""
        request, response = exchange.request, cast("HeartbeatResponse", exchange.response)
        assert isinstance(request, ConsumerGroupHeartbeatRequest | HeartbeatRequest)
        assert isinstance(exchange.data, bytes)
        reply = None if response.error_code else self._groups.steady(request.group_id, request.member_id)
        if reply is None:
            return
        if len(self._entries) >= MAX_ENTRIES:
            self._entries.clear()
        frame = exchange.frame
        self._entries[frame[AFTER_ID:]] = (frame[:BEFORE_ID], reply, Template(exchange.data))
