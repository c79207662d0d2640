# SPDX-License-Identifier: Apache-2.0
"""A data folder that several worker processes share: the views of the supervisor and of the workers.

Theory of operation
-------------------
The supervisor holds the lock of the folder and opens no log. A worker opens the logs of the partitions that it leads.
Before that, it locks the partition, so that no other worker has the log open. The end of the process releases the
locks, too.

Every worker starts with the folder's checkpoints as the supervisor read them (*inherited* entries). It writes its own
entries to its own files (`worker_checkpoints`). The folder's checkpoints have no topic ids and do not change while
workers run. So a worker that deletes a partition or hands it over leaves an entry of 0: whatever the folder's
checkpoints say about that name is out of date.

When a partition gets another leader, the old one closes the log, writes its entries to the partition's folder
(`handover`), and releases the lock. The new leader opens the log with these entries. If the old leader dies first, its
lock is released without a handover. The new leader then trusts only what is on disk: it takes the highest start offset
and recovery point of all checkpoints, and scans the log from there. A worker that restarts hands nothing over: its
entries may be older than those of the leaders after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from kcoord.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    LOCK_FILE,
    LOG_START_OFFSET_FILE,
    RECOVERY_POINT_FILE,
    TopicPartition,
    read_worker_checkpoint,
    write_worker_checkpoint,
)
from kcoord.storage.errors import DirectoryLockedError, MalformedCheckpointError, PartitionHeldError
from kcoord.storage.file_cache import FileCache
from kcoord.storage.file_system import Lock, join, make_durable_dirs
from kcoord.storage.handover import Handover
from kcoord.storage.journal import JOURNAL_FILE, make_named_logs_durable
from kcoord.storage.log import Log
from kcoord.storage.log_dir import DELETE_SUFFIX, LogDir
from kcoord.storage.recovery import Check, Recovery, go_on
from kcoord.storage.segment import LogConfig
from kcoord.storage.worker_checkpoints import (
    are_known_to_be_whole,
    current_offset,
    folder_id,
    is_of,
    merge_worker_checkpoints,
    partition_locks,
    read_merged_entry,
    worker_folder,
)

_LOCK_POSITION_BYTES = 7
"""Every partition has one byte of the lock file, at a hash of its name: one of 2**56 positions."""


@dataclass(slots=True)
class WorkerLogDir(LogDir):
    """The view of one worker. `join` makes it. It is closed like a folder that one process owns."""

    _inherited_points: dict[TopicPartition, int] = field(default_factory=dict)
    _inherited_starts: dict[TopicPartition, int] = field(default_factory=dict)
    _inherited_cleaned: dict[TopicPartition, int] = field(default_factory=dict)
    _topic_ids: dict[TopicPartition, str] = field(default_factory=dict)
    """The topics that the entries of this worker are about. Coordinators' logs have none."""
    _locks: dict[TopicPartition, Lock] = field(default_factory=dict)
    _gained: set[TopicPartition] = field(default_factory=set)
    _handed_over: set[TopicPartition] = field(default_factory=set)
    """The files have entries of 0 for them, so that nobody uses the folder's own entries, which are older."""

    @classmethod
    def join(cls, shared: LogDir, number: int, *, is_restart: bool) -> WorkerLogDir:
        """Returns the view of worker `number`. A worker that was restarted opens every log with a scan."""
        file_system, path = shared.file_system, worker_folder(shared.path, number)
        make_durable_dirs(file_system, path)
        worker = cls(
            file_system,
            shared.path,
            shared.identity,
            shared.had_clean_shutdown and not is_restart,
            FileCache(file_system),
            file_system.lock(join(path, LOCK_FILE)),
            checkpoint_path=path,
        )
        worker._inherited_points = dict(shared._recovery_points)
        worker._inherited_starts = dict(shared._start_offsets)
        worker._inherited_cleaned = dict(shared._cleaned_offsets)
        worker._read_own()
        make_named_logs_durable(file_system, shared.path, join(path, JOURNAL_FILE))
        return worker

    def _read_own(self) -> None:
        """Reads the checkpoints of an earlier process of this worker."""
        marker = join(self.checkpoint_path, CLEAN_SHUTDOWN_FILE)
        if self.file_system.exists(marker):
            self.file_system.remove(marker)
        for name, offsets in (
            (RECOVERY_POINT_FILE, self._recovery_points),
            (LOG_START_OFFSET_FILE, self._start_offsets),
            (CLEANER_OFFSET_FILE, self._cleaned_offsets),
        ):
            try:
                entries = read_worker_checkpoint(self.file_system, join(self.checkpoint_path, name))
            except MalformedCheckpointError:
                # Without the file the logs are scanned from the recovery points of the folder's own checkpoints.
                self.had_clean_shutdown = False
                continue
            for key, (offset, topic_id) in entries.items():
                offsets[key] = current_offset(self.file_system, self.path, key, offset, topic_id)
                # The files are not written at the same time. An entry of 0 may have the id of an older topic.
                if offsets[key]:
                    self._topic_ids[key] = topic_id

    # -- logs that move between workers --------------------------------------------------------------------------------

    def open_log(self, topic: str, partition: int, config: LogConfig, now_ms: int, check: Check = go_on) -> Log:
        """Opens a log, as in any folder. Raises PartitionHeldError while another worker has it open."""
        key = (topic, partition)
        if not self._lock_partition(key):
            raise PartitionHeldError(f"another worker still has the log of {topic}-{partition} open")
        self._identify(key)
        return super(WorkerLogDir, self).open_log(topic, partition, config, now_ms, check)

    def _keep_entries(self, key: TopicPartition, log: Log, handover: Handover | None) -> None:
        super(WorkerLogDir, self)._keep_entries(key, log, handover)
        former_start = self._start_offsets.get(key, 0)
        if key in self._gained and log.start_offset > former_start:
            self._note(key, log)
            try:
                self.write_checkpoints()
            except OSError:
                self._start_offsets[key] = former_start
                raise
        self._gained.discard(key)

    def claim(self, topic: str, partition: int) -> bool:
        return self._lock_partition((topic, partition))

    def note_gained(self, topic: str, partition: int) -> None:
        self._gained.add((topic, partition))

    def note_created(self, topic: str, partition: int) -> None:
        key = (topic, partition)
        if key in self._inherited_points or key in self._inherited_starts:
            self._gained.add(key)

    def hand_over(self, partitions: Iterable[TopicPartition]) -> None:
        """Hands over the logs that no other worker has locked. A worker that has one needs no handover."""
        own = [key for key in partitions if self._lock_partition(key)]
        for key in own:
            self._identify(key)
        if own:
            super(WorkerLogDir, self).hand_over(own)
        self._unlock(own)

    def _identify(self, key: TopicPartition) -> None:
        """Notes the topic that the folder of a partition belongs to. The entries of another topic are forgotten."""
        topic_id = folder_id(self.file_system, self.path, key)
        if topic_id and self._topic_ids.get(key, "") not in ("", topic_id):
            self._forget_offsets([key])
        self._topic_ids[key] = topic_id

    def forget(self, topic: str, partition: int) -> None:
        key = (topic, partition)
        entries = (self._inherited_points, self._inherited_starts, self._recovery_points, self._start_offsets)
        if any(key in offsets for offsets in entries):
            self._forget_offsets([key])

    def delete_partitions(self, partitions: Iterable[tuple[str, int, str]], suffix: str = DELETE_SUFFIX) -> list[str]:
        """Retires folders, as in any folder, but not those that other workers use for new topics of the same names.

        This worker may learn of a deletion long after other workers did. `partitions` has the ids of the topics.
        """
        deleted = list(partitions)
        try:
            # A folder without an id belongs to the topic that had its name before.
            own = [
                (topic, partition, topic_id)
                for topic, partition, topic_id in deleted
                if self._lock_partition((topic, partition))
                and is_of(self.file_system, self.path, (topic, partition), topic_id)
            ]
            if len(own) < len(deleted):
                self._forget_deleted([(topic, partition) for topic, partition, _ in deleted])
            return super(WorkerLogDir, self).delete_partitions(own, suffix)
        finally:
            # After a failure, too: new topics of these names set folders that are left aside.
            self._unlock((topic, partition) for topic, partition, _ in deleted)

    def _lock_partition(self, key: TopicPartition) -> bool:
        if key in self._locks:
            return True
        digest = blake2b(f"{key[0]}-{key[1]}".encode(), digest_size=_LOCK_POSITION_BYTES).digest()
        try:
            self._locks[key] = self.file_system.lock_byte(partition_locks(self.path), int.from_bytes(digest, "big"))
        except DirectoryLockedError:
            return False
        return True

    def _unlock(self, partitions: Iterable[TopicPartition]) -> None:
        for key in partitions:
            lock = self._locks.pop(key, None)
            if lock is not None:
                lock.release()

    def _drop(self, key: TopicPartition) -> None:
        super(WorkerLogDir, self)._drop(key)
        for offsets in (self._inherited_points, self._inherited_starts, self._inherited_cleaned):
            offsets.pop(key, None)
        self._topic_ids.pop(key, None)
        self._handed_over.add(key)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def recovery_of(self, topic: str, partition: int) -> Recovery:
        key = (topic, partition)
        if key in self._gained:
            # What this worker inherited may be of a topic that was deleted since. The other workers' entries tell.
            recovery = super(WorkerLogDir, self).recovery_of(topic, partition)
            recovery.clean = False
            start_offset, recovery_point = (
                read_merged_entry(self.file_system, self.path, name, key)
                for name in (LOG_START_OFFSET_FILE, RECOVERY_POINT_FILE)
            )
            recovery.start_offset = max(recovery.start_offset, start_offset)
            recovery.recovery_point = max(recovery.recovery_point, recovery_point)
            return recovery
        if key not in self._recovery_points and key in self._inherited_points:
            self._recovery_points[key] = self._inherited_points[key]
        if key not in self._start_offsets and key in self._inherited_starts:
            self._start_offsets[key] = self._inherited_starts[key]
        return super(WorkerLogDir, self).recovery_of(topic, partition)

    def cleaned_offset(self, topic: str, partition: int) -> int:
        key = (topic, partition)
        return self._cleaned_offsets.get(key, self._inherited_cleaned.get(key, 0))

    def _forget_offsets(self, partitions: list[TopicPartition]) -> None:
        """Sets the entries to 0, which tells a merge that the folder's own entries are out of date."""
        for key in partitions:
            self._recovery_points[key] = self._start_offsets[key] = self._cleaned_offsets[key] = 0
            self._opened.pop(key, None)
            self._topic_ids.pop(key, None)
        if partitions:
            self.write_checkpoints()

    def _write(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        entries = {**dict.fromkeys(self._handed_over.copy(), 0), **offsets}
        write_worker_checkpoint(self.file_system, self._checkpoint(name), entries, dict(self._topic_ids))

    def close(self, *, broker_epoch: int = -1) -> bool:
        try:
            return super(WorkerLogDir, self).close(broker_epoch=broker_epoch)
        finally:
            self._unlock(list(self._locks))

    def _moved_starts(self) -> dict[TopicPartition, int]:
        return self._start_offsets

    def _are_all_verified(self) -> bool:
        """True if this worker has checked all logs with entries in its files. The supervisor decides for the folder."""
        return self.had_clean_shutdown or self._recovery_points.keys() <= self._opened.keys()


@dataclass(slots=True)
class SharedLogDir(LogDir):
    """The view of the supervisor, which holds the lock of the folder and opens no log."""

    def close_after_workers(self, count: int, *, had_crash: bool) -> bool:
        """Merges the checkpoints after all workers have ended, and releases the folder.

        Returns True if the next start need not scan the logs.
        """
        try:
            needed = self.partitions() if had_crash or not self.had_clean_shutdown else []
            is_clean = are_known_to_be_whole(self.file_system, self.path, count, needed)
            merge_worker_checkpoints(self.file_system, self.path)
            if is_clean:
                self._write_marker(-1)
            return is_clean
        finally:
            self._lock.release()
