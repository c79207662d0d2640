# SPDX-License-Identifier: Apache-2.0
"""ListOffsets on real logs: special timestamps, search by timestamp inside batches, empty logs."""

from __future__ import annotations

import tracemalloc
from struct import pack

import pytest

from kcoord.topics.offset_queries import OffsetSearchError
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import Record, TimestampType, encode_batch, frame_batch, rewrite_header
from tests.unit.topics.helpers import NOW_MS, TOPIC, Cluster, batch_of, image_of


def find(cluster: Cluster, timestamp: int, **named: bool) -> tuple[int, int, int]:
    read_committed = named.get("committed", False)
    try:
        return cluster.store.find_offset(
            TOPIC, 0, timestamp, current_leader_epoch=-1, read_committed=read_committed, now_ms=cluster.now_ms
        )
    except OffsetSearchError as search:
        return search.find()


def cluster_with_data(**configs: str) -> Cluster:
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: configs}, leader_epoch=3))
    cluster.append(batch_of("a", "b", "c", timestamp_ms=NOW_MS))
    cluster.append(batch_of("d", "e", timestamp_ms=NOW_MS + 50, compression=Compression.ZSTD))
    cluster.append(batch_of("f", timestamp_ms=NOW_MS + 20))
    return cluster


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (-1, (-1, 6, 3)),
        (-2, (-1, 0, 3)),
        (-3, (NOW_MS + 51, 4, 3)),
        (-4, (-1, 0, 3)),
        (-5, (-1, -1, -1)),
        (-6, (-1, -1, -1)),
        (0, (NOW_MS, 0, 3)),
        (NOW_MS + 1, (NOW_MS + 1, 1, 3)),
        (NOW_MS + 3, (NOW_MS + 50, 3, 3)),
        (NOW_MS + 51, (NOW_MS + 51, 4, 3)),
        (NOW_MS + 52, (-1, -1, -1)),
    ],
)
def test_lookup(timestamp: int, expected: tuple[int, int, int]) -> None:
    assert find(cluster_with_data(), timestamp) == expected


@pytest.mark.parametrize(
    ("timestamp", "expected"), [(-1, (-1, 0, 0)), (-2, (-1, 0, 0)), (-3, (-1, -1, -1)), (5, (-1, -1, -1))]
)
def test_empty_log(timestamp: int, expected: tuple[int, int, int]) -> None:
    assert find(Cluster(), timestamp) == expected


def test_after_deletion_and_across_segments() -> None:
    cluster = cluster_with_data(**{"internal.segment.bytes": "200"})
    cluster.store.delete_records(TOPIC, 0, 2, NOW_MS)
    assert find(cluster, -2) == (-1, 2, 3)
    assert find(cluster, 0) == (NOW_MS + 2, 2, 3)
    assert find(cluster, -3) == (NOW_MS + 51, 4, 3)
    assert find(cluster, NOW_MS + 51) == (NOW_MS + 51, 4, 3)


def test_log_append_time_names_the_first_record() -> None:
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: {"message.timestamp.type": "LogAppendTime"}}))
    assert cluster.append(batch_of("a")).log_append_time_ms == NOW_MS
    cluster.now_ms += 1000
    assert cluster.append(batch_of("b", "c")).log_append_time_ms == NOW_MS + 1000
    assert find(cluster, -3) == (NOW_MS + 1000, 1, 0)
    assert find(cluster, NOW_MS + 1) == (NOW_MS + 1000, 1, 0)


