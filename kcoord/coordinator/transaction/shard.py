# SPDX-License-Identifier: Apache-2.0
"""One shard of the transaction coordinator: every transactional id that maps to one partition of `__transaction_state`.

**Operations.** There is one method per operation. It reads state and request and returns a CoordinatorResult; only
`replay` changes hard state. The runtime runs the operations of a shard one after the other in the event loop, and a
response leaves after the log has the records.

**The life of a transaction** (`metadata` has the states):

1. InitProducerId gives a producer its id and epoch and fences the previous producer. If a transaction is open, it is
   aborted first and the caller has to retry.
2. AddPartitionsToTxn and AddOffsetsToTxn record the partitions before the producer writes to them. The first one starts
   the transaction and its timeout. With KIP-890 the partition leader asks instead, before its first write.
3. EndTxn, a timeout, or InitProducerId of another producer decides the outcome. The *prepared* record is the decision:
   once it is in the log, the outcome cannot change.
4. A background task writes a marker to every partition. It starts only after the prepared record is durable, so no
   partition can have a marker that the coordinator does not know of after a crash. A failed attempt is repeated with a
   growing delay, without end.
5. The *completed* record follows when all partitions have their markers. Only then can the next transaction begin;
   until then the producer gets CONCURRENT_TRANSACTIONS.

**After a crash** the log decides. An open transaction keeps its deadline. For a prepared one all markers are written
again; a partition that has its marker already ignores the second one. The epoch before the present one
(`_last_epochs`) is soft, as in Kafka.

**Fencing.** Every operation of a producer must have the present producer id and epoch. The epoch never falls for one
producer id. Markers carry the coordinator epoch of this shard, so that partitions reject markers of an older owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from kcoord.config import BrokerConfig
from kcoord.coordinator.transaction import init_producer
from kcoord.coordinator.transaction.end_transaction import EndRequest, completed, decide_end, fence_and_abort
from kcoord.coordinator.transaction.metadata import (
    EPOCH_BUMPING_VERSION,
    EXHAUSTED_EPOCH,
    LEGAL_PREDECESSORS,
    NO_PRODUCER_EPOCH,
    Partitions,
    TransactionMetadata,
    TransactionState,
)
from kcoord.coordinator.transaction.records import metadata_from, new_transaction_record, new_transaction_tombstone
from kcoord.coordinator.transaction.work import (
    EXPIRATION_KEY,
    TransactionTimer,
    WriteMarkers,
    markers_key,
    timeout_key,
)
from kcoord.metadata.delta import TopicDelta
from kcoord.metadata.features import TRANSACTION_VERSION
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import (
    Cancel,
    CoordinatorRecord,
    CoordinatorResult,
    OperationContext,
    Producer,
    Schedule,
    Task,
    TimerKey,
)
from kcoord.runtime.snapshot import PackedState, SnapshotPart
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    DescribeTransactionsResponse,
    InitProducerIdResponse,
    ListTransactionsResponse,
    TransactionLogKey,
    TransactionLogValue,
)

T = TypeVar("T")

_EXPIRED_PER_ROUND = 1_000
"""How many transactional ids expire in one operation; the next operation follows after `_NEXT_ROUND_MS`."""
_NEXT_ROUND_MS = 100


class TransactionCoordinatorShard:
    """The state machine of one partition of `__transaction_state`. Implements `StateMachine` of the runtime."""

    def __init__(self, config: BrokerConfig, image: MetadataImage, coordinator_epoch: int) -> None:
        self._config = config
        self._image = image
        self._coordinator_epoch = coordinator_epoch
        self._transactions: dict[str, TransactionMetadata] = {}
        self._last_epochs: dict[str, tuple[Producer, int]] = {}
        """Soft: transactional id -> its producer and the epoch before, which an InitProducerId may still have.
        Records have no field for it."""
        self._failed_attempts: dict[str, int] = {}
        """Soft: transactional id -> number of the next attempt to write markers."""

    # The state machine.

    def replay(self, record: CoordinatorRecord) -> None:
        match record.key, record.value:
            case TransactionLogKey() as key, TransactionLogValue() as value:
                self._transactions[key.transactional_id] = metadata_from(key, value)
            case TransactionLogKey() as key, None:
                self._transactions.pop(key.transactional_id, None)
            case _:
                return

    def snapshot(self) -> Iterator[SnapshotPart]:
        """Yields the record of each id, in the newest version, which has all fields."""
        for transactional_id in list(self._transactions):
            metadata = self._transactions.get(transactional_id)
            if metadata is not None:
                yield new_transaction_record(metadata, EPOCH_BUMPING_VERSION)

    def restore(self, part: PackedState) -> bool:
        """Returns False: snapshots of transactions have no packed parts."""
        return False

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        """Schedules the timeouts of open transactions, and writes the markers of decided ones again."""
        result = CoordinatorResult(None)
        for metadata in self._transactions.values():
            if metadata.state is TransactionState.ONGOING:
                result.timers.append(_timeout(metadata))
            elif metadata.state.is_prepared:
                result.tasks.append(self._markers_task(metadata, attempt=1))
        result.timers.append(Schedule(EXPIRATION_KEY, context.now_ms + self._expiration_interval_ms))
        return result

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        """Handles a timer: aborts a transaction after its timeout, writes markers again, or expires ids."""
        if key.kind == TransactionTimer.EXPIRATION:
            return self._expire_ids(context.now_ms)
        metadata = self._transactions.get(key.group_id)
        result = CoordinatorResult(None)
        if metadata is None:
            return result
        if key.kind == TransactionTimer.TIMEOUT and metadata.state is TransactionState.ONGOING:
            if metadata.timeout_at_ms > context.now_ms:
                result.timers.append(_timeout(metadata))
            else:
                self._abort(result, metadata, context.now_ms)
        elif key.kind == TransactionTimer.MARKERS and metadata.state.is_prepared:
            result.tasks.append(self._markers_task(metadata, self._failed_attempts.get(key.group_id, 1)))
        return result

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        """Completes the transaction if all markers are written, else schedules the next attempt."""
        work = task.work
        result = CoordinatorResult(None)
        assert isinstance(work, WriteMarkers), f"unknown work {work!r}"
        metadata = self._transactions.get(work.transactional_id)
        if metadata is None or not metadata.state.is_prepared or metadata.producer != work.producer:
            return result
        if value is None:
            self._failed_attempts.pop(work.transactional_id, None)
            self._move(result, metadata, completed(metadata, context.now_ms))
        else:
            self._failed_attempts[work.transactional_id] = work.attempt + 1
            retry_ms = context.now_ms + work.retry_delay_ms
            result.timers.append(Schedule(markers_key(work.transactional_id), retry_ms))
        return result

    def on_metadata_update(
        self, context: OperationContext, image: MetadataImage, delta: TopicDelta | None = None
    ) -> CoordinatorResult[None]:
        """Installs the image, whose features decide the version of new records."""
        self._image = image
        return CoordinatorResult(None)

    # Producers.

    def needs_producer_id(self, transactional_id: str) -> bool:
        """True if InitProducerId or EndTxn may use a new producer id."""
        return init_producer.needs_producer_id(self._transactions.get(transactional_id))

    def init_producer_id(
        self,
        context: OperationContext,
        transactional_id: str,
        timeout_ms: int,
        expected: Producer | None,
        candidate_producer_id: int | None,
    ) -> CoordinatorResult[InitProducerIdResponse]:
        """Serves InitProducerId. An open transaction is aborted, and the response is CONCURRENT_TRANSACTIONS."""
        if not 0 < timeout_ms <= self._config.transaction_max_timeout_ms:
            raise KafkaError(
                Errors.INVALID_TRANSACTION_TIMEOUT,
                f"The transaction timeout {timeout_ms} ms is not between 1 and transaction.max.timeout.ms="
                f"{self._config.transaction_max_timeout_ms}.",
            )
        metadata = self._transactions.get(transactional_id)
        result: CoordinatorResult[InitProducerIdResponse] = CoordinatorResult(InitProducerIdResponse())
        last_epoch = NO_PRODUCER_EPOCH
        if metadata is None:
            assert candidate_producer_id is not None, "the caller passes a producer id if one may be needed"
            initialized = init_producer.Initialized(
                init_producer.first_metadata(transactional_id, candidate_producer_id, timeout_ms, context.now_ms)
            )
        else:
            last_epoch = self._last_epoch(metadata)
            init_producer.check_expected(metadata, expected)
            if metadata.state.is_prepared:
                raise _concurrent(metadata)
            if metadata.state is TransactionState.ONGOING:
                return self._abort_for_successor(result, metadata, context.now_ms)
            initialized = init_producer.initialize(
                metadata, expected, last_epoch, candidate_producer_id, timeout_ms, context.now_ms
            )
        self._move(result, metadata, initialized.metadata)
        producer = initialized.metadata.producer
        self._last_epochs[transactional_id] = producer, initialized.last_epoch
        result.response.producer_id, result.response.producer_epoch = producer
        return result

    def _abort_for_successor(
        self, result: CoordinatorResult[InitProducerIdResponse], metadata: TransactionMetadata, now_ms: int
    ) -> CoordinatorResult[InitProducerIdResponse]:
        self._abort(result, metadata, now_ms)
        result.response = InitProducerIdResponse(
            error_code=Errors.CONCURRENT_TRANSACTIONS, producer_id=-1, producer_epoch=-1
        )
        return result

    def _abort(self, result: CoordinatorResult[T], metadata: TransactionMetadata, now_ms: int) -> None:
        """Aborts the open transaction. InitProducerId then accepts the epoch that its producer still has (KIP-588)."""
        aborted = fence_and_abort(metadata, now_ms)
        self._move(result, metadata, aborted)
        self._last_epochs[metadata.transactional_id] = aborted.producer, metadata.producer_epoch

    def _last_epoch(self, metadata: TransactionMetadata) -> int:
        """Returns the epoch before the present one if a producer that knows no later one may send it."""
        producer, epoch = self._last_epochs.get(metadata.transactional_id, (None, NO_PRODUCER_EPOCH))
        return epoch if producer == metadata.producer else metadata.epoch_before_end

    # Transactions.

    def add_partitions(
        self,
        context: OperationContext,
        transactional_id: str,
        producer: Producer,
        partitions: Partitions,
        client_transaction_version: int,
    ) -> CoordinatorResult[None]:
        """Adds partitions to the producer's transaction; the first ones start it."""
        metadata = self._of_producer(transactional_id, producer)
        result = CoordinatorResult(None)
        if metadata.state is TransactionState.ONGOING and metadata.has_partitions(partitions):
            return result
        begins = metadata.state is not TransactionState.ONGOING
        added = replace(
            metadata,
            state=TransactionState.ONGOING,
            partitions=metadata.with_partitions(partitions),
            start_ms=context.now_ms if begins else metadata.start_ms,
            last_update_ms=context.now_ms,
            previous_producer_id=metadata.producer_id,
            client_transaction_version=client_transaction_version,
        )
        self._move(result, metadata, added)
        return result

    def verify_partitions(
        self, context: OperationContext, transactional_id: str, producer: Producer, partitions: Partitions
    ) -> CoordinatorResult[Mapping[tuple[str, int], Errors]]:
        """Returns NONE for each partition of the producer's transaction, else TRANSACTION_ABORTABLE (KIP-890)."""
        metadata = self._of_producer(transactional_id, producer)
        none: frozenset[int] = frozenset()
        return CoordinatorResult(
            {
                (topic, number): Errors.NONE
                if number in metadata.partitions.get(topic, none)
                else Errors.TRANSACTION_ABORTABLE
                for topic, numbers in sorted(partitions.items())
                for number in sorted(numbers)
            }
        )

    def _of_producer(self, transactional_id: str, producer: Producer) -> TransactionMetadata:
        """Returns the metadata; raises unless the producer is the present one and no transaction is ending."""
        metadata = self._transactions.get(transactional_id)
        if metadata is None or metadata.producer_id != producer.producer_id:
            raise _unknown(transactional_id, producer)
        if metadata.producer_epoch != producer.producer_epoch or producer.producer_epoch > EXHAUSTED_EPOCH:
            raise init_producer.fenced(metadata, producer.producer_epoch)
        if metadata.state.is_prepared:
            raise _concurrent(metadata)
        return metadata

    def end_transaction(
        self, context: OperationContext, transactional_id: str, request: EndRequest
    ) -> CoordinatorResult[Producer]:
        """Serves EndTxn: decides the outcome. The response is the client's next producer id and epoch.

        Markers are written after the decision is durable.
        """
        metadata = self._transactions.get(transactional_id)
        if metadata is None:
            raise _unknown(transactional_id, request.producer)
        prepared = decide_end(metadata, request, context.now_ms)
        if prepared is None:
            return CoordinatorResult(metadata.producer)
        result = CoordinatorResult(prepared.client_producer)
        self._move(result, metadata, prepared)
        return result

    def _move(self, result: CoordinatorResult[T], old: TransactionMetadata | None, new: TransactionMetadata) -> None:
        """Adds the record of the new metadata, and the timers and tasks of the transition."""
        if old is not None:
            _check_transition(old, new)
        result.records.append(new_transaction_record(new, self._image.features.get(TRANSACTION_VERSION, 0)))
        if new.state is TransactionState.ONGOING and (old is None or old.state is not new.state):
            result.timers.append(_timeout(new))
        elif new.state.is_prepared:
            result.timers.append(Cancel(timeout_key(new.transactional_id)))
            result.tasks.append(self._markers_task(new))

    def _markers_task(self, metadata: TransactionMetadata, attempt: int = 0) -> Task:
        work = WriteMarkers(
            metadata.transactional_id,
            metadata.producer,
            metadata.state is TransactionState.PREPARE_COMMIT,
            self._coordinator_epoch,
            metadata.client_transaction_version,
            metadata.partitions,
            attempt,
        )
        return Task(markers_key(metadata.transactional_id), work, when_durable=True)

    # Expiry.

    @property
    def _expiration_interval_ms(self) -> int:
        return self._config.transaction_remove_expired_transaction_cleanup_interval_ms

    def _expire_ids(self, now_ms: int) -> CoordinatorResult[None]:
        """Deletes ids that are between transactions and were not used for `transactional.id.expiration.ms`."""
        oldest_ms = now_ms - self._config.transactional_id_expiration_ms
        expired = (
            transactional_id
            for transactional_id, metadata in self._transactions.items()
            if metadata.state.is_between_transactions and metadata.last_update_ms <= oldest_ms
        )
        this_round = list(islice(expired, _EXPIRED_PER_ROUND))
        for transactional_id in this_round:
            self._last_epochs.pop(transactional_id, None)
        delay_ms = _NEXT_ROUND_MS if len(this_round) == _EXPIRED_PER_ROUND else self._expiration_interval_ms
        return CoordinatorResult(
            None,
            [new_transaction_tombstone(transactional_id) for transactional_id in this_round],
            [Schedule(EXPIRATION_KEY, now_ms + delay_ms)],
        )

    # Queries.

    @property
    def id_count(self) -> int:
        return len(self._transactions)

    def transactional_ids(self) -> list[str]:
        """Returns all transactional ids, in no particular order."""
        return list(self._transactions)

    def describe_transactions(
        self, context: OperationContext, transactional_ids: list[str]
    ) -> CoordinatorResult[list[DescribeTransactionsResponse.TransactionState]]:
        """Returns one description per id, in that order."""
        return CoordinatorResult([self._describe(transactional_id) for transactional_id in transactional_ids])

    def _describe(self, transactional_id: str) -> DescribeTransactionsResponse.TransactionState:
        metadata = self._transactions.get(transactional_id)
        if metadata is None:
            return DescribeTransactionsResponse.TransactionState(
                error_code=Errors.TRANSACTIONAL_ID_NOT_FOUND, transactional_id=transactional_id
            )
        return DescribeTransactionsResponse.TransactionState(
            transactional_id=transactional_id,
            transaction_state=metadata.state.wire_name,
            transaction_timeout_ms=metadata.timeout_ms,
            transaction_start_time_ms=metadata.start_ms,
            producer_id=metadata.producer_id,
            producer_epoch=metadata.producer_epoch,
            topics=[
                DescribeTransactionsResponse.TopicData(topic=topic, partitions=sorted(numbers))
                for topic, numbers in sorted(metadata.partitions.items())
            ],
        )

    def list_transactions(
        self,
        context: OperationContext,
        ids: Iterable[str] | None = None,
        *,
        states: frozenset[TransactionState],
        producer_ids: frozenset[int],
        duration_ms: int,
        matches: Callable[[str], bool] | None,
    ) -> CoordinatorResult[list[ListTransactionsResponse.TransactionState]]:
        """Returns those of the transactions that pass all filters: by default all transactions, in order.

        An empty filter or a negative duration passes all.
        """
        listed = []
        for transactional_id in sorted(self._transactions) if ids is None else ids:
            metadata = self._transactions.get(transactional_id)
            if metadata is None or (states and metadata.state not in states):
                continue
            if producer_ids and metadata.producer_id not in producer_ids:
                continue
            if duration_ms >= 0 and context.now_ms - metadata.start_ms <= duration_ms:
                continue
            if matches is not None and not matches(transactional_id):
                continue
            listed.append(
                ListTransactionsResponse.TransactionState(
                    transactional_id=transactional_id,
                    producer_id=metadata.producer_id,
                    transaction_state=metadata.state.wire_name,
                )
            )
        return CoordinatorResult(listed)

    def in_transaction(self, context: OperationContext, producer_ids: frozenset[int]) -> CoordinatorResult[set[int]]:
        """Returns those of the producers that have a transaction which is open or ending."""
        return CoordinatorResult(
            {
                metadata.producer_id
                for metadata in self._transactions.values()
                if metadata.producer_id in producer_ids and not metadata.state.is_between_transactions
            }
        )

    # For tests and checkers.

    def hard_state(self) -> Mapping[str, TransactionMetadata]:
        """Returns all hard state."""
        return dict(self._transactions)


