# SPDX-License-Identifier: Apache-2.0
"""The shards of one internal topic in one simulated process: logs, loading, writing, snapshots and cleaning.

The simulator is in the place of event loop and threads. A write takes two steps in virtual time, append and sync of the
journal, as in the server; the process may end between any two events, and then only what the disk kept is left.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, Generic, Protocol, TypeVar

from kcoord.metadata.image import MetadataImage
from kcoord.runtime.outbox import DeferredReply
from kcoord.runtime.result import CoordinatorResult, OperationContext, StateMachine, Task
from kcoord.runtime.serde import RecordSerde
from kcoord.runtime.shard_context import ShardState
from kcoord.runtime.shard_log import Append, Load, OpenedLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import Chunk, HasSnapshot, Snapshot, make_chunks
from kcoord.simulation.trace import Trace, ViolationError
from kcoord.storage.cleaner import Cleaner, CleaningRules, assess
from kcoord.storage.errors import StorageError
from kcoord.storage.journal import Appended, DurableAppends, Journal
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.storage.recovery import Recovery
from kcoord.storage.segment import LogConfig
from kcoord.storage.snapshot import SnapshotError, may_miss_deletions, read_snapshot, write_snapshot
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.record_batch import BatchHeader

DATA_FOLDER: Final = "data"
_RELOAD_MS: Final = 100
_LOAD_SLICE_BYTES: Final = 2_048
_MAP_BYTES: Final = 64 << 10
TOMBSTONES_KEPT_MS: Final = 5_000


class Machine(StateMachine, Protocol):
    """What both coordinators' state machines have."""

    def on_metadata_update(self, context: OperationContext, image: MetadataImage) -> CoordinatorResult[None]: ...


M = TypeVar("M", bound=Machine)
T = TypeVar("T")


class PowerLost(BaseException):
    """The machine stops in the middle of a file operation."""


class ProcessLife(Protocol):
    """The process that the shards belong to. What `after` starts does not happen once the process has ended."""

    trace: Trace
    random: Random
    disk: MemoryFileSystem
    journal: Journal
    appends: DurableAppends
    opening: int
    """More than 0 while logs are opened: a failed sync would leave nobody who knows what reached the disk."""

    @property
    def now_ms(self) -> int: ...

    @property
    def image(self) -> MetadataImage: ...

    def after(self, delay_ms: int, action: Callable[[], None]) -> None: ...

    def disk_delay_ms(self) -> int: ...

    def power_lost(self) -> None: ...


@dataclass(slots=True)
class Hooks(Generic[M]):
    """What differs between the coordinators, and where a test plants faults."""

    make_machine: Callable[[int], M]
    serde: RecordSerde
    start_task: Callable[[int, Task], None]
    on_active: Callable[[int, M], None]
    early_replies: bool = False


class _ShardLog:
    """The log of a shard that is open at the time. `folder` is the name of its folder."""

    def __init__(self, logs: dict[int, Log], shard_id: int, folder: str) -> None:
        self._logs = logs
        self._shard_id = shard_id
        self.folder = folder

    def sync_names(self) -> None:
        self._logs[self._shard_id].sync_names()

    def flush(self) -> None:
        self._logs[self._shard_id].flush()


