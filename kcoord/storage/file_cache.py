# SPDX-License-Identifier: Apache-2.0
"""Limits the open files and loaded indexes of all logs of a process. The least recently used ones are evicted first.

Eviction only drops a reference. A thread that is reading has its own reference, and the file closes with the last one.
Several threads may use a cache without a lock: each step is one operation on a dictionary, and lost races are repaired.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from kcoord.storage.file_system import File, FileSystem
from kcoord.storage.segment_indexes import SegmentIndexes

K = TypeVar("K")
V = TypeVar("V")


class FileCache:
    """Open files by (path, is writable), and the indexes of closed segments by path."""

    __slots__ = ("_files", "_forgotten", "_indexes", "_max_files", "_max_indexes", "file_system")

    def __init__(self, file_system: FileSystem, max_files: int = 256, max_indexes: int = 16) -> None:
        self.file_system = file_system
        self._max_files = max_files
        self._max_indexes = max_indexes
        self._files: OrderedDict[tuple[str, bool], File] = OrderedDict()
        self._forgotten = 0
        self._indexes: OrderedDict[str, SegmentIndexes] = OrderedDict()

    def reader(self, path: str) -> File:
        """Returns the file, open for reading."""
        return self._get(path, False)

    def writer(self, path: str) -> File:
        """Returns the file, open for appending and reading. Creates an empty file if it does not exist."""
        return self._get(path, True)

    def _get(self, path: str, writable: bool) -> File:
        key = (path, writable)
        file = self._files.get(key)
        while file is None:
            forgotten = self._forgotten
            file = self.file_system.open_append(path) if writable else self.file_system.open_read(path)
            # If another thread has opened the file meanwhile, both use that object, and this one closes itself.
            file = self._files.setdefault(key, file)
            if self._forgotten != forgotten:
                # The path may belong to another file now.
                self._files.pop(key, None)
                file = None
            while len(self._files) > self._max_files:
                self._files.popitem(last=False)
        _touch(self._files, key)
        return file

    def indexes(self, path: str) -> SegmentIndexes | None:
        """Returns the indexes of a closed segment, or None if they are not loaded."""
        indexes = self._indexes.get(path)
        if indexes is not None:
            _touch(self._indexes, path)
        return indexes

    def keep_indexes(self, path: str, indexes: SegmentIndexes) -> None:
        """Adds or replaces the indexes of a closed segment."""
        self._indexes[path] = indexes
        while len(self._indexes) > self._max_indexes:
            self._indexes.popitem(last=False)

    def forget(self, path: str) -> None:
        """Drops a file that is about to be renamed or removed, or is not needed for some time."""
        self._forgotten += 1
        self._files.pop((path, False), None)
        self._files.pop((path, True), None)
        self._indexes.pop(path, None)

    @property
    def open_files(self) -> int:
        return len(self._files)


def _touch(entries: OrderedDict[K, V], key: K) -> None:
    try:
        entries.move_to_end(key)
    except KeyError:
        # Another thread has evicted the entry since it was read. The caller's reference stays valid.
        return
