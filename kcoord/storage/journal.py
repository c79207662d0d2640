# SPDX-License-Identifier: Apache-2.0
"""A journal for the logs of a data folder: one sync makes the appends of many logs durable.

Theory of operation
-------------------
An append is first written to its log, which puts it into the page cache. Then the same bytes, with file and position,
are written to the journal. The response needs only the sync of the journal. If only the process stops, the logs are
complete, because the page cache survives. The journal is needed if the machine stops before a log itself was synced:
the next start writes the journal's extents over the ends of the logs, before any log is opened. A restore may be
repeated: it writes the extents in their order, every extent at its position, so the result is the same. Only the active
segment of a log is restored, because a segment is synced before its log begins the next one.

The file is a sequence of frames: CRC-32C and length of the body, then the body, which is a list of extents. The first
damaged frame ends the journal. After a failed write the journal is *torn* and accepts nothing until it is emptied,
because frames after a damaged one would not be read.

`DurableAppends` writes the journal. If the journal is torn, each log is synced instead, which is as good. When the
journal has grown, or is torn, it is renewed: all logs with extents in it are synced, and only if all of them succeed is
the journal emptied. When a log is closed, moved to another process or deleted, `Journal.forget` voids its extents, so
that a later restore does not overwrite the files of the next owner.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final, NamedTuple, Protocol, TypeAlias

from kcoord.storage.file_system import Bytes, File, FileSystem, join, parent, write_rest
from kcoord.storage.log import AppendInfo
from kcoord.storage.recovery import base_offset_of
from kcoord.storage.segment import LOG_SUFFIX, segment_name
from kcoord_protocol.batch_header import crc32c

_logger = logging.getLogger(__name__)

JOURNAL_FILE = "journal"
_FRAME = struct.Struct(">II")
_EXTENT = struct.Struct(">HqqI")
_FORGET = -1
"""The position in an extent that voids all earlier extents of its folder."""


class Extent(NamedTuple):
    """Bytes of a log, with the folder of the log, the base offset of the segment, and their position in its file."""

    folder: str
    segment_base_offset: int
    position: int
    data: Bytes


class Journal:
    """The journal that a process writes. Any thread may call it if `lock` is a lock."""

    def __init__(self, file_system: FileSystem, path: str, lock: AbstractContextManager[object] | None = None) -> None:
        """Creates or empties the file. The caller has restored the journal of an earlier process before."""
        self._fs = file_system
        self._path = path
        self._lock = lock if lock is not None else nullcontext()
        self._ends: dict[str, tuple[int, int]] = {}
        """By folder: the segment of its last extent, and the position after that extent."""
        self._size = 0
        self._is_torn = False
        self._file: File = file_system.open_append(path)
        self.descriptor = self._file.descriptor
        """The file descriptor, for callers that sync the file themselves."""
        self._file.truncate(0)
        self._file.datasync()
        file_system.sync_dir(parent(path))

    @property
    def size_bytes(self) -> int:
        return self._size

    @property
    def is_torn(self) -> bool:
        """True after a failed write or sync. The journal accepts nothing before `begin_anew`."""
        return self._is_torn

    def write(self, extents: Sequence[Extent]) -> None:
        """Appends a frame, which is durable after a sync. After an OSError the journal may have the extents or not."""
        with self._lock:
            self._check_untorn()
            ends = self._ends
            for folder, base_offset, position, data in extents:
                assert (base_offset, position) >= ends.get(folder, (0, 0)), (
                    f"S-12: the journal gets bytes of {folder} for segment {base_offset} at {position}, "
                    f"but has bytes up to segment {ends[folder][0]} at {ends[folder][1]}"
                )
                ends[folder] = (base_offset, position + len(data))
            self._write(extents)

    def sync(self) -> None:
        """Makes all written frames durable."""
        with self._lock:
            self._sync()

    def tear(self) -> None:
        """Marks the journal as torn, after a caller's own sync of the file failed."""
        self._is_torn = True

    def forget(self, folder: str) -> None:
        """Voids the extents of a log that was made durable and closed. Another owner may change its files now."""
        with self._lock:
            if folder in self._ends:
                self._write([Extent(folder, 0, _FORGET, b"")])
                self._sync()
                del self._ends[folder]

    def begin_anew(self) -> None:
        """Empties the journal. The caller has made all of its extents durable in the logs."""
        with self._lock:
            self._is_torn = True
            self._file.truncate(0)
            self._file.datasync()
            self._ends.clear()
            self._size = 0
            self._is_torn = False

    def restore(self, log_dir: str, folder: str) -> None:
        """Restores one log, which failed and is about to be opened again."""
        with self._lock:
            _restore(self._fs, log_dir, self._path, folder)

    def remove(self) -> None:
        """Removes the file. The caller has made all of its extents durable in the logs."""
        with self._lock:
            self._is_torn = True
            self.descriptor = None
            self._file.close()
            _remove(self._fs, self._path)

    def _write(self, extents: Sequence[Extent]) -> None:
        self._check_untorn()
        parts: list[Bytes] = []
        for folder, base_offset, position, data in extents:
            name = folder.encode()
            parts += (_EXTENT.pack(len(name), base_offset, position, len(data)), name, data)
        body = b"".join(parts)
        frame = _FRAME.pack(crc32c(body), len(body)) + body
        self._is_torn = True
        taken = self._file.write(frame)
        if taken != len(frame):
            write_rest(self._file, frame, taken)
        self._is_torn = False
        self._size += len(frame)

    def _check_untorn(self) -> None:
        if self._is_torn:
            raise OSError(f"{self._path}: an earlier write to the journal failed; the logs are synced instead")

    def _sync(self) -> None:
        was_torn, self._is_torn = self._is_torn, True
        self._file.datasync()
        self._is_torn = was_torn


