# SPDX-License-Identifier: Apache-2.0
"""The rows that a dump makes of log files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.coordinator.group import records
from kcoord.logtools.decode import Json, LogKind, RecordDescriber
from kcoord.logtools.dump import Selection, dump_file, files_at
from kcoord.logtools.folders import NoLogsError
from kcoord.metadata.records import (
    new_acl_record,
    new_config_record,
    new_remove_acl_record,
    new_scram_credential_record,
)
from kcoord.runtime.serde import MetadataSerde
from kcoord.storage.file_system import RealFileSystem
from kcoord.topics.producer_files import encode_aborted, encode_snapshot
from kcoord.topics.producer_state import AbortedTransaction, CachedBatch, ProducerEntry
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.record_batch import Record, iter_headers
from kcoord_protocol.scram_mechanisms import ScramMechanism
from tests.unit.logtools.support import NOW_MS, commit_record, commit_tombstone, make_small_folder, record_of

FS = RealFileSystem()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_small_folder(str(tmp_path / "data"))
    return tmp_path / "data"


def rows(path: Path, selection: Selection | None = None) -> list[Json]:
    return list(dump_file(FS, str(path), selection or Selection()))


def test_the_path_can_be_a_data_folder_a_partition_folder_or_a_file(folder: Path) -> None:
    everything = files_at(FS, str(folder), frozenset())
    assert everything == sorted(str(path) for path in folder.glob("*/*.log"))
    orders = [path for path in everything if "/orders-1/" in path]
    assert files_at(FS, str(folder), frozenset({"orders-1"})) == orders
    assert files_at(FS, str(folder / "orders-1"), frozenset()) == orders
    index = str(folder / "orders-1" / "00000000000000000000.index")
    assert files_at(FS, index, frozenset()) == [index]
    with pytest.raises(NoLogsError):
        files_at(FS, str(folder), frozenset({"orders-9"}))
    other = folder / "orders-1" / "partition.metadata"
    other.write_text("version: 0")
    with pytest.raises(NoLogsError, match=r"/partition\.metadata: no log file, whose name ends with \.log, "):
        files_at(FS, str(other), frozenset())


def test_rows_of_data(folder: Path) -> None:
    dumped = rows(folder / "orders-0" / "00000000000000000000.log", Selection(from_offset=2, to_offset=4))
    assert [(row["offset"], row["key"], row["value"]) for row in dumped] == [
        (2, "k0", "value-2" * 3),
        (3, "k1", "value-0" * 3),
        (4, "k1", "value-1" * 3),
    ]
    assert [row["compression"] for row in dumped] == ["none", "zstd", "zstd"]
    assert {row["partition"] for row in dumped} == {"orders-0"}


def test_rows_of_metadata(folder: Path) -> None:
    first = rows(folder / "__cluster_metadata-0" / "00000000000000000000.log")[0]
    assert first["value"] == {
        "type": "TOPIC_RECORD",
        "version": 0,
        "data": {"name": "orders", "topicId": "AAECAwQFBgcICQoLDA0ODw"},
    }


def test_a_dump_hides_the_keys_of_a_scram_credential() -> None:
    made = new_scram_credential_record(ScramMechanism.SCRAM_SHA_256, "alice", b"salt", bytes(32), bytes(32), 4096)
    key, value = MetadataSerde().serialize(made)
    assert RecordDescriber(LogKind.METADATA).describe(Record(key, value)) == (
        None,
        {
            "type": "USER_SCRAM_CREDENTIAL_RECORD",
            "version": 0,
            "data": {
                "name": "alice",
                "mechanism": 1,
                "salt": "[hidden]",
                "storedKey": "[hidden]",
                "serverKey": "[hidden]",
                "iterations": 4096,
            },
        },
    )


@pytest.mark.parametrize(
    ("resource_type", "name", "value", "shown"),
    [
        (4, "ssl.keystore.password", "secret", "[hidden]"),
        (4, "listener.name.tls.ssl.keystore.password", "secret", "[hidden]"),
        (4, "unknown.to.this.release", "secret", "[hidden]"),
        (4, "ssl.keystore.password", None, None),
        (4, "log.cleaner.threads", "2", "2"),
        (2, "retention.ms", "5", "5"),
    ],
)
def test_a_dump_hides_passwords_in_configs(resource_type: int, name: str, value: str | None, shown: str | None) -> None:
    key, encoded = MetadataSerde().serialize(new_config_record(resource_type, "1", name, value))
    _, described = RecordDescriber(LogKind.METADATA).describe(Record(key, encoded))
    assert isinstance(described, dict)
    assert described["data"]["value"] == shown


def test_a_dump_shows_acls() -> None:
    acl = Acl(ResourceType.TOPIC, "o", PatternType.PREFIXED, "User:a", "*", AclOperation.READ, PermissionType.DENY)
    described = []
    for made in (new_acl_record(bytes(16), acl), new_remove_acl_record(bytes(16))):
        key, value = MetadataSerde().serialize(made)
        described.append(RecordDescriber(LogKind.METADATA).describe(Record(key, value))[1])
    assert described == [
        {
            "type": "ACCESS_CONTROL_ENTRY_RECORD",
            "version": 0,
            "data": {
                "id": "AAAAAAAAAAAAAAAAAAAAAA",
                "resourceType": 2,
                "resourceName": "o",
                "patternType": 4,
                "principal": "User:a",
                "host": "*",
                "operation": 3,
                "permissionType": 2,
            },
        },
        {"type": "REMOVE_ACCESS_CONTROL_ENTRY_RECORD", "version": 0, "data": {"id": "AAAAAAAAAAAAAAAAAAAAAA"}},
    ]


def test_a_dump_shows_damage_and_the_batches_after_it(folder: Path) -> None:
    path = folder / "orders-0" / "00000000000000000000.log"
    data = bytearray(path.read_bytes())
    second = list(iter_headers(bytes(data)))[1][0]
    data[second + 70] ^= 1
    path.write_bytes(data)
    dumped = rows(path)
    (damage,) = (row for row in dumped if "damage" in row)
    assert (damage["position"], damage["offset"]) == (second, 3)
    assert [row["offset"] for row in dumped if "damage" not in row][:4] == [0, 1, 2, 6]


def test_rows_of_the_files_beside_a_segment(folder: Path) -> None:
    stem = folder / "orders-0" / "00000000000000000015"
    assert rows(stem.with_suffix(".index"))[0].keys() == {"file", "offset", "position"}
    assert rows(stem.with_suffix(".timeindex"))[0].keys() == {"file", "timestamp", "offset"}
    stem.with_suffix(".snapshot").write_bytes(
        encode_snapshot([ProducerEntry(7, 1, 0, NOW_MS, None, [CachedBatch(4, 14, 2, NOW_MS)])])
    )
    (entry,) = rows(stem.with_suffix(".snapshot"))
    assert (entry["producerId"], entry["lastSequence"], entry["lastOffset"]) == (7, 4, 14)
    stem.with_suffix(".txnindex").write_bytes(encode_aborted(AbortedTransaction(7, 3, 9, 10)))
    (aborted,) = rows(stem.with_suffix(".txnindex"))
    assert (aborted["producerId"], aborted["firstOffset"], aborted["lastOffset"]) == (7, 3, 9)
    stem.with_suffix(".txnindex").write_bytes(encode_aborted(AbortedTransaction(7, 3, 9, 10)) + b"torn")
    assert rows(stem.with_suffix(".txnindex"))[1]["damage"] == "position 34: no whole entry of version 0"
    stem.with_suffix(".snapshot").write_bytes(b"\0\1\0")
    assert "damage" in rows(stem.with_suffix(".snapshot"))[0]


def test_group_records_have_kafkas_names() -> None:
    describer = RecordDescriber(LogKind.OFFSETS)
    key, value = describer.describe(commit_record("g", "orders", 3, 12))
    assert key == {"type": "1", "data": {"group": "g", "topic": "orders", "partition": 3}}
    assert isinstance(value, dict)
    assert value["version"] == "4"
    assert value["data"]["offset"] == 12
    assert describer.describe(commit_tombstone("g", "orders", 3))[1] is None


def test_tagged_fields_of_kcoord_are_shown() -> None:
    record = records.new_group_epoch_record("g", 3, 0, -1, records.EpochReason.JOIN)
    value = RecordDescriber(LogKind.OFFSETS).describe(record_of(record))[1]
    assert isinstance(value, dict)
    assert value["unknownTaggedFields"] == {str(records.EPOCH_REASON_TAG): "join"}


def test_unknown_and_malformed_records_are_shown_as_bytes() -> None:
    describer = RecordDescriber(LogKind.OFFSETS)
    key, value = describer.describe(Record(b"\0\x63\0\1g", b"\0\7x"))
    assert key == {"type": "99", "base64": "AGMAAWc="}
    assert value == {"version": "7", "base64": "AAd4"}
    malformed = commit_record("g", "orders", 0, 1)
    malformed.value = b"\0\4\0"
    key, value = describer.describe(malformed)
    assert isinstance(key, dict) and "error" in key
    assert value == {"base64": "AAQA"}
    with pytest.raises(DecodeError):
        describer.check(malformed)


def test_bytes_that_are_not_utf8_are_base64() -> None:
    assert RecordDescriber(LogKind.DATA).describe(Record(None, b"\xff")) == (None, {"base64": "/w=="})
