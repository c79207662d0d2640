# SPDX-License-Identifier: Apache-2.0
"""Appends that the journal made durable are in their log after a crash at any step, and in no other log."""

from __future__ import annotations

import errno
from collections.abc import Callable
from copy import deepcopy
from itertools import count

import pytest

from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import FileSystem, RealFileSystem, make_durable_dirs
from kcoord.storage.journal import (
    JOURNAL_FILE,
    Appended,
    DurableAppends,
    Extent,
    Journal,
    make_named_logs_durable,
    restore,
)
from kcoord.storage.log import Log
from kcoord.storage.log_dir import Identity, LogDir
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, keep_everything, keep_nothing, no_fault
from kcoord.storage.segment import LogConfig
from tests.storage.support import NOW_MS, batch, content, crash_at, new_config, runs_through
from tests.storage.test_log_crash import KEEPS

TOPIC = "topic"
JOURNAL = f"data/{JOURNAL_FILE}"
IDENTITY = Identity("cluster", 1, "directory")


def first_file(partition: int = 0) -> str:
    return f"data/{TOPIC}-{partition}/{0:020d}.log"


class Partition:
    """A log with its name in the journal. The first use after `reopen` opens it again."""

    def __init__(self, log_dir: LogDir, number: int, config: LogConfig) -> None:
        self.folder = f"{TOPIC}-{number}"
        self._open: Callable[[], Log] = lambda: log_dir.open_log(TOPIC, number, config, NOW_MS)
        self.log = self._open()

    def sync_names(self) -> None:
        self.log.sync_names()

    def flush(self) -> None:
        self.log.flush()

    def reopen(self) -> None:
        self.log.close()
        self.log = self._open()


class Script:
    """Commits to two logs, with renewals of the journal between them. Notes which commits were acknowledged."""

    def __init__(self, fs: FileSystem, rounds: int = 12, renewal_bytes: int = 500) -> None:
        self.fs = fs
        self.rounds = rounds
        self.renewal_bytes = renewal_bytes
        self.appended: dict[int, list[bytes]] = {0: [], 1: []}
        self.acknowledged = {0: 0, 1: 0}
        self.log_dir: LogDir | None = None

    def open(self) -> tuple[dict[int, Partition], DurableAppends]:
        make_durable_dirs(self.fs, "data")
        self.log_dir = LogDir.open(self.fs, "data", IDENTITY)
        config = new_config(segment_bytes=600)
        partitions = {number: Partition(self.log_dir, number, config) for number in self.appended}
        return partitions, DurableAppends(self.log_dir.begin_journal(), renewal_bytes=self.renewal_bytes)

    def commit(self, partitions: dict[int, Partition], appends: DurableAppends, numbers: list[int]) -> None:
        appended = []
        for number in numbers:
            partition = partitions[number]
            data = batch(partition.log.end_offset, value_size=20 + len(self.appended[number]) % 9)
            self.appended[number].append(data)
            try:
                info = partition.log.append(data, now_ms=NOW_MS)
            except (OSError, StorageError):
                self.appended[number].pop()
                partition.reopen()
                continue
            appended.append((number, Appended(partition, info, data)))
        for (number, _), error in zip(appended, appends.settle([append for _, append in appended]), strict=True):
            if error is None:
                self.acknowledged[number] = len(self.appended[number])
            else:
                partitions[number].reopen()
                self.appended[number] = content(partitions[number].log)
        if appends.is_renewal_due:
            appends.renew()

    def run(self) -> None:
        partitions, appends = self.open()
        for step in range(self.rounds):
            self.commit(partitions, appends, [[0, 1], [0], [1]][step % 3])
            if step == 7:
                partitions[0].log.roll(NOW_MS)
            if step == 8:
                assert self.log_dir is not None
                self.log_dir.note_durable()
                self.log_dir.write_checkpoints()
        assert self.log_dir is not None
        self.log_dir.close()

    def check(self, context: object) -> None:
        partitions, _ = self.open()
        for number, partition in partitions.items():
            survivors = content(partition.log)
            assert survivors == self.appended[number][: len(survivors)], context
            assert len(survivors) >= self.acknowledged[number], context
            self.appended[number] = survivors
            self.acknowledged[number] = len(survivors)


