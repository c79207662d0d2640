# SPDX-License-Identifier: Apache-2.0
"""A data folder that several worker processes share: the supervisor's view of it, which holds the lock, and a worker's.

A worker opens the logs of the partitions that it leads, and nobody else does. What the folder's checkpoints said when
the supervisor started is known to every worker; what a worker learns goes to checkpoints of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kcoord.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    LOCK_FILE,
    LOG_START_OFFSET_FILE,
    RECOVERY_POINT_FILE,
    TopicPartition,
    read_offset_checkpoint,
)
from kcoord.storage.errors import MalformedCheckpointError
from kcoord.storage.file_cache import FileCache
from kcoord.storage.file_system import join, make_durable_dirs
from kcoord.storage.log_dir import LogDir
from kcoord.storage.recovery import Recovery
from kcoord.storage.worker_checkpoints import are_known_to_be_whole, merge_worker_checkpoints, worker_folder


@dataclass(slots=True)
class WorkerLogDir(LogDir):
    """One worker's view. `join` makes it; the shell closes it as it closes a folder of its own."""

    _inherited_points: dict[TopicPartition, int] = field(default_factory=dict)
    _inherited_starts: dict[TopicPartition, int] = field(default_factory=dict)
    _inherited_cleaned: dict[TopicPartition, int] = field(default_factory=dict)

    @classmethod
    def join(cls, shared: LogDir, number: int, *, is_restart: bool) -> WorkerLogDir:
        """The view of worker `number`. A worker that is started again trusts no log to be whole."""
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
        return worker

    def _read_own(self) -> None:
        """What an earlier process of this worker has left."""
        marker = join(self.checkpoint_path, CLEAN_SHUTDOWN_FILE)
        if self.file_system.exists(marker):
            self.file_system.remove(marker)
        for name, offsets in (
            (RECOVERY_POINT_FILE, self._recovery_points),
            (LOG_START_OFFSET_FILE, self._start_offsets),
            (CLEANER_OFFSET_FILE, self._cleaned_offsets),
        ):
            try:
                offsets.update(read_offset_checkpoint(self.file_system, join(self.checkpoint_path, name)))
            except MalformedCheckpointError:
                # Without it the logs are scanned from where the folder's own checkpoints say.
                self.had_clean_shutdown = False

    def recovery_of(self, topic: str, partition: int) -> Recovery:
        key = (topic, partition)
        if key not in self._recovery_points and key in self._inherited_points:
            self._recovery_points[key] = self._inherited_points[key]
        if key not in self._start_offsets and key in self._inherited_starts:
            self._start_offsets[key] = self._inherited_starts[key]
        return super(WorkerLogDir, self).recovery_of(topic, partition)

    def cleaned_offset(self, topic: str, partition: int) -> int:
        key = (topic, partition)
        return self._cleaned_offsets.get(key, self._inherited_cleaned.get(key, 0))

    def lower_recovery_point(self, topic: str, partition: int, offset: int) -> None:
        self.recovery_of(topic, partition)
        super(WorkerLogDir, self).lower_recovery_point(topic, partition, offset)

    def _forget_offsets(self, partitions: list[TopicPartition]) -> None:
        """Zero tells whoever merges the checkpoints that the folder's own entries are out of date."""
        for key in partitions:
            self._recovery_points[key] = self._start_offsets[key] = self._cleaned_offsets[key] = 0
            self._opened.pop(key, None)
        if partitions:
            self._write_checkpoints()

    def _moved_starts(self) -> dict[TopicPartition, int]:
        return self._start_offsets

    def _are_all_verified(self) -> bool:
        """The supervisor decides about the folder; a worker answers for what it has opened."""
        return self.had_clean_shutdown or self._recovery_points.keys() <= self._opened.keys()


@dataclass(slots=True)
class SharedLogDir(LogDir):
    """The supervisor's view: it holds the lock of the folder and opens no log."""

    def close_after_workers(self, count: int, *, had_crash: bool) -> bool:
        """When all workers have ended: merges what they know and gives the folder back; True where the next start may
        trust it.
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
