# SPDX-License-Identifier: Apache-2.0
"""Sequence numbers, epochs, duplicates, transactions: the rules of Kafka 4.3.1, and the files of this state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcoord.topics.producer_files import (
    InvalidSnapshotError,
    decode_aborted,
    decode_snapshot,
    encode_aborted,
    encode_snapshot,
)
from kcoord.topics.producer_state import AbortedTransaction, CachedBatch, ProducerEntry, ProducerState
from kcoord_protocol.batch_header import MAGIC, TRANSACTIONAL_BIT, BatchHeader
from kcoord_protocol.errors import Errors, KafkaError

MAX = 2**31 - 1
PRODUCER = 7


def header(
    sequence: int,
    *,
    count: int = 1,
    offset: int = 0,
    epoch: int = 0,
    transactional: bool = False,
    timestamp_ms: int = 5,
) -> BatchHeader:
    return BatchHeader(
        base_offset=offset,
        batch_length=100,
        partition_leader_epoch=0,
        magic=MAGIC,
        crc=0,
        attributes=transactional * TRANSACTIONAL_BIT,
        last_offset_delta=count - 1,
        base_timestamp=timestamp_ms,
        max_timestamp=timestamp_ms,
        producer_id=PRODUCER,
        producer_epoch=epoch,
        base_sequence=sequence,
        records_count=count,
    )


def state_after(*batches: BatchHeader) -> ProducerState:
    state = ProducerState()
    for batch in batches:
        assert state.check(batch) is None
        state.replay_data(batch)
    return state


def refusal(state: ProducerState, batch: BatchHeader) -> Errors:
    with pytest.raises(KafkaError) as caught:
        state.check(batch)
    return caught.value.error


def test_an_unknown_producer_may_begin_with_any_sequence_number() -> None:
    assert ProducerState().check(header(1234)) is None


@pytest.mark.parametrize("epoch", [-1, 0, 2**15 - 1])
def test_an_unknown_producer_may_begin_with_any_epoch_from_minus_1_on(epoch: int) -> None:
    assert ProducerState().check(header(0, epoch=epoch)) is None
    ProducerState().check_marker(PRODUCER, epoch, bumps_epoch=False)


@pytest.mark.parametrize("epoch", [-2, -(2**15)])
def test_no_producer_has_an_epoch_below_minus_1(epoch: int) -> None:
    """Observed in Kafka 4.3.1 and 4.4.0, whose producers begin at epoch -1."""
    assert refusal(ProducerState(), header(0, epoch=epoch)) is Errors.INVALID_PRODUCER_EPOCH
    assert refusal(state_after(header(0, epoch=-1)), header(1, epoch=epoch)) is Errors.INVALID_PRODUCER_EPOCH
    for bumps_epoch in (False, True):
        with pytest.raises(KafkaError) as caught:
            ProducerState().check_marker(PRODUCER, epoch, bumps_epoch=bumps_epoch)
        assert caught.value.error is Errors.INVALID_PRODUCER_EPOCH


def test_sequence_numbers_must_follow() -> None:
    state = state_after(header(0, count=3))
    assert state.check(header(3)) is None
    assert refusal(state, header(4)) is Errors.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert refusal(state, header(2, count=2)) is Errors.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_sequence_numbers_wrap() -> None:
    state = state_after(header(MAX - 1, count=3))
    assert state.entries[PRODUCER].last_sequence == 0
    assert state.entries[PRODUCER].batches[0].base_sequence == MAX - 1
    assert state.check(header(1)) is None
    assert state_after(header(MAX)).check(header(0)) is None


def test_the_last_five_batches_are_recognised() -> None:
    batches = [header(2 * number, count=2, offset=100 + 2 * number) for number in range(6)]
    state = state_after(*batches)
    assert refusal(state, batches[0]) is Errors.OUT_OF_ORDER_SEQUENCE_NUMBER
    for batch in batches[1:]:
        duplicate = state.check(batch)
        assert duplicate is not None
        assert (duplicate.base_offset, duplicate.last_offset) == (batch.base_offset, batch.last_offset)


def test_a_batch_of_epoch_minus_1_may_be_a_duplicate_and_in_sequence() -> None:
    state = state_after(header(1, epoch=-1), header(0, epoch=-1, offset=1))
    duplicate = state.check(header(1, epoch=-1))
    assert duplicate is not None
    assert duplicate.base_offset == 0


def test_part_of_a_batch_is_no_duplicate() -> None:
    state = state_after(header(0, count=4))
    assert refusal(state, header(0, count=2)) is Errors.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_new_epoch_begins_with_sequence_zero() -> None:
    state = state_after(header(0, epoch=1))
    assert refusal(state, header(1, epoch=2)) is Errors.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert state.check(header(0, epoch=2)) is None
    assert refusal(state, header(0, epoch=0)) is Errors.INVALID_PRODUCER_EPOCH


def test_a_duplicate_of_an_older_epoch_is_fenced() -> None:
    state = state_after(header(0, epoch=1), header(0, epoch=2, offset=1))
    assert refusal(state, header(0, epoch=1)) is Errors.INVALID_PRODUCER_EPOCH


def test_silent_producers_without_an_open_transaction_expire() -> None:
    state = state_after(header(0, timestamp_ms=1000))
    state.expire(PRODUCER, 1999, 1000)
    assert PRODUCER in state.entries
    state.expire(PRODUCER, 2000, 1000)
    assert state.check(header(77)) is None
    open_one = state_after(header(0, transactional=True, timestamp_ms=1000))
    open_one.expire(PRODUCER, 10**9, 1000)
    assert PRODUCER in open_one.entries


def test_a_transaction_holds_the_stable_offset_until_its_marker() -> None:
    state = state_after(header(0, offset=10, transactional=True), header(1, offset=11, transactional=True))
    assert (state.first_unstable_offset, len(state.open_transactions)) == (10, 1)
    assert refusal(state, header(2, offset=12)) is Errors.INVALID_TXN_STATE
    state.replay_marker(header(-1, offset=12), 3, committed=True)
    assert (state.open_transactions, state.aborted) == ({}, [])
    with pytest.raises(KafkaError) as caught:
        state.check_coordinator_epoch(PRODUCER, 2)
    assert caught.value.error is Errors.TRANSACTION_COORDINATOR_FENCED
    state.check_coordinator_epoch(PRODUCER, 3)


@pytest.mark.parametrize("producer_id", [-1, -5])
def test_a_batch_of_no_producer_opens_no_transaction(producer_id: int) -> None:
    state = ProducerState()
    state.replay_data(replace(header(0, offset=10, transactional=True), producer_id=producer_id))
    assert (state.entries, state.first_unstable_offset, state.end_offset) == ({}, None, 11)


def test_aborted_transactions_are_found_by_range() -> None:
    state = ProducerState()
    for first in (10, 20, 30):
        state.replay_data(header(0, offset=first, epoch=first, transactional=True))
        state.replay_marker(header(-1, offset=first + 5, epoch=first), 0, committed=False)
    assert [transaction.first_offset for transaction in state.aborted_between(0, 100)] == [10, 20, 30]
    assert [transaction.first_offset for transaction in state.aborted_between(16, 30)] == [20]
    assert [transaction.first_offset for transaction in state.aborted_between(25, 31)] == [20, 30]
    state.advance_start(16)
    assert [transaction.first_offset for transaction in state.aborted_between(0, 100)] == [20, 30]


def test_snapshot_round_trip() -> None:
    entries = [
        ProducerEntry(1, 2, 3, 4, None, [CachedBatch(9, 19, 4, 4)]),
        ProducerEntry(5, 0, -1, 6, 77, [CachedBatch(0, 77, 0, 6)]),
        ProducerEntry(8, 1, 4, 9, None, []),
    ]
    data = encode_snapshot(entries)
    assert decode_snapshot(data) == entries
    restored = ProducerState()
    restored.restore(decode_snapshot(data), 80)
    assert (restored.first_unstable_offset, restored.end_offset) == (77, 80)


@pytest.mark.parametrize("first", ["data", "new epoch", "marker", "expired"])
def test_a_snapshot_has_the_producers_as_they_were_when_it_began(first: str) -> None:
    state = state_after(header(0), header(1, offset=1, transactional=True))
    if first == "expired":
        state.replay_marker(header(-1, offset=2), 0, committed=True)
    at_once = encode_snapshot(list(state.entries.values()))
    entries, changed = state.begin_snapshot()
    if first == "marker":
        state.replay_marker(header(-1, offset=2), 3, committed=False)
    elif first == "expired":
        state.expire(PRODUCER, 10**9, 1000)
    for number in range(3):
        state.replay_data(header(number, offset=3 + number, epoch=int(first == "new epoch"), timestamp_ms=9))
    state.replay_data(replace(header(0, offset=6), producer_id=PRODUCER + 1))
    assert encode_snapshot(entries, changed) == at_once
    state.end_snapshot()
    assert encode_snapshot(list(state.entries.values())) != at_once


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d[:5], lambda d: d[:-1] + b"\x01", lambda d: b"\x00\x09" + d[2:]]
)
def test_a_damaged_snapshot_is_recognised(damage: object) -> None:
    data = encode_snapshot([ProducerEntry(1, 2, 3, 4)])
    with pytest.raises(InvalidSnapshotError):
        decode_snapshot(damage(data))  # type: ignore[operator]


def test_transaction_index_stops_at_a_torn_entry() -> None:
    first, second = AbortedTransaction(1, 2, 3, 4), AbortedTransaction(5, 6, 7, 8)
    data = encode_aborted(first) + encode_aborted(second)
    assert len(encode_aborted(first)) == 34
    assert decode_aborted(data) == [first, second]
    assert decode_aborted(data[:-3]) == [first]
    assert decode_aborted(b"\x00\x07" + data[2:]) == []
