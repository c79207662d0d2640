# SPDX-License-Identifier: Apache-2.0
"""A broker of rings 0 to 3: runtime, shards and logs, with the simulator in the place of sockets, threads and clock.

A write takes two steps in virtual time, append and sync, as in the writer thread of the server; the process may crash
between any two events, and then only what the simulated disk kept is left.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.consumer.target_assignment import ComputeTarget, TargetInput, compute
from kcoord.coordinator.group.regex import ResolveRegex, resolve
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.result import OperationContext, Task
from kcoord.coordinator.runtime.runtime import WAIT, Append, CoordinatorRuntime, Loader, ShardState
from kcoord.coordinator.runtime.serde import CoordinatorSerde
from kcoord.coordinator.service import partition_for
from kcoord.metadata.image import MetadataImage
from kcoord.simulation import apis
from kcoord.simulation.clock import Clock
from kcoord.simulation.network import Network, Request
from kcoord.simulation.options import Options
from kcoord.simulation.trace import Trace, ViolationError
from kcoord.storage.errors import StorageError
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, TornWrite, keep_everything
from kcoord.storage.segment import LogConfig
from protocol.errors import KafkaError

DATA_FOLDER = "data"
_RELOAD_MS = 100
_LOAD_SLICE_BYTES = 2_048
_LONGEST_TASK_MS = 500
_TASK_FAILURE_PROBABILITY = 0.1


@dataclass(slots=True)
class Process:
    """What a crash takes away."""

    runtime: CoordinatorRuntime[GroupCoordinatorShard]
    logs: dict[int, Log]
    requests: dict[int, Request]
    trusted_offsets: dict[int, int] = field(default_factory=dict)
    """Of logs that failed: everything below is on disk."""
    pump_at_ms: int = -1
    writes_under_way: int = 0
    disk_free_ms: dict[int, int] = field(default_factory=dict)
    """When the last write of a log that was handed out will be through."""

    def is_quiet(self) -> bool:
        """Whether the logs hold all that the shards do."""
        return self.runtime.is_idle() and not self.writes_under_way


class SimulatedBroker:
    """See the module's text. `make_machine` and `early_replies` are where a test plants a fault."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        options: Options,
        trace: Trace,
        network: Network,
        make_machine: Callable[[BrokerConfig, MetadataImage], GroupCoordinatorShard],
        early_replies: bool,
    ) -> None:
        self.image = MetadataImage.empty()
        self.config = options.broker_config()
        self.faults_on = True
        self.disk = MemoryFileSystem(fault=self._disk_fault)
        self.process: Process | None = None
        self._clock = clock
        self._random = random
        self._options = options
        self._trace = trace
        self._network = network
        self._make_machine = make_machine
        self._early_replies = early_replies
        self._log_config = LogConfig(segment_bytes=options.segment_bytes)
        self._tokens = 0
        self._is_opening = False
        self.disk.make_dirs(DATA_FOLDER)
        self.disk.sync_dir("")
        network.broker = self.receive

    # Start and crash.

    def start(self) -> None:
        """Starts the process, and loads all shards a slice at a time."""
        assert self.process is None
        runtime: CoordinatorRuntime[GroupCoordinatorShard] = CoordinatorRuntime(
            lambda shard_id: self._make_machine(self.config, self.image), CoordinatorSerde()
        )
        self.process = Process(runtime, {}, {})
        self._trace.add("start")
        for shard_id in range(self._options.shards):
            self._load(shard_id)

    def crash(self, whole_machine: bool) -> None:
        """Kills the process; with the whole machine, what was not synced is lost to a random extent."""
        self.process = None
        self._trace.add("crash", f"whole_machine={whole_machine}")
        self.disk.crash(self._keep if whole_machine else keep_everything)

    def _keep(self, kind: str, path: str, pending: int) -> int:
        return self._random.choice((0, pending, self._random.randint(0, pending)))

    def _disk_fault(self, operation: Operation) -> BaseException | TornWrite | None:
        probability = self._options.disk_error_probability
        if not self.faults_on or not probability or operation.kind not in ("write", "datasync"):
            return None
        # A sync that fails while a log is opened leaves nobody who knows how much of it ever reached the disk.
        if self._is_opening:
            return None
        if self._random.random() >= probability:
            return None
        self._trace.add("disk-error", f"{operation.kind} {operation.path}")
        error = OSError(28 if operation.kind == "write" else 5, "simulated")
        if operation.kind == "write":
            return TornWrite(self._random.randint(0, operation.size), error)
        return error

    def _load(self, shard_id: int) -> None:
        process = self.process
        assert process is not None
        try:
            log = process.logs[shard_id] = self._open(process, shard_id)
        except OSError as error:
            self._trace.add("open-failed", f"{shard_id} {error}")
            self._retry_load(process, shard_id)
            return
        except StorageError as error:
            raise ViolationError("D-1 a crash only tears the tail", f"shard {shard_id}: {error}") from error
        self._trace.add("load", f"{shard_id} {log.end_offset}")
        loader = process.runtime.start_load(shard_id, log.batches(log.start_offset), log.end_offset)
        self._load_slice(process, loader)

    def _open(self, process: Process, shard_id: int) -> Log:
        """Opens a log. What a failed sync left is cut off: it can be read, but it may never reach the disk (D-3)."""
        old = process.logs.pop(shard_id, None)
        if old is not None:
            if old.failure is not None:
                process.trusted_offsets.setdefault(shard_id, old.flushed_offset)
            old.close()
        directory = f"{DATA_FOLDER}/__consumer_offsets-{shard_id}"
        self._is_opening = True
        try:
            log = Log.open(self.disk, directory, self._log_config, self._clock.now_ms)
            log.truncate_to(process.trusted_offsets.get(shard_id, log.end_offset))
        finally:
            self._is_opening = False
        process.trusted_offsets.pop(shard_id, None)
        return log

    def _retry_load(self, process: Process, shard_id: int) -> None:
        if process.runtime.state(shard_id) is ShardState.INITIAL:
            process.runtime.start_load(shard_id, ())
        self._clock.after(_RELOAD_MS, lambda: self._load(shard_id) if self.process is process else None)

    def _load_slice(self, process: Process, loader: Loader[GroupCoordinatorShard]) -> None:
        if self.process is not process:
            return
        image = self.image
        if not loader.step(self._clock.now_ms, _LOAD_SLICE_BYTES):
            self._clock.after(1, lambda: self._load_slice(process, loader))
            return
        self._trace.add("active", str(loader.shard_id))
        self._update_image(process, loader.shard_id, image)
        self._pump(process)

    # Requests.

    def receive(self, request: Request) -> None:
        """A request arrives. While the process is down it is lost, and the client finds out by its timeout."""
        process = self.process
        if process is None:
            return
        self._trace.add("request", f"{request.connection.client_id} {request.api_key.name} {zlib.crc32(request.body)}")
        operation = apis.decode(request)
        self._tokens += 1
        token = self._tokens
        context = OperationContext(
            self._clock.now_ms, request.api_version, request.connection.client_id, "/127.0.0.1", f"made-{token}", token
        )
        shard_id = partition_for(request.group_id, self._options.shards)
        try:
            outcome = process.runtime.run_write(shard_id, operation, context, token)
        except KafkaError as error:
            self._respond(request, error)
        else:
            if outcome is WAIT:
                process.requests[token] = request
            else:
                self._respond(request, outcome)
        self._pump(process)

    def _respond(self, request: Request, value: object) -> None:
        body = apis.encode_response(request, value)
        self._trace.add("response", f"{request.connection.client_id} {zlib.crc32(body)}")
        self._network.respond(request, body)

    def update_image(self, image: MetadataImage) -> None:
        """The cluster's metadata changed."""
        self.image = image
        process = self.process
        if process is None:
            return
        for shard_id in process.runtime.active_shards():
            self._update_image(process, shard_id, image)
        self._pump(process)

    def _update_image(self, process: Process, shard_id: int, image: MetadataImage) -> None:
        context = OperationContext(self._clock.now_ms)
        process.runtime.run_write(
            shard_id, lambda shard, context: shard.on_metadata_update(context, image), context, None
        )

    # The turn of the event loop that a real process makes.

    def _pump(self, process: Process) -> None:
        if self.process is not process:
            return
        ready = process.runtime.poll(self._clock.now_ms)
        for append in ready.appends:
            self._write(process, append)
        for reply in ready.replies:
            request = process.requests.pop(reply.token, None) if isinstance(reply.token, int) else None
            if request is not None:
                self._respond(request, reply.value)
        for shard_id, task in ready.tasks:
            self._start_task(process, shard_id, task)
        for shard_id in ready.failed:
            self._trace.add("failed", str(shard_id))
            self._retry_load(process, shard_id)
        deadline_ms = process.runtime.next_deadline_ms()
        if deadline_ms is not None and not self._clock.now_ms < process.pump_at_ms <= deadline_ms:
            process.pump_at_ms = max(deadline_ms, self._clock.now_ms + 1)
            self._clock.at(process.pump_at_ms, lambda: self._pump(process))

    def _start_task(self, process: Process, shard_id: int, task: Task) -> None:
        """Background work takes its time, sees the topics as they are then, and sometimes fails."""
        work = task.work
        self._trace.add("task", f"{shard_id} {work}")
        target: TargetInput | None = None
        if isinstance(work, ComputeTarget):
            machine = process.runtime.machine(shard_id)
            target = machine.target_input(work.group_id) if machine is not None else None

        def finish() -> None:
            if self.process is not process:
                return
            failed = self.faults_on and self._random.random() < _TASK_FAILURE_PROBABILITY
            value: object = RuntimeError("simulated") if failed else None
            if not failed and isinstance(work, ResolveRegex):
                value = resolve(work, list(self.image.topics))
            elif not failed and target is not None:
                value = compute(target)
            process.runtime.complete_task(shard_id, task, value, OperationContext(self._clock.now_ms))
            self._pump(process)

        self._clock.after(self._random.randint(0, _LONGEST_TASK_MS), finish)

    def _write(self, process: Process, append: Append) -> None:
        self._trace.add(
            "append", f"{append.shard_id} {append.base_offset}-{append.next_offset} {zlib.crc32(append.data)}"
        )
        process.writes_under_way += 1
        append_ms = max(self._clock.now_ms, process.disk_free_ms.get(append.shard_id, 0)) + self._disk_delay_ms()
        sync_ms = process.disk_free_ms[append.shard_id] = append_ms + self._disk_delay_ms()
        self._clock.at(append_ms, lambda: self._append(process, append, sync_ms))
        if self._early_replies:
            self._clock.after(1, lambda: self._completed(process, append.shard_id, None))

    def _append(self, process: Process, append: Append, sync_ms: int) -> None:
        if self.process is not process:
            return
        try:
            process.logs[append.shard_id].append(append.data, now_ms=self._clock.now_ms)
        except (OSError, StorageError) as error:
            self._written(process, append, error)
            return
        self._clock.at(sync_ms, lambda: self._sync(process, append))

    def _sync(self, process: Process, append: Append) -> None:
        if self.process is not process:
            return
        try:
            process.logs[append.shard_id].flush(sync=True)
        except (OSError, StorageError) as error:
            self._written(process, append, error)
            return
        self._written(process, append, None)

    def _written(self, process: Process, append: Append, error: OSError | StorageError | None) -> None:
        process.writes_under_way -= 1
        if not self._early_replies:
            self._completed(process, append.shard_id, error)

    def _completed(self, process: Process, shard_id: int, error: OSError | StorageError | None) -> None:
        if self.process is not process:
            return
        self._trace.add("written", f"{shard_id} {error}")
        as_os_error = error if error is None or isinstance(error, OSError) else OSError(str(error))
        process.runtime.on_append_completed(shard_id, self._clock.now_ms, as_os_error)
        self._pump(process)

    def _disk_delay_ms(self) -> int:
        return self._random.randint(0, self._options.disk_delay_ms) if self.faults_on else 1
