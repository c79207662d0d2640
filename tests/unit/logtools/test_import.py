# SPDX-License-Identifier: Apache-2.0
"""Data folders made from the log folders of another broker."""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.logtools.decode import TRANSACTION_RECORDS, group_id_of
from kcoord.logtools.folders import FolderReader, NoLogsError, partitions_in
from kcoord.logtools.import_logs import ImportReport, LogImport
from kcoord.logtools.metadata_source import read_metadata
from kcoord.logtools.verify import FolderCheck
from kcoord.metadata import records
from kcoord.metadata.image import MetadataImage, ScramCredential
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import CoordinatorSerde, partition_for
from kcoord.storage.checkpoints import (
    CLEANER_OFFSET_FILE,
    LOCK_FILE,
    LOG_START_OFFSET_FILE,
    read_offset_checkpoint,
    write_offset_checkpoint,
)
from kcoord.storage.errors import CorruptLogError, DirectoryLockedError, StorageError
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.handover import Handover, write_handover
from kcoord.topics.partition_files import PartitionFiles
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.messages import TransactionLogKey, TransactionLogValue
from kcoord_protocol.record_batch import (
    ControlRecordType,
    Record,
    decode_control_key,
    decode_header,
    decode_records,
    encode_batch,
    encode_batch_from_parts,
    encode_control_batch,
    end_txn_marker,
)
from kcoord_protocol.scram_mechanisms import ScramMechanism
from kcoord_protocol.uuid import uuid_from_string
from tests.support.shared import shared
from tests.unit.logtools.support import (
    NOW_MS,
    OFFSETS_ID,
    SMALL,
    TOPIC_ID,
    append,
    broker_config,
    commit_record,
    commit_tombstone,
    make_small_folder,
    metadata_records,
    open_folder,
    uuids,
    write_metadata,
)

FS = RealFileSystem()


def run(source: Path, target: Path, **settings: str) -> ImportReport:
    work = LogImport(FS, broker_config(**settings), str(target), NOW_MS, uuids())
    return work.run([str(source)])


def image_of(folder: Path) -> MetadataImage:
    return read_metadata(FS, str(folder / "__cluster_metadata-0")).image


def records_in(folder: Path, topic: str) -> list[tuple[int, Record]]:
    """Yields (partition, record) for all partitions of a topic."""
    return [
        (partition.number, record)
        for partition in partitions_in(FS, str(folder))
        if partition.topic == topic
        for frame in FolderReader(FS, partition.path).batches()
        for record in decode_records(frame.batch)
    ]


def served_offsets(folder: Path) -> Mapping[tuple[str, str, int], int]:
    """Returns the state of a broker's shards after they replay the folder."""
    offsets: dict[tuple[str, str, int], int] = {}
    serde = CoordinatorSerde()
    shards: dict[int, GroupCoordinatorShard] = {}
    config, image = broker_config(), image_of(folder)
    for number, record in records_in(folder, "__consumer_offsets"):
        decoded = serde.deserialize(record.key, record.value)
        if decoded is not None:
            shards.setdefault(number, GroupCoordinatorShard(config, image)).replay(decoded)
    for shard in shards.values():
        state = shard.hard_state()["offsets"]
        assert isinstance(state, dict)
        offsets.update({key: committed.offset for key, committed in state.items()})
    return offsets


# --- the sample of a real broker --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    with tarfile.open(shared("spark-sample", "consumer_offsets.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def imported(sample: Path) -> tuple[Path, ImportReport]:
    target = sample.parent / "imported"
    return target, run(sample, target, offsets_topic_num_partitions="50")


def described_by_kafka() -> dict[tuple[str, str, int], int]:
    lines = shared("spark-sample", "describe-offsets.txt").read_text().splitlines()
    rows = [line.split() for line in lines if len(line.split()) > 5 and line.split()[2].isdigit()]
    return {(row[0], row[1], int(row[2])): int(row[3]) for row in rows}


def test_all_offsets_of_the_sample_are_as_kafka_described_them(imported: tuple[Path, ImportReport]) -> None:
    folder, report = imported
    truth = described_by_kafka()
    assert len(truth) == report.offsets == 68
    assert served_offsets(folder) == truth


