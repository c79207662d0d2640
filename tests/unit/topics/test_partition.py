# SPDX-License-Identifier: Apache-2.0
"""Appends and reads of one partition, and its state after a restart, a crash or a disk error."""

from __future__ import annotations

import errno

import pytest

from kcoord.storage.memory_file_system import Operation
from kcoord.topics.fetch_manager import ReadResult
from kcoord.topics.fetch_session import FetchPartition
from kcoord.topics.partition import AppendResult
from kcoord_protocol.compression import Compression
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import decode_records, encode_control_batch, iter_headers
from tests.unit.topics.helpers import NOW_MS, TOPIC, Cluster, batch_of, image_of

EVERYTHING = 1 << 20


def read(
    cluster: Cluster,
    offset: int,
    *,
    max_bytes: int = EVERYTHING,
    whole: bool = True,
    committed: bool = False,
    leader_epoch: int = -1,
    last_epoch: int = -1,
) -> ReadResult:
    request = FetchPartition(TOPIC, b"", 0, offset, max_bytes, leader_epoch, last_epoch)
    return cluster.store.read(
        request, max_bytes=max_bytes, whole_first_batch=whole, read_committed=committed, now_ms=cluster.now_ms
    )


def values(data: bytes) -> list[str]:
    return [
        (record.value or b"").decode()
        for position, _ in iter_headers(data)
        for record in decode_records(data, position)
    ]


def error_of(call: object, *arguments: object, **named: object) -> Errors:
    with pytest.raises(KafkaError) as caught:
        call(*arguments, **named)  # type: ignore[operator]
    return caught.value.error


def test_append_and_read() -> None:
    cluster = Cluster()
    assert cluster.append(batch_of("a", "b"))[:3] == (0, -1, 0)
    assert cluster.append(batch_of("c", compression=Compression.LZ4)).base_offset == 2
    result = read(cluster, 0)
    assert values(result.records) == ["a", "b", "c"]
    assert (result.high_watermark, result.last_stable_offset, result.log_start_offset) == (3, 3, 0)
    assert values(read(cluster, 2).records) == ["c"]
    assert values(read(cluster, 1).records) == ["a", "b", "c"]
    assert read(cluster, 3).records == b""


def test_limits_of_a_read() -> None:
    cluster = Cluster()
    size = cluster.append(batch_of("a" * 100)).added_bytes
    cluster.append(batch_of("b" * 100))
    assert values(read(cluster, 0, max_bytes=1).records) == ["a" * 100]
    assert read(cluster, 0, max_bytes=size - 1, whole=False).records == b""
    assert values(read(cluster, 0, max_bytes=size, whole=False).records) == ["a" * 100]
    assert read(cluster, 0, max_bytes=0, whole=False).records == b""


def test_offsets_out_of_range() -> None:
    cluster = Cluster()
    cluster.append(batch_of("a", "b", "c"))
    cluster.store.delete_records(TOPIC, 0, 2, NOW_MS)
    assert error_of(read, cluster, 1) is Errors.OFFSET_OUT_OF_RANGE
    assert error_of(read, cluster, 4) is Errors.OFFSET_OUT_OF_RANGE
    assert read(cluster, 2).log_start_offset == 2


def test_leader_epochs_fence() -> None:
    cluster = Cluster(image_of({TOPIC: 1}, leader_epoch=5))
    cluster.append(batch_of("a"))
    assert read(cluster, 0, leader_epoch=5).high_watermark == 1
    assert error_of(read, cluster, 0, leader_epoch=4) is Errors.FENCED_LEADER_EPOCH
    assert error_of(read, cluster, 0, leader_epoch=6) is Errors.UNKNOWN_LEADER_EPOCH
    cluster.update(image_of({TOPIC: 1}, leader=2))
    assert error_of(read, cluster, 0) is Errors.NOT_LEADER_OR_FOLLOWER
    assert error_of(cluster.append, batch_of("a")) is Errors.NOT_LEADER_OR_FOLLOWER


def test_diverging_epochs() -> None:
    cluster = Cluster(image_of({TOPIC: 1}, leader_epoch=1))
    cluster.append(batch_of("a", "b"))
    cluster.update(image_of({TOPIC: 1}, leader_epoch=4))
    cluster.append(batch_of("c"))
    assert read(cluster, 2, last_epoch=1).diverging_epoch is None
    assert read(cluster, 3, last_epoch=1).diverging_epoch == (1, 2)
    assert read(cluster, 3, last_epoch=2).diverging_epoch == (1, 2)
    assert read(cluster, 3, last_epoch=4).diverging_epoch is None
    assert error_of(read, cluster, 3, last_epoch=9) is Errors.OFFSET_OUT_OF_RANGE
    cluster.restart()
    lookup = {
        epoch: cluster.store.end_offset_for_epoch(TOPIC, 0, epoch, current_leader_epoch=-1, now_ms=NOW_MS)
        for epoch in (0, 1, 3, 4, 5)
    }
    assert lookup == {0: (0, 0), 1: (1, 2), 3: (1, 2), 4: (4, 3), 5: (-1, -1)}


