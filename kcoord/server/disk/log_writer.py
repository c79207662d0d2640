# SPDX-License-Identifier: Apache-2.0
"""Writes batches of the coordinator and metadata logs to disk; the event loop never waits for it.

A pass takes everything that was submitted during the last one, so the logs of many shards share one sync, that of the
journal. Mostly all of it is in the page cache already, written by the event loop, and the kernel syncs the journal by
its queue. A thread does what has to wait: a log that is not open, a new segment, a disk that refuses something, and the
syncs of the logs themselves when the journal has grown or is old: those side by side by a few threads, because a file
system makes syncs that wait at the same time durable together. The owner keeps one write in flight per log, so batches
of one log never reorder. Nothing a caller does can stop the thread but `close`.

`KernelSync` is fdatasync through the kernel's queue (Linux AIO), for the event loop: no thread waits for the disk, and
none has to wait for the interpreter when the disk is through. It is called without a library: the one that wraps these
three calls takes 40 ms to import, a sixth of a start.
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

_CALL_NUMBERS: Final = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""io_setup, io_destroy, io_getevents and io_submit."""
_FDSYNC: Final = 3
_TELL_EVENT_FD: Final = 1


class _Request(ctypes.Structure):
    """`struct iocb` of a little-endian machine."""

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
    """One sync at a time. OSError where the kernel has no such queue, or a sandbox forbids it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        numbers = _CALL_NUMBERS.get(platform.machine())
        if sys.platform != "linux" or numbers is None or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, "not known for this machine")
        self._setup, self._destroy, self._get_events, self._submit = numbers
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        self._checked(self._setup, ctypes.c_uint(1), ctypes.byref(self._context))
        self._loop = loop
        self._event = _Event()
        self._event_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._request = _Request(opcode=_FDSYNC, flags=_TELL_EVENT_FD, event_descriptor=self._event_descriptor)
        self._requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._done: Callable[[OSError | None], None] | None = None
        loop.add_reader(self._event_descriptor, self._on_event)

    @property
    def is_busy(self) -> bool:
        return self._done is not None

    def start(self, descriptor: int, done: Callable[[OSError | None], None]) -> None:
        """Syncs what was written to the file until now; `done` is called in the event loop. OSError if it was refused,
        and then it is not.
        """
        assert self._done is None, "one at a time"
        self._request.descriptor = descriptor
        self._checked(self._submit, self._context, ctypes.c_long(1), self._requests)
        self._done = done

    def close(self) -> None:
        """While nothing is under way."""
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


_logger = logging.getLogger(__name__)


class WritableLog(JournaledLog, Protocol):
    """A log that is written to in the event loop or in the thread."""

    def append(self, data: bytes, *, now_ms: int) -> AppendInfo: ...

    def append_at_once(self, data: bytes, *, now_ms: int) -> AppendInfo | None:
        """None, and nothing is done, where that would have to wait for the disk or for another thread."""


@dataclass(slots=True)
class WriteJob:
    """One append: `key` names the log to whoever asked, `data` is whole batches whose offsets are final."""

    key: Hashable
    log: WritableLog
    data: bytes
    now_ms: int
    written: AppendInfo | None = None
    """Where the log has it, up to the page cache."""
    error: OSError | None = None
    """Why writing it failed."""

    def result(self) -> WriteResult:
        """When nothing more is to be done for it."""
        return WriteResult(self.key, self.error, len(self.data))


@dataclass(slots=True)
class WriteResult:
    """How a job ended; `error` None means that the bytes are as durable as the flush policy promises."""

    key: Hashable
    error: OSError | None
    size_bytes: int = 0


SYNC_THREADS: Final = 8
"""Measured with ext4 and 50 logs: one after the other takes 6 to 20 times as long, 16 threads are no better."""
RENEWAL_SECONDS: Final = 20.0
"""The longest time that something is durable by the journal alone, and so not below a recovery point."""


def write(jobs: list[WriteJob], measures: WriteMeasures | None = None) -> list[WriteResult]:
    """Writes all jobs, as far as the page cache: the kernel writes it to the disk in its own time."""
    for job in jobs:
        _write(job, job.log.append, measures)
    return [job.result() for job in jobs]


def write_what_does_not_wait(jobs: list[WriteJob], measures: WriteMeasures | None = None) -> None:
    """In the event loop: saves the writer thread most of its work, for each write of which it would have to wait for
    the interpreter again.
    """
    for job in jobs:
        _write(job, job.log.append_at_once, measures)


def write_durably(
    jobs: list[WriteJob], appends: DurableAppends, measures: WriteMeasures | None = None
) -> list[WriteResult]:
    """Writes what is not written yet, then makes all durable. What is of a log with a failed write is not: its owner
    reloads it.
    """
    for job in jobs:
        if job.written is None and job.error is None:
            _write(job, job.log.append, measures)
    written = [job for job in jobs if job.written is not None]
    began = time.perf_counter()
    errors = appends.settle(_appended(written))
    if measures is not None:
        measures.flush.add((time.perf_counter() - began) * 1000)
    for job, error in zip(written, errors, strict=True):
        if error is not None:
            job.error = _as_os_error(job.key, error)
    return [job.result() for job in jobs]


def _write(job: WriteJob, append: Callable[..., AppendInfo | None], measures: WriteMeasures | None) -> None:
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
    """A defect in the log must fail that log only: the thread has to outlive it, and its reason must be seen."""
    if isinstance(error, OSError):
        _logger.error("Writing to the log of %s failed: %s", key, error)
        return error
    _logger.error("Writing to the log of %s failed", key, exc_info=error)
    return OSError(f"{type(error).__name__}: {error}")


class SideBySide:
    """Flushes several logs at a time; its threads start when they are first needed."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def flush(self, logs: Sequence[JournaledLog]) -> list[Exception | None]:
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
            # Many brokers never have two logs to sync at once, and every start would pay for the import.
            from concurrent.futures import ThreadPoolExecutor

            self._threads = ThreadPoolExecutor(SYNC_THREADS - 1, thread_name_prefix="kcoord-log-sync")
        return self._threads

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)


