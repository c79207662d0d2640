# SPDX-License-Identifier: Apache-2.0
"""One topic partition: its log, leader epochs and producer state. There is one replica, so the high watermark is the
end of the log.

The log is opened at the first use. After a failed write it is opened again, with recovery: what a failed write left
behind is never trusted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from kcoord.config import TopicConfig
from kcoord.metadata.image import PartitionImage
from kcoord.runtime.result import Producer
from kcoord.storage.errors import CorruptLogError, PartitionHeldError, StorageError
from kcoord.storage.log import Log
from kcoord.storage.log_dir import LogDir
from kcoord.storage.segment import LogConfig
from kcoord.topics.fetch_manager import ReadResult
from kcoord.topics.fetch_session import FetchPartition
from kcoord.topics.leader_epochs import UNDEFINED_EPOCH, UNDEFINED_OFFSET
from kcoord.topics.offset_queries import FoundOffset, find_offset
from kcoord.topics.open_log import OpenLog, load, replay
from kcoord.topics.partition_files import PartitionFiles
from kcoord.topics.producer_state import BatchFacts, ProducerEntry
from kcoord.topics.validation import batch_rules, stamp_batch
from kcoord_protocol.batch_header import BatchHeader, crc32c, decode_header
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import encode_control_batch, walk_batches

HIGH_WATERMARK: Final = -1
"""As an offset to delete records up to."""

_logger = logging.getLogger(__name__)


class Verified(NamedTuple):
    """The transaction coordinator agreed to a producer's first write of a transaction (KIP-890). `bumps_epoch`: the
    producer has a new epoch with every transaction.
    """

    ticket: int
    bumps_epoch: bool


class Marker(NamedTuple):
    """The end of a producer's transaction. A `repeated` one may be in the log already."""

    producer: Producer
    coordinator_epoch: int
    committed: bool
    bumps_epoch: bool
    repeated: bool = False


class AppendResult(NamedTuple):
    """What a producer is told about its batch, and how many bytes were added (0 for a duplicate)."""

    base_offset: int
    log_append_time_ms: int
    log_start_offset: int
    added_bytes: int


