# SPDX-License-Identifier: Apache-2.0
"""Log compaction by Kafka's rules: the last record of every key stays, with its offset and timestamp.

Theory of operation
-------------------
A log has a clean part, in which every key occurs once, and a dirty part after it. A pass has these steps:

1. Assess: the dirty part to clean ends before the active segment, the first open transaction, and segments that are
   younger than min.compaction.lag.ms.
2. Map: the cleaner reads the dirty part and notes the last offset of every key in an `OffsetMap`. If the map is full,
   the pass ends at the map's last offset.
3. Copy: all segments from the start of the log to the end of the map are copied, in groups that fit into one segment.
   A record is left out if it has no key, or if the map has a later offset for its key. A batch keeps its first and last
   offset, so offsets never change. A batch without records is left out, unless its producer still needs it.
4. Replace: `Replacement` puts the new segment in the place of its group, one group at a time.

A tombstone stays for delete.retention.ms after the first pass that copied it, so that readers can see the deletion. The
same holds for the marker of a transaction without data. The batch has this time as its delete horizon.

The cleaner has its own thread. It copies only closed segments and never changes the active one, so appends and reads
continue. Only the steps on the owner's thread (`on_owner`) change the log. A crash before a group's replacement leaves
the old segments; `replacement` describes a crash during it. Groups that were replaced stay replaced: cleaning again is
harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kcoord.storage.cleaned_transactions import AbortedTransactions, TransactionsOfPass
from kcoord.storage.cleaning_pass import Cleaned, LastOfProducer, Pass
from kcoord.storage.file_system import FileSystem
from kcoord.storage.index import MAX_RELATIVE_OFFSET, OFFSET_ENTRY_BYTES, TIME_ENTRY_BYTES
from kcoord.storage.log import Log
from kcoord.storage.log_loader import segment_number
from kcoord.storage.offset_map import OffsetMap
from kcoord.storage.record_filter import empty_batch, read_runs
from kcoord.storage.replacement import NewSegment, OnOwner, Replacement, ReplacementAbandoned, remove_leftovers
from kcoord.storage.scan import BatchFrame
from kcoord.storage.segment import Segment
from kcoord_protocol.batch_header import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader, decode_header
from kcoord_protocol.record_batch import records_of
from kcoord_protocol.record_walk import walk_records

SLICE_BYTES = 64 << 10
"""The number of bytes that are processed between two calls of `pause`."""

_HEADERS_SLICE_BYTES = 256 << 10
_ATTRIBUTES_AT = 21


@dataclass(slots=True)
class CleaningRules:
    """The cleaning settings of one log, with the names of Kafka's topic configs."""

    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = 2**63 - 1
    delete_retention_ms: int = 24 * 3600 * 1000


@dataclass(slots=True)
class Assessment:
    """The range of a log that can be cleaned: from `first_dirty_offset` to `end_offset` (exclusive)."""

    first_dirty_offset: int
    end_offset: int
    clean_bytes: int
    cleanable_bytes: int
    is_overdue: bool
    """True if a record is dirty for longer than max.compaction.lag.ms."""

    @property
    def ratio(self) -> float:
        """The share of the cleanable bytes in all bytes that a pass would read, from 0.0 to 1.0."""
        total = self.clean_bytes + self.cleanable_bytes
        return self.cleanable_bytes / total if total else 0.0

    def is_due(self, rules: CleaningRules) -> bool:
        """True if the rules require a pass now."""
        if self.cleanable_bytes == 0:
            return False
        return self.is_overdue or self.ratio > rules.min_cleanable_dirty_ratio


@contextmanager
def _abandoned_if_removed(log: Log) -> Iterator[None]:
    """Raises ReplacementAbandoned for a missing file if the owner has removed segments of the log meanwhile."""
    before = log.segments
    try:
        yield
    except FileNotFoundError as error:
        if log.is_closed or not set(before) <= set(log.segments):
            raise ReplacementAbandoned(f"{log.directory}: files were removed while they were read") from error
        raise


