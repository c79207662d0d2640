# SPDX-License-Identifier: Apache-2.0
"""The broker under test, over all lives of its process, and its ends of the clients' connections.

Theory of operation
-------------------
States. `SimulatedBroker.process` is None (down) or the running process. `start` goes from down to running. `crash` and
a completed `stop` go back to down; `World` schedules the next start. `pause` makes a running process stand still
(SIGSTOP): its events wait and run after the pause, in order. A stopping process accepts no new connection.

Requests. `receive` hands bytes of the network to the process: `Link` is the asyncio transport of the server's
`KafkaConnection`. `Link.receive` passes each request through `requests.AnswerChecks.ask`, which gives it to the
connection, and `Link.write` passes each response through `AnswerChecks.answer` before it leaves. A connection that a
former process accepted is refused, as are connections to a process that is not open.

Disk. A power loss in the middle of a cleaner pass raises `PowerLost` out of a file operation; `_clean` turns it into a
crash of the machine and starts the broker again.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Final

from kcoord.metadata.image import MetadataImage
from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.loop import SimulatedLoop, UnixSockets, running
from kcoord.simulation.machine import Machine, PowerLost
from kcoord.simulation.network import Network, SimulatedConnection
from kcoord.simulation.options import Options
from kcoord.simulation.planted import Fault
from kcoord.simulation.principals import host_of, principal_of
from kcoord.simulation.process import TOPICS, SimulatedProcess, Threads
from kcoord.simulation.requests import AnswerChecks, Dialogue
from kcoord.simulation.trace import Trace, ViolationError
from kcoord.storage.errors import StorageError
from kcoord.storage.memory_file_system import keep_everything

_LONGEST_WAY_MS: Final = 200
"""Longest delay of bytes between two processes of the cluster."""
_BACKGROUND: Final = "kcoord-background"
_LONGEST_WORK_MS: Final = 500
_WORK_FAILURE_PROBABILITY: Final = 0.1
_MOST_CLEANING_OPERATIONS: Final = 40


class Link(asyncio.Transport):
    """The broker's end of a client's connection, as an asyncio transport."""

    def __init__(self, broker: SimulatedBroker, process: SimulatedProcess, connection: SimulatedConnection) -> None:
        self.connection = connection
        self.process = process
        self.protocol = process.connect()
        self.dialogue = Dialogue(process, self.protocol, connection.client_id)
        self._broker = broker
        self._is_closing = False
        self._is_reading = True
        self._unread: list[bytes] = []
        self.protocol.connection_made(self)
        if broker.options.has_acls:
            # As after a login: the principal is known once the path exists.
            self.protocol.path.client.principal = principal_of(connection.client_id)

    def receive(self, data: bytes) -> None:
        """Takes bytes from the client. They wait here while the server has paused reading."""
        if self._is_closing:
            return
        if data:
            self._unread.append(data)
        while self._unread and self._is_reading and not self._is_closing:
            with self._broker.observer.guard():
                asked = self._broker.checks.ask(self.dialogue, self._unread.pop(0))
                if not self._is_closing:
                    self._broker.checks.ask_again(self.dialogue, asked)

    def hang_up(self) -> None:
        self._is_closing = True
        self.protocol.connection_lost(None)

    # The interface of an asyncio transport.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        address = host_of(self.connection.client_id), 10_000 + self.connection.number % 50_000
        return address if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            with self._broker.observer.guard():
                self._broker.checks.answer(self.dialogue, bytes(data))
            self._broker.respond(self.connection, bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        if self._unread:
            self.process.loop.call_soon(self.receive, b"")

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._broker.refused(self.connection)
            self.process.loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()


class SimulatedBroker(Machine):
    """The machine of the broker, and the process that runs on it, if any."""

    def __init__(
        self, clock: VirtualClock, random: Random, options: Options, trace: Trace, network: Network, fault: Fault
    ) -> None:
        super().__init__(clock, random, options, trace, fault)
        self.checks = AnswerChecks(self)
        self.process: SimulatedProcess | None = None
        self.sockets = UnixSockets(clock, lambda: random.randint(0, _LONGEST_WAY_MS))
        self._policies = itertools.cycle(options.migration_policies)
        self._network = network
        self._links: dict[int, Link] = {}
        self._ended: list[SimulatedProcess] = []
        """Processes that have ended. Kept so that Python collects them after the run, at a time that is the same in
        every run.
        """
        self._is_stopping = False
        network.broker = self

    # The life of the process.

    def start(self, offset_ms: int = 0, clock_rate: float = 1.0) -> None:
        """Starts a process. Its wall clock is off by `offset_ms` and runs at `clock_rate`."""
        assert self.process is None
        if self.options.migration_policies:
            self.config = replace(self.options, migration_policy=next(self._policies)).broker_config()
        loop = SimulatedLoop(  # type: ignore[abstract]
            self.clock, clock_rate, self.options.turn_ms, self._begin_work, self.not_handled
        )
        loop.sockets = self.sockets
        self.trace.add("start" if clock_rate == 1 else "start-slow-clock", f"{offset_ms}")
        self.opening += 1
        try:
            with running(loop):
                process = self.process = SimulatedProcess(self, loop, offset_ms)
        finally:
            self.opening -= 1
        if process.folder.log_dir.restored_bytes:
            self.trace.add("restored", str(process.folder.log_dir.restored_bytes))
        process.broker.image_observers.insert(0, self._note_image)
        loop.enter(lambda: loop.create_task(process.begin()))

    def _note_image(self, image: MetadataImage) -> None:
        self.image = image

    def start_again(self) -> None:
        if self.process is None:
            self.start()

    def end(self) -> None:
        """Ends the running process, if any, because the run is over."""
        if self.process is not None:
            self.process.loop.end()
        self.close_assignors()

    def crash(self, whole_machine: bool) -> None:
        """Kills the process. If the whole machine crashes, a random part of what was not synced is lost."""
        self._end_process()
        self.operations_before_power_loss = None
        self.power_losses += whole_machine
        self.trace.add("crash", f"whole_machine={whole_machine}")
        self.disk.crash(self._keep if whole_machine else keep_everything)

    def stop(self, then: Callable[[], None]) -> None:
        """Stops the process in order (SIGTERM), then calls `then`.

        The process answers requests under way and saves snapshots of shards whose state is durable.
        """
        process = self.process
        assert process is not None
        self.trace.add("stop")
        self._is_stopping = True
        process.loop.enter(self._end_in_order, process, then)

    def _end_in_order(self, process: SimulatedProcess, then: Callable[[], None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if self.process is process:
                self.trace.add("stopped")
                self._end_process()
                self.disk.crash(keep_everything)
                then()

        process.loop.create_task(process.stop()).add_done_callback(ended)

    def _end_process(self) -> None:
        process, self.process = self.process, None
        self._is_stopping = False
        if process is not None:
            process.loop.end()
            self._ended.append(process)
            self._links.clear()

    def pause(self, duration_ms: int) -> None:
        """Makes the process stand still (SIGSTOP). Events that become due meanwhile run afterwards at once, in order.

        Does nothing if the process is down.
        """
        if self.process is not None:
            self.trace.add("broker-pause", str(duration_ms))
            self.process.loop.paused_until_ms = self.clock.now_ms + duration_ms

    def lose_worker(self, shards: list[tuple[str, int]]) -> None:
        """Ends the imagined worker of these shards: its unwritten batches fail, and unanswered connections close."""
        process = self.process
        if process is None:
            return
        process.writer.lose(shards)
        for link in list(self._links.values()):
            if link.dialogue.asked:
                self._network.close(link.connection)

    def clean(self, shard_id: int, *, may_lose_power: bool) -> None:
        process = self.process
        if process is None or self.clock.now_ms < process.loop.paused_until_ms:
            return
        if may_lose_power and self.faults_on and self.options.every_ms["broker"]:
            self.operations_before_power_loss = self.random.randint(1, _MOST_CLEANING_OPERATIONS)
        self._clean(process, "groups", shard_id)
        if self.process is process:
            self.operations_before_power_loss = None
            self._clean(process, "transactions", shard_id % self.options.transaction_shards)

    def _clean(self, process: SimulatedProcess, name: str, shard_id: int) -> None:
        try:
            done = process.clean(TOPICS[name], shard_id)
        except PowerLost:
            self.crash(whole_machine=True)
            self.clock.after(self.random.randint(1, 1_000), self.start_again)
            return
        except (OSError, StorageError) as error:
            self.trace.add("clean-failed", f"{name} {shard_id} {error}")
            return
        if done:
            self.trace.add("clean", done)

    # The disk.

    def _keep(self, kind: str, path: str, pending: int) -> int:
        return self.random.choice((0, pending, self.random.randint(0, pending)))

    def _begin_work(self, executor: object) -> tuple[int, Exception | None]:
        """Draws duration and error of work for a thread pool. Only work of the group coordinator's pool may fail."""
        fails = False
        if isinstance(executor, Threads) and executor.name == _BACKGROUND:
            self.trace.add("task")
            fails = self.faults_on and self.random.random() < _WORK_FAILURE_PROBABILITY
        return self.random.randint(0, _LONGEST_WORK_MS), OSError("simulated") if fails else None

    def not_handled(self, message: str, error: BaseException | None) -> None:
        """Reports an error that asyncio would have logged as a violation."""
        self.observer.violated(ViolationError("I-0 no unexpected error", f"{message}: {error!r}"))

    # Requests.

    def log_offsets(self, group_id: str) -> tuple[int, int]:
        """Returns the durable offset and the end offset of the log of a group's shard."""
        assert self.process is not None
        return self.process.broker.groups.shards.offsets(self.group_shard(group_id))

    def receive(self, connection: SimulatedConnection, data: bytes) -> None:
        """Takes bytes of a client. If the process is down they are lost, and the client finds out by its timeout."""
        process = self.process
        if process is None:
            self._network.lose(connection)
        else:
            # The kernel accepts a connection even while the process stands still.
            connection.accepted_by = connection.accepted_by or process
            process.loop.enter(self._receive, process, connection, data)

    def _receive(self, process: SimulatedProcess, connection: SimulatedConnection, data: bytes) -> None:
        link = self._links.get(connection.number)
        if link is None:
            if self._is_stopping or not process.is_open or connection.accepted_by is not process:
                # The process does not listen, or the connection belongs to an earlier process.
                self.refused(connection)
                return
            link = self._links[connection.number] = Link(self, process, connection)
        self.trace.add("request", f"{connection.client_id} {zlib.crc32(data)}")
        link.receive(data)

    def hang_up(self, connection: SimulatedConnection) -> None:
        process, link = self.process, self._links.pop(connection.number, None)
        if process is not None and link is not None:
            process.loop.enter(link.hang_up)

    def respond(self, connection: SimulatedConnection, data: bytes) -> None:
        self.trace.add("response", f"{connection.client_id} {zlib.crc32(data)}")
        self._network.respond(connection, data)

    def refused(self, connection: SimulatedConnection) -> None:
        """Closes a connection that the broker has closed or does not know; bytes of the client are lost from now on."""
        if connection.is_open:
            self.trace.add("refused", connection.client_id)
            self._links.pop(connection.number, None)
            self._network.close(connection)
