# SPDX-License-Identifier: Apache-2.0
"""The producer's transactions as dialogues with a coordinator that checks the rules of KIP-98 and KIP-890."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Unpack

import pytest

from kcoord.client import (
    Errors,
    IllegalStateException,
    KafkaError,
    OffsetAndMetadata,
    Producer,
    TimeoutException,
    TransactionAbortedException,
)
from kcoord.client.config import ProducerOptions
from kcoord.client.types import ConsumerGroupMetadata, TopicPartition
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)
from kcoord_protocol.record_batch import decode_header
from tests.unit.client.fake_broker import Answer
from tests.unit.client.log_broker import LOST_ANSWER, TOPIC, LogBroker
from tests.unit.client.virtual_loop import now_ms

ID = "txn"
PRODUCER_ID = 0
GROUP = ConsumerGroupMetadata("g", "m", 7, "i")
OFFSETS = {TopicPartition("in", 1): OffsetAndMetadata(5, "note", 2), TopicPartition("in", 0): OffsetAndMetadata(4)}

Step = Callable[[Producer], Awaitable[object]]


class TransactionBroker(LogBroker):
    """A broker that is transaction coordinator and leader.

    Each request must have the current producer id and epoch. Before transaction.version 2, a partition must be added
    before its first records. `dialogue` lists the requests. `errors` are the next responses of an API; a request with
    an error has no effect.
    """

    def __init__(self, *, is_v2: bool, **versions: tuple[int, int]) -> None:
        super().__init__(**versions)
        self.is_v2 = is_v2
        self.features = {"transaction.version": 2 if is_v2 else 1}
        self.handlers |= {
            ApiKey.PRODUCE: self._write,
            ApiKey.ADD_PARTITIONS_TO_TXN: self._add_partitions,
            ApiKey.ADD_OFFSETS_TO_TXN: self._add_offsets,
            ApiKey.TXN_OFFSET_COMMIT: self._commit_offsets,
            ApiKey.END_TXN: self._end,
        }
        self.errors: dict[ApiKey, list[Errors]] = {}
        self.dialogue: list[str] = []
        self.producer = -1, -1
        self._added: set[tuple[str, int]] = set()

    def _heard(self, key: ApiKey, text: str, producer_id: int, epoch: int) -> Errors:
        self.dialogue.append(text)
        errors = self.errors.get(key)
        if errors:
            return errors.pop(0)
        return Errors.NONE if (producer_id, epoch) == self.producer else Errors.INVALID_PRODUCER_EPOCH

    def _init_producer_id(self, request: Message, version: int) -> Answer:
        assert isinstance(request, InitProducerIdRequest)
        assert request.transactional_id == ID
        who = request.producer_id, request.producer_epoch
        if version < 3:
            assert who == (-1, -1)
        error = self._heard(ApiKey.INIT_PRODUCER_ID, f"init {who[0]} {who[1]}", *self.producer)
        if who not in ((-1, -1), self.producer):
            error = Errors.PRODUCER_FENCED
        if error:
            return InitProducerIdResponse(error_code=error)
        self.producer = PRODUCER_ID, self.producer[1] + 1
        self._added.clear()
        return InitProducerIdResponse(producer_id=self.producer[0], producer_epoch=self.producer[1])

    def _add_partitions(self, request: Message, version: int) -> Answer:
        assert isinstance(request, AddPartitionsToTxnRequest)
        assert not self.is_v2 and request.v3_and_below_transactional_id == ID
        who = request.v3_and_below_producer_id, request.v3_and_below_producer_epoch
        names = [(topic.name, index) for topic in request.v3_and_below_topics for index in topic.partitions]
        error = self._heard(ApiKey.ADD_PARTITIONS_TO_TXN, f"add {names}", *who)
        if not error:
            self._added.update(names)
        result = AddPartitionsToTxnResponse.AddPartitionsToTxnPartitionResult
        topic_result = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
        # The last partition has the error. The broker did not attempt to add the other partitions.
        codes = [Errors.OPERATION_NOT_ATTEMPTED if error else Errors.NONE] * (len(names) - 1) + [error]
        return AddPartitionsToTxnResponse(
            results_by_topic_v3_and_below=[
                topic_result(name=name, results_by_partition=[result(partition_index=index, partition_error_code=code)])
                for (name, index), code in zip(names, codes, strict=True)
            ]
        )

    def _write(self, request: Message, version: int) -> Answer:
        assert isinstance(request, ProduceRequest)
        assert request.transactional_id == ID
        parts = [(TOPIC, data.index) for topic in request.topic_data for data in topic.partition_data]
        assert (version >= 12) is self.is_v2
        assert self.is_v2 or set(parts) <= self._added
        for topic in request.topic_data:
            for data in topic.partition_data:
                header = decode_header(data.records or b"")
                assert header.is_transactional
                assert (header.producer_id, header.producer_epoch) == self.producer
        error = self._heard(ApiKey.PRODUCE, f"produce {parts}", *self.producer)
        if error:
            self.fates.append(error.name)
        self._added.update(parts)
        return self._produce(request, version)

    def _add_offsets(self, request: Message, version: int) -> Answer:
        assert isinstance(request, AddOffsetsToTxnRequest)
        assert not self.is_v2 and request.transactional_id == ID
        who = request.producer_id, request.producer_epoch
        error = self._heard(ApiKey.ADD_OFFSETS_TO_TXN, f"add offsets of {request.group_id}", *who)
        if not error:
            self._added.add(("group", 0))
        return AddOffsetsToTxnResponse(error_code=error)

    def _commit_offsets(self, request: Message, version: int) -> Answer:
        assert isinstance(request, TxnOffsetCommitRequest)
        assert request.transactional_id == ID
        assert (version > 4) is self.is_v2
        assert self.is_v2 or ("group", 0) in self._added
        error = self._heard(
            ApiKey.TXN_OFFSET_COMMIT, f"offsets of {request.group_id}", request.producer_id, request.producer_epoch
        )
        if not error:
            self._added.add(("group", 0))
        result = TxnOffsetCommitResponse.TxnOffsetCommitResponsePartition
        topic_result = TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
        return TxnOffsetCommitResponse(
            topics=[
                topic_result(
                    name=topic.name,
                    partitions=[
                        result(
                            partition_index=partition.partition_index,
                            error_code=error if partition is topic.partitions[-1] else 0,
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def _end(self, request: Message, version: int) -> Answer:
        assert isinstance(request, EndTxnRequest)
        assert request.transactional_id == ID
        assert (version >= 5) is self.is_v2
        verb = "commit" if request.committed else "abort"
        error = self._heard(ApiKey.END_TXN, verb, request.producer_id, request.producer_epoch)
        if error:
            return EndTxnResponse(error_code=error)
        assert self._added, "an empty transaction sends no EndTxn"
        self._added.clear()
        if self.is_v2:
            self.producer = PRODUCER_ID, self.producer[1] + 1
            return EndTxnResponse(producer_id=self.producer[0], producer_epoch=self.producer[1])
        return EndTxnResponse()


@asynccontextmanager
async def producer_of(broker: TransactionBroker, **options: Unpack[ProducerOptions]) -> AsyncIterator[Producer]:
    settings: ProducerOptions = {
        "bootstrap_servers": broker.address,
        "transactional_id": ID,
        "transaction_timeout_ms": 9000,
        "linger_ms": 0,
        **options,
    }
    async with Producer(**settings) as producer:
        yield producer


@asynccontextmanager
async def begun(
    *, is_v2: bool = False, **options: Unpack[ProducerOptions]
) -> AsyncIterator[tuple[TransactionBroker, Producer]]:
    """Yields a producer with an open transaction. The dialogue begins after the start of the transaction."""
    async with TransactionBroker(is_v2=is_v2) as broker, producer_of(broker, **options) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        broker.dialogue.clear()
        yield broker, producer


class TestDialogues:
    async def test_requests_before_transaction_version_2(self) -> None:
        async with TransactionBroker(is_v2=False) as broker, producer_of(broker) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await asyncio.gather(*[await producer.send(TOPIC, "a", partition=index) for index in (1, 0)])
            await producer.send_and_wait(TOPIC, "b", partition=0)
            await producer.send_offsets_to_transaction(OFFSETS, GROUP)
            await producer.commit_transaction()
            await producer.begin_transaction()
            await producer.send_and_wait(TOPIC, "c", partition=0)
            await producer.abort_transaction()
            assert broker.dialogue == [
                "init -1 -1",
                "add [('t', 0), ('t', 1)]",
                "produce [('t', 1), ('t', 0)]",
                "produce [('t', 0)]",
                "add offsets of g",
                "offsets of g",
                "commit",
                "add [('t', 0)]",
                "produce [('t', 0)]",
                "abort",
            ]
            assert [header.base_sequence for header, _ in broker.logs[TopicPartition(TOPIC, 0)].batches] == [0, 1, 2]
            assert broker.versions_of(ApiKey.PRODUCE) == [11, 11, 11]
            assert broker.versions_of(ApiKey.TXN_OFFSET_COMMIT) == [4]
            assert broker.versions_of(ApiKey.END_TXN) == [4, 4]
            self.check_messages(broker)

    async def test_an_abort_waits_for_a_batch_that_may_be_stored(self) -> None:
        """Else the next transaction, which has the same epoch, would use the sequence number of the batch again."""
        async with begun() as (broker, producer):
            broker.fates.append(LOST_ANSWER)
            retried = await producer.send(TOPIC, "a", partition=0)
            await asyncio.sleep(0.05)
            unsent = await producer.send(TOPIC, "b", partition=0)
            await producer.abort_transaction()
            assert retried.result().offset == 0
            assert isinstance(unsent.exception(), TransactionAbortedException)
            await producer.begin_transaction()
            assert (await producer.send_and_wait(TOPIC, "c", partition=0)).offset == 1

    async def test_requests_with_transaction_version_2(self) -> None:
        """The producer adds no partitions, and each transaction has its own epoch (KIP-890)."""
        async with TransactionBroker(is_v2=True) as broker, producer_of(broker) as producer:
            await producer.init_transactions()
            for _ in range(2):
                await producer.begin_transaction()
                await producer.send_and_wait(TOPIC, "a", partition=1)
                await producer.send_offsets_to_transaction(OFFSETS, GROUP)
                await producer.commit_transaction()
            await producer.begin_transaction()
            await producer.send_and_wait(TOPIC, "b", partition=1)
            await producer.abort_transaction()
            transaction = ["produce [('t', 1)]", "offsets of g", "commit"]
            assert broker.dialogue == ["init -1 -1", *transaction, *transaction, "produce [('t', 1)]", "abort"]
            headers = [header for header, _ in broker.logs[TopicPartition(TOPIC, 1)].batches]
            assert [(header.producer_epoch, header.base_sequence) for header in headers] == [(0, 0), (1, 0), (2, 0)]
            assert broker.versions_of(ApiKey.PRODUCE) == [13, 13, 13]
            assert broker.versions_of(ApiKey.TXN_OFFSET_COMMIT) == [5, 5]
            assert broker.versions_of(ApiKey.END_TXN) == [5, 5, 5]
            self.check_messages(broker)

    @staticmethod
    def check_messages(broker: TransactionBroker) -> None:
        assert broker.requests_of(ApiKey.INIT_PRODUCER_ID) == [
            InitProducerIdRequest(transactional_id=ID, transaction_timeout_ms=9000, producer_id=-1, producer_epoch=-1)
        ]
        offset = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition
        topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
            name="in",
            partitions=[
                offset(partition_index=0, committed_offset=4, committed_leader_epoch=-1, committed_metadata=""),
                offset(partition_index=1, committed_offset=5, committed_leader_epoch=2, committed_metadata="note"),
            ],
        )
        assert broker.requests_of(ApiKey.TXN_OFFSET_COMMIT)[0] == TxnOffsetCommitRequest(
            transactional_id=ID,
            group_id="g",
            producer_id=PRODUCER_ID,
            producer_epoch=0,
            generation_id_or_member_epoch=7,
            member_id="m",
            group_instance_id="i",
            topics=[topic],
        )

    async def test_a_coordinator_of_an_older_version_gives_no_new_epoch(self) -> None:
        """This happens while the brokers of a cluster are being upgraded."""
        async with TransactionBroker(is_v2=True, end_txn=(0, 4)) as broker, producer_of(broker) as producer:
            end = broker.handlers[ApiKey.END_TXN]

            def old(request: Message, version: int) -> Answer:
                broker.is_v2 = False
                answer = end(request, version)
                broker.is_v2 = True
                return answer  # type: ignore[return-value]

            broker.handlers[ApiKey.END_TXN] = old
            await producer.init_transactions()
            for _ in range(2):
                await producer.begin_transaction()
                await producer.send_and_wait(TOPIC, "a", partition=1)
                await producer.commit_transaction()
            headers = [header for header, _ in broker.logs[TopicPartition(TOPIC, 1)].batches]
            assert [(header.producer_epoch, header.base_sequence) for header in headers] == [(0, 0), (0, 1)]

    @pytest.mark.parametrize("is_v2", [False, True])
    async def test_an_empty_transaction_sends_no_request(self, is_v2: bool) -> None:
        async with begun(is_v2=is_v2) as (broker, producer):
            await producer.send_offsets_to_transaction({}, GROUP)
            await producer.commit_transaction()
            await producer.begin_transaction()
            await producer.abort_transaction()
            await producer.begin_transaction()
            assert broker.dialogue == []

    @pytest.mark.parametrize("is_v2", [False, True])
    async def test_a_transaction_of_offsets_alone_is_ended(self, is_v2: bool) -> None:
        async with begun(is_v2=is_v2) as (broker, producer):
            await producer.send_offsets_to_transaction(OFFSETS, GROUP)
            await producer.commit_transaction()
            await producer.begin_transaction()
            await producer.commit_transaction()
            assert broker.dialogue == [*([] if is_v2 else ["add offsets of g"]), "offsets of g", "commit"]

    @pytest.mark.parametrize("is_v2", [False, True])
    async def test_an_abort_drops_unsent_records(self, is_v2: bool) -> None:
        async with begun(is_v2=is_v2, linger_ms=10_000) as (broker, producer):
            waiting = await producer.send(TOPIC, "a", partition=0)
            before = now_ms()
            await producer.abort_transaction()
            with pytest.raises(TransactionAbortedException, match="the transaction was aborted"):
                await waiting
            assert (now_ms(), broker.dialogue) == (before, [])

    async def test_an_abort_waits_for_batches_in_flight(self) -> None:
        """A batch that arrives after the abort marker would belong to the next transaction."""
        async with begun() as (broker, producer):
            write = broker.handlers[ApiKey.PRODUCE]

            async def slow(request: Message, version: int) -> Answer:
                await asyncio.sleep(0.3)
                return write(request, version)  # type: ignore[return-value]

            broker.handlers[ApiKey.PRODUCE] = slow
            future = await producer.send(TOPIC, "a", partition=0)
            await asyncio.sleep(0.1)
            await producer.abort_transaction()
            assert future.result().offset == 0
            assert broker.dialogue == ["add [('t', 0)]", "produce [('t', 0)]", "abort"]

    @pytest.mark.parametrize("is_v2", [False, True])
    async def test_an_abort_while_a_batch_is_prepared(self, is_v2: bool) -> None:
        """The abort drops the batch. The sender ends what it does for it, and sends the next transaction."""
        async with begun(is_v2=is_v2) as (broker, producer):
            slow_key = ApiKey.METADATA if is_v2 else ApiKey.ADD_PARTITIONS_TO_TXN
            quick = broker.handlers[slow_key]

            async def slow(request: Message, version: int) -> Answer:
                await asyncio.sleep(0.3)
                broker.topics[0].partitions[0].leader_id = broker.node_id
                return quick(request, version)  # type: ignore[return-value]

            if is_v2:
                broker.topics[0].partitions[0].leader_id = -1
                await producer.partitions_for(TOPIC)
            broker.handlers[slow_key] = slow
            future = await producer.send(TOPIC, "a", partition=0)
            await asyncio.sleep(0.1)
            await producer.abort_transaction()
            with pytest.raises(TransactionAbortedException):
                await future
            await asyncio.sleep(1)
            await producer.begin_transaction()
            await producer.send(TOPIC, "b", partition=0)
            await producer.commit_transaction()
            dialogue = ["add [('t', 0)]", "produce [('t', 0)]", "commit"]
            assert broker.dialogue == (dialogue[1:] if is_v2 else [dialogue[0], "abort", *dialogue])
            assert broker.values(0) == ["b"]

    @pytest.mark.parametrize("end", ["commit", "abort"])
    async def test_no_batch_is_left_after_the_end(self, end: str) -> None:
        """It would belong to the next transaction: of a future that was cancelled, or sent while the commit waits."""
        async with begun() as (broker, producer):
            write = broker.handlers[ApiKey.PRODUCE]

            async def slow(request: Message, version: int) -> Answer:
                await asyncio.sleep(0.3)
                return write(request, version)  # type: ignore[return-value]

            broker.handlers[ApiKey.PRODUCE] = slow
            (await producer.send(TOPIC, "a", partition=0)).cancel()
            await asyncio.sleep(0.1)
            ending = asyncio.create_task(producer.commit_transaction() if end == "commit" else _abort(producer))
            await asyncio.sleep(0.1)
            with nullcontext() if end == "commit" else pytest.raises(IllegalStateException, match="to be aborted"):
                await producer.send(TOPIC, "b", partition=0)
            await ending
            sent = ["produce [('t', 0)]"] * (2 if end == "commit" else 1)
            assert broker.dialogue == ["add [('t', 0)]", *sent, end]

    async def test_a_negative_offset_is_rejected(self) -> None:
        async with begun() as (broker, producer):
            with pytest.raises(ValueError, match="offset of in-0: -1 is not from 0 to "):
                await producer.send_offsets_to_transaction({TopicPartition("in", 0): OffsetAndMetadata(-1)}, GROUP)
            assert broker.dialogue == []

    async def test_a_commit_sends_buffered_records(self) -> None:
        async with begun(linger_ms=10_000) as (broker, producer):
            future = await producer.send(TOPIC, "a", partition=0)
            await producer.commit_transaction()
            assert future.result().offset == 0
            assert broker.dialogue == ["add [('t', 0)]", "produce [('t', 0)]", "commit"]

    @pytest.mark.parametrize("fails", [False, True])
    async def test_close_aborts_an_open_transaction(self, fails: bool) -> None:
        async with TransactionBroker(is_v2=False) as broker:
            async with producer_of(broker) as producer:
                await producer.init_transactions()
                await producer.begin_transaction()
                await producer.send_and_wait(TOPIC, "a", partition=0)
                if fails:
                    broker.errors[ApiKey.PRODUCE] = [Errors.INVALID_RECORD]
                    with pytest.raises(KafkaError, match="INVALID_RECORD"):
                        await producer.send_and_wait(TOPIC, "b", partition=0)
                broker.dialogue.clear()
            assert broker.dialogue == (["abort", "init 0 0"] if fails else ["abort"])

    async def test_close_leaves_a_finished_transaction_alone(self) -> None:
        async with TransactionBroker(is_v2=False) as broker:
            async with producer_of(broker) as producer:
                await producer.init_transactions()
                await producer.begin_transaction()
                await producer.send_and_wait(TOPIC, "a", partition=0)
                await producer.commit_transaction()
            assert broker.dialogue[-1] == "commit"


async def _init(producer: Producer) -> None:
    await producer.init_transactions()


async def _begin(producer: Producer) -> None:
    await producer.begin_transaction()


async def _send(producer: Producer) -> None:
    await producer.send_and_wait(TOPIC, "x", partition=0)


async def _send_offsets(producer: Producer) -> None:
    await producer.send_offsets_to_transaction(OFFSETS, GROUP)


async def _commit(producer: Producer) -> None:
    await producer.commit_transaction()


async def _abort(producer: Producer) -> None:
    await producer.abort_transaction()


STEPS: dict[str, Step] = {
    "init": _init,
    "begin": _begin,
    "send": _send,
    "offsets": _send_offsets,
    "commit": _commit,
    "abort": _abort,
}
IN_TRANSACTION = ["init", "begin"]
FATAL = [
    Errors.PRODUCER_FENCED,
    Errors.INVALID_PRODUCER_ID_MAPPING,
    Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    Errors.CLUSTER_AUTHORIZATION_FAILED,
    Errors.UNSUPPORTED_VERSION,
    Errors.TRANSACTION_COORDINATOR_FENCED,
]


class TestStates:
    @pytest.mark.parametrize(
        ("before", "state", "allowed"),
        [
            ([], "uninitialized", {"init"}),
            (["init"], "ready", {"begin"}),
            (IN_TRANSACTION, "in transaction", {"send", "offsets", "commit", "abort"}),
            ([*IN_TRANSACTION, "send", "commit"], "ready", {"begin"}),
            ([*IN_TRANSACTION, "send", "abort"], "ready", {"begin"}),
        ],
    )
    @pytest.mark.parametrize("call", STEPS)
    async def test_calls_allowed_in_each_state(
        self, before: list[str], state: str, allowed: set[str], call: str
    ) -> None:
        async with TransactionBroker(is_v2=True) as broker, producer_of(broker) as producer:
            for step in before:
                await STEPS[step](producer)
            heard = len(broker.dialogue)
            if call in allowed:
                await STEPS[call](producer)
            else:
                with pytest.raises(IllegalStateException, match=f"the transaction is {state}"):
                    await STEPS[call](producer)
                assert len(broker.dialogue) == heard

    async def test_a_producer_without_a_transactional_id_has_no_transactions(self) -> None:
        async with TransactionBroker(is_v2=True) as broker, Producer(bootstrap_servers=broker.address) as producer:
            for name in ("init", "begin", "offsets", "commit", "abort"):
                with pytest.raises(IllegalStateException, match="no transactional_id"):
                    await STEPS[name](producer)

    @pytest.mark.parametrize("is_v2", [False, True])
    @pytest.mark.parametrize("step", ["send", "offsets"])
    async def test_after_a_failure_the_transaction_can_only_be_aborted(self, step: str, is_v2: bool) -> None:
        key = ApiKey.PRODUCE if step == "send" else ApiKey.TXN_OFFSET_COMMIT
        error = Errors.INVALID_RECORD if step == "send" else Errors.GROUP_AUTHORIZATION_FAILED
        async with begun(is_v2=is_v2) as (broker, producer):
            await _send(producer)
            broker.errors[key] = [error]
            with pytest.raises(KafkaError, match=error.name):
                await STEPS[step](producer)
            for call in ("send", "offsets", "commit", "begin", "init"):
                with pytest.raises(KafkaError, match=error.name):
                    await STEPS[call](producer)
            broker.dialogue.clear()
            await _abort(producer)
            # The epoch changes, so that the broker rejects late batches of the aborted transaction.
            assert broker.dialogue == (["abort"] if is_v2 else ["abort", "init 0 0"])
            assert broker.producer == (PRODUCER_ID, 1)
            await _begin(producer)
            await _send(producer)
            await _commit(producer)

    async def test_a_new_epoch_needs_a_broker_with_kip_360(self) -> None:
        async with TransactionBroker(is_v2=False, init_producer_id=(0, 2)) as broker, producer_of(broker) as producer:
            await _init(producer)
            await _begin(producer)
            broker.errors[ApiKey.PRODUCE] = [Errors.INVALID_RECORD]
            with pytest.raises(KafkaError, match="INVALID_RECORD"):
                await _send(producer)
            with pytest.raises(KafkaError, match="UNSUPPORTED_VERSION"):
                await _abort(producer)

    @pytest.mark.parametrize("error", FATAL)
    @pytest.mark.parametrize(
        ("key", "step"),
        [
            (ApiKey.INIT_PRODUCER_ID, "init"),
            (ApiKey.ADD_PARTITIONS_TO_TXN, "send"),
            (ApiKey.PRODUCE, "send"),
            (ApiKey.ADD_OFFSETS_TO_TXN, "offsets"),
            (ApiKey.TXN_OFFSET_COMMIT, "offsets"),
            (ApiKey.END_TXN, "commit"),
            (ApiKey.END_TXN, "abort"),
        ],
    )
    async def test_fatal_errors(self, key: ApiKey, step: str, error: Errors) -> None:
        async with TransactionBroker(is_v2=False) as broker, producer_of(broker) as producer:
            broker.errors[key] = [error]
            if step != "init":
                await _init(producer)
                await _begin(producer)
            if step in ("commit", "abort"):
                await _send(producer)
            before = now_ms()
            with pytest.raises(KafkaError, match=error.name):
                await STEPS[step](producer)
            assert now_ms() == before
            for call in STEPS.values():
                with pytest.raises(KafkaError, match=error.name):
                    await call(producer)

    async def test_a_stale_epoch_of_a_record_makes_the_transaction_abortable(self) -> None:
        """The transaction can be aborted, and the abort shows whether there is another producer (KIP-588)."""
        async with begun() as (broker, producer):
            broker.errors[ApiKey.PRODUCE] = [Errors.INVALID_PRODUCER_EPOCH]
            with pytest.raises(KafkaError, match="INVALID_PRODUCER_EPOCH"):
                await _send(producer)
            with pytest.raises(KafkaError, match="INVALID_PRODUCER_EPOCH"):
                await _commit(producer)
            await _abort(producer)
            await _begin(producer)
            await _send(producer)
            await _commit(producer)

    async def test_stale_epochs_of_several_batches_make_the_transaction_abortable(self) -> None:
        async with begun(linger_ms=5, max_request_size=100, batch_size=1) as (broker, producer):
            broker.errors[ApiKey.PRODUCE] = [Errors.INVALID_PRODUCER_EPOCH] * 2
            for partition in (0, 1):
                await producer.send(TOPIC, "a", partition=partition)
            with pytest.raises(KafkaError, match="INVALID_PRODUCER_EPOCH"):
                await _commit(producer)
            assert broker.dialogue[-2:] == ["produce [('t', 0)]", "produce [('t', 1)]"]
            await _abort(producer)
            await _begin(producer)
            await _send(producer)
            await _commit(producer)

    @pytest.mark.parametrize("is_v2", [False, True])
    @pytest.mark.parametrize("is_cancelled", [False, True])
    async def test_an_abort_without_a_response_can_only_be_repeated(self, is_v2: bool, is_cancelled: bool) -> None:
        """A commit would store a part of the transaction, or be a commit of the next one."""
        async with begun(is_v2=is_v2) as (broker, producer):
            await _send(producer)
            end = broker.handlers[ApiKey.END_TXN]
            broker.handlers[ApiKey.END_TXN] = lambda request, version: None
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1 if is_cancelled else None):
                    await producer.abort_transaction(timeout_ms=200)
            broker.handlers[ApiKey.END_TXN] = end
            for call in (_send, _send_offsets, _commit):
                with pytest.raises(IllegalStateException, match="the transaction is to be aborted"):
                    await call(producer)
            broker.hang_up()
            await _abort(producer)
            assert broker.dialogue[-1] == "abort"
            await _begin(producer)
            await _send(producer)
            await _commit(producer)

    async def test_a_stale_epoch_of_a_late_record_changes_no_later_state(self) -> None:
        async with begun() as (broker, producer):
            broker.errors[ApiKey.END_TXN] = [Errors.INVALID_PRODUCER_EPOCH]
            await _send(producer)
            with pytest.raises(KafkaError, match="INVALID_PRODUCER_EPOCH"):
                await _commit(producer)
            with pytest.raises(KafkaError, match="INVALID_PRODUCER_EPOCH"):
                await _abort(producer)

    @pytest.mark.parametrize(
        ("key", "step"),
        [
            (ApiKey.INIT_PRODUCER_ID, "init"),
            (ApiKey.ADD_PARTITIONS_TO_TXN, "send"),
            (ApiKey.PRODUCE, "send"),
            (ApiKey.ADD_OFFSETS_TO_TXN, "offsets"),
            (ApiKey.TXN_OFFSET_COMMIT, "offsets"),
            (ApiKey.END_TXN, "commit"),
            (ApiKey.END_TXN, "abort"),
        ],
    )
    async def test_retriable_errors_are_retried(self, key: ApiKey, step: str) -> None:
        error = Errors.NOT_LEADER_OR_FOLLOWER if key is ApiKey.PRODUCE else Errors.CONCURRENT_TRANSACTIONS
        async with TransactionBroker(is_v2=False) as broker, producer_of(broker) as producer:
            broker.errors[key] = [error, error]
            if step != "init":
                await _init(producer)
                await _begin(producer)
            if step in ("commit", "abort"):
                await _send(producer)
            broker.dialogue.clear()
            before = now_ms()
            await STEPS[step](producer)
            assert 240 <= now_ms() - before <= 360
            assert max(broker.dialogue.count(text) for text in broker.dialogue) == 3

    async def test_partitions_that_could_not_be_added_are_added_again(self) -> None:
        async with begun() as (broker, producer):
            broker.errors[ApiKey.ADD_PARTITIONS_TO_TXN] = [Errors.COORDINATOR_NOT_AVAILABLE]
            await _send(producer)
            await _send(producer)
            assert broker.dialogue == ["add [('t', 0)]"] * 2 + ["produce [('t', 0)]"] * 2
            assert len(broker.requests_of(ApiKey.FIND_COORDINATOR)) == 2

    @pytest.mark.parametrize("error", [Errors.TOPIC_AUTHORIZATION_FAILED, Errors.INVALID_TXN_STATE])
    async def test_rejected_partitions_fail_the_records_and_the_transaction(self, error: Errors) -> None:
        async with begun(linger_ms=5) as (broker, producer):
            broker.errors[ApiKey.ADD_PARTITIONS_TO_TXN] = [error]
            sent = [await producer.send(TOPIC, "x", partition=index) for index in (0, 1)]
            for future in sent:
                with pytest.raises(KafkaError, match=f"{error.name}.*AddPartitionsToTxn of txn"):
                    await future
            with pytest.raises(KafkaError, match=error.name):
                await _commit(producer)
            await _abort(producer)
            assert broker.dialogue == ["add [('t', 0), ('t', 1)]"]

    async def test_a_commit_that_timed_out_can_be_repeated(self) -> None:
        async with begun(max_block_ms=500) as (broker, producer):
            await _send(producer)
            end, broker.handlers[ApiKey.END_TXN] = broker.handlers[ApiKey.END_TXN], lambda *_: None
            before = now_ms()
            with pytest.raises(TimeoutException, match="end the transaction: timed out after 500 ms"):
                await _commit(producer)
            assert now_ms() - before == 500
            for name in ("send", "offsets", "abort", "begin"):
                with pytest.raises(IllegalStateException, match="the transaction is ending"):
                    await STEPS[name](producer)
            with pytest.raises(TimeoutException, match="timed out after 70 ms"):
                await producer.commit_transaction(timeout_ms=70)
            broker.handlers[ApiKey.END_TXN] = end
            broker.hang_up()
            await _commit(producer)
            await _begin(producer)

    async def test_a_rejected_commit_can_be_aborted(self) -> None:
        async with begun() as (broker, producer):
            await _send(producer)
            broker.errors[ApiKey.END_TXN] = [Errors.INVALID_TXN_STATE]
            with pytest.raises(KafkaError, match=r"INVALID_TXN_STATE.*EndTxn of txn"):
                await _commit(producer)
            with pytest.raises(KafkaError, match="INVALID_TXN_STATE"):
                await _commit(producer)
            await _abort(producer)
            assert broker.dialogue[-3:] == ["commit", "abort", "init 0 0"]

    @pytest.mark.parametrize("call", ["init", "abort"])
    async def test_timeouts(self, call: str) -> None:
        async with TransactionBroker(is_v2=True) as broker, producer_of(broker, max_block_ms=300) as producer:
            if call == "abort":
                await _init(producer)
                await _begin(producer)
                await _send(producer)
            for key in (ApiKey.INIT_PRODUCER_ID, ApiKey.END_TXN):
                broker.handlers[key] = lambda *_: None
            method = producer.init_transactions if call == "init" else producer.abort_transaction
            for timeout_ms, expected in ((None, 300), (0, 0), (70, 70)):
                before = now_ms()
                with pytest.raises(TimeoutException, match=f"timed out after {expected} ms"):
                    await method(timeout_ms=timeout_ms)
                assert now_ms() - before == expected

    async def test_a_commit_after_a_failure_is_rejected_at_once(self) -> None:
        async with begun() as (broker, producer):
            write = broker.handlers[ApiKey.PRODUCE]

            async def slow(request: Message, version: int) -> Answer:
                await asyncio.sleep(5)
                return write(request, version)  # type: ignore[return-value]

            broker.handlers[ApiKey.PRODUCE] = slow
            await producer.send(TOPIC, "a", partition=0)
            broker.errors[ApiKey.TXN_OFFSET_COMMIT] = [Errors.GROUP_AUTHORIZATION_FAILED]
            with pytest.raises(KafkaError, match="GROUP_AUTHORIZATION_FAILED"):
                await _send_offsets(producer)
            before = now_ms()
            with pytest.raises(KafkaError, match="GROUP_AUTHORIZATION_FAILED"):
                await _commit(producer)
            assert now_ms() == before

    async def test_a_record_that_waits_for_room_is_not_sent_in_the_next_transaction(self) -> None:
        async with begun(linger_ms=10_000, buffer_memory=200) as (_, producer):
            first = await producer.send(TOPIC, "x" * 150, partition=0)
            second = asyncio.create_task(producer.send(TOPIC, "x" * 150, partition=0))
            await asyncio.sleep(1)
            before = now_ms()
            await producer.abort_transaction()
            with pytest.raises(IllegalStateException, match="the transaction is ready"):
                await second
            assert now_ms() == before
            assert isinstance(first.exception(), TransactionAbortedException)

    async def test_records_that_failed_fail_the_commit(self) -> None:
        async with begun(linger_ms=10) as (broker, producer):
            broker.errors[ApiKey.PRODUCE] = [Errors.INVALID_RECORD]
            await producer.send(TOPIC, "x", partition=0)
            with pytest.raises(KafkaError, match="INVALID_RECORD"):
                await _commit(producer)
            assert "commit" not in broker.dialogue

    async def test_a_lost_sequence_fails_the_transaction(self) -> None:
        async with begun() as (broker, producer):
            broker.errors[ApiKey.PRODUCE] = [Errors.UNKNOWN_PRODUCER_ID]
            with pytest.raises(KafkaError, match="UNKNOWN_PRODUCER_ID"):
                await _send(producer)
            assert broker.dialogue == ["add [('t', 0)]", "produce [('t', 0)]"]