def _check_transition(old: TransactionMetadata, new: TransactionMetadata) -> None:
    """Asserts the invariants of a change of one transactional id."""
    name = new.transactional_id
    assert old.state in LEGAL_PREDECESSORS[new.state], (
        f"T-1: {name} cannot go from {old.state.wire_name} to {new.state.wire_name}"
    )
    if new.producer_id == old.producer_id:
        assert new.producer_epoch >= old.producer_epoch, (
            f"T-2: the producer epoch of {name} falls from {old.producer_epoch} to {new.producer_epoch}"
        )
    else:
        assert new.producer_epoch == 0, f"T-3: producer {new.producer_id} of {name} begins at {new.producer_epoch}"
    assert old.state is not TransactionState.ONGOING or new.has_partitions(old.partitions), (
        f"T-4: {name} loses partitions of its transaction in {new.state.wire_name}"
    )


def _timeout(metadata: TransactionMetadata) -> Schedule:
    return Schedule(timeout_key(metadata.transactional_id), metadata.timeout_at_ms)


def _unknown(transactional_id: str, producer: Producer) -> KafkaError:
    return KafkaError(
        Errors.INVALID_PRODUCER_ID_MAPPING,
        f"Producer {producer.producer_id} does not have the transactional id {transactional_id}.",
    )


def _concurrent(metadata: TransactionMetadata) -> KafkaError:
    return KafkaError(
        Errors.CONCURRENT_TRANSACTIONS, f"The previous transaction of {metadata.transactional_id} is still ending."
    )
