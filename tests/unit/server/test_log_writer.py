# SPDX-License-Identifier: Apache-2.0
"""The writer thread writes in order, syncs after writing, tells errors, and outlives them."""

from __future__ import annotations

import threading

from kcoord.server.log_writer import SYNC_THREADS, LogWriter, SideBySide, WriteJob, WriteResult, write_durably


class MemoryLog:
    def __init__(self) -> None:
        self.events: list[object] = []
        self.append_error: Exception | None = None
        self.flush_error: Exception | None = None

    def append(self, data: bytes, *, now_ms: int) -> None:
        if self.append_error is not None:
            raise self.append_error
        self.events.append(data)

    def flush(self) -> None:
        if self.flush_error is not None:
            raise self.flush_error
        self.events.append("sync")


def test_all_logs_are_written_before_the_first_is_synced() -> None:
    first, second = MemoryLog(), MemoryLog()
    order: list[str] = []
    first.flush = lambda: order.append(f"first synced with {second.events}")  # type: ignore[method-assign]
    write_durably([WriteJob("a", first, b"1", 0), WriteJob("b", second, b"2", 0)])
    assert order == ["first synced with [b'2']"]
    assert second.events == [b"2", "sync"]


def test_a_failed_write_is_told_and_not_synced() -> None:
    good, bad = MemoryLog(), MemoryLog()
    bad.append_error = OSError(28, "No space left on device")
    results = write_durably([WriteJob("bad", bad, b"1", 0), WriteJob("good", good, b"2", 0)])
    assert results == [WriteResult("bad", bad.append_error, 1), WriteResult("good", None, 1)]
    assert bad.events == []
    assert good.events == [b"2", "sync"]


def test_a_failed_sync_is_an_error_of_the_write() -> None:
    log = MemoryLog()
    log.flush_error = OSError(5, "Input/output error")
    assert write_durably([WriteJob("a", log, b"1", 0)]) == [WriteResult("a", log.flush_error, 1)]


class MeetingLog(MemoryLog):
    """Its sync ends when as many as there are threads are under way."""

    def __init__(self, together: threading.Barrier) -> None:
        super().__init__()
        self._together = together

    def flush(self) -> None:
        self._together.wait(20)
        super().flush()


def test_logs_are_synced_side_by_side_and_each_error_stays_with_its_log() -> None:
    together = threading.Barrier(SYNC_THREADS)
    logs: list[MemoryLog] = [MeetingLog(together) for _ in range(SYNC_THREADS)]
    logs += [MemoryLog() for _ in range(SYNC_THREADS + 1)]
    logs[-1].append_error = OSError(28, "No space left on device")
    logs[3].flush_error = logs[-2].flush_error = OSError(5, "Input/output error")
    threads = SideBySide()
    try:
        jobs = [WriteJob(number, log, b"1", 0) for number, log in enumerate(logs)]
        results = write_durably([jobs[-1], *jobs[:-1]], flush_all=threads.flush)
    finally:
        threads.close()
    assert [result.key for result in results] == [len(logs) - 1, *range(len(logs) - 1)]
    errors = {result.key: result.error for result in results if result.error is not None}
    assert errors == {
        3: logs[3].flush_error,
        len(logs) - 2: logs[-2].flush_error,
        len(logs) - 1: logs[-1].append_error,
    }
    assert [log.events for log in logs[:3]] == [[b"1", "sync"]] * 3


def test_a_defect_in_a_log_becomes_an_error_of_that_log() -> None:
    log = MemoryLog()
    log.append_error = ZeroDivisionError("oops")
    (result,) = write_durably([WriteJob("a", log, b"1", 0)])
    assert isinstance(result.error, OSError)
    assert "ZeroDivisionError: oops" in str(result.error)


def test_the_thread_serves_all_that_waits_in_one_pass_and_ends_after_the_queue() -> None:
    log = MemoryLog()
    passes: list[list[WriteResult]] = []
    gate = threading.Event()

    def deliver(results: list[WriteResult]) -> None:
        passes.append(results)
        gate.wait(5)

    writer = LogWriter(deliver)
    writer.submit([WriteJob("a", log, b"1", 0)])
    while not passes:
        gate.wait(0.001)
    writer.submit([WriteJob("a", log, b"2", 0)])
    writer.submit([WriteJob("a", log, b"3", 0)])
    gate.set()
    assert writer.close(5)
    assert [len(results) for results in passes] == [1, 2]
    assert log.events == [b"1", "sync", b"2", b"3", "sync", "sync"]


def test_the_thread_outlives_a_deliver_without_event_loop() -> None:
    def deliver(results: list[WriteResult]) -> None:
        raise RuntimeError("Event loop is closed")

    log = MemoryLog()
    writer = LogWriter(deliver)
    writer.submit([WriteJob("a", log, b"1", 0)])
    assert writer.close(5)
    assert log.events == [b"1", "sync"]
