# SPDX-License-Identifier: Apache-2.0
"""The data folder of a process, from its lock to the clean-shutdown marker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from kcoord.config import BrokerConfig
from kcoord.metadata.image import MetadataImage
from kcoord.server.disk.shard_logs import ShardLogs
from kcoord.server.environment import RandomUuids, thread_pool
from kcoord.server.errors import StartError
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import FileSystem, RealFileSystem
from kcoord.storage.journal import Journal
from kcoord.storage.log import Log
from kcoord.storage.log_dir import Identity, LogDir
from kcoord.storage.rolled import LaterSyncs
from kcoord.storage.segment import LogConfig
from kcoord.topics.store import TopicStore
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC
from kcoord_protocol.uuid import uuid_to_string

if TYPE_CHECKING:
    # The threads of the topic store start when they are first needed.
    from concurrent.futures import Executor

    from kcoord.server.disk.log_cleaner import CleanableLog, LogCleaner

_logger = logging.getLogger(__name__)

T = TypeVar("T")

FLUSH_POLICY_FSYNC = "fsync"


def candidate_identity(config: BrokerConfig, uuids: RandomUuids) -> Identity:
    """Returns the identity for a new folder: a random cluster id, the node id, and a random directory id."""
    return Identity(uuid_to_string(uuids.take()), config.node_id, uuid_to_string(uuids.take()))


class DataFolder:
    """The data folder of one process, with its logs.

    A start takes these steps, and `close` ends with the last:

    1. The folder is locked, and a missing meta.properties is written. If the last process did not end cleanly, the
       ends of logs are restored from its journal (`kcoord.storage.journal`).
    2. With `kcoord.log.flush.policy=fsync`, an empty journal is begun.
    3. The process that `owns_metadata` opens the metadata log.
    4. The topic store reads the partition folders. Their logs are opened at their first use.
    5. `close` closes all logs. If all logs of the folder are known to be whole, it removes the journal and writes the
       clean-shutdown marker. Without the marker the next start checks the ends of all logs.

    `file_system`: the real file system by default. `log_dir`: how to open the folder; a worker passes its own view of
    the folder that all workers share. `settles_folder`: this process opens the folder first. Only the first data folder
    of `log.dirs` is used. Raises StartError if the folder cannot be used.
    """

    def __init__(
        self,
        config: BrokerConfig,
        now_ms: int,
        file_system: FileSystem | None = None,
        *,
        log_dir: Callable[[], LogDir] | None = None,
        owns_metadata: bool = True,
        settles_folder: bool = True,
        uuids: RandomUuids | None = None,
    ) -> None:
        folder = config.data_folders[0]
        if len(config.data_folders) > 1:
            _logger.warning("log.dirs names %d folders, only the first is used: %s", len(config.data_folders), folder)
        self._folder = folder
        self._fs = file_system if file_system is not None else RealFileSystem()
        candidate = candidate_identity(config, uuids or RandomUuids())
        self.log_dir: LogDir = self._open(log_dir or (lambda: LogDir.open(self._fs, folder, candidate)))
        self.log_dir.writing = threading.Lock()
        self.log_dir.later_syncs = LaterSyncs(self._sync_in_background, threading.Lock)
        self._fs = self.log_dir.file_system
        if self.log_dir.restored_bytes:
            _logger.warning(
                "The machine had stopped before logs in %s were synced: %d bytes came back from the journal",
                folder,
                self.log_dir.restored_bytes,
            )
        self.coordinator_logs: dict[str, ShardLogs] = {}
        """The logs of the coordinators' topics, by topic."""
        self._metadata_logs: ShardLogs | None = None
        self._threads: dict[str, Executor] = {}
        self.journal: Journal | None = None
        """The write-ahead journal of the coordinator and metadata logs, if the flush policy is fsync."""
        try:
            if config.kcoord_log_flush_policy == FLUSH_POLICY_FSYNC:
                self.journal = self._open(lambda: self.log_dir.begin_journal(threading.Lock()))
            if owns_metadata:
                metadata_logs = self._metadata_logs = self._new_metadata_logs(config, now_ms)
                self._open(lambda: metadata_logs.open(0))
            self.topics = self._open(
                lambda: TopicStore(
                    self._fs,
                    self.log_dir,
                    config,
                    internal_log=self.internal_log,
                    settles_folder=settles_folder,
                    in_background=self._in_background,
                    new_lock=threading.Lock,
                )
            )
        except BaseException:
            self.log_dir.close()
            raise

    def _in_background(self, work: Callable[[], None], done: Callable[[], None] | None) -> None:
        """Runs work of the topic store in a thread, and `done` in the event loop.

        There is one such thread, so that the event loop competes with one thread only.
        """
        self._in_thread("kcoord-topics", work, done)

    def _sync_in_background(self, work: Callable[[], None], done: Callable[[], None] | None) -> None:
        """Does the same for work that only waits for the disk, perhaps for seconds: no opening has to wait for it."""
        self._in_thread("kcoord-log-sync", work, done)

    def _in_thread(self, name: str, work: Callable[[], None], done: Callable[[], None] | None) -> None:
        if name not in self._threads:
            self._threads[name] = thread_pool(1, name)
        future = asyncio.get_running_loop().run_in_executor(self._threads[name], work)
        if done is not None:
            future.add_done_callback(lambda _: done())

    @property
    def metadata_logs(self) -> ShardLogs:
        """The metadata topic, whose only partition is open. Only the process that owns it may ask for it."""
        assert self._metadata_logs is not None, "another worker has the metadata log"
        return self._metadata_logs

    def _new_metadata_logs(self, config: BrokerConfig, now_ms: int) -> ShardLogs:
        log_config = LogConfig(segment_bytes=config.metadata_log_segment_bytes)

        def open_log(partition: int) -> Log:
            return self._open_coordinator_log(
                CLUSTER_METADATA_TOPIC, partition, log_config, now_ms, logs.lock(partition)
            )

        logs = ShardLogs(CLUSTER_METADATA_TOPIC, open_log, lambda partition: True, self._fs)
        return logs

    @property
    def cluster_id(self) -> str:
        return self.log_dir.identity.cluster_id

    @property
    def directory_id(self) -> str:
        return self.log_dir.identity.directory_id

    def shard_logs(self, topic: str, config: LogConfig, now_ms: Callable[[], int]) -> ShardLogs:
        """Returns the logs of a coordinator's topic, and registers them for readers and for the cleaner."""
        present = {partition for name, partition in self.log_dir.partitions() if name == topic}

        def exists(shard_id: int) -> bool:
            # The folder is created with the first record. Another worker that led the shard may still write it, so a
            # shard that this worker cannot claim is not known to be empty.
            may_exist = shard_id in present or not self.log_dir.claim(topic, shard_id)
            return may_exist or self._fs.exists(self.log_dir.partition_path(topic, shard_id))

        def hand_over_logs(shard_ids: list[int]) -> None:
            self.topics.hand_over([(topic, shard_id) for shard_id in shard_ids])

        def note_gained(shard_id: int) -> None:
            self.topics.forget_internal_producers(topic, shard_id)
            self.log_dir.note_gained(topic, shard_id)

        def open_log(shard_id: int) -> Log:
            return self._open_coordinator_log(topic, shard_id, config, now_ms(), logs.lock(shard_id))

        def delete_logs(shard_ids: list[int], topic_id: bytes) -> None:
            present.difference_update(shard_ids)
            self.topics.retire_internal(topic, topic_id, shard_ids, now_ms())

        logs = self.coordinator_logs[topic] = ShardLogs(
            topic, open_log, exists, self._fs, delete_logs, hand_over_logs, note_gained, self.log_dir.note_closed
        )
        return logs

    def _open_coordinator_log(self, topic: str, shard_id: int, config: LogConfig, now_ms: int, lock: Lock) -> Log:
        """Opens a log of a coordinator, or of the metadata.

        With a journal, the writer thread begins new segments, and may wait. Without, the event loop does that.
        """

        def in_background(work: Callable[[], None], done: Callable[[], None] | None) -> None:
            def locked() -> None:
                if done is not None:
                    with lock:
                        done()

            self._sync_in_background(work, locked)

        log = self.log_dir.open_log(topic, shard_id, config, now_ms)
        log.later_syncs = None if self.journal is not None else LaterSyncs(in_background, threading.Lock)
        return log

    def cleaner(
        self, config: BrokerConfig, image: Callable[[], MetadataImage], now_ms: Callable[[], int]
    ) -> LogCleaner:
        """Returns a cleaner for all compacted logs, not yet started.

        The event loop writes to topics, so the cleaner changes their logs by `LogCleaner.in_loop`. Without a journal it
        writes to the logs of the coordinators, too.
        """
        from kcoord.server.disk import cleanable_logs
        from kcoord.server.disk.log_cleaner import LogCleaner

        def logs() -> list[CleanableLog]:
            targets = cleanable_logs.of_topics(self.topics, cleaner.in_loop)
            for topic, shard_logs in self.coordinator_logs.items():
                forget = partial(self._forget_aborted, topic)
                on_owner = cleaner.in_loop if self.journal is None else cleanable_logs.at_once
                targets += cleanable_logs.of_coordinator(topic, shard_logs, config, image(), forget, on_owner)
            return targets

        cleaner = LogCleaner(config, self.log_dir, self._fs, logs, now_ms)
        return cleaner

    def _forget_aborted(self, topic: str, shard_id: int, marker_offsets: set[int]) -> None:
        self.topics.forget_internal_producers(topic, shard_id)

    def internal_log(self, topic: str, partition: int) -> Log | None:
        """Returns the log of a coordinator's partition for readers, or None if it is not open."""
        logs = self.coordinator_logs.get(topic)
        return logs.open_logs().get(partition) if logs is not None else None

    def close(self, now_ms: int, *, clean: bool) -> None:
        """Closes all logs and the folder. `clean`: no write is in flight.

        Without a clean end the clean-shutdown marker is not written, so the next start checks all logs.
        """
        self.topics.close(now_ms)
        for thread in self._threads.values():
            thread.shutdown()
        if not clean:
            _logger.error("A write to %s did not end in time: the next start checks all logs", self._folder)
            return
        try:
            self.log_dir.close()
        except (OSError, StorageError) as error:
            _logger.error("The data folder %s could not be closed cleanly: %s", self._folder, error)

    def _open(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except StorageError as error:
            raise StartError(str(error)) from None
        except OSError as error:
            raise StartError(f"the data folder {self._folder} cannot be used: {error.strerror or error}") from None
