# SPDX-License-Identifier: Apache-2.0
"""The worker that owns the metadata log.

Theory of operation
-------------------
The controller is the server's own broker with its metadata service. It has its own process, disk and clock. Its clock
may be ahead of or behind the broker's clock. The broker under test follows it over Unix sockets.

Clients change topics and configs by requests to the broker, which forwards them to the controller. This module makes
only the changes that a cluster makes by itself: it registers the brokers, creates the first topics, and moves leaders
of the coordinators' partitions (`move`).

Crash. `crash` ends the process, sometimes with its machine, and another one starts a little later. Messages of `write`
that were not durable before the crash are written again by the next process (`_unwritten`), so that every move of a
leader happens. The disk of the controller does not fail.

One limit differs from production: new partitions wait for a follower that stands still as long as that takes
(`surroundings`), because the checks of I-31 allow no exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Final, cast

from kcoord.metadata import records as metadata_records
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.records import BrokerRegistration
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext
from kcoord.server.broker import Broker
from kcoord.server.composition import compose, local_metadata
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.environment import Environment
from kcoord.server.replies import internal_operation_context
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.metadata_service import MetadataService
from kcoord.server.workers.controller_metadata import ControllerMetadataService
from kcoord.server.workers.peer_listener import PeerListener
from kcoord.simulation.broker import SimulatedBroker
from kcoord.simulation.log_writer import SimulatedLogWriter
from kcoord.simulation.loop import SimulatedLoop
from kcoord.simulation.machine import Machine
from kcoord.simulation.planted import NO_FAULT
from kcoord.simulation.process import AWAY_ID, CONTROLLER_ID, CONTROLLER_PATH, TOPICS, Threads
from kcoord.simulation.trace import Trace
from kcoord.storage.memory_file_system import keep_everything, keep_nothing
from kcoord_protocol.messages import CreateAclsRequest, CreateTopicsRequest, Message, PartitionRecord, TopicRecord

_LONGEST_ABSENCE_MS: Final = 3_000
_LONGEST_PASS_MS: Final = 300
"""Longest step of the log writer: long, so that groups are created while partitions are made."""


class Controller:
    """The controller over all lives of its process. `image` is the metadata that its log holds durably."""

    def __init__(self, broker: SimulatedBroker, random: Random, trace: Trace) -> None:
        self.image = MetadataImage.empty()
        self.internal_ids: dict[str, bytes] = {}
        self.names: dict[bytes, str] = {}
        """Names of all topics that ever existed, by id."""
        self._broker = broker
        self._trace = trace
        options = replace(broker.options, disk_error_probability=0.0, disk_delay_ms=_LONGEST_PASS_MS)
        machine = self._machine = Machine(broker.clock, random, options, trace, NO_FAULT)
        machine.config = options.broker_config(CONTROLLER_ID)
        self._loop = self._new_loop()
        self._ended: list[tuple[SimulatedLoop, Broker]] = []
        """Processes that have ended. Kept so that Python collects them after the run, at a time that is the same in
        every run.
        """
        self._unwritten: list[Sequence[Message]] = []
        self._offset_ms = random.choice((0, 1_500, -1_500))
        self._composed: Broker
        broker.observer.image = lambda: self.image

    def begin(
        self,
        topics: Sequence[CreateTopicsRequest.CreatableTopic],
        then: Callable[[], None],
        acls: Sequence[CreateAclsRequest.AclCreation] = (),
    ) -> None:
        """Starts the process and creates the cluster; calls `then` once all first topics and ACLs exist."""
        # A new cluster has no groups, and its worker starts after the first topics exist.
        self._loop.enter(self._start, ())
        self._loop.enter(lambda: self._loop.create_task(self._make_cluster(topics, acls, then)))

    def _new_loop(self) -> SimulatedLoop:
        broker = self._broker
        loop = SimulatedLoop(broker.clock, 1.0, 0, lambda executor: (0, None), broker.not_handled)  # type: ignore[abstract]
        loop.sockets = broker.sockets
        return loop

    def crash(self, random: Random) -> None:
        """Kills the process, in half of the cases with its machine, and starts another one a little later."""
        if self._loop.has_ended:
            return
        whole_machine = random.random() < 0.5
        self._trace.add("controller-crash", f"whole_machine={whole_machine}")
        self._ended.append((self._loop, self._composed))
        self._loop.end()
        self._machine.disk.crash(keep_nothing if whole_machine else keep_everything)
        self._machine.clock.after(random.randint(1, _LONGEST_ABSENCE_MS), self._start_again)

    def _start_again(self) -> None:
        self._loop = self._new_loop()
        self._loop.enter(self._start, (self._broker.config.node_id,))
        self._loop.enter(lambda: self._loop.create_task(self._go_on()))

    async def _go_on(self) -> None:
        self._composed.begin()
        self._publish(self._metadata.image)
        await self._listener.start()
        for messages in list(self._unwritten):
            self._loop.create_task(self._write(messages))

    def _start(self, worker_ids: Iterable[int]) -> None:
        """Composes a process. `worker_ids` are the workers that may have groups."""
        machine, loop = self._machine, self._loop

        environment = Environment(
            loop,
            lambda: machine.clock.now_ms + self._offset_ms,
            uuids=machine.uuids,
            new_pool=lambda size, name: cast("Any", Threads(loop, name)),
        )
        folder = DataFolder(machine.config, environment.now_ms(), machine.disk, uuids=machine.uuids)

        def new_metadata(broker: Broker, group_times: GroupTimes) -> MetadataService:
            new_service = partial(ControllerMetadataService, worker_ids=worker_ids)
            return local_metadata(folder, broker, group_times, new_service)

        self._composed = compose(
            machine.config,
            environment,
            folder,
            new_metadata=new_metadata,
            new_writer=lambda loop, deliver, journal: SimulatedLogWriter(machine, self._loop, deliver, journal),
        )
        self._metadata = cast("ControllerMetadataService", self._composed.metadata)
        self._metadata.publishers.append(self._publish)
        self._listener = PeerListener(cast("Any", CONTROLLER_PATH), self._composed, self._metadata.followers)

    async def _make_cluster(
        self,
        topics: Sequence[CreateTopicsRequest.CreatableTopic],
        acls: Sequence[CreateAclsRequest.AclCreation],
        then: Callable[[], None],
    ) -> None:
        registrations = [
            BrokerRegistration(node_id, bytes(16), [("PLAINTEXT", "broker", 9092, 0)], None, [bytes(15) + b"\1"])
            for node_id in (1, CONTROLLER_ID, AWAY_ID)
        ]
        context = internal_operation_context(self._composed.now_ms())
        await self._metadata.call(MetadataMachine.register_brokers, cast("Any", registrations), context)
        self._composed.begin()
        await self._write(list(self._internal_topics()))
        if topics:
            ids = self._composed.uuids.take_topic_ids(len(topics))
            request = CreateTopicsRequest(topics=list(topics))
            await self._metadata.call(
                lambda machine, context, request: machine.create_topics(context, request, ids), request, context
            )
        if acls:
            acl_ids = [self._composed.uuids.take() for _ in acls]
            creation = CreateAclsRequest(creations=list(acls))
            await self._metadata.call(
                lambda machine, context, request: machine.create_acls(context, request, acl_ids), creation, context
            )
        await self._listener.start()
        then()

    def _internal_topics(self) -> Iterable[Message]:
        """Yields the records of the coordinators' topics. Without a creation time they are older than all groups."""
        options = self._broker.options
        own = {"groups": set(options.own_shards), "transactions": set(range(options.transaction_shards))}
        counts = {"groups": options.group_partitions, "transactions": options.transaction_shards}
        for number, (name, topic) in enumerate(TOPICS.items(), 1):
            topic_id = self.internal_ids[topic] = bytes([number]) * 16
            yield TopicRecord(name=topic, topic_id=topic_id)
            for partition in range(counts[name]):
                leader = 1 if partition in own[name] else AWAY_ID
                yield PartitionRecord(
                    partition_id=partition, topic_id=topic_id, replicas=[leader], isr=[leader], leader=leader
                )

    def _publish(self, image: MetadataImage) -> None:
        before, self.image = self.image, image
        self.names.update({topic.id: topic.name for topic in image.topics.values()})
        self._trace.add("metadata", str(image.last_creation_time_ms))
        self._broker.observer.partitions_made(before, image)

    def move(self, topic: str, partition: int, leader: int) -> None:
        """Makes `leader` the leader of a partition of a coordinator's topic."""
        record = metadata_records.new_leader_record(self.internal_ids[topic], partition, [leader], leader)
        assert record.value is not None
        self.write([record.value])

    def write(self, messages: Sequence[Message]) -> None:
        """Appends records to the metadata log without a request. Not for records that create partitions."""
        self._unwritten.append(messages)
        self._loop.enter(lambda: self._loop.create_task(self._write(messages)))

    async def _write(self, messages: Sequence[Message]) -> None:
        def write(
            machine: MetadataMachine, context: OperationContext, request: Sequence[Message]
        ) -> CoordinatorResult[None]:
            return CoordinatorResult(None, [CoordinatorRecord(None, message) for message in request])

        context = internal_operation_context(self._composed.now_ms())
        await self._metadata.call(cast("Any", write), cast("Any", messages), context)
        if messages in self._unwritten:
            self._unwritten.remove(messages)

    def end(self) -> None:
        """Ends the process, because the run is over."""
        self._loop.end()
