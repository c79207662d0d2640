# SPDX-License-Identifier: Apache-2.0
"""Epochs, markers, timeouts and expiry of the pure transaction coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kcoord.coordinator.transaction.metadata import EXHAUSTED_EPOCH, TransactionMetadata, TransactionState
from kcoord.coordinator.transaction.records import new_transaction_record
from kcoord.coordinator.transaction.work import EXPIRATION_KEY, markers_key, timeout_key
from kcoord.runtime.result import Producer
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import TransactionLogValue
from tests.unit.transaction.coordinator import ID, NOW_MS, TIMEOUT_MS, Coordinator, error_of

DAY_MS = 24 * 3600 * 1000


def at_epoch(epoch: int, version: int = 2) -> tuple[Coordinator, Producer]:
    """Returns a coordinator whose producer has this epoch, and the producer."""
    coordinator = Coordinator()
    coordinator.init()
    metadata = replace(coordinator.metadata, producer_epoch=epoch, client_transaction_version=version)
    record = new_transaction_record(metadata, 2)
    coordinator.shard.replay(record)
    coordinator.log.append(record)
    return coordinator, metadata.producer


# --- InitProducerId ---------------------------------------------------------------------------------------------------


def test_each_init_bumps_the_epoch() -> None:
    coordinator = Coordinator()
    assert [coordinator.initialized() for _ in range(3)] == [(100, 0), (100, 1), (100, 2)]
    assert coordinator.next_producer_id == 101


def test_a_new_transactional_id_accepts_any_producer_in_the_request() -> None:
    coordinator = Coordinator()
    response = coordinator.init(Producer(5, 3))
    assert (response.producer_id, response.producer_epoch) == (100, 0)


def test_a_producer_that_sends_its_epoch_keeps_its_id_and_may_repeat_the_request() -> None:
    coordinator = Coordinator()
    first = coordinator.initialized()
    for _ in range(2):
        response = coordinator.init(first)
        assert (response.error_code, response.producer_id, response.producer_epoch) == (0, 100, 1)
    coordinator.init()
    assert error_of(lambda: coordinator.init(first)) is Errors.PRODUCER_FENCED
    assert error_of(lambda: coordinator.init(Producer(100, 9))) is Errors.PRODUCER_FENCED


def test_init_aborts_the_open_transaction_of_the_predecessor() -> None:
    coordinator = Coordinator()
    first = coordinator.initialized()
    coordinator.add(first, ("t", 0))
    response = coordinator.init()
    assert (response.error_code, response.producer_id) == (Errors.CONCURRENT_TRANSACTIONS, -1)
    work = coordinator.complete()
    assert (work.producer, work.committed) == (Producer(100, 1), False)
    assert work.partitions == {"t": frozenset({0})}
    assert coordinator.initialized() == (100, 2)
    for stale in (lambda: coordinator.end(first), lambda: coordinator.add(first, ("t", 0))):
        assert error_of(stale) is Errors.PRODUCER_FENCED


def test_a_producer_recovers_after_the_coordinator_aborted_its_transaction() -> None:
    coordinator = Coordinator()
    first = coordinator.initialized()
    coordinator.add(first, ("t", 0))
    coordinator.elapse(TIMEOUT_MS)
    coordinator.complete()
    coordinator.restart()
    response = coordinator.init(first)
    assert (response.error_code, response.producer_epoch) == (0, 1)


ABORTS: dict[str, Callable[[Coordinator, Producer], object]] = {
    "its timeout": lambda coordinator, producer: coordinator.elapse(TIMEOUT_MS),
    "its own request": lambda coordinator, producer: coordinator.init(producer),
    "another producer": lambda coordinator, producer: coordinator.init(),
}


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("cause", ABORTS)
def test_a_producer_recovers_with_the_epoch_of_its_aborted_transaction(cause: str, version: int) -> None:
    """Observed in Kafka 4.4.0. librdkafka does so after an error in a transaction (KIP-360), Java after a timeout."""
    coordinator = Coordinator()
    first = coordinator.initialized()
    coordinator.add(first, ("t", 0), version=version)
    ABORTS[cause](coordinator, first)
    assert error_of(lambda: coordinator.init(first)) is Errors.CONCURRENT_TRANSACTIONS
    coordinator.complete()
    for _ in range(2):
        response = coordinator.init(first)
        assert (response.error_code, response.producer_id, response.producer_epoch) == (0, 100, 1)
    coordinator.init()
    assert error_of(lambda: coordinator.init(first)) is Errors.PRODUCER_FENCED


# --- exhausted epochs -------------------------------------------------------------------------------------------------


def test_an_exhausted_epoch_gets_a_new_producer_id() -> None:
    coordinator, producer = at_epoch(EXHAUSTED_EPOCH)
    assert error_of(lambda: coordinator.init(Producer(100, 7))) is Errors.PRODUCER_FENCED
    response = coordinator.init(producer)
    assert response.producer_id >= 101
    assert response.producer_epoch == 0
    again = coordinator.init(producer)
    assert (again.producer_id, again.producer_epoch) == (response.producer_id, 0)


def test_after_the_transaction_of_the_last_epoch_the_producer_has_a_new_id() -> None:
    coordinator, producer = at_epoch(EXHAUSTED_EPOCH)
    coordinator.add(producer, ("t", 0))
    after = coordinator.end(producer)
    assert (after.producer_id >= 101, after.producer_epoch) == (True, 0)
    assert coordinator.take_work().producer == (100, EXHAUSTED_EPOCH + 1)
    coordinator.restart()
    assert coordinator.complete().producer == (100, EXHAUSTED_EPOCH + 1)
    assert coordinator.metadata.producer == after
    assert coordinator.end(producer) == after
    with pytest.raises(KafkaError, match="is CompleteCommit and cannot abort") as refusal:
        coordinator.end(producer, committed=False)
    assert refusal.value.error is Errors.INVALID_TXN_STATE
    coordinator.add(after, ("t", 0))


def test_the_epoch_after_the_last_one_only_fences() -> None:
    coordinator, producer = at_epoch(EXHAUSTED_EPOCH)
    coordinator.add(producer, ("t", 0))
    coordinator.elapse(TIMEOUT_MS)
    assert coordinator.metadata.producer_epoch == EXHAUSTED_EPOCH + 1
    coordinator.complete()
    assert error_of(lambda: coordinator.end(producer, committed=False)) is Errors.PRODUCER_FENCED
    response = coordinator.init(producer)
    assert (response.error_code, response.producer_id >= 101, response.producer_epoch) == (0, True, 0)


def test_no_request_may_use_the_epoch_after_the_last_one() -> None:
    coordinator, producer = at_epoch(EXHAUSTED_EPOCH)
    coordinator.add(producer, ("t", 0))
    coordinator.elapse(TIMEOUT_MS)
    coordinator.complete()
    stranger = coordinator.metadata.producer
    for request in (
        lambda: coordinator.add(stranger, ("t", 0)),
        lambda: coordinator.verify(stranger, ("t", 0)),
        lambda: coordinator.end(stranger, committed=False),
    ):
        assert error_of(request) is Errors.PRODUCER_FENCED
    assert coordinator.state is TransactionState.COMPLETE_ABORT


def test_producers_of_old_versions_may_use_the_last_epoch_too() -> None:
    coordinator, producer = at_epoch(EXHAUSTED_EPOCH, version=0)
    coordinator.add(producer, ("t", 0), version=0)
    assert coordinator.end(producer, version=4) == producer
    coordinator.complete()
    assert coordinator.init().producer_id >= 101


def test_a_repeated_request_for_the_last_epoch_gets_it_again() -> None:
    coordinator, producer = at_epoch(EXHAUSTED_EPOCH - 1)
    for _ in range(2):
        response = coordinator.init(producer)
        assert (response.producer_id, response.producer_epoch) == (100, EXHAUSTED_EPOCH)


def test_a_repeated_end_that_led_to_the_last_epoch_succeeds() -> None:
    coordinator, producer = at_epoch(EXHAUSTED_EPOCH - 1)
    coordinator.add(producer, ("t", 0))
    after = coordinator.end(producer)
    assert (coordinator.metadata.next_producer_id, coordinator.metadata.next_producer_epoch) == (-1, -1)
    coordinator.complete()
    assert coordinator.end(producer) == after == (100, EXHAUSTED_EPOCH)
    coordinator.add(after, ("t", 0))
    coordinator.end(after)
    assert coordinator.metadata.next_producer_id >= 101
    assert coordinator.metadata.next_producer_epoch == 0


def test_after_a_change_of_the_producer_id_only_the_last_epoch_of_the_old_id_is_accepted() -> None:
    coordinator, producer = at_epoch(EXHAUSTED_EPOCH)
    changed = coordinator.init(producer)
    for stranger in (Producer(100, EXHAUSTED_EPOCH - 1), Producer(999, EXHAUSTED_EPOCH)):
        assert error_of(lambda: coordinator.init(stranger)) is Errors.PRODUCER_FENCED  # noqa: B023
    assert coordinator.init(producer).producer_id == changed.producer_id


# --- partitions ------------------------------------------------------------------------------------------------------


def test_partitions_are_added_once_and_verified_separately() -> None:
    coordinator = Coordinator()
    producer = coordinator.initialized()
    coordinator.add(producer, ("t", 0))
    coordinator.add(producer, ("t", 0), ("u", 1))
    assert coordinator.metadata.partitions == {"t": frozenset({0}), "u": frozenset({1})}
    log = list(coordinator.log)
    coordinator.add(producer, ("t", 0))
    coordinator.add(producer, ("u", 1), ("t", 0))
    assert coordinator.log == log
    absent = Errors.TRANSACTION_ABORTABLE
    assert coordinator.verify(producer, ("t", 0), ("t", 1), ("u", 1), ("v", 0)) == [
        Errors.NONE,
        absent,
        Errors.NONE,
        absent,
    ]


# --- markers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_a_decision_survives_restarts_until_all_markers_are_written(committed: bool) -> None:
    coordinator = Coordinator()
    producer = coordinator.initialized()
    coordinator.add(producer, ("t", 0), ("t", 2))
    coordinator.add(producer, ("u", 1))
    coordinator.end(producer, committed=committed)
    first = coordinator.take_work()
    assert (first.attempt, first.coordinator_epoch, first.transaction_version) == (0, 7, 2)
    for _ in range(2):
        coordinator.restart()
        assert coordinator.take_work() == replace(first, attempt=1)
    coordinator.complete()
    assert (coordinator.state.wire_name, coordinator.metadata.partitions) == (
        "CompleteCommit" if committed else "CompleteAbort",
        {},
    )
    coordinator.restart()
    assert coordinator.tasks == []


def test_markers_are_retried_with_growing_delays() -> None:
    coordinator = Coordinator()
    producer = coordinator.initialized()
    coordinator.add(producer, ("t", 0))
    coordinator.end(producer)
    delays = []
    for attempt in range(8):
        started_ms = coordinator.now_ms
        assert coordinator.complete(KafkaError(Errors.KAFKA_STORAGE_ERROR)).attempt == attempt
        while not coordinator.tasks:
            coordinator.elapse(50)
        delays.append(coordinator.now_ms - started_ms)
    assert delays == [100, 200, 400, 800, 1600, 3200, 5000, 5000]
    coordinator.complete()
    assert coordinator.state is TransactionState.COMPLETE_COMMIT


def test_the_outcome_of_an_older_task_is_ignored() -> None:
    coordinator = Coordinator()
    producer = coordinator.initialized()
    coordinator.add(producer, ("t", 0))
    after = coordinator.end(producer)
    task = coordinator.tasks[0]
    coordinator.complete()
    coordinator.add(after, ("t", 0))
    coordinator.end(after)
    coordinator.run(lambda context: coordinator.shard.complete_task(context, task, None))
    assert coordinator.state is TransactionState.PREPARE_COMMIT


def test_an_abort_without_a_transaction_writes_no_marker() -> None:
    coordinator = Coordinator()
    producer = coordinator.initialized()
    assert coordinator.end(producer, committed=False) == (100, 1)
    assert coordinator.complete().partitions == {}
    assert coordinator.metadata.start_ms == NOW_MS


# --- timeouts and expiration ------------------------------------------------------------------------------------------


def test_a_transaction_that_takes_too_long_is_aborted() -> None:
    coordinator = Coordinator()
    producer = coordinator.initialized()
    coordinator.add(producer, ("t", 0))
    coordinator.elapse(TIMEOUT_MS - 1)
    coordinator.add(producer, ("t", 1))
    assert coordinator.state.wire_name == "Ongoing"
    coordinator.elapse(1)
    assert coordinator.state.wire_name == "PrepareAbort"
    assert error_of(lambda: coordinator.end(producer)) is Errors.INVALID_TXN_STATE
    assert coordinator.complete().producer == (100, 1)


def test_the_deadline_survives_a_restart_and_ends_with_the_transaction() -> None:
    coordinator = Coordinator()
    producer = coordinator.initialized()
    coordinator.add(producer, ("t", 0))
    coordinator.elapse(1000)
    coordinator.restart()
    assert coordinator.timers[timeout_key(ID)] == NOW_MS + TIMEOUT_MS
    coordinator.end(producer)
    assert timeout_key(ID) not in coordinator.timers


def test_a_timer_that_fires_too_early_or_too_late_changes_nothing() -> None:
    coordinator = Coordinator()

    def fire_all() -> None:
        for key in (timeout_key(ID), markers_key(ID)):
            coordinator.run(lambda context: coordinator.shard.fire_timer(context, key))  # noqa: B023

    fire_all()
    producer = coordinator.initialized()
    fire_all()
    assert (coordinator.timers, coordinator.tasks) == ({}, [])
    coordinator.add(producer, ("t", 0))
    coordinator.timers.clear()
    fire_all()
    assert coordinator.timers == {timeout_key(ID): NOW_MS + TIMEOUT_MS}
    coordinator.end(producer)
    coordinator.run(lambda context: coordinator.shard.fire_timer(context, timeout_key(ID)))
    coordinator.complete()
    fire_all()
    assert (coordinator.state, coordinator.timers, coordinator.tasks) == (TransactionState.COMPLETE_COMMIT, {}, [])


def test_the_first_check_for_unused_ids_is_an_interval_after_the_start() -> None:
    coordinator = Coordinator(transaction_remove_expired_transaction_cleanup_interval_ms="5000")
    coordinator.restart()
    assert coordinator.timers == {EXPIRATION_KEY: NOW_MS + 5_000}


def test_unused_ids_expire() -> None:
    coordinator = Coordinator()
    coordinator.restart()
    producer = coordinator.initialized()
    coordinator.elapse(7 * DAY_MS - 1)
    assert coordinator.metadata.producer == producer
    coordinator.elapse(3600 * 1000)
    assert coordinator.shard.hard_state() == {}
    assert error_of(lambda: coordinator.add(producer, ("t", 0))) is Errors.INVALID_PRODUCER_ID_MAPPING
    assert coordinator.initialized() == (101, 0)


def test_an_id_with_an_open_transaction_never_expires() -> None:
    coordinator = Coordinator(transaction_max_timeout_ms=str(2**31 - 1))
    coordinator.restart()
    coordinator.init(timeout_ms=2**31 - 1)
    coordinator.add(coordinator.metadata.producer, ("t", 0))
    coordinator.elapse(8 * DAY_MS)
    assert coordinator.state is TransactionState.ONGOING


class CountedStates(dict[str, TransactionMetadata]):
    """Counts the entries that are read one after the other."""

    read = 0

    def items(self) -> Iterator[tuple[str, TransactionMetadata]]:  # type: ignore[override]
        for item in super().items():
            self.read += 1
            yield item


def test_many_ids_expire_in_several_rounds() -> None:
    coordinator = Coordinator(transactional_id_expiration_ms="1000")
    coordinator.restart()
    metadata = at_epoch(0)[0].metadata
    for number in range(1500):
        record = new_transaction_record(replace(metadata, transactional_id=str(number)), 2)
        coordinator.shard.replay(record)
        coordinator.log.append(record)
    states = CountedStates(coordinator.shard._transactions)
    coordinator.shard._transactions = states
    coordinator.elapse(3600 * 1000)
    assert len(coordinator.shard.hard_state()) == 500
    assert states.read <= 1000, "a round looks at no more ids than it needs"
    coordinator.elapse(1000)
    assert coordinator.shard.hard_state() == {}


# --- records and descriptions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("feature", "value_version"), [(0, 0), (1, 1), (2, 1)])
def test_the_feature_decides_the_version_of_records(feature: int, value_version: int) -> None:
    coordinator = Coordinator(transaction_version=feature)
    producer = coordinator.initialized()
    coordinator.add(producer, ("b", 1), ("a", 3), ("a", 2), version=0)
    assert [record.value_version for record in coordinator.log] == [value_version] * 2
    empty, ongoing = (record.value for record in coordinator.log)
    assert isinstance(empty, TransactionLogValue)
    assert isinstance(ongoing, TransactionLogValue)
    assert empty.transaction_partitions is None
    partitions = [(topic.topic, topic.partition_ids) for topic in ongoing.transaction_partitions or ()]
    assert partitions == [("a", [2, 3]), ("b", [1])]


def test_describe_and_list() -> None:
    coordinator = Coordinator()
    producer = coordinator.initialized()
    coordinator.init(transactional_id="other")
    coordinator.add(producer, ("t", 1), ("t", 0))
    shard = coordinator.shard
    ongoing, absent = coordinator.run(lambda context: shard.describe_transactions(context, [ID, "no"]))
    assert (ongoing.transaction_state, ongoing.producer_id) == ("Ongoing", 100)
    assert ongoing.transaction_timeout_ms == TIMEOUT_MS
    assert [(topic.topic, topic.partitions) for topic in ongoing.topics] == [("t", [0, 1])]
    assert absent.error_code == Errors.TRANSACTIONAL_ID_NOT_FOUND

    def listed(
        states: frozenset[TransactionState] = frozenset(), ids: frozenset[int] = frozenset(), duration_ms: int = -1
    ) -> list[str]:
        answer = coordinator.run(
            lambda context: shard.list_transactions(
                context, states=states, producer_ids=ids, duration_ms=duration_ms, matches=None
            )
        )
        return [state.transactional_id for state in answer]

    assert listed() == ["other", ID]
    assert listed(duration_ms=0) == ["other"], "it has just begun"
    assert listed(states=frozenset({TransactionState.ONGOING})) == [ID]
    assert listed(ids=frozenset({101})) == ["other"]
    coordinator.now_ms += 500
    assert listed(duration_ms=500) == ["other"]
    assert listed(duration_ms=499) == ["other", ID]