def assess(log: Log, first_dirty_offset: int, rules: CleaningRules, stable_offset: int, now_ms: int) -> Assessment:
    """Returns the range of the log that can be cleaned now. `first_dirty_offset` is the end of the last known pass.

    Raises ReplacementAbandoned if retention or the deletion of the topic removed segments meanwhile.
    """
    segments = log.segments
    if first_dirty_offset > segments[-1].base_offset:
        first_dirty_offset = 0
    first_dirty_offset = max(first_dirty_offset, segments[0].base_offset)
    end = min(stable_offset, log.settled_offset)
    clean_bytes = cleanable_bytes = 0
    is_overdue = False
    with _abandoned_if_removed(log):
        for segment, following in pairwise(segments):
            if following.base_offset <= first_dirty_offset:
                clean_bytes += segment.size_bytes
                continue
            lag_ms = rules.min_compaction_lag_ms
            if following.base_offset > end or (lag_ms > 0 and _newest_ms(segment) > now_ms - lag_ms):
                # The segment is too young, or has the first unstable offset. It is cleaned as a whole in a later pass.
                end = min(end, segment.base_offset)
                break
            cleanable_bytes += segment.size_bytes
            is_overdue = is_overdue or now_ms - _oldest_ms(segment) > rules.max_compaction_lag_ms
    return Assessment(first_dirty_offset, max(end, first_dirty_offset), clean_bytes, cleanable_bytes, is_overdue)


def _newest_ms(segment: Segment) -> int:
    largest = segment.largest_timestamp
    return segment.created_ms if largest is None else largest.timestamp


def _oldest_ms(segment: Segment) -> int:
    first = segment.first_timestamp()
    return segment.created_ms if first is None or first < 0 else first


