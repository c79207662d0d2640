# SPDX-License-Identifier: Apache-2.0
"""Fetch requests through FetchManager: limits, long polls, sessions (KIP-227), topic ids, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kcoord.runtime.shard_log import Append
from kcoord.topics import fetch_session
from kcoord.topics.fetch_manager import MAX_POLL_BYTES, CompletedFetch, ReadResult
from kcoord.topics.fetch_session import EVICTION_AGE_MS, FetchPartition, next_epoch
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import FetchRequest, FetchResponse
from kcoord_protocol.record_batch import iter_headers
from tests.unit.topics.helpers import NODE_ID, TOPIC, Cluster, batch_of, image_of, topic_id_of

NEWEST = 18
SESSION = 4711


class Client:
    """Sends fetches and remembers its session."""

    def __init__(self, cluster: Cluster, version: int = NEWEST) -> None:
        self.cluster = cluster
        self.version = version
        self.tokens = 0

    def request(
        self,
        partitions: Iterable[tuple[str, int, int]],
        *,
        session: tuple[int, int] = (0, -1),
        wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 1 << 20,
        partition_bytes: int = 1 << 20,
        forget: Iterable[tuple[str, int]] = (),
        isolation: int = 0,
        leader_epoch: int = -1,
        last_epoch: int = -1,
        replica_id: int = -1,
    ) -> FetchRequest:
        topics = [
            FetchRequest.FetchTopic(
                topic=name,
                topic_id=topic_id_of(name),
                partitions=[
                    FetchRequest.FetchPartition(
                        partition=index,
                        fetch_offset=offset,
                        partition_max_bytes=partition_bytes,
                        current_leader_epoch=leader_epoch,
                        last_fetched_epoch=last_epoch,
                    )
                ],
            )
            for name, index, offset in partitions
        ]
        forgotten = [
            FetchRequest.ForgottenTopic(topic=name, topic_id=topic_id_of(name), partitions=[index])
            for name, index in forget
        ]
        request = FetchRequest(
            replica_id=replica_id if self.version < 15 else -1,
            replica_state=FetchRequest.ReplicaState(replica_id=replica_id if self.version >= 15 else -1),
            max_wait_ms=wait_ms,
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            isolation_level=isolation,
            session_id=session[0],
            session_epoch=session[1],
            topics=topics,
            forgotten_topics_data=forgotten,
        )
        return FetchRequest.decode(request.encode(self.version), self.version)

    def send(self, request: FetchRequest, session_id: int = SESSION) -> FetchResponse | None:
        self.tokens += 1
        response = self.cluster.store.fetches.fetch(
            request, self.version, self.cluster.now_ms, token=self.tokens, candidate_session_id=session_id
        )
        if response is not None:
            FetchResponse.decode(response.encode(self.version), self.version)
        return response

    def fetch(self, *partitions: tuple[str, int, int], **named: object) -> FetchResponse:
        response = self.send(self.request(partitions, **named))  # type: ignore[arg-type]
        assert response is not None
        return response

    def poll(self) -> list[CompletedFetch]:
        return self.cluster.store.fetches.poll(self.cluster.now_ms)


def data_of(response: FetchResponse) -> list[FetchResponse.PartitionData]:
    return [partition for topic in response.responses for partition in topic.partitions]


def sizes(response: FetchResponse) -> list[int]:
    return [len(list(iter_headers(data.records or b""))) for data in data_of(response)]


def errors(response: FetchResponse) -> list[int]:
    return [data.error_code for data in data_of(response)]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(image_of({TOPIC: 4}))


# --- plain fetches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(4, 19))
def test_every_version(cluster: Cluster, version: int) -> None:
    cluster.append(batch_of("a", "b"))
    response = Client(cluster, version).fetch((TOPIC, 0, 0), (TOPIC, 1, 0))
    assert sizes(response) == [1, 0]
    first = data_of(response)[0]
    assert (first.high_watermark, first.last_stable_offset, first.log_start_offset) == (2, 2, 0)
    assert first.aborted_transactions is None
    assert response.responses[0].topic == TOPIC
    assert len(response.responses) == 1


def test_read_committed_returns_a_list_of_aborted_transactions(cluster: Cluster) -> None:
    cluster.append(batch_of("a"))
    response = Client(cluster).fetch((TOPIC, 0, 0), isolation=1)
    assert data_of(response)[0].aborted_transactions == []


def test_the_byte_limit_spans_partitions_and_spares_the_first_batch(cluster: Cluster) -> None:
    size = 0
    for index in range(3):
        size = cluster.append(batch_of("x" * 100), partition=index).added_bytes
        cluster.append(batch_of("x" * 100), partition=index)
    everything = [(TOPIC, index, 0) for index in range(3)]
    client = Client(cluster)
    assert sizes(client.fetch(*everything, max_bytes=1)) == [1, 0, 0]
    assert sizes(client.fetch(*everything, max_bytes=3 * size)) == [2, 1, 0]
    assert sizes(client.fetch(*everything, partition_bytes=size)) == [1, 1, 1]
    assert sizes(client.fetch(*everything, partition_bytes=size - 1)) == [1, 0, 0]
    assert sizes(client.fetch((TOPIC, 3, 0), *everything, max_bytes=1)) == [0, 1, 0, 0]


def test_errors_of_partitions(cluster: Cluster) -> None:
    cluster.append(batch_of("a"))
    response = Client(cluster, 12).fetch((TOPIC, 9, 0), ("absent", 0, 0), (TOPIC, 0, 5), (TOPIC, 0, 0))
    partitions = {
        (topic.topic, data.partition_index): data for topic in response.responses for data in topic.partitions
    }
    assert partitions[TOPIC, 9].error_code == Errors.UNKNOWN_TOPIC_OR_PARTITION
    assert partitions["absent", 0].error_code == Errors.UNKNOWN_TOPIC_OR_PARTITION
    assert partitions["absent", 0].high_watermark == -1
    out_of_range = Client(cluster).fetch((TOPIC, 0, 5))
    assert errors(out_of_range) == [Errors.OFFSET_OUT_OF_RANGE]
    assert data_of(out_of_range)[0].log_start_offset == -1


@pytest.mark.parametrize("isolation", [0, 1])
@pytest.mark.parametrize("version", range(4, 19))
def test_the_fields_of_a_partition_with_an_error(cluster: Cluster, version: int, isolation: int) -> None:
    """Observed in Kafka 4.3.1 and 4.4.0: only a partition that exists has no list of aborted transactions."""
    cluster.append(batch_of("a"))
    client = Client(cluster, version)
    absent = Errors.UNKNOWN_TOPIC_OR_PARTITION if version < 13 else Errors.UNKNOWN_TOPIC_ID
    for place, error, aborted in (
        ((TOPIC, 9, 0), Errors.UNKNOWN_TOPIC_OR_PARTITION, []),
        ((TOPIC, -1, 0), Errors.UNKNOWN_TOPIC_OR_PARTITION, []),
        (("absent", 0, 0), absent, []),
        ((TOPIC, 0, 5), Errors.OFFSET_OUT_OF_RANGE, None),
    ):
        response = client.fetch(place, isolation=isolation)
        expected = FetchResponse.PartitionData(
            partition_index=place[1],
            error_code=error,
            high_watermark=-1,
            last_stable_offset=-1,
            log_start_offset=-1,
            aborted_transactions=aborted,
            preferred_read_replica=-1,
            records=b"",
        )
        assert data_of(response) == [expected]


@pytest.mark.parametrize("isolation", [0, 1])
@pytest.mark.parametrize("version", range(12, 19))
def test_a_diverging_epoch_comes_without_aborted_transactions(cluster: Cluster, version: int, isolation: int) -> None:
    """Observed in Kafka 4.3.1 and 4.4.0."""
    cluster.append(batch_of("a"))
    (data,) = data_of(Client(cluster, version).fetch((TOPIC, 0, 100), isolation=isolation, last_epoch=0))
    assert data == FetchResponse.PartitionData(
        partition_index=0,
        high_watermark=1,
        last_stable_offset=1,
        log_start_offset=0,
        diverging_epoch=FetchResponse.EpochEndOffset(epoch=0, end_offset=1),
        aborted_transactions=None,
        records=b"",
    )


@pytest.mark.parametrize("epoch", [-1, -2, -(2**31)])
def test_a_negative_epoch_counts_as_absent(epoch: int) -> None:
    """Observed in Kafka 4.3.1 and 4.4.0, which reject -2 in ListOffsets and OffsetForLeaderEpoch."""
    cluster = Cluster(image_of({TOPIC: 1}, leader_epoch=3))
    cluster.append(batch_of("a"))
    response = Client(cluster).fetch((TOPIC, 0, 0), leader_epoch=epoch, last_epoch=epoch)
    assert (errors(response), sizes(response)) == ([Errors.NONE], [1])
    beyond = Client(cluster).fetch((TOPIC, 0, 9), last_epoch=epoch)
    assert errors(beyond) == [Errors.OFFSET_OUT_OF_RANGE]


def test_unknown_topic_ids(cluster: Cluster) -> None:
    assert errors(Client(cluster).fetch(("absent", 0, 0))) == [Errors.UNKNOWN_TOPIC_ID]


def test_leader_epoch_errors_name_the_leader_from_version_16() -> None:
    cluster = Cluster(image_of({TOPIC: 1}, leader_epoch=3))
    for version, leader in ((15, -1), (16, 1)):
        response = Client(cluster, version).fetch((TOPIC, 0, 0), leader_epoch=2)
        assert errors(response) == [Errors.FENCED_LEADER_EPOCH]
        assert data_of(response)[0].current_leader.leader_id == leader


@pytest.mark.parametrize("version", [12, 18])
@pytest.mark.parametrize(
    ("epoch", "error"),
    [
        (-2, Errors.NOT_LEADER_OR_FOLLOWER),
        (-1, Errors.NOT_LEADER_OR_FOLLOWER),
        (2, Errors.FENCED_LEADER_EPOCH),
        (3, Errors.UNKNOWN_LEADER_EPOCH),
        (4, Errors.UNKNOWN_LEADER_EPOCH),
    ],
)
def test_fetches_of_replicas_are_rejected(version: int, epoch: int, error: Errors) -> None:
    """Observed in Kafka 4.3.1, which rejects a broker that is not among the replicas."""
    cluster = Cluster(image_of({TOPIC: 1}, leader_epoch=3))
    response = Client(cluster, version).fetch((TOPIC, 0, 0), replica_id=2, leader_epoch=epoch)
    assert errors(response) == [error]


@pytest.mark.parametrize("version", [12, 18])
@pytest.mark.parametrize("epoch", [-1, 2, 3, 4])
def test_fetches_of_replicas_are_sent_to_the_leader(version: int, epoch: int) -> None:
    """A Kafka 4.4.0 that does not have the partition does not compare the epochs, either."""
    cluster = Cluster(image_of({TOPIC: 1}, leader=NODE_ID + 1, leader_epoch=3))
    response = Client(cluster, version).fetch((TOPIC, 0, 0), replica_id=2, leader_epoch=epoch)
    assert errors(response) == [Errors.NOT_LEADER_OR_FOLLOWER]
    hint = data_of(response)[0].current_leader
    assert (hint.leader_id, hint.leader_epoch) == ((NODE_ID + 1, 3) if version >= 16 else (-1, -1))


# --- long polls -------------------------------------------------------------------------------------------------------


def test_a_fetch_waits_for_data(cluster: Cluster) -> None:
    client = Client(cluster)
    woken: list[int] = []
    cluster.store.fetches.wake = lambda: woken.append(1)
    assert client.send(client.request([(TOPIC, 0, 0), (TOPIC, 1, 0)], wait_ms=500)) is None
    assert cluster.store.fetches.next_deadline_ms() == cluster.now_ms + 500
    cluster.append(batch_of("x"), partition=2)
    assert (woken, client.poll()) == ([], [])
    cluster.append(batch_of("x"), partition=1)
    assert woken == [1]
    completion = client.poll()[0]
    assert (completion.token, sizes(completion.response)) == (1, [0, 1])
    assert cluster.store.fetches.next_deadline_ms() is None
    assert client.poll() == []


def test_appends_to_a_shard_are_observed_while_a_fetch_waits_there(cluster: Cluster) -> None:
    client = Client(cluster)
    observers: list[Callable[[Append], None]] = []
    fetches = cluster.store.fetches
    fetches.follow_shards(TOPIC, observers)
    for token in (1, 2):
        assert client.send(client.request([(TOPIC, 0, 0), (TOPIC, 1, 0)], wait_ms=500)) is None
        assert (fetches.parked_count, len(observers)) == (token, 1)
    cluster.append(batch_of("x"))
    client.poll()
    assert (fetches.parked_count, observers) == (0, [])
    # The TopicStore does not report the appends of a shard: the shard itself does.
    assert client.send(client.request([(TOPIC, 1, 0)], wait_ms=500)) is None
    observers[0](Append(0, 0, 1, b"x"))
    assert client.poll() == []
    woken: list[int] = []
    fetches.wake = lambda: woken.append(1)
    observers[0](Append(1, 0, 1, b"x"))
    assert woken == [1]
    fetches.cancel(3)
    assert observers == []


def test_a_fetch_waits_for_enough_data(cluster: Cluster) -> None:
    client = Client(cluster)
    size = cluster.append(batch_of("x" * 50)).added_bytes
    assert client.send(client.request([(TOPIC, 0, 0), (TOPIC, 1, 0)], wait_ms=500, min_bytes=3 * size)) is None
    cluster.append(batch_of("x" * 50), partition=1)
    assert client.poll() == []
    cluster.append(batch_of("x" * 50))
    assert sizes(client.poll()[0].response) == [2, 1]


def test_many_appends_wake_a_fetch_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(cluster)
    places = [(TOPIC, index, 0) for index in range(4)]
    assert client.send(client.request(places, wait_ms=500)) is None
    read = cluster.store.read
    asked: list[int] = []

    def count(partition: FetchPartition, **named: Any) -> ReadResult:
        asked.append(partition.partition)
        return read(partition, **named)

    monkeypatch.setattr(cluster.store, "read", count)
    for index in (0, 1, 2, 3, 1, 3):
        cluster.append(batch_of("x"), partition=index)
    assert asked == []
    (completion,) = client.poll()
    assert (asked, sizes(completion.response)) == ([0, 1, 2, 3], [1, 2, 1, 2])


@pytest.mark.parametrize("elapsed_ms", [0, 500])
def test_a_poll_completes_a_few_large_responses(cluster: Cluster, elapsed_ms: int) -> None:
    """All responses of a poll are in memory, and a few bytes of requests may wait for gigabytes."""
    client = Client(cluster)
    size = cluster.append(batch_of("x" * 450_000)).added_bytes
    requests = 30
    for _ in range(requests):
        request = client.request([(TOPIC, 0, 0), (TOPIC, 1, 0)], wait_ms=500, min_bytes=size + 1, max_bytes=2 * size)
        assert client.send(request) is None
    woken: list[int] = []
    cluster.store.fetches.wake = lambda: woken.append(1)
    if not elapsed_ms:
        cluster.append(batch_of("x"), partition=1)
    cluster.now_ms += elapsed_ms
    tokens: list[object] = []
    while len(tokens) < requests:
        woken.clear()
        completions = client.poll()
        assert 0 < len(completions) * size < MAX_POLL_BYTES + size
        tokens += [completion.token for completion in completions]
        deadline_ms = cluster.store.fetches.next_deadline_ms()
        assert woken or deadline_ms == (cluster.now_ms if len(tokens) < requests else None)
    assert tokens == list(range(1, requests + 1))


@pytest.mark.parametrize("elapsed_ms", [0, 500])
def test_an_unexpected_error_fails_only_its_own_request(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, elapsed_ms: int
) -> None:
    """Each request that a poll touches gets a response: later polls do not know it any more."""
    client = Client(cluster)
    for index in (0, 1, 2):
        assert client.send(client.request([(TOPIC, index, 0)], wait_ms=500)) is None
    read = cluster.store.read

    def fail(partition: FetchPartition, **named: Any) -> ReadResult:
        if partition.partition == 1:
            raise ValueError("planted")
        return read(partition, **named)

    monkeypatch.setattr(cluster.store, "read", fail)
    if not elapsed_ms:
        for index in (0, 1, 2):
            cluster.append(batch_of("x"), partition=index)
    cluster.now_ms += elapsed_ms
    completions = client.poll()
    assert [(token, response.error_code) for token, response in completions] == [
        (1, Errors.NONE),
        (2, Errors.UNKNOWN_SERVER_ERROR),
        (3, Errors.NONE),
    ]
    assert (cluster.store.fetches.parked_count, cluster.store.fetches.next_deadline_ms()) == (0, None)


def test_a_fetch_ends_after_max_wait_ms(cluster: Cluster) -> None:
    client = Client(cluster)
    assert client.send(client.request([(TOPIC, 0, 0)], wait_ms=500)) is None
    assert client.send(client.request([(TOPIC, 1, 0)], wait_ms=300)) is None
    cluster.now_ms += 299
    assert client.poll() == []
    cluster.now_ms += 1
    assert [completion.token for completion in client.poll()] == [2]
    cluster.now_ms += 200
    completions = client.poll()
    assert [(completion.token, sizes(completion.response)) for completion in completions] == [(1, [0])]


def test_the_deadlines_of_ended_requests_are_dropped(cluster: Cluster) -> None:
    client = Client(cluster)
    assert client.send(client.request([(TOPIC, 1, 0)], wait_ms=100)) is None
    for _ in range(500):
        assert client.send(client.request([(TOPIC, 0, 0)], wait_ms=10**9)) is None
        cluster.store.fetches.cancel(client.tokens)
    assert len(cluster.store.fetches._deadlines) < 100
    assert cluster.store.fetches.next_deadline_ms() == cluster.now_ms + 100


def test_a_fetch_does_not_wait_without_reason(cluster: Cluster) -> None:
    client = Client(cluster)
    cluster.append(batch_of("x"))
    assert sizes(client.fetch((TOPIC, 0, 0), wait_ms=500)) == [1]
    assert sizes(client.fetch((TOPIC, 0, 1), wait_ms=500, min_bytes=0)) == [0]
    assert sizes(client.fetch((TOPIC, 0, 1), wait_ms=0)) == [0]
    assert errors(client.fetch((TOPIC, 0, 1), (TOPIC, 1, 7), wait_ms=500)) == [0, Errors.OFFSET_OUT_OF_RANGE]
    assert client.fetch(wait_ms=500).responses == []


def test_a_missing_partition_does_not_end_the_wait(cluster: Cluster) -> None:
    client = Client(cluster)
    assert client.send(client.request([("absent", 0, 0), (TOPIC, 0, 0)], wait_ms=500)) is None
    cluster.append(batch_of("x"))
    assert errors(client.poll()[0].response) == [0, Errors.UNKNOWN_TOPIC_ID]


def test_deleting_the_topic_ends_the_wait(cluster: Cluster) -> None:
    client = Client(cluster)
    assert client.send(client.request([(TOPIC, 0, 0)], wait_ms=500)) is None
    cluster.update(image_of({}))
    assert errors(client.poll()[0].response) == [Errors.UNKNOWN_TOPIC_ID]


def test_read_committed_waits_for_the_end_of_a_transaction(cluster: Cluster) -> None:
    client = Client(cluster)
    assert client.send(client.request([(TOPIC, 0, 0)], wait_ms=500, isolation=1)) is None
    cluster.append(batch_of("x", producer=(1, 0, 0), is_transactional=True), verified=True)
    assert client.poll() == []
    assert cluster.store.fetches.parked_count == 1


def test_a_canceled_fetch_gets_no_response(cluster: Cluster) -> None:
    client = Client(cluster)
    assert client.send(client.request([(TOPIC, 0, 0)], wait_ms=500)) is None
    cluster.store.fetches.cancel(1)
    cluster.append(batch_of("x"))
    cluster.now_ms += 1000
    assert (client.poll(), cluster.store.fetches.next_deadline_ms()) == ([], None)


# --- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [7, 12, 13, 18])
def test_an_incremental_session(cluster: Cluster, version: int) -> None:
    client = Client(cluster, version)
    cluster.append(batch_of("a"))
    full = client.fetch((TOPIC, 0, 0), (TOPIC, 1, 0), (TOPIC, 2, 0), session=(0, 0))
    assert (full.session_id, len(data_of(full))) == (SESSION, 3)
    # Partition 0 has data again; the other partitions have not changed since the last response.
    same = client.fetch(session=(SESSION, 1))
    assert [data.partition_index for data in data_of(same)] == [0]
    moved = client.fetch((TOPIC, 0, 1), session=(SESSION, 2))
    assert (moved.session_id, data_of(moved)) == (SESSION, [])
    cluster.append(batch_of("b"), partition=2)
    assert [data.partition_index for data in data_of(client.fetch(session=(SESSION, 3)))] == [2]
    forgotten = client.fetch(session=(SESSION, 4), forget=[(TOPIC, 2)])
    assert data_of(forgotten) == []
    added = client.fetch((TOPIC, 3, 0), session=(SESSION, 5))
    assert [data.partition_index for data in data_of(added)] == [3]


def test_wrong_sessions(cluster: Cluster) -> None:
    client = Client(cluster)
    assert client.fetch(session=(99, 1)).error_code == Errors.FETCH_SESSION_ID_NOT_FOUND
    client.fetch((TOPIC, 0, 0), session=(0, 0))
    wrong = client.fetch(session=(SESSION, 2))
    assert (wrong.error_code, wrong.session_id, wrong.responses) == (Errors.INVALID_FETCH_SESSION_EPOCH, 0, [])
    by_name = Client(cluster, 12)
    assert by_name.fetch(session=(SESSION, 1)).error_code == Errors.FETCH_SESSION_TOPIC_ID_ERROR
    assert client.fetch(session=(SESSION, 1)).error_code == 0


def test_a_session_ends(cluster: Cluster) -> None:
    client = Client(cluster)
    client.fetch((TOPIC, 0, 0), session=(0, 0))
    assert client.fetch((TOPIC, 0, 0), session=(SESSION, -1)).session_id == 0
    assert client.fetch(session=(SESSION, 1)).error_code == Errors.FETCH_SESSION_ID_NOT_FOUND
    client.fetch((TOPIC, 0, 0), session=(0, 0))
    emptied = client.fetch(session=(SESSION, 1), forget=[(TOPIC, 0)])
    assert (emptied.session_id, emptied.error_code) == (0, 0)
    assert len(cluster.store.fetches.sessions) == 0


def test_sessions_have_a_limited_number_of_partitions(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of partitions that do not exist, of which a client may name any number."""
    monkeypatch.setattr(fetch_session, "MOST_PARTITIONS", 3)
    client = Client(cluster)
    assert client.fetch((TOPIC, 0, 0), ("none", 1, 0), session=(0, 0)).session_id == SESSION
    too_large = client.request([(TOPIC, 0, 0), (TOPIC, 1, 0)], session=(0, 0))
    other = client.send(too_large, SESSION + 1)
    assert other is not None
    assert (other.session_id, errors(other)) == (0, [0, 0])
    assert client.fetch(("none", 2, 0), session=(SESSION, 1)).error_code == 0
    assert client.fetch(("none", 3, 0), session=(SESSION, 2)).error_code == Errors.FETCH_SESSION_ID_NOT_FOUND
    assert len(cluster.store.fetches.sessions) == 0
    assert client.fetch((TOPIC, 0, 0), ("none", 1, 0), session=(0, 0)).session_id == SESSION
    cluster.now_ms += EVICTION_AGE_MS + 1
    other = client.send(too_large, SESSION + 1)
    assert other is not None
    assert other.session_id == SESSION + 1


