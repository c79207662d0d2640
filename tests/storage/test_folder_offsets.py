# SPDX-License-Identifier: Apache-2.0
"""The offsets that a data folder stores for its partitions, alone or shared by workers, and when it removes them."""

from __future__ import annotations

import errno
from collections.abc import Mapping

import pytest

from kcoord.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    LOG_START_OFFSET_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    TopicPartition,
    read_offset_checkpoint,
    write_offset_checkpoint,
    write_topic_id,
)
from kcoord.storage.file_system import File, make_durable_dirs
from kcoord.storage.handover import Handover, has_handover, remove_handover, write_handover
from kcoord.storage.journal import Extent
from kcoord.storage.log import Log
from kcoord.storage.log_dir import Identity, LogDir
from kcoord.storage.memory_file_system import MemoryFileSystem, keep_everything, no_fault
from kcoord.storage.worker_checkpoints import (
    merge_worker_checkpoints,
    read_merged_checkpoint,
    read_sockets_folder,
    write_sockets_folder,
)
from kcoord.storage.worker_log_dir import SharedLogDir, WorkerLogDir
from tests.storage.support import NOW_MS, batch, new_config

ROOT = "var/kafka"
ME = Identity("cluster-1", 1, "directory-1")
A, B = ("a", 0), ("b", 0)


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


def take(fs: MemoryFileSystem) -> LogDir:
    return LogDir.open(fs, ROOT, ME)


def share(fs: MemoryFileSystem) -> SharedLogDir:
    return SharedLogDir.open(fs, ROOT, ME)


def join(shared: SharedLogDir, number: int, *, is_restart: bool = False) -> WorkerLogDir:
    return WorkerLogDir.join(shared, number, is_restart=is_restart)


def opened(log_dir: LogDir, key: TopicPartition, count: int = 0, start: int = 0) -> Log:
    log = log_dir.open_log(*key, new_config(), NOW_MS)
    for offset in range(log.end_offset, log.end_offset + count):
        log.append(batch(offset), now_ms=NOW_MS)
    log.advance_start_offset(max(start, log.start_offset))
    return log


def offsets_of(log_dir: LogDir, key: TopicPartition) -> tuple[int, int, int]:
    """Returns recovery point, start offset and cleaned offset."""
    recovery = log_dir.recovery_of(*key)
    return recovery.recovery_point, recovery.start_offset, log_dir.cleaned_offset(*key)


def stored(fs: MemoryFileSystem, name: str, folder: str = ROOT) -> dict[TopicPartition, int]:
    return read_offset_checkpoint(fs, f"{folder}/{name}")


def store(fs: MemoryFileSystem, folder: str, checkpoints: Mapping[str, dict[TopicPartition, int]]) -> None:
    make_durable_dirs(fs, folder)
    for name, offsets in checkpoints.items():
        write_offset_checkpoint(fs, f"{folder}/{name}", offsets)


def die(worker: WorkerLogDir) -> None:
    worker._lock.release()
    worker._unlock(list(worker._locks))


# -- one process -------------------------------------------------------------------------------------------------------


