# SPDX-License-Identifier: Apache-2.0
"""A write-ahead journal for the logs of a data folder: one sync makes the appends of many logs durable.

The logs stay the truth. Each append goes to its log first, as far as the page cache, and then, with its place, to the
journal; the reply needs the sync of the journal alone. Only a machine that stops between two syncs of a log needs the
journal: the next start writes what it holds over the ends of the logs, before anybody opens them. Appends are only ever
behind one another, so doing that twice does no harm; segments that others follow were synced, and are left alone.

The file is a row of frames: CRC-32C and length of the body, then extents. The first damaged frame ends it.

`DurableAppends` makes appends durable by the journal, and now and then the logs themselves, so that the journal can
begin again. If the journal cannot be written, each log is synced instead: a log's own sync is always as good. The
journal begins again only when every log that it stands for is durable.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final, NamedTuple, Protocol, TypeAlias

from kcoord.storage.file_system import Bytes, File, FileSystem, join, parent, write_rest
from kcoord.storage.log import AppendInfo
from kcoord.storage.recovery import base_offset_of
from kcoord.storage.segment import LOG_SUFFIX, segment_name
from kcoord_protocol.batch_header import crc32c

JOURNAL_FILE = "journal"
_FRAME = struct.Struct(">II")
_EXTENT = struct.Struct(">HqqI")
_FORGET = -1
"""The position of an extent that makes all earlier ones of its folder void."""


class Extent(NamedTuple):
    """Bytes of a log: the name of its folder, the base offset of the segment, and where in that file they begin."""

    folder: str
    segment_base_offset: int
    position: int
    data: Bytes


class Journal:
    """The journal that a process writes. Any thread may call it, if `lock` is one. After a failed write it takes
    nothing until it was begun anew: what follows a torn frame would not be found.
    """

    def __init__(self, file_system: FileSystem, path: str, lock: AbstractContextManager[object] | None = None) -> None:
        """Begins an empty one; what an earlier process left was to be restored."""
        self._fs = file_system
        self._path = path
        self._lock = lock if lock is not None else nullcontext()
        self._folders: set[str] = set()
        self._size = 0
        self._is_torn = False
        self._file: File = file_system.open_append(path)
        self.descriptor = self._file.descriptor
        """The file, for whoever syncs it instead of `sync`."""
        self._file.truncate(0)
        self._file.datasync()
        file_system.sync_dir(parent(path))

    @property
    def size_bytes(self) -> int:
        return self._size

    @property
    def is_torn(self) -> bool:
        """A write failed: nothing more is taken before `begin_anew`."""
        return self._is_torn

    def write(self, extents: Sequence[Extent]) -> None:
        """Durable after a sync. After an OSError the extents may be found or not."""
        with self._lock:
            self._write(extents)
            self._folders.update([extent.folder for extent in extents])

    def sync(self) -> None:
        """Makes what was written durable."""
        with self._lock:
            self._sync()

    def tear(self) -> None:
        """A sync by somebody else failed."""
        self._is_torn = True

    def forget(self, folder: str) -> None:
        """The log of the folder was made durable and closed. From now on others may do with it what they like."""
        with self._lock:
            if folder in self._folders:
                self._write([Extent(folder, 0, _FORGET, b"")])
                self._sync()
                self._folders.discard(folder)

    def begin_anew(self) -> None:
        """All that was written here is durable in the logs."""
        with self._lock:
            self._is_torn = True
            self._file.truncate(0)
            self._file.datasync()
            self._folders.clear()
            self._size = 0
            self._is_torn = False

    def restore(self, log_dir: str, folder: str) -> None:
        """Writes what is here to one log, which failed and is about to be opened again."""
        with self._lock:
            _restore(self._fs, log_dir, self._path, folder)

    def remove(self) -> None:
        """As `begin_anew`, for good."""
        with self._lock:
            self._is_torn = True
            self.descriptor = None
            self._file.close()
            _remove(self._fs, self._path)

    def _write(self, extents: Sequence[Extent]) -> None:
        if self._is_torn:
            raise OSError("an earlier write to the journal failed")
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

    def _sync(self) -> None:
        was_torn, self._is_torn = self._is_torn, True
        self._file.datasync()
        self._is_torn = was_torn


def restore(file_system: FileSystem, log_dir: str, path: str) -> int:
    """After the end of a process: gives the logs in `log_dir` what they lack and the journal at `path` holds, durably.
    Then the journal is gone. Returns how many bytes it gave them.
    """
    if not file_system.exists(path):
        return 0
    restored = _restore(file_system, log_dir, path)
    _remove(file_system, path)
    return restored


def make_named_logs_durable(file_system: FileSystem, log_dir: str, path: str) -> None:
    """As `restore` while the machine has not stopped, so the files hold all of it, and others may have gone on with
    some of them.
    """
    if not file_system.exists(path):
        return
    for folder, segments in _found(file_system, path).items():
        for base_offset in segments:
            # Who took the segment away has synced what stands for it.
            with suppress(FileNotFoundError):
                _sync(file_system, _segment_path(log_dir, folder, base_offset))
    _remove(file_system, path)


def _restore(file_system: FileSystem, log_dir: str, path: str, only_folder: str | None = None) -> int:
    restored = 0
    for folder, segments in _found(file_system, path).items():
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
                # What lies between was on disk before. Opening the log tells about it.
                break
            if file.read_at(position, len(data)) != data:
                file_system.write_at(path, position, data)
                restored += len(data)
    finally:
        file.close()
    _sync(file_system, path)
    return restored


def _found(file_system: FileSystem, path: str) -> dict[str, dict[int, list[tuple[int, bytes]]]]:
    """Positions and bytes in the order of their writing, by folder and by base offset of the segment."""
    found: dict[str, dict[int, list[tuple[int, bytes]]]] = {}
    for body in _frames(file_system, path):
        at = 0
        while at < len(body):
            name_size, base_offset, position, size = _EXTENT.unpack_from(body, at)
            at += _EXTENT.size + name_size
            folder = body[at - name_size : at].decode()
            if position == _FORGET:
                found.pop(folder, None)
            else:
                found.setdefault(folder, {}).setdefault(base_offset, []).append((position, body[at : at + size]))
            at += size
    return found


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
"""As much as a start reads again at most, unless a log cannot be synced."""


class JournaledLog(Protocol):
    """A log that can be synced as long as the process runs, whatever happens to it meanwhile."""

    @property
    def folder(self) -> str:
        """The name of its folder."""

    def sync_names(self) -> None:
        """Makes the names of the log's files durable."""

    def flush(self) -> None:
        """Returns when all that was appended is durable; an exception where it is not."""


