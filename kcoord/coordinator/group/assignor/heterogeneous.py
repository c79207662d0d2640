# SPDX-License-Identifier: Apache-2.0
"""The `uniform` assignor where members subscribe to different topics: the best balance the subscriptions allow.

Topics with the same subscribers are interchangeable and are handled as one topic class. Four steps: keep what may be
kept; place what is free with the least loaded subscriber; move directly from loaded to less loaded subscribers; last,
move along chains (A gives to B, B gives to C) where no direct move helps any more. At the end no chain leads from a
member to one with at least two partitions less, which is the condition for the best possible balance (a semi-matching
without a cost-reducing path).
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush, heapreplace

from kcoord.coordinator.group.assignor.spec import Assignment, MemberSpec, PartitionSpace


def assign_heterogeneous(members: Mapping[str, MemberSpec], partition_counts: Mapping[bytes, int]) -> Assignment:
    subscriptions = {frozenset(member.subscribed_topic_ids) for member in members.values()}
    balancer = _Balancer(members, PartitionSpace(frozenset().union(*subscriptions), partition_counts))
    balancer.place(balancer.keep(members))
    balancer.move_directly()
    balancer.move_along_chains()
    return balancer.assignment(members)


class _Balancer:
    """Members are numbered in id order; `held[member][topic_class]` is an ascending stack of partition numbers, never
    empty.
    """

    __slots__ = ("class_of_topic", "held", "loads", "order", "space", "subscribers")

    def __init__(self, members: Mapping[str, MemberSpec], space: PartitionSpace) -> None:
        self.space = space
        self.order = sorted(members)
        self.loads = [0] * len(self.order)
        self.held: list[dict[int, list[int]]] = [{} for _ in self.order]
        subscriptions: dict[frozenset[bytes], list[int]] = {}
        for number, member_id in enumerate(self.order):
            subscriptions.setdefault(frozenset(members[member_id].subscribed_topic_ids), []).append(number)
        signatures: dict[bytes, list[int]] = {topic_id: [] for topic_id in space.topic_ids}
        for index, subscription in enumerate(subscriptions):
            for topic_id in subscription & space.base_of.keys():
                signatures[topic_id].append(index)
        members_of = list(subscriptions.values())
        class_of_signature: dict[tuple[int, ...], int] = {}
        self.class_of_topic: list[int] = []
        self.subscribers: list[list[int]] = []
        for topic_id in space.topic_ids:
            signature = tuple(signatures[topic_id])
            topic_class = class_of_signature.setdefault(signature, len(class_of_signature))
            if topic_class == len(self.subscribers):
                self.subscribers.append(sorted(number for index in signature for number in members_of[index]))
            self.class_of_topic.append(topic_class)

    def keep(self, members: Mapping[str, MemberSpec]) -> list[list[int]]:
        """Step 1: a subscriber keeps what it has. Returns what is free, by topic class."""
        space = self.space
        class_of = [self.class_of_topic[topic] for topic in space.topic_of_each()]
        taken = bytearray(space.total)
        for number, member_id in enumerate(self.order):
            member = members[member_id]
            subscription = frozenset(member.subscribed_topic_ids)
            held = self.held[number]
            wanted = {
                topic_id: partitions for topic_id, partitions in member.assigned.items() if topic_id in subscription
            }
            for partition in space.flatten(wanted):
                if not taken[partition]:
                    taken[partition] = 1
                    held.setdefault(class_of[partition], []).append(partition)
                    self.loads[number] += 1
        free: list[list[int]] = [[] for _ in self.subscribers]
        for partition, is_taken in enumerate(taken):
            if not is_taken:
                free[class_of[partition]].append(partition)
        return free

    def place(self, free: list[list[int]]) -> None:
        """Step 2: the topic classes with the fewest subscribers first, since they have the least choice."""
        for topic_class in sorted(range(len(free)), key=lambda index: (len(self.subscribers[index]), index)):
            if not free[topic_class]:
                continue
            lowest = [(self.loads[member], member) for member in self.subscribers[topic_class]]
            heapify(lowest)
            for partition in free[topic_class]:
                load, member = lowest[0]
                heapreplace(lowest, (load + 1, member))
                self.loads[member] += 1
                self.held[member].setdefault(topic_class, []).append(partition)

    def move_directly(self) -> None:
        """Step 3: within each topic class, from the most to the least loaded subscriber, until no such move helps."""
        moved = True
        while moved:
            moved = False
            for topic_class in range(len(self.subscribers)):
                moved |= self._level(topic_class)

    def _level(self, topic_class: int) -> bool:
        loads, held = self.loads, self.held
        of_subscribers = [loads[member] for member in self.subscribers[topic_class]]
        if max(of_subscribers, default=0) - min(of_subscribers, default=0) < 2:
            return False
        lowest = list(zip(of_subscribers, self.subscribers[topic_class], strict=True))
        highest = [(-loads[member], member) for member in self.subscribers[topic_class] if topic_class in held[member]]
        if not highest or -min(highest)[0] - min(lowest)[0] < 2:
            return False
        heapify(lowest)
        heapify(highest)
        moved = False
        while highest:
            minus_load, giver = highest[0]
            load, taker = lowest[0]
            if load != loads[taker]:
                heapreplace(lowest, (loads[taker], taker))
            elif -minus_load != loads[giver] or topic_class not in held[giver]:
                heappop(highest)
                if topic_class in held[giver]:
                    heappush(highest, (-loads[giver], giver))
            elif -minus_load - load < 2:
                break
            else:
                if topic_class not in held[taker]:
                    heappush(highest, (-load - 1, taker))
                self._move(giver, topic_class, taker)
                heapreplace(lowest, (load + 1, taker))
                heappush(lowest, (loads[giver], giver))
                moved = True
        return moved

    def _move(self, giver: int, topic_class: int, taker: int) -> None:
        stack = self.held[giver][topic_class]
        self.held[taker].setdefault(topic_class, []).append(stack.pop())
        if not stack:
            del self.held[giver][topic_class]
        self.loads[giver] -= 1
        self.loads[taker] += 1

    def move_along_chains(self) -> None:
        """Step 4. Members that the most loaded ones cannot unload to, over any chain, are settled and leave the
        search.
        """
        settled = bytearray(len(self.order))
        while True:
            open_loads = [load for load, done in zip(self.loads, settled, strict=True) if not done]
            if not open_loads or max(open_loads) - min(open_loads) < 2:
                return
            top = max(open_loads)
            sources = [member for member, load in enumerate(self.loads) if load == top and not settled[member]]
            reached = self._unload(sources, top, settled)
            for member in reached:
                settled[member] = 1

    def _unload(self, sources: list[int], top: int, settled: bytearray) -> list[int]:
        """Moves one partition each along the shortest chain that helps one of `sources`; without one, returns all
        members reached.
        """
        came_from: dict[int, tuple[int, int]] = dict.fromkeys(sources, (-1, -1))
        seen_classes: set[int] = set()
        queue = list(sources)
        for giver in queue:
            for topic_class in self.held[giver]:
                if topic_class in seen_classes:
                    continue
                seen_classes.add(topic_class)
                for taker in self.subscribers[topic_class]:
                    if taker in came_from or settled[taker]:
                        continue
                    came_from[taker] = (giver, topic_class)
                    if self.loads[taker] <= top - 2:
                        self._move_chain(taker, came_from)
                        return []
                    queue.append(taker)
        return queue

    def _move_chain(self, taker: int, came_from: dict[int, tuple[int, int]]) -> None:
        giver, topic_class = came_from[taker]
        while giver >= 0:
            self._move(giver, topic_class, taker)
            taker = giver
            giver, topic_class = came_from[taker]

    def assignment(self, members: Mapping[str, MemberSpec]) -> Assignment:
        flat = {
            member_id: sorted(partition for stack in held.values() for partition in stack)
            for member_id, held in zip(self.order, self.held, strict=True)
        }
        return {member_id: self.space.expand(flat[member_id]) for member_id in members}
