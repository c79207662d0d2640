# SPDX-License-Identifier: Apache-2.0
"""A data folder: its owner, its files, and the logs that a start trusts after an orderly stop or a crash."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kcoord.storage.checkpoints import RECOVERY_POINT_FILE, read_offset_checkpoint
from kcoord.storage.errors import (
    CorruptLogError,
    DirectoryLockedError,
    MalformedCheckpointError,
    MetaPropertiesError,
)
from kcoord.storage.file_system import FileSystem, RealFileSystem, read_file, write_file_atomically
from kcoord.storage.log import Log
from kcoord.storage.log_dir import STRAY_SUFFIX, Identity, LogDir, parse_partition_folder, retired_folder
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, keep_everything, no_fault
from tests.storage.support import NOW_MS, MachineCrash, batch, batches, content, crash_at, new_config

ROOT = "var/kafka"
ME = Identity("cluster-1", 1, "directory-1")


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


def take(fs: FileSystem, identity: Identity = ME, **more: str) -> LogDir:
    return LogDir.open(fs, ROOT, identity, **more)


def filled(log_dir: LogDir, topic: str, count: int = 5, partition: int = 0) -> Log:
    log = log_dir.open_log(topic, partition, new_config(), NOW_MS)
    for offset in range(log.end_offset, log.end_offset + count):
        log.append(batch(offset), now_ms=NOW_MS)
    return log


# -- identity and lock -------------------------------------------------------------------------------------------------


def test_a_new_folder_gets_the_candidate_identity_and_keeps_it(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    assert log_dir.identity == ME
    expected = b"cluster.id=cluster-1\ndirectory.id=directory-1\nnode.id=1\nversion=1\n"
    assert read_file(fs, f"{ROOT}/meta.properties") == expected
    log_dir.close()
    assert take(fs, Identity("other", 1, "other")).identity == ME
    fs.crash()
    assert take(fs, Identity("other", 1, "other")).identity == ME


def test_a_requested_cluster_id_is_used_for_a_new_folder(fs: MemoryFileSystem) -> None:
    assert take(fs, cluster_id="wanted").identity.cluster_id == "wanted"


@pytest.mark.parametrize(
    ("identity", "cluster_id", "reason"),
    [
        (Identity("x", 2, "x"), None, "belongs to node.id 1, but the configured node.id is 2"),
        (Identity("x", 1, "x"), "other", "belongs to cluster.id cluster-1, not to other"),
    ],
)
def test_a_folder_of_another_node_or_cluster_is_refused(
    fs: MemoryFileSystem, identity: Identity, cluster_id: str | None, reason: str
) -> None:
    take(fs).close()
    with pytest.raises(MetaPropertiesError, match=reason):
        LogDir.open(fs, ROOT, identity, cluster_id=cluster_id)
    take(fs).close()


@pytest.mark.parametrize(
    "text", ["version=0\ncluster.id=a\nnode.id=1", "version=1\nnode.id=1", "version=1\ncluster.id=a\nnode.id=one", "?"]
)
def test_unusable_meta_properties(fs: MemoryFileSystem, text: str) -> None:
    fs.make_dirs(ROOT)
    write_file_atomically(fs, f"{ROOT}/meta.properties", text.encode())
    with pytest.raises(MetaPropertiesError, match=r"meta\.properties"):
        take(fs)


def test_a_folder_without_directory_id_gets_one(fs: MemoryFileSystem) -> None:
    fs.make_dirs(ROOT)
    write_file_atomically(fs, f"{ROOT}/meta.properties", b"version=1\ncluster.id=a\nnode.id=1\n")
    assert take(fs).identity == Identity("a", 1, "directory-1")
    assert b"directory.id=directory-1" in read_file(fs, f"{ROOT}/meta.properties")


def test_only_one_owner_at_a_time(tmp_path: Path) -> None:
    fs = RealFileSystem()
    log_dir = LogDir.open(fs, str(tmp_path), ME)
    with pytest.raises(DirectoryLockedError, match="in use by another process"):
        LogDir.open(fs, str(tmp_path), ME)
    log_dir.close()
    LogDir.open(fs, str(tmp_path), ME).close()


# -- stops and starts -------------------------------------------------------------------------------------------------


def test_after_a_clean_stop_logs_are_not_scanned(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    assert log_dir.had_clean_shutdown
    filled(log_dir, "a", 100)
    filled(log_dir, "b", 100).advance_start_offset(7)
    assert log_dir.close(broker_epoch=12)
    assert json.loads(read_file(fs, f"{ROOT}/.kafka_cleanshutdown")) == {"version": 0, "brokerEpoch": 12}
    assert read_file(fs, f"{ROOT}/recovery-point-offset-checkpoint") == b"0\n2\na 0 100\nb 0 100\n"
    assert read_file(fs, f"{ROOT}/log-start-offset-checkpoint") == b"0\n1\nb 0 7\n"
    fs.crash()
    log_dir = take(fs)
    assert log_dir.had_clean_shutdown
    assert not fs.exists(f"{ROOT}/.kafka_cleanshutdown")
    log = log_dir.open_log("b", 0, new_config(), NOW_MS)
    assert (log.start_offset, log.end_offset) == (7, 100)
    assert log.recovery_report.scanned_bytes < 1000


def test_a_log_that_was_not_opened_stays_trusted_over_clean_stops(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    filled(log_dir, "a", 100)
    log_dir.close()
    for _ in range(2):
        assert take(fs).close()
    assert take(fs).recovery_of("a", 0).clean


def test_after_a_crash_a_log_is_scanned_from_its_recovery_point(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    filled(log_dir, "a", 100)
    log_dir.checkpoint()
    filled_more = log_dir._opened["a", 0]
    for offset in range(100, 110):
        filled_more.append(batch(offset), now_ms=NOW_MS)
    fs.crash(keep_everything)
    log_dir = take(fs)
    assert not log_dir.had_clean_shutdown
    recovery = log_dir.recovery_of("a", 0)
    assert (recovery.recovery_point, recovery.clean) == (100, False)
    assert log_dir.open_log("a", 0, new_config(), NOW_MS).end_offset == 110


def test_checkpoints_of_two_threads_are_never_older_than_the_noted_offsets(fs: MemoryFileSystem) -> None:
    """One thread writes the noted offsets while another removes a partition."""
    log_dir = take(fs)
    log_dir.writing = threading.Lock()
    log_dir.open_log("gone", 0, new_config(), NOW_MS).append(batch(0), now_ms=NOW_MS)
    log_dir.open_log("stays", 0, new_config(), NOW_MS)
    began, may_go_on = threading.Event(), threading.Event()

    def slow_disk(operation: Operation) -> None:
        if operation.kind == "datasync" and RECOVERY_POINT_FILE in operation.path and not began.is_set():
            began.set()
            assert may_go_on.wait(30)

    fs.fault = slow_disk
    log_dir.note_durable()
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(log_dir.write_checkpoints)
        assert began.wait(30)
        deleting = pool.submit(log_dir.delete_partitions, [("gone", 0, "f" * 32)])
        may_go_on.set()
        writing.result(30)
        deleting.result(30)
    assert read_offset_checkpoint(fs, f"{ROOT}/{RECOVERY_POINT_FILE}") == {("stays", 0): 0}


def test_a_released_folder_is_not_written_to(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    log_dir.open_log("t", 0, new_config(), NOW_MS)
    log_dir.note_durable()
    log_dir.close()
    operations = fs.operations
    log_dir.write_checkpoints()
    log_dir.write_starts()
    assert fs.operations == operations


def test_noted_offsets_and_stored_indexes_save_the_scan(fs: MemoryFileSystem) -> None:
    """As in a running broker: durable offsets are noted, and the index files have their entries."""
    log_dir = take(fs)
    log = log_dir.open_log("t", 0, new_config(index_interval_bytes=200), NOW_MS)
    for offset in range(100):
        log.append(batch(offset), now_ms=NOW_MS)
    log.flush()
    size_bytes = log.size_bytes
    log.store_indexes()
    log_dir.note_durable()
    log_dir.write_checkpoints()
    log.append(batch(100), now_ms=NOW_MS)
    fs.crash(keep_everything)
    again = take(fs).open_log("t", 0, new_config(index_interval_bytes=200), NOW_MS)
    assert (again.start_offset, again.end_offset) == (0, 101)
    assert 0 < again.recovery_report.scanned_bytes < size_bytes // 10


def test_no_index_is_stored_without_a_flush(fs: MemoryFileSystem) -> None:
    log = filled(take(fs), "a", 100)
    asked: list[Operation] = []
    fs.fault = lambda operation: asked.append(operation)
    log.store_indexes()
    assert asked == []
    fs.fault = no_fault
    log.flush()
    log.store_indexes()
    assert fs.size(f"{ROOT}/a-0/{0:020d}.index") > 0


def test_a_stop_with_unchecked_logs_is_not_clean(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    for topic in ("a", "b"):
        filled(log_dir, topic)
    log_dir.checkpoint()
    fs.crash()
    log_dir = take(fs)
    log_dir.open_log("a", 0, new_config(), NOW_MS)
    assert not log_dir.close()
    log_dir = take(fs)
    for topic in ("a", "b"):
        log_dir.open_log(topic, 0, new_config(), NOW_MS)
    assert log_dir.close()
    assert take(fs).had_clean_shutdown


def test_a_stop_with_a_failed_log_is_not_clean(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    log = filled(log_dir, "a")
    log.flush()
    log.append(batch(5), now_ms=NOW_MS)
    fs.fault = lambda operation: OSError(5, "medium") if operation.kind == "datasync" else None
    with pytest.raises(OSError, match="medium"):
        log.flush()
    fs.fault = lambda operation: None
    assert not log_dir.close()
    fs.crash()
    log_dir = take(fs)
    assert not log_dir.had_clean_shutdown
    assert log_dir.recovery_of("a", 0).recovery_point == 5
    assert content(log_dir.open_log("a", 0, new_config(), NOW_MS))[:5] == [batch(offset) for offset in range(5)]


def test_a_failed_log_is_opened_again_from_its_flushed_offset(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    log = filled(log_dir, "a")
    log.flush()
    log.append(batch(5), now_ms=NOW_MS)
    fs.fault = lambda operation: OSError(5, "medium") if operation.kind == "datasync" else None
    with pytest.raises(OSError, match="medium"):
        log.flush()
    fs.fault = lambda operation: None
    log.close()
    recovery = log_dir.recovery_of("a", 0)
    assert (recovery.recovery_point, recovery.rewrite) == (5, True)
    again = log_dir.open_log("a", 0, new_config(), NOW_MS)
    assert again.end_offset == again.flushed_offset == 6
    assert log_dir.close()


def test_logs_closed_by_their_owner_count(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    filled(log_dir, "a").close()
    log_dir.checkpoint()
    assert log_dir.close()
    assert read_file(fs, f"{ROOT}/recovery-point-offset-checkpoint") == b"0\n1\na 0 5\n"


def test_a_log_that_could_not_be_closed_properly_makes_the_stop_unclean(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    log = filled(log_dir, "a")
    fs.fault = lambda operation: OSError(28, "no space") if operation.path.endswith("index") else None
    with pytest.raises(OSError, match="no space"):
        log.close()
    fs.fault = lambda operation: None
    assert not log_dir.close()


def test_an_abandoned_log_makes_the_stop_unclean(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    filled(log_dir, "a").abandon()
    assert not log_dir.close()
    fs.crash()
    assert take(fs).open_log("a", 0, new_config(), NOW_MS).end_offset == 0


def test_a_damaged_recovery_checkpoint_costs_time_only(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    filled(log_dir, "a")
    log_dir.close()
    fs.damage(f"{ROOT}/recovery-point-offset-checkpoint", lambda old: old[:5])
    log_dir = take(fs)
    assert not log_dir.had_clean_shutdown
    assert log_dir.open_log("a", 0, new_config(), NOW_MS).end_offset == 5


def test_a_damaged_start_checkpoint_is_refused_and_the_lock_is_released(fs: MemoryFileSystem) -> None:
    take(fs).close()
    fs.damage(f"{ROOT}/log-start-offset-checkpoint", lambda old: b"junk")
    with pytest.raises(MalformedCheckpointError, match="log-start-offset-checkpoint"):
        take(fs)
    fs.damage(f"{ROOT}/log-start-offset-checkpoint", lambda old: b"0\n0\n")
    take(fs)


def test_every_step_of_a_clean_stop_may_be_the_last(fs: MemoryFileSystem) -> None:
    step = 0
    finished = False
    while not finished:
        fs = MemoryFileSystem()
        log_dir = take(fs)
        filled(log_dir, "a", 10).flush()
        filled(log_dir, "b", 3)
        fs.fault = crash_at(step)
        try:
            finished = log_dir.close()
        except MachineCrash:
            step += 1
        fs.fault = lambda operation: None
        fs.crash(lambda kind, path, pending: pending // 2)
        log_dir = take(fs)
        assert log_dir.open_log("a", 0, new_config(), NOW_MS).end_offset == 10
        end = log_dir.open_log("b", 0, new_config(), NOW_MS).end_offset
        assert end == 3 if finished else end <= 3
    assert step > 10


# -- partitions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a-0", ("a", 0)),
        ("a-b.c_d-12", ("a-b.c_d", 12)),
        ("__consumer_offsets-49", ("__consumer_offsets", 49)),
        ("a--1", ("a-", 1)),
        ("a-01", None),
        ("a-", None),
        ("-1", None),
        ("a", None),
        ("a-x", None),
        ("a-1.0123456789abcdef0123456789abcdef-delete", None),
        ("a-1.0123456789abcdef0123456789abcdef-stray", None),
        ("meta.properties", None),
        ("recovery-point-offset-checkpoint", None),
    ],
)
def test_partition_folder_names(name: str, expected: tuple[str, int] | None) -> None:
    assert parse_partition_folder(name) == expected


def test_partitions_are_listed(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    for topic, partition in (("b", 10), ("b", 2), ("a", 0)):
        log_dir.open_log(topic, partition, new_config(), NOW_MS)
    assert log_dir.partitions() == [("a", 0), ("b", 2), ("b", 10)]


def test_a_deleted_partition_frees_its_name_and_its_files_follow(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    filled(log_dir, "a", 50).close()
    log_dir.checkpoint()
    unique = "0123456789abcdef" * 2
    (folder,) = log_dir.delete_partitions([("a", 0, unique), ("missing", 0, unique)])
    assert folder == f"{ROOT}/a-0.{unique}-delete"
    assert log_dir.partitions() == []
    again = filled(log_dir, "a", 2)
    assert again.end_offset == 2
    again.flush()
    fs.crash(keep_everything)
    log_dir = take(fs)
    assert not fs.exists(folder)
    assert log_dir.open_log("a", 0, new_config(), NOW_MS).end_offset == 2


def test_files_of_a_deleted_partition_are_removed_on_demand(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    filled(log_dir, "a").close()
    (folder,) = log_dir.delete_partitions([("a", 0, "f" * 32)])
    log_dir.remove_folder(folder)
    assert not fs.exists(folder)


def test_a_stray_folder_is_kept(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    filled(log_dir, "a").close()
    (folder,) = log_dir.delete_partitions([("a", 0, "f" * 32)], STRAY_SUFFIX)
    log_dir.close()
    take(fs)
    assert folder.endswith("-stray")
    assert fs.exists(folder)


def test_a_folder_that_vanished_has_no_entries_in_the_checkpoints(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    filled(log_dir, "a").close()
    log_dir.close()
    for name in fs.list_dir(f"{ROOT}/a-0"):
        fs.remove(f"{ROOT}/a-0/{name}")
    fs.remove_dir(f"{ROOT}/a-0")
    log_dir = take(fs)
    assert filled(log_dir, "a", 1).end_offset == 1


def test_lost_segments_are_noticed(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    filled(log_dir, "a").close()
    log_dir.close()
    for name in fs.list_dir(f"{ROOT}/a-0"):
        fs.remove(f"{ROOT}/a-0/{name}")
    log_dir = take(fs)
    with pytest.raises(CorruptLogError, match="the file is missing"):
        log_dir.open_log("a", 0, new_config(), NOW_MS)


def test_long_topic_names_are_cut_to_valid_folder_names() -> None:
    name = retired_folder("t" * 249, 12345, "f" * 32, "-delete")
    assert len(name) == 255
    assert name.endswith(f"t-12345.{'f' * 32}-delete")


def test_small_files_of_a_partition(fs: MemoryFileSystem) -> None:
    log_dir = take(fs)
    log_dir.open_log("a", 3, new_config(), NOW_MS)
    assert log_dir.topic_id("a", 3) is None
    log_dir.write_topic_id("a", 3, bytes(range(16)))
    log_dir.write_leader_epochs("a", 3, [(0, 0), (2, 10)])
    fs.crash(keep_everything)
    log_dir = take(fs)
    assert log_dir.topic_id("a", 3) == bytes(range(16))
    assert log_dir.leader_epochs("a", 3) == [(0, 0), (2, 10)]
    assert log_dir.open_log("a", 3, new_config(), NOW_MS).end_offset == 0


def test_many_clean_logs_open_with_few_open_files(tmp_path: Path) -> None:
    fs = RealFileSystem()
    log_dir = LogDir.open(fs, str(tmp_path), ME)
    for partition in range(300):
        log = log_dir.open_log("t", partition, new_config(), NOW_MS)
        for batch_bytes in batches(2):
            log.append(batch_bytes, now_ms=NOW_MS)
        log.flush()
    assert log_dir.files.open_files <= 256
    for partition in range(300):
        log_dir._opened["t", partition].close()
    log_dir.close()
    log_dir = LogDir.open(fs, str(tmp_path), ME)
    logs = [log_dir.open_log("t", partition, new_config(), NOW_MS) for partition in range(300)]
    assert all(log.end_offset == 2 for log in logs)
    assert log_dir.files.open_files <= 256
    log_dir.close()
