# SPDX-License-Identifier: Apache-2.0
"""A FileSystem in memory, which models crashes and faults of a disk.

It stores separately what programs see and what a crash leaves. Content is durable after `datasync`, entries of a folder
after `sync_dir`. The caller of `crash` decides how much of the rest survives, and `fault` decides which operations
fail. Nothing here is random: the caller makes every decision.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from kcoord.storage.errors import DirectoryLockedError
from kcoord.storage.file_system import Bytes, File, Lock


@dataclass(slots=True)
class Operation:
    """One call, which `fault` may let fail.

    Kinds: write, write_at, read_at, truncate, rewrite, datasync, sync_dir, rename, remove, create, make_dirs, lock.
    """

    kind: str
    path: str
    size: int = 0


@dataclass(slots=True)
class ShortWrite:
    """A write takes only `size` bytes, without an error."""

    size: int


@dataclass(slots=True)
class TornWrite:
    """A write takes `size` bytes and then fails with `error`."""

    size: int
    error: BaseException


Fault: TypeAlias = Callable[[Operation], BaseException | ShortWrite | TornWrite | None]
Keep: TypeAlias = Callable[[str, str, int], int]
"""Decides what survives a crash: keep(kind, path, pending) returns a number from 0 to `pending`.

The kinds, in the order of the calls:

