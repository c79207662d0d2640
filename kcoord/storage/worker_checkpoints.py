# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of worker processes that share a data folder.

Every worker has its own checkpoints under `.workers`, so that no file has two writers. They are merged into those of
the folder when all workers have ended, or at the next start. So the next run may have any number of workers, and other
programs find all entries. Every worker also locks its own folder: workers that outlive their supervisor prevent another
process from using the data folder.

The lines of these checkpoints also have the id of the topic. A worker that dies keeps its entries, also if another
worker leads the partition by then. If the topic is deleted and created again, the entries are those of another log.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from kcoord.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    LOCK_FILE,
    LOG_START_OFFSET_FILE,
    RECOVERY_POINT_FILE,
    TopicPartition,
    find_in_checkpoint,
    read_offset_checkpoint,
    read_worker_checkpoint,
    topic_id_in,
    write_offset_checkpoint,
)
from kcoord.storage.errors import MalformedCheckpointError
from kcoord.storage.file_system import FileSystem, join, make_durable_dirs, read_file, write_file_atomically
from kcoord.storage.journal import JOURNAL_FILE, restore

WORKERS_FOLDER = ".workers"
_PARTITION_LOCKS = "partitions.lock"
_SOCKETS = "sockets"
_ZERO_MATTERS = (RECOVERY_POINT_FILE,)
"""The checkpoints in which an entry of 0 has a meaning. In the others, 0 means the same as no entry."""


def partition_locks(path: str) -> str:
    """Returns the path of the file on which workers lock the partitions whose logs they have open."""
    return join(join(path, WORKERS_FOLDER), _PARTITION_LOCKS)


def write_sockets_folder(file_system: FileSystem, path: str, folder: str) -> None:
    """Writes to the data folder where the workers' sockets are. They are outside of it, because paths must be short."""
    make_durable_dirs(file_system, join(path, WORKERS_FOLDER))
    write_file_atomically(file_system, join(join(path, WORKERS_FOLDER), _SOCKETS), folder.encode())


def read_sockets_folder(file_system: FileSystem, path: str) -> str | None:
    """Returns the folder of the workers' sockets, or None if no workers use the data folder."""
    with suppress(FileNotFoundError):
        return read_file(file_system, join(join(path, WORKERS_FOLDER), _SOCKETS)).decode()
    return None


def worker_folder(path: str, number: int) -> str:
    """Returns the path of a worker's own folder."""
    return join(join(path, WORKERS_FOLDER), str(number))


def merge_worker_checkpoints(file_system: FileSystem, path: str) -> int:
    """Merges the checkpoints of an earlier run's workers into those of the folder, and removes the workers' folders.

    Restores their journals first. Raises DirectoryLockedError if a worker still runs. Returns the number of restored
    bytes.
    """
    folders = worker_folders(file_system, path)
    locks = []
    try:
        for folder in folders:
            locks.append(file_system.lock(join(folder, LOCK_FILE)))
        restored = sum(restore(file_system, path, join(folder, JOURNAL_FILE)) for folder in folders)
        for name in (LOG_START_OFFSET_FILE, RECOVERY_POINT_FILE, CLEANER_OFFSET_FILE):
            _merge(file_system, path, folders, name)
    finally:
        for lock in locks:
            lock.release()
    for folder in folders:
        for name in file_system.list_dir(folder):
            file_system.remove(join(folder, name))
        file_system.remove_dir(folder)
    for name in (_PARTITION_LOCKS, _SOCKETS):
        if file_system.exists(join(join(path, WORKERS_FOLDER), name)):
            file_system.remove(join(join(path, WORKERS_FOLDER), name))
    if file_system.exists(join(path, WORKERS_FOLDER)):
        file_system.remove_dir(join(path, WORKERS_FOLDER))
    return restored


def restore_journals(file_system: FileSystem, path: str) -> int:
    """Restores the logs from the journals of an earlier run. For programs that change logs without opening the folder.

    No other process may use the folder. Returns the number of restored bytes.
    """
    folders = [path, *worker_folders(file_system, path)]
    return sum(restore(file_system, path, join(folder, JOURNAL_FILE)) for folder in folders)


def are_known_to_be_whole(file_system: FileSystem, path: str, count: int, needed: Collection[TopicPartition]) -> bool:
    """True if all `count` workers ended orderly, and their checkpoints together have all `needed` partitions."""
    with_entries: set[TopicPartition] = set()
    for number in range(count):
        folder = worker_folder(path, number)
        if not file_system.exists(join(folder, CLEAN_SHUTDOWN_FILE)):
            return False
        with_entries |= _read(file_system, join(folder, RECOVERY_POINT_FILE)).keys()
    return with_entries.issuperset(needed)


