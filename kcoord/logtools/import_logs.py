# SPDX-License-Identifier: Apache-2.0
"""Imports the log folders of a stopped broker (Kafka 4.x or kcoord) into a new data folder.

* Group records keep their history and their timestamps. The number of partitions of `__consumer_offsets` may change,
  so each record goes to the new partition of its group.
* The transactions in `__consumer_offsets` are resolved: pending and aborted offsets are left out (`transactions`).
* Topic folders are copied and checked, and their open transactions are ended (`import_topics`).
* The metadata log is written again, for one broker (`import_metadata`). Without the source's metadata log, the topics
  are guessed from the group records (`topic_clues`), and topic folders are left out.

The order matters: the metadata comes after the group records, since these may contain greater producer ids than the
source's metadata log. The source is never changed. The new folder gets its name when it is complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.logtools.copying import new_folder
from kcoord.logtools.decode import TRANSACTION_RECORDS, group_id_of
from kcoord.logtools.folders import FolderReader, NoLogsError, PartitionFolder, locked, partitions_at
from kcoord.logtools.import_metadata import MetadataImport
from kcoord.logtools.import_topics import TopicImporter
from kcoord.logtools.live_state import LiveState
from kcoord.logtools.lost_groups import new_group_record, note_of_return
from kcoord.logtools.metadata_source import SourceMetadata, read_metadata
from kcoord.logtools.topic_clues import TopicClues
from kcoord.logtools.transactions import TransactionCounts, TransactionResolver
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import CoordinatorSerde, MetadataSerde, partition_for
from kcoord.storage.checkpoints import (
    CLEANER_OFFSET_FILE,
    LOG_START_OFFSET_FILE,
    TopicPartition,
    read_properties,
    write_offset_checkpoint,
)
from kcoord.storage.errors import MalformedCheckpointError, StorageError
from kcoord.storage.file_system import FileSystem, join, parent
from kcoord.storage.handover import read_handover
from kcoord.storage.log import Log
from kcoord.storage.log_dir import META_PROPERTIES_FILE, Identity, LogDir
from kcoord.storage.segment import LogConfig
from kcoord.storage.worker_checkpoints import read_merged_checkpoint, worker_folders
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC, GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC
from kcoord_protocol.messages import TransactionLogKey, TransactionLogValue
from kcoord_protocol.record_batch import Record, decode_header, encode_batch, encode_batch_from_parts
from kcoord_protocol.uuid import uuid_from_string, uuid_to_string

_BATCH_RECORDS: Final = 500
_PREPARE_COMMIT: Final = 2
_UNSERVED_KINDS: Final = {
    **dict.fromkeys(range(10, 16), "share group records"),
    **dict.fromkeys(range(17, 24), "streams group records"),
}
"""Record types of `__consumer_offsets` that kcoord does not serve. Type 16, of consumer groups, lies between them."""
_COMPLETE: Final = (0, 4, 5, 6)
"""States in which no transaction is open: Empty, CompleteCommit, CompleteAbort, Dead."""


@dataclass(slots=True)
class ImportReport:
    """Counts what the source had and what the import did with it."""

    groups: Counter[str] = field(default_factory=Counter)
    """The number of groups by type."""
    offsets: int = 0
    group_records: int = 0
    rerouted_records: int = 0
    kept_unknown: Counter[str] = field(default_factory=Counter)
    transactions: TransactionCounts = field(default_factory=TransactionCounts)
    topics: int = 0
    partitions: int = 0
    copied_partitions: int = 0
    ended_transactions: int = 0
    from_metadata: bool = False
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


class LogImport:
    """Imports folders into `target`. `config` is the configuration of the broker that will serve the new folder."""

    def __init__(
        self, fs: FileSystem, config: BrokerConfig, target: str, now_ms: int, new_uuid: Callable[[], bytes]
    ) -> None:
        self._fs = fs
        self._config = config
        self._target = target
        self._now_ms = now_ms
        self._new_uuid = new_uuid
        self._serde = CoordinatorSerde()
        self._clues = TopicClues()
        self._live = LiveState()
        self._max_producer_id = -1
        self.report = ImportReport()

    def run(self, sources: Iterable[str]) -> ImportReport:
        """Writes the new folder. Raises DirectoryLockedError if a broker uses a source."""
        sources = list(sources)
        partitions = self._find(sources)
        folders = {parent(partition.path) for partition in partitions}
        workers = [worker for folder in sorted(folders) for worker in worker_folders(self._fs, folder)]
        with locked(self._fs, [*sorted(folders), *workers]):
            metadata = self._source_metadata(partitions)
            prepared = self._prepared_producers(partitions)
            identity = Identity(self._cluster_id(sources), self._config.node_id, uuid_to_string(self._new_uuid()))
            with new_folder(self._fs, self._target, "an import", sources) as building:
                self._build(building, identity, partitions, metadata, prepared, sources)
        return self.report

    def _build(
        self,
        building: str,
        identity: Identity,
        partitions: list[PartitionFolder],
        metadata: SourceMetadata | None,
        prepared: dict[int, int],
        sources: list[str],
    ) -> None:
        log_dir = LogDir.open(self._fs, building, identity)
        try:
            self._import_groups(log_dir, partitions, prepared)
            made = self._import_metadata(log_dir, metadata)
            if metadata is not None:
                self._import_topics(log_dir, partitions, metadata, prepared, sources)
            elif any(not partition.topic.startswith("__") for partition in partitions):
                self.report.notes.append("topic folders were left out: their topics are unknown without a metadata log")
            self._count(made)
        finally:
            log_dir.close()

    # --- sources ------------------------------------------------------------------------------------------------------

    def _find(self, sources: list[str]) -> list[PartitionFolder]:
        partitions = [partition for source in sources for partition in partitions_at(self._fs, source)]
        names = Counter(partition.name for partition in partitions)
        twice = sorted(name for name, count in names.items() if count > 1)
        if twice:
            raise StorageError(f"{twice[0]} is in more than one of the given folders")
        if not any(partition.topic in (GROUP_METADATA_TOPIC, CLUSTER_METADATA_TOPIC) for partition in partitions):
            raise NoLogsError(f"{sources[0]}: has neither {GROUP_METADATA_TOPIC} nor {CLUSTER_METADATA_TOPIC}")
        return sorted(partitions)

    def _source_metadata(self, partitions: list[PartitionFolder]) -> SourceMetadata | None:
        folder = next((partition.path for partition in partitions if partition.topic == CLUSTER_METADATA_TOPIC), None)
        if folder is None:
            return None
        metadata = read_metadata(self._fs, folder)
        self.report.from_metadata = True
        self.report.skipped.update(metadata.unknown)
        return metadata

    def _prepared_producers(self, partitions: list[PartitionFolder]) -> dict[int, int]:
        """Returns the producers in state PrepareCommit, with the epoch of their transaction coordinator.

        Their transactions are committed, although some partitions may not have the marker yet.
        """
        serde = CoordinatorSerde(TRANSACTION_RECORDS)
        last: dict[str, tuple[int, TransactionLogValue]] = {}
        for partition in partitions:
            if partition.topic != TRANSACTION_STATE_TOPIC:
                continue
            for record, epoch in _plain_records(FolderReader(self._fs, partition.path)):
                decoded = self._deserialize(serde, partition, record)
                key, value = (decoded.key, decoded.value) if decoded is not None else (None, None)
                if isinstance(key, TransactionLogKey) and isinstance(value, TransactionLogValue):
                    last[key.transactional_id] = (epoch, value)
                    self._max_producer_id = max(self._max_producer_id, value.producer_id)
                elif isinstance(key, TransactionLogKey):
                    last.pop(key.transactional_id, None)
        unfinished = sum(value.transaction_status not in _COMPLETE for _, value in last.values())
        if unfinished:
            self.report.notes.append(
                f"{unfinished} transactions were open; those without a decision to commit are aborted"
            )
        return {
            value.producer_id: epoch for epoch, value in last.values() if value.transaction_status == _PREPARE_COMMIT
        }

    def _cluster_id(self, sources: list[str]) -> str:
        for source in sources:
            for folder in (source, parent(source)):
                properties = read_properties(self._fs, join(folder, META_PROPERTIES_FILE))
                if properties and properties.get("cluster.id"):
                    return properties["cluster.id"]
        return uuid_to_string(self._new_uuid())

    # --- groups -------------------------------------------------------------------------------------------------------

    def _import_groups(self, log_dir: LogDir, partitions: list[PartitionFolder], prepared: dict[int, int]) -> None:
        writers: defaultdict[int, list[Record]] = defaultdict(list)
        logs: dict[int, Log] = {}
        count = self._config.offsets_topic_num_partitions
        log_config = LogConfig(segment_bytes=self._config.offsets_topic_segment_bytes)

        def flush(number: int) -> None:
            log = logs.get(number)
            if log is None:
                log = logs[number] = log_dir.open_log(GROUP_METADATA_TOPIC, number, log_config, self._now_ms)
            records = [replace(record, offset=-1) for record in writers.pop(number, ())]
            log.append(encode_batch(records, base_offset=log.end_offset), now_ms=self._now_ms)

        offsets_partitions = [partition for partition in partitions if partition.topic == GROUP_METADATA_TOPIC]
        for partition in offsets_partitions:
            for record in self._resolved(partition, prepared):
                number = self._target_partition(partition, record, count)
                writers[number].append(record)
                if len(writers[number]) >= _BATCH_RECORDS:
                    flush(number)
        for group_id in self._live.lost_groups:
            writers[partition_for(group_id, count)].append(new_group_record(group_id, self._now_ms))
            self.report.notes.append(note_of_return(group_id))
        for number in sorted(writers):
            flush(number)

    def _resolved(self, partition: PartitionFolder, prepared: dict[int, int]) -> Iterator[Record]:
        resolver = TransactionResolver(prepared)
        resolver.counts = self.report.transactions
        reader = FolderReader(self._fs, partition.path)
        for frame in reader.batches():
            batch = frame.batch
            self._max_producer_id = max(self._max_producer_id, decode_header(batch).producer_id)
            try:
                yield from resolver.feed(batch)
            except DecodeError as error:
                raise StorageError(f"{partition.path}: the batch at offset {frame.base_offset}: {error}") from error
        yield from resolver.finish()
        if reader.torn is not None:
            self.report.notes.append(f"{partition.name}: the torn end was left out: {reader.torn}")

    def _target_partition(self, partition: PartitionFolder, record: Record, count: int) -> int:
        """Returns the new partition of the record, and applies it to the state of live groups and topics."""
        self.report.group_records += 1
        decoded = self._deserialize(self._serde, partition, record)
        if decoded is not None:
            self._clues.note(decoded)
            self._live.note(decoded)
        else:
            self.report.kept_unknown[self._unknown_kind(record)] += 1
        group_id = group_id_of(record.key)
        if decoded is None and group_id is not None and record.value is not None:
            self._live.note_unknown(group_id)
        target = partition.number % count if group_id is None else partition_for(group_id, count)
        self.report.rerouted_records += target != partition.number
        return target

    def _unknown_kind(self, record: Record) -> str:
        number = int.from_bytes((record.key or b"")[:2], "big", signed=True)
        return _UNSERVED_KINDS.get(number) or self._serde.describe(record.key, record.value)

    def _deserialize(
        self, serde: CoordinatorSerde, partition: PartitionFolder, record: Record
    ) -> CoordinatorRecord | None:
        try:
            return serde.deserialize(record.key, record.value)
        except DecodeError as error:
            raise StorageError(
                f"{partition.path}: the record at offset {record.offset} is malformed: {error}"
            ) from error

    # --- metadata and topics ------------------------------------------------------------------------------------------

    def _import_metadata(self, log_dir: LogDir, metadata: SourceMetadata | None) -> list[CoordinatorRecord]:
        directory_id = uuid_from_string(log_dir.identity.directory_id)
        maker = MetadataImport(self._config, directory_id, self._new_uuid, self.report.skipped)
        if metadata is not None:
            metadata.image.next_producer_id = max(metadata.image.next_producer_id, self._max_producer_id + 1)
            made = maker.from_image(metadata.image)
        else:
            made = maker.from_clues(
                self._clues.topics(self._live.topic_names, self._live.topic_ids), self._max_producer_id + 1
            )
        log = log_dir.open_log(
            CLUSTER_METADATA_TOPIC, 0, LogConfig(segment_bytes=self._config.metadata_log_segment_bytes), self._now_ms
        )
        serde = MetadataSerde()
        for start in range(0, len(made), _BATCH_RECORDS):
            pairs = [serde.serialize(record) for record in made[start : start + _BATCH_RECORDS]]
            log.append(encode_batch_from_parts(pairs, self._now_ms, log.end_offset), now_ms=self._now_ms)
        return made

    def _import_topics(
        self,
        log_dir: LogDir,
        partitions: list[PartitionFolder],
        metadata: SourceMetadata,
        prepared: dict[int, int],
        sources: list[str],
    ) -> None:
        folders = {*sources, *(parent(partition.path) for partition in partitions)}
        starts = self._merged(folders, LOG_START_OFFSET_FILE) or {}
        cleaned = self._merged(folders, CLEANER_OFFSET_FILE)
        importer = TopicImporter(self._fs, log_dir, self._config, self._now_ms, prepared)
        for partition in partitions:
            if partition.topic.startswith("__"):
                continue
            if not importer.is_known(partition, metadata.image):
                self.report.skipped[f"folder {partition.name}: the metadata does not know it"] += 1
                continue
            handover = read_handover(self._fs, partition.path)
            key = (partition.topic, partition.number)
            start = starts.get(key, 0)
            if handover is not None:
                # The worker that led the partition before has removed its own entries.
                start = handover.start_offset
                if handover.cleaned_offset:
                    cleaned = {**(cleaned or {}), key: handover.cleaned_offset}
            self.report.ended_transactions += importer.copy(partition, metadata.image, start)
            self.report.copied_partitions += 1
        self.report.notes += importer.notes
        if cleaned is not None:
            # Without the file, the checks of the new folder take offsets that a cleaner has removed for lost.
            kept = {key: cleaned[key] for key in log_dir.partitions() if key in cleaned}
            kept = {key: offset for key, offset in kept.items() if not key[0].startswith("__")}
            write_offset_checkpoint(self._fs, join(log_dir.path, CLEANER_OFFSET_FILE), kept)

    def _merged(self, folders: Iterable[str], name: str) -> dict[TopicPartition, int] | None:
        """Returns the entries of a checkpoint in all folders, also of workers. None if no folder has the file.

        An empty file does not count: Kafka creates it at its first start, and writes it later.
        """
        merged: dict[TopicPartition, int] | None = None
        for folder in folders:
            path = join(folder, name)
            if self._fs.exists(path) and self._fs.size(path) == 0:
                continue
            try:
                entries = read_merged_checkpoint(self._fs, folder, name)
            except MalformedCheckpointError:
                if name != CLEANER_OFFSET_FILE:
                    raise
                entries = {}  # No log counts as cleaned, but the checks accept gaps in the offsets.
            if entries is not None:
                merged = {**(merged or {}), **entries}
        return merged

    def _count(self, made: list[CoordinatorRecord]) -> None:
        names = Counter(record.value.message_name for record in made if record.value is not None)
        self.report.topics = names["TopicRecord"] - 1
        self.report.partitions = names["PartitionRecord"] - self._config.offsets_topic_num_partitions
        self.report.groups = self._live.groups
        self.report.offsets = self._live.offsets


def _plain_records(reader: FolderReader) -> Iterator[tuple[Record, int]]:
    """Yields records with the leader epoch of their batch, which is the epoch of their coordinator."""
    resolver = TransactionResolver()
    for frame in reader.batches():
        for record in resolver.feed(frame.batch):
            yield record, frame.leader_epoch
