# SPDX-License-Identifier: Apache-2.0
"""A log begins a new segment before the old one is durable. No crash and no failed sync loses or confuses a batch."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kcoord.storage import log as log_module
from kcoord.storage import log_loader
from kcoord.storage.errors import CorruptLogError, LogFailedError
from kcoord.storage.file_system import RealFileSystem, read_file
from kcoord.storage.log import Log
from kcoord.storage.log_loader import LogLoader
from kcoord.storage.memory_file_system import (
    Keep,
    MemoryFileSystem,
    Operation,
    keep_everything,
    keep_nothing,
    no_fault,
)
from kcoord.storage.recovery import Recovery
from kcoord.storage.rolled import UNSYNCED_SUFFIX, LaterSyncs, RolledSegment, mark_path
from kcoord.storage.segment import LogConfig, Segment
from tests.storage.cleaning import clean, offsets_left
from tests.storage.support import (
    DIRECTORY,
    NOW_MS,
    Later,
    MachineCrash,
    batch,
    content,
    crash_at,
    new_config,
    open_log,
    runs_through,
)

DATA = [batch(number, value_size=10 + number % 7, timestamp_ms=100 + number) for number in range(18)]
IO_ERROR = OSError(errno.EIO, "medium")


def config() -> LogConfig:
    return new_config(segment_bytes=250, index_interval_bytes=50)


def _number(path: str) -> int:
    name = path.rpartition("/")[2]
    return int(name[:20]) if name[:20].isdigit() else 0


KEEPS: dict[str, Keep | None] = {
    "the page cache": None,
    "nothing": keep_nothing,
    "everything": keep_everything,
    "half": lambda kind, path, pending: pending // 2,
    "all but one": lambda kind, path, pending: 0 if kind == "zeros" else pending - 1,
    "entries": lambda kind, path, pending: pending if kind == "entries" else 0,
    "zeros": lambda kind, path, pending: {"entries": pending, "bytes": 1}.get(kind, pending),
    "new files": lambda kind, path, pending: pending if kind == "entries" or _number(path) >= 8 else 0,
    "every third file": lambda kind, path, pending: pending if kind == "entries" or _number(path) % 3 else pending // 2,
    "all but the indexes": lambda kind, path, pending: pending if kind == "entries" or path.endswith(".log") else 0,
}


def keep_bytes(kind: str, path: str, pending: int) -> int:
    """Keeps all bytes, and no changes of folders."""
    return pending if kind == "bytes" else 0


def marks(fs: MemoryFileSystem) -> list[int]:
    return [_number(name) for name in fs.list_dir(DIRECTORY) if name.endswith(UNSYNCED_SUFFIX)]


class Script:
    """Appends DATA, and syncs closed segments now and then. Notes what was durable when the machine stops."""

    def __init__(self, fs: MemoryFileSystem) -> None:
        self.fs = fs
        self.later = Later()
        self.appended = 0
        self.durable = 0
        self.recovery_point = 0

    def run(self) -> None:
        log = self.later.open(self.fs, config())
        for number, data in enumerate(DATA):
            self.appended += 1
            log.append(data, now_ms=NOW_MS)
            if number in (4, 9, 10, 16):
                self.later.run()
            if number == 12:
                log.flush()
            self.durable = max(self.durable, log.flushed_offset)
            if number in (6, 13):
                self.recovery_point = log.flushed_offset
        log.close()
        self.durable = self.recovery_point = self.appended

    def check(self, context: object) -> None:
        log = open_log(self.fs, config(), recovery_point=self.recovery_point)
        survivors = content(log)
        assert survivors == DATA[: len(survivors)], context
        assert self.durable <= len(survivors) <= self.appended, context
        assert marks(self.fs) == [], context
        for offset, data in enumerate(survivors):
            assert log.read(offset, 1) == data, context
        # Batches that survived a crash have to survive the next ones, too.
        self.durable = self.appended = self.recovery_point = len(survivors)

    def go_on(self, context: object) -> None:
        """The log is used again with other batches, and no file of before comes back."""
        log = self.later.open(self.fs, config(), Recovery(self.recovery_point))
        other = [batch(offset, value_size=20, leader_epoch=1) for offset in range(log.end_offset, len(DATA) + 4)]
        for data in other:
            log.append(data, now_ms=NOW_MS)
        log.flush()
        self.fs.crash(keep_nothing)
        survivors = content(open_log(self.fs, config(), recovery_point=self.recovery_point))
        assert survivors == [*DATA[: len(DATA) + 4 - len(other)], *other], context


def crash(fs: MemoryFileSystem, keep: Keep | None) -> None:
    if keep is not None:
        fs.crash(keep)


def crashes(keeps: dict[str, Keep | None]) -> Iterator[tuple[Script, object]]:
    """Yields the script after a crash at every step, for every share of the unsynced bytes that survives.

    None: only the process ends, so the page cache survives.
    """
    for name, keep in keeps.items():
        for step in count():
            fs = MemoryFileSystem()
            script = Script(fs)
            fs.fault = crash_at(step)
            finished = runs_through(script.run)
            fs.fault = no_fault
            crash(fs, keep)
            yield script, (name, step)
            if finished:
                break


@pytest.mark.parametrize("keep", KEEPS)
def test_d5_a_crash_at_every_step_between_a_roll_and_its_sync(keep: str) -> None:
    steps = 0
    for script, context in crashes({keep: KEEPS[keep]}):
        script.check(context)
        script.fs.crash()
        script.check((context, "again"))
        script.go_on(context)
        steps += 1
    assert steps > 80


@pytest.mark.parametrize("keep", ["nothing", "half", "entries", "new files"])
def test_d5_a_crash_at_every_step_of_the_recovery_of_such_a_crash(keep: str) -> None:
    for first in range(20, 90, 11):
        for step in count():
            fs = MemoryFileSystem()
            script = Script(fs)
            fs.fault = crash_at(first)
            with pytest.raises(MachineCrash):
                script.run()
            fs.fault = no_fault
            crash(fs, KEEPS["every third file"])
            fs.fault = crash_at(step)
            finished = runs_through(open_log, fs, config(), recovery_point=script.recovery_point)
            fs.fault = no_fault
            crash(fs, KEEPS[keep])
            script.check((keep, first, step))
            script.go_on((keep, first, step))
            if finished:
                break


# -- planted faults: each one must be noticed --------------------------------------------------------------------------


def _no_marks(patch: pytest.MonkeyPatch) -> None:
    """Recovery trusts all segments but the last."""
    patch.setattr(log_loader, "marks_in", lambda names: set())


def _no_drop(patch: pytest.MonkeyPatch) -> None:
    """Recovery keeps the segments after one that lost its end."""
    patch.setattr(LogLoader, "_drop_after", lambda self, number: None)


def _only_damage(patch: pytest.MonkeyPatch) -> None:
    """Recovery does not notice a tail that is missing at a batch boundary."""
    real = LogLoader._drop_after

    def drop(self: LogLoader, number: int) -> None:
        if any(cut.file == self.segments[number].log_path for cut in self.report.cuts):
            real(self, number)

    patch.setattr(LogLoader, "_drop_after", drop)


def _survivors_not_synced(patch: pytest.MonkeyPatch) -> None:
    """Recovery takes the marks away from segments that only the page cache has."""
    patch.setattr(LogLoader, "_make_durable", lambda self, segment: None)


def _flush_of_the_last(patch: pytest.MonkeyPatch) -> None:
    """A flush syncs the last segment only."""

    def forget(rolled: tuple[RolledSegment, ...]) -> None:
        for segment in rolled:
            segment.is_durable = segment.has_indexes = True

    patch.setattr(log_module, "sync_all", forget)


def _settled_early(patch: pytest.MonkeyPatch) -> None:
    """The flushed offset moves before the sync."""
    real = Log._roll_unsynced

    def roll(self: Log, old: Segment, later: LaterSyncs, now_ms: int) -> None:
        real(self, old, later, now_ms)
        self._flushed_offset = self.end_offset

    patch.setattr(Log, "_roll_unsynced", roll)


def _marked_late(patch: pytest.MonkeyPatch) -> None:
    """The mark is made after the segment."""
    real = Log._new_segment

    def new_segment(self: Log, base_offset: int, now_ms: int) -> Segment:
        mark = mark_path(self.directory, base_offset)
        if not self._fs.exists(mark):
            return real(self, base_offset, now_ms)
        self._fs.remove(mark)
        segment = real(self, base_offset, now_ms)
        self._fs.open_append(mark).close()
        return segment

    patch.setattr(Log, "_new_segment", new_segment)


def _unmarked_early(patch: pytest.MonkeyPatch) -> None:
    """The mark is removed before the sync."""
    real = RolledSegment.sync

    def sync(self: RolledSegment) -> None:
        mark = mark_path(DIRECTORY, self.end_offset)
        if self._fs.exists(mark):
            self._fs.remove(mark)
        real(self)

    patch.setattr(RolledSegment, "sync", sync)


def _no_recovery_of_old_segments(patch: pytest.MonkeyPatch) -> None:
    """Recovery looks at the last segment only."""
    real = LogLoader._recover
    patch.setattr(LogLoader, "_recover", lambda self, point: real(self, max(point, self.segments[-1].base_offset)))


PLANTED: list[Callable[[pytest.MonkeyPatch], None]] = [
    _no_marks,
    _no_drop,
    _only_damage,
    _survivors_not_synced,
    _flush_of_the_last,
    _settled_early,
    _marked_late,
    _unmarked_early,
    _no_recovery_of_old_segments,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_fault_is_noticed(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: Any) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, CorruptLogError)):
        for script, context in crashes(KEEPS):
            script.check(context)
            script.fs.crash()
            script.check((context, "again"))
            script.go_on(context)


# -- single properties -------------------------------------------------------------------------------------------------


def rolled(fs: MemoryFileSystem, later: Later) -> Log:
    """Returns a log with four segments, of which none is synced."""
    log = later.open(fs, config())
    for data in DATA[:8]:
        log.append(data, now_ms=NOW_MS)
    assert [segment.base_offset for segment in log.segments] == [0, 3, 5, 7]
    return log


def test_a_roll_waits_for_nothing() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    kinds = set()

    def note(operation: Operation) -> None:
        kinds.add(operation.kind)

    fs.fault = note
    log.roll(NOW_MS)
    assert kinds == {"create"}
    assert (log.flushed_offset, log.settled_offset, marks(fs)) == (0, 0, [3, 5, 7, 8])
    assert content(log) == DATA[:8]
    later.run()
    assert (log.flushed_offset, log.settled_offset, marks(fs)) == (8, 8, [])
    fs.crash()
    assert content(open_log(fs, config(), recovery_point=8)) == DATA[:8]


def test_the_flushed_offset_follows_segment_by_segment() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    outcomes: list[int] = []
    while later.jobs:
        work, done = later.jobs.pop(0)
        work()
        assert log.flushed_offset == (outcomes[-1] if outcomes else 0)
        assert done is not None
        done()
        outcomes.append(log.flushed_offset)
    assert outcomes == [3, 5, 7]
    assert [segment.is_unsynced for segment in log.segments] == [False, False, False, True]


def test_every_segment_has_its_indexes_when_it_is_settled() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    synced_at_once = open_log(other := MemoryFileSystem(), config())
    for data in DATA[:8]:
        synced_at_once.append(data, now_ms=NOW_MS)
    later.run()
    for segment in log.segments[:-1]:
        for suffix in (".log", ".index", ".timeindex"):
            assert read_file(fs, segment.path + suffix) == read_file(other, segment.path + suffix)


@pytest.mark.parametrize("how", ["flush", "close"])
def test_flush_and_close_sync_what_the_other_thread_has_not_synced(how: str) -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    getattr(log, how)()
    assert (log.flushed_offset, marks(fs)) == (8, [])
    fs.crash()
    later.run()
    assert content(open_log(fs, config(), recovery_point=8, clean=how == "close")) == DATA[:8]


def test_d3_a_failed_sync_of_a_closed_segment_fails_the_log() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    fs.fault = lambda operation: IO_ERROR if (operation.kind, _number(operation.path)) == ("datasync", 3) else None
    later.run()
    fs.fault = no_fault
    assert (log.failure, log.flushed_offset) == (IO_ERROR, 3)
    with pytest.raises(LogFailedError):
        log.append(DATA[8], now_ms=NOW_MS)
    with pytest.raises(LogFailedError):
        log.flush()
    log.abandon()
    again = later.open(fs, config(), log.reopening())
    assert content(again) == DATA[:8]
    fs.crash()
    assert content(open_log(fs, config(), recovery_point=8)) == DATA[:8]


def test_d3_a_flush_does_not_repeat_a_failed_sync() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    fs.fault = lambda operation: IO_ERROR if (operation.kind, _number(operation.path)) == ("datasync", 3) else None
    work, _ = later.jobs[-1]
    work()
    fs.fault = no_fault
    with pytest.raises(LogFailedError):
        log.flush()
    assert log.flushed_offset == 3


def test_d8_damage_in_an_unsynced_segment_is_refused_if_sound_batches_follow_it() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    path = log.segments[1].log_path
    fs.crash(keep_everything)
    fs.damage(path, lambda data: data[:30] + b"?" + data[31:])
    with pytest.raises(CorruptLogError, match="but a sound batch with offset 4 follows"):
        open_log(fs, config())


def test_d8_damage_in_a_synced_segment_is_refused() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    later.run()
    fs.crash(keep_everything)
    fs.damage(log.segments[1].log_path, lambda data: data[:-1])
    with pytest.raises(CorruptLogError, match="although later segments exist"):
        open_log(fs, config())


def test_d5_durable_bytes_that_are_missing_before_a_mark_are_refused() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    fs.crash(keep_everything)
    fs.damage(log.segments[1].log_path, lambda data: b"")
    with pytest.raises(CorruptLogError, match="all batches below offset 4 were durable"):
        open_log(fs, config(), recovery_point=4)
    assert len(content(open_log(fs, config(), recovery_point=3))) == 3


def test_removed_segments_do_not_come_back() -> None:
    """The log gets other batches up to the offset where a removed segment began, and the machine stops again."""
    fs, later = MemoryFileSystem(), Later()
    log = later.open(fs, config())
    for number, data in enumerate(DATA[:5]):
        log.append(data, now_ms=NOW_MS)
        if number == 1:
            log.flush()
    assert marks(fs) == [3]
    fs.crash(lambda kind, path, pending: pending if kind == "entries" or path.endswith("3.log") else 0)
    again = open_log(fs, config(), recovery_point=2)
    assert content(again) == DATA[:2]
    other = batch(2, leader_epoch=1)
    again.append(other, now_ms=NOW_MS)
    fs.crash(keep_bytes)
    assert content(open_log(fs, config(), recovery_point=2)) == [*DATA[:2], other]


@pytest.mark.parametrize("clean_stop", [False, True])
def test_a_mark_that_is_left_over_removes_nothing(clean_stop: bool) -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    log.close()
    for offset in (3, 5, 6):
        fs.open_append(mark_path(DIRECTORY, offset))
    again = open_log(fs, config(), recovery_point=8 * clean_stop, clean=clean_stop)
    assert content(again) == DATA[:8]
    assert again.recovery_report.cuts == []
    assert marks(fs) == []


def test_the_report_names_the_segments_that_were_removed() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    fs.crash(lambda kind, path, pending: 5 if path.endswith("3.log") else pending)
    names = [cut.file for cut in open_log(fs, config()).recovery_report.cuts]
    assert names == [log.segments[number].log_path for number in (1, 3, 2)]


def test_an_append_that_leaves_a_gap_syncs_first() -> None:
    """Recovery could not tell a gap between two segments from a lost tail."""
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    log.append(batch(20, value_size=200), now_ms=NOW_MS)
    assert (log.flushed_offset, log.segments[-1].base_offset, marks(fs)) == (8, 20, [])
    fs.crash(keep_everything)
    assert len(content(open_log(fs, config()))) == 9


def test_a_segment_without_batches_is_not_replaced_before_the_sync() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    log.roll(NOW_MS)
    log.append(batch(2**31 + 20), now_ms=NOW_MS)
    fs.crash(keep_everything)
    assert len(content(open_log(fs, config()))) == 9
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    log.roll(NOW_MS)
    log.append(batch(2**31 + 20), now_ms=NOW_MS)
    crash(fs, KEEPS["entries"])
    assert content(open_log(fs, config())) == DATA[:8]


@pytest.mark.parametrize("path_end", [UNSYNCED_SUFFIX, ".log"])
def test_d4_a_full_disk_at_a_roll_leaves_the_log_as_it_was(path_end: str) -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    no_space = OSError(errno.ENOSPC, "no space")

    def is_full(operation: Operation) -> OSError | None:
        return no_space if operation.kind == "create" and operation.path.endswith(path_end) else None

    fs.fault = is_full
    with pytest.raises(OSError, match="no space"):
        log.append(batch(8, value_size=200), now_ms=NOW_MS)
    fs.fault = no_fault
    assert (log.failure, log.end_offset, content(log)) == (None, 8, DATA[:8])
    log.append(DATA[8], now_ms=NOW_MS)
    log.roll(NOW_MS)
    later.run()
    assert (log.flushed_offset, log.failure) == (9, None)
    fs.crash()
    assert content(open_log(fs, config(), recovery_point=9)) == DATA[:9]


@pytest.mark.parametrize("kind", ["create", "write", "datasync"])
@pytest.mark.parametrize("path_end", [".index", ".timeindex"])
def test_d14_a_segment_whose_indexes_cannot_be_written_is_durable_and_settled_later(kind: str, path_end: str) -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    no_space = OSError(errno.ENOSPC, "no space")

    def is_full(operation: Operation) -> OSError | None:
        return no_space if operation.kind == kind and operation.path.endswith(path_end) else None

    fs.fault = is_full
    later.run()
    log.flush()
    assert (log.failure, log.flushed_offset, log.settled_offset, content(log)) == (None, 8, 0, DATA[:8])
    fs.fault = no_fault
    log.append(DATA[8], now_ms=NOW_MS)
    log.roll(NOW_MS)
    later.run()
    assert (log.flushed_offset, log.settled_offset, log.failure, marks(fs)) == (9, 9, None, [])
    fs.crash()
    assert content(open_log(fs, config(), recovery_point=9)) == DATA[:9]


def test_a_roll_waits_for_the_oldest_of_many_unsynced_segments() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = later.open(fs, new_config(segment_bytes=1))
    for data in DATA:
        log.append(data, now_ms=NOW_MS)
    assert len(log.segments) == len(DATA) == log_module.MOST_UNSYNCED + 2
    assert (log.flushed_offset, len(marks(fs))) == (1, log_module.MOST_UNSYNCED)
    fs.fault = lambda operation: IO_ERROR if operation.kind == "datasync" else None
    with pytest.raises(LogFailedError):
        log.append(batch(18), now_ms=NOW_MS)
    assert (log.failure, log.end_offset) == (IO_ERROR, 18)


@pytest.mark.parametrize("delay_ms", [0, 1000])
@pytest.mark.parametrize("keep", [name for name, keep in KEEPS.items() if keep is not None])
def test_a_crash_at_every_step_of_retention_of_unsynced_segments(keep: str, delay_ms: int) -> None:
    for step in count():
        fs, later = MemoryFileSystem(), Later()
        log = rolled(fs, later)
        log.config = new_config(segment_bytes=250, index_interval_bytes=50, file_delete_delay_ms=delay_ms)
        fs.fault = crash_at(step)
        durable = 0

        def retain(log: Log = log, later: Later = later) -> None:
            nonlocal durable
            log.delete_old_segments(lambda segment: segment.base_offset < 5, NOW_MS)
            log.append(DATA[8], now_ms=NOW_MS)
            log.flush()
            durable = 9
            later.run()

        finished = runs_through(retain)
        fs.fault = no_fault
        crash(fs, KEEPS[keep])
        survivors = content(open_log(fs, config()))
        assert survivors in [DATA[first:end] for first in (0, 3, 5, 7) for end in range(10)], (keep, step)
        assert not durable or survivors[-4:] == DATA[5:9], (keep, step)
        assert marks(fs) == []
        if finished:
            break


def test_deleted_segments_are_forgotten() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    synced = []

    def note(operation: Operation) -> None:
        if operation.kind == "datasync":
            synced.append(_number(operation.path))

    log.delete_old_segments(lambda segment: segment.base_offset < 5, NOW_MS)
    assert (marks(fs), log.settled_offset) == ([7], 5)
    fs.fault = note
    later.run()
    assert set(synced) == {5}
    assert (log.flushed_offset, log.settled_offset, log.failure) == (7, 7, None)


def test_only_settled_segments_are_cleaned() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    clean(log, fs)
    assert offsets_left(log) == list(range(8))
    assert not log.begin_replacement(log.segments[:1])
    later.run()
    clean(log, fs)
    assert offsets_left(log) == [6, 7]
    fs.crash(keep_everything)
    assert offsets_left(open_log(fs, config())) == [6, 7]


def test_an_abandoned_log_touches_no_file_any_more() -> None:
    fs, later = MemoryFileSystem(), Later()
    log = rolled(fs, later)
    log.abandon()
    again = open_log(fs, config())
    again.append(DATA[8], now_ms=NOW_MS)
    before = {name: read_file(fs, f"{DIRECTORY}/{name}") for name in fs.list_dir(DIRECTORY)}
    later.run()
    assert {name: read_file(fs, f"{DIRECTORY}/{name}") for name in fs.list_dir(DIRECTORY)} == before
    assert log.flushed_offset == 0


class SlowFileSystem(RealFileSystem):
    """A disk whose syncs of log files take as long as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.began = threading.Event()

    def open_append(self, path: str) -> Any:
        file = super().open_append(path)
        if path.endswith(".log"):
            sync = file.datasync

            def datasync() -> None:
                self.began.set()
                assert self.goes_on.wait(30)
                sync()

            return _File(file, datasync)
        return file