@pytest.mark.parametrize("keep", KEEPS)
def test_d5_the_journal_restores_what_a_crash_at_any_step_lost(keep: str) -> None:
    for step in count():
        fs = MemoryFileSystem()
        script = Script(fs)
        fs.fault = crash_at(step)
        finished = runs_through(script.run)
        fs.fault = no_fault
        fs.crash(KEEPS[keep])
        script.check((keep, step))
        fs.crash(keep_nothing)
        script.check((keep, step, "again"))
        if finished:
            break
    assert step > 50


@pytest.mark.parametrize("keep", KEEPS)
def test_d5_the_machine_stops_again_while_the_journal_is_read(keep: str) -> None:
    first = MemoryFileSystem()
    _, data = journaled(first)
    first.crash(KEEPS[keep])
    for step in count():
        fs = deepcopy(first)
        fs.fault = crash_at(step)
        finished = runs_through(restore, fs, "data", JOURNAL)
        fs.fault = no_fault
        fs.crash(KEEPS[keep])
        script = Script(fs)
        script.appended[0], script.acknowledged[0] = data, len(data)
        script.check((keep, step))
        if finished:
            break
    assert step > 1


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    ("kind", "where"),
    [("write", JOURNAL), ("write", ".log"), ("datasync", JOURNAL), ("datasync", ".log"), ("truncate", JOURNAL)],
)
def test_d3_a_disk_that_fails_once_loses_nothing_acknowledged(kind: str, where: str, keep: str) -> None:
    for number in count(1):
        fs = MemoryFileSystem()
        script = Script(fs)
        seen = 0

        def fault(operation: Operation, number: int = number) -> BaseException | None:
            nonlocal seen
            if operation.kind == kind and operation.path.endswith(where):
                seen += 1
                if seen == number:
                    return OSError(errno.EIO, "planted")
            return None

        partitions, appends = script.open()
        fs.fault = fault
        for step in range(9):
            script.commit(partitions, appends, [[0, 1], [0], [1]][step % 3])
        fs.fault = no_fault
        fs.crash(KEEPS[keep])
        script.check((number, keep))
        if seen < number:
            break
    assert number > 1, "no such operation"


def journaled(fs: FileSystem, count: int = 3) -> tuple[Log, list[bytes]]:
    """Returns a log whose batches only the journal has made durable."""
    script = Script(fs, renewal_bytes=1 << 20)
    partitions, appends = script.open()
    for _ in range(count):
        script.commit(partitions, appends, [0])
    return partitions[0].log, script.appended[0]


def test_d2_a_hole_in_the_middle_of_the_file_is_filled() -> None:
    fs = MemoryFileSystem()
    _, data = journaled(fs)
    fs.crash(keep_everything)
    fs.damage(first_file(), lambda content_now: content_now[:40] + bytes(60) + content_now[100:])
    script = Script(fs)
    script.appended[0], script.acknowledged[0] = data, 3
    script.check("hole")


def test_a_journal_that_the_logs_do_not_need_changes_no_file() -> None:
    fs = MemoryFileSystem()
    journaled(fs)
    fs.crash(keep_everything)
    operations: list[str] = []
    fs.fault = lambda operation: operations.append(operation.kind)
    assert restore(fs, "data", JOURNAL) == 0
    assert "write_at" not in operations
    assert not fs.exists(JOURNAL)


def test_a_torn_frame_ends_the_journal() -> None:
    fs = MemoryFileSystem()
    journaled(fs)
    sizes = [len(batch(offset, value_size=20 + offset)) for offset in range(3)]
    for cut in (1, 20, 39):
        again = MemoryFileSystem()
        journaled(again)
        again.crash(keep_nothing)
        again.damage(JOURNAL, lambda content_now, cut=cut: content_now[:-cut])  # type: ignore[misc]
        assert restore(again, "data", JOURNAL) == sum(sizes[:2])
    assert restore(fs, "data", "data/none") == 0


def test_only_the_active_segment_is_restored() -> None:
    """A cleaner may have replaced a closed segment, which was synced when the next one began."""
    fs = MemoryFileSystem()
    log, data = journaled(fs)
    log.roll(NOW_MS)
    log.sync_names()
    fs.crash(keep_nothing)
    fs.damage(first_file(), lambda content_now: content_now[len(data[0]) :])
    assert restore(fs, "data", JOURNAL) == 0
    assert fs.size(first_file()) == len(b"".join(data[1:]))


