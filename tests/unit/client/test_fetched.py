# SPDX-License-Identifier: Apache-2.0
"""Records of a Fetch response: offsets within batches, gaps, control batches, aborted transactions, damage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.client.consumer.fetched import AbortedProducer, FetchedRecords
from kcoord.client.types import TopicPartition
from kcoord_protocol.control_records import ControlRecordType, control_key, end_txn_marker
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import Record, encode_batch

PARTITION = TopicPartition("t", 3)


def batch(
    base_offset: int, *values: str, producer_id: int = -1, epoch: int = 2, last_offset: int | None = None
) -> bytes:
    return encode_batch(
        [Record(value=value.encode(), timestamp_ms=base_offset) for value in values],
        base_offset=base_offset,
        last_offset=last_offset,
        partition_leader_epoch=2,
        producer_id=producer_id,
        producer_epoch=0 if producer_id >= 0 else -1,
        base_sequence=0 if producer_id >= 0 else -1,
        is_transactional=producer_id >= 0,
    )


def marker(offset: int, producer_id: int, kind: ControlRecordType) -> bytes:
    return encode_batch(
        [Record(control_key(kind), end_txn_marker(0), timestamp_ms=1)],
        base_offset=offset,
        producer_id=producer_id,
        producer_epoch=0,
        is_transactional=True,
        is_control=True,
    )


def read(
    data: bytes, offset: int = 0, aborted: list[tuple[int, int]] | None = None
) -> tuple[list[tuple[int, str]], int]:
    """Returns (offset, value) of all records, and the offset after them."""
    fetched = FetchedRecords(
        PARTITION,
        offset,
        data,
        generation=0,
        aborted=None if aborted is None else [AbortedProducer(*transaction) for transaction in aborted],
    )
    records = []
    while not fetched.is_drained:
        records += fetched.take(2)
    return [(record.offset, (record.value or b"").decode()) for record in records], fetched.next_offset


def test_records_have_their_partition_and_offset() -> None:
    fetched = FetchedRecords(PARTITION, 0, batch(0, "a"), generation=0)
    (only,) = fetched.take(5)
    assert (only.topic_partition, only.offset, only.timestamp_ms, only.value) == (PARTITION, 0, 0, b"a")
    assert (only.leader_epoch, fetched.leader_epoch, fetched.is_drained) == (2, 2, True)


def test_a_fetch_may_begin_within_a_batch() -> None:
    assert read(batch(10, "a", "b", "c"), 11) == ([(11, "b"), (12, "c")], 13)


def test_the_position_moves_with_each_record() -> None:
    fetched = FetchedRecords(PARTITION, 0, batch(0, "a", "b"), generation=0)
    assert fetched.end_offset == 2
    fetched.take(1)
    assert (fetched.next_offset, fetched.is_drained) == (1, False)


def test_gaps_of_compaction_are_skipped() -> None:
    assert read(batch(0, "a", last_offset=5) + batch(8, "b")) == ([(0, "a"), (8, "b")], 9)
    assert read(batch(0, "a", last_offset=5)) == ([(0, "a")], 6)


def test_a_truncated_batch_at_the_end_is_skipped() -> None:
    data = batch(0, "a") + batch(1, "b")
    assert read(data[:-1]) == ([(0, "a")], 1)


def test_no_records() -> None:
    assert read(b"", 7) == ([], 7)


def test_control_batches_are_skipped() -> None:
    data = batch(0, "a", producer_id=5) + marker(1, 5, ControlRecordType.COMMIT)
    assert read(data) == ([(0, "a")], 2)
    assert read(data, aborted=[]) == ([(0, "a")], 2)
    assert read(marker(1, 5, ControlRecordType.COMMIT), 1) == ([], 2)


def test_read_committed_skips_aborted_transactions() -> None:
    data = (
        batch(0, "x0", producer_id=5)
        + batch(1, "y1", producer_id=6)
        + batch(2, "x2", producer_id=5)
        + marker(3, 5, ControlRecordType.ABORT)
        + batch(4, "x4", producer_id=5)
        + marker(5, 6, ControlRecordType.COMMIT)
        + marker(6, 5, ControlRecordType.COMMIT)
        + batch(7, "plain")
    )
    everything = [(0, "x0"), (1, "y1"), (2, "x2"), (4, "x4"), (7, "plain")]
    assert read(data) == (everything, 8)
    assert read(data, aborted=[(0, 5)]) == ([(1, "y1"), (4, "x4"), (7, "plain")], 8)
    assert read(data, aborted=[(4, 5), (1, 6)]) == ([(0, "x0"), (2, "x2"), (7, "plain")], 8)


def test_records_after_an_aborted_transaction_are_returned() -> None:
    data = (
        batch(0, "x0", producer_id=5)
        + marker(1, 5, ControlRecordType.ABORT)
        + batch(2, "x2", producer_id=5)
        + marker(3, 5, ControlRecordType.ABORT)
        + batch(4, "x4", producer_id=5)
        + marker(5, 5, ControlRecordType.COMMIT)
    )
    assert read(data, aborted=[(0, 5)]) == ([(2, "x2"), (4, "x4")], 6)
    assert read(data, aborted=[(2, 5), (0, 5)]) == ([(4, "x4")], 6)


def test_a_wrong_checksum_is_detected() -> None:
    data = bytearray(batch(0, "abc"))
    data[-2] ^= 1
    with pytest.raises(CorruptBatchError, match=r"t-3.*0"):
        read(bytes(data))
    unchecked = FetchedRecords(PARTITION, 0, bytes(data), generation=0, check_crcs=False)
    assert len(unchecked.take(5)) == 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_each_record_from_the_offset_on_is_returned_once(sizes: list[int], data: st.DataObject) -> None:
    encoded, offset = b"", 0
    for size in sizes:
        encoded += batch(offset, *(str(offset + index) for index in range(size)))
        offset += size
    start = data.draw(st.integers(0, offset))
    assert read(encoded, start) == ([(number, str(number)) for number in range(start, offset)], offset)
