# SPDX-License-Identifier: Apache-2.0
"""The cleaner's thread and a running event loop: logs stay small, state stays the same, and `close` is quick."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kcoord.server.disk import cleanable_logs, log_cleaner
from kcoord.server.disk.log_cleaner import CleanableLog, CleaningStopped, LogCleaner
from kcoord.storage.checkpoints import CLEANER_OFFSET_FILE
from kcoord.storage.cleaner import Assessment, CleaningRules, assess
from kcoord.storage.log import Log
from kcoord.storage.log_dir import Identity, LogDir
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation
from kcoord_protocol.messages import OffsetCommitRequest
from tests.storage.cleaning import Writer, committed_state, offsets_left, records, state
from tests.storage.support import DIRECTORY, NOW_MS

from .harness import Harness
from .test_shard_snapshots import GROUP, fetched, folder, restarted


class Running:
    """A cleaner of the logs of a harness, or of `targets`."""

    def __init__(self, broker: Harness, *targets: CleanableLog) -> None:
        self.log_dir = LogDir.open(broker.file_system, "cleaned", Identity("c", 1, "d"))
        self.targets = list(targets)
        self.broker = broker
        self.cleaner = LogCleaner(broker.config, self.log_dir, broker.file_system, self._logs, broker.now_ms)

    def _logs(self) -> list[CleanableLog]:
        if self.targets:
            return self.targets
        logs = self.broker.logs
        return cleanable_logs.of_coordinator(
            "__consumer_offsets",
            logs,
            self.broker.config,
            self.broker.image,
            lambda shard_id, offsets: None,
            cleanable_logs.at_once,
        )

    async def until_cleaned(self, topic: str, partition: int, offset: int) -> None:
        await until(lambda: self.log_dir.cleaned_offset(topic, partition) >= offset)


async def until(is_done: Callable[[], bool]) -> None:
    """Waits for the thread of the cleaner."""
    for _ in range(1000):
        if is_done():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the cleaner did not do it in time")


@pytest.fixture
async def broker() -> AsyncIterator[Harness]:
    made = await Harness(log_cleaner_backoff_ms="5", kcoord_log_flush_policy="fsync").open()
    yield made
    made.worker.close(5)
    made.groups.close()


def many(offset: int) -> OffsetCommitRequest:
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=index, committed_offset=offset)
        for index in range(3)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t3", partitions=partitions)
    return OffsetCommitRequest(group_id=GROUP, generation_id_or_member_epoch=-1, topics=[topic])


async def test_the_log_of_a_busy_coordinator_stays_small(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cleaner rolls the active segment early. Afterwards, broker and restarted broker have the same offsets."""
    monkeypatch.setattr("kcoord.server.disk.log_cleaner.LEAST_ROLLED_BYTES", 16 << 10)
    running = Running(broker)
    running.cleaner.start()
    size = 0
    for offset in range(1500):
        await broker.call(many(offset), 9)
        size = max(size, _size(broker))
        if offset % 250 == 249:
            # However slow the thread is, the dirty part stays below the size that is worth a pass: 16 KiB, or about 70
            # commits.
            await running.until_cleaned("__consumer_offsets", broker.groups.shard_of(GROUP), 3 * (offset - 100))
    await running.until_cleaned("__consumer_offsets", broker.groups.shard_of(GROUP), 1500)
    assert running.cleaner.close(5)
    written = broker.runtime.statistics.bytes_appended
    assert written > 300_000
    assert _size(broker) < 40_000
    assert size < written / 3
    assert await fetched(broker) == {0: 1499, 1: 1499, 2: 1499}
    again = await restarted(broker).open()
    assert await fetched(again) == {0: 1499, 1: 1499, 2: 1499}
    again.groups.close()


async def test_a_small_log_is_cleaned_when_it_stops_growing(broker: Harness) -> None:
    """While the log grows, passes would cost more than they save."""
    running = Running(broker)
    for offset in range(100):
        await broker.call(many(offset), 9)
    grown = _size(broker)
    assert grown > 16 << 10
    running.cleaner.start()
    await running.until_cleaned("__consumer_offsets", broker.groups.shard_of(GROUP), 100)
    assert running.cleaner.close(5)
    assert _size(broker) < grown / 10


