# SPDX-License-Identifier: Apache-2.0
"""The assignors that a member offers in its heartbeats (KIP-848 "Client Assignors"). Pure.

A heartbeat has the whole offer if the member joins or a heartbeat failed, otherwise only if the offer changed. The
coordinator increases the group epoch if a reason changes to a number other than 0, but not if it goes back to 0. So a
request for a new assignment sends the reason once. The reason stays in the offer, where the assignor can read it,
until the offer changes. A second request first sends 0 and then the reason.
"""

from __future__ import annotations

from kcoord.client.assignors import OfferedAssignor
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest

Offered = tuple[OfferedAssignor, ...]


class AssignorOffer:
    """The offer of one member. `Membership` sends it."""

    def __init__(self) -> None:
        self._current: Offered = ()
        self._sent: Offered = ()
        self._acknowledged: Offered | None = None
        self._may_have_reason = False
        """Whether the coordinator may have a reason other than 0: from a request with it until 0 is acknowledged."""
        self._requested = 0
        """The reason of a request for a new assignment, until the coordinator has acknowledged it."""
        self._next_reason = 0
        """The reason to send when the coordinator has acknowledged the reason 0."""

    def update(self, offered: Offered) -> None:
        """Replaces the offer: names, versions, metadata and reasons. A request that is not acknowledged yet stays."""
        self._current = _with_reason(offered, self._requested) if self._requested else offered

    def request_reassignment(self, reason: int) -> None:
        """Requests a new assignment: the coordinator gets a reason that it does not have yet."""
        if self._may_have_reason:
            self._next_reason, reason = reason, 0
        self._requested = reason
        self._current = _with_reason(self._current, reason)

    @property
    def has_news(self) -> bool:
        """Whether the coordinator has to get the offer."""
        return self._acknowledged != self._current

    def begin_heartbeat(self, *, is_full: bool) -> list[ConsumerGroupHeartbeatRequest.ClientAssignor] | None:
        """Returns the field of the heartbeat that is being made, None if the offer has not changed."""
        self._sent = self._current
        self._may_have_reason = self._may_have_reason or _has_reason(self._sent)
        if not is_full and not self.has_news:
            return None
        return [
            ConsumerGroupHeartbeatRequest.ClientAssignor(
                name=assignor.name,
                minimum_version=assignor.minimum_version,
                maximum_version=assignor.maximum_version,
                reason=assignor.reason,
                metadata_version=assignor.metadata.version,
                metadata_bytes=assignor.metadata.data,
            )
            for assignor in self._sent
        ]

    def acknowledge(self) -> None:
        """Records that the coordinator has the offer of the last heartbeat."""
        self._acknowledged = self._sent
        self._may_have_reason = _has_reason(self._sent)
        if self._may_have_reason:
            self._requested = 0
        if self._next_reason and not self._may_have_reason:
            reason, self._next_reason = self._next_reason, 0
            self.request_reassignment(reason)


def _has_reason(offered: Offered) -> bool:
    return any(assignor.reason for assignor in offered)


def _with_reason(offered: Offered, reason: int) -> Offered:
    return tuple(assignor._replace(reason=reason) for assignor in offered)
