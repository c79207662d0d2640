# SPDX-License-Identifier: Apache-2.0
"""The write pump of a broker, and the drivers of its shards: once per turn or two of the event loop, the pump takes
what the shard sets have ready, and has it written, answered and started.

A `ShardDriver` turns the `Ready` of one ShardSet into requests of a log, resolved futures and background tasks. The
chain write -> durable -> replies must survive everything, also clients that vanished and answers nobody waits for: no
exception of one item may keep the next from being handled.

One timer handle stands for the earliest deadline of all shard sets. With a journal (`kcoord.log.flush.policy=fsync`)
the writer makes durable what is written; without one the page cache is as far as a write has to go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, cast

from kcoord.metrics.measures import WriteMeasures
from kcoord.runtime.outbox import DeferredReply, Ready
from kcoord.runtime.result import StateMachine, Task
from kcoord.runtime.shard_log import Append, Load, ShardLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.server.disk.log_writer import LogWriter, WriteJob, WriteResult, write
from kcoord.storage.journal import Journal
from kcoord_protocol.errors import KafkaError

M = TypeVar("M", bound=StateMachine)
R = TypeVar("R")
T = TypeVar("T")


class ShardDriver(Generic[M]):
    """See the module's text. `wake` has `collect` called soon. A subclass says what happens when appends begin, loads
    end and tasks are due.
    """

    def __init__(self, shards: ShardSet[M], log: ShardLog, wake: Callable[[], None]) -> None:
        self.shards = shards
        self.log = log
        self._wake = wake
        self._under_way: dict[int, Append] = {}

    def future_of(self, reply: DeferredReply) -> asyncio.Future[T]:
        """Ends with the answer, or with its KafkaError."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        reply.deliver = partial(self._resolve, future)
        return future

    def _resolve(self, future: asyncio.Future[T], value: object) -> None:
        if future.done():
            return
        if isinstance(value, KafkaError):
            future.set_exception(value)
            future.exception()  # seen: who asked several shards may have given up at the error of another
        else:
            future.set_result(cast("T", value))

    def collect(self, now_ms: int) -> None:
        """Does what the shard set has ready."""
        ready = self.shards.poll(now_ms)
        for append in ready.appends:
            self._under_way[append.shard_id] = append
            self.on_append_started(append)
            self.log.append(append, now_ms)
        for waiter in ready.replies:
            waiter.settle()
        for shard_id, task in ready.tasks:
            self.start_task(shard_id, task)
        for save in ready.saves:
            self.log.save(save)
        if ready.has_log_work:
            self._collect_log_work(ready)

    def _collect_log_work(self, ready: Ready) -> None:
        for shard_id in ready.closes:
            self.log.close(shard_id)
            self.on_failed(shard_id)
        for release in ready.releases:
            self.log.release(release)
        for load in ready.active:
            self.on_active(load)
        for load in ready.opens:
            self.on_opening(load)
            self.log.open(load)
        for load in ready.reads:
            self.log.read(load)
        if ready.has_released:
            self.on_released()
        if ready.opens or ready.reads or ready.releases:
            # What comes next is done in a turn of its own: others have the event loop in between.
            self._wake()

    def answer(self) -> None:
        """Hands out the replies that have come to be since `collect`."""
        for waiter in self.shards.take_replies():
            waiter.settle()

    def written(self, shard_id: int, error: OSError | None, now_ms: int) -> None:
        """The append of the shard that was under way ended: it is durable, or nothing is known about it."""
        append = self._under_way.pop(shard_id)
        if error is None:
            self.shards.written(append)
        else:
            self.shards.unknown(append, error, now_ms)

    def on_append_started(self, append: Append) -> None:
        """The append is about to be passed to the log."""

    def on_failed(self, shard_id: int) -> None:
        """A shard has failed, and its log is closed."""

    def on_opening(self, load: Load) -> None:
        """A load begins."""

    def on_active(self, load: Load) -> None:
        """A load has ended well."""

    def on_released(self) -> None:
        """Shards were given away."""

    def start_task(self, shard_id: int, task: Task) -> None:
        raise AssertionError(f"shards of {self.shards.name} have no tasks, got {task}")


_logger = logging.getLogger(__name__)

MOST_GATHERING_TURNS: Final = 2
"""While every turn of the event loop brings several writes, so many more are waited for: a log is written to once for
all of them. A write that comes alone does not wait.
"""


class Writer(Protocol):
    """Makes writes durable beside the event loop: the server's thread, or the simulation's virtual disk."""

    measures: WriteMeasures | None

    def submit(self, jobs: list[WriteJob]) -> None: ...

    def close(self, timeout_seconds: float) -> bool:
        """Returns True if everything that was submitted is durable."""


NewWriter: TypeAlias = "Callable[[asyncio.AbstractEventLoop, Callable[[list[WriteResult]], None], Journal], Writer]"


