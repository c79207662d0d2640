# SPDX-License-Identifier: Apache-2.0
"""Which instance owns which shard: balanced, sticky, and the same at every instance."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.runtime.shard_map import (
    NOBODY,
    Instance,
    ShardMap,
    assign_shards,
    decode_map,
    encode_metadata,
    plan,
)
from kcoord_protocol.errors import DecodeError

COUNT = 50
NODES = st.sets(st.integers(0, 40), min_size=1, max_size=8)


def kept(owners: list[int], previous: dict[int, int]) -> int:
    return sum(previous.get(shard_id) == owner for shard_id, owner in enumerate(owners))


@given(NODES, st.dictionaries(st.integers(0, 59), st.integers(0, 45)), st.integers(0, 60))
def test_shards_are_spread_evenly_and_as_many_as_possible_stay(
    node_ids: set[int], previous: dict[int, int], count: int
) -> None:
    owners = assign_shards(count, node_ids, previous)
    loads = [owners.count(node_id) for node_id in node_ids]
    assert len(owners) == sum(loads) == count
    assert max(loads) - min(loads) <= 1
    assert owners == assign_shards(count, sorted(node_ids, reverse=True), previous)
    # Oracle: try every choice of the nodes that get one shard more.
    least, extra = divmod(count, len(node_ids))
    held = {node_id: sum(previous.get(shard_id) == node_id for shard_id in range(count)) for node_id in node_ids}
    most = max(
        sum(min(held[node_id], least + (node_id in larger)) for node_id in node_ids)
        for larger in combinations(node_ids, extra)
    )
    assert kept(owners, previous) == most


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=20))
def test_an_instance_that_leaves_or_comes_moves_only_its_share(changes: list[tuple[bool, int]]) -> None:
    node_ids: set[int] = set()
    owners = [NOBODY] * COUNT
    for comes, node_id in changes:
        after = node_ids | {node_id} if comes else node_ids - {node_id}
        moved_to = assign_shards(COUNT, after, dict(enumerate(owners)))
        moved = [shard_id for shard_id in range(COUNT) if moved_to[shard_id] != owners[shard_id]]
        if after == node_ids:
            assert not moved
        elif node_ids and after:
            # Only the shards of the node that left move, or only those that the new node gets.
            concerned = moved_to if comes else owners
            assert all(concerned[shard_id] == node_id for shard_id in moved)
            assert len(moved) <= -(-COUNT // min(len(node_ids), len(after)))
        node_ids, owners = after, moved_to


def test_without_instances_nobody_owns_a_shard() -> None:
    assert assign_shards(3, [], {0: 1}) == [NOBODY] * 3


def instance(node_id: int, *ports: int) -> Instance:
    return Instance(node_id, f"host{node_id}", 9092, "rack" if node_id % 2 else None, {p: 9100 + p for p in ports})


def joined(instance: Instance, last: ShardMap | None = None, version: int = 1) -> bytes:
    return encode_metadata(instance, version, last, 1)


def planned(generation: int, *metadata: bytes, last: ShardMap | None = None) -> ShardMap:
    return decode_map(plan(generation, metadata, COUNT, last))


def test_all_instances_get_the_same_map() -> None:
    first, second = instance(7, 1, 2), instance(3, 1, 2)
    assert plan(4, [joined(first), joined(second)], COUNT, None) == plan(
        4, [joined(second), joined(first)], COUNT, None
    )
    result = planned(4, joined(first), joined(second))
    assert (result.generation, list(result.instances.values())) == (4, [second, first])
    assert len(result.shards_of(3)) == len(result.shards_of(7)) == 25
    owner = result.owner(0)
    assert owner is not None and 0 in result.shards_of(owner.node_id)
    assert result.owner(COUNT) is None


def test_shards_stay_with_their_owners_also_if_the_leader_is_new() -> None:
    members = [instance(node_id) for node_id in (1, 2, 3)]
    before = planned(1, *map(joined, members))
    after = planned(2, *(joined(member, before) for member in members))
    assert after.owners == before.owners
    # The new leader has joined for the first time. It gets shards, and the others keep all that they may keep.
    grown = planned(3, joined(instance(4)), *(joined(member, after) for member in members))
    assert kept(list(grown.owners), dict(enumerate(after.owners))) == COUNT - len(grown.shards_of(4))


def test_a_newer_generation_counts_if_two_instances_name_the_same_shard() -> None:
    first, second = instance(1), instance(2)
    old = ShardMap(3, 1, {1: first}, [1] * COUNT)
    new = ShardMap(4, 1, {1: first, 2: second}, [2] * 25 + [1] * 25)
    for metadata in ([joined(first, old), joined(second, new)], [joined(second, new), joined(first, old)]):
        assert planned(5, *metadata).shards_of(2) == list(range(25))


def test_the_leader_remembers_owners_that_have_restarted() -> None:
    first, second = instance(1), instance(2)
    last = ShardMap(4, 1, {1: first, 2: second}, [2] * 25 + [1] * 25)
    assert planned(5, joined(first, last), joined(second), last=last).shards_of(2) == list(range(25))


def test_the_memory_of_the_leader_counts_only_against_older_claims() -> None:
    first, second = instance(1), instance(2)
    last = ShardMap(4, 1, {1: first, 2: second}, [2] * 25 + [1] * 25)
    older = ShardMap(3, 1, {1: first, 2: second}, [1] * 25 + [2] * 25)
    newer = ShardMap(5, 1, {1: first, 2: second}, [1] * 25 + [2] * 25)
    assert planned(6, joined(first, last), joined(second, older), last=last).shards_of(2) == list(range(25))
    assert planned(6, joined(first, newer), joined(second, newer), last=last).shards_of(2) == list(range(25, 50))


def test_an_instance_that_cannot_read_the_records_owns_nothing() -> None:
    old, new = instance(1), instance(2)
    both_old = planned(1, joined(old), joined(new))
    assert both_old.record_version == 1
    # The first instance of the new release changes nothing: the records have to be readable for both.
    mixed = planned(2, joined(old, both_old), joined(new, both_old, version=2))
    assert mixed.record_version == 1
    both_new = planned(3, joined(old, mixed, version=2), joined(new, mixed, version=2))
    assert both_new.record_version == 2
    # The old release comes back, as the leader, and remembers nothing.
    back = planned(4, joined(old), joined(new, both_new, version=2))
    assert (back.record_version, back.shards_of(1), len(back.shards_of(2))) == (2, [], COUNT)


def test_metadata_that_is_not_of_an_instance_is_ignored() -> None:
    result = planned(1, b"", b"\0\0\xff", joined(instance(1)))
    assert list(result.instances) == [1]
    with pytest.raises(DecodeError):
        decode_map(b"")


@given(NODES, st.integers(0, 1000))
def test_every_instance_chooses_the_same_port_for_a_broker_and_few_ports_move(
    node_ids: set[int], broker_id: int
) -> None:
    instances = {node_id: instance(node_id, broker_id) for node_id in sorted(node_ids)}
    chosen = ShardMap(1, 1, instances, []).address_of_broker(broker_id)
    assert chosen == ShardMap(2, 1, dict(reversed(instances.items())), []).address_of_broker(broker_id)
    assert chosen is not None and chosen[1] == 9100 + broker_id
    for node_id in node_ids:
        rest = {other: value for other, value in instances.items() if other != node_id}
        if f"host{node_id}" != chosen[0]:
            assert ShardMap(1, 1, rest, []).address_of_broker(broker_id) == chosen


def test_brokers_are_spread_over_the_instances() -> None:
    instances = {node_id: instance(node_id, *range(300)) for node_id in range(3)}
    shard_map = ShardMap(1, 1, instances, [])
    hosts = [shard_map.address_of_broker(broker_id) for broker_id in range(300)]
    counts = [sum(host is not None and host[0] == f"host{node_id}" for host in hosts) for node_id in range(3)]
    assert min(counts) > 70, counts


def test_an_instance_without_a_port_for_the_broker_is_not_chosen() -> None:
    shard_map = ShardMap(1, 1, {1: instance(1), 2: instance(2, 5)}, [])
    assert shard_map.address_of_broker(5) == ("host2", 9105)
    assert shard_map.address_of_broker(6) is None
