# SPDX-License-Identifier: Apache-2.0
"""The first batches of a transaction: the transaction coordinator agrees before they are written (KIP-890).

The life of such a Produce request, as a task in the event loop:

1. It waits for earlier requests of the same producer and partition, which also wait.
2. Each batch takes a verification ticket from its partition. The marker that ends the transaction invalidates the
   tickets, so a late batch cannot open the transaction again.
3. The coordinator, here or on another worker, adds the partitions to the transaction (v12 and later). For older
   requests it verifies that the transaction has them, if `transaction.partition.verification.enable`. The addition is
   durable before the coordinator agrees, so every transaction in a partition has a coordinator that ends it.
4. The batches are appended; partitions that were refused get an error.

Batches of one producer and partition keep the order of their requests. Other requests, also those of the same
connection, are handled meanwhile. If all partitions are in the transaction already, the batches are appended at once.
A crash before step 4 leaves nothing in the partitions; the coordinator aborts the transaction when it times out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from kcoord.config import BrokerConfig
from kcoord.coordinator.transaction.metadata import partitions_of
from kcoord.runtime.result import Producer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.environment import Environment
from kcoord.server.replies import Reply
from kcoord.server.shards.transaction_service import TransactionService
from kcoord.topics.partition import Verified
from kcoord.topics.store import TopicStore
from kcoord.topics.validation import single_batch
from kcoord_protocol.batch_header import BATCH_OVERHEAD_BYTES, TRANSACTIONAL_BIT, Buffer, decode_header
from kcoord_protocol.errors import DecodeError, Errors, KafkaError
from kcoord_protocol.messages import ProduceRequest

T = TypeVar("T")

_LOW_ATTRIBUTES: Final = 22
"""The position of the low byte of a batch's attributes. Most Produce requests need only a look at this byte."""
_ABORTABLE_SINCE_VERSION: Final = 11
_ADDS_PARTITIONS_SINCE_VERSION: Final = 12

_TRY_AGAIN: Final = (
    Errors.NOT_COORDINATOR,
    Errors.COORDINATOR_NOT_AVAILABLE,
    Errors.COORDINATOR_LOAD_IN_PROGRESS,
)
"""Errors of the coordinator that producers do not expect from Produce. NOT_ENOUGH_REPLICAS makes them retry instead."""

Key = tuple[str, int, int]
"""Topic, partition, producer id."""
Agreed = Mapping[tuple[str, int], "Verified | KafkaError"]


class Batch(NamedTuple):
    """A transactional batch of a request."""

    topic: str
    partition: int
    producer: Producer
    is_single: bool
    """False if the records of the partition are rejected: they are not one batch, or the version forbids its codec."""

    @property
    def key(self) -> Key:
        return self.topic, self.partition, self.producer.producer_id


def transactional_batches(
    topic: str, partitions: list[ProduceRequest.PartitionProduceData], api_version: int
) -> list[Batch]:
    """Returns the batches of a topic that are transactional. Records that are no whole batch are left out."""
    batches = []
    for partition in partitions:
        records = partition.records
        if records is None or len(records) < BATCH_OVERHEAD_BYTES or not records[_LOW_ATTRIBUTES] & TRANSACTIONAL_BIT:
            continue
        try:
            header = decode_header(records)
        except DecodeError:
            continue
        if header.size_bytes <= len(records):
            producer = Producer(header.producer_id, header.producer_epoch)
            batches.append(Batch(topic, partition.index, producer, _is_single(records, api_version)))
    return batches


def _is_single(records: Buffer, api_version: int) -> bool:
    try:
        single_batch(records, api_version)
    except KafkaError:
        return False
    return True


