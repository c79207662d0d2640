# SPDX-License-Identifier: Apache-2.0
"""Instances that follow the logs of another one in a topic of another kcoord, and their copies on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from kcoord.client import Producer
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.upstream_reader import TOMBSTONES_KEPT_MS
from kcoord.storage.file_system import join, make_durable_dirs
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, keep_nothing
from kcoord.testing import KcoordBroker, start_broker
from kcoord.upstream.standby_files import FOLDER
from kcoord_protocol.errors import KafkaError
from tests.integration.upstream.owner import DATA, Owner
from tests.unit.runtime.ledger import entry

NUMBERS = count()
TOPIC_SETTINGS = {"cleanup.policy": "compact", "max.message.bytes": "10000000"}
COPY = join(join(DATA, FOLDER), "shard-0.kcoord")


@pytest.fixture(scope="module")
def upstream() -> Iterator[KcoordBroker]:
    with start_broker() as broker:
        yield broker


@pytest.fixture
def topic(upstream: KcoordBroker) -> Iterator[str]:
    name = f"log{next(NUMBERS)}"
    upstream.create_topic(name, 2, TOPIC_SETTINGS)
    yield name
    upstream.clear_faults()


@pytest.fixture
def disk() -> MemoryFileSystem:
    disk = MemoryFileSystem()
    make_durable_dirs(disk, DATA)
    return disk


async def fill(owner: Owner, names: int = 300) -> None:
    """Sets many numbers in both shards. The names of both are different."""
    await owner.served()
    for shard_id in range(2):
        await asyncio.gather(*(owner.put(f"s{shard_id}n{number}", number, shard_id) for number in range(names)))


async def test_a_takeover_reads_only_what_the_standby_has_not_replayed(upstream: KcoordBroker, topic: str) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as owner, Owner(address, topic, is_standby=True) as standby:
        await fill(owner)
        for shard_id in range(2):
            await standby.follows(owner.balance(shard_id), shard_id)
        await owner.put("a", 1)
        before = standby.loaded
        standby.own()
        await standby.served()
        assert standby.balance() == owner.balance()
        assert standby.loaded - before <= 1
        assert await standby.put("a", 2) == "a=2"
        with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
            await owner.put("a", 3)


async def test_an_instance_says_that_it_has_not_caught_up(upstream: KcoordBroker, topic: str) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as owner:
        await fill(owner)
        delayed = upstream.inject_fault("Fetch", delay=0.5, client_id="upstream-owner", times=None)
        async with Owner(address, topic, is_standby=True) as standby:
            figures = standby.log.standbys.figures()
            assert standby.log.standbys.why_behind() == (
                "this instance has not caught up with the logs of 2 of 2 shards yet"
            )
            assert (figures.behind, figures.lag) == (2, 0)
            delayed.remove()
            await standby.follows(owner.balance())
            await standby.follows(owner.balance(1), 1)
            figures = standby.log.standbys.figures()
            assert (figures.shards, figures.behind, figures.lag) == (2, 0, 0)
            assert figures.lag_ms < 60_000
            assert standby.log.standbys.why_behind() is None


async def test_a_standby_counts_the_time_for_which_its_machine_was_suspended(
    upstream: KcoordBroker, topic: str
) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as owner, Owner(address, topic, is_standby=True) as standby:
        await fill(owner, 10)
        for shard_id in range(2):
            await standby.follows(owner.balance(shard_id), shard_id)
        standby.suspended_ms = TOMBSTONES_KEPT_MS
        assert standby.log.standbys.figures().lag_ms >= TOMBSTONES_KEPT_MS, "it may have missed deletions"


async def test_an_instance_that_lost_its_shards_follows_them(upstream: KcoordBroker, topic: str) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as older, Owner(address, topic, is_standby=True) as newer:
        await fill(older, 10)
        newer.own()
        await newer.served()
        with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
            await older.put("a", 1)
        await newer.put("b", 2)
        await older.follows(newer.balance())
        await older.lost()
        older.claim()
        await older.served()
        assert older.balance()["b"] == 2


async def test_an_instance_does_not_claim_shards_that_it_has_given_up_meanwhile(
    upstream: KcoordBroker, topic: str
) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as owner, Owner(address, topic, is_standby=True) as other:
        await fill(owner, 10)
        for shard_id in range(2):
            await other.follows(owner.balance(shard_id), shard_id)
        fault = upstream.inject_fault("InitProducerId", delay=0.5, times=None)
        other.own()
        await asyncio.sleep(0.2)
        other.give_up()
        await asyncio.sleep(0.6)
        fault.remove()
        assert await owner.put("a", 1) == "a=1"
        await other.follows(owner.balance())


async def test_a_restart_reads_the_copy_and_fetches_what_followed(
    upstream: KcoordBroker, topic: str, disk: MemoryFileSystem
) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as owner:
        await fill(owner)
        async with Owner(address, topic, is_standby=True, disk=disk) as standby:
            await standby.follows(owner.balance())
            await standby.snapshot()
        await owner.put("a", 1)
        async with Owner(address, topic, is_standby=True, disk=disk) as again:
            await again.follows(owner.balance())
            figures = again.log.standbys.figures()
            assert figures.copies_bytes > 0
            await again.follows(owner.balance(1), 1)
            # Half of the snapshot's numbers are records. Shard 1 has no copy.
            assert again.loaded <= 150 + 2 + 303


async def test_an_owner_that_is_killed_reads_its_own_copy(
    upstream: KcoordBroker, topic: str, disk: MemoryFileSystem
) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic, disk=disk) as owner:
        await fill(owner)
        await owner.snapshot()
        await owner.put("a", 1)
        expected = owner.balance()
        owner.is_killed = True
    disk.crash(keep_nothing)
    async with Owner(address, topic, disk=disk) as again:
        await again.served()
        assert again.balance() == expected
        assert again.loaded <= 150 + 1 + 300
        assert await again.put("a", 2) == "a=2"


async def test_an_orderly_stop_writes_the_copies_of_standbys(
    upstream: KcoordBroker, topic: str, disk: MemoryFileSystem
) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as owner:
        await fill(owner, 600)
        async with Owner(address, topic, is_standby=True, disk=disk) as standby:
            await standby.follows(owner.balance())
            await standby.follows(owner.balance(1), 1)
    assert disk.list_dir(join(DATA, FOLDER)) == ["shard-0.kcoord", "shard-1.kcoord"]


async def test_a_damaged_copy_is_read_again_from_the_upstream(
    upstream: KcoordBroker, topic: str, disk: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as owner:
        await fill(owner)
        async with Owner(address, topic, is_standby=True, disk=disk) as standby:
            await standby.follows(owner.balance())
            await standby.snapshot()
            standby.is_killed = True
        disk.damage(COPY, lambda data: data[:-20] + b"x" * 20)
        async with Owner(address, topic, is_standby=True, disk=disk) as again:
            await again.follows(owner.balance())
            assert "The copy of shard 0 is not used" in caplog.text
            assert again.loaded >= 300


async def test_a_full_disk_delays_no_commit(
    upstream: KcoordBroker, topic: str, disk: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(operation: Operation) -> OSError | None:
        return OSError(28, "No space left on device") if operation.kind == "write" else None

    disk.fault = fault
    address = upstream.bootstrap_servers
    async with Owner(address, topic, disk=disk) as owner, Owner(address, topic, is_standby=True, disk=disk) as standby:
        await fill(owner)
        await standby.follows(owner.balance())
        await asyncio.gather(owner.snapshot(), standby.snapshot())
        assert caplog.text.count("No space left on device") == 2, "once for each instance"
        assert await owner.put("a", 1) == "a=1"
        await standby.follows(owner.balance())


@pytest.mark.parametrize("is_away", [True, False])
async def test_a_topic_that_was_created_again_drops_the_copies(
    upstream: KcoordBroker, topic: str, disk: MemoryFileSystem, is_away: bool
) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic, is_standby=True, disk=disk) as standby:
        async with Owner(address, topic) as owner:
            await fill(owner)
            await standby.follows(owner.balance())
            await standby.snapshot()
        if is_away:
            await standby.__aexit__()
        upstream.delete_topic(topic)
        upstream.create_topic(topic, 2, TOPIC_SETTINGS)
        async with Owner(address, topic) as owner:
            await owner.served()
            await asyncio.gather(*(owner.put(f"m{number}", number) for number in range(400)))
            if not is_away:
                await standby.follows(owner.balance())
            async with Owner(address, topic, is_standby=True, disk=disk) as again:
                await again.follows(owner.balance())


@pytest.mark.parametrize("fault", [{"error": "NOT_LEADER_OR_FOLLOWER"}, {"close": True}, {"drop": True}], ids=str)
async def test_a_standby_follows_through_faults_of_the_upstream(
    upstream: KcoordBroker, topic: str, fault: dict[str, Any]
) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as owner, Owner(address, topic, is_standby=True) as standby:
        await fill(owner, 20)
        await standby.follows(owner.balance())
        injected = upstream.inject_fault("Fetch", **fault)
        await owner.put("a", 1)
        await standby.follows(owner.balance())
        assert injected.hits >= 1


async def test_batches_larger_than_a_fetch_are_followed_in_all_partitions(upstream: KcoordBroker, topic: str) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as owner, Owner(address, topic, is_standby=True) as standby:
        await owner.served()
        for value in range(3):
            await asyncio.gather(*(owner.put_large("a", value, shard_id) for shard_id in range(2)))
        for shard_id in range(2):
            await standby.follows({"a": 2}, shard_id)


async def test_transactions_of_others_are_followed_as_the_owner_sees_them(upstream: KcoordBroker, topic: str) -> None:
    address = upstream.bootstrap_servers
    async with Owner(address, topic) as owner, Owner(address, topic, is_standby=True) as standby:
        await owner.served()
        await owner.put("a", 1)
        async with Producer(bootstrap_servers=address, transactional_id=f"{topic}-zombie") as zombie:
            await zombie.init_transactions()
            await zombie.begin_transaction()
            key, value = CoordinatorSerde().serialize(entry("a", 99))
            await zombie.send(topic, value, key=key, partition=0)
            await zombie.commit_transaction()
        await owner.put("b", 2)
        await standby.follows({"a": 1, "b": 2})
        assert owner.balance() == {"a": 1, "b": 2}
        standby.own()
        await standby.served()
        assert standby.balance() == {"a": 1, "b": 2}
