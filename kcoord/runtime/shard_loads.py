# SPDX-License-Identifier: Apache-2.0
"""The shards of one set and how each is loaded: in turn, a slice at a time, and again after a failure.

Theory of operation
-------------------
A shard that is to be loaded waits in a queue, in order, until the log has room for it (`loads_at_a_time`) and nothing
else of the shard is under way. Then the log is asked to open it, the chunks of its snapshot are restored a slice per
poll, and the log is asked for batches until it says that the end is reached. So a long log does not hold up others.

A load that fails is tried again after a while, which doubles with each failure in a row; these times are deadlines of
the set's timers, as those of the state machines are. A snapshot that a machine cannot restore costs one attempt: the
next one reads the whole log. A shard whose disk is full can be read, so it is loaded at once, but not again and again.
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
"""How much of a snapshot or log is replayed before others have their turn."""
SET_TIMERS: Final = -1
"""In the place of a shard's number: the timers of the set itself."""
_FULL_DISK_RELOAD_MS: Final = 250
_HELD_CHECK_MS: Final = 50


@dataclass(slots=True)
class _Loading(Generic[M]):
    """A load under way. `is_asked`: the log was asked for something and has not answered yet."""

    load: Load
    is_asked: bool = False
    opened: OpenedLog | None = None
    loader: Loader[M] | None = None
    chunks: Iterator[Chunk] | None = None


