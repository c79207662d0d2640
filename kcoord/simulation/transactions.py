# SPDX-License-Identifier: Apache-2.0
"""Requests of transactional producers, which need both coordinators: InitProducerId, AddOffsetsToTxn, TxnOffsetCommit,
EndTxn; and the markers that tell the group coordinator how a transaction ended. The order of steps is the server's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.transaction.end_transaction import EndRequest
from kcoord.coordinator.transaction.metadata import EPOCH_BUMPING_VERSION
from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.coordinator.transaction.work import WriteMarkers
from kcoord.runtime.hashing import partition_for
from kcoord.runtime.result import CoordinatorResult, OperationContext, Producer, Task
from kcoord.simulation.network import Request
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    Message,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)

if TYPE_CHECKING:
    from kcoord.simulation.broker import Process, SimulatedBroker

TRANSACTION_SHARDS: Final = 2
END_BUMPS_SINCE: Final = 5
COMMIT_ADDS_SINCE: Final = 5

TRANSACTION_APIS: Final[Mapping[ApiKey, type[Message]]] = {
    ApiKey.INIT_PRODUCER_ID: InitProducerIdRequest,
    ApiKey.ADD_OFFSETS_TO_TXN: AddOffsetsToTxnRequest,
    ApiKey.TXN_OFFSET_COMMIT: TxnOffsetCommitRequest,
    ApiKey.END_TXN: EndTxnRequest,
    ApiKey.DESCRIBE_TRANSACTIONS: DescribeTransactionsRequest,
}


class TransactionRequests:
    """See the module's text."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker

    def receive(self, process: Process, request: Request) -> None:
        message = TRANSACTION_APIS[request.api_key].decode(request.body, request.api_version)
        context = self._broker.context(process, request)

        def answer(response: Message) -> None:
            self._broker.respond(request, response)

        match message:
            case InitProducerIdRequest():
                self._init(process, context, message, answer)
            case AddOffsetsToTxnRequest():
                self._add_offsets(process, context, message, answer)
            case TxnOffsetCommitRequest():
                self._commit_offsets(process, context, message, answer)
            case EndTxnRequest():
                self._end(process, context, message, answer)
            case DescribeTransactionsRequest():
                self._describe(process, context, message, answer)
            case _:
                raise AssertionError(message)

    def _candidate(self, process: Process, transactional_id: str) -> int | None:
        machine = process.transactions.runtime.machine(_shard_of(transactional_id))
        if machine is not None and not machine.needs_producer_id(transactional_id):
            return None
        return next(self._broker.producer_ids)

    def _init(
        self,
        process: Process,
        context: OperationContext,
        request: InitProducerIdRequest,
        answer: Callable[[Message], None],
    ) -> None:
        transactional_id = request.transactional_id or ""
        expected = None if request.producer_id < 0 else Producer(request.producer_id, request.producer_epoch)
        candidate = self._candidate(process, transactional_id)

        def operation(
            shard: TransactionCoordinatorShard, context: OperationContext
        ) -> CoordinatorResult[InitProducerIdResponse]:
            timeout_ms = request.transaction_timeout_ms
            return shard.init_producer_id(context, transactional_id, timeout_ms, expected, candidate)

        def on_reply(value: object) -> None:
            if isinstance(value, KafkaError):
                value = InitProducerIdResponse(error_code=value.error, producer_id=-1, producer_epoch=-1)
            assert isinstance(value, InitProducerIdResponse)
            answer(value)

        process.transactions.run(_shard_of(transactional_id), operation, context, on_reply)

    def _add_offsets(
        self,
        process: Process,
        context: OperationContext,
        request: AddOffsetsToTxnRequest,
        answer: Callable[[Message], None],
    ) -> None:
        producer = Producer(request.producer_id, request.producer_epoch)
        partitions = {GROUP_METADATA_TOPIC: frozenset((self._broker.group_shard(request.group_id),))}

        def operation(shard: TransactionCoordinatorShard, context: OperationContext) -> CoordinatorResult[None]:
            return shard.add_partitions(context, request.transactional_id, producer, partitions, 0)

        def on_reply(value: object) -> None:
            answer(AddOffsetsToTxnResponse(error_code=value.error if isinstance(value, KafkaError) else Errors.NONE))

        process.transactions.run(_shard_of(request.transactional_id), operation, context, on_reply)

    def _commit_offsets(
        self,
        process: Process,
        context: OperationContext,
        request: TxnOffsetCommitRequest,
        answer: Callable[[Message], None],
    ) -> None:
        """First the transaction's coordinator agrees, durably, then the group's writes."""
        shard_id = self._broker.group_shard(request.group_id)
        producer = Producer(request.producer_id, request.producer_epoch)
        machine = process.groups.runtime.machine(shard_id)
        ticket = machine.start_verification(producer) if machine is not None else None

        def done(value: object) -> None:
            if ticket is not None and machine is not None:
                machine.finish_verification(producer, ticket)
            answer(_commit_response(request, value))

        def commit(agreed: object) -> None:
            if isinstance(agreed, KafkaError):
                done(agreed)
                return
            if isinstance(agreed, dict) and any(agreed.values()):
                done(KafkaError(Errors.TRANSACTION_ABORTABLE))
                return
            hop_ms = self._broker.options.hop_ms
            if hop_ms and ticket is not None:
                process.after(hop_ms, write)
            else:
                write()

        def write() -> None:
            process.groups.run(
                shard_id,
                lambda shard, context: shard.commit_transactional_offsets(context, request, ticket),
                OperationContext(process.now_ms, context.api_version, context.client_id, "/127.0.0.1"),
                done,
            )

        adds = context.api_version >= COMMIT_ADDS_SINCE
        if ticket is None or (not adds and not self._broker.options.verification):
            commit(None)
        else:
            self._agree(process, context, request, producer, shard_id, commit)

    def _agree(
        self,
        process: Process,
        context: OperationContext,
        request: TxnOffsetCommitRequest,
        producer: Producer,
        shard_id: int,
        on_reply: Callable[[object], None],
    ) -> None:
        partitions = {GROUP_METADATA_TOPIC: frozenset((shard_id,))}
        transactional_id = request.transactional_id

        def operation(shard: TransactionCoordinatorShard, context: OperationContext) -> CoordinatorResult[object]:
            if context.api_version >= COMMIT_ADDS_SINCE:
                added: CoordinatorResult[None] = shard.add_partitions(
                    context, transactional_id, producer, partitions, EPOCH_BUMPING_VERSION
                )
                return added  # type: ignore[return-value]
            return shard.verify_partitions(context, transactional_id, producer, partitions)  # type: ignore[return-value]

        process.transactions.run(_shard_of(transactional_id), operation, context, on_reply)

    def _end(
        self, process: Process, context: OperationContext, request: EndTxnRequest, answer: Callable[[Message], None]
    ) -> None:
        bumps = context.api_version >= END_BUMPS_SINCE
        wanted = EndRequest(
            Producer(request.producer_id, request.producer_epoch),
            request.committed,
            bumps,
            EPOCH_BUMPING_VERSION if bumps else 0,
            self._candidate(process, request.transactional_id) if bumps else None,
        )

        def operation(shard: TransactionCoordinatorShard, context: OperationContext) -> CoordinatorResult[Producer]:
            return shard.end_transaction(context, request.transactional_id, wanted)

        def on_reply(value: object) -> None:
            if isinstance(value, KafkaError):
                answer(EndTxnResponse(error_code=value.error))
                return
            assert isinstance(value, Producer)
            answer(EndTxnResponse(producer_id=value.producer_id, producer_epoch=value.producer_epoch))

        process.transactions.run(_shard_of(request.transactional_id), operation, context, on_reply)

    def _describe(
        self,
        process: Process,
        context: OperationContext,
        request: DescribeTransactionsRequest,
        answer: Callable[[Message], None],
    ) -> None:
        def on_reply(value: object) -> None:
            states = [] if isinstance(value, KafkaError) else value
            assert isinstance(states, list)
            answer(DescribeTransactionsResponse(transaction_states=states))

        ids = request.transactional_ids
        process.transactions.run(
            _shard_of(ids[0]), lambda shard, context: shard.describe_transactions(context, ids), context, on_reply
        )

    # Markers.

    def start_task(self, process: Process, shard_id: int, task: Task) -> None:
        """Tells every partition of the group coordinator; the task fails where one of them could not be told."""
        work = task.work
        assert isinstance(work, WriteMarkers)
        self._broker.trace.add("markers", f"{work.transactional_id} {work.committed}")
        waiting = sorted(work.partitions.get(GROUP_METADATA_TOPIC, ()))
        failures: list[KafkaError] = []

        def told(value: object) -> None:
            if isinstance(value, KafkaError) and value.error is not Errors.INVALID_PRODUCER_EPOCH:
                failures.append(value)
            tell_next()

        def tell_next() -> None:
            if not waiting:
                process.transactions.complete_task(shard_id, task, failures[0] if failures else None)
                return
            partition = waiting.pop(0)
            context = OperationContext(process.now_ms)
            process.groups.run(
                partition,
                lambda shard, context: _end_in_group(shard, context, work),
                context,
                told,
                is_worker=True,
            )

        process.after(self._broker.random.randint(0, 5), tell_next)


def _end_in_group(
    shard: GroupCoordinatorShard, context: OperationContext, work: WriteMarkers
) -> CoordinatorResult[None]:
    return shard.end_transaction(context, work.producer, work.coordinator_epoch, committed=work.committed)


def _shard_of(transactional_id: str) -> int:
    return partition_for(transactional_id, TRANSACTION_SHARDS)


def _commit_response(request: TxnOffsetCommitRequest, value: object) -> TxnOffsetCommitResponse:
    if not isinstance(value, KafkaError):
        assert isinstance(value, TxnOffsetCommitResponse)
        return value
    topics = [
        TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic(
            name=topic.name,
            partitions=[
                TxnOffsetCommitResponse.TxnOffsetCommitResponsePartition(
                    partition_index=partition.partition_index, error_code=value.error
                )
                for partition in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    return TxnOffsetCommitResponse(topics=topics)
