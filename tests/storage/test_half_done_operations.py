# SPDX-License-Identifier: Apache-2.0
"""Interrupted file operations, and damage."""

from __future__ import annotations

import errno
from collections.abc import Callable
from copy import deepcopy

import pytest

from kcoord.storage.errors import CorruptLogError, LogFailedError, StorageError
from kcoord.storage.file_system import read_file
from kcoord.storage.index import MAX_RELATIVE_OFFSET
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, ShortWrite, keep_everything, no_fault
from kcoord_protocol.record_batch import encode_batch
from tests.storage.cleaning import Writer, clean, offsets_left
from tests.storage.support import (
    DIRECTORY,
    INDEX_FILE,
    LOG_FILE,
    NOW_MS,
    batch,
    content,
    filled_log,
    new_config,
    open_log,
)
from tests.storage.test_segment_indexes import expected_files, files
from tests.support.batch_corpus import with_crc

CONFIG = new_config(index_interval_bytes=0)


def path(offset: int, suffix: str = ".log") -> str:
    return f"{DIRECTORY}/{offset:020d}{suffix}"


def segmented(count: int) -> MemoryFileSystem:
    """Returns a closed log of segments with two batches each, and an empty segment at its end."""
    fs = MemoryFileSystem()
    log = open_log(fs, CONFIG)
    for offset in range(2 * count):
        log.append(batch(offset), now_ms=NOW_MS)
        if offset % 2:
            log.roll(NOW_MS)
    log.close()
    return fs


# -- the end of a cleaner's replacement --------------------------------------------------------------------------------


def test_a_swap_file_replaces_all_segments_in_its_range() -> None:
    """As Kafka's completeSwapOperations. The old indexes and the unfinished new ones are removed."""
    fs = segmented(4)
    fs.open_append(path(2, ".log.swap")).write(batch(3) + batch(4))
    for suffix in (".index.swap", ".timeindex.swap"):
        fs.open_append(path(2, suffix)).write(b"half")
    log = open_log(fs, CONFIG, recovery_point=8)
    assert content(log) == [batch(offset) for offset in (0, 1, 3, 4, 6, 7)]
    gone = [path(4), path(2, ".index"), path(2, ".timeindex"), path(4, ".index"), path(4, ".timeindex")]
    assert sorted(log.recovery_report.removed_files) == sorted(
        [*gone, path(2, ".index.swap"), path(2, ".timeindex.swap")]
    )


def test_the_end_of_a_replacement_is_durable_when_the_log_is_open() -> None:
    fs = segmented(3)
    fs.open_append(path(0, ".log.swap")).write(batch(1) + batch(2))
    file = fs.open_append(path(0, ".log.swap"))
    file.datasync()
    fs.sync_dir(DIRECTORY)
    open_log(fs, CONFIG, recovery_point=6, clean=True)
    fs.crash()
    names = [name for name in fs.list_dir(DIRECTORY) if "log" in name]
    assert names == [f"{offset:020d}.log" for offset in (0, 4, 6)]
    assert read_file(fs, LOG_FILE) == batch(1) + batch(2)


def test_an_empty_swap_file_replaces_one_segment() -> None:
    fs = MemoryFileSystem()
    log = open_log(fs, CONFIG)
    for offset in range(3):
        log.append(batch(offset), now_ms=NOW_MS)
        log.roll(NOW_MS)
    log.close()
    fs.open_append(path(0, ".log.swap"))
    assert content(open_log(fs, CONFIG, recovery_point=3, clean=True)) == [batch(1), batch(2)]


def test_stray_index_files_of_a_replacement_are_removed() -> None:
    fs = segmented(1)
    for suffix in (".index.swap", ".timeindex.swap"):
        fs.open_append(path(0, suffix)).write(b"x")
    open_log(fs, CONFIG, recovery_point=2, clean=True)
    assert not [name for name in fs.list_dir(DIRECTORY) if name.endswith(".swap")]


# -- scans, truncation and refused logs --------------------------------------------------------------------------------


@pytest.mark.parametrize(("recovery_point", "batches"), [(0, 6), (1, 5), (2, 4), (3, 3), (4, 2), (6, 0)])
def test_only_batches_above_the_recovery_point_are_scanned(recovery_point: int, batches: int) -> None:
    """The scan begins at the last index entry before it."""
    fs = segmented(3)
    log = open_log(fs, CONFIG, recovery_point=recovery_point)
    assert log.recovery_report.scanned_bytes == 81 * batches
    assert [segment.is_active for segment in log.segments] == [False, False, False, True]


def test_with_a_recovery_point_below_the_first_segment_everything_is_scanned() -> None:
    fs = segmented(3)
    fs.remove(LOG_FILE)
    log = open_log(fs, CONFIG, start_offset=2)
    assert log.recovery_report.scanned_bytes == 81 * 4