def restore(file_system: FileSystem, log_dir: str, path: str) -> int:
    """Restores the logs in `log_dir` from the journal that an earlier process left at `path`, and removes the journal.

    The logs are durable before the journal is removed. Returns the number of bytes that the logs lacked.
    """
    if not file_system.exists(path):
        return 0
    restored = _restore(file_system, log_dir, path)
    _remove(file_system, path)
    return restored


def make_named_logs_durable(file_system: FileSystem, log_dir: str, path: str) -> None:
    """Syncs the logs named in a journal and removes the journal, after a process ended but the machine did not.

    The logs have all bytes of the journal then, and other processes may have appended to some of them.
    """
    if not file_system.exists(path):
        return
    for folder, segments in _extents_by_segment(file_system, path).items():
        for base_offset in segments:
            # A process that removed the segment has synced its replacement.
            with suppress(FileNotFoundError):
                _sync(file_system, _segment_path(log_dir, folder, base_offset))
    _remove(file_system, path)


def _restore(file_system: FileSystem, log_dir: str, path: str, only_folder: str | None = None) -> int:
    restored = 0
    for folder, segments in _extents_by_segment(file_system, path).items():
        if only_folder is None or folder == only_folder:
            active = _active_segment(file_system, join(log_dir, folder))
            if active in segments:
                segment_path = _segment_path(log_dir, folder, active)
                restored += _restore_segment(file_system, segment_path, segments[active])
    return restored


def _restore_segment(file_system: FileSystem, path: str, extents: list[tuple[int, bytes]]) -> int:
    restored = 0
    file = file_system.open_read(path)
    try:
        for position, data in extents:
            if position > file.size():
                # The missing bytes were durable before, so this is damage. Opening the log reports it.
                break
            if file.read_at(position, len(data)) != data:
                file_system.write_at(path, position, data)
                restored += len(data)
    finally:
        file.close()
    _sync(file_system, path)
    return restored


def _extents_by_segment(file_system: FileSystem, path: str) -> dict[str, dict[int, list[tuple[int, bytes]]]]:
    """Returns positions and bytes in the order of the journal, by folder and by base offset of the segment."""
    extents: dict[str, dict[int, list[tuple[int, bytes]]]] = {}
    for body in _frames(file_system, path):
        at = 0
        while at < len(body):
            name_size, base_offset, position, size = _EXTENT.unpack_from(body, at)
            at += _EXTENT.size + name_size
            folder = body[at - name_size : at].decode()
            if position == _FORGET:
                extents.pop(folder, None)
            else:
                extents.setdefault(folder, {}).setdefault(base_offset, []).append((position, body[at : at + size]))
            at += size
    return extents


def _frames(file_system: FileSystem, path: str) -> Iterator[bytes]:
    file = file_system.open_read(path)
    try:
        end = file.size()
        at = 0
        while len(frame := file.read_at(at, _FRAME.size)) == _FRAME.size:
            crc, size = _FRAME.unpack(frame)
            at += _FRAME.size
            if not size or size > end - at:
                return
            body = file.read_at(at, size)
            if crc32c(body) != crc:
                return
            yield body
            at += size
    finally:
        file.close()


def _active_segment(file_system: FileSystem, folder: str) -> int | None:
    try:
        names = file_system.list_dir(folder)
    except FileNotFoundError:
        return None
    return max((base for name in names if (base := base_offset_of(name)) is not None), default=None)


def _segment_path(log_dir: str, folder: str, base_offset: int) -> str:
    return join(join(log_dir, folder), segment_name(base_offset) + LOG_SUFFIX)


def _sync(file_system: FileSystem, path: str) -> None:
    if not file_system.exists(path):
        raise FileNotFoundError(path)
    file = file_system.open_append(path)
    try:
        file.datasync()
    finally:
        file.close()


