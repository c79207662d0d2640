# SPDX-License-Identifier: Apache-2.0
"""Record batches: encoding and decoding agree, other implementations agree, and stamping keeps the checksum valid."""

from __future__ import annotations

import pytest
from aiokafka.record import MemoryRecords as AiokafkaRecords
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.memory_records import MemoryRecords, MemoryRecordsBuilder

from kcoord_protocol.errors import EncodeError
from kcoord_protocol.messages import EndTxnMarker
from kcoord_protocol.record_batch import (
    BATCH_OVERHEAD_BYTES,
    Compression,
    ControlRecordType,
    Record,
    TimestampType,
    control_key,
    crc32c,
    decode_control_key,
    decode_end_txn_marker,
    decode_entries,
    decode_header,
    decode_records,
    encode_batch,
    encode_batch_from_parts,
    encode_control_batch,
    end_txn_marker,
    iter_headers,
    iter_records,
    rewrite_header,
    verify_crc,
)

NOW = 1_700_000_000_000
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
NULLABLE_BYTES = st.none() | st.binary(max_size=80) | st.sampled_from([b"x" * size for size in (63, 64, 300, 9000)])
HEADERS = st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=70)), max_size=3)
RECORD = st.builds(Record, NULLABLE_BYTES, NULLABLE_BYTES, HEADERS, st.integers(0, 1 << 42))


@st.composite
def numbered_records(draw: st.DrawFn) -> list[Record]:
    """Draw records with growing offsets and gaps, as compaction leaves them."""
    records = draw(st.lists(RECORD, max_size=8))
    offset = draw(st.integers(0, 1 << 40))
    for record in records:
        offset = record.offset = offset + draw(st.integers(1, 300))
    return records


@given(
    records=numbered_records(),
    compression=st.sampled_from(Compression),
    epoch=st.integers(-1, 0x7FFF_FFFF),
    producer_id=INT64,
    sequence=st.integers(-1, 0x7FFF_FFFF),
    transactional=st.booleans(),
)
def test_batches_survive_a_round_trip(
    records: list[Record], compression: Compression, epoch: int, producer_id: int, sequence: int, transactional: bool
) -> None:
    base_offset = records[0].offset if records else 7
    batch = encode_batch(
        records,
        base_offset=base_offset,
        partition_leader_epoch=epoch,
        compression=compression,
        producer_id=producer_id,
        producer_epoch=3,
        base_sequence=sequence,
        is_transactional=transactional,
    )
    header = decode_header(batch)

    assert verify_crc(batch)
    assert decode_records(batch) == list(iter_records(batch)) == records
    assert decode_entries(batch) == [(record.offset, record.key, record.value) for record in records]
    assert header.size_bytes == len(batch)
    assert (header.base_offset, header.partition_leader_epoch, header.records_count) == (
        base_offset,
        epoch,
        len(records),
    )
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (producer_id, 3, sequence)
    assert (header.is_transactional, header.is_control) == (transactional, False)
    assert header.compression is (compression if records else Compression.NONE)
    if records:
        assert header.last_offset == records[-1].offset
        assert header.max_timestamp == max(record.timestamp_ms for record in records)
        assert header.base_timestamp == records[0].timestamp_ms


@given(
    pairs=st.lists(st.tuples(NULLABLE_BYTES, NULLABLE_BYTES), max_size=8),
    repeat=st.sampled_from([1, 1, 1, 100]),
    compression=st.sampled_from([Compression.NONE, Compression.NONE, Compression.LZ4]),
    base_offset=st.integers(0, 1 << 60),
)
def test_the_fast_encoder_agrees_with_the_general_encoder(
    pairs: list[tuple[bytes | None, bytes | None]], repeat: int, compression: Compression, base_offset: int
) -> None:
    pairs = pairs * repeat
    records = [Record(key, value, [], NOW) for key, value in pairs]
    fast = encode_batch_from_parts(pairs, NOW, base_offset, partition_leader_epoch=4, compression=compression)
    if pairs:
        assert fast == encode_batch(records, base_offset=base_offset, partition_leader_epoch=4, compression=compression)
    assert decode_entries(fast) == [(base_offset + delta, key, value) for delta, (key, value) in enumerate(pairs)]