@pytest.mark.parametrize("base", [0, 7])
def test_an_offset_too_far_from_the_name_of_its_file_is_refused(base: int) -> None:
    for distance in (MAX_RELATIVE_OFFSET, MAX_RELATIVE_OFFSET + 1):
        fs = MemoryFileSystem()
        filled_log(fs, []).delete()
        fs.make_dirs(DIRECTORY)
        fs.open_append(path(base)).write(batch(base) + batch(base + distance))
        if distance == MAX_RELATIVE_OFFSET:
            assert open_log(fs).end_offset == base + distance + 1
        else:
            with pytest.raises(CorruptLogError, match="too far from the base offset") as raised:
                open_log(fs)
            assert (raised.value.position, raised.value.offset) == (81, base + 1)


def test_a_sound_batch_directly_after_the_damage_is_seen() -> None:
    fs = MemoryFileSystem()
    filled_log(fs, [batch(0)])
    fs.crash(keep_everything)
    fs.open_append(LOG_FILE).write(b"\7" + batch(1))
    with pytest.raises(CorruptLogError, match="offset 1 follows at position 82"):
        open_log(fs)


def test_a_torn_end_is_truncated_durably_although_nothing_else_has_to_be_synced() -> None:
    fs = MemoryFileSystem()
    filled_log(fs, [batch(0), batch(1)])
    file = fs.open_append(LOG_FILE)
    file.write(b"torn")
    file.datasync()
    assert open_log(fs, recovery_point=2).end_offset == 2
    fs.crash()
    assert read_file(fs, LOG_FILE) == batch(0) + batch(1)


def test_the_last_of_several_segments_is_durable_before_it_is_served() -> None:
    fs = MemoryFileSystem()
    log = open_log(fs)
    log.append(batch(0), now_ms=NOW_MS)
    log.roll(NOW_MS)
    log.append(batch(1), now_ms=NOW_MS)
    assert content(open_log(fs, recovery_point=1)) == [batch(0), batch(1)]
    fs.crash()
    assert content(open_log(fs)) == [batch(0), batch(1)]


def test_a_start_offset_after_the_end_removes_the_old_files() -> None:
    fs = segmented(2)
    open_log(fs, CONFIG, start_offset=50)
    assert fs.list_dir(DIRECTORY) == [f"{50:020d}.log"]


# -- errors in the steps of a replacement ------------------------------------------------------------------------------


def two_to_clean(interval_bytes: int = 0) -> tuple[MemoryFileSystem, Log]:
    fs = MemoryFileSystem()
    writer = Writer(fs, index_interval_bytes=interval_bytes)
    for _ in range(2):
        writer.put(("a", "1"))
        writer.put(("b", "1"))
        writer.roll()
    writer.put(("c", "1"))
    writer.log.flush()
    return fs, writer.log


def failing(kind: str, suffix: str = "", number: int | None = None) -> Callable[[Operation], BaseException | None]:
    """Returns a fault of operations of a kind on files with the suffix: of all, or only of the one with the number."""
    count = 0

    def fault(operation: Operation) -> BaseException | None:
        nonlocal count
        if operation.kind != kind or not operation.path.endswith(suffix):
            return None
        count += 1
        return OSError(errno.EIO, "planted") if number in (None, count) else None

    return fault


@pytest.mark.parametrize(
    ("kind", "suffix", "number", "has_failed"),
    [
        ("rename", ".timeindex.cleaned", None, False),
        ("rename", ".log.cleaned", None, False),
        ("sync_dir", "", 1, False),
        ("sync_dir", "", 2, False),
        ("rename", f"{0:020d}.log", None, True),
        ("rename", f"{2:020d}.timeindex", None, True),
        ("sync_dir", "", 3, True),
        ("rename", ".timeindex.swap", None, True),
        ("rename", ".log.swap", None, True),
        ("sync_dir", "", 4, True),
        ("remove", ".deleted", None, False),
    ],
    ids=[
        "announce, first",
        "announce, last",
        "prepare, sync",
        "announce, sync",
        "publish, first",
        "publish, last",
        "publish, sync",
        "settle, first",
        "settle, last",
        "settle, sync",
        "remove",
    ],
)
def test_an_error_undoes_a_replacement_or_fails_the_log(
    kind: str, suffix: str, number: int | None, has_failed: bool
) -> None:
    """Before `publish` the old segments stay in place. After it the log has to be opened again."""
    fs, log = two_to_clean()
    fs.fault = failing(kind, suffix, number)
    with pytest.raises(OSError, match="planted"):
        clean(log, fs)
    fs.fault = no_fault
    assert (log.failure is not None) == has_failed
    if has_failed:
        with pytest.raises(LogFailedError):
            log.append(batch(5), now_ms=NOW_MS)
        log.close()
        log = open_log(fs)
    assert offsets_left(log)[-3:] == [2, 3, 4]
    clean(log, fs)
    assert offsets_left(log) == [2, 3, 4]
    assert not [name for name in fs.list_dir(DIRECTORY) if name.endswith((".cleaned", ".swap", ".deleted"))]
    # No segments are reserved any more.
    assert log.delete_old_segments(lambda segment: segment.base_offset < 4, NOW_MS) > 0


