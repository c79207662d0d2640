# SPDX-License-Identifier: Apache-2.0
"""The interface of an assignor. It is a pure function: equal input, in any order, gives equal output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

Claim: TypeAlias = Mapping[bytes, frozenset[int]]
"""Topic id -> partitions of one member, without topics that have no partition.

A claim is never changed after it was made, so members and targets may share it.
"""

Assignment: TypeAlias = dict[str, Claim]
"""Member id -> its new claim, for every member. A member that keeps all partitions may have the same object again."""


PartitionRacks: TypeAlias = Callable[[bytes], Sequence[frozenset[str]]]
"""Topic id -> the racks of the replicas of each partition."""


def no_racks(_topic_id: bytes) -> Sequence[frozenset[str]]:
    """The PartitionRacks of brokers without racks."""
    return ()


@dataclass(slots=True)
class MemberSpec:
    """A member as an assignor sees it.

    `assigned` is its present target assignment. `metadata` is what the member gives to assignors, by their names; only
    assignors of one's own get it.
    """

    instance_id: str | None = None
    rack_id: str | None = None
    subscribed_topic_ids: Collection[bytes] = ()
    assigned: Claim = field(default_factory=dict)
    metadata: Mapping[str, bytes] = field(default_factory=dict)


class Assignor(Protocol):
    """A server-side assignor; members select it by `name` (ServerAssignor)."""

    @property
    def name(self) -> str: ...

    @property
    def needs_racks(self) -> bool:
        """True if the assignment depends on `rack_id` and `partition_racks`."""

    def assign(
        self,
        members: Mapping[str, MemberSpec],
        partition_counts: Mapping[bytes, int],
        partition_racks: PartitionRacks = no_racks,
    ) -> Assignment:
        """Assigns each partition of each subscribed topic to exactly one subscriber.

        A subscribed topic that is not in `partition_counts` does not exist and is skipped.
        """
