# SPDX-License-Identifier: Apache-2.0
"""A data folder that workers share: their checkpoints, and the logs that a start trusts after a stop or a crash."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from kcoord.storage.checkpoints import read_offset_checkpoint
from kcoord.storage.errors import DirectoryLockedError, MalformedCheckpointError, PartitionHeldError
from kcoord.storage.file_system import RealFileSystem, write_file_atomically
from kcoord.storage.handover import HANDOVER_FILE, Handover, read_handover, write_handover
from kcoord.storage.journal import JOURNAL_FILE, Extent
from kcoord.storage.log import Log
from kcoord.storage.log_dir import STRAY_SUFFIX, Identity, LogDir
from kcoord.storage.memory_file_system import MemoryFileSystem, keep_nothing, no_fault
from kcoord.storage.worker_checkpoints import read_merged_checkpoint
from kcoord.storage.worker_log_dir import SharedLogDir, WorkerLogDir
from tests.storage.support import NOW_MS, batch, new_config

ROOT = "var/kafka"
ME = Identity("cluster-1", 1, "directory-1")


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


def take(fs: MemoryFileSystem) -> SharedLogDir:
    return SharedLogDir.open(fs, ROOT, ME)


def join(shared: SharedLogDir, number: int, *, is_restart: bool = False) -> WorkerLogDir:
    return WorkerLogDir.join(shared, number, is_restart=is_restart)


def filled(log_dir: LogDir, topic: str, count: int = 5) -> Log:
    log = log_dir.open_log(topic, 0, new_config(), NOW_MS)
    for offset in range(log.end_offset, log.end_offset + count):
        log.append(batch(offset), now_ms=NOW_MS)
    return log


def die(worker: WorkerLogDir) -> None:
    """Ends a process: its locks are released, and nothing else happens."""
    worker._lock.release()
    worker._unlock(list(worker._locks))


def points(fs: MemoryFileSystem) -> dict[tuple[str, int], int]:
    return read_offset_checkpoint(fs, f"{ROOT}/recovery-point-offset-checkpoint")


def test_an_orderly_stop_leaves_the_files_of_a_single_process(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    for number, topic in enumerate(("a", "b")):
        worker = join(shared, number)
        filled(worker, topic)
        assert worker.close()
    assert shared.close_after_workers(2, had_crash=False)
    assert points(fs) == {("a", 0): 5, ("b", 0): 5}
    assert not fs.exists(f"{ROOT}/.workers")
    alone = LogDir.open(fs, ROOT, ME)
    assert alone.had_clean_shutdown
    assert alone.recovery_of("a", 0).clean


def test_partitions_move_to_another_worker_with_their_checkpoints(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    first, second = join(shared, 0), join(shared, 1)
    filled(first, "a")
    first.close(), second.close()
    shared.close_after_workers(2, had_crash=False)
    shared = take(fs)
    mover = join(shared, 1)
    assert mover.recovery_of("a", 0).clean
    assert filled(mover, "a", 2).end_offset == 7
    join(shared, 0).close(), mover.close()
    assert shared.close_after_workers(2, had_crash=False)
    assert points(fs) == {("a", 0): 7}


def test_a_crash_leaves_the_checkpoints_of_the_workers(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    worker = join(shared, 0)
    log = filled(worker, "a")
    worker.checkpoint({("a", 0): log})
    fs.crash()
    alone = LogDir.open(fs, ROOT, ME)
    assert not alone.had_clean_shutdown
    recovery = alone.recovery_of("a", 0)
    assert (recovery.recovery_point, recovery.clean) == (5, False)


def test_a_worker_that_outlives_its_supervisor_keeps_the_folder_locked(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    worker = join(shared, 0)
    shared._lock.release()
    with pytest.raises(DirectoryLockedError):
        LogDir.open(fs, ROOT, ME)
    worker.close()
    LogDir.open(fs, ROOT, ME).close()


def test_a_restarted_worker_scans_every_log(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    worker = join(shared, 0)
    filled(worker, "a")
    worker.close()
    shared.close_after_workers(1, had_crash=False)
    shared = take(fs)
    worker = join(shared, 0)
    log = filled(worker, "a")
    worker.checkpoint({("a", 0): log})
    die(worker)
    again = join(shared, 0, is_restart=True)
    recovery = again.recovery_of("a", 0)
    assert (recovery.recovery_point, recovery.clean) == (10, False)
    again.open_log("a", 0, new_config(), NOW_MS)
    again.close()
    assert shared.close_after_workers(1, had_crash=True)


def test_after_a_crash_only_opened_logs_are_known_to_be_complete(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    worker = join(shared, 0)
    filled(worker, "a")
    filled(worker, "b")
    die(worker)
    again = join(shared, 0, is_restart=True)
    again.open_log("a", 0, new_config(), NOW_MS)
    again.close()
    assert not shared.close_after_workers(1, had_crash=True)
    assert not LogDir.open(fs, ROOT, ME).had_clean_shutdown


def test_a_worker_that_was_killed_at_the_end_leaves_no_marker(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    first, second = join(shared, 0), join(shared, 1)
    filled(first, "a")
    filled(second, "b")
    first.close()
    die(second)
    assert not shared.close_after_workers(2, had_crash=True)


@pytest.mark.parametrize("end", ["power loss", "kill"])
def test_a_deleted_partition_does_not_come_back_with_old_offsets(fs: MemoryFileSystem, end: str) -> None:
    shared = take(fs)
    worker = join(shared, 0)
    log = filled(worker, "a")
    log.advance_start_offset(3)
    worker.close()
    shared.close_after_workers(1, had_crash=False)
    shared = take(fs)
    worker = join(shared, 0)
    worker.delete_partitions([("a", 0, "0" * 32)])
    filled(worker, "a", 1)
    if end == "kill":
        die(worker)
        shared._lock.release()
    else:
        fs.crash()
    alone = LogDir.open(fs, ROOT, ME)
    recovery = alone.recovery_of("a", 0)
    assert (recovery.recovery_point, recovery.start_offset, recovery.clean) == (0, 0, False)


def test_the_cleaners_offsets_are_those_of_the_worker_that_cleaned(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    first, second = join(shared, 0), join(shared, 1)
    filled(first, "a")
    filled(second, "b")
    first.note_cleaned("a", 0, 3)
    first.close(), second.close()
    shared.close_after_workers(2, had_crash=False)
    shared = take(fs)
    first, second = join(shared, 0), join(shared, 1)
    assert first.cleaned_offset("a", 0) == second.cleaned_offset("a", 0) == 3
    filled(first, "a")
    filled(second, "b")
    first.note_cleaned("a", 0, 4)
    second.note_cleaned("b", 0, 2)
    first.close(), second.close()
    shared.close_after_workers(2, had_crash=False)
    alone = LogDir.open(fs, ROOT, ME)
    assert (alone.cleaned_offset("a", 0), alone.cleaned_offset("b", 0)) == (4, 2)


def test_other_programs_see_the_entries_of_the_workers(fs: MemoryFileSystem) -> None:
    name = "log-start-offset-checkpoint"
    assert read_merged_checkpoint(fs, ROOT, name) is None
    shared = take(fs)
    worker = join(shared, 0)
    log = filled(worker, "a")
    log.advance_start_offset(3)
    worker.note_durable()
    worker.write_checkpoints()
    assert read_merged_checkpoint(fs, ROOT, name) == {("a", 0): 3}
    worker.delete_partitions([("a", 0, "0" * 32)])
    assert read_merged_checkpoint(fs, ROOT, name) == {}


def test_a_damaged_checkpoint_of_start_offsets_keeps_the_files_of_the_workers(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    worker = join(shared, 0)
    log = filled(worker, "a")
    worker.checkpoint({("a", 0): log})
    fs.crash()
    write_file_atomically(fs, f"{ROOT}/log-start-offset-checkpoint", b"nonsense")
    with pytest.raises(MalformedCheckpointError):
        LogDir.open(fs, ROOT, ME)
    assert fs.exists(f"{ROOT}/.workers/0/recovery-point-offset-checkpoint")


# --- logs that move between workers -----------------------------------------------------------------------------------


def handed_over(fs: MemoryFileSystem, topic: str = "a") -> Handover | None:
    return read_handover(fs, f"{ROOT}/{topic}-0")


def give(worker: WorkerLogDir, log: Log) -> None:
    log.close()
    worker.hand_over([("a", 0)])


def test_only_one_worker_has_a_log_open(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    old, new = join(shared, 0), join(shared, 1)
    log = filled(old, "a")
    with pytest.raises(PartitionHeldError):
        new.open_log("a", 0, new_config(), NOW_MS)
    old.open_log("b", 0, new_config(), NOW_MS)
    give(old, log)
    assert filled(new, "a").end_offset == 10
    with pytest.raises(PartitionHeldError):
        old.open_log("a", 0, new_config(), NOW_MS)


def test_a_log_moves_with_the_entries_of_its_leader(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    old, new = join(shared, 0), join(shared, 1)
    log = filled(old, "a")
    log.advance_start_offset(3)
    old.note_cleaned("a", 0, 2)
    give(old, log)
    assert handed_over(fs) == Handover(5, 3, 2, is_clean=True)
    assert old.recovery_of("a", 0).recovery_point == 0
    new.note_gained("a", 0)
    taken = new.open_log("a", 0, new_config(), NOW_MS)
    assert (taken.start_offset, taken.end_offset) == (3, 5)
    assert taken.recovery_report.scanned_bytes < taken.size_bytes
    assert new.cleaned_offset("a", 0) == 2
    assert handed_over(fs) is None
    fs.crash()
    assert LogDir.open(fs, ROOT, ME).recovery_of("a", 0).start_offset == 3


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_a_log_whose_entries_cannot_be_written_is_opened_again(fs: MemoryFileSystem, is_handed_over: bool) -> None:
    """The disk may be full when a log moves. Nothing is lost, and the log is served when there is space."""
    shared = take(fs)
    old, new = join(shared, 0), join(shared, 1)
    log = filled(old, "a")
    log.advance_start_offset(2)
    if is_handed_over:
        give(old, log)
    else:
        old.note_starts()
        old.write_starts()
        die(old)
    new.note_gained("a", 0)
    fs.fault = lambda operation: (
        OSError(errno.ENOSPC, "no space") if operation.kind == "write" and "checkpoint" in operation.path else None
    )
    for _ in range(2):
        with pytest.raises(OSError, match="no space"):
            new.open_log("a", 0, new_config(), NOW_MS)
        assert new.files.open_files == 0
    fs.fault = no_fault
    assert filled(new, "a").start_offset == 2
    fs.crash()
    assert LogDir.open(fs, ROOT, ME).recovery_of("a", 0).start_offset == 2


def test_a_partition_whose_deletion_failed_is_not_locked_for_ever(fs: MemoryFileSystem) -> None:
    """The leader of a new topic of that name sets the folder aside."""
    shared = take(fs)
    old, new = join(shared, 0), join(shared, 1)
    filled(old, "a").close()
    fs.fault = lambda operation: OSError(errno.EIO, "planted") if operation.kind == "rename" else None
    with pytest.raises(OSError, match="planted"):
        old.delete_partitions([("a", 0, "00" * 16)])
    fs.fault = no_fault
    assert new.delete_partitions([("a", 0, "00" * 16)], STRAY_SUFFIX)


def test_a_log_that_comes_back_is_as_its_last_leader_left_it(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    first, second = join(shared, 0), join(shared, 1)
    give(first, filled(first, "a"))
    log = filled(second, "a")
    log.advance_start_offset(7)
    give(second, log)
    back = first.open_log("a", 0, new_config(), NOW_MS)
    assert (back.start_offset, back.end_offset) == (7, 10)
    first.close()
    second.close()
    assert shared.close_after_workers(2, had_crash=False)
    assert points(fs) == {("a", 0): 10}


def test_a_handover_that_no_worker_has_read_is_used_at_the_next_start(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    worker = join(shared, 0)
    log = filled(worker, "a")
    log.advance_start_offset(4)
    give(worker, log)
    worker.close()
    shared.close_after_workers(1, had_crash=False)
    alone = LogDir.open(fs, ROOT, ME)
    assert alone.open_log("a", 0, new_config(), NOW_MS).start_offset == 4
    assert handed_over(fs) is None


def test_after_the_death_of_its_leader_a_log_is_checked_and_keeps_its_start(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    old, new = join(shared, 0), join(shared, 1)
    log = filled(old, "a")
    log.advance_start_offset(2)
    old.note_starts()
    old.write_starts()
    die(old)
    new.note_gained("a", 0)
    taken = new.open_log("a", 0, new_config(), NOW_MS)
    assert (taken.start_offset, taken.end_offset) == (2, 5)
    assert taken.recovery_report.scanned_bytes > 0
    again = join(shared, 0, is_restart=True)
    again.hand_over([("a", 0)])
    assert handed_over(fs) is None, "another worker has the log open"


def test_a_restarted_worker_hands_over_a_log_that_it_has_not_opened_again(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    old = join(shared, 0)
    log = filled(old, "a")
    log.advance_start_offset(2)
    old.checkpoint()
    die(old)
    again = join(shared, 0, is_restart=True)
    again.hand_over([("a", 0)])
    assert handed_over(fs) == Handover(5, 2, 0, is_clean=False)
    assert again.recovery_of("a", 0).recovery_point == 0


def test_a_log_whose_sync_failed_is_written_again_by_the_next_leader(fs: MemoryFileSystem) -> None:
    """A failed sync may drop bytes. Programs still see them, but later syncs do not write them (D-3)."""
    shared = take(fs)
    old, new = join(shared, 0), join(shared, 1)
    log = filled(old, "a")
    fs.fault = lambda operation: OSError(5, "medium") if operation.kind == "datasync" else None
    with pytest.raises(OSError, match="medium"):
        log.flush()
    fs.fault = no_fault
    old.hand_over([("a", 0)])
    taken = new.open_log("a", 0, new_config(), NOW_MS)
    assert taken.end_offset == 5
    taken.flush()
    path = f"{taken.directory}/00000000000000000000.log"
    content = fs.open_read(path).read_at(0, fs.size(path))
    fs.crash(keep_nothing)
    assert fs.open_read(path).read_at(0, fs.size(path)) == content


def test_a_log_with_a_failed_write_is_not_handed_over_as_clean(fs: MemoryFileSystem) -> None:
    """All of its batches are durable, but its file may end with other bytes."""
    worker = join(take(fs), 0)
    log = filled(worker, "a")
    log.flush()
    fs.fault = lambda operation: OSError(5, "medium") if operation.kind in ("write", "truncate") else None
    with pytest.raises(OSError, match="could not be undone"):
        log.append(batch(5), now_ms=NOW_MS)
    fs.fault = no_fault
    assert log.failure is not None and log.flushed_offset == log.end_offset
    give(worker, log)
    assert handed_over(fs) == Handover(5, 0, 0, is_clean=False)


def test_a_handover_is_newer_than_the_entries_of_a_worker(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    worker = join(shared, 0)
    give(worker, filled(worker, "a"))
    newer = Handover(9, 4, 0, is_clean=True)
    write_handover(fs, f"{ROOT}/a-0", newer)
    worker._recovery_points["a", 0] = 5
    worker.hand_over([("a", 0)])
    assert handed_over(fs) == newer


def test_a_deleted_partition_is_free_for_another_worker(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    old, new = join(shared, 0), join(shared, 1)
    filled(old, "a").abandon()
    old.delete_partitions([("a", 0, "0" * 32)])
    assert new.open_log("a", 0, new_config(), NOW_MS).end_offset == 0


@pytest.mark.parametrize("content", [b"", b"1\n5 0 0 1\n", b"0\n5 0 0\n", b"0\n5 x 0 1\n"])
def test_a_malformed_handover_fails_the_opening(fs: MemoryFileSystem, content: bytes) -> None:
    shared = take(fs)
    worker = join(shared, 0)
    give(worker, filled(worker, "a"))
    write_file_atomically(fs, f"{ROOT}/a-0/{HANDOVER_FILE}", content)
    with pytest.raises(MalformedCheckpointError):
        worker.open_log("a", 0, new_config(), NOW_MS)


def test_real_locks_of_single_bytes_keep_other_processes_out(tmp_path: Path) -> None:
    path = str(tmp_path / "partitions.lock")
    first = RealFileSystem()
    lock, other = first.lock_byte(path, 1 << 55), first.lock_byte(path, 7)
    with pytest.raises(DirectoryLockedError):
        first.lock_byte(path, 7)
    script = f"import fcntl, os; fd = os.open({path!r}, os.O_RDWR); print(*[_try(fd, one) for one in (7, 1 << 55, 8)])"
    helper = """
