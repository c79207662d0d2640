# SPDX-License-Identifier: Apache-2.0
"""Opening a log: the effects of a crash are repaired, and other damage is refused with file, position and offset."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from kcoord.storage.errors import CorruptLogError
from kcoord.storage.file_system import read_file
from kcoord.storage.memory_file_system import MemoryFileSystem, keep_everything
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

Change = Callable[[bytes], bytes]


def written(data: list[bytes], **config: int) -> MemoryFileSystem:
    """Makes a log of `data` after a kill: all bytes are there, and the active segment has no index file."""
    fs = MemoryFileSystem()
    filled_log(fs, data, new_config(**config))
    fs.crash(keep_everything)
    return fs


def closed(data: list[bytes], **config: int) -> MemoryFileSystem:
    fs = MemoryFileSystem()
    filled_log(fs, data, new_config(**config)).close()
    return fs


def flip(position: int, mask: int = 0x40) -> Change:
    return lambda old: old[:position] + bytes([old[position] ^ mask]) + old[position + 1 :]


# -- torn tails --------------------------------------------------------------------------------------------------------


def test_d1_every_prefix_recovers_to_its_whole_batches() -> None:
    data = [batch(0, 3), batch(3), batch(4, 2, value_size=70), batch(6, 2)]
    whole = b"".join(data)
    ends = [sum(map(len, data[:number])) for number in range(len(data) + 1)]
    for size in range(len(whole) + 1):
        fs = written(data)
        fs.damage(LOG_FILE, lambda old, size=size: old[:size])  # type: ignore[misc]
        log = open_log(fs)
        count = sum(end <= size for end in ends) - 1
        assert content(log) == data[:count], size
        assert log.end_offset == [0, 3, 4, 6, 8][count]
        assert log.size_bytes == fs.size(LOG_FILE) == ends[count]
        assert [cut.lost_bytes for cut in log.recovery_report.cuts] == (
            [size - ends[count]] if size > ends[count] else []
        )
        log.append(batch(log.end_offset), now_ms=NOW_MS)
        assert content(log)[:-1] == data[:count]


@pytest.mark.parametrize("zeros", [1, 11, 12, 60, 61, 62, 200, 5000])
def test_d2_a_tail_of_zeros_is_cut(zeros: int) -> None:
    data = batches(5)
    fs = written(data)
    fs.damage(LOG_FILE, lambda old: old + bytes(zeros))
    log = open_log(fs)
    assert content(log) == data
    assert fs.size(LOG_FILE) == len(b"".join(data))
    assert log.recovery_report.cuts[0].lost_bytes == zeros


def test_d2_every_prefix_of_the_last_batch_with_zeros_to_its_end_is_cut() -> None:
    data = batches(3)
    last = len(data[-1])
    for kept in range(last):
        fs = written(data)
        fs.damage(LOG_FILE, lambda old, kept=kept: old[: len(old) - last + kept] + bytes(last - kept))  # type: ignore[misc]
        whole = data if read_file(fs, LOG_FILE) == b"".join(data) else data[:-1]
        assert content(open_log(fs)) == whole, kept


def test_d2_a_tail_of_old_bytes_is_cut() -> None:
    data = batches(3)
    fs = written(data)
    fs.damage(LOG_FILE, lambda old: old + b"\xa5" * 3000)
    assert content(open_log(fs)) == data


def test_d1_a_torn_batch_larger_than_a_read_is_cut() -> None:
    data = [batch(0), batch(1, value_size=3 << 20)]
    fs = written(data, segment_bytes=8 << 20)
    assert content(open_log(fs)) == data
    fs.damage(LOG_FILE, lambda old: old[:-1])
    assert content(open_log(fs)) == data[:1]


def test_d1_the_cut_is_durable_before_the_log_is_used() -> None:
    data = batches(3)
    fs = written(data)
    fs.damage(LOG_FILE, lambda old: old[:-1])
    open_log(fs)
    fs.crash()
    assert read_file(fs, LOG_FILE) == b"".join(data[:-1])


def test_bytes_in_the_page_cache_are_durable_before_they_are_served() -> None:
    data = batches(3)
    fs = MemoryFileSystem()
    log = open_log(fs)
    log.flush()
    for batch_bytes in data:
        log.append(batch_bytes, now_ms=NOW_MS)
    assert content(open_log(fs)) == data
    fs.crash()
    assert content(open_log(fs)) == data


# -- damage in the middle ----------------------------------------------------------------------------------------------


def assert_refused(fs: MemoryFileSystem, position: int, offset: int, reason: str, **recovery: int) -> None:
    before = read_file(fs, LOG_FILE)
    with pytest.raises(CorruptLogError, match=reason) as caught:
        open_log(fs, None, **recovery)
    assert (caught.value.file, caught.value.position, caught.value.offset) == (LOG_FILE, position, offset)
    assert "repair" in str(caught.value)
    assert read_file(fs, LOG_FILE) == before


def test_d8_every_flipped_bit_in_the_middle_is_refused() -> None:
    data = batches(4)
    start = len(data[0])
    for position in range(start, start + len(data[1])):
        # The CRC does not cover base offset and leader epoch. The base offset continues the log; any epoch is valid.
        if position - start in range(12, 16):
            continue
        for mask in (0x01, 0x80):
            fs = written(data)
            fs.damage(LOG_FILE, flip(position, mask))
            if position - start < 8:
                with pytest.raises(CorruptLogError):
                    open_log(fs)
            else:
                assert_refused(fs, start, 1, "a sound batch with offset 2 follows")


def test_d8_a_length_beyond_the_end_in_the_middle_is_no_torn_tail() -> None:
    data = batches(4)
    fs = written(data)
    fs.damage(LOG_FILE, flip(len(data[0]) + 9))
    assert_refused(fs, len(data[0]), 1, "the batch has a length of .* a sound batch with offset 2 follows")


def test_d11_offsets_that_fall_are_refused() -> None:
    data = batches(3)
    fs = written(data)
    fs.damage(LOG_FILE, lambda old: data[0] + data[1] + data[0])
    assert_refused(fs, len(data[0]) * 2, 2, "begins with offset 0, but the log is already at 2")


def test_d11_offsets_that_overlap_are_refused() -> None:
    fs = written(batches(3))
    fs.damage(LOG_FILE, lambda old: batch(0, 5) + batch(4))
    assert_refused(fs, len(batch(0, 5)), 5, "begins with offset 4, but the log is already at 5")


def test_d9_a_batch_of_another_file_is_refused() -> None:
    fs = MemoryFileSystem()
    log = open_log(fs, start_offset=100)
    log.append(batch(100), now_ms=NOW_MS)
    log.close()
    path = log.segments[0].log_path
    fs.damage(path, lambda old: batch(7))
    with pytest.raises(CorruptLogError, match="begins with offset 7, but the log is already at 100"):
        open_log(fs, start_offset=100)


def test_a_foreign_magic_before_sound_batches_is_refused() -> None:
    data = batches(4)
    fs = written(data)
    fs.damage(LOG_FILE, lambda old: old[: len(data[0]) + 16] + b"\x03" + old[len(data[0]) + 17 :])
    assert_refused(fs, len(data[0]), 1, "magic is 3 instead of 2, but a sound batch with offset 2")


@pytest.mark.parametrize("magic", [0, 1])
def test_a_message_in_an_old_format_is_refused_at_any_position(magic: int) -> None:
    body = bytes([magic, 0]) + bytes(8) * magic + b"\xff\xff\xff\xff" + b"\0\0\0\x20" + b"v" * 80
    message = zlib.crc32(body).to_bytes(4, "big") + body
    fs = written(batches(1))
    fs.damage(LOG_FILE, lambda old: bytes(8) + len(message).to_bytes(4, "big") + message)
    assert_refused(fs, 0, 0, f"old format .magic {magic}.")


def test_d8_a_hole_of_zeros_in_the_middle_is_refused() -> None:
    data = batches(40)
    position = len(b"".join(data[:10]))
    fs = written(data)
    fs.damage(LOG_FILE, lambda old: old[:position] + bytes(1000) + old[position + 1000 :])
    assert_refused(fs, position, 10, "continues with zeros, but a sound batch")


def test_damage_below_the_recovery_point_is_refused_even_at_the_end() -> None:
    data = batches(4)
    position = len(b"".join(data[:3]))
    fs = written(data)
    fs.damage(LOG_FILE, lambda old: old[:-1])
    assert_refused(fs, position, 3, "all batches below offset 4 were durable", recovery_point=4)


def test_a_file_that_ends_before_the_recovery_point_is_refused() -> None:
    data = batches(4)
    for clean in (0, 1):
        fs = closed(data)
        fs.damage(LOG_FILE, lambda old: b"".join(data[:3]))
        assert_refused(fs, len(b"".join(data[:3])), 3, "below offset 4 were durable", recovery_point=4, clean=clean)


def test_d5_a_missing_file_is_refused() -> None:
    fs = closed(batches(4))
    fs.remove(LOG_FILE)
    with pytest.raises(CorruptLogError, match="the file is missing"):
        open_log(fs, recovery_point=4)


def test_d8_a_flipped_bit_in_the_last_batch_after_a_clean_stop_is_refused() -> None:
    data = batches(4)
    fs = closed(data)
    fs.damage(LOG_FILE, flip(len(b"".join(data)) - 3))
    assert_refused(fs, len(b"".join(data[:3])), 3, "CRC", recovery_point=4, clean=1)


def test_a_torn_segment_before_the_last_one_is_refused() -> None:
    fs = written(batches(10), segment_bytes=400)
    path = f"{DIRECTORY}/{0:020d}.log"
    fs.damage(path, lambda old: old[:-1])
    with pytest.raises(CorruptLogError, match="although later segments exist"):
        open_log(fs, new_config(segment_bytes=400))


def test_d11_segments_that_overlap_are_refused() -> None:
    fs = written(batches(10), segment_bytes=400)
    size = fs.size(LOG_FILE)
    count = size // len(batch(0))
    fs.damage(LOG_FILE, lambda old: old + batch(count))
    with pytest.raises(CorruptLogError, match=f"offset {count + 1}: the file before it has offsets up to {count}"):
        open_log(fs, new_config(segment_bytes=400))


def test_d8_damage_in_a_closed_segment_is_refused_when_it_is_read() -> None:
    data = batches(10)
    fs = closed(data, segment_bytes=400)
    fs.damage(LOG_FILE, flip(len(data[0]) + 70))
    log = open_log(fs, recovery_point=10, clean=1)
    assert log.end_offset == 10
    with pytest.raises(CorruptLogError, match="CRC") as caught:
        content(log)
    assert (caught.value.position, caught.value.offset) == (len(data[0]), 1)
    assert [header.base_offset for header, _ in log.batches(8)] == [8, 9]


# -- indexes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [0, 1])
@pytest.mark.parametrize("file", [INDEX_FILE, TIME_INDEX_FILE])
@pytest.mark.parametrize(
    "change",
    [
        None,
        lambda old: b"",
        lambda old: old[:-3],
        lambda old: old[:-12],
        lambda old: bytes(len(old)),
        lambda old: old + bytes(240),
        lambda old: old[::-1],
        lambda old: old[:24] * 2,
        lambda old: old[:-1] + bytes([old[-1] ^ 1]),
    ],
    ids=["missing", "empty", "torn", "short", "zeros", "preallocated", "reversed", "repeated", "flipped"],
)
def test_d10_a_bad_index_costs_time_only(clean: int, file: str, change: Change | None) -> None:
    data = batches(100)
    fs = closed(data)
    intact = read_file(fs, file)
    if change is None:
        fs.remove(file)
    else:
        fs.damage(file, change)
    log = open_log(fs, recovery_point=100 * clean, clean=clean)
    assert content(log) == data
    for offset in (0, 1, 50, 98, 99):
        assert log.read(offset, 1) == data[offset]
    if file == INDEX_FILE or not clean:
        position = log.offset_for_timestamp(150)
        assert position is not None
        assert position.offset == 50
    log.append(batch(100, timestamp_ms=200), now_ms=NOW_MS)
    assert log.read(100, 1) == batch(100, timestamp_ms=200)
    log.close()
    if not clean:
        assert read_file(fs, file)[: len(intact) - 12] == intact[: len(intact) - 12]


@pytest.mark.parametrize("name", ["index", "timeindex"])
def test_d10_a_missing_index_of_a_closed_segment_is_built_again(name: str) -> None:
    data = batches(100)
    fs = closed(data, segment_bytes=3000)
    path = f"{DIRECTORY}/{0:020d}.{name}"
    intact = read_file(fs, path)
    fs.remove(path)
    log = open_log(fs, recovery_point=100, clean=1)
    assert log.read(20, 1) == data[20]
    assert read_file(fs, path) == intact


def test_d10_an_index_entry_that_points_between_batches_is_not_used() -> None:
    data = batches(100)
    fs = closed(data, segment_bytes=3000)
    fs.damage(INDEX_FILE, lambda old: old[:7] + bytes([old[7] ^ 1]) + old[8:])
    log = open_log(fs, recovery_point=100, clean=1)
    for offset in range(100):
        assert log.read(offset, 1) == data[offset]


def test_an_index_without_its_log_is_removed() -> None:
    fs = closed(batches(3))
    fs.open_append(f"{DIRECTORY}/{77:020d}.index").write(bytes(8))
    log = open_log(fs)
    assert log.end_offset == 3
    assert f"{77:020d}.index" not in fs.list_dir(DIRECTORY)
    assert len(log.recovery_report.removed_files) == 1


def test_recovery_starts_at_the_recovery_point() -> None:
    fs = closed(batches(1000))
    assert open_log(fs, recovery_point=990).recovery_report.scanned_bytes < fs.size(LOG_FILE) // 20
    assert open_log(fs, recovery_point=1000, clean=1).recovery_report.scanned_bytes < fs.size(LOG_FILE) // 20
    assert open_log(fs).recovery_report.scanned_bytes == fs.size(LOG_FILE)


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (bytes(20), "the file continues with zeros"),
        (bytes(19) + b"x", "the file ends 20 bytes into a batch header"),
        (batch(6)[:-5], "the batch has a length of 81 bytes, but the file has only 76 more"),
        (bytes(200), "the file continues with zeros"),
        (b"x" * 200, "not a record batch: magic is 120 instead of 2"),
    ],
)
def test_a_torn_tail_is_described(tail: bytes, reason: str) -> None:
    fs = closed(batches(6))
    fs.open_append(LOG_FILE).write(tail)
    read_bytes: list[int] = []
    log = open_log(fs, check=read_bytes.append)
    (cut,) = log.recovery_report.cuts
    assert (cut.lost_bytes, cut.reason, log.end_offset) == (len(tail), reason, 6)
    assert read_bytes[:7] == [*[81] * 6, len(tail)], "each batch, and the tail, in which a sound batch is searched"


# -- interrupted file operations ---------------------------------------------------------------------------------------


def test_deleted_and_cleaned_files_are_removed() -> None:
    fs = closed(batches(3))
    for name in (f"{0:020d}.log.deleted", f"{0:020d}.log.cleaned", f"{0:020d}.index.cleaned"):
        fs.open_append(f"{DIRECTORY}/{name}").write(b"x")
    assert open_log(fs).end_offset == 3
    assert fs.list_dir(DIRECTORY) == [f"{0:020d}.index", f"{0:020d}.log", f"{0:020d}.timeindex"]


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_d6_a_swap_file_replaces_the_segments_that_it_was_made_from(removed: int) -> None:
    data = batches(12)
    config = new_config(segment_bytes=400)
    fs = closed(data, segment_bytes=400)
    bases = sorted(name for name in fs.list_dir(DIRECTORY) if name.endswith(".log"))
    third = int(bases[2][:20])
    compacted = data[1] + data[third - 1]
    fs.open_append(f"{DIRECTORY}/{bases[0]}.swap").write(compacted)
    for name in bases[:removed]:
        fs.remove(f"{DIRECTORY}/{name}")
    log = open_log(fs, config)
    assert content(log) == [data[1], data[third - 1], *data[third:]]
    assert not [name for name in fs.list_dir(DIRECTORY) if "swap" in name]
    assert log.read(0, 1) == data[1]


def test_a_swap_file_with_an_earlier_unfinished_one_is_removed() -> None:
    data = batches(6)
    fs = closed(data)
    for unfinished in (0, 5):
        fs.open_append(f"{DIRECTORY}/{unfinished:020d}.log.cleaned").write(b"")
    fs.open_append(f"{DIRECTORY}/{3:020d}.log.swap").write(data[5])
    assert content(open_log(fs)) == data


def test_d6_a_damaged_swap_file_is_refused() -> None:
    fs = closed(batches(6))
    fs.open_append(f"{DIRECTORY}/{0:020d}.log.swap").write(batch(0)[:-1])
    with pytest.raises(CorruptLogError, match=r"log\.swap"):
        open_log(fs)


def test_other_files_are_left_alone() -> None:
    fs = closed(batches(3))
    for name in ("partition.metadata", f"{0:020d}.snapshot", "leader-epoch-checkpoint", "12.log", f"{0:020d}.txnindex"):
        fs.open_append(f"{DIRECTORY}/{name}").write(b"mine")
    assert open_log(fs).end_offset == 3
    assert len(fs.list_dir(DIRECTORY)) == 8


def test_gaps_of_compaction_are_not_damage() -> None:
    fs = written([batch(0), batch(5, 3), batch(100)])
    log = open_log(fs)
    assert log.end_offset == 101
    assert log.read(2, 1) == batch(5, 3)
    assert log.read(8, 1) == batch(100)


def test_a_start_offset_above_the_end_empties_the_log() -> None:
    fs = closed(batches(3))
    log = open_log(fs, start_offset=50)
    assert (log.start_offset, log.end_offset, log.size_bytes) == (50, 50, 0)
    log.append(batch(50), now_ms=NOW_MS)
    log.close()
    assert content(open_log(fs, start_offset=50)) == [batch(50)]