def read_merged_checkpoint(file_system: FileSystem, path: str, name: str) -> dict[TopicPartition, int] | None:
    """Returns the folder's checkpoint as a merge would write it now, or None if no such file exists.

    Raises MalformedCheckpointError if the folder's own file is damaged.
    """
    # The workers' files are read first. A merge by another process writes the folder's file before it removes them.
    files = [join(folder, name) for folder in worker_folders(file_system, path)]
    present = [file for file in files if file_system.exists(file)]
    of_workers: dict[TopicPartition, int] = {}
    for file in present:
        # If a log has moved, both workers may have an entry. Offsets never fall, so the larger one is newer.
        for key, (offset, topic_id) in _read(file_system, file).items():
            offset = current_offset(file_system, path, key, offset, topic_id)
            of_workers[key] = max(offset, of_workers.get(key, 0))
    if not present and not file_system.exists(join(path, name)):
        return None
    merged = {**read_offset_checkpoint(file_system, join(path, name)), **of_workers}
    return {
        key: offset for key, offset in merged.items() if offset > 0 or key not in of_workers or name in _ZERO_MATTERS
    }


def read_merged_entry(file_system: FileSystem, path: str, name: str, key: TopicPartition) -> int:
    """Returns the offset of one partition in the folder's checkpoint as a merge would write it now, 0 if it has none.

    Parses no other line: a checkpoint may have 100,000 lines, and each log that moves from a dead leader needs one.
    """
    entries = [_find(file_system, join(folder, name), key) for folder in worker_folders(file_system, path)]
    offsets = [current_offset(file_system, path, key, *entry) for entry in entries if entry is not None]
    if not offsets and (entry := _find(file_system, join(path, name), key)) is not None:
        offsets.append(entry[0])
    return max(offsets, default=0)


def worker_folders(file_system: FileSystem, path: str) -> list[str]:
    """Returns the folders of workers that use the data folder, or that ended without a merge."""
    parent = join(path, WORKERS_FOLDER)
    try:
        return [join(parent, name) for name in file_system.list_dir(parent) if name.isdecimal()]
    except FileNotFoundError:
        return []


def _merge(file_system: FileSystem, path: str, folders: list[str], name: str) -> None:
    """Merges one checkpoint. Entries of workers replace those of the folder; 0 means that the partition was deleted."""
    if not any(file_system.exists(join(folder, name)) for folder in folders):
        return
    try:
        merged = read_merged_checkpoint(file_system, path, name)
    except MalformedCheckpointError:
        if name == LOG_START_OFFSET_FILE:
            # The folder is rejected, as without workers. The workers' files stay.
            raise
        return
    if merged or file_system.exists(join(path, name)):
        # Without entries, too: those of the folder may be of deleted partitions, whose names other topics may have now.
        write_offset_checkpoint(file_system, join(path, name), merged or {})


def current_offset(file_system: FileSystem, path: str, key: TopicPartition, offset: int, topic_id: str) -> int:
    """Returns the offset of a worker's entry, or 0 if its topic is deleted and another topic has the name now."""
    return offset if not offset or is_of(file_system, path, key, topic_id) else 0


def is_of(file_system: FileSystem, path: str, key: TopicPartition, topic_id: str) -> bool:
    """Returns whether the folder of a partition may belong to the topic. An id is unknown if it is empty."""
    return not topic_id or folder_id(file_system, path, key) in ("", topic_id)


def folder_id(file_system: FileSystem, path: str, key: TopicPartition) -> str:
    """Returns the topic id in the folder of a partition in hexadecimal, empty if it is missing or malformed."""
    topic_id = topic_id_in(file_system, join(path, f"{key[0]}-{key[1]}"))
    return topic_id.hex() if topic_id is not None else ""


def _read(file_system: FileSystem, file: str) -> dict[TopicPartition, tuple[int, str]]:
    """Reads a worker's checkpoint. A missing or damaged file has no entries, and more is scanned then."""
    with suppress(MalformedCheckpointError, FileNotFoundError):
        return read_worker_checkpoint(file_system, file)
    return {}


def _find(file_system: FileSystem, file: str, key: TopicPartition) -> tuple[int, str] | None:
    with suppress(MalformedCheckpointError, FileNotFoundError):
        return find_in_checkpoint(file_system, file, key)
    return None
