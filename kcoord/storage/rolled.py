# SPDX-License-Identifier: Apache-2.0
"""Closed segments that are not durable yet, because their log began the next segment without waiting for the disk.

Theory of operation
-------------------
A log that has `LaterSyncs` begins a new segment at once. Another thread then syncs the old segment:

    mark      owner      create `<base offset of the new segment>.unsynced`, then the new segment
    sync      thread     sync the old segment, write its indexes, sync the folder
    settle    owner      the flushed offset moves to the new segment; remove the mark

The owner is the thread that changes the log. It does not wait for the disk in these steps. Before it removes the files
of a segment, or closes the log, it calls `cancel`, after which the thread uses no file by its name. `cancel` waits for
index files that are being written, but not for the sync of the segment, which uses the open file.

`sync` may run in two threads: the second one waits, and finds the outcome of the first one. So `flush` and `close` sync
what the other thread has not synced yet, and a failed sync is never repeated. A failed sync fails the log. If only the
indexes cannot be written, as on a full disk, the segment is durable, and the next `sync` tries again.

A crash may tear a segment only if the mark of the next one exists. The entries of a folder reach the disk in the order
in which they were made, and so no segment exists without its mark, unless the segment before it is durable:

    mark of the next segment    old segment                recovery (`recovery`, `log_loader`)
    absent                      durable                    damage is refused
    present                     reaches the next segment   syncs it, and removes the mark
    present                     ends before that           truncates it, and removes the segments after it

The old segment ends exactly where the next one begins, so a tail that is missing at a batch boundary is noticed, too.
Cleaning would break that rule. So only settled segments are cleaned, and the sync of the folder during a replacement
makes the removal of their marks durable. A mark without its segment means nothing, and an orderly stop leaves none.
Kafka's broker ignores these files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Final, NamedTuple, TypeAlias

from kcoord.storage.file_system import FileSystem, join
from kcoord.storage.segment import Segment, segment_name

UNSYNCED_SUFFIX: Final = ".unsynced"

Background: TypeAlias = Callable[[Callable[[], None], Callable[[], None] | None], object]
"""Runs a function in another thread, at some later time, and then a second one in the thread of the owner."""
NewLock: TypeAlias = Callable[[], AbstractContextManager[object]]


class LaterSyncs(NamedTuple):
    """How a log syncs its closed segments in another thread."""

    in_background: Background
    new_lock: NewLock


def mark_path(folder: str, base_offset: int) -> str:
    """Returns the path of the mark of the segment with this base offset: the segment before it may be torn."""
    return join(folder, segment_name(base_offset) + UNSYNCED_SUFFIX)


class RolledSegment:
    """A closed segment until it is settled. `end_offset` is the offset of the next segment."""

    __slots__ = (
        "_file",
        "_folders",
        "_fs",
        "_is_canceled",
        "_lock",
        "_names_lock",
        "end_offset",
        "error",
        "has_indexes",
        "is_durable",
        "segment",
    )

    def __init__(
        self, fs: FileSystem, segment: Segment, end_offset: int, folders: list[str], new_lock: NewLock
    ) -> None:
        """`folders` are those whose entries lead to the segment, and may not be durable."""
        self.segment = segment
        self.end_offset = end_offset
        self.error: OSError | None = None
        self.is_durable = False
        self.has_indexes = False
        self._fs = fs
        self._folders = folders
        self._file = segment.file()
        self._lock = new_lock()
        self._names_lock = new_lock()
        self._is_canceled = False

    def sync(self) -> None:
        """Makes the segment durable, or notes the error. Then writes the indexes, if that is possible."""
        with self._lock:
            if not self.is_durable and self.error is None and not self._is_canceled:
                self._sync_once()
            with self._names_lock, suppress(OSError):
                if self.is_durable and not self.has_indexes and not self._is_canceled:
                    self.segment.write_indexes()
                    self.has_indexes = True

    def _sync_once(self) -> None:
        try:
            self._file.datasync()
            for folder in self._folders:
                self._fs.sync_dir(folder)
        except OSError as error:
            self.error = error
        else:
            self.is_durable = True

    def cancel(self) -> None:
        """Ends the use of names, because the segment is deleted or its log is closed."""
        with self._names_lock:
            self._is_canceled = True


def sync_all(rolled: Iterable[RolledSegment]) -> None:
    """Syncs segments, the oldest first, so that a durable segment follows durable ones only."""
    for segment in rolled:
        segment.sync()
        if segment.error is not None:
            return