class TransactionalProduce:
    """The Produce requests that wait for the agreement of a transaction coordinator."""

    __slots__ = ("_config", "_environment", "_last", "_topics", "_transactions")

    def __init__(
        self, config: BrokerConfig, topics: TopicStore, transactions: TransactionService, environment: Environment
    ) -> None:
        self._config = config
        self._topics = topics
        self._transactions = transactions
        self._environment = environment
        self._last: dict[Key, asyncio.Task[object]] = {}

    def run(
        self,
        context: RequestContext,
        transactional_id: str,
        batches: list[Batch],
        append: Callable[[Agreed], T],
    ) -> Reply[T]:
        """Calls `append` when the coordinator has agreed; at once if all partitions are in the transaction already.

        The batches are of one producer.
        """
        predecessors = {self._last[batch.key] for batch in batches if batch.key in self._last}
        if not predecessors and not self._need_agreement(context, batches):
            return append({})
        task = self._environment.spawn(self._run(context, transactional_id, batches, append, predecessors))
        for batch in batches:
            self._last[batch.key] = task
        task.add_done_callback(lambda done: self._forget(batches, done))
        return task

    def _forget(self, batches: list[Batch], task: asyncio.Task[T]) -> None:
        for batch in batches:
            if self._last.get(batch.key) is task:
                del self._last[batch.key]

    async def _run(
        self,
        context: RequestContext,
        transactional_id: str,
        batches: list[Batch],
        append: Callable[[Agreed], T],
        predecessors: set[asyncio.Task[object]],
    ) -> T:
        if predecessors:
            await asyncio.wait(predecessors)
        tickets, refused = self._take_tickets(context, batches)
        try:
            return append({**refused, **(await self._agree(context, transactional_id, tickets) if tickets else {})})
        finally:
            for batch, ticket in tickets.items():
                self._topics.finish_verification(batch.topic, batch.partition, batch.producer, ticket)

    def _need_agreement(self, context: RequestContext, batches: list[Batch]) -> bool:
        adds = context.api_version >= _ADDS_PARTITIONS_SINCE_VERSION
        if not adds and not self._config.transaction_partition_verification_enable:
            return False
        return not all(
            self._topics.is_in_transaction(batch.topic, batch.partition, batch.producer, context.now_ms)
            for batch in batches
        )

    def _take_tickets(self, context: RequestContext, batches: list[Batch]) -> tuple[dict[Batch, int], Agreed]:
        """Returns the tickets, and the errors of partitions whose log is not usable now."""
        tickets: dict[Batch, int] = {}
        refused: dict[tuple[str, int], Verified | KafkaError] = {}
        for batch in batches:
            try:
                ticket = self._topics.start_verification(batch.topic, batch.partition, batch.producer, context.now_ms)
            except KafkaError as error:
                # The log may be usable by the time of the append. Without a ticket that would be a fatal error.
                refused[batch.topic, batch.partition] = error
                continue
            if ticket is not None:
                tickets[batch] = ticket
        return tickets, refused

    async def _agree(self, context: RequestContext, transactional_id: str, tickets: Mapping[Batch, int]) -> Agreed:
        """Returns for each partition the permission to write, or the error for the producer."""
        version = context.api_version
        adds = version >= _ADDS_PARTITIONS_SINCE_VERSION
        try:
            reply = self._transactions.agree(
                transactional_id,
                next(iter(tickets)).producer,
                partitions_of((batch.topic, [batch.partition]) for batch in tickets),
                context.operation_context(),
                adds=adds,
            )
            errors = await reply if asyncio.isfuture(reply) else reply
        except KafkaError as error:
            refused = KafkaError(_error_for_producer(error.error, version), error.message)
            return {(batch.topic, batch.partition): refused for batch in tickets}
        outcome: dict[tuple[str, int], Verified | KafkaError] = {}
        for batch, ticket in tickets.items():
            place = batch.topic, batch.partition
            code = errors.get(place, Errors.NONE)
            if code is Errors.NONE:
                outcome[place] = Verified(ticket, adds)
            else:
                text = f"{batch.topic}-{batch.partition} is not part of the transaction."
                outcome[place] = KafkaError(_error_for_producer(code, version), text)
        return outcome


def _error_for_producer(error: Errors, version: int) -> Errors:
    if error is Errors.PRODUCER_FENCED:
        return Errors.INVALID_PRODUCER_EPOCH
    if error in _TRY_AGAIN:
        return Errors.NOT_ENOUGH_REPLICAS
    if error is Errors.CONCURRENT_TRANSACTIONS and version < _ADDS_PARTITIONS_SINCE_VERSION:
        return Errors.NOT_ENOUGH_REPLICAS
    if error is Errors.TRANSACTION_ABORTABLE and version < _ABORTABLE_SINCE_VERSION:
        return Errors.INVALID_TXN_STATE
    return error