def _try(fd, position):
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)
    except OSError:
        return "held"
    return "free"
"""

    def seen() -> str:
        command = [sys.executable, "-c", "import fcntl\n" + helper + script]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    assert seen() == "held held free"
    lock.release()
    assert seen() == "held free free"
    other.release()
    assert seen() == "free free free"
    first.lock_byte(path, 7).release()


def journaled(worker: WorkerLogDir, topic: str) -> None:
    """Appends a batch that only the worker's journal has made durable."""
    log = worker.open_log(topic, 0, new_config(), NOW_MS)
    data = batch(0)
    info = log.append(data, now_ms=NOW_MS)
    log.sync_names()
    journal = worker.begin_journal()
    journal.write([Extent(f"{topic}-0", info.segment_base_offset, info.position, data)])
    journal.sync()


def test_the_journals_of_workers_outlive_the_machine(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    for number, topic in enumerate(("a", "b")):
        journaled(join(shared, number), topic)
    fs.crash(keep_nothing)
    shared = take(fs)
    assert shared.restored_bytes == 2 * len(batch(0))
    assert not fs.exists(f"{ROOT}/.workers")
    worker = join(shared, 0)
    assert [worker.open_log(topic, 0, new_config(), NOW_MS).end_offset for topic in ("a", "b")] == [1, 1]


def test_a_restarted_worker_syncs_the_logs_of_its_journal_and_changes_nothing(fs: MemoryFileSystem) -> None:
    shared = take(fs)
    worker = join(shared, 0)
    journaled(worker, "a")
    die(worker)
    size = fs.size(f"{ROOT}/a-0/{0:020d}.log")
    log = join(shared, 1).open_log("a", 0, new_config(), NOW_MS)
    log.append(batch(1), now_ms=NOW_MS)
    log.roll(NOW_MS)
    log.sync_names()
    again = join(shared, 0, is_restart=True)
    assert not fs.exists(f"{ROOT}/.workers/0/{JOURNAL_FILE}")
    die(again)
    fs.crash(keep_nothing)
    assert fs.size(f"{ROOT}/a-0/{0:020d}.log") == 2 * size
    assert take(fs).open_log("a", 0, new_config(), NOW_MS).end_offset == 2
