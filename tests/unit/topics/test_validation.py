# SPDX-License-Identifier: Apache-2.0
"""The errors that reject a batch before it is stored, and the fields that change in a stored batch."""

from __future__ import annotations

import itertools
import struct

import pytest

from kcoord.config import BrokerConfig, TopicConfig
from kcoord.topics.validation import BatchRules, RecordsRejectedError, batch_rules, single_batch, stamp_batch
from kcoord_protocol.batch_header import TimestampType, crc32c, decode_header, verify_crc
from kcoord_protocol.compression import Compression
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import Record, decode_records, encode_batch, encode_control_batch
from tests.unit.topics.helpers import NOW_MS, batch_of

RULES = BatchRules(max_message_bytes=1000, segment_bytes=10_000, timestamp_after_max_ms=3_600_000)
CODECS = list(Compression)


def stamped(batch: bytes, rules: BatchRules = RULES) -> bytes:
    stored, header = stamp_batch(batch, rules, base_offset=500, leader_epoch=7, now_ms=NOW_MS)
    assert header == decode_header(stored)
    return stored


def refusal(batch: bytes, rules: BatchRules = RULES) -> KafkaError:
    with pytest.raises(KafkaError) as caught:
        stamped(batch, rules)
    return caught.value


def with_header(batch: bytes, position: int, layout: str, value: int) -> bytes:
    """Returns the batch with another value of a header field and a matching checksum."""
    changed = bytearray(batch)
    struct.pack_into(layout, changed, position, value)
    struct.pack_into(">I", changed, 17, crc32c(memoryview(changed)[21:]))
    return bytes(changed)


@pytest.mark.parametrize("codec", CODECS)
def test_offsets_and_epoch_are_stamped_and_the_rest_stays(codec: Compression) -> None:
    batch = batch_of("a", "b", "c", compression=codec)
    stored = stamped(batch)
    header = decode_header(stored)
    assert (header.base_offset, header.last_offset, header.partition_leader_epoch) == (500, 502, 7)
    assert stored[16:] == batch[16:]
    assert [record.offset for record in decode_records(stored)] == [500, 501, 502]


@pytest.mark.parametrize("codec", CODECS)
def test_log_append_time_replaces_the_timestamps(codec: Compression) -> None:
    rules = BatchRules(1000, 10_000, log_append_time=True)
    stored = stamped(batch_of("a", "b", timestamp_ms=3, compression=codec), rules)
    header = decode_header(stored)
    assert (header.timestamp_type, header.max_timestamp) == (TimestampType.LOG_APPEND_TIME, NOW_MS)
    assert verify_crc(stored)
    assert {record.timestamp_ms for record in decode_records(stored)} == {NOW_MS}


def test_a_wrong_max_timestamp_is_corrected() -> None:
    stored = stamped(with_header(batch_of("a", "b"), 35, ">q", 12))
    assert decode_header(stored).max_timestamp == NOW_MS + 1
    assert verify_crc(stored)


@pytest.mark.parametrize("source", CODECS)
@pytest.mark.parametrize("target", CODECS)
def test_compression_type_of_the_topic(source: Compression, target: Compression) -> None:
    rules = BatchRules(1000, 10_000, compression=target)
    batch = batch_of("a", "b", compression=source, producer=(5, 1, 20))
    stored = stamped(batch, rules)
    header = decode_header(stored)
    assert header.compression is target
    assert verify_crc(stored)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (5, 1, 20)
    assert (header.base_offset, header.partition_leader_epoch) == (500, 7)
    assert [record.value for record in decode_records(stored)] == [b"a", b"b"]
    assert [record.offset for record in decode_records(stored)] == [500, 501]