class Cleaner:
    """Cleans logs, one at a time.

    `pause` is called with the number of bytes after every slice of work. It may sleep, to limit the rate, or raise an
    exception, which abandons the pass. `on_owner` is described in `replacement`.
    """

    def __init__(self, file_system: FileSystem, *, max_map_bytes: int, pause: Callable[[int], None]) -> None:
        self._file_system = file_system
        self._max_map_bytes = max_map_bytes
        self._pause = pause

    def clean(
        self,
        log: Log,
        assessment: Assessment,
        rules: CleaningRules,
        on_owner: OnOwner,
        now_ms: int,
        *,
        stable_offset: int,
        producers: Mapping[int, LastOfProducer] | None = None,
        forget_aborted: Callable[[set[int]], None] = lambda offsets: None,
    ) -> Cleaned:
        """Runs one pass over a log.

        Raises CorruptLogError if a segment is damaged, and ReplacementAbandoned if retention or the deletion of the
        topic removed segments meanwhile. Groups that were replaced before the error stay replaced.

        `forget_aborted` is called before abort markers are removed, with their offsets. A fetch that still listed such
        a transaction as aborted would make readers skip later records of its producer.
        """

        def while_open(step: Callable[[], None]) -> None:
            """Makes a step on the owner's thread. The folder of a closed log may be another worker's by then."""

            def checked() -> None:
                if log.is_closed:
                    raise ReplacementAbandoned(f"{log.directory}: the log was closed")
                step()

            on_owner(checked)

        with _abandoned_if_removed(log):
            return self._clean(
                log, assessment, rules, while_open, now_ms, stable_offset, producers or {}, forget_aborted
            )

    def _clean(
        self,
        log: Log,
        assessment: Assessment,
        rules: CleaningRules,
        on_owner: OnOwner,
        now_ms: int,
        stable_offset: int,
        producers: Mapping[int, LastOfProducer],
        forget_aborted: Callable[[set[int]], None],
    ) -> Cleaned:
        remove_leftovers(self._file_system, log.directory, on_owner)
        aborted = AbortedTransactions(self._transactional_batches(log, stable_offset))
        if aborted.first_open_offset is not None and aborted.first_open_offset < assessment.end_offset:
            assessment = assess(log, assessment.first_dirty_offset, rules, aborted.first_open_offset, now_ms)
            if assessment.cleanable_bytes == 0:
                return Cleaned(assessment.first_dirty_offset)
        segments = tuple(segment for segment in log.segments[:-1] if segment.base_offset < assessment.end_offset)
        offsets = self._build_map(segments, assessment, aborted)
        end_offset = assessment.end_offset if offsets.is_complete else offsets.map.latest_offset + 1
        if not offsets.is_complete:
            segments = tuple(segment for segment in segments if segment.base_offset < end_offset)
        transactions = TransactionsOfPass(aborted)
        result = Cleaned(end_offset, removed_aborts=transactions.removed_aborts)
        pass_ = Pass(offsets.map, transactions, producers, now_ms, rules.delete_retention_ms, result)
        groups = list(group_segments(segments, log))
        for group in groups:
            gone = len(result.removed_aborts)
            replacement = self._prepare(log, group, pass_, on_owner, is_last=group is groups[-1])
            if len(result.removed_aborts) > gone:
                forget_aborted(result.removed_aborts)
            if replacement is not None:
                replacement.run(on_owner)
        return result

    # -- the map -------------------------------------------------------------------------------------------------------

    def _frames(self, segment: Segment) -> Iterator[BatchFrame]:
        """Yields the batches of a segment and pauses between slices."""
        done_bytes = 0
        for frame in segment.batches(0, segment.base_offset, segment.size_bytes):
            yield frame
            done_bytes += frame.size_bytes
            if done_bytes >= SLICE_BYTES:
                self._pause(done_bytes)
                done_bytes = 0
        self._pause(done_bytes)

    def _transactional_batches(self, log: Log, stable_offset: int) -> Iterator[tuple[BatchHeader, bytes]]:
        """Yields the transactional and control batches of the whole log up to the stable offset.

        The marker of a transaction may be after the range that is cleaned.
        """
        for segment in log.segments:
            done_bytes = 0
            for frame in segment.frames():
                if frame.base_offset >= stable_offset:
                    return
                if frame.data[frame.at + _ATTRIBUTES_AT + 1] & (TRANSACTIONAL_BIT | CONTROL_BIT):
                    batch = frame.batch
                    yield decode_header(batch), batch
                done_bytes += frame.size_bytes
                if done_bytes >= _HEADERS_SLICE_BYTES:
                    self._pause(0)
                    done_bytes = 0

    def _build_map(
        self, segments: tuple[Segment, ...], assessment: Assessment, aborted: AbortedTransactions
    ) -> _FilledMap:
        offsets = OffsetMap(self._max_map_bytes)
        start = assessment.first_dirty_offset
        offsets.latest_offset = start - 1
        for segment in segments[max(segment_number(segments, start), 0) :]:
            for frame in self._frames(segment):
                if frame.last_offset < start:
                    continue
                batch = frame.batch
                header = decode_header(batch)
                if header.is_control or aborted.holds(header):
                    continue
                if not self._put(offsets, header, records_of(batch, 0, header), start):
                    return _FilledMap(offsets, False)
        return _FilledMap(offsets, True)

    @staticmethod
    def _put(offsets: OffsetMap, header: BatchHeader, data: bytes, start: int) -> bool:
        """Adds the keys of a batch to the map. Returns False if the map is full."""
        base_offset, count = header.base_offset, header.records_count
        runs = read_runs(data, count) if base_offset >= start else None
        if runs is not None:
            for run in runs:
                if not offsets.put_all(run.keys, [base_offset + delta for delta in run.offset_deltas]):
                    break
            else:
                return True
        for _, _, delta, key_at, key_end, _, _ in walk_records(data, count, check_headers=False, lenient=True):
            offset = base_offset + (delta >> 1)
            if key_at != -1 and offset >= start and not offsets.put(data[key_at:key_end], offset):
                return False
        return True

    # -- copying -------------------------------------------------------------------------------------------------------

    def _prepare(
        self, log: Log, group: tuple[Segment, ...], pass_: Pass, on_owner: OnOwner, *, is_last: bool
    ) -> Replacement | None:
        """Writes the segment that replaces a group and makes it durable. Returns None if it would change nothing."""
        new = NewSegment(self._file_system, log.new_segment_for(group[0]), on_owner)
        result = pass_.result
        result.bytes_before += sum(segment.size_bytes for segment in group)
        result.segments_before += len(group)
        try:
            is_changed = self._copy(group, new, pass_)
            if is_last:
                pass_.check_last_records()
            result.bytes_after += new.size_bytes
            result.segments_after += 1
            if not is_changed and len(group) == 1:
                # The new file would equal the old one.
                new.discard()
                return None
            new.finish(group[-1].created_ms)
            self._file_system.sync_dir(log.directory)
        except BaseException:
            new.discard()
            raise
        return Replacement(self._file_system, log, group, new.segment)

    def _copy(self, group: tuple[Segment, ...], new: NewSegment, pass_: Pass) -> bool:
        """Copies the batches of a group without superseded records. Returns True if any batch has changed."""
        is_changed = False
        last: BatchHeader | None = None
        unwritten_bytes = 0
        for segment in group:
            for frame in self._frames(segment):
                batch = frame.batch
                last = header = decode_header(batch)
                kept = pass_.filtered(header, batch)
                is_changed = is_changed or kept is not batch
                if kept is None:
                    continue
                kept_header = header if kept is batch else decode_header(kept)
                offsets = (header.base_offset, header.last_offset)
                kept_offsets = (kept_header.base_offset, kept_header.last_offset)
                assert kept_offsets == offsets, (
                    f"S-7: cleaning changes a batch of {segment.log_path} with the offsets {offsets} to {kept_offsets}"
                )
                new.add(kept, header.last_offset, kept_header.max_timestamp)
                last = None
                unwritten_bytes += len(kept)
                if unwritten_bytes >= SLICE_BYTES:
                    new.write()
                    self._pause(unwritten_bytes)
                    unwritten_bytes = 0
        if last is not None and len(group) > 1:
            # The new segment must end at the same offset as the group. Recovery removes the old segments by that rule.
            new.add(empty_batch(last), last.last_offset, last.max_timestamp)
        return is_changed


