# SPDX-License-Identifier: Apache-2.0
"""Drives one CoordinatorRuntime: its Ready becomes log writes, resolved futures and background tasks.

The chain write -> durable -> replies must survive everything, also clients that vanished and answers nobody waits for:
no exception of one item may keep the next from being handled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from kcoord.runtime.coordinator_runtime import Wait, Waiter
from kcoord.server.disk.log_writer import WritableLog, WriteJob, WriteResult
from kcoord_protocol.errors import KafkaError

if TYPE_CHECKING:
    from kcoord.runtime.coordinator_runtime import CoordinatorRuntime, Reply
    from kcoord.runtime.result import CoordinatorResult, OperationContext, StateMachine, Task

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound="StateMachine")
R = TypeVar("R")
T = TypeVar("T")


class DriverHooks(Protocol):
    """What the owner of a driver adds."""

    def log_of(self, shard_id: int) -> WritableLog: ...

    def on_append_started(self, shard_id: int) -> None: ...

    def on_append_durable(self, shard_id: int, size_bytes: int) -> None: ...

    def on_failed(self, shard_id: int) -> None:
        """A shard failed, and nothing of it is being written: its log can be opened and loaded again."""

    def start_task(self, shard_id: int, task: Task) -> None: ...

    def wake(self) -> None: ...


class RuntimeDriver(Generic[M]):
    """See the module's text. `name` tells the drivers of one worker apart in write jobs and log lines; `translate` is
    for errors of the runtime that mean something else to the clients of these state machines.
    """

    def __init__(
        self,
        name: str,
        runtime: CoordinatorRuntime[M],
        hooks: DriverHooks,
        translate: Callable[[KafkaError], KafkaError] = lambda error: error,
    ) -> None:
        self.name = name
        self._translate = translate
        self.runtime = runtime
        self._hooks = hooks
        self._waiting: dict[Hashable, asyncio.Future[object]] = {}

    def run(
        self,
        shard_id: int,
        operation: Callable[[M, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> T | asyncio.Future[T]:
        """The answer, or a future where it has to wait for the disk or for a later operation."""
        token = context.token
        self._hooks.wake()
        try:
            outcome = self.runtime.run_write(shard_id, operation, request, context, token)
        except KafkaError as error:
            raise self._translate(error) from None
        if not isinstance(outcome, Wait):
            return outcome
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        return cast("asyncio.Future[T]", future)

    def run_unanswered(
        self,
        shard_id: int,
        operation: Callable[[M, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> None:
        """Runs an operation whose answer nobody needs."""
        self._hooks.wake()
        self.runtime.run_write(shard_id, operation, request, context, context.token)

    @property
    def waiting(self) -> int:
        """Answers that are still to come."""
        return len(self._waiting)

    def collect(self, now_ms: int, jobs: list[WriteJob]) -> None:
        """Handles what the runtime has ready and adds its writes to `jobs`."""
        ready = self.runtime.poll(now_ms)
        for append in ready.appends:
            self._hooks.on_append_started(append.shard_id)
            key = (self.name, append.shard_id)
            jobs.append(WriteJob(key, self._hooks.log_of(append.shard_id), append.data, now_ms))
        self._settle(ready.replies, ready.waiters)
        for shard_id, task in ready.tasks:
            self._hooks.start_task(shard_id, task)
        for shard_id in ready.failed:
            self._hooks.on_failed(shard_id)

    def answer(self) -> None:
        """Hands out the replies that have come to be since `collect`."""
        self._settle(*self.runtime.take_replies())

    def written(self, shard_id: int, result: WriteResult, now_ms: int) -> None:
        """A write of this driver ended."""
        if result.error is None:
            try:
                self._hooks.on_append_durable(shard_id, result.size_bytes)
            except Exception:
                _logger.exception("Publishing what shard %d of %s wrote failed", shard_id, self.name)
        self.runtime.on_append_completed(shard_id, now_ms, result.error)

    def _settle(self, replies: list[Reply], waiters: list[Waiter]) -> None:
        for reply in replies:
            self._resolve(reply)
        for waiter in waiters:
            waiter.settle()

    def _resolve(self, reply: Reply) -> None:
        token = reply.token
        if isinstance(token, Waiter):
            assert isinstance(reply.value, KafkaError), "a waiter is told of nothing but failure otherwise"
            token.fail(reply.value)
            return
        future = self._waiting.pop(token, None)
        if future is None or future.done():
            return
        if isinstance(reply.value, KafkaError):
            future.set_exception(self._translate(reply.value))
        else:
            future.set_result(reply.value)
