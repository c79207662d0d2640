# SPDX-License-Identifier: Apache-2.0
"""The owners of partitions as a group derives them from its members, beside a plain model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kcoord.coordinator.group.consumer.group import NO_METADATA, ConsumerGroup, ConsumerGroupMember

TOPICS = [bytes([number]) * 16 for number in range(3)]
OWNED = st.dictionaries(st.sampled_from(TOPICS), st.dictionaries(st.integers(0, 5), st.integers(1, 2)))
MEMBER_ID = st.sampled_from("abc")
PUT = st.builds(ConsumerGroupMember, MEMBER_ID, assigned=OWNED, pending_revocation=OWNED)
CHANGES = st.lists(st.one_of(PUT, MEMBER_ID, st.sampled_from(TOPICS)), max_size=12)


class Model:
    """Every partition with its owner: a member that is put takes all its partitions, also those of others."""

    def __init__(self) -> None:
        self.members: dict[str, ConsumerGroupMember] = {}
        self.owners: dict[tuple[bytes, int], str] = {}

    def put(self, member_id: str, member: ConsumerGroupMember | None) -> None:
        old = self.members.get(member_id, ConsumerGroupMember(member_id))
        new = member or ConsumerGroupMember(member_id)
        if (old.assigned, old.pending_revocation) != (new.assigned, new.pending_revocation):
            for place in partitions_of(old):
                if self.owners.get(place) == member_id:
                    del self.owners[place]
            self.owners.update(dict.fromkeys(partitions_of(new), member_id))
        self.members[member_id] = new

    def owners_of(self, topic_id: bytes) -> Mapping[int, str]:
        return {number: owner for (topic, number), owner in self.owners.items() if topic == topic_id}


def partitions_of(member: ConsumerGroupMember) -> list[tuple[bytes, int]]:
    owned = (member.assigned, member.pending_revocation)
    return [(topic_id, number) for part in owned for topic_id, numbers in part.items() for number in numbers]


@given(CHANGES)
def test_a_group_knows_the_owner_of_each_partition(changes: list[ConsumerGroupMember | str | bytes]) -> None:
    """A text in `changes` is a member that is removed, and bytes are a topic whose owners are asked for."""
    group, model = ConsumerGroup("g"), Model()
    for change in changes:
        if isinstance(change, bytes):
            assert group.owners_of(change) == model.owners_of(change)
        elif isinstance(change, str):
            group.remove_member(change)
            model.put(change, None)
        else:
            # Members are values, so what the group keeps must not depend on the objects of the caller.
            group.put_member(replace(change))
            model.put(change.member_id, change)
    for topic_id in TOPICS:
        assert group.owners_of(topic_id) == model.owners_of(topic_id)


def test_a_member_waits_as_long_as_one_partition_of_its_target_has_another_owner() -> None:
    group, member = ConsumerGroup("g"), ConsumerGroupMember("b")
    group.put_member(ConsumerGroupMember("a", assigned={TOPICS[0]: {0: 1, 1: 1}}))
    group.put_member(member)
    for target, waits in (
        ({TOPICS[0]: {1}, TOPICS[1]: {0}}, True),
        ({TOPICS[1]: {0}, TOPICS[0]: {1}}, True),
        ({TOPICS[0]: {2}, TOPICS[1]: {0}}, False),
        ({}, False),
    ):
        group.put_target("b", {topic_id: frozenset(numbers) for topic_id, numbers in target.items()}, NO_METADATA)
        assert group.waits_for_release(member) is waits, target
