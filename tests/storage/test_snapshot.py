# SPDX-License-Identifier: Apache-2.0
"""The snapshot file of a shard: it is complete or not used, and a crash leaves the old or the new one."""

from __future__ import annotations

import errno

import pytest

from kcoord.runtime.snapshot import Chunk, Snapshot
from kcoord.storage.file_system import join, make_durable_dirs
from kcoord.storage.memory_file_system import Keep, MemoryFileSystem, keep_everything, keep_nothing, no_fault
from kcoord.storage.record_filter import filter_batch, iter_raw
from kcoord.storage.snapshot import (
    SNAPSHOT_FILE,
    SnapshotError,
    may_miss_deletions,
    read_snapshot,
    remove_snapshot,
    write_snapshot,
)
from kcoord_protocol.batch_header import crc32c
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, Record, decode_header, encode_batch
from tests.storage.support import DIRECTORY, MachineCrash, batch, crash_at, filled_log, open_log

PATH = join(DIRECTORY, SNAPSHOT_FILE)
OLD = Snapshot(5, 6, 100, [Chunk(0, b"old")])
NEW = Snapshot(2**40, 2**40 + 3, 1_700_000_000_000, [Chunk(0, b"x" * 300), Chunk(7, b""), Chunk(1, bytes(range(256)))])


@pytest.fixture
def file_system() -> MemoryFileSystem:
    made = MemoryFileSystem()
    make_durable_dirs(made, DIRECTORY)
    return made


@pytest.mark.parametrize("snapshot", [OLD, NEW, Snapshot(0, 0, 0, [])])
def test_a_written_snapshot_can_be_read(file_system: MemoryFileSystem, snapshot: Snapshot) -> None:
    write_snapshot(file_system, DIRECTORY, OLD)
    write_snapshot(file_system, DIRECTORY, snapshot)
    file_system.crash(keep_nothing)
    assert read_snapshot(file_system, DIRECTORY) == snapshot
    assert file_system.list_dir(DIRECTORY) == [SNAPSHOT_FILE]


@pytest.mark.parametrize("kind", ["write", "datasync", "rename"])
def test_d4_a_snapshot_that_does_not_fit_leaves_the_old_one_and_no_other_file(
    file_system: MemoryFileSystem, kind: str
) -> None:
    write_snapshot(file_system, DIRECTORY, OLD)
    full = OSError(errno.ENOSPC, "no space")
    file_system.fault = lambda operation: full if operation.kind == kind else None
    with pytest.raises(OSError, match="no space"):
        write_snapshot(file_system, DIRECTORY, NEW)
    file_system.fault = no_fault
    assert read_snapshot(file_system, DIRECTORY) == OLD
    assert file_system.list_dir(DIRECTORY) == [SNAPSHOT_FILE]


def test_a_missing_snapshot_is_not_an_error(file_system: MemoryFileSystem) -> None:
    assert read_snapshot(file_system, DIRECTORY) is None
    write_snapshot(file_system, DIRECTORY, NEW)
    remove_snapshot(file_system, DIRECTORY)
    file_system.crash(keep_nothing)
    assert read_snapshot(file_system, DIRECTORY) is None


def test_d10_every_flipped_bit_is_found(file_system: MemoryFileSystem) -> None:
    """D-10."""
    write_snapshot(file_system, DIRECTORY, NEW)
    for bit in range(file_system.size(PATH) * 8):
        file_system.damage(PATH, lambda data, bit=bit: _flipped(data, bit))  # type: ignore[misc]
        with pytest.raises(SnapshotError):
            read_snapshot(file_system, DIRECTORY)
        file_system.damage(PATH, lambda data, bit=bit: _flipped(data, bit))  # type: ignore[misc]
    assert read_snapshot(file_system, DIRECTORY) == NEW


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_d10_every_shorter_and_a_longer_file_is_rejected(file_system: MemoryFileSystem) -> None:
    write_snapshot(file_system, DIRECTORY, NEW)
    whole = file_system.open_read(PATH).read_at(0, 10_000)
    for size in range(len(whole)):
        file_system.damage(PATH, lambda data, size=size: whole[:size])  # type: ignore[misc]
        with pytest.raises(
            SnapshotError, match="but the header has 38" if size < 38 else "ends inside a chunk|CRC of the chunk"
        ):
            read_snapshot(file_system, DIRECTORY)
    file_system.damage(PATH, lambda data: whole + b"\0")
    with pytest.raises(SnapshotError):
        read_snapshot(file_system, DIRECTORY)


