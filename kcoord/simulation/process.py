# SPDX-License-Identifier: Apache-2.0
"""One life of the broker: the server's own process, composed as in production, on simulated time and disk.

A crash loses all that these classes hold; `machine.Machine` holds what survives. A real process differs in two parts:
frames come from its own sockets, and it has a writer thread. The controller, another process, owns the metadata log;
this process follows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.runtime.waiting import ShardState
from kcoord.server.broker import Broker
from kcoord.server.composition import compose, new_transaction_shard
from kcoord.server.disk import cleanable_logs
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.disk.log_writer import WriteJob, Writer
from kcoord.server.environment import Environment
from kcoord.server.net.connection import KafkaConnection
from kcoord.server.process import BrokerProcess
from kcoord.server.replies import Reply
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.metadata_service import MetadataService
from kcoord.server.shards.shard_service import Clock
from kcoord.server.workers.metadata_follower import MetadataFollower
from kcoord.server.workers.peer_link import Peers
from kcoord.simulation.log_writer import SimulatedLogWriter
from kcoord.simulation.loop import SimulatedLoop
from kcoord.simulation.machine import Machine
from kcoord.simulation.trace import ViolationError
from kcoord.storage.cleaner import Cleaner, assess
from kcoord.storage.errors import OpeningCanceledError, PartitionHeldError, StorageError
from kcoord.storage.journal import Journal
from kcoord.storage.log import Log
from kcoord.storage.log_dir import Identity, LogDir
from kcoord.storage.recovery import Check, go_on
from kcoord.storage.segment import LogConfig
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC

DATA_FOLDER: Final = "data"
_MAP_BYTES: Final = 64 << 10
CONTROLLER_ID: Final = 2
CONTROLLER_PATH: Final = "controller.sock"
AWAY_ID: Final = 3
"""A broker that leads partitions for a while and never answers."""


class SimulatedLogDir(LogDir):
    """A data folder whose logs are opened without disk faults, and which reports damage (D-1).

    After a failed sync during an open, no part of the simulation could know which bytes are on the disk. A log that
    cannot be opened without faults is damaged, and no crash may damage a log.
    """

    machine: Machine

    def open_log(self, topic: str, partition: int, config: LogConfig, now_ms: int, check: Check = go_on) -> Log:
        machine = self.machine
        machine.opening += 1
        try:
            return super().open_log(topic, partition, config, now_ms, check)
        except (PartitionHeldError, OpeningCanceledError):
            raise
        except StorageError as error:
            machine.observer.violated(
                ViolationError("D-1 a crash only tears the tail", f"{topic}-{partition}: {error}")
            )
            raise
        finally:
            machine.opening -= 1


class Threads:
    """A thread pool of the server; its work runs in the loop."""

    def __init__(self, loop: SimulatedLoop, name: str) -> None:
        self.name = name
        self._loop = loop

    def submit(self, work: Callable[..., object], *args: object) -> object:
        return self._loop.run_in_executor(self, work, *args)

    def shutdown(self, **how: object) -> None:
        """Does nothing: there is no thread to end."""


class SimulatedProcess(BrokerProcess):
    """One life of the broker under test, from start to crash or orderly stop."""

    group_times: GroupTimes

    def __init__(self, simulated: Machine, loop: SimulatedLoop, offset_ms: int) -> None:
        self.simulated = simulated
        self.loop = loop
        self.is_open = False
        """Whether the process accepts connections of clients."""
        started_ms = simulated.clock.now_ms + offset_ms

        def now_ns() -> int:
            return (started_ms + loop.elapsed_ms()) * 1_000_000

        clock = Clock(wall_ns=now_ns, monotonic_ns=now_ns)
        environment = Environment(
            loop,
            clock.now_ms,
            clock_gain_ms=clock.gain_ms,
            uuids=simulated.uuids,
            new_pool=lambda size, name: cast("Any", Threads(loop, name)),
        )
        self.folder = DataFolder(
            simulated.config,
            environment.now_ms(),
            simulated.disk,
            log_dir=self._open_log_dir,
            owns_metadata=False,
            uuids=simulated.uuids,
        )
        self._peers = Peers({CONTROLLER_ID: CONTROLLER_PATH, AWAY_ID: "away.sock"}, environment.spawn)
        broker = compose(
            simulated.config,
            environment,
            self.folder,
            new_metadata=self._new_metadata,
            peers=self._peers,
            metadata_broker_id=CONTROLLER_ID,
            new_group_shard=self._new_group_shard,
            new_transaction_shard=self._new_transaction_shard,
            new_writer=self._new_writer,
            start_assignors=simulated.start_assignors,
        )
        super().__init__(broker, environment, self.folder)
        if simulated.options.hop_ms:
            broker.transactions.agree = self._over_a_hop(broker.transactions.agree)  # type: ignore[method-assign]

    # The parts that differ.

    def _open_log_dir(self) -> LogDir:
        log_dir = SimulatedLogDir.open(self.simulated.disk, DATA_FOLDER, Identity("cluster", 1, "folder"))
        log_dir.machine = self.simulated
        return log_dir

    def _new_metadata(self, broker: Broker, group_times: GroupTimes) -> MetadataService:
        self.group_times = group_times
        self._metadata = MetadataFollower(
            broker.config, self._peers, CONTROLLER_ID, CONTROLLER_PATH, self._give_up, group_times
        )
        return self._metadata

    def _give_up(self, error: BaseException) -> None:
        self.simulated.observer.violated(ViolationError("I-0 no unexpected error", f"out of step: {error}"))

    def _new_writer(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[WriteJob]], None], journal: Journal
    ) -> Writer:
        self.writer = SimulatedLogWriter(self.simulated, self.loop, deliver, journal)
        return self.writer

    def _new_group_shard(self, broker: Broker, shard_id: int) -> GroupCoordinatorShard:
        simulated = self.simulated
        machine = simulated.fault.make_machine(broker.config, broker.image, broker.groups.counters)
        simulated.trace.add("load", f"groups {shard_id}")
        _on_loaded(machine, lambda: simulated.observer.watch_groups(shard_id, machine))
        return machine

    def _new_transaction_shard(self, broker: Broker, shard_id: int) -> TransactionCoordinatorShard:
        machine = new_transaction_shard(broker, shard_id)
        self.simulated.trace.add("load", f"transactions {shard_id}")
        _on_loaded(machine, lambda: self.simulated.observer.watch_transactions(shard_id, machine))
        return machine

    def _over_a_hop(self, agree: Callable[..., Reply[Any]]) -> Callable[..., Reply[Any]]:
        """Delays the transaction coordinator's answers by `hop_ms`, as if it were on another worker."""

        def agree_there(*args: Any, **more: Any) -> Reply[Any]:
            reply, future = agree(*args, **more), self.loop.create_future()

            def arrive() -> None:
                error = reply.exception() if asyncio.isfuture(reply) else None
                if future.done():
                    return
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(reply.result() if asyncio.isfuture(reply) else reply)

            if asyncio.isfuture(reply):
                reply.add_done_callback(lambda _: self.loop.after(self.simulated.options.hop_ms, arrive))
            else:
                self.loop.after(self.simulated.options.hop_ms, arrive)
            return future

        return agree_there

    # Its life.

    async def begin(self) -> None:
        """Loads the metadata from the controller, then takes over its shards, then accepts clients."""
        for address in self.broker.config.open_listeners:
            self.broker.endpoints[address.name] = address
        await self._metadata.start()
        self.broker.begin()
        self.is_open = True

    async def stop(self) -> None:
        await super().stop()
        self._peers.close()

    def connect(self) -> KafkaConnection:
        (listener,) = self.listeners
        return listener.connections.open()

    # For the checks.

    def machine_of(self, group_id: str) -> GroupCoordinatorShard | None:
        """Returns the state machine of the group's shard, or None if the shard is not active."""
        return self.broker.groups.shards.machine(self.simulated.group_shard(group_id))

    def state_of(self, group_id: str) -> ShardState:
        """Returns the state of the group's shard."""
        return self.broker.groups.shards.state(self.simulated.group_shard(group_id))

    @property
    def is_quiet(self) -> bool:
        """True if no write is in flight, so that the logs hold all state of the shards."""
        return self.broker.pump.is_quiet and all(
            service.shards.is_idle() for service in (self.broker.groups, self.broker.transactions)
        )

    def clean(self, topic: str, shard_id: int) -> str:
        """Rolls the active segment of a shard's log and runs one pass of the real cleaner over the closed segments.

        Returns a text for the trace, or "" if there was nothing to clean.
        """
        logs = self.folder.coordinator_logs[topic]
        for cleanable in cleanable_logs.of_coordinator(
            topic, logs, self.broker.config, self.broker.image, lambda shard, offsets: None, cleanable_logs.at_once
        ):
            log = cleanable.log
            if cleanable.partition != shard_id or log.is_closed or log.failure is not None:
                continue
            now_ms = self.broker.now_ms()
            if log.end_offset > log.segments[-1].base_offset:
                log.roll(now_ms)
            log_dir = self.folder.log_dir
            rules = cleanable.rules
            rules.min_cleanable_dirty_ratio = 0.0
            assessment = assess(log, log_dir.cleaned_offset(topic, shard_id), rules, log.end_offset, now_ms)
            if not assessment.is_due(rules):
                return ""
            cleaner = Cleaner(self.simulated.disk, max_map_bytes=_MAP_BYTES, pause=lambda size: None)
            done = cleaner.clean(log, assessment, rules, cleanable.on_owner, now_ms, stable_offset=log.end_offset)
            log_dir.note_cleaned(topic, shard_id, done.next_dirty_offset)
            return f"{topic} {shard_id} {done.next_dirty_offset} {done.records_kept}/{done.records_read}"
        return ""


def _on_loaded(machine: Any, watch: Callable[[], None]) -> None:
    """Calls `watch` once the machine has replayed its whole log, before it takes requests."""
    on_loaded = machine.on_loaded

    def loaded(context: OperationContext) -> CoordinatorResult[None]:
        watch()
        result: CoordinatorResult[None] = on_loaded(context)
        return result

    machine.on_loaded = loaded


TOPICS: Final = {"groups": GROUP_METADATA_TOPIC, "transactions": TRANSACTION_STATE_TOPIC}
