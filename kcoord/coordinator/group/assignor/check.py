# SPDX-License-Identifier: Apache-2.0
"""Checks an assignment that comes from outside of the coordinator (KIP-848 "Assignment Validation")."""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.coordinator.group.assignor.spec import Assignment, Claim, MemberSpec
from kcoord_protocol.uuid import uuid_to_string


class InvalidAssignment(Exception):
    """The assignment does not give each partition to exactly one subscriber; the text has the first reason."""


def checked_assignment(
    proposed: Mapping[str, Mapping[bytes, list[int]]],
    members: Mapping[str, MemberSpec],
    partition_counts: Mapping[bytes, int],
    names: Mapping[bytes, str],
) -> Assignment:
    """Returns the assignment of all members; a member that is not in `proposed` gets nothing.

    `names` are the topics' names, for the texts. Raises InvalidAssignment.
    """
    claims: dict[str, Claim] = {member_id: {} for member_id in members}
    given: dict[bytes, list[int]] = {topic_id: [] for topic_id in partition_counts}
    for member_id, topics in proposed.items():
        member = members.get(member_id)
        if member is None:
            raise _invalid(proposed, members, partition_counts, names)
        claim: dict[bytes, frozenset[int]] = {}
        for topic_id, partitions in topics.items():
            if topic_id not in member.subscribed_topic_ids:
                raise _invalid(proposed, members, partition_counts, names)
            if partitions:
                claim[topic_id] = frozenset(partitions)
                given[topic_id] += partitions
        claims[member_id] = claim
    for topic_id, count in partition_counts.items():
        # As many claims as partitions, and as many different partitions: each partition has exactly one owner.
        numbers = set(given[topic_id])
        is_exact = len(given[topic_id]) == len(numbers) == count
        if not is_exact or min(numbers, default=0) < 0 or max(numbers, default=-1) >= count:
            raise _invalid(proposed, members, partition_counts, names)
    return claims


def _invalid(
    proposed: Mapping[str, Mapping[bytes, list[int]]],
    members: Mapping[str, MemberSpec],
    partition_counts: Mapping[bytes, int],
    names: Mapping[bytes, str],
) -> InvalidAssignment:
    """Returns the first reason why an invalid assignment is invalid."""
    owners: dict[bytes, list[str]] = {topic_id: [""] * count for topic_id, count in partition_counts.items()}
    for member_id, topics in proposed.items():
        member = members.get(member_id)
        if member is None:
            return InvalidAssignment(f"member {member_id} is not in the group")
        for topic_id, partitions in topics.items():
            if topic_id not in member.subscribed_topic_ids:
                name = names.get(topic_id) or uuid_to_string(topic_id)
                return InvalidAssignment(f"member {member_id} does not subscribe to topic {name}")
            owner_of = owners[topic_id]
            for partition in partitions:
                if not 0 <= partition < len(owner_of):
                    return InvalidAssignment(f"topic {names[topic_id]} has no partition {partition}")
                if owner_of[partition]:
                    return InvalidAssignment(
                        f"partition {names[topic_id]}-{partition} has two owners, {owner_of[partition]} and {member_id}"
                    )
                owner_of[partition] = member_id
    for topic_id, owner_of in owners.items():
        if "" in owner_of:
            return InvalidAssignment(f"partition {names[topic_id]}-{owner_of.index('')} has no owner")
    raise AssertionError("the assignment is valid")
