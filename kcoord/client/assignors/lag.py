# SPDX-License-Identifier: Apache-2.0
"""An assignor that balances lag: the records that the group still has to read.

The member that computes reads the committed offsets of the group and the end offsets of the partitions. So all lags are
of one moment, and partitions without an owner have one too. Members send no metadata.

The algorithm, `assign_by_cost`:

- The cost of a partition is its lag plus `partition_cost`, so that partitions without lag are shared evenly, too. The
  cost of a member is the sum of its partitions.
- A fresh assignment takes the partitions from the most to the least expensive one, and gives each to the subscriber
  with the lowest cost (LPT rule).
- A sticky assignment keeps the present owners, gives the free partitions away by the same rule, and then moves
  partitions one by one, each at most once. A move must reduce the higher cost of both members by more than the
  tolerance.
- The sticky assignment is the result if its highest cost is at most (1 + tolerance) times that of the fresh one,
  otherwise the fresh one is.

If the present assignment is a result of the algorithm, the highest cost does not rise. So repeated computations with
equal costs come to rest.

Bounds: let m be the number of members, and let OPT be the lowest possible highest cost of a member. If all members
subscribe to the same topics, the highest cost is at most (1 + tolerance) * (4/3 - 1/(3m)) * OPT (Graham 1969).
Otherwise it is at most (1 + tolerance) * (1 + ceil(log2 m)) * OPT (Azar, Naor, Rom 1995).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from heapq import heappush, heapreplace

from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import OffsetSpec
from kcoord.client.assignors import AssignmentSpec, GroupAssignment, MemberAssignment, PartitionAssignor
from kcoord.client.config import AdminConfig, AdminOptions, make_config
from kcoord.client.errors import ClientException
from kcoord.client.types import TopicPartition
from kcoord_protocol.errors import KafkaError

_log = logging.getLogger(__name__)

Assigned = Mapping[str, frozenset[TopicPartition]]


class LagAssignor(PartitionAssignor):
    """Balances the lag of the partitions over the members. Partitions do not move for small differences.

    `tolerance` is the share by which a move must reduce the cost of a member, and `partition_cost` is the cost of a
    partition without lag, in records. All members should have the same values. The lag of a partition without a
    committed offset is the number of its records.

    The group computes an assignment when its members or topics change. To balance the lag at other times too, let one
    member call `Consumer.request_reassignment` now and then.

    If the offsets cannot be read within `timeout_ms`, all partitions have the same cost. The lag of a partition whose
    offsets alone cannot be read counts as 0.
    """

    name = "lag"

    def __init__(self, *, tolerance: float = 0.1, partition_cost: int = 1_000, timeout_ms: int = 10_000) -> None:
        if not tolerance >= 0:
            raise ValueError(f"tolerance: {tolerance} must not be negative")
        if partition_cost < 1 or timeout_ms < 1:
            raise ValueError(f"partition_cost, timeout_ms: {partition_cost}, {timeout_ms} must be at least 1")
        self._tolerance = tolerance
        self._partition_cost = partition_cost
        self._timeout_ms = timeout_ms
        self._config: AdminConfig | None = None

    def configure(self, settings: Mapping[str, object]) -> None:
        """Takes the settings for connections of the consumer."""
        names = AdminOptions.__annotations__.keys() & settings.keys()
        options = {name: settings[name] for name in names} | {"default_api_timeout_ms": max(self._timeout_ms // 2, 1)}
        self._config = make_config(AdminConfig, None, options)

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        """Reads the lags and balances them."""
        lags = self._read_lags(spec)
        costs = {partition: lag + self._partition_cost for partition, lag in lags.items()}
        subscribers = {
            topic: [member_id for member_id, member in spec.members.items() if topic in member.subscribed_topics]
            for topic in spec.topics
        }
        present = {member_id: member.target_partitions for member_id, member in spec.members.items()}
        assigned = assign_by_cost(costs, subscribers, present, self._tolerance)
        return GroupAssignment({member_id: MemberAssignment(partitions) for member_id, partitions in assigned.items()})

    def _read_lags(self, spec: AssignmentSpec) -> dict[TopicPartition, int]:
        partitions = [
            TopicPartition(topic, partition)
            for topic, metadata in spec.topics.items()
            for partition in range(metadata.num_partitions)
        ]
        try:
            measured = asyncio.run(self._measure(spec.group_id, partitions))
        except (ClientException, KafkaError, TimeoutError) as error:
            _log.warning("group %s: lags cannot be read, all partitions have the same cost: %r", spec.group_id, error)
            measured = {}
        return {partition: measured.get(partition, 0) for partition in partitions}

    async def _measure(self, group_id: str, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        assert self._config is not None, "configure has not been called"
        async with asyncio.timeout(self._timeout_ms / 1000), AdminClient(self._config) as admin:
            groups, begins, ends = await asyncio.gather(
                admin.list_consumer_group_offsets({group_id: partitions}),
                admin.list_offsets(dict.fromkeys(partitions, OffsetSpec.earliest())),
                admin.list_offsets(dict.fromkeys(partitions, OffsetSpec.latest())),
            )
        committed = groups[group_id]
        lags = {}
        for partition in ends.values.keys() & begins.values.keys():
            offset = committed[partition]
            begin = begins.values[partition].offset
            # Records below the start of the log are deleted, so nobody has to read them.
            start = begin if offset is None else max(offset.offset, begin)
            lags[partition] = max(ends.values[partition].offset - start, 0)
        return lags


def assign_by_cost(
    costs: Mapping[TopicPartition, int],
    subscribers: Mapping[str, Collection[str]],
    present: Assigned,
    tolerance: float,
) -> dict[str, frozenset[TopicPartition]]:
    """Returns the partitions of each member of `present`. The module describes the algorithm and its bounds.

    `subscribers` are the member ids by topic. A topic without subscribers is not assigned. Equal arguments, in any
    order, give equal results.
    """
    fresh = _Shares(costs, subscribers, present)
    fresh.give(costs.keys())
    sticky = _Shares(costs, subscribers, present)
    sticky.keep(present)
    sticky.give(costs.keys() - sticky.owner.keys())
    sticky.improve(tolerance)
    shares = sticky if sticky.highest_cost() <= (1 + tolerance) * fresh.highest_cost() else fresh
    return {member_id: frozenset(partitions) for member_id, partitions in shares.partitions.items()}


class _Shares:
    """An assignment in the making: the partitions and the cost of each member."""

    def __init__(
        self,
        costs: Mapping[TopicPartition, int],
        subscribers: Mapping[str, Collection[str]],
        member_ids: Collection[str],
    ) -> None:
        self.partitions: dict[str, set[TopicPartition]] = {member_id: set() for member_id in sorted(member_ids)}
        self.owner: dict[TopicPartition, str] = {}
        self._costs = costs
        self._subscribers = {topic: frozenset(taking) for topic, taking in subscribers.items() if taking}
        heaps = {taking: [(0, member_id) for member_id in sorted(taking)] for taking in self._subscribers.values()}
        self._heaps = {topic: heaps[taking] for topic, taking in self._subscribers.items()}
        """The costs of the subscribers by topic. Each has an entry with its cost, or with a lower one."""
        self._cost_of = dict.fromkeys(self.partitions, 0)

    def keep(self, present: Assigned) -> None:
        """Gives the partitions to their present owners, if these still subscribe to them."""
        for member_id in self.partitions:
            for partition in sorted(present[member_id]):
                is_subscribed = member_id in self._subscribers.get(partition.topic, ())
                if partition in self._costs and partition not in self.owner and is_subscribed:
                    self._give(partition, member_id)

    def give(self, partitions: Collection[TopicPartition]) -> None:
        """Gives each partition to the subscriber with the lowest cost, from the most to the least expensive one."""
        for partition in sorted(partitions, key=lambda partition: (-self._costs[partition], partition)):
            if partition.topic in self._subscribers:
                self._give(partition, self._cheapest(partition.topic))

    def _cheapest(self, topic: str) -> str:
        heap = self._heaps[topic]
        while True:
            cost, member_id = heap[0]
            if cost == self._cost_of[member_id]:
                return member_id
            heapreplace(heap, (self._cost_of[member_id], member_id))

    def improve(self, tolerance: float) -> None:
        """Moves partitions from expensive members, each partition at most once, while a move is worth it."""
        moved: set[TopicPartition] = set()
        while (move := self._best_move(tolerance, moved)) is not None:
            partition, member_id = move
            moved.add(partition)
            owner = self.owner[partition]
            self.partitions[owner].remove(partition)
            self._cost_of[owner] -= self._costs[partition]
            for topic, taking in self._subscribers.items():
                if owner in taking:
                    heappush(self._heaps[topic], (self._cost_of[owner], owner))
            self._give(partition, member_id)

    def _best_move(self, tolerance: float, moved: Collection[TopicPartition]) -> tuple[TopicPartition, str] | None:
        """Returns the best move from the most expensive member that has a worthwhile one, and its new owner."""
        cheapest = {topic: self._cheapest(topic) for topic in self._subscribers}
        for member_id in sorted(self._cost_of, key=lambda member_id: (-self._cost_of[member_id], member_id)):
            cost = self._cost_of[member_id]
            moves = [
                (self._higher_cost_after(partition, cost, cheapest[partition.topic]), partition)
                for partition in self.partitions[member_id]
                if partition not in moved
            ]
            if moves:
                after, partition = min(moves)
                if after * (1 + tolerance) < cost:
                    return partition, cheapest[partition.topic]
        return None

    def _higher_cost_after(self, partition: TopicPartition, cost: int, taker: str) -> int:
        return max(cost - self._costs[partition], self._cost_of[taker] + self._costs[partition])

    def highest_cost(self) -> int:
        return max(self._cost_of.values(), default=0)

    def _give(self, partition: TopicPartition, member_id: str) -> None:
        self.partitions[member_id].add(partition)
        self.owner[partition] = member_id
        self._cost_of[member_id] += self._costs[partition]
