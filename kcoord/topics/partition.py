# SPDX-License-Identifier: Apache-2.0
"""One topic partition: what requests do with its log, leader epochs and producer state.

There is one replica, so the high watermark is the end of the log. Everything runs in the event loop. `partition_log`
describes the life of the log. TopicStore finds a partition only while this broker leads it.

The order of an append: the validation of the batch, the producer state's `check`, the write, and last `replay`. The
producer state changes only after the write, so a failed write leaves no trace in it.
A batch is acknowledged when it is in the page cache. It is synced by flush.messages, flush.ms, in another thread after
its segment was closed (`kcoord.storage.rolled`), and at shutdown.
A power loss may therefore cost the end of the log, at a batch boundary; a crash of the process costs nothing.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from kcoord.config import TopicConfig
from kcoord.metadata.image import PartitionImage
from kcoord.runtime.result import Producer
from kcoord.storage.errors import StorageError
from kcoord.topics.fetch_manager import ReadResult
from kcoord.topics.fetch_session import FetchPartition
from kcoord.topics.leader_epochs import UNDEFINED_EPOCH, UNDEFINED_OFFSET
from kcoord.topics.offset_queries import FoundOffset, find_offset
from kcoord.topics.open_log import OpenLog, replay
from kcoord.topics.partition_log import PartitionLog
from kcoord.topics.producer_state import ProducerEntry
from kcoord.topics.validation import batch_rules, stamp_batch
from kcoord_protocol.batch_header import NO_TIMESTAMP, TRANSACTIONAL_BIT, BatchHeader, Buffer, decode_header
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import encode_control_batch

HIGH_WATERMARK: Final = -1
"""The offset by which DeleteRecords asks to delete all records."""

SENT_UNREAD_BYTES: Final = 64 << 10
"""A read that is at least as large returns a part of a file. Reading and copying fewer bytes costs less than that."""

_logger = logging.getLogger(__name__)


class Verified(NamedTuple):
    """The transaction coordinator's consent to a producer's first write of a transaction (KIP-890).

    `bumps_epoch`: the producer has a new epoch in every transaction.
    """

    ticket: int
    bumps_epoch: bool


class Marker(NamedTuple):
    """The end of a producer's transaction. A `repeated` marker may be in the log already."""

    producer: Producer
    coordinator_epoch: int
    committed: bool
    bumps_epoch: bool
    repeated: bool = False


class AppendResult(NamedTuple):
    """The response to a producer's batch, and the number of bytes that were added (0 for a duplicate)."""

    base_offset: int
    log_append_time_ms: int
    log_start_offset: int
    added_bytes: int


