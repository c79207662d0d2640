# SPDX-License-Identifier: Apache-2.0
"""How many partitions of each topic class the members of each subscription get: the best balance there is.

Members of one subscription can take each other's partitions, so they share evenly whatever they have together, and
only sums count: `held[subscription][topic_class]`. The sums are a flow with convex costs. Three steps: place what is
free with the least loaded subscribers; move directly from loaded to less loaded subscribers; last, move along chains
(A gives to B, B gives to C) where no direct move helps any more. At the end no chain leads from a member to one with
at least two partitions less, which is the condition for the best possible balance (a semi-matching without a
cost-reducing path).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from kcoord.coordinator.group.assignor.subscriptions import Subscription, TopicClass


class Balance:
    """`held` is what the members have, and after `place` and `level` what they shall have; `loads` are its sums."""

    __slots__ = ("_highs", "_lows", "_sizes", "_subscribers", "held", "loads")

    def __init__(
        self, subscriptions: Sequence[Subscription], classes: Sequence[TopicClass], held: list[dict[int, int]]
    ) -> None:
        self.held = held
        self.loads = [sum(counts.values()) for counts in held]
        self._subscribers = [topic_class.subscribers for topic_class in classes]
        self._sizes = [len(subscription.member_ids) for subscription in subscriptions]
        # What the least and the most loaded members of each subscription have.
        self._lows = [load // size for load, size in zip(self.loads, self._sizes, strict=True)]
        self._highs = [-(-load // size) for load, size in zip(self.loads, self._sizes, strict=True)]

    def place(self, free: Sequence[int]) -> None:
        """`free` partitions of each class. Classes with few subscribers come first: they have the least choice."""
        choice = [sum(self._sizes[taker] for taker in subscribers) for subscribers in self._subscribers]
        for topic_class in sorted(range(len(free)), key=lambda index: (choice[index], index)):
            if free[topic_class]:
                self._fill(topic_class, free[topic_class])

    def _fill(self, topic_class: int, left: int) -> None:
        sizes, loads, lows = self._sizes, self.loads, self._lows
        takers = sorted(self._subscribers[topic_class], key=lambda taker: (lows[taker], taker))
        # How far up the lowest ones can all come; what is left then is not enough for one more each.
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
        """Moves what has to move."""
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
        """How many partitions can go before other members are the giver's most, or the taker's least loaded ones."""
        loads, sizes = self.loads, self._sizes
        surplus = loads[giver] - (self._highs[giver] - 1) * sizes[giver]
        return min(surplus, (self._lows[taker] + 1) * sizes[taker] - loads[taker])

    def _move_directly(self, topic_class: int) -> bool:
        """From the most to the least loaded subscribers of the class, until no such move helps."""
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
        """Those that the most loaded ones cannot unload to, over any chain, are settled and leave the search."""
        open_ones = set(range(len(self.loads)))
        while open_ones:
            top = max(self._highs[number] for number in open_ones)
            if top - min(self._lows[number] for number in open_ones) < 2:
                return
            open_ones.difference_update(self._unload(top, open_ones))

    def _unload(self, top: int, open_ones: set[int]) -> list[int]:
        """Moves along the shortest chain that helps one with `top`; without one, returns all that were reached."""
        queue = [giver for giver in sorted(open_ones) if self._highs[giver] == top]
        came_from: dict[int, tuple[int, int]] = dict.fromkeys(queue, (-1, -1))
        seen_classes: set[int] = set()
        for giver in queue:
            for topic_class in sorted(self.held[giver].keys() - seen_classes):
                seen_classes.add(topic_class)
                for taker in self._subscribers[topic_class]:
                    if taker in came_from or taker not in open_ones:
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
