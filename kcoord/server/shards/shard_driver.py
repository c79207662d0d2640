# SPDX-License-Identifier: Apache-2.0
"""Drives one ShardSet in the event loop: its `Ready` becomes requests of a log, resolved futures and background tasks.

The chain write -> durable -> replies must survive everything, also clients that vanished and answers nobody waits for:
no exception of one item may keep the next from being handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar, cast

from kcoord.runtime.outbox import DeferredReply
from kcoord.runtime.result import StateMachine, Task
from kcoord.runtime.shard_log import Append, Load, ShardLog
from kcoord.runtime.shard_set import ShardSet
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
        for save in ready.saves:
            self.log.save(save)
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