class _FilledMap(NamedTuple):
    map: OffsetMap
    is_complete: bool
    """True if the map has the whole dirty part. Otherwise the rest is cleaned in the next pass."""


def group_segments(segments: tuple[Segment, ...], log: Log) -> Iterator[tuple[Segment, ...]]:
    """Yields groups of consecutive segments that fit into one segment by bytes, by index size, and by offsets."""
    bases = [segment.base_offset for segment in log.segments]
    following = dict(pairwise(bases))
    config = log.config
    group: list[Segment] = []
    size_bytes = index_bytes = time_index_bytes = 0
    for segment in segments:
        indexes = segment.indexes()
        size_bytes += segment.size_bytes
        index_bytes += len(indexes.offsets) * OFFSET_ENTRY_BYTES
        time_index_bytes += len(indexes.times) * TIME_ENTRY_BYTES
        last_offset = following.get(segment.base_offset, segment.base_offset) - 1
        fits = (
            size_bytes <= config.segment_bytes
            and max(index_bytes, time_index_bytes) <= config.segment_index_bytes
            and last_offset - (group or [segment])[0].base_offset <= MAX_RELATIVE_OFFSET
        )
        if group and not fits:
            yield tuple(group)
            group, size_bytes = [], segment.size_bytes
            index_bytes = len(indexes.offsets) * OFFSET_ENTRY_BYTES
            time_index_bytes = len(indexes.times) * TIME_ENTRY_BYTES
        group.append(segment)
    if group:
        yield tuple(group)