def test_the_end_of_the_marker_is_durable_before_anything_is_written(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    opened(log_dir, A, 1)
    assert log_dir.close()
    assert take(fs).had_clean_shutdown
    fs.crash()
    assert not take(fs).had_clean_shutdown


@pytest.mark.parametrize("name", [RECOVERY_POINT_FILE, LOG_START_OFFSET_FILE, CLEANER_OFFSET_FILE])
def test_entries_of_missing_folders_are_removed_from_every_checkpoint(fs: MemoryFileSystem, name: str) -> None:
    store(fs, ROOT, {name: {A: 7}})
    log_dir = take(fs)
    assert offsets_of(log_dir, A) == (0, 0, 0)
    if name != CLEANER_OFFSET_FILE:
        assert stored(fs, name) == {}


@pytest.mark.parametrize("name", [RECOVERY_POINT_FILE, LOG_START_OFFSET_FILE])
def test_a_new_partition_inherits_no_offsets_of_an_older_one_with_its_name(fs: MemoryFileSystem, name: str) -> None:
    make_durable_dirs(fs, f"{ROOT}/a-0")
    store(fs, ROOT, {name: {A: 7}, CLEANER_OFFSET_FILE: {A: 5}})
    log_dir = take(fs)
    operations = fs.operations
    log_dir.forget(*B)
    assert fs.operations == operations, "there are no entries to remove"
    log_dir.forget(*A)
    assert offsets_of(log_dir, A) == (0, 0, 0)
    assert stored(fs, name) == {}


def test_a_folder_that_vanishes_while_the_broker_runs_leaves_no_entries(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    opened(log_dir, A, 5, 2).delete()
    log_dir.note_durable()
    assert opened(log_dir, A).start_offset == 0


def test_deleted_partitions_have_folders_of_their_own_and_no_offsets(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    for key in (A, B):
        opened(log_dir, key, 3).close()
        log_dir.note_cleaned(*key, 2)
    folders = log_dir.delete_partitions([(*A, "1" * 32), (*B, "2" * 32)])
    assert folders == [f"{ROOT}/a-0.{'1' * 32}-delete", f"{ROOT}/b-0.{'2' * 32}-delete"]
    assert [fs.exists(folder) for folder in folders] == [True, True]
    assert offsets_of(log_dir, A) == offsets_of(log_dir, B) == (0, 0, 0)
    fs.crash()
    assert take(fs).partitions() == []


@pytest.mark.parametrize("has_workers", [False, True])
def test_a_full_disk_does_not_keep_the_folders_of_deleted_partitions(fs: MemoryFileSystem, has_workers: bool) -> None:
    """The entries are removed before a new partition of that name has a folder."""
    log_dir = join(share(fs), 0) if has_workers else take(fs)
    opened(log_dir, A, 5, 2).close()
    log_dir.checkpoint()
    fs.fault = lambda operation: OSError(errno.ENOSPC, "no space") if operation.kind == "write" else None
    (folder,) = log_dir.delete_partitions([(*A, "1" * 32)])
    log_dir.remove_folder(folder)
    with pytest.raises(OSError, match="no space"):
        log_dir.forget(*A)
    fs.fault = no_fault
    log_dir.forget(*A)
    opened(log_dir, A, 3)
    fs.crash(keep_everything)
    assert take(fs).recovery_of(*A).start_offset == 0


def test_the_smallest_start_that_was_moved_is_stored(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    opened(log_dir, A, 2, 1)
    opened(log_dir, B, 2)
    log_dir.checkpoint()
    assert stored(fs, LOG_START_OFFSET_FILE) == {A: 1}
    fs.crash()
    assert take(fs).recovery_of(*A).start_offset == 1


def test_a_log_is_opened_with_the_handover_of_its_last_leader(fs: MemoryFileSystem) -> None:
    """The entries of this process are older."""
    log_dir = take(fs)
    log = opened(log_dir, A, 5)
    log.close()
    write_handover(fs, f"{ROOT}/a-0", Handover(4, 3, 2, is_clean=False))
    assert opened(log_dir, A).start_offset == 3
    assert offsets_of(log_dir, A) == (5, 3, 2)
    assert (stored(fs, RECOVERY_POINT_FILE), stored(fs, LOG_START_OFFSET_FILE)) == ({A: 5}, {A: 3})
    assert not has_handover(fs, f"{ROOT}/a-0")


def test_a_handover_is_used_once(fs: MemoryFileSystem) -> None:
    make_durable_dirs(fs, f"{ROOT}/a-0")
    write_handover(fs, f"{ROOT}/a-0", Handover(1, 0, 0, is_clean=True))
    fs.crash()
    assert has_handover(fs, f"{ROOT}/a-0")
    remove_handover(fs, f"{ROOT}/a-0")
    fs.crash()
    assert not has_handover(fs, f"{ROOT}/a-0")


def test_a_log_that_was_handed_over_has_no_entries_in_the_checkpoints(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    for key in (A, B):
        opened(log_dir, key, 3, 1)
    log_dir.checkpoint()
    log_dir.hand_over([A])
    assert (stored(fs, RECOVERY_POINT_FILE), stored(fs, LOG_START_OFFSET_FILE)) == ({B: 3}, {B: 1})
    assert offsets_of(log_dir, A) == (0, 0, 0)


def test_a_closed_log_needs_no_journal(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    log_dir.note_closed("a-0")
    log = opened(log_dir, A)
    log.flush()
    journal = log_dir.begin_journal()
    journal.write([Extent("a-0", 0, 0, batch(0))])
    journal.sync()
    fs.crash(keep_everything)
    log_dir = take(fs)
    assert log_dir.restored_bytes == len(batch(0))
    log = opened(log_dir, A)
    log.flush()
    journal = log_dir.begin_journal()
    journal.write([Extent("a-0", 0, log.size_bytes, batch(1))])
    journal.sync()
    log_dir.note_closed("a-0")
    fs.crash()
    assert take(fs).restored_bytes == 0


# -- workers -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_restarted_has_not_ended_orderly(fs: MemoryFileSystem) -> None:
    shared = share(fs)
    join(shared, 0).close()
    marker = f"{ROOT}/.workers/0/{CLEAN_SHUTDOWN_FILE}"
    assert fs.exists(marker)
    join(shared, 0)
    assert not fs.exists(marker)


INHERITED: list[dict[str, dict[TopicPartition, int]]] = [
    {RECOVERY_POINT_FILE: {A: 5}},
    {LOG_START_OFFSET_FILE: {A: 3}},
    {RECOVERY_POINT_FILE: {A: 5}, LOG_START_OFFSET_FILE: {A: 3}, CLEANER_OFFSET_FILE: {A: 4}},
]


def inherited(fs: MemoryFileSystem, checkpoints: Mapping[str, dict[TopicPartition, int]]) -> SharedLogDir:
    make_durable_dirs(fs, f"{ROOT}/a-0")
    store(fs, ROOT, checkpoints)
    return share(fs)


@pytest.mark.parametrize("checkpoints", INHERITED)
def test_a_worker_removes_inherited_entries_durably(
    fs: MemoryFileSystem, checkpoints: dict[str, dict[TopicPartition, int]]
) -> None:
    """Zero in its own checkpoints means that the entries of the folder are out of date."""
    worker = join(inherited(fs, checkpoints), 0)
    operations = fs.operations
    worker.forget(*B)
    assert fs.operations == operations, "there are no entries to remove"
    worker.forget(*A)
    assert offsets_of(worker, A) == (0, 0, 0)
    assert read_merged_checkpoint(fs, ROOT, LOG_START_OFFSET_FILE) == {}
    assert read_merged_checkpoint(fs, ROOT, RECOVERY_POINT_FILE) == {A: 0}


def test_a_worker_removes_its_own_entries(fs: MemoryFileSystem) -> None:
    worker = join(share(fs), 0)
    opened(worker, A, 3, 1)
    worker.checkpoint()
    worker.forget(*A)
    assert offsets_of(worker, A) == (0, 0, 0)
    assert stored(fs, LOG_START_OFFSET_FILE, f"{ROOT}/.workers/0") == {A: 0}


@pytest.mark.parametrize("end", ["delete", "hand over"])
def test_a_partition_that_moved_away_has_no_entries_left(fs: MemoryFileSystem, end: str) -> None:
    worker = join(inherited(fs, {**INHERITED[2], RECOVERY_POINT_FILE: {A: 0}, LOG_START_OFFSET_FILE: {A: 0}}), 0)
    opened(worker, A, 6, 2).close()
    if end == "delete":
        worker.delete_partitions([(*A, "0" * 32)])
    else:
        worker.hand_over([A])
    assert offsets_of(worker, A) == (0, 0, 0)


def test_entries_of_a_worker_replace_those_of_the_folder(fs: MemoryFileSystem) -> None:
    shared = inherited(fs, {RECOVERY_POINT_FILE: {A: 1, B: 1}, LOG_START_OFFSET_FILE: {A: 1}})
    store(
        fs,
        f"{ROOT}/.workers/0",
        {RECOVERY_POINT_FILE: {A: 5}, LOG_START_OFFSET_FILE: {A: 3}, CLEANER_OFFSET_FILE: {A: 4}},
    )
    assert offsets_of(join(shared, 0, is_restart=True), A) == (5, 3, 4)
    assert offsets_of(join(shared, 1), A) == (1, 1, 0)


def test_the_new_leader_stores_the_start_offset_of_a_dead_leader(fs: MemoryFileSystem) -> None:
    """It applies to the log that moved here, and not to a later log with its name."""
    shared = share(fs)
    old, new = join(shared, 0), join(shared, 1)
    opened(old, A, 5, 2)
    opened(old, B, 5)
    old.note_starts()
    old.write_starts()
    die(old)
    folder = f"{ROOT}/.workers/1"
    new.note_gained(*B)
    opened(new, B)
    assert not fs.exists(f"{folder}/{LOG_START_OFFSET_FILE}"), "there was no start offset to take over"
    new.note_gained(*A)
    assert opened(new, A).start_offset == 2
    assert stored(fs, LOG_START_OFFSET_FILE, folder)[A] == 2
    assert stored(fs, RECOVERY_POINT_FILE, folder)[A] == 5
    new.delete_partitions([(*A, "0" * 32)])
    assert opened(new, A).start_offset == 0


@pytest.mark.parametrize("name", [LOG_START_OFFSET_FILE, RECOVERY_POINT_FILE])
def test_a_log_that_moves_from_a_dead_leader_needs_only_its_own_line_of_the_checkpoints(
    fs: MemoryFileSystem, name: str
) -> None:
    """There may be 100,000 lines, and as many logs that move. Nothing else parses a line that is no entry."""
    shared = share(fs)
    old, new = join(shared, 0), join(shared, 1)
    opened(old, A, 5, 2)
    opened(old, B, 5, 3)
    old.checkpoint()
    die(old)
    store(fs, ROOT, {name: {B: 1}})
    for folder in (ROOT, f"{ROOT}/.workers/0"):
        fs.damage(f"{folder}/{name}", lambda content: content.replace(b"b 0 ", b"b zero "))
    new.note_gained(*A)
    assert offsets_of(new, A) == (5, 2, 0)
    new.note_gained("c", 0)
    assert offsets_of(new, ("c", 0)) == (0, 0, 0)


def test_the_topic_of_an_entry_is_read_once_when_workers_stop(
    fs: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = share(fs)
    worker = join(shared, 0)
    opened(worker, A).close()
    write_topic_id(fs, f"{ROOT}/a-0/{PARTITION_METADATA_FILE}", bytes(range(16)))
    opened(worker, A, 1)
    assert worker.close()
    reads: list[str] = []
    open_read = MemoryFileSystem.open_read

    def noted(file_system: MemoryFileSystem, path: str) -> File:
        reads.append(path)
        return open_read(file_system, path)

    monkeypatch.setattr(MemoryFileSystem, "open_read", noted)
    assert shared.close_after_workers(1, had_crash=False)
    assert stored(fs, RECOVERY_POINT_FILE) == {A: 1}
    assert [path for path in reads if path.endswith(PARTITION_METADATA_FILE)] == [f"{ROOT}/a-0/partition.metadata"]


@pytest.mark.parametrize(("had_clean_shutdown", "had_crash"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("opens_all", [True, False])
def test_a_folder_is_trusted_if_its_logs_were_and_stayed_complete(
    fs: MemoryFileSystem, had_clean_shutdown: bool, had_crash: bool, opens_all: bool
) -> None:
    shared = share(fs)
    worker = join(shared, 0)
    opened(worker, A, 1)
    opened(worker, B, 1)
    worker.close()
    shared.close_after_workers(1, had_crash=False)
    if not had_clean_shutdown:
        fs.remove(f"{ROOT}/{CLEAN_SHUTDOWN_FILE}")
        fs.remove(f"{ROOT}/{RECOVERY_POINT_FILE}")
    shared = share(fs)
    assert shared.had_clean_shutdown == had_clean_shutdown
    worker = join(shared, 0, is_restart=had_crash)
    opened(worker, A)
    if opens_all:
        opened(worker, B)
    assert worker.close()
    assert shared.close_after_workers(1, had_crash=had_crash) == (opens_all or (had_clean_shutdown and not had_crash))


def test_the_folder_of_the_workers_sockets(fs: MemoryFileSystem) -> None:
    make_durable_dirs(fs, ROOT)
    assert read_sockets_folder(fs, ROOT) is None
    write_sockets_folder(fs, ROOT, "/run/kcoord-1")
    fs.crash()
    assert read_sockets_folder(fs, ROOT) == "/run/kcoord-1"
    merge_worker_checkpoints(fs, ROOT)
    assert read_sockets_folder(fs, ROOT) is None


def test_the_offset_1_of_a_worker_is_in_the_merged_checkpoint(fs: MemoryFileSystem) -> None:
    store(fs, f"{ROOT}/.workers/0", {LOG_START_OFFSET_FILE: {A: 1, B: 0}})
    assert read_merged_checkpoint(fs, ROOT, LOG_START_OFFSET_FILE) == {A: 1}