class ShardLoads(Generic[M]):
    """See the module's text. `make_machine` makes the empty state machine into which a shard's log is replayed. A write
    waits for `linger_ms` for others to join it.
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
        """An operation that each machine runs as soon as its log is replayed, before any request."""
        self.append_observers: list[Callable[[Append], None]] = []
        """Called with each append that has become durable, before the answers that wait for it leave."""
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
        self.snapshots = ShardSnapshots(self._shards, serde)
        self.shard_ids: Collection[int] = range(0)
        """The shards that are owned, in ascending order; none before the internal topic exists."""
        self.count = configured_shards
        """How many shards there are in the cluster."""
        self.topic_id: bytes | None = None
        """The internal topic whose shards are owned."""
        self._releasing: dict[Release, bool] = {}
        """Shards that are being given away, in order, and whether the log was asked for it."""
        self._has_released = False
        self._is_closing = False
        self._queued: dict[int, bool] = {}
        """Shards that wait to be opened, and whether a snapshot may be used."""
        self._loads: dict[int, _Loading[M]] = {}
        self._overtaken: set[Load] = set()
        """Loads that nobody waits for any more, whose outcome the log still owes."""
        self._distrusted: set[int] = set()
        """Shards whose snapshot hid damage in the log."""
        self._reload_ms: dict[int, int] = {}
        self._last_failed_ms: dict[int, int] = {}
        self._closes: list[int] = []
        self._active: list[Load] = []
        self._may_have_log_work = False
        """False if there are no loads, closes or releases. Whoever adds some sets it; `has_ready` asks in each turn."""

    def state(self, shard_id: int) -> ShardState:
        shard = self._shards.get(shard_id)
        return shard.state if shard is not None else ShardState.INITIAL

    def machine(self, shard_id: int) -> M | None:
        """The state machine of an active shard, to look at."""
        shard = self._shards.get(shard_id)
        return shard.machine if shard is not None else None

    def active(self, shard_id: int) -> ShardContext[M] | None:
        """A shard that can run operations; its `machine` is there. For what need not go through `run`."""
        shard = self._shards.get(shard_id)
        return shard if shard is not None and shard.machine is not None else None

    def is_writing(self, shard_id: int) -> bool:
        """Whether an append of the shard is under way, also of one that has been closed."""
        shard = self._shards.get(shard_id)
        return shard is not None and shard.is_writing

    @property
    def is_loading(self) -> bool:
        """Whether a shard is being loaded, or waits for its first attempt or its next one that is due."""
        return bool(self._queued or self._loads)

    def claim(self, shard_ids: Iterable[int]) -> None:
        """Loads shards that are owned, also those that others had claimed."""
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
        """Loads a shard in one go, from what is at hand. Raises LoadError if it cannot be."""
        shard = self._context(shard_id)
        shard.begin_load()
        self._drop_load(shard_id)
        loader = self._new_loader(shard_id, end_offset)
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

    def _new_loader(self, shard_id: int, end_offset: int) -> Loader[M]:
        machine = self._make_machine(shard_id)
        return Loader(shard_id, machine, self._serde, end_offset, self.statistics, self._skipped)

    def _activate(self, shard: ShardContext[M], loader: Loader[M], now_ms: int) -> None:
        if not shard.activate(loader.machine, loader.next_offset, now_ms):
            raise LoadError(f"shard {shard.shard_id}: the state that its log holds cannot be started")

    def opened(self, load: Load, opened: OpenedLog) -> None:
        """The log of the shard is claimed and open."""
        loading = self._answered(load)
        if loading is None:
            return
        self._shards[load.shard_id].begin_load()
        loading.opened = opened
        loading.loader = self._new_loader(load.shard_id, opened.end_offset)
        load.offset = opened.start_offset
        if opened.snapshot is not None:
            load.offset = opened.snapshot.offset
            loading.chunks = iter(opened.snapshot.chunks)
        loading.loader.read_offset = load.offset

    def read(self, load: Load, batches: Iterable[tuple[BatchHeader, bytes]], now_ms: int, *, is_end: bool) -> None:
        """The next batches of the log, perhaps the last ones."""
        loading = self._answered(load)
        if loading is None:
            return
        loader, opened = loading.loader, loading.opened
        assert loader is not None and opened is not None, "the log was read before it was opened"
        shard = self._shards[load.shard_id]
        try:
            loader.replay(batches)
            load.offset = loader.read_offset
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
        """Another owner still has the log: it has not heard of the change yet, or is closing it."""
        if self._answered(load) is not None:
            del self._loads[load.shard_id]
            self._timers.schedule(_reload_key(load.shard_id), now_ms + _HELD_CHECK_MS)

    def failed(self, load: Load, error: Exception, now_ms: int) -> None:
        """The log cannot be opened or read."""
        loading = self._answered(load)
        if loading is not None:
            self._not_loaded(loading, error, now_ms)

    def _answered(self, load: Load) -> _Loading[M] | None:
        """The load that an outcome is of; None if it was overtaken."""
        loading = self._loads.get(load.shard_id)
        if loading is None or loading.load is not load:
            self._overtaken.discard(load)
            return None
        loading.is_asked = False
        return loading

    def _not_loaded(self, loading: _Loading[M], error: Exception, now_ms: int) -> None:
        """The shard is FAILED if its log was open; before, clients still hear that it is being loaded."""
        load = loading.load
        self._loads.pop(load.shard_id, None)
        self._may_have_log_work = True
        if isinstance(error, LoadError) and loading.opened is not None and loading.opened.snapshot is not None:
            _logger.warning("A snapshot of %s is not used, the whole log is read: %s", self.name, error)
            self._queued[load.shard_id] = False
            return
        shard = self._shards[load.shard_id]
        if loading.loader is not None and shard.state is ShardState.LOADING:
            shard.move_to(ShardState.FAILED)
        _logger.error("Loading shard %d of %s failed: %s", load.shard_id, self.name, error)
        self._closes.append(load.shard_id)
        self._reload_later(load.shard_id, now_ms)

    def _on_failed(self, shard_id: int, now_ms: int) -> None:
        """Nothing of a failed shard is under way any more. A full disk can be read: there the shard is loaded at once,
        but not again and again. A shard that was claimed meanwhile has its turn already.
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
        _logger.warning("Shard %d of %s is loaded again in %.0f s", shard_id, self.name, delay_ms / 1000)
        self._timers.schedule(_reload_key(shard_id), now_ms + delay_ms)

    def _drop_load(self, shard_id: int) -> None:
        self._queued.pop(shard_id, None)
        self._timers.cancel(_reload_key(shard_id))
        loading = self._loads.pop(shard_id, None)
        if loading is not None and loading.is_asked:
            self._overtaken.add(loading.load)

    def _is_busy(self, shard_id: int) -> bool:
        return self.is_writing(shard_id) or any(load.shard_id == shard_id for load in self._overtaken)

    def _go_on(self, loading: _Loading[M], now_ms: int) -> Load | None:
        """Restores a slice of the snapshot. Once it is through, the log is read."""
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
        """The part of the log that was not read because of a snapshot is damaged: the shard ends as it would without
        the snapshot, and is loaded from its log alone from now on.
        """
        _logger.error("The log of shard %d of %s is damaged: %s", shard_id, self.name, reason)
        self._distrusted.add(shard_id)
        self.fail_shard(shard_id, reason)

    def fail_shard(self, shard_id: int, reason: str) -> None:
        """The shard ends as after a failed append."""
        shard = self.active(shard_id)
        if shard is not None:
            shard.fail(reason, None)

    def _collect_loads(self, ready: Ready, now_ms: int) -> None:
        """What the log is to be asked for: at most one thing per load."""
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
        """Whether there is something to be asked that waits for nothing."""
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
            _logger.error("Shard %d of %s did not take an update: %s", shard.shard_id, self.name, error)


def _reload_key(shard_id: int) -> TimerKey:
    return TimerKey(ShardTimer.RELOAD, str(shard_id))
