# SPDX-License-Identifier: Apache-2.0
"""Exports for Apache Kafka: the metadata records, the copied files, and the sources that are rejected."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord.logtools import export_logs
from kcoord.logtools.export_logs import ExportReport, LogExport
from kcoord.logtools.export_metadata import MetadataExport
from kcoord.logtools.folders import FolderReader, partitions_in, segments_in
from kcoord.logtools.metadata_source import read_metadata
from kcoord.logtools.verify import FolderCheck
from kcoord.metadata import records
from kcoord.metadata.image import ImageBuilder, MetadataImage, ScramCredential
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import partition_for
from kcoord.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    LOG_START_OFFSET_FILE,
    read_offset_checkpoint,
    read_properties,
    write_offset_checkpoint,
)
from kcoord.storage.errors import DirectoryLockedError, StorageError
from kcoord.storage.file_system import FileSystem, RealFileSystem, join, make_durable_dirs, read_file, write_all
from kcoord.storage.handover import Handover, write_handover
from kcoord.storage.journal import Extent, Journal
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.topics.partition_files import PartitionFiles
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.messages import FeatureLevelRecord, PartitionRecord
from kcoord_protocol.record_batch import decode_header
from kcoord_protocol.scram_mechanisms import ScramMechanism
from kcoord_protocol.uuid import uuid_to_string
from tests.unit.logtools.support import (
    DIRECTORY_ID,
    NODE_ID,
    NOW_MS,
    OFFSETS_ID,
    SMALL,
    TOPIC_ID,
    make_small_folder,
    metadata_records,
    open_folder,
    uuids,
    write_metadata,
)
from tests.unit.logtools.test_import import transactional_batch

SOURCE, TARGET = "var/source", "var/target"
HOME = partition_for("readers", 4)


@pytest.fixture
def fs() -> MemoryFileSystem:
    fs = MemoryFileSystem()
    make_small_folder(SOURCE, fs)
    return fs


def export(fs: FileSystem, node_id: int = 5) -> ExportReport:
    return LogExport(fs, SOURCE, TARGET, node_id, NOW_MS, uuids()).run()


def image_of(fs: FileSystem, folder: str = TARGET) -> MetadataImage:
    return read_metadata(fs, join(folder, "__cluster_metadata-0")).image


def files_in(fs: FileSystem, folder: str) -> dict[str, bytes]:
    """Returns the content of every file below a folder, by path."""
    contents = {}
    for name in fs.list_dir(folder):
        path = join(folder, name)
        try:
            contents.update(files_in(fs, path))
        except NotADirectoryError:
            contents[path] = read_file(fs, path)
    return contents


def logs_of(fs: FileSystem, folder: str) -> dict[str, bytes]:
    """Returns the bytes of every log except the metadata log, by partition name."""
    return {
        partition.name: b"".join(read_file(fs, segment.path) for segment in segments_in(fs, partition.path))
        for partition in partitions_in(fs, folder)
        if partition.topic != "__cluster_metadata"
    }


# --- metadata records -------------------------------------------------------------------------------------------------


def exported_image(*added: CoordinatorRecord) -> tuple[MetadataImage, MetadataExport]:
    maker = MetadataExport(5, NODE_ID, DIRECTORY_ID)
    made = maker.from_image(ImageBuilder.of([*metadata_records(), *added]))
    return ImageBuilder.of(made), maker


def test_exported_partitions_have_no_leader_before_the_election() -> None:
    change = records.new_reassignment_record(TOPIC_ID, 1, [2, 3], [DIRECTORY_ID] * 2, 3)
    image, _ = exported_image(change)
    topic = image.topics["orders"]
    assert topic.id == TOPIC_ID
    assert [(part.leader, part.replicas, part.isr, part.directories) for part in topic.partitions] == [
        (-1, [5], [5], [DIRECTORY_ID]),
        (-1, [5], [5], [DIRECTORY_ID]),
    ]
    assert [(part.leader_epoch, part.partition_epoch) for part in topic.partitions] == [(0, 0), (1, 1)]
    assert {part.creation_time_ms for part in topic.partitions} == {NOW_MS}
    assert image.brokers == {}


def test_feature_levels_are_at_most_those_of_kafka() -> None:
    def levels(*features: tuple[str, int]) -> dict[str, int]:
        image, _ = exported_image(*(records.new_feature_level_record(*feature) for feature in features))
        return dict(image.features)

    new_cluster = {"metadata.version": 30, "group.version": 1, "transaction.version": 2}
    assert levels() == new_cluster
    assert levels(("metadata.version", 99), ("group.version", 9), ("transaction.version", 9), ("own", 1)) == new_cluster
    without_groups = levels(("metadata.version", 30), ("transaction.version", 1))
    assert without_groups == {"metadata.version": 30, "transaction.version": 1}


def test_the_features_come_first_and_partitions_in_kafkas_version() -> None:
    made = MetadataExport(5, NODE_ID, DIRECTORY_ID).from_image(ImageBuilder.of(metadata_records()))
    assert all(isinstance(record.value, FeatureLevelRecord) for record in made[:3])
    assert {record.value_version for record in made if isinstance(record.value, PartitionRecord)} == {2}


ACL = Acl(ResourceType.TOPIC, "o", PatternType.PREFIXED, "User:a", "*", AclOperation.READ, PermissionType.ALLOW)


def test_configs_are_exported_except_those_of_kcoord() -> None:
    token = records.DelegationTokenData("User:alice", "User:bob", ("User:carol",), 1, 3, 2)
    image, maker = exported_image(
        records.new_delegation_token_record("token", token),
        records.new_config_record(2, "orders", "retention.ms", "1234"),
        records.new_config_record(2, "orders", "min.insync.replicas", "2"),
        records.new_config_record(4, "", "log.cleaner.threads", "2"),
        records.new_config_record(4, str(NODE_ID), "num.io.threads", "3"),
        records.new_config_record(4, "9", "num.io.threads", "4"),
        records.new_config_record(32, "readers", "consumer.session.timeout.ms", "46000"),
        records.new_config_record(32, "readers", "kcoord.offsets.retention.minutes", "5"),
        records.new_producer_ids_record(1, 0, 5000),
        records.new_scram_credential_record(ScramMechanism.SCRAM_SHA_256, "alice", b"s", bytes(32), bytes(32), 4096),
        records.new_acl_record(b"i" * 16, ACL),
        records.new_acl_record(b"j" * 16, replace(ACL, host="10.0.0.0/8")),
    )
    assert image.topic_configs("orders") == {"retention.ms": "1234", "min.insync.replicas": "2"}
    assert image.broker_configs() == {"log.cleaner.threads": "2"}
    assert image.broker_configs(5) == {"num.io.threads": "3"}
    assert image.group_configs("readers") == {"consumer.session.timeout.ms": "46000"}
    assert image.next_producer_id == 5000
    assert image.scram_credentials == {("SCRAM-SHA-256", "alice"): ScramCredential(b"s", bytes(32), bytes(32), 4096)}
    assert dict(maker.skipped) == {
        "configs of broker 9": 1,
        "config kcoord.offsets.retention.minutes: Kafka does not have it": 1,
    }
    assert image.delegation_tokens == {"token": token}
    assert image.acls == {b"i" * 16: ACL, b"j" * 16: replace(ACL, host="10.0.0.0/8")}
    note, note_about_acl = maker.notes
    assert note_about_acl.startswith("Kafka 4.3.1 does not treat the host as a range")
    assert note.startswith("orders: min.insync.replicas=2")


# --- folders ----------------------------------------------------------------------------------------------------------


def test_the_folder_has_the_same_logs_for_another_node(fs: MemoryFileSystem) -> None:
    before = files_in(fs, SOURCE)
    report = export(fs)
    assert files_in(fs, SOURCE) == before
    assert (report.topics, report.partitions, report.copied_partitions) == (2, 6, 3)
    assert (dict(report.groups), report.offsets) == ({"classic": 1}, 2)
    assert (dict(report.skipped), report.notes) == ({}, [])
    assert logs_of(fs, TARGET) == logs_of(fs, SOURCE)
    assert read_properties(fs, f"{TARGET}/meta.properties") == {
        "version": "1",
        "cluster.id": "c" * 22,
        "node.id": "5",
        "directory.id": uuid_to_string(DIRECTORY_ID),
    }
    assert fs.exists(f"{TARGET}/{CLEAN_SHUTDOWN_FILE}")
    for name, topic_id in (("orders-0", TOPIC_ID), (f"__consumer_offsets-{HOME}", OFFSETS_ID)):
        assert PartitionFiles(fs, f"{TARGET}/{name}").topic_id() == topic_id
    assert list(FolderCheck(fs, TARGET).run()) == []


def test_the_metadata_log_is_of_the_first_epoch(fs: MemoryFileSystem) -> None:
    export(fs)
    folder = f"{TARGET}/__cluster_metadata-0"
    epochs = {decode_header(frame.batch).partition_leader_epoch for frame in FolderReader(fs, folder).batches()}
    assert epochs == {1}
    assert read_file(fs, f"{folder}/leader-epoch-checkpoint") == b"0\n1\n1 0\n"
    assert PartitionFiles(fs, folder).topic_id() == (1).to_bytes(16, "big")
    assert image_of(fs).topics["orders"].id == TOPIC_ID


def test_producers_and_their_open_transactions_are_in_a_snapshot() -> None:
    fs = MemoryFileSystem()
    log_dir = open_folder(SOURCE, fs)
    write_metadata(log_dir, metadata_records())
    log = log_dir.open_log("orders", 0, SMALL, NOW_MS)
    log.append(transactional_batch(7), now_ms=NOW_MS)
    log_dir.close()
    export(fs)
    snapshot = PartitionFiles(fs, f"{TARGET}/orders-0").load_snapshot(0, 1)
    assert snapshot is not None
    offset, (producer,) = snapshot
    assert (offset, producer.producer_id, producer.current_transaction_first_offset) == (1, 7, 0)


def test_bytes_that_only_the_journals_of_workers_hold_are_exported(fs: MemoryFileSystem) -> None:
    segment = segments_in(fs, f"{SOURCE}/orders-0")[-1]
    whole = read_file(fs, segment.path)
    fs.damage(segment.path, lambda data: data[: len(data) // 2])
    worker = f"{SOURCE}/.workers/1"
    make_durable_dirs(fs, worker)
    journal = Journal(fs, f"{worker}/journal")
    journal.write([Extent("orders-0", segment.base_offset, len(whole) // 2, whole[len(whole) // 2 :])])
    journal.sync()
    before = files_in(fs, SOURCE)
    report = export(fs)
    assert report.notes == []
    assert logs_of(fs, TARGET)["orders-0"].endswith(whole)
    assert files_in(fs, SOURCE) == before
    assert not fs.exists(f"{TARGET}/.workers")


def test_log_start_offsets_are_exported(fs: MemoryFileSystem) -> None:
    worker = f"{SOURCE}/.workers/0"
    make_durable_dirs(fs, worker)
    write_offset_checkpoint(fs, f"{worker}/{LOG_START_OFFSET_FILE}", {("orders", 0): 4})
    write_handover(fs, f"{SOURCE}/orders-1", Handover(0, 7, 0, True))
    export(fs)
    assert read_offset_checkpoint(fs, f"{TARGET}/{LOG_START_OFFSET_FILE}") == {("orders", 0): 4, ("orders", 1): 7}
    assert not fs.exists(f"{TARGET}/orders-1/leader-handover-checkpoint")


def test_an_export_knows_how_far_logs_were_cleaned(fs: MemoryFileSystem) -> None:
    """A check accepts the gaps of cleaned logs only, and Kafka does not clean them again."""
    worker = f"{SOURCE}/.workers/0"
    make_durable_dirs(fs, worker)
    write_offset_checkpoint(fs, f"{SOURCE}/{CLEANER_OFFSET_FILE}", {("__consumer_offsets", HOME): 2, ("gone", 0): 9})
    write_offset_checkpoint(fs, f"{worker}/{CLEANER_OFFSET_FILE}", {("orders", 0): 4})
    export(fs)
    cleaned = read_offset_checkpoint(fs, f"{TARGET}/{CLEANER_OFFSET_FILE}")
    assert cleaned == {("__consumer_offsets", HOME): 2, ("orders", 0): 4}


def test_folders_of_deleted_topics_are_not_exported(fs: MemoryFileSystem) -> None:
    make_durable_dirs(fs, f"{SOURCE}/gone-0")
    make_durable_dirs(fs, f"{SOURCE}/orders-9")
    PartitionFiles(fs, f"{SOURCE}/orders-1").create(bytes(16))
    report = export(fs)
    assert sorted(report.skipped) == [
        "folder gone-0: the metadata does not know it",
        "folder orders-1: the metadata does not know it",
        "folder orders-9: the metadata does not know it",
    ]
    assert sorted(partition.name for partition in partitions_in(fs, TARGET)) == [
        "__cluster_metadata-0",
        f"__consumer_offsets-{HOME}",
        "orders-0",
    ]


def test_a_torn_end_is_left_out_with_a_note(fs: MemoryFileSystem) -> None:
    path = segments_in(fs, f"{SOURCE}/orders-0")[-1].path
    whole = read_file(fs, path)
    fs.damage(path, lambda data: data + data[:40])
    report = export(fs)
    (note,) = report.notes
    assert "40 torn bytes" in note
    assert logs_of(fs, TARGET)["orders-0"].endswith(whole)


def is_nothing_left(fs: FileSystem) -> bool:
    return fs.list_dir("var") == ["source"]


def test_damage_is_an_error_that_names_the_source_file(fs: MemoryFileSystem) -> None:
    path = segments_in(fs, f"{SOURCE}/orders-0")[0].path
    fs.damage(path, lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(StorageError, match=f"^{path}: position 0"):
        export(fs)
    assert is_nothing_left(fs)


@pytest.mark.parametrize("folder", [SOURCE, f"{SOURCE}/.workers/1"])
def test_a_folder_in_use_is_an_error(fs: MemoryFileSystem, folder: str) -> None:
    make_durable_dirs(fs, folder)
    path = f"{folder}/.lock"
    write_all(fs.open_append(path), b"")
    lock = fs.lock(path)
    with pytest.raises(DirectoryLockedError, match=r"\.lock"):
        export(fs)
    assert is_nothing_left(fs)
    lock.release()
    export(fs)


def test_no_broker_can_start_during_an_export(fs: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    build = LogExport._build

    def try_to_start(self: LogExport, *arguments: object) -> None:
        with pytest.raises(DirectoryLockedError):
            open_folder(SOURCE, fs)
        build(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LogExport, "_build", try_to_start)
    assert export(fs).topics == 2


def test_an_export_needs_a_data_folder_and_a_new_target(fs: MemoryFileSystem) -> None:
    make_durable_dirs(fs, f"{TARGET}/something")
    with pytest.raises(StorageError, match=f"^{TARGET}: already exists"):
        export(fs)
    fs.remove_dir(f"{TARGET}/something")
    make_durable_dirs(fs, f"{TARGET}.incomplete")
    with pytest.raises(StorageError, match=f"^{TARGET}.incomplete: already exists"):
        export(fs)
    fs.remove_dir(f"{TARGET}.incomplete")
    export(fs)
    fs.remove(f"{SOURCE}/meta.properties")
    with pytest.raises(StorageError, match=r"not a data folder: it has no meta\.properties"):
        LogExport(fs, SOURCE, "var/second", 1, NOW_MS, uuids()).run()


def test_a_target_inside_the_source_is_an_error(fs: MemoryFileSystem) -> None:
    before = files_in(fs, SOURCE)
    with pytest.raises(StorageError, match=f"^{SOURCE}/kafka: is inside {SOURCE}"):
        LogExport(fs, SOURCE, f"{SOURCE}/kafka", 1, NOW_MS, uuids()).run()
    assert files_in(fs, SOURCE) == before


def test_a_full_disk_is_an_error_that_names_the_folder(fs: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_logs, "copy_file", fail)
    with pytest.raises(StorageError, match=rf"^{TARGET}\.incomplete: .*No space left on device"):
        export(fs)
    assert is_nothing_left(fs)


def test_a_folder_without_a_metadata_log_is_an_error(fs: MemoryFileSystem) -> None:
    folder = f"{SOURCE}/__cluster_metadata-0"
    for name in fs.list_dir(folder):
        fs.remove(f"{folder}/{name}")
    fs.remove_dir(folder)
    with pytest.raises(StorageError, match="__cluster_metadata-0 is missing"):
        export(fs)
    assert is_nothing_left(fs)


# --- command line -----------------------------------------------------------------------------------------------------


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    make_small_folder(source)
    assert main(["log", "export", source, target, "--node-id", "3"]) == 0
    said = capsys.readouterr().out
    assert f"start Kafka with log.dirs={target}, node.id=3" in said
    assert main(["log", "export", source, target, "--json"]) == 1
    assert capsys.readouterr().err == f"kcoord log: {target}: already exists; an export needs a new folder\n"
    assert main(["log", "export", source, f"{target}2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["classic groups"], report["committed offsets"], report["topics"]) == (1, 2, 2)
    assert image_of(RealFileSystem(), f"{target}2").topics["orders"].partitions[0].replicas == [1]
    with pytest.raises(SystemExit) as ended:
        main(["log", "export", source, target, "--node-id=-2"])
    assert ended.value.code == 2
    assert "'-2' is not a node.id: give a number from 0 to 2147483647" in capsys.readouterr().err
