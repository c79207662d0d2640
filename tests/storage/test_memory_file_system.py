# SPDX-License-Identifier: Apache-2.0
"""In a crash, the memory file system loses only what a real one may lose, and nothing that was synced."""

from __future__ import annotations

import errno
import random
from copy import deepcopy

import pytest

from kcoord.storage.file_system import read_file, write_file_atomically
from kcoord.storage.memory_file_system import (
    Keep,
    MemoryFileSystem,
    Operation,
    TornWrite,
    keep_everything,
    keep_nothing,
    no_fault,
)


def synced(content: bytes = b"old") -> MemoryFileSystem:
    """Returns a file system with the durable file f."""
    fs = MemoryFileSystem()
    file = fs.open_append("f")
    file.write(content)
    file.datasync()
    fs.sync_dir("")
    return fs


def test_unsynced_bytes_are_lost_and_synced_bytes_stay() -> None:
    fs = synced()
    fs.open_append("f").write(b"new")
    fs.crash()
    assert read_file(fs, "f") == b"old"


def test_a_file_without_its_entry_is_lost() -> None:
    fs = MemoryFileSystem()
    file = fs.open_append("f")
    file.write(b"x")
    file.datasync()
    fs.crash()
    assert fs.list_dir("") == []


def test_an_entry_without_content_is_an_empty_file() -> None:
    fs = MemoryFileSystem()
    fs.open_append("f").write(b"x")
    fs.sync_dir("")
    fs.crash()
    assert read_file(fs, "f") == b""


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_any_number_of_unsynced_bytes_may_survive(kept: int) -> None:
    fs = synced()
    fs.open_append("f").write(b"new")
    fs.crash(lambda kind, path, pending: kept if kind == "bytes" else 0)
    assert read_file(fs, "f") == b"old" + b"new"[:kept]


def test_the_size_may_survive_without_the_bytes() -> None:
    fs = synced()
    fs.open_append("f").write(b"new")
    fs.crash(lambda kind, path, pending: 1 if kind == "bytes" else pending)
    assert read_file(fs, "f") == b"oldn\0\0"


def test_entries_survive_in_the_order_of_the_changes() -> None:
    fs = synced()
    fs.open_append("g")
    fs.rename("f", "h")
    fs.crash(lambda kind, path, pending: 1 if kind == "entries" else 0)
    assert fs.list_dir("") == ["f", "g"]


def test_an_unsynced_rename_or_removal_is_undone() -> None:
    fs = synced()
    fs.rename("f", "g")
    fs.crash()
    assert fs.list_dir("") == ["f"]
    fs.remove("f")
    fs.crash()
    assert read_file(fs, "f") == b"old"


def test_an_unsynced_truncation_is_undone_or_not() -> None:
    fs = synced()
    fs.open_append("f").truncate(1)
    fs.crash()
    assert read_file(fs, "f") == b"old"
    fs.open_append("f").truncate(1)
    fs.crash(keep_everything)
    assert read_file(fs, "f") == b"o"


def test_bytes_that_a_failed_sync_dropped_are_not_written_by_the_next_sync() -> None:
    fs = synced()
    file = fs.open_append("f")
    file.write(b"lost")
    fs.fault = lambda operation: OSError(errno.EIO, "medium") if operation.kind == "datasync" else None
    with pytest.raises(OSError, match="medium"):
        file.datasync()
    fs.fault = lambda operation: None
    file.write(b"later")
    file.datasync()
    assert file.read_at(0, 100) == b"oldlostlater"
    fs.crash(keep_everything)
    assert read_file(fs, "f") == b"old\0\0\0\0later"


def test_bytes_that_a_failed_sync_dropped_are_written_after_a_rewrite() -> None:
    fs = synced()
    file = fs.open_append("f")
    file.write(b"kept")
    fs.fault = lambda operation: OSError(errno.EIO, "medium") if operation.kind == "datasync" else None
    with pytest.raises(OSError, match="medium"):
        file.datasync()
    fs.fault = lambda operation: None
    fs.rewrite("f", 3)
    file.datasync()
    fs.crash()
    assert read_file(fs, "f") == b"oldkept"


