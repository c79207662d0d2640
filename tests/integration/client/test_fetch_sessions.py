# SPDX-License-Identifier: Apache-2.0
"""KIP-227 on the wire: requests name only changes, and a lost session costs one full request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kcoord.client import Consumer, TopicPartition
from kcoord.testing import KcoordBroker, Record, start_broker

PARTITIONS = 20


@pytest.fixture
async def broker() -> AsyncIterator[KcoordBroker]:
    started = await asyncio.to_thread(start_broker)
    yield started
    await asyncio.to_thread(started.stop)


async def read(consumer: Consumer, count: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    async with asyncio.timeout(20):
        while len(values) < count:
            values += [record.value for record in await consumer.poll(100)]
    return values


def fetches(broker: KcoordBroker) -> list[dict[str, Any]]:
    return [request.body for request in broker.requests("Fetch")]


def named(body: dict[str, Any]) -> int:
    return sum(len(topic["partitions"]) for topic in body["topics"])


@pytest.mark.parametrize("error", [None, "FETCH_SESSION_ID_NOT_FOUND", "INVALID_FETCH_SESSION_EPOCH"])
async def test_requests_name_only_changes(broker: KcoordBroker, error: str | None) -> None:
    broker.create_topic("t", PARTITIONS)
    broker.produce("t", [Record(f"{number}", partition=number) for number in range(PARTITIONS)])
    async with Consumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition("t", number) for number in range(PARTITIONS)])
        assert set(await read(consumer, PARTITIONS)) == {b"%d" % number for number in range(PARTITIONS)}
        if error is not None:
            lost = broker.inject_fault("Fetch", error=error)
            while not lost.hits:
                await consumer.poll(50)
        for number in range(30):
            await asyncio.to_thread(broker.produce, "t", [Record(f"more {number}", partition=number % 3)])
            assert await read(consumer, 1) == [b"more %d" % number]
    bodies = fetches(broker)
    assert {body["sessionEpoch"] for body in bodies} >= {0, 1, 2}
    assert sum(body["sessionEpoch"] == 0 for body in bodies) <= (3 if error is None else 5)
    late = bodies[-10:]
    assert all(named(body) <= 3 for body in late), "requests name only the partitions whose position moved"
    assert all(body["sessionId"] for body in late)


async def test_paused_partitions_are_forgotten(broker: KcoordBroker) -> None:
    broker.create_topic("t", 2)
    broker.produce("t", [Record("a", partition=0), Record("b", partition=1)])
    first, second = TopicPartition("t", 0), TopicPartition("t", 1)
    async with Consumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([first, second])
        await read(consumer, 2)
        consumer.pause([second])
        await asyncio.to_thread(broker.produce, "t", [Record("c", partition=1), Record("d", partition=0)])
        assert await read(consumer, 1) == [b"d"]
        assert await consumer.poll(300) == []
        consumer.resume([second])
        assert await read(consumer, 1) == [b"c"]
    forgotten = [body for body in fetches(broker) if body["forgottenTopicsData"]]
    assert any(topic["partitions"] == [1] for body in forgotten for topic in body["forgottenTopicsData"])
