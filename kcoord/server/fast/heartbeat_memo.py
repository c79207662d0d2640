# SPDX-License-Identifier: Apache-2.0
"""The fast path of steady heartbeats: the same bytes as before, answered with the same bytes as before.

Heartbeats of a member differ in nothing but the correlation id. So the bytes behind it are the key, and an answer is
repeated as long as `SteadyReply.repeat` proves that a full run would give it too (see `coordinator.group.steady`).
One memo per connection: what else an answer depends on, the client's address, is the same for all of its requests. The
form of KIP-1327 may change when the client names its software again; the connection then forgets all answers.
`kcoord.fast.paths.enable=false` switches it off, for debugging.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, HeartbeatRequest

if TYPE_CHECKING:
    from kcoord.server.shards.group_service import GroupService, SteadyReply
    from kcoord_protocol.messages import Message

HEARTBEAT_KEYS: Final = frozenset({int(ApiKey.HEARTBEAT), int(ApiKey.CONSUMER_GROUP_HEARTBEAT)})

_BEFORE_ID: Final = 4
_AFTER_ID: Final = 8
"""A request begins with key, version and correlation id; an answer with length and correlation id."""

MAX_ENTRIES: Final = 1024
"""Members that one connection may have an answer remembered for; a real consumer needs one."""


class HeartbeatMemo:
    """See the module's text."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[bytes, SteadyReply, bytes, bytes]] = {}

    def answer(self, frame: bytes, now_ms: int) -> bytes | None:
        """The framed answer, if it is known beforehand."""
        entry = self._entries.get(frame[_AFTER_ID:])
        if entry is None:
            return None
        start, reply, head, tail = entry
        if frame.startswith(start) and reply.repeat(now_ms):
            return head + frame[_BEFORE_ID:_AFTER_ID] + tail
        del self._entries[frame[_AFTER_ID:]]
        return None

    def forget_all(self) -> None:
        """The same requests get other answers from now on."""
        self._entries.clear()

    def remember(self, groups: GroupService, frame: bytes, request: Message, answer: bytes) -> None:
        """Keep the answer that `frame` was just given at once and without error."""
        if not isinstance(request, ConsumerGroupHeartbeatRequest | HeartbeatRequest):
            return
        reply = groups.steady(request.group_id, request.member_id)
        if reply is None:
            return
        if len(self._entries) >= MAX_ENTRIES:
            self._entries.clear()
        self._entries[frame[_AFTER_ID:]] = (frame[:_BEFORE_ID], reply, answer[:_BEFORE_ID], answer[_AFTER_ID:])
