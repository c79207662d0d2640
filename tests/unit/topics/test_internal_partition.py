# SPDX-License-Identifier: Apache-2.0
"""The producers of a coordinator's log: another thread reads a large log, as the openings of logs."""

from __future__ import annotations

import pytest

from kcoord.runtime.result import Producer
from kcoord.storage.log import Log
from kcoord.storage.segment import LogConfig
from kcoord.topics.fetch_manager import ReadResult
from kcoord.topics.fetch_session import FetchPartition
from kcoord.topics.log_opening import LogBeingOpenedError
from kcoord.topics.store import TopicStore
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.record_batch import Record, encode_batch, encode_control_batch
from tests.unit.topics.helpers import NOW_MS, Cluster, image_of
from tests.unit.topics.test_log_opening import LARGE as LARGE_AT_ONCE
from tests.unit.topics.test_log_opening import Thread

LARGE = LARGE_AT_ONCE * 3
"""Reading goes on where it ended, so this takes more than two attempts in the event loop."""
PRODUCER = Producer(9, 0)
NO_PRODUCER = Producer(-1, -1)


class Coordinator(Cluster):
    """A cluster with a log of a coordinator, which a `Thread` reads if it is large."""

    def __init__(self) -> None:
        super().__init__(image_of({GROUP_METADATA_TOPIC: 1}), start=False)
        self.thread = Thread()
        self.start()
        self.store = TopicStore(
            self.fs,
            self.log_dir,
            self.config,
            internal_log=lambda topic, index: self.internal_logs.get((topic, index)),
            in_background=self.thread.begin,
        )
        self.store.on_metadata_update(self.image, self.now_ms)
        self.open_log(0)

    def open_log(self, generation: int) -> None:
        self.log = Log.open(self.fs, f"logs-{generation}", LogConfig(), NOW_MS)
        self.internal_logs[GROUP_METADATA_TOPIC, 0] = self.log

    def write(self, *values: str, producer: Producer = NO_PRODUCER, sequence: int = -1) -> None:
        """Appends a batch per value."""
        for number, value in enumerate(values):
            batch = encode_batch(
                [Record(b"key", value.encode(), timestamp_ms=NOW_MS)],
                base_offset=self.log.end_offset,
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                base_sequence=sequence + number if producer.producer_id >= 0 else -1,
                is_transactional=producer.producer_id >= 0,
            )
            self.log.append(batch, now_ms=NOW_MS)

    def end(self, producer: Producer, *, committed: bool) -> None:
        marker = encode_control_batch(
            ControlRecordType.COMMIT if committed else ControlRecordType.ABORT,
            end_txn_marker(0),
            timestamp_ms=NOW_MS,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            base_offset=self.log.end_offset,
        )
        self.log.append(marker, now_ms=NOW_MS)

    def last_stable_offset(self) -> int:
        self.now_ms += 1
        return self.store.find_offset(
            GROUP_METADATA_TOPIC, 0, -1, current_leader_epoch=-1, read_committed=True, now_ms=self.now_ms
        ).offset

    def fetched(self, offset: int, max_bytes: int) -> ReadResult:
        self.now_ms += 1
        request = FetchPartition(GROUP_METADATA_TOPIC, b"", 0, offset, max_bytes)
        return self.store.read(
            request, max_bytes=max_bytes, whole_first_batch=True, read_committed=True, now_ms=self.now_ms
        )

    def fetched_bytes(self, offset: int, max_bytes: int) -> int:
        return len(self.fetched(offset, max_bytes).records)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


def test_a_large_log_is_read_in_a_thread(coordinator: Coordinator) -> None:
    coordinator.write(*LARGE)
    for _ in range(2):
        with pytest.raises(LogBeingOpenedError):
            coordinator.last_stable_offset()
    with pytest.raises(LogBeingOpenedError):
        coordinator.store.active_producers(GROUP_METADATA_TOPIC, 0, coordinator.now_ms)
    assert len(coordinator.thread.work) == 1
    coordinator.write("one more")
    coordinator.thread.run()
    assert coordinator.last_stable_offset() == len(LARGE) + 1
    assert coordinator.thread.work == []


