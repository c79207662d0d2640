# SPDX-License-Identifier: Apache-2.0
"""Decides when the shards of one set need a snapshot, and takes it while the shard runs operations.

Theory of operation
-------------------
One snapshot is taken at a time, of the shard whose log has grown most since its last snapshot. It is made in slices,
one per deadline of the shard set's snapshot timer. The state may change between two slices, so a snapshot has two
offsets. The first is the end of the log before the first slice; loading replays the log from there. The second is the
end after the last slice. The snapshot is saved when everything before the second offset is durable. So a snapshot never
has a record that the log could lose.

If the shard is loaded again meanwhile, its machine is another object and the snapshot is dropped. A crash leaves the
previous snapshot. Correctness never depends on a snapshot: if it is missing or unusable, the whole log is read.

Standbys (`kcoord.runtime.standby`) get snapshots, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from kcoord.runtime.result import StateMachine
from kcoord.runtime.serde import RecordSerde
from kcoord.runtime.shard_context import ShardContext
from kcoord.runtime.shard_log import NO_NOTE, OpenedLog, Save
from kcoord.runtime.snapshot import Chunk, HasSnapshot, Snapshot, make_chunks
from kcoord.runtime.standby import Standby

M = TypeVar("M", bound=StateMachine)

_Source: TypeAlias = ShardContext[M] | Standby[M]

LEAST_GROWTH_BYTES: Final = 1 << 20
"""While the process runs, a shard whose log grew by less gets no snapshot."""
LEAST_GROWTH_AT_STOP_BYTES: Final = 16 << 10
MOST_PER_TICK: Final = 8
_SLICE_REST_MS: Final = 1
"""The pause between two slices. A slice takes a quarter of it. A response needs several turns of the event loop, and
the pause keeps it from waiting for a slice in each of them.
"""
_DURABLE_CHECK_MS: Final = 10


@dataclass(slots=True)
class _Taking(Generic[M]):
    """The snapshot that is being taken. It is dropped if the shard's machine is replaced meanwhile."""

    shard_id: int
    machine: M | None
    slices: Iterator[list[Chunk]]
    snapshot: Snapshot
    note: object
    is_whole: bool = False
    save: Save | None = None


