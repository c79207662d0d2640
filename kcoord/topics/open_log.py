# SPDX-License-Identifier: Apache-2.0
"""The state of a partition while its log is open, and how `load` rebuilds it.

`load` reads the small files of the folder first: leader epochs, newest producer snapshot, and the transaction index up
to the offset of that snapshot. It then replays the batches after the snapshot. The log decides: whatever the files lack
or contradict is taken from it.

A snapshot makes the load skip the transaction markers before it. So the transactions that they aborted are written to
the index first, durably (`snapshot_at`). Nothing else is written to the index, so a failed write cannot leave a gap in
it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from kcoord.runtime.verification import Verifications
from kcoord.storage.errors import is_disk_full
from kcoord.storage.log import Log
from kcoord.storage.log_dir import LogDir
from kcoord.storage.recovery import Check, go_on
from kcoord.storage.segment import LogConfig
from kcoord.topics.leader_epochs import LeaderEpochs
from kcoord.topics.partition_files import PartitionFiles
from kcoord.topics.producer_files import encode_snapshot
from kcoord.topics.producer_state import AbortedTransaction, ProducerEntry, ProducerState
from kcoord_protocol.batch_header import BatchHeader
from kcoord_protocol.control_records import ControlRecordType, decode_control_key, decode_end_txn_marker
from kcoord_protocol.record_batch import decode_entries


@dataclass(slots=True)
class OpenLog:
    """An open log with its leader epochs, its producer state and its counters for flushes."""

    log: Log
    epochs: LeaderEpochs
    producers: ProducerState
    unflushed_records: int = 0
    last_flush_ms: int = 0
    snapshot_offset: int = -1
    are_epochs_stored: bool = True
    verifications: Verifications = field(default_factory=Verifications)
    is_disk_full: bool = False
    loaded_transactions: dict[int, int] = field(default_factory=dict)
    """The transactions that were open when the log was opened: producer ids, and the last offsets of their batches."""

    def is_news(self, error: Exception) -> bool:
        """Returns whether to log a failed write, and remembers whether the disk is full.

        Producers retry, so a full disk is logged once, until a write succeeds again.
        """
        is_known, self.is_disk_full = self.is_disk_full, is_disk_full(error)
        return not (is_known and self.is_disk_full)

    @property
    def last_stable_offset(self) -> int:
        """The first offset of the oldest open transaction, or the end of the log if no transaction is open.

        Not below the start of the log: DeleteRecords may delete records of an open transaction.
        """
        unstable = self.producers.first_unstable_offset
        return self.log.end_offset if unstable is None else max(unstable, self.log.start_offset)

    def unchanged_transactions(self) -> list[ProducerEntry]:
        """Returns the producers whose transaction is still open since the log was opened, and that sent no batch."""
        entries = self.producers.entries
        return [
            entries[producer_id]
            for producer_id, last_offset in self.loaded_transactions.items()
            if producer_id in self.producers.open_transactions and entries[producer_id].last_offset == last_offset
        ]

    @property
    def first_offset(self) -> int:
        """The offset at which the segments begin.

        The producer state has the batches from here on. The start of the log may be later, but a start that
        DeleteRecords has moved is not durable at once.
        """
        return self.log.segments[0].base_offset

    def not_indexed(self) -> list[AbortedTransaction]:
        """Returns the aborted transactions that the transaction index does not have yet."""
        return self.producers.aborted_from(max(self.snapshot_offset, self.first_offset))


def open_and_load(
    log_dir: LogDir,
    topic: str,
    index: int,
    files: PartitionFiles,
    config: LogConfig,
    now_ms: int,
    check: Check,
) -> OpenLog:
    """Opens the log of a partition, and returns it with its leader epochs and its producer state."""
    log = log_dir.open_log(topic, index, config, now_ms, check)
    try:
        return load(log, files, now_ms, check)
    except BaseException:
        # The next use opens the log again, and a log is open only once.
        log.abandon()
        raise


def load(log: Log, files: PartitionFiles, now_ms: int, check: Check = go_on) -> OpenLog:
    """Returns a log that was just opened with its leader epochs and its producer state.

    `check` is called for each batch that is read.
    """
    opened = OpenLog(log, files.load_epochs(), ProducerState(), last_flush_ms=now_ms)
    stored = list(opened.epochs.entries)
    _load_epochs(opened, check)
    _load_producers(opened, files, check)
    if opened.epochs.entries != stored:
        files.store_epochs(opened.epochs)
    return opened


def _load_producers(opened: OpenLog, files: PartitionFiles, check: Check) -> None:
    log, producers = opened.log, opened.producers
    snapshot = files.load_snapshot(opened.first_offset, log.end_offset, check)
    if snapshot is not None:
        opened.snapshot_offset, entries = snapshot
        producers.restore(entries, opened.snapshot_offset)
    replayed_from = max(opened.snapshot_offset, opened.first_offset)
    producers.aborted = files.load_aborted(replayed_from, check)
    for header, data in log.batches(replayed_from):
        check(len(data))
        replay(producers, header, data)
        if header.base_offset >= log.start_offset:
            # Storing a new epoch may have failed.
            opened.epochs.assign(header.partition_leader_epoch, header.base_offset)
    producers.advance_start(opened.first_offset)
    opened.loaded_transactions = {
        producer_id: producers.entries[producer_id].last_offset for producer_id in producers.open_transactions
    }


def snapshot_at(opened: OpenLog, files: PartitionFiles, offset: int) -> Callable[[Check], int]:
    """Returns a function that stores the producer state as of `offset`, up to which batches were replayed.

    The function may run in another thread. It returns `offset`, or raises OSError.
    """
    not_indexed, bases = opened.not_indexed(), [segment.base_offset for segment in opened.log.segments]
    entries, changed = opened.producers.begin_snapshot()

    def store(check: Check) -> int:
        for base, aborted in groupby(not_indexed, lambda aborted: bisect_right(bases, aborted.last_offset)):
            check(0)
            files.store_aborted(bases[base - 1], list(aborted))
        files.store_snapshot(offset, encode_snapshot(entries, changed, check))
        return offset

    return store


def _load_epochs(opened: OpenLog, check: Check) -> None:
    """Makes the leader epochs fit the log. If their file is missing, they are read from the batches."""
    log, epochs = opened.log, opened.epochs
    if not epochs.entries:
        for header, data in log.batches(log.start_offset):
            check(len(data))
            epochs.assign(header.partition_leader_epoch, header.base_offset)
    epochs.truncate_end(log.end_offset)
    epochs.advance_start(log.start_offset)


def replay(producers: ProducerState, header: BatchHeader, data: bytes) -> None:
    """Adds a stored batch to the producer state."""
    if not header.is_control:
        producers.replay_data(header)
        return
    for _, key, value in decode_entries(data):
        kind = decode_control_key(key)
        if kind in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
            is_commit = kind is ControlRecordType.COMMIT
            producers.replay_marker(header, decode_end_txn_marker(value), committed=is_commit)
