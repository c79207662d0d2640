# SPDX-License-Identifier: Apache-2.0
"""Large logs are opened in another thread while the event loop serves requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest

from kcoord.runtime.result import Producer
from kcoord.storage.errors import OpeningCanceledError
from kcoord.storage.rolled import LaterSyncs
from kcoord.topics import log_opening
from kcoord.topics.log_opening import AT_ONCE_US, BATCH_US, BYTES_PER_US, OPENED_AT_ONCE, Opening
from kcoord.topics.open_log import open_and_load
from kcoord.topics.store import TopicStore
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import FetchRequest
from tests.unit.topics.helpers import TOPIC, Cluster, batch_of, image_of
from tests.unit.topics.test_partition import read, values
from tests.unit.topics.test_transactions import end

LARGE = [f"value {number}" for number in range(AT_ONCE_US // BATCH_US + 1)]
"""The values of so many batches that the event loop must not read them at once."""


class Thread:
    """Runs work when a test says so."""

    def __init__(self) -> None:
        self.work: list[tuple[Callable[[], None], Callable[[], None] | None]] = []

    def begin(self, work: Callable[[], None], done: Callable[[], None] | None) -> None:
        self.work.append((work, done))

    def run(self) -> None:
        work, done = self.work.pop(0)
        work()
        if done is not None:
            done()


class Restarted(Cluster):
    """A cluster whose store opens large logs in a `Thread`, from the second start on."""

    def __init__(self, values: list[str], partitions: int = 1) -> None:
        super().__init__(image_of({TOPIC: partitions}))
        self.thread = Thread()
        self.syncs = Thread()
        for partition in range(partitions):
            for value in values:
                self.append(batch_of(value), partition=partition)

    def start(self) -> None:
        super().start()
        if hasattr(self, "thread"):
            self.log_dir.later_syncs = LaterSyncs(self.syncs.begin, nullcontext)
            self.store = TopicStore(self.fs, self.log_dir, self.config, in_background=self.thread.begin)
            self.store.on_metadata_update(self.image, self.now_ms)

    def error(self) -> Errors | None:
        try:
            self.store.partition(TOPIC, 0).open(self.now_ms)
        except KafkaError as error:
            return error.error
        return None


def fetch_request(partitions: int = 1) -> FetchRequest:
    return FetchRequest(
        max_wait_ms=500,
        min_bytes=1,
        max_bytes=1 << 20,
        topics=[
            FetchRequest.FetchTopic(
                topic=TOPIC,
                partitions=[
                    FetchRequest.FetchPartition(partition=partition, fetch_offset=0, partition_max_bytes=1 << 20)
                    for partition in range(partitions)
                ],
            )
        ],
    )


def test_a_large_log_is_opened_in_a_thread_after_a_crash() -> None:
    cluster = Restarted(LARGE)
    cluster.crash()
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    with pytest.raises(KafkaError) as failure:
        cluster.append(batch_of("more"))
    assert failure.value.error is Errors.NOT_LEADER_OR_FOLLOWER
    assert len(cluster.thread.work) == 1
    cluster.thread.run()
    assert cluster.append(batch_of("more")).base_offset == len(LARGE)
    assert values(read(cluster, 0, max_bytes=1 << 20).records) == [*LARGE, "more"]


def test_a_large_log_without_a_snapshot_is_opened_in_a_thread() -> None:
    cluster = Restarted(LARGE)
    cluster.stop()
    (snapshot,) = [name for name in cluster.files() if name.endswith(".snapshot")]
    cluster.fs.remove(f"{cluster.log_dir.partition_path(TOPIC, 0)}/{snapshot}")
    cluster.start()
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    cluster.thread.run()
    assert cluster.error() is None


@pytest.mark.parametrize("aborts", [False, True])
def test_a_log_with_many_producers_or_aborted_transactions_is_opened_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, aborts: bool
) -> None:
    cluster = Restarted([])
    for number in range(500):
        # Each transaction has its own epoch.
        producer = (0, number, 0) if aborts else (number, 0, 0)
        cluster.append(batch_of("x", producer=producer, is_transactional=aborts), verified=aborts)
        if aborts:
            end(cluster, Producer(0, number + 1), committed=False)
    cluster.restart()
    monkeypatch.setattr(log_opening, "AT_ONCE_US", 1_000)
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    cluster.thread.run()
    assert cluster.error() is None


def test_other_logs_are_opened_at_once() -> None:
    large = Restarted(LARGE)
    large.restart()
    assert large.error() is None
    small = Restarted(["small"])
    small.crash()
    assert small.error() is None
    assert large.thread.work == small.thread.work == []


def test_other_partitions_are_served_meanwhile() -> None:
    cluster = Restarted(LARGE, partitions=2)
    cluster.append(batch_of("last"), partition=1)
    cluster.crash()
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    cluster.update(image_of({TOPIC: 2, "other": 1}))
    assert cluster.append(batch_of("a"), "other").base_offset == 0


def test_a_fetch_waits_for_the_log() -> None:
    cluster = Restarted(LARGE)
    cluster.crash()
    fetches = cluster.store.fetches
    assert fetches.fetch(fetch_request(), 12, cluster.now_ms, token="t", candidate_session_id=0) is None
    assert fetches.poll(cluster.now_ms) == []
    cluster.thread.run()
    (completed,) = fetches.poll(cluster.now_ms)
    assert values(completed.response.responses[0].partitions[0].records or b"") == LARGE


def test_a_fetch_ends_when_its_time_is_up() -> None:
    cluster = Restarted(LARGE)
    cluster.crash()
    fetches = cluster.store.fetches
    assert fetches.fetch(fetch_request(), 12, cluster.now_ms, token="t", candidate_session_id=0) is None
    (completed,) = fetches.poll(cluster.now_ms + 500)
    assert completed.response.responses[0].partitions[0].error_code == Errors.NOT_LEADER_OR_FOLLOWER


def test_a_failed_opening_is_reported_once_and_tried_again() -> None:
    cluster = Restarted(LARGE)
    cluster.crash()
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    cluster.fs.fault = lambda operation: OSError("no disk")
    cluster.thread.run()
    cluster.fs.fault = lambda operation: None
    assert cluster.error() is Errors.KAFKA_STORAGE_ERROR
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    cluster.thread.run()
    assert cluster.error() is None


@pytest.mark.parametrize("is_open", [False, True])
def test_a_topic_is_deleted_during_the_opening(is_open: bool) -> None:
    cluster = Restarted(LARGE)
    cluster.crash()
    partition = cluster.store.partition(TOPIC, 0)
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    if is_open:
        cluster.thread.run()
    cluster.update(image_of({}))
    cluster.update(image_of({TOPIC: 1}, generation=1))
    if not is_open:
        cluster.thread.run()
    assert cluster.error() is None
    assert cluster.append(batch_of("new")).base_offset == 0
    with pytest.raises(KafkaError, match="is deleted"):
        partition.open(cluster.now_ms)


@pytest.mark.parametrize("is_open", [False, True])
def test_the_broker_stops_during_the_opening(is_open: bool) -> None:
    cluster = Restarted(LARGE)
    cluster.crash()
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    if is_open:
        cluster.thread.run()
    cluster.stop()
    if not is_open:
        cluster.thread.run()
    cluster.start()
    if not is_open:
        # The log was not closed orderly.
        assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
        cluster.thread.run()
    assert cluster.append(batch_of("more")).base_offset == len(LARGE)


@pytest.mark.parametrize("is_clean", [False, True], ids=["in the scan", "in the replay"])
def test_a_canceled_opening_ends_between_two_batches(monkeypatch: pytest.MonkeyPatch, is_clean: bool) -> None:
    cluster = Restarted(LARGE)
    cluster.append(batch_of("second"))
    if is_clean:
        cluster.stop()
        for name in cluster.files():
            if name.endswith(".snapshot"):
                cluster.fs.remove(f"{cluster.log_dir.partition_path(TOPIC, 0)}/{name}")
        cluster.start()
    else:
        cluster.crash()
    partition = cluster.store.partition(TOPIC, 0)
    read = partial(open_and_load, cluster.log_dir, TOPIC, 0, partition.files, partition.log_config, cluster.now_ms)
    opening = Opening(f"{TOPIC}-0", read, nullcontext())
    check, checks = Opening._check, 0

    def cancel_at_the_second(self: Opening[object], size_bytes: int) -> None:
        nonlocal checks
        checks += 1
        self._is_canceled = checks > 1
        check(self, size_bytes)

    monkeypatch.setattr(Opening, "_check", cancel_at_the_second)
    opening.run()
    assert checks == 2
    with pytest.raises(OpeningCanceledError):
        opening.result()
    monkeypatch.undo()
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    cluster.thread.run()
    assert cluster.error() is None


def test_retention_waits_for_one_opening_at_a_time() -> None:
    cluster = Restarted(LARGE, partitions=3)
    cluster.crash()
    cluster.tick(0)
    cluster.tick(cluster.config.log_retention_check_interval_ms)
    cluster.tick(1)
    openings = [work for work, done in cluster.thread.work if done is not None]
    assert len(openings) == 1
    for expected in (1, 1, 0):
        while cluster.thread.work:
            cluster.thread.run()
        cluster.tick(1)
        assert len(cluster.thread.work) == expected


def damage(cluster: Cluster, name: str) -> None:
    """Damages a file of the partition while the broker is down."""
    cluster.fs.damage(f"{cluster.log_dir.partition_path(TOPIC, 0)}/{name}", lambda old: b"?" * len(old))


@pytest.mark.parametrize("suffix", [".snapshot", "leader-epoch-checkpoint", ".index"])
def test_a_large_log_with_a_damaged_small_file_is_opened_in_a_thread(suffix: str) -> None:
    cluster = Restarted(LARGE)
    cluster.stop()
    (name,) = [name for name in cluster.files() if name.endswith(suffix)]
    damage(cluster, name)
    cluster.start()
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    cluster.thread.run()
    assert cluster.error() is None
    assert cluster.append(batch_of("more")).base_offset == len(LARGE)


def test_a_large_torn_end_is_searched_in_a_thread() -> None:
    cluster = Restarted(["small"])
    cluster.fs.crash(lambda kind, path, pending: pending)
    rest = b"\1" * (2 * AT_ONCE_US * BYTES_PER_US)
    cluster.fs.damage(f"{cluster.log_dir.partition_path(TOPIC, 0)}/{0:020d}.log", lambda old: old + rest)
    cluster.start()
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    cluster.thread.run()
    assert cluster.append(batch_of("more")).base_offset == 1


def test_a_large_log_that_failed_is_written_again_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Restarted(["small"])
    cluster.restart()
    cluster.append(batch_of("x" * 1_000))
    opened = cluster.store.partition(TOPIC, 0).open(cluster.now_ms)
    cluster.fs.fault = lambda operation: OSError("no disk") if operation.kind == "datasync" else None
    with pytest.raises(OSError, match="no disk"):
        opened.log.flush()
    cluster.fs.fault = lambda operation: None
    cluster.store.partition(TOPIC, 0).fail(OSError("no disk"))
    monkeypatch.setattr(log_opening, "BYTES_PER_US", 1 / AT_ONCE_US)
    assert cluster.error() is Errors.NOT_LEADER_OR_FOLLOWER
    cluster.thread.run()
    assert cluster.append(batch_of("more")).base_offset == 2


SMALL = [f"value {number}" for number in range(30)]
MANY = AT_ONCE_US // (len(SMALL) * BATCH_US) + 10


def opened(cluster: Cluster, partitions: int = MANY) -> int:
    return sum(cluster.store.partition(TOPIC, index).opened is not None for index in range(partitions))


def test_retention_opens_few_logs_in_a_tick_after_a_crash() -> None:
    cluster = Restarted(SMALL, partitions=MANY)
    cluster.crash()
    cluster.tick(0)
    cluster.tick(cluster.config.log_retention_check_interval_ms)
    first = opened(cluster)
    assert 0 < first < MANY - 5
    assert any(done is not None for _, done in cluster.thread.work)
    while cluster.thread.work:
        cluster.thread.run()
    cluster.tick(1)
    assert opened(cluster) > first + 1


def test_one_request_opens_few_logs_at_once_after_a_crash() -> None:
    cluster = Restarted(SMALL, partitions=MANY)
    cluster.crash()
    fetches = cluster.store.fetches
    response = fetches.fetch(fetch_request(MANY), 12, cluster.now_ms, token="t", candidate_session_id=0)
    assert response is not None
    errors = [partition.error_code for partition in response.responses[0].partitions]
    assert set(errors) == {Errors.NONE, Errors.NOT_LEADER_OR_FOLLOWER}
    cluster.now_ms += 1
    while cluster.thread.work:
        cluster.thread.run()
    response = fetches.fetch(fetch_request(MANY), 12, cluster.now_ms, token="t", candidate_session_id=0)
    assert response is not None
    assert not any(partition.error_code for partition in response.responses[0].partitions)


def test_one_request_opens_few_logs_at_once_after_an_orderly_stop() -> None:
    partitions = OPENED_AT_ONCE + 10
    cluster = Restarted(["small"], partitions)
    cluster.restart()
    fetches = cluster.store.fetches
    assert fetches.fetch(fetch_request(partitions), 12, cluster.now_ms, token="t", candidate_session_id=0) is not None
    assert opened(cluster, partitions) == OPENED_AT_ONCE
    while cluster.thread.work:
        cluster.thread.run()
    fetches.fetch(fetch_request(partitions), 12, cluster.now_ms, token="t", candidate_session_id=0)
    assert opened(cluster, partitions) == partitions
