# SPDX-License-Identifier: Apache-2.0
"""The `uniform` assignor: members' totals differ as little as their subscriptions allow, and partitions stay in place.

This module has the usual case, all members with one subscription, where quotas settle everything; heterogeneous.py
has the
general one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from kcoord.coordinator.group.assignor.heterogeneous import assign_heterogeneous
from kcoord.coordinator.group.assignor.spec import Assignment, Claim, MemberSpec, PartitionSpace, common_subscription


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
    """Everybody keeps up to its quota, then what is free fills up those below theirs.

    Most members keep what they have, so only those that change go through the flat numbers.
    """
    space = PartitionSpace(topic_ids, partition_counts)
    claims, free = _claims(members, space)
    quota, extra = divmod(space.total, len(members))
    changed: dict[str, list[int]] = {}
    below: list[tuple[str, int]] = []
    for member_id in sorted(members):
        claim = claims[member_id]
        size = sum(map(len, claim.values())) if claim else 0
        if size <= quota:
            below.append((member_id, quota - size))
            continue
        limit = quota
        if extra:
            extra -= 1
            limit += 1
        if size > limit:
            owned = space.flatten(claim)
            changed[member_id] = owned[:limit]
            free += owned[limit:]
    free.sort()
    for member_id, share in _shares(below, extra, free):
        claim = claims[member_id]
        changed[member_id] = sorted(space.flatten(claim) + share) if claim else share
    return {
        member_id: space.expand(changed[member_id]) if member_id in changed else _without_empty(claim)
        for member_id, claim in claims.items()
    }


def _without_empty(claim: Claim) -> Claim:
    """The same object wherever it can be."""
    if all(claim.values()):
        return claim
    return {topic_id: partitions for topic_id, partitions in claim.items() if partitions}


def _claims(members: Mapping[str, MemberSpec], space: PartitionSpace) -> tuple[dict[str, Claim], list[int]]:
    """What each member has of the partitions that exist, each partition once; and the numbers of the unclaimed ones."""
    claims: dict[str, Claim] = {member_id: member.assigned for member_id, member in members.items()}
    claimed = _claimed(claims, space)
    if claimed is None:  # partitions that are gone, or have two owners: the first owner in id order keeps them
        taken: set[int] = set()
        for member_id in sorted(members):
            owned = [number for number in space.flatten(claims[member_id]) if number not in taken]
            taken.update(owned)
            claims[member_id] = space.expand(owned)
        claimed = _claimed(claims, space)
        assert claimed is not None
    free: list[int] = []
    for topic_id in space.topic_ids:
        base, count = space.base_of[topic_id]
        partitions = claimed[topic_id]
        if not partitions:
            free += range(base, base + count)
        elif len(partitions) < count:
            free += [base + partition for partition in range(count) if partition not in partitions]
    return claims, free


def _claimed(claims: Mapping[str, Claim], space: PartitionSpace) -> dict[bytes, set[int]] | None:
    """The claimed partitions of each topic, or None where claims overlap or go beyond what exists."""
    claimed: dict[bytes, set[int]] = {topic_id: set() for topic_id in space.topic_ids}
    total = 0
    for claim in claims.values():
        for topic_id, partitions in claim.items():
            if topic_id not in claimed:
                return None
            claimed[topic_id].update(partitions)
            total += len(partitions)
    if total != sum(map(len, claimed.values())):
        return None
    if any(partitions and max(partitions) >= space.base_of[topic_id][1] for topic_id, partitions in claimed.items()):
        return None
    return claimed


def _shares(below: list[tuple[str, int]], extra: int, free: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Hands out `free` in runs; the first `extra` members go one over the quota."""
    position = 0
    for member_id, missing in below:
        end = position + missing
        if extra:
            extra -= 1
            end += 1
        if end > position:
            yield member_id, free[position:end]
            position = end
    assert position == len(free)
