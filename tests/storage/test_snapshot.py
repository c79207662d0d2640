# SPDX-License-Identifier: Apache-2.0
"""The snapshot file of a shard: all of it or none, the old one or the new one."""

from __future__ import annotations

import pytest

from kcoord.runtime.snapshot import Chunk, Snapshot
from kcoord.storage.file_system import join, make_durable_dirs
from kcoord.storage.memory_file_system import Keep, MemoryFileSystem, keep_everything, keep_nothing, no_fault
from kcoord.storage.snapshot import SNAPSHOT_FILE, SnapshotError, read_snapshot, remove_snapshot, write_snapshot
from tests.storage.support import DIRECTORY, MachineCrash, crash_at

PATH = join(DIRECTORY, SNAPSHOT_FILE)
OLD = Snapshot(5, 6, 100, [Chunk(0, b"old")])
NEW = Snapshot(2**40, 2**40 + 3, 1_700_000_000_000, [Chunk(0, b"x" * 300), Chunk(7, b""), Chunk(1, bytes(range(256)))])


@pytest.fixture
def file_system() -> MemoryFileSystem:
    made = MemoryFileSystem()
    make_durable_dirs(made, DIRECTORY)
    return made


@pytest.mark.parametrize("snapshot", [OLD, NEW, Snapshot(0, 0, 0, [])])
def test_what_is_written_is_read(file_system: MemoryFileSystem, snapshot: Snapshot) -> None:
    write_snapshot(file_system, DIRECTORY, OLD)
    write_snapshot(file_system, DIRECTORY, snapshot)
    file_system.crash(keep_nothing)
    assert read_snapshot(file_system, DIRECTORY) == snapshot
    assert file_system.list_dir(DIRECTORY) == [SNAPSHOT_FILE]


def test_none_is_no_error(file_system: MemoryFileSystem) -> None:
    assert read_snapshot(file_system, DIRECTORY) is None
    write_snapshot(file_system, DIRECTORY, NEW)
    remove_snapshot(file_system, DIRECTORY)
    file_system.crash(keep_nothing)
    assert read_snapshot(file_system, DIRECTORY) is None


def test_d10_every_flipped_bit_is_found(file_system: MemoryFileSystem) -> None:
    """D-10."""
    write_snapshot(file_system, DIRECTORY, NEW)
    for bit in range(0, file_system.size(PATH) * 8, 5):
        file_system.damage(PATH, lambda data, bit=bit: _flipped(data, bit))  # type: ignore[misc]
        with pytest.raises(SnapshotError):
            read_snapshot(file_system, DIRECTORY)
        file_system.damage(PATH, lambda data, bit=bit: _flipped(data, bit))  # type: ignore[misc]
    assert read_snapshot(file_system, DIRECTORY) == NEW


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_d10_every_shorter_and_a_longer_file_is_refused(file_system: MemoryFileSystem) -> None:
    write_snapshot(file_system, DIRECTORY, NEW)
    whole = file_system.open_read(PATH).read_at(0, 10_000)
    for size in range(len(whole)):
        file_system.damage(PATH, lambda data, size=size: whole[:size])  # type: ignore[misc]
        with pytest.raises(SnapshotError):
            read_snapshot(file_system, DIRECTORY)
    file_system.damage(PATH, lambda data: whole + b"\0")
    with pytest.raises(SnapshotError):
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
        found = read_snapshot(file_system, DIRECTORY)
        assert found == NEW if is_through else found in (OLD, NEW)
        write_snapshot(file_system, DIRECTORY, NEW)
        assert read_snapshot(file_system, DIRECTORY) == NEW
        step += 1
    assert step > 4