def test_a_torn_write_leaves_its_first_bytes() -> None:
    fs = synced()
    fs.fault = lambda operation: TornWrite(2, OSError(errno.ENOSPC, "full")) if operation.kind == "write" else None
    file = fs.open_append("f")
    with pytest.raises(OSError, match="full"):
        file.write(b"new")
    assert file.read_at(0, 100) == b"oldne"


def crashed(fs: MemoryFileSystem, keep: Keep) -> bytes:
    again = deepcopy(fs)
    again.crash(keep)
    return read_file(again, "f")


@pytest.mark.parametrize("seed", range(60))
def test_every_byte_is_kept_or_lost_alone(seed: int) -> None:
    """A model of single bytes: if a failed sync drops a byte, later syncs write a zero until it is written again."""
    rng = random.Random(seed)
    fs = synced(b"")
    file = fs.open_append("f")
    seen, durable, dropped = bytearray(), bytearray(), set[int]()
    changed_from: int | None = None
    for _ in range(25):
        kind = rng.choice(["write", "write", "write_at", "truncate", "sync", "fail", "rewrite"])
        position = rng.randint(0, len(seen))
        data = rng.randbytes(rng.randint(1, 5)).replace(b"\0", b"x")
        if kind == "write":
            position = len(seen)
            file.write(data)
            seen += data
        elif kind == "write_at":
            fs.write_at("f", position, data)
            seen[position : position + len(data)] = data
            dropped -= set(range(position, position + len(data)))
        elif kind == "truncate":
            file.truncate(position)
            if position == len(seen):
                continue
            del seen[position:]
            dropped = {place for place in dropped if place < position}
        elif kind == "rewrite":
            fs.rewrite("f", position)
            dropped = {place for place in dropped if place < position}
        elif kind == "sync":
            file.datasync()
            if changed_from is not None:
                durable = bytearray(0 if place in dropped else byte for place, byte in enumerate(seen))
            changed_from = None
            continue
        else:
            fs.fault = lambda operation: OSError(errno.EIO, "planted")
            with pytest.raises(OSError, match="planted"):
                file.datasync()
            fs.fault = no_fault
            if changed_from is not None:
                dropped |= set(range(changed_from, len(seen)))
            continue
        changed_from = position if changed_from is None else min(changed_from, position)
        assert read_file(fs, "f") == seen
        assert crashed(fs, keep_nothing) == durable
        kept = seen if changed_from < len(seen) or len(seen) < len(durable) else durable
        assert crashed(fs, keep_everything) == kept


def test_old_handles_and_locks_do_not_outlive_a_crash() -> None:
    fs = synced()
    file = fs.open_append("f")
    fs.lock(".lock")
    fs.crash()
    with pytest.raises(OSError, match="crashed"):
        file.write(b"x")
    fs.lock(".lock")


def test_atomic_replacement_leaves_old_or_new_at_every_step() -> None:
    steps = 0
    outcomes = set()
    while True:
        fs = MemoryFileSystem()
        write_file_atomically(fs, "f", b"old")
        limit = fs.operations + steps

        def fault(operation: Operation, fs: MemoryFileSystem = fs, limit: int = limit) -> BaseException | None:
            return KeyboardInterrupt() if fs.operations > limit else None

        fs.fault = fault
        try:
            write_file_atomically(fs, "f", b"new!")
        except KeyboardInterrupt:
            finished = False
        else:
            finished = True
        fs.fault = lambda operation: None
        for keep_all in (False, True):
            fs.crash(keep_everything if keep_all else lambda kind, path, pending: 0)
            outcomes.add(read_file(fs, "f"))
        assert outcomes <= {b"old", b"new!"}
        if finished:
            assert read_file(fs, "f") == b"new!"
            break
        steps += 1
    assert outcomes == {b"old", b"new!"}
    assert steps >= 4
