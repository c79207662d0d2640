# SPDX-License-Identifier: Apache-2.0
"""Both indexes of one segment and their files. In memory they may be ahead of the files.

The time index reaches the disk before the offset index, so it covers every batch that the offset index knows.
"""

from __future__ import annotations

from struct import Struct

from kcoord.storage.errors import DamagedIndexError
from kcoord.storage.file_system import FileSystem, read_file, write_all
from kcoord.storage.index import MAX_RELATIVE_OFFSET, OFFSET_ENTRY_BYTES, TIME_ENTRY_BYTES, OffsetIndex, TimeIndex

INDEX_SUFFIX = ".index"
TIME_INDEX_SUFFIX = ".timeindex"
_OFFSET_ENTRY = Struct(">ii")
_UNKNOWN = -1


class SegmentIndexes:
    """The indexes, and how many entries their files are known to hold; with `_UNKNOWN` the files are to be replaced."""

    __slots__ = ("_stored_offsets", "_stored_times", "offsets", "times")

    def __init__(self, offsets: OffsetIndex, times: TimeIndex, *, is_stored: bool) -> None:
        self.offsets = offsets
        self.times = times
        self._stored_offsets = len(offsets) if is_stored else _UNKNOWN
        self._stored_times = len(times) if is_stored else _UNKNOWN

    @classmethod
    def empty(cls, base_offset: int) -> SegmentIndexes:
        return cls(OffsetIndex(base_offset), TimeIndex(base_offset), is_stored=False)

    @classmethod
    def load(cls, fs: FileSystem, path: str, base_offset: int, log_size_bytes: int) -> SegmentIndexes:
        """From the files `path` + suffix; DamagedIndexError or FileNotFoundError where they are of no use."""
        offsets = OffsetIndex.decode(base_offset, read_file(fs, path + INDEX_SUFFIX), log_size_bytes)
        times = TimeIndex.decode(base_offset, read_file(fs, path + TIME_INDEX_SUFFIX))
        return cls(offsets, times, is_stored=True)

    @classmethod
    def load_trusted_part(cls, fs: FileSystem, path: str, base_offset: int, log_size_bytes: int) -> SegmentIndexes:
        """What the files hold, as far as it can be true; what they lack is not missed."""
        try:
            indexes = cls.load(fs, path, base_offset, MAX_RELATIVE_OFFSET)
        except (DamagedIndexError, FileNotFoundError):
            return cls.empty(base_offset)
        indexes.offsets.truncate_to_position(log_size_bytes)
        if len(indexes.offsets) != indexes._stored_offsets:
            indexes._distrust_files()
        return indexes

    def _distrust_files(self) -> None:
        self._stored_offsets = self._stored_times = _UNKNOWN

    def rewind(self, offset: int) -> int:
        """Drop what follows the last entry at or below `offset`, and return the position of that entry, or 0."""
        entry = self.offsets.lookup(offset)
        before = len(self.offsets), len(self.times)
        self.offsets.truncate_to_position(entry.position + 1 if entry else 0)
        self.times.truncate_to_offset(entry.offset + 1 if entry else self.offsets.base_offset)
        if (len(self.offsets), len(self.times)) != before:
            self._distrust_files()
        return entry.position if entry else 0

    def store(self, fs: FileSystem, path: str) -> bool:
        """Make the files hold every entry, durably; True where files may have been created."""
        created = _UNKNOWN in (self._stored_offsets, self._stored_times)
        if self._stored_times != len(self.times):
            stored = max(self._stored_times, 0)
            data = self.times.encode(stored)
            _store(fs, path + TIME_INDEX_SUFFIX, stored * TIME_ENTRY_BYTES, data)
            self._stored_times = stored + len(data) // TIME_ENTRY_BYTES
        if self._stored_offsets != len(self.offsets):
            stored = max(self._stored_offsets, 0)
            data = self.offsets.encode(stored)
            _store(fs, path + INDEX_SUFFIX, stored * OFFSET_ENTRY_BYTES, data)
            self._stored_offsets = stored + len(data) // OFFSET_ENTRY_BYTES
        return created


def stored_tail(fs: FileSystem, path: str, log_size_bytes: int) -> int:
    """The position in the last entry of the offset index file, read without loading it; 0 where none fits."""
    try:
        file = fs.open_read(path + INDEX_SUFFIX)
    except FileNotFoundError:
        return 0
    try:
        size = file.size()
        data = file.read_at(max(size - OFFSET_ENTRY_BYTES, 0), OFFSET_ENTRY_BYTES)
    finally:
        file.close()
    if len(data) < OFFSET_ENTRY_BYTES or size % OFFSET_ENTRY_BYTES:
        return 0
    _, position = _OFFSET_ENTRY.unpack(data)
    return max(position, 0) if position < log_size_bytes else 0


def _store(fs: FileSystem, path: str, kept_bytes: int, data: bytes) -> None:
    file = fs.open_append(path)
    try:
        file.truncate(kept_bytes)
        write_all(file, data)
        file.datasync()
    finally:
        file.close()
