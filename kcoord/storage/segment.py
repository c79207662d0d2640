# SPDX-License-Identifier: Apache-2.0
"""One segment of a log: a .log file, its two indexes, and their state in memory.

The last segment of a log is *active*: batches are appended to it, and its indexes belong to it alone. A closed segment
never changes; its indexes are in the shared FileCache and are loaded when they are needed. Cleaning replaces closed
segments by new ones (`replacement`).

Threads: one thread at a time changes a segment. Other threads may read at the same time. A reader first reads
`size_bytes` and uses only what is below it. The writer stores the bytes first, then the index entries and
`next_offset`, and `size_bytes` last. So a reader never sees a part of a batch, nor a batch without its index entry.

Crash: a file may end in a part of the last appended batches (`recovery`). Index files may lack entries or be missing;
they are rebuilt from the log.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kcoord.storage.errors import DamagedIndexError, LongSearchError, TruncateFailedError
from kcoord.storage.file_cache import FileCache
from kcoord.storage.file_system import Bytes, File, FileSlice, FileSystem, join, write_rest
from kcoord.storage.index import (
    MAX_RELATIVE_OFFSET,
    OFFSET_ENTRY_BYTES,
    TIME_ENTRY_BYTES,
    TimestampOffset,
)
from kcoord.storage.scan import BatchFrame, Damage, DamageKind, corrupt, walk
from kcoord.storage.segment_indexes import INDEX_SUFFIX, TIME_INDEX_SUFFIX, SegmentIndexes, stored_tail
from kcoord_protocol.batch_header import BATCH_OVERHEAD_BYTES, HEADER, LOG_OVERHEAD_BYTES
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import decode_header, iter_times, walk_batches

LOG_SUFFIX = ".log"
DELETED_SUFFIX = ".deleted"
_WINDOW_BYTES = 16 << 10
_UNKNOWN = -1
_MAX_TIMESTAMP = 8
"""The place of the max timestamp in the fields of a batch header."""


@dataclass(slots=True)
class LogConfig:
    """The settings of one log, with the names of Kafka's topic configs. Changes take effect with the next append."""

    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * 24 * 3600 * 1000
    segment_index_bytes: int = 10 << 20
    index_interval_bytes: int = 4096
    file_delete_delay_ms: int = 0


class BatchPosition(NamedTuple):
    """The position of a batch in its file, and its offsets."""

    position: int
    size_bytes: int
    base_offset: int
    last_offset: int
    max_timestamp: int


BatchPlace: TypeAlias = tuple[int, int, int, int]
"""A batch of an append: its position in the append, its size, its last offset and its largest timestamp.

A plain tuple, which is faster to make. Every commit makes one.
"""


class LogSlice(FileSlice):
    """Whole batches of a segment, with consecutive offsets. At least one."""

    __slots__ = ("_segment",)

    def __init__(self, segment: Segment, position: int, size: int) -> None:
        super().__init__(segment.file(), position, size)
        self._segment = segment

    def next_offset(self) -> int:
        """Returns the offset after the last record. Reads headers at the end of the slice."""
        return self._segment.offset_after(self.position + self.size)


def segment_name(base_offset: int) -> str:
    """Returns the file name of a segment without its suffix."""
    return f"{base_offset:020d}"


