# SPDX-License-Identifier: Apache-2.0
"""Keeps snapshots of the coordinator shards of one kind beside their logs, so that a start reads little more than there
is state.

A snapshot is taken in slices while the shard works on, one after another, of the shard whose log has grown most since
its last one. It is written by a thread once everything it may hold is durable. At an orderly stop each shard
whose log has grown gets one. Nothing depends on any of it: whatever is wrong with a snapshot, the log is read instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from kcoord.runtime.result import StateMachine
from kcoord.runtime.snapshot import Snapshot
from kcoord.server.environment import NewPool, thread_pool
from kcoord.storage.errors import CorruptLogError, StorageError
from kcoord.storage.snapshot import SnapshotError, may_miss_deletions, read_snapshot, remove_snapshot, write_snapshot

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from kcoord.runtime.coordinator_runtime import CoordinatorRuntime
    from kcoord.server.disk.shard_logs import ShardLogs
    from kcoord.storage.file_system import FileSystem
    from kcoord.storage.log import Log

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound=StateMachine)

LEAST_GROWTH_BYTES = 1 << 20
"""A log that grew by less is not worth a snapshot while the process runs."""
MOST_PER_TICK = 8
LEAST_GROWTH_AT_STOP_BYTES = 16 << 10
STOP_SECONDS = 0.7
"""How long the snapshots of an orderly stop may take."""
_SLICE_REST_SECONDS = 0.001
"""Between two slices, which take a quarter of that: an answer takes several turns of the event loop, and must not wait
for a slice in each.
"""
_DURABLE_CHECK_SECONDS = 0.01
_VERIFY_SLICE_BYTES = 64 << 10
_VERIFY_REST_SECONDS = 0.002


class ShardSnapshots(Generic[M]):
    """See the module's text. `on_damage` is told of a shard whose log is damaged where its snapshot made it unread."""

    def __init__(
        self,
        name: str,
        runtime: CoordinatorRuntime[M],
        logs: ShardLogs,
        file_system: FileSystem,
        now_ms: Callable[[], int],
        on_damage: Callable[[int, CorruptLogError], None],
        tombstones_kept_ms: Callable[[], int],
        new_pool: NewPool = thread_pool,
    ) -> None:
        self._name = name
        self._runtime = runtime
        self._logs = logs
        self._file_system = file_system
        self._now_ms = now_ms
        self._on_damage = on_damage
        self._tombstones_kept_ms = tombstones_kept_ms
        self._loop = asyncio.get_running_loop()
        self._growth_bytes: dict[int, int] = {}
        self._postponed_bytes: dict[int, int] = {}
        self._size_bytes: dict[int, int] = {}
        self._writing: int | None = None
        self._distrusted: set[int] = set()
        self._new_pool = new_pool
        self._threads: Executor | None = None
        self._is_taking = False
        self._is_closing = False

    # --- loading ------------------------------------------------------------------------------------------------------

    def read(self, shard_id: int, log: Log) -> Snapshot | None:
        """The snapshot to begin with, if there is one that fits the log."""
        if shard_id in self._distrusted:
            return None
        try:
            snapshot = read_snapshot(self._file_system, log.directory)
        except (OSError, SnapshotError) as error:
            _logger.warning("A snapshot is not used, the whole log is read instead: %s", error)
            return None
        if snapshot is None:
            return None
        if snapshot.end_offset > log.end_offset:
            _logger.warning(
                "The snapshot of %s reaches to offset %d, the log only to %d: it is removed, the whole log is read",
                log.directory,
                snapshot.end_offset,
                log.end_offset,
            )
            remove_snapshot(self._file_system, log.directory)
            return None
        if snapshot.offset < log.start_offset:
            return None
        if may_miss_deletions(snapshot, log, self._now_ms(), self._tombstones_kept_ms()):
            _logger.info("The snapshot of %s is older than tombstones are kept, the whole log is read", log.directory)
            return None
        return snapshot

    def distrust(self, shard_id: int) -> None:
        """Load this shard from its log alone from now on."""
        self._distrusted.add(shard_id)

    def on_loaded(self, shard_id: int, log: Log, snapshot: Snapshot | None) -> None:
        """The shard is active."""
        if snapshot is None:
            self._growth_bytes[shard_id] = log.size_bytes
            return
        self._size_bytes[shard_id] = snapshot.size_bytes
        self._growth_bytes[shard_id] = log.bytes_from(snapshot.offset)
        if log.recovery_report.scanned_bytes < log.size_bytes:
            self._pool().submit(self._verify, shard_id, log, snapshot.offset)

    def _verify(self, shard_id: int, log: Log, end_offset: int) -> None:
        """In a thread: the part of the log that was not read because of the snapshot must be sound all the same."""
        seen_bytes = 0
        try:
            for header, _ in log.batches():
                if header.base_offset >= end_offset or self._is_closing or log.is_closed:
                    return
                seen_bytes += header.size_bytes
                if seen_bytes >= _VERIFY_SLICE_BYTES:
                    seen_bytes = 0
                    time.sleep(_VERIFY_REST_SECONDS)
        except CorruptLogError as error:
            if not self._is_closing:
                self._loop.call_soon_threadsafe(self._on_damage, shard_id, error)
        except (OSError, StorageError) as error:
            _logger.warning("Checking %s ended early: %s", log.directory, error)

    # --- while the process runs ---------------------------------------------------------------------------------------

    def on_grown(self, shard_id: int, size_bytes: int) -> None:
        """Batches were appended to the log of a shard, durably."""
        self._growth_bytes[shard_id] = self._growth_bytes.get(shard_id, 0) + size_bytes

    def is_due(self) -> bool:
        """Whether a shard needs a snapshot, and none is being taken."""
        return not self._is_taking and self._due() is not None

    def _due(self) -> int | None:
        """The shard that needs a snapshot most, if one does. A larger one has to pay off."""
        shard_id = max(self._growth_bytes, key=self._growth_bytes.__getitem__, default=None)
        if shard_id is None or self._is_closing:
            return None
        least = max(LEAST_GROWTH_BYTES, self._size_bytes.get(shard_id, 0))
        return shard_id if self._growth_bytes[shard_id] >= least else None

    async def take_due(self) -> None:
        """Takes some of the snapshots that are due."""
        self._is_taking = True
        try:
            for _ in range(MOST_PER_TICK):
                shard_id = self._due()
                if shard_id is None:
                    return
                await self.take(shard_id)
        finally:
            self._is_taking = False

    async def take(self, shard_id: int) -> bool:
        """Takes and writes one snapshot; False where the shard did not stay as it was, or the disk refused."""
        # Whatever happens, it is another shard's turn until this one has grown again.
        self._postponed_bytes[shard_id] = self._unsaved_bytes(shard_id)
        self._growth_bytes[shard_id] = 0
        machine = self._runtime.machine(shard_id)
        slices = self._runtime.chunks(shard_id)
        log = self._logs.open_logs().get(shard_id)
        if machine is None or slices is None or log is None:
            return False
        snapshot = Snapshot(self._runtime.offsets(shard_id)[1], 0, self._now_ms(), [])
        for chunks in slices:
            snapshot.chunks += chunks
            await asyncio.sleep(_SLICE_REST_SECONDS)
            if self._runtime.machine(shard_id) is not machine:
                return False
        snapshot.end_offset = self._runtime.offsets(shard_id)[1]
        while self._runtime.offsets(shard_id)[0] < snapshot.end_offset:
            await asyncio.sleep(_DURABLE_CHECK_SECONDS)
            if self._runtime.machine(shard_id) is not machine:
                return False
        self._writing = shard_id
        if not await self._loop.run_in_executor(self._pool(), self._write, log, snapshot):
            return False
        if self._runtime.machine(shard_id) is not machine:
            # The shard was loaded again, or its topic deleted, while this was written.
            with suppress(OSError):
                remove_snapshot(self._file_system, log.directory)
            return False
        self._size_bytes[shard_id] = snapshot.size_bytes
        self._postponed_bytes.pop(shard_id, None)
        self._distrusted.discard(shard_id)
        return True

    def _unsaved_bytes(self, shard_id: int) -> int:
        return self._growth_bytes.get(shard_id, 0) + self._postponed_bytes.get(shard_id, 0)

    def _write(self, log: Log, snapshot: Snapshot) -> bool:
        try:
            write_snapshot(self._file_system, log.directory, snapshot)
        except OSError as error:
            _logger.warning("No snapshot of %s: %s", log.directory, error)
            return False
        finally:
            self._writing = None
        return True

    def _pool(self) -> Executor:
        if self._threads is None:
            self._threads = self._new_pool(1, f"kcoord-{self._name}-snapshots")
        return self._threads

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Nothing is begun any more."""
        self._is_closing = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def take_last(self) -> None:
        """At an orderly stop, when everything is durable: a snapshot of each log that has grown, as long as time is."""
        deadline = self._loop.time() + STOP_SECONDS
        for shard_id in sorted(self._growth_bytes, key=self._unsaved_bytes, reverse=True):
            log = self._logs.open_logs().get(shard_id)
            if self._unsaved_bytes(shard_id) < LEAST_GROWTH_AT_STOP_BYTES or self._loop.time() > deadline:
                return
            if log is not None and log.failure is None and shard_id != self._writing:
                self._take_at_once(shard_id, log)

    def _take_at_once(self, shard_id: int, log: Log) -> None:
        slices = self._runtime.chunks(shard_id)
        durable_offset, next_offset = self._runtime.offsets(shard_id)
        if slices is not None and durable_offset == next_offset:
            chunks = [chunk for slice_ in slices for chunk in slice_]
            self._write(log, Snapshot(next_offset, next_offset, self._now_ms(), chunks))
