# SPDX-License-Identifier: Apache-2.0
"""Snapshots of live shards: used when they fit, left aside when they do not, and never a way past damage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kcoord.runtime import shard_snapshots
from kcoord.runtime.snapshot import Snapshot
from kcoord.server.disk import shard_logs
from kcoord.storage.cleaner import Cleaner, CleaningRules, assess
from kcoord.storage.file_system import join
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, no_fault
from kcoord.storage.recovery import Recovery
from kcoord.storage.segment import LogConfig
from kcoord.storage.snapshot import SNAPSHOT_FILE, read_snapshot, write_snapshot
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import DeleteGroupsRequest, OffsetFetchRequest

from .harness import SHARDS, TOMBSTONES_KEPT_MS, Harness
from .test_group_handlers import commit, errors_of

GROUP = "g"


async def fetched(broker: Harness) -> dict[int, int] | int:
    request = OffsetFetchRequest(groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id=GROUP, topics=None)])
    (group,) = (await broker.call(request, 9)).groups
    if group.error_code:
        return int(group.error_code)
    return {p.partition_index: p.committed_offset for topic in group.topics for p in topic.partitions}


async def put(broker: Harness, partition: int, offset: int) -> None:
    assert errors_of(await broker.call(commit(GROUP, ("t3", {partition: offset})), 9)) == {"t3": {partition: 0}}


def folder(broker: Harness) -> str:
    return f"data/__consumer_offsets-{broker.groups.shard_of(GROUP)}"


async def take_due(broker: Harness) -> None:
    broker.runtime.take_snapshots(broker.now)
    await until_taken(broker)


async def take(broker: Harness) -> None:
    assert broker.runtime.take_snapshot(broker.groups.shard_of(GROUP), broker.now)
    await until_taken(broker)


async def until_taken(broker: Harness) -> None:
    async with asyncio.timeout(5):
        while broker.runtime.snapshots.is_taking:
            await broker.pass_time(1)


def restarted(broker: Harness) -> Harness:
    """The process is gone; what it had written is there."""
    broker.groups.close()
    for shard_id in range(SHARDS):
        broker.logs.close(shard_id)
    return broker.restarted()


@pytest.fixture
def no_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_snapshots, "LEAST_GROWTH_BYTES", 1)
    monkeypatch.setattr(shard_snapshots, "LEAST_GROWTH_AT_STOP_BYTES", 1)


@pytest.mark.usefixtures("no_minimum")
async def test_after_a_snapshot_only_the_log_behind_it_is_read() -> None:
    broker = await Harness().open()
    for offset in range(50):
        await put(broker, offset % 3, offset)
    assert broker.runtime.snapshots.due() is not None
    await take_due(broker)
    assert broker.runtime.snapshots.due() is None
    await put(broker, 0, 100)
    again = await restarted(broker).open()
    assert await fetched(again) == {0: 100, 1: 49, 2: 47}
    assert again.runtime.statistics.records_loaded == 1
    again.groups.close()


@pytest.mark.usefixtures("no_minimum")
async def test_an_orderly_stop_leaves_one_of_all_that_was_written() -> None:
    broker = await Harness().open()
    for offset in range(50):
        await put(broker, offset % 3, offset)
    broker.groups.finish()
    again = await restarted(broker).open()
    assert await fetched(again) == {0: 48, 1: 49, 2: 47}
    assert again.runtime.statistics.records_loaded == 0
    again.groups.finish()
    assert again.runtime.statistics.records_appended == 0


async def test_little_growth_is_not_worth_it() -> None:
    broker = await Harness().open()
    await put(broker, 0, 1)
    assert broker.runtime.snapshots.due() is None
    broker.groups.tick()
    broker.groups.finish()
    assert SNAPSHOT_FILE not in broker.file_system.list_dir(folder(broker))


@pytest.mark.usefixtures("no_minimum")
@pytest.mark.parametrize(
    "change",
    [lambda data: data[: len(data) // 2], lambda data: bytes(len(data)), lambda data: b"", lambda data: data + b"x"],
    ids=["short", "zeros", "empty", "long"],
)
async def test_a_damaged_one_only_costs_time(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    broker = await Harness().open()
    for offset in range(5):
        await put(broker, 0, offset)
    broker.groups.finish()
    again = restarted(broker)
    assert isinstance(again.file_system, MemoryFileSystem)
    again.file_system.damage(join(folder(again), SNAPSHOT_FILE), change)
    await again.open()
    assert await fetched(again) == {0: 4}
    assert again.runtime.statistics.records_loaded == 5
    assert "the whole log is read instead" in caplog.text


@pytest.mark.usefixtures("no_minimum")
async def test_one_that_the_machine_does_not_understand_only_costs_time(caplog: pytest.LogCaptureFixture) -> None:
    broker = await Harness().open()
    await put(broker, 0, 7)
    broker.groups.finish()
    again = restarted(broker)
    found = read_snapshot(again.file_system, folder(again))
    assert found is not None
    found.chunks = [chunk._replace(kind=chunk.kind + 50) for chunk in found.chunks]
    write_snapshot(again.file_system, folder(again), found)
    await again.open()
    assert await fetched(again) == {0: 7}
    assert "unknown kind" in caplog.text


@pytest.mark.usefixtures("no_minimum")
async def test_one_that_is_ahead_of_its_log_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    """The end of the log was lost: it will grow past the snapshot again, with other records."""
    broker = await Harness().open()
    for offset in range(5):
        await put(broker, 0, offset)
    broker.groups.finish()
    again = restarted(broker)
    found = read_snapshot(again.file_system, folder(again))
    assert found is not None
    write_snapshot(again.file_system, folder(again), Snapshot(3, found.end_offset + 1, 0, []))
    await again.open()
    assert await fetched(again) == {0: 4}
    assert "the log only to 5" in caplog.text
    assert SNAPSHOT_FILE not in again.file_system.list_dir(folder(again))


@pytest.mark.usefixtures("no_minimum")
async def test_damage_behind_a_snapshot_is_found_and_the_shard_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-8: the snapshot knows the state, but a log that cannot be read must not go unnoticed."""
    monkeypatch.setattr(shard_logs, "VERIFY_SLICE_BYTES", 1)
    monkeypatch.setattr(shard_logs, "VERIFY_REST_SECONDS", 0)
    broker = await Harness().open()
    for offset in range(100):
        await put(broker, 0, offset)
    broker.groups.finish()
    again = restarted(broker)
    assert isinstance(again.file_system, MemoryFileSystem)
    path = join(folder(again), f"{0:020d}.log")
    again.logs._open_log = lambda shard_id: Log.open(  # as after an orderly stop
        again.file_system, folder(again), LogConfig(), again.now, recovery=Recovery(recovery_point=100, clean=True)
    )
    again.file_system.damage(path, lambda data: data[:100] + bytes([data[100] ^ 4]) + data[101:])
    await again.open()
    assert again.runtime.statistics.records_loaded == 0, "it began with the snapshot"
    for _ in range(300):
        if await fetched(again) == Errors.NOT_COORDINATOR:
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert await fetched(again) in (Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS)
    assert f"{path}: position 0, offset 0: the CRC" in caplog.text
    assert SNAPSHOT_FILE in again.file_system.list_dir(folder(again)), "it may be all that is left"
    again.groups.close()


