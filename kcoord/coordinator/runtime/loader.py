# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a state machine from its log, a slice at a time, so that loading a long log does not hold up other shards.

Records of unknown types or versions are counted, logged once each and skipped. Damage is never skipped: the load fails
and names the offset.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

from kcoord.coordinator.result import StateMachine
from kcoord.coordinator.runtime.serde import RecordSerde
from kcoord.coordinator.runtime.shard_context import ShardContext, ShardState, Statistics
from protocol.record_batch import BatchHeader, decode_entries

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound=StateMachine)

_SLICE_BYTES: Final = 256 * 1024


class LoadError(Exception):
    """A batch of the log could not be read or replayed."""


class Loader(Generic[M]):
    """Loads one shard. Call `step` until it says that the shard is active.

    `batches` are header and bytes of each batch of the log in order, `end_offset` is where the log ends: it can lie
    beyond the last batch that compaction left.
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
    ) -> None:
        self._shard = shard
        self._attempt = shard.begin_load()
        self._machine = machine
        self._serde = serde
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
        for header, data in self._batches:
            self._replay_batch(header, data)
            self._next_offset = max(self._next_offset, header.next_offset)
            slice_bytes -= len(data)
            if slice_bytes <= 0:
                return False
        return True

    def _replay_batch(self, header: BatchHeader, data: bytes) -> None:
        """Control batches carry nothing for a state machine."""
        if header.is_control:
            return
        try:
            entries = decode_entries(data)
        except ValueError as error:
            raise LoadError(
                f"shard {self.shard_id}: the batch at offset {header.base_offset} is malformed: {error}"
            ) from error
        for offset, key, value in entries:
            try:
                record = self._serde.deserialize(key, value)
                if record is None:
                    self._skip(key, value)
                else:
                    self._machine.replay(record)
            except Exception as error:
                raise LoadError(
                    f"shard {self.shard_id}: the record at offset {offset} cannot be replayed: {error}"
                ) from error
        self._statistics.records_loaded += len(entries)

    def _skip(self, key: bytes | None, value: bytes | None) -> None:
        self._statistics.records_skipped += 1
        what = self._serde.describe(key, value)
        if what not in self._skipped:
            self._skipped.add(what)
            _logger.warning("Skipping records that this release does not know: %s (shard %d)", what, self.shard_id)