class Pump:
    """See the module's text. Drivers are added once, before the first request. `gathers`: a write may wait for a turn
    or two of the event loop for others to join it. `new_writer` makes the writer for the journal, if there is one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ms: Callable[[], int],
        journal: Journal | None,
        *,
        gathers: bool = True,
        new_writer: NewWriter = LogWriter,
    ) -> None:
        self._loop = loop
        self._now_ms = now_ms
        self._drivers: dict[str, ShardDriver[Any]] = {}
        self._all_drivers: tuple[ShardDriver[Any], ...] = ()
        self._pump_scheduled = False
        self._most_gathering_turns = MOST_GATHERING_TURNS if gathers else 0
        self._wakes = self._gathering_turns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_ms = 0
        self._jobs: list[WriteJob] = []
        self._writes_under_way = 0
        self._measures: WriteMeasures | None = None
        self._writer = new_writer(loop, self._written, journal) if journal is not None else None

    def measure_writes(self, measures: WriteMeasures) -> None:
        """From now on the writes are timed."""
        self._measures = measures
        if self._writer is not None:
            self._writer.measures = measures

    def add(self, driver: ShardDriver[Any]) -> None:
        self._drivers[driver.shards.name] = driver
        self._all_drivers = tuple(self._drivers.values())

    @property
    def is_quiet(self) -> bool:
        """Nothing is being written and nobody waits for a write."""
        return not self._writes_under_way and not self._pump_scheduled

    def wake(self) -> None:
        """Pumps in the next turn of the event loop, or a little later where much is coming."""
        self._wakes += 1
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def submit(self, job: WriteJob) -> None:
        """Has a batch written in the turn that is under way."""
        self._jobs.append(job)

    def next_deadline_ms(self) -> int | None:
        """When the earliest timer of all runtimes is due."""
        deadlines = [driver.shards.next_deadline_ms() for driver in self._all_drivers]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def on_clock_moved(self) -> None:
        """The clock jumped ahead: the armed timer would be late."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wake()

    def close(self, timeout_seconds: float) -> bool:
        """Ends the pump and the writer thread; True when all that was submitted is on disk."""
        if self._timer is not None:
            self._timer.cancel()
        return self._writer is None or self._writer.close(timeout_seconds)

    def _pump(self) -> None:
        if self._wakes > 1 and self._gathering_turns < self._most_gathering_turns:
            self._wakes = 0
            self._gathering_turns += 1
            self._loop.call_soon(self._pump)
            return
        self._wakes = self._gathering_turns = 0
        self._pump_scheduled = False
        self._turn(self._now_ms())

    def _turn(self, now_ms: int) -> None:
        """Writes what is ready. Where that takes no thread the answers leave at once."""
        self._collect(now_ms)
        jobs, self._jobs = self._jobs, []
        if jobs:
            self._writes_under_way += len(jobs)
            if self._writer is not None:
                self._writer.submit(jobs)
            else:
                self._complete(write(jobs, self._measures), now_ms)
        self._arm_timer(now_ms)

    def _collect(self, now_ms: int) -> None:
        for driver in self._all_drivers:
            if driver.shards.has_ready(now_ms):
                try:
                    driver.collect(now_ms)
                except Exception:
                    # What was collected before is still written, and the next turn goes on with the rest.
                    _logger.exception("Collecting what the runtime of %s has ready failed", driver.shards.name)

    def _written(self, results: list[WriteResult]) -> None:
        now_ms = self._now_ms()
        self._complete(results, now_ms)
        self._turn(now_ms)

    def _complete(self, results: list[WriteResult], now_ms: int) -> None:
        self._writes_under_way -= len(results)
        for result in results:
            name, shard_id = cast("tuple[str, int]", result.key)
            driver = self._drivers[name]
            try:
                driver.written(shard_id, result.error, now_ms)
            except Exception:
                _logger.exception("Completing a write of shard %d of %s failed", shard_id, name)
        for driver in self._all_drivers:
            if driver.shards.has_ready(now_ms):
                driver.answer()
                if driver.shards.has_ready(now_ms):
                    self.wake()

    def _arm_timer(self, now_ms: int) -> None:
        """Keeps a handle that is early enough: heartbeats move deadlines away all the time, and a needless pump is
        cheap.
        """
        armed_ms = self._timer_deadline_ms if self._timer is not None else None
        if armed_ms is not None:
            for driver in self._all_drivers:
                if driver.shards.has_timer_before(armed_ms):
                    break
            else:
                return
        deadline_ms = self.next_deadline_ms()
        if deadline_ms is None or (armed_ms is not None and armed_ms <= deadline_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_deadline_ms = deadline_ms
        self._timer = self._loop.call_later(max(deadline_ms - now_ms, 1) / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()
