# SPDX-License-Identifier: Apache-2.0
"""Appends, reads, retention and lookups of a log, without faults."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kcoord.storage.errors import InvalidAppendError, OffsetOutOfRangeError, StorageError
from kcoord.storage.file_system import RealFileSystem, read_file
from kcoord.storage.log import AppendInfo, Log
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord_protocol.record_batch import Record, TimestampType, encode_batch, iter_headers
from tests.storage.support import (
    DIRECTORY,
    INDEX_FILE,
    LOG_FILE,
    NOW_MS,
    TIME_INDEX_FILE,
    batch,
    batches,
    content,
    filled_log,
    new_config,
    open_log,
)


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


# -- append ------------------------------------------------------------------------------------------------------------


def test_an_append_returns_the_place_of_its_batches(fs: MemoryFileSystem) -> None:
    log = open_log(fs)
    assert (log.start_offset, log.end_offset, log.size_bytes) == (0, 0, 0)
    info = log.append(batch(0, 3, timestamp_ms=50) + batch(3, 2, timestamp_ms=10), now_ms=NOW_MS)
    assert info == AppendInfo(segment_base_offset=0, position=0, rolled=False)
    second = log.append(memoryview(batch(5)), now_ms=NOW_MS)
    assert second.position == len(batch(0, 3) + batch(3, 2))
    assert (log.end_offset, log.flushed_offset) == (6, 0)
    log.flush()
    assert log.flushed_offset == 6
    assert log.size_bytes == second.position + len(batch(5)) == fs.size(LOG_FILE)


def test_the_first_timestamp_of_a_segment_is_that_of_its_first_batch(fs: MemoryFileSystem) -> None:
    log = open_log(fs)
    (segment,) = log.segments
    assert segment.first_timestamp() is None, "the segment is empty"
    log.append(batch(0, 3, timestamp_ms=50) + batch(3, 2, timestamp_ms=10), now_ms=NOW_MS)
    assert segment.first_timestamp() == 52


@pytest.mark.parametrize(
    "data",
    [
        b"",
        batch(5)[:-1],
        batch(5)[:30],
        batch(5) + b"x",
        batch(4),
        batch(5, 3) + batch(7),
        batch(5)[:16] + b"\1" + batch(5)[17:],
        batch(5)[:23] + b"\xff" * 4 + batch(5)[27:],
        bytes(100),
    ],
    ids=["empty", "torn", "header", "surplus", "back", "overlap", "magic", "delta", "zeros"],
)
def test_data_that_does_not_continue_the_log_is_not_appended(fs: MemoryFileSystem, data: bytes) -> None:
    log = filled_log(fs, batches(5))
    with pytest.raises(InvalidAppendError):
        log.append(data, now_ms=NOW_MS)
    assert content(log) == batches(5)
    log.append(batch(5), now_ms=NOW_MS)


def test_a_batch_that_the_caller_has_stamped_is_appended_like_any_other(fs: MemoryFileSystem) -> None:
    config = new_config(segment_bytes=1_000)
    read, stamped = open_log(fs, config), open_log(other := MemoryFileSystem(), config)
    for data in [*batches(20, 3), batch(90, 2, timestamp_ms=3)]:
        header = next(iter_headers(data))[1]
        fields = header.base_offset, header.last_offset, header.max_timestamp
        assert stamped.append_batch(data, *fields, now_ms=NOW_MS) == read.append(data, now_ms=NOW_MS)
    assert len(read.segments) > 2
    read.close()
    stamped.close()
    names = fs.list_dir(DIRECTORY)
    assert other.list_dir(DIRECTORY) == names
    for name in names:
        path = f"{DIRECTORY}/{name}"
        assert read_file(other, path) == read_file(fs, path), name


def test_a_stamped_batch_does_not_go_back(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(5))
    with pytest.raises(InvalidAppendError, match="base offset 4, but the log ends at 5"):
        log.append_batch(batch(4), 4, 4, 5, now_ms=NOW_MS)
    assert content(log) == batches(5)
    log.close()
    with pytest.raises(StorageError, match="closed"):
        log.append_batch(batch(5), 5, 5, 5, now_ms=NOW_MS)


def test_a_closed_log_accepts_nothing(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(2))
    log.close()
    log.close()
    old = log.segments[:1]
    deleting = lambda: log.delete_old_segments(lambda segment: False, 0)  # noqa: E731
    for call in (lambda: log.append(batch(2), now_ms=0), log.flush, lambda: log.roll(0), deleting):
        with pytest.raises(StorageError, match="closed"):
            call()
    assert not log.begin_replacement(old)


def test_a_new_log_may_begin_anywhere(fs: MemoryFileSystem) -> None:
    log = open_log(fs, start_offset=42)
    assert (log.start_offset, log.end_offset) == (42, 42)
    log.append(batch(42), now_ms=NOW_MS)
    assert fs.list_dir(DIRECTORY) == [f"{42:020d}.log"]


# -- segments ----------------------------------------------------------------------------------------------------------


def test_roll_by_size(fs: MemoryFileSystem) -> None:
    data = batches(10)
    size = len(data[0])
    log = filled_log(fs, data, new_config(segment_bytes=3 * size))
    assert [segment.base_offset for segment in log.segments] == [0, 3, 6, 9]
    assert [segment.size_bytes for segment in log.segments] == [3 * size, 3 * size, 3 * size, size]
    assert content(log) == data


def test_an_append_stays_in_one_segment(fs: MemoryFileSystem) -> None:
    data = batches(4)
    log = filled_log(fs, data[:1], new_config(segment_bytes=3 * len(data[0])))
    info = log.append(b"".join(data[1:]), now_ms=NOW_MS)
    assert (info.rolled, info.segment_base_offset, info.position) == (True, 1, 0)


def test_roll_by_the_time_of_the_records(fs: MemoryFileSystem) -> None:
    log = open_log(fs, new_config(segment_ms=100))
    for offset, timestamp in enumerate((1000, 1100, 1050, 1101, 1150, 1202)):
        log.append(batch(offset, timestamp_ms=timestamp), now_ms=0)
    assert [segment.base_offset for segment in log.segments] == [0, 3, 5]
    log.close()
    reopened = open_log(fs, new_config(segment_ms=100))
    reopened.append(batch(6, timestamp_ms=1303), now_ms=0)
    assert [segment.base_offset for segment in reopened.segments] == [0, 3, 5, 6]


def test_roll_by_the_clock_if_records_have_no_time(fs: MemoryFileSystem) -> None:
    log = open_log(fs, new_config(segment_ms=100))
    for offset, now_ms in enumerate((NOW_MS, NOW_MS + 100, NOW_MS + 101)):
        log.append(batch(offset, timestamp_ms=-1), now_ms=now_ms)
    assert [segment.base_offset for segment in log.segments] == [0, 2]
    assert log.max_timestamp() is None
    assert log.offset_for_timestamp(0) is None


def test_the_time_zero_is_a_time(fs: MemoryFileSystem) -> None:
    log = open_log(fs, new_config(segment_ms=100))
    for offset, timestamp in enumerate((0, 100, 101)):
        log.append(batch(offset, timestamp_ms=timestamp), now_ms=NOW_MS * 2)
    assert [segment.base_offset for segment in log.segments] == [0, 2]


def test_roll_when_the_index_is_full(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(40), new_config(segment_index_bytes=48, index_interval_bytes=0))
    assert all(segment.size_bytes <= 8 * len(batch(0)) for segment in log.segments)
    assert len(log.segments) > 4
    assert content(log) == batches(40)


def test_roll_before_a_relative_offset_overflows(fs: MemoryFileSystem) -> None:
    log = open_log(fs)
    far = 2**31 - 1
    for offset in (0, far, far + 1, 3 * far):
        log.append(batch(offset), now_ms=NOW_MS)
    assert [segment.base_offset for segment in log.segments] == [0, far + 1, 3 * far]
    assert log.read(far - 5, 1) == batch(far)
    assert log.read(3 * far, 1) == batch(3 * far)


def test_a_jump_of_an_empty_log_leaves_no_empty_segment(fs: MemoryFileSystem) -> None:
    log = open_log(fs)
    log.append(batch(2**31), now_ms=NOW_MS)
    assert [segment.base_offset for segment in log.segments] == [2**31]
    assert fs.list_dir(DIRECTORY) == [f"{2**31:020d}.log"]


def test_roll_on_demand(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(2))
    assert log.roll(NOW_MS)
    assert not log.roll(NOW_MS)
    log.append(batch(2), now_ms=NOW_MS)
    assert [segment.base_offset for segment in log.segments] == [0, 2]
    assert content(log) == [*batches(2), batch(2)]


def test_a_changed_config_takes_effect_with_the_next_append(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(5))
    log.config = new_config(segment_bytes=len(batch(0)))
    log.append(batch(5), now_ms=NOW_MS)
    log.append(batch(6), now_ms=NOW_MS)
    assert [segment.base_offset for segment in log.segments] == [0, 5, 6]


def test_index_files_follow_kafkas_rule(fs: MemoryFileSystem) -> None:
    data = batches(10)
    size = len(data[0])
    filled_log(fs, data, new_config(index_interval_bytes=2 * size)).close()
    # A batch has an entry if more than the interval was written between it and the last entry.
    expected = [(number, number * size) for number in (3, 6, 9)]
    assert read_file(fs, INDEX_FILE) == b"".join(o.to_bytes(4, "big") + p.to_bytes(4, "big") for o, p in expected)
    times = [(100 + number, number) for number in (3, 6, 9)]
    assert read_file(fs, TIME_INDEX_FILE) == b"".join(t.to_bytes(8, "big") + o.to_bytes(4, "big") for t, o in times)


def test_closing_writes_the_largest_timestamp(fs: MemoryFileSystem) -> None:
    filled_log(fs, batches(3), new_config(index_interval_bytes=1 << 20)).close()
    assert read_file(fs, INDEX_FILE) == b""
    assert read_file(fs, TIME_INDEX_FILE) == (102).to_bytes(8, "big") + (2).to_bytes(4, "big")


def test_reopening_many_times_changes_nothing(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(60), new_config(segment_bytes=2000))
    log.close()
    before = {name: read_file(fs, f"{DIRECTORY}/{name}") for name in fs.list_dir(DIRECTORY)}
    for clean in (1, 0, 1, 0):
        log = open_log(fs, new_config(segment_bytes=2000), clean=clean, recovery_point=60 * clean)
        assert content(log) == batches(60)
        log.close()
        assert {name: read_file(fs, f"{DIRECTORY}/{name}") for name in fs.list_dir(DIRECTORY)} == before


# -- read --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0, 100, 300, 1 << 20])
def test_reads_return_whole_batches_from_the_requested_offset(fs: MemoryFileSystem, interval: int) -> None:
    data = batches(30, records=3, value_size=20)
    log = filled_log(fs, data, new_config(segment_bytes=2500, index_interval_bytes=interval))
    bases = [segment.base_offset for segment in log.segments]
    size = len(data[0])
    for offset in range(90):
        segment_end = next((base for base in bases if base > offset), 90)
        for max_bytes in (0, 1, size - 1, size, size + 1, 3 * size, 3 * size + 50, 10**6):
            count = max(1, max_bytes // size)
            first = offset // 3
            expected = data[first : min(first + count, segment_end // 3)]
            assert log.read(offset, max_bytes) == b"".join(expected)


def test_reads_stop_below_max_offset(fs: MemoryFileSystem) -> None:
    data = batches(30)
    log = filled_log(fs, data, new_config(segment_bytes=1000))
    for max_offset in range(31):
        for offset in range(max_offset):
            got = [header.base_offset for _, header in iter_headers(log.read(offset, 10**6, max_offset=max_offset))]
            assert got[0] == offset
            assert got[-1] < max_offset
        assert log.read(max_offset, 10**6, max_offset=max_offset) == b""
    assert log.read(29, 10**6, max_offset=99) == data[29]


def test_a_batch_that_reaches_max_offset_is_left_out(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(3, records=4))
    assert log.read(0, 10**6, max_offset=6) == batch(0, 4, timestamp_ms=100)


def test_a_hard_limit_may_leave_nothing(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(3))
    size = len(batch(0))
    assert log.read(0, size - 1, min_one=False) == b""
    assert log.read(0, size, min_one=False) == batches(3)[0]


def test_reads_outside_the_log(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(5))
    log.advance_start_offset(2)
    assert log.read(5, 100) == b""
    for offset in (-1, 1, 6):
        with pytest.raises(OffsetOutOfRangeError) as caught:
            log.read(offset, 100)
        assert (caught.value.offset, caught.value.start_offset, caught.value.end_offset) == (offset, 2, 5)


def test_reads_skip_to_the_next_segment_after_a_gap(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, [batch(0), batch(3)])
    log.roll(NOW_MS)
    log.append(batch(10), now_ms=NOW_MS)
    assert log.read(4, 100) == batch(10)


def test_large_batches_are_read_whole(fs: MemoryFileSystem) -> None:
    data = [batch(0), batch(1, value_size=2 << 20), batch(2), batch(3, value_size=100_000), batch(4)]
    log = filled_log(fs, data, new_config(segment_bytes=8 << 20))
    assert [log.read(offset, 1) for offset in range(5)] == data
    assert content(log) == data
    assert log.read(0, len(data[0] + data[1])) == data[0] + data[1]


def test_batches_from_any_offset(fs: MemoryFileSystem) -> None:
    data = batches(20, records=2)
    log = filled_log(fs, data, new_config(segment_bytes=700))
    for offset in range(40):
        assert [batch_bytes for _, batch_bytes in log.batches(offset)] == data[offset // 2 :]
    assert list(log.batches(40)) == []


def test_a_concurrent_reader_sees_only_whole_batches(tmp_path: Path) -> None:
    log = Log.open(RealFileSystem(), str(tmp_path / "t-0"), new_config(segment_bytes=20_000), 0)
    count = 3000
    problems: list[str] = []

    def write() -> None:
        for offset in range(count):
            log.append(batch(offset, value_size=offset % 50, timestamp_ms=offset), now_ms=0)
            if offset % 100 == 0:
                log.flush()

    writer = threading.Thread(target=write)
    writer.start()
    offset = 0
    while offset < count and not problems:
        end = log.end_offset
        data = log.read(offset, 2000)
        headers = [header for _, header in iter_headers(data)]
        if offset < end and not headers:
            problems.append(f"nothing at {offset} although the end is {end}")
        for header in headers:
            if header.base_offset != offset:
                problems.append(f"{header.base_offset} instead of {offset}")
            offset = header.next_offset
        if sum(header.size_bytes for header in headers) != len(data):
            problems.append(f"part of a batch behind {offset}")
    writer.join()
    assert problems == []
    log.close()


# -- timestamps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0, 200, 1 << 20])
def test_offset_for_timestamp_finds_the_first_record_at_or_after_it(fs: MemoryFileSystem, interval: int) -> None:
    stamps = [10, 20, 15, 40, 30, 30, 50, 45, 70, 60, 80, 80]
    data = [batch(number, timestamp_ms=stamp, leader_epoch=7) for number, stamp in enumerate(stamps)]
    log = filled_log(fs, data, new_config(segment_bytes=4 * len(data[0]), index_interval_bytes=interval))
    log.close()
    for clean in (0, 1):
        log = open_log(fs, new_config(index_interval_bytes=interval), clean=clean, recovery_point=12 * clean)
        for timestamp in range(-1, 82):
            position = log.offset_for_timestamp(timestamp)
            expected = next((number for number, stamp in enumerate(stamps) if stamp >= timestamp), None)
            assert (position.offset if position else None) == expected, timestamp
            if position is not None:
                assert (position.timestamp, position.leader_epoch) == (stamps[position.offset], 7)
        best = log.max_timestamp()
        assert best is not None
        assert tuple(best) == (80, 10, 7)


def test_offset_for_timestamp_searches_in_batches_and_respects_the_start(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, [batch(0, 5, timestamp_ms=100), batch(5, 5, timestamp_ms=100)])
    position = log.offset_for_timestamp(103)
    assert position is not None
    assert position.offset == 3
    log.advance_start_offset(4)
    position = log.offset_for_timestamp(103)
    assert position is not None
    assert position.offset == 4
    assert log.offset_for_timestamp(105) is None
    best = log.max_timestamp()
    assert best is not None
    assert (best.timestamp, best.offset) == (104, 4)


def test_log_append_time_counts_for_every_record(fs: MemoryFileSystem) -> None:
    records = [Record(b"k", b"v", [], 500, offset) for offset in range(3)]
    log = filled_log(fs, [encode_batch(records, timestamp_type=TimestampType.LOG_APPEND_TIME)])
    position = log.offset_for_timestamp(500)
    assert position is not None
    assert (position.timestamp, position.offset) == (500, 0)


def test_timestamps_of_an_empty_log(fs: MemoryFileSystem) -> None:
    log = open_log(fs)
    assert log.max_timestamp() is None
    assert log.offset_for_timestamp(0) is None


# -- removing ----------------------------------------------------------------------------------------------------------


def test_moving_the_start_hides_records_and_then_deletes_segments(fs: MemoryFileSystem) -> None:
    data = batches(20)
    log = filled_log(fs, data, new_config(segment_bytes=4 * len(data[0])))
    assert log.advance_start_offset(9) == 9
    assert log.advance_start_offset(3) == 9
    with pytest.raises(OffsetOutOfRangeError):
        log.advance_start_offset(21)
    assert content(log) == data[9:]
    assert log.delete_old_segments(lambda segment: False, NOW_MS) == 2
    assert [segment.base_offset for segment in log.segments] == [8, 12, 16]
    assert not fs.exists(LOG_FILE)
    assert log.start_offset == 9
    assert content(log) == data[9:]


def test_retention_deletes_the_oldest_segments_and_stops_at_the_first_that_stays(fs: MemoryFileSystem) -> None:
    data = batches(20)
    log = filled_log(fs, data, new_config(segment_bytes=4 * len(data[0])))
    assert log.delete_old_segments(lambda segment: segment.base_offset in (0, 4, 12), NOW_MS) == 2
    assert (log.start_offset, log.end_offset) == (8, 20)
    assert content(log) == data[8:]


def test_retention_of_everything_leaves_an_empty_segment_at_the_end(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(20), new_config(segment_bytes=700))
    stamps = []

    def is_old(segment: object) -> bool:
        largest = segment.largest_timestamp  # type: ignore[attr-defined]
        stamps.append(largest.timestamp)
        return True

    count = len(log.segments)
    assert log.delete_old_segments(is_old, NOW_MS) == count
    assert stamps == sorted(stamps)
    assert stamps[-1] == 119
    assert (log.start_offset, log.end_offset, log.size_bytes) == (20, 20, 0)
    assert fs.list_dir(DIRECTORY) == [f"{20:020d}.log"]
    assert log.delete_old_segments(lambda segment: True, NOW_MS) == 0
    log.append(batch(20), now_ms=NOW_MS)
    log.close()
    assert content(open_log(fs)) == [batch(20)]


def test_delete_removes_the_folder(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(20), new_config(segment_bytes=700))
    fs.open_append(f"{DIRECTORY}/partition.metadata").write(b"x")
    log.delete()
    assert fs.list_dir("data") == []


# -- files -------------------------------------------------------------------------------------------------------------


def test_an_idle_log_has_few_open_files(tmp_path: Path) -> None:
    fs = RealFileSystem()
    log = Log.open(fs, str(tmp_path / "t-0"), new_config(segment_bytes=700), 0)
    for batch_bytes in batches(100):
        log.append(batch_bytes, now_ms=0)
    log.flush()
    for offset in range(100):
        log.read(offset, 1)
    assert log._files.open_files <= 8
    log.close()
    assert log._files.open_files <= 8
    for name in sorted(path.name for path in (tmp_path / "t-0").iterdir()):
        assert name.endswith((".log", ".index", ".timeindex"))
    reopened = Log.open(fs, str(tmp_path / "t-0"), new_config(), 0)
    assert content(reopened) == batches(100)


def test_bytes_from_an_offset_are_those_of_the_batches_from_there(fs: MemoryFileSystem) -> None:
    data = batches(9, records=2)
    log = filled_log(fs, data, new_config(segment_bytes=3 * len(data[0])))
    assert len(log.segments) == 3
    for offset in range(18):
        assert log.bytes_from(offset) == sum(len(batch_bytes) for _, batch_bytes in log.batches(offset))
    assert log.bytes_from(18) == 0
    assert log.size_bytes == sum(map(len, data))


def test_only_consecutive_closed_segments_are_replaced(fs: MemoryFileSystem) -> None:
    data = batches(9)
    log = filled_log(fs, data, new_config(segment_bytes=3 * len(data[0])))
    first, second, active = log.segments
    for old in ((active,), (second, active), (first, active), (first, second, active)):
        assert not log.begin_replacement(old)
    assert log.begin_replacement((first, second))
    assert not log.begin_replacement((first,)), "one replacement at a time"
