# SPDX-License-Identifier: Apache-2.0
"""The segments of a pass, its rests, the size of its writes, and the files that an abandoned pass leaves."""

from __future__ import annotations

import errno
from collections import Counter

import pytest

from kcoord.storage.cleaner import SLICE_BYTES, CleaningRules, assess, group_segments
from kcoord.storage.index import MAX_RELATIVE_OFFSET
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, no_fault
from kcoord.storage.offset_map import ENTRY_BYTES
from kcoord_protocol.control_records import ControlRecordType
from kcoord_protocol.record_batch import Record, encode_batch
from tests.storage.cleaning import RULES, Writer, clean, offsets_left
from tests.storage.support import DIRECTORY, NOW_MS, batch, content, open_log


def append(log: Log, key: bytes | None, *, timestamp_ms: int = 5, value: bytes = b"v") -> int:
    """Appends a batch of one record. Returns its size."""
    base = log.end_offset
    data = encode_batch([Record(key, value, [], timestamp_ms, base)], base_offset=base)
    log.append(data, now_ms=NOW_MS)
    return len(data)


@pytest.mark.parametrize(
    ("timestamp_ms", "lag_ms", "now_ms", "is_young", "is_overdue"),
    [
        (500, 100, 599, True, False),
        (500, 100, 600, False, False),
        (500, 100, 601, False, True),
        (500, 1, 500, True, False),
        (500, 0, 0, False, False),
        (0, 100, 100, False, False),
        (0, 100, 101, False, True),
        # Without timestamps, the age counts from the creation of the segment. Kafka uses the time of the file.
        (-1, 100, NOW_MS + 99, True, False),
        (-1, 100, NOW_MS + 100, False, False),
        (-1, 100, NOW_MS + 101, False, True),
    ],
)
def test_the_age_of_a_segment(timestamp_ms: int, lag_ms: int, now_ms: int, is_young: bool, is_overdue: bool) -> None:
    log = open_log(MemoryFileSystem())
    size = append(log, b"k", timestamp_ms=timestamp_ms)
    log.roll(NOW_MS)
    assessment = assess(log, 0, CleaningRules(min_compaction_lag_ms=lag_ms), 1, now_ms)
    assert (assessment.end_offset, assessment.cleanable_bytes) == ((0, 0) if is_young else (1, size))
    rules = CleaningRules(max_compaction_lag_ms=lag_ms or 100)
    assert assess(log, 0, rules, 1, now_ms).is_overdue == is_overdue


def test_a_segment_that_cleaning_emptied_is_as_old_as_its_files() -> None:
    file_system = MemoryFileSystem()
    log = open_log(file_system)
    append(log, None)
    log.roll(NOW_MS)
    append(log, b"k")
    log.roll(NOW_MS)
    log.config.segment_bytes = 1
    clean(log, file_system)
    assert [segment.size_bytes > 0 for segment in log.segments] == [False, True, False]
    rules = CleaningRules(max_compaction_lag_ms=10)
    log.segments[1].created_ms = 10**9
    assert not assess(log, 0, rules, 1, NOW_MS + 10).is_overdue
    assert assess(log, 0, rules, 1, NOW_MS + 11).is_overdue


def test_the_dirty_part_begins_at_the_log_start_if_the_log_was_moved_or_truncated() -> None:
    log = open_log(MemoryFileSystem(), start_offset=5)
    for _ in range(3):
        append(log, b"k")
        log.roll(NOW_MS)
    firsts = {dirty: assess(log, dirty, RULES, 8, NOW_MS).first_dirty_offset for dirty in (0, 4, 5, 6, 8, 9, 2**40)}
    assert firsts == {0: 5, 4: 5, 5: 5, 6: 6, 8: 8, 9: 5, 2**40: 5}


def test_a_marker_that_is_not_stable_yet_ends_no_transaction() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"), producer_id=1, sequence=0, is_transactional=True)
    writer.roll()
    marker = writer.end(1, ControlRecordType.ABORT)
    clean(writer.log, file_system, stable_offset=marker)
    assert offsets_left(writer.log) == [0]
    clean(writer.log, file_system, stable_offset=marker + 1)
    assert offsets_left(writer.log) == []


