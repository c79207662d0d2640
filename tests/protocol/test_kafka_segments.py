# SPDX-License-Identifier: Apache-2.0
"""Segment files of Apache Kafka 4.3.1: every batch is decoded, and uncompressed batches are encoded to the same bytes.

The sample is outside the repository. If it is absent, these tests are skipped, and pytest's summary says so.
"""

from __future__ import annotations

import tarfile
from collections import Counter

import pytest

from kcoord_protocol.record_batch import (
    BatchHeader,
    Compression,
    ControlRecordType,
    Record,
    decode_control_key,
    decode_entries,
    decode_records,
    encode_batch,
    encode_batch_from_parts,
    iter_headers,
    verify_crc,
)
from tests.support.shared import shared

Batch = tuple[bytes, BatchHeader, list[Record]]


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    sample = shared("spark-sample", "consumer_offsets.tar.xz")
    batches: list[Batch] = []
    with tarfile.open(sample) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.name.endswith(".log") else None
            data = stream.read() if stream else b""
            end = 0
            for position, header in iter_headers(data):
                assert position == end
                end += header.size_bytes
                assert verify_crc(data, position)
                batches.append((data[position:end], header, decode_records(data, position)))
            assert end == len(data)
    return batches


def test_all_batches_and_records_are_decoded(batches: list[Batch]) -> None:
    assert sum(len(records) for _, _, records in batches) == 24_368
    assert Counter(header.compression for _, header, _ in batches) == {
        Compression.NONE: 3619,
        Compression.ZSTD: 2150,
        Compression.LZ4: 1957,
        Compression.SNAPPY: 1111,
        Compression.GZIP: 1037,
    }
    markers = Counter(decode_control_key(records[0].key) for _, header, records in batches if header.is_control)
    assert markers == {ControlRecordType.COMMIT: 274, ControlRecordType.ABORT: 135}
    for batch, header, records in batches:
        assert [record.offset for record in records] == list(range(header.base_offset, header.next_offset))
        assert max(record.timestamp_ms for record in records) == header.max_timestamp
        assert decode_entries(batch) == [(record.offset, record.key, record.value) for record in records]


def test_uncompressed_batches_are_encoded_to_the_same_bytes(batches: list[Batch]) -> None:
    fast = 0
    for batch, header, records in batches:
        if header.compression is not Compression.NONE:
            continue
        again = encode_batch(
            records,
            base_offset=header.base_offset,
            partition_leader_epoch=header.partition_leader_epoch,
            timestamp_type=header.timestamp_type,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            is_transactional=header.is_transactional,
            is_control=header.is_control,
        )
        assert again == batch
        if not header.is_control and {record.timestamp_ms for record in records} == {header.max_timestamp}:
            again = encode_batch_from_parts(
                [(record.key, record.value) for record in records],
                header.base_timestamp,
                header.base_offset,
                partition_leader_epoch=header.partition_leader_epoch,
                producer_id=header.producer_id,
                producer_epoch=header.producer_epoch,
                base_sequence=header.base_sequence,
                is_transactional=header.is_transactional,
            )
            assert again == batch
            fast += 1
    assert fast > 2000


def test_compressed_batches_hold_the_same_records_after_encoding(batches: list[Batch]) -> None:
    for _, header, records in batches[::7]:
        again = encode_batch(records, base_offset=header.base_offset, compression=header.compression)
        assert decode_records(again) == records
