# SPDX-License-Identifier: Apache-2.0
"""Which log files a folder holds, read without owning it: nothing is locked, finished or removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import FileSystem, join
from kcoord.storage.log_dir import parse_partition_folder, partition_folder
from kcoord.storage.recovery import SWAP_SUFFIX, base_offset_of
from kcoord.storage.scan import BatchFrame, Damage, DamageKind, corrupt, find_batch, walk
from kcoord.storage.segment import LOG_SUFFIX
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC, GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC

COORDINATOR_TOPICS: Final = (GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC)


class NoLogsError(StorageError):
    """There is nothing to work on at a path."""


@dataclass(slots=True, order=True)
class PartitionFolder:
    """A partition folder."""

    topic: str
    number: int
    path: str

    @property
    def name(self) -> str:
        return partition_folder(self.topic, self.number)


@dataclass(slots=True, order=True)
class LogFile:
    """A `.log` file."""

    base_offset: int
    path: str


def partition_at(path: str) -> PartitionFolder | None:
    """The partition whose folder is at `path`, going by its name."""
    found = parse_partition_folder(path.rpartition("/")[2])
    return PartitionFolder(*found, path) if found else None


def partitions_in(fs: FileSystem, data_folder: str) -> list[PartitionFolder]:
    """The partition folders in a data folder, by topic and number."""
    names = ((name, parse_partition_folder(name)) for name in fs.list_dir(data_folder))
    return sorted(PartitionFolder(*found, join(data_folder, name)) for name, found in names if found)


def partitions_at(fs: FileSystem, path: str) -> list[PartitionFolder]:
    """The partitions of a data folder, or the one whose folder `path` is."""
    one = partition_at(path)
    if one is not None and segments_in(fs, path):
        return [one]
    found = partitions_in(fs, path)
    if not found:
        raise NoLogsError(f"{path}: there is no partition folder, such as {GROUP_METADATA_TOPIC}-0")
    return found


def segments_in(fs: FileSystem, folder: str) -> list[LogFile]:
    """The segments of a partition folder, oldest first."""
    bases = ((base_offset_of(name, LOG_SUFFIX), name) for name in fs.list_dir(folder))
    return sorted(LogFile(base, join(folder, name)) for base, name in bases if base is not None)


class FolderReader:
    """Reads the batches of a partition folder in order. Damage is a CorruptLogError; a torn end is noted in `torn`."""

    def __init__(self, fs: FileSystem, folder: str) -> None:
        self._fs = fs
        self.segments = segments_in(fs, folder)
        self.torn: Damage | None = None
        if any(name.endswith(LOG_SUFFIX + SWAP_SUFFIX) for name in fs.list_dir(folder)):
            raise StorageError(
                f"{folder}: a compaction was interrupted here; let a broker open the folder once and stop it again"
            )

    def batches(self, from_offset: int = 0) -> Iterator[BatchFrame]:
        """All batches that reach `from_offset`; segments below it are not read."""
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
    """Whether a coordinator of the broker owns the log: it is compacted, and its partitions are its shards."""
    return topic in COORDINATOR_TOPICS


def is_metadata_topic(topic: str) -> bool:
    return topic == CLUSTER_METADATA_TOPIC
