# SPDX-License-Identifier: Apache-2.0
"""When the shards of one set are due for a snapshot, and how one is taken while its shard works on.

A snapshot is taken in slices, one after another, of the shard whose log has grown most since its last one. It is saved
once everything it may hold is durable. Nothing depends on any of it: whatever is wrong with a snapshot, the log is read
instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kcoord.runtime.result import StateMachine
from kcoord.runtime.serde import RecordSerde
from kcoord.runtime.shard_context import ShardContext
from kcoord.runtime.shard_log import OpenedLog, Save
from kcoord.runtime.snapshot import Chunk, HasSnapshot, Snapshot, make_chunks

M = TypeVar("M", bound=StateMachine)

LEAST_GROWTH_BYTES: Final = 1 << 20
"""A log that grew by less is not worth a snapshot while the process runs."""
LEAST_GROWTH_AT_STOP_BYTES: Final = 16 << 10
MOST_PER_TICK: Final = 8
_SLICE_REST_MS: Final = 1
"""Between two slices, which take a quarter of that: an answer takes several turns of the event loop, and must not wait
for a slice in each.
"""
_DURABLE_CHECK_MS: Final = 10


@dataclass(slots=True)
class _Taking(Generic[M]):
    """The snapshot that is being taken. It is worth nothing if the shard's machine is replaced meanwhile."""

    shard_id: int
    machine: M | None
    slices: Iterator[list[Chunk]]
    snapshot: Snapshot
    is_whole: bool = False
    save: Save | None = None


class ShardSnapshots(Generic[M]):
    """See the module's text."""

    def __init__(self, shards: Mapping[int, ShardContext[M]], serde: RecordSerde) -> None:
        self.step_due_ms: int | None = None
        """When `step` is to be called next."""
        self._shards = shards
        self._serde = serde
        self._postponed_bytes: dict[int, int] = {}
        self._size_bytes: dict[int, int] = {}
        self._taking: _Taking[M] | None = None
        self._left = 0

    def loaded(self, shard_id: int, opened: OpenedLog) -> None:
        """The shard is active."""
        if opened.snapshot is None:
            self._shards[shard_id].grown_bytes = opened.size_bytes
        else:
            self._size_bytes[shard_id] = opened.snapshot.size_bytes
            self._shards[shard_id].grown_bytes = opened.unread_bytes

    @property
    def is_taking(self) -> bool:
        return self._taking is not None

    def take_due(self, now_ms: int) -> None:
        """Takes some of the snapshots that are due, one after another."""
        self._left = MOST_PER_TICK
        if self._taking is None:
            self._take_next(now_ms)

    def _take_next(self, now_ms: int) -> None:
        while self._left > 0 and self._taking is None:
            self._left -= 1
            shard_id = self.due()
            if shard_id is None:
                self._left = 0
            else:
                self.take(shard_id, now_ms)

    def due(self) -> int | None:
        """The shard that needs a snapshot most, if one does. A larger one has to pay off."""
        shard = max(self._shards.values(), key=lambda shard: shard.grown_bytes, default=None)
        if shard is None:
            return None
        least = max(LEAST_GROWTH_BYTES, self._size_bytes.get(shard.shard_id, 0))
        return shard.shard_id if shard.grown_bytes >= least else None

    def take(self, shard_id: int, now_ms: int) -> bool:
        """Begins a snapshot of an active shard; False if none can be made now, or another one is being taken."""
        if self._taking is not None:
            return False
        # Whatever happens, it is another shard's turn until this one has grown again.
        self._postponed_bytes[shard_id] = self._unsaved_bytes(shard_id)
        shard = self._shards[shard_id]
        shard.grown_bytes = 0
        slices = self.slices(shard_id)
        if slices is None:
            return False
        self._taking = _Taking(shard_id, shard.machine, slices, Snapshot(shard.next_offset, 0, now_ms, []))
        self.step_due_ms = now_ms
        return True

    def slices(self, shard_id: int) -> Iterator[list[Chunk]] | None:
        """The chunks of a snapshot of an active shard, to be made in slices; None if there can be none now."""
        machine: object = self._shards[shard_id].machine
        parts = machine.snapshot() if isinstance(machine, HasSnapshot) else None
        return make_chunks(parts, self._serde) if parts is not None else None

    def step(self, now_ms: int) -> Save | None:
        """Takes one slice; returns the snapshot once it is whole and durable."""
        taking = self._taking
        if taking is None:
            self.step_due_ms = None
            return None
        shard = self._shards[taking.shard_id]
        if shard.machine is not taking.machine:
            self._end(now_ms)
            return None
        chunks = None if taking.is_whole else next(taking.slices, None)
        if chunks is not None:
            taking.snapshot.chunks += chunks
            self.step_due_ms = now_ms + _SLICE_REST_MS
            return None
        if not taking.is_whole:
            taking.is_whole = True
            taking.snapshot.end_offset = shard.next_offset
        if shard.durable_offset < taking.snapshot.end_offset:
            self.step_due_ms = now_ms + _DURABLE_CHECK_MS
            return None
        self.step_due_ms = None
        taking.save = Save(taking.shard_id, taking.snapshot)
        return taking.save

    def saved(self, save: Save, now_ms: int, *, succeeded: bool) -> bool:
        """A snapshot was written, or could not be. Returns False if it must be removed: the shard was loaded again, or
        its topic deleted, while it was written.
        """
        taking = self._taking
        if taking is None or taking.save is not save:
            return False
        is_same = self._shards[save.shard_id].machine is taking.machine
        if succeeded and is_same:
            self._size_bytes[save.shard_id] = save.snapshot.size_bytes
            self._postponed_bytes.pop(save.shard_id, None)
        self._end(now_ms)
        return is_same

    def _end(self, now_ms: int) -> None:
        self._taking = None
        self.step_due_ms = None
        self._take_next(now_ms)

    def _unsaved_bytes(self, shard_id: int) -> int:
        return self._shards[shard_id].grown_bytes + self._postponed_bytes.get(shard_id, 0)

    def last(self, now_ms: int) -> Iterator[Save]:
        """At an orderly stop: a snapshot of each shard whose log has grown, the most first, each taken in one go."""
        saving = self._taking.shard_id if self._taking is not None and self._taking.save is not None else None
        for shard_id in sorted(self._shards, key=self._unsaved_bytes, reverse=True):
            if self._unsaved_bytes(shard_id) < LEAST_GROWTH_AT_STOP_BYTES:
                return
            shard = self._shards[shard_id]
            slices = self.slices(shard_id) if shard_id != saving else None
            if slices is not None and not shard.is_behind:
                chunks = [chunk for chunks_of_slice in slices for chunk in chunks_of_slice]
                yield Save(shard_id, Snapshot(shard.next_offset, shard.next_offset, now_ms, chunks))