def test_groups_transactions_and_unknown_records_of_the_sample_are_counted(
    imported: tuple[Path, ImportReport],
) -> None:
    _, report = imported
    assert report.groups == Counter(consumer=5, classic=4)
    counts = report.transactions
    assert (counts.committed, counts.aborted, counts.pending) == (274, 135, 0)
    assert report.kept_unknown == Counter({"share group records": 15})
    assert report.group_records == 24_368 - (274 + 135) - 135


def test_every_group_of_the_sample_is_in_the_partition_of_its_hash(imported: tuple[Path, ImportReport]) -> None:
    groups = {(group_id_of(record.key), number) for number, record in records_in(imported[0], "__consumer_offsets")}
    assert all(group_id is not None and partition_for(group_id, 50) == number for group_id, number in groups)
    assert ("share-1", partition_for("share-1", 50)) in groups


def test_records_of_unknown_types_are_kept_byte_for_byte(sample: Path, imported: tuple[Path, ImportReport]) -> None:
    def share_records(folder: Path) -> list[tuple[bytes | None, bytes | None]]:
        records = [record for _, record in records_in(folder, "__consumer_offsets")]
        return [(record.key, record.value) for record in records if group_id_of(record.key) == "share-1"]

    assert len(share_records(sample)) == 15
    assert share_records(imported[0]) == share_records(sample)


def test_topics_of_the_sample_are_found_with_their_ids_and_partitions(imported: tuple[Path, ImportReport]) -> None:
    truth = {}
    for line in shared("spark-sample", "topics.txt").read_text().splitlines():
        if line.startswith("Topic: ") and not line.startswith("Topic: __"):
            words = line.replace(":", "").split()
            truth[words[1]] = uuid_from_string(words[3]), int(words[5])
    topics = dict(image_of(imported[0]).topics)
    # Offsets that are committed in transactions have no topic id.
    truth["in-tx"] = topics["in-tx"].id, truth["in-tx"][1]
    assert len(topics.pop("__consumer_offsets").partitions) == 50
    assert {name: (topic.id, len(topic.partitions)) for name, topic in topics.items()} == truth
    assert {part.creation_time_ms for topic in topics.values() for part in topic.partitions} == {-1}


def test_the_imported_folder_is_sound(imported: tuple[Path, ImportReport]) -> None:
    assert list(FolderCheck(FS, str(imported[0])).run()) == []


# --- small folders ----------------------------------------------------------------------------------------------------


