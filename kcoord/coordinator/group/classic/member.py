# SPDX-License-Identifier: Apache-2.0
"""One member of a classic group."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field


def metadata_of(protocols: list[tuple[str, bytes]], protocol: str | None) -> bytes:
    """Returns the metadata for the protocol; empty if it is not among `protocols`."""
    for name, metadata in protocols:
        if name == protocol:
            return metadata
    return b""


@dataclass(slots=True)
class ClassicMember:
    """A member. Whatever the group metadata record does not contain is soft state and lost in a restart.

    `protocols` are (name, metadata) in the member's order of preference. `assignment` is the leader's.
    `join_token` and `sync_token` identify a JoinGroup or SyncGroup request that waits for other members; None if none
    waits. `is_new` is True until the member's first join phase ends: it does not have its id yet, so it cannot send
    heartbeats.
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
    """A rebalance began again before the leader sent the assignments. DescribeGroups shows none until it does."""

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
        """True if a parked request proves that the member is alive.

        For a new member it does not: its client may have given up and joined again under another id.
        """
        return not self.is_new and (self.is_awaiting_join or self.is_awaiting_sync)

    def metadata(self, protocol: str | None) -> bytes:
        """Returns the member's metadata for the protocol; empty if the member does not support it."""
        return metadata_of(self.protocols, protocol)

    def is_shown_by(self, stored: ClassicMember) -> bool:
        """True if a group metadata record shows this member as it is. `stored` is made of the record."""
        return (
            self.instance_id == stored.instance_id
            and self.client_id == stored.client_id
            and self.client_host == stored.client_host
            and self.rebalance_timeout_ms == stored.rebalance_timeout_ms
            and self.session_timeout_ms == stored.session_timeout_ms
            and all(protocol in self.protocols for protocol in stored.protocols)
        )

    def vote(self, candidates: Collection[str]) -> str:
        """Returns the candidate that the member prefers; it supports every candidate."""
        return next(name for name, _ in self.protocols if name in candidates)