@pytest.mark.parametrize(("codec", "low", "high"), [("gzip", 1, 9), ("lz4", 9, 12), ("zstd", 1, 19)])
def test_compression_level_of_the_topic(codec: str, low: int, high: int) -> None:
    """A higher level makes smaller batches of the same records. Level 9 of lz4 is the fast compressor, as in Kafka."""
    batch = batch_of(*(f"{number * number % 9973} sold to {number % 617}" for number in range(2000)))
    sizes = []
    for level in (low, high):
        own = {"compression.type": codec, f"compression.{codec}.level": str(level)}
        rules = batch_rules(TopicConfig.resolve(BrokerConfig.from_properties({}), own))
        stored = stamped(batch, rules)
        assert [record.value for record in decode_records(stored)] == [record.value for record in decode_records(batch)]
        sizes.append(len(stored))
    assert sizes[1] < 0.97 * sizes[0]


def test_size_limits() -> None:
    batch = batch_of("x" * 300)
    assert refusal(batch, BatchRules(len(batch) - 1, 10_000)).error is Errors.MESSAGE_TOO_LARGE
    assert refusal(batch, BatchRules(1000, len(batch) - 1)).error is Errors.RECORD_LIST_TOO_LARGE
    assert stamped(batch, BatchRules(len(batch), len(batch)))


def test_max_message_bytes_also_applies_after_recompression() -> None:
    rules = BatchRules(1000, 10_000, compression=Compression.NONE)
    assert refusal(batch_of("x" * 2000, compression=Compression.GZIP), rules).error is Errors.MESSAGE_TOO_LARGE


def test_checksum() -> None:
    batch = bytearray(batch_of("abc"))
    batch[-2] ^= 1
    assert refusal(bytes(batch)).error is Errors.CORRUPT_MESSAGE


@pytest.mark.parametrize(
    ("position", "layout", "value"),
    [
        (0, ">q", 1),
        (23, ">i", 5),
        (23, ">i", -2),
        (57, ">i", 0),
        (57, ">i", 3),
        (43, ">q", 4),
        (21, ">h", 5),
    ],
    ids=[
        "base offset",
        "last delta",
        "negative delta",
        "no records",
        "count",
        "id without sequence",
        "codec",
    ],
)
def test_impossible_headers(position: int, layout: str, value: int) -> None:
    assert refusal(with_header(batch_of("a", "b"), position, layout, value)).error is Errors.INVALID_RECORD


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("is_transactional", [False, True])
@pytest.mark.parametrize("producer", [(-1, -1, -1), (-1, -2, 0), (-2, 0, -1), (-(2**63), -(2**15), -(2**31))])
def test_a_negative_producer_id_is_no_producer(
    producer: tuple[int, int, int], is_transactional: bool, codec: Compression
) -> None:
    """Kafka 4.3.1 and 4.4.0 store such a batch as it is, whatever its epoch and sequence number."""
    batch = batch_of("a", producer=producer, is_transactional=is_transactional, compression=codec)
    assert stamped(batch)[16:] == batch[16:]


def test_control_records_of_clients_are_rejected() -> None:
    batch = encode_control_batch(
        ControlRecordType.COMMIT, end_txn_marker(0), timestamp_ms=NOW_MS, producer_id=1, producer_epoch=0
    )
    assert refusal(with_header(batch, 53, ">i", 0)).error is Errors.INVALID_RECORD


def test_records_must_fill_the_batch_exactly() -> None:
    batch = batch_of("abc", "def")
    for cut in (1, 5):
        shorter = bytearray(batch[:-cut])
        struct.pack_into(">i", shorter, 8, len(shorter) - 12)
        assert refusal(with_header(bytes(shorter), 57, ">i", 2)).error is Errors.INVALID_RECORD
    longer = bytearray(batch + b"\0\0")
    struct.pack_into(">i", longer, 8, len(longer) - 12)
    assert refusal(with_header(bytes(longer), 57, ">i", 2)).error is Errors.INVALID_RECORD