def test_an_import_of_a_kcoord_folder_keeps_everything(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_small_folder(str(source))
    report = run(source, target, offsets_topic_num_partitions="7")
    assert report.from_metadata
    assert (report.topics, report.partitions, report.copied_partitions) == (1, 2, 2)
    assert served_offsets(target) == served_offsets(source)
    for number in range(2):
        ours, theirs = (sorted((folder / f"orders-{number}").glob("*.log")) for folder in (target, source))
        assert [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs]
    before, after = image_of(source), image_of(target)
    assert after.topics["orders"].id == TOPIC_ID
    assert after.topics["__consumer_offsets"].id == OFFSETS_ID
    assert [part.creation_time_ms for part in after.topics["orders"].partitions] == [NOW_MS, NOW_MS]
    assert after.topics["orders"].partitions[0].leader_epoch > before.topics["orders"].partitions[0].leader_epoch
    assert list(FolderCheck(FS, str(target)).run()) == []


def test_history_is_kept_with_its_times_and_headers(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    log_dir = open_folder(str(source))
    home = partition_for("g", 4)
    history = [commit_record("g", "orders", 0, 1, 100), commit_tombstone("g", "orders", 0, 200, "expired")]
    append(log_dir, "__consumer_offsets", home, [encode_batch([record]) for record in history])
    log_dir.close()
    run(source, target)
    kept = [record for _, record in records_in(target, "__consumer_offsets")]
    assert [record.timestamp_ms for record in kept] == [100, 200]
    assert kept[1].headers == [("kcoord.reason", b"expired")]


def test_only_valid_configs_are_imported(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    made = metadata_records()
    made.append(records.new_config_record(2, "orders", "retention.ms", "1234"))
    made.append(records.new_config_record(2, "orders", "no.such.config", "1"))
    made.append(records.new_config_record(32, "readers", "consumer.session.timeout.ms", "46000"))
    made.append(records.new_config_record(4, "9", "log.cleaner.threads", "2"))
    made.append(records.new_config_record(4, "", "secret.of.a.plugin", "hush"))
    made.append(records.new_producer_ids_record(1, 0, 5000))
    made.append(
        records.new_scram_credential_record(ScramMechanism.SCRAM_SHA_512, "alice", b"s", bytes(64), bytes(64), 4096)
    )
    made.append(records.new_acl_record(b"i" * 16, ACL))
    token = records.DelegationTokenData("User:alice", "User:bob", ("User:carol",), 1, 3, 2)
    made.append(records.new_delegation_token_record("token", token))
    log_dir = open_folder(str(source))
    write_metadata(log_dir, made)
    log_dir.close()
    report = run(source, target)
    image = image_of(target)
    assert image.topic_configs("orders") == {"retention.ms": "1234"}
    assert image.group_configs("readers") == {"consumer.session.timeout.ms": "46000"}
    assert image.next_producer_id == 5000
    assert image.scram_credentials == {("SCRAM-SHA-512", "alice"): ScramCredential(b"s", bytes(64), bytes(64), 4096)}
    assert image.acls == {b"i" * 16: ACL}
    assert image.delegation_tokens == {"token": token}
    skipped = sorted(report.skipped)
    assert len(skipped) == 3
    assert skipped[0].startswith("config no.such.config=1")
    assert skipped[1] == "config secret.of.a.plugin=[hidden]: Unknown broker config name: secret.of.a.plugin"
    assert skipped[2] == "configs of broker 9"


def test_configs_that_are_valid_only_together_are_imported(tmp_path: Path) -> None:
    """They must not be checked one by one: the key that needs the other may come first."""
    source, target = tmp_path / "source", tmp_path / "target"
    made = metadata_records()
    configs = {"consumer.heartbeat.interval.ms": "50000", "consumer.session.timeout.ms": "60000"}
    made += records.new_config_records(32, "readers", {}, {**configs, "no.such.config": "1"})
    log_dir = open_folder(str(source))
    write_metadata(log_dir, made)
    log_dir.close()
    report = run(source, target, group_consumer_max_heartbeat_interval_ms="60000")
    assert image_of(target).group_configs("readers") == configs
    assert list(report.skipped) == ["config no.such.config=1: Unknown group config name: no.such.config"]


def test_configs_of_the_offsets_topic_are_imported(tmp_path: Path) -> None:
    """`min.compaction.lag.ms` decides how far back offsets can be restored."""
    source, target = tmp_path / "source", tmp_path / "target"
    configs = {"cleanup.policy": "compact", "min.compaction.lag.ms": "5000", "segment.bytes": "104857600"}
    log_dir = open_folder(str(source))
    write_metadata(log_dir, [*metadata_records(), *records.new_config_records(2, "__consumer_offsets", {}, configs)])
    log_dir.close()
    run(source, target)
    assert image_of(target).topic_configs("__consumer_offsets") == configs


@pytest.mark.parametrize(
    ("release", "levels", "imported"),
    [
        ("4.4", {"metadata.version": 30}, {"metadata.version": 30}),
        ("4.4", {"metadata.version": 33, "transaction.version": 1}, {"metadata.version": 33, "transaction.version": 1}),
        ("4.3", {"metadata.version": 33, "group.version": 9}, {"metadata.version": 30, "group.version": 1}),
        ("4.4", {"metadata.version": 20, "share.version": 1}, {"metadata.version": 30}),
        ("4.4", {}, {}),
    ],
)
def test_levels_of_features_are_imported(
    tmp_path: Path, release: str, levels: Mapping[str, int], imported: Mapping[str, int]
) -> None:
    """Without levels, a start takes the folder for a new cluster: it would also set the first passwords again."""
    source, target = tmp_path / "source", tmp_path / "target"
    log_dir = open_folder(str(source))
    features = [records.new_feature_level_record(name, level) for name, level in levels.items()]
    write_metadata(log_dir, [*features, *metadata_records()])
    log_dir.close()
    run(source, target, kcoord_release=release)
    assert image_of(target).features == imported


ACL = Acl(ResourceType.TOPIC, "o", PatternType.PREFIXED, "User:a", "*", AclOperation.READ, PermissionType.ALLOW)


def transactional_batch(producer_id: int, value: bytes = b"v") -> bytes:
    record = Record(b"k", value, timestamp_ms=NOW_MS)
    return encode_batch([record], producer_id=producer_id, producer_epoch=3, base_sequence=0, is_transactional=True)


def transaction_log(statuses: Mapping[int, int]) -> list[bytes]:
    """Returns the last transaction record of each of the producers 7, 8, ..., by the given status."""
    serde = CoordinatorSerde(TRANSACTION_RECORDS)
    made = []
    for producer_id, status in statuses.items():
        key = TransactionLogKey(transactional_id=f"t{producer_id}")
        value = TransactionLogValue(producer_id=producer_id, transaction_status=status, transaction_partitions=[])
        made.append(encode_batch_from_parts([serde.serialize(CoordinatorRecord(key, value, 0))], NOW_MS))
    return made


def test_open_transactions_are_ended_as_their_coordinator_had_decided(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    log_dir = open_folder(str(source))
    write_metadata(log_dir, metadata_records())
    marker = encode_control_batch(
        ControlRecordType.COMMIT, end_txn_marker(0), timestamp_ms=NOW_MS, producer_id=9, producer_epoch=3
    )
    append(log_dir, "orders", 0, [transactional_batch(7), transactional_batch(8), transactional_batch(9), marker])
    home = partition_for("g", 4)
    for producer_id, offset in ((7, 70), (8, 80)):
        batch = encode_batch(
            [commit_record("g", "orders", producer_id - 7, offset)],
            producer_id=producer_id,
            producer_epoch=3,
            is_transactional=True,
        )
        append(log_dir, "__consumer_offsets", home, [batch])
    append(log_dir, "__transaction_state", 0, transaction_log({7: 2, 8: 1}))
    log_dir.close()
    report = run(source, target)
    assert report.ended_transactions == 2
    assert served_offsets(target) == {("g", "orders", 0): 70}
    ended = {}
    for frame in FolderReader(FS, str(target / "orders-0")).batches():
        header = decode_header(frame.batch)
        if header.is_control:
            ended[header.producer_id] = decode_control_key(decode_records(frame.batch)[0].key)
    assert ended == {
        7: ControlRecordType.COMMIT,
        8: ControlRecordType.ABORT,
        9: ControlRecordType.COMMIT,
    }
    assert image_of(target).next_producer_id == 9


def test_a_moved_start_offset_is_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_small_folder(str(source))
    write_offset_checkpoint(FS, str(source / "log-start-offset-checkpoint"), {("orders", 0): 4})
    run(source, target)
    log_dir = open_folder(str(target))
    assert log_dir.recovery_of("orders", 0).start_offset == 4
    log_dir.close()


def test_start_offsets_of_workers_are_kept(tmp_path: Path) -> None:
    """Otherwise records that were deleted would reappear if the workers were killed."""
    source, target = tmp_path / "source", tmp_path / "target"
    make_small_folder(str(source))
    worker = source / ".workers" / "0"
    worker.mkdir(parents=True)
    write_offset_checkpoint(FS, str(worker / "log-start-offset-checkpoint"), {("orders", 0): 4})
    write_handover(FS, str(source / "orders-1"), Handover(0, 7, 0, True))
    run(source, target)
    log_dir = open_folder(str(target))
    assert [log_dir.recovery_of("orders", number).start_offset for number in range(2)] == [4, 7]
    log_dir.close()


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_the_checks_of_an_imported_folder_accept_the_gaps_of_cleaned_logs(tmp_path: Path, is_handed_over: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    log_dir = open_folder(str(source))
    write_metadata(log_dir, metadata_records())
    log = log_dir.open_log("orders", 0, SMALL, NOW_MS)
    for offset in (0, 5):
        log.append(encode_batch([Record(b"k", b"v", timestamp_ms=NOW_MS)], base_offset=offset), now_ms=NOW_MS)
    log.close()
    log_dir.write_topic_id("orders", 0, TOPIC_ID)
    log_dir.close()
    if is_handed_over:
        write_handover(FS, str(source / "orders-0"), Handover(6, 0, 6, True))
    else:
        write_offset_checkpoint(FS, str(source / CLEANER_OFFSET_FILE), {("orders", 0): 6, ("__consumer_offsets", 0): 3})
    run(source, target)
    assert list(FolderCheck(FS, str(target)).run()) == []
    assert read_offset_checkpoint(FS, str(target / CLEANER_OFFSET_FILE)) == {("orders", 0): 6}


@pytest.mark.parametrize(("content", "is_noted"), [("", False), ("x", True)], ids=["empty", "damaged"])
def test_the_cleaner_checkpoint_of_a_source_may_be_empty_or_damaged(
    tmp_path: Path, content: str, is_noted: bool
) -> None:
    """Kafka creates checkpoints empty. If this one is damaged, a cleaner has run, so the checks have to accept gaps."""
    source, target = tmp_path / "source", tmp_path / "target"
    log_dir = open_folder(str(source))
    write_metadata(log_dir, metadata_records())
    log_dir.close()
    (source / CLEANER_OFFSET_FILE).write_text(content)
    (source / LOG_START_OFFSET_FILE).write_text("")
    run(source, target)
    assert list(FolderCheck(FS, str(target)).run()) == []
    assert (target / CLEANER_OFFSET_FILE).exists() is is_noted


def test_the_folder_of_a_deleted_topic_of_the_same_name_is_left_out(tmp_path: Path) -> None:
    """A broker that is killed after a topic was deleted and created again may still have the old folder."""
    source, target = tmp_path / "source", tmp_path / "target"
    make_small_folder(str(source))
    PartitionFiles(FS, str(source / "orders-1")).create(bytes(16))
    report = run(source, target)
    assert list(report.skipped) == ["folder orders-1: the metadata does not know it"]
    assert not (target / "orders-1").exists()
    assert (target / "orders-0").exists()


def test_a_torn_end_is_left_out_and_damage_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_small_folder(str(source))
    log = sorted((source / "__consumer_offsets-0").glob("*.log"))[-1]
    whole = log.read_bytes()
    log.write_bytes(whole + whole[:40])
    report = run(source, tmp_path / "target")
    assert any("torn end" in note for note in report.notes)
    first = sorted((source / "__consumer_offsets-0").glob("*.log"))[0]
    data = bytearray(first.read_bytes())
    data[100] ^= 1
    first.write_bytes(data)
    with pytest.raises(CorruptLogError):
        run(source, tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_a_folder_in_use_is_not_imported(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_small_folder(str(source))
    worker = source / ".workers" / "0"
    worker.mkdir(parents=True)
    for folder in (source, worker):
        lock = FS.lock(str(folder / LOCK_FILE))
        try:
            for path in (source, source / "__consumer_offsets-0"):
                work = LogImport(FS, broker_config(), str(tmp_path / "target"), NOW_MS, uuids())
                with pytest.raises(DirectoryLockedError, match="is in use by another process"):
                    work.run([str(path)])
        finally:
            lock.release()


def test_an_import_needs_a_new_target(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_small_folder(str(source))
    target.mkdir()
    run(source, target)
    with pytest.raises(StorageError, match="already exists"):
        run(source, target)
    with pytest.raises(StorageError, match=f"^{source}/new: is inside {source}; an import does not change"):
        run(source, source / "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoLogsError):
        run(tmp_path / "empty", tmp_path / "other")


@pytest.mark.parametrize("key", [None, b"\0", b"\0\1\0\5abc", b"\0\1\xff\xff", b"\0\1\0\1\xff"])
def test_keys_without_a_group(key: bytes | None) -> None:
    assert group_id_of(key) is None
