# SPDX-License-Identifier: Apache-2.0
"""The snapshots of standbys and of owned shards, in the folder `standby` of the data folder: one file for each shard.

A file has the state at an offset of the upstream's log, and what the instance knew of the log there (the mark). It only
saves time: a start reads it, and fetches what followed. A file that is missing, damaged, of another version or of
another topic is not used, and neither is one whose mark does not fit the log (`kcoord.runtime.upstream_reader`).

All file operations run in one thread, in the order of the calls, so a slow or full disk delays no commit. If a file
cannot be written, the one before stays, and following continues in memory.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from kcoord.runtime.snapshot import Chunk, Snapshot
from kcoord.server.environment import NewPool, thread_pool
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import FileSystem, join, make_durable_dirs
from kcoord.storage.snapshot import SnapshotError, read_snapshot, write_snapshot

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

FOLDER: Final = "standby"
_MARK: Final = -2
"""The kind of the first chunk: the topic id and the mark. Kinds from 0 on belong to the state machine."""
_ID_BYTES: Final = 16

_logger = logging.getLogger(__name__)


class StandbyCopy(NamedTuple):
    """A snapshot of a shard, and the mark of the log at its end."""

    mark: bytes
    snapshot: Snapshot


class StandbyFiles:
    """The snapshot files; the module describes them. `topic_id` is that of the topic with the logs."""

    def __init__(
        self, file_system: FileSystem, data_folder: str, topic_id: bytes, new_pool: NewPool = thread_pool
    ) -> None:
        self.topic_id = topic_id
        self.sizes: dict[int, int] = {}
        """The bytes of each shard's snapshot, as far as it was read or written."""
        self._file_system = file_system
        self._folder = join(data_folder, FOLDER)
        self._new_pool = new_pool
        self._threads: Executor | None = None
        self._has_failed = False

    async def read(self, shard_id: int) -> StandbyCopy | None:
        """Returns the copy of a shard, or None if there is none that can be used."""
        copy = await asyncio.get_running_loop().run_in_executor(self._pool(), self._read, shard_id, self.topic_id)
        if copy is not None:
            self.sizes[shard_id] = copy.snapshot.size_bytes
        return copy

    def write(self, shard_id: int, copy: StandbyCopy) -> Future[bool]:
        """Replaces the copy of a shard. The future has whether that succeeded."""
        return self._pool().submit(self.write_now, shard_id, copy)

    def remove(self, shard_id: int) -> None:
        """Removes the copy of a shard, because the log is another one."""
        self.sizes.pop(shard_id, None)
        self._pool().submit(self._remove, shard_id)

    def stop(self) -> None:
        """Finishes the write that is under way. Nothing is written in the thread any more."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def write_now(self, shard_id: int, copy: StandbyCopy) -> bool:
        """Replaces the copy of a shard, in the calling thread. Returns False, and logs the reason, if that fails."""
        snapshot = copy.snapshot
        chunks = [Chunk(_MARK, self.topic_id + copy.mark), *snapshot.chunks]
        try:
            make_durable_dirs(self._file_system, self._folder)
            write_snapshot(
                self._file_system,
                self._folder,
                Snapshot(snapshot.offset, snapshot.end_offset, snapshot.created_ms, chunks),
                _name(shard_id),
            )
        except (OSError, AssertionError) as error:
            with suppress(OSError):
                self._file_system.remove(join(self._folder, f"{_name(shard_id)}.tmp"))
            if not self._has_failed:
                self._has_failed = True
                _logger.error(
                    "The copies of the logs of groups cannot be written to %s; this instance continues without new "
                    "ones, and its next start reads more from the upstream: %s",
                    *(self._folder, error),
                )
            return False
        self.sizes[shard_id] = snapshot.size_bytes
        if self._has_failed:
            self._has_failed = False
            _logger.info("The copies of the logs of groups are written to %s again", self._folder)
        return True

    def _pool(self) -> Executor:
        if self._threads is None:
            self._threads = self._new_pool(1, "kcoord-standby")
        return self._threads

    def _read(self, shard_id: int, topic_id: bytes) -> StandbyCopy | None:
        try:
            snapshot = read_snapshot(self._file_system, self._folder, _name(shard_id))
        except (OSError, SnapshotError, StorageError) as error:
            _logger.warning("The copy of shard %d is not used, its log is read from the upstream: %s", shard_id, error)
            return None
        if snapshot is None:
            return None
        kind, data = snapshot.chunks[0] if snapshot.chunks else (0, b"")
        if kind != _MARK or data[:_ID_BYTES] != topic_id:
            _logger.warning("The copy of shard %d is of another topic, its log is read from the upstream", shard_id)
            return None
        del snapshot.chunks[0]
        return StandbyCopy(data[_ID_BYTES:], snapshot)

    def _remove(self, shard_id: int) -> None:
        with suppress(FileNotFoundError):
            self._file_system.remove(join(self._folder, _name(shard_id)))


def _name(shard_id: int) -> str:
    return f"shard-{shard_id}.kcoord"