def test_compressed_garbage() -> None:
    batch = batch_of("abc", compression=Compression.GZIP)
    garbled = batch[:70] + b"\xff" * (len(batch) - 70)
    assert refusal(with_header(garbled, 57, ">i", 1)).error is Errors.INVALID_RECORD


@pytest.mark.parametrize("codec", CODECS)
def test_compacted_topics_need_keys(codec: Compression) -> None:
    rules = BatchRules(1000, 10_000, compacted=True)
    assert stamped(batch_of("a", compression=codec), rules)
    error = refusal(batch_of("a", "b", keys=False, compression=codec), rules)
    assert error.error is Errors.INVALID_RECORD
    assert isinstance(error, RecordsRejectedError)
    assert [index for index, _ in error.record_errors] == [0, 1]


def test_timestamps_out_of_range() -> None:
    rules = BatchRules(1000, 10_000, timestamp_before_max_ms=1000, timestamp_after_max_ms=100)
    assert stamped(batch_of("a", timestamp_ms=NOW_MS - 1000), rules)
    assert stamped(batch_of("a", timestamp_ms=NOW_MS + 100), rules)
    assert stamped(batch_of("a", timestamp_ms=-1), rules)
    assert refusal(batch_of("a", timestamp_ms=NOW_MS - 1001), rules).error is Errors.INVALID_TIMESTAMP
    error = refusal(batch_of("a", "b", timestamp_ms=NOW_MS + 100), rules)
    assert isinstance(error, RecordsRejectedError)
    assert (error.error, [index for index, _ in error.record_errors]) == (Errors.INVALID_TIMESTAMP, [1])


def test_timestamps_do_not_matter_with_log_append_time() -> None:
    rules = BatchRules(1000, 10_000, log_append_time=True, timestamp_before_max_ms=0, timestamp_after_max_ms=0)
    assert stamped(batch_of("a", timestamp_ms=1), rules)


@pytest.mark.parametrize("codec", CODECS)
def test_attributes_without_a_meaning_go_with_a_changed_timestamp(codec: Compression) -> None:
    """Observed in Kafka 4.3.1 and 4.4.0."""
    batch = with_header(batch_of("a", "b", compression=codec), 21, ">h", 0x4180 | codec)
    assert decode_header(stamped(batch)).attributes == 0x4180 | codec
    assert decode_header(stamped(with_header(batch, 35, ">q", NOW_MS))).attributes == codec
    rules = BatchRules(1000, 10_000, log_append_time=True)
    assert decode_header(stamped(batch, rules)).attributes == 0x08 | codec
    with_horizon = with_header(batch, 21, ">h", 0x50 | codec)
    assert decode_header(stamped(with_header(with_horizon, 35, ">q", NOW_MS))).attributes == 0x50 | codec


# A batch whose producer claims LogAppendTime, as Kafka 4.3.1 and 4.4.0 answer it.


def claiming(codec: Compression, largest: int, *offsets_ms: int) -> bytes:
    """Returns a batch that claims LogAppendTime, with records at NOW_MS + each offset and `largest` in its header."""
    records = [Record(b"k", b"v", timestamp_ms=NOW_MS + offset_ms) for offset_ms in offsets_ms]
    batch = with_header(encode_batch(records, compression=codec), 21, ">h", codec | 0x08)
    return with_header(batch, 35, ">q", largest)


