# SPDX-License-Identifier: Apache-2.0
"""The log writer: order of writes, syncs and results, errors of the disk, and renewals of the journal."""

from __future__ import annotations

import asyncio
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.server.disk import log_writer
from kcoord.server.disk.log_writer import (
    SYNC_THREADS,
    KernelSync,
    LogWriter,
    SideBySide,
    WriteJob,
    write_durably,
)
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.journal import Appended, DurableAppends, Journal
from kcoord.storage.log import AppendInfo
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation


def ignore_end(error: OSError | None, now_ms: int) -> None:
    """The tests see the errors of jobs where the writer delivers them."""


class MemoryLog:
    """A log that records what is done to it, and fails if a test says so."""

    def __init__(self) -> None:
        self.folder = f"topic-{id(self)}"
        self.events: list[object] = []
        self.size_bytes = 0
        self.would_wait = False
        self.append_error: Exception | None = None
        self.flush_error: Exception | None = None

    def append_at_once(self, data: bytes, *, now_ms: int) -> AppendInfo | None:
        return None if self.would_wait else self.append(data, now_ms=now_ms)

    def append(self, data: bytes, *, now_ms: int) -> AppendInfo:
        if self.append_error is not None:
            raise self.append_error
        self.events.append(data)
        position, self.size_bytes = self.size_bytes, self.size_bytes + len(data)
        return AppendInfo(0, position, False)

    def sync_names(self) -> None:
        self.events.append("names")

    def flush(self) -> None:
        if self.flush_error is not None:
            raise self.flush_error
        self.events.append("sync")