class Partition(PartitionLog):
    """A partition that this broker leads."""

    __slots__ = ("_has_enough_replicas", "_needed_replicas", "rules")

    def __repr__(self) -> str:
        return f"Partition({self.topic}-{self.index})"

    # --- metadata -----------------------------------------------------------------------------------------------------

    def configure(self, config: TopicConfig) -> None:
        super().configure(config)
        self.rules = batch_rules(config)
        self._count_replicas()

    def update(self, image: PartitionImage) -> None:
        """Applies the leader epoch and the replicas of `image`."""
        new_epoch = image.leader_epoch != self.image.leader_epoch
        self.image = image
        self._count_replicas()
        if new_epoch and self._open is not None:
            self._assign_epoch(self._open)

    def check_leader_epoch(self, current_leader_epoch: int) -> None:
        """Raises KafkaError if the client's leader epoch is not the current one.

        -1 stands for a client that does not know the epoch.
        """
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

    # --- writing ------------------------------------------------------------------------------------------------------

    def is_in_transaction(self, producer: Producer, now_ms: int) -> bool:
        """Returns whether the producer has an open transaction here.

        Also True if the log is unusable; the write itself then fails with the right error.
        """
        try:
            return self.open(now_ms).producers.is_open(*producer)
        except KafkaError:
            return True

    def start_verification(self, producer: Producer, now_ms: int) -> int | None:
        """Returns a ticket if a write needs the consent of the transaction coordinator first, else None."""
        opened = self.open(now_ms)
        if opened.producers.is_open(*producer):
            return None
        return opened.verifications.start(producer.producer_id)

    def finish_verification(self, producer: Producer, ticket: int) -> None:
        if self._open is not None:
            self._open.verifications.finish(producer.producer_id, ticket)

    def append(
        self, batch: Buffer, *, requires_all: bool, verified: Verified | None, needs_verification: bool, now_ms: int
    ) -> AppendResult:
        """Appends a client's batch; a duplicate returns the offset of the batch that was appended before."""
        if requires_all and not self._has_enough_replicas:
            raise self._not_enough_replicas()
        opened = self._open or self.open(now_ms)
        log = opened.log
        data, header = stamp_batch(
            batch, self.rules, base_offset=log.end_offset, leader_epoch=self.image.leader_epoch, now_ms=now_ms
        )
        if header.producer_id >= 0:
            duplicate = opened.producers.check(header)
            if duplicate is not None:
                return AppendResult(duplicate.base_offset, duplicate.timestamp_ms, log.start_offset, 0)
            if needs_verification and header.attributes & TRANSACTIONAL_BIT:
                self._check_verified(opened, header, verified)
        self._write(opened, data, header, now_ms)
        log_append_time_ms = now_ms if self.rules.log_append_time else NO_TIMESTAMP
        return AppendResult(header.base_offset, log_append_time_ms, log.start_offset, len(data))

    def _check_verified(self, opened: OpenLog, header: BatchHeader, verified: Verified | None) -> None:
        """Raises KafkaError if a batch would begin a transaction that its coordinator does not know.

        Nobody would end such a transaction.
        """
        if opened.producers.is_open(header.producer_id, header.producer_epoch):
            return
        if verified is None or not opened.verifications.holds(header.producer_id, verified.ticket):
            raise KafkaError(
                Errors.INVALID_TXN_STATE,
                f"{self.topic}-{self.index} is not part of a transaction of producer {header.producer_id}.",
            )
        if verified.bumps_epoch and header.base_sequence != 0 and header.producer_id not in opened.producers.entries:
            # An earlier batch of the transaction was rejected. This batch must not be written before its retry.
            raise KafkaError(
                Errors.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"Producer {header.producer_id} began with sequence number {header.base_sequence} instead of 0.",
            )

    def write_marker(self, marker: Marker, now_ms: int) -> int:
        """Ends a producer's transaction; returns the number of bytes that were added."""
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
        self._write(opened, data, decode_header(data), now_ms)
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

    def active_producers(self, now_ms: int) -> list[ProducerEntry]:
        """Returns the state of every producer of this partition (KIP-664)."""
        return list(self.open(now_ms).producers.entries.values())

    def _count_replicas(self) -> None:
        """Notes whether min.insync.replicas are in sync.

        min.insync.replicas is capped by the number of replicas (observed in Kafka 4.3.1).
        """
        needed, replicas = self.config.min_insync_replicas, len(self.image.replicas)
        self._needed_replicas = needed if needed < replicas else replicas
        self._has_enough_replicas = len(self.image.isr) >= self._needed_replicas

    def _not_enough_replicas(self) -> KafkaError:
        return KafkaError(
            Errors.NOT_ENOUGH_REPLICAS,
            f"{self.topic}-{self.index} has {len(self.image.isr)} in-sync replicas; min.insync.replicas requires "
            f"{self._needed_replicas}.",
        )

    def _write(self, opened: OpenLog, data: bytes, header: BatchHeader, now_ms: int) -> None:
        log, producers, base_offset = opened.log, opened.producers, header.base_offset
        # The first offsets of open transactions. Most partitions have none, and the last stable offset is the log end.
        unstable = producers.open_transactions
        stable_offset = next(iter(unstable.values())) if unstable else base_offset
        try:
            assert base_offset == log.end_offset, (
                f"P-1: a batch begins at {base_offset}, the log ends at {log.end_offset}"
            )
            info = log.append_batch(data, base_offset, header.last_offset, header.max_timestamp, now_ms=now_ms)
            opened.is_disk_full = False
            if info.rolled:
                self._take_snapshot(opened, base_offset, at_once=False)
            replay(producers, header, data)
            end_offset = log.end_offset
            assert producers.end_offset == end_offset, (
                f"P-2: the producer state ends at {producers.end_offset}, the log at {end_offset}"
            )
            if unstable:
                assert header.producer_id not in unstable or not header.is_control, (
                    f"P-4: the transaction of producer {header.producer_id} is open after its marker"
                )
                assert stable_offset <= opened.last_stable_offset <= end_offset, (
                    f"P-3: the last stable offset goes from {stable_offset} to {opened.last_stable_offset}"
                )
            opened.unflushed_records += header.last_offset_delta + 1
            if opened.unflushed_records >= self.config.flush_messages:
                self.flush(opened, now_ms)
        except (OSError, StorageError, AssertionError) as error:
            raise self.fail(error) from error

    def delete_records(self, offset: int, now_ms: int) -> int:
        """Moves the start of the log up to `offset`; returns the new start."""
        if not self.config.is_deleted:
            raise KafkaError(
                Errors.POLICY_VIOLATION, f"Records of {self.topic} cannot be deleted: its cleanup.policy is compact."
            )
        opened = self.open(now_ms)
        if offset == HIGH_WATERMARK:
            offset = opened.log.end_offset
        if not 0 <= offset <= opened.log.end_offset:
            raise KafkaError(
                Errors.OFFSET_OUT_OF_RANGE,
                f"Offset {offset} is not within {self.topic}-{self.index}, which ends at {opened.log.end_offset}.",
            )
        if offset > opened.log.start_offset:
            opened.log.advance_start_offset(offset)
            self.on_start_moved(opened)
        return opened.log.start_offset

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, request: FetchPartition, *, max_bytes: int, whole_first_batch: bool, read_committed: bool, now_ms: int
    ) -> ReadResult:
        """Returns whole batches from the fetch offset on, as stored.

        The first batch may exceed `max_bytes` only with `whole_first_batch`.
        """
        self.check_leader_epoch(request.current_leader_epoch)
        opened = self.open(now_ms)
        log = opened.log
        stable = opened.last_stable_offset
        result = ReadResult(b"", log.end_offset, stable, log.start_offset)
        if request.last_fetched_epoch != UNDEFINED_EPOCH:
            result.diverging_epoch = self._diverging_epoch(opened, request)
            if result.diverging_epoch is not None:
                return result
        if read_committed:
            result.aborted_transactions = []
        if not log.start_offset <= request.fetch_offset <= log.end_offset:
            raise KafkaError(
                Errors.OFFSET_OUT_OF_RANGE,
                f"{self.topic}-{self.index} holds offsets {log.start_offset} to {log.end_offset}, not "
                f"{request.fetch_offset}.",
            )
        end = stable if read_committed else log.end_offset
        if request.fetch_offset >= end or (max_bytes <= 0 and not whole_first_batch):
            return result
        try:
            batches = log.find(request.fetch_offset, max_bytes, max_offset=end, min_one=whole_first_batch)
            if read_committed:
                next_offset = request.fetch_offset if batches is None else batches.next_offset()
                assert next_offset <= stable, f"P-5: a read_committed fetch goes to {next_offset}, above {stable}"
                result.aborted_transactions = opened.producers.aborted_between(request.fetch_offset, next_offset)
            if batches is not None and len(batches) >= SENT_UNREAD_BYTES and batches.file.descriptor is not None:
                result.unread_records = batches
            elif batches is not None:
                result.records = batches.read()
        except (OSError, StorageError) as error:
            _logger.error("Reading %s-%d at offset %d failed: %s", self.topic, self.index, request.fetch_offset, error)
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error
        return result

    def _diverging_epoch(self, opened: OpenLog, request: FetchPartition) -> tuple[int, int] | None:
        """Returns the epoch and offset at which the reader's log and this log diverge (KIP-595), None if they agree."""
        epoch, end_offset = opened.epochs.end_offset_for(request.last_fetched_epoch, opened.log.end_offset)
        if epoch == UNDEFINED_EPOCH or end_offset == UNDEFINED_OFFSET or request.fetch_offset < opened.log.start_offset:
            raise KafkaError(
                Errors.OFFSET_OUT_OF_RANGE,
                f"The end of leader epoch {request.last_fetched_epoch} in {self.topic}-{self.index} is unknown.",
            )
        return (epoch, end_offset) if epoch < request.last_fetched_epoch or end_offset < request.fetch_offset else None

    def find_offset(
        self, timestamp: int, *, current_leader_epoch: int, read_committed: bool, now_ms: int
    ) -> FoundOffset:
        """Returns the offset that a timestamp, or a special timestamp, stands for."""
        self.check_leader_epoch(current_leader_epoch)
        opened = self.open(now_ms)
        end_offset = opened.last_stable_offset if read_committed else opened.log.end_offset
        return find_offset(
            opened.log, opened.epochs, timestamp, end_offset=end_offset, leader_epoch=self.image.leader_epoch
        )

    def end_offset_for_epoch(self, epoch: int, current_leader_epoch: int, now_ms: int) -> tuple[int, int]:
        """Returns the largest leader epoch not above `epoch` and the offset where it ends."""
        self.check_leader_epoch(current_leader_epoch)
        opened = self.open(now_ms)
        return opened.epochs.end_offset_for(epoch, opened.log.end_offset)