class Segment:
    """One segment. Its files are opened when they are needed, and FileCache may close them between two uses."""

    __slots__ = (
        "_bytes_since_index",
        "_files",
        "_first_timestamp",
        "_highest",
        "_is_closed",
        "_own_indexes",
        "_path",
        "_pinned",
        "_size",
        "base_offset",
        "config",
        "created_ms",
        "is_active",
        "is_unsynced",
        "next_offset",
    )

    def __init__(self, files: FileCache, directory: str, base_offset: int, config: LogConfig, created_ms: int) -> None:
        self.base_offset = base_offset
        self.created_ms = created_ms
        """The time when this object was made. If the records have no timestamps, segment.ms counts from it."""
        self.next_offset = base_offset
        """The offset after the last batch. Only known for the active segment."""
        self.config = config
        self.is_active = False
        """True as long as the indexes belong to this object alone: batches are appended, or the files lack entries."""
        self.is_unsynced = False
        self._is_closed = False
        self._files = files
        self._path = join(directory, segment_name(base_offset))
        self._size = _UNKNOWN
        self._first_timestamp: int | None = None
        self._highest: TimestampOffset | None = None
        self._bytes_since_index = 0
        # A file with unsynced bytes stays open: the kernel reports a late write error only to descriptors that were
        # open at that time.
        self._pinned: File | None = None
        # Indexes of the active segment. It is a dictionary because `setdefault` makes two threads use the same object.
        self._own_indexes: dict[str, SegmentIndexes] = {}

    def __repr__(self) -> str:
        return f"Segment({self.log_path})"

    @property
    def path(self) -> str:
        """The path of the segment's files, without their suffixes."""
        return self._path

    @property
    def log_path(self) -> str:
        """The path of the log file."""
        return self._path + LOG_SUFFIX

    @property
    def _fs(self) -> FileSystem:
        return self._files.file_system

    @property
    def size_bytes(self) -> int:
        """The size of the log file up to the last published batch."""
        if self._size == _UNKNOWN:
            self._size = self._fs.size(self.log_path)
        return self._size

    @property
    def largest_timestamp(self) -> TimestampOffset | None:
        """The largest timestamp, with the last offset of its batch; None if no batch has a timestamp."""
        highest = self._highest
        if highest is None:
            highest = self.indexes().times.last() if self.is_active else self._highest_to_the_end()
        if highest is None or highest.timestamp < 0:
            return None
        if not self.is_active:
            self._highest = highest
        return highest

    def _highest_to_the_end(self) -> TimestampOffset | None:
        """Looks at the batches behind the last index entry, too, as Kafka does.

        After a kill -9 the files of the indexes may lack the entry of `seal`, which is written after a roll.
        """
        indexes = self.indexes()
        highest, size = indexes.times.last(), self.size_bytes
        try:
            for place in self._places(indexes.offsets.floor_position(size), size):
                if highest is None or place.max_timestamp > highest.timestamp:
                    highest = TimestampOffset(place.max_timestamp, place.last_offset)
        except Damage:
            return highest
        return highest

    def first_timestamp(self) -> int | None:
        """Returns the largest timestamp of the first batch, from which Kafka counts segment.ms."""
        if self._first_timestamp is None and self.size_bytes >= BATCH_OVERHEAD_BYTES:
            header = self.file().read_at(0, BATCH_OVERHEAD_BYTES)
            self._first_timestamp = int(HEADER.unpack_from(header)[_MAX_TIMESTAMP])
        return self._first_timestamp

    def file(self) -> File:
        """Returns the log file for reading.

        The cache does not keep a file of a closed or detached segment. Its path may belong to a segment of another log
        soon, as a search in another thread may outlive its topic.
        """
        pinned = self._pinned
        if pinned is not None:
            return pinned
        file = self._fs.open_read(self.log_path) if self._is_closed else self._files.reader(self.log_path)
        pinned = self._pinned
        if self._is_closed or pinned is not None:  # perhaps only since it was opened
            self._files.forget(self.log_path)
        # A file of the same name may have replaced the file meanwhile. The old one was pinned before that.
        return pinned or file

    # -- changing: one thread at a time --------------------------------------------------------------------------------

    def create(self) -> None:
        """Creates the empty log file. The first `write_indexes` creates the index files."""
        # A deletion that failed may have left the file of a deleted topic of this name in the cache.
        self._files.forget(self.log_path)
        self._files.writer(self.log_path)
        self._size = 0
        self.is_active = self.is_unsynced = True
        self._own_indexes["own"] = SegmentIndexes.empty(self.base_offset)

    def should_roll(self, data_bytes: int, last_offset: int, max_timestamp: int, now_ms: int) -> bool:
        """True if an append needs a new segment, by Kafka's rule.

        The rule looks at the size, the age of the records, the size of the indexes, and the distance from the base
        offset.
        """
        if last_offset - self.base_offset > MAX_RELATIVE_OFFSET:
            return True
        size = self._size
        if size == 0:
            return False
        if size + data_bytes > self.config.segment_bytes:
            return True
        first_timestamp = self._first_timestamp
        if first_timestamp is None:
            first_timestamp = self.first_timestamp()
        if first_timestamp is None or first_timestamp < 0:
            age_ms = now_ms - self.created_ms
        else:
            age_ms = max_timestamp - first_timestamp
        if age_ms > self.config.segment_ms:
            return True
        indexes = self.indexes()
        most = self.config.segment_index_bytes
        # One entry of the time index is reserved for the last one, which is written when the segment is closed.
        offsets, times = len(indexes.offsets.positions), len(indexes.times.timestamps)
        return offsets >= most // OFFSET_ENTRY_BYTES or times >= most // TIME_ENTRY_BYTES - 1

    def write(self, data: Bytes) -> int:
        """Appends bytes without publishing them. Returns their position.

        A failed write is undone and raises OSError. If it cannot be undone, raises TruncateFailedError.
        """
        if self._pinned is None:
            self._pinned = self._files.writer(self.log_path)
        self.is_unsynced = True
        position = self._size
        try:
            taken = self._pinned.write(data)
            if taken != len(data):
                write_rest(self._pinned, data, taken)
        except OSError as error:
            try:
                self._pinned.truncate(position)
            except OSError:
                raise TruncateFailedError(
                    f"{self.log_path}: a failed write at {position} could not be undone"
                ) from error
            raise
        return position

    def note(self, position: int, size: int, last_offset: int, max_timestamp: int) -> None:
        """Adds a batch of the file to the indexes, by Kafka's rule, and publishes it."""
        self.note_all(position, [(0, size, last_offset, max_timestamp)])

    def note_all(self, position: int, batches: list[BatchPlace]) -> None:
        """Adds and publishes adjacent batches, the first of which is at `position`."""
        assert position == self._size and batches[0][2] >= self.next_offset, (
            f"S-1: a batch at position {position} with last offset {batches[0][2]} does not continue {self.log_path}, "
            f"which ends at position {self._size} with offset {self.next_offset - 1}"
        )
        indexes = self.indexes()
        highest = self._highest or indexes.times.last()
        interval_bytes, since_index = self.config.index_interval_bytes, self._bytes_since_index
        for at, size, last_offset, max_timestamp in batches:
            if highest is None or max_timestamp > highest.timestamp:
                highest = tuple.__new__(TimestampOffset, (max_timestamp, last_offset))
            if since_index > interval_bytes:
                indexes.offsets.append(last_offset, position + at)
                indexes.times.maybe_append(*highest)
                since_index = 0
            since_index += size
        self._highest = highest
        self._bytes_since_index = since_index
        self.next_offset = last_offset + 1
        self._size = position + at + size

    def adopt_end(self, size: int, next_offset: int) -> None:
        """Makes an existing file with a known end the active segment."""
        self._size = size
        self.next_offset = next_offset
        self.is_active = True

    def rewind(self, offset: int) -> int:
        """Drops everything after the last index entry with at most `offset`. Returns the position of that entry.

        The caller notes the batches from there again.
        """
        indexes = self._own_indexes.get("own") or self._load_trusted_indexes()
        self._own_indexes["own"] = indexes
        self.is_active = True
        position = indexes.rewind(offset)
        self._highest = self._first_timestamp = None
        self._bytes_since_index = 0
        self._size = position
        self.next_offset = self.base_offset
        return position

    def discard_indexes(self) -> None:
        """Empties the indexes. The caller notes all batches from position 0 again."""
        self._own_indexes["own"] = SegmentIndexes.empty(self.base_offset)
        self.is_active = True
        self._highest = self._first_timestamp = None
        self._bytes_since_index = self._size = 0
        self.next_offset = self.base_offset

    def cut(self, size: int) -> None:
        """Truncates the log file to `size`."""
        self._pinned = self._pinned or self._files.writer(self.log_path)
        self._pinned.truncate(size)
        self.is_unsynced = True

    def rewrite(self, position: int) -> None:
        """Writes the bytes from `position` again and makes them durable."""
        self._fs.rewrite(self.log_path, position)
        self.is_unsynced = True
        self.sync()

    def detach(self) -> None:
        """Keeps file and indexes of a closed segment for its readers, because their names will get another content.

        They leave the cache: a log does not close segments that were replaced, and their names may belong to another
        topic of the same name later.
        """
        indexes = self.indexes()
        self._own_indexes.setdefault("own", indexes)
        self._pinned = self.file()
        self._files.forget(self.log_path)
        self._files.forget(self._path)

    def attach(self, file: File, created_ms: int) -> None:
        """Makes this a closed segment that is read from `file`, which does not have its final name yet."""
        self.seal()
        self._pinned = file
        self.created_ms = created_ms
        self.is_active = self.is_unsynced = False

    def settle(self) -> None:
        """Ends the use of pinned objects, because the files have their final names."""
        self._files.forget(self.log_path)
        self._files.keep_indexes(self._path, self.indexes())
        self._own_indexes = {}
        self._pinned = None

    def sync(self) -> None:
        """Makes the log file durable."""
        if self.is_unsynced:
            file = self._pinned or self._files.writer(self.log_path)
            file.datasync()
            self._pinned = None
            self.is_unsynced = False

    def seal(self) -> None:
        """Adds the largest timestamp as the last entry of the time index, because no more batches follow for now."""
        if self._highest is not None and self._own_indexes:
            self.indexes().times.maybe_append(*self._highest)

    def become_inactive(self) -> None:
        """Moves the indexes to the shared cache. Called when the next segment is already active."""
        self._files.keep_indexes(self._path, self.indexes())
        self.is_active = False
        self._own_indexes = {}

    def settle_roll(self) -> None:
        """Notes that the log file and the index files were made durable after the segment was closed."""
        self._pinned = None
        self.is_unsynced = False
        self.become_inactive()

    def write_indexes(self) -> bool:
        """Writes missing entries to the index files, durably. Returns True if it may have created files."""
        indexes = self._own_indexes.get("own")
        if indexes is None:
            return False
        return indexes.store(self._fs, self._path)

    def close(self) -> None:
        """Closes all files."""
        self._is_closed = True
        self._pinned = None
        self._files.forget(self.log_path)
        self._files.forget(self._path)

    def delete(self) -> None:
        """Removes the files, the log file first. Opening a log removes index files without a log file."""
        self.close()
        self._fs.remove(self.log_path)
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
            if self._fs.exists(self._path + suffix):
                self._fs.remove(self._path + suffix)

    def retire(self) -> list[str]:
        """Renames the files to .deleted, in the order of `delete`. Returns the new paths, which the caller removes."""
        self.close()
        retired: list[str] = []
        for suffix in (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX):
            path = self._path + suffix
            if self._fs.exists(path):
                self._fs.rename(path, path + DELETED_SUFFIX)
                retired.append(path + DELETED_SUFFIX)
        return retired

    # -- indexes -------------------------------------------------------------------------------------------------------

    def indexes(self) -> SegmentIndexes:
        """Returns both indexes. Loads them on first use, or builds them if the files are missing or damaged."""
        own = self._own_indexes.get("own")
        if own is not None:
            return own
        if self.is_active:
            return self._own_indexes.setdefault("own", self._load_indexes())
        cached = None if self._is_closed else self._files.indexes(self._path)
        if cached is None:
            cached = self._load_indexes()
            if not self._is_closed:
                self._files.keep_indexes(self._path, cached)
            if self._is_closed or self._own_indexes:  # perhaps only since then, see `file`
                self._files.forget(self._path)
        return self._own_indexes.get("own") or cached

    def _load_indexes(self) -> SegmentIndexes:
        try:
            return SegmentIndexes.load(self._fs, self._path, self.base_offset, self.size_bytes)
        except (DamagedIndexError, FileNotFoundError):
            return self._build_indexes()

    def _load_trusted_indexes(self) -> SegmentIndexes:
        size = self._fs.size(self.log_path)
        return SegmentIndexes.load_trusted_part(self._fs, self._path, self.base_offset, size)

    def _build_indexes(self) -> SegmentIndexes:
        """Builds the indexes from the log file, and writes them unless the segment is active.

        The index files of the active segment belong to the writing thread.
        """
        size = self.size_bytes
        builder = Segment(self._files, "", self.base_offset, self.config, self.created_ms)
        builder._path = self._path
        builder.discard_indexes()
        try:
            for frame in walk(self.file(), 0, size, self.base_offset, verify=False):
                builder.note(frame.position, frame.size_bytes, frame.last_offset, frame.max_timestamp)
        except Damage as damage:
            raise corrupt(self.log_path, damage) from None
        builder.seal()
        if not self.is_active:
            # A log in a read-only folder can still be read.
            with suppress(OSError):
                builder.write_indexes()
        return builder._own_indexes["own"]

    def stored_index_tail(self) -> int:
        """Returns the last position in the index file, without loading the file, or 0 if there is none."""
        return stored_tail(self._fs, self._path, self.size_bytes)

    # -- reading: any thread -------------------------------------------------------------------------------------------

    def locate(self, offset: int, end: int | None = None) -> BatchPosition | None:
        """Returns the first batch before position `end` whose last offset is at least `offset`, or None."""
        end = self.size_bytes if end is None else end
        entry = self.indexes().offsets.lookup(offset)
        if entry is not None:
            try:
                return self._locate_from(entry.position, offset, end, entry.offset)
            except Damage:
                # The entry does not point to a batch with its offset. The index is wrong, but the log may be intact.
                self._distrust_indexes()
        try:
            return self._locate_from(0, offset, end, None)
        except Damage as damage:
            raise corrupt(self.log_path, damage) from None

    def _locate_from(self, position: int, offset: int, end: int, indexed_offset: int | None) -> BatchPosition | None:
        for place in self._places(position, end):
            if indexed_offset is not None and place.base_offset > indexed_offset:
                raise Damage(DamageKind.MISPLACED, place.position, indexed_offset, "the index points beyond its offset")
            indexed_offset = None
            if place.last_offset >= offset:
                return place
        return None

    def _distrust_indexes(self) -> None:
        if not self.is_active:
            self._files.keep_indexes(self._path, self._build_indexes())

    def _places(self, position: int, end: int) -> Iterator[BatchPosition]:
        """Yields the batches from `position` to `end`. Only their headers are read."""
        file = self.file()
        while position < end:
            window = file.read_at(position, min(_WINDOW_BYTES, end - position))
            at = 0
            try:
                for at, header in walk_batches(window, 0, end - position):
                    base, length, _, _, _, _, last_delta, _, max_timestamp, _, _, _, _ = header
                    size = length + LOG_OVERHEAD_BYTES
                    fields = (position + at, size, base, base + last_delta, max_timestamp)
                    # Takes half the time of the constructor of the class. A fetch makes dozens of tuples.
                    yield tuple.__new__(BatchPosition, fields)
                    at += size
            except CorruptBatchError:
                raise self._no_batch(position + at) from None
            if at <= len(window) - BATCH_OVERHEAD_BYTES:
                raise self._no_batch(position + at)
            if at == 0:
                raise Damage(DamageKind.INCOMPLETE, position, self.base_offset, "the file ends inside a batch")
            position += at

    def _no_batch(self, position: int) -> Damage:
        return Damage(DamageKind.GARBAGE, position, self.base_offset, "there is no record batch")

    def find(self, offset: int, max_bytes: int, max_offset: int | None) -> LogSlice | None:
        """Returns whole batches from the first with at least `offset`, below `max_offset`. None if there is none here.

        A first batch that is larger than `max_bytes` is whole too.
        """
        end = self.size_bytes
        if max_offset is not None and not (self.is_active and max_offset >= self.next_offset):
            bound = self.locate(max_offset, end)
            end = bound.position if bound is not None else end
        first = self.locate(offset, end)
        if first is None:
            return None
        limit = first.position + max_bytes
        if limit < end:
            end = self._whole_batches_end(first, limit, end)
        return LogSlice(self, first.position, end - first.position)

    def offset_after(self, end: int) -> int:
        """Returns the offset after the last record of the batch that ends at the position `end`."""
        last_offset = self.base_offset - 1
        try:
            for place in self._places(self.indexes().offsets.floor_position(end - 1), end):
                last_offset = place.last_offset
        except Damage as damage:
            raise corrupt(self.log_path, damage) from None
        return last_offset + 1

    def _whole_batches_end(self, first: BatchPosition, limit: int, end: int) -> int:
        """Returns the end of the last batch that ends at or before `limit`, but at least the end of the first batch."""
        first_end = first.position + first.size_bytes
        if first_end >= limit:
            return first_end
        start = max(self.indexes().offsets.floor_position(limit), first_end)
        try:
            for place in self._places(start, end):
                if place.position + place.size_bytes > limit:
                    return place.position
        except Damage as damage:
            raise corrupt(self.log_path, damage) from None
        return end

    def first_record_from(
        self, timestamp: int, start_offset: int, most_records: float = math.inf
    ) -> tuple[int, int, int] | None:
        """Returns (timestamp, offset, leader epoch) of the first record at or after both bounds, or None.

        Raises LongSearchError if a batch has more than `most_records`, or none of the records that its header promises.
        After such a header, which a producer can make, the search may go on to the end of the log.
        """
        indexes = self.indexes()
        earlier = indexes.times.lookup(timestamp)
        entry = indexes.offsets.lookup(max(earlier.offset if earlier else self.base_offset, start_offset))
        position = entry.position if entry else 0
        try:
            for place in self._places(position, self.size_bytes):
                if place.max_timestamp < timestamp or place.last_offset < start_offset:
                    continue
                batch = self.file().read_at(place.position, place.size_bytes)
                header = decode_header(batch)
                if header.records_count > most_records:
                    raise LongSearchError
                for offset, timestamp_ms in iter_times(batch):
                    if timestamp_ms >= timestamp and offset >= start_offset:
                        return timestamp_ms, offset, header.partition_leader_epoch
                if most_records < math.inf:
                    raise LongSearchError
        except Damage as damage:
            raise corrupt(self.log_path, damage) from None
        return None

    def frames(self) -> Iterator[BatchFrame]:
        """Yields all batches without a check of their CRCs, for callers that read only headers."""
        try:
            yield from walk(self.file(), 0, self.size_bytes, self.base_offset, verify=False)
        except Damage as damage:
            raise corrupt(self.log_path, damage) from None

    def batches(self, position: int, offset: int, end: int) -> Iterator[BatchFrame]:
        """Yields the batches from `position` to `end` and checks them. Raises CorruptLogError for damage."""
        try:
            yield from walk(self.file(), position, end, offset)
        except Damage as damage:
            raise corrupt(self.log_path, damage) from None
