# SPDX-License-Identifier: Apache-2.0
"""Both indexes of one segment, in memory and in files. The files may lack entries that the memory has.

The time index is written before the offset index, so it covers every batch that the offset index has.
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
    """Both indexes, and the number of entries in their files. If it is `_UNKNOWN`, the files have to be replaced."""

    __slots__ = ("_stored_offsets", "_stored_times", "offsets", "times")

    def __init__(self, offsets: OffsetIndex, times: TimeIndex, *, is_stored: bool) -> None:
        self.offsets = offsets
        self.times = times
        self._stored_offsets = len(offsets) if is_stored else _UNKNOWN
        self._stored_times = len(times) if is_stored else _UNKNOWN

    @classmethod
    def empty(cls, base_offset: int) -> SegmentIndexes:
        """Returns indexes without entries, whose files do not exist or have to be replaced."""
        return cls(OffsetIndex(base_offset), TimeIndex(base_offset), is_stored=False)

    @classmethod
    def load(cls, fs: FileSystem, path: str, base_offset: int, log_size_bytes: int) -> SegmentIndexes:
        """Loads the files. Raises DamagedIndexError if they do not fit the log, FileNotFoundError if one is missing."""
        offsets = OffsetIndex.decode(base_offset, read_file(fs, path + INDEX_SUFFIX), log_size_bytes)
        times = TimeIndex.decode(base_offset, read_file(fs, path + TIME_INDEX_SUFFIX))
        return cls(offsets, times, is_stored=True)

    @classmethod
    def load_trusted_part(cls, fs: FileSystem, path: str, base_offset: int, log_size_bytes: int) -> SegmentIndexes:
        """Loads the entries within the log file. Returns empty indexes if the files are missing or damaged."""
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
        """Drops all entries after the last one with at most `offset`. Returns the position of that entry, or 0."""
        entry = self.offsets.lookup(offset)
        before = len(self.offsets), len(self.times)
        self.offsets.truncate_to_position(entry.position + 1 if entry else 0)
        self.times.truncate_to_offset(entry.offset + 1 if entry else self.offsets.base_offset)
        if (len(self.offsets), len(self.times)) != before:
            self._distrust_files()
        return entry.position if entry else 0

    def store(self, fs: FileSystem, path: str) -> bool:
        """Writes missing entries to the files, durably. Returns True if it may have created files."""
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
    """Returns the position in the last entry of the offset index file, or 0 if it does not fit the log file.

    Only that entry is read.
    """
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
