# SPDX-License-Identifier: Apache-2.0
"""One member of a classic group. All of it but what the group metadata record holds is soft: a restart makes it
rejoin.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class ClassicMember:
    """`protocols` are (name, metadata) in the member's order of preference; `assignment` is what the leader gave it.

    `join_token` and `sync_token` name the JoinGroup or SyncGroup request that waits for the others, None for none.
    `is_new` lasts until the member's first join phase ends: it has not been told its id, so it cannot send heartbeats.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocols: list[tuple[str, bytes]] = field(default_factory=list)
    assignment: bytes = b""
    join_token: Hashable = None
    sync_token: Hashable = None
    is_new: bool = False
    is_assignment_withdrawn: bool = False
    """A rebalance began again before the leader sent the next assignments. DescribeGroups shows none until then."""

    @property
    def is_static(self) -> bool:
        return self.instance_id is not None

    @property
    def is_awaiting_join(self) -> bool:
        return self.join_token is not None

    @property
    def is_awaiting_sync(self) -> bool:
        return self.sync_token is not None

    @property
    def is_alive_without_heartbeat(self) -> bool:
        """A parked request proves that the member is there, but not for ever: a new member may be a forgotten retry."""
        return not self.is_new and (self.is_awaiting_join or self.is_awaiting_sync)

    def metadata(self, protocol: str | None) -> bytes:
        """The member's metadata for the protocol; empty where it does not support it."""
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")

    def vote(self, candidates: Collection[str]) -> str:
        """The candidate that the member likes best; it supports every candidate."""
        return next(name for name, _ in self.protocols if name in candidates)
