# SPDX-License-Identifier: Apache-2.0
"""The seam between storage and the machine: everything that storage does to files goes through FileSystem and File.

Nothing is durable before `datasync` of the file and `sync_dir` of each folder whose entries changed. Paths are strings
with "/".
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
from typing import Protocol, TypeAlias

from kcoord.storage.errors import DirectoryLockedError

Bytes: TypeAlias = bytes | bytearray | memoryview
_REWRITE_BYTES = 1 << 20


class File(Protocol):
    """An open file. Closing twice is allowed; a file that nobody refers to any more closes itself."""

    @property
    def descriptor(self) -> int | None:
        """What the kernel knows it by, if it does."""

    def write(self, data: Bytes, /) -> int:
        """Append, and return how many bytes were taken, which may be fewer than given: `write_rest` follows then."""

    def read_at(self, position: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file. Safe beside a concurrent `write`."""

    def size(self) -> int: ...

    def truncate(self, size: int, /) -> int:
        """Cut the file to `size` bytes, which is also what is returned."""

    def datasync(self) -> None:
        """Make content and size durable. After a failure, what was written since the last success may be anything."""

    def close(self) -> None: ...


class Lock(Protocol):
    """An exclusive lock that the end of the process also releases."""

    def release(self) -> None: ...


class FileSystem(Protocol):
    """The file operations that storage needs."""

    def open_append(self, path: str) -> File:
        """Open for appending and reading, creating an empty file where there is none."""

    def open_read(self, path: str) -> File: ...

    def list_dir(self, path: str) -> list[str]:
        """Names in the folder, sorted. FileNotFoundError where there is no such folder."""

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def make_dirs(self, path: str) -> None: ...

    def rename(self, source: str, target: str) -> None:
        """Atomically, replacing a file `target`."""

    def remove(self, path: str) -> None: ...

    def remove_dir(self, path: str) -> None:
        """Remove an empty folder."""

    def rewrite(self, path: str, position: int) -> None:
        """Write what the file holds from `position` on once more, unchanged.

        After a failed sync the system may take bytes for written that are not; these are waiting to be written again.
        """

    def write_at(self, path: str, position: int, data: Bytes) -> None:
        """Write over what the file holds from `position` on, and behind it."""

    def sync_dir(self, path: str) -> None:
        """Make the entries of this folder durable."""

    def lock(self, path: str) -> Lock:
        """Take the lock file exclusively, or raise DirectoryLockedError at once."""

    def lock_byte(self, path: str, position: int) -> Lock:
        """Take one byte of a lock file exclusively, or raise DirectoryLockedError at once. Many bytes of a file cost
        one descriptor.
        """


class RealFile(io.FileIO):
    """A file of the operating system. Dropping the last reference closes it: no reader is left with a recycled
    descriptor. `write` is inherited: one system call, and no call of a Python function on the way of every record.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int, mode: str) -> None:
        self._fd = fd
        try:
            super().__init__(fd, mode)
        except OSError:
            os.close(fd)
            raise

    @property
    def descriptor(self) -> int | None:
        return self._fd

    def read_at(self, position: int, size: int) -> bytes:
        data = os.pread(self._fd, size, position)
        if len(data) == size:
            return data
        parts = [data]
        missing = size - len(data)
        while data and missing > 0:
            data = os.pread(self._fd, missing, position + size - missing)
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def datasync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        self._fd = -1
        super().close()

    def __del__(self) -> None:
        # The inherited finalizer warns of a file that nobody has closed.
        self.close()


class RealLock:
    """A POSIX record lock, the kind that Kafka's own broker takes: each keeps the other out of the folder."""

    __slots__ = ("_fd", "_held", "_path")

    def __init__(self, fd: int, path: str, held: set[str]) -> None:
        self._fd = fd
        self._path = path
        self._held = held

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd != -1:
            self._held.discard(self._path)
            os.close(fd)


class ByteLock:
    """A record lock of one byte. The descriptor stays: closing it would give up every lock of the file."""

    __slots__ = ("_fd", "_held", "_key")

    def __init__(self, fd: int, key: tuple[str, int], held: set[tuple[str, int]]) -> None:
        self._fd = fd
        self._key = key
        self._held = held

    def release(self) -> None:
        if self._key in self._held:
            self._held.discard(self._key)
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._key[1])


