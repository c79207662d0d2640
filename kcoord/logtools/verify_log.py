# SPDX-License-Identifier: Apache-2.0
"""Checks the segments and indexes of one partition folder, batch by batch, and continues after every finding.

The check reads each segment once. Its state between two batches:

* `_due`: the offset that the next batch should begin with. Every accepted batch sets it to its last offset plus 1.
* `_last`: the previous batch, with the `_due` and the leader epoch before it. Damage clears it.
* `_gap`: a gap that was seen before the previous batch and is not reported yet. The next batch decides: if the previous
  batch fits into the gap, its base offset is wrong (MISPLACED), and otherwise offsets are missing (GAP).
* `_gap_is_explained`: offsets may be missing before the next batch, since bytes before it are damaged or the log was
  compacted.
* `_epoch`: the leader epoch of the last batch with a correct one. Leader epochs never decrease.

Base offset and leader epoch of a batch are outside of its CRC. So they are compared with both neighbours, and the
finding names the batch that does not fit between them, not the batch after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from kcoord.logtools.decode import LogKind, RecordDescriber, group_id_of, kind_of
from kcoord.logtools.dump import frames_and_damage
from kcoord.logtools.findings import Finding, FindingKind
from kcoord.logtools.folders import LogFile, PartitionFolder, segments_in
from kcoord.logtools.lost_groups import LostGroups
from kcoord.logtools.verify_index import IndexCheck
from kcoord.runtime.serde import partition_for
from kcoord.storage.file_system import FileSystem
from kcoord.storage.recovery import marks_in
from kcoord.storage.scan import BatchFrame, Damage, DamageKind
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.record_batch import decode_header, decode_records


@dataclass(slots=True)
class LogFacts:
    """Facts about a log from the checkpoints and the metadata."""

    recovery_point: int = 0
    is_clean: bool = False
    """The folder had a clean shutdown, so no end may be torn."""
    in_use: bool = False
    """A broker may be writing at the same time, so the end may be an incomplete write."""
    may_have_gaps: bool = False
    """The log may have been compacted."""
    highest_epoch: int | None = None
    partitions: int = 0
    """The partition count of a topic whose records are routed by group; otherwise 0."""


@dataclass(slots=True)
class _Seen:
    """The previous batch, and the state before it: the offset that was due and the leader epoch."""

    frame: BatchFrame
    file: str
    due: int
    epoch_before: int


class LogCheck:
    """Checks a log. `run` yields the findings; then `start_offset` and `end_offset` are the bounds of the log."""

    def __init__(self, fs: FileSystem, partition: PartitionFolder, facts: LogFacts) -> None:
        self._fs = fs
        self._partition = partition
        self._facts = facts
        self._describer = RecordDescriber(kind_of(partition.topic))
        self._due = 0
        self._epoch = -1
        self._last: _Seen | None = None
        self._gap: Finding | None = None
        self._gap_is_explained = True
        self._lost_groups = LostGroups()
        self.batches = 0
        self.records = 0
        self.start_offset = 0

    @property
    def end_offset(self) -> int:
        return self._due

    def run(self) -> Iterator[Finding]:
        segments = segments_in(self._fs, self._partition.path)
        self._due = self.start_offset = segments[0].base_offset if segments else 0
        self._gap_is_explained = self._facts.may_have_gaps
        marks = marks_in(self._fs.list_dir(self._partition.path)) if segments and not self._facts.is_clean else set()
        for number, segment in enumerate(segments, 1):
            following = segments[number] if number < len(segments) else None
            may_be_torn = following is None or following.base_offset in marks
            is_torn = False
            for finding in self._segment(segment, is_last=following is None, may_be_torn=may_be_torn):
                is_torn = is_torn or finding.kind is FindingKind.TORN
                yield finding
            if following is not None and may_be_torn and self._due < following.base_offset:
                if not is_torn:
                    size = self._fs.size(segment.path)
                    reason = f"the end before offset {following.base_offset} was not synced and is lost"
                    yield Finding(FindingKind.TORN, segment.path, size, self._due, reason, size)
                # The next start removes the later segments, too.
                del segments[number:]
        if self._gap is not None:
            yield self._gap
        if segments and self._due < segments[-1].base_offset:
            if not self._gap_is_explained:
                yield self._gap_before(segments[-1].path, 0, segments[-1].base_offset)
            self._due = segments[-1].base_offset
        if self._due < self._facts.recovery_point and not self._facts.in_use:
            file = segments[-1].path if segments else self._partition.path
            position = self._fs.size(file) if segments else 0
            reason = f"the recovery point is {self._facts.recovery_point}, so every offset below it had been durable"
            yield Finding(FindingKind.SHORT, file, position, self._due, reason)

    def lost_groups(self) -> Iterator[Finding]:
        """Yields the lost groups of a log without other findings. The position is that of the record to append."""
        if not self._lost_groups.candidates:
            return
        segments = segments_in(self._fs, self._partition.path)
        frames = chain.from_iterable(frames_and_damage(self._fs, segment.path) for segment in segments)
        groups = self._lost_groups.find(frame.batch for frame in frames if isinstance(frame, BatchFrame))
        file = segments[-1].path
        for group_id, count in groups.items():
            reason = f"group {group_id} has {count} committed offsets, but its last record is a tombstone"
            place = self._fs.size(file), self._due
            yield Finding(FindingKind.LOST_GROUP, file, *place, reason, leader_epoch=self._epoch, group=group_id)

    def _segment(self, segment: LogFile, *, is_last: bool, may_be_torn: bool) -> Iterator[Finding]:
        index = IndexCheck(self._fs, segment, is_active=is_last, in_use=self._facts.in_use)
        damage: Damage | None = None
        has_damage = False
        for item in frames_and_damage(self._fs, segment.path):
            if isinstance(item, Damage):
                if item.kind is not DamageKind.MISPLACED and damage is None:
                    damage = item
                continue
            if damage is not None:
                has_damage = True
                yield self._damaged(segment, damage, item.position, item.base_offset)
                damage, self._gap_is_explained, self._last = None, True, None
            yield from self._order(segment, item)
            yield from self._content(segment, item)
            index.note(item)
        if damage is not None:
            has_damage = True
            size = self._fs.size(segment.path)
            if may_be_torn:
                yield from self._end(segment, damage, size)
            else:
                yield self._damaged(segment, damage, size, -1)
                self._gap_is_explained, self._last = True, None
        # After damage the index may be right about bytes that are gone, so its findings are dropped.
        if not has_damage:
            yield from index.findings()

    # --- damage -------------------------------------------------------------------------------------------------------

    def _damaged(self, segment: LogFile, damage: Damage, end: int, next_offset: int) -> Finding:
        return Finding(FindingKind.DAMAGED, segment.path, damage.position, self._due, damage.reason, end, next_offset)

    def _end(self, segment: LogFile, damage: Damage, size: int) -> Iterator[Finding]:
        """Yields the finding for invalid bytes at the end of a file that may be torn."""
        can_be_torn = damage.kind in (DamageKind.INCOMPLETE, DamageKind.GARBAGE)
        if can_be_torn and self._facts.in_use:
            return
        was_durable = self._facts.is_clean or self._due < self._facts.recovery_point
        finding = self._damaged(segment, damage, size, -1)
        if can_be_torn and not was_durable:
            finding.kind = FindingKind.TORN
        elif was_durable:
            finding.reason += ", although the end of the log had been durable"
        yield finding

    # --- order --------------------------------------------------------------------------------------------------------

    def _order(self, segment: LogFile, frame: BatchFrame) -> Iterator[Finding]:
        gap, self._gap = self._gap, None
        due = self._due
        if frame.base_offset < max(due, segment.base_offset):
            last = self._last
            size = last.frame.last_offset - last.frame.base_offset + 1 if last is not None else 0
            if (
                last is not None
                and last.due < last.frame.base_offset
                and max(last.due + size, segment.base_offset) <= frame.base_offset
            ):
                room = f"its neighbours leave room for {last.due} to {frame.base_offset - 1}"
                yield self._misplaced(last.file, last.frame, last.due, f"its base offset does not fit: {room}")
            else:
                if gap is not None:
                    yield gap
                yield self._misplaced(
                    segment.path, frame, due, f"expected at least {max(due, segment.base_offset)} here"
                )
                # The offsets that the batch should have had are missing now.
                self._gap_is_explained = True
                return
        elif gap is not None:
            yield gap
        if frame.base_offset > due and not self._gap_is_explained:
            self._gap = self._gap_before(segment.path, frame.position, frame.base_offset)
        yield from self._leader_epoch(segment, frame)
        self._gap_is_explained = self._facts.may_have_gaps
        self._due = frame.last_offset + 1

    def _misplaced(self, file: str, frame: BatchFrame, offset: int, reason: str) -> Finding:
        text = f"the batch with base offset {frame.base_offset}: {reason}"
        end = frame.position + frame.size_bytes
        return Finding(FindingKind.MISPLACED, file, frame.position, offset, text, end)

    def _gap_before(self, file: str, position: int, offset: int) -> Finding:
        reason = f"the offsets {self._due} to {offset - 1} are missing before it, and the log was never compacted"
        return Finding(FindingKind.GAP, file, position, self._due, reason, position, offset)

    def _leader_epoch(self, segment: LogFile, frame: BatchFrame) -> Iterator[Finding]:
        before, last = self._epoch, self._last
        highest = self._facts.highest_epoch
        if frame.leader_epoch < before and last is not None and frame.leader_epoch >= last.epoch_before:
            yield self._wrong_epoch(last.file, last.frame, "the next batch has", frame.leader_epoch)
            before = last.epoch_before
        elif frame.leader_epoch < before:
            yield self._wrong_epoch(segment.path, frame, "the previous batch has", before)
            self._last = _Seen(frame, segment.path, self._due, before)
            return
        elif highest is not None and frame.leader_epoch > highest:
            yield self._wrong_epoch(segment.path, frame, "the metadata log has", highest)
            self._last = _Seen(frame, segment.path, self._due, before)
            return
        self._last = _Seen(frame, segment.path, self._due, before)
        self._epoch = frame.leader_epoch

    def _wrong_epoch(self, file: str, frame: BatchFrame, why: str, expected: int) -> Finding:
        text = f"the batch has leader epoch {frame.leader_epoch}, but {why} {expected}"
        end = frame.position + frame.size_bytes
        offset = frame.base_offset
        return Finding(FindingKind.WRONG_EPOCH, file, frame.position, offset, text, end, leader_epoch=expected)

    # --- content ------------------------------------------------------------------------------------------------------

    def _content(self, segment: LogFile, frame: BatchFrame) -> Iterator[Finding]:
        self.batches += 1
        end = frame.position + frame.size_bytes
        offset = frame.base_offset
        has_foreign_group = False
        try:
            header = decode_header(frame.batch)
            for record in decode_records(frame.batch):
                offset = record.offset
                self.records += 1
                if self._describer.kind is LogKind.DATA:
                    continue
                if self._describer.kind is LogKind.OFFSETS and not header.is_control:
                    self._lost_groups.note(record, is_transactional=header.is_transactional)
                self._describer.check(record, is_control=header.is_control)
                group_id = group_id_of(record.key) if self._facts.partitions and not header.is_control else None
                home = partition_for(group_id, self._facts.partitions) if group_id else self._partition.number
                if home != self._partition.number and not has_foreign_group:
                    # One finding is enough for a batch, since a repair leaves out the whole batch.
                    has_foreign_group = True
                    reason = f"group {group_id} belongs to partition {home} of {self._facts.partitions}"
                    yield Finding(FindingKind.FOREIGN_GROUP, segment.path, frame.position, offset, reason, end)
        except DecodeError as error:
            yield Finding(FindingKind.MALFORMED, segment.path, frame.position, offset, str(error), end)
