# SPDX-License-Identifier: Apache-2.0
"""The worker that makes partitions: a process of its own, with another clock than the coordinators' process.

It follows `kcoord.metadata.creation_order` as the server does. Messages between the two take their time and stay in
order. One difference on purpose: it waits for a process that stands still as long as that takes; the server goes on
after some seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Final, TypeVar

from kcoord.metadata import records as metadata_records
from kcoord.metadata.creation_order import CreationOrder
from kcoord.metadata.image import ImageBuilder, MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.records import BrokerRegistration
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext
from kcoord.simulation.broker import SimulatedBroker
from kcoord.simulation.process import TOPICS, RemoteMetadata, SimulatedProcess
from kcoord.simulation.trace import Trace
from kcoord_protocol.messages import Message, PartitionRecord, TopicRecord

RequestMessage = TypeVar("RequestMessage", bound=Message)
T = TypeVar("T")

_LONGEST_WAY_MS: Final = 200
"""For a message between the two processes."""
_LONGEST_WRITE_MS: Final = 600
"""From the stamp until the partitions are known: long, so that groups are created meanwhile."""
_LOAD_CHECK_MS: Final = 20


class Controller:
    """`change` runs one change of the cluster after the other; `make` is what makes partitions within one."""

    def __init__(self, broker: SimulatedBroker, random: Random, trace: Trace) -> None:
        self._broker = broker
        self._clock = broker.clock
        self._random = random
        self._trace = trace
        self._order: CreationOrder[SimulatedProcess] = CreationOrder()
        self._offset_ms = random.choice((0, 1_500, -1_500))
        self.internal_ids: dict[str, bytes] = {}
        self._is_busy = False
        self._changes: deque[Callable[[], None]] = deque()
        self._asking: tuple[int, Callable[[int], Iterable[Message]], str] | None = None
        broker.on_start = self._joined
        broker.on_end = self._lost
        broker.new_metadata = lambda: RemoteMetadata(self.image, self.call)

    @property
    def image(self) -> MetadataImage:
        return self._broker.image

    @property
    def now_ms(self) -> int:
        return self._clock.now_ms + self._offset_ms

    def change(self, change: Callable[[], None]) -> None:
        """Runs `change` when those before it are done."""
        self._changes.append(change)
        self._next()

    def _next(self) -> None:
        while self._changes and not self._is_busy:
            self._changes.popleft()()

    def begin(self) -> None:
        """Who the brokers are, and the topics of the coordinators, which are older than all groups."""
        machine = MetadataMachine(self._broker.config, MetadataImage.empty())
        registration = BrokerRegistration(1, bytes(16), [("PLAINTEXT", "broker", 9092, 0)], None, [bytes(15) + b"\1"])
        made: list[Message] = [
            record.value
            for record in machine.register_brokers(OperationContext(0), [registration]).records
            if record.value is not None
        ]
        options = self._broker.options
        own = {"groups": set(options.own_shards), "transactions": set(range(options.transaction_shards))}
        counts = {"groups": options.group_partitions, "transactions": options.transaction_shards}
        for number, (name, topic) in enumerate(TOPICS.items(), 1):
            topic_id = self.internal_ids[topic] = bytes([number]) * 16
            made.append(TopicRecord(name=topic, topic_id=topic_id))
            for partition in range(counts[name]):
                leader = 1 if partition in own[name] else 2
                made.append(
                    PartitionRecord(
                        partition_id=partition, topic_id=topic_id, replicas=[leader], isr=[leader], leader=leader
                    )
                )
        self.publish(made, "begin")

    def move(self, topic: str, partition: int, leader: int) -> None:
        """Another broker leads a partition of a coordinator's topic from now on."""
        record = metadata_records.new_leader_record(self.internal_ids[topic], partition, [leader], leader)
        assert record.value is not None
        self.publish([record.value], f"{topic}-{partition} is led by {leader}")

    async def call(
        self,
        operation: Callable[[MetadataMachine, OperationContext, RequestMessage], CoordinatorResult[T]],
        request: RequestMessage,
        context: OperationContext,
    ) -> T:
        """What a broker asks for; the answer takes its way there and back."""
        await asyncio.sleep(self._random.randint(0, _LONGEST_WAY_MS) / 1000)
        result = operation(MetadataMachine(self._broker.config, self._broker.image), context, request)
        self.publish([record.value for record in result.records if record.value is not None], type(request).__name__)
        await asyncio.sleep(self._random.randint(0, _LONGEST_WAY_MS) / 1000)
        return result.response

    def publish(self, records: Iterable[Message], text: str) -> None:
        """Changes the metadata at once; for all that makes no partitions."""
        builder = ImageBuilder(self._broker.image)
        for record in records:
            builder.replay(CoordinatorRecord(None, record))
        self._trace.add("metadata", text)
        self._broker.update_image(builder.build())

    def make(self, records: Callable[[int], Iterable[Message]], text: str) -> None:
        """Publishes records that make partitions; `records` gets their creation time."""
        ticket = self._order.begin()
        self._is_busy = True
        self._asking = ticket, records, text
        for process in list(self._order.waiting(ticket)):
            self._send(process, lambda process=process: self._ask(process, ticket))  # type: ignore[misc]
        self._stamp_if_answered()

    def _send(self, process: SimulatedProcess, action: Callable[[], None]) -> None:
        self._clock.after(self._random.randint(0, _LONGEST_WAY_MS), lambda: process.loop.enter(action))

    def _ask(self, process: SimulatedProcess, ticket: int) -> None:
        """In the process: all of its groups have to be known."""
        if process.broker.groups.is_loading:
            process.loop.after(_LOAD_CHECK_MS, self._ask, process, ticket)
            return
        newest_ms = process.group_times.newest_ms()
        process.group_times.limits.hold(ticket, newest_ms)
        way_ms = self._random.randint(0, _LONGEST_WAY_MS)
        self._clock.after(way_ms, lambda: self._answered(process, ticket, newest_ms))

    def _answered(self, process: SimulatedProcess, ticket: int, newest_ms: int) -> None:
        self._order.answer(process, ticket, newest_ms, self._clock.now_ms)
        self._stamp_if_answered()

    def _stamp_if_answered(self) -> None:
        if self._asking is None or self._order.waiting(self._asking[0]):
            return
        (ticket, records, text), self._asking = self._asking, None
        last_ms = self._broker.image.last_creation_time_ms
        time_ms = self._order.stamp(ticket, self.now_ms, last_ms, self._clock.now_ms)
        made = list(records(time_ms))
        if self._broker.process is None:
            self._finish(ticket, made, text)
        else:
            write_ms = self._random.randint(0, _LONGEST_WRITE_MS)
            self._clock.after(write_ms, lambda: self._finish(ticket, made, text))

    def _finish(self, ticket: int, made: list[Message], text: str) -> None:
        self._broker.observer.partitions_made(made)
        self.publish(made, text)
        self._order.end(ticket)
        process = self._broker.process
        if process is not None:
            # Behind the image, which takes the same way.
            process.loop.enter(process.group_times.limits.release, ticket)
        self._is_busy = False
        self._next()

    def _joined(self, process: SimulatedProcess) -> None:
        for ticket, limit_ms in self._order.join(process, process.group_times.newest_ms(), self._clock.now_ms).items():
            if limit_ms is None:
                self._send(process, lambda ticket=ticket: self._ask(process, ticket))  # type: ignore[misc]
            else:
                process.group_times.limits.hold(ticket, limit_ms)

    def _lost(self, process: SimulatedProcess) -> None:
        self._order.lose(process, self._clock.now_ms)
        self._stamp_if_answered()
