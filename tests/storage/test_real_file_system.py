# SPDX-License-Identifier: Apache-2.0
"""The system calls of the real file system: syncs, short reads and writes, and locks."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.storage.errors import DirectoryLockedError, is_disk_full
from kcoord.storage.file_system import Lock, RealFileSystem, read_file, write_file_atomically
from kcoord.storage.memory_file_system import MemoryFileSystem


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_reads_and_writes_continue_after_short_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = RealFileSystem()
    path = f"{tmp_path}/f"
    fs.open_append(path).write(b"0123456789")
    pread, pwrite = os.pread, os.pwrite
    sizes: list[int] = []

    def read_little(fd: int, size: int, position: int) -> bytes:
        sizes.append(size)
        return pread(fd, min(size, 4), position)

    monkeypatch.setattr(os, "pread", read_little)
    file = fs.open_read(path)
    assert file.read_at(1, 8) == b"12345678"
    assert sizes == [8, 4], "no further read follows a complete one"
    assert file.read_at(1, 9) == b"123456789"
    assert file.read_at(5, 20) == b"56789"
    assert file.read_at(0, 3) == b"012"
    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, position: pwrite(fd, bytes(data[:2]), position))
    fs.write_at(path, 3, b"abcde")
    assert read_file(fs, path) == b"012abcde89"
    rewritten: list[tuple[bytes, int]] = []

    def write_little(fd: int, data: bytes, position: int) -> int:
        rewritten.append((data[:4], position))
        return pwrite(fd, data[:4], position)

    monkeypatch.setattr(os, "pwrite", write_little)
    fs.rewrite(path, 1)
    assert rewritten == [(b"12ab", 1), (b"cde8", 5), (b"9", 9)]
    assert read_file(fs, path) == b"012abcde89"


def test_syncs_reach_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = RealFileSystem()
    file = fs.open_append(f"{tmp_path}/f")
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    file.datasync()
    assert synced == [file.descriptor]
    folders: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: folders.append(os.readlink(f"/proc/self/fd/{fd}")))
    fs.sync_dir(str(tmp_path))
    assert folders == [str(tmp_path)]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    fs = RealFileSystem()
    path = f"{tmp_path}/f"
    before = descriptors()
    file = fs.open_append(path)
    assert descriptors() == before + 1
    file.write(b"x")
    file.close()
    fs.rewrite(path, 0)
    fs.write_at(path, 0, b"y")
    fs.sync_dir(str(tmp_path))
    fs.lock(path).release()
    assert descriptors() == before
    fs.open_read(path)
    assert descriptors() == before, "a file without references closes itself"


@pytest.mark.parametrize("lock", [RealFileSystem.lock, lambda fs, path: fs.lock_byte(path, 3)], ids=["file", "byte"])
@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.EAGAIN, DirectoryLockedError), (errno.EACCES, DirectoryLockedError), (errno.ENOLCK, OSError)],
)
def test_a_lock_of_another_process_differs_from_other_errors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lock: Callable[[RealFileSystem, str], Lock],
    number: int,
    error: type[Exception],
) -> None:
    """POSIX permits either of two errors if another process has the lock."""

    def refuse(*arguments: object) -> None:
        raise OSError(number, "refused")

    fs = RealFileSystem()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "lockf", refuse)
        with pytest.raises(error):
            lock(fs, f"{tmp_path}/f")
        before = descriptors()
        with pytest.raises(error):
            lock(fs, f"{tmp_path}/f")
        assert descriptors() == before
    lock(fs, f"{tmp_path}/f").release()


@pytest.mark.parametrize("is_real", [True, False])
def test_only_folders_have_entries_to_sync(tmp_path: Path, is_real: bool) -> None:
    fs = RealFileSystem() if is_real else MemoryFileSystem()
    path = f"{tmp_path}/f" if is_real else "f"
    fs.open_append(path)
    with pytest.raises(NotADirectoryError):
        fs.sync_dir(path)


@pytest.mark.parametrize("is_real", [True, False])
def test_the_leftover_of_an_atomic_replacement_is_not_in_the_next(tmp_path: Path, is_real: bool) -> None:
    fs = RealFileSystem() if is_real else MemoryFileSystem()
    path = f"{tmp_path}/f" if is_real else "f"
    fs.open_append(f"{path}.tmp").write(b"half of something longer")
    write_file_atomically(fs, path, b"whole")
    assert read_file(fs, path) == b"whole"


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, ""), True),
        (OSError(errno.EDQUOT, ""), True),
        (OSError(errno.EIO, ""), False),
        (ValueError(errno.ENOSPC), False),
    ],
)
def test_only_a_full_disk_or_quota_is_disk_full(error: BaseException, is_full: bool) -> None:
    assert is_disk_full(error) is is_full
