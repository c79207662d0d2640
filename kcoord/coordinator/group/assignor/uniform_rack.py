# SPDX-License-Identifier: Apache-2.0
"""The `uniform-rack` assignor: as balanced as `uniform`, and as many partitions as possible in their member's rack.

A partition matches its owner if a replica is on a broker in the owner's rack (KIP-881). Such an owner can fetch from a
replica nearby (KIP-392). Three aims follow each other: the loads are those of `uniform`; of such targets, most
partitions match; of those, a partition stays with its owner.

**Steps.** `uniform` assigns first. Then the members of each subscription exchange partitions, so their loads stay.

1. *How many.* Members of one rack are alike, and so are partitions whose replicas are in the same racks (a kind). The
   counts per rack and kind are a flow from kinds to racks. An augmenting path begins with a partition that does not
   match its owner. It takes the place of a partition in one of its own racks, that one takes a place in another of its
   racks, and so on. The path ends at a partition that does not match either, which goes to the first owner. If no such
   path exists, no other target with these loads has more matches (the theorem of Ford and Fulkerson).
2. *Which.* A rack gives up partitions that moved anyway first. A partition goes to its present owner if that one has a
   place.
3. *Back home.* Two members exchange partitions if one of them comes back to its present owner and the matches do not
   become fewer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

from kcoord.coordinator.group.assignor.spec import Assignment, MemberSpec, PartitionRacks, no_racks
from kcoord.coordinator.group.assignor.uniform import Subscription, UniformAssignor, subscriptions_of

_Partition: TypeAlias = tuple[bytes, int]
_Kind: TypeAlias = frozenset[str]
"""The racks of a partition's replicas in which the subscription has members."""
_Key = TypeVar("_Key")
_NO_RACK = ""
"""Stands for members without a rack, and for members in a rack without any replica."""


class UniformRackAssignor:
    """Balanced like `uniform`; exchanges partitions between members until most are in the rack of their member."""

    __slots__ = ()

    needs_racks = True

    @property
    def name(self) -> str:
        return "uniform-rack"

    def assign(
        self,
        members: Mapping[str, MemberSpec],
        partition_counts: Mapping[bytes, int],
        partition_racks: PartitionRacks = no_racks,
    ) -> Assignment:
        assignment = UniformAssignor().assign(members, partition_counts)
        for subscription in subscriptions_of(sorted(members), members):
            if any(members[member_id].rack_id for member_id in subscription.member_ids):
                _match_racks(assignment, subscription, members, partition_racks)
        return assignment


def _match_racks(
    assignment: Assignment,
    subscription: Subscription,
    members: Mapping[str, MemberSpec],
    partition_racks: PartitionRacks,
) -> None:
    exchange = _Exchange(assignment, subscription, members, partition_racks)
    flow = _Flow({rack: {kind: len(held) for kind, held in kinds.items()} for rack, kinds in exchange.held.items()})
    if flow.improve():
        exchange.move(flow.counts)
        exchange.bring_home()
        exchange.store(assignment)