class ShardSnapshots(Generic[M]):
    """Takes the snapshots of one shard set. The module docstring describes how."""

    def __init__(
        self, shards: Mapping[int, ShardContext[M]], standbys: Mapping[int, Standby[M]], serde: RecordSerde
    ) -> None:
        self.step_due_ms: int | None = None
        """The time of the next `step`; None if no snapshot is being taken or it is being saved."""
        self.note_log: Callable[[int], object] = lambda shard_id: NO_NOTE
        """Called when a snapshot of a shard begins. Returns what the log has to know then (`Save.note`).

        None means that the log permits no snapshot now.
        """
        self._shards = shards
        self._standbys = standbys
        self._serde = serde
        self._postponed_bytes: dict[int, int] = {}
        self._size_bytes: dict[int, int] = {}
        self._taking: _Taking[M] | None = None
        self._left = 0

    def loaded(self, shard_id: int, opened: OpenedLog) -> None:
        """Notes how much of a loaded shard's log is not in its snapshot."""
        if opened.snapshot is None:
            self._shards[shard_id].grown_bytes = opened.size_bytes
        else:
            self._size_bytes[shard_id] = opened.snapshot.size_bytes
            self._shards[shard_id].grown_bytes = opened.unread_bytes

    def _source(self, shard_id: int) -> _Source[M] | None:
        """Returns the standby of a shard or, if it has none, the shard itself."""
        return self._standbys.get(shard_id) or self._shards.get(shard_id)

    def _sources(self) -> Iterator[_Source[M]]:
        yield from self._standbys.values()
        for shard_id, shard in self._shards.items():
            if shard_id not in self._standbys:
                yield shard

    @property
    def is_taking(self) -> bool:
        """True if a snapshot is being taken or saved."""
        return self._taking is not None

    def take_due(self, now_ms: int) -> None:
        """Begins to take the snapshots that are due, at most `MOST_PER_TICK`, one after another."""
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
        """Returns the shard whose log has grown most, or None if no log has grown enough.

        A log has to grow by at least the size of the last snapshot, so that large snapshots are written less often.
        """
        source = max(self._sources(), key=lambda source: source.grown_bytes, default=None)
        if source is None:
            return None
        least = max(LEAST_GROWTH_BYTES, self._size_bytes.get(source.shard_id, 0))
        return source.shard_id if source.grown_bytes >= least else None

    def take(self, shard_id: int, now_ms: int) -> bool:
        """Begins a snapshot of an active shard. Returns False if it cannot be made now or another is being taken."""
        if self._taking is not None:
            return False
        source = self._source(shard_id)
        if source is None:
            return False
        # Even if this snapshot fails, other shards have precedence until this log has grown again.
        self._postponed_bytes[shard_id] = self._unsaved_bytes(source)
        source.grown_bytes = 0
        slices, note = self.slices(shard_id), self.note_log(shard_id)
        if slices is None or note is None:
            return False
        self._taking = _Taking(shard_id, source.machine, slices, Snapshot(source.next_offset, 0, now_ms, []), note)
        self.step_due_ms = now_ms
        return True

    def slices(self, shard_id: int) -> Iterator[list[Chunk]] | None:
        """Returns an iterator over the slices of a shard's snapshot, or None if it cannot be made now."""
        source = self._source(shard_id)
        machine: object = source.machine if source is not None else None
        parts = machine.snapshot() if isinstance(machine, HasSnapshot) else None
        return make_chunks(parts, self._serde) if parts is not None else None

    def step(self, now_ms: int) -> Save | None:
        """Takes one slice. Returns the snapshot when it is complete and its content is durable."""
        taking = self._taking
        if taking is None:
            self.step_due_ms = None
            return None
        source = self._source(taking.shard_id)
        if source is None or source.machine is not taking.machine:
            self._end(now_ms)
            return None
        chunks = None if taking.is_whole else next(taking.slices, None)
        if chunks is not None:
            taking.snapshot.chunks += chunks
            self.step_due_ms = now_ms + _SLICE_REST_MS
            return None
        if not taking.is_whole:
            taking.is_whole = True
            taking.snapshot.end_offset = source.next_offset
        if source.durable_offset < taking.snapshot.end_offset:
            self.step_due_ms = now_ms + _DURABLE_CHECK_MS
            return None
        snapshot = taking.snapshot
        assert snapshot.offset <= snapshot.end_offset <= source.durable_offset, (
            f"R-10: the snapshot of shard {taking.shard_id} has the state of the offsets {snapshot.offset} to "
            f"{snapshot.end_offset}, but {source.durable_offset} is the durable offset"
        )
        self.step_due_ms = None
        taking.save = Save(taking.shard_id, snapshot, taking.note)
        return taking.save

    def abandon(self, error: AssertionError) -> None:
        """Drops the snapshot that is being taken, and fails its shard, because an invariant is broken."""
        if self._taking is not None:
            source = self._source(self._taking.shard_id)
            self._taking = self.step_due_ms = None
            if source is not None:
                source.broken(error)

    def saved(self, save: Save, now_ms: int, *, succeeded: bool) -> bool:
        """Ends a snapshot that was written, or could not be written.

        Returns False if it must be removed, because the shard was loaded again or its topic was deleted meanwhile.
        """
        taking = self._taking
        if taking is None or taking.save is not save:
            return False
        source = self._source(save.shard_id)
        is_same = source is not None and source.machine is taking.machine
        if succeeded and is_same:
            self._size_bytes[save.shard_id] = save.snapshot.size_bytes
            self._postponed_bytes.pop(save.shard_id, None)
        self._end(now_ms)
        return is_same

    def _end(self, now_ms: int) -> None:
        self._taking = None
        self.step_due_ms = None
        self._take_next(now_ms)

    def _unsaved_bytes(self, source: _Source[M]) -> int:
        return source.grown_bytes + self._postponed_bytes.get(source.shard_id, 0)

    def last(self, now_ms: int) -> Iterator[Save]:
        """Yields the snapshots for an orderly stop, those of the logs that have grown most first.

        Every snapshot is taken in one step. Shards that have grown by less than `LEAST_GROWTH_AT_STOP_BYTES` get none.
        """
        saving = self._taking.shard_id if self._taking is not None and self._taking.save is not None else None
        for source in sorted(self._sources(), key=self._unsaved_bytes, reverse=True):
            if self._unsaved_bytes(source) < LEAST_GROWTH_AT_STOP_BYTES:
                return
            shard_id, offset = source.shard_id, source.next_offset
            slices = self.slices(shard_id) if shard_id != saving else None
            note = self.note_log(shard_id)
            if slices is not None and note is not None and not source.is_behind:
                chunks = [chunk for chunks_of_slice in slices for chunk in chunks_of_slice]
                yield Save(shard_id, Snapshot(offset, offset, now_ms, chunks), note)
