# SPDX-License-Identifier: Apache-2.0
"""Makes appends to the coordinator and metadata logs durable; the event loop never waits for the disk.

Theory of operation
-------------------
A `WriteJob` is one append: whole batches of one log, with final offsets. They hold the records of all operations that
the shard has run since its last append. The life of a job:

    submitted -> written    the batches are in the page cache of their log
    written -> journaled    a copy of the batches is in the journal (`kcoord.storage.journal`), in the page cache, too
    journaled -> durable    the journal was synced: `deliver` gets the job without an error
    any -> failed           `deliver` gets the job with the error, and the owner reloads the log

One pass runs at a time. It takes all jobs that were submitted during the last pass, so one sync of the journal
serves the logs of many shards (group commit). Most passes need the event loop alone:

* `submit` appends the batches of a job to its log, unless that has to wait for the disk or for a lock.
* The pass writes the batches of all its jobs to the journal and starts the sync of the journal (`KernelSync`).
* When the kernel reports the end of the sync, the jobs are delivered and the next pass begins.

The writer thread runs every pass that may block, from start to end:

* A log is not open, needs a new segment, or has files whose names are not durable.
* The journal rejected a write, or its sync failed. The thread renews the journal and writes to it again. If that fails,
  each log of the pass is synced instead.
* The journal is to be renewed, because it is large or `RENEWAL_SECONDS` old. All logs with batches that only the
  journal has made durable are synced, several at a time. Then the journal is emptied.
* The kernel has no queue for syncs.

What orders what:

* The owner has at most one job per log in flight, so batches of one log never reorder. Logs have no order between
  them.
* A log's lock keeps its cleaner and its `close` away while a job is written to it.
* An acknowledgement waits for its job. A job without an error is delivered only after a successful sync of the
  journal or of the log. A failed sync never counts as done: the bytes are written or synced once more.
* Jobs are delivered in the event loop, and before a renewal: the syncs of the logs delay no answer of the pass.

A crash of the process leaves everything that reached the page cache. A crash of the machine leaves what the last
successful sync covered, and perhaps more. The next start copies from the journal what the ends of the logs lack, up to
the first damaged frame. Jobs that were not delivered may be in the log or not, also as a part of their batches.

Without a journal (`kcoord.log.flush.policy` other than `fsync`) there is no writer: `write` appends in the event loop,
as far as the page cache.

An exception of one log fails the jobs of that log only. Only `close` ends the thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from kcoord.metrics.measures import WriteMeasures
from kcoord.storage.journal import Appended, DurableAppends, Journal, JournaledLog, flush_each
from kcoord.storage.log import AppendInfo

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_logger = logging.getLogger(__name__)

SYNC_THREADS: Final = 8
"""The number of logs that are synced at a time.

A file system makes concurrent syncs durable together. Measured with ext4 and 50 logs: one sync after the other takes 6
to 20 times as long, and 16 threads are no faster than 8.
"""
RENEWAL_SECONDS: Final = 20.0
"""The time from the first batch that only the journal has made durable to the renewal of the journal.

Until then the batches are not below the recovery point of their log.
"""

_CALL_NUMBERS: Final = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""io_setup, io_destroy, io_getevents and io_submit."""
_FDSYNC: Final = 3
_NOTIFY_EVENT_FD: Final = 1


class WritableLog(JournaledLog, Protocol):
    """A log that the event loop or the writer thread appends to."""

    def append(self, data: bytes, *, now_ms: int) -> AppendInfo: ...

    def append_at_once(self, data: bytes, *, now_ms: int) -> AppendInfo | None:
        """Appends, or returns None and does nothing if the append has to wait for the disk or for another thread."""


@dataclass(slots=True)
class WriteJob:
    """One append of whole batches with final offsets. `key` names the log for the caller.

    The pump calls `end` with the error and the time when the job has finished.
    """

    key: Hashable
    log: WritableLog
    data: bytes
    now_ms: int
    end: Callable[[OSError | None, int], None]
    written: AppendInfo | None = None
    """The place of the batches in the log, once they are in the page cache."""
    error: OSError | None = None
    """Why the append or its sync failed. None in a finished job: it is as durable as the flush policy promises."""


def write_what_does_not_wait(jobs: list[WriteJob], measures: WriteMeasures | None = None) -> None:
    """Appends the jobs that do not have to wait. Runs in the event loop.

    Writing here spares the writer thread one GIL acquisition per write.
    """
    for job in jobs:
        write(job, job.log.append_at_once, measures)


def write_durably(jobs: list[WriteJob], appends: DurableAppends, measures: WriteMeasures | None = None) -> None:
    """Appends the jobs that were not appended yet, then makes all of them durable. Runs in the writer thread.

    Batches of a log whose write failed are not made durable; the owner reloads that log.
    """
    for job in jobs:
        if job.written is None and job.error is None:
            write(job, job.log.append, measures)
    written = [job for job in jobs if job.written is not None]
    began = time.perf_counter()
    errors = appends.settle(_appended(written))
    if measures is not None:
        measures.flush.add((time.perf_counter() - began) * 1000)
    for job, error in zip(written, errors, strict=True):
        if error is not None:
            job.error = _as_os_error(job.key, error)


