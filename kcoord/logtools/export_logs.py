# SPDX-License-Identifier: Apache-2.0
"""Exports the data folder of a stopped broker to a folder that Apache Kafka 4.3.1 starts on.

All log files are copied, together with the bytes that only the journals hold, and every batch is checked. Group
records, transactions and topic data stay as they are, since they are Kafka's own records. A lost group gets one more
record, so that Kafka lists it too (see `lost_groups`). The metadata log is written again, for one broker.

The source is locked and never changed. The new folder gets its name when it is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kcoord.logtools.copying import copy_file, new_folder
from kcoord.logtools.export_metadata import MetadataExport
from kcoord.logtools.folders import FolderReader, PartitionFolder, is_metadata_topic, locked, partitions_in
from kcoord.logtools.lost_groups import LostGroups, new_group_record, note_of_return
from kcoord.logtools.metadata_source import read_metadata
from kcoord.logtools.replay_check import replay_folder
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.serde import MetadataSerde
from kcoord.storage.checkpoints import (
    CLEANER_OFFSET_FILE,
    LOG_START_OFFSET_FILE,
    read_properties,
    write_offset_checkpoint,
)
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import FileSystem, join
from kcoord.storage.handover import HANDOVER_FILE, read_handover
from kcoord.storage.journal import JOURNAL_FILE, restore
from kcoord.storage.log import Log
from kcoord.storage.log_dir import META_PROPERTIES_FILE, Identity, LogDir, identity_of
from kcoord.storage.recovery import go_on
from kcoord.storage.segment import LogConfig
from kcoord.storage.snapshot import SNAPSHOT_FILE
from kcoord.storage.worker_checkpoints import read_merged_checkpoint, worker_folders
from kcoord.topics import open_log
from kcoord.topics.partition_files import PartitionFiles
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC, GROUP_METADATA_TOPIC
from kcoord_protocol.record_batch import encode_batch, encode_batch_from_parts
from kcoord_protocol.uuid import uuid_from_string, uuid_to_string

_BATCH_RECORDS: Final = 500
_METADATA_EPOCH: Final = 1
_METADATA_TOPIC_ID: Final = (1).to_bytes(16, "big")
_LEFT_OUT: Final = (SNAPSHOT_FILE, HANDOVER_FILE)
"""Files of a partition that are derived from its log and that Kafka does not have."""


@dataclass(slots=True)
class ExportReport:
    """Counts what is in the new folder, and what was skipped."""

    groups: Counter[str] = field(default_factory=Counter)
    """The number of groups by type."""
    offsets: int = 0
    topics: int = 0
    partitions: int = 0
    copied_partitions: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


class LogExport:
    """Exports `source` to `target`. `node_id` is the `node.id` of the Kafka broker that will use it."""

    def __init__(
        self, fs: FileSystem, source: str, target: str, node_id: int, now_ms: int, new_uuid: Callable[[], bytes]
    ) -> None:
        self._fs = fs
        self._source = source
        self._target = target
        self._node_id = node_id
        self._now_ms = now_ms
        self._new_uuid = new_uuid
        self.report = ExportReport()

    def run(self) -> ExportReport:
        """Writes the new folder and returns the report.

        Raises StorageError or OSError, which name file and reason, if the source is in use, damaged or not a data
        folder, or if the target is not empty. If it raises, no part of the target is left.
        """
        source = self._identity()
        identity = replace(source, node_id=self._node_id)
        folders = (self._source, *worker_folders(self._fs, self._source))
        target = new_folder(self._fs, self._target, "an export", [self._source])
        with locked(self._fs, folders), target as building:
            try:
                self._build(building, source.node_id, identity)
            except StorageError as error:
                # The copy is removed, and its original has the same damage. So the text names the original.
                raise StorageError(str(error).replace(building, self._source)) from error
        return self.report

    def _identity(self) -> Identity:
        """Returns the identity of the source, which has a directory id in any case."""
        path = join(self._source, META_PROPERTIES_FILE)
        properties = read_properties(self._fs, path)
        if properties is None:
            raise StorageError(f"{self._source}: not a data folder: it has no {META_PROPERTIES_FILE}")
        identity = identity_of(properties, path)
        identity.directory_id = identity.directory_id or uuid_to_string(self._new_uuid())
        return identity

    # --- logs ---------------------------------------------------------------------------------------------------------

    def _build(self, building: str, source_node_id: int, identity: Identity) -> None:
        starts = self._copy(building)
        log_dir = LogDir.open(self._fs, building, identity)
        try:
            self._open(log_dir, CLUSTER_METADATA_TOPIC, 0).close()
            metadata = read_metadata(self._fs, log_dir.partition_path(CLUSTER_METADATA_TOPIC, 0))
            self.report.skipped += metadata.unknown
            for topic, number in log_dir.partitions():
                if topic != CLUSTER_METADATA_TOPIC:
                    self._settle(log_dir, topic, number, metadata.image, starts.get((topic, number), 0))
            self._write_metadata(log_dir, metadata.image, source_node_id)
            self._write_cleaner_offsets(log_dir)
        finally:
            log_dir.close()
        self._count(building)

    def _copy(self, building: str) -> dict[tuple[str, int], int]:
        """Copies every partition and replays the journals into the copy. Returns the log start offsets."""
        fs = self._fs
        partitions = partitions_in(fs, self._source)
        if not any(is_metadata_topic(partition.topic) for partition in partitions):
            raise StorageError(f"{self._source}: {CLUSTER_METADATA_TOPIC}-0 is missing, so the topics are unknown")
        starts = read_merged_checkpoint(fs, self._source, LOG_START_OFFSET_FILE) or {}
        for partition in partitions:
            self._copy_partition(partition, join(building, partition.name))
            handover = read_handover(fs, partition.path)
            if handover is not None:
                starts[partition.topic, partition.number] = handover.start_offset
        for folder in (self._source, *worker_folders(fs, self._source)):
            journal = join(folder, JOURNAL_FILE)
            if fs.exists(journal):
                copy_file(fs, journal, join(building, JOURNAL_FILE))
                restore(fs, building, join(building, JOURNAL_FILE))
        return starts

    def _copy_partition(self, partition: PartitionFolder, folder: str) -> None:
        self._fs.make_dirs(folder)
        for name in self._fs.list_dir(partition.path):
            if name not in _LEFT_OUT:
                copy_file(self._fs, join(partition.path, name), join(folder, name))
        self._fs.sync_dir(folder)

    def _open(self, log_dir: LogDir, topic: str, number: int) -> Log:
        """Opens a log of the new folder, which checks every batch, since there is no recovery point."""
        log = log_dir.open_log(topic, number, LogConfig(), self._now_ms)
        self.report.notes += [
            f"{cut.file}: {cut.lost_bytes} torn bytes at position {cut.position} were left out: {cut.reason}"
            for cut in log.recovery_report.cuts
        ]
        return log

    def _settle(self, log_dir: LogDir, topic: str, number: int, image: MetadataImage, start_offset: int) -> None:
        """Writes the files that Kafka needs beside the log of a partition: topic id and producer snapshot.

        A folder that is not in the metadata is removed from the export.
        """
        files = PartitionFiles(self._fs, log_dir.partition_path(topic, number))
        topic_id = image.topics[topic].id if image.partition(topic, number) is not None else None
        if topic_id is None or files.topic_id() not in (None, topic_id):
            self.report.skipped[f"folder {topic}-{number}: the metadata does not know it"] += 1
            log_dir.remove_folder(files.directory)
            return
        log = self._open(log_dir, topic, number)
        log.advance_start_offset(min(max(start_offset, log.start_offset), log.end_offset))
        if topic == GROUP_METADATA_TOPIC:
            self._restore_lost_groups(log, files.directory)
        files.create(topic_id)
        opened = open_log.load(log, files, self._now_ms)
        # After a clean shutdown Kafka restores producers and their open transactions from a snapshot alone.
        open_log.snapshot_at(opened, files, log.end_offset)(go_on)
        self.report.copied_partitions += 1

    def _write_cleaner_offsets(self, log_dir: LogDir) -> None:
        """Writes how far logs are cleaned. Without that, offsets that a cleaner has removed would count as lost."""
        offsets = read_merged_checkpoint(self._fs, self._source, CLEANER_OFFSET_FILE)
        if offsets is not None:
            kept = {key: offsets[key] for key in log_dir.partitions() if key in offsets}
            write_offset_checkpoint(self._fs, join(log_dir.path, CLEANER_OFFSET_FILE), kept)

    def _restore_lost_groups(self, log: Log, folder: str) -> None:
        """Appends a record per lost group. The source's broker lists these groups, and Kafka would not."""
        reader = FolderReader(self._fs, folder)
        candidates = LostGroups()
        leader_epoch = 0
        try:
            for frame in reader.batches(log.start_offset):
                candidates.note_batch(frame.batch)
                leader_epoch = max(leader_epoch, frame.leader_epoch)
            if not candidates.candidates:
                return
            lost = candidates.find(frame.batch for frame in reader.batches(log.start_offset))
        except DecodeError as error:
            raise StorageError(f"{folder}: {error}") from error
        if lost:
            records = [new_group_record(group_id, self._now_ms) for group_id in lost]
            batch = encode_batch(records, base_offset=log.end_offset, partition_leader_epoch=leader_epoch)
            log.append(batch, now_ms=self._now_ms)
        self.report.notes += map(note_of_return, lost)

    # --- metadata -----------------------------------------------------------------------------------------------------

    def _write_metadata(self, log_dir: LogDir, image: MetadataImage, source_node_id: int) -> None:
        maker = MetadataExport(self._node_id, source_node_id, uuid_from_string(log_dir.identity.directory_id))
        made = maker.from_image(image)
        self.report.skipped += maker.skipped
        self.report.notes += maker.notes
        log_dir.delete_partitions([(CLUSTER_METADATA_TOPIC, 0, self._new_uuid().hex())])
        log_dir.remove_deleted()
        PartitionFiles(self._fs, log_dir.partition_path(CLUSTER_METADATA_TOPIC, 0)).create(_METADATA_TOPIC_ID)
        log = log_dir.open_log(CLUSTER_METADATA_TOPIC, 0, LogConfig(), self._now_ms)
        serde = MetadataSerde()
        for start in range(0, len(made), _BATCH_RECORDS):
            pairs = [serde.serialize(record) for record in made[start : start + _BATCH_RECORDS]]
            batch = encode_batch_from_parts(pairs, self._now_ms, log.end_offset, partition_leader_epoch=_METADATA_EPOCH)
            log.append(batch, now_ms=self._now_ms)
        log_dir.write_leader_epochs(CLUSTER_METADATA_TOPIC, 0, [(_METADATA_EPOCH, 0)])

    def _count(self, building: str) -> None:
        """Reads the whole result again and counts its content."""
        replayed = replay_folder(self._fs, building)
        if replayed.problems:
            raise StorageError(f"{building}: {replayed.problems[0]}")
        self.report.groups = replayed.groups
        self.report.offsets = replayed.offsets
        self.report.topics = len(replayed.image.topics)
        self.report.partitions = sum(len(topic.partitions) for topic in replayed.image.topics.values())