@pytest.mark.parametrize("delta", [0, 63, 64, 8191, 8192, 1 << 20, 1 << 27, 0x7FFF_FFFF])
@pytest.mark.parametrize("later_ms", [-(1 << 40), -1, 0, 63, 64, 1 << 40])
def test_deltas_of_every_length(delta: int, later_ms: int) -> None:
    records = [Record(b"a", b"b", [], NOW, 5), Record(b"c", None, [("h", b"")], NOW + later_ms, 6)]
    if delta:
        records[1].offset = 5 + delta
        assert decode_records(encode_batch(records, base_offset=5)) == records
    assert decode_records(encode_batch(records[1:], base_offset=records[1].offset - delta)) == records[1:]


def test_records_without_an_offset_are_numbered() -> None:
    records = [Record(value=b"a"), Record(value=b"b", offset=25), Record(value=b"c")]
    assert [record.offset for record in decode_records(encode_batch(records, base_offset=20))] == [20, 25, 26]


@pytest.mark.parametrize("offset", [19, 20])
def test_offsets_must_grow(offset: int) -> None:
    with pytest.raises(EncodeError, match="out of order"):
        encode_batch([Record(offset=20), Record(offset=offset)], base_offset=20)


def test_compaction_keeps_the_last_offset_even_of_an_empty_batch() -> None:
    kept = decode_header(encode_batch([Record(offset=11)], base_offset=10, last_offset=19))
    assert (kept.records_count, kept.last_offset, kept.next_offset) == (1, 19, 20)

    empty = encode_batch([], base_offset=10, last_offset=19, compression=Compression.ZSTD, producer_id=9)
    assert len(empty) == BATCH_OVERHEAD_BYTES
    assert (decode_header(empty).last_offset, decode_header(empty).producer_id, decode_records(empty)) == (19, 9, [])
    assert verify_crc(empty)

    with pytest.raises(EncodeError, match="last offset 10"):
        encode_batch([Record(offset=11)], base_offset=10, last_offset=10)


def test_a_delete_horizon_replaces_the_base_timestamp() -> None:
    records = [Record(b"k", None, [], NOW, 3)]
    batch = encode_batch(records, base_offset=3, delete_horizon_ms=NOW + 86_400_000)
    assert decode_header(batch).delete_horizon_ms == NOW + 86_400_000
    assert decode_records(batch) == records
    assert decode_header(encode_batch(records, base_offset=3)).delete_horizon_ms is None


def test_log_append_time_is_the_timestamp_of_every_record() -> None:
    records = [Record(value=b"a", timestamp_ms=NOW), Record(value=b"b", timestamp_ms=NOW + 5)]
    batch = encode_batch(records, timestamp_type=TimestampType.LOG_APPEND_TIME)
    assert decode_header(batch).timestamp_type is TimestampType.LOG_APPEND_TIME
    assert [record.timestamp_ms for record in decode_records(batch)] == [NOW + 5, NOW + 5]


def test_sequences_wrap() -> None:
    records = [Record(value=b"x")] * 3
    assert decode_header(encode_batch(records, base_sequence=0x7FFF_FFFE)).last_sequence == 0
    assert decode_header(encode_batch(records, base_sequence=4)).last_sequence == 6
    assert decode_header(encode_batch(records)).last_sequence == -1


def test_header_keys_that_are_not_utf8_are_kept() -> None:
    batch = encode_batch([Record(headers=[("a\udcff", b"v")])])
    assert b"a\xff" in batch
    assert decode_records(batch)[0].headers == [("a\udcff", b"v")]


@pytest.mark.parametrize("compression", Compression)
def test_stamping_in_place(compression: Compression) -> None:
    records = [Record(b"k", b"v" * 100, [], NOW + delta) for delta in range(5)]
    before = b"other batch"
    data = bytearray(before + encode_batch(records, compression=compression) + b"after")
    position = len(before)

    rewrite_header(data, position, base_offset=1000, partition_leader_epoch=12)
    assert verify_crc(data, position)
    assert [record.offset for record in decode_records(data, position)] == [1000, 1001, 1002, 1003, 1004]
    assert decode_header(data, position).partition_leader_epoch == 12
    assert [record.timestamp_ms for record in decode_records(data, position)] == [NOW + delta for delta in range(5)]

    rewrite_header(memoryview(data), position, log_append_time_ms=NOW + 77)
    assert verify_crc(data, position)
    assert {record.timestamp_ms for record in decode_records(data, position)} == {NOW + 77}
    assert decode_header(data, position).compression is compression
    assert data.startswith(before)
    assert data.endswith(b"after")


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_iter_headers_skips_a_last_batch_that_is_cut_off(make: type[bytes]) -> None:
    batches = [encode_batch([Record(value=b"v" * size)], base_offset=size) for size in (1, 5, 100)]
    data = b"".join(batches)
    starts = [0, len(batches[0]), len(batches[0]) + len(batches[1])]
    assert [(position, header.base_offset) for position, header in iter_headers(make(data))] == list(
        zip(starts, (1, 5, 100), strict=True)
    )
    for cut in range(1, len(batches[2])):
        assert [position for position, _ in iter_headers(make(data[:-cut]))] == starts[:2]
    assert not verify_crc(make(data[:-1]), starts[2])
    assert decode_records(make(data), starts[1])[0].value == b"v" * 5


