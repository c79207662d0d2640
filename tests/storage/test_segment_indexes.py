# SPDX-License-Identifier: Apache-2.0
"""The bytes of index files: they equal those of an uninterrupted log after any stops and restarts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.storage.file_cache import FileCache
from kcoord.storage.file_system import make_durable_dirs, read_file
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, keep_everything, no_fault
from kcoord.storage.recovery import Recovery
from kcoord_protocol.record_batch import Record, encode_batch
from tests.storage.support import (
    DIRECTORY,
    INDEX_FILE,
    LOG_FILE,
    NOW_MS,
    TIME_INDEX_FILE,
    batch,
    content,
    filled_log,
    new_config,
    open_log,
)

Files = tuple[bytes, bytes]


def expected_files(data: Sequence[bytes], interval_bytes: int, stops: Collection[int] = ()) -> Files:
    """Returns the entries that Kafka's LogSegment.append and onBecomeInactive write for the batches of a segment.

    As in Kafka, an orderly stop loses the number of bytes since the last entry. `stops` has the batches before which
    the log was stopped.
    """
    offsets: list[bytes] = []
    times: list[bytes] = []
    position = since_entry = 0
    greatest, greatest_offset, last_time = -1, 0, -1
    for number, made in enumerate(data):
        if number in stops:
            since_entry = 0
            if greatest > last_time:
                times.append(pack(">qi", greatest, greatest_offset))
                last_time = greatest
        last_offset = int.from_bytes(made[:8], "big") + int.from_bytes(made[23:27], "big")
        timestamp = int.from_bytes(made[35:43], "big", signed=True)
        if timestamp > greatest:
            greatest, greatest_offset = timestamp, last_offset
        if since_entry > interval_bytes:
            offsets.append(pack(">ii", last_offset, position))
            if greatest > last_time:
                times.append(pack(">qi", greatest, greatest_offset))
                last_time = greatest
            since_entry = 0
        position += len(made)
        since_entry += len(made)
    if greatest > last_time:
        times.append(pack(">qi", greatest, greatest_offset))
    return b"".join(offsets), b"".join(times)


def files(fs: MemoryFileSystem) -> Files:
    return read_file(fs, INDEX_FILE), read_file(fs, TIME_INDEX_FILE)


STEPS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([0, 0, 7]), st.sampled_from([-1, 0, 3, 50, 50, 51, 200])),
    min_size=2,
    max_size=14,
)


def made_of(steps: Sequence[tuple[int, int, int]]) -> list[bytes]:
    """Batches with a number of records, a gap in the offsets before them, and a timestamp."""
    data, offset = [], 0
    for records, gap, timestamp_ms in steps:
        offset += gap
        made = [Record(b"k", b"v" * 10, [], timestamp_ms, offset + number) for number in range(records)]
        data.append(encode_batch(made, base_offset=offset))
        offset += records
    return data


@settings(max_examples=120)
@given(STEPS, st.sampled_from([0, 100, 200, 10**6]), st.sampled_from(["stop", "kill"]), st.data())
def test_index_files_equal_those_of_an_uninterrupted_log(
    steps: list[tuple[int, int, int]], interval_bytes: int, end: str, draw: st.DataObject
) -> None:
    """With checkpoints, orderly stops and kills between the batches, and any recovery point that was reached."""
    data = made_of(steps)
    fs = MemoryFileSystem()
    config = new_config(index_interval_bytes=interval_bytes)
    log = open_log(fs, config)
    rest, durable = list(data), 0
    stops: set[int] = set()
    while rest:
        taken = draw.draw(st.integers(1, len(rest)))
        log.append(b"".join(rest[:taken]), now_ms=NOW_MS)
        del rest[:taken]
        match draw.draw(st.sampled_from(["nothing", "checkpoint", end, end])):
            case "checkpoint":
                durable = log.checkpoint()
            case "stop":
                log.close()
                done = len(data) - len(rest)
                assert files(fs) == expected_files(data[:done], interval_bytes, stops)
                stops.add(done)
                durable = log.end_offset
                log = open_log(fs, config, recovery_point=durable, clean=True)
            case "kill":
                log.flush()
                if draw.draw(st.booleans()):
                    log.checkpoint()
                    durable = draw.draw(st.sampled_from([durable, log.end_offset]))
                fs.crash(keep_everything)
                log = open_log(fs, config, recovery_point=durable)
    log.close()
    assert files(fs) == expected_files(data, interval_bytes, stops)
    # Also if they have to be built from the log.
    for path in (INDEX_FILE, TIME_INDEX_FILE):
        fs.remove(path)
    again = open_log(fs, config, recovery_point=log.end_offset)
    again.close()
    assert files(fs) == expected_files(data, interval_bytes)


@pytest.mark.parametrize("path", [INDEX_FILE, TIME_INDEX_FILE])
@pytest.mark.parametrize("is_clean", [False, True])
def test_a_closed_segment_gets_new_index_files_if_one_is_missing(path: str, is_clean: bool) -> None:
    data = [batch(offset, timestamp_ms=10 + offset) for offset in range(10)]
    fs = MemoryFileSystem()
    log = filled_log(fs, data, new_config(index_interval_bytes=100))
    log.roll(NOW_MS)
    log.close()
    before = files(fs)
    assert before == expected_files(data, 100)
    fs.remove(path)
    log = open_log(fs, new_config(index_interval_bytes=100), recovery_point=10 if is_clean else 0, clean=is_clean)
    assert log.offset_for_timestamp(12) is not None
    assert log.read(5, 1)[:8] == (5).to_bytes(8, "big")
    assert files(fs) == before


@pytest.mark.parametrize(
    "index",
    [
        b"",
        pack(">ii", 5, 81 * 7),
        pack(">ii", 5, 81 * 5 + 3),
        pack(">iiii", 1, 81, 5, 81 * 6),
        pack(">ii", 5, 81 * 5)[:7],
        pack(">ii", 5, 81 * 9),
        pack(">ii", 3, -1),
        pack(">ii", -1, 3),
    ],
    ids=["empty", "behind", "between", "partly right", "cut", "too far", "negative position", "negative offset"],
)
@pytest.mark.parametrize("how", ["closed segment", "clean stop", "kill"])
def test_a_wrong_index_costs_time_only(index: bytes, how: str) -> None:
    """Every offset is found in its batch, and the files are right again when they are rebuilt by Kafka's rule."""
    data = [batch(offset) for offset in range(9)]
    fs = MemoryFileSystem()
    config = new_config(index_interval_bytes=0)
    log = filled_log(fs, data, config)
    if how == "closed segment":
        log.roll(NOW_MS)
    log.close()
    assert len(data[0]) == 81
    fs.damage(INDEX_FILE, lambda old: index)
    log = open_log(fs, config, recovery_point=5, clean=how != "kill")
    assert [log.read(offset, 1) for offset in range(9)] == data
    assert content(log) == data
    log.append(batch(9), now_ms=NOW_MS)
    log.close()
    if index and how == "closed segment":
        assert read_file(fs, INDEX_FILE) == expected_files(data, 0)[0]
    if how == "kill" and (len(index) % 8 or index[4:] in (pack(">i", 81 * 9), pack(">i", -1), pack(">i", 81 * 5 + 3))):
        assert files(fs) == expected_files([*data, batch(9)], 0), "such an index was not used"