def test_leader_epochs_are_rebuilt_from_the_log_if_their_file_is_missing() -> None:
    cluster = Cluster(image_of({TOPIC: 1}, leader_epoch=1))
    cluster.append(batch_of("a", "b"))
    cluster.update(image_of({TOPIC: 1}, leader_epoch=4))
    cluster.append(batch_of("c"))
    cluster.stop()
    cluster.fs.remove(f"data/{TOPIC}-0/leader-epoch-checkpoint")
    cluster.start()
    epoch_and_end = cluster.store.end_offset_for_epoch(TOPIC, 0, 1, current_leader_epoch=-1, now_ms=NOW_MS)
    assert epoch_and_end == (1, 2)


def test_a_duplicate_returns_the_offset_of_the_first_append() -> None:
    cluster = Cluster()
    first = cluster.append(batch_of("a", "b", producer=(9, 0, 0)))
    cluster.append(batch_of("c", producer=(9, 0, 2)))
    again = cluster.append(batch_of("a", "b", producer=(9, 0, 0)))
    assert again == AppendResult(first.base_offset, NOW_MS + 1, 0, 0)
    assert read(cluster, 0).high_watermark == 3
    assert error_of(cluster.append, batch_of("x", producer=(9, 0, 4))) is Errors.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert error_of(cluster.append, batch_of("x", producer=(9, 0, 1))) is Errors.OUT_OF_ORDER_SEQUENCE_NUMBER


@pytest.mark.parametrize("clean", [True, False])
def test_producer_state_survives(clean: bool) -> None:
    cluster = Cluster()
    cluster.append(batch_of("a", producer=(9, 1, 0)))
    cluster.append(batch_of("b", producer=(9, 1, 1)))
    if clean:
        cluster.restart()
        assert "00000000000000000002.snapshot" in cluster.files()
    else:
        cluster.crash()
    assert cluster.append(batch_of("b", producer=(9, 1, 1))).base_offset == 1
    assert cluster.append(batch_of("c", producer=(9, 1, 2))).base_offset == 2
    assert error_of(cluster.append, batch_of("x", producer=(9, 0, 0))) is Errors.INVALID_PRODUCER_EPOCH


def test_after_a_crash_the_batches_after_the_snapshot_are_replayed() -> None:
    cluster = Cluster()
    cluster.append(batch_of("a", producer=(9, 0, 0)))
    cluster.restart()
    cluster.append(batch_of("b", producer=(9, 0, 1)))
    cluster.append(batch_of("z", producer=(10, 0, 0)))
    cluster.crash()
    assert cluster.append(batch_of("c", producer=(9, 0, 2))).base_offset == 3
    assert cluster.append(batch_of("z", producer=(10, 0, 0))).base_offset == 2


def test_a_roll_takes_a_snapshot() -> None:
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: {"internal.segment.bytes": "300"}}))
    for number in range(4):
        cluster.append(batch_of("x" * 100, producer=(9, 0, number)))
    assert "00000000000000000001.snapshot" in cluster.files()
    cluster.crash()
    assert cluster.append(batch_of("x" * 100, producer=(9, 0, 3))).base_offset == 3
    assert cluster.append(batch_of("y", producer=(9, 0, 4))).base_offset == 4


def test_transactions_need_a_coordinator() -> None:
    cluster = Cluster()
    batch = batch_of("a", producer=(9, 0, 0), is_transactional=True)
    assert error_of(cluster.append, batch) is Errors.INVALID_TXN_STATE
    assert read(cluster, 0).high_watermark == 0


def test_open_and_aborted_transactions_in_the_log() -> None:
    cluster = Cluster()
    cluster.append(batch_of("a", producer=(9, 0, 0), is_transactional=True), verified=True)
    cluster.append(batch_of("b"))
    assert values(read(cluster, 0).records) == ["a", "b"]
    result = read(cluster, 0, committed=True)
    assert (result.records, result.last_stable_offset, result.high_watermark) == (b"", 0, 2)
    opened = cluster.store.partition(TOPIC, 0).open(NOW_MS)
    marker = encode_control_batch(
        ControlRecordType.ABORT, end_txn_marker(1), timestamp_ms=NOW_MS, producer_id=9, producer_epoch=0, base_offset=2
    )
    opened.log.append(marker, now_ms=NOW_MS)
    for restart in (cluster.crash, cluster.restart, cluster.restart):
        restart()
        result = read(cluster, 0, committed=True)
        assert (result.last_stable_offset, result.high_watermark) == (3, 3)
        assert [
            (transaction.producer_id, transaction.first_offset) for transaction in result.aborted_transactions or []
        ] == [(9, 0)]
        assert read(cluster, 1, committed=False).aborted_transactions is None


