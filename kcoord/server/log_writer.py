# SPDX-License-Identifier: Apache-2.0
"""Writes batches of the coordinator and metadata logs to disk, away from the event loop.

One dedicated thread takes everything that is waiting, writes it, and syncs each touched log once: the logs of many
shards share one pass. Logs are synced side by side by a few threads, because a file system makes syncs that wait at the
same time durable together. The owner keeps one write in flight per log, so batches of one log never reorder. Nothing a
caller does can stop the thread but `close`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from kcoord.metrics.measures import WriteMeasures

_logger = logging.getLogger(__name__)


class WritableLog(Protocol):
    """The part of `storage.log.Log` that is used here."""

    def append(self, data: bytes, *, now_ms: int) -> object: ...

    def flush(self) -> None: ...


@dataclass(slots=True)
class WriteJob:
    """One append: `key` names the log to whoever asked, `data` is whole batches whose offsets are final."""

    key: Hashable
    log: WritableLog
    data: bytes
    now_ms: int


@dataclass(slots=True)
class WriteResult:
    """How a job ended; `error` None means that the bytes are as durable as the flush policy promises."""

    key: Hashable
    error: OSError | None
    size_bytes: int = 0


Flushed: TypeAlias = "tuple[OSError | None, float]"
"""How the flush of one log ended, and how many milliseconds it took."""

FlushAll: TypeAlias = Callable[[list[WriteJob]], "list[Flushed]"]

SYNC_THREADS: Final = 8
"""Measured with ext4 and 50 logs: one after the other takes 6 to 20 times as long, 16 threads are no better."""


def flush_each(jobs: list[WriteJob]) -> list[Flushed]:
    """One log after the other."""
    return [_flush(job) for job in jobs]


def write(jobs: list[WriteJob], measures: WriteMeasures | None = None) -> list[WriteResult]:
    """Writes all jobs, as far as the page cache: the kernel writes it to the disk in its own time."""
    results = []
    for job in jobs:
        began = time.perf_counter()
        results.append(WriteResult(job.key, _append(job), len(job.data)))
        if measures is not None:
            measures.append.add((time.perf_counter() - began) * 1000)
    return results


def write_durably(
    jobs: list[WriteJob], measures: WriteMeasures | None = None, *, flush_all: FlushAll = flush_each
) -> list[WriteResult]:
    """Writes all jobs, then makes each log durable. A log with a failed write is not synced: its owner reloads it."""
    results = write(jobs, measures)
    written = [number for number, result in enumerate(results) if result.error is None]
    flushed = flush_all([jobs[number] for number in written])
    for number, (error, milliseconds) in zip(written, flushed, strict=True):
        results[number].error = error
        if measures is not None:
            measures.flush.add(milliseconds)
    return results


class SideBySide:
    """Flushes several logs at a time; its threads start when they are first needed."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def flush(self, jobs: list[WriteJob]) -> list[Flushed]:
        count = min(len(jobs), SYNC_THREADS)
        if count < 2:
            return flush_each(jobs)
        threads = self._pool()
        shares = [threads.submit(flush_each, jobs[number::count]) for number in range(1, count)]
        flushed: list[Flushed] = [(None, 0.0)] * len(jobs)
        flushed[::count] = flush_each(jobs[::count])
        for number, share in enumerate(shares, 1):
            flushed[number::count] = share.result()
        return flushed

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            # Many brokers never have two logs to sync at once, and every start would pay for the import.
            from concurrent.futures import ThreadPoolExecutor

            self._threads = ThreadPoolExecutor(SYNC_THREADS - 1, thread_name_prefix="kcoord-log-sync")
        return self._threads

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def _append(job: WriteJob) -> OSError | None:
    try:
        job.log.append(job.data, now_ms=job.now_ms)
    except Exception as error:
        return _as_os_error(job, error)
    return None


def _flush(job: WriteJob) -> Flushed:
    began = time.perf_counter()
    error = None
    try:
        job.log.flush()
    except Exception as failure:
        error = _as_os_error(job, failure)
    return error, (time.perf_counter() - began) * 1000


def _as_os_error(job: WriteJob, error: Exception) -> OSError:
    """A defect in the log must fail that log only: the thread has to outlive it, and its reason must be seen."""
    if isinstance(error, OSError):
        _logger.error("Writing to the log of %s failed: %s", job.key, error)
        return error
    _logger.exception("Writing to the log of %s failed", job.key)
    return OSError(f"{type(error).__name__}: {error}")


class LogWriter:
    """The writer thread. `deliver` gets each finished pass; it is called in the thread and must only hand the list
    over.
    """

    def __init__(self, deliver: Callable[[list[WriteResult]], None]) -> None:
        self.measures: WriteMeasures | None = None
        self._deliver = deliver
        self._side_by_side = SideBySide()
        self._queue: SimpleQueue[list[WriteJob] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kcoord-log-writer", daemon=True)
        self._started = False

    def submit(self, jobs: list[WriteJob]) -> None:
        if not self._started:
            self._started = True
            self._thread.start()
        self._queue.put(jobs)

    def close(self, timeout_seconds: float) -> bool:
        """Ends the thread after what is queued; True when it ended in time."""
        if not self._started:
            return True
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        closing = False
        while not closing:
            jobs, closing = self._take()
            if jobs:
                self._finish(write_durably(jobs, self.measures, flush_all=self._side_by_side.flush))
        self._side_by_side.close()

    def _take(self) -> tuple[list[WriteJob], bool]:
        """Waits for work, then takes all that is there, so that one pass serves everything that arrived during the
        last.
        """
        first = self._queue.get()
        if first is None:
            return [], True
        jobs = list(first)
        while not self._queue.empty():
            more = self._queue.get()
            if more is None:
                return jobs, True
            jobs.extend(more)
        return jobs, False

    def _finish(self, results: list[WriteResult]) -> None:
        try:
            self._deliver(results)
        except RuntimeError as error:
            # The event loop is closed: there is nobody left to answer, and the bytes are on disk.
            _logger.warning("A finished write found no event loop: %s", error)