def _size(broker: Harness) -> int:
    directory = folder(broker)
    return sum(broker.file_system.size(f"{directory}/{name}") for name in broker.file_system.list_dir(directory))


def target_of(writer: Writer, running: Running) -> CleanableLog:
    return CleanableLog("topic", 0, writer.log, CleaningRules(), writer.log.end_offset, running.cleaner.in_loop)


async def test_logs_of_topics_are_changed_in_the_event_loop_and_the_offset_is_checkpointed(broker: Harness) -> None:
    assert isinstance(broker.file_system, MemoryFileSystem)
    writer = Writer(broker.file_system)
    for number in range(10):
        writer.put(("a", str(number)), ("b", "x"))
    writer.roll()
    expected = state(records(writer.log))
    running = Running(broker)
    running.targets = [target_of(writer, running)]
    running.cleaner.start()
    await running.until_cleaned("topic", 0, 20)
    assert running.cleaner.close(5)
    assert offsets_left(writer.log) == [18, 19]
    assert state(records(writer.log)) == expected
    assert running.log_dir.close()
    again = LogDir.open(broker.file_system, "cleaned", Identity("c", 1, "d"))
    assert again.cleaned_offset("topic", 0) == 0, "a partition without a folder is forgotten"


async def test_the_checkpoint_names_a_log_before_its_first_segment_is_replaced(broker: Harness) -> None:
    """Otherwise a crash between the two leaves gaps between offsets that look like damage."""
    file_system = broker.file_system
    assert isinstance(file_system, MemoryFileSystem)
    writer = Writer(file_system)
    for number in range(10):
        writer.put(("a", str(number)))
    writer.roll()
    has_checkpoint: list[bool] = []

    def note(operation: Operation) -> None:
        if operation.kind == "rename" and CLEANER_OFFSET_FILE not in operation.path:
            has_checkpoint.append(file_system.exists(f"cleaned/{CLEANER_OFFSET_FILE}"))

    running = Running(broker)
    running.targets = [target_of(writer, running)]
    file_system.fault = note
    running.cleaner.start()
    await running.until_cleaned("topic", 0, 10)
    assert running.cleaner.close(5)
    assert has_checkpoint
    assert all(has_checkpoint)


