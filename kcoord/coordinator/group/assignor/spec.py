# SPDX-License-Identifier: Apache-2.0
"""What an assignor takes and gives. An assignor is a pure function: equal input, in any order, gives equal output."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

Claim: TypeAlias = Mapping[bytes, frozenset[int]]
"""Topic id -> partitions of one member; a topic without partitions is not there. Never changed once it was made, so
that members and targets may share it.
"""

Assignment: TypeAlias = dict[str, Claim]
"""Member id -> what it gets; every member is present. A member that keeps all it had may get the same object back."""


@dataclass(slots=True)
class MemberSpec:
    """A member as an assignor sees it. `assigned` is its target assignment up to now."""

    instance_id: str | None = None
    rack_id: str | None = None
    subscribed_topic_ids: Collection[bytes] = ()
    assigned: Claim = field(default_factory=dict)


class Assignor(Protocol):
    """A server-side assignor; `name` is what members ask for as ServerAssignor."""

    @property
    def name(self) -> str: ...

    def assign(self, members: Mapping[str, MemberSpec], partition_counts: Mapping[bytes, int]) -> Assignment:
        """Gives each partition of each subscribed topic to exactly one subscriber.

        A subscribed topic that `partition_counts` does not name does not exist and is left out.
        """
