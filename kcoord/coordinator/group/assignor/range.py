# SPDX-License-Identifier: Apache-2.0
"""The `range` assignor: each topic is cut into contiguous ranges, one per subscriber, in one member order for all
topics.

So topics with equal partition counts and equal subscribers are co-partitioned: partition n of each is with the same
member. It is not sticky by itself (observed in Kafka 4.3.1: a member that joins in front of the others shifts all
ranges); a static member keeps its place because the instance id, not the member id, gives the order.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        assignment: Assignment = {member_id: {} for member_id in members}
        common = common_subscription(members)
        if common is not None:
            subscribers = dict.fromkeys(common, order)
        else:
            subscribers = {}
            for member_id in order:
                for topic_id in set(members[member_id].subscribed_topic_ids):
                    subscribers.setdefault(topic_id, []).append(member_id)
        for topic_id in sorted(subscribers):
            _cut(topic_id, partition_counts.get(topic_id, 0), subscribers[topic_id], assignment)
        return assignment


def _position(member_id: str, member: MemberSpec) -> tuple[bool, str]:
    """Static members come first, by instance id; the others follow by member id."""
    if member.instance_id is None:
        return (True, member_id)
    return (False, member.instance_id)


def _cut(topic_id: bytes, count: int, subscribers: list[str], assignment: Assignment) -> None:
    quota, extra = divmod(count, len(subscribers))
    start = 0
    for member_id in subscribers if quota else subscribers[:extra]:
        end = start + quota
        if extra:
            extra -= 1
            end += 1
        assignment[member_id][topic_id] = list(range(start, end))
        start = end
