# SPDX-License-Identifier: Apache-2.0
"""What the journal made durable is in its log after a crash at any step, and nowhere else."""

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
    """A log with its journal name, opened again by its first use after `reopen`."""

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
    """Commits of two logs, with renewals of the journal between them; remembers what was acknowledged."""

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
        for (number, _), error in zip(appended, appends.settle([each for _, each in appended]), strict=True):
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
            found = content(partition.log)
            assert found == self.appended[number][: len(found)], context
            assert len(found) >= self.acknowledged[number], context
            self.appended[number] = found
            self.acknowledged[number] = len(found)


@pytest.mark.parametrize("keep", KEEPS)
def test_d5_the_journal_gives_back_what_a_crash_at_any_step_took(keep: str) -> None:
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
    """A log whose batches only the journal has made durable."""
    script = Script(fs, renewal_bytes=1 << 20)
    partitions, appends = script.open()
    for _ in range(count):
        script.commit(partitions, appends, [0])
    return partitions[0].log, script.appended[0]


def test_d2_a_hole_in_the_middle_of_the_file_is_filled() -> None:
    fs = MemoryFileSystem()
    _, data = journaled(fs)
    fs.crash(keep_everything)
    fs.damage(first_file(), lambda found: found[:40] + bytes(60) + found[100:])
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
        again.damage(JOURNAL, lambda found, cut=cut: found[:-cut])  # type: ignore[misc]
        assert restore(again, "data", JOURNAL) == sum(sizes[:2])
    assert restore(fs, "data", "data/none") == 0


def test_segments_that_others_follow_are_left_alone() -> None:
    """A cleaner may have put another file in the place of one that was synced when the next began."""
    fs = MemoryFileSystem()
    log, data = journaled(fs)
    log.roll(NOW_MS)
    log.sync_names()
    fs.crash(keep_nothing)
    fs.damage(first_file(), lambda found: found[len(data[0]) :])
    assert restore(fs, "data", JOURNAL) == 0
    assert fs.size(first_file()) == len(b"".join(data[1:]))


def test_a_folder_that_was_closed_is_forgotten_also_where_a_new_topic_takes_its_place() -> None:
    fs = MemoryFileSystem()
    make_durable_dirs(fs, f"data/{TOPIC}-0")
    journal = Journal(fs, JOURNAL)
    old = Extent(f"{TOPIC}-0", 0, 0, b"old")
    journal.write([old, Extent(f"{TOPIC}-1", 0, 0, b"other")])
    journal.forget(f"{TOPIC}-0")
    size = journal.size_bytes
    journal.forget(f"{TOPIC}-0")
    assert journal.size_bytes == size, "there is nothing to forget"
    for number in range(2):
        make_durable_dirs(fs, f"data/{TOPIC}-{number}")
        fs.open_append(first_file(number))
    assert restore(fs, "data", JOURNAL) == len(b"other")
    assert fs.size(first_file(0)) == 0


def test_missing_folders_and_missing_bytes_are_for_those_who_open_the_log() -> None:
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
    # The kernel evicted what it could not write.
    fs.damage(first_file(), lambda found: bytes(len(found)))
    partitions[0].reopen()
    assert content(partitions[0].log) == script.appended[0]
    assert appends.renew()
    assert fs.size(JOURNAL) == 0
    fs.crash(keep_nothing)
    script.check("reopened")


def test_an_orderly_stop_leaves_no_journal_and_one_with_a_failed_log_does() -> None:
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


def test_a_journal_that_could_not_begin_anew_takes_nothing() -> None:
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