def _remove(file_system: FileSystem, path: str) -> None:
    file_system.remove(path)
    file_system.sync_dir(parent(path))


RENEWAL_BYTES: Final = 32 << 20
"""The journal is renewed at this size, which limits what a start has to restore, unless a log cannot be synced."""


class JournaledLog(Protocol):
    """A log that can be synced as long as the process runs, even if it was closed or has failed meanwhile."""

    @property
    def folder(self) -> str:
        """The name of the log's folder."""

    def sync_names(self) -> None:
        """Makes the names of the log's files durable."""

    def flush(self) -> None:
        """Makes all appended batches durable. Raises an exception if that fails."""


class Appended(NamedTuple):
    """An append that has to be made durable."""

    log: JournaledLog
    info: AppendInfo
    data: Bytes


FlushAll: TypeAlias = Callable[[Sequence[JournaledLog]], list[Exception | None]]


def flush_each(logs: Sequence[JournaledLog]) -> list[Exception | None]:
    """Flushes the logs one after another. Returns an error or None for every log; an error does not stop the others."""
    return [_outcome(log.flush) for log in logs]


class DurableAppends:
    """Makes appends durable with the journal, or with the logs' own syncs. Used by one thread at a time.

    `flush_all` may sync several logs in parallel.
    """

    def __init__(
        self, journal: Journal, flush_all: FlushAll = flush_each, *, renewal_bytes: int = RENEWAL_BYTES
    ) -> None:
        self._journal = journal
        self._flush_all = flush_all
        self._renewal_bytes = renewal_bytes
        self._next_renewal_bytes = renewal_bytes
        self._unflushed: dict[str, JournaledLog] = {}

    @property
    def is_renewal_due(self) -> bool:
        """True if the journal has grown or is torn. `renew` makes its content durable in the logs then."""
        return self._journal.is_torn or self._journal.size_bytes >= self._next_renewal_bytes

    @property
    def is_renewal_useful(self) -> bool:
        """True if a log has appends that only the journal has made durable."""
        return bool(self._unflushed)

    def settle(self, appended: Sequence[Appended]) -> list[Exception | None]:
        """Makes the appends durable. Returns an error or None for every append; those without an error are durable."""
        outcomes = [_outcome(log.sync_names) for log, _, _ in appended]
        whole = [number for number, error in enumerate(outcomes) if error is None]
        if not whole:
            return outcomes
        if not self._write_and_sync([appended[number] for number in whole]):
            flushed = self._flush_all([appended[number].log for number in whole])
            for number, error in zip(whole, flushed, strict=True):
                outcomes[number] = error
        return outcomes

    def write(self, appended: Sequence[Appended]) -> bool:
        """Writes the appends to the journal for a caller that syncs the journal itself.

        Returns False if the journal is due for renewal or cannot be written; then `settle` has to be used. The names of
        the logs' files must be durable. After the sync the caller calls `note`, or `Journal.tear` if it failed.
        """
        if self.is_renewal_due:
            return False
        try:
            self._journal.write(_extents(appended))
        except OSError:
            return False
        except AssertionError as error:
            self._on_broken(error)
            return False
        return True

    def note(self, appended: Sequence[Appended]) -> None:
        """Notes appends that a sync of the journal has made durable."""
        self._unflushed.update([(log.folder, log) for log, _, _ in appended])

    def _write_and_sync(self, appended: Sequence[Appended]) -> bool:
        """Makes the appends durable with the journal. Returns False if that is not possible."""
        if self._journal.is_torn and not self.renew():
            return False
        try:
            self._journal.write(_extents(appended))
            self._journal.sync()
        except OSError:
            return False
        except AssertionError as error:
            self._on_broken(error)
            return False
        self.note(appended)
        return True

    def _on_broken(self, error: AssertionError) -> None:
        """Stops the use of the journal until it is renewed. The logs themselves are synced instead."""
        _logger.error("The journal is not used until it is renewed: %s", error, exc_info=error)
        self._journal.tear()

    def renew(self) -> bool:
        """Syncs all logs with extents in the journal, and empties it. Returns False if a log cannot be synced."""
        logs = list(self._unflushed.values())
        errors = self._flush_all(logs)
        self._unflushed = {log.folder: log for log, error in zip(logs, errors, strict=True) if error is not None}
        try:
            if not self._unflushed:
                self._journal.begin_anew()
        except OSError:
            pass
        self._next_renewal_bytes = self._journal.size_bytes + self._renewal_bytes
        return not self._unflushed and not self._journal.is_torn


def _extents(appended: Sequence[Appended]) -> list[Extent]:
    return [Extent(log.folder, info.segment_base_offset, info.position, data) for log, info, data in appended]


def _outcome(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None
