# SPDX-License-Identifier: Apache-2.0
"""Classic groups with members of aiokafka: assignments, rebalances, and committed offsets after members restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import CommitFailedError, IllegalGenerationError, RebalanceInProgressError

from tests.support.confluent import committed, create_topic, partitions_of, produce
from tests.support.kcoord_process import KcoordProcess
from tests.support.ownership import Ownership, Partition

TIMEOUT_SECONDS = 20.0
JoinGroup = Callable[..., Awaitable["Member"]]


class _TopicPartition(Protocol):
    topic: str
    partition: int


class Member:
    """A consumer that polls and commits in a background task."""

    def __init__(self, consumer: AIOKafkaConsumer, listener: _Listener) -> None:
        self._consumer = consumer
        self._listener = listener
        self.seen: set[tuple[str, int, int]] = set()
        self._polling = asyncio.create_task(self._poll())
        self._stopped = False

    @property
    def assigned(self) -> set[Partition]:
        return {(partition.topic, partition.partition) for partition in self._consumer.assignment()}

    async def _poll(self) -> None:
        while True:
            batches = await self._consumer.getmany(timeout_ms=100)
            if batches:
                try:
                    await self._consumer.commit(
                        {partition: batch[-1].offset + 1 for partition, batch in batches.items()}
                    )
                except (CommitFailedError, IllegalGenerationError, RebalanceInProgressError):
                    continue
                self.seen |= {
                    (partition.topic, partition.partition, r.offset)
                    for partition, batch in batches.items()
                    for r in batch
                }

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
            # aiokafka does not call the listener when it stops.
            self._listener.on_partitions_revoked(self._consumer.assignment())
            await self._consumer.stop()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership

    def on_partitions_revoked(self, revoked: Iterable[_TopicPartition]) -> None:
        self._ownership.gave(self, [(partition.topic, partition.partition) for partition in revoked])

    def on_partitions_assigned(self, assigned: Iterable[_TopicPartition]) -> None:
        self._ownership.took(self, [(partition.topic, partition.partition) for partition in assigned])


@pytest.fixture
async def join(broker: KcoordProcess) -> AsyncIterator[JoinGroup]:
    members: list[Member] = []

    async def start(group_id: str, topic: str, strategy: type, ownership: Ownership) -> Member:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=broker.address,
            group_id=group_id,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=6000,
            heartbeat_interval_ms=300,
            partition_assignment_strategy=(strategy,),
        )
        listener = _Listener(ownership)
        consumer.subscribe([topic], listener=listener)
        await consumer.start()
        members.append(Member(consumer, listener))
        return members[-1]

    yield start
    await asyncio.gather(*(member.stop() for member in members))


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not within {TIMEOUT_SECONDS:g} s: {what}")


async def until_split(members: Sequence[Member], partitions: set[Partition]) -> None:
    def is_split() -> bool:
        owned = [member.assigned for member in members]
        sizes = [len(partitions) for partitions in owned]
        return sum(sizes) == len(partitions) and set().union(*owned) == partitions and max(sizes) - min(sizes) <= 1

    await until(is_split, f"a balanced assignment of {len(partitions)} partitions")


@pytest.mark.parametrize("strategy", [RangePartitionAssignor, StickyPartitionAssignor], ids=["range", "sticky"])
async def test_members_share_partitions_commit_and_hand_over(
    broker: KcoordProcess, join: JoinGroup, name: str, strategy: type
) -> None:
    create_topic(broker.address, name, 6)
    produce(broker.address, name, 6, 5)
    everything, ownership = partitions_of(name, 6), Ownership()
    members: list[Member] = []
    for _ in range(3):
        members.append(await join(name, name, strategy, ownership))
        await until_split(members, everything)
    produce(broker.address, name, 6, 5)
    await until(lambda: len(set().union(*(member.seen for member in members))) == 60, "all records are read")
    await members[0].stop()
    await until_split(members[1:], everything)
    assert ownership.conflicts == []
    assert committed(broker.address, name, sorted(everything)) == dict.fromkeys(everything, 10)


async def test_a_group_resumes_at_its_committed_offsets(broker: KcoordProcess, join: JoinGroup, name: str) -> None:
    create_topic(broker.address, name, 2)
    produce(broker.address, name, 2, 5)
    first = await join(name, name, RangePartitionAssignor, Ownership())
    await until(lambda: len(first.seen) == 10, "all records are read")
    await first.stop()
    produce(broker.address, name, 2, 3)
    second = await join(name, name, RangePartitionAssignor, Ownership())
    await until(lambda: len(second.seen) == 6, "only the new records are read")
    assert {offset for _, _, offset in second.seen} == {5, 6, 7}
