# SPDX-License-Identifier: Apache-2.0
"""What an assignor takes and gives. An assignor is a pure function: equal input, in whatever order, gives equal output.

Partitions are numbered flat inside an assignor (topics in id order, one after the other), so the work is on integers.

Members with the same subscription are taken together, and so are topics with the same subscribers: a group has far
fewer kinds of members and of topics than members and topics, and within a kind all are alike.
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


@dataclass(slots=True)
class Subscription:
    """The members, in the order in which they were given, that subscribe to just these topics; some may not exist."""

    topic_ids: frozenset[bytes]
    member_ids: list[str]


@dataclass(slots=True)
class TopicClass:
    """Existing topics, in id order, and the indexes of the subscriptions that have them, ascending."""

    subscribers: tuple[int, ...]
    topic_ids: list[bytes]


def subscriptions_of(order: Iterable[str], members: Mapping[str, MemberSpec]) -> list[Subscription]:
    """In the order of their first members. Members that share one object cost nothing."""
    found: dict[frozenset[bytes], Subscription] = {}
    of_object: dict[int, list[str]] = {}
    for member_id in order:
        topic_ids = members[member_id].subscribed_topic_ids
        alike = of_object.get(id(topic_ids))
        if alike is None:
            of_object[id(topic_ids)] = alike = _subscription(found, topic_ids).member_ids
        alike.append(member_id)
    return list(found.values())


def _subscription(found: dict[frozenset[bytes], Subscription], topic_ids: Collection[bytes]) -> Subscription:
    distinct = frozenset(topic_ids)
    subscription = found.get(distinct)
    if subscription is None:
        subscription = found[distinct] = Subscription(distinct, [])
    return subscription


def topic_classes(subscriptions: Iterable[Subscription], partition_counts: Mapping[bytes, int]) -> list[TopicClass]:
    """In the order of their first topics."""
    subscribers: dict[bytes, list[int]] = {}
    for index, subscription in enumerate(subscriptions):
        for topic_id in subscription.topic_ids & partition_counts.keys():
            subscribers.setdefault(topic_id, []).append(index)
    found: dict[tuple[int, ...], TopicClass] = {}
    for topic_id in sorted(subscribers):
        signature = tuple(subscribers[topic_id])
        topic_class = found.get(signature)
        if topic_class is None:
            topic_class = found[signature] = TopicClass(signature, [])
        topic_class.topic_ids.append(topic_id)
    return list(found.values())