def test_the_extents_of_a_closed_log_are_not_restored_to_a_new_topic_of_its_name() -> None:
    fs = MemoryFileSystem()
    make_durable_dirs(fs, f"data/{TOPIC}-0")
    journal = Journal(fs, JOURNAL)
    old = Extent(f"{TOPIC}-0", 0, 0, b"old")
    journal.write([old, Extent(f"{TOPIC}-1", 0, 0, b"other")])
    journal.forget(f"{TOPIC}-0")
    size = journal.size_bytes
    journal.forget(f"{TOPIC}-0")
    assert journal.size_bytes == size, "the journal has no extents of the log"
    for number in range(2):
        make_durable_dirs(fs, f"data/{TOPIC}-{number}")
        fs.open_append(first_file(number))
    assert restore(fs, "data", JOURNAL) == len(b"other")
    assert fs.size(first_file(0)) == 0


def test_a_restore_skips_missing_folders_and_gaps() -> None:
    fs = MemoryFileSystem()
    make_durable_dirs(fs, f"data/{TOPIC}-0")
    fs.open_append(first_file())
    Journal(fs, JOURNAL).write([Extent(f"{TOPIC}-0", 0, 5, b"behind a gap"), Extent(f"{TOPIC}-1", 0, 0, b"nowhere")])
    assert restore(fs, "data", JOURNAL) == 0
    assert fs.size(first_file()) == 0


def test_a_log_that_failed_gets_its_bytes_from_the_journal_before_it_is_opened_again() -> None:
    fs = MemoryFileSystem()
    script = Script(fs, renewal_bytes=1 << 20)
    partitions, appends = script.open()
    script.commit(partitions, appends, [0, 1])
    fs.fault = lambda operation: OSError(5, "planted") if operation.path == first_file() else None
    assert not appends.renew()
    assert not appends.renew(), "the log stays failed"
    script.commit(partitions, appends, [1])
    fs.fault = no_fault
    # The kernel has dropped the pages that it could not write.
    fs.damage(first_file(), lambda content_now: bytes(len(content_now)))
    partitions[0].reopen()
    assert content(partitions[0].log) == script.appended[0]
    assert appends.renew()
    assert fs.size(JOURNAL) == 0
    fs.crash(keep_nothing)
    script.check("reopened")


def test_a_stop_leaves_a_journal_only_if_a_log_has_failed() -> None:
    fs = MemoryFileSystem()
    script = Script(fs)
    script.run()
    assert not fs.exists(JOURNAL)
    partitions, appends = script.open()
    script.commit(partitions, appends, [0])
    fs.fault = lambda operation: OSError(5, "planted") if operation.path.endswith(".log") else None
    partitions[0].log.fail(OSError(5, "planted"))
    assert script.log_dir is not None
    assert not script.log_dir.close()
    fs.fault = no_fault
    fs.crash(keep_nothing)
    script.check("after a failure")


def test_a_real_disk_is_written_in_place(tmp_path: object) -> None:
    fs = RealFileSystem()
    path = f"{tmp_path}/file"
    fs.open_append(path).write(b"0123456789")
    fs.write_at(path, 4, b"abc")
    fs.write_at(path, 9, b"xyz")
    assert fs.open_read(path).read_at(0, 20) == b"0123abc78xyz"
    make_named_logs_durable(fs, str(tmp_path), f"{tmp_path}/none")


def test_a_journal_that_could_not_be_emptied_accepts_nothing() -> None:
    file_system = MemoryFileSystem()
    journal = Journal(file_system, "journal")
    extent = Extent("topic-0", 0, 0, b"batch")
    journal.write([extent])
    file_system.fault = lambda operation: OSError(errno.EIO, "") if operation.kind == "truncate" else None
    with pytest.raises(OSError):
        journal.begin_anew()
    file_system.fault = no_fault
    with pytest.raises(OSError, match="earlier write"):
        journal.write([extent])
    journal.begin_anew()
    journal.write([extent])
    assert journal.size_bytes > 0
