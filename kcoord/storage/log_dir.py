# SPDX-License-Identifier: Apache-2.0
"""A data folder in Kafka's layout: lock, meta.properties, partition folders, checkpoints, clean-shutdown marker.

Theory of operation
-------------------
One process at a time owns a folder; it holds the lock. (Workers share a folder as `worker_log_dir` describes.) A log is
opened when it is needed. The checkpoints have, for every partition, what the opening needs:

* the recovery point: everything below it was durable when the checkpoint was written;
* the log start offset: everything below it is deleted, even if the files still exist;
* the cleaner offset: the log is clean up to there.

Checkpoints are written atomically, start offsets before recovery points. They may be old, but never claim too much: an
old recovery point only means that more is scanned.

The clean-shutdown marker is written last, and only if every log of the folder is durable and was checked. A start
removes it, durably, before it opens a log. So the marker exists only if no log was written since. With the marker, logs
are opened without a scan; without it, every log is scanned from its recovery point. A start also restores the journal
of the last run (`journal`) before it opens a log.

A folder that is made again under an old name must not inherit the checkpoint entries of the old partition, so they are
removed first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Self

from kcoord.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    LOCK_FILE,
    LOG_START_OFFSET_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    TopicPartition,
    read_leader_epochs,
    read_offset_checkpoint,
    read_properties,
    topic_id_in,
    write_leader_epochs,
    write_offset_checkpoint,
    write_properties,
    write_topic_id,
)
from kcoord.storage.errors import MalformedCheckpointError, MetaPropertiesError
from kcoord.storage.file_cache import FileCache
from kcoord.storage.file_system import FileSystem, Lock, join, make_durable_dirs, write_file_atomically
from kcoord.storage.handover import Handover, has_handover, read_handover, remove_handover, write_handover
from kcoord.storage.journal import JOURNAL_FILE, Journal, restore
from kcoord.storage.log import Log
from kcoord.storage.recovery import Check, Recovery, go_on
from kcoord.storage.rolled import LaterSyncs
from kcoord.storage.segment import LogConfig
from kcoord.storage.worker_checkpoints import merge_worker_checkpoints

META_PROPERTIES_FILE = "meta.properties"
HIGH_WATERMARK_FILE = "replication-offset-checkpoint"
LEADER_EPOCH_FILE = "leader-epoch-checkpoint"
DELETE_SUFFIX = "-delete"
STRAY_SUFFIX = "-stray"
_META_VERSION = "1"
_LONGEST_NAME = 255
_DELETED_FOLDER = re.compile(r".*-[0-9]+\.[0-9a-f]{32}-delete")


@dataclass(slots=True)
class Identity:
    """The owner of the data: the content of meta.properties."""

    cluster_id: str
    node_id: int
    directory_id: str


def partition_folder(topic: str, partition: int) -> str:
    """Returns the name of a partition's folder."""
    return f"{topic}-{partition}"


def retired_folder(topic: str, partition: int, unique: str, suffix: str) -> str:
    """Returns the name of a folder that is no longer used. A long topic name is cut to keep the name valid."""
    tail = f"-{partition}.{unique}{suffix}"
    return topic[: _LONGEST_NAME - len(tail)] + tail


def parse_partition_folder(name: str) -> TopicPartition | None:
    """Returns the topic and partition of a folder's name, or None for other files and for retired folders."""
    topic, separator, number = name.rpartition("-")
    if not separator or not topic or not number.isascii() or not number.isdigit() or str(int(number)) != number:
        return None
    return topic, int(number)


