# SPDX-License-Identifier: Apache-2.0
"""The `range` assignor: cuts each topic into contiguous ranges, one per subscriber.

All topics use the same member order. Topics with equal partition counts and equal subscribers are therefore
co-partitioned: a member has the same partition numbers of each. The assignor is not sticky (observed in Kafka 4.3.1): a
member that comes first in the order shifts all ranges. A static member keeps its place, because the order uses its
instance id instead of its member id.
"""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.coordinator.group.assignor.spec import Assignment, MemberSpec, PartitionRacks, no_racks
from kcoord.coordinator.group.assignor.uniform import subscriptions_of, topic_classes


class RangeAssignor:
    """Balances each topic: if the partitions do not divide evenly, the first subscribers have one more."""

    __slots__ = ()

    needs_racks = False

    @property
    def name(self) -> str:
        return "range"

    def assign(
        self,
        members: Mapping[str, MemberSpec],
        partition_counts: Mapping[bytes, int],
        partition_racks: PartitionRacks = no_racks,
    ) -> Assignment:
        order = sorted(members, key=lambda member_id: _position(member_id, members[member_id]))
        place_of = {member_id: place for place, member_id in enumerate(order)}
        subscriptions = subscriptions_of(order, members)
        places = [[place_of[member_id] for member_id in subscription.member_ids] for subscription in subscriptions]
        assigned: list[dict[bytes, frozenset[int]]] = [{} for _ in order]
        cuts: dict[tuple[int, int], list[frozenset[int]]] = {}
        for topic_class in topic_classes(subscriptions, partition_counts):
            by_count: dict[int, list[bytes]] = {}
            for topic_id in topic_class.topic_ids:
                by_count.setdefault(partition_counts[topic_id], []).append(topic_id)
            of_class = [places[index] for index in topic_class.subscribers]
            size = sum(map(len, of_class))
            # With more subscribers than partitions, the subscribers after the first `most` get nothing.
            most = min(max(by_count), size)
            subscribers = sorted(place for of_subscription in of_class for place in of_subscription[:most])[:most]
            for count, alike in by_count.items():
                cut = cuts.get((count, size))
                if cut is None:
                    cut = cuts[count, size] = _cut(count, size)
                if len(alike) == 1:
                    (topic_id,) = alike
                    for place, partitions in zip(subscribers, cut, strict=False):
                        assigned[place][topic_id] = partitions
                else:
                    for place, partitions in zip(subscribers, cut, strict=False):
                        assigned[place].update(dict.fromkeys(alike, partitions))
        return {member_id: assigned[place_of[member_id]] for member_id in members}


def _position(member_id: str, member: MemberSpec) -> tuple[bool, str]:
    """Returns the sort key: static members come first, by instance id; dynamic members follow, by member id."""
    if member.instance_id is None:
        return (True, member_id)
    return (False, member.instance_id)


def _cut(count: int, subscribers: int) -> list[frozenset[int]]:
    """Returns the ranges of a topic with `count` partitions; none is empty."""
    quota, extra = divmod(count, subscribers)
    ranges: list[frozenset[int]] = []
    start = 0
    while start < count:
        end = start + quota + (len(ranges) < extra)
        ranges.append(frozenset(range(start, end)))
        start = end
    return ranges
