# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a state machine from its log, a slice at a time, so that loading a long log does not hold up other shards.

Records of unknown types or versions are counted, logged once each and skipped. Damage is never skipped: the load fails
and names the offset. Records of transactions and transaction markers are replayed in their place in the log; what a
record of a transaction is worth before its marker is up to the state machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

from kcoord.runtime.outbox import Statistics
from kcoord.runtime.result import Producer, StateMachine, new_end_transaction_marker
from kcoord.runtime.serde import RecordSerde
from kcoord.runtime.shard_context import ShardContext, ShardState
from kcoord.runtime.snapshot import RECORDS, Chunk, HasSnapshot, PackedState
from kcoord_protocol.batch_header import CONTROL_BIT, TRANSACTIONAL_BIT
from kcoord_protocol.control_records import ControlRecordType, decode_control_key, decode_end_txn_marker
from kcoord_protocol.record_batch import BatchHeader, decode_entries, decode_header

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound=StateMachine)

_SLICE_BYTES: Final = 256 * 1024
_COMPRESSION_BITS: Final = 0x07
_NOT_PLAIN: Final = _COMPRESSION_BITS | TRANSACTIONAL_BIT | CONTROL_BIT


@runtime_checkable
class HasBatchReplay(Protocol):
    """A state machine that can take common records without objects being made of them, for quick loading."""

    def batch_replay(self) -> Callable[[bytes, int], bool]:
        """A function of an uncompressed batch and its number of records, for one load. It replays them all, or returns
        False: then `replay` has to, for each of them, whatever has been replayed already.
        """


def _batch_replay_of(machine: object) -> Callable[[bytes, int], bool]:
    return machine.batch_replay() if isinstance(machine, HasBatchReplay) else lambda batch, count: False


class LoadError(Exception):
    """A batch of the log could not be read or replayed."""


class Loader(Generic[M]):
    """Loads one shard. Call `step` until it says that the shard is active.

    `batches` are header and bytes of each batch of the log in order, `end_offset` is where the log ends: it can lie
    beyond the last batch that compaction left. With a `snapshot`, `batches` are those behind it.
    """

    def __init__(
        self,
        shard: ShardContext[M],
        machine: M,
        serde: RecordSerde,
        batches: Iterable[tuple[BatchHeader, bytes]],
        end_offset: int,
        statistics: Statistics,
        skipped: set[str],
        snapshot: Iterable[Chunk] = (),
    ) -> None:
        self._shard = shard
        self._attempt = shard.begin_load()
        self._machine = machine
        self._batch_replay = _batch_replay_of(machine)
        self._serde = serde
        self._chunks = iter(snapshot)
        self._batches = iter(batches)
        self._next_offset = end_offset
        self._statistics = statistics
        self._skipped = skipped

    @property
    def shard_id(self) -> int:
        return self._shard.shard_id

    def step(self, now_ms: int, slice_bytes: int = _SLICE_BYTES) -> bool:
        """Replays about `slice_bytes` of the log; True once the shard is active. After an exception the shard is
        FAILED.
        """
        if self._shard.state is not ShardState.LOADING or self._shard.load_attempt != self._attempt:
            raise LoadError(f"shard {self.shard_id} is {self._shard.state.value} and no longer loaded by this loader")
        try:
            finished = self._replay_slice(slice_bytes)
        except BaseException:
            self._shard.move_to(ShardState.FAILED)
            raise
        if finished and not self._shard.activate(self._machine, self._next_offset, now_ms):
            raise LoadError(f"shard {self.shard_id}: the state that its log holds cannot be started")
        return finished

    def _replay_slice(self, slice_bytes: int) -> bool:
        for chunk in self._chunks:
            self._restore(chunk)
            slice_bytes -= len(chunk.data)
            if slice_bytes <= 0:
                return False
        for header, data in self._batches:
            self._replay_batch(header, data)
            self._next_offset = max(self._next_offset, header.next_offset)
            slice_bytes -= len(data)
            if slice_bytes <= 0:
                return False
        return True

    def _restore(self, chunk: Chunk) -> None:
        if chunk.kind == RECORDS:
            self._replay_batch(decode_header(chunk.data), chunk.data)
            return
        machine: object = self._machine
        try:
            is_known = isinstance(machine, HasSnapshot) and machine.restore(PackedState(*chunk))
        except ValueError as error:
            raise LoadError(f"shard {self.shard_id}: the snapshot cannot be used: {error}") from error
        if not is_known:
            raise LoadError(f"shard {self.shard_id}: the snapshot has a part of the unknown kind {chunk.kind}")

    def _replay_batch(self, header: BatchHeader, data: bytes) -> None:
        """Of control batches only transaction markers mean something to a state machine."""
        if not header.attributes & _NOT_PLAIN and self._batch_replay(data, header.records_count):
            self._statistics.records_loaded += header.records_count
            return
        try:
            entries = decode_entries(data)
        except ValueError as error:
            raise LoadError(
                f"shard {self.shard_id}: the batch at offset {header.base_offset} is malformed: {error}"
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
                self._machine.replay(record)
            except Exception as error:
                raise LoadError(
                    f"shard {self.shard_id}: the record at offset {offset} cannot be replayed: {error}"
                ) from error
        self._statistics.records_loaded += len(entries)

    def _replay_control(self, header: BatchHeader, key: bytes | None, value: bytes | None) -> None:
        control_type = decode_control_key(key)
        if control_type in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
            producer = Producer(header.producer_id, header.producer_epoch)
            is_commit = control_type is ControlRecordType.COMMIT
            self._machine.replay(
                new_end_transaction_marker(producer, decode_end_txn_marker(value), committed=is_commit)
            )

    def _skip(self, key: bytes | None, value: bytes | None) -> None:
        self._statistics.records_skipped += 1
        what = self._serde.describe(key, value)
        if what not in self._skipped:
            self._skipped.add(what)
            _logger.warning("Skipping records that this release does not know: %s (shard %d)", what, self.shard_id)