@dataclass(slots=True)
class LogDir:
    """A data folder that this process owns. `LogDir.open` locks it, `close` releases it."""

    file_system: FileSystem
    path: str
    identity: Identity
    had_clean_shutdown: bool
    files: FileCache
    _lock: Lock
    checkpoint_path: str = ""
    """The folder of the checkpoints and the marker, if it is not the data folder itself."""
    writing: AbstractContextManager[object] = field(default_factory=nullcontext)
    """A lock for writing checkpoints. The offsets are read under the lock, so an older state is never written later."""
    later_syncs: LaterSyncs | None = None
    """How the logs sync closed segments without the thread that writes to them."""
    restored_bytes: int = 0
    """The number of bytes that journals restored in the logs when the folder was opened."""
    _is_closed: bool = False
    _journal: Journal | None = None
    _recovery_points: dict[TopicPartition, int] = field(default_factory=dict)
    _start_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    _cleaned_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    _opened: dict[TopicPartition, Log] = field(default_factory=dict)
    _is_behind: bool = False
    """True if the last write of checkpoints failed, so that the files may have entries that were forgotten."""

    @classmethod
    def open(cls, file_system: FileSystem, path: str, candidate: Identity, *, cluster_id: str | None = None) -> Self:
        """Locks the folder, creates it if it does not exist, and reads its checkpoints.

        `candidate` is the identity for a new folder. In an existing folder the node id must be that of the candidate,
        and the cluster id must be `cluster_id`, if it is given.
        """
        make_durable_dirs(file_system, path)
        lock = file_system.lock(join(path, LOCK_FILE))
        try:
            identity = _read_identity(file_system, path, candidate, cluster_id)
            restored_bytes = restore(file_system, path, join(path, JOURNAL_FILE))
            restored_bytes += merge_worker_checkpoints(file_system, path)
            marker = join(path, CLEAN_SHUTDOWN_FILE)
            has_marker = file_system.exists(marker)
            log_dir = cls(
                file_system, path, identity, True, FileCache(file_system), lock, restored_bytes=restored_bytes
            )
            present = log_dir.partitions()
            log_dir.had_clean_shutdown = has_marker or not present
            log_dir._read_checkpoints(present)
            if has_marker:
                # Before anything is written: a start after a crash must not find the marker.
                file_system.remove(marker)
                file_system.sync_dir(path)
            log_dir.remove_deleted()
        except BaseException:
            lock.release()
            raise
        return log_dir

    def _read_checkpoints(self, present: list[TopicPartition]) -> None:
        self._start_offsets = read_offset_checkpoint(self.file_system, join(self.path, LOG_START_OFFSET_FILE))
        try:
            self._recovery_points = read_offset_checkpoint(self.file_system, join(self.path, RECOVERY_POINT_FILE))
        except MalformedCheckpointError:
            # Without it every log is scanned from its start: slower, and just as safe.
            self._recovery_points = {}
            self.had_clean_shutdown = False
        with suppress(MalformedCheckpointError):
            # Without it the next passes of the cleaner begin at the start of each log.
            self._cleaned_offsets = read_offset_checkpoint(self.file_system, join(self.path, CLEANER_OFFSET_FILE))
        with_entries = self._recovery_points.keys() | self._start_offsets.keys() | self._cleaned_offsets.keys()
        self._forget_offsets(sorted(with_entries.difference(present)))

    def begin_journal(self, lock: AbstractContextManager[object] | None = None) -> Journal:
        """Begins the journal of this process. `close` removes it, unless a log may still need it."""
        self._journal = Journal(self.file_system, self._checkpoint(JOURNAL_FILE), lock)
        return self._journal

    def note_closed(self, folder: str) -> None:
        """Voids the journal's extents of a log that is durable and closed, before another owner uses the folder."""
        if self._journal is not None:
            self._journal.forget(folder)

    # -- partitions ----------------------------------------------------------------------------------------------------

    def partitions(self) -> list[TopicPartition]:
        """Returns every partition that has a folder, sorted."""
        names = self.file_system.list_dir(self.path)
        return sorted(partition for name in names if (partition := parse_partition_folder(name)))

    def partition_path(self, topic: str, partition: int) -> str:
        """Returns the path of a partition's folder."""
        return join(self.path, partition_folder(topic, partition))

    def open_log(self, topic: str, partition: int, config: LogConfig, now_ms: int, check: Check = go_on) -> Log:
        """Opens or creates the log of a partition, with its entries in the checkpoints.

        `check` may end the opening by an error (`kcoord.storage.recovery`).
        """
        key = (topic, partition)
        path = self.partition_path(topic, partition)
        if not self.file_system.exists(path):
            self._forget_offsets([key])
        handover = self._take_over(key, path)
        earlier = self._opened.get(key)
        assert earlier is None or earlier.is_closed, f"S-11: {path} is opened for writing twice"
        recovery = self.recovery_of(topic, partition)
        if recovery.rewrite and self._journal is not None:
            self._journal.restore(self.path, partition_folder(topic, partition))
        recovery.check = check
        if handover is not None:
            recovery.clean = handover.is_clean
            # A failed sync of the previous leader may have dropped bytes, which only that leader could know.
            recovery.rewrite = not handover.is_clean
        log = Log.open(self.file_system, path, config, now_ms, recovery=recovery, files=self.files)
        log.later_syncs = self.later_syncs
        self._opened[key] = log
        try:
            self._keep_entries(key, log, handover)
        except BaseException:
            # The disk may be full. The next use opens the log again, and a log is open only once.
            log.abandon()
            raise
        return log

    def _keep_entries(self, key: TopicPartition, log: Log, handover: Handover | None) -> None:
        """Makes the entries of a log durable that another worker led before."""
        if handover is not None:
            self._note(key, log)
            self.write_checkpoints()
            remove_handover(self.file_system, self.partition_path(*key))

    def _take_over(self, key: TopicPartition, path: str) -> Handover | None:
        """Returns the handover of the previous leader, if there is one. It replaces the entries of this worker."""
        handover = read_handover(self.file_system, path)
        if handover is not None:
            self._opened.pop(key, None)
            self._recovery_points[key] = handover.recovery_point
            self._start_offsets[key] = handover.start_offset
            self._cleaned_offsets[key] = handover.cleaned_offset
        return handover

    def forget(self, topic: str, partition: int) -> None:
        """Removes the checkpoint entries of a new partition, which belong to an older partition of that name."""
        self._forget_offsets([(topic, partition)])

    def claim(self, topic: str, partition: int) -> bool:
        """Returns whether this process may create the log. Until it hands the partition over, no other process may."""
        return True

    def note_gained(self, topic: str, partition: int) -> None:
        """Called when a partition moves here from another broker. The entries of this worker may be old."""

    def note_created(self, topic: str, partition: int) -> None:
        """Called if the topic was created after the start of this process. Inherited entries are of an older topic."""

    def hand_over(self, partitions: Iterable[TopicPartition]) -> None:
        """Writes the handover files of logs that other brokers lead now. The logs are closed or were never opened."""
        for key in partitions:
            self._leave_handover(key)
            self._drop(key)
        self.write_checkpoints()

    def _leave_handover(self, key: TopicPartition) -> None:
        folder = self.partition_path(*key)
        log = self._opened.get(key)
        if not self.file_system.exists(folder) or (log is None and has_handover(self.file_system, folder)):
            return
        recovery = self.recovery_of(*key)
        is_clean = recovery.clean
        if log is not None:
            is_clean = log.failure is None and log.flushed_offset == log.end_offset
        handover = Handover(recovery.recovery_point, recovery.start_offset, self.cleaned_offset(*key), is_clean)
        write_handover(self.file_system, folder, handover)

    def _drop(self, key: TopicPartition) -> None:
        for offsets in (self._recovery_points, self._start_offsets, self._cleaned_offsets):
            offsets.pop(key, None)
        self._opened.pop(key, None)

    def recovery_of(self, topic: str, partition: int) -> Recovery:
        """Returns what is known about a log before it is opened: from its use in this process, or the checkpoints."""
        key = (topic, partition)
        earlier = self._opened.get(key)
        if earlier is not None:
            return earlier.reopening()
        return Recovery(
            recovery_point=self._recovery_points.get(key, 0),
            clean=self.had_clean_shutdown and key in self._recovery_points,
            start_offset=self._start_offsets.get(key, 0),
        )

    def delete_partitions(self, partitions: Iterable[tuple[str, int, str]], suffix: str = DELETE_SUFFIX) -> list[str]:
        """Retires the folders of partitions durably. `partitions` has (topic, partition, unique hexadecimal text).

        As in Kafka, the folder gets the name `<topic>-<partition>.<unique>-delete`, so that its old name is free at
        once. With STRAY_SUFFIX the operator keeps it. The caller closes the logs before, and passes the returned
        folders to `remove_folder`. A full disk does not keep the folders.
        """
        deleted = list(partitions)
        self._forget_deleted([(topic, partition) for topic, partition, _ in deleted])
        folders = []
        for topic, partition, unique in deleted:
            source = self.partition_path(topic, partition)
            if self.file_system.exists(source):
                folders.append(join(self.path, retired_folder(topic, partition, unique, suffix)))
                self.file_system.rename(source, folders[-1])
        self.file_system.sync_dir(self.path)
        return folders

    def remove_folder(self, folder: str) -> None:
        """Removes a folder that `delete_partitions` returned."""
        for name in self.file_system.list_dir(folder):
            self.file_system.remove(join(folder, name))
        self.file_system.remove_dir(folder)

    def remove_deleted(self) -> None:
        """Removes the folders of partitions that an earlier run deleted."""
        for name in self.file_system.list_dir(self.path):
            if _DELETED_FOLDER.fullmatch(name):
                self.remove_folder(join(self.path, name))

    def topic_id(self, topic: str, partition: int) -> bytes | None:
        """Returns the topic id in the partition's folder, or None if partition.metadata is missing or malformed."""
        return topic_id_in(self.file_system, self.partition_path(topic, partition))

    def write_topic_id(self, topic: str, partition: int, topic_id: bytes) -> None:
        """Writes the topic id to the partition's folder."""
        write_topic_id(self.file_system, join(self.partition_path(topic, partition), PARTITION_METADATA_FILE), topic_id)

    def leader_epochs(self, topic: str, partition: int) -> list[tuple[int, int]]:
        """Returns the leader epochs of a partition with their start offsets, ascending."""
        return read_leader_epochs(self.file_system, join(self.partition_path(topic, partition), LEADER_EPOCH_FILE))

    def write_leader_epochs(self, topic: str, partition: int, epochs: list[tuple[int, int]]) -> None:
        """Replaces the leader epochs of a partition."""
        write_leader_epochs(self.file_system, join(self.partition_path(topic, partition), LEADER_EPOCH_FILE), epochs)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def checkpoint(self, logs: Mapping[TopicPartition, Log] | None = None) -> None:
        """Makes the given logs durable (all open ones by default), and writes their entries to the checkpoints.

        This changes the logs, so it runs in the thread that appends, or while no thread appends.
        """
        for key, log in sorted((self._opened if logs is None else logs).items()):
            if log.failure is None and not log.is_closed:
                log.checkpoint()
            self._note(key, log)
        self.write_checkpoints()

    def _note(self, key: TopicPartition, log: Log) -> None:
        # The flushed offset of a failed log is still right: what could not be synced is above it. Its index files can
        # only lack entries.
        self._recovery_points[key] = log.flushed_offset
        self._start_offsets[key] = log.start_offset

    def note_durable(self) -> None:
        """Notes the entries of all open logs for `write_checkpoints`, without a flush: only what is durable already."""
        # Other threads may open logs meanwhile.
        for key, log in list(self._opened.items()):
            if log.failure is None:
                self._note(key, log)

    def note_starts(self) -> None:
        """Notes the start offsets of all open logs for `write_starts`: deleted batches stay deleted after a crash."""
        for key, log in list(self._opened.items()):
            self._start_offsets[key] = log.start_offset

    def cleaned_offset(self, topic: str, partition: int) -> int:
        """Returns the offset up to which the log is clean."""
        return self._cleaned_offsets.get((topic, partition), 0)

    def note_cleaned(self, topic: str, partition: int, offset: int) -> None:
        """Writes and notes the offset up to which a log is clean. Only the cleaner's thread calls it.

        An offset that could not be written is not noted.
        """
        self._write(CLEANER_OFFSET_FILE, {**self._cleaned_offsets, (topic, partition): offset})
        self._cleaned_offsets[topic, partition] = offset

    def _forget_offsets(self, partitions: list[TopicPartition]) -> None:
        """Removes the entries of partitions, so that new folders under these names do not inherit them."""
        with_entries = [key for key in partitions if key in self._recovery_points or key in self._start_offsets]
        for key in with_entries:
            self._recovery_points.pop(key, None)
            self._start_offsets.pop(key, None)
        for key in partitions:
            self._cleaned_offsets.pop(key, None)
            self._opened.pop(key, None)
        if with_entries or self._is_behind:
            self.write_checkpoints()

    def _forget_deleted(self, partitions: list[TopicPartition]) -> None:
        """Forgets the entries of deleted partitions. If that cannot be written, `forget` writes it.

        A new partition of that name calls `forget` before it has a folder, and a start drops entries without a folder.
        """
        with suppress(OSError):
            self._forget_offsets(partitions)

    def write_checkpoints(self) -> None:
        """Writes the noted recovery points and start offsets. Any thread may call it if `writing` is a lock."""
        with self.writing:
            if not self._is_closed:
                self._is_behind = True
                # Start offsets first: the start offset of every recovery point on disk must be on disk, too.
                self._write(LOG_START_OFFSET_FILE, self._moved_starts())
                self._write(RECOVERY_POINT_FILE, dict(self._recovery_points))
                self._is_behind = False

    def write_starts(self) -> None:
        """Writes only the noted start offsets."""
        with self.writing:
            if not self._is_closed:
                self._write(LOG_START_OFFSET_FILE, self._moved_starts())

    def _write(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        write_offset_checkpoint(self.file_system, self._checkpoint(name), offsets)

    def _moved_starts(self) -> dict[TopicPartition, int]:
        return {key: offset for key, offset in dict(self._start_offsets).items() if offset > 0}

    def _checkpoint(self, name: str) -> str:
        return join(self.checkpoint_path or self.path, name)

    def _write_marker(self, broker_epoch: int) -> None:
        marker = json.dumps({"version": 0, "brokerEpoch": broker_epoch}, separators=(",", ":"))
        write_file_atomically(self.file_system, self._checkpoint(CLEAN_SHUTDOWN_FILE), marker.encode())

    def _are_all_verified(self) -> bool:
        return self.had_clean_shutdown or set(self.partitions()) <= self._opened.keys()

    def close(self, *, broker_epoch: int = -1) -> bool:
        """Closes every open log and releases the folder. Returns True if the next start need not scan the logs.

        The marker is written only if every log of the folder is known to be complete and durable.
        """
        try:
            for key, log in sorted(self._opened.items()):
                log.close()
                self._note(key, log)
            self.write_checkpoints()
            is_whole = all(
                log.failure is None and log.flushed_offset == log.end_offset for log in self._opened.values()
            )
            if is_whole and self._journal is not None:
                self._journal.remove()
            is_clean = is_whole and self._are_all_verified()
            if is_clean:
                self._write_marker(broker_epoch)
            return is_clean
        finally:
            with self.writing:
                self._is_closed = True
            self._lock.release()


def _read_identity(file_system: FileSystem, path: str, candidate: Identity, cluster_id: str | None) -> Identity:
    file = join(path, META_PROPERTIES_FILE)
    properties = read_properties(file_system, file)
    if properties is None:
        identity = Identity(cluster_id or candidate.cluster_id, candidate.node_id, candidate.directory_id)
        _write_identity(file_system, file, identity)
        return identity
    identity = identity_of(properties, file)
    if identity.node_id != candidate.node_id:
        raise MetaPropertiesError(
            f"{file}: the folder belongs to node.id {identity.node_id}, but the configured node.id is "
            f"{candidate.node_id}"
        )
    if cluster_id not in (None, identity.cluster_id):
        raise MetaPropertiesError(
            f"{file}: the folder belongs to cluster.id {identity.cluster_id}, not to {cluster_id}"
        )
    if not identity.directory_id:
        identity.directory_id = candidate.directory_id
        _write_identity(file_system, file, identity)
    return identity


def identity_of(properties: Mapping[str, str], file: str) -> Identity:
    """Returns the identity in `file`, with an empty directory id if it has none. Raises MetaPropertiesError."""
    if properties.get("version") != _META_VERSION:
        raise MetaPropertiesError(
            f"{file}: version is {properties.get('version')!r}, only {_META_VERSION} is supported"
        )
    cluster_id, node_id = properties.get("cluster.id"), properties.get("node.id", "")
    if not cluster_id or not node_id.isascii() or not node_id.isdigit():
        raise MetaPropertiesError(f"{file}: cluster.id or node.id is missing or malformed")
    return Identity(cluster_id, int(node_id), properties.get("directory.id", ""))


def _write_identity(file_system: FileSystem, file: str, identity: Identity) -> None:
    properties = {
        "cluster.id": identity.cluster_id,
        "directory.id": identity.directory_id,
        "node.id": str(identity.node_id),
        "version": _META_VERSION,
    }
    write_properties(file_system, file, properties)