* "entries": the changes of a folder's entries that survive, oldest first.
* "bytes": the unsynced bytes of a file that survive. If the file was truncated, 0 undoes the truncation.
* "zeros": the number of lost bytes that the file has as zeros, because its size reached the disk before its content.
"""


def no_fault(operation: Operation) -> None:
    """Every operation succeeds."""


def keep_nothing(kind: str, path: str, pending: int) -> int:
    """Loses everything that is not durable."""
    return 0


def keep_everything(kind: str, path: str, pending: int) -> int:
    """Loses nothing, as if only the process ends and the machine does not."""
    return 0 if kind == "zeros" else pending


class _Content:
    """The content of a file: as programs see it (`volatile`), and as it is on disk (`durable`)."""

    __slots__ = ("changed_from", "dropped", "durable", "volatile")

    def __init__(self) -> None:
        self.volatile = bytearray()
        self.durable = bytearray()
        self.changed_from: int | None = None
        # Ranges that a failed sync dropped. Programs see them, but later syncs do not write them.
        self.dropped: list[tuple[int, int]] = []

    def touch(self, position: int) -> None:
        self.changed_from = position if self.changed_from is None else min(self.changed_from, position)

    def sync(self) -> None:
        if self.changed_from is None:
            return
        del self.durable[self.changed_from :]
        self.durable += self.volatile[len(self.durable) :]
        self.changed_from = None
        for start, end in self.dropped:
            end = min(end, len(self.durable))
            self.durable[start:end] = bytes(max(end - start, 0))

    def fail_sync(self) -> None:
        if self.changed_from is not None:
            self.dropped.append((self.changed_from, len(self.volatile)))

    def rewrite(self, position: int) -> None:
        self.dropped = [(start, min(end, position)) for start, end in self.dropped if start < position]
        self.touch(min(position, len(self.volatile)))

    def write_at(self, position: int, data: Bytes) -> None:
        end = position + len(data)
        self.volatile[position:end] = data
        # The kernel treats a dropped range as dirty again after a write.
        kept = [((start, min(stop, position)), (max(start, end), stop)) for start, stop in self.dropped]
        self.dropped = [part for parts in kept for part in parts if part[0] < part[1]]
        self.touch(position)

    def crash(self, path: str, keep: Keep) -> None:
        if self.changed_from is not None:
            changed_from = min(self.changed_from, len(self.volatile))
            pending = len(self.volatile) - changed_from
            cut_short = len(self.volatile) < len(self.durable)
            kept = _ask(keep, "bytes", path, pending or int(cut_short))
            if kept:
                lost = pending - min(kept, pending)
                zeros = _ask(keep, "zeros", path, lost)
                self.durable = self.volatile[: len(self.volatile) - lost] + bytes(zeros)
        self.volatile = bytearray(self.durable)
        self.changed_from = None
        self.dropped = []


class _Folder:
    """The entries of a folder: as programs see them, as they are on disk, and the changes between the two."""

    __slots__ = ("durable", "entries", "pending")

    def __init__(self) -> None:
        self.entries: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}
        self.pending: list[tuple[str | None, str | None, _Node]] = []

    def change(self, source: str | None, target: str | None, node: _Node) -> None:
        """Removes `source` and adds `target`, as one step."""
        _apply(self.entries, source, target, node)
        self.pending.append((source, target, node))

    def sync(self) -> None:
        for step in self.pending:
            _apply(self.durable, *step)
        self.pending.clear()

    def crash(self, path: str, keep: Keep) -> None:
        kept = _ask(keep, "entries", path, len(self.pending))
        for step in self.pending[:kept]:
            _apply(self.durable, *step)
        self.pending.clear()
        self.entries = dict(self.durable)
        for name, node in sorted(self.entries.items()):
            node.crash(f"{path}/{name}", keep)


_Node: TypeAlias = _Content | _Folder


def _apply(entries: dict[str, _Node], source: str | None, target: str | None, node: _Node) -> None:
    if source is not None:
        entries.pop(source, None)
    if target is not None:
        entries[target] = node


def _ask(keep: Keep, kind: str, path: str, pending: int) -> int:
    if pending == 0:
        return 0
    kept = keep(kind, path, pending)
    assert 0 <= kept <= pending, f"keep({kind!r}, {path!r}, {pending}) returned {kept}"
    return kept


class MemoryFile:
    """An open file. Every operation fails after a crash."""

    __slots__ = ("_content", "_epoch", "_fs", "_path")

    def __init__(self, file_system: MemoryFileSystem, path: str, content: _Content) -> None:
        self._fs = file_system
        self._path = path
        self._content = content
        self._epoch = file_system.crashes

    @property
    def descriptor(self) -> int | None:
        return None

    def write(self, data: Bytes, /) -> int:
        size = len(data)
        fault = self._begin("write", size)
        if isinstance(fault, ShortWrite | TornWrite):
            size = min(size, fault.size)
        self._content.touch(len(self._content.volatile))
        self._content.volatile += data[:size]
        if isinstance(fault, TornWrite):
            raise fault.error
        return size

    def read_at(self, position: int, size: int) -> bytes:
        self._begin("read_at", size)
        return bytes(self._content.volatile[position : position + size])

    def size(self) -> int:
        self._check()
        return len(self._content.volatile)

    def truncate(self, size: int, /) -> int:
        self._begin("truncate", size)
        if size < len(self._content.volatile):
            self._content.touch(size)
            del self._content.volatile[size:]
            # Later writes to the removed range are dirty again, so a later sync writes them.
            self._content.dropped = [(start, min(end, size)) for start, end in self._content.dropped if start < size]
        return size

    def datasync(self) -> None:
        try:
            self._begin("datasync", 0)
        except OSError:
            self._content.fail_sync()
            raise
        self._content.sync()

    def close(self) -> None:
        """Does nothing."""

    def _begin(self, kind: str, size: int) -> ShortWrite | TornWrite | None:
        self._check()
        return self._fs.begin(kind, self._path, size)

    def _check(self) -> None:
        if self._epoch != self._fs.crashes:
            raise OSError(errno.EBADF, "the machine crashed after this file was opened", self._path)


class MemoryLock:
    """A lock that a crash releases."""

    __slots__ = ("_held", "_path")

    def __init__(self, held: set[str], path: str) -> None:
        self._held = held
        self._path = path

    def release(self) -> None:
        self._held.discard(self._path)


@dataclass(slots=True)
class MemoryFileSystem:
    """A FileSystem in memory. `fault` is called before every operation; if it returns an exception, that is raised."""

    fault: Fault = no_fault
    crashes: int = 0
    operations: int = 0
    """The number of operations that were begun. A test can name the point of a fault by it."""
    _root: _Folder = field(default_factory=_Folder)
    _locks: set[str] = field(default_factory=set)

    def crash(self, keep: Keep = keep_nothing) -> None:
        """Stops and restarts the machine: open files and locks are lost, and everything that `keep` does not keep."""
        self.crashes += 1
        self._locks = set()
        self._root.crash("", keep)

    def begin(self, kind: str, path: str, size: int = 0) -> ShortWrite | TornWrite | None:
        """Counts an operation. Raises or returns the fault that `fault` returns."""
        self.operations += 1
        fault = self.fault(Operation(kind, path, size))
        if isinstance(fault, BaseException):
            raise fault
        return fault

    def open_append(self, path: str) -> File:
        folder, name = self._place(path)
        node = folder.entries.get(name)
        if node is None:
            self.begin("create", path)
            node = _Content()
            folder.change(None, name, node)
        return MemoryFile(self, path, _as_file(node, path))

    def open_read(self, path: str) -> File:
        return MemoryFile(self, path, self._file(path))

    def list_dir(self, path: str) -> list[str]:
        return sorted(self._folder(path).entries)

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def size(self, path: str) -> int:
        return len(self._file(path).volatile)

    def make_dirs(self, path: str) -> None:
        folder = self._root
        for name in _names(path):
            node = folder.entries.get(name)
            if node is None:
                self.begin("make_dirs", path)
                node = _Folder()
                folder.change(None, name, node)
            if not isinstance(node, _Folder):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            folder = node

    def rename(self, source: str, target: str) -> None:
        folder, name = self._place(source)
        target_folder, target_name = self._place(target)
        if name not in folder.entries:
            raise _missing(source)
        if folder is not target_folder:
            raise OSError(errno.EXDEV, f"a rename to another folder ({target}) is not supported", source)
        self.begin("rename", source)
        folder.change(name, target_name, folder.entries[name])

    def remove(self, path: str) -> None:
        node = self._file(path)
        self.begin("remove", path)
        folder, name = self._place(path)
        folder.change(name, None, node)

    def remove_dir(self, path: str) -> None:
        node = self._folder(path)
        if node.entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self.begin("remove", path)
        folder, name = self._place(path)
        folder.change(name, None, node)

    def rewrite(self, path: str, position: int) -> None:
        content = self._file(path)
        self.begin("rewrite", path)
        content.rewrite(position)

    def write_at(self, path: str, position: int, data: Bytes) -> None:
        content = self._file(path)
        self.begin("write_at", path, len(data))
        assert position <= len(content.volatile), f"{path}: a write at {position} leaves a hole in the file"
        content.write_at(position, data)

    def sync_dir(self, path: str) -> None:
        self.begin("sync_dir", path)
        self._folder(path).sync()

    def lock(self, path: str) -> Lock:
        self.begin("lock", path)
        self.open_append(path)
        if path in self._locks:
            raise DirectoryLockedError(f"{path} is locked by another process")
        self._locks.add(path)
        return MemoryLock(self._locks, path)

    def lock_byte(self, path: str, position: int) -> Lock:
        self.begin("lock", path)
        self.open_append(path)
        name = f"{path}@{position}"
        if name in self._locks:
            raise DirectoryLockedError(f"byte {position} of {path} is locked by another process")
        self._locks.add(name)
        return MemoryLock(self._locks, name)

    def damage(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Replaces the content of a file on disk and in memory, as a failing disk or another program would."""
        content = self._file(path)
        content.durable = bytearray(change(bytes(content.volatile)))
        content.volatile = bytearray(content.durable)
        content.changed_from = None

    def _find(self, path: str) -> _Node | None:
        node: _Node = self._root
        for name in _names(path):
            if not isinstance(node, _Folder) or name not in node.entries:
                return None
            node = node.entries[name]
        return node

    def _folder(self, path: str) -> _Folder:
        node = self._find(path)
        if node is None:
            raise _missing(path)
        if not isinstance(node, _Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def _file(self, path: str) -> _Content:
        node = self._find(path)
        if node is None:
            raise _missing(path)
        return _as_file(node, path)

    def _place(self, path: str) -> tuple[_Folder, str]:
        names = _names(path)
        return self._folder("/".join(names[:-1])), names[-1]


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _as_file(node: _Node, path: str) -> _Content:
    if isinstance(node, _Folder):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return node


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
