# SPDX-License-Identifier: Apache-2.0
"""The framing of records in coordinator and metadata logs."""

from __future__ import annotations

import pytest

from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import CoordinatorSerde, MetadataSerde, OpenBatch, check_size, size_bound_bytes, stamp_of
from kcoord_protocol.errors import DecodeError, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    GroupMetadataKey,
    OffsetCommitKey,
    OffsetCommitValue,
    TopicRecord,
    TransactionLogKey,
    TransactionLogValue,
)
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, encode_batch_from_parts


def test_a_coordinator_record_has_its_type_and_its_version_in_front() -> None:
    record = CoordinatorRecord(ConsumerGroupMetadataKey(group_id="g"), ConsumerGroupMetadataValue(epoch=5))
    key, value = CoordinatorSerde().serialize(record)
    assert key is not None
    assert value is not None
    assert key == b"\x00\x03\x00\x01g"
    assert value.startswith(b"\x00\x00\x00\x00\x00\x05")
    assert CoordinatorSerde().deserialize(key, value) == record


@pytest.mark.parametrize("version", range(5))
def test_offset_commits_in_every_version(version: int) -> None:
    key = OffsetCommitKey(group="g", topic="t", partition=7)
    record = CoordinatorRecord(key, OffsetCommitValue(offset=9, metadata="m", commit_timestamp=11), version)
    assert CoordinatorSerde().deserialize(*CoordinatorSerde().serialize(record)) == record


def test_a_tombstone_has_no_value() -> None:
    record = CoordinatorRecord(OffsetCommitKey(group="g", topic="t", partition=7), None)
    key, value = CoordinatorSerde().serialize(record)
    assert value is None
    assert CoordinatorSerde().deserialize(key, value) == record


def test_old_offset_commits_have_type_zero() -> None:
    key, value = CoordinatorSerde().serialize(
        CoordinatorRecord(OffsetCommitKey(group="g", topic="t", partition=7), OffsetCommitValue(offset=9), 0)
    )
    assert key is not None
    record = CoordinatorSerde().deserialize(b"\x00\x00" + key[2:], value)
    assert record is not None
    assert record.key == OffsetCommitKey(group="g", topic="t", partition=7)


@pytest.mark.parametrize("length", [0, 1, 100, 32_767])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_the_bound_of_a_batch_is_never_below_its_size(length: int, count: int) -> None:
    for pair in ((b"k" * length, b"v"), (b"k", b"v" * length), (None, b"v" * length), (b"k" * length, None)):
        size_bytes = len(encode_batch_from_parts([pair] * count, timestamp_ms=0))
        bound_bytes = size_bound_bytes([pair] * count) + BATCH_OVERHEAD_BYTES
        assert size_bytes <= bound_bytes <= size_bytes + 100 * count


@pytest.mark.parametrize("principal", ["", "User:eve", "User:CN=" + "ü" * 300])
def test_the_limit_of_a_batch_counts_the_headers_of_tombstones(principal: str) -> None:
    records = [
        CoordinatorRecord(GroupMetadataKey(group=f"g{number}"), None, reason="group-delete", principal=principal)
        for number in range(50)
    ]
    serialized = [CoordinatorSerde().serialize(record) for record in records]
    batch = OpenBatch(0, 0, stamp_of(records))
    batch.add(serialized, 0)
    size_bytes = len(batch.encode())
    check_size(records, serialized, size_bytes)
    with pytest.raises(KafkaError, match=f"50 records of {size_bytes} bytes exceed the limit"):
        check_size(records, serialized, size_bytes - 1)


@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize("length", [0, 50, 20_000])
def test_the_limit_of_a_batch_without_headers(length: int, count: int) -> None:
    """Keys, values and counts have lengths of one to three bytes in the batch."""
    record = CoordinatorRecord(GroupMetadataKey(group="g" * length), None)
    records, serialized = [record] * count, [CoordinatorSerde().serialize(record)] * count
    batch = OpenBatch(0, 0, None)
    batch.add(serialized, 0)
    size_bytes = len(batch.encode())
    for limit in range(size_bytes, size_bytes + 80 * count, count):
        check_size(records, serialized, limit)
    with pytest.raises(KafkaError, match=f"{count} records of {size_bytes} bytes exceed the limit"):
        check_size(records, serialized, size_bytes - 1)


def test_the_size_of_a_batch_is_not_computed_if_its_bound_without_reasons_is_below_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OpenBatch, "encode", lambda batch: pytest.fail("the batch was encoded"))
    record = CoordinatorRecord(GroupMetadataKey(group="g"), None)
    records, serialized = [record] * 1000, [CoordinatorSerde().serialize(record)] * 1000
    limit = BATCH_OVERHEAD_BYTES + size_bound_bytes(serialized) - 49 * 1000
    check_size(records, serialized, limit)
    with pytest.raises(pytest.fail.Exception):
        check_size(records, serialized, limit - 1)


def test_every_log_has_its_own_numbers_for_its_types() -> None:
    serde = CoordinatorSerde(["TransactionLog"])
    record = CoordinatorRecord(TransactionLogKey(transactional_id="x"), TransactionLogValue(producer_id=3), 1)
    assert serde.deserialize(*serde.serialize(record)) == record
    assert serde.deserialize(b"\x00\x01", b"\x00\x00") is None
    assert serde.describe(b"\x00\x01", b"\x00\x02") == "record type 1, version 2"


def test_records_of_unknown_types_and_versions_are_none() -> None:
    serde = CoordinatorSerde()
    assert serde.deserialize(b"\x00\x20abc", b"\x00\x00") is None
    assert serde.deserialize(b"\x00\x01\x00\x01g\x00\x01t\x00\x00\x00\x00", b"\x00\x09") is None
    assert serde.deserialize(None, b"\x00\x09") is None
    assert serde.describe(b"\x00\x20abc", None) == "record type 32"
    for key, value in ((b"\x00", None), (b"\x00\x01\x00\x01g\x00\x01t\x00\x00\x00\x00", b"\x00")):
        with pytest.raises(DecodeError):
            serde.deserialize(key, value)


def test_a_metadata_record_has_a_frame() -> None:
    record = CoordinatorRecord(None, TopicRecord(name="t", topic_id=bytes(range(16))))
    serde = MetadataSerde()
    key, value = serde.serialize(record)
    assert key is None
    assert value is not None
    assert value.startswith(b"\x01\x02\x00")
    assert serde.deserialize(key, value) == record
    assert serde.deserialize(None, b"\x01\x63\x00") is None
    assert serde.describe(None, b"\x01\x63\x00") == "frame version 1, record type 99, version 0"
    assert serde.deserialize(None, b"\x02\x02\x00") is None
    with pytest.raises(DecodeError):
        serde.deserialize(None, b"\x01\x80")
