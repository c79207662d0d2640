# SPDX-License-Identifier: Apache-2.0
"""The partition folders of a coordinator's topic. A shard's log is opened when it is loaded, or when its first batch is
written.

Each log has a lock, by which the thread that writes, the cleaner and whoever closes the log keep out of each other's
way. The event loop takes it only to close a log that nobody writes to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from kcoord.storage.errors import LogFailedError, StorageError
from kcoord.storage.log_dir import partition_folder

if TYPE_CHECKING:
    from kcoord.storage.file_system import FileSystem
    from kcoord.storage.log import AppendInfo, Log

_logger = logging.getLogger(__name__)


class ShardLogs:
    """`open_log` opens or begins the log of a partition of `topic`, `log_exists` says whether it has a folder,
    `delete_logs` takes the folders of partitions of a topic id out of use, `hand_over_logs` leaves closed logs to other
    brokers, `note_gained` is told of those that others led, and `note_closed` of the folders of durable closed logs.
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
        """Shards whose logs were closed without being durable."""
        self._writable: dict[int, LazyLog] = {}
        self._locks: dict[int, Lock] = {}
        self._is_ending = False

    def lock(self, shard_id: int) -> Lock:
        """Held by whoever changes the log of a shard."""
        return self._locks.setdefault(shard_id, Lock())

    def exists(self, shard_id: int) -> bool:
        return self._log_exists(shard_id)

    def open(self, shard_id: int) -> Log:
        """The open log; OSError or StorageError where it cannot be had."""
        log = self._logs.get(shard_id)
        if log is None:
            log = self._logs[shard_id] = self._open_log(shard_id)
            self._failed.discard(shard_id)
        return log

    def opened(self, shard_id: int) -> Log | None:
        """The log if it is open."""
        return self._logs.get(shard_id)

    def writable(self, shard_id: int) -> LazyLog:
        """The log for the writer thread, which opens it if need be: that is disk work, too."""
        lazy = self._writable.get(shard_id)
        if lazy is None:
            lazy = self._writable[shard_id] = LazyLog(self, shard_id, partition_folder(self._topic, shard_id))
        return lazy

    def flush(self, shard_id: int) -> None:
        """Makes durable what was appended, under the lock of the shard; an exception where it cannot be."""
        log = self._logs.get(shard_id)
        if log is not None:
            log.flush()
        elif shard_id in self._failed:
            raise LogFailedError(f"{partition_folder(self._topic, shard_id)} failed and was not opened again")

    def close(self, shard_id: int) -> None:
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
        """The topic is deleted; nothing of these shards may be under way."""
        for shard_id in shard_ids:
            self.close(shard_id)
        self._delete_logs(shard_ids, topic_id)

    def hand_over(self, shard_ids: list[int]) -> None:
        """Other brokers lead these shards from now on; nothing of them may be under way."""
        for shard_id in shard_ids:
            self.close(shard_id)
        self._hand_over_logs(shard_ids)

    def store_indexes(self) -> None:
        """In a thread of its own, for each log in turn: see `Log.store_indexes`."""
        for shard_id, log in self.open_logs().items():
            try:
                with self.lock(shard_id):
                    if self._is_ending:
                        return
                    log.store_indexes()
            except (OSError, StorageError) as error:
                _logger.warning("The indexes of %s cannot be written: %s", log.directory, error)

    def end_index_store(self) -> None:
        """Returns when `store_indexes` touches no log any more: they are closed next."""
        self._is_ending = True
        for shard_id in self.open_logs():
            with self.lock(shard_id):
                continue

    def open_logs(self) -> dict[int, Log]:
        return dict(self._logs)


class LazyLog:
    """A log that is opened by its first use, and again after it was closed. `folder` is the name of its folder."""

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