class Partition:
    """See the module's text."""

    __slots__ = (
        "_failure",
        "_log_dir",
        "_open",
        "config",
        "files",
        "image",
        "index",
        "log_config",
        "node_id",
        "rules",
        "topic",
        "topic_id",
    )

    def __init__(
        self, topic: str, topic_id: bytes, image: PartitionImage, config: TopicConfig, log_dir: LogDir, node_id: int
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = image.partition_id
        self.image = image
        self.files = PartitionFiles(log_dir.file_system, log_dir.partition_path(topic, image.partition_id))
        self.node_id = node_id
        self.log_config = LogConfig()
        self.configure(config)
        self._log_dir = log_dir
        self._open: OpenLog | None = None
        self._failure: str | None = None

    def __repr__(self) -> str:
        return f"Partition({self.topic}-{self.index})"

    # --- metadata -----------------------------------------------------------------------------------------------------

    def configure(self, config: TopicConfig) -> None:
        """Takes over the topic's configuration; segments follow with the next append."""
        self.config = config
        self.rules = batch_rules(config)
        self.log_config.segment_bytes = config.effective_segment_bytes
        segment_ms = min(config.segment_ms, config.max_compaction_lag_ms) if config.is_compacted else config.segment_ms
        self.log_config.segment_ms = max(segment_ms - self._jitter_ms(config), 1)
        self.log_config.segment_index_bytes = config.segment_index_bytes
        self.log_config.index_interval_bytes = config.index_interval_bytes
        self.log_config.file_delete_delay_ms = config.file_delete_delay_ms

    def _jitter_ms(self, config: TopicConfig) -> int:
        """Spreads the rolls of many partitions over segment.jitter.ms: always the same for one partition."""
        return (
            crc32c(f"{self.topic}-{self.index}".encode()) % config.segment_jitter_ms if config.segment_jitter_ms else 0
        )

    def update(self, image: PartitionImage) -> None:
        """Takes over leader and epoch."""
        new_epoch = image.leader_epoch != self.image.leader_epoch
        self.image = image
        if new_epoch and self._open is not None:
            self._assign_epoch(self._open)

    def check_leader(self, current_leader_epoch: int) -> None:
        """Refuses a request to another leader or leader epoch; -1 stands for a client that does not know the epoch."""
        if self.image.leader != self.node_id:
            raise KafkaError(
                Errors.NOT_LEADER_OR_FOLLOWER, f"{self.topic}-{self.index} is led by broker {self.image.leader}."
            )
        if current_leader_epoch == UNDEFINED_EPOCH or current_leader_epoch == self.image.leader_epoch:
            return
        error = (
            Errors.FENCED_LEADER_EPOCH
            if current_leader_epoch < self.image.leader_epoch
            else Errors.UNKNOWN_LEADER_EPOCH
        )
        raise KafkaError(
            error,
            f"The leader epoch of {self.topic}-{self.index} is {self.image.leader_epoch}, not {current_leader_epoch}.",
        )

    # --- opening ------------------------------------------------------------------------------------------------------

    @property
    def opened(self) -> OpenLog | None:
        """The open log, without opening it."""
        return self._open

    def open(self, now_ms: int) -> OpenLog:
        """The open log; KAFKA_STORAGE_ERROR where it cannot be opened or is damaged."""
        if self._open is not None:
            return self._open
        if self._failure is not None:
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, self._failure)
        try:
            opened = self._load(now_ms)
        except PartitionHeldError as error:
            raise KafkaError(Errors.NOT_LEADER_OR_FOLLOWER, str(error)) from error
        except CorruptLogError as error:
            # Every request would find the same damage: it is looked for once.
            self._failure = str(error)
            _logger.error("%s-%d is not served: %s", self.topic, self.index, error)
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error
        except (OSError, StorageError) as error:
            _logger.error("%s-%d cannot be opened: %s", self.topic, self.index, error)
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error
        self._open = opened
        return opened

    def _load(self, now_ms: int) -> OpenLog:
        log = self._log_dir.open_log(self.topic, self.index, self.log_config, now_ms)
        opened = load(log, self.files, now_ms)
        self._assign_epoch(opened)
        return opened

    def _assign_epoch(self, opened: OpenLog) -> None:
        if opened.epochs.assign(self.image.leader_epoch, opened.log.end_offset):
            self.files.store_epochs(opened.epochs)

    def fail(self, error: Exception) -> KafkaError:
        """A write failed. Where the log cannot go on after that, it is given up, and recovered at the next use."""
        if self._open is None or self._open.is_news(error):
            _logger.error("Writing to %s-%d failed: %s", self.topic, self.index, error)
        if self._open is not None and self._open.log.failure is not None:
            self._open.log.abandon()
            self._open = None
        return KafkaError(Errors.KAFKA_STORAGE_ERROR, f"Writing to {self.topic}-{self.index} failed: {error}")

    # --- writing ------------------------------------------------------------------------------------------------------

    def is_in_transaction(self, producer: Producer, now_ms: int) -> bool:
        """Whether the producer's transaction is under way here; also where the log is not usable, which who writes will
        be told.
        """
        try:
            return self.open(now_ms).producers.is_open(*producer)
        except KafkaError:
            return True

    def start_verification(self, producer: Producer, now_ms: int) -> int:
        """A ticket for a producer that the transaction coordinator has to be asked about before it may write."""
        return self.open(now_ms).verifications.start(producer.producer_id)

    def finish_verification(self, producer: Producer, ticket: int) -> None:
        if self._open is not None:
            self._open.verifications.finish(producer.producer_id, ticket)

    def append(
        self, batch: bytes, *, requires_all: bool, verified: Verified | None, needs_verification: bool, now_ms: int
    ) -> AppendResult:
        """Appends a client's batch, or recognises it as one that was appended before."""
        self.check_leader(UNDEFINED_EPOCH)
        if requires_all:
            self._check_in_sync_replicas()
        opened = self.open(now_ms)
        log = opened.log
        stamped = stamp_batch(
            batch, self.rules, base_offset=log.end_offset, leader_epoch=self.image.leader_epoch, now_ms=now_ms
        )
        facts = stamped.facts
        if facts.producer_id >= 0:
            duplicate = opened.producers.check(facts)
            if duplicate is not None:
                return AppendResult(duplicate.base_offset, duplicate.timestamp_ms, log.start_offset, 0)
            if facts.is_transactional and needs_verification:
                self._check_verified(opened, facts, verified)
        self._write(
            opened,
            stamped.data,
            facts.base_offset,
            stamped.records_count,
            lambda: opened.producers.replay_data(facts),
            now_ms,
        )
        return AppendResult(facts.base_offset, stamped.log_append_time_ms, log.start_offset, len(stamped.data))

    def _check_verified(self, opened: OpenLog, facts: BatchFacts, verified: Verified | None) -> None:
        """A transaction never begins here behind its coordinator's back: nobody would end it."""
        if opened.producers.is_open(facts.producer_id, facts.producer_epoch):
            return
        if verified is None or not opened.verifications.holds(facts.producer_id, verified.ticket):
            raise KafkaError(
                Errors.INVALID_TXN_STATE,
                f"{self.topic}-{self.index} is not part of a transaction of producer {facts.producer_id}.",
            )
        if verified.bumps_epoch and facts.base_sequence != 0 and facts.producer_id not in opened.producers.entries:
            # An earlier batch of the same transaction was refused, and must not be overtaken.
            raise KafkaError(
                Errors.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"Producer {facts.producer_id} began with sequence number {facts.base_sequence} instead of 0.",
            )

    def write_marker(self, marker: Marker, now_ms: int) -> int:
        """Ends a producer's transaction; returns how many bytes were added."""
        self.check_leader(UNDEFINED_EPOCH)
        opened = self.open(now_ms)
        producers, producer_id = opened.producers, marker.producer.producer_id
        producers.check_coordinator_epoch(producer_id, marker.coordinator_epoch)
        producers.check_marker(*marker.producer, bumps_epoch=marker.bumps_epoch)
        opened.verifications.end(producer_id)
        entry = producers.entries.get(producer_id)
        is_known = entry is not None and entry.producer_epoch == marker.producer.producer_epoch
        if marker.repeated and is_known and producer_id not in producers.open_transactions:
            return 0
        data = self._encode_marker(marker, opened.log.end_offset, now_ms)
        header = decode_header(data)
        self._write(opened, data, header.base_offset, 1, lambda: self._replay_marker(opened, header, data), now_ms)
        return len(data)

    def _encode_marker(self, marker: Marker, base_offset: int, now_ms: int) -> bytes:
        return encode_control_batch(
            ControlRecordType.COMMIT if marker.committed else ControlRecordType.ABORT,
            end_txn_marker(marker.coordinator_epoch),
            timestamp_ms=now_ms,
            producer_id=marker.producer.producer_id,
            producer_epoch=marker.producer.producer_epoch,
            base_offset=base_offset,
            partition_leader_epoch=self.image.leader_epoch,
        )

    def _replay_marker(self, opened: OpenLog, header: BatchHeader, data: bytes) -> None:
        aborted = replay(opened.producers, header, data)
        if aborted is not None:
            self.files.append_aborted(opened.segment_base_of(aborted.last_offset), aborted)

    def active_producers(self, now_ms: int) -> list[ProducerEntry]:
        """Everything that is known of the producers of this partition (KIP-664)."""
        self.check_leader(UNDEFINED_EPOCH)
        return list(self.open(now_ms).producers.entries.values())

    def _check_in_sync_replicas(self) -> None:
        """A topic cannot ask for more in-sync replicas than it has (observed in Kafka 4.3.1: min.insync.replicas is
        capped by them).
        """
        needed = min(self.config.min_insync_replicas, len(self.image.replicas))
        if len(self.image.isr) < needed:
            raise KafkaError(
                Errors.NOT_ENOUGH_REPLICAS,
                f"{len(self.image.isr)} replicas are in sync, min.insync.replicas asks for {needed}.",
            )

    def _write(
        self,
        opened: OpenLog,
        data: bytes,
        base_offset: int,
        records_count: int,
        replay_batch: Callable[[], None],
        now_ms: int,
    ) -> None:
        try:
            info = opened.log.append(data, now_ms=now_ms)
            opened.is_disk_full = False
            if info.rolled:
                self._take_snapshot(opened, base_offset)
            replay_batch()
            opened.unflushed_records += records_count
            if opened.unflushed_records >= self.config.flush_messages:
                self.flush(opened, now_ms)
        except (OSError, StorageError) as error:
            raise self.fail(error) from error

    def _take_snapshot(self, opened: OpenLog, offset: int) -> None:
        """Keeps the producer state as of `offset`, which bounds what a restart must read. The log can do without."""
        if opened.snapshot_offset >= offset:
            return
        try:
            self.files.store_snapshot(offset, list(opened.producers.entries.values()))
            opened.snapshot_offset = offset
        except OSError as error:
            _logger.warning("No producer snapshot of %s-%d: %s", self.topic, self.index, error)

    def flush(self, opened: OpenLog, now_ms: int) -> None:
        """Makes everything durable."""
        opened.log.flush()
        opened.unflushed_records = 0
        opened.last_flush_ms = now_ms

    def delete_records(self, offset: int, now_ms: int) -> int:
        """Moves the start of the log to `offset`; returns where it is then."""
        self.check_leader(UNDEFINED_EPOCH)
        if not self.config.is_deleted:
            raise KafkaError(
                Errors.POLICY_VIOLATION, f"Records of {self.topic} cannot be deleted: its cleanup.policy is compact."
            )
        opened = self.open(now_ms)
        if offset == HIGH_WATERMARK:
            offset = opened.log.end_offset
        if not 0 <= offset <= opened.log.end_offset:
            raise KafkaError(Errors.OFFSET_OUT_OF_RANGE, f"Offset {offset} is not within {self.topic}-{self.index}.")
        if offset > opened.log.start_offset:
            self._advance_start(opened, offset)
        return opened.log.start_offset

    def _advance_start(self, opened: OpenLog, offset: int) -> None:
        opened.log.advance_start_offset(offset)
        self.on_start_moved(opened)

    def on_start_moved(self, opened: OpenLog) -> None:
        """The log begins later than before: what belongs to the lost part goes too."""
        opened.producers.advance_start(opened.log.start_offset)
        if opened.epochs.advance_start(opened.log.start_offset):
            self.files.store_epochs(opened.epochs)
        self.files.remove_below(opened.log.start_offset)

    def forget_aborted(self, opened: OpenLog, marker_offsets: set[int]) -> None:
        """The cleaner removes what is left of aborted transactions: readers are not told of them any more."""
        opened.producers.forget_aborted(marker_offsets)
        self.files.forget_aborted(marker_offsets)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, wanted: FetchPartition, *, max_bytes: int, whole_first_batch: bool, read_committed: bool, now_ms: int
    ) -> ReadResult:
        """Whole batches from the fetch offset on, as stored. The first one may exceed `max_bytes` only with
        `whole_first_batch`.
        """
        self.check_leader(wanted.current_leader_epoch)
        opened = self.open(now_ms)
        log = opened.log
        stable = opened.last_stable_offset
        result = ReadResult(b"", log.end_offset, stable, log.start_offset, [] if read_committed else None)
        if wanted.last_fetched_epoch != UNDEFINED_EPOCH:
            result.diverging_epoch = self._diverging_epoch(opened, wanted)
            if result.diverging_epoch is not None:
                return result
        if not log.start_offset <= wanted.fetch_offset <= log.end_offset:
            raise KafkaError(
                Errors.OFFSET_OUT_OF_RANGE,
                f"{self.topic}-{self.index} holds offsets {log.start_offset} to {log.end_offset}, not "
                f"{wanted.fetch_offset}.",
            )
        end = stable if read_committed else log.end_offset
        if wanted.fetch_offset >= end or (max_bytes <= 0 and not whole_first_batch):
            return result
        result.records = self._read_log(log, wanted.fetch_offset, max_bytes, end, whole_first_batch)
        if read_committed:
            next_offset = _next_offset(result.records, wanted.fetch_offset)
            result.aborted_transactions = opened.producers.aborted_between(wanted.fetch_offset, next_offset)
        return result

    def _read_log(self, log: Log, offset: int, max_bytes: int, end: int, whole_first_batch: bool) -> bytes:
        try:
            return log.read(offset, max_bytes, max_offset=end, min_one=whole_first_batch)
        except (OSError, StorageError) as error:
            _logger.error("Reading %s-%d at offset %d failed: %s", self.topic, self.index, offset, error)
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error

    def _diverging_epoch(self, opened: OpenLog, wanted: FetchPartition) -> tuple[int, int] | None:
        """Where the reader's log and ours part (KIP-595), None where they do not."""
        epoch, end_offset = opened.epochs.end_offset_for(wanted.last_fetched_epoch, opened.log.end_offset)
        if epoch == UNDEFINED_EPOCH or end_offset == UNDEFINED_OFFSET or wanted.fetch_offset < opened.log.start_offset:
            raise KafkaError(
                Errors.OFFSET_OUT_OF_RANGE,
                f"The end of leader epoch {wanted.last_fetched_epoch} is not known any more.",
            )
        return (epoch, end_offset) if epoch < wanted.last_fetched_epoch or end_offset < wanted.fetch_offset else None

    def find_offset(
        self, timestamp: int, *, current_leader_epoch: int, read_committed: bool, now_ms: int
    ) -> FoundOffset:
        """The offset that a timestamp, or a special value for one, stands for."""
        self.check_leader(current_leader_epoch)
        opened = self.open(now_ms)
        end_offset = opened.last_stable_offset if read_committed else opened.log.end_offset
        try:
            return find_offset(
                opened.log, opened.epochs, timestamp, end_offset=end_offset, leader_epoch=self.image.leader_epoch
            )
        except (OSError, StorageError) as error:
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error

    def end_offset_for_epoch(self, epoch: int, current_leader_epoch: int, now_ms: int) -> tuple[int, int]:
        """The largest leader epoch not above `epoch`, and where it ends."""
        self.check_leader(current_leader_epoch)
        opened = self.open(now_ms)
        return opened.epochs.end_offset_for(epoch, opened.log.end_offset)

    # --- end ----------------------------------------------------------------------------------------------------------

    def prepare_close(self) -> None:
        """Writes a snapshot, so that the next start need not read the log. The log itself is closed with its folder."""
        opened, self._open = self._open, None
        if opened is not None and opened.log.failure is None and opened.log.end_offset > opened.log.start_offset:
            self._take_snapshot(opened, opened.log.end_offset)

    def resign(self) -> None:
        """Another broker leads from now on: everything is made durable, and the log closed."""
        log = self._open.log if self._open is not None else None
        self.prepare_close()
        self._failure = f"{self.topic}-{self.index} is led by another broker."
        if log is None:
            return
        try:
            log.close()
        except (OSError, StorageError) as error:
            _logger.error("The log of %s-%d could not be closed in an orderly way: %s", self.topic, self.index, error)

    def delete(self) -> None:
        """The topic is gone: nothing is served any more, and the owner may rename the folder."""
        opened, self._open = self._open, None
        self._failure = f"{self.topic}-{self.index} is deleted."
        if opened is not None:
            opened.log.abandon()


def _next_offset(data: bytes, fetch_offset: int) -> int:
    """The offset after the last batch in `data`."""
    end = fetch_offset
    for _, (base_offset, _, _, _, _, _, last_delta, *_) in walk_batches(data):
        end = base_offset + last_delta + 1
    return end
