# SPDX-License-Identifier: Apache-2.0
"""Breaks each named invariant of partitions (docs/contributing/invariants.md) and sees its assertion."""

from __future__ import annotations

import pytest

from kcoord.runtime.result import Producer
from kcoord.storage.log import Log
from kcoord.topics.leader_epochs import EpochEntry, LeaderEpochs
from kcoord.topics.producer_state import ProducerState
from kcoord.topics.validation import stamp_batch
from kcoord_protocol.batch_header import BatchHeader
from kcoord_protocol.errors import Errors, KafkaError
from tests.unit.topics.helpers import Cluster, batch_of
from tests.unit.topics.test_partition import read, values
from tests.unit.topics.test_transactions import after, end, write

PRODUCER = Producer(9, 0)


def assert_write_fails(cluster: Cluster, name: str) -> None:
    """An append breaks an invariant; the partition fails it and can be used again once the cause is gone."""
    with pytest.raises(KafkaError) as raised:
        cluster.append(batch_of("x", producer=(10, 0, 0), is_transactional=True), verified=True)
    assert raised.value.error is Errors.KAFKA_STORAGE_ERROR
    assert isinstance(raised.value.__cause__, AssertionError)
    assert str(raised.value.__cause__).startswith(f"{name}: ")


def test_a_batch_begins_at_the_end_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    cluster.append(batch_of("a"))
    with monkeypatch.context() as patch:
        patch.setattr(
            "kcoord.topics.partition.stamp_batch",
            lambda *arguments, base_offset, **more: stamp_batch(*arguments, base_offset=base_offset + 1, **more),
        )
        assert_write_fails(cluster, "P-1")
    assert cluster.append(batch_of("b")).base_offset == 1
    assert values(read(cluster, 0).records) == ["a", "b"]


def test_the_producer_state_has_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    with monkeypatch.context() as patch:
        patch.setattr(ProducerState, "replay_data", lambda *_: None)
        assert_write_fails(cluster, "P-2")
    # The state is rebuilt from the log, which has the batch: its transaction is open.
    assert read(cluster, 0, committed=True).last_stable_offset == 0
    assert read(cluster, 0).high_watermark == 1


def test_the_last_stable_offset_does_not_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    cluster.append(batch_of("a"))
    replay = ProducerState.replay_data

    def replay_earlier(state: ProducerState, header: BatchHeader) -> None:
        replay(state, header)
        state.open_transactions[header.producer_id] = 0

    with monkeypatch.context() as patch:
        patch.setattr(ProducerState, "replay_data", replay_earlier)
        assert_write_fails(cluster, "P-3")
    assert read(cluster, 0, committed=True).last_stable_offset == 1


def test_a_marker_ends_the_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    write(cluster, PRODUCER, 0, "a")
    replay = ProducerState.replay_marker

    def stay_open(state: ProducerState, header: BatchHeader, coordinator_epoch: int, *, committed: bool) -> None:
        replay(state, header, coordinator_epoch, committed=committed)
        state.open_transactions[header.producer_id] = 0

    with monkeypatch.context() as patch:
        patch.setattr(ProducerState, "replay_marker", stay_open)
        with pytest.raises(KafkaError) as raised:
            end(cluster, after(PRODUCER), committed=True)
    assert str(raised.value.__cause__).startswith("P-4: ")
    assert read(cluster, 0, committed=True).last_stable_offset == 2


def test_read_committed_ends_at_the_last_stable_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    cluster.append(batch_of("a"))
    write(cluster, PRODUCER, 0, "b")
    find = Log.find
    monkeypatch.setattr(
        Log, "find", lambda log, *arguments, max_offset, **more: find(log, *arguments, max_offset=2, **more)
    )
    with pytest.raises(AssertionError, match="P-5: "):
        read(cluster, 0, committed=True)


def test_leader_epochs_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = LeaderEpochs([EpochEntry(3, 5)])
    latest = iter([-1, 3])
    monkeypatch.setattr(LeaderEpochs, "latest_epoch", property(lambda _: next(latest, 3)))
    with pytest.raises(AssertionError, match="P-6: "):
        epochs.assign(2, 9)