class SimulatedShards(Generic[M]):
    """See the module's text."""

    def __init__(self, life: ProcessLife, topic: str, count: int, segment_bytes: int, hooks: Hooks[M]) -> None:
        self.topic = topic
        self.count = count
        self.runtime: ShardSet[M] = ShardSet(
            hooks.make_machine, hooks.serde, name=topic, first_reload_ms=_RELOAD_MS, longest_reload_ms=_RELOAD_MS
        )
        self.runtime.catch_up = self._catch_up
        self.logs: dict[int, Log] = {}
        self._readers: dict[int, Iterator[tuple[BatchHeader, bytes]]] = {}
        self._life = life
        self._hooks = hooks
        self._log_config = LogConfig(segment_bytes=segment_bytes)
        self._waiting: dict[int, tuple[int, Callable[[object], None], bool]] = {}
        self._tokens = 0
        self._reopening: dict[int, Recovery] = {}
        """What is known of logs that failed."""
        self._cleaned_offsets: dict[int, int] = {}
        self._pump_at_ms = -1
        self._writes_under_way = 0
        self._disk_free_ms: dict[int, int] = {}
        self._given_up: set[int] = set()
        self._lost: set[int] = set()

    def is_quiet(self) -> bool:
        """Whether the logs hold all that the shards do."""
        return self.runtime.is_idle() and not self._writes_under_way

    # Loading.

    def load_all(self) -> None:
        self.runtime.claim(range(self.count))
        self.pump()

    def load(self, shard_id: int) -> None:
        """The shard is owned again."""
        self._given_up.discard(shard_id)
        self._lost.discard(shard_id)
        self.runtime.claim([shard_id])
        self.pump()

    def _open_load(self, load: Load) -> None:
        shard_id = load.shard_id
        try:
            log = self.logs[shard_id] = self._open(shard_id)
        except OSError as error:
            self._life.trace.add("open-failed", f"{self.topic} {shard_id} {error}")
            self.runtime.failed(load, error, self._life.now_ms)
            return
        except StorageError as error:
            raise ViolationError("D-1 a crash only tears the tail", f"{self.topic}-{shard_id}: {error}") from error
        snapshot = self._read_snapshot(shard_id, log)
        start_offset = log.start_offset if snapshot is None else snapshot.offset
        self._life.trace.add("load", f"{self.topic} {shard_id} {start_offset}-{log.end_offset}")
        self._readers[shard_id] = log.batches(start_offset)
        self.runtime.opened(load, OpenedLog(log.start_offset, log.end_offset, log.size_bytes, snapshot))

    def _read(self, load: Load) -> None:
        batches = []
        size_bytes = 0
        for header, data in self._readers[load.shard_id]:
            batches.append((header, data))
            size_bytes += len(data)
            if size_bytes >= _LOAD_SLICE_BYTES:
                break
        self.runtime.read(load, batches, self._life.now_ms, is_end=size_bytes < _LOAD_SLICE_BYTES)
        state = self.runtime.state(load.shard_id)
        if state is ShardState.FAILED:
            raise ViolationError("I-17 live state is the log's state", f"{self.topic}-{load.shard_id} cannot be loaded")
        self.pump()

    def _open(self, shard_id: int) -> Log:
        """Opens a log. What a failed sync left can be read, but may never reach the disk: it is written again (D-3)."""
        life, name = self._life, self._folder(shard_id)
        old = self.logs.pop(shard_id, None)
        if old is not None:
            try:
                old.close()
            finally:
                # Closing syncs, and may be what fails.
                if old.failure is not None:
                    self._reopening.setdefault(shard_id, old.reopening())
        recovery = self._reopening.get(shard_id, Recovery())
        life.opening += 1
        try:
            if recovery.rewrite:
                life.journal.restore(DATA_FOLDER, name)
            log = Log.open(life.disk, f"{DATA_FOLDER}/{name}", self._log_config, life.now_ms, recovery=recovery)
        finally:
            life.opening -= 1
        self._reopening.pop(shard_id, None)
        return log

    def _folder(self, shard_id: int) -> str:
        return f"{self.topic}-{shard_id}"

    def give_up(self, shard_id: int) -> bool:
        """Another worker is to own the shard: this one answers NOT_COORDINATOR until it loads it again."""
        if self.runtime.state(shard_id) is not ShardState.ACTIVE:
            return False
        self._life.trace.add("give-up-shard", f"{self.topic} {shard_id}")
        self._given_up.add(shard_id)
        self.runtime.close_shard(shard_id)
        self.pump()
        return True

    def lose(self, shard_id: int) -> bool:
        """The worker that owns the shard dies: no client is answered, and what the disk did not get it never will."""
        if self.runtime.state(shard_id) is not ShardState.ACTIVE:
            return False
        self._lost.add(shard_id)
        self._waiting = {token: one for token, one in self._waiting.items() if one[0] != shard_id or one[2]}
        return self.give_up(shard_id)

    # Operations.

    def run(
        self,
        shard_id: int,
        operation: Callable[[M, OperationContext], CoordinatorResult[T]],
        context: OperationContext,
        on_reply: Callable[[object], None],
        *,
        is_worker: bool = False,
    ) -> None:
        """`on_reply` gets the response or the KafkaError, now or later. A worker sees that the one it asked died."""
        self._tokens += 1
        token = self._tokens
        context.token = token
        try:
            outcome = self.runtime.run(shard_id, lambda shard, context, _: operation(shard, context), None, context)
        except KafkaError as error:
            on_reply(error)
        else:
            if isinstance(outcome, DeferredReply):
                self._waiting[token] = shard_id, on_reply, is_worker
                outcome.deliver = lambda value: self._deliver(token, value)
            else:
                on_reply(outcome)
        self.pump()

    def _deliver(self, token: int, value: object) -> None:
        waiting = self._waiting.pop(token, None)
        if waiting is not None:
            waiting[1](value)

    def update_image(self, image: MetadataImage) -> None:
        self.runtime.run_on_active(_update, image, self._life.now_ms)
        self.pump()

    def _catch_up(self, machine: M, context: OperationContext, nothing: None) -> CoordinatorResult[None]:
        for shard_id in range(self.count):
            if self.runtime.machine(shard_id) is machine:
                self._life.trace.add("active", f"{self.topic} {shard_id}")
                self._hooks.on_active(shard_id, machine)
        return machine.on_metadata_update(context, self._life.image)

    def complete_task(self, shard_id: int, task: Task, value: object) -> None:
        self.runtime.complete_task(shard_id, task, value, OperationContext(self._life.now_ms))
        self.pump()

    # The turn of the event loop that a real process makes.

    def pump(self) -> None:
        runtime, now_ms = self.runtime, self._life.now_ms
        ready = runtime.poll(now_ms)
        for append in ready.appends:
            self._write(append)
        for waiter in ready.replies:
            waiter.settle()
        for shard_id, task in ready.tasks:
            self._hooks.start_task(shard_id, task)
        for shard_id in ready.closes:
            self._life.trace.add("failed", f"{self.topic} {shard_id}")
        for load in ready.opens:
            self._open_load(load)
        for load in ready.reads:
            self._life.after(1, lambda load=load: self._read(load))  # type: ignore[misc]
        if ready.opens:
            self._life.after(1, self.pump)
        deadline_ms = runtime.next_deadline_ms()
        if deadline_ms is not None and not now_ms < self._pump_at_ms <= deadline_ms:
            self._pump_at_ms = max(deadline_ms, now_ms + 1)
            self._life.after(self._pump_at_ms - now_ms, self.pump)

    # Writing.

    def _write(self, append: Append) -> None:
        place = f"{self.topic} {append.shard_id} {append.base_offset}-{append.next_offset}"
        self._life.trace.add("append", f"{place} {zlib.crc32(append.data)}")
        self._writes_under_way += 1
        now_ms = self._life.now_ms
        append_ms = max(now_ms, self._disk_free_ms.get(append.shard_id, 0)) + self._life.disk_delay_ms()
        sync_ms = self._disk_free_ms[append.shard_id] = append_ms + self._life.disk_delay_ms()
        self._life.after(append_ms - now_ms, lambda: self._append(append, sync_ms))
        if self._hooks.early_replies:
            self._life.after(1, lambda: self._completed(append, None))

    def _append(self, append: Append, sync_ms: int) -> None:
        if append.shard_id in self._lost:
            self._written(append, OSError("the worker is gone"))
            return
        log = _ShardLog(self.logs, append.shard_id, self._folder(append.shard_id))
        try:
            info = self.logs[append.shard_id].append(append.data, now_ms=self._life.now_ms)
        except (OSError, StorageError) as error:
            self._written(append, error)
            return
        appended = Appended(log, info, append.data)
        self._life.after(max(sync_ms - self._life.now_ms, 0), lambda: self._sync(append, appended))

    def _sync(self, append: Append, appended: Appended) -> None:
        appends = self._life.appends
        (error,) = appends.settle([appended])
        self._written(append, error)
        if appends.is_renewal_due:
            self._life.trace.add("renew", f"{appends.renew()}")

    def _written(self, append: Append, error: Exception | None) -> None:
        self._writes_under_way -= 1
        if not self._hooks.early_replies:
            self._completed(append, error)

    def _completed(self, append: Append, error: Exception | None) -> None:
        self._life.trace.add("written", f"{self.topic} {append.shard_id} {error}")
        if error is None:
            self.runtime.written(append)
        else:
            as_os_error = error if isinstance(error, OSError) else OSError(str(error))
            self.runtime.unknown(append, as_os_error, self._life.now_ms)
        self.pump()

    # Snapshots.

    def _read_snapshot(self, shard_id: int, log: Log) -> Snapshot | None:
        """The snapshot to begin with, by the rules of the server."""
        try:
            snapshot = read_snapshot(self._life.disk, log.directory)
        except (OSError, SnapshotError):
            self._life.trace.add("snapshot-refused", str(shard_id))
            return None
        if snapshot is None:
            return None
        if snapshot.end_offset > log.end_offset:
            # A server removes it. Here nothing but the tail that was not synced is lost, and that no snapshot holds.
            text = f"{self.topic}-{shard_id}: the snapshot holds {snapshot.end_offset}, the log {log.end_offset}"
            raise ViolationError("I-11 what is durable stays", text)
        if snapshot.offset < log.start_offset:
            return None
        if may_miss_deletions(snapshot, log, self._life.now_ms, TOMBSTONES_KEPT_MS):
            self._life.trace.add("snapshot-too-old", str(shard_id))
            return None
        return snapshot

    def take_snapshot(self, shard_id: int) -> None:
        """A slice at a time, while the shard works on; written once all that it holds is durable."""
        slices = self._slices(shard_id)
        machine = self.runtime.machine(shard_id)
        if slices is None or machine is None:
            return
        snapshot = Snapshot(self.runtime.offsets(shard_id)[1], 0, self._life.now_ms, [])

        def go_on() -> None:
            if self.runtime.machine(shard_id) is not machine:
                return
            chunks = next(slices, None) if snapshot.end_offset == 0 else None
            if chunks is not None:
                snapshot.chunks += chunks
                self._life.after(1, go_on)
                return
            snapshot.end_offset = snapshot.end_offset or self.runtime.offsets(shard_id)[1] or -1
            if self.runtime.offsets(shard_id)[0] < snapshot.end_offset:
                self._life.after(1, go_on)
                return
            self._save(shard_id, snapshot)

        go_on()

    def _slices(self, shard_id: int) -> Iterator[list[Chunk]] | None:
        machine: object = self.runtime.machine(shard_id)
        parts = machine.snapshot() if isinstance(machine, HasSnapshot) else None
        return make_chunks(parts, self._hooks.serde) if parts is not None else None

    def _save(self, shard_id: int, snapshot: Snapshot) -> None:
        snapshot.end_offset = max(snapshot.end_offset, 0)
        try:
            write_snapshot(self._life.disk, self.logs[shard_id].directory, snapshot)
        except OSError as error:
            self._life.trace.add("snapshot-failed", f"{self.topic} {shard_id} {error}")
        else:
            self._life.trace.add("snapshot", f"{self.topic} {shard_id} {snapshot.offset}-{snapshot.end_offset}")

    def stop(self) -> None:
        """An orderly stop: what is durable is saved as it is."""
        for shard_id in self.runtime.active_shards():
            durable_offset, next_offset = self.runtime.offsets(shard_id)
            slices = self._slices(shard_id)
            if slices is not None and durable_offset == next_offset and self.logs[shard_id].failure is None:
                chunks = [chunk for slice_ in slices for chunk in slice_]
                self._save(shard_id, Snapshot(next_offset, next_offset, self._life.now_ms, chunks))

    # Cleaning.

    def clean(self, shard_id: int) -> None:
        """One pass of the real cleaner over the closed segments, after the active one is closed."""
        log = self.logs.get(shard_id)
        if log is None or log.is_closed or log.failure is not None or shard_id in self._given_up:
            return
        rules = CleaningRules(0.0, delete_retention_ms=TOMBSTONES_KEPT_MS)
        now_ms = self._life.now_ms
        try:
            if log.end_offset > log.segments[-1].base_offset:
                log.roll(now_ms)
            found = assess(log, self._cleaned_offsets.get(shard_id, 0), rules, log.end_offset, now_ms)
            if not found.is_due(rules):
                return
            cleaner = Cleaner(self._life.disk, max_map_bytes=_MAP_BYTES, pause=lambda size: None)
            done = cleaner.clean(log, found, rules, lambda step: step(), now_ms, stable_offset=log.end_offset)
        except PowerLost:
            self._life.power_lost()
            return
        except (OSError, StorageError) as error:
            self._life.trace.add("clean-failed", f"{self.topic} {shard_id} {error}")
            return
        self._cleaned_offsets[shard_id] = done.next_dirty_offset
        self._life.trace.add(
            "clean", f"{self.topic} {shard_id} {done.next_dirty_offset} {done.records_kept}/{done.records_read}"
        )


def _update(machine: M, context: OperationContext, image: MetadataImage) -> CoordinatorResult[None]:
    return machine.on_metadata_update(context, image)
