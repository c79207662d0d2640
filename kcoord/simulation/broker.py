# SPDX-License-Identifier: Apache-2.0
"""A broker of rings 0 to 3: both coordinators and their logs, with the simulator in the place of sockets, threads and
clock. Its process can crash, stop in order, stand still, and give up single shards; the disk outlives it.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from random import Random
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.consumer.assignment import ComputeTarget, TargetInput, compute
from kcoord.coordinator.group.creation_limits import CreationLimits
from kcoord.coordinator.group.regex import ResolveRegex, resolve
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.hashing import partition_for
from kcoord.runtime.result import OperationContext, Task
from kcoord.runtime.serde import TRANSACTION_RECORDS, CoordinatorSerde
from kcoord.simulation.apis import APIS, operation_of, response_of
from kcoord.simulation.clock import Clock
from kcoord.simulation.network import Network, Request
from kcoord.simulation.observer import REPEATABLE, Observer
from kcoord.simulation.options import Options
from kcoord.simulation.planted import Fault
from kcoord.simulation.rude import MISROUTED
from kcoord.simulation.shards import DATA_FOLDER, Hooks, PowerLost, SimulatedShards
from kcoord.simulation.trace import Trace, ViolationError
from kcoord.simulation.transactions import TRANSACTION_APIS, TransactionRequests
from kcoord.storage.journal import JOURNAL_FILE, DurableAppends, Journal, restore
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, TornWrite, keep_everything
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse, Message

TRANSACTION_SHARDS: Final = 2
_JOURNAL: Final = f"{DATA_FOLDER}/{JOURNAL_FILE}"
_LONGEST_TASK_MS: Final = 500
_TASK_FAILURE_PROBABILITY: Final = 0.1
_STEADY_SHARE: Final = 0.7
_MOST_CLEANING_OPERATIONS: Final = 40
_REPEATED_SHARE: Final = 0.1


class Process:
    """What a crash takes away. Implements `ProcessLife` of the shards."""

    def __init__(self, broker: SimulatedBroker, offset_ms: int, clock_rate: float) -> None:
        self.trace = broker.trace
        self.random = broker.random
        self.disk = broker.disk
        self.restored_bytes = restore(self.disk, DATA_FOLDER, _JOURNAL)
        self.journal = Journal(self.disk, _JOURNAL)
        self.appends = DurableAppends(self.journal, renewal_bytes=broker.options.segment_bytes)
        self.opening = 0
        self.paused_until_ms = 0
        self._held: deque[Callable[[], None]] = deque()
        """What came while the process stood still."""
        self.published = broker.image
        """The newest image that all active shards know."""
        self._broker = broker
        self._offset_ms = offset_ms
        self.clock_rate = clock_rate
        self._started_ms = broker.clock.now_ms
        options, fault, observer = broker.options, broker.fault, broker.observer
        self.groups: SimulatedShards[GroupCoordinatorShard] = SimulatedShards(
            self,
            GROUP_METADATA_TOPIC,
            options.shards,
            options.segment_bytes,
            Hooks(
                lambda _: fault.make_machine(broker.config, broker.image),
                CoordinatorSerde(),
                self._start_group_task,
                observer.watch_groups,
                fault.early_replies,
            ),
        )
        self.transactions: SimulatedShards[TransactionCoordinatorShard] = SimulatedShards(
            self,
            TRANSACTION_STATE_TOPIC,
            TRANSACTION_SHARDS,
            options.segment_bytes,
            Hooks(
                lambda _: TransactionCoordinatorShard(broker.config, broker.image, 0),
                CoordinatorSerde(TRANSACTION_RECORDS),
                lambda shard_id, task: broker.transaction_requests.start_task(self, shard_id, task),
                observer.watch_transactions,
            ),
        )
        self.creation_limits = CreationLimits()
        self.memo: dict[tuple[str, str, int], object] = {}
        """Answers to steady heartbeats that may be repeated, as the server keeps them."""

    @property
    def now_ms(self) -> int:
        """What the clock of this process says; another process may have another one, and it may be a slow one."""
        elapsed_ms = self._broker.clock.now_ms - self._started_ms
        return self._started_ms + self._offset_ms + int(elapsed_ms * self.clock_rate)

    def newest_creation_time_ms(self) -> int | None:
        """The latest creation time that a group has, or could get now; None while a shard is not loaded."""
        machines = [self.groups.runtime.machine(shard_id) for shard_id in range(self.groups.count)]
        times_ms = [machine.latest_creation_time_ms for machine in machines if machine is not None]
        if len(times_ms) < len(machines):
            return None
        return max(self.now_ms, self.published.last_creation_time_ms, *times_ms)

    @property
    def image(self) -> MetadataImage:
        return self._broker.image

    @property
    def is_quiet(self) -> bool:
        return self.groups.is_quiet() and self.transactions.is_quiet()

    def after(self, delay_ms: int, action: Callable[[], None]) -> None:
        """The delay is one by the clock of the process."""
        self._broker.clock.after(ceil(delay_ms / self.clock_rate), lambda: self.run(action))

    def run(self, action: Callable[[], None]) -> None:
        """Runs it if the process is alive; while it stands still, later, and in the order in which it all came."""
        broker = self._broker
        if broker.process is not self:
            return
        if self._held or broker.clock.now_ms < self.paused_until_ms:
            self._held.append(action)
            if len(self._held) == 1:
                broker.clock.at(self.paused_until_ms, self._go_on)
            return
        action()

    def _go_on(self) -> None:
        """One action at a time, each in a step of its own."""
        broker = self._broker
        if broker.process is not self:
            return
        if broker.clock.now_ms >= self.paused_until_ms:
            self._held.popleft()()
        if self._held:
            broker.clock.at(self.paused_until_ms, self._go_on)

    def disk_delay_ms(self) -> int:
        broker = self._broker
        return self.random.randint(0, broker.options.disk_delay_ms) if broker.faults_on else 1

    def power_lost(self) -> None:
        self._broker.crash(whole_machine=True)
        self._broker.clock.after(self.random.randint(1, 1_000), self._broker.start_again)

    def _start_group_task(self, shard_id: int, task: Task) -> None:
        """Background work takes its time, sees the topics as they are then, and sometimes fails."""
        work = task.work
        self.trace.add("task", f"{shard_id} {work}")
        target: TargetInput | None = None
        if isinstance(work, ComputeTarget):
            machine = self.groups.runtime.machine(shard_id)
            target = machine.target_input(work.group_id) if machine is not None else None

        def finish() -> None:
            failed = self._broker.faults_on and self.random.random() < _TASK_FAILURE_PROBABILITY
            value: object = RuntimeError("simulated") if failed else None
            if not failed and isinstance(work, ResolveRegex):
                value = resolve(work, list(self.image.topics))
            elif not failed and target is not None:
                value = compute(target)
            self.groups.complete_task(shard_id, task, value)

        self.after(self.random.randint(0, _LONGEST_TASK_MS), finish)


class SimulatedBroker:
    """See the module's text."""

    def __init__(
        self, clock: Clock, random: Random, options: Options, trace: Trace, network: Network, fault: Fault
    ) -> None:
        self.clock = clock
        self.random = random
        self.options = options
        self.trace = trace
        self.fault = fault
        self.image = MetadataImage.empty()
        self.config: BrokerConfig = options.broker_config()
        self.faults_on = True
        self.disk = MemoryFileSystem(fault=self._disk_fault)
        self.observer = Observer(trace)
        self.transaction_requests = TransactionRequests(self)
        self.process: Process | None = None
        self.on_start: Callable[[Process], None] = lambda process: None
        self.on_end: Callable[[Process], None] = lambda process: None
        self.producer_ids = itertools.count(1_000)
        self._policies = itertools.cycle(options.migration_policies)
        self._network = network
        self._power_lost_after: int | None = None
        self._made = 0
        self._repeats = Random(0)
        self.disk.make_dirs(DATA_FOLDER)
        self.disk.sync_dir("")
        network.broker = self._arrived

    # The life of the process.

    def start(self, offset_ms: int = 0, clock_rate: float = 1.0) -> None:
        """Starts the process, and loads all shards a slice at a time."""
        assert self.process is None
        if self.options.migration_policies:
            self.config = replace(self.options, migration_policy=next(self._policies)).broker_config()
        process = self.process = Process(self, offset_ms, clock_rate)
        self.trace.add("start" if clock_rate == 1 else "start-slow-clock", f"{offset_ms}")
        if process.restored_bytes:
            self.trace.add("restored", str(process.restored_bytes))
        process.groups.load_all()
        process.transactions.load_all()
        self.on_start(process)

    def start_again(self) -> None:
        if self.process is None:
            self.start()

    def crash(self, whole_machine: bool) -> None:
        """Kills the process; with the whole machine, what was not synced is lost to a random extent."""
        self._end_process()
        self._power_lost_after = None
        self.trace.add("crash", f"whole_machine={whole_machine}")
        self.disk.crash(self._keep if whole_machine else keep_everything)

    def stop(self) -> None:
        """SIGTERM: snapshots are saved where everything is durable. Nobody is answered any more."""
        process = self.process
        assert process is not None
        self.trace.add("stop")
        process.groups.stop()
        process.transactions.stop()
        self._end_process()
        self.disk.crash(keep_everything)

    def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            self.on_end(process)

    def pause(self, duration_ms: int) -> None:
        """SIGSTOP: nothing moves; then everything that has become due does, at once."""
        if self.process is not None:
            self.trace.add("broker-pause", str(duration_ms))
            self.process.paused_until_ms = self.clock.now_ms + duration_ms

    def clean(self, shard_id: int, *, may_lose_power: bool) -> None:
        process = self.process
        if process is None:
            return
        if may_lose_power and self.faults_on and self.options.every_ms["broker"]:
            self._power_lost_after = self.random.randint(1, _MOST_CLEANING_OPERATIONS)
        process.groups.clean(shard_id)
        if self.process is process:
            self._power_lost_after = None
            process.transactions.clean(shard_id % TRANSACTION_SHARDS)

    def _keep(self, kind: str, path: str, pending: int) -> int:
        return self.random.choice((0, pending, self.random.randint(0, pending)))

    def _disk_fault(self, operation: Operation) -> BaseException | TornWrite | None:
        if self._power_lost_after is not None:
            self._power_lost_after -= 1
            if self._power_lost_after < 0:
                return PowerLost()
        probability = self.options.disk_error_probability
        if not self.faults_on or not probability or operation.kind not in ("write", "datasync"):
            return None
        if self.process is None or self.process.opening or self.random.random() >= probability:
            return None
        self.trace.add("disk-error", f"{operation.kind} {operation.path}")
        error = OSError(28 if operation.kind == "write" else 5, "simulated")
        if operation.kind == "write":
            return TornWrite(self.random.randint(0, operation.size), error)
        return error

    # Requests.

    def group_shard(self, group_id: str) -> int:
        return partition_for(group_id, self.options.shards)

    def _arrived(self, request: Request) -> None:
        """A request arrives. While the process is down it is lost, and the client finds out by its timeout."""
        process = self.process
        if process is not None:
            process.run(lambda: self._receive(process, request))

    def _receive(self, process: Process, request: Request) -> None:
        self.trace.add("request", f"{request.connection.client_id} {request.api_key.name} {zlib.crc32(request.body)}")
        if request.api_key in TRANSACTION_APIS:
            self.transaction_requests.receive(process, request)
            return
        if self._repeat_steady(process, request):
            return
        message = APIS[request.api_key].request.decode(request.body, request.api_version)
        # What is not this process's is refused, as it is where workers share the shards.
        is_misrouted = request.group_id == MISROUTED
        shard_id = self.options.shards if is_misrouted else self.group_shard(request.group_id)
        is_active = process.groups.runtime.machine(shard_id) is not None
        interval_ms = self._interval_ms(process, request.group_id)
        self.observer.begin(message)
        is_now = True

        def on_reply(value: object) -> None:
            if is_now:
                self.observer.refused(request, value)
                _check_ownership(request, value, is_active)
            answer = response_of(request, message, value)
            _check_interval(answer, interval_ms)
            body = self.respond(request, answer)
            if is_now and request.api_key is ApiKey.CONSUMER_GROUP_HEARTBEAT and not getattr(answer, "error_code", 0):
                self._remember_steady(process, request, message, body)

        # Timers that are due, as after a pause, fire in the same turn. What they change is not the request's doing.
        deadline_ms = process.groups.runtime.next_deadline_ms()
        has_due_timers = deadline_ms is not None and deadline_ms <= process.now_ms
        process.groups.run(shard_id, operation_of(request, message), self.context(process, request), on_reply)
        is_now = False
        if request.api_key in REPEATABLE and self._repeats.random() < _REPEATED_SHARE and not has_due_timers:
            self._repeat(process, shard_id, request, message)
        self.observer.end()

    def _repeat(self, process: Process, shard_id: int, request: Request, message: Message) -> None:
        machine = process.groups.runtime.machine(shard_id)
        # Who leaves the choice of its member id to the coordinator joins twice (version 0).
        is_nameless = isinstance(message, ConsumerGroupHeartbeatRequest) and not message.member_id
        if machine is not None and not is_nameless:
            context = self.context(process, request)
            self.observer.check_repeated(request, lambda: operation_of(request, message)(machine, context))

    def _interval_ms(self, process: Process, group_id: str) -> int:
        own = process.published.group_configs(group_id).get("consumer.heartbeat.interval.ms")
        return self.options.heartbeat_interval_ms if own is None else int(own)

    def context(self, process: Process, request: Request) -> OperationContext:
        self._made += 1
        client_id = request.connection.client_id
        context = OperationContext(process.now_ms, request.api_version, client_id, "/127.0.0.1", f"made-{self._made}")
        context.creation_limit_ms = process.creation_limits.limit_ms
        return context

    def respond(self, request: Request, answer: object) -> bytes:
        body = answer.encode(request.api_version)  # type: ignore[attr-defined]
        assert isinstance(body, bytes)
        self.trace.add("response", f"{request.connection.client_id} {zlib.crc32(body)}")
        self._network.respond(request, body)
        return body

    # Steady heartbeats are answered from memory, as by the server.

    def _repeat_steady(self, process: Process, request: Request) -> bool:
        known = process.memo.get((request.connection.client_id, request.group_id, zlib.crc32(request.body)))
        if known is None or request.api_key is not ApiKey.CONSUMER_GROUP_HEARTBEAT:
            return False
        assert isinstance(known, tuple)
        shard_id, known_machine, steady, body = known
        machine: GroupCoordinatorShard = known_machine
        if not self.fault.is_current(steady, machine.image_epoch):
            return False
        shard = process.groups.runtime.active(shard_id)
        if shard is None or shard.machine is not machine:
            return False
        shard.timers.schedule(steady.timer, process.now_ms + steady.timeout_ms)
        self.trace.add("steady", f"{request.connection.client_id} {zlib.crc32(body)}")
        self.observer.check_steady(request, body, machine, self.context(process, request))
        self._network.respond(request, body)
        process.groups.pump()
        return True

    def _remember_steady(self, process: Process, request: Request, message: object, body: bytes) -> None:
        shard_id = self.group_shard(request.group_id)
        machine = process.groups.runtime.machine(shard_id)
        if machine is None or self.random.random() > _STEADY_SHARE:
            return
        member_id, epoch = message.member_id, message.member_epoch  # type: ignore[attr-defined]
        steady = machine.steady_heartbeat(request.group_id, member_id) if epoch > 0 else None
        if steady is not None:
            key = request.connection.client_id, request.group_id, zlib.crc32(request.body)
            process.memo[key] = shard_id, machine, steady, body

    def update_image(self, image: MetadataImage) -> None:
        """The cluster's metadata changed."""
        self.image = image
        process = self.process
        if process is not None:
            process.run(lambda: self._publish(process))

    def _publish(self, process: Process) -> None:
        process.published = self.image
        process.groups.update_image(self.image)
        process.transactions.update_image(self.image)


def _check_ownership(request: Request, value: object, is_active: bool) -> None:
    """I-19: who does not own a shard, or has not loaded it, does not answer for it."""
    is_refusal = isinstance(value, KafkaError) and value.error in (
        Errors.NOT_COORDINATOR,
        Errors.COORDINATOR_LOAD_IN_PROGRESS,
    )
    if not is_active and not is_refusal:
        raise ViolationError("I-19 no answer without the shard", f"{request.api_key.name} {value}")


def _check_interval(answer: object, interval_ms: int) -> None:
    """I-25: a config of the group is what its members are told."""
    if not isinstance(answer, ConsumerGroupHeartbeatResponse) or answer.error_code or answer.member_epoch < 0:
        return
    if answer.heartbeat_interval_ms != interval_ms:
        text = f"{answer.heartbeat_interval_ms} ms are told, {interval_ms} are configured"
        raise ViolationError("I-25 group configs take effect", text)