def test_delete_records() -> None:
    cluster = Cluster()
    cluster.append(batch_of("a", "b", "c"))
    delete = cluster.store.delete_records
    assert error_of(delete, TOPIC, 0, 4, NOW_MS) is Errors.OFFSET_OUT_OF_RANGE
    assert error_of(delete, TOPIC, 0, -2, NOW_MS) is Errors.OFFSET_OUT_OF_RANGE
    assert delete(TOPIC, 0, 2, NOW_MS) == 2
    assert delete(TOPIC, 0, 1, NOW_MS) == 2
    cluster.restart()
    assert read(cluster, 2).log_start_offset == 2
    assert cluster.store.delete_records(TOPIC, 0, -1, NOW_MS) == 3
    assert cluster.append(batch_of("d")).base_offset == 3


@pytest.mark.parametrize(("policy", "allowed"), [("compact", False), ("compact,delete", True), ("delete", True)])
def test_records_of_compacted_topics_cannot_be_deleted(policy: str, allowed: bool) -> None:
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: {"cleanup.policy": policy}}))
    cluster.append(batch_of("a"))
    if allowed:
        assert cluster.store.delete_records(TOPIC, 0, 1, NOW_MS) == 1
    else:
        assert error_of(cluster.store.delete_records, TOPIC, 0, 1, NOW_MS) is Errors.POLICY_VIOLATION


@pytest.mark.parametrize(("replicas", "accepted"), [((1,), True), ((1, 2), False), ((1, 2, 3), False)])
def test_min_insync_replicas(replicas: tuple[int, ...], accepted: bool) -> None:
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: {"min.insync.replicas": "2"}}, replicas=replicas))
    assert cluster.append(batch_of("a"), requires_all=False).base_offset == 0
    if accepted:
        assert cluster.append(batch_of("a")).base_offset == 1
    else:
        assert error_of(cluster.append, batch_of("a")) is Errors.NOT_ENOUGH_REPLICAS


def test_appends_fail_while_the_disk_is_full_and_succeed_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.append(batch_of("a"))

    def no_space(operation: Operation) -> OSError | None:
        return OSError(errno.ENOSPC, "no space") if operation.kind == "write" else None

    cluster.fs.fault = no_space
    for _ in range(3):
        assert error_of(cluster.append, batch_of("b", producer=(9, 0, 0))) is Errors.KAFKA_STORAGE_ERROR
    cluster.fs.fault = lambda operation: None
    assert cluster.append(batch_of("b", producer=(9, 0, 0))).base_offset == 1
    assert values(read(cluster, 0).records) == ["a", "b"]
    cluster.fs.fault = no_space
    assert error_of(cluster.append, batch_of("c")) is Errors.KAFKA_STORAGE_ERROR
    assert caplog.text.count("Writing to orders-0 failed") == 2, "logged once for each time that the disk was full"


def test_a_failed_sync_reopens_the_log() -> None:
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: {"flush.messages": "1"}}))
    cluster.append(batch_of("a", producer=(9, 0, 0)))

    def no_sync(operation: Operation) -> OSError | None:
        return OSError(errno.EIO, "sync failed") if operation.kind == "datasync" else None

    cluster.fs.fault = no_sync
    assert error_of(cluster.append, batch_of("b", producer=(9, 0, 1))) is Errors.KAFKA_STORAGE_ERROR
    cluster.fs.fault = lambda operation: None
    result = cluster.append(batch_of("b", producer=(9, 0, 1)))
    assert result.base_offset == 1
    assert values(read(cluster, 0).records) == ["a", "b"]


def test_a_log_that_is_corrupt_in_the_middle_fails_requests_with_the_name_of_the_file() -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.append(batch_of("abc"))
    cluster.fs.crash(lambda kind, path, pending: pending)
    cluster.fs.damage(f"data/{TOPIC}-0/00000000000000000000.log", lambda data: data[:70] + b"\xff" + data[71:])
    cluster.start()
    with pytest.raises(KafkaError) as caught:
        read(cluster, 0)
    assert caught.value.error is Errors.KAFKA_STORAGE_ERROR
    assert "00000000000000000000.log" in str(caught.value)
    assert error_of(cluster.append, batch_of("d")) is Errors.KAFKA_STORAGE_ERROR


def test_flush_by_messages() -> None:
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: {"flush.messages": "3"}}))
    cluster.append(batch_of("a", "b"))
    opened = cluster.store.partition(TOPIC, 0).open(NOW_MS)
    assert opened.log.flushed_offset == 0
    cluster.append(batch_of("c"))
    assert opened.log.flushed_offset == 3
