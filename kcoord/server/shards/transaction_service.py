# SPDX-License-Identifier: Apache-2.0
"""The transaction coordinator shards of this process, and the markers that tell partitions how a transaction ended.

Partitions that this worker leads are told by a call, others through their leader. What could not be told is told again
later, also after a restart: the decision is durable before the first partition hears of it.
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
from kcoord.server.shards.peer_calls import PeerCalls
from kcoord.server.shards.shard_service import ShardService
from kcoord.topics.partition import Marker
from kcoord.topics.store import TopicStore
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC

if TYPE_CHECKING:
    from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
    from kcoord.coordinator.transaction.work import WriteMarkers

_logger = logging.getLogger(__name__)

T = TypeVar("T")


MARKERS_AT_A_TIME = 200
"""How many partitions are told before others get the event loop."""

_NOTHING_TO_TELL: Final = (
    Errors.UNKNOWN_TOPIC_OR_PARTITION,
    Errors.INVALID_PRODUCER_EPOCH,
    Errors.TRANSACTION_COORDINATOR_FENCED,
)
"""A partition that is gone, or that has a newer marker of this producer already, needs no other one."""


class TransactionService(ShardService["TransactionCoordinatorShard"]):
    """Serves `Broker.transactions`; see the module's text."""

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

    def needs_producer_id(self, transactional_id: str) -> bool:
        """Whether an operation on this id may use up a fresh producer id, which the caller then has to bring."""
        machine = self.shards.machine(self.shard_of(transactional_id))
        return machine is not None and machine.needs_producer_id(transactional_id)

    def agree(
        self,
        transactional_id: str,
        producer: Producer,
        partitions: Partitions,
        context: OperationContext,
        *,
        adds: bool,
    ) -> Reply[Mapping[tuple[str, int], Errors]]:
        """Whether the producer may write to the partitions within its transaction. With `adds` (KIP-890) they become
        part of it; before, the producer had to have them added.
        """
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
        """Makes partitions part of a transaction that this worker coordinates."""

        def add(
            shard: TransactionCoordinatorShard, context: OperationContext, partitions: Partitions
        ) -> CoordinatorResult[None]:
            return shard.add_partitions(context, transactional_id, producer, partitions, client_transaction_version)

        return self.call(transactional_id, add, partitions, context)

    def _leader(self, topic: str, partition: int) -> int:
        """This worker also where there is no such partition: it knows what to say then."""
        image = self._image().partition(topic, partition)
        return image.leader if image is not None else self._node_id

    # --- markers ------------------------------------------------------------------------------------------------------

    def start_task(self, shard_id: int, task: Task) -> None:
        self._environment.spawn(self._tell(shard_id, task))

    async def _tell(self, shard_id: int, task: Task) -> None:
        value: object = None
        try:
            await self._tell_partitions(cast("WriteMarkers", task.work))
        except Exception as error:
            value = error
            if not isinstance(error, KafkaError):
                _logger.exception("Writing the markers of shard %d failed", shard_id)
        self.task_done(shard_id, task, value)

    async def _tell_partitions(self, work: WriteMarkers) -> None:
        """Tells all partitions that can be told; raises the error of one that could not."""
        by_leader: dict[int, list[tuple[str, int]]] = {}
        for topic, partition in _each(work.partitions):
            by_leader.setdefault(self._leader(topic, partition), []).append((topic, partition))
        own = by_leader.pop(self._node_id, [])
        told = [self._tell_others(work, leader, partitions) for leader, partitions in by_leader.items()]
        outcomes = await asyncio.gather(self._tell_own(work, own), *told)
        failed = next((error for error in outcomes if error is not None), None)
        if failed is not None:
            raise failed

    async def _tell_others(
        self, work: WriteMarkers, leader: int, partitions: list[tuple[str, int]]
    ) -> KafkaError | None:
        from kcoord.server.shards.remote_transactions import tell_leader

        wanted = partitions_of((topic, [number]) for topic, number in partitions)
        errors = await tell_leader(self._peers, leader, work, wanted)
        failed: KafkaError | None = None
        for topic, number in partitions:
            error = errors.get((topic, number), Errors.UNKNOWN_SERVER_ERROR)
            if error is not Errors.NONE:
                failed = self._not_told(work, topic, number, KafkaError(error)) or failed
        return failed

    async def _tell_own(self, work: WriteMarkers, partitions: list[tuple[str, int]]) -> KafkaError | None:
        failed: KafkaError | None = None
        waiting: list[tuple[str, int, asyncio.Future[None]]] = []
        for count, (topic, partition) in enumerate(partitions, 1):
            try:
                reply = self._tell_one(work, topic, partition)
                if asyncio.isfuture(reply):
                    waiting.append((topic, partition, reply))
            except KafkaError as error:
                failed = self._not_told(work, topic, partition, error) or failed
            if not count % MARKERS_AT_A_TIME:
                await asyncio.sleep(0)
        for topic, partition, reply in waiting:
            try:
                await reply
            except KafkaError as error:
                failed = self._not_told(work, topic, partition, error) or failed
        return failed

    def _tell_one(self, work: WriteMarkers, topic: str, partition: int) -> Reply[None]:
        now_ms = self._now_ms()
        if topic != GROUP_METADATA_TOPIC:
            bumps_epoch = work.transaction_version >= EPOCH_BUMPING_VERSION
            repeated = work.attempt > 0
            marker = Marker(work.producer, work.coordinator_epoch, work.committed, bumps_epoch, repeated)
            self._topics.write_marker(topic, partition, marker, now_ms)
            return None

        return self._groups.call_shard(partition, _end_transaction, work, internal_operation_context(now_ms))

    @staticmethod
    def _not_told(work: WriteMarkers, topic: str, partition: int, error: KafkaError) -> KafkaError | None:
        """The error, if the partition has to be told again."""
        if error.error is Errors.UNKNOWN_TOPIC_OR_PARTITION:
            return None
        retried = error.error not in _NOTHING_TO_TELL
        _logger.log(
            logging.DEBUG if retried and not work.attempt else logging.WARNING,
            "The end of the transaction of %s could not be written to %s-%d%s: %s",
            work.transactional_id,
            topic,
            partition,
            ", it is tried again" if retried else "",
            error,
        )
        return error if retried else None


def _end_transaction(
    shard: GroupCoordinatorShard, context: OperationContext, work: WriteMarkers
) -> CoordinatorResult[None]:
    return shard.end_transaction(context, work.producer, work.coordinator_epoch, committed=work.committed)


def _each(partitions: Partitions) -> Iterator[tuple[str, int]]:
    for topic, numbers in sorted(partitions.items()):
        for number in sorted(numbers):
            yield topic, number
