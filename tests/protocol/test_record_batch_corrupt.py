# SPDX-License-Identifier: Apache-2.0
"""Corrupt and hostile batches raise CorruptBatchError: never another error, a wrong record, or gigabytes of memory."""

from __future__ import annotations

import tracemalloc
import zlib
from struct import pack_into

import lz4.frame
import pytest
import zstandard
from cramjam import snappy
from hypothesis import given
from hypothesis import strategies as st

from kcoord_protocol.compression import compress, decompress
from kcoord_protocol.errors import BatchTooLargeError, CorruptBatchError, DecodeError, UnsupportedMagicError
from kcoord_protocol.primitives import encode_uvarint, encode_varint
from kcoord_protocol.record_batch import (
    BATCH_OVERHEAD_BYTES,
    Compression,
    Record,
    decode_control_key,
    decode_end_txn_marker,
    decode_entries,
    decode_header,
    decode_records,
    encode_batch,
    iter_headers,
    verify_crc,
)

BATCH = encode_batch(
    [Record(b"key", b"value", [("name", b"text"), ("null", None)], 1000 + n) for n in range(4)], base_offset=70
)
XERIAL_HEADER = b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01"


def batch_of(content: bytes, count: int = 1, last_delta: int | None = None) -> bytes:
    """Return a batch whose records section is `content`."""
    batch = bytearray(encode_batch([]) + content)
    pack_into(">i", batch, 8, len(batch) - 12)
    pack_into(">i", batch, 23, count - 1 if last_delta is None else last_delta)
    pack_into(">i", batch, 57, count)
    return bytes(batch)


def record(content: bytes) -> bytes:
    return encode_varint(len(content)) + content


def test_records_written_by_hand_are_read() -> None:
    data = batch_of(record(b"\0\0\0" + b"\x02k" + b"\x02v" + b"\0") + record(b"\0\0\x02\x01\x01\0"), count=2)
    assert decode_entries(data) == [(0, b"k", b"v"), (1, None, None)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "do not fit"),
        (record(b"\0\0\0\x01\x01"), "do not fit"),
        (record(b"\0\0\0\x09k\x01\0"), "cut short"),
        (record(b"\0\0\0\x02kk\x02v\0"), "cut short|wrong"),
        (record(b"\0\0\0\x03k\x02v\0"), "wrong"),  # key length -2
        (record(b"\0\0\0\x02k\x03v\0"), "wrong"),  # value length -2
        (record(b"\0\0\0\x02k\x02v\0\0"), "wrong"),
        (record(b"\0\0\x01\x02k\x02v\0"), "wrong"),  # offset delta -1
        (record(b"\0\0\x02\x02k\x02v\0"), "exceeds"),  # offset delta 1, but the last offset delta is 0
        (record(b"\0\0\0\x02k\x02v\x01"), "number of headers -1"),
        (record(b"\0\0\0\x02k\x02v\x08\x02n\x01"), "number of headers 4"),
        (record(b"\0\0\0\x02k\x02v\x02\x01\x02xx"), "header key"),
        (record(b"\0\0\0\x02k\x02v\x02\x0cn\x01"), "header key"),
        (record(b"\0\0\0\x02k\x02v\x02\x02n\x0c1"), "header value"),
        (record(b"\0\0\0\x02k\x02v\x02\x02n\x031"), "header value"),
        (b"\x13" + b"\0\0\0\x02k\x02v\0", "wrong"),  # negative record length
        (b"\x80\x80\x80\x80\x80\x01" + b"\0\0\0\x02k\x02v\0", "varint"),
        (record(b"\0" + b"\xff" * 10 + b"\x01\0\x02k\x02v\0"), "varlong"),
        (record(b"\0\0\0\x02k\x02v\0") + b"more", "4 bytes follow"),
    ],
)
def test_records_with_wrong_lengths(content: bytes, reason: str) -> None:
    for decode in (decode_records, decode_entries):
        with pytest.raises(CorruptBatchError, match=reason):
            decode(batch_of(content))


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (0, "follow"),
        (1, "follow"),
        (3, "cut short"),
        (4, "do not fit"),
        (-1, "do not fit"),
        (0x7FFF_FFFF, "do not fit"),
    ],
)
def test_wrong_record_counts(count: int, reason: str) -> None:
    two = record(b"\0\0\0\x02k\x10" + b"v" * 8 + b"\0") + record(b"\0\0\x02\x02k\x02v\0")
    with pytest.raises(CorruptBatchError, match=reason):
        decode_records(batch_of(two, count, last_delta=0x7FFF_FFFF))


def test_offsets_that_do_not_grow() -> None:
    same = record(b"\0\0\0\x02k\x02v\0")
    with pytest.raises(CorruptBatchError, match=r"records\[1\]: offset delta 0 follows 0"):
        decode_records(batch_of(same + same, count=2))
    with pytest.raises(CorruptBatchError, match="last offset delta 0 with 2 records"):
        decode_records(batch_of(same + same, count=2, last_delta=0))


def test_batches_that_are_cut_off() -> None:
    with pytest.raises(CorruptBatchError, match="the batch needs"):
        decode_records(BATCH[:-1])
    with pytest.raises(CorruptBatchError, match="too few"):
        decode_header(BATCH[:60])
    with pytest.raises(CorruptBatchError, match="less than its header"):
        decode_header(BATCH[:8] + b"\0\0\0\x30" + BATCH[12:])
    with pytest.raises(CorruptBatchError, match="less than its header"):
        list(iter_headers(BATCH[:8] + b"\xff\xff\xff\xff" + BATCH[12:]))


