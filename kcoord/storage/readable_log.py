# SPDX-License-Identifier: Apache-2.0
"""The reading half of a log, which any thread may call while another thread changes the log.

It relies on two rules of `Log`: the tuple of segments is replaced as a whole and never changed, and a batch is in its
segment before `end_offset` moves beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from kcoord.storage.errors import LongSearchError, OffsetOutOfRangeError
from kcoord.storage.log_loader import segment_number
from kcoord.storage.segment import LogSlice, Segment
from kcoord_protocol.record_batch import BatchHeader, decode_header, iter_times


class RecordPosition(NamedTuple):
    """A record that was looked up by its timestamp."""

    timestamp: int
    offset: int
    leader_epoch: int


class ReadableLog:
    """The segments of one partition folder, for reading."""

    __slots__ = ("_segments", "end_offset", "start_offset")

    def __init__(self) -> None:
        self._segments: tuple[Segment, ...] = ()
        self.start_offset = 0
        """The first offset of the log. Records below it are deleted. Only the log changes it, and the end offset."""
        self.end_offset = 0
        """The offset of the next record."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, oldest first. The last one is active."""
        return self._segments

    @property
    def size_bytes(self) -> int:
        """The size of all segments without their indexes."""
        return sum(segment.size_bytes for segment in self._segments)

    def bytes_from(self, offset: int) -> int:
        """Returns the number of bytes that `batches(offset)` has to read."""
        number = max(segment_number(self._segments, offset), 0)
        first = self._segments[number]
        place = first.locate(offset)
        before = place.position if place is not None else first.size_bytes
        return sum(segment.size_bytes for segment in self._segments[number:]) - before

    def read(self, offset: int, max_bytes: int, *, max_offset: int | None = None, min_one: bool = True) -> bytes:
        """Reads what `find` finds. Returns b"" if that is nothing."""
        batches = self.find(offset, max_bytes, max_offset=max_offset, min_one=min_one)
        return b"" if batches is None else batches.read()

    def find(
        self, offset: int, max_bytes: int, *, max_offset: int | None = None, min_one: bool = True
    ) -> LogSlice | None:
        """Finds whole batches of one segment, from the batch with `offset`, all below `max_offset`.

        Returns None at the end of the log. A first batch larger than `max_bytes` is returned whole, unless `min_one` is
        False. Raises OffsetOutOfRangeError if the log does not have the offset.
        """
        end_offset = self.end_offset
        if not self.start_offset <= offset <= end_offset:
            raise OffsetOutOfRangeError(offset, self.start_offset, end_offset)
        bound = end_offset if max_offset is None else min(max_offset, end_offset)
        if offset >= bound:
            return None
        segments = self._segments
        first = max(segment_number(segments, offset), 0)
        for segment, following in zip(segments[first:], (*segments[first + 1 :], None), strict=True):
            if segment.base_offset >= bound:
                break
            is_bounded = following is None or bound < following.base_offset
            batches = segment.find(offset, max_bytes, bound if is_bounded else None)
            if batches is not None:
                return batches if min_one or len(batches) <= max_bytes else None
        return None

    def batches(self, from_offset: int | None = None) -> Iterator[tuple[BatchHeader, bytes]]:
        """Yields all batches from the one with `from_offset`, and checks them. Raises CorruptLogError for damage."""
        start = self.start_offset if from_offset is None else from_offset
        segments = self._segments
        expected = 0
        for segment in segments[max(segment_number(segments, start), 0) :]:
            size = segment.size_bytes
            place = segment.locate(start, size) if start > segment.base_offset else None
            if start > segment.base_offset and place is None:
                continue
            position = place.position if place is not None else 0
            floor = place.base_offset if place is not None else max(expected, segment.base_offset)
            for frame in segment.batches(position, floor, size):
                batch = frame.batch
                yield decode_header(batch), batch
                expected = frame.last_offset + 1

    def offset_for_timestamp(self, timestamp: int, most_records: float = math.inf) -> RecordPosition | None:
        """Returns the first record, by offset, with at least this timestamp, or None.

        Raises LongSearchError if it is not in the first batch whose header promises it, or if that has more than
        `most_records`.
        """
        for segment in self._segments:
            largest = segment.largest_timestamp
            if largest is not None and largest.timestamp >= timestamp:
                match = segment.first_record_from(timestamp, self.start_offset, most_records)
                if match is not None:
                    return RecordPosition(*match)
        return None

    def max_timestamp(self, most_records: float = math.inf) -> RecordPosition | None:
        """Returns the first record with the largest timestamp, or None if no record has a timestamp.

        Raises LongSearchError if it is in a batch of more than `most_records`.
        """
        pairs = [(largest, segment) for segment in self._segments if (largest := segment.largest_timestamp) is not None]
        if not pairs:
            return None
        largest, segment = max(pairs, key=lambda pair: pair[0].timestamp)
        place = segment.locate(largest.offset)
        if place is None:
            return None
        batch = segment.file().read_at(place.position, place.size_bytes)
        header = decode_header(batch)
        if header.records_count > most_records:
            raise LongSearchError
        for offset, timestamp_ms in iter_times(batch):
            if timestamp_ms == largest.timestamp:
                return RecordPosition(timestamp_ms, offset, header.partition_leader_epoch)
        return None
