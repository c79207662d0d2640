# SPDX-License-Identifier: Apache-2.0
"""Checks the segments and indexes of one partition folder, batch by batch, and goes on behind what it finds.

Base offset and leader epoch of a batch lie outside of its CRC: they are checked against the neighbours, and it is the
batch that does not fit between both that is named.
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
from kcoord.runtime.shard_set import partition_for
from kcoord.storage.file_system import FileSystem
from kcoord.storage.scan import BatchFrame, Damage, DamageKind
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.record_batch import decode_header, decode_records


@dataclass(slots=True)
class LogFacts:
    """What is known of a log from elsewhere."""

    recovery_point: int = 0
    is_clean: bool = False
    """The folder was closed in an orderly way: nothing may be torn."""
    in_use: bool = False
    """A broker is writing meanwhile: the end may be half of a write."""
    may_have_gaps: bool = False
    """It may have been compacted."""
    highest_epoch: int | None = None
    partitions: int = 0
    """Of the topic, where its records are routed by group; else 0."""


@dataclass(slots=True)
class _Seen:
    """The batch before the present one, and the offset that was due when it came."""

    frame: BatchFrame
    file: str
    due: int
    epoch_before: int


class LogCheck:
    """`run` gives the findings; then `start_offset` and `end_offset` tell what the log holds."""

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
        for segment in segments:
            yield from self._segment(segment, is_last=segment is segments[-1])
        if self._gap is not None:
            yield self._gap
        if segments and self._due < segments[-1].base_offset:
            if not self._gap_is_explained:
                yield self._gap_before(segments[-1].path, 0, segments[-1].base_offset)
            self._due = segments[-1].base_offset
        if self._due < self._facts.recovery_point and not self._facts.in_use:
            file = segments[-1].path if segments else self._partition.path
            position = self._fs.size(file) if segments else 0
            reason = f"everything below offset {self._facts.recovery_point} had reached the disk"
            yield Finding(FindingKind.SHORT, file, position, self._due, reason)

    def lost_groups(self) -> Iterator[Finding]:
        """Of a log in which nothing else was found. The position is that of the record to be written."""
        if not self._lost_groups.candidates:
            return
        segments = segments_in(self._fs, self._partition.path)
        frames = chain.from_iterable(frames_and_damage(self._fs, segment.path) for segment in segments)
        found = self._lost_groups.find(frame.batch for frame in frames if isinstance(frame, BatchFrame))
        file = segments[-1].path
        for group_id, count in found.items():
            reason = f"group {group_id} has {count} committed offsets, but its last record is a tombstone"
            place = self._fs.size(file), self._due
            yield Finding(FindingKind.LOST_GROUP, file, *place, reason, leader_epoch=self._epoch, group=group_id)

    def _segment(self, segment: LogFile, *, is_last: bool) -> Iterator[Finding]:
        index = IndexCheck(self._fs, segment, is_active=is_last, in_use=self._facts.in_use)
        damage: Damage | None = None
        has_damage = False
        for found in frames_and_damage(self._fs, segment.path):
            if isinstance(found, Damage):
                if found.kind is not DamageKind.MISPLACED and damage is None:
                    damage = found
                continue
            if damage is not None:
                has_damage = True
                yield self._damaged(segment, damage, found.position, found.base_offset)
                damage, self._gap_is_explained, self._last = None, True, None
            yield from self._order(segment, found)
            yield from self._content(segment, found)
            index.note(found)
        if damage is not None:
            has_damage = True
            size = self._fs.size(segment.path)
            if is_last:
                yield from self._end(segment, damage, size)
            else:
                yield self._damaged(segment, damage, size, -1)
                self._gap_is_explained, self._last = True, None
        # Where the log is damaged the index may be right about bytes that are gone.
        if not has_damage:
            yield from index.findings()

    # --- damage -------------------------------------------------------------------------------------------------------

    def _damaged(self, segment: LogFile, damage: Damage, end: int, next_offset: int) -> Finding:
        return Finding(FindingKind.DAMAGED, segment.path, damage.position, self._due, damage.reason, end, next_offset)

    def _end(self, segment: LogFile, damage: Damage, size: int) -> Iterator[Finding]:
        """The last file ends with something that is no batch."""
        can_be_torn = damage.kind in (DamageKind.INCOMPLETE, DamageKind.GARBAGE)
        if can_be_torn and self._facts.in_use:
            return
        was_durable = self._facts.is_clean or self._due < self._facts.recovery_point
        finding = self._damaged(segment, damage, size, -1)
        if can_be_torn and not was_durable:
            finding.kind = FindingKind.TORN
        elif was_durable:
            finding.reason += ", although the end of the log had reached the disk"
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
                yield self._misplaced(last.file, last.frame, last.due, f"its base offset says otherwise: {room}")
            else:
                if gap is not None:
                    yield gap
                yield self._misplaced(segment.path, frame, due, f"the log is at {max(due, segment.base_offset)} here")
                # The offsets that it should have had are missing now.
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
            yield self._wrong_epoch(segment.path, frame, "the batch before has", before)
            self._last = _Seen(frame, segment.path, self._due, before)
            return
        elif highest is not None and frame.leader_epoch > highest:
            yield self._wrong_epoch(segment.path, frame, "the metadata log says", highest)
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
                if home != self._partition.number:
                    reason = f"group {group_id} belongs to partition {home} of {self._facts.partitions}"
                    yield Finding(FindingKind.FOREIGN_GROUP, segment.path, frame.position, offset, reason, end)
        except DecodeError as error:
            yield Finding(FindingKind.MALFORMED, segment.path, frame.position, offset, str(error), end)
