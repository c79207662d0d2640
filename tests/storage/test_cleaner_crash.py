# SPDX-License-Identifier: Apache-2.0
"""The machine stops, or the disk fails, at every step of a pass. The last values survive in every case."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.storage.cleaner import CleaningRules
from kcoord.storage.errors import StorageError
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import Keep, MemoryFileSystem, Operation, keep_everything, keep_nothing, no_fault
from kcoord_protocol.control_records import ControlRecordType
from kcoord_protocol.record_batch import Compression
from tests.storage.cleaning import Writer, clean, committed_state, offsets_left, records, state
from tests.storage.support import DIRECTORY, MachineCrash, crash_at, open_log

LATE_MS = 10**6
HALF_DONE = (".cleaned", ".swap", ".deleted")
FIRST_PASS = CleaningRules(delete_retention_ms=100)


def keep_half(kind: str, path: str, pending: int) -> int:
    return 0 if kind == "zeros" else pending // 2


def keep_entries(kind: str, path: str, pending: int) -> int:
    """D-6: names reach the disk before the content of their files."""
    return pending if kind == "entries" else 0


KEEPS: list[Keep] = [keep_nothing, keep_everything, keep_half, keep_entries]


def prepared() -> tuple[MemoryFileSystem, Log]:
    """Returns a log with an active segment and three closed ones, which cleaning merges. The last becomes empty."""
    file_system = MemoryFileSystem()
    writer = Writer(file_system, index_interval_bytes=50)
    writer.put(("a", "1"), ("b", "1"), ("gone", "1"))
    writer.put(("c", "1"))
    writer.roll()
    writer.put(("a", "2"), ("gone", None))
    writer.put(("b", "2"))
    writer.roll()
    writer.put(("c", "2"))
    writer.put(("d", "1"))
    writer.put(("gone", None))
    writer.roll()
    writer.put(("d", "2"))
    writer.log.flush()
    clean(writer.log, file_system, now_ms=0, rules=FIRST_PASS)
    for number in range(2):
        writer.put(("a", f"3{number}"), ("gone", None))
        writer.roll()
    writer.put(("c", "3"))
    writer.log.flush()
    return file_system, writer.log


def steps_of_a_pass() -> int:
    file_system, log = prepared()
    count = 0

    def fault(operation: Operation) -> None:
        nonlocal count
        count += operation.kind != "read_at"

    file_system.fault = fault
    clean(log, file_system, now_ms=LATE_MS)
    return count


STEPS = steps_of_a_pass()


def after_crash(file_system: MemoryFileSystem, keep: Keep, recovery_point: int) -> Log:
    file_system.fault = no_fault
    file_system.crash(keep)
    return open_log(file_system, recovery_point=recovery_point)


@pytest.mark.parametrize("keep", KEEPS, ids=lambda keep: keep.__name__)
def test_d6_d7_a_crash_at_every_step_loses_and_resurrects_nothing(keep: Keep) -> None:
    """D-6, D-7."""
    file_system, log = prepared()
    expected, end_offset = state(records(log)), log.end_offset
    all_offsets = set(offsets_left(log))
    clean(log, file_system, now_ms=LATE_MS)
    survivors = set(offsets_left(log))
    assert survivors < all_offsets
    outcomes = set()
    for step in range(STEPS):
        file_system, log = prepared()
        recovery_point = log.flushed_offset
        file_system.fault = crash_at(step)
        with pytest.raises(MachineCrash):
            clean(log, file_system, now_ms=LATE_MS)
        log = after_crash(file_system, keep, recovery_point)
        left = offsets_left(log)
        assert left == sorted(set(left)), f"step {step}: duplicates"
        assert survivors <= set(left) <= all_offsets, f"step {step}"
        assert state(records(log)) == expected, f"step {step}"
        assert log.end_offset == end_offset, f"step {step}"
        assert not [name for name in file_system.list_dir(DIRECTORY) if name.endswith(HALF_DONE)]
        outcomes.add(len(log.segments))
        clean(log, file_system, now_ms=LATE_MS)
        assert set(offsets_left(log)) == survivors, f"step {step}: the next pass finishes the work"
    assert len(outcomes) == 2, "some crashes leave the old segments, others the new one"


def test_d7_a_crash_during_the_recovery_of_a_crash() -> None:
    file_system, log = prepared()
    expected = state(records(log))
    for step in range(0, STEPS, 3):
        for second_step in range(6):
            file_system, log = prepared()
            recovery_point = log.flushed_offset
            file_system.fault = crash_at(step)
            with pytest.raises(MachineCrash):
                clean(log, file_system, now_ms=LATE_MS)
            file_system.fault = no_fault
            file_system.crash(keep_everything)
            file_system.fault = crash_at(second_step)
            with suppress(MachineCrash):
                open_log(file_system, recovery_point=recovery_point)
            assert state(records(after_crash(file_system, keep_nothing, recovery_point))) == expected


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "for good"])
def test_d4_d14_an_error_at_every_step_leaves_a_log_that_works_or_has_failed(code: int, is_lasting: bool) -> None:
    """D-4, D-14: after the error the log continues with its old segments, or its owner opens it again."""
    for step in range(STEPS):
        file_system, log = prepared()
        expected = state(records(log))
        file_system.fault = error_at(step, code, is_lasting)
        with suppress(OSError, StorageError):
            clean(log, file_system, now_ms=LATE_MS)
        file_system.fault = no_fault
        if log.failure is not None:
            recovery = log.reopening()
            log.abandon()
            log = open_log(file_system, recovery_point=recovery.recovery_point, rewrite=recovery.rewrite)
        assert state(records(log)) == expected, f"step {step}"
        end_offset = log.end_offset
        writer = Writer.__new__(Writer)
        writer.log = log
        writer.put(("e", "1"))
        log.flush()
        log = after_crash(file_system, keep_nothing, log.flushed_offset)
        assert log.end_offset == end_offset + 1
        assert state(records(log)) == expected | {b"e": (b"1", end_offset, end_offset)}, f"step {step}"


def error_at(step: int, code: int, is_lasting: bool) -> Callable[[Operation], BaseException | None]:
    seen = 0

    def fault(operation: Operation) -> BaseException | None:
        nonlocal seen
        if operation.kind == "read_at":
            return None
        seen += 1
        is_hit = seen > step if is_lasting else seen == step + 1
        return OSError(code, "planted", operation.path) if is_hit else None

    return fault


KEYS = st.sampled_from(["a", "b", "c", "d"])
PUT = st.tuples(
    st.just("put"),
    st.lists(st.tuples(KEYS, st.one_of(st.none(), st.sampled_from(["x", "y" * 40]))), min_size=1, max_size=4),
    st.sampled_from([Compression.NONE, Compression.NONE, Compression.GZIP]),
    st.sampled_from([-1, -1, 1, 2]),
)
ACTION = st.one_of(
    PUT,
    st.tuples(st.just("end"), st.sampled_from([1, 2]), st.sampled_from(list(ControlRecordType)[:2])),
    st.tuples(st.just("roll")),
    st.tuples(st.just("clean"), st.integers(0, 3000), st.sampled_from([400, 1 << 20])),
    st.tuples(st.just("restart")),
    st.tuples(st.just("crash"), st.integers(0, 60), st.sampled_from(KEEPS)),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(ACTION, max_size=25))
def test_any_history_of_writing_cleaning_and_crashing_keeps_the_last_values(actions: list[tuple[object, ...]]) -> None:
    """A read_committed reader sees the same state before and after every pass."""
    model = _Model()
    for action in actions:
        model.apply(action)


class _Model:
    """A log, a clock, and the open transactions."""

    def __init__(self) -> None:
        self.file_system = MemoryFileSystem()
        self.writer = Writer(self.file_system, segment_bytes=600, index_interval_bytes=80)
        self.now_ms = 0
        self.dirty = 0
        self.opened: dict[int, int] = {}

    def apply(self, action: tuple[object, ...]) -> None:
        match action:
            case ("put", list(pairs), Compression() as codec, int(producer_id)):
                base = self.writer.log.end_offset
                is_transactional = producer_id >= 0
                self.writer.put(
                    *pairs, compression=codec, producer_id=producer_id, is_transactional=is_transactional, sequence=0
                )
                if is_transactional:
                    self.opened.setdefault(producer_id, base)
            case ("end", int(producer_id), ControlRecordType() as kind):
                self.writer.end(producer_id, kind)
                self.opened.pop(producer_id, None)
            case ("roll",):
                self.writer.roll()
            case ("clean", int(later_ms), int(map_bytes)):
                self.now_ms += later_ms
                self._clean(map_bytes)
            case ("restart",):
                self.writer.log.close()
                self._reopen(self.writer.log.end_offset)
            case ("crash", int(step), keep):
                self._crash(step, keep)  # type: ignore[arg-type]

    def _clean(self, map_bytes: int) -> None:
        log = self.writer.log
        expected = committed_state(log)
        stable = min(self.opened.values(), default=log.end_offset)
        result = clean(
            log,
            self.file_system,
            first_dirty_offset=self.dirty,
            now_ms=self.now_ms,
            stable_offset=stable,
            max_map_bytes=map_bytes,
        )
        self.dirty = result.next_dirty_offset
        assert committed_state(log) == expected

    def _crash(self, step: int, keep: Keep) -> None:
        log = self.writer.log
        log.flush()
        expected, recovery_point = committed_state(log), log.flushed_offset
        self.file_system.fault = crash_at(step)
        with suppress(MachineCrash):
            stable = min(self.opened.values(), default=log.end_offset)
            clean(log, self.file_system, first_dirty_offset=self.dirty, now_ms=self.now_ms, stable_offset=stable)
        self.file_system.fault = no_fault
        self.file_system.crash(keep)
        self._reopen(recovery_point)
        assert committed_state(self.writer.log) == expected

    def _reopen(self, recovery_point: int) -> None:
        self.writer.log = open_log(self.file_system, self.writer.log.config, recovery_point=recovery_point)
        assert self.writer.log.end_offset == recovery_point or recovery_point == 0