async def test_a_full_disk_postpones_the_pass_until_the_checkpoint_names_the_log(
    broker: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failed write, memory must not claim that the file names the log: the next pass would rely on it."""
    file_system = broker.file_system
    assert isinstance(file_system, MemoryFileSystem)
    writer = Writer(file_system)
    writer.put(("a", "0"))
    writer.roll()
    for number in range(1, 10):
        writer.put(("a", str(number)))
    writer.roll()
    writer.log.advance_start_offset(1)
    assert writer.log.delete_old_segments(lambda segment: segment.next_offset <= 1, broker.now_ms())
    failures = 3
    replaced_too_early: list[str] = []

    def fail(operation: Operation) -> None:
        nonlocal failures
        if CLEANER_OFFSET_FILE in operation.path:
            if operation.kind == "write" and failures:
                failures -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
        elif operation.kind == "rename" and not file_system.exists(f"cleaned/{CLEANER_OFFSET_FILE}"):
            replaced_too_early.append(operation.path)

    running = Running(broker)
    running.targets = [target_of(writer, running)]
    file_system.fault = fail
    running.cleaner.start()
    await running.until_cleaned("topic", 0, 10)
    assert running.cleaner.close(5)
    assert not failures
    assert not replaced_too_early
    assert caplog.text.count("topic-0 was not cleaned: [Errno 28]") == 3
    assert "Traceback" not in caplog.text


async def test_a_damaged_log_is_reported_once(broker: Harness, caplog: pytest.LogCaptureFixture) -> None:
    file_system = broker.file_system
    assert isinstance(file_system, MemoryFileSystem)
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.put(("a", "2"))
    writer.roll()
    file_system.damage(writer.log.segments[0].log_path, lambda data: data[:-3] + b"xyz")
    running = Running(broker)
    running.targets = [target_of(writer, running), *running._logs()]
    running.cleaner.start()
    await until(lambda: "was not cleaned" in caplog.text)
    await asyncio.sleep(0.05)
    assert running.cleaner.close(5)
    assert caplog.text.count("topic-0 was not cleaned") == 1
    assert "the CRC" in caplog.text
    assert file_system.list_dir(DIRECTORY)


async def test_a_new_log_in_place_of_a_damaged_one_is_cleaned(
    broker: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """A topic with a damaged log is deleted and created again."""
    file_system = broker.file_system
    assert isinstance(file_system, MemoryFileSystem)
    damaged = Writer(file_system)
    damaged.put(("a", "1"))
    damaged.roll()
    file_system.damage(damaged.log.segments[0].log_path, lambda data: data[:-3] + b"xyz")
    running = Running(broker)
    running.targets = [target_of(damaged, running)]
    running.cleaner.start()
    await until(lambda: "was not cleaned" in caplog.text)
    damaged.log.abandon()
    file_system.rename(DIRECTORY, "data/deleted")
    new = Writer(file_system)
    new.put(("a", "1"), ("a", "2"))
    new.roll()
    running.targets = [target_of(new, running)]
    await running.until_cleaned("topic", 0, 2)
    assert running.cleaner.close(5)


async def test_a_log_that_changes_while_it_is_cleaned_is_no_error(
    broker: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention, or the deletion of the topic, was faster than the cleaner."""
    caplog.set_level(logging.INFO)
    file_system = broker.file_system
    assert isinstance(file_system, MemoryFileSystem)
    writer = Writer(file_system)
    for number in range(10):
        writer.put(("a", str(number)))
        writer.roll()
    running = Running(broker)
    target = target_of(writer, running)

    def delete_and_run(step: Callable[[], None]) -> None:
        def run() -> None:
            writer.log.delete_old_segments(lambda segment: segment.base_offset < 2, NOW_MS)
            step()

        running.cleaner.in_loop(run)

    target.on_owner = delete_and_run
    running.targets = [target]
    running.cleaner.start()
    await running.until_cleaned("topic", 0, 10)
    assert running.cleaner.close(5)
    assert "topic-0 was not cleaned: data/topic-0: files were removed while they were read" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}