class Disk(MemoryFileSystem):
    """The disk of the journal. Every operation fails with `error`, if that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.syncs = 0
        self.journal = Journal(self, "journal")
        self.fault = self._fault

    def _fault(self, operation: Operation) -> Exception | None:
        self.syncs += operation.kind == "datasync"
        return self.error


def durable(disk: Disk | None = None) -> DurableAppends:
    return DurableAppends((disk or Disk()).journal)


def without_journal() -> DurableAppends:
    """The journal cannot be written, so each log is synced itself."""
    disk = Disk()
    disk.error = OSError(5, "Input/output error")
    return durable(disk)


def test_one_sync_makes_all_logs_durable() -> None:
    first, second, disk = MemoryLog(), MemoryLog(), Disk()
    jobs = [WriteJob("a", first, b"1", 0, ignore_end), WriteJob("b", second, b"2", 0, ignore_end)]
    write_durably(jobs, durable(disk))
    assert [job.error for job in jobs] == [None, None]
    assert first.events == [b"1", "names"]
    assert disk.syncs == 1


def test_all_logs_are_written_before_the_first_is_synced() -> None:
    first, second = MemoryLog(), MemoryLog()
    order: list[str] = []
    first.flush = lambda: order.append(f"first synced with {second.events}")  # type: ignore[method-assign]
    write_durably(
        [WriteJob("a", first, b"1", 0, ignore_end), WriteJob("b", second, b"2", 0, ignore_end)], without_journal()
    )
    assert order == ["first synced with [b'2', 'names']"]
    assert second.events == [b"2", "names", "sync"]


def test_a_failed_append_is_reported_and_its_log_is_not_synced() -> None:
    good, bad = MemoryLog(), MemoryLog()
    bad.append_error = OSError(28, "No space left on device")
    jobs = [WriteJob("bad", bad, b"1", 0, ignore_end), WriteJob("good", good, b"2", 0, ignore_end)]
    write_durably(jobs, durable())
    assert [job.error for job in jobs] == [bad.append_error, None]
    assert bad.events == []
    assert good.events == [b"2", "names"]


def test_a_failed_sync_is_an_error_of_the_write() -> None:
    log = MemoryLog()
    log.flush_error = OSError(5, "Input/output error")
    job = WriteJob("a", log, b"1", 0, ignore_end)
    write_durably([job], without_journal())
    assert job.error is log.flush_error


class MeetingLog(MemoryLog):
    """A log whose sync ends only when `SYNC_THREADS` syncs run at the same time."""

    def __init__(self, together: threading.Barrier) -> None:
        super().__init__()
        self._together = together

    def flush(self) -> None:
        self._together.wait(20)
        super().flush()


def test_logs_are_synced_in_parallel_and_an_error_fails_only_its_log() -> None:
    together = threading.Barrier(SYNC_THREADS)
    logs: list[MemoryLog] = [MeetingLog(together) for _ in range(SYNC_THREADS)]
    logs += [MemoryLog() for _ in range(SYNC_THREADS + 1)]
    logs[-1].append_error = OSError(28, "No space left on device")
    logs[3].flush_error = logs[-2].flush_error = OSError(5, "Input/output error")
    threads = SideBySide()
    try:
        jobs = [WriteJob(number, log, b"1", 0, ignore_end) for number, log in enumerate(logs)]
        disk = Disk()
        disk.error = OSError(5, "Input/output error")
        write_durably([jobs[-1], *jobs[:-1]], DurableAppends(disk.journal, threads.flush))
    finally:
        threads.close()
    errors = {job.key: job.error for job in jobs if job.error is not None}
    assert errors == {
        3: logs[3].flush_error,
        len(logs) - 2: logs[-2].flush_error,
        len(logs) - 1: logs[-1].append_error,
    }
    assert [log.events for log in logs[:3]] == [[b"1", "names", "sync"]] * 3


def test_an_unexpected_exception_fails_the_jobs_of_its_log() -> None:
    log = MemoryLog()
    log.append_error = ZeroDivisionError("oops")
    job = WriteJob("a", log, b"1", 0, ignore_end)
    write_durably([job], durable())
    assert isinstance(job.error, OSError)
    assert "ZeroDivisionError: oops" in str(job.error)


class Writer:
    """A LogWriter and the jobs of its passes. `end` closes it when no pass runs."""

    def __init__(self, journal: Journal) -> None:
        self.passes: list[list[WriteJob]] = []
        self.writer = LogWriter(asyncio.get_running_loop(), self.passes.append, journal)

    async def until_passes(self, count: int) -> None:
        await until(lambda: len(self.passes) >= count)

    def outcomes(self) -> list[list[tuple[object, OSError | None]]]:
        return [[(job.key, job.error) for job in jobs] for jobs in self.passes]

    async def end(self) -> None:
        await until(lambda: not self.writer._is_busy)
        assert self.writer.close(5)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not in time")


@pytest.fixture(params=["thread", "kernel"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    """A journal in memory, which only the thread can sync, or in a file, which the kernel syncs."""
    return Disk().journal if request.param == "thread" else Journal(RealFileSystem(), f"{tmp_path}/journal")


async def test_one_pass_takes_all_jobs_that_wait(journal: Journal) -> None:
    log = MemoryLog()
    writer = Writer(journal)
    for data in (b"1", b"2", b"3"):
        writer.writer.submit([WriteJob("a", log, data, 0, ignore_end)])
    await writer.until_passes(2)
    assert [len(jobs) for jobs in writer.passes] == [1, 2]
    assert [event for event in log.events if event != "names"] == [b"1", b"2", b"3"]
    assert journal.size_bytes
    await writer.end()


async def test_the_thread_appends_if_the_event_loop_would_have_to_wait(journal: Journal) -> None:
    log = MemoryLog()
    log.would_wait = True
    writer = Writer(journal)
    writer.writer.submit([WriteJob("a", log, b"1", 0, ignore_end)])
    assert log.events == []
    await writer.until_passes(1)
    assert log.events == [b"1", "names"]
    await writer.end()


async def test_an_exception_in_the_event_loop_fails_the_jobs_of_its_log(journal: Journal) -> None:
    good, bad = MemoryLog(), MemoryLog()
    bad.append_error = ZeroDivisionError("oops")
    writer = Writer(journal)
    writer.writer.submit([WriteJob("bad", bad, b"1", 0, ignore_end), WriteJob("good", good, b"2", 0, ignore_end)])
    await writer.until_passes(1)
    ((failed, succeeded),) = writer.passes
    assert isinstance(failed.error, OSError)
    assert (succeeded.key, succeeded.error) == ("good", None)
    await writer.end()


async def test_the_thread_syncs_if_the_kernel_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(KernelSync, "start", refuse)
    log = MemoryLog()
    writer = Writer(Journal(RealFileSystem(), f"{tmp_path}/journal"))
    writer.writer.submit([WriteJob("a", log, b"1", 0, ignore_end)])
    await writer.until_passes(1)
    assert writer.outcomes() == [[("a", None)]]
    assert writer.writer._kernel is None
    await writer.end()


async def test_after_a_failed_sync_of_the_journal_the_logs_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: KernelSync, descriptor: int, done: Callable[[OSError | None], None]) -> None:
        asyncio.get_running_loop().call_soon(done, OSError(5, "Input/output error"))

    monkeypatch.setattr(KernelSync, "start", fail)
    first, second = MemoryLog(), MemoryLog()
    journal = Journal(RealFileSystem(), f"{tmp_path}/journal")
    writer = Writer(journal)
    writer.writer._appends.note([Appended(first, AppendInfo(0, 0, False), b"0")])
    writer.writer.submit([WriteJob("b", second, b"1", 0, ignore_end)])
    await writer.until_passes(1)
    assert writer.outcomes() == [[("b", None)]]
    assert first.events == ["sync"], "its batch was only in the torn journal"
    assert not journal.is_torn
    await writer.end()


async def test_the_thread_syncs_on_machines_without_the_queue_of_linux(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="no system call numbers for linux on riscv64"):
        KernelSync(asyncio.get_running_loop())
    writer = Writer(Journal(RealFileSystem(), f"{tmp_path}/journal"))
    assert writer.writer._kernel is None
    await writer.end()


async def test_the_kernel_reports_the_outcome_of_a_sync(tmp_path: Path) -> None:
    kernel = KernelSync(asyncio.get_running_loop())
    outcomes: list[OSError | None] = []
    with open(tmp_path / "file", "wb") as file:
        file.write(b"content")
        file.flush()
        for count in (1, 2, 3):
            kernel.start(file.fileno(), outcomes.append)
            await until(lambda count=count: len(outcomes) == count)  # type: ignore[misc]
    assert outcomes == [None] * 3
    with pytest.raises(OSError, match="Bad file descriptor"):
        kernel.start(file.fileno() if not file.closed else 999_999, outcomes.append)
    read_end, write_end = os.pipe()
    with pytest.raises(OSError, match="Invalid argument"):
        kernel.start(write_end, outcomes.append)
    os.close(read_end)
    os.close(write_end)
    kernel.close()


async def test_the_logs_are_synced_when_the_journal_is_old(monkeypatch: pytest.MonkeyPatch, journal: Journal) -> None:
    monkeypatch.setattr(log_writer, "RENEWAL_SECONDS", 0.0)
    log = MemoryLog()
    writer = Writer(journal)
    writer.writer.submit([WriteJob("a", log, b"1", 0, ignore_end)])
    await until(lambda: "sync" in log.events)
    await writer.end()
    assert journal.size_bytes == 0
    assert writer.outcomes() == [[("a", None)]]


async def test_the_logs_are_synced_when_the_journal_is_large(monkeypatch: pytest.MonkeyPatch, journal: Journal) -> None:
    monkeypatch.setattr(DurableAppends, "is_renewal_due", property(lambda self: journal.size_bytes > 300))
    log = MemoryLog()
    writer = Writer(journal)
    for number in range(10):
        writer.writer.submit([WriteJob("a", log, b"12345", 0, ignore_end)])
        await writer.until_passes(number + 1)
    await writer.end()
    assert 1 <= log.events.count("sync") < 5
    assert journal.size_bytes < 500


async def test_the_thread_survives_a_closed_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    writer = Writer(Disk().journal)

    def refuse(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    monkeypatch.setattr(writer.writer._loop, "call_soon_threadsafe", refuse)
    writer.writer.submit([WriteJob("a", log, b"1", 0, ignore_end)])
    assert writer.writer.close(5), "the batch is on disk"
    assert log.events == [b"1", "names"]
    assert not writer.writer._thread.is_alive()
