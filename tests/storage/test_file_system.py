# SPDX-License-Identifier: Apache-2.0
"""Both file systems keep the same contract. test_memory_file_system.py checks the effects of a crash."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest

from kcoord.storage.errors import DirectoryLockedError
from kcoord.storage.file_cache import FileCache
from kcoord.storage.file_system import FileSystem, RealFileSystem, read_file, write_all, write_file_atomically
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, ShortWrite


@pytest.fixture(params=["real", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FileSystem, str]:
    """Returns a file system and an existing folder in it."""
    if request.param == "real":
        return RealFileSystem(), str(tmp_path)
    memory = MemoryFileSystem()
    memory.make_dirs("root")
    return memory, "root"


def test_append_read_and_truncate(place: tuple[FileSystem, str]) -> None:
    fs, root = place
    file = fs.open_append(f"{root}/f")
    assert file.write(b"hello ") == 6
    write_all(file, memoryview(b"world"))
    assert file.read_at(6, 100) == b"world"
    assert file.read_at(100, 5) == b""
    file.truncate(5)
    file.write(b"!")
    file.datasync()
    assert file.size() == fs.size(f"{root}/f") == 6
    file.close()
    file.close()
    assert read_file(fs, f"{root}/f") == b"hello!"


def test_open_append_continues_an_existing_file(place: tuple[FileSystem, str]) -> None:
    fs, root = place
    fs.open_append(f"{root}/f").write(b"one")
    fs.open_append(f"{root}/f").write(b"two")
    assert read_file(fs, f"{root}/f") == b"onetwo"


def test_folders_and_names(place: tuple[FileSystem, str]) -> None:
    fs, root = place
    fs.make_dirs(f"{root}/a/b")
    fs.make_dirs(f"{root}/a/b")
    for name in ("z", "m", "a"):
        fs.open_append(f"{root}/a/b/{name}").write(name.encode())
    assert fs.list_dir(f"{root}/a/b") == ["a", "m", "z"]
    fs.rename(f"{root}/a/b/z", f"{root}/a/b/a")
    assert read_file(fs, f"{root}/a/b/a") == b"z"
    fs.remove(f"{root}/a/b/m")
    assert fs.list_dir(f"{root}/a/b") == ["a"]
    assert not fs.exists(f"{root}/a/b/m")
    with pytest.raises(OSError, match="not empty"):
        fs.remove_dir(f"{root}/a/b")
    fs.remove(f"{root}/a/b/a")
    fs.remove_dir(f"{root}/a/b")
    fs.sync_dir(f"{root}/a")
    assert fs.list_dir(f"{root}/a") == []


@pytest.mark.parametrize("call", ["open_read", "list_dir", "size", "remove", "remove_dir"])
def test_missing_files_raise_file_not_found(place: tuple[FileSystem, str], call: str) -> None:
    fs, root = place
    with pytest.raises(FileNotFoundError):
        getattr(fs, call)(f"{root}/missing")


def test_rename_of_a_folder_takes_its_content_along(place: tuple[FileSystem, str]) -> None:
    fs, root = place
    fs.make_dirs(f"{root}/old")
    fs.open_append(f"{root}/old/f").write(b"x")
    fs.rename(f"{root}/old", f"{root}/new")
    assert read_file(fs, f"{root}/new/f") == b"x"
    assert fs.list_dir(root) == ["new"]


def test_rewrite_changes_nothing_that_can_be_seen(place: tuple[FileSystem, str]) -> None:
    fs, root = place
    fs.open_append(f"{root}/f").write(b"0123456789")
    fs.rewrite(f"{root}/f", 4)
    fs.rewrite(f"{root}/f", 10)
    assert read_file(fs, f"{root}/f") == b"0123456789"


def test_write_file_atomically_replaces(place: tuple[FileSystem, str]) -> None:
    fs, root = place
    for data in (b"long content", b"short"):
        write_file_atomically(fs, f"{root}/f", data)
        assert read_file(fs, f"{root}/f") == data
    assert fs.list_dir(root) == ["f"]


def test_a_file_without_references_closes_itself_without_a_warning(tmp_path: Path) -> None:
    fs = RealFileSystem()
    file = fs.open_append(f"{tmp_path}/f")
    descriptor = file.descriptor
    assert descriptor is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del file
    assert caught == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_closed_file_reads_nothing_from_a_recycled_descriptor(tmp_path: Path) -> None:
    fs = RealFileSystem()
    file = fs.open_append(f"{tmp_path}/f")
    file.close()
    other = fs.open_append(f"{tmp_path}/g")
    for call in (file.datasync, file.size, partial(file.read_at, 0, 1), partial(file.write, b"x")):
        with pytest.raises((OSError, ValueError), match=r"descriptor|closed file"):
            call()
    assert other.size() == 0


def test_a_folder_is_no_file_and_keeps_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IsADirectoryError):
        RealFileSystem().open_read(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


def test_write_all_continues_after_short_writes() -> None:
    fs = MemoryFileSystem(fault=lambda operation: ShortWrite(3) if operation.kind == "write" else None)
    file = fs.open_append("f")
    write_all(file, b"0123456789")
    assert file.read_at(0, 100) == b"0123456789"


def test_write_all_fails_if_a_write_takes_no_bytes() -> None:
    fs = MemoryFileSystem(fault=lambda operation: ShortWrite(0) if operation.kind == "write" else None)
    with pytest.raises(OSError, match="took no bytes") as caught:
        write_all(fs.open_append("f"), b"0123")
    assert caught.value.errno == errno.EIO


def test_a_lock_is_exclusive_and_can_be_taken_again(place: tuple[FileSystem, str]) -> None:
    fs, root = place
    lock = fs.lock(f"{root}/.lock")
    with pytest.raises(DirectoryLockedError):
        fs.lock(f"{root}/.lock")
    lock.release()
    lock.release()
    fs.lock(f"{root}/.lock").release()


def test_a_lock_excludes_another_process(tmp_path: Path) -> None:
    fs = RealFileSystem()
    lock = fs.lock(f"{tmp_path}/.lock")
    program = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+')\n"
        "try:\n    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError:\n    print('refused')\n"
        "else:\n    print('granted')\n"
    )

    def other_process() -> str:
        command = [sys.executable, "-c", program, f"{tmp_path}/.lock"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert other_process() == "refused"
    lock.release()
    assert other_process() == "granted"


def test_a_lock_of_another_process_is_respected(tmp_path: Path) -> None:
    program = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, f"{tmp_path}/.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(DirectoryLockedError, match="in use by another process"):
            RealFileSystem().lock(f"{tmp_path}/.lock")
        process.communicate()
    RealFileSystem().lock(f"{tmp_path}/.lock").release()


def test_the_cache_keeps_few_files_open_and_evicted_ones_stay_usable(tmp_path: Path) -> None:
    cache = FileCache(RealFileSystem(), max_files=2)
    first = cache.writer(f"{tmp_path}/0")
    first.write(b"first")
    for number in range(1, 5):
        cache.writer(f"{tmp_path}/{number}")
    assert cache.open_files == 2
    assert first.read_at(0, 5) == b"first"
    assert cache.reader(f"{tmp_path}/0").read_at(0, 5) == b"first"
    cache.forget(f"{tmp_path}/0")
    assert cache.open_files == 1


def test_fault_hook_sees_every_change() -> None:
    seen: list[Operation] = []
    fs = MemoryFileSystem(fault=seen.append)
    fs.make_dirs("d")
    file = fs.open_append("d/f")
    file.write(b"abc")
    file.datasync()
    file.truncate(1)
    file.read_at(0, 1)
    fs.rewrite("d/f", 0)
    fs.write_at("d/f", 0, b"xy")
    fs.rename("d/f", "d/g")
    fs.remove("d/g")
    fs.sync_dir("d")
    fs.remove_dir("d")
    kinds = [operation.kind for operation in seen]
    changes = ["make_dirs", "create", "write", "datasync", "truncate", "read_at", "rewrite", "write_at"]
    assert kinds == [*changes, "rename", "remove", "sync_dir", "remove"]
    assert [operation.size for operation in seen if operation.kind == "write_at"] == [2]
    assert fs.operations == len(seen)
    seen.clear()
    fs.lock("lock")
    fs.lock_byte("bytes", 7)
    assert [operation.kind for operation in seen] == ["lock", "create", "lock", "create"]
    assert fs.list_dir("") == ["bytes", "lock"]
    fs.crash()
    fs.crash()
    assert fs.crashes == 2
    with pytest.raises(OSError, match="crashed"):
        file.size()
