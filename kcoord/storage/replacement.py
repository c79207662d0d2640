# SPDX-License-Identifier: Apache-2.0
"""Replaces several segments by one, so that a crash at any point leaves the old ones or the new one.

Theory of operation
-------------------

    create     owner      create x.log.cleaned and its indexes
    prepare    cleaner    write them, and make them durable
    announce   owner      rename them to .swap: from here on recovery finishes the replacement
    -          cleaner    sync the folder
    publish    owner      readers use the new segment; rename the old files to .deleted
    -          cleaner    sync the folder: an old file that still existed would overlap with the new one
    settle     owner      drop the suffix .swap
    -          cleaner    sync the folder, then remove the .deleted files

The owner is the thread that appends to the log. Its steps are a few renames and do not wait for the disk; the cleaner's
thread does all syncs. Readers of the old segments keep their files open and continue.

After a crash before `announce` is durable, recovery removes the .cleaned files, and the old segments stay. After it,
recovery finishes the replacement, because a .swap file is complete and durable.

An error before `publish` undoes the replacement. An error after it fails the log, because disk and memory differ, and
recovery finishes the replacement when the log is opened again. A log that is closed meanwhile abandons the replacement.

A closed log may be opened by another worker, or again by this one, and its opening removes the .cleaned files. So every
step that creates, renames or removes files with these names is one of the owner, which makes none for a closed log. A
.cleaned file that the former owner left beside a .swap file of the next one would make recovery undo that replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import File, FileSystem, join, write_all
from kcoord.storage.log import Log
from kcoord.storage.recovery import CLEANED_SUFFIX, SWAP_SUFFIX
from kcoord.storage.segment import DELETED_SUFFIX, LOG_SUFFIX, Segment
from kcoord.storage.segment_indexes import INDEX_SUFFIX, TIME_INDEX_SUFFIX

OnOwner: TypeAlias = "Callable[[Callable[[], None]], None]"
"""Runs a function in the thread that appends to the log, or while that thread waits. Raises the function's error."""

_INDEX_SUFFIXES = (TIME_INDEX_SUFFIX, INDEX_SUFFIX)
_STRAY_INDEXES = tuple(suffix + SWAP_SUFFIX for suffix in _INDEX_SUFFIXES)


class ReplacementAbandoned(StorageError):
    """The log changed or was closed during the replacement. Nothing is lost; a later pass can clean the segments."""


class NewSegment:
    """The file `<base offset>.log.cleaned` that is being written, batch by batch, and the files of its indexes."""

    __slots__ = ("_buffer", "_file_system", "_files", "_on_owner", "segment")

    def __init__(self, file_system: FileSystem, segment: Segment, on_owner: OnOwner) -> None:
        """Creates the files. `segment` has the base offset of the first segment that it replaces."""
        self.segment = segment
        self._file_system = file_system
        self._on_owner = on_owner
        self._files: dict[str, File] = {}
        self._buffer: list[bytes] = []
        segment.discard_indexes()
        on_owner(self._create)

    def _path(self, suffix: str) -> str:
        return self.segment.path + suffix + CLEANED_SUFFIX

    def _create(self) -> None:
        try:
            for suffix in (LOG_SUFFIX, *_INDEX_SUFFIXES):
                file = self._files[suffix] = self._file_system.open_append(self._path(suffix))
                file.truncate(0)
        except OSError:
            self._remove()
            raise

    @property
    def size_bytes(self) -> int:
        """The size of the batches that were added."""
        return self.segment.size_bytes

    def add(self, batch: bytes, last_offset: int, max_timestamp: int) -> None:
        """Adds a batch, which `write` or `finish` writes."""
        self.segment.note(self.segment.size_bytes, len(batch), last_offset, max_timestamp)
        self._buffer.append(batch)

    def write(self) -> None:
        """Writes the batches that were added since the last call."""
        data = b"".join(self._buffer)
        self._buffer = []
        if data:
            write_all(self._files[LOG_SUFFIX], data)

    def finish(self, created_ms: int) -> None:
        """Makes the log file and both index files durable."""
        self.write()
        self._files[LOG_SUFFIX].datasync()
        self.segment.attach(self._files[LOG_SUFFIX], created_ms)
        indexes = self.segment.indexes()
        for suffix, data in ((TIME_INDEX_SUFFIX, indexes.times.encode()), (INDEX_SUFFIX, indexes.offsets.encode())):
            file = self._files[suffix]
            try:
                write_all(file, data)
                file.datasync()
            finally:
                file.close()

    def discard(self) -> None:
        """Removes the files, unless the log is closed: they belong to the next opening then."""
        with suppress(ReplacementAbandoned):
            self._on_owner(self._remove)

    def _remove(self) -> None:
        for suffix in (LOG_SUFFIX, *_INDEX_SUFFIXES):
            with suppress(FileNotFoundError):
                self._file_system.remove(self._path(suffix))


