# SPDX-License-Identifier: Apache-2.0
"""A partition with transactions, and the coordinator that ends them, as far as producers of Apache Kafka see them.

From the behaviour of Apache Kafka 3.9.1 and 4.3.1 with transaction.version 1: the first batch of a transaction is
verified with the coordinator, later ones are not. Epochs and sequence numbers are those of ModelPartition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

from kcoord.runtime.result import Producer
from kcoord.simulation.upstream.partition import ModelPartition
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import BatchHeader, encode_control_batch


class TransactionPhase(Enum):
    """What a transaction is doing."""

    EMPTY = "empty"
    ONGOING = "ongoing"
    ENDING = "ending"


@dataclass
class UpstreamTransaction:
    """The transaction of one transactional id. `has_partition`: the partition is part of it."""

    producer: Producer
    status: TransactionPhase = TransactionPhase.EMPTY
    has_partition: bool = False


class UpstreamTransactions:
    """Coordinates the transactions of clients. Markers wait in `markers` until `write_marker`."""

    def __init__(self) -> None:
        self.transactions: dict[int, UpstreamTransaction] = {}
        self.markers: deque[tuple[int, bytes]] = deque()
        self._late: dict[int, list[Callable[[], bool]]] = {}
        """By producer id: what `when_next_begins` calls."""

    def init(self, producer_id: int) -> Producer:
        """InitProducerId: fences earlier instances of the client, whose transaction is aborted."""
        transaction = self.transactions.get(producer_id)
        if transaction is None:
            transaction = self.transactions[producer_id] = UpstreamTransaction(Producer(producer_id, -1))
        if transaction.status is TransactionPhase.ONGOING:
            self.time_out(producer_id)
        if transaction.status is TransactionPhase.ENDING:
            raise KafkaError(Errors.CONCURRENT_TRANSACTIONS)
        transaction.producer = Producer(producer_id, transaction.producer.producer_epoch + 1)
        return transaction.producer

    def add_partition(self, producer: Producer) -> None:
        transaction = self._checked(producer)
        if transaction.status is TransactionPhase.ENDING:
            raise KafkaError(Errors.CONCURRENT_TRANSACTIONS)
        transaction.status, transaction.has_partition = TransactionPhase.ONGOING, True
        waiting = self._late.pop(producer.producer_id, [])
        self._late[producer.producer_id] = [arrive for arrive in waiting if not arrive()]

    def when_next_begins(self, producer_id: int, arrive: Callable[[], bool]) -> None:
        """Calls `arrive` whenever a client begins a transaction, until the callable returns True."""
        self._late.setdefault(producer_id, []).append(arrive)

    def verify(self, producer: Producer) -> None:
        """Called by the leader of the partition before the first batch of a transaction."""
        transaction = self._checked(producer)
        if transaction.status is TransactionPhase.ENDING:
            # What an old version of Produce gets if a transaction ends.
            raise KafkaError(Errors.NOT_ENOUGH_REPLICAS)
        if not transaction.has_partition:
            raise KafkaError(Errors.INVALID_TXN_STATE)

    def end(self, producer: Producer, *, committed: bool) -> None:
        transaction = self._checked(producer)
        if transaction.status is not TransactionPhase.ONGOING:
            raise KafkaError(Errors.INVALID_TXN_STATE)
        self._decide(transaction, committed=committed)

    def time_out(self, producer_id: int) -> None:
        """Aborts a transaction that takes too long. The client is fenced."""
        transaction = self.transactions[producer_id]
        if transaction.status is TransactionPhase.ONGOING:
            transaction.producer = Producer(producer_id, transaction.producer.producer_epoch + 1)
            self._decide(transaction, committed=False)

    def _decide(self, transaction: UpstreamTransaction, *, committed: bool) -> None:
        transaction.status = TransactionPhase.ENDING
        kind = ControlRecordType.COMMIT if committed else ControlRecordType.ABORT
        producer_id, epoch = transaction.producer
        marker = encode_control_batch(
            kind, end_txn_marker(0), timestamp_ms=1, producer_id=producer_id, producer_epoch=epoch
        )
        self.markers.append((producer_id, marker))

    def _checked(self, producer: Producer) -> UpstreamTransaction:
        transaction = self.transactions[producer.producer_id]
        if producer != transaction.producer:
            raise KafkaError(Errors.INVALID_PRODUCER_EPOCH)
        return transaction

    def write_marker(self, partition: ModelPartition) -> None:
        """Writes the oldest marker to all replicas, and ends its transaction."""
        producer_id, marker = self.markers[0]
        partition.append(marker)
        partition.replicate()
        self.markers.popleft()
        transaction = self.transactions[producer_id]
        transaction.status, transaction.has_partition = TransactionPhase.EMPTY, False


class TransactionalPartition(ModelPartition):
    """A partition whose leader verifies transactions."""

    def __init__(self, random: Random, coordinator: UpstreamTransactions) -> None:
        super().__init__(random)
        self._coordinator = coordinator
        self.ongoing: set[int] = set()
        """The producers with a batch after their last marker."""

    def _check(self, header: BatchHeader) -> int | None:
        if header.is_transactional and not header.is_control and header.producer_id not in self.ongoing:
            self._coordinator.verify(Producer(header.producer_id, header.producer_epoch))
        return super()._check(header)

    def _take(self, header: BatchHeader, batch: bytes) -> None:
        super()._take(header, batch)
        if header.is_control:
            self.ongoing.discard(header.producer_id)
        elif header.is_transactional:
            self.ongoing.add(header.producer_id)

    def truncate(self, offset: int) -> None:
        self.ongoing = set()
        super().truncate(offset)
