# SPDX-License-Identifier: Apache-2.0
"""The `range` assignor: each topic is cut into contiguous ranges, one per subscriber, in one member order for all
topics.

So topics with equal partition counts and equal subscribers are co-partitioned: partition n of each is with the same
member. It is not sticky by itself (observed in Kafka 4.3.1: a member that joins in front of the others shifts all
ranges); a static member keeps its place because the instance id, not the member id, gives the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kcoord.coordinator.group.assignor.spec import Assignment, MemberSpec, common_subscription


class RangeAssignor:
    """Balanced per topic: a topic's first members have one partition more than its last ones, where it does not
    divide.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        return "range"

    def assign(self, members: Mapping[str, MemberSpec], partition_counts: Mapping[bytes, int]) -> Assignment:
        order = sorted(members, key=lambda member_id: _position(member_id, members[member_id]))
        assigned: dict[str, dict[bytes, frozenset[int]]] = {member_id: {} for member_id in members}
        for subscribers, topic_ids in _subscriptions(members, order):
            by_count: dict[int, list[bytes]] = {}
            for topic_id in topic_ids:
                by_count.setdefault(partition_counts.get(topic_id, 0), []).append(topic_id)
            for count, alike in by_count.items():
                for member_id, partitions in _cut(count, subscribers):
                    assigned[member_id].update(dict.fromkeys(alike, partitions))
        return {**assigned}


def _position(member_id: str, member: MemberSpec) -> tuple[bool, str]:
    """Static members come first, by instance id; the others follow by member id."""
    if member.instance_id is None:
        return (True, member_id)
    return (False, member.instance_id)


def _subscriptions(members: Mapping[str, MemberSpec], order: list[str]) -> Iterator[tuple[list[str], list[bytes]]]:
    """Topics with the same subscribers, who come in the given order: equal partition counts are cut alike."""
    common = common_subscription(members)
    if common is not None:
        yield order, sorted(set(common))
        return
    numbers: dict[frozenset[bytes], list[int]] = {}
    for number, member_id in enumerate(order):
        numbers.setdefault(frozenset(members[member_id].subscribed_topic_ids), []).append(number)
    signatures: dict[bytes, list[int]] = {}
    for index, topic_ids in enumerate(numbers):
        for topic_id in topic_ids:
            signatures.setdefault(topic_id, []).append(index)
    alike: dict[tuple[int, ...], list[bytes]] = {}
    for topic_id in sorted(signatures):
        alike.setdefault(tuple(signatures[topic_id]), []).append(topic_id)
    members_of = list(numbers.values())
    for signature, topics in alike.items():
        subscribers = sorted(number for index in signature for number in members_of[index])
        yield [order[number] for number in subscribers], topics


def _cut(count: int, subscribers: list[str]) -> Iterator[tuple[str, frozenset[int]]]:
    """The ranges of one topic with `count` partitions; who gets none is left out."""
    quota, extra = divmod(count, len(subscribers))
    start = 0
    for member_id in subscribers if quota else subscribers[:extra]:
        end = start + quota
        if extra:
            extra -= 1
            end += 1
        yield member_id, frozenset(range(start, end))
        start = end