@pytest.mark.usefixtures("no_minimum")
async def test_a_full_disk_costs_the_snapshot_alone(caplog: pytest.LogCaptureFixture) -> None:
    """D-4."""
    broker = await Harness().open()
    await put(broker, 0, 1)

    def fault(operation: Operation) -> OSError | None:
        return OSError(28, "No space left on device") if SNAPSHOT_FILE in operation.path else None

    assert isinstance(broker.file_system, MemoryFileSystem)
    broker.file_system.fault = fault
    await take(broker)
    assert "No snapshot of" in caplog.text
    await put(broker, 0, 2)
    broker.file_system.fault = no_fault
    await take_due(broker)
    again = await restarted(broker).open()
    assert await fetched(again) == {0: 2}
    again.groups.close()


@pytest.mark.usefixtures("no_minimum")
async def test_one_older_than_the_tombstones_that_were_cleaned_away_is_left_aside() -> None:
    """Found by the simulation, seed 31: what was deleted after the snapshot came back with it."""
    broker = await Harness().open()
    await put(broker, 0, 7)
    await take(broker)
    assert SNAPSHOT_FILE in broker.file_system.list_dir(folder(broker))
    await broker.call(DeleteGroupsRequest(groups_names=[GROUP]), 2)
    log = broker.logs.open_logs()[broker.groups.shard_of(GROUP)]
    for _ in range(2):
        log.roll(broker.now)
        clean(broker, log)
        broker.now += TOMBSTONES_KEPT_MS + 1
    again = restarted(broker)
    again.now = broker.now
    await again.open()
    assert await fetched(again) == {}
    again.groups.close()


@pytest.mark.usefixtures("no_minimum")
async def test_one_behind_which_nothing_was_cleaned_is_good_at_any_age() -> None:
    broker = await Harness().open()
    await put(broker, 0, 7)
    await take(broker)
    assert SNAPSHOT_FILE in broker.file_system.list_dir(folder(broker))
    await put(broker, 1, 8)
    again = restarted(broker)
    again.now = broker.now + 10 * TOMBSTONES_KEPT_MS
    await again.open()
    assert await fetched(again) == {0: 7, 1: 8}
    assert again.runtime.statistics.records_loaded == 1
    again.groups.close()


def clean(broker: Harness, log: Log) -> None:
    rules = CleaningRules(0.0, delete_retention_ms=TOMBSTONES_KEPT_MS)
    found = assess(log, 0, rules, log.end_offset, broker.now)
    cleaner = Cleaner(broker.file_system, max_map_bytes=1 << 16, pause=lambda size: None)
    cleaner.clean(log, found, rules, lambda step: step(), broker.now, stable_offset=log.end_offset)
