# SPDX-License-Identifier: Apache-2.0
"""Takes out of a stopped broker's data folder what a check named, and nothing else; what goes is kept elsewhere.

`SKIP` removes damaged bytes alone and leaves an empty batch in the place of their offsets, so that readers pass over
them; `TRUNCATE` ends the log before the first damage. What can be built again from the log (indexes, producer
snapshots, checkpoints) is removed. What it adds are records of lost groups alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kcoord.logtools.copying import copy_file, copy_range
from kcoord.logtools.findings import Finding, FindingKind
from kcoord.logtools.folders import FolderReader, LogFile, NoLogsError, partition_at, segments_in
from kcoord.logtools.lost_groups import new_group_record
from kcoord.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    LOCK_FILE,
    RECOVERY_POINT_FILE,
    read_offset_checkpoint,
    write_offset_checkpoint,
)
from kcoord.storage.errors import MalformedCheckpointError
from kcoord.storage.file_system import (
    File,
    FileSystem,
    join,
    make_durable_dirs,
    parent,
    read_file,
    write_all,
    write_file_atomically,
)
from kcoord.storage.log_dir import META_PROPERTIES_FILE
from kcoord.storage.scan import walk
from kcoord.storage.segment import LOG_SUFFIX
from kcoord.storage.segment_indexes import INDEX_SUFFIX, TIME_INDEX_SUFFIX
from kcoord.storage.snapshot import SNAPSHOT_FILE
from kcoord.topics.producer_files import SNAPSHOT_SUFFIX, TRANSACTION_INDEX_SUFFIX
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, decode_header, encode_batch, rewrite_header

MANIFEST: Final = "repair.json"
_REPAIRED_SUFFIX: Final = ".repaired"
_REMOVED_SUFFIX: Final = ".removed"
_DERIVED_SUFFIXES: Final = (SNAPSHOT_SUFFIX, TRANSACTION_INDEX_SUFFIX, SNAPSHOT_FILE)
_INDEX_SUFFIXES: Final = (INDEX_SUFFIX, TIME_INDEX_SUFFIX)
_MAX_DELTA: Final = 2**31 - 1
_RANGES: Final = (
    FindingKind.TORN,
    FindingKind.DAMAGED,
    FindingKind.MISPLACED,
    FindingKind.MALFORMED,
    FindingKind.FOREIGN_GROUP,
)
_SKIPPING: Final = {
    **dict.fromkeys(_RANGES, "left out"),
    FindingKind.GAP: "an empty batch for the missing offsets",
    FindingKind.WRONG_EPOCH: "leader epoch corrected",
}
_IN_LOG: Final = (*_RANGES, FindingKind.GAP, FindingKind.WRONG_EPOCH)


def _is_gap_before_file(finding: Finding) -> bool:
    return finding.kind is FindingKind.GAP and finding.position == 0


class RepairMode(Enum):
    """What becomes of damage in the middle of a log."""

    SKIP = "skip"
    TRUNCATE = "truncate"


@dataclass(slots=True)
class RepairStep:
    """One change, as it is shown before it is made."""

    file: str
    position: int
    lost_bytes: int
    what: str


class Repair:
    """Makes a plan from findings; `run` carries it out. `keep` is a new folder for what is removed."""

    def __init__(self, fs: FileSystem, path: str, mode: RepairMode, keep: str, findings: Iterable[Finding]) -> None:
        if partition_at(path) is not None and not fs.exists(join(path, META_PROPERTIES_FILE)):
            raise NoLogsError(f"{path}: give the data folder, whose checkpoints have to fit")
        self._fs = fs
        self._path = path
        self._mode = mode
        self._keep = keep
        self._in_logs: defaultdict[str, list[Finding]] = defaultdict(list)
        self._lost_groups: defaultdict[str, list[Finding]] = defaultdict(list)
        self._others: list[Finding] = []
        self._steps: list[RepairStep] = []
        self._kept: list[dict[str, object]] = []
        for finding in findings:
            if finding.kind is FindingKind.LOST_GROUP:
                self._lost_groups[parent(finding.file)].append(finding)
            else:
                (self._in_logs[parent(finding.file)] if finding.kind in _IN_LOG else self._others).append(finding)

    def plan(self) -> list[RepairStep]:
        """What `run` would do."""
        return self._walk(is_real=False)

    def run(self) -> list[RepairStep]:
        """Take the folder, which no broker may be using, and repair it."""
        lock = self._fs.lock(join(self._path, LOCK_FILE))
        try:
            return self._walk(is_real=True)
        finally:
            lock.release()

    def _walk(self, *, is_real: bool) -> list[RepairStep]:
        self._steps = []
        if is_real:
            make_durable_dirs(self._fs, self._keep)
        touched: set[tuple[str, int]] = set()
        for folder, findings in sorted(self._in_logs.items()):
            loses_batches = any(finding.kind is not FindingKind.WRONG_EPOCH for finding in findings)
            if self._mode is RepairMode.TRUNCATE and loses_batches:
                self._truncate(folder, findings, is_real=is_real)
            else:
                self._skip(folder, findings, is_real=is_real)
            partition = partition_at(folder)
            if partition is not None:
                touched.add((partition.topic, partition.number))
        for folder, findings in sorted(self._lost_groups.items()):
            self._bring_back(folder, findings, is_real=is_real)
            partition = partition_at(folder)
            if partition is not None:
                touched.add((partition.topic, partition.number))
        for finding in self._others:
            self._other(finding, touched, is_real=is_real)
        if touched:
            self._forget_checkpoints(touched, is_real=is_real)
        if is_real:
            lines = "".join(f"{json.dumps(entry)}\n" for entry in self._kept)
            write_file_atomically(self._fs, join(self._keep, MANIFEST), lines.encode())
        return self._steps

    # --- logs ---------------------------------------------------------------------------------------------------------

    def _truncate(self, folder: str, findings: Sequence[Finding], *, is_real: bool) -> None:
        first = min(findings, key=lambda finding: (finding.file, finding.position))
        segments = segments_in(self._fs, folder)
        # A file of which nothing is left goes as a whole, but for the first: there must be one.
        is_whole = first.position == 0 and first.file != segments[0].path
        later = [each for each in segments if each.path > first.file or (is_whole and each.path == first.file)]
        if not is_whole:
            size = self._fs.size(first.file)
            self._note(first.file, first.position, size - first.position, f"cut: {first.kind.value}: {first.reason}")
        for segment in later:
            why = f"{first.kind.value}: {first.reason}" if segment.path == first.file else "it follows the cut"
            self._note(segment.path, 0, self._fs.size(segment.path), f"removed: {why}")
        if is_real:
            for segment in reversed(later):
                self._remove(segment.path)
            if not is_whole:
                self._cut(first.file, first.position)
        self._drop_derived(folder, [LogFile(0, first.file), *later], is_real=is_real)

    def _cut(self, path: str, position: int) -> None:
        self._keep_range(path, position, self._fs.size(path))
        file = self._fs.open_append(path)
        try:
            file.truncate(position)
            file.datasync()
        finally:
            file.close()

    def _skip(self, folder: str, findings: Sequence[Finding], *, is_real: bool) -> None:
        segments = segments_in(self._fs, folder)
        changed = []
        due = 0
        for segment, following in zip(segments, [*segments[1:], None], strict=True):
            mine = sorted((one for one in findings if one.file == segment.path), key=lambda one: one.position)
            bridge_end = following is not None and (
                any(one.end >= self._fs.size(segment.path) for one in mine if one.kind in _RANGES)
                or any(one.file == following.path and _is_gap_before_file(one) for one in findings)
            )
            if not mine and not bridge_end:
                due = self._end_offset(segment, due)
                continue
            changed.append(segment)
            for one in mine:
                self._note(one.file, one.position, self._lost(one), f"{_SKIPPING[one.kind]}: {one.reason}")
            if is_real:
                end_offset = following.base_offset if following is not None and bridge_end else None
                due = self._rewrite(segment, mine, max(due, segment.base_offset), end_offset)
                if following is not None and self._fs.size(segment.path) == 0:
                    self._remove(segment.path)
        self._drop_derived(folder, changed, is_real=is_real)

    def _bring_back(self, folder: str, findings: Sequence[Finding], *, is_real: bool) -> None:
        """Appends a record per lost group, with the time of the last batch: a repair has no clock."""
        last = LogFile(0, findings[0].file)
        for finding in findings:
            self._note(finding.file, finding.position, 0, f"a record of the group is written: {finding.reason}")
        if is_real:
            time_ms = max(frame.max_timestamp for frame in FolderReader(self._fs, folder).batches())
            batch = encode_batch(
                [new_group_record(finding.group, time_ms) for finding in findings],
                base_offset=findings[0].offset,
                partition_leader_epoch=max(findings[0].leader_epoch, 0),
            )
            file = self._fs.open_append(last.path)
            try:
                write_all(file, batch)
                file.datasync()
            finally:
                file.close()
        self._drop_derived(folder, [last], is_real=is_real)

    @staticmethod
    def _lost(finding: Finding) -> int:
        return finding.end - finding.position if finding.kind in _RANGES else 0

    def _end_offset(self, segment: LogFile, due: int) -> int:
        """Where a sound segment ends."""
        file = self._fs.open_read(segment.path)
        try:
            for frame in walk(file, 0, file.size(), 0, verify=False):
                due = frame.last_offset + 1
        finally:
            file.close()
        return due

    def _rewrite(self, segment: LogFile, findings: Sequence[Finding], due: int, end_offset: int | None) -> int:
        """A new file from the sound parts, in one step with the old one's end; bridged up to `end_offset`.

        `due` is the offset that the log has reached before the file; returns that behind it.
        """
        target = segment.path + _REPAIRED_SUFFIX
        source = self._fs.open_read(segment.path)
        copy = self._fs.open_append(target)
        try:
            copy.truncate(0)
            writer = _SegmentWriter(source, copy, due)
            position = 0
            size = source.size()
            for finding in findings:
                writer.copy(position, finding.position)
                position = max(position, finding.position)
                if finding.kind is FindingKind.WRONG_EPOCH:
                    writer.copy_with_epoch(position, finding.end, finding.leader_epoch)
                    position = finding.end
                elif finding.kind is not FindingKind.GAP and finding.end > position:
                    self._keep_range(segment.path, position, finding.end)
                    position = finding.end
                writer.bridge_next()
            writer.copy(position, size)
            if end_offset is not None:
                writer.bridge_to(end_offset)
            copy.datasync()
        finally:
            source.close()
            copy.close()
        self._fs.rename(target, segment.path)
        self._fs.sync_dir(parent(segment.path))
        return writer.due

    def _drop_derived(self, folder: str, changed: Sequence[LogFile], *, is_real: bool) -> None:
        """Everything in the folder that was made from the bytes that are gone."""
        names = set(self._fs.list_dir(folder))
        stems = {segment.path.rpartition("/")[2].removesuffix(LOG_SUFFIX) for segment in changed}
        for name in sorted(names):
            is_index = name.endswith(_INDEX_SUFFIXES) and name.partition(".")[0] in stems
            if is_index or name.endswith(_DERIVED_SUFFIXES):
                self._note(join(folder, name), 0, 0, "removed: it is made again from the log")
                if is_real:
                    self._remove(join(folder, name))

    # --- other files --------------------------------------------------------------------------------------------------

    def _other(self, finding: Finding, touched: set[tuple[str, int]], *, is_real: bool) -> None:
        partition = partition_at(parent(finding.file))
        if finding.kind is FindingKind.SHORT and partition is not None:
            self._note(finding.file, finding.position, 0, "nothing is left to repair; the loss is accepted")
            touched.add((partition.topic, partition.number))
        elif finding.kind is FindingKind.IDENTITY or finding.file.endswith(".checkpoint"):
            self._note(finding.file, finding.position, 0, f"not repaired: {finding.reason}")
        elif finding.kind is FindingKind.CHECKPOINT and self._is_readable(finding.file):
            self._note(finding.file, 0, 0, f"wrong lines removed: {finding.reason}")
            if is_real:
                self._drop_lines(finding)
        elif self._fs.exists(finding.file):
            self._note(finding.file, 0, 0, f"removed, and made again: {finding.reason}")
            if is_real:
                self._remove(finding.file)

    def _is_readable(self, path: str) -> bool:
        try:
            return bool(read_offset_checkpoint(self._fs, path))
        except MalformedCheckpointError:
            return False

    def _drop_lines(self, finding: Finding) -> None:
        self._copy_aside(finding.file)
        offsets = read_offset_checkpoint(self._fs, finding.file)
        left = {key: offset for key, offset in offsets.items() if offset != finding.offset}
        write_offset_checkpoint(self._fs, finding.file, left)

    def _forget_checkpoints(self, touched: set[tuple[str, int]], *, is_real: bool) -> None:
        """The next start reads these logs from their beginning, and misses nothing in them."""
        marker = join(self._path, CLEAN_SHUTDOWN_FILE)
        if self._fs.exists(marker):
            self._note(marker, 0, 0, "removed: the next start checks the logs")
            if is_real:
                self._remove(marker)
        path = join(self._path, RECOVERY_POINT_FILE)
        if not self._fs.exists(path) or not self._is_readable(path):
            return
        offsets = read_offset_checkpoint(self._fs, path)
        left = {key: offset for key, offset in offsets.items() if key not in touched}
        if left != offsets:
            self._note(path, 0, 0, "the recovery points of the repaired logs are forgotten")
            if is_real:
                self._copy_aside(path)
                write_offset_checkpoint(self._fs, path, left)

    # --- keeping ------------------------------------------------------------------------------------------------------

    def _note(self, file: str, position: int, lost_bytes: int, what: str) -> None:
        self._steps.append(RepairStep(file, position, lost_bytes, what))

    def _place(self, path: str) -> str:
        """Where something of `path` is kept; the path below the data folder stays."""
        place = join(self._keep, path.removeprefix(f"{self._path}/"))
        make_durable_dirs(self._fs, parent(place))
        return place

    def _keep_range(self, path: str, position: int, end: int) -> None:
        place = f"{self._place(path)}.{position}{_REMOVED_SUFFIX}"
        file = self._fs.open_read(path)
        try:
            copy_range(self._fs, file, position, end, place)
        finally:
            file.close()
        self._fs.sync_dir(parent(place))
        self._kept.append({"file": path, "position": position, "bytes": end - position, "kept": place})

    def _copy_aside(self, path: str) -> None:
        place = self._place(path)
        if self._fs.exists(place):
            return
        size = copy_file(self._fs, path, place)
        self._fs.sync_dir(parent(place))
        self._kept.append({"file": path, "position": 0, "bytes": size, "kept": place})

    def _remove(self, path: str) -> None:
        if self._fs.exists(path):
            self._copy_aside(path)
            self._fs.remove(path)
            self._fs.sync_dir(parent(path))


class _SegmentWriter:
    """Copies ranges of whole batches, and bridges the offsets between two of them where it is told to."""

    def __init__(self, source: File, target: File, due: int) -> None:
        self._source = source
        self._target = target
        self.due = due
        self._leader_epoch = 0
        self._bridge = False

    def bridge_next(self) -> None:
        """Something was left out here: what follows is joined with an empty batch."""
        self._bridge = True

    def copy(self, position: int, end: int) -> None:
        while position < end:
            head = self._source.read_at(position, BATCH_OVERHEAD_BYTES)
            size = decode_header(head).size_bytes
            self._write(bytearray(self._source.read_at(position, size)))
            position += size

    def copy_with_epoch(self, position: int, end: int, leader_epoch: int) -> None:
        batch = bytearray(self._source.read_at(position, end - position))
        rewrite_header(batch, partition_leader_epoch=leader_epoch)
        self._write(batch)

    def _write(self, batch: bytearray) -> None:
        header = decode_header(batch)
        if self._bridge:
            self.bridge_to(header.base_offset)
        write_all(self._target, batch)
        self.due, self._leader_epoch, self._bridge = header.next_offset, header.partition_leader_epoch, False

    def bridge_to(self, offset: int) -> None:
        while self.due < offset:
            last = min(offset - 1, self.due + _MAX_DELTA)
            empty = encode_batch([], base_offset=self.due, last_offset=last, partition_leader_epoch=self._leader_epoch)
            write_all(self._target, empty)
            self.due = last + 1


def kept_files(fs: FileSystem, keep: str) -> list[dict[str, object]]:
    """What a repair has kept, from its manifest."""
    return [json.loads(line) for line in read_file(fs, join(keep, MANIFEST)).decode().splitlines()]
