# SPDX-License-Identifier: Apache-2.0
"""Logs in bad shape: torn, damaged, cleaned, rolled or replaced during the read, or written by a newer broker."""

from __future__ import annotations

import re
import shutil
import struct
from itertools import chain
from pathlib import Path

import pytest

from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer.client_assignors import ClientAssignor
from kcoord.coordinator.group.consumer.group import ConsumerGroupMember, TargetMetadata
from kcoord.coordinator.group.records import TombstoneReason
from kcoord.pipeline.keys import KeyTable
from kcoord.pipeline.log_files import Folder, LogFolder, NoLogError, folders_at, long_name_in, open_file_system
from kcoord.pipeline.log_reader import END_OF_LOG, read_pieces
from kcoord.pipeline.options import OptionError, SourceOptions
from kcoord.pipeline.planning import log_ranges, pack, prune
from kcoord.pipeline.range_reader import LogRange, read_range
from kcoord.pipeline.tail import LogTail
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import REASON_HEADER, partition_for
from kcoord_protocol.compression import Compression
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.messages import (
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerProtocolSubscription,
    GroupMetadataKey,
    GroupMetadataValue,
)
from kcoord_protocol.record_batch import Record, TimestampType, encode_batch, encode_control_batch
from tests.support.offsets_sample import Row
from tests.unit.logtools.support import commit_record, commit_tombstone, record_of
from tests.unit.pipeline.support import NOW_MS, LogWriter, range_rows, table_rows


def commits(count: int, first: int = 0, compression: Compression = Compression.NONE) -> bytes:
    made = [commit_record("readers", "orders", number % 5, first + number) for number in range(count)]
    return encode_batch(made, compression=compression)


def offsets(rows: list[Row]) -> list[int]:
    return [int(str(row["log_offset"])) for row in rows]


def segment_files(writer: LogWriter) -> list[Path]:
    return sorted(writer.folder.glob("*.log"))


