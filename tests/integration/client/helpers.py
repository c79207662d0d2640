# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of the client: topics, records, consumers and groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Unpack

from kcoord.client import (
    AdminClient,
    Consumer,
    ConsumerRebalanceListener,
    ConsumerRecord,
    NewTopic,
    Producer,
    TopicPartition,
)
from kcoord.client.config import ConsumerOptions

SECONDS = 20.0
Partitions = frozenset[TopicPartition]


async def eventually(
    condition: Callable[[], Awaitable[object] | object], what: str | Callable[[], str], seconds: float = SECONDS
) -> None:
    """Waits until the condition is true. `what` is for the error; a function of it sees the state at the deadline."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        outcome = condition()
        if await outcome if isinstance(outcome, Awaitable) else outcome:
            return
        assert loop.time() < deadline, f"not within {seconds:g} s: {what if isinstance(what, str) else what()}"
        await asyncio.sleep(0.01)


async def create_topic(admin: AdminClient, name: str, partitions: int = 1) -> list[TopicPartition]:
    """Creates a topic, waits until the broker describes it, and returns its partitions."""
    (await admin.create_topics([NewTopic(name, partitions, 1)])).all()

    async def is_there() -> bool:
        descriptions = (await admin.describe_topics([name])).values
        return name in descriptions and len(descriptions[name].partitions) == partitions

    await eventually(is_there, f"the topic {name}")
    return [TopicPartition(name, partition) for partition in range(partitions)]


async def produce(address: str, *records: tuple[TopicPartition, str, int | None]) -> None:
    """Produces records, given as (partition, value, timestamp)."""
    async with Producer(bootstrap_servers=address, linger_ms=0) as producer:
        sent = [
            await producer.send(partition.topic, value, partition=partition.partition, timestamp_ms=timestamp_ms)
            for partition, value, timestamp_ms in records
        ]
        await asyncio.gather(*sent)


@asynccontextmanager
async def consumer_of(
    address: str, group: str | None = None, **options: Unpack[ConsumerOptions]
) -> AsyncIterator[Consumer]:
    """Yields a consumer with short waits, which reads from the earliest record."""
    settings: ConsumerOptions = {
        "bootstrap_servers": address,
        "group_id": group,
        "auto_offset_reset": "earliest",
        "fetch_max_wait_ms": 50,
        "retry_backoff_ms": 20,
        **options,
    }
    async with Consumer(**settings) as consumer:
        yield consumer


async def read(consumer: Consumer, count: int, seconds: float = SECONDS) -> list[ConsumerRecord]:
    """Polls until there are `count` records. Returns all records."""
    records: list[ConsumerRecord] = []
    async with asyncio.timeout(seconds):
        while len(records) < count:
            records += await consumer.poll(200)
    return records


def values(records: list[ConsumerRecord]) -> list[str]:
    return [(record.value or b"").decode() for record in records]


class Events(ConsumerRebalanceListener):
    """A listener that records its calls in order.

    Members share `owners`, which checks that no two of them own the same partition at once.
    """

    def __init__(self, owners: dict[TopicPartition, Events] | None = None) -> None:
        self.events: list[tuple[str, Partitions]] = []
        self._owners = owners if owners is not None else {}

    async def on_partitions_assigned(self, partitions: Partitions) -> None:
        self.events.append(("assigned", partitions))
        for partition in partitions:
            assert partition not in self._owners, f"{partition} has an owner already"
            self._owners[partition] = self

    async def on_partitions_revoked(self, partitions: Partitions) -> None:
        self.events.append(("revoked", partitions))
        self._release(partitions)

    async def on_partitions_lost(self, partitions: Partitions) -> None:
        self.events.append(("lost", partitions))
        self._release(partitions)

    def _release(self, partitions: Partitions) -> None:
        for partition in partitions:
            if self._owners.get(partition) is self:
                del self._owners[partition]


class Member:
    """A consumer with a task that polls it continuously. `stop` leaves the group."""

    def __init__(
        self, address: str, group: str, owners: dict[TopicPartition, Events], **options: Unpack[ConsumerOptions]
    ) -> None:
        self.events = Events(owners)
        self.seen: list[str] = []
        self._context = consumer_of(address, group, **options)
        self._task: asyncio.Task[None] | None = None

    async def start(self, *topics: str, pattern: str | None = None) -> Member:
        self.consumer = await self._context.__aenter__()
        self.consumer.subscribe(topics, pattern=pattern, listener=self.events)
        self._task = asyncio.create_task(self._poll())
        return self

    async def _poll(self) -> None:
        while True:
            self.seen += values(await self.consumer.poll())

    async def stop(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        outcomes = await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        await self._context.__aexit__(None, None, None)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes

    @property
    def owned(self) -> Partitions:
        return self.consumer.assignment


@asynccontextmanager
async def members_of(
    address: str, group: str, *instance_ids: str | None, topics: list[str], **options: Unpack[ConsumerOptions]
) -> AsyncIterator[list[Member]]:
    """Yields members that check that they do not share partitions. All members leave at the end."""
    owners: dict[TopicPartition, Events] = {}
    members: list[Member] = []
    try:
        for instance_id in instance_ids:
            options["group_instance_id"] = instance_id
            member = Member(address, group, owners, **options)
            members.append(await member.start(*topics))
        yield members
    finally:
        await asyncio.gather(*(member.stop() for member in members))


async def until_shared(members: list[Member], partitions: list[TopicPartition]) -> None:
    """Waits until the members own all partitions, each partition once, as evenly as possible."""

    def is_shared() -> bool:
        owned = [member.owned for member in members]
        sizes = [len(partitions_of_member) for partitions_of_member in owned]
        return sum(sizes) == len(partitions) == len(frozenset().union(*owned)) and max(sizes) - min(sizes) <= 1

    await eventually(is_shared, f"{len(partitions)} partitions shared by {len(members)} members")
