# SPDX-License-Identifier: Apache-2.0
"""The logs of coordinators in this broker's data folder.

Theory of operation
-------------------
`ShardLogs` holds the partition folders of a coordinator's topic. A shard's log is opened when the shard is loaded, or
when its first batch is written. `close` closes it, and the next use opens it again.

`LocalShardLog` implements `kcoord.runtime.shard_log` on these folders:

    open, read    event loop       a slice at a time; the outcome is a call of the shard set before the method returns
    append        log writer       the outcome comes with the end of the write job (`kcoord.server.disk.log_writer`)
    save          snapshot thread  the outcome is posted to the event loop
    release       event loop       closes the logs, then deletes them or hands them over
    close         event loop       closes the log of a failed shard

The claim of a log is the lock of the data folder. Workers that share the folder hand partitions over to each other.

Locks: each log has one lock. The event loop, the writer thread, the log cleaner, the thread that stores indexes and
`close` hold it while they change the log. The event loop waits for it only to close a log. For an append it tries the
lock, and leaves the append to the writer thread if another thread holds it.

A shard that was loaded from a snapshot has not read the log before the snapshot's offset. If opening the log did not
scan all of it either, the snapshot thread reads that part afterwards. Damage found there fails the shard.

A crash while a snapshot is saved leaves the old one or the new one. A crash during an append leaves any part of the
batches: recovery cuts the log at a whole batch, and the journal restores what was acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from kcoord.runtime.shard_loads import LOAD_SLICE_BYTES
from kcoord.runtime.shard_log import Append, Load, OpenedLog, Release, Save
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import Snapshot
from kcoord.server.disk.log_writer import WriteJob
from kcoord.server.environment import NewPool, thread_pool
from kcoord.storage.errors import CorruptLogError, LogFailedError, PartitionHeldError, StorageError
from kcoord.storage.file_system import FileSystem
from kcoord.storage.log import AppendInfo, Log
from kcoord.storage.log_dir import partition_folder
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
"""The time after which an orderly stop begins no further snapshot."""
INDEX_STORE_INTERVAL_MS: Final = 30_000
"""Half of the default interval between two recovery points (log.flush.offset.checkpoint.interval.ms)."""
VERIFY_SLICE_BYTES: Final = 64 << 10
VERIFY_REST_SECONDS: Final = 0.002


class ShardLogs:
    """The logs of the partitions of one topic, by shard id (the partition's index).

    * `open_log` opens or creates the log of a partition.
    * `log_exists` returns whether a partition has a folder.
    * `delete_logs` takes the folders of deleted partitions out of use; it gets their topic id, too.
    * `hand_over_logs` leaves closed logs to other brokers.
    * `note_gained` is called for a partition that another broker led until now.
    * `note_closed` is called with the folder of a log that is durable and closed.
    """

    def __init__(
        self,
        topic: str,
        open_log: Callable[[int], Log],
        log_exists: Callable[[int], bool],
        file_system: FileSystem,
        delete_logs: Callable[[list[int], bytes], None] = lambda shard_ids, topic_id: None,
        hand_over_logs: Callable[[list[int]], None] = lambda shard_ids: None,
        note_gained: Callable[[int], None] = lambda shard_id: None,
        note_closed: Callable[[str], None] = lambda folder: None,
    ) -> None:
        self._topic = topic
        self._note_closed = note_closed
        self._hand_over_logs = hand_over_logs
        self.note_gained = note_gained
        self._delete_logs = delete_logs
        self.file_system = file_system
        self._open_log = open_log
        self._log_exists = log_exists
        self._logs: dict[int, Log] = {}
        self._failed: set[int] = set()
        """Shards whose logs were closed after a failure, so they may not be durable."""
        self._writable: dict[int, LazyLog] = {}
        self._locks: dict[int, Lock] = {}
        self._is_ending = False

    def lock(self, shard_id: int) -> Lock:
        """Returns the lock of a shard's log. A thread holds it while it changes the log."""
        return self._locks.setdefault(shard_id, Lock())

    def exists(self, shard_id: int) -> bool:
        return self._log_exists(shard_id)

    def open(self, shard_id: int) -> Log:
        """Returns the log, and opens it if needed. Raises OSError or StorageError if it cannot be opened."""
        log = self._logs.get(shard_id)
        if log is None:
            log = self._logs[shard_id] = self._open_log(shard_id)
            self._failed.discard(shard_id)
        return log

    def opened(self, shard_id: int) -> Log | None:
        """Returns the log if it is open, otherwise None."""
        return self._logs.get(shard_id)

    def writable(self, shard_id: int) -> LazyLog:
        """Returns the log for the log writer, which opens it at its first use."""
        lazy = self._writable.get(shard_id)
        if lazy is None:
            lazy = self._writable[shard_id] = LazyLog(self, shard_id, partition_folder(self._topic, shard_id))
        return lazy

    def flush(self, shard_id: int) -> None:
        """Makes all appended batches durable. The caller holds the lock of the shard.

        Raises LogFailedError if the log failed and was not opened again, OSError or StorageError if the sync fails.
        """
        log = self._logs.get(shard_id)
        if log is not None:
            log.flush()
        elif shard_id in self._failed:
            raise LogFailedError(f"{partition_folder(self._topic, shard_id)} failed and was not opened again")

    def close(self, shard_id: int) -> None:
        """Closes the log of a shard if it is open. Failures are logged."""
        with self.lock(shard_id):
            log = self._logs.pop(shard_id, None)
            if log is None:
                return
            try:
                log.close()
                if log.failure is None:
                    self._note_closed(partition_folder(self._topic, shard_id))
            except (OSError, StorageError) as error:
                _logger.warning("Closing %s failed: %s", log.directory, error)
            if log.failure is not None:
                self._failed.add(shard_id)

    def delete(self, shard_ids: list[int], topic_id: bytes) -> None:
        """Closes and deletes the logs of a deleted topic. No append and no load of these shards may be in flight."""
        for shard_id in shard_ids:
            self.close(shard_id)
        self._delete_logs(shard_ids, topic_id)

    def hand_over(self, shard_ids: list[int]) -> None:
        """Closes the logs and leaves them to the brokers that lead these shards now.

        No append and no load of these shards may be in flight.
        """
        for shard_id in shard_ids:
            self.close(shard_id)
        self._hand_over_logs(shard_ids)

    def store_indexes(self) -> None:
        """Stores the index files of one log after the other (`Log.store_indexes`). Runs in a thread."""
        for shard_id, log in self.open_logs().items():
            try:
                with self.lock(shard_id):
                    if self._is_ending:
                        return
                    log.store_indexes()
            except (OSError, StorageError) as error:
                _logger.warning("The indexes of %s were not stored: %s", log.directory, error)

    def end_index_store(self) -> None:
        """Ends `store_indexes`. When this method returns, no thread stores indexes, so the logs can be closed."""
        self._is_ending = True
        for shard_id in self.open_logs():
            with self.lock(shard_id):
                continue

    def open_logs(self) -> dict[int, Log]:
        return dict(self._logs)


class LazyLog:
    """A log that is opened at its first use, and again after it was closed. `folder` is the name of its folder."""

    __slots__ = ("_lock", "_logs", "_shard_id", "folder")

    def __init__(self, logs: ShardLogs, shard_id: int, folder: str) -> None:
        self._logs = logs
        self._shard_id = shard_id
        self._lock = logs.lock(shard_id)
        self.folder = folder

    def append(self, data: bytes, *, now_ms: int) -> AppendInfo:
        with self._lock:
            return self._logs.open(self._shard_id).append(data, now_ms=now_ms)

    def append_at_once(self, data: bytes, *, now_ms: int) -> AppendInfo | None:
        if not self._lock.acquire(blocking=False):
            return None
        try:
            log = self._logs.opened(self._shard_id)
            return log.append_without_sync(data, now_ms=now_ms) if log is not None else None
        finally:
            self._lock.release()

    def sync_names(self) -> None:
        with self._lock:
            self._logs.open(self._shard_id).sync_names()

    def flush(self) -> None:
        with self._lock:
            self._logs.flush(self._shard_id)


@dataclass(slots=True)
class _LogReader:
    """A log that is being read. `unread_offset`: batches before it are skipped because a snapshot covers them."""

    log: Log
    batches: Iterator[tuple[BatchHeader, bytes]]
    unread_offset: int | None


class LocalShardLog:
    """The `ShardLog` of a shard set on folders of the data folder; the module text describes the threads.

    * `submit` passes a job to the pump (`Pump.submit`).
    * `wake` requests a poll of the shard set.
    * `tombstones_kept_ms` returns `delete.retention.ms` of the coordinators' logs.
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
        self._readers: dict[int, _LogReader] = {}
        """By shard. The reader of an abandoned load stays until the next load of the shard."""
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
        except (OSError, StorageError, AssertionError) as error:
            self._shards.failed(load, error, self._now_ms())
        else:
            self._shards.opened(load, opened)
            start_offset = log.start_offset if snapshot is None else snapshot.offset
            unread_offset = None if snapshot is None else snapshot.offset
            self._readers[load.shard_id] = _LogReader(log, log.batches(start_offset), unread_offset)

    def _usable_snapshot(self, log: Log) -> Snapshot | None:
        """Returns the snapshot to begin with, or None if the whole log has to be read."""
        try:
            snapshot = read_snapshot(self.logs.file_system, log.directory)
        except (OSError, SnapshotError) as error:
            _logger.warning("The snapshot of %s is not used, the whole log is read instead: %s", log.directory, error)
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
        except (OSError, StorageError, AssertionError) as error:
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
        """Checks the part of the log that the snapshot covers, up to `end_offset`. Runs in the snapshot thread."""
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
            _logger.warning("The check of %s ended early: %s", log.directory, error)

    def _damaged(self, shard_id: int, reason: str) -> None:
        self._shards.damaged(shard_id, reason)
        self._wake()

    # --- while the process runs ---------------------------------------------------------------------------------------

    def append(self, append: Append, now_ms: int) -> None:
        key = (self._shards.name, append.shard_id)
        log = self.logs.writable(append.shard_id)
        self._submit(WriteJob(key, log, append.data, now_ms, partial(self._ended, append)))

    def _ended(self, append: Append, error: OSError | None, now_ms: int) -> None:
        if error is None:
            self._shards.written(append)
        else:
            self._shards.unknown(append, error, now_ms)

    def save(self, save: Save) -> None:
        log = self.logs.opened(save.shard_id)
        if log is None:
            self._shards.saved(save, self._now_ms(), succeeded=False)
            return
        written = self._pool().submit(self._write, log, save.snapshot)
        written.add_done_callback(lambda done: self._post_saved(log, save, done))

    def _post_saved(self, log: Log, save: Save, done: Future[bool]) -> None:
        if not self._is_closing:
            self._loop.call_soon_threadsafe(self._saved, log, save, done.result())

    def _saved(self, log: Log, save: Save, succeeded: bool) -> None:
        if not self._shards.saved(save, self._now_ms(), succeeded=succeeded) and succeeded:
            # The shard set refuses the snapshot, so the next load must not begin with it.
            with suppress(OSError):
                remove_snapshot(self.logs.file_system, log.directory)
        self._wake()

    def _write(self, log: Log, snapshot: Snapshot) -> bool:
        try:
            write_snapshot(self.logs.file_system, log.directory, snapshot)
        except (OSError, AssertionError) as error:
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
        """Stores index files at intervals, so that a recovery after a crash need not read what is durable."""
        if self._index_store.is_due(now_ms):
            self._loop.run_in_executor(None, self.logs.store_indexes)

    # --- the end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begins no work in the snapshot thread any more."""
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
