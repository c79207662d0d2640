# SPDX-License-Identifier: Apache-2.0
"""The `uniform` assignor: members' totals differ as little as their subscriptions allow, and partitions stay in place.

Everybody keeps what it may keep. balance.py says how many partitions of each topic class the members of each
subscription get together; they give up what is too much of a class, and share evenly what they then have. Most members
keep what they have, so only those that change go through the flat numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from kcoord.coordinator.group.assignor.balance import Balance
from kcoord.coordinator.group.assignor.spec import Assignment, Claim, MemberSpec, PartitionSpace
from kcoord.coordinator.group.assignor.subscriptions import Subscription, TopicClass, subscriptions_of, topic_classes


class UniformAssignor:
    """Sticky and balanced: no partition moves unless balance asks for it."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return "uniform"

    def assign(self, members: Mapping[str, MemberSpec], partition_counts: Mapping[bytes, int]) -> Assignment:
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


class _Sharing:
    """`claims` are what the members have so far, `free` the ascending numbers of what nobody has, by topic class."""

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
        """A subscriber keeps what it has. Returns how many of each topic class, by subscription."""
        held = self._kept()
        if held is None:
            self._drop_disputed()
            held = self._kept()
            assert held is not None
        return held

    def _kept(self) -> list[dict[int, int]] | None:
        """None where claims overlap or go beyond what exists."""
        claims, class_of_topic = self.claims, self._class_of_topic
        taken: dict[bytes, set[int]] = {}
        held: list[dict[int, int]] = []
        total = 0
        for subscription in self._subscriptions:
            wanted = subscription.topic_ids & class_of_topic.keys()
            together: defaultdict[bytes, set[int]] = defaultdict(set)
            for member_id in subscription.member_ids:
                claim = claims[member_id]
                if not claim.keys() <= wanted:
                    claim = {topic_id: partitions for topic_id, partitions in claim.items() if topic_id in wanted}
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
        """Says whether what is taken exists at all."""
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
        """Partitions that are gone, or have two owners: the first owner in id order keeps them."""
        taken: set[int] = set()
        for member_id in sorted(self.claims):
            owned = [number for number in self._space.flatten(self.claims[member_id]) if number not in taken]
            taken.update(owned)
            self.claims[member_id] = self._space.expand(owned)

    def give_up(
        self, subscription: Subscription, before: Mapping[int, int], after: Mapping[int, int], load: int
    ) -> None:
        """What the members have too much of some topic classes is free. First those give it up who have too much."""
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
        """The claim without `spare` partitions, or as many as it has of the surplus, which shrinks."""
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
        """What members of a subscription lack, out of what is free."""
        taken: list[int] = []
        for topic_class, count in after.items():
            lack = count - before.get(topic_class, 0)
            if lack > 0:
                numbers = self.free[topic_class]
                taken += numbers[:lack]
                del numbers[:lack]
        return taken

    def share(self, subscription: Subscription, free: list[int], load: int) -> None:
        """Everybody keeps up to its quota, then what is free fills up those below theirs."""
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
    """Hands out `free` in runs; the first `extra` members go one over the quota."""
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
