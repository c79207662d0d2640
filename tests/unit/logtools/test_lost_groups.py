# SPDX-License-Identifier: Apache-2.0
"""Lost groups: a check finds them, a repair restores them, and neither an import nor an export creates any."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings

from kcoord.coordinator.group.records import TombstoneReason, new_classic_group_tombstone, new_group_epoch_tombstone
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.logtools.export_logs import ExportReport, LogExport
from kcoord.logtools.findings import Finding, FindingKind
from kcoord.logtools.folders import FolderReader, partitions_in
from kcoord.logtools.import_logs import ImportReport, LogImport
from kcoord.logtools.repair import Repair, RepairMode
from kcoord.logtools.replay_check import replay_folder
from kcoord.logtools.restore import offsets_at
from kcoord.logtools.verify import FolderCheck
from kcoord.runtime.result import OperationContext
from kcoord.storage.file_system import RealFileSystem
from kcoord_protocol.record_batch import Record, decode_records, encode_batch
from tests.storage.cleaning import clean
from tests.support.coordinator_log import (
    NO_PRODUCER,
    OffsetOf,
    Step,
    batches_of,
    logs,
    offsets_of,
    replayed,
    stable_offset,
)
from tests.unit.logtools.support import (
    NOW_MS,
    SMALL,
    append,
    broker_config,
    commit_record,
    commit_tombstone,
    metadata_records,
    open_folder,
    record_of,
    uuids,
    write_metadata,
)

FS = RealFileSystem()
CLASSIC_END = record_of(new_classic_group_tombstone("g", TombstoneReason.GROUP_DELETE))
CONSUMER_END = record_of(new_group_epoch_tombstone("g", TombstoneReason.MIGRATION))
COMMIT = commit_record("g", "orders", 0, 5)


def make_folder(path: Path, batches: Iterable[bytes], partition: int = 0) -> Path:
    """Creates a cleanly closed folder with one partition of `__consumer_offsets`."""
    log_dir = open_folder(str(path))
    write_metadata(log_dir, metadata_records(offsets_partitions=1))
    append(log_dir, "__consumer_offsets", partition, list(batches))
    log_dir.close()
    return path


def batches(*records: Record) -> list[bytes]:
    return [encode_batch([record]) for record in records]


def check(folder: Path) -> list[Finding]:
    return list(FolderCheck(FS, str(folder)).run())


def loaded(folder: Path) -> GroupCoordinatorShard:
    """Loads the shard of the folder's one partition of `__consumer_offsets`."""
    return replayed(batches_in(folder))


def batches_in(folder: Path) -> list[bytes]:
    return [
        frame.batch
        for partition in partitions_in(FS, str(folder))
        if partition.topic == "__consumer_offsets"
        for frame in FolderReader(FS, partition.path).batches()
    ]


def repair(folder: Path) -> None:
    Repair(FS, str(folder), RepairMode.SKIP, f"{folder}.kept", check(folder)).run()


def imported(source: Path, target: Path) -> ImportReport:
    work = LogImport(FS, broker_config(offsets_topic_num_partitions="1"), str(target), NOW_MS, uuids())
    return work.run([str(source)])


def exported(source: Path, target: Path) -> ExportReport:
    return LogExport(FS, str(source), str(target), 1, NOW_MS, uuids()).run()


def lost_for_other_brokers(folder: Path) -> set[str]:
    """Returns the groups that Kafka 4.3.1 loses when it loads the log.

    Its rule: a tombstone of a group removes the group even if it has offsets, and a later commit creates it again.
    """
    groups: dict[str, str] = {}
    offsets: dict[str, set[bytes]] = {}
    for batch in batches_in(folder):
        for record in decode_records(batch):
            assert record.key is not None
            kind, group = int.from_bytes(record.key[:2]), record.key[4 : 4 + int.from_bytes(record.key[2:4])].decode()
            if kind < 2:
                of_group = offsets.setdefault(group, set())
                if record.value is None:
                    of_group.discard(record.key[2:])
                else:
                    of_group.add(record.key[2:])
                    groups.setdefault(group, "simple")
                continue
            name = {2: "classic", 3: "consumer"}[kind]
            if record.value is not None:
                groups[group] = name
            elif groups.get(group) in ("simple", name):
                del groups[group]
    return {group for group, keys in offsets.items() if keys and group not in groups}


@pytest.mark.parametrize("end", [CLASSIC_END, CONSUMER_END], ids=["classic", "consumer"])
def test_a_check_finds_a_lost_group_and_a_repair_restores_it(tmp_path: Path, end: Record) -> None:
    folder = make_folder(tmp_path / "data", batches(COMMIT, commit_record("g", "orders", 1, 6), end))
    (finding,) = check(folder)
    assert (finding.kind, finding.group, finding.offset) == (FindingKind.LOST_GROUP, "g", 3)
    assert "group g has 2 committed offsets" in str(finding)
    (step, *_) = Repair(FS, str(folder), RepairMode.TRUNCATE, f"{folder}.kept", [finding]).plan()
    assert "a group record is appended" in step.what
    assert lost_for_other_brokers(folder) == {"g"}
    repair(folder)
    assert check(folder) == []
    assert lost_for_other_brokers(folder) == set()
    shard = loaded(folder)
    assert offsets_of(shard) == {("g", "orders", 0): 5, ("g", "orders", 1): 6}
    (listed,) = shard.list_groups(OperationContext(NOW_MS, 5), [], []).response
    assert (listed.group_id, listed.group_state, listed.protocol_type) == ("g", "Empty", "")