def times(stored: bytes) -> tuple[int, int, list[int]]:
    """Returns the base timestamp, the largest one, and those of the records."""
    header = decode_header(stored)
    return header.base_timestamp, header.max_timestamp, [record.timestamp_ms for record in decode_records(stored)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("topic_codec", [None, *CODECS])
def test_only_brokers_set_log_append_time(codec: Compression, topic_codec: Compression | None) -> None:
    rules = BatchRules(1000, 10_000, log_append_time=True, compression=topic_codec)
    error = refusal(claiming(codec, NOW_MS, 0, 5, 2), rules)
    assert isinstance(error, RecordsRejectedError)
    assert (error.error, [index for index, _ in error.record_errors]) == (Errors.INVALID_TIMESTAMP, [0, 1, 2])


@pytest.mark.parametrize("largest", [NOW_MS + 5, NOW_MS + 100, NOW_MS - 100, 0, -2])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("compacted", [False, True])
def test_a_claimed_append_time_is_dropped_with_create_time(codec: Compression, largest: int, compacted: bool) -> None:
    batch = claiming(codec, largest, 0, 5, 2)
    for topic_codec in (None, codec):
        rules = BatchRules(1000, 10_000, compacted, compression=topic_codec, timestamp_after_max_ms=3_600_000)
        stored = stamped(batch, rules)
        assert verify_crc(stored)
        assert stored[61:] == batch[61:]
        assert decode_header(stored).attributes == codec
        assert times(stored) == (NOW_MS, max(largest, -1), [NOW_MS, NOW_MS + 5, NOW_MS + 2])


@pytest.mark.parametrize("largest", [NOW_MS + 5, NOW_MS + 100, NOW_MS - 100, 0])
@pytest.mark.parametrize(("codec", "topic_codec"), list(itertools.permutations(CODECS, 2)))
def test_a_claimed_append_time_is_the_time_of_recompressed_records(
    codec: Compression, topic_codec: Compression, largest: int
) -> None:
    rules = BatchRules(1000, 10_000, compression=topic_codec, timestamp_after_max_ms=3_600_000)
    stored = stamped(claiming(codec, largest, 0, 5, 2), rules)
    assert verify_crc(stored)
    assert decode_header(stored).attributes == topic_codec
    assert times(stored) == (largest, largest, [largest] * 3)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("topic_codec", [None, *CODECS])
def test_a_claimed_append_time_is_checked_in_place_of_the_records(
    codec: Compression, topic_codec: Compression | None
) -> None:
    rules = BatchRules(1000, 10_000, compression=topic_codec, timestamp_before_max_ms=1000, timestamp_after_max_ms=1000)
    for largest in (-1, NOW_MS - 1001, NOW_MS + 1001):
        error = refusal(claiming(codec, largest, 0, 5), rules)
        assert isinstance(error, RecordsRejectedError)
        assert (error.error, [index for index, _ in error.record_errors]) == (Errors.INVALID_TIMESTAMP, [0, 1])
    assert stamped(claiming(codec, NOW_MS + 1000, -(10**9), 10**9, -NOW_MS - 1), rules)


@pytest.mark.parametrize("codec", CODECS)
def test_the_times_of_records_fit_also_below_a_claimed_append_time(codec: Compression) -> None:
    """ListOffsets and the cleaner could not encode others."""
    batch = with_header(claiming(codec, NOW_MS, 0, 1, 2), 27, ">q", 2**63 - 2)
    error = refusal(batch)
    assert isinstance(error, RecordsRejectedError)
    assert (error.error, [index for index, _ in error.record_errors]) == (Errors.INVALID_TIMESTAMP, [2])


def test_a_record_without_a_key_is_named_before_the_claimed_append_time() -> None:
    batch = encode_batch([Record(None, b"v", timestamp_ms=NOW_MS), Record(b"k", b"v", timestamp_ms=NOW_MS)])
    error = refusal(with_header(batch, 21, ">h", 8), BatchRules(1000, 10_000, True, log_append_time=True))
    assert isinstance(error, RecordsRejectedError)
    assert error.error is Errors.INVALID_TIMESTAMP
    assert ["key" in reason for _, reason in error.record_errors] == [True, False]


def test_offset_deltas_must_be_consecutive() -> None:
    records = [Record(b"k", b"v", timestamp_ms=NOW_MS, offset=0), Record(b"k", b"v", timestamp_ms=NOW_MS, offset=2)]
    batch = with_header(encode_batch(records), 23, ">i", 1)
    assert refusal(batch).error is Errors.INVALID_RECORD


def test_headers_are_walked() -> None:
    records = [Record(b"k", None, headers=[("h", b"v"), ("n", None)], timestamp_ms=NOW_MS)] * 3
    assert stamped(encode_batch(records))


# --- the produce request's partition ----------------------------------------------------------------------------------


def set_refusal(records: bytes | None, version: int = 13) -> Errors:
    with pytest.raises(KafkaError) as caught:
        single_batch(records, version)
    return caught.value.error


def test_exactly_one_batch() -> None:
    batch = batch_of("a")
    assert single_batch(batch, 13) == batch
    assert set_refusal(None) is Errors.INVALID_RECORD
    assert set_refusal(b"") is Errors.INVALID_RECORD
    assert set_refusal(batch[:-1]) is Errors.INVALID_RECORD
    assert set_refusal(batch + batch) is Errors.INVALID_RECORD


def test_a_cut_second_batch_is_dropped() -> None:
    batch = batch_of("a")
    assert single_batch(batch + batch[:30], 13) == batch


@pytest.mark.parametrize(
    ("magic", "error"), [(0, Errors.INVALID_RECORD), (1, Errors.INVALID_RECORD), (3, Errors.CORRUPT_MESSAGE)]
)
def test_magic(magic: int, error: Errors) -> None:
    batch = bytearray(batch_of("a"))
    batch[16] = magic
    assert set_refusal(bytes(batch)) is error


def test_a_length_below_the_smallest_batch_is_rejected() -> None:
    assert set_refusal(struct.pack(">qi", 0, 3) + bytes(40)) is Errors.CORRUPT_MESSAGE
    tiny = struct.pack(">qiib", 0, 20, 0, 2) + bytes(15)
    assert single_batch(tiny, 13) == tiny
    assert refusal(tiny).error is Errors.CORRUPT_MESSAGE


def test_the_base_offset_is_checked_before_the_size_of_the_header() -> None:
    """Observed in Kafka 4.3.1 and 4.4.0."""
    assert refusal(struct.pack(">qiib", 1, 20, 0, 2) + bytes(15)).error is Errors.INVALID_RECORD


def test_zstd_needs_produce_version_7() -> None:
    batch = batch_of("a", compression=Compression.ZSTD)
    assert set_refusal(batch, 6) is Errors.UNSUPPORTED_COMPRESSION_TYPE
    assert single_batch(batch, 7) == batch


def test_a_header_with_a_wrong_length_in_a_batch_that_is_recompressed() -> None:
    batch = bytearray(encode_batch([Record(value=b"v", headers=[("h", b"12")], timestamp_ms=NOW_MS)]))
    position = batch.index(b"h", 61) + 1
    assert batch[position] == 4, "the length of the header's value, in zigzag"
    batch[position] = 0x7F
    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
    assert refusal(bytes(batch), BatchRules(1000, 10_000, compression=Compression.GZIP)).error is Errors.INVALID_RECORD


def test_max_decompressed_message_bytes_limits_a_record_of_a_compressed_batch() -> None:
    """The sizes were observed in Kafka 4.4.0."""
    rules = BatchRules(max_message_bytes=100_000, segment_bytes=1_000_000, max_record_bytes=5000)
    for codec in CODECS:
        stamped(encode_batch([Record(None, b"x" * 1000, timestamp_ms=NOW_MS)] * 10, compression=codec), rules)
        stamped(encode_batch([Record(None, b"x" * 4992, timestamp_ms=NOW_MS)], compression=codec), rules)
        large = encode_batch([Record(None, b"x" * 4994, timestamp_ms=NOW_MS)], compression=codec)
        if codec is Compression.NONE:
            stamped(large, rules)
        else:
            error = refusal(large, rules)
            assert error.error is Errors.INVALID_RECORD
            assert "max.decompressed.message.bytes=5000" in (error.message or "")
