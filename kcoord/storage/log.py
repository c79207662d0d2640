# SPDX-License-Identifier: Apache-2.0
"""A log of record batches in segments: what was appended is there after `flush()`, whatever happens then.

Threads: everything that changes a log (append, flush, checkpoint, roll, advance_start_offset,
delete_old_segments, close, delete) is called by one thread at a time. What is of `ReadableLog`, and the properties, may
run in another thread meanwhile: they see a batch once `end_offset` has passed it and never part of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kcoord.storage.errors import (
    InvalidAppendError,
    LogFailedError,
    OffsetOutOfRangeError,
    StorageError,
    TruncateFailedError,
)
from kcoord.storage.file_cache import FileCache
from kcoord.storage.file_system import Bytes, FileSystem, join, parent
from kcoord.storage.log_loader import LogLoader, segment_number
from kcoord.storage.readable_log import ReadableLog
from kcoord.storage.recovery import Recovery, RecoveryReport
from kcoord.storage.segment import BatchPlace, LogConfig, Segment
from kcoord_protocol.batch_header import LOG_OVERHEAD_BYTES
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import walk_batches

_OWN_FILES = 8


@dataclass(slots=True)
class AppendInfo:
    """Where an append went."""

    base_offset: int
    last_offset: int
    max_timestamp: int
    segment_base_offset: int
    position: int
    size_bytes: int
    rolled: bool


class Log(ReadableLog):
    """The segments of one partition folder. `Log.open` makes one."""

    __slots__ = (
        "_config",
        "_failure",
        "_files",
        "_flushed_offset",
        "_is_closed",
        "_is_entry_unsynced",
        "_is_folder_unsynced",
        "_replaced",
        "_retired",
        "directory",
        "recovery_report",
    )

    def __init__(self, files: FileCache, directory: str, config: LogConfig) -> None:
        super().__init__()
        self.directory = directory
        self.recovery_report = RecoveryReport()
        self._files = files
        self._config = config
        self._replaced: tuple[Segment, ...] = ()
        self._retired: list[tuple[int, str]] = []
        self._flushed_offset = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        self._is_entry_unsynced = False
        self._is_folder_unsynced = False

    def __repr__(self) -> str:
        return f"Log({self.directory}, {self._start_offset}..{self._end_offset})"

    # -- opening -------------------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        file_system: FileSystem,
        directory: str,
        config: LogConfig,
        now_ms: int,
        *,
        recovery: Recovery | None = None,
        files: FileCache | None = None,
    ) -> Log:
        """Open the log in `directory`, or begin one there. Raises CorruptLogError for what only an operator may repair.

        `files` bounds the open files of all logs that share it.
        """
        log = cls(files or FileCache(file_system, _OWN_FILES), directory, config)
        log._load(recovery or Recovery(), now_ms)
        return log

    def _load(self, recovery: Recovery, now_ms: int) -> None:
        if not self._fs.exists(self.directory):
            self._fs.make_dirs(self.directory)
        loader = LogLoader(self._files, self.directory, self._config, now_ms, recovery)
        loader.load()
        self.recovery_report = loader.report
        self._segments = tuple(loader.segments)
        self._end_offset = loader.end_offset
        self._flushed_offset = loader.end_offset if recovery.clean else min(recovery.recovery_point, loader.end_offset)
        self._is_folder_unsynced = bool(loader.report.removed_files)
        # A folder without segments is probably as new as they will be.
        self._is_entry_unsynced = not self._segments
        if self._flushed_offset < self._end_offset:
            # Bytes that survived the end of a process need not survive the end of the machine. They will be served now.
            self._segments[-1].is_unsynced = self._is_entry_unsynced = self._is_folder_unsynced = True
            self.flush()
        if not self._segments or self._end_offset < recovery.start_offset:
            # Everything that is left was deleted by moving the start offset.
            self._start_anew(recovery.start_offset, now_ms)
        self._start_offset = max(recovery.start_offset, self._segments[0].base_offset)

    def _start_anew(self, offset: int, now_ms: int) -> None:
        old = self._segments
        self._segments = (self._new_segment(offset, now_ms),)
        self._end_offset = self._start_offset = self._flushed_offset = offset
        for segment in old:
            segment.delete()

    def _new_segment(self, base_offset: int, now_ms: int) -> Segment:
        segment = Segment(self._files, self.directory, base_offset, self._config, now_ms)
        segment.create()
        self._is_folder_unsynced = True
        return segment

    # -- properties ----------------------------------------------------------------------------------------------------

    @property
    def _fs(self) -> FileSystem:
        return self._files.file_system

    @property
    def config(self) -> LogConfig:
        return self._config

    @config.setter
    def config(self, config: LogConfig) -> None:
        self._config = config
        for segment in self._segments:
            segment.config = config

    @property
    def flushed_offset(self) -> int:
        """Everything below it is on disk."""
        return self._flushed_offset

    @property
    def failure(self) -> BaseException | None:
        """Why the log takes no more appends until it is opened again."""
        return self._failure

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def reopening(self) -> Recovery:
        """What is known for opening this log again in the same process, be it after a failure or after `close`."""
        is_failed = self._failure is not None
        return Recovery(recovery_point=self._flushed_offset, start_offset=self._start_offset, rewrite=is_failed)

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, data: Bytes, *, now_ms: int) -> AppendInfo:
        """Write whole batches whose offsets are final and continue the log: readable now, durable after a flush.

        After an OSError nothing was appended; where the file could not be put right, the log has failed.
        """
        info = self._append(data, now_ms, may_sync=True)
        assert info is not None
        return info

    def append_without_sync(self, data: Bytes, *, now_ms: int) -> AppendInfo | None:
        """As `append`; None, and nothing is done, where a new segment or its name would wait for the disk."""
        return self._append(data, now_ms, may_sync=False)

    def _append(self, data: Bytes, now_ms: int, *, may_sync: bool) -> AppendInfo | None:
        self._check_usable()
        base_offset, entries = self._parse(data)
        last_offset = entries[-1][2]
        max_timestamp = max([entry[3] for entry in entries])
        rolled = self._segments[-1].should_roll(len(data), last_offset, max_timestamp, now_ms)
        if not may_sync and (rolled or self._is_folder_unsynced or self._is_entry_unsynced):
            return None
        if rolled:
            self._roll(base_offset, now_ms)
        segment = self._segments[-1]
        position = segment.size_bytes
        try:
            segment.write(data)
        except TruncateFailedError as error:
            self._failure = error
            raise LogFailedError(str(error)) from error
        segment.note_all(position, entries)
        self._end_offset = last_offset + 1
        return AppendInfo(base_offset, last_offset, max_timestamp, segment.base_offset, position, len(data), rolled)

    def _parse(self, data: Bytes) -> tuple[int, list[BatchPlace]]:
        offset = self._end_offset
        at = 0
        entries: list[BatchPlace] = []
        first_offset = -1
        try:
            for at, fields in walk_batches(data):
                base, length, _, _, _, _, last_delta, _, max_timestamp, _, _, _, _ = fields
                if base < offset:
                    raise InvalidAppendError(f"base offset {base} at {at}, but the log is at {offset} already")
                size = length + LOG_OVERHEAD_BYTES
                entries.append((at, size, base + last_delta, max_timestamp))
                first_offset = base if at == 0 else first_offset
                offset = base + last_delta + 1
                at += size
        except CorruptBatchError as error:
            raise InvalidAppendError(f"no record batch at {error.position}: {error}") from None
        if at != len(data):
            raise InvalidAppendError(f"{len(data) - at} bytes at {at} are no whole record batch")
        if not entries:
            raise InvalidAppendError("an empty append")
        return first_offset, entries

    def flush(self) -> None:
        """Make everything durable that was appended.

        A failed sync fails the log for good: the kernel may have dropped the bytes, so a later success means nothing.
        """
        self._check_usable()
        end_offset = self._end_offset
        try:
            self._segments[-1].sync()
        except OSError as error:
            self._failure = error
            raise
        self.sync_names()
        self._flushed_offset = end_offset

    def sync_names(self) -> None:
        """Make the names of the files durable that `append` made."""
        try:
            if self._is_folder_unsynced:
                self._fs.sync_dir(self.directory)
                self._is_folder_unsynced = False
            if self._is_entry_unsynced:
                self._fs.sync_dir(parent(self.directory))
                self._is_entry_unsynced = False
        except OSError as error:
            self._failure = error
            raise

    def checkpoint(self) -> int:
        """Flush, and make the indexes durable too: the returned offset may be used as the next recovery point."""
        self.flush()
        self._write_indexes()
        return self._flushed_offset

    def store_indexes(self) -> None:
        """Give the index files what they lack, so that a recovery point saves the reading of what lies below it.

        Where nothing of the active segment is known to be durable there is no such point, and nothing waits for a disk.
        """
        is_usable = self._failure is None and not self._is_closed
        if is_usable and self._flushed_offset > self._segments[-1].base_offset:
            self._write_indexes()

    def _write_indexes(self) -> None:
        if self._segments[-1].write_indexes():
            self._is_folder_unsynced = True
            self.sync_names()

    def roll(self, now_ms: int) -> bool:
        """Begin a new segment; False where the active one is empty."""
        self._check_usable()
        if self._segments[-1].size_bytes == 0:
            return False
        self._roll(self._end_offset, now_ms)
        return True

    def _roll(self, base_offset: int, now_ms: int) -> None:
        """The old segment is durable before the new one exists, so only the last segment can ever have a torn tail."""
        old = self._segments[-1]
        if old.size_bytes == 0:
            self._segments = (*self._segments[:-1], self._new_segment(base_offset, now_ms))
            self._start_offset = max(self._start_offset, self._segments[0].base_offset)
            old.delete()
            return
        old.seal()
        self.flush()
        old.write_indexes()
        self._segments = (*self._segments, self._new_segment(base_offset, now_ms))
        old.become_inactive()

    def advance_start_offset(self, offset: int) -> int:
        """Records below `offset` are gone for readers; their files follow with `delete_old_segments`."""
        if offset > self._end_offset:
            raise OffsetOutOfRangeError(offset, self._start_offset, self._end_offset)
        self._start_offset = max(self._start_offset, offset)
        return self._start_offset

    def delete_old_segments(self, predicate: Callable[[Segment], bool], now_ms: int) -> int:
        """Delete segments from the oldest on, while they lie below the start offset or `predicate` says so.

        A new active segment is begun where the active one is to go. While a cleaner replaces segments nothing goes.
        """
        self._check_usable()
        if self._replaced:
            return 0
        segments = self._segments
        count = 0
        for segment, following in zip(segments, (*segments[1:], None), strict=True):
            is_below_start = following is not None and following.base_offset <= self._start_offset
            # A segment that cleaning left empty goes with those around it.
            is_emptied = segment.size_bytes == 0 and following is not None
            if (segment.size_bytes == 0 and not is_emptied) or not (is_below_start or is_emptied or predicate(segment)):
                break
            count += 1
        if count == len(segments):
            self._roll(self._end_offset, now_ms)
            # The new file must outlive the old ones.
            self.sync_names()
        if count:
            self._segments = self._segments[count:]
            self._start_offset = max(self._start_offset, self._segments[0].base_offset)
            self._is_folder_unsynced = True
            for segment in segments[:count]:
                self._remove_segment(segment, now_ms)
        return count

    def _remove_segment(self, segment: Segment, now_ms: int) -> None:
        delay_ms = self._config.file_delete_delay_ms
        if delay_ms:
            self._retired += ((now_ms + delay_ms, path) for path in segment.retire())
        else:
            segment.delete()

    def take_retired_files(self) -> list[tuple[int, str]]:
        """Files of deleted segments that are still there, each with the time of its removal, for whoever removes them.
        The next opening of the log removes those that are left.
        """
        retired, self._retired = self._retired, []
        return retired

    # -- replacing segments: the steps of a cleaner, see replacement.py ------------------------------------------------

    def new_segment_for(self, old: Segment) -> Segment:
        """One that will stand in the place of `old` and those behind it. It has no files yet."""
        return Segment(self._files, self.directory, old.base_offset, self._config, old.created_ms)

    def begin_replacement(self, old: tuple[Segment, ...]) -> bool:
        """Reserve closed segments that follow each other; False where the log does not consist of them any more."""
        if self._is_closed or self._failure is not None or self._replaced:
            return False
        number = segment_number(self._segments[:-1], old[0].base_offset)
        if self._segments[number : min(number + len(old), len(self._segments) - 1)] != old:
            return False
        self._replaced = old
        return True

    def publish_replacement(self, new: Segment) -> bool:
        """Readers find the new segment in place of the reserved ones from now on; False where the log is closed."""
        old = self._replaced
        if self._is_closed:
            return False
        number = self._segments.index(old[0])
        self._segments = (*self._segments[:number], new, *self._segments[number + len(old) :])
        return True

    def fail(self, error: BaseException) -> None:
        """What is on disk is not what is in memory any more: the log has to be opened again."""
        self._failure = self._failure or error

    def end_replacement(self) -> None:
        """Done or given up: segments may be deleted again."""
        self._replaced = ()

    def close(self) -> None:
        """Make everything durable, indexes included, and let go of the files. A failed log only lets go."""
        if self._is_closed:
            return
        try:
            if self._failure is None:
                self._segments[-1].seal()
                self.checkpoint()
        except OSError as error:
            self._failure = error
            raise
        finally:
            self._is_closed = True
            for segment in self._segments:
                segment.close()

    def abandon(self) -> None:
        """Let go of the files without making anything durable: the folder is about to be deleted."""
        self._is_closed = True
        for segment in self._segments:
            segment.close()

    def delete(self) -> None:
        """Remove the folder and everything in it. The caller syncs the folder above."""
        self._is_closed = True
        for segment in self._segments:
            segment.close()
        for name in self._fs.list_dir(self.directory):
            self._fs.remove(join(self.directory, name))
        self._fs.remove_dir(self.directory)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise LogFailedError(f"{self.directory}: failed earlier: {self._failure}") from self._failure
        if self._is_closed:
            raise StorageError(f"{self.directory}: the log is closed")
