# SPDX-License-Identifier: Apache-2.0
"""Transactions in a partition: markers, the last stable offset, aborted transactions, and which writes are allowed."""

from __future__ import annotations

import pytest

from kcoord.runtime.result import Producer
from kcoord.topics.partition import Marker, Verified
from kcoord_protocol.control_records import ControlRecordType, decode_control_key, decode_end_txn_marker
from kcoord_protocol.errors import Errors
from kcoord_protocol.record_batch import decode_entries, iter_headers
from tests.unit.topics.helpers import TOPIC, Cluster, batch_of, image_of
from tests.unit.topics.test_fetch import Client
from tests.unit.topics.test_partition import error_of, read, values

P, Q = Producer(9, 0), Producer(10, 3)


def write(cluster: Cluster, producer: Producer, sequence: int, *texts: str) -> None:
    batch = batch_of(*texts, producer=(*producer, sequence), is_transactional=True)
    cluster.append(batch, verified=True)


def end(
    cluster: Cluster,
    producer: Producer,
    *,
    committed: bool,
    coordinator_epoch: int = 0,
    bumps_epoch: bool = True,
    repeated: bool = False,
) -> None:
    marker = Marker(producer, coordinator_epoch, committed, bumps_epoch, repeated)
    cluster.store.write_marker(TOPIC, 0, marker, cluster.now_ms)


def after(producer: Producer) -> Producer:
    return Producer(producer.producer_id, producer.producer_epoch + 1)


def aborted(cluster: Cluster, offset: int = 0) -> list[tuple[int, int]]:
    result = read(cluster, offset, committed=True)
    return [(transaction.producer_id, transaction.first_offset) for transaction in result.aborted_transactions or []]


def stable(cluster: Cluster) -> tuple[int, int]:
    result = read(cluster, 0, committed=True)
    return result.last_stable_offset, result.high_watermark


def test_read_committed_ends_before_an_open_transaction() -> None:
    cluster = Cluster()
    cluster.append(batch_of("before"))
    write(cluster, P, 0, "a", "b")
    cluster.append(batch_of("after"))
    assert values(read(cluster, 0, committed=True).records) == ["before"]
    assert stable(cluster) == (1, 4)
    end(cluster, after(P), committed=True)
    assert stable(cluster) == (5, 5)
    result = read(cluster, 0, committed=True)
    headers = [header for _, header in iter_headers(result.records)]
    assert [header.is_control for header in headers] == [False, False, False, True]
    position = [position for position, _ in iter_headers(result.records)][-1]
    ((offset, key, value),) = decode_entries(result.records, position)
    assert (offset, decode_control_key(key), decode_end_txn_marker(value)) == (4, ControlRecordType.COMMIT, 0)
    assert result.aborted_transactions == []


def test_a_read_returns_the_aborted_transactions_of_its_range() -> None:
    cluster = Cluster()
    write(cluster, P, 0, "a")
    write(cluster, Q, 0, "b")
    end(cluster, after(P), committed=False)
    assert stable(cluster) == (1, 3)
    assert aborted(cluster) == [(9, 0)]
    end(cluster, after(Q), committed=False)
    cluster.append(batch_of("c"))
    for start_again in (cluster.crash, cluster.restart):
        assert stable(cluster) == (5, 5)
        assert aborted(cluster) == [(9, 0), (10, 1)]
        assert aborted(cluster, 3) == [(10, 1)]
        assert aborted(cluster, 4) == []
        start_again()
    assert "00000000000000000000.txnindex" in cluster.files()
    assert aborted(cluster) == [(9, 0), (10, 1)]


def test_entries_of_a_transaction_index_beyond_the_end_of_the_log_are_removed() -> None:
    cluster = Cluster()
    cluster.append(batch_of("before"))
    write(cluster, P, 0, "a")
    end(cluster, after(P), committed=False)
    index = cluster.log_dir.partition_path(TOPIC, 0) + "/00000000000000000000.txnindex"
    partition = cluster.store.partition(TOPIC, 0)
    opened = partition.open(cluster.now_ms)
    size = len(opened.log.read(0, 1))
    partition.files.store_aborted(0, opened.producers.aborted)
    cluster.crash()
    cluster.fs.damage(cluster.log_dir.partition_path(TOPIC, 0) + f"/{0:020d}.log", lambda data: data[:size])
    assert (stable(cluster), aborted(cluster)) == ((1, 1), [])
    assert cluster.fs.size(index) == 0
    write(cluster, Q, 0, "b")
    end(cluster, after(Q), committed=False)
    assert aborted(cluster) == [(10, 1)]


