# SPDX-License-Identifier: Apache-2.0
"""The cache of open files and indexes against a list in the order of use. Every opened file is closed again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from kcoord.runtime.snapshot import Chunk, Snapshot
from kcoord.storage.errors import OpeningCanceledError, StorageError
from kcoord.storage.file_cache import FileCache
from kcoord.storage.file_system import File, make_durable_dirs, read_file, write_file_atomically
from kcoord.storage.journal import JOURNAL_FILE, Extent, Journal, make_named_logs_durable, restore
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation
from kcoord.storage.recovery import Recovery
from kcoord.storage.segment_indexes import SegmentIndexes
from kcoord.storage.snapshot import read_snapshot, write_snapshot
from tests.storage.cleaning import Writer, clean
from tests.storage.support import DIRECTORY, LOG_FILE, NOW_MS, batch, filled_log, new_config, open_log


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_least_recently_used_entry_is_evicted_first(most: int) -> None:
    rng = random.Random(most)
    fs = MemoryFileSystem()
    for path in "abcd":
        fs.open_append(path)
    cache = FileCache(fs, max_files=most, max_indexes=most)
    opened: dict[tuple[str, str], File] = {}
    kept: dict[str, SegmentIndexes] = {}
    for _ in range(1000):
        path = rng.choice("abcd")
        kind = rng.choice(["reader", "reader", "writer", "writer", "indexes", "indexes", "keep", "keep", "forget"])
        if kind in ("reader", "writer"):
            file = cache.reader(path) if kind == "reader" else cache.writer(path)
            earlier = opened.pop((kind, path), None)
            assert earlier is None or file is earlier
            assert earlier is not None or file not in opened.values()
            opened[kind, path] = file
            opened = dict(list(opened.items())[-most:])
        elif kind == "forget":
            cache.forget(path)
            opened.pop(("reader", path), None)
            opened.pop(("writer", path), None)
            kept.pop(path, None)
        elif kind == "indexes":
            indexes = cache.indexes(path)
            assert indexes is kept.get(path)
            if indexes is not None:
                kept[path] = kept.pop(path)
        elif path not in kept:
            kept[path] = SegmentIndexes.empty(0)
            cache.keep_indexes(path, kept[path])
            kept = dict(list(kept.items())[-most:])
        assert cache.open_files == len(opened)


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_again() -> None:
    """A cleaner renames files while others read. Later readers get the new file."""
    fs = MemoryFileSystem()
    fs.open_append("f").write(b"old")
    cache = FileCache(fs)

    class Renaming(MemoryFileSystem):
        """A file system in which the file is replaced during its first opening."""

        is_replaced = False

        def open_read(self, path: str) -> File:
            file = fs.open_read(path)
            if not self.is_replaced:
                self.is_replaced = True
                fs.open_append("g").write(b"new")
                fs.rename("g", "f")
                cache.forget("f")
            return file

    cache.file_system = Renaming()
    assert cache.reader("f").read_at(0, 9) == b"new"
    assert cache.reader("f").read_at(0, 9) == b"new"
    assert cache.open_files == 1


class ClosingFileSystem(MemoryFileSystem):
    """Notes which files are open. An interpreter without reference counts would run out of descriptors."""

    opened: list[str]

    def open_append(self, path: str) -> File:
        return self._watched(super().open_append(path), path)

    def open_read(self, path: str) -> File:
        return self._watched(super().open_read(path), path)

    def _watched(self, file: File, path: str) -> File:
        self.opened.append(path)
        return cast(File, WatchedFile(file, lambda: self.opened.remove(path)))


class WatchedFile:
    def __init__(self, file: File, on_close: Callable[[], None]) -> None:
        self._file = file
        self._on_close = on_close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        self._on_close()
        self._on_close = lambda: None
        self._file.close()


@pytest.fixture
def fs() -> ClosingFileSystem:
    made = ClosingFileSystem()
    made.opened = []
    make_durable_dirs(made, DIRECTORY)
    return made


def test_small_files_are_closed(fs: ClosingFileSystem) -> None:
    write_file_atomically(fs, "data/f", b"content")
    assert read_file(fs, "data/f") == b"content"
    write_snapshot(fs, DIRECTORY, Snapshot(0, 1, 2, [Chunk(0, b"x")]))
    assert read_snapshot(fs, DIRECTORY) is not None
    assert fs.opened == []


def test_a_journal_is_closed_and_so_are_the_logs_that_it_changes(fs: ClosingFileSystem) -> None:
    path = f"data/{JOURNAL_FILE}"
    fs.open_append(LOG_FILE).close()
    for read in (restore, make_named_logs_durable):
        journal = Journal(fs, path)
        journal.write([Extent("topic-0", 0, 0, b"content")])
        assert fs.opened == [path]
        journal.restore("data", "topic-0")
        assert fs.opened == [path]
        fs.opened.clear()
        read(fs, "data", path)
        assert fs.opened == []
    Journal(fs, path).remove()
    assert fs.opened == []


@pytest.mark.parametrize("end", ["close", "abandon", "delete"])
def test_a_log_closes_files_outside_the_cache_and_empties_the_cache_when_it_is_closed(
    fs: ClosingFileSystem, end: str
) -> None:
    """Index files and `.swap` files are opened outside the cache."""
    config = new_config(index_interval_bytes=0)
    log = filled_log(fs, [batch(offset) for offset in range(4)], config)
    log.roll(NOW_MS)
    log.checkpoint()
    log.close()
    fs.rename(LOG_FILE, LOG_FILE + ".swap")
    fs.opened.clear()
    log = open_log(fs, config, recovery_point=4, clean=True)
    log.read(2, 1)
    log.append(batch(4), now_ms=NOW_MS)
    assert {path.rpartition(".")[2] for path in fs.opened} == {"log"}
    files = log._files
    getattr(log, end)()
    assert files.open_files == 0


def test_a_pass_of_the_cleaner_closes_its_files(fs: ClosingFileSystem) -> None:
    writer = Writer(fs)
    for value in "123":
        writer.put(("a", value))
        writer.roll()
    clean(writer.log, fs)
    writer.log.close()
    assert not [path for path in fs.opened if not path.endswith((".log", ".log.cleaned"))], (
        "only log files stay open, for their readers"
    )


@pytest.mark.parametrize("delay_ms", [0, 500])
def test_files_of_deleted_segments_are_neither_in_the_log_nor_in_the_cache(delay_ms: int) -> None:
    """With file.delete.delay.ms they stay for a time under another name."""
    fs = MemoryFileSystem()
    log = open_log(fs, new_config(file_delete_delay_ms=delay_ms, index_interval_bytes=0))
    for offset in range(3):
        log.append(batch(offset), now_ms=NOW_MS)
        log.read(offset, 1)
        log.roll(NOW_MS)
    log.checkpoint()
    assert [log.read(offset, 1)[:8] for offset in range(3)] == [offset.to_bytes(8, "big") for offset in range(3)]
    fs.remove(f"{DIRECTORY}/{1:020d}.timeindex")
    gone = [segment.path for segment in log.segments[:2]]
    order: list[str] = []

    def note(operation: Operation) -> None:
        order.append(operation.kind)

    fs.fault = note
    assert log.delete_old_segments(lambda segment: segment.base_offset < 2, NOW_MS) == 2
    assert [segment.base_offset for segment in log.segments] == [2, 3]
    suffixes = [".log", ".index", ".timeindex", ".log", ".index"]
    paths = [path + suffix for path, suffix in zip([gone[0]] * 3 + [gone[1]] * 2, suffixes, strict=True)]
    for path in gone:
        with pytest.raises(FileNotFoundError):
            log._files.reader(path + ".log")
    names = fs.list_dir(DIRECTORY)
    assert not set(names) & {path.rpartition("/")[2] for path in paths}
    retired = [(NOW_MS + delay_ms, path + ".deleted") for path in paths] if delay_ms else []
    assert log.take_retired_files() == retired
    assert log.take_retired_files() == []
    assert set(names) >= {path.rpartition("/")[2] for _, path in retired}
    fs.crash()
    assert open_log(fs).start_offset in (0, 2)


def assert_a_new_log_reads_its_own_records(fs: MemoryFileSystem, files: FileCache) -> None:
    """Deletes the topic of DIRECTORY and creates it again."""
    fs.rename(DIRECTORY, "data/deleted")
    new = Log.open(fs, DIRECTORY, new_config(), NOW_MS, files=files)
    new.append(batch(0, timestamp_ms=6), now_ms=NOW_MS)
    new.flush()
    assert new.read(0, 1 << 20) == batch(0, timestamp_ms=6)


def test_a_closed_log_brings_no_file_back_that_a_new_log_would_read() -> None:
    """A search in another thread may outlive its topic, which is then created again."""
    fs = MemoryFileSystem()
    files = FileCache(fs)
    make_durable_dirs(fs, "data")
    old = Log.open(fs, DIRECTORY, new_config(), NOW_MS, files=files)
    old.append(batch(0, timestamp_ms=5), now_ms=NOW_MS)
    old.flush()
    old.abandon()
    assert old.offset_for_timestamp(5) is not None
    assert files.open_files == 0
    assert_a_new_log_reads_its_own_records(fs, files)


def cancel(size_bytes: int) -> None:
    raise OpeningCanceledError("the topic was deleted")


@pytest.mark.parametrize("ending", ["canceled", "corrupt", "no sync"])
def test_an_opening_that_fails_leaves_no_file_that_a_new_log_would_read(ending: str) -> None:
    """The topic may be deleted and created again, for example because its log is corrupt."""
    fs = MemoryFileSystem()
    files = FileCache(fs)
    log = filled_log(fs, [batch(0, timestamp_ms=5)])
    log.abandon()
    recovery = Recovery()
    if ending == "canceled":
        recovery.check = cancel
    elif ending == "corrupt":
        recovery.recovery_point = 7
    else:
        fs.fault = lambda operation: OSError(5, "planted") if operation.kind == "datasync" else None
    with pytest.raises((OSError, StorageError)):
        Log.open(fs, DIRECTORY, new_config(), NOW_MS, recovery=recovery, files=files)
    fs.fault = lambda operation: None
    assert files.open_files == 0
    assert_a_new_log_reads_its_own_records(fs, files)


def test_a_cleaned_log_leaves_no_file_that_a_new_log_would_use() -> None:
    """The topic is deleted and created again, and its segments begin at the same offsets as before."""
    fs = MemoryFileSystem()
    writer = Writer(fs)
    for value in "123":
        writer.put(("a", value))
        writer.log.read(writer.log.end_offset - 1, 1)
        writer.roll()
        writer.log.read(writer.log.end_offset - 1, 1)
    old, files = writer.log, writer.log._files
    clean(old, fs)
    assert [segment.base_offset for segment in old.segments] == [0, 3]
    old.abandon()
    assert files.open_files == 0
    fs.rename(DIRECTORY, "data/deleted")
    new = Log.open(fs, DIRECTORY, new_config(), NOW_MS, files=files)
    for offset in range(3):
        new.append(batch(offset), now_ms=NOW_MS)
        new.roll(NOW_MS)
        assert new.read(offset, 1) == batch(offset)
    assert sorted(name for name in fs.list_dir(DIRECTORY) if name.endswith(".log")) == [
        f"{base:020d}.log" for base in range(4)
    ]


@pytest.mark.parametrize("end", ["detach", "close"])
def test_a_reader_that_overlaps_with_the_end_of_a_segment_brings_nothing_back(end: str) -> None:
    """Another thread asks for the file and the indexes of a segment right before it is replaced or closed."""
    fs = MemoryFileSystem()
    writer = Writer(fs)
    for value in "12":
        writer.put(("a", value))
        writer.roll()

    class Overtaken(FileCache):
        """A cache in which the segment ends while another thread fetches something."""

        ends = True

        def _end(self) -> None:
            if self.ends:
                self.ends = False
                getattr(segment, end)()

        def reader(self, path: str) -> File:
            self._end()
            return super().reader(path)

        def keep_indexes(self, path: str, indexes: SegmentIndexes) -> None:
            self._end()
            super().keep_indexes(path, indexes)

    segment = writer.log.segments[1]
    expected = segment.file().read_at(0, segment.size_bytes)
    files = segment._files = Overtaken(fs)
    assert segment.file().read_at(0, segment.size_bytes) == expected
    assert files.open_files == 0
    segment = writer.log.segments[0]
    files = segment._files = Overtaken(fs)
    assert segment.indexes().offsets.base_offset == 0
    assert files.indexes(segment.path) is None
    assert files.open_files == 0


def test_a_deletion_that_fails_leaves_no_file_to_which_a_new_log_would_write() -> None:
    fs = MemoryFileSystem()
    files = FileCache(fs)
    config = new_config(segment_bytes=1)
    log = Log.open(fs, DIRECTORY, config, NOW_MS, files=files)
    for offset in range(3):
        log.append(batch(offset, timestamp_ms=5), now_ms=NOW_MS)
    log.flush()
    assert log.read(1, 1) == batch(1, timestamp_ms=5)
    fs.fault = lambda operation: OSError(5, "planted") if operation.kind == "remove" else None
    with pytest.raises(OSError):
        log.delete_old_segments(lambda segment: segment.base_offset < 2, NOW_MS)
    log.abandon()
    fs.fault = lambda operation: None
    fs.rename(DIRECTORY, "data/deleted")
    new = Log.open(fs, DIRECTORY, config, NOW_MS, files=files)
    for offset in range(3):
        new.append(batch(offset, timestamp_ms=6), now_ms=NOW_MS)
    new.flush()
    assert [new.read(offset, 1) for offset in range(3)] == [batch(offset, timestamp_ms=6) for offset in range(3)]
