# SPDX-License-Identifier: Apache-2.0
"""The machine stops at every step, and any share of the unsynced bytes survives: no acknowledged batch is missing.

Checked after every crash: all flushed batches are there; every batch there was appended, in order and once; the log can
be used again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import count

import pytest

from kcoord.storage.errors import LogFailedError
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import (
    Fault,
    Keep,
    MemoryFileSystem,
    Operation,
    ShortWrite,
    TornWrite,
    keep_everything,
    keep_nothing,
    no_fault,
)
from kcoord.storage.segment import LogConfig
from tests.storage.support import (
    DIRECTORY,
    NOW_MS,
    MachineCrash,
    batch,
    batches,
    content,
    crash_at,
    filled_log,
    new_config,
    open_log,
    runs_through,
)

DATA = [batch(number, value_size=10 + number % 7, timestamp_ms=100 + number) for number in range(24)]


def config() -> LogConfig:
    return new_config(segment_bytes=350, index_interval_bytes=100)


KEEPS: dict[str, Keep] = {
    "nothing": keep_nothing,
    "everything": keep_everything,
    "half": lambda kind, path, pending: pending // 2,
    "all but one": lambda kind, path, pending: 0 if kind == "zeros" else pending - 1,
    "entries": lambda kind, path, pending: pending if kind == "entries" else 0,
    "bytes": lambda kind, path, pending: pending if kind == "bytes" else 0,
    "zeros": lambda kind, path, pending: {"entries": pending, "bytes": 1}.get(kind, pending),
    "logs": lambda kind, path, pending: pending if kind == "entries" or path.endswith(".log") else 0,
    "indexes": lambda kind, path, pending: pending if kind == "entries" or path.endswith("index") else 0,
}


class Script:
    """Appends and flushes DATA, rolls, and writes checkpoints. Notes what was acknowledged when the machine stops."""

    def __init__(self, fs: MemoryFileSystem) -> None:
        self.fs = fs
        self.appended = 0
        self.acknowledged = 0
        self.recovery_point = 0

    def run(self) -> None:
        log = open_log(self.fs, config())
        for number, data in enumerate(DATA):
            self.appended += 1
            log.append(data, now_ms=NOW_MS)
            if number % 3 != 1:
                log.flush()
                self.acknowledged = self.appended
            if number % 10 == 9:
                self.recovery_point = log.checkpoint()
            if number == 15:
                log.roll(NOW_MS)
        log.close()
        self.acknowledged = self.recovery_point = self.appended

    def check(self, context: object) -> None:
        log = open_log(self.fs, config(), recovery_point=self.recovery_point)
        survivors = content(log)
        assert survivors == DATA[: len(survivors)], context
        assert self.acknowledged <= len(survivors) <= self.appended, context
        for offset, data in enumerate(survivors):
            assert log.read(offset, 1) == data, context
        largest = log.max_timestamp()
        assert (largest.timestamp if largest else None) == (99 + len(survivors) if survivors else None), context
        # Batches that survived a crash have to survive the next ones, too.
        self.acknowledged = self.appended = self.recovery_point = len(survivors)


@pytest.mark.parametrize("keep", KEEPS)
def test_d5_a_crash_at_every_step_of_writing(keep: str) -> None:
    for step in count():
        fs = MemoryFileSystem()
        script = Script(fs)
        fs.fault = crash_at(step)
        finished = runs_through(script.run)
        fs.fault = no_fault
        fs.crash(KEEPS[keep])
        script.check((keep, step))
        fs.crash()
        script.check((keep, step, "again"))
        if finished:
            break
    assert step > 100


@pytest.mark.parametrize("keep", ["nothing", "half", "zeros", "indexes"])
def test_a_crash_at_every_step_of_recovery(keep: str) -> None:
    for first in range(3, 120, 13):
        for step in count():
            fs = MemoryFileSystem()
            script = Script(fs)
            fs.fault = crash_at(first)
            with pytest.raises(MachineCrash):
                script.run()
            fs.fault = no_fault
            fs.crash(KEEPS["all but one"])
            fs.fault = crash_at(step)
            finished = runs_through(open_log, fs, config(), recovery_point=script.recovery_point)
            fs.fault = no_fault
            fs.crash(KEEPS[keep])
            script.check((keep, first, step))
            if finished:
                break


def crash_everywhere(prepare: Callable[[MemoryFileSystem], Log], action: Callable[[Log], object]) -> list[list[bytes]]:
    """Returns the contents of the log after a crash at every step of `action`, for every share that may survive."""
    outcomes = []
    for keep in KEEPS.values():
        for step in count():
            fs = MemoryFileSystem()
            log = prepare(fs)
            fs.fault = crash_at(step)
            finished = runs_through(action, log)
            fs.fault = no_fault
            fs.crash(keep)
            outcomes.append(content(open_log(fs, config())))
            if finished:
                break
    return outcomes


def test_a_crash_at_every_step_of_retention() -> None:
    def retain(log: Log) -> None:
        log.delete_old_segments(lambda segment: segment.base_offset < 12, NOW_MS)
        log.flush()

    outcomes = crash_everywhere(lambda fs: filled_log(fs, DATA, config()), retain)
    tail = next(survivors for survivors in outcomes if survivors != DATA and len(survivors) == min(map(len, outcomes)))
    assert len(tail) >= 10
    for survivors in outcomes:
        assert survivors[-len(tail) :] == tail
        assert set(survivors) <= set(DATA)


def test_a_crash_at_every_step_of_deleting_everything() -> None:
    def retain(log: Log) -> None:
        log.delete_old_segments(lambda segment: True, NOW_MS)
        log.flush()
        log.append(batch(len(DATA)), now_ms=NOW_MS)
        log.flush()

    for keep in KEEPS.values():
        for step in count():
            fs = MemoryFileSystem()
            log = filled_log(fs, DATA, config())
            fs.fault = crash_at(step)
            finished = runs_through(retain, log)
            fs.fault = no_fault
            fs.crash(keep)
            # The end offset never falls, so no offset is used twice.
            assert open_log(fs, config(), recovery_point=len(DATA)).end_offset >= len(DATA)
            if finished:
                break


# -- faults without a crash --------------------------------------------------------------------------------------------


def fault_once(kind: str, fault: BaseException | TornWrite | ShortWrite, path_end: str = "") -> Fault:
    left = [fault]

    def hook(operation: Operation) -> BaseException | TornWrite | ShortWrite | None:
        if left and operation.kind == kind and operation.path.endswith(path_end):
            return left.pop()
        return None

    return hook


NO_SPACE = OSError(errno.ENOSPC, "no space")
IO_ERROR = OSError(errno.EIO, "medium")


@pytest.mark.parametrize("taken", [0, 1, 30, 79])
@pytest.mark.parametrize("error", [NO_SPACE, IO_ERROR])
def test_d4_a_failed_write_leaves_the_log_as_it_was(taken: int, error: OSError) -> None:
    data = batches(4)
    fs = MemoryFileSystem()
    log = filled_log(fs, data[:2])
    fs.fault = fault_once("write", TornWrite(taken, error))
    with pytest.raises(OSError, match=error.strerror):
        log.append(data[2], now_ms=NOW_MS)
    assert log.failure is None
    assert (log.end_offset, log.size_bytes) == (2, len(data[0] + data[1]))
    assert fs.size(log.segments[0].log_path) == log.size_bytes
    log.append(data[2], now_ms=NOW_MS)
    log.flush()
    fs.crash()
    assert content(open_log(fs)) == data[:3]


def test_d4_a_short_write_is_continued() -> None:
    data = batches(2)
    fs = MemoryFileSystem()
    log = open_log(fs)
    fs.fault = lambda operation: ShortWrite(7) if operation.kind == "write" else None
    for batch_bytes in data:
        log.append(batch_bytes, now_ms=NOW_MS)
    assert content(log) == data


def test_d4_a_write_that_cannot_be_undone_fails_the_log() -> None:
    data = batches(3)
    fs = MemoryFileSystem()
    log = filled_log(fs, data[:2])
    faults: dict[str, BaseException | TornWrite] = {"write": TornWrite(30, NO_SPACE), "truncate": IO_ERROR}
    fs.fault = lambda operation: faults.get(operation.kind)
    with pytest.raises(LogFailedError, match="could not be undone"):
        log.append(data[2], now_ms=NOW_MS)
    fs.fault = no_fault
    for call in (lambda: log.append(data[2], now_ms=NOW_MS), log.flush, log.checkpoint, lambda: log.roll(NOW_MS)):
        with pytest.raises(LogFailedError, match="the log failed earlier"):
            call()
    assert content(log) == data[:2]
    log.close()
    assert content(open_log(fs)) == data[:2]


def test_d3_a_failed_sync_fails_the_log_until_it_is_opened_again() -> None:
    data = batches(4)
    fs = MemoryFileSystem()
    log = filled_log(fs, data[:2])
    log.append(data[2], now_ms=NOW_MS)
    fs.fault = fault_once("datasync", IO_ERROR)
    with pytest.raises(OSError, match="medium"):
        log.flush()
    assert log.flushed_offset == 2
    with pytest.raises(LogFailedError) as caught:
        log.flush()
    assert isinstance(caught.value, OSError)
    assert isinstance(log.failure, OSError)
    with pytest.raises(LogFailedError):
        log.append(data[3], now_ms=NOW_MS)
    log.close()


def test_d3_after_a_failed_sync_the_reopened_log_has_only_what_is_on_disk() -> None:
    data = batches(4)
    fs = MemoryFileSystem()
    log = filled_log(fs, data[:2])
    log.append(data[2], now_ms=NOW_MS)
    fs.fault = fault_once("datasync", IO_ERROR)
    with pytest.raises(OSError, match="medium"):
        log.flush()
    log.close()
    recovery = log.reopening()
    assert (recovery.recovery_point, recovery.rewrite, recovery.clean) == (2, True, False)
    reopened = Log.open(fs, DIRECTORY, new_config(), NOW_MS, recovery=recovery)
    served = content(reopened)
    reopened.append(data[3], now_ms=NOW_MS)
    reopened.flush()
    fs.crash()
    assert content(open_log(fs))[:-1] == served == data[:3]


def test_d3_a_failed_sync_of_a_folder_fails_the_log() -> None:
    fs = MemoryFileSystem()
    log = open_log(fs)
    log.append(batch(0), now_ms=NOW_MS)
    fs.fault = fault_once("sync_dir", IO_ERROR)
    with pytest.raises(OSError, match="medium"):
        log.flush()
    assert log.failure is not None
    assert log.flushed_offset == 0


@pytest.mark.parametrize("kind", ["create", "write", "datasync"])
@pytest.mark.parametrize("path_end", [".log", ".index", ".timeindex"])
def test_a_fault_while_rolling_loses_nothing(kind: str, path_end: str) -> None:
    fs = MemoryFileSystem()
    log = filled_log(fs, DATA[:4], config())
    log.flush()
    before = log.end_offset
    fs.fault = fault_once(kind, NO_SPACE, path_end)
    try:
        log.roll(NOW_MS)
        log.append(DATA[4], now_ms=NOW_MS)
        log.flush()
        before += 1
    except OSError:
        pass
    fs.fault = no_fault
    if log.failure is None:
        while log.end_offset < 8:
            log.append(DATA[log.end_offset], now_ms=NOW_MS)
        log.flush()
        before = 8
    fs.crash()
    survivors = content(open_log(fs, config()))
    assert survivors == DATA[: len(survivors)]
    assert len(survivors) >= before


def test_without_a_flush_nothing_is_promised() -> None:
    fs = MemoryFileSystem()
    log = filled_log(fs, batches(2))
    log.append(batch(2), now_ms=NOW_MS)
    assert log.flushed_offset == 2
    assert log.segments[-1].is_unsynced
    assert log.checkpoint() == 3
    fs.crash()
    assert content(open_log(fs, recovery_point=3)) == [*batches(2), batch(2)]


@pytest.mark.parametrize("rolls", [False, True])
def test_the_names_of_an_empty_log_are_durable_with_its_first_records(rolls: bool) -> None:
    """The log was opened before, and that ended without a sync: by an error, or with its process."""
    fs = MemoryFileSystem()
    first = open_log(fs)
    kept = []
    if rolls:
        kept.append(batch(0))
        first.append(kept[0], now_ms=NOW_MS)
        first.flush()
        first.roll(NOW_MS)
    log = open_log(fs, recovery_point=len(kept))
    data = batch(len(kept))
    log.append(data, now_ms=NOW_MS)
    log.flush()
    fs.crash(keep_nothing)
    assert content(open_log(fs, recovery_point=len(kept))) == [*kept, data]