def test_errors_are_repeated_in_a_session(cluster: Cluster) -> None:
    client = Client(cluster)
    client.fetch((TOPIC, 0, 0), ("late", 0, 0), session=(0, 0))
    for epoch in (1, 2):
        assert errors(client.fetch(session=(SESSION, epoch))) == [Errors.UNKNOWN_TOPIC_ID]
    cluster.update(image_of({TOPIC: 4, "late": 1}))
    assert errors(client.fetch(session=(SESSION, 3))) == [0]
    assert errors(client.fetch(session=(SESSION, 4))) == []


def test_busy_partitions_go_to_the_end(cluster: Cluster) -> None:
    client = Client(cluster)
    for index in (0, 1, 2):
        cluster.append(batch_of("x" * 100), partition=index)
    partitions = [(TOPIC, index, 0) for index in range(3)]
    assert sizes(client.fetch(*partitions, session=(0, 0), max_bytes=1)) == [1, 0, 0]
    served = [
        data.partition_index
        for epoch in (1, 2, 3, 4)
        for data in data_of(client.fetch(session=(SESSION, epoch), max_bytes=1))
    ]
    assert served == [0, 1, 2, 0]


def test_a_parked_fetch_of_an_older_session_epoch_gets_an_error(cluster: Cluster) -> None:
    client = Client(cluster)
    client.fetch((TOPIC, 0, 0), session=(0, 0))
    assert client.send(client.request([], session=(SESSION, 1), wait_ms=500)) is None
    assert client.fetch(session=(SESSION, 2)).error_code == 0
    cluster.append(batch_of("x"))
    assert client.poll()[0].response.error_code == Errors.INVALID_FETCH_SESSION_EPOCH