class _Flow:
    """The numbers of partitions by rack and kind. `improve` changes them; the sum of each rack and kind stays.

    A kind whose search fails, and all racks that the search reached, are settled: no later path leads through them.
    """

    def __init__(self, counts: Mapping[str, Mapping[_Kind, int]]) -> None:
        kinds = sorted({kind for of_rack in counts.values() for kind in of_rack}, key=sorted)
        self.counts: dict[str, dict[_Kind, int]] = {rack: {} for rack in sorted(counts)}
        self._strays: dict[_Kind, dict[str, None]] = {kind: {} for kind in kinds}
        """Kind -> the racks in which partitions of the kind do not match."""
        self._spare: dict[str, dict[_Kind, None]] = {rack: {} for rack in self.counts}
        """Rack -> the kinds of its partitions that do not match."""
        self._ways: dict[str, dict[str, dict[_Kind, None]]] = {rack: defaultdict(dict) for rack in self.counts}
        """Rack -> another rack -> the kinds of its partitions that match in both."""
        self._settled: set[str] = set()
        for rack in self.counts:
            for kind in kinds:
                if kind in counts[rack]:
                    self._set(rack, kind, counts[rack][kind])

    def _set(self, rack: str, kind: _Kind, count: int) -> None:
        self.counts[rack][kind] = count
        if rack in kind:
            indexes = [self._ways[rack][target] for target in sorted(kind)]
        else:
            indexes = [self._spare[rack]]
            _note(self._strays[kind], rack, count)
        for index in indexes:
            _note(index, kind, count)

    def improve(self) -> bool:
        """Makes the matches as many as possible. Returns whether anything changed."""
        has_changed = False
        for kind, racks in self._strays.items():
            while racks and (path := self._path(kind)):
                self._exchange(path)
                has_changed = True
        return has_changed

    def _path(self, kind: _Kind) -> list[tuple[_Kind, str]]:
        """Returns the shortest augmenting path that begins with the kind, empty if there is none.

        Its pairs are a kind and the rack that a partition of it leaves. The partition goes to the rack of the next
        pair, the last one to the rack of the first.
        """
        queue = sorted(kind - self._settled)
        came_from: dict[str, tuple[_Kind, str]] = {}
        seen = self._settled.union(queue)
        for rack in queue:
            if self._spare[rack]:
                path = [(next(iter(self._spare[rack])), rack)]
                while rack in came_from:
                    leaving, rack = came_from[rack]
                    path.append((leaving, rack))
                return [(kind, next(iter(self._strays[kind]))), *reversed(path)]
            for target, kinds in self._ways[rack].items():
                if kinds and target not in seen:
                    seen.add(target)
                    came_from[target] = (next(iter(kinds)), rack)
                    queue.append(target)
        self._settled = seen
        return []

    def _exchange(self, path: Sequence[tuple[_Kind, str]]) -> None:
        count = min(self.counts[rack][kind] for kind, rack in path)
        for (kind, rack), (_, target) in zip(path, [*path[1:], path[0]], strict=True):
            self._set(rack, kind, self.counts[rack][kind] - count)
            self._set(target, kind, self.counts[target].get(kind, 0) + count)


def _note(index: dict[_Key, None], key: _Key, count: int) -> None:
    """Keeps the key in the index as long as the count is not 0. A dict keeps the order, unlike a set."""
    if count:
        index[key] = None
    else:
        index.pop(key, None)


