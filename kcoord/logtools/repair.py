# SPDX-License-Identifier: Apache-2.0
"""Repairs the data folder of a stopped broker: changes what the findings of a check name, and nothing else.

* `SKIP` removes only the damaged bytes. An empty batch takes the place of their offsets, so that readers skip them.
* `TRUNCATE` ends the log before the first damage.
* Files that are derived from the log (indexes, producer snapshots, wrong checkpoints) are removed. A broker builds
  them again.
* A lost group gets one group record (see `lost_groups`). No other record is added to a log.

`plan` and `run` execute the same code, so a plan lists exactly the steps that `run` takes. `run` holds the lock of the
folder.

Every byte is copied to the folder `keep`, and synced there, before it is removed. A rewritten segment replaces the old
file by a rename. The recovery points of changed logs are removed last, so that the next start checks these logs whole;
then the manifest of the kept files is written. After a crash in between, check and repair the folder again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kcoord.logtools.copying import copy_file, copy_range, named_errors
from kcoord.logtools.findings import Finding, FindingKind
from kcoord.logtools.folders import FolderReader, LogFile, NoLogsError, partition_at, segments_in
from kcoord.logtools.lost_groups import new_group_record
from kcoord.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    LOCK_FILE,
    RECOVERY_POINT_FILE,
    TopicPartition,
    read_worker_checkpoint,
    write_worker_checkpoint,
)
from kcoord.storage.errors import MalformedCheckpointError, StorageError
from kcoord.storage.file_system import (
    File,
    FileSystem,
    join,
    make_durable_dirs,
    parent,
    write_all,
    write_file_atomically,
)
from kcoord.storage.log_dir import META_PROPERTIES_FILE, parse_partition_folder
from kcoord.storage.rolled import UNSYNCED_SUFFIX
from kcoord.storage.scan import walk
from kcoord.storage.segment import LOG_SUFFIX
from kcoord.storage.segment_indexes import INDEX_SUFFIX, TIME_INDEX_SUFFIX
from kcoord.storage.snapshot import SNAPSHOT_FILE
from kcoord.storage.worker_checkpoints import worker_folders
from kcoord.topics.producer_files import SNAPSHOT_SUFFIX, TRANSACTION_INDEX_SUFFIX
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, decode_header, encode_batch, rewrite_header

MANIFEST: Final = "repair.json"
_REPAIRED_SUFFIX: Final = ".repaired"
_REMOVED_SUFFIX: Final = ".removed"
_PRODUCER_STATE_SUFFIXES: Final = (SNAPSHOT_SUFFIX, TRANSACTION_INDEX_SUFFIX)
_DERIVED_SUFFIXES: Final = (*_PRODUCER_STATE_SUFFIXES, SNAPSHOT_FILE, UNSYNCED_SUFFIX)
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
    """How damage in the middle of a log is repaired."""

    SKIP = "skip"
    TRUNCATE = "truncate"


@dataclass(slots=True)
class RepairStep:
    """One change. `lost_bytes` is the number of log bytes that it removes."""

    file: str
    position: int
    lost_bytes: int
    what: str


class Repair:
    """Plans a repair from findings; `run` executes it. `keep` is the new folder for removed bytes and files."""

    def __init__(self, fs: FileSystem, path: str, mode: RepairMode, keep: str, findings: Iterable[Finding]) -> None:
        if partition_at(path) is not None and not fs.exists(join(path, META_PROPERTIES_FILE)):
            raise NoLogsError(
                f"{path}: this is a partition folder; give its data folder, since a repair changes checkpoints too"
            )
        self._fs = fs
        self._path = path
        self._mode = mode
        self._keep = keep
        self._in_logs: defaultdict[str, list[Finding]] = defaultdict(list)
        self._lost_groups: defaultdict[str, list[Finding]] = defaultdict(list)
        self._with_damaged_producer_state: set[str] = set()
        self._other_findings: list[Finding] = []
        self._steps: list[RepairStep] = []
        self._kept: list[dict[str, object]] = []
        for finding in findings:
            if finding.kind is FindingKind.LOST_GROUP:
                self._lost_groups[parent(finding.file)].append(finding)
            elif finding.file.endswith(TRANSACTION_INDEX_SUFFIX):
                self._with_damaged_producer_state.add(parent(finding.file))
            else:
                in_log = finding.kind in _IN_LOG
                (self._in_logs[parent(finding.file)] if in_log else self._other_findings).append(finding)

    def plan(self) -> list[RepairStep]:
        """Returns the steps that `run` would take. Nothing is changed."""
        return self._walk(is_real=False)

    def run(self) -> list[RepairStep]:
        """Locks the folder, repairs it and returns the steps. Raises DirectoryLockedError if a broker uses it."""
        lock = self._fs.lock(join(self._path, LOCK_FILE))
        try:
            with named_errors(self._path):
                return self._walk(is_real=True)
        finally:
            lock.release()

    def _walk(self, *, is_real: bool) -> list[RepairStep]:
        self._steps = []
        if is_real:
            if self._fs.exists(self._keep) and self._fs.list_dir(self._keep):
                raise StorageError(f"{self._keep}: already exists; a repair needs a new folder for what it removes")
            make_durable_dirs(self._fs, self._keep)
        touched: set[TopicPartition] = set()
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
            self._restore_lost_groups(folder, findings, is_real=is_real)
            partition = partition_at(folder)
            if partition is not None:
                touched.add((partition.topic, partition.number))
        for folder in sorted(self._with_damaged_producer_state.difference(self._in_logs)):
            self._drop_derived(folder, [], suffixes=_PRODUCER_STATE_SUFFIXES, is_real=is_real)
        for finding in self._other_findings:
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
        # A file that would become empty is removed. The first file stays, since a log has at least one segment.
        is_whole = first.position == 0 and first.file != segments[0].path
        later = [
            segment for segment in segments if segment.path > first.file or (is_whole and segment.path == first.file)
        ]
        if not is_whole:
            size = self._fs.size(first.file)
            self._note(first.file, first.position, size - first.position, f"cut: {first.kind.value}: {first.reason}")
        for segment in later:
            why = f"{first.kind.value}: {first.reason}" if segment.path == first.file else "it follows the truncation"
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
            mine = sorted(
                (finding for finding in findings if finding.file == segment.path), key=lambda finding: finding.position
            )
            bridge_end = following is not None and (
                any(finding.end >= self._fs.size(segment.path) for finding in mine if finding.kind in _RANGES)
                or any(finding.file == following.path and _is_gap_before_file(finding) for finding in findings)
            )
            if not mine and not bridge_end:
                due = self._end_offset(segment, due)
                continue
            changed.append(segment)
            for finding in mine:
                what = f"{_SKIPPING[finding.kind]}: {finding.reason}"
                self._note(finding.file, finding.position, self._lost(finding), what)
            if is_real:
                end_offset = following.base_offset if following is not None and bridge_end else None
                due = self._rewrite(segment, mine, max(due, segment.base_offset), end_offset)
                if following is not None and self._fs.size(segment.path) == 0:
                    self._remove(segment.path)
        self._drop_derived(folder, changed, is_real=is_real)

    def _restore_lost_groups(self, folder: str, findings: Sequence[Finding], *, is_real: bool) -> None:
        """Appends a record per lost group, with the greatest timestamp of the log, since a repair has no clock."""
        last = LogFile(0, findings[0].file)
        for finding in findings:
            self._note(finding.file, finding.position, 0, f"a group record is appended: {finding.reason}")
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
        """Returns the end offset of a segment without damage; `due` if it is empty."""
        file = self._fs.open_read(segment.path)
        try:
            for frame in walk(file, 0, file.size(), 0, verify=False):
                due = frame.last_offset + 1
        finally:
            file.close()
        return due

    def _rewrite(self, segment: LogFile, findings: Sequence[Finding], due: int, end_offset: int | None) -> int:
        """Writes the valid parts to a new file, which then replaces the segment by a rename.

        `due` is the log end offset before this segment; the result is the one after it. If `end_offset` is given, an
        empty batch bridges the missing offsets up to it.
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
        except BaseException:
            self._fs.remove(target)
            raise
        finally:
            source.close()
            copy.close()
        self._fs.rename(target, segment.path)
        self._fs.sync_dir(parent(segment.path))
        return writer.due

    def _drop_derived(
        self, folder: str, changed: Sequence[LogFile], *, suffixes: tuple[str, ...] = _DERIVED_SUFFIXES, is_real: bool
    ) -> None:
        """Removes the indexes of the changed segments, and the files of the folder with these suffixes."""
        names = set(self._fs.list_dir(folder))
        stems = {segment.path.rpartition("/")[2].removesuffix(LOG_SUFFIX) for segment in changed}
        # A snapshot hides from the start that a transaction index is missing, so it is removed first.
        for name in sorted(names, key=lambda name: (name.endswith(TRANSACTION_INDEX_SUFFIX), name)):
            is_index = name.endswith(_INDEX_SUFFIXES) and name.partition(".")[0] in stems
            if is_index or name.endswith(suffixes):
                self._note(join(folder, name), 0, 0, "removed: it is built again from the log")
                if is_real:
                    self._remove(join(folder, name))

    # --- other files --------------------------------------------------------------------------------------------------

    def _other(self, finding: Finding, touched: set[TopicPartition], *, is_real: bool) -> None:
        partition = partition_at(parent(finding.file))
        if finding.kind is FindingKind.SHORT and partition is not None:
            self._note(finding.file, finding.position, 0, "the missing end cannot be restored; the loss is accepted")
            touched.add((partition.topic, partition.number))
        elif finding.kind is FindingKind.IDENTITY or finding.file.endswith(".checkpoint"):
            self._note(finding.file, finding.position, 0, f"not repaired: {finding.reason}")
        elif finding.kind is FindingKind.CHECKPOINT and finding.partition:
            key = parse_partition_folder(finding.partition)
            assert key is not None
            if finding.file.endswith(RECOVERY_POINT_FILE):
                touched.add(key)
            else:
                name = finding.file.rpartition("/")[2]
                self._drop_lines(name, {key}, f"wrong line removed: {finding.reason}", is_real=is_real)
        elif self._fs.exists(finding.file):
            self._note(finding.file, 0, 0, f"removed, and built again: {finding.reason}")
            if is_real:
                self._remove(finding.file)

    def _forget_checkpoints(self, touched: set[TopicPartition], *, is_real: bool) -> None:
        """Makes the next start check these logs whole, instead of expecting the end that they had before."""
        for folder in self._checkpoint_folders():
            marker = join(folder, CLEAN_SHUTDOWN_FILE)
            if self._fs.exists(marker):
                self._note(marker, 0, 0, "removed, so that the next start checks the logs")
                if is_real:
                    self._remove(marker)
        what = "the recovery points of the repaired logs are removed"
        self._drop_lines(RECOVERY_POINT_FILE, touched, what, is_real=is_real)

    def _drop_lines(self, name: str, keys: set[TopicPartition], what: str, *, is_real: bool) -> None:
        """Removes the lines of these partitions from a checkpoint. A malformed checkpoint has a finding of its own."""
        for folder in self._checkpoint_folders():
            path = join(folder, name)
            try:
                entries = read_worker_checkpoint(self._fs, path)
            except MalformedCheckpointError:
                continue
            left = {key: entry for key, entry in entries.items() if key not in keys}
            if left != entries:
                self._note(path, 0, 0, what)
                if is_real:
                    self._copy_aside(path)
                    offsets = {key: offset for key, (offset, _) in left.items()}
                    topic_ids = {key: topic_id for key, (_, topic_id) in left.items()}
                    write_worker_checkpoint(self._fs, path, offsets, topic_ids)

    def _checkpoint_folders(self) -> list[str]:
        """Returns the data folder, and the folders of workers that ended without a merge of their checkpoints."""
        return [self._path, *worker_folders(self._fs, self._path)]

    # --- keeping ------------------------------------------------------------------------------------------------------

    def _note(self, file: str, position: int, lost_bytes: int, what: str) -> None:
        self._steps.append(RepairStep(file, position, lost_bytes, what))

    def _place(self, path: str) -> str:
        """Returns the path below `keep` for bytes of `path`. The path relative to the data folder stays."""
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
    """Copies ranges of whole batches, and fills requested gaps between their offsets with empty batches."""

    def __init__(self, source: File, target: File, due: int) -> None:
        self._source = source
        self._target = target
        self.due = due
        self._leader_epoch = 0
        self._bridge = False

    def bridge_next(self) -> None:
        """Requests an empty batch for the offsets before the next batch, since a batch was left out here."""
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