def test_a_parked_fetch_is_answered_when_the_stable_offset_moves() -> None:
    cluster = Cluster()
    client = Client(cluster)
    write(cluster, P, 0, "a")
    assert client.send(client.request([(TOPIC, 0, 0)], wait_ms=500, isolation=1)) is None
    assert client.poll() == []
    end(cluster, after(P), committed=True)
    (answer,) = client.poll()
    assert values(answer.response.responses[0].partitions[0].records or b"")[0] == "a"


# --- allowed writes ---------------------------------------------------------------------------------------------------


def test_a_first_batch_needs_a_ticket_that_no_marker_has_voided() -> None:
    cluster = Cluster()
    batch = batch_of("a", producer=(9, 0, 0), is_transactional=True)
    assert error_of(cluster.append, batch) is Errors.INVALID_TXN_STATE
    store = cluster.store
    ticket = store.start_verification(TOPIC, 0, P, cluster.now_ms)
    assert ticket is not None
    end(cluster, P, committed=False, bumps_epoch=False)
    late = Verified(ticket, False)
    assert (
        error_of(store.append, TOPIC, 0, batch, requires_all=True, now_ms=cluster.now_ms, verified=late)
        is Errors.INVALID_TXN_STATE
    )
    cluster.append(batch, verified=True)
    assert store.start_verification(TOPIC, 0, P, cluster.now_ms) is None
    assert store.start_verification(TOPIC, 0, after(P), cluster.now_ms) is not None
    assert cluster.append(batch_of("b", producer=(9, 0, 1), is_transactional=True)).base_offset == 2


def test_verification_can_be_switched_off() -> None:
    cluster = Cluster(properties={"transaction.partition.verification.enable": "false"})
    assert cluster.append(batch_of("a", producer=(9, 0, 0), is_transactional=True)).base_offset == 0


def test_no_batch_overtakes_the_first_batch_of_its_transaction() -> None:
    cluster = Cluster()
    second = batch_of("b", producer=(9, 0, 1), is_transactional=True)
    assert error_of(cluster.append, second, verified=True) is Errors.OUT_OF_ORDER_SEQUENCE_NUMBER
    write(cluster, P, 0, "a")
    end(cluster, after(P), committed=True)
    second = batch_of("b", producer=(9, 1, 1), is_transactional=True)
    assert error_of(cluster.append, second, verified=True) is Errors.OUT_OF_ORDER_SEQUENCE_NUMBER
    write(cluster, after(P), 0, "c")


def test_writes_of_a_fenced_producer_are_rejected() -> None:
    cluster = Cluster()
    write(cluster, P, 0, "a")
    end(cluster, after(P), committed=False)
    stale = batch_of("b", producer=(9, 0, 1), is_transactional=True)
    assert error_of(cluster.append, stale, verified=True) is Errors.INVALID_PRODUCER_EPOCH


def test_a_plain_batch_of_a_producer_with_an_open_transaction_is_rejected() -> None:
    cluster = Cluster()
    write(cluster, P, 0, "a")
    outside = batch_of("b", producer=(9, 0, 1))
    assert error_of(cluster.append, outside) is Errors.INVALID_TXN_STATE


# --- markers ----------------------------------------------------------------------------------------------------------


def test_markers_of_older_epochs_and_coordinators_are_rejected() -> None:
    cluster = Cluster()
    write(cluster, Q, 0, "a")
    older = Producer(10, 2)
    assert error_of(end, cluster, older, committed=True) is Errors.INVALID_PRODUCER_EPOCH
    assert error_of(end, cluster, Q, committed=True) is Errors.INVALID_PRODUCER_EPOCH
    assert stable(cluster)[0] == 0
    end(cluster, Q, committed=True, bumps_epoch=False, coordinator_epoch=4)
    assert error_of(end, cluster, Q, committed=True, coordinator_epoch=3) is Errors.TRANSACTION_COORDINATOR_FENCED
    end(cluster, Q, committed=True, coordinator_epoch=4)
    end(cluster, after(Q), committed=True, coordinator_epoch=4)


@pytest.mark.parametrize("bumps_epoch", [True, False])
def test_a_repeated_marker_is_written_once(bumps_epoch: bool) -> None:
    cluster = Cluster()
    write(cluster, P, 0, "a")
    marker = after(P) if bumps_epoch else P
    for _ in range(3):
        end(cluster, marker, committed=True, bumps_epoch=bumps_epoch, repeated=True)
        assert stable(cluster) == (2, 2)
        cluster.crash()
    write(cluster, marker, 0 if bumps_epoch else 1, "b")
    assert stable(cluster)[0] == 2


