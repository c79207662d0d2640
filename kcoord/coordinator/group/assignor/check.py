# SPDX-License-Identifier: Apache-2.0
"""Checks an assignment that comes from outside of the coordinator (KIP-848 "Assignment Validation")."""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.coordinator.group.assignor.spec import Assignment, Claim, MemberSpec


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
    owners: dict[bytes, list[str]] = {topic_id: [""] * count for topic_id, count in partition_counts.items()}
    claims: dict[str, Claim] = {member_id: {} for member_id in members}
    for member_id, topics in proposed.items():
        member = members.get(member_id)
        if member is None:
            raise InvalidAssignment(f"member {member_id} is not in the group")
        claim: dict[bytes, frozenset[int]] = {}
        for topic_id, partitions in topics.items():
            if topic_id not in member.subscribed_topic_ids:
                raise InvalidAssignment(f"member {member_id} does not subscribe to topic {names.get(topic_id)}")
            owner_of = owners[topic_id]
            for partition in partitions:
                if not 0 <= partition < len(owner_of):
                    raise InvalidAssignment(f"topic {names[topic_id]} has no partition {partition}")
                if owner_of[partition]:
                    raise InvalidAssignment(
                        f"partition {names[topic_id]}-{partition} has two owners, {owner_of[partition]} and {member_id}"
                    )
                owner_of[partition] = member_id
            if partitions:
                claim[topic_id] = frozenset(partitions)
        claims[member_id] = claim
    for topic_id, owner_of in owners.items():
        if "" in owner_of:
            raise InvalidAssignment(f"partition {names[topic_id]}-{owner_of.index('')} has no owner")
    return claims