def write(job: WriteJob, append: Callable[..., AppendInfo | None], measures: WriteMeasures | None) -> None:
    """Appends a job to its log, as far as the page cache. The kernel writes it to the disk when it chooses."""
    began = time.perf_counter()
    try:
        job.written = append(job.data, now_ms=job.now_ms)
    except Exception as error:
        job.error = _as_os_error(job.key, error)
    if measures is not None and job.written is not None:
        measures.append.add((time.perf_counter() - began) * 1000)


def _appended(jobs: list[WriteJob]) -> list[Appended]:
    return [Appended(job.log, job.written, job.data) for job in jobs if job.written is not None]


def _as_os_error(key: Hashable, error: Exception) -> OSError:
    """Logs the error and returns it as an OSError.

    Even a defect in the code of a log must fail that log only, so the thread survives every exception.
    """
    if isinstance(error, OSError):
        _logger.error("Writing to the log of %s failed: %s", key, error)
        return error
    _logger.error("Writing to the log of %s failed", key, exc_info=error)
    return OSError(f"{type(error).__name__}: {error}")


class SideBySide:
    """Flushes several logs at a time. Its threads start when they are first needed."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def flush(self, logs: Sequence[JournaledLog]) -> list[Exception | None]:
        """Returns the error of each log, in the order of `logs`, or None if its flush succeeded."""
        count = min(len(logs), SYNC_THREADS)
        if count < 2:
            return flush_each(logs)
        threads = self._pool()
        shares: list[Future[list[Exception | None]]]
        shares = [threads.submit(flush_each, logs[number::count]) for number in range(1, count)]
        errors: list[Exception | None] = [None] * len(logs)
        errors[::count] = flush_each(logs[::count])
        for number, share in enumerate(shares, 1):
            errors[number::count] = share.result()
        return errors

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            # Many brokers never sync two logs at once, and an import at the top would slow down every start.
            from concurrent.futures import ThreadPoolExecutor

            self._threads = ThreadPoolExecutor(SYNC_THREADS - 1, thread_name_prefix="kcoord-log-sync")
        return self._threads

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)


class Writer(Protocol):
    """Makes writes durable without blocking the event loop: `LogWriter`, or the simulation's virtual disk."""

    measures: WriteMeasures | None

    def submit(self, jobs: list[WriteJob]) -> None:
        """Begins to write the jobs. They are delivered when nothing more is to be done for them."""

    def close(self, timeout_seconds: float) -> bool:
        """Ends the writer; returns True if everything that was submitted is durable."""


NewWriter: TypeAlias = "Callable[[asyncio.AbstractEventLoop, Callable[[list[WriteJob]], None], Journal], Writer]"