@pytest.mark.parametrize(
    "records",
    [
        [COMMIT],
        [CLASSIC_END],
        [COMMIT, CLASSIC_END, COMMIT],
        [COMMIT, CLASSIC_END, commit_tombstone("g", "orders", 0)],
        [COMMIT, CLASSIC_END, Record(b"\0\x11\0\x01g", b"\0\0", timestamp_ms=NOW_MS)],
    ],
    ids=["simple", "ended", "again", "deleted", "unknown type"],
)
def test_no_other_group_is_lost(tmp_path: Path, records: list[Record]) -> None:
    assert check(make_folder(tmp_path / "data", batches(*records))) == []


def test_lost_groups_are_not_searched_in_a_damaged_log(tmp_path: Path) -> None:
    """The damaged part may contain records of the group."""
    folder = make_folder(tmp_path / "data", batches(COMMIT, COMMIT, CLASSIC_END))
    path = folder / "__consumer_offsets-0" / f"{0:020}.log"
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    assert [finding.kind for finding in check(folder)] == [FindingKind.DAMAGED]
    repair(folder)
    assert [finding.kind for finding in check(folder)] == [FindingKind.LOST_GROUP]


def test_a_group_that_a_broker_may_be_moving_is_not_lost(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "data", batches(COMMIT, CLASSIC_END))
    assert list(FolderCheck(FS, str(folder), in_use=True).run()) == []


def test_an_import_restores_a_lost_group(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "data", batches(COMMIT, CLASSIC_END))
    report = imported(source, tmp_path / "new")
    assert report.notes == ["group g had offsets, but its last record was a tombstone; the group is restored"]
    assert (report.groups, report.offsets) == ({"classic": 1}, 1)
    assert check(tmp_path / "new") == []
    assert lost_for_other_brokers(tmp_path / "new") == set()


def test_an_export_restores_a_lost_group(tmp_path: Path) -> None:
    """The broker of the source lists the group, so Kafka has to list it too."""
    source = make_folder(tmp_path / "data", batches(COMMIT, CLASSIC_END))
    report = exported(source, tmp_path / "new")
    assert report.notes == ["group g had offsets, but its last record was a tombstone; the group is restored"]
    assert (report.groups, report.offsets) == ({"classic": 1}, 1)
    assert check(tmp_path / "new") == []
    assert lost_for_other_brokers(tmp_path / "new") == set()
    assert lost_for_other_brokers(source) == {"g"}


@settings(max_examples=25)
@given(steps=logs(oddities=True))
def test_an_export_has_the_coordinators_offsets_and_no_lost_group(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as name:
        source = make_folder(Path(name, "data"), batches_of(steps))
        report = exported(source, Path(name, "new"))
        offsets = offsets_of(replayed(batches_of(steps)))
        assert offsets_of(loaded(Path(name, "new"))) == offsets
        assert report.offsets == len(offsets)
        assert check(Path(name, "new")) == []


@settings(max_examples=25)
@given(steps=logs(oddities=True))
def test_an_import_has_the_coordinators_offsets_and_no_lost_group(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as name:
        source = make_folder(Path(name, "data"), batches_of(steps))
        offsets = offsets_of(replayed(batches_of(steps)))
        assert replay_folder(FS, str(source)).offsets == len(offsets)
        report = imported(source, Path(name, "new"))
        assert offsets_of(loaded(Path(name, "new"))) == offsets
        assert report.offsets == len(offsets)
        assert lost_for_other_brokers(Path(name, "new")) == set()
        assert check(Path(name, "new")) == []
        repair(source)
        assert [finding for finding in check(source) if finding.kind is FindingKind.LOST_GROUP] == []
        assert offsets_of(loaded(source)) == offsets


@settings(max_examples=20)
@given(steps=logs(oddities=False))
def test_a_cleaned_log_gives_the_same_offsets_and_no_lost_group(steps: list[Step]) -> None:
    """The cleaner removes tombstones, and the records that they and later commits replaced."""
    batches = batches_of(steps)
    offsets = offsets_of(replayed(batches))
    with tempfile.TemporaryDirectory() as name:
        source = make_folder(Path(name, "data"), [])
        log_dir = open_folder(str(source))
        log = log_dir.open_log("__consumer_offsets", 0, SMALL, NOW_MS)
        for batch in batches:
            log.append(batch, now_ms=NOW_MS)
        log.roll(NOW_MS)
        for now_ms in (NOW_MS, NOW_MS + 10**9):
            clean(log, FS, stable_offset=stable_offset(batches), now_ms=now_ms)
        log.close()
        log_dir.close()
        imported(source, Path(name, "new"))
        assert offsets_of(loaded(source)) == offsets_of(loaded(Path(name, "new"))) == offsets
        assert lost_for_other_brokers(Path(name, "new")) == set()
        restored = {
            (group, *place): offset.offset
            for group in ("g", "h")
            for place, offset in offsets_at(batches_in(source), group, NOW_MS + 10**9).offsets.items()
        }
        assert restored == offsets


@settings(max_examples=40)
@given(steps=logs(oddities=False))
def test_a_check_finds_the_groups_that_other_brokers_lose(steps: list[Step]) -> None:
    plain = [step for step in steps if step.producer_id == NO_PRODUCER]
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(Path(name), batches_of(plain))
        assert {finding.group for finding in check(folder)} == lost_for_other_brokers(folder)


@settings(max_examples=60)
@given(steps=logs(oddities=True))
def test_a_restore_offers_the_offsets_that_the_coordinator_had(steps: list[Step]) -> None:
    """Compares them at the time of every batch."""
    batches = batches_of(steps)
    for count in range(1, len(batches) + 1):
        restored: dict[OffsetOf, int] = {}
        for group in ("g", "h"):
            past = offsets_at(batches, group, NOW_MS + count - 1)
            restored.update({(group, *place): offset.offset for place, offset in past.offsets.items()})
        assert restored == offsets_of(replayed(batches[:count]))
