# SPDX-License-Identifier: Apache-2.0
"""Disk faults under live shards: nothing is acknowledged before it is on disk, and members keep their sessions."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kcoord.runtime.waiting import ShardState
from kcoord.server.disk.log_writer import LogWriter
from kcoord.server.disk.shard_logs import INDEX_STORE_INTERVAL_MS
from kcoord.storage.file_system import RealFileSystem, make_durable_dirs
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, keep_nothing, no_fault
from kcoord.storage.recovery import Recovery
from kcoord.storage.segment import LogConfig
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest
from tests.storage.support import batch

from .harness import SHARDS, Harness
from .test_group_handlers import commit, errors_of, join
from .test_shard_snapshots import GROUP, fetched, restarted

SESSION_TIMEOUT_MS = 3000


@pytest.fixture
async def broker() -> AsyncIterator[Harness]:
    settings = {
        "group_consumer_min_session_timeout_ms": "1000",
        "group_consumer_session_timeout_ms": str(SESSION_TIMEOUT_MS),
        "group_consumer_heartbeat_interval_ms": "500",
        "group_consumer_min_heartbeat_interval_ms": "1",
        "kcoord_log_flush_policy": "fsync",
        "offsets_retention_minutes": "1",
        "offsets_retention_check_interval_ms": "1000",
    }
    file_system = MemoryFileSystem()
    make_durable_dirs(file_system, "data")
    made = Harness(file_system=file_system, **settings)
    made.runtime.first_reload_ms = 0
    yield await made.open()
    memory(made).fault = no_fault
    made.worker.close(5)
    made.groups.close()


def memory(broker: Harness) -> MemoryFileSystem:
    assert isinstance(broker.file_system, MemoryFileSystem)
    return broker.file_system


async def put(broker: Harness, offset: int) -> int:
    (errors,) = errors_of(await broker.call(commit(GROUP, ("t3", {0: offset})), 9)).values()
    return errors[0]


def sync_logs(broker: Harness) -> None:
    """Renews the journal, as the writer thread does after a while."""
    assert isinstance(broker.worker._writer, LogWriter)
    assert broker.worker._writer._appends.renew()


async def until_served(broker: Harness) -> object:
    for _ in range(400):
        offsets = await fetched(broker)
        if isinstance(offsets, dict):
            return offsets
        await asyncio.sleep(0.005)
    raise AssertionError("the shard was not loaded again")


@pytest.mark.parametrize("code", [5, 28, 122], ids=["EIO", "ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("kind", ["write", "datasync", "sync_dir"])
async def test_d3_d4_a_failed_write_or_sync_is_not_acknowledged(broker: Harness, kind: str, code: int) -> None:
    """D-3, D-4: the shard fails, and is loaded again from the log as it is on disk by then."""
    assert await put(broker, 1) == 0
    memory(broker).fault = lambda operation: OSError(code, "planted") if operation.kind == kind else None
    answer = await put(broker, 2)
    # A folder is synced only with the first batch of its log.
    assert answer == (0 if kind == "sync_dir" else Errors.NOT_COORDINATOR)
    memory(broker).fault = no_fault
    broker.now += 1000
    offsets = await until_served(broker)
    assert offsets in {"write": [{0: 1}], "datasync": [{0: 1}, {0: 2}], "sync_dir": [{0: 2}]}[kind]
    memory(broker).crash(keep_nothing)
    again = await Harness(file_system=memory(broker)).open()
    assert await fetched(again) == offsets, "offsets that were served are on disk"
    again.groups.close()


async def test_a_shard_accepts_commits_again_after_a_fault(broker: Harness) -> None:
    memory(broker).fault = lambda operation: OSError(5, "planted") if operation.kind == "datasync" else None
    assert await put(broker, 2) == Errors.NOT_COORDINATOR
    memory(broker).fault = no_fault
    await until_served(broker)
    assert await put(broker, 3) == 0
    memory(broker).crash(keep_nothing)
    again = await Harness(file_system=memory(broker)).open()
    assert await fetched(again) == {0: 3}
    again.groups.close()


async def test_new_partitions_do_not_wait_for_a_log_that_cannot_be_read(broker: Harness) -> None:
    """They would wait for the creation times of its groups, each time for as long as partitions wait at most."""
    assert await put(broker, 1) == 0
    memory(broker).crash(keep_nothing)
    again = Harness(file_system=memory(broker))
    memory(broker).fault = lambda operation: OSError(5, "planted") if "__consumer_offsets" in operation.path else None
    await again.open()
    assert again.runtime.state(again.groups.shard_of(GROUP)) is ShardState.LOADING
    assert not again.groups.is_loading
    again.groups.close()


async def test_d4_heartbeats_and_reads_work_on_a_full_disk(broker: Harness) -> None:
    """D-4, ENOSPC: only requests that have to write are rejected, and a rejected request attempts no write."""
    assert await put(broker, 1) == 0
    joined = await broker.call(join(GROUP + "-members"), 1)
    attempts = 0

    def is_full(operation: Operation) -> OSError | None:
        nonlocal attempts
        attempts += operation.kind == "write"
        return OSError(28, "planted") if operation.kind == "write" else None

    memory(broker).fault = is_full
    assert await put(broker, 2) == Errors.NOT_COORDINATOR
    assert await until_served(broker) == {0: 1}
    before = attempts
    beat = ConsumerGroupHeartbeatRequest(group_id=GROUP + "-members", member_id="m1", member_epoch=joined.member_epoch)
    for _ in range(20):
        assert await put(broker, 3) == Errors.NOT_COORDINATOR
        assert await fetched(broker) == {0: 1}
        assert (await broker.call(beat, 1)).error_code == 0
    assert attempts == before
    memory(broker).fault = no_fault
    assert await put(broker, 4) == Errors.NOT_COORDINATOR
    broker.now += 1000
    assert await put(broker, 5) == 0
    assert await fetched(broker) == {0: 5}


async def test_d12_a_slow_disk_fences_no_member(broker: Harness) -> None:
    """D-12: while a sync takes longer than the session timeout, heartbeats are answered and their members stay."""
    joined = await broker.call(join("steady"), 1)
    assert joined.error_code == 0
    released, begun = threading.Event(), threading.Event()

    def stall(operation: Operation) -> None:
        if operation.kind == "datasync":
            begun.set()
            assert released.wait(10)

    memory(broker).fault = stall
    # A group of another shard than the steady group: a reply of the same shard may have to wait for the stalled write.
    name = next(f"g{n}" for n in range(99) if broker.groups.shard_of(f"g{n}") != broker.groups.shard_of("steady"))
    waiting = broker.send(commit(name, ("t3", {0: 1})), 9)
    assert asyncio.isfuture(waiting)
    await asyncio.sleep(0)
    assert await asyncio.get_running_loop().run_in_executor(None, begun.wait, 5)
    beat = ConsumerGroupHeartbeatRequest(group_id="steady", member_id="m1", member_epoch=joined.member_epoch)
    for _ in range(10):
        broker.now += SESSION_TIMEOUT_MS // 2
        assert (await broker.call(beat, 1)).error_code == 0
    assert not waiting.done()
    released.set()
    assert errors_of(await asyncio.wait_for(waiting, 5)) == {"t3": {0: 0}}
    assert (await broker.call(beat, 1)).error_code == 0


async def test_a_request_fails_if_its_write_takes_longer_than_offsets_commit_timeout_ms(broker: Harness) -> None:
    """The error is that of Kafka 4.3.1. The records of the request are written when the disk works again."""
    released, begun = threading.Event(), threading.Event()

    def stall(operation: Operation) -> None:
        if operation.kind == "datasync":
            begun.set()
            assert released.wait(10)

    memory(broker).fault = stall
    waiting = broker.send(commit(GROUP, ("t3", {0: 7})), 9)
    joining = broker.send(join(GROUP + "-members"), 1)
    assert asyncio.isfuture(waiting)
    assert asyncio.isfuture(joining)
    await asyncio.sleep(0)
    assert await asyncio.get_running_loop().run_in_executor(None, begun.wait, 5)
    broker.groups.tick()
    broker.now += broker.config.offsets_commit_timeout_ms - 1
    broker.groups.tick()
    assert not waiting.done()
    broker.now += 1
    broker.groups.tick()
    with pytest.raises(KafkaError) as caught:
        await asyncio.wait_for(waiting, 5)
    assert caught.value.error == Errors.COORDINATOR_NOT_AVAILABLE
    with pytest.raises(KafkaError):
        await asyncio.wait_for(joining, 5)
    memory(broker).fault = no_fault
    released.set()
    assert await fetched(broker) == {0: 7}
    assert await put(broker, 8) == 0


async def test_d14_offsets_expire_when_a_full_disk_has_space_again(broker: Harness) -> None:
    """D-14: on the full disk, writing the tombstones fails like any write, and the offsets stay."""
    assert await put(broker, 1) == 0
    memory(broker).fault = lambda operation: OSError(28, "planted") if operation.kind == "write" else None
    broker.now += 120_000
    broker.wake()
    await asyncio.sleep(0.05)
    memory(broker).fault = no_fault
    assert await until_served(broker) in ({0: 1}, {})
    for _ in range(50):
        broker.now += 2000
        broker.wake()
        await asyncio.sleep(0.005)
        if await fetched(broker) == {}:
            break
    assert await until_served(broker) == {}
    again = await restarted(broker).open()
    assert await fetched(again) == {}
    again.groups.close()


async def test_recovery_points_are_checkpointed_while_the_broker_runs(broker: Harness) -> None:
    """A start after a crash checks only the part of the log after the recovery point, and loses nothing."""
    for offset in range(200):
        assert await put(broker, offset) == 0
    log = next(iter(broker.logs.open_logs().values()))
    size_bytes = log.size_bytes
    sync_logs(broker)
    broker.logs.store_indexes()
    broker.folder.log_dir.note_durable()
    broker.folder.log_dir.write_checkpoints()
    assert await put(broker, 1000) == 0
    memory(broker).crash(keep_nothing)
    again = await Harness(file_system=memory(broker)).open()
    assert await fetched(again) == {0: 1000}
    (log,) = again.logs.open_logs().values()
    assert 0 < log.recovery_report.scanned_bytes < size_bytes / 2
    again.groups.close()


async def test_indexes_are_stored_by_the_tick(broker: Harness) -> None:
    for offset in range(200):
        assert await put(broker, offset) == 0
    sync_logs(broker)
    broker.groups.tick()
    broker.now += INDEX_STORE_INTERVAL_MS
    broker.groups.tick()
    path = f"data/__consumer_offsets-{broker.groups.shard_of(GROUP)}/{0:020d}.index"
    for _ in range(400):
        if memory(broker).exists(path) and memory(broker).size(path):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("no index file")


async def test_d5_a_lost_directory_entry_of_a_log_loses_no_acknowledged_offset(broker: Harness) -> None:
    """D-5: the entry of a new folder is durable before its first batch is acknowledged."""
    for number in range(SHARDS * 3):
        answer = errors_of(await broker.call(commit(f"g{number}", ("t3", {0: number})), 9))
        assert answer == {"t3": {0: 0}}
    memory(broker).crash(keep_nothing)
    again = await Harness(file_system=memory(broker)).open()
    names = {name for name in memory(again).list_dir("data") if name.startswith("__consumer_offsets")}
    assert len(names) == len({broker.groups.shard_of(f"g{number}") for number in range(SHARDS * 3)})
    again.groups.close()


def test_d13_the_times_of_files_do_not_matter(tmp_path: Path) -> None:
    """D-13: recovery and retention depend on offsets and timestamps in the log only."""
    directory = str(tmp_path / "t-0")
    log = Log.open(RealFileSystem(), directory, LogConfig(), 1000)
    for offset in range(3):
        log.append(batch(offset), now_ms=1000)
        log.roll(1000)
    log.close()
    for number, path in enumerate(sorted(Path(directory).iterdir())):
        os.utime(path, ns=(0, 0) if number % 2 else (2**61, 2**61))
    for clean in (True, False):
        again = Log.open(RealFileSystem(), directory, LogConfig(), 5, recovery=Recovery(recovery_point=3, clean=clean))
        assert (again.start_offset, again.end_offset, len(list(again.batches()))) == (0, 3, 3)
        assert again.delete_old_segments(lambda segment: (segment.largest_timestamp or (0, 0))[0] < 5, 5) == 0
        again.close()


async def test_d12_without_a_journal_no_roll_of_a_coordinators_log_waits_for_the_disk() -> None:
    """D-12: other threads sync closed segments and cleaned ones."""
    file_system = MemoryFileSystem()
    make_durable_dirs(file_system, "data")
    settings = {"offsets_topic_segment_bytes": "1000", "log_cleaner_backoff_ms": "5"}
    broker = await Harness(file_system=file_system, **settings).open()
    assert await put(broker, 0) == 0
    ((shard_id, log),) = [(shard_id, log) for shard_id, log in broker.logs.open_logs().items() if log.end_offset]
    waited: set[int] = set()

    def note(operation: Operation) -> None:
        if operation.kind in ("datasync", "sync_dir") and operation.path.startswith(log.directory):
            waited.add(threading.get_ident())

    file_system.fault = note
    for offset in range(1, 40):
        assert await put(broker, offset) == 0
    assert len(log.segments) > 3
    await until(lambda: log.flushed_offset == log.segments[-1].base_offset)
    cleaner = broker.folder.cleaner(broker.config, lambda: broker.image, broker.now_ms)
    cleaner.start()
    await until(lambda: broker.folder.log_dir.cleaned_offset("__consumer_offsets", shard_id) > 0)
    assert await asyncio.get_running_loop().run_in_executor(None, cleaner.close, 5)
    assert waited
    assert threading.get_ident() not in waited
    file_system.fault = no_fault
    durable = log.flushed_offset
    file_system.crash(keep_nothing)
    again = await Harness(file_system=file_system, **settings).open()
    assert again.logs.open_logs()[shard_id].end_offset >= durable > 0
    broker.groups.close()
    again.groups.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition was never met")
