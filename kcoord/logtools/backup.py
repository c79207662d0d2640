# SPDX-License-Identifier: Apache-2.0
"""Copies a data folder while a broker is writing to it. The copy is what a start after a crash would find.

The order of the copies makes the result consistent, since the logs only grow at their ends:

1. Checkpoints, so that no checkpoint claims more than the copied logs hold.
2. The transaction log, then `__consumer_offsets`, then the topics. So a copied committed offset is never greater than
   the log end offset of its partition.
3. The metadata log, so that it has every topic, producer id and leader epoch that the copied logs refer to.

Files that are derived from a log (producer snapshots, transaction indexes) are copied before the log itself.

All segments of a partition are opened before the first one is copied. Then the open files are compared with the
folder. If the log cleaner or the retention changed a segment in between, the copy of this partition starts again.
The copy of the last segment ends with its last whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Final

from kcoord.logtools.copying import copy_file, copy_range, new_folder
from kcoord.logtools.folders import LogFile, PartitionFolder, is_metadata_topic, partitions_in, segments_in
from kcoord.storage.checkpoints import (
    CLEANER_OFFSET_FILE,
    LOG_START_OFFSET_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    write_offset_checkpoint,
)
from kcoord.storage.errors import MalformedCheckpointError, StorageError
from kcoord.storage.file_system import File, FileSystem, join, parent
from kcoord.storage.log_dir import HIGH_WATERMARK_FILE, LEADER_EPOCH_FILE, META_PROPERTIES_FILE
from kcoord.storage.recovery import SWAP_SUFFIX
from kcoord.storage.scan import Damage, DamageKind, find_batch, walk
from kcoord.storage.segment import LOG_SUFFIX
from kcoord.storage.segment_indexes import INDEX_SUFFIX, TIME_INDEX_SUFFIX
from kcoord.storage.worker_checkpoints import WORKERS_FOLDER, read_merged_checkpoint
from kcoord.topics.producer_files import SNAPSHOT_SUFFIX, TRANSACTION_INDEX_SUFFIX
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC

_ATTEMPTS: Final = 100
_CHECKPOINTS: Final = (RECOVERY_POINT_FILE, LOG_START_OFFSET_FILE, HIGH_WATERMARK_FILE, CLEANER_OFFSET_FILE)
_FIRST_TOPICS: Final = (TRANSACTION_STATE_TOPIC, GROUP_METADATA_TOPIC)


@dataclass(slots=True)
class BackupReport:
    """Counts what was copied. `notes` are for the operator."""

    partitions: int = 0
    segments: int = 0
    size_bytes: int = 0
    repeated: int = 0
    notes: list[str] = field(default_factory=list)


class Backup:
    """Backs up `source` to `target`. `wait` sleeps for a moment, so that the log cleaner can finish its step."""

    def __init__(self, fs: FileSystem, source: str, target: str, wait: Callable[[], None]) -> None:
        self._fs = fs
        self._source = source
        self._target = target
        self._building = ""
        self._wait = wait
        self.report = BackupReport()

    def run(self) -> BackupReport:
        if not self._fs.exists(join(self._source, META_PROPERTIES_FILE)):
            raise StorageError(f"{self._source}: not a data folder: it has no {META_PROPERTIES_FILE}")
        with new_folder(self._fs, self._target, "a backup", [self._source]) as self._building:
            self._build()
        return self.report

    def _build(self) -> None:
        fs = self._fs
        had_cleaner = self._has_cleaner()
        for name in _CHECKPOINTS:
            self._checkpoint(name)
        for partition in sorted(partitions_in(fs, self._source), key=_order):
            self._partition(partition)
        if not had_cleaner and self._has_cleaner():
            # The first cleaning ran during the copy. With an empty checkpoint no log counts as cleaned, but the checks
            # of the copy accept gaps in the offsets.
            write_offset_checkpoint(fs, join(self._building, CLEANER_OFFSET_FILE), {})
        self._copy_small(self._source, self._building, META_PROPERTIES_FILE)
        fs.sync_dir(self._building)

    def _has_cleaner(self) -> bool:
        try:
            return read_merged_checkpoint(self._fs, self._source, CLEANER_OFFSET_FILE) is not None
        except MalformedCheckpointError:
            return True

    def _checkpoint(self, name: str) -> None:
        """Copies a checkpoint. If workers have checkpoints of their own, the copy is the merged one.

        A malformed checkpoint is copied as it is.
        """
        if self._fs.exists(join(self._source, WORKERS_FOLDER)):
            with suppress(MalformedCheckpointError):
                merged = read_merged_checkpoint(self._fs, self._source, name)
                if merged is not None:
                    write_offset_checkpoint(self._fs, join(self._building, name), merged)
                return
        self._copy_small(self._source, self._building, name)

    def _copy_small(self, source: str, target: str, name: str) -> None:
        """Copies a file that its writer replaces atomically, so that every copy is one of its versions."""
        try:
            copy_file(self._fs, join(source, name), join(target, name))
        except FileNotFoundError:
            return

    # --- one partition ------------------------------------------------------------------------------------------------

    def _partition(self, partition: PartitionFolder) -> None:
        folder = join(self._building, partition.name)
        for _ in range(_ATTEMPTS):
            try:
                if self._try_partition(partition, folder):
                    self.report.partitions += 1
                    return
            except FileNotFoundError:
                if not self._fs.exists(partition.path):
                    self.report.notes.append(f"{partition.name} was deleted meanwhile")
                    self._clear(folder)
                    return
            self.report.repeated += 1
            self._clear(folder)
            self._wait()
        raise StorageError(
            f"{partition.path}: its files changed during each of {_ATTEMPTS} attempts; "
            "try again when the log cleaner is idle"
        )

    def _clear(self, folder: str) -> None:
        if self._fs.exists(folder):
            for name in self._fs.list_dir(folder):
                self._fs.remove(join(folder, name))
            self._fs.remove_dir(folder)

    def _try_partition(self, partition: PartitionFolder, folder: str) -> bool:
        fs = self._fs
        fs.make_dirs(folder)
        # Derived files come first, since they must not cover more than the copy of the log.
        for suffixes in ((SNAPSHOT_SUFFIX, ".checkpoint"), (TRANSACTION_INDEX_SUFFIX,)):
            for name in fs.list_dir(partition.path):
                if name.endswith(suffixes):
                    self._copy_small(partition.path, folder, name)
        for name in (PARTITION_METADATA_FILE, LEADER_EPOCH_FILE):
            self._copy_small(partition.path, folder, name)
        segments = self._settled_segments(partition.path)
        if segments is None:
            return False
        with ExitStack() as open_files:
            files = []
            for segment in segments:
                file = fs.open_read(segment.path)
                open_files.callback(file.close)
                files.append(file)
            sizes = [file.size() for file in files]
            if not self._is_unchanged(partition.path, segments, sizes):
                return False
            for segment, file in zip(segments, files, strict=True):
                self._segment(segment, file, folder, is_last=segment is segments[-1])
        fs.sync_dir(folder)
        return True

    def _settled_segments(self, path: str) -> list[LogFile] | None:
        """Returns the segments, or None while the log cleaner is replacing segments."""
        if any(name.endswith(LOG_SUFFIX + SWAP_SUFFIX) for name in self._fs.list_dir(path)):
            return None
        return segments_in(self._fs, path)

    def _is_unchanged(self, path: str, segments: list[LogFile], sizes: list[int]) -> bool:
        """Whether the open files are still those of the folder. New segments and a longer last segment are allowed."""
        now = self._settled_segments(path)
        if now is None or now[: len(segments)] != segments:
            return False
        closed = zip(segments[:-1], sizes[:-1], strict=True)
        return all(self._fs.size(segment.path) == size for segment, size in closed)

    def _segment(self, segment: LogFile, file: File, folder: str, *, is_last: bool) -> None:
        name = segment.path.rpartition("/")[2]
        end = self._whole_batches(segment, file) if is_last else file.size()
        self.report.size_bytes += copy_range(self._fs, file, 0, end, join(folder, name))
        self.report.segments += 1
        if not is_last:
            for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
                index = name.removesuffix(LOG_SUFFIX) + suffix
                self._copy_small(parent(segment.path), folder, index)

    def _whole_batches(self, segment: LogFile, file: File) -> int:
        """Returns the end of the last whole batch. Other damage than an incomplete write is copied as it is."""
        size = file.size()
        end = 0
        try:
            for frame in walk(file, 0, size, segment.base_offset):
                end = frame.position + frame.size_bytes
        except Damage as damage:
            is_end = damage.kind in (DamageKind.INCOMPLETE, DamageKind.GARBAGE)
            if is_end and find_batch(file, damage.position + 1, size, damage.offset) is None:
                return end
            self.report.notes.append(f"{segment.path} is damaged at position {damage.position}: {damage.reason}")
            return size
        return end


def _order(partition: PartitionFolder) -> tuple[int, PartitionFolder]:
    if partition.topic in _FIRST_TOPICS:
        return _FIRST_TOPICS.index(partition.topic), partition
    return (3 if is_metadata_topic(partition.topic) else 2), partition
