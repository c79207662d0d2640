# SPDX-License-Identifier: Apache-2.0
"""The `uniform` assignor: balances the members' partition counts and moves as few partitions as possible.

**Kinds.** Members with the same subscription are handled together, and so are topics with the same subscribers (a topic
class). A group has far fewer subscriptions and topic classes than members and topics. Partitions are numbered flat
(topics in id order, one after the other), so the work is on integers.

**Steps** (`UniformAssignor.assign`). Every member first keeps the partitions that it may keep. `Balance` computes how
many partitions of each topic class the members of each subscription get together. Members give up the surplus of a
class. Then the members of a subscription share evenly. Most members keep their partitions, so only members that change
go through the flat numbers.

**Balance.** Members of one subscription can exchange partitions and share evenly, so only sums matter:
`held[subscription][topic_class]`. The sums are a flow with convex costs, which three steps improve. First, free
partitions go to the least loaded subscribers. Second, partitions move directly from loaded to less loaded subscribers.
Third, partitions move along chains (A gives to B, B gives to C) if no direct move helps. At the end no chain leads from
a member to another with at least two partitions less. This is the condition for the best possible balance (a
semi-matching without a cost-reducing path).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from kcoord.coordinator.group.assignor.spec import Assignment, Claim, MemberSpec, PartitionRacks, no_racks


@dataclass(slots=True)
class Subscription:
    """The members that subscribe to exactly these topics, in the given order. Some of the topics may not exist."""

    topic_ids: frozenset[bytes]
    member_ids: list[str]


@dataclass(slots=True)
class TopicClass:
    """Existing topics in id order, and the ascending indexes of the subscriptions that include them."""

    subscribers: tuple[int, ...]
    topic_ids: list[bytes]


def subscriptions_of(order: Iterable[str], members: Mapping[str, MemberSpec]) -> list[Subscription]:
    """Returns the subscriptions in the order of their first members."""
    subscriptions: dict[frozenset[bytes], Subscription] = {}
    # Members that share one object are found by its id, without hashing their topics.
    of_object: dict[int, list[str]] = {}
    for member_id in order:
        topic_ids = members[member_id].subscribed_topic_ids
        alike = of_object.get(id(topic_ids))
        if alike is None:
            of_object[id(topic_ids)] = alike = _subscription(subscriptions, topic_ids).member_ids
        alike.append(member_id)
    return list(subscriptions.values())


def _subscription(subscriptions: dict[frozenset[bytes], Subscription], topic_ids: Collection[bytes]) -> Subscription:
    distinct = frozenset(topic_ids)
    subscription = subscriptions.get(distinct)
    if subscription is None:
        subscription = subscriptions[distinct] = Subscription(distinct, [])
    return subscription


def topic_classes(subscriptions: Iterable[Subscription], partition_counts: Mapping[bytes, int]) -> list[TopicClass]:
    """Returns the topic classes in the order of their first topics."""
    subscribers: dict[bytes, list[int]] = {}
    for index, subscription in enumerate(subscriptions):
        for topic_id in subscription.topic_ids & partition_counts.keys():
            subscribers.setdefault(topic_id, []).append(index)
    classes: dict[tuple[int, ...], TopicClass] = {}
    for topic_id in sorted(subscribers):
        signature = tuple(subscribers[topic_id])
        topic_class = classes.get(signature)
        if topic_class is None:
            topic_class = classes[signature] = TopicClass(signature, [])
        topic_class.topic_ids.append(topic_id)
    return list(classes.values())


class PartitionSpace:
    """The flat numbering of the partitions of some topics."""

    __slots__ = ("_whole", "base_of", "counts", "ends", "topic_ids", "total")

    def __init__(self, topic_ids: Iterable[bytes], partition_counts: Mapping[bytes, int]) -> None:
        self.topic_ids = sorted({topic_id for topic_id in topic_ids if topic_id in partition_counts})
        self.counts = [partition_counts[topic_id] for topic_id in self.topic_ids]
        self.base_of: dict[bytes, tuple[int, int]] = {}
        """Topic id -> (flat number of its partition 0, number of partitions)."""
        self.ends: list[int] = []
        self.total = 0
        for topic_id, count in zip(self.topic_ids, self.counts, strict=True):
            self.base_of[topic_id] = (self.total, count)
            self.total += count
            self.ends.append(self.total)
        self._whole: dict[int, frozenset[int]] = {}
        """Number of partitions -> all of them. Topics of the same size share the set."""

    def flatten(self, assigned: Claim) -> list[int]:
        """Returns the ascending flat numbers of the partitions in `assigned` that exist."""
        flat: list[int] = []
        for topic_id, partitions in assigned.items():
            place = self.base_of.get(topic_id)
            if place is not None:
                base, count = place
                flat += [base + partition for partition in partitions if partition < count]
        flat.sort()
        return flat

    def expand(self, flat: list[int]) -> Claim:
        """Returns topic id -> partitions for ascending flat numbers."""
        assigned: dict[bytes, frozenset[int]] = {}
        start, size = 0, len(flat)
        while start < size:
            topic = bisect_right(self.ends, flat[start])
            end = self.ends[topic]
            base = end - self.counts[topic]
            stop = size if flat[-1] < end else bisect_left(flat, end, start)
            first, last = flat[start] - base, flat[stop - 1] - base
            count = stop - start
            if count == self.counts[topic]:
                partitions = self._whole.get(count) or self._whole.setdefault(count, frozenset(range(count)))
            elif last - first == count - 1:
                partitions = frozenset(range(first, last + 1))
            else:
                partitions = frozenset([number - base for number in flat[start:stop]])
            assigned[self.topic_ids[topic]] = partitions
            start = stop
        return assigned


class Balance:
    """The counts of partitions per subscription and topic class.

    `held` begins with what the members keep; after `place` and `level` it is what they get. `loads` are its sums per
    subscription.
    """

    __slots__ = ("_highs", "_lows", "_sizes", "_subscribers", "held", "loads")

    def __init__(
        self, subscriptions: Sequence[Subscription], classes: Sequence[TopicClass], held: list[dict[int, int]]
    ) -> None:
        self.held = held
        self.loads = [sum(counts.values()) for counts in held]
        self._subscribers = [topic_class.subscribers for topic_class in classes]
        self._sizes = [len(subscription.member_ids) for subscription in subscriptions]
        # The partition counts of the least and the most loaded members of each subscription.
        self._lows = [load // size for load, size in zip(self.loads, self._sizes, strict=True)]
        self._highs = [-(-load // size) for load, size in zip(self.loads, self._sizes, strict=True)]

    def place(self, free: Sequence[int]) -> None:
        """Places the `free` partitions of each class.

        Classes with few subscribers have the least choice, so they are first.
        """
        choice = [sum(self._sizes[taker] for taker in subscribers) for subscribers in self._subscribers]
        for topic_class in sorted(range(len(free)), key=lambda index: (choice[index], index)):
            if free[topic_class]:
                self._fill(topic_class, free[topic_class])

    def _fill(self, topic_class: int, left: int) -> None:
        sizes, loads, lows = self._sizes, self.loads, self._lows
        takers = sorted(self._subscribers[topic_class], key=lambda taker: (lows[taker], taker))
        # The level that all of the least loaded takers can reach. The rest is less than one more for all of them.
        level = members = load = 0
        for taker in takers:
            if members and level <= lows[taker]:
                break
            members += sizes[taker]
            load += loads[taker]
            level = (left + load) // members
        while left:
            for taker in takers:
                count = min(left, level * sizes[taker] - loads[taker])
                if count > 0:
                    self._add(taker, topic_class, count)
                    left -= count
            level += 1

    def level(self) -> None:
        """Moves partitions until the balance cannot improve."""
        moved = True
        while moved:
            moved = False
            for topic_class in range(len(self._subscribers)):
                moved |= self._move_directly(topic_class)
        self._move_along_chains()

    def _add(self, taker: int, topic_class: int, count: int) -> None:
        held = self.held[taker]
        held[topic_class] = held.get(topic_class, 0) + count
        load = self.loads[taker] + count
        self.loads[taker] = load
        self._lows[taker] = load // self._sizes[taker]
        self._highs[taker] = -(-load // self._sizes[taker])

    def _move(self, giver: int, topic_class: int, taker: int, count: int) -> None:
        self._add(taker, topic_class, count)
        self._add(giver, topic_class, -count)
        if not self.held[giver][topic_class]:
            del self.held[giver][topic_class]

    def _movable(self, giver: int, taker: int) -> int:
        """Returns how many partitions can move until the giver's highest or the taker's lowest count changes."""
        loads, sizes = self.loads, self._sizes
        surplus = loads[giver] - (self._highs[giver] - 1) * sizes[giver]
        return min(surplus, (self._lows[taker] + 1) * sizes[taker] - loads[taker])

    def _move_directly(self, topic_class: int) -> bool:
        """Moves from the most to the least loaded subscribers of the class until no such move helps."""
        held, lows, highs = self.held, self._lows, self._highs
        subscribers = self._subscribers[topic_class]
        if max([highs[giver] for giver in subscribers]) - min([lows[taker] for taker in subscribers]) < 2:
            return False
        lowest = [(lows[taker], taker) for taker in subscribers]
        highest = [(-highs[giver], giver) for giver in subscribers if topic_class in held[giver]]
        heapify(lowest)
        heapify(highest)
        moved = False
        while highest:
            minus_high, giver = highest[0]
            low, taker = lowest[0]
            if low != lows[taker]:
                heapreplace(lowest, (lows[taker], taker))
            elif -minus_high != highs[giver] or topic_class not in held[giver]:
                heappop(highest)
                if topic_class in held[giver]:
                    heappush(highest, (-highs[giver], giver))
            elif -minus_high - low < 2:
                break
            else:
                if topic_class not in held[taker]:
                    heappush(highest, (-low - 1, taker))
                self._move(giver, topic_class, taker, min(held[giver][topic_class], self._movable(giver, taker)))
                heappush(lowest, (lows[giver], giver))
                moved = True
        return moved

    def _move_along_chains(self) -> None:
        """Moves along chains from the most loaded subscriptions until no chain helps.

        If no chain helps the most loaded subscriptions, all that their chains reach are settled and leave the search.
        """
        unsettled = set(range(len(self.loads)))
        while unsettled:
            top = max(self._highs[number] for number in unsettled)
            if top - min(self._lows[number] for number in unsettled) < 2:
                return
            unsettled.difference_update(self._unload(top, unsettled))

    def _unload(self, top: int, unsettled: set[int]) -> list[int]:
        """Moves along the shortest chain that helps a subscription with `top`.

        If there is no such chain, it returns all subscriptions that were reached.
        """
        queue = [giver for giver in sorted(unsettled) if self._highs[giver] == top]
        came_from: dict[int, tuple[int, int]] = dict.fromkeys(queue, (-1, -1))
        seen_classes: set[int] = set()
        for giver in queue:
            for topic_class in sorted(self.held[giver].keys() - seen_classes):
                seen_classes.add(topic_class)
                for taker in self._subscribers[topic_class]:
                    if taker in came_from or taker not in unsettled:
                        continue
                    came_from[taker] = (giver, topic_class)
                    if self._lows[taker] <= top - 2:
                        self._move_chain(taker, came_from)
                        return []
                    queue.append(taker)
        return queue

    def _move_chain(self, last: int, came_from: dict[int, tuple[int, int]]) -> None:
        chain: list[tuple[int, int, int]] = []
        taker = last
        giver, topic_class = came_from[taker]
        while giver >= 0:
            chain.append((giver, topic_class, taker))
            taker = giver
            giver, topic_class = came_from[taker]
        count = min(self.held[giver][topic_class] for giver, topic_class, _ in chain)
        count = min(count, self._movable(taker, last))
        for giver, topic_class, taker in chain:
            self._move(giver, topic_class, taker, count)


class UniformAssignor:
    """Sticky and balanced: a partition moves only if that improves the balance."""

    __slots__ = ()

    needs_racks = False

    @property
    def name(self) -> str:
        return "uniform"

    def assign(
        self,
        members: Mapping[str, MemberSpec],
        partition_counts: Mapping[bytes, int],
        partition_racks: PartitionRacks = no_racks,
    ) -> Assignment:
        if len(members) == 1:
            [(member_id, member)] = members.items()
            return {member_id: _all_partitions(member.subscribed_topic_ids, partition_counts)}
        subscriptions = subscriptions_of(sorted(members), members)
        classes = topic_classes(subscriptions, partition_counts)
        claims = {member_id: member.assigned for member_id, member in members.items()}
        sharing = _Sharing(subscriptions, classes, partition_counts, claims)
        held = sharing.keep()
        balance = Balance(subscriptions, classes, [counts.copy() for counts in held])
        balance.place([len(numbers) for numbers in sharing.free])
        balance.level()
        for subscription, before, after, load in zip(subscriptions, held, balance.held, balance.loads, strict=True):
            sharing.give_up(subscription, before, after, load)
        for subscription, before, after, load in zip(subscriptions, held, balance.held, balance.loads, strict=True):
            sharing.share(subscription, sharing.take(before, after), load)
        return sharing.claims


def _all_partitions(topic_ids: Collection[bytes], partition_counts: Mapping[bytes, int]) -> Claim:
    """Returns what the only member of a group gets, in the turn of its first heartbeat. Topics share equal sets."""
    counts = {topic_id: partition_counts.get(topic_id, 0) for topic_id in sorted(topic_ids)}
    whole = {count: frozenset(range(count)) for count in set(counts.values())}
    return {topic_id: whole[count] for topic_id, count in counts.items() if count}


class _Sharing:
    """The partitions of the members while they are shared out.

    `claims` are the members' present claims. `free` has the flat numbers of partitions without an owner, by topic
    class.
    """

    __slots__ = ("_class_of_topic", "_space", "_subscriptions", "claims", "free")

    def __init__(
        self,
        subscriptions: list[Subscription],
        classes: list[TopicClass],
        partition_counts: Mapping[bytes, int],
        claims: dict[str, Claim],
    ) -> None:
        self._subscriptions = subscriptions
        self._class_of_topic = {
            topic_id: index for index, topic_class in enumerate(classes) for topic_id in topic_class.topic_ids
        }
        self._space = PartitionSpace(self._class_of_topic, partition_counts)
        self.claims = claims
        self.free: list[list[int]] = [[] for _ in classes]

    def keep(self) -> list[dict[int, int]]:
        """Reduces each claim to subscribed topics. Returns the counts per subscription and topic class."""
        held = self._kept()
        if held is None:
            self._drop_disputed()
            held = self._kept()
            assert held is not None
        return held

    def _kept(self) -> list[dict[int, int]] | None:
        """Returns the counts of `keep`; None if claims overlap or contain partitions that do not exist."""
        claims, class_of_topic = self.claims, self._class_of_topic
        taken: dict[bytes, set[int]] = {}
        held: list[dict[int, int]] = []
        total = 0
        for subscription in self._subscriptions:
            topic_ids = subscription.topic_ids & class_of_topic.keys()
            together: defaultdict[bytes, set[int]] = defaultdict(set)
            for member_id in subscription.member_ids:
                claim = claims[member_id]
                if not claim.keys() <= topic_ids:
                    claim = {topic_id: partitions for topic_id, partitions in claim.items() if topic_id in topic_ids}
                    claims[member_id] = claim
                for topic_id, partitions in claim.items():
                    if not partitions:
                        return None
                    together[topic_id].update(partitions)
                    total += len(partitions)
            counts: defaultdict[int, int] = defaultdict(int)
            for topic_id, theirs in together.items():
                counts[class_of_topic[topic_id]] += len(theirs)
                if taken.setdefault(topic_id, theirs) is not theirs:
                    taken[topic_id] |= theirs
            held.append(counts)
        if total != sum(map(len, taken.values())):
            return None
        return held if self._find_free(taken) else None

    def _find_free(self, taken: Mapping[bytes, set[int]]) -> bool:
        """Sets `free` to the partitions that are not taken; returns False if a taken partition does not exist."""
        free: list[list[int]] = [[] for _ in self.free]
        for topic_id in self._space.topic_ids:
            base, count = self._space.base_of[topic_id]
            partitions = taken.get(topic_id)
            if not partitions:
                free[self._class_of_topic[topic_id]] += range(base, base + count)
            elif max(partitions) >= count:
                return False
            elif len(partitions) < count:
                free[self._class_of_topic[topic_id]] += [base + part for part in range(count) if part not in partitions]
        self.free = free
        return True

    def _drop_disputed(self) -> None:
        """Drops partitions that do not exist; of several owners of a partition, the first in id order keeps it."""
        taken: set[int] = set()
        for member_id in sorted(self.claims):
            owned = [number for number in self._space.flatten(self.claims[member_id]) if number not in taken]
            taken.update(owned)
            self.claims[member_id] = self._space.expand(owned)

    def give_up(
        self, subscription: Subscription, before: Mapping[int, int], after: Mapping[int, int], load: int
    ) -> None:
        """Frees the members' surplus of some topic classes. The most loaded members give it up first."""
        surplus = {
            topic_class: count - after.get(topic_class, 0)
            for topic_class, count in before.items()
            if count > after.get(topic_class, 0)
        }
        quota = load // len(subscription.member_ids)
        for least in (quota + 1, quota, 0):
            for member_id in subscription.member_ids:
                if not surplus:
                    return
                claim = self.claims[member_id]
                spare = sum(map(len, claim.values())) - least
                if spare > 0:
                    self.claims[member_id] = self._without(claim, surplus, spare)

    def _without(self, claim: Claim, surplus: dict[int, int], spare: int) -> Claim:
        """Returns the claim without up to `spare` partitions of the surplus, and reduces the surplus."""
        rest = dict(claim)
        for topic_id in sorted(claim):
            topic_class = self._class_of_topic[topic_id]
            count = min(surplus.get(topic_class, 0), spare, len(claim[topic_id]))
            if not count:
                continue
            partitions = sorted(claim[topic_id])
            base = self._space.base_of[topic_id][0]
            self.free[topic_class] += [base + number for number in partitions[-count:]]
            rest[topic_id] = frozenset(partitions[:-count])
            if not rest[topic_id]:
                del rest[topic_id]
            spare -= count
            surplus[topic_class] -= count
            if not surplus[topic_class]:
                del surplus[topic_class]
        return rest

    def take(self, before: Mapping[int, int], after: Mapping[int, int]) -> list[int]:
        """Takes the partitions that the members of a subscription lack out of `free`."""
        taken: list[int] = []
        for topic_class, count in after.items():
            lack = count - before.get(topic_class, 0)
            if lack > 0:
                numbers = self.free[topic_class]
                taken += numbers[:lack]
                del numbers[:lack]
        return taken

    def share(self, subscription: Subscription, free: list[int], load: int) -> None:
        """Shares partitions evenly: members keep up to their quota, and `free` fills the rest."""
        quota, extra = divmod(load, len(subscription.member_ids))
        claims, space = self.claims, self._space
        below: list[tuple[str, int]] = []
        for member_id in subscription.member_ids:
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
                claims[member_id] = space.expand(owned[:limit])
                free += owned[limit:]
        free.sort()
        for member_id, share in _shares(below, extra, free):
            claim = claims[member_id]
            claims[member_id] = space.expand(sorted(space.flatten(claim) + share) if claim else share)


def _shares(below: list[tuple[str, int]], extra: int, free: list[int]) -> Iterator[tuple[str, list[int]]]:
    """Yields a contiguous part of `free` per member; the first `extra` members get one more than the quota."""
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