@pytest.mark.parametrize(("control_type", "code"), [(ControlRecordType.ABORT, 0), (ControlRecordType.COMMIT, 1)])
def test_end_transaction_markers(control_type: ControlRecordType, code: int) -> None:
    value = end_txn_marker(coordinator_epoch=6)
    batch = encode_control_batch(
        control_type,
        value,
        timestamp_ms=NOW,
        producer_id=4000,
        producer_epoch=2,
        base_offset=8,
        partition_leader_epoch=1,
    )
    header = decode_header(batch)
    (record,) = decode_records(batch)

    assert (header.is_control, header.is_transactional, header.base_sequence) == (True, True, -1)
    assert (header.producer_id, header.producer_epoch, header.base_offset) == (4000, 2, 8)
    assert record.key == bytes((0, 0, 0, code))
    assert decode_control_key(record.key) is control_type
    assert record.value == b"\0\0" + EndTxnMarker(coordinator_epoch=6).encode(0)
    assert decode_end_txn_marker(record.value) == 6


def test_control_records_of_newer_versions() -> None:
    assert decode_control_key(control_key(ControlRecordType.KRAFT_VOTERS)) is ControlRecordType.KRAFT_VOTERS
    assert decode_control_key(b"\0\x01\0\x63and more") is None
    assert decode_end_txn_marker(b"\0\x01\0\0\0\x05and more") == 5
    header = decode_header(encode_control_batch(ControlRecordType.LEADER_CHANGE, b"", timestamp_ms=0))
    assert (header.is_control, header.is_transactional) == (True, False)


def test_the_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283


SAMPLES = [
    Record(b"key", b"value", [("h", b"1"), ("n", None)], NOW, 0),
    Record(None, b"v" * 500, [], NOW + 3, 1),
    Record(b"", None, [("\u00e9", b"")], NOW + 100_000, 2),
]
KAFKA_PYTHON_CODECS = [Compression.NONE, Compression.GZIP, Compression.LZ4, Compression.ZSTD]


@pytest.mark.parametrize("compression", KAFKA_PYTHON_CODECS)
def test_kafka_python_reads_our_batches(compression: Compression) -> None:
    data = encode_batch(SAMPLES, compression=compression, producer_id=5, producer_epoch=1, base_sequence=9)
    batch = MemoryRecords(data).next_batch()
    assert batch.validate_crc()
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (5, 1, 9)
    assert [Record(r.key, r.value, r.headers, r.timestamp, r.offset) for r in batch] == SAMPLES


@pytest.mark.parametrize("compression", KAFKA_PYTHON_CODECS)
def test_we_read_the_batches_of_kafka_python(compression: Compression) -> None:
    builder = MemoryRecordsBuilder(
        magic=2, compression_type=int(compression), batch_size=1 << 20, producer_id=5, producer_epoch=1, base_sequence=9
    )
    for record in SAMPLES:
        builder.append(record.timestamp_ms, record.key, record.value, record.headers)
    builder.close()
    data = bytes(builder.buffer())

    assert verify_crc(data)
    assert decode_records(data) == SAMPLES
    if compression is Compression.NONE:
        same = encode_batch(
            SAMPLES, producer_id=5, producer_epoch=1, base_sequence=9,
            partition_leader_epoch=decode_header(data).partition_leader_epoch,
        )  # fmt: skip
        assert data == same


@pytest.mark.parametrize("compression", Compression)
def test_aiokafka_reads_our_batches(compression: Compression) -> None:
    batch = AiokafkaRecords(encode_batch(SAMPLES, compression=compression)).next_batch()
    assert batch is not None
    assert batch.validate_crc()
    assert [Record(r.key, r.value, list(r.headers), r.timestamp or 0, r.offset) for r in batch] == SAMPLES