def test_a_small_log_is_read_at_once(coordinator: Coordinator) -> None:
    coordinator.write("a")
    coordinator.write("b", "c", producer=PRODUCER, sequence=0)
    assert coordinator.last_stable_offset() == 1
    (entry,) = coordinator.store.active_producers(GROUP_METADATA_TOPIC, 0, coordinator.now_ms)
    assert (entry.producer_id, entry.current_transaction_first_offset) == (9, 1)
    coordinator.end(PRODUCER, committed=True)
    assert coordinator.last_stable_offset() == 4
    assert coordinator.thread.work == []


def test_a_fetch_needs_only_the_part_that_it_returns(coordinator: Coordinator) -> None:
    coordinator.write(*LARGE)
    assert 0 < coordinator.fetched_bytes(0, 1_000) <= 1_000
    assert coordinator.fetched_bytes(10, 1_000) > 0
    assert coordinator.thread.work == []
    with pytest.raises(LogBeingOpenedError):
        coordinator.fetched_bytes(len(LARGE) - 1, 1_000)
    coordinator.thread.run()
    assert coordinator.fetched_bytes(len(LARGE) - 1, 1_000) > 0


def test_a_fetch_at_an_open_transaction_reads_on_to_its_marker(coordinator: Coordinator) -> None:
    coordinator.write("a", producer=PRODUCER, sequence=0)
    coordinator.write(*LARGE)
    coordinator.end(PRODUCER, committed=True)
    with pytest.raises(LogBeingOpenedError):
        coordinator.fetched_bytes(0, 100)
    coordinator.thread.run()
    assert coordinator.fetched_bytes(0, 100) > 0


def test_a_fetch_lists_only_the_aborted_transactions_of_its_records(coordinator: Coordinator) -> None:
    for epoch in range(3):
        coordinator.write("a", producer=Producer(9, epoch), sequence=0)
        coordinator.end(Producer(9, epoch), committed=False)
    assert coordinator.last_stable_offset() == 6, "all transactions are read"
    for offset, expected in ((0, [0]), (2, [2]), (4, [4]), (6, [])):
        aborted = coordinator.fetched(offset, 1).aborted_transactions
        assert aborted is not None
        assert [transaction.first_offset for transaction in aborted] == expected


def test_a_log_that_moves_meanwhile_is_read_again(coordinator: Coordinator) -> None:
    coordinator.write(*LARGE)
    with pytest.raises(LogBeingOpenedError):
        coordinator.last_stable_offset()
    coordinator.store.forget_internal_producers(GROUP_METADATA_TOPIC, 0)
    coordinator.open_log(1)
    coordinator.write("new")
    assert coordinator.last_stable_offset() == 1
    coordinator.thread.run()
    assert coordinator.last_stable_offset() == 1


def test_a_log_that_is_replaced_without_notice_is_read_again(coordinator: Coordinator) -> None:
    coordinator.write(*LARGE)
    with pytest.raises(LogBeingOpenedError):
        coordinator.last_stable_offset()
    coordinator.open_log(1)
    coordinator.write("new")
    assert coordinator.last_stable_offset() == 1


def test_a_stop_ends_the_reading(coordinator: Coordinator) -> None:
    coordinator.write(*LARGE)
    with pytest.raises(LogBeingOpenedError) as caught:
        coordinator.last_stable_offset()
    coordinator.store.close(coordinator.now_ms)
    coordinator.thread.run()
    assert not caught.value.opening.has_ended


def test_an_error_of_the_disk_is_reported_once(coordinator: Coordinator) -> None:
    coordinator.write(*LARGE)
    with pytest.raises(LogBeingOpenedError):
        coordinator.last_stable_offset()
    coordinator.fs.fault = lambda operation: OSError("no disk")
    coordinator.thread.run()
    coordinator.fs.fault = lambda operation: None
    with pytest.raises(KafkaError) as caught:
        coordinator.last_stable_offset()
    assert caught.value.error is Errors.KAFKA_STORAGE_ERROR
    with pytest.raises(LogBeingOpenedError):
        coordinator.last_stable_offset()
    coordinator.thread.run()
    assert coordinator.last_stable_offset() == len(LARGE)
