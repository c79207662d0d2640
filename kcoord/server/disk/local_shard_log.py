# SPDX-License-Identifier: Apache-2.0
"""The logs of one kind of shards in this broker's data folder: what `kcoord.runtime.shard_log` asks of a log.

The claim is the lock of the data folder: workers that share it hand partitions over. Logs are opened and read in the
event loop, a slice at a time. Appends go to the process's log writer. Snapshots are written, and logs that were not
read whole because of one are checked, in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kcoord.runtime.shard_loads import LOAD_SLICE_BYTES
from kcoord.runtime.shard_log import Append, Load, OpenedLog, Release, Save
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import Snapshot
from kcoord.server.disk.log_writer import WriteJob
from kcoord.server.disk.shard_logs import ShardLogs
from kcoord.server.environment import NewPool, thread_pool
from kcoord.storage.errors import CorruptLogError, PartitionHeldError, StorageError
from kcoord.storage.log import Log
from kcoord.storage.snapshot import (
    SnapshotError,
    may_miss_deletions,
    read_snapshot,
    remove_snapshot,
    write_snapshot,
)
from kcoord.topics.schedule import Every
from kcoord_protocol.record_batch import BatchHeader

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

_logger = logging.getLogger(__name__)

STOP_SECONDS: Final = 0.7
"""How long the snapshots of an orderly stop may take."""
INDEX_STORE_INTERVAL_MS: Final = 30_000
"""Half of what lies between two recovery points (log.flush.offset.checkpoint.interval.ms)."""
VERIFY_SLICE_BYTES: Final = 64 << 10
VERIFY_REST_SECONDS: Final = 0.002


@dataclass(slots=True)
class _Reader:
    """A log that is being read. Because of a snapshot, what lies before `unread_offset` is not."""

    log: Log
    batches: Iterator[tuple[BatchHeader, bytes]]
    unread_offset: int | None


class LocalShardLog:
    """See the module's text. `submit` has batches written, and `ShardDriver.written` called when that ended; `wake` has
    the shard set polled soon. `tombstones_kept_ms` is `delete.retention.ms` of the coordinators' logs.
    """

    def __init__(
        self,
        shards: ShardSet[Any],
        logs: ShardLogs,
        *,
        submit: Callable[[WriteJob], None],
        wake: Callable[[], None],
        now_ms: Callable[[], int],
        tombstones_kept_ms: Callable[[], int],
        new_pool: NewPool = thread_pool,
    ) -> None:
        self.logs = logs
        self._shards = shards
        self._submit = submit
        self._wake = wake
        self._now_ms = now_ms
        self._tombstones_kept_ms = tombstones_kept_ms
        self._new_pool = new_pool
        self._loop = asyncio.get_running_loop()
        self._readers: dict[int, _Reader] = {}
        """By shard; the one of a load that was given up stays until the next load."""
        self._index_store = Every(INDEX_STORE_INTERVAL_MS)
        self._threads: Executor | None = None
        self._is_closing = False

    # --- loading ------------------------------------------------------------------------------------------------------

    def is_empty(self, shard_id: int) -> bool:
        return not self.logs.exists(shard_id)

    def gained(self, shard_id: int) -> None:
        self.logs.note_gained(shard_id)

    def open(self, load: Load) -> None:
        try:
            log = self.logs.open(load.shard_id)
            snapshot = self._usable_snapshot(log) if load.with_snapshot else None
            opened = OpenedLog(log.start_offset, log.end_offset, log.size_bytes, snapshot)
            if snapshot is not None:
                opened.unread_bytes = log.bytes_from(snapshot.offset)
        except PartitionHeldError:
            self._shards.held(load, self._now_ms())
        except (OSError, StorageError) as error:
            self._shards.failed(load, error, self._now_ms())
        else:
            self._shards.opened(load, opened)
            start_offset = log.start_offset if snapshot is None else snapshot.offset
            unread_offset = None if snapshot is None else snapshot.offset
            self._readers[load.shard_id] = _Reader(log, log.batches(start_offset), unread_offset)

    def _usable_snapshot(self, log: Log) -> Snapshot | None:
        """The snapshot to begin with, if there is one that fits the log."""
        try:
            snapshot = read_snapshot(self.logs.file_system, log.directory)
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
            remove_snapshot(self.logs.file_system, log.directory)
            return None
        if snapshot.offset < log.start_offset:
            return None
        if may_miss_deletions(snapshot, log, self._now_ms(), self._tombstones_kept_ms()):
            _logger.info("The snapshot of %s is older than tombstones are kept, the whole log is read", log.directory)
            return None
        return snapshot

    def read(self, load: Load) -> None:
        reader = self._readers[load.shard_id]
        batches: list[tuple[BatchHeader, bytes]] = []
        size_bytes = 0
        try:
            for header, data in reader.batches:
                batches.append((header, data))
                size_bytes += len(data)
                if size_bytes >= LOAD_SLICE_BYTES:
                    break
        except (OSError, StorageError) as error:
            self._shards.failed(load, error, self._now_ms())
            return
        is_end = size_bytes < LOAD_SLICE_BYTES
        self._shards.read(load, batches, self._now_ms(), is_end=is_end)
        if is_end:
            del self._readers[load.shard_id]
            log, end_offset = reader.log, reader.unread_offset
            if end_offset is not None and log.recovery_report.scanned_bytes < log.size_bytes:
                self._pool().submit(self._verify, load.shard_id, log, end_offset)

    def _verify(self, shard_id: int, log: Log, end_offset: int) -> None:
        """In a thread: the part of the log that was not read because of the snapshot must be sound all the same."""
        seen_bytes = 0
        try:
            for header, _ in log.batches():
                if header.base_offset >= end_offset or self._is_closing or log.is_closed:
                    return
                seen_bytes += header.size_bytes
                if seen_bytes >= VERIFY_SLICE_BYTES:
                    seen_bytes = 0
                    time.sleep(VERIFY_REST_SECONDS)
        except CorruptLogError as error:
            if not self._is_closing:
                self._loop.call_soon_threadsafe(self._damaged, shard_id, str(error))
        except (OSError, StorageError) as error:
            _logger.warning("Checking %s ended early: %s", log.directory, error)

    def _damaged(self, shard_id: int, reason: str) -> None:
        self._shards.damaged(shard_id, reason)
        self._wake()

    # --- while the process runs ---------------------------------------------------------------------------------------

    def append(self, append: Append, now_ms: int) -> None:
        key = (self._shards.name, append.shard_id)
        self._submit(WriteJob(key, self.logs.writable(append.shard_id), append.data, now_ms))

    def save(self, save: Save) -> None:
        log = self.logs.opened(save.shard_id)
        if log is None:
            self._shards.saved(save, self._now_ms(), succeeded=False)
            return
        written = self._pool().submit(self._write, log, save.snapshot)
        written.add_done_callback(lambda done: self._tell_loop(log, save, done))

    def _tell_loop(self, log: Log, save: Save, done: Future[bool]) -> None:
        if not self._is_closing:
            self._loop.call_soon_threadsafe(self._saved, log, save, done.result())

    def _saved(self, log: Log, save: Save, succeeded: bool) -> None:
        if not self._shards.saved(save, self._now_ms(), succeeded=succeeded) and succeeded:
            with suppress(OSError):
                remove_snapshot(self.logs.file_system, log.directory)
        self._wake()

    def _write(self, log: Log, snapshot: Snapshot) -> bool:
        try:
            write_snapshot(self.logs.file_system, log.directory, snapshot)
        except OSError as error:
            _logger.warning("No snapshot of %s: %s", log.directory, error)
            return False
        return True

    def _pool(self) -> Executor:
        if self._threads is None:
            self._threads = self._new_pool(1, f"kcoord-{self._shards.name}-snapshots")
        return self._threads

    def release(self, release: Release) -> None:
        if release.deleted_topic_id is not None:
            self.logs.delete(list(release.shard_ids), release.deleted_topic_id)
        else:
            self.logs.hand_over(list(release.shard_ids))
        self._shards.released(release)

    def close(self, shard_id: int) -> None:
        self.logs.close(shard_id)

    def tick(self, now_ms: int) -> None:
        """Stores index files, so that recovery points are worth something."""
        if self._index_store.is_due(now_ms):
            self._loop.run_in_executor(None, self.logs.store_indexes)

    # --- the end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Nothing is begun any more."""
        self._is_closing = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def finish(self, saves: Iterator[Save]) -> None:
        deadline = self._loop.time() + STOP_SECONDS
        for save in saves:
            log = self.logs.opened(save.shard_id)
            if log is not None and log.failure is None:
                self._write(log, save.snapshot)
            if self._loop.time() > deadline:
                break
        self.logs.end_index_store()
