# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of worker processes that share a data folder: each has its own under `.workers`, so that no file has
two writers.

They are merged into those of the folder when the workers have ended, or at the next start, so any number of workers can
follow, and other programs find what they know. Each worker holds a lock of its own besides: workers that outlive their
supervisor keep everybody out.
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
    read_offset_checkpoint,
    write_offset_checkpoint,
)
from kcoord.storage.errors import MalformedCheckpointError
from kcoord.storage.file_system import FileSystem, join, make_durable_dirs, read_file, write_file_atomically
from kcoord.storage.journal import JOURNAL_FILE, restore

WORKERS_FOLDER = ".workers"
_PARTITION_LOCKS = "partitions.lock"
_SOCKETS = "sockets"
_ZERO_MATTERS = (RECOVERY_POINT_FILE,)
"""Checkpoints whose entries mean something at 0 too: in the others a partition without an entry is as good."""


def partition_locks(path: str) -> str:
    """The file on which workers lock the partitions whose logs they have open."""
    return join(join(path, WORKERS_FOLDER), _PARTITION_LOCKS)


def write_sockets_folder(file_system: FileSystem, path: str, folder: str) -> None:
    """Tells in the data folder where the workers' sockets are, which is outside of it: their names must be short."""
    make_durable_dirs(file_system, join(path, WORKERS_FOLDER))
    write_file_atomically(file_system, join(join(path, WORKERS_FOLDER), _SOCKETS), folder.encode())


def read_sockets_folder(file_system: FileSystem, path: str) -> str | None:
    """None where no workers use the data folder."""
    with suppress(FileNotFoundError):
        return read_file(file_system, join(join(path, WORKERS_FOLDER), _SOCKETS)).decode()
    return None


def worker_folder(path: str, number: int) -> str:
    return join(join(path, WORKERS_FOLDER), str(number))


def merge_worker_checkpoints(file_system: FileSystem, path: str) -> int:
    """Takes over what workers of an earlier run knew, and removes their folders. DirectoryLockedError where one of them
    still runs. Returns how many bytes their journals gave the logs.
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
    """Gives the logs what an earlier run has left in journals, before somebody changes them without opening the folder.
    Nobody may be using it. Returns how many bytes that were.
    """
    folders = [path, *worker_folders(file_system, path)]
    return sum(restore(file_system, path, join(folder, JOURNAL_FILE)) for folder in folders)


def are_known_to_be_whole(file_system: FileSystem, path: str, count: int, needed: Collection[TopicPartition]) -> bool:
    """Whether all of `count` workers ended in an orderly way and know, together, all of the `needed` partitions."""
    known: set[TopicPartition] = set()
    for number in range(count):
        folder = worker_folder(path, number)
        if not file_system.exists(join(folder, CLEAN_SHUTDOWN_FILE)):
            return False
        known |= _read(file_system, join(folder, RECOVERY_POINT_FILE)).keys()
    return known.issuperset(needed)


def read_merged_checkpoint(file_system: FileSystem, path: str, name: str) -> dict[TopicPartition, int] | None:
    """What the folder's checkpoint would say if its workers ended now; None where there is no such file.
    MalformedCheckpointError where the folder's own is damaged.
    """
    # The workers' first: whoever merges them meanwhile writes the folder's before they go.
    files = [join(folder, name) for folder in worker_folders(file_system, path)]
    present = [file for file in files if file_system.exists(file)]
    found: dict[TopicPartition, int] = {}
    for file in present:
        # Of a log that went from one to another both may know something, and offsets only grow.
        for key, offset in _read(file_system, file).items():
            found[key] = max(offset, found.get(key, 0))
    if not present and not file_system.exists(join(path, name)):
        return None
    merged = {**read_offset_checkpoint(file_system, join(path, name)), **found}
    return {key: offset for key, offset in merged.items() if offset > 0 or key not in found or name in _ZERO_MATTERS}


def worker_folders(file_system: FileSystem, path: str) -> list[str]:
    """The folders of workers that use the data folder, or that ended without being merged."""
    parent = join(path, WORKERS_FOLDER)
    try:
        return [join(parent, name) for name in file_system.list_dir(parent) if name.isdecimal()]
    except FileNotFoundError:
        return []


def _merge(file_system: FileSystem, path: str, folders: list[str], name: str) -> None:
    """A worker's entry is newer than the folder's; 0 stands for a partition that was deleted meanwhile."""
    if not any(file_system.exists(join(folder, name)) for folder in folders):
        return
    try:
        merged = read_merged_checkpoint(file_system, path, name)
    except MalformedCheckpointError:
        if name == LOG_START_OFFSET_FILE:
            # As without workers the folder is refused, and nothing that workers know is lost.
            raise
        return
    if merged:
        write_offset_checkpoint(file_system, join(path, name), merged)


def _read(file_system: FileSystem, path: str) -> dict[TopicPartition, int]:
    """What is damaged is as good as missing: more is scanned then."""
    with suppress(MalformedCheckpointError, FileNotFoundError):
        return read_offset_checkpoint(file_system, path)
    return {}
