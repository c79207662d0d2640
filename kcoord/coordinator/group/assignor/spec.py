# SPDX-License-Identifier: Apache-2.0
"""What an assignor takes and gives. An assignor is a pure function: equal input, in whatever order, gives equal output.

Partitions are numbered flat inside an assignor (topics in id order, one after the other), so the work is on integers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping
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


def common_subscription(members: Mapping[str, MemberSpec]) -> Collection[bytes] | None:
    """The subscription that all members share, or None where they differ. Members sharing one object cost nothing."""
    first: Collection[bytes] | None = None
    first_set: frozenset[bytes] = frozenset()
    for member in members.values():
        topic_ids = member.subscribed_topic_ids
        if first is None:
            first, first_set = topic_ids, frozenset(topic_ids)
        elif topic_ids is not first and frozenset(topic_ids) != first_set:
            return None
    return first


class PartitionSpace:
    """The flat numbering of the partitions of some topics."""

    __slots__ = ("base_of", "counts", "ends", "topic_ids", "total")

    def __init__(self, topic_ids: Iterable[bytes], partition_counts: Mapping[bytes, int]) -> None:
        self.topic_ids = sorted({topic_id for topic_id in topic_ids if topic_id in partition_counts})
        self.counts = [partition_counts[topic_id] for topic_id in self.topic_ids]
        self.base_of: dict[bytes, tuple[int, int]] = {}
        """Topic id -> (number of its partition 0, how many partitions it has)."""
        self.ends: list[int] = []
        self.total = 0
        for topic_id, count in zip(self.topic_ids, self.counts, strict=True):
            self.base_of[topic_id] = (self.total, count)
            self.total += count
            self.ends.append(self.total)

    def topic_of_each(self) -> list[int]:
        """Partition number -> index of its topic."""
        return [index for index, count in enumerate(self.counts) for _ in range(count)]

    def flatten(self, assigned: Claim) -> list[int]:
        """The numbers, ascending, of those partitions of `assigned` that exist here."""
        flat: list[int] = []
        for topic_id, partitions in assigned.items():
            place = self.base_of.get(topic_id)
            if place is not None:
                base, count = place
                flat += [base + partition for partition in partitions if partition < count]
        flat.sort()
        return flat

    def expand(self, flat: list[int]) -> Claim:
        """Turns ascending numbers back into topic id -> partitions."""
        assigned: dict[bytes, frozenset[int]] = {}
        start, size = 0, len(flat)
        while start < size:
            topic = bisect_right(self.ends, flat[start])
            end = self.ends[topic]
            base = end - self.counts[topic]
            stop = size if flat[-1] < end else bisect_left(flat, end, start)
            first, last = flat[start] - base, flat[stop - 1] - base
            assigned[self.topic_ids[topic]] = frozenset(
                range(first, last + 1)
                if last - first == stop - start - 1
                else [number - base for number in flat[start:stop]]
            )
            start = stop
        return assigned