def test_producers_are_described() -> None:
    cluster = Cluster()
    cluster.append(batch_of("x"))
    write(cluster, P, 0, "a", "b")
    (entry,) = cluster.store.active_producers(TOPIC, 0, cluster.now_ms)
    assert (entry.producer_id, entry.last_sequence, entry.current_transaction_first_offset) == (9, 1, 1)
    end(cluster, after(P), committed=True, coordinator_epoch=2)
    (entry,) = cluster.store.active_producers(TOPIC, 0, cluster.now_ms)
    assert (entry.producer_epoch, entry.last_sequence, entry.coordinator_epoch) == (1, -1, 2)
    assert entry.current_transaction_first_offset is None


@pytest.mark.parametrize("reopened", [False, True])
def test_transactions_survive_rolled_segments(reopened: bool) -> None:
    cluster = Cluster(properties={"log.segment.bytes": str(1 << 20)})
    write(cluster, P, 0, "a" * 300_000)
    write(cluster, Q, 0, "b" * 300_000)
    end(cluster, after(P), committed=False)
    if reopened:
        cluster.crash()
    assert stable(cluster) == (1, 3)
    end(cluster, after(Q), committed=False)
    assert stable(cluster) == (4, 4)
    assert len([name for name in cluster.files() if name.endswith(".log")]) == 2
    cluster.crash()
    assert aborted(cluster, 2) == [(9, 0), (10, 1)]


@pytest.mark.parametrize("ending", ["crash", "restart"])
def test_a_snapshot_before_the_start_of_the_log_is_not_used(ending: str) -> None:
    configs = {"internal.segment.bytes": "300", "retention.ms": "1000"}
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: configs}))
    cluster.tick(0)
    write(cluster, P, 0, "a" * 100)
    cluster.append(batch_of("b" * 100, producer=(8, 0, 0)))
    end(cluster, after(P), committed=True)
    cluster.append(batch_of("c", producer=(8, 0, 1)))
    assert [name for name in cluster.files() if name.endswith(".snapshot")]
    cluster.tick(3_600_000)
    getattr(cluster, ending)()
    result = read(cluster, 4, committed=True)
    assert (result.log_start_offset, result.last_stable_offset, result.high_watermark) == (4, 4, 4)
    assert cluster.append(batch_of("d", producer=(8, 0, 2))).base_offset == 4, "the producer begins anew"


def test_the_stable_offset_is_not_below_the_start_of_the_log() -> None:
    cluster = Cluster()
    write(cluster, P, 0, "a")
    for value in "bc":
        cluster.append(batch_of(value))
    cluster.store.delete_records(TOPIC, 0, 2, cluster.now_ms)
    latest = cluster.store.find_offset(
        TOPIC, 0, -1, current_leader_epoch=-1, read_committed=True, now_ms=cluster.now_ms
    )
    assert latest.offset == 2
    result = read(cluster, 2, committed=True)
    assert (result.records, result.last_stable_offset, result.log_start_offset) == (b"", 2, 2)
    cluster.append(batch_of("d"))
    write(cluster, Q, 0, "e")
    end(cluster, after(P), committed=True)
    assert values(read(cluster, 2, committed=True).records) == ["c", "d"]


def test_deleted_markers_leave_no_transaction_open() -> None:
    cluster = Cluster()
    write(cluster, P, 0, "a")
    cluster.restart()
    end(cluster, after(P), committed=True)
    cluster.append(batch_of("b"))
    cluster.store.delete_records(TOPIC, 0, 2, cluster.now_ms)
    cluster.store.note_deleted()
    cluster.store.keep_deleted()
    cluster.crash()
    assert values(read(cluster, 2, committed=True).records) == ["b"]


@pytest.mark.parametrize("reopened", [False, True])
def test_a_start_that_is_not_durable_brings_back_no_aborted_records(reopened: bool) -> None:
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: {"internal.segment.bytes": "500"}}))
    write(cluster, P, 0, "a" * 100)
    end(cluster, after(P), committed=False)
    cluster.append(batch_of("b"))
    cluster.store.delete_records(TOPIC, 0, 3, cluster.now_ms)
    if reopened:
        cluster.store.partition(TOPIC, 0).fail(AssertionError("broken"))
    for _ in range(2):
        cluster.append(batch_of("c" * 100))
    assert [name for name in cluster.files() if name.endswith(".snapshot")]
    cluster.crash()
    assert (stable(cluster), aborted(cluster)) == ((5, 5), [(9, 0)])
