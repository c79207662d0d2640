# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a state machine from its snapshot and its log.

The caller passes a slice of the log at a time, so that a long log does not delay other shards.

* A record of an unknown type or version is skipped and counted. Each type and version is logged once. If the log
  belongs to several processes, the load fails instead: another release may have written a commit that counts.
* Damage is never skipped: the load fails, and the error names the shard and the offset.
* Records of transactions, and transaction markers, are replayed in the order of the log. The state machine decides
  whether a transaction's records count before its marker arrives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

from kcoord.runtime.result import Producer, StateMachine, new_end_transaction_marker
from kcoord.runtime.serde import RecordSerde
from kcoord.runtime.snapshot import RECORDS, Chunk, HasSnapshot, PackedState
from kcoord.runtime.waiting import Statistics
from kcoord_protocol.batch_header import CONTROL_BIT, TRANSACTIONAL_BIT
from kcoord_protocol.control_records import ControlRecordType, decode_control_key, decode_end_txn_marker
from kcoord_protocol.record_batch import BatchHeader, decode_entries, decode_header

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound=StateMachine)

_COMPRESSION_BITS: Final = 0x07
_NOT_PLAIN: Final = _COMPRESSION_BITS | TRANSACTIONAL_BIT | CONTROL_BIT


@runtime_checkable
class HasBatchReplay(Protocol):
    """A state machine that can replay batches of common records without an object per record, which is faster."""

    def batch_replay(self) -> Callable[[bytes, int], bool]:
        """Returns a function for one load, which is called with an uncompressed batch and its number of records.

        The function replays all records and returns True. If any record needs `replay`, it returns False. The caller
        then replays the whole batch record by record; replaying some of them twice is harmless.
        """


def _batch_replay_of(machine: object) -> Callable[[bytes, int], bool]:
    return machine.batch_replay() if isinstance(machine, HasBatchReplay) else lambda batch, count: False


class LoadError(Exception):
    """A batch of the log or a chunk of the snapshot cannot be decoded or replayed."""


class Loader(Generic[M]):
    """Replays into a state machine the chunks of its snapshot, if there is one, and then the batches after it.

    `skipped` has the types and versions that were logged already. With None an unknown record fails the load.

    After a LoadError the state machine is incomplete and must be dropped.
    """

    def __init__(
        self,
        shard_id: int,
        machine: M,
        serde: RecordSerde,
        end_offset: int,
        statistics: Statistics,
        skipped: set[str] | None,
    ) -> None:
        self.machine = machine
        self.next_offset = end_offset
        """The end of the log. It can be greater than the end of the last batch, because compaction removes batches."""
        self.read_offset = 0
        """The offset from which to read next."""
        self._shard_id = shard_id
        self._batch_replay = _batch_replay_of(machine)
        self._serde = serde
        self._statistics = statistics
        self._skipped = skipped

    def replay(self, batches: Iterable[tuple[BatchHeader, bytes]]) -> None:
        """Replays batches of the log in order."""
        for header, data in batches:
            assert header.next_offset > self.read_offset, (
                f"R-8: shard {self._shard_id} replays the batch at offset {header.base_offset} "
                f"after everything below {self.read_offset}"
            )
            self._replay_batch(header, data)
            self.read_offset = header.next_offset
        self.next_offset = max(self.next_offset, self.read_offset)

    def restore(self, chunk: Chunk) -> None:
        """Replays one chunk of a snapshot. Raises LoadError if it is malformed or of an unknown kind."""
        if chunk.kind == RECORDS:
            self._replay_batch(decode_header(chunk.data), chunk.data)
            return
        machine: object = self.machine
        try:
            is_known = isinstance(machine, HasSnapshot) and machine.restore(PackedState(*chunk))
        except ValueError as error:
            raise LoadError(f"shard {self._shard_id}: the snapshot cannot be used: {error}") from error
        if not is_known:
            raise LoadError(f"shard {self._shard_id}: the snapshot has a part of the unknown kind {chunk.kind}")

    def _replay_batch(self, header: BatchHeader, data: bytes) -> None:
        """Replays one batch. Of the control records only transaction markers are passed to the state machine."""
        if not header.attributes & _NOT_PLAIN and self._batch_replay(data, header.records_count):
            self._statistics.records_loaded += header.records_count
            return
        try:
            entries = decode_entries(data)
        except ValueError as error:
            raise LoadError(
                f"shard {self._shard_id}: the batch at offset {header.base_offset} is malformed: {error}"
            ) from error
        for offset, key, value in entries:
            try:
                if header.is_control:
                    self._replay_control(header, key, value)
                    continue
                record = self._serde.deserialize(key, value)
                if record is None:
                    self._skip(key, value)
                    continue
                if header.is_transactional:
                    record.producer = Producer(header.producer_id, header.producer_epoch)
                self.machine.replay(record)
            except Exception as error:
                raise LoadError(
                    f"shard {self._shard_id}: the record at offset {offset} cannot be replayed: {error}"
                ) from error
        self._statistics.records_loaded += len(entries)

    def _replay_control(self, header: BatchHeader, key: bytes | None, value: bytes | None) -> None:
        control_type = decode_control_key(key)
        if control_type in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
            producer = Producer(header.producer_id, header.producer_epoch)
            is_commit = control_type is ControlRecordType.COMMIT
            self.machine.replay(new_end_transaction_marker(producer, decode_end_txn_marker(value), committed=is_commit))

    def _skip(self, key: bytes | None, value: bytes | None) -> None:
        what = self._serde.describe(key, value)
        if self._skipped is None:
            raise LoadError(f"this release does not know {what}: a later release has written it")
        self._statistics.records_skipped += 1
        if what not in self._skipped:
            self._skipped.add(what)
            _logger.warning("Skipping records that this release does not know: %s (shard %d)", what, self._shard_id)
