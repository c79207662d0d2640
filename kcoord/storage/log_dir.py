# SPDX-License-Identifier: Apache-2.0
"""A data folder as Kafka lays it out: lock, meta.properties, partition folders, checkpoints, clean-shutdown marker.

One process at a time owns it. A log is opened when it is needed; the checkpoints say what its opening must know.
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
    RECOVERY_POINT_FILE,
    TopicPartition,
    read_leader_epochs,
    read_offset_checkpoint,
    read_properties,
    read_topic_id,
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
from kcoord.storage.recovery import Recovery
from kcoord.storage.segment import LogConfig
from kcoord.storage.worker_checkpoints import merge_worker_checkpoints

META_PROPERTIES_FILE = "meta.properties"
HIGH_WATERMARK_FILE = "replication-offset-checkpoint"
PARTITION_METADATA_FILE = "partition.metadata"
LEADER_EPOCH_FILE = "leader-epoch-checkpoint"
DELETE_SUFFIX = "-delete"
STRAY_SUFFIX = "-stray"
_META_VERSION = "1"
_LONGEST_NAME = 255
_DELETED_FOLDER = re.compile(r".*-[0-9]+\.[0-9a-f]{32}-delete")


@dataclass(slots=True)
class Identity:
    """Whose data it is: the content of meta.properties."""

    cluster_id: str
    node_id: int
    directory_id: str


def partition_folder(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


def retired_folder(topic: str, partition: int, unique: str, suffix: str) -> str:
    """The name of a folder that is out of use; a long topic is cut so that the name stays legal."""
    tail = f"-{partition}.{unique}{suffix}"
    return topic[: _LONGEST_NAME - len(tail)] + tail


def parse_partition_folder(name: str) -> TopicPartition | None:
    """Topic and partition of a folder's name; None for other files and for folders that are being deleted."""
    topic, separator, number = name.rpartition("-")
    if not separator or not topic or not number.isascii() or not number.isdigit() or str(int(number)) != number:
        return None
    return topic, int(number)


