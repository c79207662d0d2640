# SPDX-License-Identifier: Apache-2.0
"""The interface between storage and the operating system: all file operations of storage use FileSystem and File.

Content is durable after `datasync` of the file, and the names of files after `sync_dir` of their folder. Paths are
strings with "/".
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
    """An open file. It may be closed twice, and closes itself with its last reference."""

    @property
    def descriptor(self) -> int | None:
        """The file descriptor; None if the file is not one of the operating system."""

    def write(self, data: Bytes, /) -> int:
        """Appends, and returns the number of bytes that were written. If it is less than all, use `write_rest`."""

    def read_at(self, position: int, size: int) -> bytes:
        """Reads up to `size` bytes; fewer only at the end of the file. May run during a `write` of another thread."""

    def size(self) -> int: ...

    def truncate(self, size: int, /) -> int:
        """Truncates the file to `size` bytes. Returns `size`."""

    def datasync(self) -> None:
        """Makes content and size durable.

        After a failure, the disk may have any part of the bytes that were written since the last successful sync.
        """

    def close(self) -> None: ...


class FileSlice:
    """A part of a file that is not read yet, and that the kernel may pass from the page cache to a socket.

    Its bytes do not change: logs only append, and whatever replaces or removes a file leaves an open file as it is.
    """

    __slots__ = ("file", "position", "size")

    def __init__(self, file: File, position: int, size: int) -> None:
        self.file = file
        self.position = position
        self.size = size

    def __len__(self) -> int:
        return self.size

    def read(self) -> bytes:
        return self.file.read_at(self.position, self.size)


class Lock(Protocol):
    """An exclusive lock, which the end of the process also releases."""

    def release(self) -> None: ...


class FileSystem(Protocol):
    """The file operations that storage needs."""

    def open_append(self, path: str) -> File:
        """Opens a file for appending and reading. Creates an empty file if it does not exist."""

    def open_read(self, path: str) -> File: ...

    def list_dir(self, path: str) -> list[str]:
        """Returns the names in the folder, sorted. Raises FileNotFoundError if the folder does not exist."""

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def make_dirs(self, path: str) -> None: ...

    def rename(self, source: str, target: str) -> None:
        """Renames a file atomically. Replaces an existing file `target`."""

    def remove(self, path: str) -> None: ...

    def remove_dir(self, path: str) -> None:
        """Removes an empty folder."""

    def rewrite(self, path: str, position: int) -> None:
        """Writes the content of the file from `position` again, unchanged.

        After a failed sync the kernel may treat unwritten pages as clean. Writing them again makes them dirty, so that
        the next sync writes them.
        """

    def write_at(self, path: str, position: int, data: Bytes) -> None:
        """Overwrites the file from `position`. The file grows if the data is longer than its rest."""

    def sync_dir(self, path: str) -> None:
        """Makes the entries of this folder durable."""

    def lock(self, path: str) -> Lock:
        """Locks the file exclusively. Raises DirectoryLockedError, without waiting, if another process has the lock."""

    def lock_byte(self, path: str, position: int) -> Lock:
        """Locks one byte of a file exclusively, like `lock`. Many locked bytes of a file need one descriptor."""


class RealFile(io.FileIO):
    """A file of the operating system.

    The last reference closes the file, so a reader never has a descriptor that belongs to another file by now. `write`
    is inherited: every append is one system call, without a call of a Python function.
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
        # The inherited finalizer warns if a file was not closed.
        self.close()


class RealLock:
    """A POSIX record lock, as Kafka's broker uses it. kcoord and Kafka exclude each other from a folder."""

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
    """A record lock of one byte. The descriptor stays open, because closing it would release every lock of the file."""

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
    """The FileSystem of the operating system. Child programs inherit none of its files (PEP 446)."""

    __slots__ = ("_byte_files", "_held_bytes", "_held_locks")

    def __init__(self) -> None:
        # A record lock belongs to the process. The kernel would grant a second lock of the file to the same process.
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
        f"{os.path.dirname(path)} is in use by another process, which has locked {path}; "
        "stop that process or choose another log.dirs"
    )


def join(directory: str, name: str) -> str:
    """Returns the path of an entry of a folder."""
    return f"{directory}/{name}" if directory else name


def parent(path: str) -> str:
    """Returns the folder that contains `path`."""
    return os.path.dirname(path) or "."


def write_all(file: File, data: Bytes) -> None:
    """Appends all of `data`, with as many writes as necessary."""
    taken = file.write(data)
    if taken != len(data):
        write_rest(file, data, taken)


def write_rest(file: File, data: Bytes, taken: int) -> None:
    """Appends the rest of `data` after a write that took only its first `taken` bytes."""
    rest = memoryview(data)[taken:]
    while rest:
        taken = file.write(rest)
        if taken <= 0:
            raise OSError(errno.EIO, "a write took no bytes")
        rest = rest[taken:]


def make_durable_dirs(file_system: FileSystem, path: str) -> None:
    """Makes the folder and its missing parents, so that they exist after a crash."""
    missing = []
    while not file_system.exists(path):
        missing.append(path)
        path = parent(path)
    if missing:
        file_system.make_dirs(missing[0])
    for made in reversed(missing):
        file_system.sync_dir(parent(made))


def read_file(file_system: FileSystem, path: str) -> bytes:
    """Returns the whole content of a small file."""
    file = file_system.open_read(path)
    try:
        return file.read_at(0, file.size())
    finally:
        file.close()


def write_file_atomically(file_system: FileSystem, path: str, data: bytes) -> None:
    """Replaces a file. A crash leaves the old or the new content, and the new content is durable on return."""
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