class _File:
    def __init__(self, file: Any, datasync: Callable[[], None]) -> None:
        self._file = file
        self.datasync = datasync

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_the_log_is_used_while_a_thread_waits_for_the_disk(tmp_path: Path) -> None:
    fs = SlowFileSystem()
    threads: list[threading.Thread] = []
    ended: list[Callable[[], None] | None] = []

    def in_background(work: Callable[[], None], done: Callable[[], None] | None) -> None:
        threads.append(threading.Thread(target=work))
        ended.append(done)
        threads[-1].start()

    log = Log.open(fs, str(tmp_path / "t-0"), config(), 0)
    log.later_syncs = LaterSyncs(in_background, threading.Lock)
    for data in DATA:
        log.append(data, now_ms=0)
    assert fs.began.wait(30)
    assert content(log) == DATA
    log.delete_old_segments(lambda segment: segment.base_offset < 3, 0)
    assert (log.flushed_offset, log.start_offset) == (0, 3)
    fs.goes_on.set()
    log.close()
    for thread in threads:
        thread.join()
    for done in ended:
        assert done is not None
        done()
    assert (log.flushed_offset, log.failure) == (len(DATA), None)
    assert content(Log.open(RealFileSystem(), str(tmp_path / "t-0"), config(), 0)) == DATA[3:]
