# SPDX-License-Identifier: Apache-2.0
"""Clients of the instances: they commit offsets, plainly and in transactions, and fetch them.

A client sends one request at a time to the instance that it takes for the coordinator, and asks another one after an
error or without a response. Each commit has a larger offset than all before it. A request to an instance that stands
still waits there, and is executed later, also when its client has given it up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Final

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import partition_for
from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.trace import Trace, ViolationError
from kcoord.simulation.upstream.brokers import UpstreamBrokers
from kcoord.simulation.upstream.checks import UpstreamChecks
from kcoord.simulation.upstream.instance import ClientRequest, InstanceProcess, SimulatedInstance
from kcoord.simulation.upstream.options import UpstreamOptions
from kcoord.simulation.upstream.transactions import TransactionPhase
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    OffsetCommitRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    TxnOffsetCommitRequest,
)

TOPICS: Final = ("t0", "t1", "t2", "t3")
TIMEOUT_MS: Final = 2_500
RETRIABLE: Final = frozenset(
    {
        Errors.COORDINATOR_NOT_AVAILABLE,
        Errors.COORDINATOR_LOAD_IN_PROGRESS,
        Errors.NOT_COORDINATOR,
        Errors.REQUEST_TIMED_OUT,
    }
)
_REFUSED: Final = frozenset(
    {
        Errors.INVALID_PRODUCER_EPOCH,
        Errors.PRODUCER_FENCED,
        Errors.INVALID_TXN_STATE,
        Errors.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Errors.GROUP_ID_NOT_FOUND,
        Errors.NON_EMPTY_GROUP,
    }
)
"""Errors after which a client aborts its transaction, or that an operator expects."""
_LONGEST_PAUSE_MS: Final = 250


@dataclass(slots=True)
class ClientScene:
    """What all clients share."""

    clock: VirtualClock
    options: UpstreamOptions
    trace: Trace
    brokers: UpstreamBrokers
    instances: Sequence[SimulatedInstance]
    checks: UpstreamChecks
    numbers: count[int]


class InstanceClient(ABC):
    """A client with one request at a time."""

    def __init__(self, name: str, group_id: str, scene: ClientScene, random: Random) -> None:
        self.name = name
        self.group_id = group_id
        self.random = random
        self.shard_id = partition_for(group_id, scene.options.shards)
        self.answered = 0
        """The number of commits that were acknowledged."""
        self._scene = scene
        self._target = random.choice(scene.instances)
        self._waits: ClientRequest | None = None
        self._goal = 0

    def start(self) -> None:
        self._scene.clock.after(self.random.randint(1, _LONGEST_PAUSE_MS), self._next)

    def settle(self) -> None:
        """Called when the faults end."""
        self._goal = self.answered + 2

    def is_settled(self) -> bool:
        return self.answered >= self._goal > 0

    def _next(self) -> None:
        if self._waits is None:
            self.act()
        if self._waits is None:
            self.start()

    @abstractmethod
    def act(self) -> None:
        """Sends the next request, if there is one."""

    def send(
        self,
        operation: Callable[..., object],
        message: object,
        on_answer: Callable[[InstanceProcess, object], None],
        *,
        version: int = 3,
    ) -> ClientRequest:
        """Sends a request. `on_answer` is called for its response, also for one that comes too late to matter."""
        clock = self._scene.clock

        def answer(process: InstanceProcess, value: object) -> None:
            """Called when the response leaves the instance."""
            self._check(value)
            if not isinstance(value, Exception):
                self._scene.trace.add("answer", f"{self.name} {process.owner}")
            on_answer(process, value)
            clock.after(self._way_ms(), lambda: self._end(request, value))

        request = ClientRequest(next(self._scene.numbers), self.group_id, operation, message, version, answer)
        self._waits = request
        clock.after(self._way_ms(), lambda: self._arrive(self._target, request))
        clock.after(TIMEOUT_MS, lambda: self._give_up(request))
        return request

    def _way_ms(self) -> int:
        return self.random.randint(1, self._scene.options.delay_ms)

    def _arrive(self, instance: SimulatedInstance, request: ClientRequest) -> None:
        process = instance.process
        if process is not None:
            process.loop.enter(self.execute, process, request)

    def execute(self, process: InstanceProcess, request: ClientRequest) -> None:
        process.serve(request)

    def _check(self, value: object) -> None:
        if isinstance(value, Exception):
            code = value.error if isinstance(value, KafkaError) else None
            if code not in RETRIABLE and code not in _REFUSED:
                self._scene.checks.violated(ViolationError("U-0 no unexpected error", f"{self.name} got {value!r}"))

    def _end(self, request: ClientRequest, value: object) -> None:
        if request is not self._waits:
            return
        self._waits = None
        if isinstance(value, Exception):
            self._target = self.random.choice(self._scene.instances)
        self.ended(value)
        self.start()

    def _give_up(self, request: ClientRequest) -> None:
        if request is self._waits:
            self._waits = None
            self._target = self.random.choice(self._scene.instances)
            self.ended(None)
            self.start()

    @abstractmethod
    def ended(self, value: object) -> None:
        """Called with the response, an error, or None if there was no response in time."""


class PlainClient(InstanceClient):
    """Commits offsets, fetches them, and sometimes deletes its group."""

    def act(self) -> None:
        draw = self.random.random()
        topic = self.random.choice(TOPICS)
        if draw < 0.55 or self._goal:
            self._commit(topic)
        elif draw < 0.95:
            self._fetch(topic)
        else:
            self.send(GroupCoordinatorShard.delete_groups, [self.group_id], lambda process, value: None)

    def ended(self, value: object) -> None:
        """Does nothing: every request stands for itself."""

    def _commit(self, topic: str) -> None:
        offset = next(self._scene.numbers)
        partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
        topics = [OffsetCommitRequest.OffsetCommitRequestTopic(name=topic, partitions=[partition])]

        def acknowledged(process: InstanceProcess, value: object) -> None:
            if not isinstance(value, Exception):
                self._scene.checks.acknowledged(process, self.shard_id, (self.group_id, topic), offset)
                self.answered += 1

        message = OffsetCommitRequest(group_id=self.group_id, topics=topics)
        self.send(GroupCoordinatorShard.commit_offset, message, acknowledged)

    def _fetch(self, topic: str) -> None:
        asked = OffsetFetchRequest.OffsetFetchRequestTopics(name=topic, partition_indexes=[0])
        message = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=self.group_id, topics=[asked])

        def fetched(process: InstanceProcess, value: object) -> None:
            if isinstance(value, OffsetFetchResponse.OffsetFetchResponseGroup):
                (partition,) = value.topics[0].partitions
                key = self.group_id, topic
                self._scene.checks.fetched(process, self.shard_id, key, partition.committed_offset)

        self.send(_fetch_offsets, message, fetched)


def _fetch_offsets(
    machine: GroupCoordinatorShard, context: OperationContext, message: OffsetFetchRequest.OffsetFetchRequestGroup
) -> object:
    return machine.fetch_offsets(context, message, require_stable=False)


class TransactionalClient(InstanceClient):
    """Runs transactions, each of which commits a new offset. Other clients may use its group (`is_shared`)."""

    def __init__(
        self, name: str, group_id: str, producer_id: int, scene: ClientScene, random: Random, *, is_shared: bool
    ) -> None:
        super().__init__(name, group_id, scene, random)
        self.is_shared = is_shared
        self._transactions = scene.brokers.transactions
        scene.brokers.partition_of[producer_id] = self.shard_id
        self.producer = self._transactions.init(producer_id)
        self.offset = 0
        """The offset of the present transaction, 0 if there is none."""
        self.topics: Sequence[str] = ()
        self.is_sent = self.is_doomed = False
        self.committed = dict.fromkeys(TOPICS, 0)
        self.aborted: set[int] = set()
        self._commit: ClientRequest | None = None
        self._abandoned: set[int] = set()
        """The requests that this client has given up."""

    def act(self) -> None:
        if self.random.random() < 0.5:
            self._scene.brokers.write_marker()
        if self.random.random() < 0.01 and not self._goal:
            self._transactions.time_out(self.producer.producer_id)
        try:
            self._step()
        except KafkaError as error:
            if error.error is Errors.INVALID_PRODUCER_EPOCH:
                with suppress(KafkaError):
                    self.producer = self._transactions.init(self.producer.producer_id)
                    self.aborted.add(self.offset)
                    self.offset = 0

    def _step(self) -> None:
        transactions = self._transactions
        if not self.offset:
            transactions.add_partition(self.producer)
            self.offset, self.is_sent, self.is_doomed = next(self._scene.numbers), False, False
            self.topics = TOPICS if self.random.random() < 0.2 else [self.random.choice(TOPICS)]
        elif self.is_doomed or (self.is_sent and self.random.random() < 0.2):
            transactions.end(self.producer, committed=False)
            self.aborted.add(self.offset)
            self.offset = 0
        elif self.is_sent:
            transactions.end(self.producer, committed=True)
            self.committed |= dict.fromkeys(self.topics, self.offset)
            self.offset = 0
            self.answered += 1
            self._scene.trace.add("transaction", f"{self.name}")
        else:
            self._send()

    def _send(self) -> None:
        producer_id, epoch = self.producer
        offset, topics = self.offset, self.topics
        message = TxnOffsetCommitRequest(
            transactional_id=str(producer_id),
            group_id=self.group_id,
            producer_id=producer_id,
            producer_epoch=epoch,
            topics=[
                TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
                    name=topic,
                    partitions=[
                        TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
                            partition_index=0, committed_offset=offset
                        )
                    ],
                )
                for topic in topics
            ],
        )

        def acknowledged(process: InstanceProcess, value: object) -> None:
            if not isinstance(value, Exception) and self._commit is not None and self._waits is self._commit:
                for topic in topics:
                    self._scene.checks.acknowledged(process, self.shard_id, (self.group_id, topic), offset)

        self._commit = self.send(GroupCoordinatorShard.commit_provisionally, message, acknowledged)

    def execute(self, process: InstanceProcess, request: ClientRequest) -> None:
        """Executes a request, unless the client has given it up and the process is the true owner.

        It would be part of the client's next transaction, also in Apache Kafka before transaction.version 2.
        """
        read = self._scene.checks.partitions[self.shard_id]
        read.follow()
        if request is not self._waits and process.owner == read.owner:
            return
        super().execute(process, request)

    def ended(self, value: object) -> None:
        if value is None:
            self.is_doomed = self.random.random() < 0.5
        elif not isinstance(value, Exception):
            self.is_sent = True
        elif isinstance(value, KafkaError) and value.error not in RETRIABLE:
            self.is_doomed = True

    def check(self) -> None:
        """U-7: offsets of aborted transactions never show, those of committed ones do."""
        read = self._scene.checks.partitions[self.shard_id]
        read.follow()
        offsets = read.mine.offsets()
        for topic in TOPICS:
            offset = offsets.get((self.group_id, topic), 0)
            if offset in self.aborted:
                text = f"offset {offset} of an aborted transaction of {self.name} is committed"
                raise ViolationError("U-7 transactions are atomic", text)
            phase = self._transactions.transactions[self.producer.producer_id].status
            if not self.is_shared and phase is not TransactionPhase.ENDING and offset != self.committed[topic]:
                text = f"{self.name} has committed {self.committed}, and the upstream has {offset} of {topic}"
                raise ViolationError("U-7 transactions are atomic", text)