def test_a_torn_tail_is_ignored(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.append(commits(3))
    writer.close()
    (path,) = segment_files(writer)
    sound = path.read_bytes()
    whole = table_rows(str(tmp_path))
    for tail in (commits(2)[:-1], commits(2)[:20], bytes(100), b"\x00" * 8 + commits(2)[8:-3] + b"\xff" * 3):
        path.write_bytes(sound + tail)
        assert table_rows(str(tmp_path)) == whole
    assert offsets(whole) == [0, 1, 2]


def test_damage_is_one_row_and_what_follows_is_read(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    for number in range(4):
        writer.append(commits(3, number))
    writer.close()
    (path,) = segment_files(writer)
    data = bytearray(path.read_bytes())
    size = len(data) // 4
    data[size + 70] ^= 0xFF
    path.write_bytes(data)
    rows = table_rows(str(tmp_path))
    assert sorted(offsets(rows)) == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]
    damaged = [row for row in rows if row["error"]]
    assert [(row["log_offset"], row["value"]) for row in damaged] == [(3, bytes(data[size : 2 * size]))]
    assert "checksum" in str(damaged[0]["error"])
    assert offsets(table_rows(str(tmp_path), "commits")) == [0, 1, 2, 6, 7, 8, 9, 10, 11]


def test_a_malformed_batch_is_one_row_if_checksums_are_off(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    for number in range(3):
        writer.append(commits(3, number))
    writer.close()
    (path,) = segment_files(writer)
    data = bytearray(path.read_bytes())
    data[len(data) // 3 + 61] = 0x7F
    path.write_bytes(data)
    rows = table_rows(str(tmp_path), checksums="none")
    assert sorted(offsets(rows)) == [0, 1, 2, 3, 6, 7, 8]
    assert [row["error"] for row in rows if row["error"]] == ["the records of the batch are malformed"]


@pytest.mark.parametrize("codec", list(Compression))
def test_every_codec_is_read(tmp_path: Path, codec: Compression) -> None:
    writer = LogWriter(tmp_path)
    for number in range(40):
        writer.append(commits(1 + number % 7, number, codec if number % 3 else Compression.NONE))
    writer.close()
    plain = LogWriter(tmp_path / "plain")
    for number in range(40):
        plain.append(commits(1 + number % 7, number))
    plain.close()
    assert table_rows(str(tmp_path)) == table_rows(str(tmp_path / "plain"))


def test_a_cleaned_log_with_gaps_and_empty_batches_is_read(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.append(encode_batch([Record(b"\0\1", None, offset=2)], base_offset=0, last_offset=9))
    writer.append(encode_batch([], base_offset=0, last_offset=4), at=100)
    writer.append(commits(2), at=200)
    writer.close()
    assert offsets(table_rows(str(tmp_path))) == [2, 200, 201]
    assert offsets(range_rows(str(tmp_path), 100, 201)) == [200]


def test_unknown_types_and_versions_keep_their_bytes(tmp_path: Path) -> None:
    future = Record(b"\x00\x63\x00\x01gmore", b"\x00\x00anything", timestamp_ms=NOW_MS)
    newer = commit_record("g", "t", 0, 1)
    assert newer.value is not None
    newer.value = b"\x00\x7f" + newer.value[2:]
    cut = Record(b"\x00\x01\x00\x05ab", b"\x00\x04\x00", timestamp_ms=NOW_MS)
    bad_group = Record(b"\x00\x03\x00\x01g", b"\x00\x00\x01", timestamp_ms=NOW_MS)
    keyless = Record(None, b"v", timestamp_ms=NOW_MS)
    writer = LogWriter(tmp_path)
    writer.append(encode_batch([future, newer, cut, bad_group, keyless]))
    writer.close()
    rows = table_rows(str(tmp_path))
    assert [row["record_type"] for row in rows] == [0x63, 1, 1, 3, None]
    assert [row["group"] for row in rows] == ["g", "g", None, "g", None]
    assert [bool(row["error"]) for row in rows] == [False, False, True, True, False]
    assert (rows[0]["key"], rows[0]["value"]) == (future.key, future.value)
    assert rows[1]["committed_offset"] is None and rows[1]["value_version"] == 0x7F
    for table in ("commits", "group_epochs", "current_offsets"):
        assert table_rows(str(tmp_path), table) == []


def test_tombstones_and_epochs_have_their_reasons_and_principals(tmp_path: Path) -> None:
    tombstone = commit_tombstone("g", "t", 0)
    tombstone.headers = [("kcoord.reason", b"offset-delete"), ("kcoord.principal", b"User:eve"), ("other", None)]
    epoch = ConsumerGroupMetadataValue(epoch=3, metadata_hash=5, creation_time_ms=NOW_MS)
    epoch.unknown_tagged_fields = ((1000, b"join"), (1001, NOW_MS.to_bytes(8, "big")))
    writer = LogWriter(tmp_path)
    writer.append(
        encode_batch([tombstone, record_of(CoordinatorRecord(ConsumerGroupMetadataKey(group_id="g"), epoch, 0))])
    )
    writer.close()
    deleted, bumped = table_rows(str(tmp_path))
    assert deleted["tombstone_reason"] == "offset-delete" and deleted["is_tombstone"]
    assert (deleted["tombstone_principal"], bumped["tombstone_principal"]) == ("User:eve", None)
    assert deleted["headers"] == [{"key": name, "value": value} for name, value in tombstone.headers]
    (row,) = table_rows(str(tmp_path), "group_epochs")
    assert (row["epoch"], row["epoch_reason"], row["metadata_hash"]) == (3, "join", 5)
    assert row["creation_timestamp"] == row["empty_since"] == bumped["timestamp"]


def test_what_client_side_assignors_add_to_records_is_read(tmp_path: Path) -> None:
    member = ConsumerGroupMember("m", client_assignors=(ClientAssignor("x", -1, 2, 3, 1, b"in"),))
    owner = ConsumerGroupMember("m", metadata=TargetMetadata(7, 2, b"out"))
    plain = ConsumerGroupMember("n")
    made = [
        records.new_member_subscription_record("g", member),
        records.new_target_assignment_epoch_record("g", 5, NOW_MS, "x", "m"),
        records.new_current_assignment_record("g", owner),
        records.new_member_subscription_record("g", plain),
        records.new_target_assignment_epoch_record("g", 6, NOW_MS),
        records.new_current_assignment_record("g", plain),
    ]
    writer = LogWriter(tmp_path)
    writer.append(encode_batch([record_of(record) for record in made]))
    writer.close()
    first, second = table_rows(str(tmp_path), "members")
    assert first["client_assignors"] == [
        {
            "name": "x",
            "minimum_version": -1,
            "maximum_version": 2,
            "reason": 3,
            "metadata_version": 1,
            "metadata": b"in",
        }
    ]
    assert second["client_assignors"] is None
    epochs = table_rows(str(tmp_path), "group_epochs")
    assert [(row["epoch"], row["client_assignor"], row["assigned_by"]) for row in epochs] == [
        (5, "x", "m"),
        (6, None, None),
    ]
    names = ("assignor_error", "assignor_metadata_version", "assignor_metadata")
    current = table_rows(str(tmp_path), "assignments")
    assert [tuple(row[name] for name in names) for row in current] == [(7, 2, b"out"), (None, None, None)]


def test_topics_of_a_subscription_are_read_as_the_coordinator_reads_them(tmp_path: Path) -> None:
    """The coordinator reads every subscription as version 0 (KIP-496). The bytes here are version 0 labelled as 1."""
    subscription = b"\x00\x01" + ConsumerProtocolSubscription(topics=["orders"]).encode(0)
    members = [
        GroupMetadataValue.MemberMetadata(member_id=str(len(data)), subscription=data) for data in (subscription, b"\0")
    ]
    value = GroupMetadataValue(protocol_type="consumer", generation=1, protocol="range", leader="m", members=members)
    writer = LogWriter(tmp_path)
    writer.append(encode_batch([record_of(CoordinatorRecord(GroupMetadataKey(group="g"), value, 3))]))
    writer.close()
    (row,) = table_rows(str(tmp_path), "classic_groups")
    described = row["members"]
    assert isinstance(described, list)
    assert [member["subscribed_topics"] for member in described] == [["orders"], None]


def test_a_group_that_moves_to_the_other_protocol_does_not_end(tmp_path: Path) -> None:
    moved = CoordinatorRecord(GroupMetadataKey(group="moved"), None)
    created = CoordinatorRecord(ConsumerGroupMetadataKey(group_id="moved"), ConsumerGroupMetadataValue(epoch=1))
    gone = CoordinatorRecord(ConsumerGroupMetadataKey(group_id="gone"), None)
    writer = LogWriter(tmp_path)
    writer.append(encode_batch([record_of(moved), record_of(created), record_of(gone)]))
    writer.append(encode_batch([record_of(CoordinatorRecord(ConsumerGroupMetadataKey(group_id="moved"), None))]))
    writer.close()
    assert [row["group_end"] for row in table_rows(str(tmp_path))] == [False, None, True, True]
    assert [row["group_end"] for row in table_rows(str(tmp_path), "group_epochs")] == [False, None, True, True]


def test_a_group_that_is_deleted_beside_other_changes_ends(tmp_path: Path) -> None:
    """A coordinator writes the records of several requests in one batch: here of a leave, a deletion and a join."""
    left = CoordinatorRecord(ConsumerGroupMetadataKey(group_id="g"), ConsumerGroupMetadataValue(epoch=2))
    gone = CoordinatorRecord(ConsumerGroupMetadataKey(group_id="g"), None)
    joined = CoordinatorRecord(ConsumerGroupMetadataKey(group_id="g"), ConsumerGroupMetadataValue(epoch=1))
    writer = LogWriter(tmp_path)
    writer.append(encode_batch([record_of(left), record_of(gone), record_of(joined)]))
    classic = CoordinatorRecord(GroupMetadataKey(group="g"), GroupMetadataValue(generation=1))
    # The group moves, and is deleted afterwards.
    moves = [gone, classic, CoordinatorRecord(GroupMetadataKey(group="g"), None)]
    writer.append(encode_batch([record_of(record) for record in moves]))
    writer.close()
    assert [row["group_end"] for row in table_rows(str(tmp_path))] == [None, True, None, False, None, True]


def test_the_recorded_reason_of_a_tombstone_tells_whether_the_group_ends(tmp_path: Path) -> None:
    """The cleaner removes the new record of a group that has moved before it removes the tombstone."""
    tombstone = record_of(CoordinatorRecord(GroupMetadataKey(group="g"), None))
    writer = LogWriter(tmp_path)
    for reason in (TombstoneReason.MIGRATION, TombstoneReason.GROUP_DELETE):
        tombstone.headers = [(REASON_HEADER, reason.value.encode())]
        writer.append(encode_batch([tombstone]))
    writer.close()
    assert [row["group_end"] for row in table_rows(str(tmp_path))] == [False, True]


def test_streams_groups_end_and_move_like_other_groups(tmp_path: Path) -> None:
    """Their values are not read. DeleteGroups writes tombstones of types 20, 17 and 23 in one batch (Kafka 4.3)."""

    def streams(record_type: int, group: str, value: bytes | None) -> Record:
        return Record(struct.pack(">hh", record_type, len(group)) + group.encode(), value, timestamp_ms=NOW_MS)

    moved = record_of(CoordinatorRecord(GroupMetadataKey(group="moved"), None))
    writer = LogWriter(tmp_path)
    writer.append(encode_batch([moved, streams(17, "moved", b"\0\0")]))
    writer.append(encode_batch([streams(record_type, "gone", None) for record_type in (20, 17, 23)]))
    writer.close()
    assert [row["group_end"] for row in table_rows(str(tmp_path))] == [False, None, None, True, None]
    for table in ("group_epochs", "classic_groups"):
        assert [row["group_end"] for row in table_rows(str(tmp_path), table)] == [False]


def test_log_append_times_and_missing_times_are_read(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    stamped = [commit_record("g", "t", 0, 1, NOW_MS), commit_record("g", "t", 0, 2, NOW_MS + 5)]
    writer.append(encode_batch(stamped, timestamp_type=TimestampType.LOG_APPEND_TIME))
    writer.append(encode_batch([Record(b"\0\1", None, timestamp_ms=-1)]))
    writer.close()
    first, second, untimed = table_rows(str(tmp_path))
    assert first["timestamp"] == second["timestamp"] != None  # noqa: E711
    assert untimed["timestamp"] is None


def test_segments_that_the_cleaner_replaces_are_read_once(tmp_path: Path) -> None:
    """During a replacement the new segment exists as `.swap`, with or without the old files."""
    writer = LogWriter(tmp_path, segment_bytes=600)
    for number in range(12):
        writer.append(commits(4, number))
    writer.close()
    files = segment_files(writer)
    assert len(files) >= 4
    whole = table_rows(str(tmp_path))
    merged = files[0].read_bytes() + files[1].read_bytes()
    files[0].with_suffix(".log.swap").write_bytes(merged)
    assert table_rows(str(tmp_path)) == whole
    files[0].unlink()
    assert table_rows(str(tmp_path)) == whole
    files[1].rename(files[1].with_suffix(".log.deleted"))
    assert table_rows(str(tmp_path)) == whole
    files[0].with_suffix(".log.swap").rename(files[0])
    assert table_rows(str(tmp_path)) == whole


def test_segments_are_listed_again_if_one_vanishes_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(tmp_path, segment_bytes=600)
    for number in range(8):
        writer.append(commits(4, number))
    writer.close()
    whole = offsets(table_rows(str(tmp_path)))
    files = segment_files(writer)
    listed = LogFolder.segments
    calls = []

    def stale(self: LogFolder) -> object:
        segments = listed(self)
        calls.append(1)
        if len(calls) == 2:  # planning makes the first listing
            files[0].write_bytes(files[0].read_bytes() + files[1].read_bytes())
            files[1].unlink()
        return segments

    monkeypatch.setattr(LogFolder, "segments", stale)
    assert offsets(table_rows(str(tmp_path))) == whole
    assert len(calls) == 3


@pytest.mark.parametrize("spoil", [b"", b"\xff" * 24, b"\x00" * 4096, b"abc"])
def test_a_malformed_or_missing_index_changes_nothing(tmp_path: Path, spoil: bytes) -> None:
    writer = LogWriter(tmp_path)
    for number in range(50):
        writer.append(commits(4, number))
    writer.close()
    whole = table_rows(str(tmp_path), splitBytes="4096")
    (index,) = writer.folder.glob("*.index")
    index.write_bytes(index.read_bytes() + spoil)
    assert table_rows(str(tmp_path), splitBytes="4096") == whole
    index.write_bytes(spoil)
    assert table_rows(str(tmp_path), splitBytes="4096") == whole
    index.unlink()
    assert table_rows(str(tmp_path), splitBytes="4096") == whole


def test_a_batch_larger_than_a_block_is_read(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.append(commits(100))
    writer.append(commits(1))
    writer.close()
    log = LogFolder(Folder(0, str(writer.folder)))
    by_piece = [piece.batches.base_offset.tolist() for piece in read_pieces(log, 0, END_OF_LOG, block_bytes=200)]
    assert [*chain(*by_piece)] == [0, 100]


def test_ranges_cover_the_log_without_overlap(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, segment_bytes=3000)
    for number in range(60):
        writer.append(commits(4, number))
    writer.close()
    ranges = [log_range for log_range, _ in log_ranges(Folder(0, str(writer.folder)), 1000)]
    assert len(ranges) > 10
    assert ranges[0].start == 0 and ranges[-1].end == END_OF_LOG
    assert [log_range.end for log_range in ranges[:-1]] == [log_range.start for log_range in ranges[1:]]
    assert offsets(table_rows(str(tmp_path), splitBytes="4096")) == list(range(240))
    folder = Folder(0, str(writer.folder))
    packs = pack([(LogRange(folder, start), 40) for start in range(5)], 100)
    assert [[log_range.start for log_range in packed] for packed in packs] == [[0, 1], [2, 3], [4]]


def make_routed(path: Path, groups: list[str], count: int, folders: int | None = None) -> None:
    for number in range(count if folders is None else folders):
        writer = LogWriter(path, number)
        for group in groups:
            if partition_for(group, count) == number:
                writer.append(encode_batch([commit_record(group, "orders", 0, number)]))
        writer.close()


def test_a_group_is_read_from_the_log_partition_of_its_hash(tmp_path: Path) -> None:
    groups = [f"group-{number}" for number in range(40)]
    make_routed(tmp_path, groups, 8)
    folders = folders_at([str(tmp_path)], "__consumer_offsets")
    pruned = prune(folders, {"group-3"}, None, None)
    assert [folder.log_partition for folder in pruned] == [partition_for("group-3", 8)]
    assert len(prune(folders, None, {2, 5}, None)) == 2
    assert prune(folders, {"group-3"}, {99}, None) == []
    (row,) = table_rows(str(tmp_path), "current_offsets", groups="group-3")
    assert row["group"] == "group-3"


def test_no_folder_is_pruned_if_some_folders_of_the_topic_are_missing(tmp_path: Path) -> None:
    """Only folders 0, 1 and 2 of 8 are here.

    Their number is not the topic's number of partitions, as their records show.
    """
    make_routed(tmp_path, [f"group-{number}" for number in range(40)], 8, folders=3)
    folders = folders_at([str(tmp_path)], "__consumer_offsets")
    assert len(prune(folders, {"group-3"}, None, None)) == 3
    assert len(prune(folders, {"group-3"}, None, 8)) <= 1


def test_paths_are_data_folders_or_folders_of_one_partition(tmp_path: Path) -> None:
    for number, disk in enumerate(("a", "b")):
        LogWriter(tmp_path / disk, number).close()
    paths = [str(tmp_path / "a"), f"file://{tmp_path}/b/"]
    assert [folder.log_partition for folder in folders_at(paths, "__consumer_offsets")] == [0, 1]
    (folder,) = folders_at([str(tmp_path / "a" / "__consumer_offsets-0")], "__consumer_offsets")
    assert folder.log_partition == 0
    with pytest.raises(NoLogError, match=r"both .* hold __consumer_offsets-0"):
        folders_at([*paths, folder.uri], "__consumer_offsets")
    with pytest.raises(NoLogError, match="there is no folder __consumer_offsets-N"):
        folders_at([str(tmp_path / "nothing")], "__consumer_offsets")
    assert open_file_system("mock:///")[0].type_name == "mock"


def test_a_path_that_hadoop_cannot_open_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("Unable to load libjvm\ndlopen(/usr/lib/libjvm.so) failed")

    monkeypatch.setattr("pyarrow.fs.HadoopFileSystem", fail)
    with pytest.raises(OSError, match=r"^path: s3a://b/logs cannot be read with .*: Unable to load libjvm$"):
        open_file_system("s3a://b/logs")


def test_a_tail_stops_before_an_open_transaction_and_continues_after_its_end(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.append(commits(2))
    folder = Folder(0, str(writer.folder))
    tail = LogTail(folder, 0, is_read_committed=True, abandoned_ms=1000, clock=lambda: NOW_MS + 1001)
    uncommitted = LogTail(folder, 0, is_read_committed=False, abandoned_ms=1000)

    def ends() -> tuple[int, int]:
        tail.advance(1 << 20)
        uncommitted.advance(1 << 20)
        return tail.stable_offset, uncommitted.stable_offset

    assert ends() == (2, 2)
    producer = {"producer_id": 5, "producer_epoch": 0}
    writer.append(encode_batch([commit_record("g", "t", 0, 1)], is_transactional=True, **producer))  # type: ignore[arg-type]
    writer.append(commits(2))
    assert ends() == (2, 5)
    marker = encode_control_batch(ControlRecordType.COMMIT, end_txn_marker(0), timestamp_ms=NOW_MS, producer_id=5)
    writer.append(marker)
    assert ends() == (6, 6)
    writer.append(encode_batch([commit_record("g", "t", 0, 1)], is_transactional=True, **producer))  # type: ignore[arg-type]
    assert ends() == (6, 7)
    writer.append(encode_batch([commit_record("g", "t", 0, 2, NOW_MS + 1001)]))
    assert ends() == (8, 8), "the transaction was abandoned"
    writer.close()


def test_a_time_in_the_future_abandons_no_transaction(tmp_path: Path) -> None:
    """The clock of a coordinator was an hour ahead for a while. The transaction is new, and its marker is to come."""
    hour_ms = 3_600_000
    writer = LogWriter(tmp_path)
    writer.append(encode_batch([commit_record("g", "t", 0, 1, NOW_MS + hour_ms)]))
    record = commit_record("g", "t", 0, 2, NOW_MS)
    writer.append(encode_batch([record], is_transactional=True, producer_id=5, producer_epoch=0))
    now_ms = NOW_MS
    folder = Folder(0, str(writer.folder))
    tail = LogTail(folder, 0, is_read_committed=True, abandoned_ms=1000, clock=lambda: now_ms)
    tail.advance(1 << 20)
    assert tail.stable_offset == 1
    now_ms = NOW_MS + 1001
    assert tail.stable_offset == 2
    writer.close()


def test_a_tail_continues_over_new_segments_and_a_cleaned_segment(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, segment_bytes=600)
    tail = LogTail(Folder(0, str(writer.folder)), 0, is_read_committed=True, abandoned_ms=1000)
    seen = []
    for number in range(20):
        writer.append(commits(4, number))
        tail.advance(1 << 20)
        seen.append(tail.stable_offset)
        if number == 10:
            shutil.copy(segment_files(writer)[0], tmp_path / "kept")
            segment_files(writer)[0].write_bytes(b"")
    writer.close()
    assert seen == [4 * number for number in range(1, 21)]
    mark = tail.mark_at(41)
    assert mark is not None and mark.offset <= 41
    tail.forget_before(60)
    assert tail.mark_at(41) is None


def test_a_range_with_a_hint_has_the_same_records(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    for number in range(30):
        writer.append(commits(4, number))
    folder = Folder(0, str(writer.folder))
    tail = LogTail(folder, 0, is_read_committed=True, abandoned_ms=1000)
    tail.advance(1)
    tail.advance(1)
    writer.append(commits(4))
    tail.advance(1 << 20)
    mark = tail.mark_at(120)
    assert mark is not None and mark.offset > 0
    with_hint = LogRange(folder, mark.offset, 124, 124, mark.place)
    rows = [part.chunk.records.offset.tolist() for part in read_range(with_hint, KeyTable(), "active")]
    assert [*chain(*rows)] == list(range(mark.offset, 124))
    writer.close()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("path", "", "path: give"),
        ("tabel", "commits", "unknown option tabel"),
        ("table", "offsets", "table: 'offsets' does not exist"),
        ("logPartitions", "1-x", "logPartitions: '1-x'"),
        ("logPartitions", "7-3", "logPartitions: '7-3'"),
        ("logPartitions", "²", "logPartitions: '²'"),
        ("logPartitions", ",", "logPartitions: ','"),
        ("logPartitions", "[]", "logPartitions: '[]'"),
        ("logPartitions", "0-1000000", "logPartitions: '0-1000000'"),
        ("splitBytes", "10", "splitBytes: 10 is less than 4096"),
        ("splitBytes", "many", "splitBytes: 'many' is not a number"),
        ("isolationLevel", "serializable", "isolationLevel: 'serializable' is not one of"),
        ("checksums", "some", "checksums: 'some' is not one of"),
        ("startingOffsets", "[1]", "startingOffsets: "),
        ("startingOffsets", '{"0": -1}', "startingOffsets: "),
        ("startingOffsets", '{"0": 1.5}', "startingOffsets: "),
        ("startingOffsets", '{"0": true}', "startingOffsets: "),
        ("startingOffsets", '{"0": Infinity}', "startingOffsets: "),
        ("startingOffsets", '{"0": 9223372036854775808}', "startingOffsets: "),
        ("startingOffsets", '{"-1": 5}', "startingOffsets: "),
        ("groups", "[1]", "groups: '[1]' is not a JSON array of strings"),
        ("path", "[/data", "path: '[/data' is not a JSON array"),
        ("path", f"/data, /{'x' * 300}/t-0", f"path: the name {'x' * 300} in /{'x' * 300}/t-0 has 300 bytes"),
        ("path", f"file:///{'ü' * 128}", "has 256 bytes; names of files have 255 at most"),
        ("decoder", "rust", "decoder: 'rust' is not one of"),
    ],
)
def test_the_error_names_the_bad_option(option: str, value: str, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        SourceOptions.parse({"path": "/data", option: value})


def test_options_are_parsed() -> None:
    options = SourceOptions.parse(
        {"PATH": "/a, /b", "groups": '["a,b", "c"]', "logPartitions": "1,4-6", "startingOffsets": '{"0": 7}'}
    )
    assert options.paths == ("/a", "/b")
    assert options.groups == frozenset({"a,b", "c"})
    assert options.log_partitions == frozenset({1, 4, 5, 6})
    assert options.starting_offsets == {"0": 7}
    assert options.is_read_committed and options.checksums == "active"


def test_a_name_in_a_file_uri_is_measured_as_the_file_system_has_it() -> None:
    assert long_name_in(f"file:///{'%C3%BC' * 127}/t-0") is None
    assert long_name_in(f"file:///{'%C3%BC' * 128}/t-0") is not None
