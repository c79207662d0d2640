# SPDX-License-Identifier: Apache-2.0
"""Snapshots of live shards.

A shard uses a snapshot that fits its log, ignores one that does not, and still finds damage in the log.
"""

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
    """Returns another broker on the files that a process left."""
    broker.groups.close()
    for shard_id in range(SHARDS):
        broker.logs.close(shard_id)
    return broker.restarted()


@pytest.fixture
def no_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_snapshots, "LEAST_GROWTH_BYTES", 1)
    monkeypatch.setattr(shard_snapshots, "LEAST_GROWTH_AT_STOP_BYTES", 1)


@pytest.mark.usefixtures("no_minimum")
async def test_a_load_reads_the_snapshot_and_the_later_part_of_the_log() -> None:
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
async def test_an_orderly_stop_leaves_a_snapshot_of_the_whole_log() -> None:
    broker = await Harness().open()
    for offset in range(50):
        await put(broker, offset % 3, offset)
    broker.groups.finish()
    again = await restarted(broker).open()
    assert await fetched(again) == {0: 48, 1: 49, 2: 47}
    assert again.runtime.statistics.records_loaded == 0
    again.groups.finish()
    assert again.runtime.statistics.records_appended == 0


async def test_no_snapshot_is_taken_after_little_growth() -> None:
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
async def test_a_damaged_snapshot_only_costs_time(change: Any, caplog: pytest.LogCaptureFixture) -> None:
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
async def test_a_snapshot_of_unknown_content_only_costs_time(caplog: pytest.LogCaptureFixture) -> None:
    broker = await Harness().open()
    await put(broker, 0, 7)
    broker.groups.finish()
    again = restarted(broker)
    snapshot = read_snapshot(again.file_system, folder(again))
    assert snapshot is not None
    snapshot.chunks = [chunk._replace(kind=chunk.kind + 50) for chunk in snapshot.chunks]
    write_snapshot(again.file_system, folder(again), snapshot)
    await again.open()
    assert await fetched(again) == {0: 7}
    assert "unknown kind" in caplog.text


@pytest.mark.usefixtures("no_minimum")
async def test_a_snapshot_ahead_of_its_log_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    """The end of the log was lost. The log will grow past the snapshot's offset again, with other records."""
    broker = await Harness().open()
    for offset in range(5):
        await put(broker, 0, offset)
    broker.groups.finish()
    again = restarted(broker)
    snapshot = read_snapshot(again.file_system, folder(again))
    assert snapshot is not None
    write_snapshot(again.file_system, folder(again), Snapshot(3, snapshot.end_offset + 1, 0, []))
    await again.open()
    assert await fetched(again) == {0: 4}
    assert "the log only to 5" in caplog.text
    assert SNAPSHOT_FILE not in again.file_system.list_dir(folder(again))


@pytest.mark.usefixtures("no_minimum")
async def test_damage_in_the_log_before_a_snapshot_fails_the_shard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-8: the snapshot has the state, but damage in the log that it stands for must be found."""
    monkeypatch.setattr(shard_logs, "VERIFY_SLICE_BYTES", 1)
    monkeypatch.setattr(shard_logs, "VERIFY_REST_SECONDS", 0)
    broker = await Harness().open()
    for offset in range(100):
        await put(broker, 0, offset)
    broker.groups.finish()
    again = restarted(broker)
    assert isinstance(again.file_system, MemoryFileSystem)
    path = join(folder(again), f"{0:020d}.log")
    # Recovery as after an orderly stop, which does not scan the log.
    again.logs._open_log = lambda shard_id: Log.open(
        again.file_system, folder(again), LogConfig(), again.now, recovery=Recovery(recovery_point=100, clean=True)
    )
    again.file_system.damage(path, lambda data: data[:100] + bytes([data[100] ^ 4]) + data[101:])
    await again.open()
    assert again.runtime.statistics.records_loaded == 0, "the load used the snapshot"
    for _ in range(300):
        if await fetched(again) == Errors.NOT_COORDINATOR:
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert await fetched(again) in (Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS)
    assert f"{path}: position 0, offset 0: the CRC" in caplog.text
    assert SNAPSHOT_FILE in again.file_system.list_dir(folder(again)), "it may be the only copy of the state"
    again.groups.close()


@pytest.mark.usefixtures("no_minimum")
async def test_a_snapshot_that_finds_the_disk_full_does_not_fail_the_shard(caplog: pytest.LogCaptureFixture) -> None:
    """D-4: the old or no snapshot stays, and the shard continues."""
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
async def test_a_snapshot_older_than_removed_tombstones_is_ignored() -> None:
    """Found by the simulation, seed 31: offsets that were deleted after the snapshot came back with it."""
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
async def test_a_snapshot_is_used_at_any_age_if_the_later_log_was_not_cleaned() -> None:
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
    assessment = assess(log, 0, rules, log.end_offset, broker.now)
    cleaner = Cleaner(broker.file_system, max_map_bytes=1 << 16, pause=lambda size: None)
    cleaner.clean(log, assessment, rules, lambda step: step(), broker.now, stable_offset=log.end_offset)
