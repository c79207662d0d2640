# SPDX-License-Identifier: Apache-2.0
"""The producer's transaction: its state, and the requests to the transaction coordinator (KIP-98).

Theory of operation. States of the producer:

- UNINITIALIZED: `initialize` gets a producer id and epoch, which fences earlier producers. It leads to READY.
- READY: no transaction. `begin` leads to IN_TRANSACTION.
- IN_TRANSACTION: records and offsets are added. A failure leads to ABORTABLE_ERROR.
- ENDING: a commit was sent. Success leads to READY. After a timeout the state stays, and the commit may be repeated.
  Any other error leads to ABORTABLE_ERROR.
- ABORTABLE_ERROR: a request failed, or an abort has begun. Only an abort is possible. It leads to READY. After a
  timeout the state stays, because the transaction may be aborted already, or lack records.
- FATAL_ERROR: the producer was fenced, or the cluster does not allow or support transactions. It can only be closed.

With transaction.version 1 the coordinator must know each partition and group before the first write: the requests are
AddPartitionsToTxn and AddOffsetsToTxn. With transaction.version 2 (KIP-890) Produce and TxnOffsetCommit add them, and
each end of a transaction gives the producer a new epoch.

After a crash the coordinator aborts the transaction at its timeout, or when a new producer with the same transactional
id initializes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from enum import Enum
from typing import Final, TypeVar

from kcoord.client.api_versions import TRANSACTION_VERSION
from kcoord.client.cluster import Cluster, CoordinatorType, Deadline
from kcoord.client.errors import IllegalStateException
from kcoord.client.offset_messages import LAST_TXN_VERSION_WITH_NAMES, by_topic
from kcoord.client.producer.batches import Sequences
from kcoord.client.results import error_of
from kcoord.client.types import ConsumerGroupMetadata, OffsetAndMetadata, Offsets, TopicPartition
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)

T = TypeVar("T")

# The last versions with the first transaction protocol, which the second part of KIP-890 replaced.
_LAST_V1_END_TXN: Final = 4
_LAST_V1_OFFSET_COMMIT: Final = 4
LAST_V1_PRODUCE: Final = 11
_FIRST_V2: Final = 2

_FATAL: Final = frozenset(
    {
        Errors.PRODUCER_FENCED,
        Errors.INVALID_PRODUCER_EPOCH,
        Errors.INVALID_PRODUCER_ID_MAPPING,
        Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Errors.CLUSTER_AUTHORIZATION_FAILED,
        Errors.UNSUPPORTED_VERSION,
        Errors.TRANSACTION_COORDINATOR_FENCED,
    }
)


class ProducerTransactionState(Enum):
    """The states of a transactional producer. The module's docstring explains them."""

    UNINITIALIZED = "uninitialized"
    READY = "ready"
    IN_TRANSACTION = "in transaction"
    ENDING = "ending"
    ABORTABLE_ERROR = "to be aborted"
    FATAL_ERROR = "failed for good"


