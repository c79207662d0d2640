# SPDX-License-Identifier: Apache-2.0
"""A log of record batches in segments. After `flush()` every appended batch survives a crash.

Theory of operation
-------------------
A log is a folder with segments, which follow each other without overlap. Only the last segment, the active one, is
appended to. The log has three offsets: `start_offset` <= `flushed_offset` <= `end_offset` (the flushed offset may be
lower only if the start offset was advanced into unflushed batches). Batches below the start offset are deleted. Batches
below the flushed offset are durable. The next batch gets at least the end offset.

* *Append*: the data is checked to be whole batches whose offsets continue the log. The bytes are written to the active
  segment, then the indexes are updated, and last the end offset moves. A failed write is undone by truncation. If that
  fails too, the log has failed.
* *Roll*: the active segment is made durable before the next one is created. So after a crash only the last segment
  can have a torn end. A log with `LaterSyncs` begins the next segment at once, and another thread makes the old one
  durable (`rolled`). Until then the flushed offset is not above the old segment, and a mark tells recovery about it.
* *Flush*: the file is synced, then the names of new files. After a failed sync the log has failed, because the kernel
  may have dropped the bytes, and a later sync would succeed without them.
* *Failed*: every change raises LogFailedError. Reads still work. The owner opens the log again with
  `Recovery.rewrite`, which writes everything above the flushed offset again.
* *Delete*: segments are removed from the oldest on. The start offset never falls.
* *Crash*: recovery keeps everything below the recovery point, and after it as many whole batches as the disk has
  (`recovery`). So a batch is lost only with all batches after it, and only if it was not flushed.

Threads: one thread at a time calls the methods that change a log (append, flush, checkpoint, roll,
advance_start_offset, delete_old_segments, close, delete), and `_end_syncs`, which `LaterSyncs` calls. The methods of
`ReadableLog` and the properties may be called by other threads at the same time. They see a batch as soon as
`end_offset` is beyond it, and never a part of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

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
from kcoord.storage.rolled import LaterSyncs, RolledSegment, mark_path, sync_all
from kcoord.storage.segment import BatchPlace, LogConfig, Segment
from kcoord_protocol.batch_header import BATCH_OVERHEAD_BYTES, LOG_OVERHEAD_BYTES, MAGIC, PLACE
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import walk_batches

MOST_UNSYNCED: Final = 16
"""The number of closed segments that a log may have to sync before a roll waits for the oldest one."""

_OWN_FILES = 8


class AppendInfo(NamedTuple):
    """The place of an append in the log: a segment, and a position in its file. `rolled`: it is a new segment."""

    segment_base_offset: int
    position: int
    rolled: bool


class Log(ReadableLog):
    """The segments of one partition folder. `Log.open` opens a log. The module docstring describes its life."""

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
        "_rolled",
        "directory",
        "later_syncs",
        "recovery_report",
    )

    def __init__(self, files: FileCache, directory: str, config: LogConfig) -> None:
        super().__init__()
        self.directory = directory
        self.later_syncs: LaterSyncs | None = None
        """How another thread syncs closed segments. Without it a roll waits for the disk."""
        self.recovery_report = RecoveryReport()
        self._files = files
        self._config = config
        self._rolled: tuple[RolledSegment, ...] = ()
        """The closed segments that are not durable yet, oldest first. The active segment follows them."""
        self._replaced: tuple[Segment, ...] = ()
        self._retired: list[tuple[int, str]] = []
        self._flushed_offset = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        self._is_entry_unsynced = False
        self._is_folder_unsynced = False

    def __repr__(self) -> str:
        return f"Log({self.directory}, {self.start_offset}..{self.end_offset})"

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
        """Opens the log in `directory`, or creates an empty one.

        Raises CorruptLogError for damage that only an operator may repair. `files` limits the open files of all logs
        that share it.
        """
        log = cls(files or FileCache(file_system, _OWN_FILES), directory, config)
        try:
            log._load(recovery or Recovery(), now_ms)
        except BaseException:
            # The cache knows files by their paths, and the folder may belong to another topic of that name soon.
            log.abandon()
            raise
        return log

    def _load(self, recovery: Recovery, now_ms: int) -> None:
        if not self._fs.exists(self.directory):
            self._fs.make_dirs(self.directory)
        loader = LogLoader(self._files, self.directory, self._config, now_ms, recovery)
        try:
            loader.load()
        finally:
            self._segments = tuple(loader.segments)
        self.recovery_report = loader.report
        self.end_offset = loader.end_offset
        self._flushed_offset = loader.end_offset if recovery.clean else min(recovery.recovery_point, loader.end_offset)
        # The names of an empty segment and of an empty log may not be durable: an earlier open may have failed, or its
        # process may have ended, before the first flush.
        is_last_empty = not self._segments or self._segments[-1].size_bytes == 0
        self._is_folder_unsynced = is_last_empty or bool(loader.report.removed_files)
        self._is_entry_unsynced = is_last_empty and len(self._segments) <= 1
        if self._flushed_offset < self.end_offset:
            # The sync may take ten times as long as reading the bytes.
            recovery.check(10 * loader.report.scanned_bytes)
            # These bytes survived the end of the process, but may be only in the page cache. Readers will see them.
            self._segments[-1].is_unsynced = self._is_entry_unsynced = self._is_folder_unsynced = True
            self.flush()
        if not self._segments or self.end_offset < recovery.start_offset:
            # All batches in the files are below the start offset, so they are deleted.
            self._start_anew(recovery.start_offset, now_ms)
        self.start_offset = max(recovery.start_offset, self._segments[0].base_offset)

    def _start_anew(self, offset: int, now_ms: int) -> None:
        old = self._segments
        self._segments = (self._new_segment(offset, now_ms),)
        self.end_offset = self.start_offset = self._flushed_offset = offset
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
        """The settings of the log. A new value takes effect with the next append."""
        return self._config

    @config.setter
    def config(self, config: LogConfig) -> None:
        self._config = config
        for segment in self._segments:
            segment.config = config

    @property
    def flushed_offset(self) -> int:
        """All batches below this offset are durable."""
        return self._flushed_offset

    @property
    def settled_offset(self) -> int:
        """All segments below this offset are closed and durable."""
        rolled = self._rolled
        return rolled[0].segment.base_offset if rolled else self._segments[-1].base_offset

    @property
    def failure(self) -> BaseException | None:
        """The error after which the log accepts no appends until it is opened again; None if there was none."""
        return self._failure

    @property
    def is_closed(self) -> bool:
        """True after `close`, `abandon` or `delete`."""
        return self._is_closed

    def reopening(self) -> Recovery:
        """Returns the argument for opening this log again in the same process, after a failure or after `close`."""
        is_failed = self._failure is not None
        return Recovery(recovery_point=self._flushed_offset, start_offset=self.start_offset, rewrite=is_failed)

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, data: Bytes, *, now_ms: int) -> AppendInfo:
        """Appends whole batches whose offsets are final and continue the log. They are durable after a flush.

        After an OSError nothing was appended. If the file could not be truncated to its old end, the log has failed.
        Raises InvalidAppendError if the data is not whole batches or does not continue the log.
        """
        self._check_usable()
        base_offset, entries = self._parse(data)
        info = self._append(data, base_offset, entries, now_ms, may_sync=True)
        assert info is not None
        return info

    def append_batch(
        self, data: Bytes, base_offset: int, last_offset: int, max_timestamp: int, *, now_ms: int
    ) -> AppendInfo:
        """Appends like `append`, but does not read the batch. The caller has just stamped these values on it."""
        self._check_usable()
        if base_offset < self.end_offset:
            raise InvalidAppendError(f"the batch has base offset {base_offset}, but the log ends at {self.end_offset}")
        info = self._append(data, base_offset, [(0, len(data), last_offset, max_timestamp)], now_ms, may_sync=True)
        assert info is not None
        return info

    def append_without_sync(self, data: Bytes, *, now_ms: int) -> AppendInfo | None:
        """Appends like `append`. Returns None, without any change, if a new segment or its name needs a sync first."""
        self._check_usable()
        base_offset, entries = self._parse(data)
        return self._append(data, base_offset, entries, now_ms, may_sync=False)

    def _append(
        self, data: Bytes, base_offset: int, entries: list[BatchPlace], now_ms: int, *, may_sync: bool
    ) -> AppendInfo | None:
        last_offset = entries[-1][2]
        max_timestamp = entries[0][3] if len(entries) == 1 else max([entry[3] for entry in entries])
        segment = self._segments[-1]
        rolled = segment.should_roll(len(data), last_offset, max_timestamp, now_ms)
        if not may_sync and (rolled or self._is_folder_unsynced or self._is_entry_unsynced):
            return None
        if rolled:
            self._roll(base_offset, now_ms)
            segment = self._segments[-1]
        try:
            position = segment.write(data)
        except TruncateFailedError as error:
            self._failure = error
            raise LogFailedError(str(error)) from error
        try:
            segment.note_all(position, entries)
        except AssertionError as error:
            # The file has bytes that the segment does not have. Opening the log again decides what they are.
            self._failure = error
            raise
        self.end_offset = last_offset + 1
        # Takes a third of the time of the constructor of the class.
        return tuple.__new__(AppendInfo, (segment.base_offset, position, rolled))

    def _parse(self, data: Bytes) -> tuple[int, list[BatchPlace]]:
        offset = self.end_offset
        if len(data) >= BATCH_OVERHEAD_BYTES:
            # Most appends are one batch, such as a commit that arrives alone. The loop below takes three times as long.
            base, length, magic, last_delta, max_timestamp = PLACE.unpack_from(data)
            if length == len(data) - LOG_OVERHEAD_BYTES and magic == MAGIC and base >= offset and last_delta >= 0:
                return base, [(0, len(data), base + last_delta, max_timestamp)]
        at = 0
        entries: list[BatchPlace] = []
        first_offset = -1
        try:
            for at, fields in walk_batches(data):
                base, length, _, _, _, _, last_delta, _, max_timestamp, _, _, _, _ = fields
                if base < offset:
                    raise InvalidAppendError(f"the batch at {at} has base offset {base}, but the log ends at {offset}")
                size = length + LOG_OVERHEAD_BYTES
                entries.append((at, size, base + last_delta, max_timestamp))
                first_offset = base if at == 0 else first_offset
                offset = base + last_delta + 1
                at += size
        except CorruptBatchError as error:
            raise InvalidAppendError(f"no record batch at {error.position}: {error}") from None
        if at != len(data):
            raise InvalidAppendError(f"{len(data) - at} bytes at {at} are not a whole record batch")
        if not entries:
            raise InvalidAppendError("the append has no batches")
        return first_offset, entries

    def flush(self) -> None:
        """Makes all appended batches durable.

        After a failed sync the log has failed: the kernel may have dropped the bytes, so a later sync proves nothing.
        """
        self._check_usable()
        end_offset = self.end_offset
        active = self._segments[-1]
        sync_all(self._rolled)
        self._end_syncs()
        self._check_usable()
        try:
            _check_size(active)
            assert self._flushed_offset <= end_offset, (
                f"S-3: {self.directory} is durable up to offset {self._flushed_offset}, but ends at {end_offset}"
            )
            active.sync()
        except (OSError, AssertionError) as error:
            self._failure = error
            raise
        self.sync_names()
        self._flushed_offset = end_offset

    def sync_names(self) -> None:
        """Makes the names of the files that `append` created durable."""
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
        """Makes all batches and the indexes durable. The returned offset can be used as the recovery point."""
        self.flush()
        self._write_indexes()
        return self._flushed_offset

    def store_indexes(self) -> None:
        """Writes missing entries to the index files, so that recovery need not read the batches below them.

        Does nothing if no batch of the active segment is known to be durable, because no recovery point is in it then.
        """
        is_usable = self._failure is None and not self._is_closed
        if is_usable and self._flushed_offset > self._segments[-1].base_offset:
            self._write_indexes()

    def _write_indexes(self) -> None:
        if self._segments[-1].write_indexes():
            self._is_folder_unsynced = True
            self.sync_names()

    def roll(self, now_ms: int) -> bool:
        """Begins a new segment. Returns False if the active one is empty."""
        self._check_usable()
        if self._segments[-1].size_bytes == 0:
            return False
        self._roll(self.end_offset, now_ms)
        return True

    def _roll(self, base_offset: int, now_ms: int) -> None:
        """Begins a new segment. The old one is made durable before, or by another thread afterwards."""
        assert base_offset >= self.end_offset, (
            f"S-4: a segment of {self.directory} begins at offset {base_offset}, but the log ends at {self.end_offset}"
        )
        old = self._segments[-1]
        if old.size_bytes == 0:
            if self._rolled:
                # The mark names the segment that is replaced now.
                self.flush()
            self._segments = (*self._segments[:-1], self._new_segment(base_offset, now_ms))
            self.start_offset = max(self.start_offset, self._segments[0].base_offset)
            old.delete()
            return
        old.seal()
        if self.later_syncs is not None and base_offset == self.end_offset:
            self._roll_unsynced(old, self.later_syncs, now_ms)
            return
        self.flush()
        old.write_indexes()
        self._segments = (*self._segments, self._new_segment(base_offset, now_ms))
        old.become_inactive()

    def _roll_unsynced(self, old: Segment, later_syncs: LaterSyncs, now_ms: int) -> None:
        """Begins a new segment at the end of the log. Another thread makes the old one durable."""
        self._check_usable()
        try:
            _check_size(old)
        except (OSError, AssertionError) as error:
            self._failure = error
            raise
        if len(self._rolled) >= MOST_UNSYNCED:
            # The disk is too slow. Each unsynced segment has an open file.
            sync_all(self._rolled[:1])
            self._end_syncs()
            self._check_usable()
        folders = [self.directory, parent(self.directory)] if self._is_entry_unsynced else [self.directory]
        rolled = RolledSegment(self._fs, old, self.end_offset, folders, later_syncs.new_lock)
        # The mark is made first, so no crash leaves the new segment without it.
        self._fs.open_append(mark_path(self.directory, self.end_offset)).close()
        self._segments = (*self._segments, self._new_segment(self.end_offset, now_ms))
        self._rolled = (*self._rolled, rolled)
        later_syncs.in_background(partial(sync_all, self._rolled), self._end_syncs)

    def _end_syncs(self) -> None:
        """Settles the closed segments that are durable and have indexes by now. A failed sync fails the log."""
        while self._rolled and not self._is_closed and self._failure is None:
            rolled = self._rolled[0]
            if rolled.error is not None:
                self._failure = rolled.error
            if not rolled.has_indexes:
                return
            self._rolled = self._rolled[1:]
            self._flushed_offset = max(self._flushed_offset, rolled.end_offset)
            self._is_entry_unsynced = False
            rolled.segment.settle_roll()
            self._unmark(rolled)

    def _unmark(self, rolled: RolledSegment) -> None:
        # A mark that is left costs the next recovery a sync.
        with suppress(OSError):
            self._fs.remove(mark_path(self.directory, rolled.end_offset))

    def advance_start_offset(self, offset: int) -> int:
        """Hides the records below `offset` from readers. `delete_old_segments` removes their files.

        The start offset never falls. Returns the new start offset.
        """
        if offset > self.end_offset:
            raise OffsetOutOfRangeError(offset, self.start_offset, self.end_offset)
        self.start_offset = max(self.start_offset, offset)
        return self.start_offset

    def delete_old_segments(self, predicate: Callable[[Segment], bool], now_ms: int) -> int:
        """Deletes segments from the oldest on, as long as they are below the start offset or `predicate` is true.

        If the active segment is to be deleted, a new one is begun first. Nothing is deleted while a cleaner replaces
        segments. Returns the number of deleted segments.
        """
        self._check_usable()
        if self._replaced:
            return 0
        segments = self._segments
        count = 0
        for segment, following in zip(segments, (*segments[1:], None), strict=True):
            is_below_start = following is not None and following.base_offset <= self.start_offset
            # Cleaning can leave an empty segment, which is deleted together with the segments around it.
            is_emptied = segment.size_bytes == 0 and following is not None
            if (segment.size_bytes == 0 and not is_emptied) or not (is_below_start or is_emptied or predicate(segment)):
                break
            count += 1
        if count == len(segments):
            self._roll(self.end_offset, now_ms)
            # The name of the new file must be durable before the old files are removed.
            self.sync_names()
        if count:
            assert len(self._segments) > count, f"S-5: {self.directory} has no segment left after {count} were deleted"
            self._segments = self._segments[count:]
            self.start_offset = max(self.start_offset, self._segments[0].base_offset)
            self._is_folder_unsynced = True
            unsynced = [rolled for rolled in self._rolled if rolled.segment in segments[:count]]
            self._rolled = self._rolled[len(unsynced) :]
            for rolled in unsynced:
                rolled.cancel()
            for segment in segments[:count]:
                self._remove_segment(segment, now_ms)
            for rolled in unsynced:
                self._unmark(rolled)
        return count

    def _remove_segment(self, segment: Segment, now_ms: int) -> None:
        delay_ms = self._config.file_delete_delay_ms
        if delay_ms:
            self._retired += ((now_ms + delay_ms, path) for path in segment.retire())
        else:
            segment.delete()

    def take_retired_files(self) -> list[tuple[int, str]]:
        """Returns the files of deleted segments that still exist, with the times at which the caller removes them.

        The next opening of the log removes files that are left.
        """
        retired, self._retired = self._retired, []
        return retired

    # -- replacing segments: the steps of a cleaner, see replacement.py ------------------------------------------------

    def new_segment_for(self, old: Segment) -> Segment:
        """Returns a segment, still without files, that will replace `old` and segments after it."""
        return Segment(self._files, self.directory, old.base_offset, self._config, old.created_ms)

    def begin_replacement(self, old: tuple[Segment, ...]) -> bool:
        """Reserves consecutive settled segments. Returns False if the log no longer has all of them in this order."""
        if self._is_closed or self._failure is not None or self._replaced:
            return False
        if old[-1].base_offset >= self.settled_offset:
            return False
        number = segment_number(self._segments[:-1], old[0].base_offset)
        if self._segments[number : min(number + len(old), len(self._segments) - 1)] != old:
            return False
        self._replaced = old
        return True

    def publish_replacement(self, new: Segment) -> bool:
        """Shows readers the new segment in place of the reserved ones. Returns False if the log is closed."""
        old = self._replaced
        if self._is_closed:
            return False
        number = self._segments.index(old[0])
        following = self._segments[number + len(old)]
        assert new.base_offset == old[0].base_offset and new.next_offset <= following.base_offset, (
            f"S-6: {new.log_path} ends before offset {new.next_offset} and cannot replace the segments "
            f"from {old[0].base_offset} to before {following.base_offset}"
        )
        self._segments = (*self._segments[:number], new, *self._segments[number + len(old) :])
        return True

    def fail(self, error: BaseException) -> None:
        """Marks the log as failed, because disk and memory differ. It has to be opened again."""
        self._failure = self._failure or error

    def end_replacement(self) -> None:
        """Ends a replacement that was finished or abandoned. Segments may be deleted again."""
        self._replaced = ()

    def close(self) -> None:
        """Makes all batches and indexes durable, and closes the files. If the log has failed, only closes the files."""
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
            self._close_files()

    def abandon(self) -> None:
        """Closes the files without making anything durable, because the folder is about to be deleted."""
        self._close_files()

    def _close_files(self) -> None:
        self._is_closed = True
        for rolled in self._rolled:
            rolled.cancel()
        for segment in self._segments:
            segment.close()

    def delete(self) -> None:
        """Removes the folder with all its files. The caller syncs the parent folder."""
        self._close_files()
        for name in self._fs.list_dir(self.directory):
            self._fs.remove(join(self.directory, name))
        self._fs.remove_dir(self.directory)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise LogFailedError(f"{self.directory}: the log failed earlier: {self._failure}") from self._failure
        if self._is_closed:
            raise StorageError(f"{self.directory}: the log is closed")


def _check_size(segment: Segment) -> None:
    assert not segment.is_unsynced or segment.file().size() == segment.size_bytes, (
        f"S-2: {segment.log_path} has {segment.file().size()} bytes, but its batches have {segment.size_bytes}"
    )
