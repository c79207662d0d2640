# SPDX-License-Identifier: Apache-2.0
"""Loads the shards of one set: in order, a slice at a time, and again after a failure.

Theory of operation
-------------------
A shard to load waits in a queue until fewer than `loads_at_a_time` loads run. No append and no earlier load of the
shard may be in flight. Then `poll` returns these requests, one at a time for each load:

1. `open`: the log is claimed and opened. The outcome is `opened`, `held` (the earlier owner still has it; the next
   attempt follows soon), `failed` or `fenced`.
2. The chunks of the snapshot, if there is one, are restored in memory, one slice per `poll`.
3. `read`, repeated until a `read` outcome has the end of the log. Every outcome replays one slice.
4. The shard becomes ACTIVE. It runs `on_loaded` and then `catch_up`, before any request.

Slices keep a long log from delaying requests of other shards.

If a load fails, the next attempt follows after a delay that doubles with every failure in a row. These delays are
timers of the set. If a machine cannot restore its snapshot, the whole log is read at once, without a delay. A shard
that failed because the disk is full can still be read, so it is loaded at once, but at most every 250 ms.

A shard may be closed during its load. `_drop_load` forgets the load then. If the log still owes an outcome, the load is
kept in `_overtaken`. The shard counts as busy until the outcome arrives, and is neither opened nor released before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kcoord.runtime.loader import Loader, LoadError
from kcoord.runtime.result import MAX_BATCH_BYTES, CoordinatorResult, OperationContext, StateMachine, TimerKey
from kcoord.runtime.serde import RecordSerde
from kcoord.runtime.shard_context import ShardContext
from kcoord.runtime.shard_log import Append, Load, OpenedLog, Release
from kcoord.runtime.shard_snapshots import ShardSnapshots
from kcoord.runtime.snapshot import Chunk
from kcoord.runtime.standby import Standby
from kcoord.runtime.upstream_reader import UpstreamReader
from kcoord.runtime.waiting import Outbox, Ready, ShardState, ShardTimer, ShardTimers, Statistics, TimerQueue
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.record_batch import BatchHeader

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound=StateMachine)
R = TypeVar("R")

FIRST_RELOAD_MS: Final = 1_000
LONGEST_RELOAD_MS: Final = 60_000
LOAD_SLICE_BYTES: Final = 256 * 1024
"""The size of the slice of a snapshot or log that is replayed at once."""
SET_TIMERS: Final = -1
"""Stands for the shard number in the timers of the set itself."""
_FULL_DISK_RELOAD_MS: Final = 250
_HELD_CHECK_MS: Final = 50


@dataclass(slots=True)
class _Loading(Generic[M]):
    """A load in progress. `is_asked` is True while the log has a request of the load without an outcome."""

    load: Load
    is_asked: bool = False
    opened: OpenedLog | None = None
    loader: Loader[M] | None = None
    chunks: Iterator[Chunk] | None = None
    broken: AssertionError | None = None
    """The broken invariant for which the next `poll` ends the load."""


class ShardLoads(Generic[M]):
    """The shards of one set and their loads. ShardSet adds ownership, operations and appends.

    `make_machine` makes the empty state machine into which a shard's log is replayed. An append waits for up to
    `linger_ms` for more results.
    """

    def __init__(
        self,
        make_machine: Callable[[int], M],
        serde: RecordSerde,
        *,
        name: str = "shards",
        configured_shards: int = 1,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        compression: Compression = Compression.NONE,
        linger_ms: int = 0,
        first_reload_ms: int = FIRST_RELOAD_MS,
        longest_reload_ms: int = LONGEST_RELOAD_MS,
        loads_at_a_time: int = 1,
    ) -> None:
        self.name = name
        self.statistics = Statistics()
        self.catch_up: Callable[[M, OperationContext, None], CoordinatorResult[None]] | None = None
        """An operation that every machine runs when its log is replayed, before any request."""
        self.append_observers: list[Callable[[Append], None]] = []
        """Called with every append that has become durable, before the replies that wait for it leave."""
        self.first_reload_ms = first_reload_ms
        self.longest_reload_ms = longest_reload_ms
        self._make_machine = make_machine
        self._serde = serde
        self._max_batch_bytes = max_batch_bytes
        self._compression = compression
        self._linger_ms = linger_ms
        self._loads_at_a_time = loads_at_a_time
        self._shards: dict[int, ShardContext[M]] = {}
        self._timer_queue = TimerQueue()
        self._timers = ShardTimers(SET_TIMERS, self._timer_queue)
        self._outbox = Outbox()
        self._skipped: set[str] = set()
        self.standbys: dict[int, Standby[M]] = {}
        """The machines of shards that this process does not own, if the log can follow them (`stand_by`)."""
        self.snapshots = ShardSnapshots(self._shards, self.standbys, serde)
        self.shard_ids: Collection[int] = range(0)
        """The owned shards, in ascending order. Empty until the internal topic exists."""
        self.count = configured_shards
        """The number of shards in the cluster."""
        self.topic_id: bytes | None = None
        """The id of the internal topic."""
        self._releasing: dict[Release, bool] = {}
        """The releases in progress, in order. The value is True if `poll` has returned the release."""
        self._has_released = False
        self._is_closing = False
        self._queued: dict[int, bool] = {}
        """The shards that wait to be opened. The value is True if a snapshot may be used."""
        self._loads: dict[int, _Loading[M]] = {}
        self._overtaken: set[Load] = set()
        """Dropped loads whose outcome has not arrived yet."""
        self._distrusted: set[int] = set()
        """The shards whose snapshot hid damage in the log. Their snapshots are not used until a new one is saved."""
        self._reload_ms: dict[int, int] = {}
        self._last_failed_ms: dict[int, int] = {}
        self._closes: list[int] = []
        self._active: list[Load] = []
        self._may_have_log_work = False
        """Code that adds a load, close or release sets it. Every turn of the event loop reads it."""

    def state(self, shard_id: int) -> ShardState:
        """Returns the state of a shard. It is INITIAL if the shard was never owned."""
        shard = self._shards.get(shard_id)
        return shard.state if shard is not None else ShardState.INITIAL

    def machine(self, shard_id: int) -> M | None:
        """Returns the state machine of an ACTIVE shard, for reading only. None if the shard is not ACTIVE."""
        shard = self._shards.get(shard_id)
        return shard.machine if shard is not None else None

    def active(self, shard_id: int) -> ShardContext[M] | None:
        """Returns a shard if it is ACTIVE, for callers that do not need `run`."""
        shard = self._shards.get(shard_id)
        return shard if shard is not None and shard.machine is not None else None

    def is_writing(self, shard_id: int) -> bool:
        """True if an append of the shard is in flight, even if the shard is closed."""
        shard = self._shards.get(shard_id)
        return shard is not None and shard.is_writing

    @property
    def is_loading(self) -> bool:
        """True if a shard is being loaded or waits in the queue. Shards that wait for a delay do not count."""
        return bool(self._queued or self._loads)

    def has_failed(self, shard_id: int) -> bool:
        """True if the last attempt to load the shard failed. Nobody knows when the next one will succeed."""
        return shard_id in self._reload_ms

    def claim(self, shard_ids: Iterable[int]) -> None:
        """Puts owned shards into the queue of loads, also those whose logs other processes had claimed."""
        for shard_id in shard_ids:
            shard = self._context(shard_id)
            if shard.machine is None and shard_id not in self._loads:
                if shard.state in (ShardState.INITIAL, ShardState.CLOSED) and not shard.is_writing:
                    shard.begin_load()
                self._timers.cancel(_reload_key(shard_id))
                self._queued.setdefault(shard_id, shard_id not in self._distrusted)
                self._may_have_log_work = True

    # Loading.

    def load(
        self,
        shard_id: int,
        batches: Iterable[tuple[BatchHeader, bytes]],
        now_ms: int,
        end_offset: int = 0,
        chunks: Iterable[Chunk] = (),
    ) -> None:
        """Loads a shard in one step, from the given chunks and batches. Raises LoadError if that fails."""
        shard = self._context(shard_id)
        shard.begin_load()
        self._drop_load(shard_id)
        loader = self._new_loader(shard_id, end_offset, self._skipped)
        try:
            for chunk in chunks:
                loader.restore(chunk)
            loader.replay(batches)
        except BaseException:
            shard.move_to(ShardState.FAILED)
            raise
        self._activate(shard, loader, now_ms)

    def _context(self, shard_id: int) -> ShardContext[M]:
        shard = self._shards.get(shard_id)
        if shard is None:
            shard = self._shards[shard_id] = ShardContext(
                shard_id,
                self._serde,
                self._timer_queue,
                self._outbox,
                self.statistics,
                self._max_batch_bytes,
                self._compression,
                self._linger_ms,
            )
        return shard

    def _new_loader(self, shard_id: int, end_offset: int, skipped: set[str] | None) -> Loader[M]:
        return Loader(shard_id, self._make_machine(shard_id), self._serde, end_offset, self.statistics, skipped)

    def stand_by(self, shard_id: int, reader: UpstreamReader) -> Standby[M]:
        """Makes a standby of a shard, with an empty machine. It replaces an earlier one."""
        loader = self._new_loader(shard_id, 0, None)
        loader.read_offset = reader.position
        standby = self.standbys[shard_id] = Standby(shard_id, loader, reader)
        return standby

    def _activate(self, shard: ShardContext[M], loader: Loader[M], now_ms: int) -> None:
        if not shard.activate(loader.machine, loader.next_offset, now_ms):
            raise LoadError(f"shard {shard.shard_id}: the log was replayed, but its timers and tasks cannot be started")

    def opened(self, load: Load, opened: OpenedLog) -> None:
        """Begins to replay a log that was claimed and opened, or continues with the machine of the shard's standby."""
        standby = self.standbys.pop(load.shard_id) if opened.has_standby else None
        loading = self._answered(load)
        if loading is None:
            return
        try:
            self._shards[load.shard_id].begin_load()
            loading.opened = opened
            if standby is not None:
                loading.loader = standby.loader
                loading.loader.next_offset = opened.end_offset
            else:
                loading.loader = self._new_loader(load.shard_id, opened.end_offset, self._skipped)
            load.offset = opened.start_offset
            snapshot = opened.snapshot
            if snapshot is not None:
                assert snapshot.end_offset <= opened.end_offset, (
                    f"R-11: the snapshot of shard {load.shard_id} has records up to offset {snapshot.end_offset}, "
                    f"but the log ends at {opened.end_offset}"
                )
                load.offset = snapshot.offset
                loading.chunks = iter(snapshot.chunks)
            loading.loader.read_offset = load.offset
        except AssertionError as error:
            loading.broken = error

    def read(self, load: Load, batches: Iterable[tuple[BatchHeader, bytes]], now_ms: int, *, is_end: bool) -> None:
        """Replays the next batches of the log. If they are the last ones (`is_end`), the shard becomes ACTIVE."""
        loading = self._answered(load)
        if loading is None:
            return
        loader, opened = loading.loader, loading.opened
        assert loader is not None and opened is not None, "the log was read before it was opened"
        shard = self._shards[load.shard_id]
        try:
            loader.replay(batches)
            load.offset = loader.read_offset
            assert loader.read_offset <= opened.end_offset, (
                f"R-9: the log of shard {load.shard_id} ended at offset {opened.end_offset} when it was claimed, "
                f"but has batches up to {loader.read_offset}"
            )
            if not is_end:
                return
            self._activate(shard, loader, now_ms)
        except Exception as error:
            self._not_loaded(loading, error, now_ms)
            return
        del self._loads[load.shard_id]
        self._reload_ms.pop(load.shard_id, None)
        self.snapshots.loaded(load.shard_id, opened)
        self._active.append(load)
        self._may_have_log_work = True
        if self.catch_up is not None:
            self._run_unanswered(shard, self.catch_up, None, now_ms)

    def held(self, load: Load, now_ms: int) -> None:
        """Schedules another attempt, because the earlier owner still has the log.

        The owner does not know of the change yet, or is closing the log.
        """
        if self._answered(load) is not None:
            del self._loads[load.shard_id]
            self._timers.schedule(_reload_key(load.shard_id), now_ms + _HELD_CHECK_MS)

    def failed(self, load: Load, error: Exception, now_ms: int) -> None:
        """Schedules another attempt, because the log cannot be opened or read."""
        loading = self._answered(load)
        if loading is not None:
            self._not_loaded(loading, error, now_ms)

    def _answered(self, load: Load) -> _Loading[M] | None:
        """Returns the load to which an outcome belongs, or None if the load was dropped."""
        loading = self._loads.get(load.shard_id)
        if loading is None or loading.load is not load:
            self._overtaken.discard(load)
            return None
        loading.is_asked = False
        return loading

    def _not_loaded(self, loading: _Loading[M], error: Exception, now_ms: int) -> None:
        """Ends a failed load and schedules the next attempt.

        The shard becomes FAILED if its log was open. Otherwise it stays LOADING, and requests get
        COORDINATOR_LOAD_IN_PROGRESS.
        """
        load = loading.load
        self._loads.pop(load.shard_id, None)
        self._may_have_log_work = True
        opened = loading.opened
        if isinstance(error, LoadError | AssertionError) and opened is not None and opened.snapshot is not None:
            _logger.warning("Cannot use a snapshot of %s, reading the whole log instead: %s", self.name, error)
            self._queued[load.shard_id] = False
            return
        shard = self._shards[load.shard_id]
        if loading.loader is not None and shard.state is ShardState.LOADING:
            shard.move_to(ShardState.FAILED)
        _logger.error("Loading shard %d of %s failed: %s", load.shard_id, self.name, error)
        self._closes.append(load.shard_id)
        self._reload_later(load.shard_id, now_ms)

    def _on_failed(self, shard_id: int, now_ms: int) -> None:
        """Closes the log of a failed shard, which has no append in flight any more, and schedules a load.

        If the disk is full, the shard can be read, so there is almost no delay. A shard that was claimed meanwhile is
        in the queue already.
        """
        if self._shards[shard_id].state is not ShardState.FAILED:
            return
        self._closes.append(shard_id)
        self._may_have_log_work = True
        if self._is_closing or shard_id in self._queued:
            return
        since_ms = now_ms - self._last_failed_ms.get(shard_id, now_ms - self.longest_reload_ms)
        self._last_failed_ms[shard_id] = now_ms
        if self._shards[shard_id].is_read_only(now_ms):
            self._timers.schedule(_reload_key(shard_id), now_ms + max(_FULL_DISK_RELOAD_MS - since_ms, 0))
        else:
            self._reload_later(shard_id, now_ms)

    def _reload_later(self, shard_id: int, now_ms: int) -> None:
        delay_ms = self._reload_ms.get(shard_id, self.first_reload_ms)
        self._reload_ms[shard_id] = min(delay_ms * 2, self.longest_reload_ms)
        _logger.warning("Loading shard %d of %s again in %.0f s", shard_id, self.name, delay_ms / 1000)
        self._timers.schedule(_reload_key(shard_id), now_ms + delay_ms)

    def _drop_load(self, shard_id: int) -> None:
        self._queued.pop(shard_id, None)
        self._timers.cancel(_reload_key(shard_id))
        loading = self._loads.pop(shard_id, None)
        if loading is not None and loading.is_asked:
            loading.load.is_dropped = True
            self._overtaken.add(loading.load)

    def _is_busy(self, shard_id: int) -> bool:
        return self.is_writing(shard_id) or any(load.shard_id == shard_id for load in self._overtaken)

    def _go_on(self, loading: _Loading[M], now_ms: int) -> Load | None:
        """Restores a slice of the snapshot. After the last slice, returns the load for the next read of the log."""
        if loading.broken is not None:
            self._not_loaded(loading, loading.broken, now_ms)
            return None
        loader = loading.loader
        if loading.is_asked or loader is None:
            return None
        size_bytes = 0
        try:
            for chunk in loading.chunks or ():
                loader.restore(chunk)
                size_bytes += len(chunk.data)
                if size_bytes >= LOAD_SLICE_BYTES:
                    return None
        except Exception as error:
            self._not_loaded(loading, error, now_ms)
            return None
        loading.is_asked = True
        return loading.load

    def damaged(self, shard_id: int, reason: str) -> None:
        """Fails a shard with damage in the part of its log that was not read, because the shard has a snapshot.

        From now on the shard is loaded from its log alone, so it fails as it would without a snapshot.
        """
        _logger.error("The log of shard %d of %s is damaged: %s", shard_id, self.name, reason)
        self._distrusted.add(shard_id)
        self.fail_shard(shard_id, reason)

    def fail_shard(self, shard_id: int, reason: str) -> None:
        """Fails a shard, if it is ACTIVE, as a failed append does."""
        shard = self.active(shard_id)
        if shard is not None:
            shard.fail(reason, None)

    def _collect_loads(self, ready: Ready, now_ms: int) -> None:
        """Adds the requests for the log to `ready`, at most one for each load."""
        ready.closes, self._closes = self._closes, []
        ready.active, self._active = self._active, []
        loads = [self._go_on(loading, now_ms) for loading in list(self._loads.values())]
        ready.reads = [load for load in loads if load is not None]
        opens: list[Load] = []
        for shard_id, with_snapshot in list(self._queued.items()):
            if len(self._loads) >= self._loads_at_a_time:
                break
            if not self._is_busy(shard_id):
                del self._queued[shard_id]
                load = Load(shard_id, with_snapshot)
                self._loads[shard_id] = _Loading(load, is_asked=True)
                opens.append(load)
        ready.opens = opens

    def _can_load(self) -> bool:
        """True if a request for the log can be made now."""
        if self._closes or self._active or not all(loading.is_asked for loading in self._loads.values()):
            return True
        return len(self._loads) < self._loads_at_a_time and not all(map(self._is_busy, self._queued))

    def _run_unanswered(
        self,
        shard: ShardContext[M],
        operation: Callable[[M, OperationContext, R], CoordinatorResult[None]],
        request: R,
        now_ms: int,
    ) -> None:
        try:
            shard.run(operation, request, OperationContext(now_ms))
        except KafkaError as error:
            _logger.error("An update of shard %d of %s failed: %s", shard.shard_id, self.name, error)


def _reload_key(shard_id: int) -> TimerKey:
    return TimerKey(ShardTimer.RELOAD, str(shard_id))
