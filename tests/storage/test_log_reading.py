# SPDX-License-Identifier: Apache-2.0
"""Reads and lookups against a plain search of all records, and how much of the files they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.storage.errors import CorruptLogError, OffsetOutOfRangeError
from kcoord.storage.file_cache import FileCache
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, no_fault
from kcoord.storage.recovery import Recovery
from kcoord_protocol.record_batch import Record, decode_header, decode_records, encode_batch
from tests.storage.support import DIRECTORY, LOG_FILE, NOW_MS, batch, filled_log, new_config, open_log

STEPS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([-1, 0, 1, 2, 50, 51]), min_size=1, max_size=3),
        st.sampled_from([0, 0, 0, 3]),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


def written(
    steps: Sequence[tuple[list[int], int, bool]], interval_bytes: int
) -> tuple[Log, list[list[bytes]], MemoryFileSystem]:
    """Returns a log, and the batches of every segment."""
    fs = MemoryFileSystem()
    log = open_log(fs, new_config(index_interval_bytes=interval_bytes))
    segments: list[list[bytes]] = [[]]
    offset = 0
    for number, (timestamps, gap, is_rolled) in enumerate(steps):
        offset += gap
        records = [Record(b"k", b"v" * number, [], at, offset + place) for place, at in enumerate(timestamps)]
        made = encode_batch(records, base_offset=offset, partition_leader_epoch=number)
        log.append(made, now_ms=NOW_MS)
        segments[-1].append(made)
        offset += len(records)
        if is_rolled:
            log.roll(NOW_MS)
            segments.append([])
    return log, segments, fs


def plain_read(segments: list[list[bytes]], offset: int, max_bytes: int, bound: int, *, min_one: bool) -> bytes:
    """Returns the whole batches of one segment that fit, from the one with the offset or the next, below the bound."""
    for data in segments:
        whole: list[bytes] = []
        for made in data:
            header = decode_header(made)
            if header.last_offset >= bound:
                break
            fits = sum(map(len, whole)) + len(made) <= max_bytes or (min_one and not whole)
            if header.last_offset >= offset:
                if not fits:
                    return b"".join(whole)
                whole.append(made)
        if whole:
            return b"".join(whole)
    return b""


@settings(max_examples=100)
@given(STEPS, st.sampled_from([0, 100, 10**6]), st.booleans(), st.data())
def test_reads_and_searches_agree_with_a_plain_search(
    steps: list[tuple[list[int], int, bool]], interval_bytes: int, is_reopened: bool, draw: st.DataObject
) -> None:
    log, segments, fs = written(steps, interval_bytes)
    if is_reopened:
        log.close()
        log = open_log(fs, log.config, recovery_point=log.end_offset, clean=True)
    everything = [made for data in segments for made in data]
    start = log.advance_start_offset(draw.draw(st.integers(0, log.end_offset)))
    records = [
        (record.timestamp_ms, record.offset, number)
        for number, made in enumerate(everything)
        for record in decode_records(made)
    ]
    assert log.end_offset == records[-1][1] + 1
    for timestamp in range(-1, 53):
        later = [place for place in records if place[0] >= timestamp and place[1] >= start]
        assert log.offset_for_timestamp(timestamp) == (later[0] if later else None) or timestamp < 0
    greatest = max(records, key=lambda place: place[0])
    assert log.max_timestamp() == (greatest if greatest[0] >= 0 else None)
    size = len(everything[0])
    for offset in range(start, log.end_offset + 1):
        for max_offset in (None, offset, offset + 1, offset + 4, log.end_offset):
            for max_bytes in (0, size, 2 * size + 3, 10**6):
                for min_one in (True, False):
                    bound = log.end_offset if max_offset is None else max_offset
                    data = log.read(offset, max_bytes, max_offset=max_offset, min_one=min_one)
                    assert data == plain_read(segments, offset, max_bytes, bound, min_one=min_one)
        rest = [made for made in everything if decode_header(made).last_offset >= offset]
        assert [data for _, data in log.batches(offset)] == rest
        assert log.bytes_from(offset) == sum(map(len, rest))


# -- how much is read --------------------------------------------------------------------------------------------------

Readings = list[tuple[str, int]]


def readings(fs: MemoryFileSystem, action: Callable[[], object]) -> Readings:
    """Returns the reads of an action: the files by offset and suffix, with the number of bytes."""
    made: Readings = []

    def note(operation: Operation) -> None:
        if operation.kind == "read_at":
            made.append((operation.path.rpartition("/")[2].lstrip("0") or "0", operation.size))

    fs.fault = note
    action()
    fs.fault = no_fault
    return made


@pytest.fixture
def three() -> tuple[MemoryFileSystem, Log]:
    """Returns a log with segments of 3 batches of 81 bytes, all in the index, and an active segment of 3."""
    fs = MemoryFileSystem()
    log = open_log(fs, new_config(index_interval_bytes=0))
    for offset in range(9):
        log.append(batch(offset, timestamp_ms=100 + offset), now_ms=NOW_MS)
        if offset in (2, 5):
            log.roll(NOW_MS)
    return fs, log


def test_a_fetch_reads_one_window_of_headers_and_its_result(three: tuple[MemoryFileSystem, Log]) -> None:
    """It opens no other segment, needs no bound at the end of the segment, and loads no index that is in memory."""
    fs, log = three
    assert readings(fs, lambda: log.read(0, 10**6)) == [(".log", 243), (".log", 243)]
    assert readings(fs, lambda: log.read(1, 81)) == [(".log", 162), (".log", 81)]
    assert readings(fs, lambda: log.read(1, 162)) == [(".log", 162), (".log", 162)]
    assert readings(fs, lambda: log.read(3, 10**6, max_offset=6)) == [("3.log", 243), ("3.log", 243)]
    assert readings(fs, lambda: log.read(3, 10**6, max_offset=5)) == [("3.log", 81), ("3.log", 162), ("3.log", 162)]
    assert readings(fs, lambda: log.read(6, 10**6, max_offset=9)) == [("6.log", 243), ("6.log", 243)]
    assert readings(fs, lambda: log.read(8, 10**6)) == [("6.log", 81), ("6.log", 81)]
    assert readings(fs, lambda: log.read(9, 10**6)) == []
    assert readings(fs, lambda: log.read(4, 10**6, max_offset=4)) == []


def test_a_search_by_time_reads_from_the_last_entry_before_it(three: tuple[MemoryFileSystem, Log]) -> None:
    fs, log = three
    assert readings(fs, lambda: log.offset_for_timestamp(108)) == [("6.log", 81), ("6.log", 81)]
    assert readings(fs, lambda: log.offset_for_timestamp(200)) == []
    log.advance_start_offset(8)
    assert readings(fs, lambda: log.offset_for_timestamp(107)) == [("6.log", 81), ("6.log", 81)]


def test_a_search_without_entries_reads_headers_and_one_batch() -> None:
    fs = MemoryFileSystem()
    log = filled_log(
        fs, [batch(offset, timestamp_ms=100 + offset) for offset in range(4)], new_config(index_interval_bytes=10**6)
    )
    assert readings(fs, lambda: log.offset_for_timestamp(102)) == [(".log", 4 * 81), (".log", 81)]
    log.advance_start_offset(3)
    assert readings(fs, lambda: log.offset_for_timestamp(101)) == [(".log", 4 * 81), (".log", 81)]


def test_a_fetch_in_a_gap_opens_no_segment_at_its_bound() -> None:
    fs = MemoryFileSystem()
    log = filled_log(fs, [batch(0), batch(5)], new_config(segment_bytes=100))
    assert [segment.base_offset for segment in log.segments] == [0, 5]
    assert {name for name, _ in readings(fs, lambda: log.read(1, 10**6, max_offset=5))} == {".log"}
    assert log.read(1, 10**6) == batch(5)


def test_all_batches_are_read_once(three: tuple[MemoryFileSystem, Log]) -> None:
    fs, log = three
    assert readings(fs, lambda: list(log.batches())) == [(".log", 243), ("3.log", 243), ("6.log", 243)]
    assert readings(fs, lambda: list(log.batches(4))) == [("3.log", 162), ("3.log", 162), ("6.log", 243)]


def test_indexes_of_closed_segments_are_read_once(three: tuple[MemoryFileSystem, Log]) -> None:
    fs, log = three
    log.close()
    log = open_log(fs, log.config, recovery_point=9, clean=True)
    first = readings(fs, lambda: log.read(1, 1))
    assert {name for name, _ in first} == {".log", ".index", ".timeindex"}
    assert {name for name, _ in readings(fs, lambda: log.read(1, 1))} == {".log"}


def test_timestamps_of_closed_segments_stay_in_memory_without_their_indexes(
    three: tuple[MemoryFileSystem, Log],
) -> None:
    """Retention reads them of all segments periodically."""
    fs, log = three
    log.close()
    recovery = Recovery(recovery_point=9, clean=True)
    log = Log.open(fs, DIRECTORY, log.config, NOW_MS, recovery=recovery, files=FileCache(fs, max_indexes=1))

    def times() -> list[int]:
        return [
            segment.largest_timestamp.timestamp
            for segment in log.segments
            if segment.largest_timestamp and segment.first_timestamp() is not None
        ]

    assert times() == [102, 105, 108]
    assert readings(fs, times) == []


def test_a_rolled_segment_keeps_its_indexes_in_the_cache(three: tuple[MemoryFileSystem, Log]) -> None:
    fs, log = three
    log.roll(NOW_MS)
    assert [segment.is_active for segment in log.segments] == [False, False, False, True]
    assert {name for name, _ in readings(fs, lambda: [log.read(offset, 1) for offset in range(9)])} == {
        ".log",
        "3.log",
        "6.log",
    }


def test_a_read_with_a_right_index_writes_nothing(three: tuple[MemoryFileSystem, Log]) -> None:
    fs, log = three
    log.close()
    log = open_log(fs, log.config, recovery_point=9, clean=True)
    kinds: set[str] = set()
    fs.fault = lambda operation: kinds.add(operation.kind)
    for offset in range(9):
        log.read(offset, 10**6)
    assert kinds == {"read_at"}


def test_a_large_fetch_reads_no_header_before_the_index_entry_nearest_to_its_end() -> None:
    fs = MemoryFileSystem()
    data = [batch(offset, value_size=1000) for offset in range(200)]
    log = filled_log(fs, data, new_config(index_interval_bytes=4096))
    max_bytes = 150 * len(data[0]) + 5
    sizes = readings(fs, lambda: log.read(3, max_bytes))
    assert [size for _, size in sizes] == [16 << 10, 16 << 10, 150 * len(data[0])]
    log.roll(NOW_MS)
    assert [size for _, size in readings(fs, lambda: log.read(199, 1))][-1] == len(data[0])


# -- damage below the end of the log, which only reads detect ----------------------------------------------------------


def closed_with(change: Callable[[bytes], bytes], data: list[bytes], interval_bytes: int = 10**6) -> Log:
    """Returns a log whose first segment was changed after an orderly stop."""
    fs = MemoryFileSystem()
    log = filled_log(fs, data, new_config(index_interval_bytes=interval_bytes))
    log.roll(NOW_MS)
    log.close()
    fs.damage(LOG_FILE, change)
    return open_log(fs, log.config, recovery_point=len(data), clean=True)


@pytest.mark.parametrize(("interval_bytes", "last_entry"), [(10**6, 0), (100, 162)])
def test_a_closed_file_without_its_end_is_read_up_to_the_damage(interval_bytes: int, last_entry: int) -> None:
    """This holds as long as its index fits the file."""
    data = [batch(offset) for offset in range(4)]
    for size in range(last_entry + 1, 4 * 81):
        log = closed_with(lambda old, size=size: old[:size], data, interval_bytes)  # type: ignore[misc]
        whole, torn = divmod(size, 81)
        for offset in range(4):
            if offset < whole:
                assert log.read(offset, 81) == data[offset]
            elif torn:
                with pytest.raises(CorruptLogError) as raised:
                    log.read(offset, 81)
                assert raised.value.position == 81 * whole
                reason = "there is no record batch" if torn >= 61 else "the file ends inside a batch"
                assert raised.value.reason == reason or last_entry
            else:
                assert log.read(offset, 81) == b""


@pytest.mark.parametrize("interval_bytes", [0, 10**6])
def test_a_read_of_a_closed_file_fails_at_garbage(interval_bytes: int) -> None:
    data = [batch(offset) for offset in range(4)]
    for number in range(4):
        at = 81 * number

        def garbage(old: bytes, at: int = at) -> bytes:
            return old[: at + 16] + b"\7" + old[at + 17 :]

        log = closed_with(garbage, data, interval_bytes)
        with pytest.raises(CorruptLogError) as raised:
            log.read(number, 81)
        assert raised.value.position == at
        with pytest.raises(CorruptLogError) as raised:
            list(log.batches())
        assert (raised.value.position, raised.value.offset) == (at, number)


@pytest.mark.parametrize("first", [5, 6])
def test_overlapping_segments_are_noticed_if_all_batches_are_read(first: int) -> None:
    fs = MemoryFileSystem()
    filled_log(fs, [batch(0, 3), batch(3, 3)]).close()
    fs.open_append(f"{DIRECTORY}/{5:020d}.log").write(batch(first))
    log = open_log(fs, recovery_point=first + 1, clean=True)
    if first == 6:
        assert len(list(log.batches())) == 3
    else:
        with pytest.raises(CorruptLogError) as raised:
            list(log.batches())
        assert (raised.value.position, raised.value.offset) == (0, 6)


@pytest.mark.parametrize("offset", [1, 7])
def test_the_error_for_an_offset_outside_the_log_has_its_bounds(offset: int) -> None:
    log = filled_log(MemoryFileSystem(), [batch(0, 6)])
    log.advance_start_offset(2)
    with pytest.raises(
        OffsetOutOfRangeError, match=f"^offset {offset} is outside the log, which has the offsets 2 to 6$"
    ):
        log.read(offset, 1)


def test_the_first_of_equal_timestamps_counts() -> None:
    log = filled_log(MemoryFileSystem(), [batch(0, timestamp_ms=7)])
    log.roll(NOW_MS)
    log.append(batch(1, timestamp_ms=7), now_ms=NOW_MS)
    position = log.max_timestamp()
    assert position is not None
    assert position.offset == 0