class LogWriter:
    """Writes and syncs for one event loop. `deliver` gets the jobs of each finished pass.

    All methods are called in the event loop, except `_run` and `_work`: those run in the writer thread.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[WriteJob]], None], journal: Journal
    ) -> None:
        self.measures: WriteMeasures | None = None
        self._loop = loop
        self._deliver = deliver
        self._journal = journal
        self._side_by_side = SideBySide()
        self._appends = DurableAppends(journal, self._side_by_side.flush)
        self._kernel = _open_kernel_sync(loop) if journal.descriptor is not None else None
        self._waiting: list[WriteJob] = []
        self._is_busy = False
        self._is_old = False
        self._renewal: asyncio.TimerHandle | None = None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kcoord-log-writer", daemon=True)

    def submit(self, jobs: list[WriteJob]) -> None:
        """Appends the jobs that do not have to wait, and leaves all jobs to the next pass."""
        write_what_does_not_wait(jobs, self.measures)
        self._waiting += jobs
        if not self._is_busy:
            self._begin_pass()

    def close(self, timeout_seconds: float) -> bool:
        """Ends the thread after the queued work; returns True if everything that was submitted is durable.

        Returns False if the thread does not end within `timeout_seconds`, or if jobs or a sync are in flight.
        """
        if self._renewal is not None:
            self._renewal.cancel()
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_seconds)
        self._side_by_side.close()
        if self._thread.is_alive() or self._waiting:
            return False
        if self._kernel is None:
            return True
        was_busy = self._kernel.is_busy
        if not was_busy:
            self._kernel.close()
        return not was_busy

    # A pass, in the event loop.

    def _begin_pass(self) -> None:
        """Takes all waiting jobs, so that one pass serves everything that arrived during the last pass."""
        jobs, self._waiting = self._waiting, []
        if not jobs and not self._is_old:
            return
        self._is_busy = True
        if self._kernel is None or self._is_old or not self._sync_by_kernel(self._kernel, jobs):
            self._in_thread(jobs)

    def _sync_by_kernel(self, kernel: KernelSync, jobs: list[WriteJob]) -> bool:
        """Starts a pass without the thread; returns False if that is not possible.

        The thread then runs the pass. It repeats what this method began, for example the write to the journal.
        """
        appended = _appended(jobs)
        descriptor = self._journal.descriptor
        if len(appended) < len(jobs) or descriptor is None or not self._appends.write(appended):
            return False
        began = time.perf_counter()

        def done(error: OSError | None) -> None:
            if error is not None:
                self._journal.tear()
                self._in_thread(jobs)
                return
            if self.measures is not None:
                self.measures.flush.add((time.perf_counter() - began) * 1000)
            self._appends.note(appended)
            try:
                self._finish(jobs)
            finally:
                self._end_pass()

        try:
            kernel.start(descriptor, done)
        except OSError as error:
            _logger.warning(
                "The kernel refused a sync through its queue, a thread waits for the disk instead: %s", error
            )
            self._kernel = None
            return False
        return True

    def _end_pass(self) -> None:
        self._is_busy = False
        if self._renewal is None and self._appends.is_renewal_useful:
            self._renewal = self._loop.call_later(RENEWAL_SECONDS, self._on_old)
        self._begin_pass()

    def _on_old(self) -> None:
        self._renewal = None
        self._is_old = True
        if not self._is_busy:
            self._begin_pass()

    def _finish(self, jobs: list[WriteJob]) -> None:
        if jobs:
            self._deliver(jobs)

    # The thread.

    def _in_thread(self, jobs: list[WriteJob]) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self._queue.put(partial(self._work, jobs))

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _work(self, jobs: list[WriteJob]) -> None:
        """Makes the jobs durable and hands them to the event loop. Then renews the journal if that is due."""
        if jobs:
            write_durably(jobs, self._appends, self.measures)
        self._call_in_loop(self._finish, jobs)
        if self._is_old or self._appends.is_renewal_due:
            self._appends.renew()
            self._is_old = False
        self._call_in_loop(self._end_pass)

    def _call_in_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError as error:
            # No client is left to be answered, and the bytes are on disk.
            _logger.warning("A write finished after its event loop was closed: %s", error)


def _open_kernel_sync(loop: asyncio.AbstractEventLoop) -> KernelSync | None:
    try:
        return KernelSync(loop)
    except OSError as error:
        _logger.info("A thread waits for the disk, because the kernel offers no queue for syncs: %s", error)
        return None


class _Request(ctypes.Structure):
    """`struct iocb` on a little-endian machine."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("descriptor", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_descriptor", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """`struct io_event`."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class KernelSync:
    """Runs fdatasync through the kernel's queue (Linux AIO) for the event loop, one sync at a time.

    No thread waits for the disk, and none has to take the GIL when the disk is done. The system calls are made without
    a library: the library that wraps them takes 40 ms to import, a sixth of a start. Raises OSError if the kernel has
    no such queue, or a sandbox forbids it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        numbers = _CALL_NUMBERS.get(platform.machine())
        if sys.platform != "linux" or numbers is None or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, f"no system call numbers for {sys.platform} on {platform.machine()}")
        self._setup, self._destroy, self._get_events, self._submit = numbers
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        self._checked(self._setup, ctypes.c_uint(1), ctypes.byref(self._context))
        self._loop = loop
        self._event = _Event()
        self._event_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._request = _Request(opcode=_FDSYNC, flags=_NOTIFY_EVENT_FD, event_descriptor=self._event_descriptor)
        self._requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._done: Callable[[OSError | None], None] | None = None
        loop.add_reader(self._event_descriptor, self._on_event)

    @property
    def is_busy(self) -> bool:
        return self._done is not None

    def start(self, descriptor: int, done: Callable[[OSError | None], None]) -> None:
        """Starts a sync of what was written to the file until now. `done` is called in the event loop when it ends.

        Raises OSError if the kernel refuses the sync. Then `done` is not called.
        """
        assert self._done is None, "one sync at a time"
        self._request.descriptor = descriptor
        self._checked(self._submit, self._context, ctypes.c_long(1), self._requests)
        self._done = done

    def close(self) -> None:
        """Frees the queue. May be called only while no sync is in flight."""
        self._loop.remove_reader(self._event_descriptor)
        self._call(self._destroy, self._context)
        os.close(self._event_descriptor)

    def _on_event(self) -> None:
        os.eventfd_read(self._event_descriptor)
        count = self._checked(
            self._get_events, self._context, ctypes.c_long(1), ctypes.c_long(1), ctypes.byref(self._event), None
        )
        done, self._done = self._done, None
        assert count == 1
        assert done is not None
        result = self._event.result
        done(OSError(-result, os.strerror(-result)) if result < 0 else None)

    def _checked(self, number: int, *arguments: object) -> int:
        result = int(self._call(ctypes.c_long(number), *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result
