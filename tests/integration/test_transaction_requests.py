# SPDX-License-Identifier: Apache-2.0
"""Transactions on the wire: the responses of Kafka 4.3.1 to the same requests, and requests that no client sends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from kcoord.runtime.serde import partition_for
from kcoord.storage.snapshot import SNAPSHOT_FILE
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EndTxnRequest,
    EndTxnResponse,
    FetchRequest,
    FetchResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    MetadataRequest,
    MetadataResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    ProduceRequest,
    ProduceResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from kcoord_protocol.record_batch import Record, encode_batch, iter_headers
from tests.integration.conftest import MakeServer
from tests.integration.wire import WireClient
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

TOPIC, GROUP = "t", "g"
Partitions = list[tuple[str, int]]

OK = Errors.NONE
CONCURRENT = Errors.CONCURRENT_TRANSACTIONS


class Tx:
    """A transactional producer that sends exactly the requests of a test."""

    def __init__(self, wire: WireClient, transactional_id: str) -> None:
        self.wire = wire
        self.id = transactional_id
        self.producer_id = -1
        self.epoch = -1

    def init(self, version: int = 5, timeout_ms: int = 60_000, producer: tuple[int, int] = (-1, -1)) -> Errors:
        request = InitProducerIdRequest(
            transactional_id=self.id,
            transaction_timeout_ms=timeout_ms,
            producer_id=producer[0],
            producer_epoch=producer[1],
        )
        answer = self.wire.call(request, version, InitProducerIdResponse)
        if not answer.error_code:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
        return Errors(answer.error_code)

    def settled(self) -> Tx:
        """Waits until the last transaction is complete in all partitions; returns itself."""
        wait_until(lambda: not self.describe().startswith("Prepare"), "the transaction is complete")
        return self

    def add(self, *partitions: tuple[str, int], version: int = 3, epoch: int | None = None) -> list[Errors]:
        topics = self._topics(list(partitions))
        epoch = self.epoch if epoch is None else epoch
        if version < 4:
            request = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=self.id,
                v3_and_below_producer_id=self.producer_id,
                v3_and_below_producer_epoch=epoch,
                v3_and_below_topics=topics,
            )
            topics_added = self.wire.call(request, version, AddPartitionsToTxnResponse).results_by_topic_v3_and_below
        else:
            topics_added = self._add_batched(topics, version, epoch, verify_only=False)
        return [
            Errors(partition.partition_error_code) for topic in topics_added for partition in topic.results_by_partition
        ]

    def verify(self, *partitions: tuple[str, int], version: int = 5) -> list[Errors]:
        topics_added = self._add_batched(self._topics(list(partitions)), version, self.epoch, verify_only=True)
        return [
            Errors(partition.partition_error_code) for topic in topics_added for partition in topic.results_by_partition
        ]

    def _add_batched(
        self,
        topics: list[AddPartitionsToTxnRequest.AddPartitionsToTxnTopic],
        version: int,
        epoch: int,
        verify_only: bool,
    ) -> list[AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult]:
        transaction = AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction(
            transactional_id=self.id,
            producer_id=self.producer_id,
            producer_epoch=epoch,
            verify_only=verify_only,
            topics=topics,
        )
        request = AddPartitionsToTxnRequest(transactions=[transaction])
        (result,) = self.wire.call(request, version, AddPartitionsToTxnResponse).results_by_transaction
        return result.topic_results

    @staticmethod
    def _topics(partitions: Partitions) -> list[AddPartitionsToTxnRequest.AddPartitionsToTxnTopic]:
        names = dict.fromkeys(topic for topic, _ in partitions)
        return [
            AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(
                name=name, partitions=[number for topic, number in partitions if topic == name]
            )
            for name in names
        ]

    def add_offsets(self, version: int = 3, epoch: int | None = None) -> Errors:
        request = AddOffsetsToTxnRequest(
            transactional_id=self.id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch if epoch is None else epoch,
            group_id=GROUP,
        )
        return Errors(self.wire.call(request, version, AddOffsetsToTxnResponse).error_code)

    def end(self, committed: bool = True, version: int = 5, epoch: int | None = None) -> Errors:
        request = EndTxnRequest(
            transactional_id=self.id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch if epoch is None else epoch,
            committed=committed,
        )
        answer = self.wire.call(request, version, EndTxnResponse)
        if version >= 5 and not answer.error_code:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
        return Errors(answer.error_code)

    def batch(self, sequence: int, epoch: int | None = None) -> bytes:
        return encode_batch(
            [Record(None, f"{sequence}".encode(), timestamp_ms=int(time.time() * 1000))],
            producer_id=self.producer_id,
            producer_epoch=self.epoch if epoch is None else epoch,
            base_sequence=sequence,
            is_transactional=True,
        )

    def produce_request(self, sequence: int, *, named: bool = True, epoch: int | None = None) -> ProduceRequest:
        partition = ProduceRequest.PartitionProduceData(index=0, records=self.batch(sequence, epoch))
        topic = ProduceRequest.TopicProduceData(name=TOPIC, partition_data=[partition])
        return ProduceRequest(transactional_id=self.id if named else None, acks=-1, timeout_ms=1000, topic_data=[topic])

    def produce(self, sequence: int = 0, version: int = 12, named: bool = True, epoch: int | None = None) -> Errors:
        request = self.produce_request(sequence, named=named, epoch=epoch)
        answer = self.wire.call(request, version, ProduceResponse)
        return Errors(answer.responses[0].partition_responses[0].error_code)

    def commit_offset(
        self, offset: int, version: int = 5, epoch: int | None = None, topic: str = TOPIC, group: str = GROUP
    ) -> Errors:
        partition = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
            partition_index=0, committed_offset=offset, committed_metadata=""
        )
        request = TxnOffsetCommitRequest(
            transactional_id=self.id,
            group_id=group,
            producer_id=self.producer_id,
            producer_epoch=self.epoch if epoch is None else epoch,
            topics=[TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(name=topic, partitions=[partition])],
        )
        answer = self.wire.call(request, version, TxnOffsetCommitResponse)
        return Errors(answer.topics[0].partitions[0].error_code)

    def described(self) -> DescribeTransactionsResponse.TransactionState:
        request = DescribeTransactionsRequest(transactional_ids=[self.id])
        (state,) = self.wire.call(request, 0, DescribeTransactionsResponse).transaction_states
        return state

    def describe(self) -> str:
        state = self.described()
        return state.transaction_state or Errors(state.error_code).name

    def partitions(self) -> Partitions:
        return [(topic.topic, number) for topic in self.described().topics for number in topic.partitions]


def fetch_offset(wire: WireClient, group: str = GROUP) -> int | Errors:
    topic = OffsetFetchRequest.OffsetFetchRequestTopics(name=TOPIC, partition_indexes=[0])
    requested = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=[topic])
    answer = wire.call(OffsetFetchRequest(groups=[requested], require_stable=True), 8, OffsetFetchResponse)
    partition = answer.groups[0].topics[0].partitions[0]
    return Errors(partition.error_code) if partition.error_code else partition.committed_offset


def fetch(wire: WireClient, topic: str = TOPIC) -> FetchResponse.PartitionData:
    partition = FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    request = FetchRequest(
        max_wait_ms=0, isolation_level=1, topics=[FetchRequest.FetchTopic(topic=topic, partitions=[partition])]
    )
    return wire.call(request, 11, FetchResponse).responses[0].partitions[0]


@pytest.fixture
def wire(server: KcoordProcess) -> Iterator[WireClient]:
    with WireClient(server.port) as client:
        prepare(client)
        yield client


def prepare(wire: WireClient) -> None:
    for key_type in (0, 1):
        request = FindCoordinatorRequest(key_type=key_type, coordinator_keys=[GROUP, "other"])
        answer = wire.call(request, 4, FindCoordinatorResponse)
        assert [coordinator.error_code for coordinator in answer.coordinators] == [0, 0]
    topic = CreateTopicsRequest.CreatableTopic(name=TOPIC, num_partitions=2, replication_factor=1)
    wire.call(CreateTopicsRequest(topics=[topic], timeout_ms=1000), 5, CreateTopicsResponse)


# --- requests of all versions -----------------------------------------------------------------------------------------


def test_errors_depend_on_the_version(wire: WireClient) -> None:
    tx = Tx(wire, "tx")
    assert tx.init() is OK
    old = tx.producer_id, tx.epoch
    assert tx.init() is OK
    assert [tx.init(version, producer=old) for version in (3, 4, 5)] == [
        Errors.INVALID_PRODUCER_EPOCH,
        Errors.PRODUCER_FENCED,
        Errors.PRODUCER_FENCED,
    ]
    stale = tx.epoch - 1
    for version, error in (
        (0, Errors.INVALID_PRODUCER_EPOCH),
        (1, Errors.INVALID_PRODUCER_EPOCH),
        (2, None),
        (4, None),
    ):
        expected = error or Errors.PRODUCER_FENCED
        assert tx.end(version=version, epoch=stale) is expected
        assert tx.add((TOPIC, 0), version=min(version, 3), epoch=stale) == [expected]
        assert tx.add_offsets(version, epoch=stale) is expected
    assert tx.init(version=0) is OK
    assert [Tx(wire, "").init(), tx.init(timeout_ms=0), tx.init(timeout_ms=900_001)] == [
        Errors.INVALID_REQUEST,
        Errors.INVALID_TRANSACTION_TIMEOUT,
        Errors.INVALID_TRANSACTION_TIMEOUT,
    ]


def test_partitions_are_added_all_or_none(wire: WireClient) -> None:
    tx = Tx(wire, "tx")
    tx.init()
    for version in (0, 3, 4, 5):
        assert tx.add((TOPIC, 0), (TOPIC, 9), version=version) == [
            Errors.OPERATION_NOT_ATTEMPTED,
            Errors.UNKNOWN_TOPIC_OR_PARTITION,
        ]
    assert tx.describe() == "Empty"
    assert tx.add((TOPIC, 1), version=3) == [OK]
    assert tx.verify((TOPIC, 0), (TOPIC, 1)) == [Errors.TRANSACTION_ABORTABLE, OK]
    assert tx.describe() == "Ongoing"


def test_internal_topics_cannot_be_added(wire: WireClient) -> None:
    """As in Kafka 4.4.0, also without an authorizer."""
    tx = Tx(wire, "tx")
    tx.init()
    assert tx.add(("__consumer_offsets", 0), version=3) == [Errors.TOPIC_AUTHORIZATION_FAILED]
    assert tx.add(("__consumer_offsets", 0), version=5) == [OK], "brokers ask each other with v4 and v5"


def test_old_producers_add_partitions_first(wire: WireClient) -> None:
    tx = Tx(wire, "tx")
    tx.init()
    assert [tx.produce(version=version) for version in (9, 10, 11)] == [
        Errors.INVALID_TXN_STATE,
        Errors.INVALID_TXN_STATE,
        Errors.TRANSACTION_ABORTABLE,
    ]
    assert [tx.commit_offset(1, version=version) for version in (0, 3, 4)] == [
        Errors.INVALID_TXN_STATE,
        Errors.INVALID_TXN_STATE,
        Errors.TRANSACTION_ABORTABLE,
    ]
    assert tx.add((TOPIC, 0), version=0) == [OK]
    assert tx.add_offsets(version=0) is OK
    assert [tx.produce(0, version=3), tx.produce(1, version=11), tx.commit_offset(5, version=2)] == [OK, OK, OK]
    assert fetch_offset(wire) is Errors.UNSTABLE_OFFSET_COMMIT
    assert tx.end(version=0) is OK
    assert tx.settled().end(version=3) is OK
    assert tx.end(committed=False, version=3) is Errors.INVALID_TXN_STATE
    assert fetch_offset(wire) == 5
    assert fetch(wire).last_stable_offset == 3


def test_new_producers_write_without_adding_partitions(wire: WireClient) -> None:
    tx = Tx(wire, "tx")
    tx.init()
    assert [tx.produce(0), tx.produce(1), tx.commit_offset(7)] == [OK, OK, OK]
    assert fetch(wire).last_stable_offset == 0
    assert fetch_offset(wire) is Errors.UNSTABLE_OFFSET_COMMIT
    before = tx.epoch
    assert tx.end() is OK
    assert tx.epoch == before + 1
    tx.settled()
    data = fetch(wire)
    assert (data.last_stable_offset, data.high_watermark, data.aborted_transactions) == (3, 3, [])
    assert fetch_offset(wire) == 7
    assert tx.end(epoch=before) is OK
    assert tx.end(committed=False, epoch=before) is Errors.INVALID_TXN_STATE
    assert tx.produce(2, epoch=before) is Errors.INVALID_PRODUCER_EPOCH
    assert tx.commit_offset(8, epoch=before) is Errors.INVALID_PRODUCER_EPOCH
    assert [tx.produce(0), tx.commit_offset(9), tx.end(committed=False)] == [OK, OK, OK]
    tx.settled()
    aborted = fetch(wire).aborted_transactions
    assert aborted is not None
    assert [(transaction.producer_id, transaction.first_offset) for transaction in aborted] == [(tx.producer_id, 3)]
    assert fetch_offset(wire) == 7


def test_rejected_writes(wire: WireClient) -> None:
    tx, other = Tx(wire, "tx"), Tx(wire, "other")
    tx.init()
    assert tx.produce(named=False) is Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    other.producer_id, other.epoch = tx.producer_id, tx.epoch
    assert [other.produce(), other.commit_offset(1)] == [Errors.INVALID_PRODUCER_ID_MAPPING] * 2
    assert tx.commit_offset(1, topic="absent") is Errors.UNKNOWN_TOPIC_OR_PARTITION
    assert tx.commit_offset(1, group="") is Errors.INVALID_GROUP_ID
    assert tx.describe() == "Empty"


def test_an_empty_transactional_id_before_the_first_transaction(server: KcoordProcess) -> None:
    """Kafka 4.3.1 and 4.4.0 check the id before they look for its coordinator. Other ids get NOT_COORDINATOR."""
    with WireClient(server.port) as wire:
        topic = CreateTopicsRequest.CreatableTopic(name=TOPIC, num_partitions=1, replication_factor=1)
        wire.call(CreateTopicsRequest(topics=[topic], timeout_ms=1000), 5, CreateTopicsResponse)
        for name, error in (("", Errors.INVALID_REQUEST), ("tx", Errors.NOT_COORDINATOR)):
            tx = Tx(wire, name)
            assert [tx.init(), tx.end(), tx.add_offsets()] == [error] * 3
            assert tx.add((TOPIC, 0)) == tx.verify((TOPIC, 0)) == [error]
            assert tx.describe() == error.name


@pytest.mark.parametrize("stranger", [0, 1000])
def test_records_rejected_as_a_whole_do_not_join_the_transaction(wire: WireClient, stranger: int) -> None:
    """Kafka 4.3.1 and 4.4.0 check the record sets before they compare their producers and add their partitions."""
    tx = Tx(wire, "tx")
    tx.init()
    request = tx.produce_request(0)
    other = Tx(wire, "other")
    other.producer_id, other.epoch = tx.producer_id + stranger, tx.epoch
    two_batches = ProduceRequest.PartitionProduceData(index=1, records=other.batch(0) + other.batch(1))
    request.topic_data[0].partition_data.append(two_batches)
    (topic,) = wire.call(request, 12, ProduceResponse).responses
    assert [Errors(partition.error_code) for partition in topic.partition_responses] == [OK, Errors.INVALID_RECORD]
    assert tx.partitions() == [(TOPIC, 0)]


def test_every_partition_of_a_rejected_commit_has_its_error(wire: WireClient) -> None:
    """Kafka checks first whether the topics exist."""
    partition = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    topics = [
        TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(name=name, partitions=[partition])
        for name in (TOPIC, "absent")
    ]
    request = TxnOffsetCommitRequest(transactional_id="tx", group_id="", topics=topics)
    answer = wire.call(request, 3, TxnOffsetCommitResponse)
    errors = {topic.name: topic.partitions[0].error_code for topic in answer.topics}
    assert errors == {TOPIC: Errors.INVALID_GROUP_ID, "absent": Errors.UNKNOWN_TOPIC_OR_PARTITION}


def test_offsets_are_committed_by_topic_id_since_v6(wire: WireClient) -> None:
    """The rules are those of KIP-1319, and the responses those of Kafka 4.4.0."""
    (topic,) = wire.call(
        MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=TOPIC)]), 12, MetadataResponse
    ).topics
    tx = Tx(wire, "tx")
    tx.init()

    def commit(topic_id: bytes, *partitions: int) -> dict[tuple[bytes, int], Errors]:
        asked = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(topic_id=topic_id)
        asked.partitions = [
            TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(partition_index=index, committed_offset=7)
            for index in partitions
        ]
        request = TxnOffsetCommitRequest(
            transactional_id="tx", group_id=GROUP, producer_id=tx.producer_id, producer_epoch=tx.epoch, topics=[asked]
        )
        answer = wire.call(request, 6, TxnOffsetCommitResponse)
        return {
            (committed_topic.topic_id, partition.partition_index): Errors(partition.error_code)
            for committed_topic in answer.topics
            for partition in committed_topic.partitions
        }

    missing = Errors.UNKNOWN_TOPIC_OR_PARTITION
    assert commit(topic.topic_id, 0, 99) == {(topic.topic_id, 0): OK, (topic.topic_id, 99): missing}
    for unknown in (b"1" * 16, bytes(16)):
        assert commit(unknown, 0) == {(unknown, 0): Errors.UNKNOWN_TOPIC_ID}
    assert tx.end() is OK
    assert fetch_offset(wire) == 7


def test_a_new_producer_fences_the_old_one(wire: WireClient) -> None:
    first, second = Tx(wire, "tx"), Tx(wire, "tx")
    first.init()
    assert [first.produce(), first.commit_offset(3)] == [OK, OK]
    assert second.init() is CONCURRENT
    second.settled()
    assert second.init() is OK
    assert (second.producer_id, second.epoch) == (first.producer_id, 2)
    assert [first.produce(1), first.commit_offset(4)] == [Errors.INVALID_PRODUCER_EPOCH] * 2
    assert first.end() is Errors.PRODUCER_FENCED
    assert fetch(wire).last_stable_offset == 2
    assert fetch_offset(wire) == -1


def test_pipelined_requests_keep_their_order(wire: WireClient) -> None:
    """The first request waits for the coordinator. The requests after it must not overtake it."""
    tx = Tx(wire, "tx")
    tx.init()
    for _ in range(3):
        sent = [wire.send(tx.produce_request(sequence), 12) for sequence in range(8)]
        answers = [wire.receive(correlation_id, ProduceRequest.api_key, 12, ProduceResponse) for correlation_id in sent]
        assert [answer.responses[0].partition_responses[0].error_code for answer in answers] == [0] * 8
        assert tx.end() is OK
        tx.settled()
    sequences = [header.base_sequence for _, header in iter_headers(fetch(wire).records or b"")]
    assert sequences == [*range(8), -1] * 3


# --- administration ---------------------------------------------------------------------------------------------------


def test_list_transactions(wire: WireClient) -> None:
    first, second = Tx(wire, "a1"), Tx(wire, "a2")
    first.init()
    second.init()
    second.produce()

    def listed(version: int = 2, **filters: object) -> list[str]:
        request = ListTransactionsRequest(**filters)  # type: ignore[arg-type]
        answer = wire.call(request, version, ListTransactionsResponse)
        assert answer.error_code == 0
        return sorted(state.transactional_id for state in answer.transaction_states)

    assert listed(0) == ["a1", "a2"]
    assert listed(0, state_filters=["Ongoing"]) == ["a2"]
    assert listed(0, producer_id_filters=[first.producer_id]) == ["a1"]
    assert listed(1, duration_filter=60_000) == ["a1"]
    assert listed(transactional_id_pattern=".2") == ["a2"]
    assert listed(transactional_id_pattern="a") == []
    assert listed(state_filters=["Nonsense"]) == []
    for states in ([], ["Nonsense"]):
        request = ListTransactionsRequest(state_filters=states, transactional_id_pattern="[")
        bad = wire.call(request, 2, ListTransactionsResponse)
        assert (bad.error_code, bad.unknown_state_filters) == (Errors.INVALID_REGULAR_EXPRESSION, [])
    unknown = wire.call(ListTransactionsRequest(state_filters=["Empty", "x"]), 2, ListTransactionsResponse)
    assert unknown.unknown_state_filters == ["x"]


def write_markers(wire: WireClient, tx: Tx, topic: str, partitions: list[int], epoch: int) -> list[Errors]:
    marker = WriteTxnMarkersRequest.WritableTxnMarker(
        producer_id=tx.producer_id,
        producer_epoch=epoch,
        transaction_result=False,
        topics=[WriteTxnMarkersRequest.WritableTxnMarkerTopic(name=topic, partition_indexes=partitions)],
    )
    answer = wire.call(WriteTxnMarkersRequest(markers=[marker]), 1, WriteTxnMarkersResponse)
    return [Errors(partition.error_code) for partition in answer.markers[0].topics[0].partitions]


def test_an_administrator_ends_a_transaction_in_single_partitions(wire: WireClient) -> None:
    tx = Tx(wire, "tx")
    tx.init()
    assert [tx.produce(), tx.commit_offset(3)] == [OK, OK]
    request = DescribeProducersRequest(
        topics=[DescribeProducersRequest.TopicRequest(name=TOPIC, partition_indexes=[0, 1, 9])]
    )
    first, empty, absent = wire.call(request, 0, DescribeProducersResponse).topics[0].partitions
    assert (absent.error_code, absent.error_message) == (Errors.UNKNOWN_TOPIC_OR_PARTITION, None)
    (producer,) = first.active_producers
    assert (producer.producer_id, producer.last_sequence, producer.current_txn_start_offset) == (tx.producer_id, 0, 0)
    assert empty.active_producers == []
    assert write_markers(wire, tx, TOPIC, [0, 9], tx.epoch) == [OK, Errors.UNKNOWN_TOPIC_OR_PARTITION]
    assert write_markers(wire, tx, TOPIC, [0], tx.epoch - 1) == [Errors.INVALID_PRODUCER_EPOCH]
    assert fetch(wire).last_stable_offset == 2
    shards = [shard for shard in range(4) if write_markers(wire, tx, "__consumer_offsets", [shard], tx.epoch) == [OK]]
    assert shards == [0, 1, 2, 3]
    assert fetch_offset(wire) == -1


def test_the_offsets_topic_is_readable_with_its_transactions(wire: WireClient) -> None:
    tx = Tx(wire, "tx")
    tx.init()
    shard_topic = "__consumer_offsets"
    groups = {shard_of(group): group for group in (f"g{number}" for number in range(40))}
    group = groups[0]
    assert tx.commit_offset(3, group=group) is OK
    assert (fetch(wire, shard_topic).last_stable_offset, fetch(wire, shard_topic).high_watermark) == (0, 1)
    tx.end(committed=False)
    tx.settled()
    data = fetch(wire, shard_topic)
    assert (data.last_stable_offset, data.high_watermark) == (2, 2)
    assert [transaction.first_offset for transaction in data.aborted_transactions or []] == [0]


def shard_of(group: str) -> int:
    return partition_for(group, 4)


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def test_an_acknowledged_commit_is_completed_after_a_kill(server: KcoordProcess) -> None:
    with WireClient(server.port) as client:
        prepare(client)
        tx = Tx(client, "tx")
        tx.init()
        assert [tx.produce(), tx.commit_offset(11)] == [OK, OK]
        assert tx.end() is OK
        server.stop(signal.SIGKILL)
    server.start()
    with WireClient(server.port) as client:
        again = Tx(client, "tx")
        wait_until(lambda: again.describe() == "CompleteCommit", "the transaction is complete")
        assert fetch_offset(client) == 11
        assert fetch(client).last_stable_offset == 2
        assert Errors(again.init()) is OK
        assert (again.producer_id, again.epoch) == (tx.producer_id, tx.epoch + 1)


def test_a_snapshot_of_transactional_ids_is_used_but_never_needed(make_server: MakeServer) -> None:
    server = make_server(transaction_state_log_num_partitions="1").start()
    ids = [f"{number}-{'long' * 40}" for number in range(100)]
    with WireClient(server.port) as client:
        prepare(client)
        epochs = {}
        for transactional_id in ids:
            tx = Tx(client, transactional_id)
            tx.init()
            epochs[transactional_id] = (tx.producer_id, tx.epoch)
    assert server.stop() == 0
    snapshot = server.data / "__transaction_state-0" / SNAPSHOT_FILE
    assert snapshot.stat().st_size > 100 * len(ids)
    for damage in (lambda: None, lambda: snapshot.write_bytes(snapshot.read_bytes()[:-1]), snapshot.unlink):
        damage()
        server.start()
        with WireClient(server.port) as client:
            for transactional_id in ids[::20]:
                tx = Tx(client, transactional_id)
                wait_until(lambda tx=tx: tx.init() is OK, "the coordinator is loaded")  # type: ignore[misc]
                assert (tx.producer_id, tx.epoch - 1) == epochs[transactional_id]
                epochs[transactional_id] = (tx.producer_id, tx.epoch)
        assert server.stop() == 0
