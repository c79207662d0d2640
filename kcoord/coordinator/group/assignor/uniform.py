# SPDX-License-Identifier: Apache-2.0
"""The `uniform` assignor: members' totals differ as little as their subscriptions allow, and partitions stay in place.

This module has the usual case, all members with one subscription, where quotas settle everything; heterogeneous.py
has the
general one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import compress

from kcoord.coordinator.group.assignor.heterogeneous import assign_heterogeneous
from kcoord.coordinator.group.assignor.spec import Assignment, MemberSpec, PartitionSpace, common_subscription

_NOT = bytes([1]) + bytes(255)
"""Translation table: 0 -> 1, anything else -> 0."""


class UniformAssignor:
    """Sticky and balanced: no partition moves unless balance asks for it."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return "uniform"

    def assign(self, members: Mapping[str, MemberSpec], partition_counts: Mapping[bytes, int]) -> Assignment:
        if not members:
            return {}
        common = common_subscription(members)
        if common is None:
            return assign_heterogeneous(members, partition_counts)
        return _assign_homogeneous(members, common, partition_counts)


def _assign_homogeneous(
    members: Mapping[str, MemberSpec], topic_ids: Collection[bytes], partition_counts: Mapping[bytes, int]
) -> Assignment:
    """Everybody keeps up to its quota, then what is free fills up those below theirs."""
    space = PartitionSpace(topic_ids, partition_counts)
    quota, extra = divmod(space.total, len(members))
    taken = bytearray(space.total)
    kept: dict[str, list[int]] = {}
    below: list[str] = []
    for member_id in sorted(members):
        owned = [number for number in space.flatten(members[member_id].assigned) if not taken[number]]
        if len(owned) <= quota:
            below.append(member_id)
        elif extra:
            extra -= 1
            del owned[quota + 1 :]
        else:
            del owned[quota:]
        for number in owned:
            taken[number] = 1
        kept[member_id] = owned
    _fill(kept, below, quota, extra, list(compress(range(space.total), taken.translate(_NOT))))
    return {member_id: space.expand(kept[member_id]) for member_id in members}


def _fill(kept: dict[str, list[int]], below: list[str], quota: int, extra: int, free: list[int]) -> None:
    """Hands out `free` in runs; the first `extra` members of `below` go one over the quota."""
    position = 0
    for member_id in below:
        owned = kept[member_id]
        end = position + quota - len(owned)
        if extra:
            extra -= 1
            end += 1
        if end > position:
            owned += free[position:end]
            owned.sort()
            position = end
    assert position == len(free)
