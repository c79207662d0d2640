# SPDX-License-Identifier: Apache-2.0
"""The transaction coordinator shards of this process, and the markers that end transactions in partitions.

`kcoord.server.shards.shard_service` describes how operations run and what orders them. Besides, this service does three
things:

* Agreement. Before the first batch of a transaction is written to a partition, `agree` asks the coordinator, here or on
  another worker (KIP-890).
* Markers. When a transaction is decided, the shard starts a task (`WriteMarkers`). The task writes a commit or abort
  marker to every partition of the transaction: directly if this worker leads the partition, else through its leader.
  Markers of `__consumer_offsets` go to the group coordinator's shards.
* Abortion of transactions that no coordinator has (`hanging_transactions`).

What orders what: the decision is durable before the first marker is written. The transaction is complete when every
partition has its marker. If a marker cannot be written, the task fails and the shard starts it again later, for all
partitions. A partition that has the marker already ignores it or reports an error that needs no retry.

A crash between decision and completion: the shard starts the task again when it is loaded, here or on another worker.
Tasks run in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, TypeVar, cast

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.transaction.metadata import EPOCH_BUMPING_VERSION, Partitions, partitions_of
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorResult, OperationContext, Producer, Task
from kcoord.runtime.shard_log import ShardLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.server.environment import Environment
from kcoord.server.replies import Reply, internal_operation_context, map_reply
from kcoord.server.shards.group_service import GroupService
from kcoord.server.shards.hanging_transactions import CHECK_MS, HangingTransactions
from kcoord.server.shards.peer_calls import PeerCalls
from kcoord.server.shards.shard_service import ShardService
from kcoord.topics.partition import Marker
from kcoord.topics.schedule import Every
from kcoord.topics.store import TopicStore
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC

if TYPE_CHECKING:
    from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
    from kcoord.coordinator.transaction.work import WriteMarkers

_logger = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")


MARKERS_AT_A_TIME = 200
"""Number of markers after which a task yields to the event loop, and most markers of a request to another worker."""

_NEEDS_NO_MARKER: Final = (
    Errors.UNKNOWN_TOPIC_OR_PARTITION,
    Errors.INVALID_PRODUCER_EPOCH,
    Errors.TRANSACTION_COORDINATOR_FENCED,
)
"""Errors of a partition that is deleted, or that already has a newer marker of this producer: no retry is needed."""


class TransactionService(ShardService["TransactionCoordinatorShard"]):
    """The transaction coordinator of a process: serves `Broker.transactions`."""

    def __init__(
        self,
        shards: ShardSet[TransactionCoordinatorShard],
        log: ShardLog,
        environment: Environment,
        image: Callable[[], MetadataImage],
        wake: Callable[[], None],
        topics: TopicStore,
        groups: GroupService,
        *,
        node_id: int,
        peers: PeerCalls,
    ) -> None:
        super().__init__(shards, log, environment, image, wake)
        self._topics = topics
        self._groups = groups
        self._node_id = node_id
        self._peers = peers
        self._hanging = HangingTransactions(topics, self._in_transaction)
        self._check_of_hanging = Every(CHECK_MS)

    def call(
        self,
        key: str,
        operation: Callable[[TransactionCoordinatorShard, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> Reply[T]:
        """As `ShardService.call`. An empty transactional id is rejected."""
        check_id(key)
        return super().call(key, operation, request, context)

    def needs_producer_id(self, transactional_id: str) -> bool:
        """Returns whether an operation on this id may need a new producer id, which the caller has to provide."""
        machine = self.shards.machine(self.shard_of(transactional_id))
        return machine is not None and machine.needs_producer_id(transactional_id)

    @property
    def id_count(self) -> int:
        """The number of transactional ids of the shards that are active here."""
        machines = map(self.shards.machine, self.shard_ids)
        return sum(machine.id_count for machine in machines if machine is not None)

    def agree(
        self,
        transactional_id: str,
        producer: Producer,
        partitions: Partitions,
        context: OperationContext,
        *,
        adds: bool,
    ) -> Reply[Mapping[tuple[str, int], Errors]]:
        """Returns an error per partition to which the producer may not write in its transaction.

        With `adds` (KIP-890) the partitions become part of the transaction, the result is empty, and a refusal is a
        KafkaError. Without `adds` the producer has to have added them before (AddPartitionsToTxn).
        """
        check_id(transactional_id)
        coordinator = self._leader(TRANSACTION_STATE_TOPIC, self.shard_of(transactional_id))
        if coordinator != self._node_id:
            from kcoord.server.shards.remote_transactions import ask_coordinator

            return ask_coordinator(self._peers, coordinator, transactional_id, producer, partitions, adds=adds)
        if adds:
            added = self.add_partitions(transactional_id, producer, partitions, EPOCH_BUMPING_VERSION, context)
            return map_reply(added, lambda _: {})

        def verify(
            shard: TransactionCoordinatorShard, context: OperationContext, partitions: Partitions
        ) -> CoordinatorResult[Mapping[tuple[str, int], Errors]]:
            return shard.verify_partitions(context, transactional_id, producer, partitions)

        return self.call(transactional_id, verify, partitions, context)

    def add_partitions(
        self,
        transactional_id: str,
        producer: Producer,
        partitions: Partitions,
        client_transaction_version: int,
        context: OperationContext,
    ) -> Reply[None]:
        """Adds partitions to a transaction that this worker coordinates."""

        def add(
            shard: TransactionCoordinatorShard, context: OperationContext, partitions: Partitions
        ) -> CoordinatorResult[None]:
            return shard.add_partitions(context, transactional_id, producer, partitions, client_transaction_version)

        return self.call(transactional_id, add, partitions, context)

    def _leader(self, topic: str, partition: int) -> int:
        """Returns the leader of a partition, or this worker if there is no such partition: it knows the right error."""
        image = self._image().partition(topic, partition)
        return image.leader if image is not None else self._node_id

    # --- hanging transactions -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        now_ms = self._now_ms()
        if self._check_of_hanging.is_due(now_ms) and self._topics.unchanged_transactions():
            self._environment.spawn(self._hanging.check(now_ms))

    async def _in_transaction(self, producer_ids: frozenset[int]) -> set[int]:
        """Returns those of the producers that have a transaction which is open or ending, at any coordinator.

        Raises KafkaError if a coordinator does not answer.
        """

        def ask(
            shard: TransactionCoordinatorShard, context: OperationContext, producer_ids: frozenset[int]
        ) -> CoordinatorResult[set[int]]:
            return shard.in_transaction(context, producer_ids)

        topic = self._image().topics.get(TRANSACTION_STATE_TOPIC)
        producers: set[int] = set()
        peer_ids: set[int] = set()
        for partition in topic.partitions if topic is not None else ():
            if partition.leader != self._node_id:
                peer_ids.add(partition.leader)
                continue
            context = internal_operation_context(self._now_ms())
            reply = self.call_shard(partition.partition_id, ask, producer_ids, context)
            producers |= await reply if asyncio.isfuture(reply) else reply
        if peer_ids:
            from kcoord.server.shards.remote_transactions import in_transaction

            for coordinator in sorted(peer_ids):
                producers |= await in_transaction(self._peers, coordinator, producer_ids)
        return producers

    # --- markers ------------------------------------------------------------------------------------------------------

    def start_task(self, shard_id: int, task: Task) -> None:
        self._environment.spawn(self._run_task(shard_id, task))

    async def _run_task(self, shard_id: int, task: Task) -> None:
        value: object = None
        try:
            await self._write_markers(cast("WriteMarkers", task.work))
        except Exception as error:
            value = error
            if not isinstance(error, KafkaError):
                _logger.exception("Writing the markers of shard %d failed", shard_id)
        self.task_done(shard_id, task, value)

    async def _write_markers(self, work: WriteMarkers) -> None:
        """Writes as many markers as possible. Raises the error of a marker that has to be written again."""
        by_leader: dict[int, list[tuple[str, int]]] = {}
        for topic, partition in _in_order(work.partitions):
            by_leader.setdefault(self._leader(topic, partition), []).append((topic, partition))
        own = by_leader.pop(self._node_id, [])
        remote = [self._write_remote_markers(work, leader, partitions) for leader, partitions in by_leader.items()]
        outcomes = await asyncio.gather(self._write_own_markers(work, own), *remote)
        failed = next((error for error in outcomes if error is not None), None)
        if failed is not None:
            raise failed

    async def _write_remote_markers(
        self, work: WriteMarkers, leader: int, partitions: list[tuple[str, int]]
    ) -> KafkaError | None:
        from kcoord.server.shards.remote_transactions import tell_leader

        errors: dict[tuple[str, int], Errors] = {}
        for start in range(0, len(partitions), MARKERS_AT_A_TIME):
            some = partitions[start : start + MARKERS_AT_A_TIME]
            numbers_by_topic = partitions_of((topic, [number]) for topic, number in some)
            errors.update(await tell_leader(self._peers, leader, work, numbers_by_topic))
        failed: KafkaError | None = None
        for topic, number in partitions:
            error = errors.get((topic, number), Errors.UNKNOWN_SERVER_ERROR)
            if error is not Errors.NONE:
                failed = self._error_to_retry(work, topic, number, KafkaError(error)) or failed
        return failed

    async def _write_own_markers(self, work: WriteMarkers, partitions: list[tuple[str, int]]) -> KafkaError | None:
        failed: KafkaError | None = None
        waiting: list[tuple[str, int, asyncio.Future[None]]] = []
        for count, (topic, partition) in enumerate(partitions, 1):
            try:
                reply = self._write_marker(work, topic, partition)
                if asyncio.isfuture(reply):
                    waiting.append((topic, partition, reply))
            except KafkaError as error:
                failed = self._error_to_retry(work, topic, partition, error) or failed
            if not count % MARKERS_AT_A_TIME:
                await asyncio.sleep(0)
        for topic, partition, reply in waiting:
            try:
                await reply
            except KafkaError as error:
                failed = self._error_to_retry(work, topic, partition, error) or failed
        return failed

    def _write_marker(self, work: WriteMarkers, topic: str, partition: int) -> Reply[None]:
        now_ms = self._now_ms()
        if topic != GROUP_METADATA_TOPIC:
            bumps_epoch = work.transaction_version >= EPOCH_BUMPING_VERSION
            repeated = work.attempt > 0
            marker = Marker(work.producer, work.coordinator_epoch, work.committed, bumps_epoch, repeated)
            self._topics.write_marker(topic, partition, marker, now_ms)
            return None

        return self._groups.call_shard(partition, _end_transaction, work, internal_operation_context(now_ms))

    @staticmethod
    def _error_to_retry(work: WriteMarkers, topic: str, partition: int, error: KafkaError) -> KafkaError | None:
        """Logs the error of a marker. Returns the error if the marker has to be written again, else None."""
        if error.error is Errors.UNKNOWN_TOPIC_OR_PARTITION:
            return None
        retried = error.error not in _NEEDS_NO_MARKER
        _logger.log(
            logging.DEBUG if retried and not work.attempt else logging.WARNING,
            "The marker of the transaction of %s could not be written to %s-%d%s: %s",
            work.transactional_id,
            topic,
            partition,
            ", it will be retried" if retried else "",
            error,
        )
        return error if retried else None


def check_id(transactional_id: str) -> None:
    """Raises KafkaError if the id is empty: as in Kafka, also if the coordinator is another worker or not available."""
    if not transactional_id:
        raise KafkaError(Errors.INVALID_REQUEST, "The transactional id must not be empty.")


def _end_transaction(
    shard: GroupCoordinatorShard, context: OperationContext, work: WriteMarkers
) -> CoordinatorResult[None]:
    return shard.end_transaction(context, work.producer, work.coordinator_epoch, committed=work.committed)


def _in_order(partitions: Partitions) -> Iterator[tuple[str, int]]:
    for topic, numbers in sorted(partitions.items()):
        for number in sorted(numbers):
            yield topic, number