def test_the_cache_of_sessions_is_bounded() -> None:
    cluster = Cluster(image_of({TOPIC: 4}), {"max.incremental.fetch.session.cache.slots": "2"})
    client = Client(cluster)

    def opened(session_id: int, partitions: int) -> int:
        topic_partitions = [(TOPIC, index, 0) for index in range(partitions)]
        response = client.send(client.request(topic_partitions, session=(0, 0)), session_id)
        assert response is not None
        return response.session_id

    assert [opened(1, 1), opened(2, 2), opened(3, 4)] == [1, 2, 0]
    cluster.now_ms += 120_001
    assert client.fetch(session=(2, 1)).session_id == 2
    # Session 1 was unused for longer than two minutes, so it is evicted.
    assert opened(4, 1) == 4
    # Sessions 2 and 4 are in use. Only session 2 is old enough to be evicted, and only for a larger session.
    assert opened(5, 2) == 0
    assert opened(6, 3) == 6
    assert client.fetch(session=(2, 2)).error_code == Errors.FETCH_SESSION_ID_NOT_FOUND
    assert client.fetch(session=(4, 1)).error_code == 0


def test_epochs_skip_the_special_values() -> None:
    assert [next_epoch(epoch) for epoch in (0, 1, 2**31 - 1, -1)] == [1, 2, 1, -1]