class Transactions:
    """The transactions of one transactional id. At most one is open."""

    def __init__(self, cluster: Cluster, sequences: Sequences, transactional_id: str, timeout_ms: int) -> None:
        self.transactional_id = transactional_id
        self.state = ProducerTransactionState.UNINITIALIZED
        self.is_v2 = False
        self._cluster = cluster
        self._sequences = sequences
        self._timeout_ms = timeout_ms
        self._partitions: set[TopicPartition] = set()
        self._has_offsets = False
        self._failure: KafkaError | None = None

    # States.

    def check(self, *allowed: ProducerTransactionState) -> None:
        """Raises an error unless the state is one of `allowed`.

        Raises the failure of the transaction if there is one, IllegalStateException otherwise.
        """
        if self.state in allowed:
            return
        if self._failure is not None:
            raise self._failure
        states = " or ".join(state.value for state in allowed)
        raise IllegalStateException(f"the transaction is {self.state.value}; the call requires: {states}")

    def fail(self, error: KafkaError) -> None:
        """Records the failure of a record or request. A fatal error ends the producer, any other the transaction."""
        if error.error in _FATAL:
            self.state, self._failure = ProducerTransactionState.FATAL_ERROR, error
        elif self.state in (ProducerTransactionState.IN_TRANSACTION, ProducerTransactionState.ENDING):
            self.state, self._failure = ProducerTransactionState.ABORTABLE_ERROR, error

    def fail_batch(self, error: KafkaError) -> None:
        """Records the failure of a batch.

        A stale epoch may only mean that the transaction timed out, so it is not fatal yet. The abort shows whether
        another producer is the reason (KIP-588).
        """
        is_open = self.state in (ProducerTransactionState.IN_TRANSACTION, ProducerTransactionState.ABORTABLE_ERROR)
        if error.error is Errors.INVALID_PRODUCER_EPOCH and is_open:
            self.state, self._failure = ProducerTransactionState.ABORTABLE_ERROR, error
        else:
            self.fail(error)

    def begin(self) -> None:
        """Begins a transaction."""
        self.check(ProducerTransactionState.READY)
        self.state = ProducerTransactionState.IN_TRANSACTION

    def begin_abort(self) -> None:
        """Makes an abort the only possible end, also if this abort times out or is cancelled."""
        self.state = ProducerTransactionState.ABORTABLE_ERROR

    # Requests.

    async def initialize(self, deadline: Deadline) -> None:
        """Gets a producer id and epoch. Fences earlier producers of the transactional id and ends their transaction."""
        self.check(ProducerTransactionState.UNINITIALIZED)
        await self._init_producer_id(deadline, -1, -1)
        connection = await self._cluster.any_connection()
        self.is_v2 = connection.versions.features.get(TRANSACTION_VERSION, 0) >= _FIRST_V2
        self.state = ProducerTransactionState.READY

    async def _init_producer_id(self, deadline: Deadline, producer_id: int, producer_epoch: int) -> None:
        request = InitProducerIdRequest(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self._timeout_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
        )
        # From v3 on a request can name the producer id to keep (KIP-360).
        lowest = 3 if producer_id >= 0 else 0

        async def attempt() -> InitProducerIdResponse:
            answer = await self._cluster.call_coordinator(
                CoordinatorType.TRANSACTION,
                self.transactional_id,
                request,
                InitProducerIdResponse,
                lambda answer: [answer.error_code],
                lowest=lowest,
            )
            self._check(answer.error_code, "InitProducerId")
            return answer

        answer = await self._retry("get a producer id", deadline, attempt)
        self._sequences.reset(answer.producer_id, answer.producer_epoch)

    async def add_partitions(self, deadline: Deadline, partitions: Iterable[TopicPartition]) -> None:
        """Adds partitions to the transaction, before its first records for them are sent."""
        missing = sorted(set(partitions) - self._partitions)
        if not missing:
            return
        if not self.is_v2:
            await self._retry("add partitions", deadline, lambda: self._add_partitions(missing))
        self._partitions.update(missing)

    async def _add_partitions(self, partitions: list[TopicPartition]) -> None:
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self._sequences.producer_id,
            v3_and_below_producer_epoch=self._sequences.producer_epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=name, partitions=indexes)
                for name, indexes in by_topic(partitions).items()
            ],
        )

        def codes(answer: AddPartitionsToTxnResponse) -> list[int]:
            return [
                partition.partition_error_code
                for topic in answer.results_by_topic_v3_and_below
                for partition in topic.results_by_partition
            ]

        answer = await self._cluster.call_coordinator(
            CoordinatorType.TRANSACTION, self.transactional_id, request, AddPartitionsToTxnResponse, codes
        )
        attempted = (code for code in codes(answer) if code != Errors.OPERATION_NOT_ATTEMPTED)
        self._check(next((code for code in attempted if code), 0), "AddPartitionsToTxn")

    async def send_offsets(self, deadline: Deadline, offsets: Offsets, group: ConsumerGroupMetadata) -> None:
        """Adds offsets of a group to the transaction. They take effect only if it is committed."""
        self.check(ProducerTransactionState.IN_TRANSACTION)
        if not offsets:
            return
        try:
            if not self.is_v2:
                await self._retry("add offsets", deadline, lambda: self._add_offsets(group.group_id))
            self._has_offsets = True
            await self._retry("commit offsets", deadline, lambda: self._commit_offsets(offsets, group))
        except KafkaError as error:
            self.fail(error)
            raise

    async def _add_offsets(self, group_id: str) -> None:
        request = AddOffsetsToTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self._sequences.producer_id,
            producer_epoch=self._sequences.producer_epoch,
            group_id=group_id,
        )
        answer = await self._cluster.call_coordinator(
            CoordinatorType.TRANSACTION,
            self.transactional_id,
            request,
            AddOffsetsToTxnResponse,
            lambda answer: [answer.error_code],
        )
        self._check(answer.error_code, "AddOffsetsToTxn")

    async def _commit_offsets(self, offsets: Offsets, group: ConsumerGroupMetadata) -> None:
        request = TxnOffsetCommitRequest(
            transactional_id=self.transactional_id,
            group_id=group.group_id,
            producer_id=self._sequences.producer_id,
            producer_epoch=self._sequences.producer_epoch,
            generation_id_or_member_epoch=group.member_epoch,
            member_id=group.member_id,
            group_instance_id=group.group_instance_id,
            topics=[
                TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
                    name=name,
                    partitions=[_txn_offset(index, offsets[TopicPartition(name, index)]) for index in indexes],
                )
                for name, indexes in by_topic(offsets).items()
            ],
        )

        def codes(answer: TxnOffsetCommitResponse) -> list[int]:
            return [partition.error_code for topic in answer.topics for partition in topic.partitions]

        answer = await self._cluster.call_coordinator(
            CoordinatorType.GROUP,
            group.group_id,
            request,
            TxnOffsetCommitResponse,
            codes,
            highest=LAST_TXN_VERSION_WITH_NAMES if self.is_v2 else _LAST_V1_OFFSET_COMMIT,
        )
        self._check(next((code for code in codes(answer) if code), 0), "TxnOffsetCommit")

    async def end(self, deadline: Deadline, committed: bool) -> None:
        """Commits or aborts the transaction. A transaction without partitions and offsets needs no request."""
        if self._partitions or self._has_offsets:
            answer = await self._retry("end the transaction", deadline, lambda: self._end(committed))
            if self.is_v2 and answer.producer_id >= 0:
                self._sequences.reset(answer.producer_id, answer.producer_epoch)
            elif not committed and self._failure is not None:
                await self._init_producer_id(deadline, self._sequences.producer_id, self._sequences.producer_epoch)
        self._partitions.clear()
        self._has_offsets = False
        self._failure = None
        self.state = ProducerTransactionState.READY

    async def _end(self, committed: bool) -> EndTxnResponse:
        request = EndTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self._sequences.producer_id,
            producer_epoch=self._sequences.producer_epoch,
            committed=committed,
        )
        answer = await self._cluster.call_coordinator(
            CoordinatorType.TRANSACTION,
            self.transactional_id,
            request,
            EndTxnResponse,
            lambda answer: [answer.error_code],
            highest=None if self.is_v2 else _LAST_V1_END_TXN,
        )
        self._check(answer.error_code, "EndTxn")
        return answer

    async def _retry(self, what: str, deadline: Deadline, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retries like `Cluster.retry`, and records a fatal error."""
        try:
            return await self._cluster.retry(what, deadline, attempt)
        except KafkaError as error:
            if error.error in _FATAL:
                self.fail(error)
            raise

    def _check(self, code: int, what: str) -> None:
        if code:
            raise KafkaError(error_of(code), f"{what} of {self.transactional_id}")


def _txn_offset(index: int, offset: OffsetAndMetadata) -> TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition:
    return TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
        partition_index=index,
        committed_offset=offset.offset,
        committed_leader_epoch=offset.leader_epoch,
        committed_metadata=offset.metadata,
    )
