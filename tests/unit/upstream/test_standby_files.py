# SPDX-License-Identifier: Apache-2.0
"""The snapshot files of standbys on a disk in memory."""

from __future__ import annotations

import logging

import pytest

from kcoord.runtime.snapshot import Chunk, Snapshot
from kcoord.storage.file_system import join
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation
from kcoord.upstream.standby_files import FOLDER, StandbyCopy, StandbyFiles

DATA = "/data"
TOPIC = b"t" * 16
COPY = StandbyCopy(b"mark", Snapshot(5, 7, 100, [Chunk(0, b"state"), Chunk(2, b"packed")]))


@pytest.fixture
def disk() -> MemoryFileSystem:
    disk = MemoryFileSystem()
    disk.make_dirs(DATA)
    return disk


def files_of(disk: MemoryFileSystem, topic_id: bytes = TOPIC) -> StandbyFiles:
    return StandbyFiles(disk, DATA, topic_id)


async def test_a_copy_that_was_written_can_be_read(disk: MemoryFileSystem) -> None:
    files = files_of(disk)
    assert await files.read(3) is None
    assert files.write(3, COPY).result()
    assert files.sizes == {3: COPY.snapshot.size_bytes}
    files.stop()
    again = files_of(disk)
    assert await again.read(3) == COPY
    assert await again.read(4) is None
    assert again.sizes == {3: COPY.snapshot.size_bytes}


async def test_a_copy_of_another_topic_is_not_used(disk: MemoryFileSystem, caplog: pytest.LogCaptureFixture) -> None:
    assert files_of(disk).write_now(3, COPY)
    assert await files_of(disk, b"u" * 16).read(3) is None
    assert "is of another topic" in caplog.text


async def test_a_damaged_copy_is_not_used(disk: MemoryFileSystem, caplog: pytest.LogCaptureFixture) -> None:
    assert files_of(disk).write_now(3, COPY)
    path = join(join(DATA, FOLDER), "shard-3.kcoord")
    disk.damage(path, lambda data: data.replace(b"packed", b"pocked"))
    assert await files_of(disk).read(3) is None
    assert "its log is read from the upstream" in caplog.text
    assert files_of(disk).write_now(3, COPY)
    assert await files_of(disk).read(3) == COPY


async def test_a_removed_copy_is_gone(disk: MemoryFileSystem) -> None:
    files = files_of(disk)
    files.remove(3)
    assert files.write(3, COPY).result()
    files.remove(3)
    assert await files.read(3) is None
    assert files.sizes == {}


async def test_a_full_disk_keeps_the_last_copy_and_is_logged_once(
    disk: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files = files_of(disk)
    assert files.write_now(3, COPY)
    is_full = True

    def fault(operation: Operation) -> OSError | None:
        return OSError(28, "No space left on device") if is_full and operation.kind == "write" else None

    disk.fault = fault
    newer = StandbyCopy(b"newer", COPY.snapshot)
    assert not files.write_now(3, newer)
    assert not files.write_now(3, newer)
    assert caplog.text.count("No space left on device") == 1
    assert disk.list_dir(join(DATA, FOLDER)) == ["shard-3.kcoord"]
    assert await files.read(3) == COPY
    is_full = False
    assert files.write_now(3, newer)
    assert "are written to /data/standby again" in caplog.text
    assert await files.read(3) == newer