@pytest.mark.parametrize("magic", [0, 1, 3])
def test_the_error_names_an_unsupported_format(magic: int) -> None:
    data = BATCH[:16] + bytes((magic,)) + BATCH[17:]
    for read in (decode_header, decode_records, verify_crc, lambda batch: list(iter_headers(batch))):
        for size in (len(data), 30):
            with pytest.raises(UnsupportedMagicError, match=f"record format {magic} is not supported"):
                read(data[:size])


def test_unknown_codec() -> None:
    data = bytearray(BATCH)
    data[22] |= 5
    with pytest.raises(CorruptBatchError, match="unknown compression codec 5"):
        decode_records(data)


@given(st.integers(0, len(BATCH) - 1), st.integers(0, 255))
def test_a_changed_byte_is_detected(position: int, byte: int) -> None:
    data = bytearray(BATCH)
    data[position] = byte
    outside_the_checksum = position < 8 or 12 <= position < 16 or bytes(data) == BATCH
    try:
        assert verify_crc(data) == outside_the_checksum
        decode_records(data)
    except CorruptBatchError:
        assert not outside_the_checksum


@given(st.sampled_from(Compression), st.binary(max_size=60), st.integers(0, 200), st.integers(0, 60))
def test_garbage_raises_no_other_error_than_decode_error(
    codec: Compression, garbage: bytes, position: int, cut: int
) -> None:
    batch = bytearray(encode_batch([Record(b"k", b"v" * 40, [("h", b"x")])] * 3, compression=codec))
    position = BATCH_OVERHEAD_BYTES + position % (len(batch) - BATCH_OVERHEAD_BYTES)
    batch[position : position + cut] = garbage
    pack_into(">i", batch, 8, len(batch) - 12)
    try:
        records = decode_records(batch)
    except DecodeError:
        return
    assert len(records) == 3


@pytest.mark.parametrize("codec", list(Compression)[1:])
@pytest.mark.parametrize(
    "content",
    [
        b"\0",
        b"not compressed at all, but some text",
        XERIAL_HEADER + b"\0\0\0\x09abc",
        XERIAL_HEADER + b"\xff\xff\xff\xff",
    ],
)
def test_data_that_is_not_compressed(codec: Compression, content: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        decode_records(batch_with_codec(codec, content))


@pytest.mark.parametrize("codec", list(Compression)[1:])
def test_cut_compressed_data(codec: Compression) -> None:
    whole = compress(codec, record(b"\0\0\0\x02k\x40" + bytes(range(32)) + b"\0"))
    assert decode_entries(batch_with_codec(codec, whole)) == [(0, b"k", bytes(range(32)))]
    for cut in range(1, len(whole)):
        with pytest.raises(CorruptBatchError):
            decode_records(batch_with_codec(codec, whole[:-cut]))


def batch_with_codec(codec: Compression, content: bytes) -> bytes:
    batch = bytearray(batch_of(content))
    batch[22] |= codec
    return bytes(batch)


def gzip_bomb(size: int) -> bytes:
    compressor = zlib.compressobj(9, wbits=31)
    return b"".join(compressor.compress(bytes(1 << 20)) for _ in range(size >> 20)) + compressor.flush()


BOMBS = {
    Compression.GZIP: gzip_bomb(64 << 20),
    Compression.SNAPPY: XERIAL_HEADER
    + (lambda block: len(block).to_bytes(4, "big") + block)(bytes(snappy.compress_raw(bytes(1 << 20)))) * 64,
    Compression.LZ4: lz4.frame.compress(bytes(64 << 20), store_size=False),
    Compression.ZSTD: zstandard.ZstdCompressor().compress(bytes(64 << 20)),
}


@pytest.mark.parametrize("codec", BOMBS)
def test_decompression_bombs_are_rejected(codec: Compression) -> None:
    tracemalloc.start()
    with pytest.raises(BatchTooLargeError, match="exceed 1000000 bytes"):
        decode_records(batch_with_codec(codec, BOMBS[codec]), max_bytes=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("codec", [Compression.GZIP, Compression.SNAPPY, Compression.LZ4])
def test_possible_ratios_are_accepted_below_a_large_limit(codec: Compression) -> None:
    assert decompress(codec, BOMBS[codec]) == bytes(64 << 20)


def test_a_suspicious_ratio_is_rejected() -> None:
    """A ratio of 4,000 is accepted for a batch of ordinary size, but not for a large batch."""
    small = zstandard.ZstdCompressor().compress(bytes(8 << 20))
    assert decompress(Compression.ZSTD, small) == bytes(8 << 20)
    with pytest.raises(BatchTooLargeError):
        decompress(Compression.ZSTD, BOMBS[Compression.ZSTD])


def test_wrong_snappy_sizes_are_rejected() -> None:
    with pytest.raises(BatchTooLargeError):
        decompress(Compression.SNAPPY, encode_uvarint(0xFFFF_FFFF) + b"\0a")
    with pytest.raises(CorruptBatchError, match="impossible size"):
        decompress(Compression.SNAPPY, encode_uvarint(1_000_000) + b"\0a")


@pytest.mark.parametrize("key", [None, b"", b"\0\0\0", b"\xff\xff\0\0"])
def test_bad_control_keys(key: bytes | None) -> None:
    with pytest.raises(CorruptBatchError):
        decode_control_key(key)


@pytest.mark.parametrize("value", [None, b"", b"\0\0\0\0\0", b"\xff\xff\0\0\0\0"])
def test_bad_end_transaction_markers(value: bytes | None) -> None:
    with pytest.raises(CorruptBatchError):
        decode_end_txn_marker(value)