def test_every_batch_of_an_append_is_indexed() -> None:
    data = [batch(offset, value_size=10 * offset, timestamp_ms=offset) for offset in range(7)]
    fs = MemoryFileSystem()
    log = open_log(fs, new_config(index_interval_bytes=0))
    for part in (data[:2], data[2:6], data[6:]):
        log.append(b"".join(part), now_ms=NOW_MS)
    log.close()
    assert files(fs) == expected_files(data, 0)


def test_entries_after_the_end_of_the_log_are_removed_from_the_file() -> None:
    data = [batch(offset) for offset in range(9)]
    fs = MemoryFileSystem()
    config = new_config(index_interval_bytes=0)
    filled_log(fs, data, config).close()
    fs.damage(INDEX_FILE, lambda old: pack(">iiii", 1, 81, 5, 81 * 9))
    open_log(fs, config, recovery_point=1).close()
    assert files(fs) == expected_files(data, 0)


def test_index_files_are_durable_after_every_checkpoint() -> None:
    data = [batch(offset, timestamp_ms=offset) for offset in range(7)]
    fs = MemoryFileSystem()
    log = open_log(fs, new_config(index_interval_bytes=0))
    written: list[tuple[str, int]] = []

    def note(operation: Operation) -> None:
        if operation.kind == "write" and "index" in operation.path:
            written.append((operation.path, operation.size))

    for count, made in enumerate(data, 1):
        log.append(made, now_ms=NOW_MS)
        written.clear()
        fs.fault = note
        assert log.checkpoint() == count
        fs.fault = no_fault
        if count > 1:
            assert written == [(TIME_INDEX_FILE, 12), (INDEX_FILE, 8)], "the time index first, and only new entries"
        at_crash = deepcopy(fs)
        at_crash.crash()
        offsets, times = expected_files(data[:count], 0)
        assert files(at_crash) == (offsets, times if count > 1 else b"")
        assert read_file(at_crash, LOG_FILE) == b"".join(data[:count])