def test_an_undo_leaves_no_swap_file_and_lets_segments_be_deleted() -> None:
    fs, log = two_to_clean()
    fs.fault = failing("sync_dir", number=2)
    with pytest.raises(OSError, match="planted"):
        clean(log, fs)
    fs.fault = no_fault
    assert not [name for name in fs.list_dir(DIRECTORY) if name.endswith((".cleaned", ".swap"))]
    assert log.delete_old_segments(lambda segment: segment.base_offset < 2, NOW_MS) == 1


def test_after_an_error_before_the_announcement_segments_may_be_deleted() -> None:
    fs, log = two_to_clean()
    fs.fault = failing("rename", ".index.cleaned")
    with pytest.raises(OSError, match="planted"):
        clean(log, fs)
    fs.fault = no_fault
    assert log.delete_old_segments(lambda segment: segment.base_offset < 2, NOW_MS) == 1


def test_a_replacement_that_cannot_even_be_undone_fails_the_log() -> None:
    """A remaining .swap file would replace the old segments at the next start."""
    fs, log = two_to_clean()
    sync_fails, remove_fails = failing("sync_dir", number=2), failing("remove", ".swap")
    fs.fault = lambda operation: sync_fails(operation) or remove_fails(operation)
    with pytest.raises(OSError, match="planted"):
        clean(log, fs)
    fs.fault = no_fault
    assert log.failure is not None
    log.close()
    assert offsets_left(open_log(fs)) == [2, 3, 4]


def test_readers_of_replaced_segments_continue_with_their_own_indexes() -> None:
    """The new file has other positions. For readers of the old file its index would be damaged, and they rebuild it."""
    fs = MemoryFileSystem()
    writer = Writer(fs, index_interval_bytes=0)
    for number in range(8):
        writer.put(("ab"[number == 3] + str(number % 5), "v" * 7 * number))
    writer.roll()
    log = writer.log
    old = log.segments[0]

    def read(offset: int) -> bytes:
        batches = old.find(offset, 1, None)
        assert batches is not None
        return batches.read()

    before = [read(offset) for offset in range(8)]
    clean(log, fs)
    operations: list[Operation] = []
    fs.fault = operations.append
    assert [read(offset) for offset in range(8)] == before
    assert {operation.kind for operation in operations} == {"read_at"}
    operations.clear()
    assert [log.read(offset, 1)[:8] for offset in (3, 6)] == [offset.to_bytes(8, "big") for offset in (3, 6)]
    assert {operation.path for operation in operations} == {LOG_FILE}, (
        "the files have their final names, and the indexes are in memory"
    )


@pytest.mark.parametrize("interval_bytes", [0, 10**6])
def test_the_new_segment_has_the_indexes_of_its_own_batches(interval_bytes: int) -> None:
    fs, log = two_to_clean(interval_bytes)
    clean(log, fs)
    kept = [data for _, data in log.batches()][:-1]
    assert files(fs) == expected_files(kept, interval_bytes)
    durable = deepcopy(fs)
    durable.crash()
    assert files(durable) == expected_files(kept, interval_bytes)


# -- rules of a log ----------------------------------------------------------------------------------------------------


def test_append_without_sync_does_nothing_if_it_would_wait_for_the_disk() -> None:
    """It would wait for a new segment, or for the name of a file that is not durable yet."""
    fs = MemoryFileSystem()
    log = open_log(fs, new_config(segment_bytes=200))
    assert log.append_without_sync(batch(0), now_ms=NOW_MS) is None, "the folder and the file are new"
    log.append(batch(0), now_ms=NOW_MS)
    assert log.append_without_sync(batch(1), now_ms=NOW_MS) is None
    log.sync_names()
    info = log.append_without_sync(batch(1), now_ms=NOW_MS)
    assert info is not None
    assert log.append_without_sync(batch(2), now_ms=NOW_MS) is None, "the segment is full"
    log.append(batch(2), now_ms=NOW_MS)
    assert log.append_without_sync(batch(3), now_ms=NOW_MS) is None, "the new file has no durable name"
    log.sync_names()
    assert log.append_without_sync(batch(3), now_ms=NOW_MS) is not None
    assert log.end_offset == 4