def test_nothing_is_cleaned_at_or_after_the_oldest_open_transaction() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    for producer_id in (1, 2):
        writer.put(("a", "1"), producer_id=producer_id, sequence=0, is_transactional=True)
        writer.put(("a", "2"))
        writer.roll()
    clean(writer.log, file_system)
    assert offsets_left(writer.log) == [0, 1, 2, 3]
    writer.end(1, ControlRecordType.COMMIT)
    clean(writer.log, file_system)
    assert offsets_left(writer.log) == [1, 2, 3]


def test_keys_below_the_dirty_part_need_no_space_in_the_map() -> None:
    """A pass may begin inside a batch, if the map of the last pass was full there."""
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(*((f"a{number}", "v") for number in range(8)), timestamp_ms=1)
    writer.put(("b0", "v"), ("b1", "v"))
    writer.roll()
    room = 8 * (ENTRY_BYTES + 2)
    assert clean(writer.log, file_system, first_dirty_offset=2, max_map_bytes=room).next_dirty_offset == 10
    assert clean(writer.log, file_system, first_dirty_offset=1, max_map_bytes=room).next_dirty_offset == 9


def test_a_pass_ends_after_the_last_key_of_its_map() -> None:
    """The map does not have the later records, so they wait for the next pass."""
    file_system = MemoryFileSystem()
    log = open_log(file_system)
    append(log, b"k")
    log.roll(NOW_MS)
    append(log, None)
    append(log, None)
    log.roll(NOW_MS)
    clean(log, file_system, first_dirty_offset=1)
    assert offsets_left(log) == [0, 1, 2]
    append(log, b"k")
    log.roll(NOW_MS)
    clean(log, file_system, first_dirty_offset=1)
    assert offsets_left(log) == [3]


def group_sizes(log: Log) -> list[int]:
    return [len(group) for group in group_segments(log.segments[:-1], log)]


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ([0, 5, MAX_RELATIVE_OFFSET], [3]),
        ([0, 5, MAX_RELATIVE_OFFSET + 1], [2, 1]),
        ([MAX_RELATIVE_OFFSET, MAX_RELATIVE_OFFSET + 5], [2]),
    ],
)
def test_groups_reach_as_far_as_offsets_relative_to_their_first(offsets: list[int], sizes: list[int]) -> None:
    log = open_log(MemoryFileSystem(), start_offset=offsets[0])
    for offset in offsets:
        log.append(batch(offset), now_ms=NOW_MS)
        log.roll(NOW_MS)
    assert group_sizes(log) == sizes


def test_groups_are_bounded_by_the_larger_of_both_indexes() -> None:
    """Batches of one millisecond have one entry in the time index, and many in the other."""
    writer = Writer(MemoryFileSystem(), index_interval_bytes=0)
    for _ in range(4):
        for number in range(5):
            writer.put((f"key-{number}", "x"), timestamp_ms=7)
        writer.roll()
    entry_bytes = 8 * len(writer.log.segments[0].indexes().offsets)
    for limit, sizes in ((4 * entry_bytes, [4]), (2 * entry_bytes, [2, 2]), (2 * entry_bytes - 1, [1, 1, 1, 1])):
        writer.log.config.segment_index_bytes = limit
        assert group_sizes(writer.log) == sizes


def test_a_merged_segment_is_as_old_as_the_last_of_those_it_replaces() -> None:
    file_system = MemoryFileSystem()
    log = open_log(file_system)
    for now_ms in (1, 2, 3):
        append(log, b"k", timestamp_ms=-1)
        log.roll(NOW_MS + now_ms)
    clean(log, file_system)
    assert [segment.created_ms for segment in log.segments] == [NOW_MS + 2, NOW_MS + 3]


def test_the_largest_timestamp_of_a_segment_is_that_of_its_remaining_records() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("b", "1"), ("a", "1"))
    writer.put(("a", "2"), timestamp_ms=0)
    writer.roll()
    before = writer.log.segments[0].largest_timestamp
    clean(writer.log, file_system)
    assert (before, writer.log.segments[0].largest_timestamp) == ((1, 1), (0, 1))


