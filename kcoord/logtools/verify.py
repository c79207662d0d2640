# SPDX-License-Identifier: Apache-2.0
"""Checks every batch, record, index, checkpoint and small file of a data folder. Nothing is written or locked.

The files are checked in the order of what they depend on: `meta.properties` and the checkpoints, the metadata log, and
then each partition (`verify_log`) with the files beside its segments. At last the checkpoints are compared with the
ends of the logs.

The checkpoints decide what counts as damage. Bytes below a recovery point, or in any log after a clean shutdown, were
durable, so a missing or torn end there is damage. Above it, a torn end is the trace of a crash and costs nothing.
If a broker may be running (`in_use`), unfinished ends and lagging checkpoints are no findings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from kcoord.logtools.findings import Finding, FindingKind
from kcoord.logtools.folders import (
    PartitionFolder,
    is_coordinator_topic,
    is_metadata_topic,
    partition_at,
    partitions_at,
    segments_in,
)
from kcoord.logtools.metadata_source import read_metadata
from kcoord.logtools.verify_log import LogCheck, LogFacts
from kcoord.metadata.image import MetadataImage
from kcoord.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    LOG_START_OFFSET_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    TopicPartition,
    read_leader_epochs,
    read_properties,
    read_topic_id,
)
from kcoord.storage.errors import MalformedCheckpointError, MetaPropertiesError, StorageError
from kcoord.storage.file_system import FileSystem, join, read_file
from kcoord.storage.log_dir import (
    HIGH_WATERMARK_FILE,
    LEADER_EPOCH_FILE,
    META_PROPERTIES_FILE,
    identity_of,
    partition_folder,
)
from kcoord.storage.scan import Damage, walk
from kcoord.storage.snapshot import SNAPSHOT_FILE, SnapshotError, read_snapshot
from kcoord.storage.worker_checkpoints import read_merged_checkpoint
from kcoord.topics.producer_files import (
    SNAPSHOT_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
    InvalidSnapshotError,
    damage_of_index,
    decode_snapshot,
)
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC

_OFFSET_CHECKPOINTS: Final = (RECOVERY_POINT_FILE, LOG_START_OFFSET_FILE, HIGH_WATERMARK_FILE, CLEANER_OFFSET_FILE)


@dataclass(slots=True)
class Totals:
    """Counts what was checked."""

    partitions: int = 0
    batches: int = 0
    records: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class FolderCheck:
    """Checks a data folder or one partition folder. `in_use` means that a broker may be writing to it."""

    fs: FileSystem
    path: str
    in_use: bool = False
    totals: Totals = field(default_factory=Totals)
    _checkpoints: dict[str, Mapping[TopicPartition, int]] = field(default_factory=dict)
    _image: MetadataImage | None = None
    _is_clean: bool = False

    def run(self) -> Iterator[Finding]:
        partitions = partitions_at(self.fs, self.path)
        partition_itself = partition_at(self.path)
        if partition_itself is None or partition_itself not in partitions:
            yield from self._folder_files()
            self._read_image(partitions)
        ends: dict[TopicPartition, tuple[int, int]] = {}
        for partition in partitions:
            check = LogCheck(self.fs, partition, self._facts(partition))
            is_whole = not self.in_use
            for finding in check.run():
                is_whole &= finding.kind is FindingKind.INDEX
                yield finding
            if is_whole:
                yield from check.lost_groups()
            yield from self._side_files(partition, check)
            ends[partition.topic, partition.number] = check.start_offset, check.end_offset
            self.totals.partitions += 1
            self.totals.batches += check.batches
            self.totals.records += check.records
            segments = segments_in(self.fs, partition.path)
            self.totals.size_bytes += sum(self.fs.size(segment.path) for segment in segments)
        if not self.in_use:
            yield from self._checkpoint_values(ends)

    # --- files of the data folder -------------------------------------------------------------------------------------

    def _folder_files(self) -> Iterator[Finding]:
        path = join(self.path, META_PROPERTIES_FILE)
        try:
            properties = read_properties(self.fs, path)
            if properties is not None:
                identity_of(properties, path)
        except MetaPropertiesError as error:
            yield Finding(FindingKind.IDENTITY, path, 0, -1, str(error))
        for name in _OFFSET_CHECKPOINTS:
            path = join(self.path, name)
            if name == CLEANER_OFFSET_FILE and self.fs.exists(path) and self.fs.size(path) == 0:
                # Kafka creates the file empty and writes it after its first cleaning.
                continue
            try:
                checkpoint = read_merged_checkpoint(self.fs, self.path, name)
                if checkpoint is not None:
                    self._checkpoints[name] = checkpoint
            except MalformedCheckpointError as error:
                yield Finding(FindingKind.CHECKPOINT, path, 0, -1, str(error))
        marker = join(self.path, CLEAN_SHUTDOWN_FILE)
        self._is_clean = self.fs.exists(marker)
        if self._is_clean:
            try:
                json.loads(read_file(self.fs, marker) or b"{}")
            except ValueError as error:
                yield Finding(FindingKind.CHECKPOINT, marker, 0, -1, f"not valid JSON: {error}")

    def _read_image(self, partitions: list[PartitionFolder]) -> None:
        folder = next((partition.path for partition in partitions if is_metadata_topic(partition.topic)), None)
        if folder is not None:
            try:
                self._image = read_metadata(self.fs, folder).image
            except StorageError:
                # The check of the metadata log reports the reason. The other logs are checked without metadata.
                self._image = None

    def _checkpoint_values(self, ends: Mapping[TopicPartition, tuple[int, int]]) -> Iterator[Finding]:
        for name in (LOG_START_OFFSET_FILE, HIGH_WATERMARK_FILE):
            for key, offset in sorted(self._checkpoints.get(name, {}).items()):
                if key in ends and not 0 <= offset <= ends[key][1]:
                    reason = f"{partition_folder(*key)} ends at offset {ends[key][1]}, so it cannot be {offset}"
                    yield self._wrong_line(name, key, offset, reason)
        yield from self._recovery_points(ends)

    def _wrong_line(self, checkpoint: str, key: TopicPartition, offset: int, reason: str) -> Finding:
        file = join(self.path, checkpoint)
        return Finding(FindingKind.CHECKPOINT, file, 0, offset, reason, partition=partition_folder(*key))

    def _recovery_points(self, ends: Mapping[TopicPartition, tuple[int, int]]) -> Iterator[Finding]:
        """Checks the recovery points.

        After a clean shutdown they equal the log end offsets. After a crash, a log must not end before its recovery
        point, which `LogCheck` checks.
        """
        points = self._checkpoints.get(RECOVERY_POINT_FILE, {})
        for key, offset in sorted(points.items()):
            name = partition_folder(*key)
            reason = f"{name} has a negative recovery point" if offset < 0 else None
            if self._is_clean and key not in ends:
                reason = f"there is no folder {name}"
            elif self._is_clean and 0 <= offset < ends[key][1]:
                reason = f"{name} was closed at offset {ends[key][1]}, not at {offset}"
            if reason is not None:
                yield self._wrong_line(RECOVERY_POINT_FILE, key, offset, reason)
        if self._is_clean and points:
            for key, (_, end) in sorted(ends.items()):
                # Kafka's metadata log is not in this checkpoint.
                if key not in points and end > 0 and not is_metadata_topic(key[0]):
                    yield self._wrong_line(RECOVERY_POINT_FILE, key, end, f"{partition_folder(*key)} is not in it")

    # --- what is known of a log ---------------------------------------------------------------------------------------

    def _facts(self, partition: PartitionFolder) -> LogFacts:
        key = (partition.topic, partition.number)
        recovery_points = self._checkpoints.get(RECOVERY_POINT_FILE, {})
        facts = LogFacts(recovery_points.get(key, 0), self._is_clean and key in recovery_points, self.in_use)
        facts.may_have_gaps = self._may_be_compacted(partition)
        if is_metadata_topic(partition.topic):
            facts.highest_epoch = self._highest_metadata_epoch(partition)
        topic = self._image.topics.get(partition.topic) if self._image is not None else None
        if topic is not None and partition.number < len(topic.partitions):
            facts.highest_epoch = max(topic.partitions[partition.number].leader_epoch, 0)
            if partition.topic == GROUP_METADATA_TOPIC:
                facts.partitions = len(topic.partitions)
        return facts

    def _highest_metadata_epoch(self, partition: PartitionFolder) -> int | None:
        """Kafka's controllers write the epochs of their log to a checkpoint. kcoord's log has only one epoch."""
        path = join(partition.path, LEADER_EPOCH_FILE)
        try:
            entries = read_leader_epochs(self.fs, path)
        except MalformedCheckpointError:
            return None
        return entries[-1][0] if entries else 0

    def _may_be_compacted(self, partition: PartitionFolder) -> bool:
        """Whether the log cleaner may have removed offsets. It writes its checkpoint at the end of each pass.

        Returns True if the folder has no checkpoints that could exclude it.
        """
        if is_metadata_topic(partition.topic):
            return False
        policy = self._image.topic_configs(partition.topic).get("cleanup.policy") if self._image is not None else None
        if not is_coordinator_topic(partition.topic) and policy is not None and "compact" not in policy:
            return False
        is_whole_folder = self.fs.exists(join(self.path, RECOVERY_POINT_FILE))
        return not is_whole_folder or not self._is_clean or CLEANER_OFFSET_FILE in self._checkpoints

    # --- files beside the segments ------------------------------------------------------------------------------------

    def _side_files(self, partition: PartitionFolder, check: LogCheck) -> Iterator[Finding]:
        for name in self.fs.list_dir(partition.path):
            path = join(partition.path, name)
            reason = None
            if name.endswith(SNAPSHOT_SUFFIX):
                reason = self._producer_snapshot(path)
            elif name.endswith(TRANSACTION_INDEX_SUFFIX):
                reason = damage_of_index(read_file(self.fs, path))
            elif name.endswith(".checkpoint") and is_metadata_topic(partition.topic):
                reason = self._metadata_snapshot(path)
            elif name == LEADER_EPOCH_FILE:
                reason = self._leader_epochs(path, check.end_offset)
            elif name == SNAPSHOT_FILE:
                reason = self._shard_snapshot(partition.path)
            elif name == PARTITION_METADATA_FILE:
                yield from self._topic_id(path, partition)
            if reason is not None:
                yield Finding(FindingKind.SIDE_FILE, path, 0, -1, reason)

    def _producer_snapshot(self, path: str) -> str | None:
        try:
            decode_snapshot(read_file(self.fs, path))
        except InvalidSnapshotError as error:
            return str(error)
        return None

    def _shard_snapshot(self, folder: str) -> str | None:
        try:
            read_snapshot(self.fs, folder)
        except SnapshotError as error:
            return str(error)
        return None

    def _metadata_snapshot(self, path: str) -> str | None:
        file = self.fs.open_read(path)
        try:
            for _ in walk(file, 0, file.size(), 0):
                pass
        except Damage as damage:
            return f"position {damage.position}: {damage.reason}"
        finally:
            file.close()
        return None

    def _leader_epochs(self, path: str, end_offset: int) -> str | None:
        try:
            entries = read_leader_epochs(self.fs, path)
        except MalformedCheckpointError as error:
            return str(error)
        for before, after in pairwise(entries):
            if not (before[0] < after[0] and before[1] < after[1]):
                return f"epoch {after[0]} from offset {after[1]} follows epoch {before[0]} from offset {before[1]}"
        if entries and entries[-1][1] > end_offset and not self.in_use:
            return f"epoch {entries[-1][0]} begins at offset {entries[-1][1]}, but the log ends at {end_offset}"
        return None

    def _topic_id(self, path: str, partition: PartitionFolder) -> Iterator[Finding]:
        try:
            topic_id = read_topic_id(self.fs, path)
        except MalformedCheckpointError as error:
            yield Finding(FindingKind.IDENTITY, path, 0, -1, str(error))
            return
        topic = self._image.topics.get(partition.topic) if self._image is not None else None
        if topic is not None and topic_id != topic.id and not self.in_use:
            yield Finding(FindingKind.IDENTITY, path, 0, -1, "the metadata log has another id for the topic")