class Replacement:
    """One replacement. `run` makes all steps, those of the owner through `on_owner`."""

    __slots__ = ("_deleted", "_file_system", "_is_published", "_log", "_new", "_old")

    def __init__(self, file_system: FileSystem, log: Log, old: tuple[Segment, ...], new: Segment) -> None:
        self._file_system = file_system
        self._log = log
        self._old = old
        self._new = new
        self._deleted: list[str] = []
        self._is_published = False

    def run(self, on_owner: OnOwner) -> None:
        """Replaces the segments. Raises ReplacementAbandoned if the log was changed or closed meanwhile.

        After any other error the old segments are in place, or the log has failed, and recovery finishes the
        replacement when the log is opened again.
        """
        for segment in self._old:
            segment.detach()
        on_owner(self._announce)
        try:
            self._sync()
            on_owner(self._publish)
        except (OSError, AssertionError):
            on_owner(self._undo)
            raise
        try:
            self._sync()
            on_owner(self._settle)
            self._sync()
        except OSError as error:
            self._log.fail(error)
            raise
        for path in self._deleted:
            _remove_deleted(self._file_system, path)

    def _undo(self) -> None:
        if self._log.is_closed or self._is_published:
            return
        try:
            for suffix in (LOG_SUFFIX, *_INDEX_SUFFIXES):
                self._file_system.remove(self._new.path + suffix + SWAP_SUFFIX)
        except OSError as error:
            self._log.fail(error)
        self._log.end_replacement()

    def _announce(self) -> None:
        if not self._log.begin_replacement(self._old):
            raise ReplacementAbandoned(f"{self._log.directory}: the segments have changed since they were read")
        try:
            # The log file is renamed last: while any file is named .cleaned, recovery returns to the old segments.
            for suffix in (*_INDEX_SUFFIXES, LOG_SUFFIX):
                path = self._new.path + suffix
                self._file_system.rename(path + CLEANED_SUFFIX, path + SWAP_SUFFIX)
        except OSError:
            self._log.end_replacement()
            raise

    def _publish(self) -> None:
        if not self._log.publish_replacement(self._new):
            raise ReplacementAbandoned(f"{self._log.directory}: the log was closed")
        self._is_published = True
        try:
            present = set(self._file_system.list_dir(self._log.directory))
            for segment in self._old:
                name = segment.path.rpartition("/")[2]
                for suffix in (*_INDEX_SUFFIXES, LOG_SUFFIX):
                    if name + suffix in present:
                        deleted = segment.path + suffix + DELETED_SUFFIX
                        self._file_system.rename(segment.path + suffix, deleted)
                        self._deleted.append(deleted)
        except OSError as error:
            self._log.fail(error)
            raise

    def _settle(self) -> None:
        if self._log.is_closed:
            raise ReplacementAbandoned(f"{self._log.directory}: the log was closed")
        for suffix in (*_INDEX_SUFFIXES, LOG_SUFFIX):
            path = self._new.path + suffix
            self._file_system.rename(path + SWAP_SUFFIX, path)
        self._new.settle()
        self._log.end_replacement()

    def _sync(self) -> None:
        self._file_system.sync_dir(self._log.directory)


def remove_leftovers(file_system: FileSystem, directory: str, on_owner: OnOwner) -> None:
    """Removes the files of an abandoned cleaning. Recovery would confuse them with those of the next cleaning."""
    unfinished: list[str] = []
    for name in file_system.list_dir(directory):
        if name.endswith(DELETED_SUFFIX):
            # The file may be large, and no recovery needs it, even if it is one of the next owner.
            _remove_deleted(file_system, join(directory, name))
        elif name.endswith((CLEANED_SUFFIX, *_STRAY_INDEXES)):
            unfinished.append(join(directory, name))
    if unfinished:
        on_owner(partial(_remove_all, file_system, unfinished))


def _remove_deleted(file_system: FileSystem, path: str) -> None:
    """Removes a file unless the owner has done that, whose retention removes such files after their delay."""
    with suppress(FileNotFoundError):
        file_system.remove(path)


def _remove_all(file_system: FileSystem, paths: list[str]) -> None:
    for path in paths:
        file_system.remove(path)
