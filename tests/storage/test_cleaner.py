# SPDX-License-Identifier: Apache-2.0
"""Compaction keeps the last value per key, tombstones for their time, and the last batch of active producers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.storage import cleaner
from kcoord.storage.cleaner import Assessment, CleaningRules, assess, group_segments
from kcoord.storage.cleaning_pass import LastOfProducer
from kcoord.storage.errors import CorruptLogError
from kcoord.storage.file_system import join
from kcoord.storage.index import MAX_RELATIVE_OFFSET, OFFSET_ENTRY_BYTES, TIME_ENTRY_BYTES
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, no_fault
from kcoord.storage.record_filter import iter_raw, read_runs
from kcoord.storage.replacement import ReplacementAbandoned
from kcoord_protocol.control_records import ControlRecordType
from kcoord_protocol.record_batch import (
    Compression,
    Record,
    TimestampType,
    decode_header,
    decode_records,
    encode_batch,
    frame_batch,
    records_of,
)
from tests.storage.cleaning import RULES, Writer, clean, committed_state, offsets_left, raw_records, records, state
from tests.storage.support import DIRECTORY, NOW_MS, batch, content, open_log
from tests.storage.test_record_filter import record as raw_record

ABORT, COMMIT = ControlRecordType.ABORT, ControlRecordType.COMMIT
CODECS = list(Compression)


def names(file_system: MemoryFileSystem) -> list[str]:
    return file_system.list_dir(DIRECTORY)


def reopened(file_system: MemoryFileSystem, log: Log) -> Log:
    log.close()
    return open_log(file_system)


def test_the_last_record_of_every_key_stays_with_offset_time_headers_and_bytes() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"), ("b", "1"), ("c", "1"))
    writer.put(("a", "2"), ("b", "2"))
    writer.roll()
    writer.put(("b", "3"))
    writer.roll()
    log = writer.log
    before = {record.offset: record for record in records(log)}
    result = clean(log, file_system)
    assert offsets_left(log) == [2, 3, 5]
    assert all(record == before[record.offset] for record in records(log))
    assert (result.records_read, result.records_kept, result.next_dirty_offset) == (6, 3, 6)
    assert (result.segments_before, result.segments_after, len(log.segments)) == (2, 1, 2)
    assert log.start_offset == 0
    assert log.end_offset == 6
    assert offsets_left(reopened(file_system, log)) == [2, 3, 5]


def test_a_batch_that_loses_records_keeps_its_offsets_and_its_producer() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"), ("b", "1"), ("c", "1"), producer_id=7, sequence=3)
    writer.put(("a", "2"), ("c", "2"))
    writer.roll()
    clean(writer.log, file_system)
    header, data = next(iter(writer.log.batches()))
    assert (header.base_offset, header.last_offset, header.records_count) == (0, 2, 1)
    assert (header.producer_id, header.base_sequence, header.last_sequence) == (7, 3, 5)
    assert header.max_timestamp == 1
    assert [record.offset for record in decode_records(data)] == [1]


@pytest.mark.parametrize("codec", CODECS, ids=[codec.name for codec in CODECS])
def test_batches_of_every_codec(codec: Compression) -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"), ("b", "1" * 500), ("gone", None), compression=codec)
    writer.put(("a", "2"), compression=codec)
    writer.roll()
    expected = state(records(writer.log))
    clean(writer.log, file_system)
    assert state(records(writer.log)) == expected
    assert offsets_left(writer.log) == [1, 2, 3]
    assert {header.compression for header, _ in writer.log.batches()} == {codec}


def test_log_append_time_survives() -> None:
    file_system = MemoryFileSystem()
    log = open_log(file_system)
    made = [
        Record(b"a", b"1", timestamp_ms=50),
        Record(b"b", b"1", timestamp_ms=60),
        Record(b"a", b"2", timestamp_ms=70),
    ]
    log.append(encode_batch(made, timestamp_type=TimestampType.LOG_APPEND_TIME), now_ms=NOW_MS)
    log.roll(NOW_MS)
    clean(log, file_system)
    assert [(record.offset, record.timestamp_ms) for record in records(log)] == [(1, 70), (2, 70)]


def test_records_without_a_key_are_removed() -> None:
    file_system = MemoryFileSystem()
    log = open_log(file_system)
    log.append(encode_batch([Record(None, b"x", timestamp_ms=1), Record(b"k", b"y", timestamp_ms=1)]), now_ms=NOW_MS)
    log.roll(NOW_MS)
    clean(log, file_system)
    assert offsets_left(log) == [1]


def test_records_with_any_negative_length_are_cleaned() -> None:
    """The broker accepts them, as Kafka's does, so the cleaner must read them. A length of -2 is null, like -1."""
    records_of_producer = [
        raw_record(0, b"a", b"1"),
        raw_record(1, b"a", b"", value_size=lambda _: -2),
        raw_record(2, b"", b"no key", key_size=lambda _: -7),
        raw_record(3, b"b", b"2", tail=b"\2\2h\3"),
    ]
    checked = struct.pack(">hiqqqhii", 0, 3, 5, 5, -1, -1, -1, 4) + b"".join(records_of_producer)
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.log.append(frame_batch(0, 0, checked), now_ms=NOW_MS)
    writer.put(("c", "1"))
    writer.put(("c", "2"))
    writer.roll()
    clean(writer.log, file_system)
    (header, data), *following = writer.log.batches()
    raw = records_of(data, 0, header)
    assert [(record.key, record.has_value) for record in iter_raw(raw, 2)] == [(b"a", False), (b"b", True)]
    assert raw.endswith(records_of_producer[3][3:]), "the rest of the record is not changed"
    assert [record.offset for _, batch_bytes in following for record in decode_records(batch_bytes)] == [5]