class Appended(NamedTuple):
    """An append that is to be made durable."""

    log: JournaledLog
    info: AppendInfo
    data: Bytes


FlushAll: TypeAlias = Callable[[Sequence[JournaledLog]], list[Exception | None]]


def flush_each(logs: Sequence[JournaledLog]) -> list[Exception | None]:
    """One log after the other. What becomes of each: a defect in one must not keep the others waiting."""
    return [_outcome(log.flush) for log in logs]


class DurableAppends:
    """See the module's text. One thread at a time uses it. `flush_all` may sync several logs at a time."""

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
        """It has grown, or it failed: what it holds is durable in the logs soon then."""
        return self._journal.is_torn or self._journal.size_bytes >= self._next_renewal_bytes

    @property
    def is_renewal_useful(self) -> bool:
        """Whether there is something that only the journal has made durable."""
        return bool(self._unflushed)

    def settle(self, appended: Sequence[Appended]) -> list[Exception | None]:
        """When it returns, everything is durable but that of logs with an error."""
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
        """For who syncs the journal by himself: whether all is durable after that, and the journal the place for it.
        The names of the files are durable already. `note` follows, or `Journal.tear`.
        """
        if self.is_renewal_due:
            return False
        try:
            self._journal.write(_extents(appended))
        except OSError:
            return False
        return True

    def note(self, appended: Sequence[Appended]) -> None:
        """The journal has made it durable."""
        self._unflushed.update([(log.folder, log) for log, _, _ in appended])

    def _write_and_sync(self, appended: Sequence[Appended]) -> bool:
        """False where the journal takes nothing."""
        if self._journal.is_torn and not self.renew():
            return False
        try:
            self._journal.write(_extents(appended))
            self._journal.sync()
        except OSError:
            return False
        self.note(appended)
        return True

    def renew(self) -> bool:
        """Syncs the logs and begins the journal anew; False where one of them cannot be synced."""
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
