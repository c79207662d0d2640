# SPDX-License-Identifier: Apache-2.0
"""Lists and reads the log files of a folder without a lock. Nothing in the folder is changed."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from kcoord.storage.checkpoints import LOCK_FILE
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import FileSystem, join
from kcoord.storage.log_dir import parse_partition_folder, partition_folder
from kcoord.storage.recovery import SWAP_SUFFIX, base_offset_of
from kcoord.storage.scan import BatchFrame, Damage, DamageKind, corrupt, find_batch, walk
from kcoord.storage.segment import LOG_SUFFIX
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC, GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC

COORDINATOR_TOPICS: Final = (GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC)


class NoLogsError(StorageError):
    """Raised if a path holds no log to work on."""


@dataclass(slots=True, order=True)
class PartitionFolder:
    """The folder of a partition; `number` is the partition id."""

    topic: str
    number: int
    path: str

    @property
    def name(self) -> str:
        return partition_folder(self.topic, self.number)


@dataclass(slots=True, order=True)
class LogFile:
    """A segment's `.log` file."""

    base_offset: int
    path: str


def partition_at(path: str) -> PartitionFolder | None:
    """Returns the partition whose folder is `path`, judged by the name alone, or None."""
    parsed = parse_partition_folder(path.rpartition("/")[2])
    return PartitionFolder(*parsed, path) if parsed else None


def partitions_in(fs: FileSystem, data_folder: str) -> list[PartitionFolder]:
    """Returns the partition folders in a data folder, by topic and number."""
    names = ((name, parse_partition_folder(name)) for name in fs.list_dir(data_folder))
    return sorted(PartitionFolder(*parsed, join(data_folder, name)) for name, parsed in names if parsed)


def partitions_at(fs: FileSystem, path: str) -> list[PartitionFolder]:
    """Returns the partitions of the data folder `path`, or the single partition whose folder `path` is.

    Raises NoLogsError if there is none.
    """
    partition = partition_at(path)
    if partition is not None and segments_in(fs, path):
        return [partition]
    partitions = partitions_in(fs, path)
    if not partitions:
        raise NoLogsError(f"{path}: there is no partition folder, such as {GROUP_METADATA_TOPIC}-0")
    return partitions


def segments_in(fs: FileSystem, folder: str) -> list[LogFile]:
    """Returns the segments of a partition folder, oldest first."""
    bases = ((base_offset_of(name, LOG_SUFFIX), name) for name in fs.list_dir(folder))
    return sorted(LogFile(base, join(folder, name)) for base, name in bases if base is not None)


@contextmanager
def locked(fs: FileSystem, folders: Iterable[str]) -> Iterator[None]:
    """Holds the locks that a broker and its workers hold while they run. Raises DirectoryLockedError if one does.

    A missing lock file is not created, since no process holds it.
    """
    with ExitStack() as locks:
        for folder in folders:
            lock = join(folder, LOCK_FILE)
            if fs.exists(lock):
                try:
                    locks.callback(fs.lock(lock).release)
                except OSError as error:
                    # On a read-only file system no broker can run, and no lock can be taken.
                    if error.errno != errno.EROFS:
                        raise
        yield


class FolderReader:
    """Reads the batches of a partition folder in order.

    Damage raises CorruptLogError. An incomplete last write is stored in `torn` instead. Raises StorageError if a
    compaction was interrupted, since the folder then holds old and new segments.
    """

    def __init__(self, fs: FileSystem, folder: str) -> None:
        self._fs = fs
        self.segments = segments_in(fs, folder)
        self.torn: Damage | None = None
        if any(name.endswith(LOG_SUFFIX + SWAP_SUFFIX) for name in fs.list_dir(folder)):
            raise StorageError(
                f"{folder}: a compaction was interrupted here; start a broker on the data folder once and stop it again"
            )

    def batches(self, from_offset: int = 0) -> Iterator[BatchFrame]:
        """Yields the batches whose last offset is at least `from_offset`. Segments below it are not read."""
        first = 0
        for number, segment in enumerate(self.segments):
            if segment.base_offset <= from_offset:
                first = number
        offset = 0
        for number, segment in enumerate(self.segments[first:], first):
            for frame in self._segment(segment, max(offset, segment.base_offset), number == len(self.segments) - 1):
                offset = frame.last_offset + 1
                if frame.last_offset >= from_offset:
                    yield frame

    def _segment(self, segment: LogFile, offset: int, is_last: bool) -> Iterator[BatchFrame]:
        file = self._fs.open_read(segment.path)
        size = file.size()
        try:
            yield from walk(file, 0, size, offset)
        except Damage as damage:
            is_tail = damage.kind in (DamageKind.INCOMPLETE, DamageKind.GARBAGE) and is_last
            if not is_tail or find_batch(file, damage.position + 1, size, damage.offset) is not None:
                raise corrupt(segment.path, damage) from None
            self.torn = damage
        finally:
            file.close()


def is_coordinator_topic(topic: str) -> bool:
    """Whether the log belongs to a coordinator. Such a log is compacted, and its partitions are the shards."""
    return topic in COORDINATOR_TOPICS


def is_metadata_topic(topic: str) -> bool:
    return topic == CLUSTER_METADATA_TOPIC
