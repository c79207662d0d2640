# SPDX-License-Identifier: Apache-2.0
"""Assignments from outside: exactly those are accepted that give each partition to one subscriber."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.coordinator.group.assignor import MemberSpec
from kcoord.coordinator.group.assignor.check import InvalidAssignment, checked_assignment
from tests.unit.assignor.test_assignors import topic

T, U = topic(1), topic(2)
NAMES = {T: "t", U: "u"}
COUNTS = {T: 2, U: 1}
MEMBERS = {"a": MemberSpec(subscribed_topic_ids=(T, U)), "b": MemberSpec(subscribed_topic_ids=(T,))}


@pytest.mark.parametrize(
    ("proposed", "reason"),
    [
        ({"a": {T: [0, 1], U: [0]}, "c": {}}, "member c is not in the group"),
        ({"a": {T: [0, 1]}, "b": {U: [0]}}, "member b does not subscribe to topic u"),
        ({"a": {bytes(16): [0]}}, "member a does not subscribe to topic AAAAAAAAAAAAAAAAAAAAAA"),
        ({"a": {T: [0, 1, 2], U: [0]}}, "topic t has no partition 2"),
        ({"a": {T: [-1, 0, 1], U: [0]}}, "topic t has no partition -1"),
        ({"a": {T: [0, 1], U: [0]}, "b": {T: [1]}}, "partition t-1 has two owners, a and b"),
        ({"a": {T: [0, 0, 1], U: [0]}}, "partition t-0 has two owners, a and a"),
        ({"a": {T: [0], U: [0]}}, "partition t-1 has no owner"),
        ({}, "partition t-0 has no owner"),
    ],
)
def test_an_invalid_assignment_is_refused_with_its_first_reason(
    proposed: dict[str, dict[bytes, list[int]]], reason: str
) -> None:
    with pytest.raises(InvalidAssignment, match=f"^{reason}$"):
        checked_assignment(proposed, MEMBERS, COUNTS, NAMES)


def test_a_member_that_is_left_out_gets_nothing() -> None:
    proposed = {"a": {T: [1, 0], U: [0]}}
    assert checked_assignment(proposed, MEMBERS, COUNTS, NAMES) == {
        "a": {T: frozenset({0, 1}), U: frozenset({0})},
        "b": {},
    }


@given(
    st.dictionaries(
        st.sampled_from(["a", "b"]),
        st.dictionaries(st.sampled_from([T, U]), st.lists(st.integers(-1, 2), max_size=3), max_size=2),
    )
)
def test_it_accepts_what_counting_accepts(proposed: dict[str, dict[bytes, list[int]]]) -> None:
    given_out = [(t, p, m) for m, topics in proposed.items() for t, partitions in topics.items() for p in partitions]
    is_valid = (
        sorted((t, p) for t, p, _ in given_out) == [(T, 0), (T, 1), (U, 0)]
        and all(t in MEMBERS[m].subscribed_topic_ids for t, _, m in given_out)
        and U not in proposed.get("b", {})
    )
    try:
        checked_assignment(proposed, MEMBERS, COUNTS, NAMES)
        accepted = True
    except InvalidAssignment:
        accepted = False
    assert accepted == is_valid