class _Exchange:
    """The partitions of a subscription's members. `held` has them by rack and kind, with their owners."""

    def __init__(
        self,
        assignment: Assignment,
        subscription: Subscription,
        members: Mapping[str, MemberSpec],
        partition_racks: PartitionRacks,
    ) -> None:
        self._member_ids = subscription.member_ids
        topic_ids = {topic_id for member_id in self._member_ids for topic_id in assignment[member_id]}
        racks_of = {topic_id: partition_racks(topic_id) for topic_id in sorted(topic_ids)}
        of_members = {rack for member_id in self._member_ids if (rack := members[member_id].rack_id)}
        of_partitions = {kind for kinds in racks_of.values() for kind in kinds}
        # Racks of replicas without a member here match nobody, so kinds that differ only in them are the same.
        kinds = {racks: frozenset(racks & of_members) for racks in of_partitions}
        self._kinds_of = {topic_id: [kinds[racks] for racks in of_topic] for topic_id, of_topic in racks_of.items()}
        present = frozenset[str]().union(*kinds.values())
        self._rack_of = {
            member_id: rack if (rack := members[member_id].rack_id) in present and rack else _NO_RACK
            for member_id in self._member_ids
        }
        self._home: dict[_Partition, str] = {}
        self._owner: dict[_Partition, str] = {}
        self.held: dict[str, dict[_Kind, list[_Partition]]] = {
            rack: defaultdict(list) for rack in (*self._rack_of.values(), *present)
        }
        self._changed: set[str] = set()
        for member_id in self._member_ids:
            held = self.held[self._rack_of[member_id]]
            for topic_id, numbers in assignment[member_id].items():
                for number in sorted(numbers):
                    partition = (topic_id, number)
                    self._owner[partition] = member_id
                    held[self._kind(partition)].append(partition)
        for member_id in self._member_ids:
            for topic_id, numbers in members[member_id].assigned.items():
                for number in numbers:
                    if (topic_id, number) in self._owner:
                        self._home[topic_id, number] = member_id

    def _kind(self, partition: _Partition) -> _Kind:
        topic_id, number = partition
        kinds = self._kinds_of[topic_id]
        return kinds[number] if number < len(kinds) else frozenset()

    def move(self, counts: Mapping[str, Mapping[_Kind, int]]) -> None:
        """Moves partitions between members until each rack has these counts."""
        pool: dict[_Kind, list[_Partition]] = defaultdict(list)
        places: dict[str, int] = defaultdict(int)
        lacks: dict[tuple[str, _Kind], int] = {}
        for rack, kinds in counts.items():
            for kind, count in kinds.items():
                surplus = len(self.held[rack][kind]) - count
                if surplus < 0:
                    lacks[rack, kind] = -surplus
                for partition in sorted(self.held[rack][kind], key=self._order_of_leaving)[: max(surplus, 0)]:
                    pool[kind].append(partition)
                    places[self._owner[partition]] += 1
        # First those that go home, so that nobody else takes their place.
        for kind, partitions in pool.items():
            homeless: list[_Partition] = []
            for partition in partitions:
                home = self._home.get(partition, "")
                rack = self._rack_of.get(home, _NO_RACK)
                if places.get(home) and lacks.get((rack, kind)):
                    lacks[rack, kind] -= 1
                    places[home] -= 1
                    self._give(partition, home)
                else:
                    homeless.append(partition)
            pool[kind] = homeless
        open_places: dict[str, list[str]] = defaultdict(list)
        for member_id in self._member_ids:
            open_places[self._rack_of[member_id]] += [member_id] * places.get(member_id, 0)
        for (rack, kind), count in lacks.items():
            for _ in range(count):
                self._give(pool[kind].pop(), open_places[rack].pop())

    def _order_of_leaving(self, partition: _Partition) -> tuple[bool, _Partition]:
        return (self._home.get(partition) == self._owner[partition], partition)

    def _give(self, partition: _Partition, member_id: str) -> None:
        self._changed |= {self._owner[partition], member_id}
        self._owner[partition] = member_id

    def bring_home(self) -> None:
        """Exchanges two partitions, as long as one of them comes home by it and the matches stay.

        What a member holds for candidates is kept by kind, since all partitions of a kind are alike in an exchange.
        """
        strangers: dict[str, dict[_Kind, dict[_Partition, None]]] = defaultdict(lambda: defaultdict(dict))
        away: list[_Partition] = []
        for partition, member_id in sorted(self._owner.items()):
            home = self._home.get(partition)
            if home != member_id:
                strangers[member_id][self._kind(partition)][partition] = None
                if home is not None:
                    away.append(partition)
        has_changed = True
        while has_changed:
            has_changed = False
            for partition in away:
                owner, home, kind = self._owner[partition], self._home[partition], self._kind(partition)
                if owner == home:
                    continue
                for other_kind, candidates in strangers[home].items():
                    if candidates and self._may_exchange(owner, kind, home, other_kind):
                        other = next(iter(candidates))
                        del candidates[other], strangers[owner][kind][partition]
                        self._give(partition, home)
                        self._give(other, owner)
                        if self._home.get(other) != owner:
                            strangers[owner][other_kind][other] = None
                        has_changed = True
                        break

    def _may_exchange(self, owner: str, kind: _Kind, other_owner: str, other_kind: _Kind) -> bool:
        """Returns whether the matches stay if two members exchange partitions of these kinds."""
        rack, other_rack = self._rack_of[owner], self._rack_of[other_owner]
        before = (rack in kind) + (other_rack in other_kind)
        return (other_rack in kind) + (rack in other_kind) >= before

    def store(self, assignment: Assignment) -> None:
        """Writes the claims of the members that changed."""
        claims: dict[str, dict[bytes, set[int]]] = {member_id: defaultdict(set) for member_id in self._changed}
        for (topic_id, number), member_id in self._owner.items():
            if member_id in claims:
                claims[member_id][topic_id].add(number)
        for member_id, claim in claims.items():
            assignment[member_id] = {topic_id: frozenset(numbers) for topic_id, numbers in claim.items()}