async def test_a_log_that_is_deleted_while_it_is_assessed_is_no_error(
    broker: Harness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    file_system = broker.file_system
    assert isinstance(file_system, MemoryFileSystem)
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.roll()

    def delete_and_assess(log: Log, *arguments: Any) -> Assessment:
        log.abandon()
        file_system.rename(DIRECTORY, "data/deleted")
        return assess(log, *arguments)

    monkeypatch.setattr(log_cleaner, "assess", delete_and_assess)
    running = Running(broker)
    running.targets = [target_of(writer, running)]
    running.cleaner.start()
    await until(lambda: "topic-0 was not cleaned: data/topic-0: files were removed while they were read" in caplog.text)
    assert running.cleaner.close(5)
    assert {record.levelname for record in caplog.records} == {"INFO"}


@pytest.mark.parametrize("step", ["_assess", "_clean"])
async def test_an_unexpected_error_of_one_log_does_not_stop_the_others(
    broker: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """Every round begins with the dirtiest log, so the same log would fail first each time."""
    file_system = broker.file_system
    assert isinstance(file_system, MemoryFileSystem)
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.roll()
    for offset in range(100):
        await broker.call(many(offset), 9)

    def assess_or_fail(log: Log, *arguments: Any) -> Assessment:
        if log is writer.log:
            raise ValueError("planted")
        return assess(log, *arguments)

    def fail(operation: Operation) -> None:
        if operation.path.startswith(DIRECTORY):
            raise ValueError("planted")

    if step == "_assess":
        monkeypatch.setattr(log_cleaner, "assess", assess_or_fail)
    else:
        file_system.fault = fail
    running = Running(broker)
    running.targets = [target_of(writer, running), *running._logs()]
    running.cleaner.start()
    await running.until_cleaned("__consumer_offsets", broker.groups.shard_of(GROUP), 100)
    await asyncio.sleep(0.05)
    assert running.cleaner.close(5)
    assert caplog.text.count("topic-0 was not cleaned: planted") == 1, "it is left alone until the next start"
    assert "Traceback" in caplog.text


async def test_records_of_an_open_transaction_are_not_cleaned(broker: Harness) -> None:
    assert isinstance(broker.file_system, MemoryFileSystem)
    writer = Writer(broker.file_system)
    writer.put(("a", "1"), producer_id=1, sequence=0, is_transactional=True)
    writer.roll()
    writer.put(("a", "2"))
    writer.roll()
    expected = committed_state(writer.log)
    running = Running(broker)
    running.targets = [target_of(writer, running)]
    running.cleaner.start()
    await asyncio.sleep(0.05)
    assert running.cleaner.close(5)
    assert (offsets_left(writer.log), committed_state(writer.log)) == ([0, 1], expected)


async def test_close_ends_a_pass_in_the_middle(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_cleaner, "_SHORTEST_REST_SECONDS", 60.0)
    assert isinstance(broker.file_system, MemoryFileSystem)
    writer = Writer(broker.file_system)
    for number in range(4):
        writer.put(("a", str(number)))
        writer.roll()
    running = Running(broker)
    running.targets = [target_of(writer, running)]
    running.cleaner.start()
    await asyncio.sleep(0.05)
    began = time.monotonic()
    assert running.cleaner.close(5)
    assert time.monotonic() - began < 2
    assert offsets_left(writer.log) == [0, 1, 2, 3]


async def test_the_thread_ends_while_it_waits_for_the_event_loop(broker: Harness) -> None:
    cleaner = Running(broker).cleaner
    answers: list[str] = []
    asking = threading.Thread(target=_ask, args=(cleaner, answers))
    asking.start()
    cleaner._stopping.set()
    # This blocks the event loop, which does not run the function.
    asking.join(30)
    assert answers == ["stopped"]


def _ask(cleaner: LogCleaner, answers: list[str]) -> None:
    try:
        cleaner.in_loop(lambda: answers.append("answered"))
    except CleaningStopped:
        answers.append("stopped")


async def test_in_loop_raises_the_error_of_its_function(broker: Harness) -> None:
    cleaner = Running(broker).cleaner

    def fail() -> None:
        raise OSError(5, "planted")

    with pytest.raises(OSError, match="planted"):
        await asyncio.get_running_loop().run_in_executor(None, partial(cleaner.in_loop, fail))


async def test_the_cleaner_stays_below_the_configured_rate(broker: Harness) -> None:
    cleaner = Running(broker).cleaner
    broker.config.apply_dynamic({"log.cleaner.io.max.bytes.per.second": "1000000"})
    began = time.monotonic()
    cleaner._slice_began = time.perf_counter()
    await asyncio.get_running_loop().run_in_executor(None, partial(cleaner._pause, 100_000))
    assert 0.09 < time.monotonic() - began < 2


@pytest.mark.parametrize(("busy_seconds", "rest_seconds"), [(0.0, 0.01), (0.01, 0.025), (0.02, 0.04), (0.08, 0.04)])
async def test_the_cleaner_rests_longer_while_other_threads_are_busy(
    broker: Harness, monkeypatch: pytest.MonkeyPatch, busy_seconds: float, rest_seconds: float
) -> None:
    """The cleaner rested for 10 ms and worked for 10 ms; other threads used `busy_seconds` of CPU meanwhile."""
    cleaner = Running(broker).cleaner
    times = SimpleNamespace(perf_counter=lambda: 5.02, process_time=lambda: 3 + busy_seconds, thread_time=lambda: 1.0)
    rests: list[float] = []
    monkeypatch.setattr("kcoord.server.disk.log_cleaner.time", times)
    monkeypatch.setattr(cleaner, "_stopping", SimpleNamespace(wait=rests.append))
    cleaner._paused, cleaner._slice_began = (5.0, 2.0), 5.01
    cleaner._pause(100)
    assert rests == [pytest.approx(rest_seconds)]