@dataclass(slots=True)
class LogDir:
    """An owned data folder. `LogDir.open` takes it, `close` gives it back."""

    file_system: FileSystem
    path: str
    identity: Identity
    had_clean_shutdown: bool
    files: FileCache
    _lock: Lock
    checkpoint_path: str = ""
    """Where the checkpoints and the marker are written, if not in the folder itself."""
    writing: AbstractContextManager[object] = field(default_factory=nullcontext)
    """Held while checkpoints are written. What is written is what is noted then, so an older state never follows."""
    restored_bytes: int = 0
    """What the logs lacked when the folder was opened, and journals held."""
    _is_closed: bool = False
    _journal: Journal | None = None
    _recovery_points: dict[TopicPartition, int] = field(default_factory=dict)
    _start_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    _cleaned_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    _opened: dict[TopicPartition, Log] = field(default_factory=dict)

    @classmethod
    def open(cls, file_system: FileSystem, path: str, candidate: Identity, *, cluster_id: str | None = None) -> Self:
        """Lock the folder, making it where it is missing, and read what an earlier run left.

        `candidate` is the identity of a new folder. In an old one its node id must be the same, and so must
        `cluster_id` where it is given.
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
                # Before anything is written: a crash from here on is one.
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
        known = self._recovery_points.keys() | self._start_offsets.keys() | self._cleaned_offsets.keys()
        self._forget_offsets(sorted(known.difference(present)))

    def begin_journal(self, lock: AbstractContextManager[object] | None = None) -> Journal:
        """Of this process. `close` removes it, unless a log is left that it may be needed for."""
        self._journal = Journal(self.file_system, self._checkpoint(JOURNAL_FILE), lock)
        return self._journal

    def note_closed(self, folder: str) -> None:
        """The log in the folder was made durable and closed: another process, or a new topic, may use it next."""
        if self._journal is not None:
            self._journal.forget(folder)

    # -- partitions ----------------------------------------------------------------------------------------------------

    def partitions(self) -> list[TopicPartition]:
        """Every partition that has a folder, sorted."""
        return sorted(found for name in self.file_system.list_dir(self.path) if (found := parse_partition_folder(name)))

    def partition_path(self, topic: str, partition: int) -> str:
        return join(self.path, partition_folder(topic, partition))

    def open_log(self, topic: str, partition: int, config: LogConfig, now_ms: int, *, repair: bool = False) -> Log:
        """Open or begin the log of a partition with what the checkpoints say about it."""
        key = (topic, partition)
        path = self.partition_path(topic, partition)
        if not self.file_system.exists(path):
            self._forget_offsets([key])
        handover = self._take_over(key, path)
        recovery = self.recovery_of(topic, partition)
        if recovery.rewrite and self._journal is not None:
            self._journal.restore(self.path, partition_folder(topic, partition))
        recovery.repair = repair
        if handover is not None:
            recovery.clean = handover.is_clean
            # A failed sync of the leader before may have dropped something. Nobody but that leader knows.
            recovery.rewrite = not handover.is_clean
        log = Log.open(self.file_system, path, config, now_ms, recovery=recovery, files=self.files)
        self._opened[key] = log
        if handover is not None:
            self._note(key, log)
            self.write_checkpoints()
            remove_handover(self.file_system, path)
        return log

    def _take_over(self, key: TopicPartition, path: str) -> Handover | None:
        """What the leader before has left counts, and nothing that was known here."""
        handover = read_handover(self.file_system, path)
        if handover is not None:
            self._opened.pop(key, None)
            self._recovery_points[key] = handover.recovery_point
            self._start_offsets[key] = handover.start_offset
            self._cleaned_offsets[key] = handover.cleaned_offset
        return handover

    def noted(self) -> list[TopicPartition]:
        """The partitions that the checkpoints say something about."""
        return sorted(self._recovery_points.keys() | self._start_offsets.keys())

    def forget(self, topic: str, partition: int) -> None:
        """The partition is a new one: what the checkpoints say is of an older one of that name."""
        self._forget_offsets([(topic, partition)])

    def note_gained(self, topic: str, partition: int) -> None:
        """Another broker led the partition until now: what is known here about its log may be out of date."""

    def hand_over(self, partitions: Iterable[TopicPartition]) -> None:
        """Leaves logs to other brokers, which lead them from now on: closed ones, or ones that were never opened."""
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
        """What is known about a log before it is opened: from its last use in this process, or from the checkpoints."""
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
        """Take (topic, partition, unique hex text) out of use, durably; the renamed folders are for `remove_folder`.

        As in Kafka the folder becomes `<topic>-<partition>.<unique>-delete`, so its name is free at once. With
        STRAY_SUFFIX it is kept for the operator instead. Close the log before.
        """
        gone = list(partitions)
        self._forget_offsets([(topic, partition) for topic, partition, _ in gone])
        folders = []
        for topic, partition, unique in gone:
            source = self.partition_path(topic, partition)
            if self.file_system.exists(source):
                folders.append(join(self.path, retired_folder(topic, partition, unique, suffix)))
                self.file_system.rename(source, folders[-1])
        self.file_system.sync_dir(self.path)
        return folders

    def remove_folder(self, folder: str) -> None:
        """Remove a folder that `delete_partitions` returned."""
        for name in self.file_system.list_dir(folder):
            self.file_system.remove(join(folder, name))
        self.file_system.remove_dir(folder)

    def remove_deleted(self) -> None:
        """Finish the deletions that an earlier run began."""
        for name in self.file_system.list_dir(self.path):
            if _DELETED_FOLDER.fullmatch(name):
                self.remove_folder(join(self.path, name))

    def topic_id(self, topic: str, partition: int) -> bytes | None:
        return read_topic_id(self.file_system, join(self.partition_path(topic, partition), PARTITION_METADATA_FILE))

    def write_topic_id(self, topic: str, partition: int, topic_id: bytes) -> None:
        write_topic_id(self.file_system, join(self.partition_path(topic, partition), PARTITION_METADATA_FILE), topic_id)

    def leader_epochs(self, topic: str, partition: int) -> list[tuple[int, int]]:
        """(epoch, start offset), ascending."""
        return read_leader_epochs(self.file_system, join(self.partition_path(topic, partition), LEADER_EPOCH_FILE))

    def write_leader_epochs(self, topic: str, partition: int, epochs: list[tuple[int, int]]) -> None:
        write_leader_epochs(self.file_system, join(self.partition_path(topic, partition), LEADER_EPOCH_FILE), epochs)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def checkpoint(self, logs: Mapping[TopicPartition, Log] | None = None) -> None:
        """Flush the given open logs (all by default), and note how far each is durable and where it starts.

        Like any change of a log it must not run beside one: call it in the thread that appends, or while nobody does.
        """
        for key, log in sorted((self._opened if logs is None else logs).items()):
            if log.failure is None and not log.is_closed:
                log.checkpoint()
            self._note(key, log)
        self.write_checkpoints()

    def _note(self, key: TopicPartition, log: Log) -> None:
        # What a failed log could not sync lies above its flushed offset; its index files may only lack entries.
        self._recovery_points[key] = log.flushed_offset
        self._start_offsets[key] = log.start_offset

    def note_durable(self) -> None:
        """As `checkpoint`, with what is durable already: nothing is flushed, so no log waits for the disk. For
        `write_checkpoints`.
        """
        # Other threads may open logs meanwhile.
        for key, log in list(self._opened.items()):
            if log.failure is None:
                self._note(key, log)

    def note_starts(self) -> None:
        """Where the open logs start, for `write_starts`: what lies before does not come back after a crash then."""
        for key, log in list(self._opened.items()):
            self._start_offsets[key] = log.start_offset

    def cleaned_offset(self, topic: str, partition: int) -> int:
        """Up to where the cleaner has been."""
        return self._cleaned_offsets.get((topic, partition), 0)

    def note_cleaned(self, topic: str, partition: int, offset: int) -> None:
        """Called by the cleaner's thread alone; nobody else writes this file."""
        self._cleaned_offsets[topic, partition] = offset
        write_offset_checkpoint(self.file_system, self._checkpoint(CLEANER_OFFSET_FILE), dict(self._cleaned_offsets))

    def _forget_offsets(self, partitions: list[TopicPartition]) -> None:
        """A folder that is made again under an old name must not inherit what was true of the old one."""
        known = [key for key in partitions if key in self._recovery_points or key in self._start_offsets]
        for key in known:
            self._recovery_points.pop(key, None)
            self._start_offsets.pop(key, None)
        for key in partitions:
            self._cleaned_offsets.pop(key, None)
            self._opened.pop(key, None)
        if known:
            self.write_checkpoints()

    def write_checkpoints(self) -> None:
        """Makes durable what is noted at this moment. In any thread, if `writing` is a lock."""
        with self.writing:
            if not self._is_closed:
                # Start offsets first: a recovery point is only ever above a start offset that is on disk.
                self._write(LOG_START_OFFSET_FILE, self._moved_starts())
                self._write(RECOVERY_POINT_FILE, dict(self._recovery_points))

    def write_starts(self) -> None:
        """As `write_checkpoints`, of the start offsets alone."""
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
        """Close every open log and give the folder back; True where the next start may trust what it finds.

        The marker is written only if every log of the folder is known to be whole.
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
    if properties.get("version") != _META_VERSION:
        raise MetaPropertiesError(
            f"{file}: version is {properties.get('version')!r}, only {_META_VERSION} is supported"
        )
    found_cluster, found_node = properties.get("cluster.id"), properties.get("node.id")
    if not found_cluster or found_node is None or not found_node.isascii() or not found_node.isdigit():
        raise MetaPropertiesError(f"{file}: cluster.id or node.id is missing or malformed")
    if int(found_node) != candidate.node_id:
        raise MetaPropertiesError(
            f"{file}: the folder belongs to node.id {found_node}, but node.id is {candidate.node_id} now"
        )
    if cluster_id is not None and cluster_id != found_cluster:
        raise MetaPropertiesError(f"{file}: the folder belongs to cluster.id {found_cluster}, not to {cluster_id}")
    identity = Identity(found_cluster, int(found_node), properties.get("directory.id") or candidate.directory_id)
    if "directory.id" not in properties:
        _write_identity(file_system, file, identity)
    return identity


def _write_identity(file_system: FileSystem, file: str, identity: Identity) -> None:
    properties = {
        "cluster.id": identity.cluster_id,
        "directory.id": identity.directory_id,
        "node.id": str(identity.node_id),
        "version": _META_VERSION,
    }
    write_properties(file_system, file, properties)