@pytest.mark.parametrize("start", [b"KCSHARD\n\0\2", b"KCSHARE\n\0\1"])
def test_another_version_or_another_file_is_rejected(file_system: MemoryFileSystem, start: bytes) -> None:
    write_snapshot(file_system, DIRECTORY, NEW)

    def changed(data: bytes) -> bytes:
        header = start + data[10:34]
        return header + crc32c(header).to_bytes(4, "big") + data[38:]

    file_system.damage(PATH, changed)
    with pytest.raises(SnapshotError, match="not a snapshot of version 1"):
        read_snapshot(file_system, DIRECTORY)


def test_chunks_that_changed_places_are_noticed(file_system: MemoryFileSystem) -> None:
    write_snapshot(file_system, DIRECTORY, Snapshot(1, 1, 1, [Chunk(1, b"one"), Chunk(1, b"two")]))

    def swap(data: bytes) -> bytes:
        return data[:38] + data[51:64] + data[38:51] + data[64:]

    file_system.damage(PATH, swap)
    with pytest.raises(SnapshotError):
        read_snapshot(file_system, DIRECTORY)


@pytest.mark.parametrize("keep", [keep_nothing, keep_everything], ids=["nothing kept", "all kept"])
def test_d6_a_crash_at_every_step_leaves_the_old_or_the_new_one(keep: Keep) -> None:
    step, is_through = 0, False
    while not is_through:
        file_system = MemoryFileSystem()
        make_durable_dirs(file_system, DIRECTORY)
        write_snapshot(file_system, DIRECTORY, OLD)
        file_system.fault = crash_at(step)
        try:
            write_snapshot(file_system, DIRECTORY, NEW)
            is_through = True
        except MachineCrash:
            pass
        file_system.fault = no_fault
        file_system.crash(keep)
        snapshot = read_snapshot(file_system, DIRECTORY)
        assert snapshot == NEW if is_through else snapshot in (OLD, NEW)
        write_snapshot(file_system, DIRECTORY, NEW)
        assert read_snapshot(file_system, DIRECTORY) == NEW
        step += 1
    assert step > 4


def cleaned(offset: int, deltas: list[int], last_delta: int) -> bytes:
    """Returns a batch from which the cleaner has removed records."""
    records = [Record(b"key", b"value", [], 5, offset + delta) for delta in range(last_delta + 1)]
    whole = encode_batch(records, base_offset=offset)
    kept = [
        (raw.start, raw.end)
        for raw in iter_raw(whole[BATCH_OVERHEAD_BYTES:], len(records))
        if raw.offset_delta in deltas
    ]
    return filter_batch(decode_header(whole), whole[BATCH_OVERHEAD_BYTES:], kept, None)


@pytest.mark.parametrize(
    ("batches", "is_cleaned"),
    [
        ([batch(0), batch(1, 2), batch(3)], False),
        ([batch(0), batch(2, 2)], True),
        ([batch(0), cleaned(1, [0, 2], 2), batch(4)], True),
        ([batch(0), cleaned(1, [0, 1], 2)], True),
        ([batch(0), cleaned(1, [1, 2], 2)], True),
        ([batch(0), cleaned(1, [], 2), batch(4)], True),
    ],
)
def test_an_old_snapshot_may_miss_deletions_if_the_log_was_cleaned(batches: list[bytes], is_cleaned: bool) -> None:
    log = filled_log(MemoryFileSystem(), batches)
    snapshot = Snapshot(1, 1, 1000, [])
    assert may_miss_deletions(snapshot, log, 1500, 500) is is_cleaned
    assert not may_miss_deletions(snapshot, log, 1499, 500), "the tombstones after the snapshot are still there"
    assert not may_miss_deletions(Snapshot(log.end_offset, log.end_offset, 1000, []), log, 1500, 500)


def test_a_snapshot_may_miss_deletions_if_the_end_of_the_log_was_cleaned() -> None:
    log = open_log(MemoryFileSystem(), start_offset=5)
    assert may_miss_deletions(Snapshot(3, 3, 0, []), log, 1000, 500)
