# SPDX-License-Identifier: Apache-2.0
"""A model of a transactional producer that commits offsets of a group and writes records (consume, transform, produce).

It uses transactions version 1 or 2 (KIP-890). Some transactions it aborts, and some it abandons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcoord.simulation.client import RETRIABLE, RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.ledger import FLUSHED_TOPIC, RECORD_PARTITIONS, Attempt, Ledger, Place, Transaction
from kcoord.simulation.observer import CommitKey
from kcoord.simulation.promises import Promises
from kcoord.simulation.record_producer import REFUSED, produce_request, produced
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)
from kcoord_protocol.record_batch import Record, encode_batch

_INIT_VERSION: Final = 4
_ADD_VERSION: Final = 3
_FETCH_VERSION: Final = 9
_TIMEOUTS_MS: Final = (2_000, 8_000)
_PAUSE_MS: Final = 600
_FORGET_PROBABILITY: Final = 0.1
_COMMIT_PROBABILITY: Final = 0.7
_NEW_PRODUCE_VERSION: Final = 13
_OLD_PRODUCE_VERSION: Final = 11
_NOT_NOW: Final = frozenset({Errors.CONCURRENT_TRANSACTIONS, Errors.NOT_ENOUGH_REPLICAS, Errors.NOT_CONTROLLER})
_START_ANEW: Final = frozenset(
    {
        Errors.PRODUCER_FENCED,
        Errors.INVALID_PRODUCER_EPOCH,
        Errors.INVALID_PRODUCER_ID_MAPPING,
        Errors.INVALID_TXN_STATE,
        Errors.TRANSACTION_ABORTABLE,
        Errors.UNKNOWN_MEMBER_ID,
        Errors.ILLEGAL_GENERATION,
        Errors.OUT_OF_ORDER_SEQUENCE_NUMBER,
    }
)


class TransactionalProducer(SimulatedClient):
    """A producer with one transactional id. It starts again with InitProducerId after an error that ends its epoch."""

    def __init__(
        self,
        number: int,
        group_id: str,
        topic: str,
        scene: Scene,
        promises: Promises,
        ledger: Ledger | None,
    ) -> None:
        super().__init__(f"producer-{number}", scene)
        self.group_id = group_id
        self.committed = 0
        self._transactional_id = f"tx-{number}"
        self._topic = topic
        self._trace = scene.trace
        self._commits = promises.commits
        self._promises = promises
        self._ledger = ledger
        """None if the run has no producers and readers of records."""
        self._transaction = Transaction()
        self._place = Place(FLUSHED_TOPIC, self.random.randrange(RECORD_PARTITIONS))
        self._sequence = 0
        self._values = 0
        self._is_new_protocol = self.random.random() < 0.5
        self._producer = -1, -1
        self._pending: list[tuple[CommitKey, int]] = []
        self._step: Callable[[], None] = self._init
        self._faults_on = True
        self._committed_before_settling = 0

    def start(self) -> None:
        self._after(0, self._init)

    def settle(self) -> None:
        self._faults_on = False
        self._committed_before_settling = self.committed

    def is_settled(self) -> bool:
        """True once a transaction that began after the end of the faults is committed."""
        return self.committed > self._committed_before_settling + 1

    def on_timeout(self) -> None:
        """Sends the same request again; all requests of a producer may be repeated."""
        self._after(RETRY_MS, self._step)

    def _after(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._step = action
        self.clock.after(delay_ms, lambda: action() if not self.is_waiting and self._step == action else None)

    def _on_error(self, error: int, again: Callable[[], None]) -> None:
        if error in RETRIABLE | REFUSED | _NOT_NOW:
            self._after(RETRY_MS, again)
        elif error in _START_ANEW:
            self._trace.add("producer-anew", f"{self.name} {error}")
            self._pending = []
            self._after(RETRY_MS, self._init)
        else:
            raise self.unexpected(error, "a transactional producer")

    def _init(self) -> None:
        request = InitProducerIdRequest(
            transactional_id=self._transactional_id, transaction_timeout_ms=self.random.choice(_TIMEOUTS_MS)
        )

        def on_answer(body: bytes) -> None:
            response = InitProducerIdResponse.decode(body, _INIT_VERSION)
            if response.error_code:
                self._on_error(response.error_code, self._init)
                return
            self._become(response.producer_id, response.producer_epoch)
            self._after(self.random.randint(0, _PAUSE_MS), self._begin)

        self.request(ApiKey.INIT_PRODUCER_ID, _INIT_VERSION, self.group_id, request, on_answer)

    def _become(self, producer_id: int, epoch: int) -> None:
        """Takes a producer id and epoch. With a new epoch the sequence begins at 0."""
        if self._producer != (producer_id, epoch):
            self._producer, self._sequence = (producer_id, epoch), 0

    def _begin(self) -> None:
        self._pending = []
        self._transaction = Transaction()
        (self._commit if self._is_new_protocol else self._add)()

    def _add(self) -> None:
        self._step = self._add
        producer_id, epoch = self._producer
        request = AddOffsetsToTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=producer_id,
            producer_epoch=epoch,
            group_id=self.group_id,
        )

        def on_answer(body: bytes) -> None:
            error = AddOffsetsToTxnResponse.decode(body, _ADD_VERSION).error_code
            if error:
                self._on_error(error, self._add)
            else:
                self._commit()

        self.request(ApiKey.ADD_OFFSETS_TO_TXN, _ADD_VERSION, self.group_id, request, on_answer)

    def _commit(self) -> None:
        self._step = self._commit
        producer_id, epoch = self._producer
        offset = self._commits.next_offset()
        partition = self.random.randrange(self.options.partitions)
        committed = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
            partition_index=partition, committed_offset=offset, committed_metadata=""
        )
        request = TxnOffsetCommitRequest(
            transactional_id=self._transactional_id,
            group_id=self.group_id,
            producer_id=producer_id,
            producer_epoch=epoch,
            topics=[TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(name=self._topic, partitions=[committed])],
        )
        version = 5 if self._is_new_protocol else 3

        def on_answer(body: bytes) -> None:
            error = TxnOffsetCommitResponse.decode(body, version).topics[0].partitions[0].error_code
            if error:
                self._on_error(error, self._commit)
                return
            self._pending.append((CommitKey(self.group_id, self._topic, partition), offset))
            self._go_on()

        self.request(ApiKey.TXN_OFFSET_COMMIT, version, self.group_id, request, on_answer)

    def _go_on(self) -> None:
        chance = self.random.random()
        if self._faults_on and chance < _FORGET_PROBABILITY:
            self._trace.add("producer-forgets", self.name)
            self._after(self.random.randint(1, 2 * max(_TIMEOUTS_MS)), self._init)
        elif chance < 0.3:
            self._after(self.random.randint(0, _PAUSE_MS), self._commit)
        elif chance < 0.5 and self._ledger is not None:
            self._after(self.random.randint(0, _PAUSE_MS), self._write)
        else:
            is_committed = not self._faults_on or self.random.random() < _COMMIT_PROBABILITY
            self._end(is_committed)

    # Records.

    def _write(self) -> None:
        """Writes one record. With transactions version 1 the producer sends AddPartitionsToTxn first."""
        assert self._ledger is not None
        value = f"{self.name}/{self._values}".encode()
        self._values += 1
        self._ledger.attempt(value, Attempt(self._place, copies=1, transaction=self._transaction))
        (self._produce if self._is_new_protocol else self._add_partition)(value)

    def _add_partition(self, value: bytes) -> None:
        def again() -> None:
            self._add_partition(value)

        self._step = again
        producer_id, epoch = self._producer
        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(
            name=self._place.topic, partitions=[self._place.partition]
        )
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._transactional_id,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[topic],
        )

        def on_answer(body: bytes) -> None:
            response = AddPartitionsToTxnResponse.decode(body, _ADD_VERSION)
            error = response.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
            if error:
                self._on_error(error, again)
            else:
                self._produce(value)

        self.request(ApiKey.ADD_PARTITIONS_TO_TXN, _ADD_VERSION, self.group_id, request, on_answer)

    def _produce(self, value: bytes) -> None:
        def again() -> None:
            self._produce(value)

        assert self._ledger is not None
        self._step = again
        producer_id, epoch = self._producer
        batch = encode_batch(
            [Record(None, value, timestamp_ms=self.clock.now_ms)],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=self._sequence,
            is_transactional=True,
        )
        topic_id = self._promises.topic_id(self._place.topic) or bytes(16)
        version = _NEW_PRODUCE_VERSION if self._is_new_protocol else _OLD_PRODUCE_VERSION
        ledger, power_losses = self._ledger, self._ledger.glance().power_losses

        def on_answer(body: bytes) -> None:
            answer = produced(body, version)
            if answer.error_code:
                self._on_error(answer.error_code, again)
                return
            ledger.acknowledge(self._place, answer.base_offset, value, power_losses)
            self._sequence += 1
            self._go_on()

        request = produce_request(self._place, topic_id, batch, transactional_id=self._transactional_id)
        self.request(ApiKey.PRODUCE, version, self.group_id, request, on_answer)

    def _end(self, is_committed: bool) -> None:
        def again() -> None:
            self._end(is_committed)

        self._step = again
        self._transaction.may_be_committed = is_committed
        producer_id, epoch = self._producer
        version = 5 if self._is_new_protocol else 3
        request = EndTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=is_committed,
        )

        def on_answer(body: bytes) -> None:
            response = EndTxnResponse.decode(body, version)
            if response.error_code:
                self._on_error(response.error_code, again)
                return
            if version >= 5:
                self._become(response.producer_id, response.producer_epoch)
            self._transaction.is_committed = is_committed
            if is_committed:
                self._trace.add("transaction-committed", self.name)
                self._after(1, lambda: self._read(dict(self._pending)))
            else:
                self._trace.add("transaction-aborted", self.name)
                self._after(self.random.randint(0, _PAUSE_MS), self._begin)

        self.request(ApiKey.END_TXN, version, self.group_id, request, on_answer)

    def _read(self, expected: dict[CommitKey, int]) -> None:
        """I-11 for transactions: a stable fetch after the acknowledged commit returns its offsets."""
        # By name: a fetch of all topics omits partitions that have only a pending offset.
        topic = OffsetFetchRequest.OffsetFetchRequestTopics(
            name=self._topic, partition_indexes=sorted({key.partition for key in expected})
        )
        group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=self.group_id, topics=[topic])
        request = OffsetFetchRequest(groups=[group], require_stable=True)

        def on_answer(body: bytes) -> None:
            answer = OffsetFetchResponse.decode(body, _FETCH_VERSION).groups[0]
            if answer.error_code in RETRIABLE:
                self._after(RETRY_MS, lambda: self._read(expected))
                return
            if answer.error_code:
                raise self.unexpected(answer.error_code, "OffsetFetch")
            self._commits.answered(expected, answer)
            self.committed += 1
            self._after(self.random.randint(0, _PAUSE_MS), self._begin)

        self.request(ApiKey.OFFSET_FETCH, _FETCH_VERSION, self.group_id, request, on_answer)