@pytest.mark.parametrize(
    ("codec", "largest", "by_time", "last"),
    [
        ("producer", 100, {-100: (0, 0), 0: (0, 0), 1: (1, 5), 5: (1, 5), 6: None, 101: None}, None),
        ("producer", -100, {-100: (0, 0), -99: None, 0: None, 5: None}, None),
        ("producer", 5, {-100: (0, 0), 1: (1, 5), 6: None}, (1, 5)),
        ("gzip", 100, {-100: (0, 100), 6: (0, 100), 100: (0, 100), 101: None}, (0, 100)),
        ("gzip", -100, {-100: (0, -100), -99: None}, (0, -100)),
    ],
)
def test_timestamps_of_a_batch_that_claims_log_append_time(
    codec: str, largest: int, by_time: dict[int, tuple[int, int] | None], last: tuple[int, int] | None
) -> None:
    """Observed in Kafka 4.3.1 and 4.4.0, before and after a restart. Times are relative to NOW_MS."""
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: {"compression.type": codec}}))
    records = [Record(b"k", b"v", timestamp_ms=NOW_MS + offset_ms) for offset_ms in (0, 5, 2)]
    batch = bytearray(encode_batch(records, timestamp_type=TimestampType.LOG_APPEND_TIME))
    rewrite_header(batch, log_append_time_ms=NOW_MS + largest)
    cluster.append(bytes(batch))

    def answer(record: tuple[int, int] | None) -> tuple[int, int, int]:
        return (-1, -1, -1) if record is None else (NOW_MS + record[1], record[0], 0)

    for _ in range(2):
        for offset_ms, expected in by_time.items():
            assert find(cluster, NOW_MS + offset_ms) == answer(expected)
        assert find(cluster, -3) == answer(last)
        cluster.crash()


def test_read_committed_ends_at_the_stable_offset() -> None:
    cluster = cluster_with_data()
    batch = batch_of("t", timestamp_ms=NOW_MS + 99, producer=(1, 0, 0), is_transactional=True)
    cluster.append(batch, verified=True)
    assert find(cluster, -1, committed=True) == (-1, 6, 3)
    assert find(cluster, -1) == (-1, 7, 3)
    assert find(cluster, NOW_MS + 99) == (NOW_MS + 99, 6, 3)
    assert find(cluster, NOW_MS + 99, committed=True) == (-1, -1, -1)


@pytest.mark.parametrize("timestamp", [NOW_MS, -3])
def test_records_with_a_negative_length_have_timestamps(timestamp: int) -> None:
    """Kafka's broker accepts them: any negative length is null."""
    cluster = Cluster()
    cluster.append(batch_with(b"\x0e\0\0\0\x02k\x03\0"))
    assert find(cluster, timestamp) == (NOW_MS, 0, 0)


def batch_with(records: bytes, base_offset: int = 0) -> bytes:
    """Returns a batch around the bytes of one record."""
    return frame_batch(base_offset, 0, pack(">hiqqqhii", 0, 0, NOW_MS, NOW_MS, -1, -1, -1, 1) + records)


@pytest.mark.parametrize("timestamp", [NOW_MS, -3])
@pytest.mark.parametrize("topic", [TOPIC, "__consumer_offsets"])
def test_records_that_cannot_be_read_are_a_storage_error(timestamp: int, topic: str) -> None:
    cluster = Cluster(image_of({TOPIC: 1, "__consumer_offsets": 1}))
    log = cluster.store.partition(TOPIC, 0).open(NOW_MS).log
    log.append(batch_with(b"\x7f\0\0\0\0\0\0"), now_ms=NOW_MS)
    cluster.internal_logs["__consumer_offsets", 0] = log
    with pytest.raises(KafkaError) as caught:
        cluster.store.find_offset(topic, 0, timestamp, current_leader_epoch=-1, read_committed=False, now_ms=NOW_MS)
    assert caught.value.error is Errors.KAFKA_STORAGE_ERROR


@pytest.mark.parametrize("timestamp", [NOW_MS + 9_999, -3])
def test_a_search_makes_no_objects_for_the_records_of_a_batch(timestamp: int) -> None:
    """A few bytes may expand to millions of records."""
    cluster = Cluster()
    cluster.append(batch_of(*[""] * 10_000, compression=Compression.ZSTD))
    tracemalloc.start()
    try:
        assert find(cluster, timestamp) == (NOW_MS + 9_999, 9_999, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60 * 10_000


def test_unknown_special_timestamps_and_partitions() -> None:
    cluster = cluster_with_data()
    with pytest.raises(KafkaError) as caught:
        find(cluster, -7)
    assert caught.value.error is Errors.UNSUPPORTED_VERSION
    with pytest.raises(KafkaError) as caught:
        cluster.store.find_offset("absent", 0, -1, current_leader_epoch=-1, read_committed=False, now_ms=NOW_MS)
    assert caught.value.error is Errors.UNKNOWN_TOPIC_OR_PARTITION
