# SPDX-License-Identifier: Apache-2.0
"""What a partition has in memory while its log is open, and how that is found again: snapshot and small files first,
then the batches behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kcoord.runtime.verification import Verifications
from kcoord.storage.errors import is_disk_full
from kcoord.storage.log import Log
from kcoord.topics.leader_epochs import LeaderEpochs
from kcoord.topics.partition_files import PartitionFiles
from kcoord.topics.producer_state import AbortedTransaction, BatchFacts, ProducerState
from kcoord_protocol.batch_header import BatchHeader
from kcoord_protocol.control_records import ControlRecordType, decode_control_key, decode_end_txn_marker
from kcoord_protocol.record_batch import decode_entries


@dataclass(slots=True)
class OpenLog:
    """See the module's text."""

    log: Log
    epochs: LeaderEpochs
    producers: ProducerState
    unflushed_records: int = 0
    last_flush_ms: int = 0
    snapshot_offset: int = -1
    verifications: Verifications = field(default_factory=Verifications)
    is_disk_full: bool = False

    def is_news(self, error: Exception) -> bool:
        """Whether a failed write is to be told. Producers try again and again: a full disk is, once, until it takes a
        write.
        """
        is_known, self.is_disk_full = self.is_disk_full, is_disk_full(error)
        return not (is_known and self.is_disk_full)

    @property
    def last_stable_offset(self) -> int:
        """Up to where transactions are decided."""
        unstable = self.producers.first_unstable_offset
        return self.log.end_offset if unstable is None else unstable

    def segment_base_of(self, offset: int) -> int:
        """The base offset of the segment that holds `offset`."""
        return max(segment.base_offset for segment in self.log.segments if segment.base_offset <= offset)


def load(log: Log, files: PartitionFiles, now_ms: int) -> OpenLog:
    """Rebuilds what belongs to a log that was just opened."""
    opened = OpenLog(log, files.load_epochs(), ProducerState(), last_flush_ms=now_ms)
    _load_producers(opened, files)
    if _load_epochs(opened):
        files.store_epochs(opened.epochs)
    return opened


def _load_producers(opened: OpenLog, files: PartitionFiles) -> None:
    log, producers = opened.log, opened.producers
    producers.aborted = files.load_aborted(log.end_offset)
    snapshot = files.load_snapshot(log.end_offset)
    if snapshot is not None:
        opened.snapshot_offset, entries = snapshot
        producers.restore(entries, opened.snapshot_offset)
    for header, data in log.batches(max(opened.snapshot_offset, log.start_offset)):
        aborted = replay(producers, header, data)
        if aborted is not None:
            files.append_aborted(opened.segment_base_of(aborted.last_offset), aborted)
    producers.advance_start(log.start_offset)


def _load_epochs(opened: OpenLog) -> bool:
    """Makes the leader epochs fit the log; True where they changed. Without the file every batch tells its epoch."""
    log, epochs = opened.log, opened.epochs
    changed = False
    if not epochs.entries:
        for header, _ in log.batches(log.start_offset):
            changed |= epochs.assign(header.partition_leader_epoch, header.base_offset)
    changed |= epochs.truncate_end(log.end_offset)
    return epochs.advance_start(log.start_offset) or changed


def facts_of(header: BatchHeader) -> BatchFacts:
    """What the producer state wants to know of a stored batch."""
    return BatchFacts(
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.last_sequence,
        header.base_offset,
        header.last_offset,
        header.max_timestamp,
        header.is_transactional,
    )


def replay(producers: ProducerState, header: BatchHeader, data: bytes) -> AbortedTransaction | None:
    """Takes a stored batch into the producer state; returns the transaction that it aborts, if it was not known."""
    facts = facts_of(header)
    if not header.is_control:
        producers.replay_data(facts)
        return None
    aborted = None
    for _, key, value in decode_entries(data):
        kind = decode_control_key(key)
        if kind in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
            is_commit = kind is ControlRecordType.COMMIT
            aborted = producers.replay_marker(facts, decode_end_txn_marker(value), committed=is_commit)
    return aborted