def test_a_tombstone_stays_for_its_time_after_the_first_pass() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"), ("b", "1"))
    writer.put(("a", None), ("b", "2"))
    writer.roll()
    log = writer.log
    clean(log, file_system, now_ms=5000)
    header, data = next(iter(log.batches()))
    assert header.delete_horizon_ms == 5000 + RULES.delete_retention_ms
    assert [(record.offset, record.value, record.timestamp_ms) for record in decode_records(data)] == [
        (2, None, 2),
        (3, b"2", 3),
    ]
    assert header.max_timestamp == 3
    clean(log, file_system, now_ms=5999)
    assert offsets_left(log) == [2, 3], "the horizon is fixed by the first pass"
    clean(log, file_system, now_ms=6000)
    assert offsets_left(log) == [3]


def test_a_value_after_a_tombstone_takes_its_place() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", None))
    writer.put(("a", "1"))
    writer.roll()
    clean(writer.log, file_system)
    assert offsets_left(writer.log) == [1]


def test_the_active_segment_is_never_touched() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.put(("a", "2"))
    assert assess(writer.log, 0, RULES, writer.log.end_offset, NOW_MS).cleanable_bytes == 0
    writer.roll()
    writer.put(("a", "3"))
    clean(writer.log, file_system)
    assert offsets_left(writer.log) == [1, 2], "the map has only keys of closed segments"


def test_cleaning_may_remove_all_records_of_a_log() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.roll()
    writer.put(("b", "1"))
    writer.roll()
    writer.put(("a", None), ("b", None))
    writer.roll()
    log = writer.log
    clean(log, file_system, now_ms=0)
    clean(log, file_system, now_ms=10**9)
    assert records(log) == []
    log = reopened(file_system, log)
    assert (log.start_offset, log.end_offset) == (0, 4)
    assert log.read(0, 1000) == b""


def test_segments_are_merged_up_to_their_size() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system, segment_bytes=1 << 20)
    for number in range(12):
        writer.put((f"key-{number}", "x" * 100))
        writer.roll()
    size = writer.log.segments[0].size_bytes
    writer.log.config.segment_bytes = 5 * size
    clean(writer.log, file_system)
    assert [len(content_of) for content_of in _batches_by_segment(writer.log)] == [5, 5, 2, 0]
    assert offsets_left(writer.log) == list(range(12))


def test_segments_are_merged_up_to_the_size_of_their_indexes() -> None:
    writer = Writer(MemoryFileSystem(), index_interval_bytes=0)
    for number in range(4):
        writer.put((f"key-{number}", "x"))
        writer.put((f"other-{number}", "x"))
        writer.roll()
    *closed, _ = writer.log.segments
    entries = [segment.indexes() for segment in closed]
    bytes_of_two = max(
        sum(len(indexes.offsets) for indexes in entries[:2]) * OFFSET_ENTRY_BYTES,
        sum(len(indexes.times) for indexes in entries[:2]) * TIME_ENTRY_BYTES,
    )
    for limit, sizes in ((bytes_of_two, [2, 2]), (bytes_of_two - 1, [1, 1, 1, 1])):
        writer.log.config.segment_index_bytes = limit
        assert [len(group) for group in group_segments(tuple(closed), writer.log)] == sizes