def test_a_truncated_log_has_the_indexes_of_its_remaining_batches() -> None:
    """A crash tears it at any batch, with any recovery point."""
    data = [batch(offset, timestamp_ms=offset) for offset in range(7)]
    whole = MemoryFileSystem()
    config = new_config(index_interval_bytes=0)
    filled_log(whole, data, config).close()
    for torn in range(7):
        for recovery_point in range(torn + 1):
            fs = deepcopy(whole)
            at = sum(map(len, data[:torn])) + 70
            fs.damage(LOG_FILE, lambda old, at=at: old[:at])  # type: ignore[misc]
            log = open_log(fs, config, recovery_point=recovery_point)
            log.close()
            assert log.end_offset == torn, recovery_point
            assert files(fs) == expected_files(data[:torn], 0), (torn, recovery_point)


def test_the_last_entry_that_a_clean_start_trusts() -> None:
    """Only the batches after it are read. Kafka reads none."""
    data = [batch(offset) for offset in range(9)]
    for entry, scanned in (
        (pack(">ii", 8, 81 * 8), 1),
        (pack(">ii", 1, 81), 8),
        (pack(">ii", 0, 0), 9),
        (pack(">ii", 8, 81 * 9), 9),
        (pack(">ii", 8, -81), 9),
        (pack(">ii", 8, 81 * 8) + b"\0", 9),
        (pack(">ii", 8, 81 * 8)[:-1], 9),
        (b"\0" * 3, 9),
        (b"", 9),
        (None, 9),
    ):
        fs = MemoryFileSystem()
        filled_log(fs, data, new_config(index_interval_bytes=0)).close()
        if entry is None:
            fs.remove(INDEX_FILE)
        else:
            fs.damage(INDEX_FILE, lambda old, entry=entry: entry)  # type: ignore[misc]
        log = open_log(fs, recovery_point=9, clean=True)
        assert (log.end_offset, log.recovery_report.scanned_bytes) == (9, scanned * 81), entry


@pytest.mark.parametrize(("timestamps", "per_segment"), [("rise", 3), ("stay", 6)])
def test_a_segment_is_rolled_when_an_index_is_full(timestamps: str, per_segment: int) -> None:
    """Kafka's OffsetIndex.isFull and TimeIndex.isFull, which keeps one entry for the end of the segment."""
    log = open_log(MemoryFileSystem(), new_config(index_interval_bytes=0, segment_index_bytes=47))
    for offset in range(20):
        log.append(batch(offset, timestamp_ms=offset if timestamps == "rise" else 5), now_ms=NOW_MS)
    assert [segment.base_offset for segment in log.segments] == list(range(0, 20, per_segment))


def test_a_folder_with_new_files_is_not_read_with_old_indexes() -> None:
    """This happens after a restore from a backup, or if a topic of the same name was created again."""
    fs = MemoryFileSystem()
    make_durable_dirs(fs, DIRECTORY)
    cache = FileCache(fs)
    config = new_config(index_interval_bytes=0)
    for size in (10, 300):
        backup = MemoryFileSystem()
        data = [batch(offset, value_size=size) for offset in range(6)]
        log = filled_log(backup, data, config)
        log.roll(NOW_MS)
        log.close()
        for name in backup.list_dir(DIRECTORY):
            fs.open_append(f"{DIRECTORY}/{name}").write(read_file(backup, f"{DIRECTORY}/{name}"))
        recovery = Recovery(recovery_point=6, clean=True)
        log = Log.open(fs, DIRECTORY, config, NOW_MS, recovery=recovery, files=cache)
        assert [log.read(offset, 1) for offset in range(6)] == data
        log.close()
        assert cache.open_files == 0
        assert [cache.indexes(segment.path) for segment in log.segments] == [None, None]
        for name in fs.list_dir(DIRECTORY):
            fs.remove(f"{DIRECTORY}/{name}")


def test_unsynced_bytes_of_any_segment_are_written_again_if_the_last_leader_failed() -> None:
    fs = MemoryFileSystem()
    make_durable_dirs(fs, DIRECTORY)
    data = [batch(0), batch(1)]
    for offset, made in enumerate(data):
        fs.open_append(f"{DIRECTORY}/{offset:020d}.log").write(made)
    fs.sync_dir(DIRECTORY)
    log = open_log(fs, rewrite=True)
    assert content(log) == data
    fs.crash()
    assert read_file(fs, LOG_FILE) == data[0]
    assert content(open_log(fs)) == data


def test_the_offset_after_any_batch_of_a_slice_is_found() -> None:
    """Every batch has an index entry, so the slice ends where an entry points to."""
    data = [batch(0, records=3), batch(3), batch(4, records=2)]
    log = filled_log(MemoryFileSystem(), data, new_config(index_interval_bytes=0))
    for count, next_offset in ((1, 3), (2, 4), (3, 6)):
        batches = log.find(0, sum(map(len, data[:count])))
        assert batches is not None
        assert batches.next_offset() == next_offset