# --- throttled responses ----------------------------------------------------------------------------------------------


def throttled(client: Client, *partitions: tuple[str, int, int], session: tuple[int, int] = (0, -1)) -> FetchResponse:
    """Sends a fetch whose client is above its quota."""
    response = client.cluster.store.fetches.fetch(
        client.request(partitions, session=session),
        client.version,
        client.cluster.now_ms,
        token=0,
        candidate_session_id=SESSION,
        throttle=lambda _: 250,
    )
    assert response is not None
    assert (response.throttle_time_ms, response.error_code, response.responses) == (250, 0, [])
    return response


def test_a_withheld_full_fetch_opens_no_session(cluster: Cluster) -> None:
    client = Client(cluster)
    assert throttled(client, (TOPIC, 0, 0), session=(0, 0)).session_id == 0
    assert len(cluster.store.fetches.sessions) == 0


def test_a_session_sends_later_what_was_withheld(cluster: Cluster) -> None:
    client = Client(cluster)
    client.fetch((TOPIC, 0, 0), (TOPIC, 1, 0), session=(0, 0))
    cluster.append(batch_of("a"))
    assert throttled(client, session=(SESSION, 1)).session_id == SESSION
    # The client moved to the end meanwhile, so only the new high watermark is left to say.
    response = client.fetch((TOPIC, 0, 1), session=(SESSION, 2))
    assert [(data.partition_index, data.high_watermark) for data in data_of(response)] == [(0, 1)]


def test_a_client_within_its_quota_gets_its_data(cluster: Cluster) -> None:
    cluster.append(batch_of("a"))
    counted: list[FetchResponse] = []

    def throttle(response: FetchResponse) -> int:
        counted.append(response)
        return 0

    client = Client(cluster)
    response = cluster.store.fetches.fetch(
        client.request([(TOPIC, 0, 0)]),
        NEWEST,
        cluster.now_ms,
        token=0,
        candidate_session_id=SESSION,
        throttle=throttle,
    )
    assert response is not None
    assert sizes(response) == [1]
    assert counted == [response]
