# SPDX-License-Identifier: Apache-2.0
"""A transaction shard under test. After every operation it rebuilds a second shard from the log and compares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kcoord.config import BrokerConfig
from kcoord.coordinator.transaction.end_transaction import EndRequest
from kcoord.coordinator.transaction.metadata import TransactionMetadata, TransactionState, partitions_of
from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.coordinator.transaction.work import WriteMarkers
from kcoord.metadata.image import ImageBuilder
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
from kcoord.runtime.serde import TRANSACTION_RECORDS, CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import make_chunks
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import FeatureLevelRecord, InitProducerIdResponse

T = TypeVar("T")

ID = "tx"
NOW_MS = 1_000_000
TIMEOUT_MS = 60_000


class Coordinator:
    """A transaction shard with its log, timers and tasks, as the runtime keeps them."""

    def __init__(self, transaction_version: int = 2, config: BrokerConfig | None = None, **settings: str) -> None:
        properties = {key.replace("_", "."): value for key, value in settings.items()}
        self.config = config or BrokerConfig.from_properties(properties)
        feature = FeatureLevelRecord(name="transaction.version", feature_level=transaction_version)
        self.image = ImageBuilder.of([CoordinatorRecord(None, feature)])
        self.now_ms = NOW_MS
        self.log: list[CoordinatorRecord] = []
        self.timers: dict[TimerKey, int] = {}
        self.tasks: list[Task] = []
        self.next_producer_id = 100
        self.shard = self._new_shard()

    def _new_shard(self) -> TransactionCoordinatorShard:
        return TransactionCoordinatorShard(self.config, self.image, coordinator_epoch=7)

    def run(self, operation: Callable[[OperationContext], CoordinatorResult[T]]) -> T:
        result = operation(OperationContext(self.now_ms))
        for record in result.records:
            self.shard.replay(record)
        self.log += result.records
        for effect in result.timers:
            if isinstance(effect, Schedule):
                self.timers[effect.key] = effect.deadline_ms
            elif isinstance(effect, Cancel):
                self.timers.pop(effect.key, None)
        self.tasks += result.tasks
        assert self.rebuilt().hard_state() == self.shard.hard_state()
        assert self.restored().hard_state() == self.shard.hard_state()
        return result.response

    def rebuilt(self) -> TransactionCoordinatorShard:
        """Returns a shard that is rebuilt from the bytes of the log."""
        serde = CoordinatorSerde(TRANSACTION_RECORDS)
        shard = self._new_shard()
        for record in self.log:
            read = serde.deserialize(*serde.serialize(record))
            assert read is not None
            shard.replay(read)
        return shard

    def restored(self) -> TransactionCoordinatorShard:
        """Returns a shard that is restored from the bytes of a snapshot."""
        serde = CoordinatorSerde(TRANSACTION_RECORDS)
        runtime = ShardSet(lambda _: self._new_shard(), serde)
        chunks = [chunk for slice_ in make_chunks(self.shard.snapshot(), serde) for chunk in slice_]
        runtime.load(0, (), self.now_ms, 0, chunks)
        shard = runtime.machine(0)
        assert shard is not None
        return shard

    def restart(self) -> None:
        """Rebuilds the shard from the log; soft state is lost."""
        self.shard = self.rebuilt()
        self.timers.clear()
        self.tasks.clear()
        self.run(self.shard.on_loaded)

    # Requests.

    def init(
        self, expected: Producer | None = None, timeout_ms: int = TIMEOUT_MS, transactional_id: str = ID
    ) -> InitProducerIdResponse:
        candidate = None
        if self.shard.needs_producer_id(transactional_id):
            candidate = self.next_producer_id
            self.next_producer_id += 1
        return self.run(
            lambda context: self.shard.init_producer_id(context, transactional_id, timeout_ms, expected, candidate)
        )

    def initialized(self) -> Producer:
        response = self.init()
        assert response.error_code == 0
        return Producer(response.producer_id, response.producer_epoch)

    def add(self, producer: Producer, *partitions: tuple[str, int], version: int = 2) -> None:
        added = partitions_of((topic, [number]) for topic, number in partitions)
        self.run(lambda context: self.shard.add_partitions(context, ID, producer, added, version))

    def verify(self, producer: Producer, *partitions: tuple[str, int]) -> list[Errors]:
        requested = partitions_of((topic, [number]) for topic, number in partitions)
        errors = self.run(lambda context: self.shard.verify_partitions(context, ID, producer, requested))
        return [errors[partition] for partition in partitions]

    def end(self, producer: Producer, *, committed: bool = True, version: int = 5) -> Producer:
        candidate = None
        if version >= 5 and self.shard.needs_producer_id(ID):
            candidate = self.next_producer_id
            self.next_producer_id += 1
        request = EndRequest(producer, committed, version >= 5, 2 if version >= 5 else 0, candidate)
        return self.run(lambda context: self.shard.end_transaction(context, ID, request))

    # Tasks and time.

    def take_work(self) -> WriteMarkers:
        """Returns the work of the only task."""
        (task,) = self.tasks
        assert isinstance(task.work, WriteMarkers)
        assert task.when_durable
        return task.work

    def complete(self, value: object = None) -> WriteMarkers:
        """Completes the only task; returns its work. `value` is an exception if the markers could not be written."""
        work = self.take_work()
        self.end_task(self.tasks.pop(), value)
        return work

    def end_task(self, task: Task, value: object = None) -> None:
        self.run(lambda context: self.shard.complete_task(context, task, value))

    def elapse(self, elapsed_ms: int) -> None:
        """Advances the clock and fires the timers that become due, in order."""
        end_ms = self.now_ms + elapsed_ms
        while due := sorted((deadline, key) for key, deadline in self.timers.items() if deadline <= end_ms):
            self.now_ms, key = max(self.now_ms, due[0][0]), due[0][1]
            del self.timers[key]
            self._fire(key)
        self.now_ms = end_ms

    def _fire(self, key: TimerKey) -> None:
        self.run(lambda context: self.shard.fire_timer(context, key))

    # State.

    @property
    def metadata(self) -> TransactionMetadata:
        return self.shard.hard_state()[ID]

    @property
    def state(self) -> TransactionState:
        return self.metadata.state


def error_of(call: Callable[[], object]) -> Errors:
    """Returns the error that a call raises or that its response has; NONE if there is none."""
    try:
        response = call()
    except KafkaError as error:
        return error.error
    return Errors(response.error_code) if isinstance(response, InitProducerIdResponse) else Errors.NONE
