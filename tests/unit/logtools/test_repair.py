# SPDX-License-Identifier: Apache-2.0
"""A repair removes what the check found and nothing else, keeps a copy of it, and leaves a sound folder."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from kcoord.logtools.findings import FindingKind
from kcoord.logtools.folders import FolderReader, NoLogsError
from kcoord.logtools.repair import MANIFEST, Repair, RepairMode
from kcoord.logtools.verify import FolderCheck
from kcoord.runtime.serde import partition_for
from kcoord.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    LOG_START_OFFSET_FILE,
    RECOVERY_POINT_FILE,
    read_offset_checkpoint,
    write_offset_checkpoint,
    write_worker_checkpoint,
)
from kcoord.storage.errors import DirectoryLockedError, StorageError
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.rolled import UNSYNCED_SUFFIX
from kcoord.storage.worker_checkpoints import folder_id, worker_folder
from kcoord.topics.producer_files import encode_snapshot
from kcoord_protocol.record_batch import decode_header, decode_records, encode_batch, rewrite_header
from tests.unit.logtools import test_verify as damages
from tests.unit.logtools.support import NOW_MS, SMALL, append, commit_record, make_small_folder, open_folder
from tests.unit.logtools.test_verify import Damage, check, logs, positions

FS = RealFileSystem()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "data"
    make_small_folder(str(folder))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "data"))


def repair(folder: Path, mode: RepairMode = RepairMode.SKIP) -> Path:
    keep = folder.parent / "kept"
    Repair(FS, str(folder), mode, str(keep), FolderCheck(FS, str(folder)).run()).run()
    return keep


def offsets(folder: Path, partition: str) -> list[int]:
    """Returns the offsets of all records that can be read."""
    batches = FolderReader(FS, str(folder / partition)).batches()
    return [record.offset for frame in batches for record in decode_records(frame.batch)]


def flip(path: Path, number: int) -> None:
    data = bytearray(path.read_bytes())
    data[positions(path)[number] + 70] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("mode", RepairMode)
def test_a_repair_removes_the_marks_of_unsynced_segments(folder: Path, mode: RepairMode) -> None:
    """The next start would remove segments that the repair has kept."""
    first, second = logs(folder, "orders-0")[:2]
    mark = second.with_suffix(UNSYNCED_SUFFIX)
    mark.touch()
    flip(first, -1)
    repair(folder, mode)
    assert not mark.exists()
    before = offsets(folder, "orders-0")
    log_dir = open_folder(str(folder))
    log = log_dir.open_log("orders", 0, SMALL, NOW_MS)
    assert log.recovery_report.cuts == []
    log_dir.close()
    assert offsets(folder, "orders-0") == before


def test_skipping_leaves_out_one_batch_and_bridges_its_offsets(folder: Path) -> None:
    path = logs(folder, "orders-0")[0]
    flip(path, 1)
    damaged = path.read_bytes()
    before = offsets(folder, "orders-1")
    keep = repair(folder)
    assert check(folder) == []
    assert offsets(folder, "orders-0") == [offset for offset in before if offset not in (3, 4, 5)]
    bridge = next(
        decode_header(frame.batch)
        for frame in FolderReader(FS, str(folder / "orders-0")).batches()
        if frame.base_offset == 3
    )
    assert (bridge.records_count, bridge.last_offset) == (0, 5)
    entries = [json.loads(line) for line in (keep / MANIFEST).read_text().splitlines()]
    (kept,) = (entry for entry in entries if entry["file"] == str(path))
    start = kept["position"]
    assert isinstance(start, int) and isinstance(kept["bytes"], int)
    assert Path(str(kept["kept"])).read_bytes() == damaged[start : start + kept["bytes"]]


def test_truncating_ends_the_log_before_the_first_damage(folder: Path) -> None:
    first, second, third = logs(folder, "orders-0")
    whole = [path.read_bytes() for path in (first, second, third)]
    flip(second, 0)
    flip(first, 2)
    cut_at = positions(first)[2]
    damaged = first.read_bytes()
    keep = repair(folder, RepairMode.TRUNCATE)
    assert check(folder) == []
    assert offsets(folder, "orders-0") == list(range(6))
    assert first.read_bytes() == whole[0][:cut_at]
    assert not second.exists() and not third.exists()
    assert (keep / "orders-0" / third.name).read_bytes() == whole[2]
    assert (keep / "orders-0" / f"{first.name}.{cut_at}.removed").read_bytes() == damaged[cut_at:]


@pytest.mark.parametrize("mode", list(RepairMode))
@pytest.mark.parametrize(
    "damage",
    [
        damages.remove_middle_segment,
        damages.remove_last_segment,
        damages.repeat_a_batch,
        damages.insert_garbage,
        damages.append_zeros,
        damages.swap_two_segments,
        damages.write_old_format,
        damages.truncate_index,
        damages.other_index,
        damages.put_foreign_group,
        damages.put_malformed_record,
        damages.break_leader_epochs,
        damages.break_checkpoint,
        damages.promise_too_much,
        damages.break_snapshot,
        damages.tear_transaction_index,
    ],
)
def test_after_a_repair_the_folder_is_sound_and_opens(folder: Path, damage: Damage, mode: RepairMode) -> None:
    damage(folder)
    untouched = {path: path.read_bytes() for path in logs(folder, "orders-1")}
    repair(folder, mode)
    assert check(folder) == []
    assert {path: path.read_bytes() for path in logs(folder, "orders-1")} == untouched
    log_dir = open_folder(str(folder))
    for topic, number in log_dir.partitions():
        log = log_dir.open_log(topic, number, SMALL, NOW_MS)
        assert log.recovery_report.cuts == []
        last = None
        for header, _ in log.batches():
            last = header
        assert last is None or last.next_offset == log.end_offset
    assert log_dir.close()


def test_a_bad_leader_epoch_is_corrected_without_a_loss(folder: Path) -> None:
    path = logs(folder, "orders-0")[0]
    whole = path.read_bytes()
    data = bytearray(whole)
    rewrite_header(data, positions(path)[1], partition_leader_epoch=9)
    path.write_bytes(data)
    repair(folder, RepairMode.TRUNCATE)
    assert path.read_bytes() == whole
    assert check(folder) == []


def test_a_plan_changes_nothing(folder: Path) -> None:
    flip(logs(folder, "orders-0")[0], 1)
    damages.break_checkpoint(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    work = Repair(FS, str(folder), RepairMode.SKIP, str(folder.parent / "kept"), FolderCheck(FS, str(folder)).run())
    steps = work.plan()
    assert any(step.lost_bytes > 0 and "left out" in step.what for step in steps)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert not (folder.parent / "kept").exists()


def test_a_finding_that_an_operator_has_to_decide_is_left(folder: Path) -> None:
    path = damages.break_topic_id(folder)
    repair(folder)
    assert [(finding.kind, finding.file) for finding in check(folder)] == [(FindingKind.IDENTITY, str(path))]


def test_a_folder_in_use_is_not_repaired(folder: Path) -> None:
    flip(logs(folder, "orders-0")[0], 1)
    work = Repair(FS, str(folder), RepairMode.SKIP, str(folder.parent / "kept"), FolderCheck(FS, str(folder)).run())
    lock = FS.lock(str(folder / ".lock"))
    try:
        with pytest.raises(DirectoryLockedError):
            work.run()
    finally:
        lock.release()
    with pytest.raises(NoLogsError):
        Repair(FS, str(folder / "orders-0"), RepairMode.SKIP, str(folder.parent / "kept"), [])


def test_the_folder_for_removed_bytes_must_be_new(folder: Path) -> None:
    """Otherwise a second repair would take the copy of another file for its own, and remove the file without a copy."""
    index = folder / "orders-0" / "00000000000000000000.index"
    index.write_bytes(b"damage that is kept.....")
    kept = repair(folder) / "orders-0" / index.name
    index.write_bytes(b"later damage............")
    with pytest.raises(StorageError, match=r"kept: already exists"):
        repair(folder)
    assert index.read_bytes() == b"later damage............"
    assert kept.read_bytes() == b"damage that is kept....."


def test_a_wrong_line_of_a_checkpoint_is_removed_and_no_other(folder: Path) -> None:
    """Without its log start offset a partition would show records again that were deleted."""
    for path in logs(folder, "orders-0")[1:]:
        path.unlink()
    checkpoint = str(folder / LOG_START_OFFSET_FILE)
    write_offset_checkpoint(FS, checkpoint, {("orders", 0): 20, ("orders", 1): 20})
    repair(folder)
    assert read_offset_checkpoint(FS, checkpoint) == {("orders", 1): 20}
    assert check(folder) == []


@pytest.mark.parametrize("mode", RepairMode)
def test_the_checkpoints_of_crashed_workers_are_repaired(folder: Path, mode: RepairMode) -> None:
    own_points = str(folder / RECOVERY_POINT_FILE)
    points = read_offset_checkpoint(FS, own_points)
    (folder / CLEAN_SHUTDOWN_FILE).unlink()
    worker = Path(worker_folder(str(folder), 0))
    worker.mkdir(parents=True)
    starts = {("orders", 0): 1_000, ("orders", 1): 3}
    for name, offsets in ((RECOVERY_POINT_FILE, points), (LOG_START_OFFSET_FILE, starts)):
        ids = {key: folder_id(FS, str(folder), key) for key in offsets}
        write_worker_checkpoint(FS, str(worker / name), offsets, ids)
    Path(own_points).unlink()
    flip(logs(folder, "orders-0")[-1], -1)
    repair(folder, mode)
    assert check(folder) == []
    log_dir = open_folder(str(folder))
    assert log_dir.open_log("orders", 0, SMALL, NOW_MS).end_offset == 39
    assert log_dir.open_log("orders", 1, SMALL, NOW_MS).start_offset == 3
    log_dir.close()


@pytest.mark.parametrize("points", [{("orders", 0): 41}, {("orders", 2): 1}, {("orders", 0): -1}, {}])
def test_wrong_recovery_points_are_repaired(folder: Path, points: dict[tuple[str, int], int]) -> None:
    """Without `points` the log of orders-0 is not in the checkpoint."""
    checkpoint = str(folder / RECOVERY_POINT_FILE)
    right = read_offset_checkpoint(FS, checkpoint)
    write_offset_checkpoint(FS, checkpoint, ({**right, **points} if points else {("orders", 1): 42}))
    assert {finding.kind for finding in check(folder)} == {FindingKind.CHECKPOINT}
    repair(folder)
    assert check(folder) == []


def test_a_batch_with_several_findings_is_left_out_once(folder: Path) -> None:
    strangers = [name for name in map(str, range(9)) if partition_for(name, 4) != 0][:2]
    batch = encode_batch([commit_record(name, "orders", 0, 1) for name in strangers])
    log_dir = open_folder(str(folder))
    append(log_dir, "__consumer_offsets", 0, [batch])
    log_dir.close()
    steps = Repair(
        FS, str(folder), RepairMode.SKIP, str(folder.parent / "kept"), FolderCheck(FS, str(folder)).run()
    ).plan()
    assert [step.lost_bytes for step in steps if step.lost_bytes] == [len(batch)]


def test_producer_snapshots_go_with_a_damaged_transaction_index(folder: Path) -> None:
    """A start makes the entries of the index again only from batches that no snapshot covers."""
    index = damages.tear_transaction_index(folder)
    snapshot = index.with_name("00000000000000000030.snapshot")
    snapshot.write_bytes(encode_snapshot([]))
    mark = index.with_suffix(UNSYNCED_SUFFIX)
    mark.touch()
    keep = repair(folder)
    assert not index.exists() and not snapshot.exists()
    assert (keep / "orders-0" / index.name).exists() and (keep / "orders-0" / snapshot.name).exists()
    assert mark.exists(), "the log is as it was"


def test_a_repair_on_a_full_disk_changes_no_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    flip(logs(folder, "orders-0")[0], 1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr("kcoord.logtools.repair.write_all", full)
    with pytest.raises(StorageError, match=rf"^{folder}: .*No space left on device"):
        repair(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
