# SPDX-License-Identifier: Apache-2.0
"""Checks the index files of a segment against its batches, in the same pass that checks the batches.

A missing index is not a finding, since a broker builds it again. Neither is an index of the active segment that ends
early, since index entries reach the disk later than batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kcoord.logtools.findings import Finding, FindingKind
from kcoord.logtools.folders import LogFile
from kcoord.logtools.index_entries import offset_entries, time_entries
from kcoord.storage.file_system import FileSystem, read_file
from kcoord.storage.index import OFFSET_ENTRY_BYTES, TIME_ENTRY_BYTES
from kcoord.storage.scan import BatchFrame
from kcoord.storage.segment import LOG_SUFFIX
from kcoord.storage.segment_indexes import INDEX_SUFFIX, TIME_INDEX_SUFFIX

_NEVER_WITHOUT_ENTRY_BYTES: Final = 64 * 4096
"""A closed segment with more bytes than this after its first batch has an index entry, even after many restarts."""


class IndexCheck:
    """Checks both indexes of a segment. The caller notes the batches in order, then asks for the findings."""

    def __init__(self, fs: FileSystem, segment: LogFile, *, is_active: bool, in_use: bool) -> None:
        path = segment.path.removesuffix(LOG_SUFFIX)
        self._base_offset = segment.base_offset
        self._is_active = is_active
        self._offset_path = path + INDEX_SUFFIX
        self._time_path = path + TIME_INDEX_SUFFIX
        self._skip_offsets = not fs.exists(self._offset_path) or (is_active and in_use)
        self._skip_times = not fs.exists(self._time_path) or (is_active and in_use)
        offset_data = b"" if self._skip_offsets else read_file(fs, self._offset_path)
        time_data = b"" if self._skip_times else read_file(fs, self._time_path)
        # Kafka preallocates the index files of the active segment. After a crash the unused rest is zero.
        self._offset_data = _without_unused(offset_data, OFFSET_ENTRY_BYTES)
        self._time_data = _without_unused(time_data, TIME_ENTRY_BYTES)
        self._offsets = offset_entries(segment.base_offset, self._offset_data)
        self._times = time_entries(segment.base_offset, self._time_data)
        self._next_offset_entry = 0
        self._next_time_entry = 0
        self._first_batch_bytes = 0
        self._end = 0
        self._max_timestamp = -1
        self._wrong: list[Finding] = []

    def note(self, frame: BatchFrame) -> None:
        if frame.position == 0:
            self._first_batch_bytes = frame.size_bytes
        self._end = frame.position + frame.size_bytes
        self._max_timestamp = max(self._max_timestamp, frame.max_timestamp)
        while (at := self._next_offset_entry) < len(self._offsets):
            entry = self._offsets[at]
            if entry.position > frame.position:
                break
            if entry.position < frame.position or entry.offset != frame.last_offset:
                at_frame = f"the batch at {frame.position} ends with offset {frame.last_offset}"
                self._offset_wrong(
                    at, f"the entry has offset {entry.offset} at position {entry.position}, but {at_frame}"
                )
            self._next_offset_entry += 1
        while (at := self._next_time_entry) < len(self._times):
            time = self._times[at]
            if time.offset > frame.last_offset:
                break
            if time.offset < frame.base_offset or time.timestamp not in (frame.max_timestamp, self._max_timestamp):
                reason = f"the greatest timestamp up to that offset is {self._max_timestamp}"
                self._time_wrong(at, f"the entry has timestamp {time.timestamp} at offset {time.offset}, but {reason}")
            self._next_time_entry += 1

    def findings(self) -> Iterator[Finding]:
        if self._next_offset_entry < len(self._offsets):
            self._offset_wrong(self._next_offset_entry, "the entry points beyond the end of the log file")
        if self._next_time_entry < len(self._times):
            self._time_wrong(self._next_time_entry, "the entry has an offset beyond the end of the log file")
        if len(self._offset_data) % OFFSET_ENTRY_BYTES:
            self._offset_wrong(len(self._offsets), "the file ends inside an entry")
        if len(self._time_data) % TIME_ENTRY_BYTES:
            self._time_wrong(len(self._times), "the file ends inside an entry")
        if not self._is_active:
            self._check_closed()
        yield from self._wrong

    def _check_closed(self) -> None:
        last = self._times[-1].timestamp if self._times else -1
        if not self._skip_times and last != self._max_timestamp and self._next_time_entry == len(self._times):
            reason = f"the last entry should have the greatest timestamp, {self._max_timestamp}"
            self._time_wrong(len(self._times), reason)
        covered = self._end - self._first_batch_bytes
        if not self._skip_offsets and not self._offsets and covered > _NEVER_WITHOUT_ENTRY_BYTES:
            self._offset_wrong(0, f"the index is empty, but {covered} bytes of the log file follow its first batch")

    def _offset_wrong(self, entry: int, reason: str) -> None:
        offset = self._offsets[entry].offset if entry < len(self._offsets) else self._base_offset
        self._add(self._offset_path, entry * OFFSET_ENTRY_BYTES, offset, reason)

    def _time_wrong(self, entry: int, reason: str) -> None:
        offset = self._times[entry].offset if entry < len(self._times) else self._base_offset
        self._add(self._time_path, entry * TIME_ENTRY_BYTES, offset, reason)

    def _add(self, path: str, position: int, offset: int, reason: str) -> None:
        """Adds at most one finding per file, since entries after a wrong one are compared with the wrong batches."""
        if all(finding.file != path for finding in self._wrong):
            self._wrong.append(Finding(FindingKind.INDEX, path, position, offset, reason))


def _without_unused(data: bytes, entry_bytes: int) -> bytes:
    used = len(data.rstrip(b"\0"))
    used += -used % entry_bytes
    unused = len(data) - used
    # A single zero entry is valid: offset 0 at position 0.
    return data[:used] if unused > entry_bytes and unused % entry_bytes == 0 else data
