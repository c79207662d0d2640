# SPDX-License-Identifier: Apache-2.0
"""Copies topic folders during an import. Every batch is checked and stays as it is; open transactions are ended.

The transaction coordinator of the source is not imported, so no other process would ever end these transactions, and
read_committed consumers would wait forever. A transaction in state PrepareCommit is committed, any other is aborted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kcoord.config import BrokerConfig, TopicConfig
from kcoord.logtools.copying import copy_file
from kcoord.logtools.folders import PartitionFolder
from kcoord.metadata.image import MetadataImage
from kcoord.storage.file_system import FileSystem, join
from kcoord.storage.log import Log
from kcoord.storage.log_dir import LEADER_EPOCH_FILE, LogDir
from kcoord.storage.recovery import base_offset_of
from kcoord.storage.segment import LogConfig
from kcoord.topics import open_log
from kcoord.topics.partition_files import PartitionFiles
from kcoord.topics.producer_files import SNAPSHOT_SUFFIX, TRANSACTION_INDEX_SUFFIX
from kcoord_protocol.record_batch import ControlRecordType, encode_control_batch, end_txn_marker

_SIDE_FILES: Final = (SNAPSHOT_SUFFIX, TRANSACTION_INDEX_SUFFIX)


class TopicImporter:
    """Copies partitions into `log_dir`. `prepared` has the producers in PrepareCommit and their coordinator's epoch."""

    def __init__(
        self, fs: FileSystem, log_dir: LogDir, config: BrokerConfig, now_ms: int, prepared: Mapping[int, int]
    ) -> None:
        self._fs = fs
        self._log_dir = log_dir
        self._config = config
        self._now_ms = now_ms
        self._prepared = prepared
        self.notes: list[str] = []

    def is_known(self, partition: PartitionFolder, image: MetadataImage) -> bool:
        """Whether the folder is of a topic of the image. It may be of a deleted topic of the same name."""
        if image.partition(partition.topic, partition.number) is None:
            return False
        return PartitionFiles(self._fs, partition.path).topic_id() in (None, image.topics[partition.topic].id)

    def copy(self, partition: PartitionFolder, image: MetadataImage, start_offset: int) -> int:
        """Copies a partition and returns the number of transactions that it ended."""
        target = self._log_dir.partition_path(partition.topic, partition.number)
        files = PartitionFiles(self._fs, target)
        files.create(image.topics[partition.topic].id)
        for name in self._fs.list_dir(partition.path):
            if base_offset_of(name) is not None or name.endswith(_SIDE_FILES) or name == LEADER_EPOCH_FILE:
                copy_file(self._fs, join(partition.path, name), join(target, name))
        topic_config = TopicConfig.resolve(self._config, image.topic_configs(partition.topic))
        log_config = LogConfig(segment_bytes=topic_config.segment_bytes, segment_ms=topic_config.segment_ms)
        log = self._log_dir.open_log(partition.topic, partition.number, log_config, self._now_ms)
        self.notes += [
            f"{cut.file}: {cut.lost_bytes} torn bytes at position {cut.position} were left out: {cut.reason}"
            for cut in log.recovery_report.cuts
        ]
        log.advance_start_offset(min(max(start_offset, log.start_offset), log.end_offset))
        partition_image = image.partition(partition.topic, partition.number)
        return self._end_transactions(log, files, partition_image.leader_epoch if partition_image is not None else 0)

    def _end_transactions(self, log: Log, files: PartitionFiles, leader_epoch: int) -> int:
        producers = open_log.load(log, files, self._now_ms).producers
        ended = 0
        for producer_id, entry in sorted(producers.entries.items()):
            if entry.current_transaction_first_offset is None:
                continue
            is_commit = producer_id in self._prepared
            batch = encode_control_batch(
                ControlRecordType.COMMIT if is_commit else ControlRecordType.ABORT,
                end_txn_marker(max(self._prepared.get(producer_id, 0), entry.coordinator_epoch)),
                timestamp_ms=self._now_ms,
                producer_id=producer_id,
                producer_epoch=entry.producer_epoch,
                base_offset=log.end_offset,
                partition_leader_epoch=leader_epoch,
            )
            log.append(batch, now_ms=self._now_ms)
            ended += 1
        return ended