def large_log(file_system: MemoryFileSystem, count: int) -> Log:
    """Returns a log with batches of exactly one slice. The last supersedes the first."""
    log = open_log(file_system)
    overhead = append(open_log(MemoryFileSystem()), b"0", value=b"v" * 60_000) - 60_000
    for number in range(count + 1):
        assert append(log, b"%d" % (number % count), value=b"v" * (SLICE_BYTES - overhead)) == SLICE_BYTES
    log.roll(NOW_MS)
    return log


def test_a_pass_rests_for_all_bytes_that_it_reads_and_writes() -> None:
    """The cleaner rests after every slice of the map, of the copy and of the writes.

    It rests after every four slices of the search for transactions, which reads only headers.
    """
    file_system = MemoryFileSystem()
    log = large_log(file_system, 8)
    rests: list[int] = []
    clean(log, file_system, pause=rests.append)
    assert offsets_left(log) == list(range(1, 9))
    assert Counter(rests) == {0: 2 + 1 + 1, SLICE_BYTES: 9 + 9 + 8}


def test_a_pass_writes_no_more_than_a_slice_at_a_time() -> None:
    """So a segment need not fit into memory."""
    file_system = MemoryFileSystem()
    log = large_log(file_system, 5)
    sizes: list[int] = []

    def note(operation: Operation) -> None:
        if operation.kind == "write" and operation.path.endswith(".log.cleaned"):
            sizes.append(operation.size)

    file_system.fault = note
    clean(log, file_system)
    assert sizes == [SLICE_BYTES] * 5


def test_small_segments_are_written_together() -> None:
    file_system = MemoryFileSystem()
    log = open_log(file_system)
    total = 0
    for number in range(7):
        total += append(log, b"%d" % number, value=b"v" * 20_000)
        log.roll(NOW_MS)
    sizes: list[int] = []
    rests: list[int] = []

    def note(operation: Operation) -> None:
        if operation.kind == "write" and operation.path.endswith(".log.cleaned"):
            sizes.append(operation.size)

    file_system.fault = note
    clean(log, file_system, pause=rests.append)
    batch_bytes = total // 7
    assert sizes == [4 * batch_bytes, 3 * batch_bytes]
    assert Counter(rests) == {batch_bytes: 14, 4 * batch_bytes: 1}


def test_a_clean_segment_is_not_replaced_by_an_equal_one() -> None:
    file_system = MemoryFileSystem()
    log = open_log(file_system)
    size = append(log, b"k")
    log.roll(NOW_MS)
    kinds: list[str] = []
    file_system.fault = lambda operation: kinds.append(operation.kind)
    result = clean(log, file_system)
    assert "rename" not in kinds
    assert (result.bytes_after, result.segments_after) == (size, 1)


def test_a_pass_on_a_full_disk_leaves_no_files() -> None:
    file_system = MemoryFileSystem()
    log = large_log(file_system, 3)
    before, names = content(log), file_system.list_dir(DIRECTORY)

    def full(operation: Operation) -> BaseException | None:
        is_new = operation.kind == "write" and operation.path.endswith(".cleaned")
        return OSError(errno.ENOSPC, "no space") if is_new else None

    file_system.fault = full
    with pytest.raises(OSError, match="no space"):
        clean(log, file_system)
    file_system.fault = no_fault
    assert file_system.list_dir(DIRECTORY) == names
    assert content(log) == before
    clean(log, file_system)
    assert offsets_left(log) == [1, 2, 3]


def test_a_file_that_vanished_without_a_change_of_the_log_is_an_error() -> None:
    """Retention would also remove the segment from the log."""
    file_system = MemoryFileSystem()
    log = open_log(file_system)
    append(log, b"k")
    log.roll(NOW_MS)
    append(log, b"k")

    def rolled(size: int) -> None:
        log.roll(NOW_MS)
        log.segments[0].close()
        file_system.remove(log.segments[0].log_path)

    log.segments[0].close()
    with pytest.raises(FileNotFoundError):
        clean(log, file_system, pause=rolled)
    with pytest.raises(FileNotFoundError):
        clean(log, file_system)