class Writer(Protocol):
    """Makes writes durable beside the event loop: the server's thread, or the simulation's virtual disk."""

    measures: WriteMeasures | None

    def submit(self, jobs: list[WriteJob]) -> None: ...

    def close(self, timeout_seconds: float) -> bool:
        """Returns True if everything that was submitted is durable."""


NewWriter: TypeAlias = "Callable[[asyncio.AbstractEventLoop, Callable[[list[WriteResult]], None], Journal], Writer]"


class LogWriter:
    """Writes and syncs for one event loop, in which all of it is called. `deliver` gets each finished pass."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[WriteResult]], None], journal: Journal
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
        """Writes them as far as that does not wait, and syncs them in the next pass."""
        write_what_does_not_wait(jobs, self.measures)
        self._waiting += jobs
        if not self._is_busy:
            self._begin_pass()

    def close(self, timeout_seconds: float) -> bool:
        """Ends the thread after what is queued; True when all that was submitted is durable."""
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
        """Takes all that is there, so that one pass serves everything that arrived during the last."""
        jobs, self._waiting = self._waiting, []
        if not jobs and not self._is_old:
            return
        self._is_busy = True
        if self._kernel is None or self._is_old or not self._sync_by_kernel(self._kernel, jobs):
            self._in_thread(jobs)

    def _sync_by_kernel(self, kernel: KernelSync, jobs: list[WriteJob]) -> bool:
        """False where that is not possible: the thread does it then, all over again where something is begun."""
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
                self._finish([job.result() for job in jobs])
            finally:
                self._end_pass()

        try:
            kernel.start(descriptor, done)
        except OSError as error:
            _logger.warning("The kernel syncs nothing by its queue, a thread waits for the disk instead: %s", error)
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

    def _finish(self, results: list[WriteResult]) -> None:
        if results:
            self._deliver(results)

    # The thread.

    def _in_thread(self, jobs: list[WriteJob]) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self._queue.put(partial(self._work, jobs))

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _work(self, jobs: list[WriteJob]) -> None:
        """Makes everything durable, and where it is time for it, renews the journal after the answers."""
        results = write_durably(jobs, self._appends, self.measures) if jobs else []
        self._tell_loop(self._finish, results)
        if self._is_old or self._appends.is_renewal_due:
            self._appends.renew()
            self._is_old = False
        self._tell_loop(self._end_pass)

    def _tell_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError as error:
            # The event loop is closed: there is nobody left to answer, and the bytes are on disk.
            _logger.warning("A finished write found no event loop: %s", error)


def _open_kernel_sync(loop: asyncio.AbstractEventLoop) -> KernelSync | None:
    try:
        return KernelSync(loop)
    except OSError as error:
        _logger.info("A thread waits for the disk, since the kernel does not offer it otherwise: %s", error)
        return None
