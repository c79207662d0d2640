# SPDX-License-Identifier: Apache-2.0
"""`uniform-rack`: the loads of `uniform`, most matches, and then as few moves as an exchange can save."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.coordinator.group.assignor import ASSIGNORS, Assignment, MemberSpec
from kcoord.coordinator.group.assignor.uniform_rack import _Exchange
from tests.unit.assignor.test_assignors import after, owners, targets, topic, totals

UNIFORM, UNIFORM_RACK = ASSIGNORS["uniform"], ASSIGNORS["uniform-rack"]
RACKS = ("a", "b", "c", "d")

Topics = dict[bytes, list[frozenset[str]]]
Group = tuple[dict[str, MemberSpec], Topics]


def assign(members: Mapping[str, MemberSpec], topics: Topics) -> Assignment:
    return UNIFORM_RACK.assign(members, counts(topics), topics.__getitem__)


def counts(topics: Topics) -> dict[bytes, int]:
    return {topic_id: len(racks) for topic_id, racks in topics.items()}


def matches(members: Mapping[str, MemberSpec], topics: Topics, partition: tuple[bytes, int], member_id: str) -> bool:
    topic_id, number = partition
    return members[member_id].rack_id in topics[topic_id][number]


def all_matches(members: Mapping[str, MemberSpec], topics: Topics, assignment: Assignment) -> int:
    return sum(matches(members, topics, partition, owner) for partition, owner in owners(assignment).items())


def most_matches(members: Mapping[str, MemberSpec], topics: Topics, assignment: Assignment) -> int:
    """Returns the largest possible number of matches of targets with these loads per subscription.

    Each place of a member takes one partition. This is Kuhn's algorithm for bipartite matchings, one place at a time.
    """
    total = 0
    for subscription in {frozenset(member.subscribed_topic_ids) for member in members.values()}:
        alike = [name for name, member in members.items() if frozenset(member.subscribed_topic_ids) == subscription]
        pool = [(topic_id, p) for name in alike for topic_id, ps in assignment[name].items() for p in ps]
        places = [name for name in alike for ps in assignment[name].values() for _ in ps]
        taken: dict[tuple[bytes, int], int] = {}
        total += sum(_place(place, set(), places, pool, taken, members, topics) for place in range(len(places)))
    return total


def _place(
    place: int,
    tried: set[tuple[bytes, int]],
    places: list[str],
    pool: list[tuple[bytes, int]],
    taken: dict[tuple[bytes, int], int],
    members: Mapping[str, MemberSpec],
    topics: Topics,
) -> bool:
    for partition in pool:
        if partition in tried or not matches(members, topics, partition, places[place]):
            continue
        tried.add(partition)
        if partition not in taken or _place(taken[partition], tried, places, pool, taken, members, topics):
            taken[partition] = place
            return True
    return False


@st.composite
def groups(draw: st.DrawFn) -> Group:
    topic_ids = [topic(number) for number in range(1, draw(st.integers(1, 3)) + 1)]
    replicas = st.frozensets(st.sampled_from((*RACKS, "e")), max_size=3)
    topics = {topic_id: draw(st.lists(replicas, min_size=1, max_size=6)) for topic_id in topic_ids}
    subscriptions = draw(st.lists(st.frozensets(st.sampled_from(topic_ids), min_size=1), min_size=1, max_size=2))
    members = {
        f"m{number}": MemberSpec(None, draw(st.sampled_from((None, *RACKS))), draw(st.sampled_from(subscriptions)), {})
        for number in range(draw(st.integers(1, 5)))
    }
    free = [(topic_id, p) for topic_id in topic_ids for p in range(len(topics[topic_id])) if draw(st.booleans())]
    for topic_id, p in free:
        takers = [member for member in members.values() if topic_id in member.subscribed_topic_ids]
        if takers:
            taker = draw(st.sampled_from(takers))
            taker.assigned = {**taker.assigned, topic_id: taker.assigned.get(topic_id, frozenset()) | {p}}
    return members, topics


@given(group=groups())
@settings(max_examples=400)
def test_the_loads_are_those_of_uniform_and_no_target_has_more_matches(group: Group) -> None:
    members, topics = group
    uniform, ours = UNIFORM.assign(members, counts(topics)), assign(members, topics)
    assert owners(ours).keys() == owners(uniform).keys()
    assert {name: totals({name: ours[name]}) for name in members} == {
        name: totals({name: uniform[name]}) for name in members
    }
    for (topic_id, _), owner in owners(ours).items():
        assert topic_id in members[owner].subscribed_topic_ids
    assert all_matches(members, topics, ours) == most_matches(members, topics, uniform)


@given(group=groups())
@settings(max_examples=300)
def test_no_exchange_brings_a_partition_back_without_costing_a_match(group: Group) -> None:
    members, topics = group
    ours = assign(members, topics)
    if ours == UNIFORM.assign(members, counts(topics)):
        return
    home, owner_of = targets(members), owners(ours)
    for first, second in combinations(owner_of, 2):
        owner, taker = owner_of[first], owner_of[second]
        if owner == taker or members[owner].subscribed_topic_ids != members[taker].subscribed_topic_ids:
            continue
        before = matches(members, topics, first, owner) + matches(members, topics, second, taker)
        exchanged = matches(members, topics, first, taker) + matches(members, topics, second, owner)
        at_home = (home.get(first) == owner) + (home.get(second) == taker)
        back_home = (home.get(first) == taker) + (home.get(second) == owner)
        assert exchanged < before or back_home <= at_home


@given(group=groups())
def test_nothing_moves_if_nothing_changed(group: Group) -> None:
    members, topics = group
    first = assign(members, topics)
    assert assign(after(first, members), topics) == first


@given(group=groups(), data=st.data())
def test_the_order_of_the_input_does_not_matter(group: Group, data: st.DataObject) -> None:
    members, topics = group
    shuffled = {member_id: members[member_id] for member_id in data.draw(st.permutations(sorted(members)))}
    assert assign(shuffled, dict(reversed(topics.items()))) == assign(members, topics)


@given(group=groups())
def test_without_racks_it_is_uniform(group: Group) -> None:
    members, topics = group
    bare = {name: MemberSpec(None, None, spec.subscribed_topic_ids, spec.assigned) for name, spec in members.items()}
    assert assign(bare, topics) == UNIFORM.assign(bare, counts(topics))


def test_each_member_reads_its_own_rack() -> None:
    members = {name: MemberSpec(None, rack, {topic(1)}) for name, rack in {"m1": "a", "m2": "b", "m3": "c"}.items()}
    racks = [frozenset("b"), frozenset("c"), frozenset("a")] * 4
    assignment = assign(members, {topic(1): racks})
    assert {name: sorted(assignment[name][topic(1)]) for name in members} == {
        "m1": [2, 5, 8, 11],
        "m2": [0, 3, 6, 9],
        "m3": [1, 4, 7, 10],
    }


def test_a_chain_over_three_racks_is_found() -> None:
    # No exchange of two partitions helps here: each of the three members has to pass on one.
    assigned = {"m1": 0, "m2": 1, "m3": 2}
    members = {
        name: MemberSpec(None, rack, {topic(1)}, {topic(1): frozenset({assigned[name]})})
        for name, rack in {"m1": "a", "m2": "b", "m3": "c"}.items()
    }
    racks = [frozenset("ab"), frozenset("bc"), frozenset()]
    assert all_matches(members, {topic(1): racks}, assign(members, {topic(1): racks})) == 2
    racks = [frozenset("b"), frozenset("bc"), frozenset("a")]
    assignment = assign(members, {topic(1): racks})
    assert owners(assignment) == {(topic(1), 0): "m2", (topic(1), 1): "m3", (topic(1), 2): "m1"}


def test_bringing_partitions_home_looks_at_kinds_and_not_at_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members swap their racks. Each partition is away then, and no exchange is possible."""
    looks = 0
    may_exchange = _Exchange._may_exchange

    def counted(exchange: _Exchange, owner: str, kind: frozenset[str], other: str, other_kind: frozenset[str]) -> bool:
        nonlocal looks
        looks += 1
        return may_exchange(exchange, owner, kind, other, other_kind)

    monkeypatch.setattr(_Exchange, "_may_exchange", counted)
    half = 500
    racks = [frozenset("a")] * half + [frozenset("b")] * half
    members = {
        "m1": MemberSpec(None, "a", {topic(1)}, {topic(1): frozenset(range(half, 2 * half))}),
        "m2": MemberSpec(None, "b", {topic(1)}, {topic(1): frozenset(range(half))}),
    }
    assignment = assign(members, {topic(1): racks})
    assert all_matches(members, {topic(1): racks}, assignment) == 2 * half
    assert 0 < looks <= 4 * half


def test_a_new_member_takes_the_partitions_of_its_rack() -> None:
    racks = [frozenset("a")] * 3 + [frozenset("b")] * 3
    present = {"m1": MemberSpec(None, "a", {topic(1)}, {topic(1): frozenset(range(6))})}
    joined = assign({**present, "m2": MemberSpec(None, "b", {topic(1)})}, {topic(1): racks})
    assert joined == {"m1": {topic(1): frozenset({0, 1, 2})}, "m2": {topic(1): frozenset({3, 4, 5})}}
    other_way = assign({**present, "m2": MemberSpec(None, "a", {topic(1)})}, {topic(1): racks[::-1]})
    assert all_matches({**present, "m2": MemberSpec(None, "a")}, {topic(1): racks[::-1]}, other_way) == 3
