# SPDX-License-Identifier: Apache-2.0
"""The partitioner and the batches of the producer."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.partitioner.default import DefaultPartitioner
from kafka.partitioner.default import murmur2 as other_murmur2

from kcoord.client.producer.batches import Accumulator, ProducerBatch, Sequences, record_size
from kcoord.client.producer.partitioner import StickyPartitions, murmur2, partition_for_key
from kcoord.client.types import TopicPartition
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, Compression, Record, decode_header, decode_records

ZERO, ONE = TopicPartition("t", 0), TopicPartition("t", 1)


class TestPartitioner:
    @pytest.mark.parametrize(
        ("key", "expected"),
        [
            (b"21", -973932308),
            (b"foobar", -790332482),
            (b"a-little-bit-long-string", -985981536),
            (b"a-little-bit-longer-string", -1486304829),
            (b"abc", 479470107),
        ],
    )
    def test_murmur2_of_java(self, key: bytes, expected: int) -> None:
        assert murmur2(key) == expected

    @given(st.binary(max_size=40))
    def test_murmur2_of_kafka_python(self, key: bytes) -> None:
        assert murmur2(key) & 0xFFFF_FFFF == other_murmur2(key) & 0xFFFF_FFFF
        assert -(1 << 31) <= murmur2(key) < 1 << 31

    @given(st.binary(max_size=20), st.integers(1, 50))
    def test_keys_go_to_the_partitions_of_kafka_python(self, key: bytes, count: int) -> None:
        partitions = lambda topic: range(count)  # noqa: E731
        cluster = SimpleNamespace(
            topics=lambda: "t", partitions_for_topic=partitions, available_partitions_for_topic=partitions
        )
        expected = DefaultPartitioner().partition("t", None, key, None, None, cluster)
        assert partition_for_key(key, count) == expected

    def test_a_partition_sticks_until_its_batch_is_closed(self) -> None:
        sticky = StickyPartitions(random.Random(1).random)
        first = sticky.partition("t", [0, 1, 2])
        assert {sticky.partition("t", [0, 1, 2]) for _ in range(10)} == {first}
        sticky.batch_closed("t", first, [0, 1, 2])
        second = sticky.partition("t", [0, 1, 2])
        assert second != first
        sticky.batch_closed("t", first, [0, 1, 2])
        assert sticky.partition("t", [0, 1, 2]) == second
        assert sticky.partition("t", [first]) == first

    def test_a_random_partition_is_chosen(self) -> None:
        draws = [0.0, 0.25, 0.5, 0.75, 0.999]
        sticky = StickyPartitions(iter(draws).__next__)
        assert [sticky.partition(str(draw), [4, 5, 6, 7]) for draw in draws] == [4, 5, 6, 7, 7]

    def test_only_the_end_of_the_current_batch_changes_the_partition(self) -> None:
        draws = iter([0.0, 0.9])
        sticky = StickyPartitions(draws.__next__)
        assert sticky.partition("t", [0, 1]) == 0
        sticky.batch_closed("t", 1, [0, 1])
        sticky.batch_closed("u", 0, [0, 1])
        sticky.batch_closed("t", 0, [])
        assert sticky.partition("t", [0, 1]) == 0
        sticky.batch_closed("t", 0, [0])
        assert sticky.partition("t", [0, 1]) == 0, "there is no other available partition"


def record(text: str = "", size: int = 0) -> Record:
    return Record(value=text.encode() or b"x" * size, timestamp_ms=1)


class TestAccumulator:
    def test_a_batch_lingers(self) -> None:
        batches: Accumulator[int] = Accumulator(1000, linger_ms=50)
        assert batches.next_due_ms() is None
        batches.append(ZERO, record("a"), 1, 100)
        assert batches.ready(149) == []
        assert batches.next_due_ms() == 150
        assert batches.ready(150) == [ZERO]
        assert batches.take(ZERO).done == [1]

    def test_a_batch_that_is_followed_by_another_does_not_wait(self) -> None:
        batches: Accumulator[int] = Accumulator(300, linger_ms=1000)
        assert not batches.append(ZERO, record(size=100), 1, 0)
        assert batches.ready(0) == []
        assert batches.append(ZERO, record(size=200), 2, 0)
        assert batches.ready(0) == [ZERO]
        assert batches.take(ZERO).done == [1]

    def test_a_batch_of_exactly_the_batch_size_does_not_wait(self) -> None:
        size = BATCH_OVERHEAD_BYTES + 2 * record_size(record("a"))
        batches: Accumulator[int] = Accumulator(size, linger_ms=1000)
        assert not batches.append(ZERO, record("a"), 1, 5)
        assert batches.append(ZERO, record("b"), 2, 6)
        assert (batches.ready(5), batches.next_due_ms()) == ([ZERO], 5)

    def test_the_earliest_due_partition_counts(self) -> None:
        batches: Accumulator[int] = Accumulator(1000, linger_ms=50)
        batches.append(ZERO, record("a"), 1, 20)
        batches.append(ONE, record("a"), 2, 10)
        assert batches.next_due_ms() == 60
        batches.take(ONE)
        assert batches.next_due_ms() == 70

    def test_expired_batches_free_their_room(self) -> None:
        batches: Accumulator[int] = Accumulator(1, linger_ms=0)
        for number in range(3):
            batches.append(ZERO, record("a"), number, number * 10)
        assert [batch.done for batch in batches.expired(10)] == [[0], [1]]
        assert batches.buffered_bytes == record_size(record("a"))

    def test_a_record_larger_than_a_batch_is_a_batch_of_its_own(self) -> None:
        batches: Accumulator[int] = Accumulator(10, linger_ms=1000)
        assert batches.append(ZERO, record(size=200), 1, 0)
        assert batches.ready(0) == [ZERO]

    def test_a_flush_does_not_wait(self) -> None:
        batches: Accumulator[int] = Accumulator(1000, linger_ms=1000)
        batches.append(ZERO, record("a"), 1, 0)
        batches.flushing += 1
        assert batches.ready(0) == [ZERO]

    def test_one_batch_per_partition_is_in_flight(self) -> None:
        batches: Accumulator[int] = Accumulator(1, linger_ms=0)
        for number in range(2):
            batches.append(ZERO, record("a"), number, 0)
            batches.append(ONE, record("a"), number, 0)
        first = batches.take(ZERO)
        assert batches.ready(0) == [ONE]
        batches.finished(first)
        assert batches.ready(0) == [ZERO, ONE]

    def test_a_retried_batch_is_first_after_its_backoff(self) -> None:
        batches: Accumulator[int] = Accumulator(1, linger_ms=0)
        batches.append(ZERO, record("a"), 1, 0)
        batches.append(ZERO, record("b"), 2, 0)
        batches.put_back(batches.take(ZERO), retry_at_ms=100)
        assert batches.ready(99) == []
        assert batches.next_due_ms() == 100
        assert batches.ready(100) == [ZERO]
        assert batches.take(ZERO).done == [1]

    def test_a_batch_that_was_sent_takes_no_more_records(self) -> None:
        batches: Accumulator[int] = Accumulator(1000, linger_ms=0)
        batches.append(ZERO, record("a"), 1, 0)
        batches.put_back(batches.take(ZERO), retry_at_ms=100)
        batches.append(ZERO, record("b"), 2, 0)
        assert [batch.done for batch in batches.pending()] == [[1], [2]]

    def test_partitions_with_a_batch_in_flight_do_not_expire(self) -> None:
        batches: Accumulator[int] = Accumulator(1, linger_ms=0)
        for partition in (ZERO, ONE):
            for number in range(2):
                batches.append(partition, record("a"), number, number * 10)
        batches.take(ZERO)
        assert [(batch.partition, batch.done) for batch in batches.expired(5)] == [(ONE, [0])]

    @settings(max_examples=50)
    @given(
        st.lists(st.tuples(st.sampled_from([ZERO, ONE]), st.integers(0, 300), st.sampled_from("asfrd")), max_size=60)
    )
    def test_no_record_is_lost_duplicated_or_reordered(self, steps: list[tuple[TopicPartition, int, str]]) -> None:
        batches: Accumulator[int] = Accumulator(400, linger_ms=0)
        added: dict[TopicPartition, list[int]] = defaultdict(list)
        got: dict[TopicPartition, list[int]] = defaultdict(list)
        for number, (partition, size, action) in enumerate(steps):
            if action == "a":
                batches.append(partition, record(size=size), number, number)
                added[partition].append(number)
            elif partition in batches.ready(10**6):
                batch = batches.take(partition)
                if action == "s" and len(batch.records) > 1:
                    batches.split(batch)
                elif action == "r":
                    batches.put_back(batch, 0)
                else:
                    batches.finished(batch)
                    got[partition] += batch.done
        for batch in batches.drain_unsent():
            got[batch.partition] += batch.done
        assert got == added
        assert batches.buffered_bytes == 0


class TestBatch:
    def test_an_encoded_batch_is_at_most_its_estimate(self) -> None:
        batch: ProducerBatch[int] = ProducerBatch(ZERO, 0)
        for number in range(100):
            item = Record(b"key", b"v" * number, [("h", None), ("\u00fc", b"x")], 10**12 + number)
            batch.add(item, number, record_size(item))
        data = batch.encode(Compression.NONE, False)
        assert len(data) <= batch.size_bytes
        assert [item.value for item in decode_records(data)] == [item.value for item in batch.records]

    @pytest.mark.parametrize(
        ("key", "headers"),
        [
            (None, []),
            (b"k" * 40, []),
            (None, [("h" * 30, None)]),
            (None, [("h", b"v" * 50)]),
            (b"k" * 40, [("h" * 30, b"v" * 50), ("\udc80", None)]),
        ],
    )
    def test_the_estimate_of_a_record_is_close(
        self, key: bytes | None, headers: list[tuple[str, bytes | None]]
    ) -> None:
        item = Record(key, b"value", headers, 1)
        batch: ProducerBatch[int] = ProducerBatch(ZERO, 0)
        batch.add(item, 0, record_size(item))
        actual = len(batch.encode(Compression.NONE, False)) - BATCH_OVERHEAD_BYTES
        assert actual <= record_size(item) <= actual + 20 + 10 * len(headers)

    def test_sequences(self) -> None:
        sequences = Sequences(7, 1)
        first: ProducerBatch[int] = ProducerBatch(ZERO, 0)
        for number in range(3):
            first.add(record("a"), number, 1)
        sequences.assign(first)
        assert (first.producer_id, first.producer_epoch, first.base_sequence) == (7, 1, 0)
        sequences.assign(first)
        sequences.stored(first)
        second: ProducerBatch[int] = ProducerBatch(ZERO, 0)
        second.add(record("b"), 0, 1)
        sequences.assign(second)
        assert second.base_sequence == 3
        header = decode_header(second.encode(Compression.NONE, True))
        assert (header.producer_id, header.base_sequence, header.is_transactional) == (7, 3, True)
        sequences.reset(8, 0)
        sequences.assign(first)
        assert (first.producer_id, first.producer_epoch, first.base_sequence) == (7, 1, 0), "it may be stored"
        sequences.stored(second)
        third: ProducerBatch[int] = ProducerBatch(ZERO, 0)
        sequences.assign(third)
        assert (third.producer_id, third.base_sequence) == (8, 0)

    def test_sequences_wrap(self) -> None:
        sequences = Sequences(1, 0)
        batch: ProducerBatch[int] = ProducerBatch(ZERO, 0, [record("a"), record("b")], [1, 2])
        batch.producer_id, batch.producer_epoch, batch.base_sequence = 1, 0, 0x7FFF_FFFF
        sequences.stored(batch)
        following: ProducerBatch[int] = ProducerBatch(ZERO, 0)
        sequences.assign(following)
        assert following.base_sequence == 1
