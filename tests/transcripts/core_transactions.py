# SPDX-License-Identifier: Apache-2.0
"""The transaction coordinator of the core stage: one pure shard. The shard of the groups writes its markers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kcoord.config import BrokerConfig
from kcoord.coordinator.transaction.metadata import EPOCH_BUMPING_VERSION, Partitions
from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.coordinator.transaction.work import WriteMarkers
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext, Producer
from kcoord.server.shards.transaction_service import check_id
from kcoord.topics.partition import Marker
from kcoord.topics.producer_ids import ProducerIds
from kcoord_protocol.errors import Errors
from tests.unit.transaction.coordinator import Coordinator

_SHARD = 0
_GROUP_TOPIC = "__consumer_offsets"
_FIRST_PRODUCER_ID = 1000


class CoreTopics:
    """Serves `Broker.topics`. The core has no topic data, so it drops the markers of topics."""

    def __init__(self) -> None:
        self.producer_ids = ProducerIds()
        self.producer_ids.add_block(_FIRST_PRODUCER_ID, 1_000_000)

    def write_marker(self, topic: str, partition: int, marker: Marker, now_ms: int) -> None:
        """Does nothing."""


class CoreTransactions:
    """Serves `Broker.transactions` with one shard, in which an operation ends when it returns."""

    shard_ids = (_SHARD,)

    def __init__(self, config: BrokerConfig, now_ms: int, end_in_groups: Callable[[WriteMarkers], None]) -> None:
        self._coordinator = Coordinator(config=config)
        self._coordinator.now_ms = now_ms
        self._coordinator.restart()
        self._end_in_groups = end_in_groups

    @property
    def log(self) -> list[CoordinatorRecord]:
        return self._coordinator.log

    @property
    def id_count(self) -> int:
        return self._coordinator.shard.id_count

    def shard_of(self, key: str) -> int:
        return _SHARD

    def needs_producer_id(self, transactional_id: str) -> bool:
        return self._coordinator.shard.needs_producer_id(transactional_id)

    def call(self, key: str, operation: Any, request: Any, context: OperationContext) -> Any:
        check_id(key)
        return self.call_shard(_SHARD, operation, request, context)

    def call_shard(
        self,
        shard_id: int,
        operation: Callable[[TransactionCoordinatorShard, OperationContext, Any], CoordinatorResult[Any]],
        request: Any,
        context: OperationContext,
    ) -> Any:
        return self._coordinator.run(lambda context: operation(self._coordinator.shard, context, request))

    def add_partitions(
        self,
        transactional_id: str,
        producer: Producer,
        partitions: Partitions,
        client_transaction_version: int,
        context: OperationContext,
    ) -> None:
        self._coordinator.run(
            lambda context: self._coordinator.shard.add_partitions(
                context, transactional_id, producer, partitions, client_transaction_version
            )
        )

    def agree(
        self,
        transactional_id: str,
        producer: Producer,
        partitions: Partitions,
        context: OperationContext,
        *,
        adds: bool,
    ) -> Mapping[tuple[str, int], Errors]:
        if adds:
            self.add_partitions(transactional_id, producer, partitions, EPOCH_BUMPING_VERSION, context)
            return {}
        return self._coordinator.run(
            lambda context: self._coordinator.shard.verify_partitions(context, transactional_id, producer, partitions)
        )

    def write_markers(self) -> None:
        """Ends decided transactions in the groups' shard, as their markers do."""
        while self._coordinator.tasks:
            task = self._coordinator.tasks.pop(0)
            assert isinstance(task.work, WriteMarkers)
            if _GROUP_TOPIC in task.work.partitions:
                self._end_in_groups(task.work)
            self._coordinator.end_task(task)

    def next_deadline_ms(self) -> int | None:
        return min(self._coordinator.timers.values(), default=None)

    def go_to(self, now_ms: int) -> None:
        self._coordinator.elapse(now_ms - self._coordinator.now_ms)

    def restart(self) -> None:
        self._coordinator.restart()
