# SPDX-License-Identifier: Apache-2.0
"""The subscribed topics and the preferred assignor of a group with a changed member that is not replayed yet.

The group counts names, so that a heartbeat need not visit all members. The oracle visits all members.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kcoord.coordinator.group.consumer.group import ConsumerGroup, ConsumerGroupMember, ResolvedRegularExpression

ASSIGNORS = ("uniform", "range")
RESOLVED = {
    "t.*": ResolvedRegularExpression(frozenset({"t1", "t2"}), 1, 0),
    "u.*": ResolvedRegularExpression(frozenset({"u1"}), 1, 0),
}

MEMBERS = st.builds(
    ConsumerGroupMember,
    member_id=st.sampled_from("abcd"),
    instance_id=st.none() | st.sampled_from("ij"),
    subscribed_topic_names=st.sets(st.sampled_from(["t1", "t3", "v"])).map(sorted).map(tuple),
    subscribed_topic_regex=st.sampled_from([None, "", "t.*", "u.*", "not resolved"]),
    server_assignor=st.sampled_from([None, *ASSIGNORS]),
)


def group_of(members: list[ConsumerGroupMember]) -> ConsumerGroup:
    """Returns a group of these members. An instance id belongs to its first member."""
    group = ConsumerGroup("g")
    group.resolved_regexes.update(RESOLVED)
    for member in members:
        if member.instance_id is None or group.static_member(member.instance_id) is None:
            group.put_member(member)
    return group


def members_after(group: ConsumerGroup, changed: ConsumerGroupMember) -> list[ConsumerGroupMember]:
    """Returns the members after `changed` has joined and replaced those with its member id or instance id."""
    return [
        *(
            member
            for member in group.members.values()
            if member.member_id != changed.member_id
            and (changed.instance_id is None or member.instance_id != changed.instance_id)
        ),
        changed,
    ]


@given(st.lists(MEMBERS, max_size=6), MEMBERS)
def test_a_member_that_is_not_replayed_yet_counts_instead_of_the_members_that_it_replaces(
    members: list[ConsumerGroupMember], changed: ConsumerGroupMember
) -> None:
    group = group_of(members)
    after = members_after(group, changed)
    assert group.members_with(changed) == {member.member_id: member for member in after}
    topics: set[str] = set()
    votes: Counter[str | None] = Counter()
    for member in after:
        topics.update(member.subscribed_topic_names)
        resolved = RESOLVED.get(member.subscribed_topic_regex or "")
        topics |= resolved.topics if resolved is not None else set()
        votes[member.server_assignor] += 1
    assert group.subscribed_topic_names(changed) == topics
    preferred = "range" if votes["range"] > votes["uniform"] else "uniform"
    assert group.preferred_server_assignor(ASSIGNORS, changed) == preferred