def test_a_failed_or_closed_log_stores_no_indexes_and_does_not_roll() -> None:
    for end in ("close", "fail"):
        fs = MemoryFileSystem()
        log = filled_log(fs, [batch(offset) for offset in range(5)], CONFIG)
        log.close() if end == "close" else log.fail(OSError("planted"))
        if fs.exists(INDEX_FILE):
            fs.remove(INDEX_FILE)
        operations = fs.operations
        log.store_indexes()
        with pytest.raises(StorageError):
            log.roll(NOW_MS)
        assert fs.operations == operations
    log = open_log(MemoryFileSystem())
    log.close()
    with pytest.raises(StorageError, match="closed"):
        log.roll(NOW_MS)


def test_indexes_are_stored_if_a_batch_of_the_active_segment_is_durable() -> None:
    fs = MemoryFileSystem()
    log = filled_log(fs, [batch(0), batch(1)], CONFIG)
    log.roll(NOW_MS)
    log.append(batch(2), now_ms=NOW_MS)
    log.append(batch(3), now_ms=NOW_MS)
    log.store_indexes()
    assert not fs.exists(path(2, ".index"))
    log.flush()
    log.store_indexes()
    assert read_file(fs, path(2, ".index")) == bytes.fromhex("00000001 00000051")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_jump_far_ahead_begins_a_segment_in_place_of_the_empty_one(closed: int) -> None:
    fs = MemoryFileSystem()
    log = open_log(fs)
    for offset in range(closed):
        log.append(batch(offset), now_ms=NOW_MS)
        log.roll(NOW_MS)
    far = closed + MAX_RELATIVE_OFFSET + 1
    assert log.append(batch(far), now_ms=NOW_MS).rolled
    assert [segment.base_offset for segment in log.segments] == [*range(closed), far]
    assert log.start_offset == (0 if closed else far)
    assert not fs.exists(path(closed))
    assert content(log) == [*map(batch, range(closed)), batch(far)]


def test_an_append_larger_than_a_segment_stays_in_an_empty_one() -> None:
    log = open_log(MemoryFileSystem(), new_config(segment_bytes=10))
    assert not log.append(batch(0), now_ms=NOW_MS).rolled
    assert log.append(batch(1), now_ms=NOW_MS).rolled


def test_an_append_continues_after_a_short_write() -> None:
    fs = MemoryFileSystem(fault=lambda operation: ShortWrite(50) if operation.kind == "write" else None)
    assert content(filled_log(fs, [batch(0, 9), batch(9)])) == [batch(0, 9), batch(9)]


def test_a_segment_is_deleted_if_the_next_one_begins_at_the_log_start() -> None:
    """As Kafka's deleteLogStartOffsetBreachedSegments."""
    fs = segmented(2)
    log = open_log(fs, CONFIG, recovery_point=4, clean=True)
    log.advance_start_offset(1)
    assert log.delete_old_segments(lambda segment: False, NOW_MS) == 0
    log.advance_start_offset(2)
    assert log.delete_old_segments(lambda segment: False, NOW_MS) == 1
    assert log.start_offset == 2


def test_a_new_active_segment_has_a_durable_name_before_the_old_ones_are_deleted() -> None:
    fs = MemoryFileSystem()
    log = filled_log(fs, [batch(0)])
    kinds: list[str] = []
    fs.fault = lambda operation: kinds.append(operation.kind)
    assert log.delete_old_segments(lambda segment: True, NOW_MS) == 1
    assert "sync_dir" in kinds[kinds.index("create") : kinds.index("remove")]


def test_the_age_of_a_segment_counts_from_its_first_batch_after_a_restart_too() -> None:
    """Kafka counts segment.ms from the largest timestamp of the first batch."""
    fs = MemoryFileSystem()
    config = new_config(segment_ms=100)
    log = filled_log(fs, [batch(0, timestamp_ms=1000), batch(1, timestamp_ms=1050)], config)
    log.close()
    for timestamp_ms, is_rolled in ((1100, False), (1101, True)):
        log = open_log(fs, config, recovery_point=log.end_offset, clean=True)
        assert log.append(batch(log.end_offset, timestamp_ms=timestamp_ms), now_ms=NOW_MS).rolled == is_rolled
        log.close()


def test_a_segment_of_one_emptied_batch_has_the_age_of_that_batch() -> None:
    made = with_crc(
        encode_batch([], last_offset=4)[:35] + (77).to_bytes(8, "big") + encode_batch([], last_offset=4)[43:]
    )
    log = filled_log(MemoryFileSystem(), [made])
    assert (log.size_bytes, log.segments[0].first_timestamp()) == (61, 77)


def test_timestamps_of_zero_count_and_negative_ones_do_not() -> None:
    for timestamp_ms, expected in ((0, (0, 0)), (-1, None)):
        log = filled_log(MemoryFileSystem(), [batch(0, timestamp_ms=timestamp_ms)])
        assert log.segments[0].largest_timestamp == expected