class RealFileSystem:
    """FileSystem on the operating system. Programs that this one starts inherit none of its files (PEP 446)."""

    __slots__ = ("_byte_files", "_held_bytes", "_held_locks")

    def __init__(self) -> None:
        # A record lock belongs to the process, so a second lock of the same file would be granted within one.
        self._held_locks: set[str] = set()
        self._byte_files: dict[str, int] = {}
        self._held_bytes: set[tuple[str, int]] = set()

    def open_append(self, path: str) -> File:
        return RealFile(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644), "rb+")

    def open_read(self, path: str) -> File:
        return RealFile(os.open(path, os.O_RDONLY), "rb")

    def list_dir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def make_dirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_dir(self, path: str) -> None:
        os.rmdir(path)

    def rewrite(self, path: str, position: int) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            while data := os.pread(fd, _REWRITE_BYTES, position):
                position += os.pwrite(fd, data, position)
        finally:
            os.close(fd)

    def write_at(self, path: str, position: int, data: Bytes) -> None:
        rest = memoryview(data)
        fd = os.open(path, os.O_RDWR)
        try:
            while rest:
                written = os.pwrite(fd, rest, position)
                position += written
                rest = rest[written:]
        finally:
            os.close(fd)

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: str) -> Lock:
        resolved = os.path.realpath(path)
        if resolved in self._held_locks:
            raise _locked(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _locked(path) from None
            raise
        self._held_locks.add(resolved)
        return RealLock(fd, resolved, self._held_locks)

    def lock_byte(self, path: str, position: int) -> Lock:
        key = (path, position)
        if key in self._held_bytes:
            raise _locked(path)
        fd = self._byte_files.get(path)
        if fd is None:
            fd = self._byte_files[path] = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _locked(path) from None
            raise
        self._held_bytes.add(key)
        return ByteLock(fd, key, self._held_bytes)


def _locked(path: str) -> DirectoryLockedError:
    return DirectoryLockedError(
        f"{os.path.dirname(path)} is in use by another process, which holds {path}; "
        "stop that process or choose another log.dirs"
    )


def join(directory: str, name: str) -> str:
    """Path of an entry of a folder."""
    return f"{directory}/{name}" if directory else name


def parent(path: str) -> str:
    """The folder that holds `path`."""
    return os.path.dirname(path) or "."


def write_all(file: File, data: Bytes) -> None:
    """Append all of `data`, however many writes that takes."""
    taken = file.write(data)
    if taken != len(data):
        write_rest(file, data, taken)


def write_rest(file: File, data: Bytes, taken: int) -> None:
    """Append what is behind the first `taken` bytes of `data`, all that a write took of it."""
    rest = memoryview(data)[taken:]
    while rest:
        taken = file.write(rest)
        if taken <= 0:
            raise OSError(errno.EIO, "a write took no bytes")
        rest = rest[taken:]


def make_durable_dirs(file_system: FileSystem, path: str) -> None:
    """Make the folder and those above it, as far as they are missing, so that they are there after a crash."""
    missing = []
    while not file_system.exists(path):
        missing.append(path)
        path = parent(path)
    if missing:
        file_system.make_dirs(missing[0])
    for made in reversed(missing):
        file_system.sync_dir(parent(made))


def read_file(file_system: FileSystem, path: str) -> bytes:
    """The whole content of a (small) file."""
    file = file_system.open_read(path)
    try:
        return file.read_at(0, file.size())
    finally:
        file.close()


def write_file_atomically(file_system: FileSystem, path: str, data: bytes) -> None:
    """Replace a file so that a crash leaves the old content or the new one, and the new one is durable on return."""
    temporary = f"{path}.tmp"
    file = file_system.open_append(temporary)
    try:
        file.truncate(0)
        write_all(file, data)
        file.datasync()
    finally:
        file.close()
    file_system.rename(temporary, path)
    file_system.sync_dir(parent(path))