def test_segments_are_merged_within_the_range_of_relative_offsets() -> None:
    for last_offset, sizes in ((MAX_RELATIVE_OFFSET, [2]), (MAX_RELATIVE_OFFSET + 1, [1, 1])):
        log = open_log(MemoryFileSystem())
        for offset in (0, last_offset):
            log.append(batch(offset), now_ms=NOW_MS)
            log.roll(NOW_MS)
        assert [segment.base_offset for segment in log.segments] == [0, 1, last_offset + 1]
        assert [len(group) for group in group_segments(log.segments[:2], log)] == sizes


def test_the_thread_rests_after_every_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pause` gets the number of bytes since the last rest, for the limit of bytes per second."""
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    for number in range(4):
        writer.put((f"key-{number}", "x"))
    size_of_one = writer.log.segments[0].size_bytes // 4
    writer.roll()
    monkeypatch.setattr(cleaner, "SLICE_BYTES", 2 * size_of_one)
    rests: list[int] = []
    clean(writer.log, file_system, pause=rests.append)
    copied = [size for size in rests if size]
    assert copied[-2:] == [2 * size_of_one, 2 * size_of_one]


def _batches_by_segment(log: Log) -> list[list[int]]:
    return [[frame.base_offset for frame in segment.frames()] for segment in log.segments]


def test_a_group_without_records_at_its_end_keeps_its_end_offset() -> None:
    """Recovery finishes a replacement by it: it removes all old segments up to the end offset."""
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.roll()
    writer.put(("b", "1"))
    writer.roll()
    writer.put(("b", "2"), timestamp_ms=NOW_MS * 2)
    writer.log.config.segment_bytes = 2 * writer.log.segments[0].size_bytes
    writer.roll()
    clean(writer.log, file_system)
    headers = [header for header, _ in writer.log.batches()]
    assert [(h.base_offset, h.last_offset, h.records_count) for h in headers] == [(0, 0, 1), (1, 1, 0), (2, 2, 1)]


def test_a_clean_segment_is_not_written_again() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.roll()
    before = file_system.operations
    content_before, names_before = content(writer.log), names(file_system)
    clean(writer.log, file_system)
    assert (content(writer.log), names(file_system)) == (content_before, names_before)
    assert file_system.operations > before


def test_the_map_is_bounded_and_later_passes_continue() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    for round_number in range(2):
        for number in range(20):
            writer.put((f"key-{number:02}", str(round_number)))
        writer.roll()
    log = writer.log
    expected = state(records(log))
    dirty, passes = 0, 0
    while dirty < 40:
        result = clean(log, file_system, first_dirty_offset=dirty, max_map_bytes=1000)
        assert dirty < result.next_dirty_offset <= dirty + 6
        dirty = result.next_dirty_offset
        assert dirty > 20 or result.segments_before == 1, "only segments up to the end of the map are read"
        passes += 1
        assert state(records(log)) == expected
    assert passes > 5
    assert offsets_left(log) == list(range(20, 40))


# -- when a log is due -------------------------------------------------------------------------------------------------


def test_the_dirty_ratio() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    for number in range(4):
        writer.put((f"k{number}", "v"))
        writer.roll()
    assessment = assess(writer.log, 2, RULES, writer.log.end_offset, NOW_MS)
    assert (assessment.first_dirty_offset, assessment.end_offset, assessment.ratio) == (2, 4, 0.5)
    assert not assessment.is_due(RULES)
    assert assessment.is_due(CleaningRules(min_cleanable_dirty_ratio=0.4))
    assert assess(writer.log, 1, RULES, writer.log.end_offset, NOW_MS).is_due(RULES)
    starts = [
        assess(writer.log, dirty, RULES, writer.log.end_offset, NOW_MS).first_dirty_offset for dirty in (4, 5, 99)
    ]
    assert starts == [4, 0, 0]


@pytest.mark.parametrize(
    ("cleanable", "clean", "is_overdue", "is_due"),
    [
        (0, 10, True, False),
        (1, 10, True, True),
        (1, 1, False, False),
        (2, 1, False, True),
        (1, 0, False, True),
        (0, 0, False, False),
    ],
)
def test_a_log_is_due_by_its_dirty_ratio_or_its_age(cleanable: int, clean: int, is_overdue: bool, is_due: bool) -> None:
    assert Assessment(0, 9, clean, cleanable, is_overdue).is_due(CleaningRules(min_cleanable_dirty_ratio=0.5)) is is_due


def test_min_and_max_compaction_lag() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    for timestamp_ms in (1000, 2000, 3000):
        writer.put(("a", "v"), timestamp_ms=timestamp_ms)
        writer.roll()
    log = writer.log
    young = CleaningRules(min_compaction_lag_ms=500)
    assert assess(log, 0, young, 3, 2400).end_offset == 1
    assert assess(log, 0, young, 3, 2500).end_offset == 2
    old = CleaningRules(min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=500)
    assert not assess(log, 2, old, 3, 3500).is_due(old)
    assert assess(log, 2, old, 3, 3501).is_due(old)


def test_nothing_is_cleaned_at_or_after_the_first_open_transaction() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.roll()
    writer.put(("a", "2"), producer_id=1, sequence=0, is_transactional=True)
    writer.roll()
    assert assess(writer.log, 0, RULES, 1, NOW_MS).end_offset == 1
    for stable_offset in (1, 2):
        clean(writer.log, file_system, stable_offset=stable_offset)
        assert offsets_left(writer.log) == [0, 1], "the cleaner also finds open transactions itself"


@pytest.mark.parametrize("producer_id", [-1, -2])
def test_a_transactional_batch_without_a_producer_is_no_open_transaction(producer_id: int) -> None:
    """Kafka 4.3.1 accepts such a batch, and nobody could end its transaction."""
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"), producer_id=producer_id, is_transactional=True)
    writer.put(("a", "2"), ("b", "2"))
    writer.roll()
    clean(writer.log, file_system)
    assert offsets_left(writer.log) == [1, 2]


# -- transactions and producers ----------------------------------------------------------------------------------------


def test_aborted_data_is_removed_and_supersedes_nothing() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "good"))
    writer.put(("a", "bad"), producer_id=1, sequence=0, is_transactional=True)
    writer.put(("b", "good"), producer_id=2, sequence=0, is_transactional=True)
    writer.end(2, COMMIT)
    writer.roll()
    writer.end(1, ABORT)
    log = writer.log
    expected = committed_state(log)
    clean(log, file_system)
    assert offsets_left(log) == [0, 2]
    assert committed_state(log) == expected


def test_markers_stay_until_their_transaction_is_gone_and_their_time_is_over() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"), producer_id=1, sequence=0, is_transactional=True)
    abort_at = writer.end(1, ABORT)
    writer.put(("b", "1"), producer_id=1, sequence=1, is_transactional=True)
    commit_at = writer.end(1, COMMIT)
    writer.roll()
    log = writer.log

    def markers() -> list[int]:
        return [header.base_offset for header, _ in log.batches() if header.is_control and header.records_count]

    assert clean(log, file_system, now_ms=1000).removed_aborts == set()
    assert (markers(), offsets_left(log)) == ([abort_at, commit_at], [2])
    clean(log, file_system, now_ms=2000)
    assert markers() == [abort_at, commit_at], "its data was removed in the last pass, so its time begins"
    result = clean(log, file_system, now_ms=3000)
    assert markers() == [commit_at]
    assert result.removed_aborts == {abort_at}
    writer.put(("b", "2"))
    writer.roll()
    passes = [clean(log, file_system, now_ms=now_ms) for now_ms in (4000, 5000, 6000)]
    assert (markers(), offsets_left(log)) == ([], [4])
    assert [cleaned.removed_aborts for cleaned in passes] == [set()] * 3, "readers look up only aborted transactions"


def test_the_last_batch_of_an_active_producer_stays_without_records() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"), producer_id=5, sequence=0)
    writer.put(("a", "2"), producer_id=5, sequence=1)
    writer.put(("a", "3"))
    writer.roll()
    producers = {5: LastOfProducer(1, 0)}
    clean(writer.log, file_system, producers=producers)
    clean(writer.log, file_system, producers=producers)
    headers = [header for header, _ in writer.log.batches()]
    assert [(header.base_offset, header.records_count) for header in headers] == [(1, 0), (2, 1)]
    assert (headers[0].producer_id, headers[0].last_sequence) == (5, 1)
    clean(writer.log, file_system)
    assert [header.base_offset for header, _ in writer.log.batches()] == [2]


def test_the_last_marker_of_a_producer_without_data_stays() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    marker = writer.end(3, COMMIT)
    writer.put(("a", "1"))
    writer.roll()
    producers = {3: LastOfProducer(None, 0)}
    clean(writer.log, file_system, producers=producers, now_ms=0)
    clean(writer.log, file_system, producers=producers, now_ms=10**6)
    kept = [(header.base_offset, header.records_count) for header, _ in writer.log.batches()]
    assert kept == [(marker, 0), (1, 1)]


# -- around the log ----------------------------------------------------------------------------------------------------


def test_reads_continue_while_segments_are_replaced() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    for number in range(6):
        writer.put(("a", "x" * 2000), (f"b{number}", "y"))
        writer.roll()
    log = writer.log
    old_segments = log.segments
    expected = content(log)
    reader = log.batches()
    seen = [next(reader)[1]]
    clean(log, file_system)
    seen += [data for _, data in reader]
    assert seen == expected
    batches = old_segments[2].find(4, 10_000, None)
    assert batches is not None and batches.read() == expected[2]
    assert log.read(0, 10_000)[:8] == bytes(8)
    record = log.offset_for_timestamp(7)
    assert record is not None
    assert record.offset == 7


def test_indexes_of_the_new_segment_are_right_before_and_after_a_restart() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system, index_interval_bytes=100)
    for number in range(60):
        writer.put((f"key-{number % 40}", "x" * 30))
    writer.roll()
    clean(writer.log, file_system)
    for is_again in (False, True):
        opened = reopened(file_system, writer.log) if is_again else writer.log
        assert len(opened.segments[0].indexes().offsets) > 10
        for offset in range(60):
            data = opened.read(offset, 10)
            if data:
                assert decode_records(data)[0].offset >= offset
        assert opened.read(25, 10)[:8] == (25).to_bytes(8, "big")


def test_a_log_that_is_closed_or_changed_during_a_pass_is_not_replaced() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.put(("a", "2"))
    writer.roll()
    log = writer.log
    with pytest.raises(ReplacementAbandoned):
        clean(log, file_system, pause=lambda size: log.close())
    assert not [name for name in names(file_system) if name.endswith(".swap")]
    log = open_log(file_system)
    assert offsets_left(log) == [0, 1]
    log.roll(NOW_MS)
    with pytest.raises(ReplacementAbandoned):
        clean(log, file_system, pause=lambda size: _drop_old(log))


def test_a_pass_does_not_touch_the_folder_of_a_log_that_another_worker_has_opened() -> None:
    """The log moves before each operation in turn that the thread of the cleaner makes. The next worker cleans, too."""
    steps = 0
    while _is_moved_before(steps):
        steps += 1
    assert steps > 30


def _is_moved_before(step: int) -> bool:
    file_system = MemoryFileSystem()
    writer = Writer(file_system, segment_bytes=1 << 16)
    for value in ("1", "2", "3"):
        writer.put(("a", value), ("b", value * 40_000))
        writer.roll()
    writer.log.config.segment_bytes = 1 << 15
    moved: dict[str, bytes] = {}
    operations = 0

    def move(operation: Operation) -> None:
        nonlocal operations
        operations += 1
        if operations > step and not moved:
            file_system.fault = no_fault
            writer.log.close()
            for segment in open_log(file_system).segments:
                for suffix in (".log", ".index", ".timeindex"):
                    file_system.open_append(f"{segment.path}{suffix}.cleaned").write(b"of the next worker")
            moved.update(_files(file_system))

    def on_owner(step_of_owner: Callable[[], None]) -> None:
        file_system.fault = no_fault
        try:
            step_of_owner()
        finally:
            file_system.fault = no_fault if moved else move

    file_system.open_append(f"{writer.log.segments[1].path}.log.cleaned").write(b"left by an abandoned pass")
    assessment = assess(writer.log, 0, RULES, writer.log.end_offset, NOW_MS)
    file_system.fault = move
    cleaner_of_worker = cleaner.Cleaner(file_system, max_map_bytes=1 << 20, pause=lambda size: None)
    with suppress(ReplacementAbandoned):
        cleaner_of_worker.clean(writer.log, assessment, RULES, on_owner, NOW_MS, stable_offset=writer.log.end_offset)
    file_system.fault = no_fault
    assert not moved or _files(file_system) == moved
    return bool(moved)


def _files(file_system: MemoryFileSystem) -> dict[str, bytes]:
    paths = {name: join(DIRECTORY, name) for name in names(file_system)}
    return {name: file_system.open_read(path).read_at(0, file_system.size(path)) for name, path in paths.items()}


def _drop_old(log: Log) -> None:
    log.delete_old_segments(lambda segment: True, NOW_MS)


def test_damage_stops_the_pass_and_changes_nothing() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.put(("a", "2"))
    writer.roll()
    writer.put(("a", "3"))
    path = writer.log.segments[0].log_path
    file_system.damage(path, lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with pytest.raises(CorruptLogError, match="CRC"):
        clean(writer.log, file_system)
    assert not [name for name in names(file_system) if name.endswith((".cleaned", ".swap", ".deleted"))]


def test_deletion_continues_over_emptied_segments() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.roll()
    clean(writer.log, file_system, now_ms=0)
    writer.put(("a", None), timestamp_ms=50)
    writer.roll()
    log = writer.log
    log.config.segment_bytes = 1
    clean(log, file_system, now_ms=0)
    assert log.segments[0].size_bytes == 0
    writer.put(("b", "1"), timestamp_ms=900)
    assert log.delete_old_segments(lambda segment: (segment.largest_timestamp or (0,))[0] < 100, NOW_MS) == 2
    assert log.start_offset == 2


def test_leftovers_of_an_abandoned_pass_are_removed_first() -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    writer.put(("a", "1"))
    writer.put(("a", "2"))
    writer.roll()
    for name in ("00000000000000000000.log.cleaned", "00000000000000000007.log.deleted"):
        file_system.open_append(join(DIRECTORY, name)).write(b"half")
    clean(writer.log, file_system)
    assert not [name for name in names(file_system) if name.endswith((".cleaned", ".swap", ".deleted"))]
    assert offsets_left(writer.log) == [1]


# -- reading records ---------------------------------------------------------------------------------------------------

RECORDS = st.lists(
    st.builds(
        Record,
        key=st.sampled_from([None, b"", b"k1", b"k2", b"k3", b"key" * 30]),
        value=st.sampled_from([None, None, b"", b"v", b"value" * 20]),
        headers=st.sampled_from([[], [], [], [("h", b"x")]]),
        timestamp_ms=st.sampled_from([5, 5, 5, 6, 10**6]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(RECORDS, st.integers(1, 25))
def test_runs_are_the_records_one_by_one(made: list[Record], times: int) -> None:
    batch = encode_batch(made * times)
    header = decode_header(batch)
    data = records_of(batch, 0, header)
    one_by_one = list(iter_raw(data, header.records_count))
    assert [record.key for record in one_by_one] == [record.key for record in made] * times
    assert [record.has_value for record in one_by_one] == [record.value is not None for record in made] * times
    runs = read_runs(data, header.records_count)
    if runs is not None:
        assert raw_records(runs) == one_by_one


def test_batches_of_a_coordinator_are_read_in_runs() -> None:
    made = [Record(f"group-topic-{number:04}".encode(), b"v" * 40, timestamp_ms=5) for number in range(300)]
    batch = encode_batch(made)
    runs = read_runs(batch[61:], 300)
    assert runs is not None
    assert [len(run.keys) for run in runs] == [64, 236]


def test_a_large_batch_is_cleaned_like_a_small_one() -> None:
    """Also if the map becomes full inside the batch."""
    for map_bytes in (1 << 20, 15_000):
        file_system = MemoryFileSystem()
        writer = Writer(file_system)
        for round_number in range(3):
            writer.put(*((f"key-{number:04}", str(round_number)) for number in range(200)), timestamp_ms=7)
        writer.put(*((f"key-{number:04}", None) for number in range(0, 200, 2)), timestamp_ms=8)
        writer.roll()
        log = writer.log
        expected = state(records(log))
        dirty = 0
        for now_ms in range(0, 60_000, 2000):
            dirty = clean(
                log, file_system, first_dirty_offset=dirty, now_ms=now_ms, max_map_bytes=map_bytes
            ).next_dirty_offset
            assert state(records(log)) == expected
        assert offsets_left(log) == list(range(401, 600, 2))


def test_a_deleted_file_may_be_removed_by_the_owner_meanwhile() -> None:
    """Retention removes `.deleted` files after file.delete.delay.ms, in the thread of the owner."""
    fs = MemoryFileSystem()
    writer = Writer(fs)
    for value in "123":
        writer.put(("a", value))
        writer.roll()
    fs.open_append(f"{DIRECTORY}/{9:020d}.log.deleted").close()

    def remove_first(operation: Operation) -> FileNotFoundError | None:
        is_deleted = operation.kind == "remove" and operation.path.endswith(".deleted")
        return FileNotFoundError(2, "planted") if is_deleted else None

    fs.fault = remove_first
    assert clean(writer.log, fs).next_dirty_offset == 3
    assert [segment.base_offset for segment in writer.log.segments] == [0, 3]
