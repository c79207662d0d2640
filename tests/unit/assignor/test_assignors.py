# SPDX-License-Identifier: Apache-2.0
"""The assignors, compared with Kafka's own assignments, and their promises as properties."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TypedDict

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kcoord.coordinator.group.assignor import ASSIGNORS, Assignment, MemberSpec

A = "fa45161b-b0b1-5546-9e4b-a438543aa800"
B = "73692782-8a1f-578b-827c-f2923dd979ec"
C = "32ca0eae-09ad-5054-8289-b4016128eb15"


Group = tuple[dict[str, MemberSpec], dict[bytes, int]]


def topic(number: int) -> bytes:
    return number.to_bytes(16, "big")


def after(assignment: Assignment, members: Mapping[str, MemberSpec]) -> dict[str, MemberSpec]:
    """Returns the members for the next run, with `assignment` as their target."""
    return {
        member_id: MemberSpec(
            member.instance_id,
            member.rack_id,
            member.subscribed_topic_ids,
            {topic_id: frozenset(partitions) for topic_id, partitions in assignment.get(member_id, {}).items()},
        )
        for member_id, member in members.items()
    }


def owners(assignment: Assignment) -> dict[tuple[bytes, int], str]:
    owner_of: dict[tuple[bytes, int], str] = {}
    for member_id, topics in assignment.items():
        for topic_id, partitions in topics.items():
            assert partitions
            for partition in partitions:
                assert owner_of.setdefault((topic_id, partition), member_id) == member_id, "assigned twice"
    return owner_of


def targets(members: Mapping[str, MemberSpec]) -> dict[tuple[bytes, int], str]:
    return {
        (topic_id, partition): member_id
        for member_id, member in members.items()
        for topic_id, partitions in member.assigned.items()
        for partition in partitions
    }


def totals(assignment: Assignment) -> list[int]:
    return sorted(sum(map(len, topics.values())) for topics in assignment.values())


# -- assignments of Kafka 4.3.1 ----------------------------------------------------------------------------------------

Steps = list[tuple[str, dict[str, list[int]]]]

JOINS: list[tuple[str, int, Steps]] = [
    (
        "range",
        6,
        [
            (A, {A: [0, 1, 2, 3, 4, 5]}),
            (B, {A: [3, 4, 5], B: [0, 1, 2]}),
            (C, {A: [4, 5], B: [2, 3], C: [0, 1]}),
        ],
    ),
    ("range", 3, [(A, {A: [0, 1, 2]}), (B, {A: [2], B: [0, 1]}), (C, {A: [2], B: [1], C: [0]})]),
    ("uniform", 3, [(A, {A: [0, 1, 2]}), (B, {A: [0, 1], B: [2]}), (C, {A: [0], B: [2], C: [1]})]),
]


@pytest.mark.parametrize(("name", "count", "steps"), JOINS)
def test_members_join_one_by_one_as_in_kafka(
    name: str, count: int, steps: list[tuple[str, dict[str, list[int]]]]
) -> None:
    members: dict[str, MemberSpec] = {}
    for joining, expected in steps:
        members[joining] = MemberSpec(subscribed_topic_ids=frozenset([topic(1)]))
        assignment = ASSIGNORS[name].assign(members, {topic(1): count})
        assert assignment == {
            member_id: {topic(1): frozenset(partitions)} for member_id, partitions in expected.items()
        }
        members = after(assignment, members)


def test_range_gives_an_added_partition_to_the_last_member_as_in_kafka() -> None:
    members = {member_id: MemberSpec(subscribed_topic_ids=frozenset([topic(1)])) for member_id in (A, B)}
    assert ASSIGNORS["range"].assign(members, {topic(1): 4}) == {
        A: {topic(1): frozenset({2, 3})},
        B: {topic(1): frozenset({0, 1})},
    }


class RecordedMember(TypedDict):
    instance_id: str | None
    subscribed: list[int]
    assigned: dict[str, list[int]]


class Recorded(TypedDict):
    """One line of kafka_assignments.jsonl: an input, and the assignment of that assignor in Kafka 4.3.1."""

    assignor: str
    partition_counts: dict[str, int]
    members: dict[str, RecordedMember]
    kafka: dict[str, dict[str, list[int]]]


RECORDED: list[Recorded] = [
    json.loads(line) for line in (Path(__file__).parent / "kafka_assignments.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("name", ["range", "uniform"])
def test_recorded_assignments_of_kafka(name: str) -> None:
    """`range` gives the same assignment. Kafka's `uniform` depends on hash order; kcoord's is at least as good."""
    checked = 0
    for case in RECORDED:
        if case["assignor"] != name:
            continue
        members = {
            member_id: MemberSpec(
                member["instance_id"],
                None,
                frozenset(topic(number) for number in member["subscribed"]),
                {topic(int(number)): frozenset(partitions) for number, partitions in member["assigned"].items()},
            )
            for member_id, member in case["members"].items()
        }
        counts = {topic(int(number)): count for number, count in case["partition_counts"].items()}
        kafka: Assignment = {
            member_id: {topic(int(number)): frozenset(partitions) for number, partitions in topics.items()}
            for member_id, topics in case["kafka"].items()
        }
        ours = ASSIGNORS[name].assign(members, counts)
        if name == "range":
            assert ours == kafka
        else:
            _assert_as_good(ours, kafka, members)
        checked += 1
    assert checked > 50


def _assert_as_good(ours: Assignment, kafka: Assignment, members: Mapping[str, MemberSpec]) -> None:
    before = targets(members)
    assert owners(ours).keys() == owners(kafka).keys()
    assert sum(n * n for n in totals(ours)) <= sum(n * n for n in totals(kafka))
    if len({frozenset(member.subscribed_topic_ids) for member in members.values()}) == 1:
        kept_by_us, kept_by_kafka = (len(owners(result).items() & before.items()) for result in (ours, kafka))
        assert totals(ours) == totals(kafka)
        assert kept_by_us >= kept_by_kafka


# -- properties -------------------------------------------------------------------------------------------------------

MEMBER_IDS = [f"m{n}" for n in range(8)]


@st.composite
def groups(draw: st.DrawFn, max_members: int = 8, max_count: int = 9) -> Group:
    topic_ids = [topic(n) for n in range(draw(st.integers(1, 4)))]
    counts = {topic_id: draw(st.integers(1, max_count)) for topic_id in topic_ids}
    subscriptions = st.frozensets(st.sampled_from([*topic_ids, topic(99)]))
    if draw(st.booleans()):
        subscriptions = st.just(draw(subscriptions))
    members: dict[str, MemberSpec] = {}
    for member_id in draw(st.permutations(MEMBER_IDS))[: draw(st.integers(1, max_members))]:
        instance_id = draw(st.none() | st.just("i" + member_id))
        members[member_id] = MemberSpec(instance_id, None, draw(subscriptions), {})
    holder = st.none() | st.sampled_from(sorted(members))
    assigned: dict[str, dict[bytes, set[int]]] = {member_id: {} for member_id in members}
    for topic_id in [*topic_ids, topic(98)]:
        for partition in range(counts.get(topic_id, 2) + 1):
            owner = draw(holder)
            if owner is not None:
                assigned[owner].setdefault(topic_id, set()).add(partition)
    for member_id, member in members.items():
        member.assigned = {topic_id: frozenset(partitions) for topic_id, partitions in assigned[member_id].items()}
    return members, counts


@pytest.mark.parametrize("name", sorted(ASSIGNORS))
@given(group=groups())
def test_every_subscribed_partition_has_one_subscriber(name: str, group: Group) -> None:
    members, counts = group
    assignment = ASSIGNORS[name].assign(members, counts)
    assert assignment.keys() == members.keys()
    owner_of = owners(assignment)
    expected = {
        (topic_id, partition)
        for member in members.values()
        for topic_id in member.subscribed_topic_ids
        for partition in range(counts.get(topic_id, 0))
    }
    assert owner_of.keys() == expected
    assert all(topic_id in members[member_id].subscribed_topic_ids for (topic_id, _), member_id in owner_of.items())


@pytest.mark.parametrize("name", sorted(ASSIGNORS))
@given(group=groups(), data=st.data())
def test_the_order_of_the_input_does_not_matter(name: str, group: Group, data: st.DataObject) -> None:
    members, counts = group
    shuffled = {
        member_id: MemberSpec(
            members[member_id].instance_id,
            members[member_id].rack_id,
            sorted(members[member_id].subscribed_topic_ids, reverse=True),
            dict(reversed(list(members[member_id].assigned.items()))),
        )
        for member_id in data.draw(st.permutations(sorted(members)))
    }
    assert ASSIGNORS[name].assign(shuffled, dict(reversed(counts.items()))) == ASSIGNORS[name].assign(members, counts)


@pytest.mark.parametrize("name", sorted(ASSIGNORS))
@given(group=groups())
def test_nothing_moves_when_nothing_changed(name: str, group: Group) -> None:
    members, counts = group
    first = ASSIGNORS[name].assign(members, counts)
    assert ASSIGNORS[name].assign(after(first, members), counts) == first


@given(group=groups())
def test_uniform_with_one_subscription_is_balanced_and_moves_as_little_as_possible(
    group: Group,
) -> None:
    members, counts = group
    assume(len({frozenset(member.subscribed_topic_ids) for member in members.values()}) == 1)
    assignment = ASSIGNORS["uniform"].assign(members, counts)
    sizes = totals(assignment)
    assert sizes[-1] - sizes[0] <= 1
    owner_of = owners(assignment)
    before = {key: member_id for key, member_id in targets(members).items() if key in owner_of}
    quota, extra = divmod(len(owner_of), len(members))
    owned = sorted((sum(1 for owner in before.values() if owner == member_id) for member_id in members), reverse=True)
    could_stay = sum(min(count, quota + (rank < extra)) for rank, count in enumerate(owned))
    assert len(owner_of.items() & before.items()) == could_stay


@given(group=groups(), data=st.data())
def test_uniform_moves_only_the_partitions_of_a_member_that_leaves(group: Group, data: st.DataObject) -> None:
    members, counts = group
    assume(len(members) > 1)
    shared = next(iter(members.values())).subscribed_topic_ids
    members = {member_id: replace(member, subscribed_topic_ids=shared) for member_id, member in members.items()}
    first = ASSIGNORS["uniform"].assign(members, counts)
    leaving = data.draw(st.sampled_from(sorted(members)))
    rest = after(first, {member_id: member for member_id, member in members.items() if member_id != leaving})
    second = owners(ASSIGNORS["uniform"].assign(rest, counts))
    assert all(second[key] == owner for key, owner in owners(first).items() if owner != leaving)


@settings(deadline=None)
@given(group=groups(max_members=3, max_count=2))
def test_uniform_is_as_balanced_as_the_subscriptions_allow(
    group: Group,
) -> None:
    """Compares the assignment of a small group with all possible assignments."""
    members, counts = group
    assignment = ASSIGNORS["uniform"].assign(members, counts)
    partitions = sorted(owners(assignment))
    assume(len(partitions) <= 6)
    choices = [
        [member_id for member_id, member in members.items() if topic_id in member.subscribed_topic_ids]
        for topic_id, _ in partitions
    ]
    best = min(sum(chosen.count(member_id) ** 2 for member_id in members) for chosen in product(*choices))
    assert sum(size * size for size in totals(assignment)) == best


@given(group=groups(), joining=st.lists(st.frozensets(st.integers(0, 3), min_size=1), max_size=4))
def test_uniform_leaves_no_chain_from_a_member_to_one_with_two_partitions_less(
    group: Group, joining: list[frozenset[int]]
) -> None:
    """Checks the condition for the best balance, for groups with too many assignments to compare all."""
    members, counts = group
    for number, topics in enumerate(joining):
        members[f"n{number}"] = MemberSpec(subscribed_topic_ids=frozenset(map(topic, topics)))
    assignment = ASSIGNORS["uniform"].assign(members, counts)
    loads = {member_id: sum(map(len, topics.values())) for member_id, topics in assignment.items()}
    for giver in members:
        reached = [giver]
        for between in reached:
            reached += [
                taker
                for taker, member in members.items()
                if taker not in reached and not assignment[between].keys().isdisjoint(member.subscribed_topic_ids)
            ]
        assert loads[giver] - min(loads[taker] for taker in reached) < 2


@given(group=groups())
def test_uniform_takes_a_partition_away_only_for_balance(group: Group) -> None:
    """If the kept partitions are balanced already and none is free, no partition moves."""
    members, counts = group
    balanced = after(ASSIGNORS["uniform"].assign(members, counts), members)
    strangers = {topic(97): frozenset({0}), topic(96): frozenset[int]()}
    with_strangers = {
        member_id: replace(member, assigned={**member.assigned, **strangers}) for member_id, member in balanced.items()
    }
    assignment = ASSIGNORS["uniform"].assign(with_strangers, counts)
    assert assignment == {member_id: member.assigned for member_id, member in balanced.items()}


def test_uniform_moves_along_a_chain_if_no_single_move_helps() -> None:
    foo, bar = topic(1), topic(2)
    members = {
        "a": MemberSpec(None, None, [foo], {foo: frozenset({0, 1, 2})}),
        "b": MemberSpec(None, None, [foo, bar], {foo: frozenset({3}), bar: frozenset({0})}),
        "c": MemberSpec(None, None, [bar], {bar: frozenset({1})}),
    }
    assignment = ASSIGNORS["uniform"].assign(members, {foo: 4, bar: 2})
    assert totals(assignment) == [2, 2, 2]
    assert len(owners(assignment).items() & targets(members).items()) == 4


def test_uniform_moves_no_more_along_a_chain_than_its_middle_holds() -> None:
    a, b = topic(1), topic(2)
    givers = {f"giver{i}": MemberSpec(None, None, [a], {a: frozenset(range(3 * i, 3 * i + 3))}) for i in range(3)}
    takers = {f"taker{i}": MemberSpec(None, None, [b], {b: frozenset({i})}) for i in range(3)}
    middle = MemberSpec(None, None, [a, b], {a: frozenset({9}), b: frozenset({3})})
    assignment = ASSIGNORS["uniform"].assign({**givers, **takers, "middle": middle}, {a: 10, b: 4})
    assert len(owners(assignment)) == 14
    assert sorted(len(assignment[member_id][a]) for member_id in givers) == [2, 3, 3]
    assert sorted(len(assignment[member_id][b]) for member_id in takers) == [1, 1, 2]
    assert {topic_id: len(partitions) for topic_id, partitions in assignment["middle"].items()} == {a: 2}


@pytest.mark.parametrize(
    ("owned", "newcomer", "moved"),
    [
        ({"a": {1: range(4)}, "b": {1: range(4, 8)}, "c": {1: range(8, 14)}}, [1], 3),
        ({"a": {1: range(2)}, "b": {1: range(2, 5)}}, [1], 1),
        ({"a": {1: range(1)}, "b": {2: range(5)}}, [1], 3),
        ({"a": {1: range(4), 2: range(2)}, "b": {1: range(4, 9)}}, [1, 2], 3),
    ],
    ids=["one too many", "at the quota", "all of a topic", "of two topics"],
)
def test_uniform_takes_from_the_most_loaded_members(
    owned: dict[str, dict[int, range]], newcomer: list[int], moved: int
) -> None:
    """Each partition moves at most once, to the new member or for the balance of the present members.

    The present members also subscribe to a topic that does not exist.
    """
    all_topics = frozenset({topic(1), topic(2), topic(3)})
    members = {
        member_id: MemberSpec(None, None, all_topics, {topic(number): frozenset(run) for number, run in topics.items()})
        for member_id, topics in owned.items()
    }
    counts = {
        topic(number): sum(len(topics.get(number, ())) for topics in owned.values())
        for number in (1, 2)
        if any(number in topics for topics in owned.values())
    }
    members["new"] = MemberSpec(None, None, frozenset(map(topic, newcomer)))
    assignment = ASSIGNORS["uniform"].assign(members, counts)
    before, after_it = targets(members), owners(assignment)
    assert before.keys() == after_it.keys()
    assert sum(after_it[partition] != owner for partition, owner in before.items()) == moved


@given(
    partitions=st.integers(1, 12),
    static=st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_range_co_partitions_topics_with_equal_counts(partitions: int, static: list[bool]) -> None:
    members = {
        f"m{n}": MemberSpec(f"i{9 - n}" if is_static else None, None, [topic(1), topic(2)], {})
        for n, is_static in enumerate(static)
    }
    assignment = ASSIGNORS["range"].assign(members, {topic(1): partitions, topic(2): partitions})
    assert all(topics.get(topic(1)) == topics.get(topic(2)) for topics in assignment.values())


def test_range_orders_static_members_first_and_by_instance_id() -> None:
    members = {
        "a": MemberSpec(None, None, [topic(1)], {}),
        "b": MemberSpec("z", None, [topic(1)], {}),
        "c": MemberSpec("y", None, [topic(1)], {}),
    }
    assignment = ASSIGNORS["range"].assign(members, {topic(1): 3})
    expected = {"c": 0, "b": 1, "a": 2}
    assert assignment == {member_id: {topic(1): frozenset({number})} for member_id, number in expected.items()}


@pytest.mark.parametrize("name", sorted(ASSIGNORS))
def test_a_group_without_members(name: str) -> None:
    assert ASSIGNORS[name].assign({}, {topic(1): 3}) == {}


def test_uniform_makes_the_partitions_of_whole_topics_once_per_size() -> None:
    members = {"a": MemberSpec(None, None, [topic(1), topic(2), topic(3)], {})}
    assigned = ASSIGNORS["uniform"].assign(members, {topic(1): 3, topic(2): 3, topic(3): 2})["a"]
    assert assigned == {topic(1): {0, 1, 2}, topic(2): {0, 1, 2}, topic(3): {0, 1}}
    assert assigned[topic(1)] is assigned[topic(2)]
