# SPDX-License-Identifier: Apache-2.0
"""One shard: a state machine, its log's offsets, and everything that waits for that log.

State runs ahead of the disk and replies wait for it. A result is serialized and checked first, then it gets its offsets
and is replayed, so that a refused result changes nothing. After a failed write or a broken invariant the memory is
thrown away and rebuilt from the log. Where the disk is full, the state that was rebuilt is read but not written for a
while: heartbeats and reads go on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from kcoord.runtime.result import (
    PENDING,
    CoordinatorRecord,
    CoordinatorResult,
    EncodedRecords,
    OperationContext,
    PackedRecords,
    Schedule,
    StateMachine,
    Task,
    TimerKey,
)
from kcoord.runtime.serde import (
    BatchStamp,
    PackedBatch,
    RecordSerde,
    SerializedRecord,
    WriteBuffer,
    check_size,
    serialize_control,
    size_bound_bytes,
    stamp_of,
)
from kcoord.runtime.shard_log import Append
from kcoord.runtime.waiting import (
    NEXT_STATES,
    DeferredReplies,
    DeferredReply,
    FullDisk,
    Outbox,
    Refusal,
    ShardState,
    ShardTimer,
    ShardTimers,
    Statistics,
    TimerQueue,
    Waiter,
)
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ControlRecordTypeSchema
from kcoord_protocol.record_batch import encode_records

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound=StateMachine)
R = TypeVar("R")
T = TypeVar("T")


_TIMER_RETRY_MS: Final = 500
_LINGER: Final = TimerKey(ShardTimer.LINGER)
_MAX_TASK_BYTES: Final = 64 * 1024 * 1024
"""The most that the result of a task may take in the log. It is one batch, however many members a group has whose
target changes; Kafka's limit of a message is one for requests of clients.
"""


class ShardContext(Generic[M]):
    """See the module's text. `machine` is there exactly while the shard is ACTIVE."""

    __slots__ = (
        "_buffer",
        "_deferred",
        "_deferred_tasks",
        "_full_disk",
        "_in_flight",
        "_linger_ms",
        "_max_batch_bytes",
        "_outbox",
        "_pending",
        "_running_tasks",
        "_serde",
        "_statistics",
        "durable_offset",
        "grown_bytes",
        "machine",
        "next_offset",
        "shard_id",
        "state",
        "timers",
    )

    def __init__(
        self,
        shard_id: int,
        serde: RecordSerde,
        timer_queue: TimerQueue,
        outbox: Outbox,
        statistics: Statistics,
        max_batch_bytes: int,
        compression: Compression = Compression.NONE,
        linger_ms: int = 0,
    ) -> None:
        self.shard_id = shard_id
        self.state = ShardState.INITIAL
        self.machine: M | None = None
        self.timers = ShardTimers(shard_id, timer_queue)
        self._serde = serde
        self._outbox = outbox
        self._statistics = statistics
        self._max_batch_bytes = max_batch_bytes
        self._linger_ms = linger_ms
        self._deferred = DeferredReplies()
        self._deferred_tasks: deque[tuple[int, Task]] = deque()
        self._pending: dict[Hashable, DeferredReply] = {}
        self._running_tasks: dict[TimerKey, Task] = {}
        self._buffer = WriteBuffer(max_batch_bytes, compression)
        self.next_offset = 0
        """The offset of the next record."""
        self.durable_offset = 0
        """Everything before it is durable."""
        self.grown_bytes = 0
        """By how much the log has grown, durably, since the last snapshot."""
        self._in_flight: Append | None = None
        self._full_disk = FullDisk()

    # State.

    @property
    def is_behind(self) -> bool:
        """Whether the disk is behind the state."""
        return self.next_offset != self.durable_offset

    @property
    def running_tasks(self) -> int:
        """Background tasks that are started or to be started."""
        return len(self._running_tasks)

    @property
    def is_writing(self) -> bool:
        return self._in_flight is not None

    def is_read_only(self, now_ms: int) -> bool:
        """Whether the disk was full a moment ago. What has to be written is refused until it is time to try again."""
        return now_ms < self._full_disk.until_ms

    def move_to(self, state: ShardState) -> None:
        assert state in NEXT_STATES[self.state], f"shard {self.shard_id}: {self.state.value} to {state.value}"
        self.state = state

    def begin_load(self) -> None:
        assert not self.is_writing, "a log is read again only when no write is under way"
        self.move_to(ShardState.LOADING)

    def activate(self, machine: M, next_offset: int, now_ms: int) -> bool:
        """The machine holds all of the log, which ends at `next_offset`; its timers and tasks start now. False where
        that failed.
        """
        self.move_to(ShardState.ACTIVE)
        self.machine = machine
        self.next_offset = self.durable_offset = next_offset
        if self._run_internal(machine.on_loaded, OperationContext(now_ms)):
            return True
        if self.machine is not None:
            self._stop(ShardState.FAILED)
        # Not to be loaded again at once: it would only fail again.
        self._outbox.failed = [shard_id for shard_id in self._outbox.failed if shard_id != self.shard_id]
        return False

    def unavailable(self) -> KafkaError:
        """Why no operation can run now."""
        if self.state in (ShardState.INITIAL, ShardState.LOADING):
            return KafkaError(Errors.COORDINATOR_LOAD_IN_PROGRESS)
        return KafkaError(Errors.NOT_COORDINATOR)

    def fail(self, reason: str, error: BaseException | None) -> None:
        """Gives up what is in memory. The shard can be loaded again as soon as no write is under way."""
        _logger.error("Shard %d failed and has to be loaded again: %s", self.shard_id, reason, exc_info=error)
        self._stop(ShardState.FAILED)
        if not self.is_writing:
            self._offer_load()

    def close(self) -> None:
        """Answers everybody who waits; a write that is under way goes on, its outcome is of no interest any more."""
        self._stop(ShardState.CLOSED)

    def _stop(self, state: ShardState) -> None:
        self.move_to(state)
        self.machine = None
        self.timers.clear()
        self._buffer.clear()
        self._running_tasks.clear()
        self._deferred_tasks.clear()
        waiters = self._deferred.drain()
        waiters += self._pending.values()
        self._pending.clear()
        self._outbox.replies += (Refusal(waiter, KafkaError(Errors.NOT_COORDINATOR)) for waiter in waiters)

    # Operations.

    def run(
        self,
        operation: Callable[[M, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> T | DeferredReply:
        """Runs an operation, also one that only reads.

        Returns its response, or raises its KafkaError, if it depends on nothing that is still to be written. Otherwise
        returns a DeferredReply, which a later `Ready` holds. A result that is PENDING is completed by `context.token`.
        """
        machine = self.machine
        if machine is None:
            raise self.unavailable()
        try:
            result = operation(machine, context, request)
            records = self._serialize(result.records) if result.records else None
        except KafkaError as error:
            return self._answer_error(error)
        except AssertionError as error:
            self.fail("an operation found a broken invariant", error)
            raise KafkaError(Errors.NOT_COORDINATOR) from error
        except Exception:
            self._statistics.operations_failed += 1
            _logger.exception("An operation on shard %d failed", self.shard_id)
            return self._answer_error(KafkaError(Errors.UNKNOWN_SERVER_ERROR))
        if records is not None:
            if context.now_ms < self._full_disk.until_ms:
                return self._refuse_write(is_refusable=result.is_refusable)
            self._append_and_replay(machine, result.records, records, context.now_ms)
        response = result.response
        if response is PENDING:
            reply = self._pending[context.token] = DeferredReply(PENDING)
            self._apply_effects(result)
            return reply
        self._apply_effects(result)
        if self.next_offset == self.durable_offset:
            return response
        reply = DeferredReply(response)
        self._deferred.add(self.next_offset, reply)
        return reply

    def append_packed(self, packed: PackedRecords, waiter: Waiter) -> bool:
        """Appends and replays what an operation on this shard's machine has just given. `waiter` hears when it is
        durable, or of the failure of the shard; False where nothing has happened.
        """
        if self.machine is None:
            return False
        has_begun = self._buffer.pack(packed, self.next_offset)
        if has_begun is None:
            return False  # no batch has room
        if has_begun:
            self._batch_began(packed.timestamp_ms)
        self._appended(packed.count)
        self._deferred.add(self.next_offset, waiter)
        try:
            packed.replay()
        except Exception as error:
            self.fail("replaying a packed result failed", error)
            return True
        timer = packed.timer
        if timer is not None:
            self.timers.schedule(timer.key, timer.deadline_ms)
        return True

    def defer(self, waiter: Waiter) -> bool:
        """Whether an answer that was read off the state must wait for the disk; `waiter` hears when it need not."""
        if self.next_offset == self.durable_offset:
            return False
        self._deferred.add(self.next_offset, waiter)
        return True

    def _answer_error(self, error: KafkaError) -> DeferredReply:
        """An error may rest on records that are not durable yet, so it waits for them like any answer."""
        if self.next_offset == self.durable_offset:
            raise error
        reply = DeferredReply(error)
        self._deferred.add(self.next_offset, reply)
        return reply

    def _refuse_write(self, *, is_refusable: bool) -> DeferredReply:
        """There is no space for a result. Where it cannot be dropped, the shard fails as it would by writing it."""
        error = KafkaError(Errors.NOT_COORDINATOR)
        if is_refusable:
            return self._answer_error(error)
        self.fail("the disk is full", None)
        raise error

    def fire(self, key: TimerKey, now_ms: int) -> None:
        """A timer of this shard is due. Where its operation fails, it is tried again a little later."""
        machine = self.machine
        assert machine is not None, "only an active shard has timers"
        self.timers.fired(key)
        if key is _LINGER:
            self._offer_write()
            return
        done = self._run_internal(lambda context: machine.fire_timer(context, key), OperationContext(now_ms))
        if not done and self.machine is not None and self.timers.deadline_ms(key) is None:
            self.timers.schedule(key, now_ms + _TIMER_RETRY_MS)

    def complete_task(self, task: Task, value: object, context: OperationContext) -> None:
        """A task has ended. The outcome of one that was started before the shard was loaded again is dropped."""
        machine = self.machine
        if machine is None or self._running_tasks.get(task.key) is not task:
            return
        del self._running_tasks[task.key]
        self._run_internal(
            lambda context: machine.complete_task(context, task, value),
            context,
            max(_MAX_TASK_BYTES, self._max_batch_bytes),
        )

    def _run_internal(
        self,
        operation: Callable[[OperationContext], CoordinatorResult[None]],
        context: OperationContext,
        max_bytes: int = 0,
    ) -> bool:
        """Runs an operation that nobody waits for; False where it failed."""
        machine = self.machine
        assert machine is not None
        try:
            result = operation(context)
            encoded = result.encoded
            max_bytes -= 0 if encoded is None else len(encoded.body)
            records = self._serialize(result.records, max_bytes) if result.records else None
        except AssertionError as error:
            self.fail("an operation found a broken invariant", error)
            return False
        except Exception:
            self._statistics.operations_failed += 1
            _logger.exception("A timer or task of shard %d failed", self.shard_id)
            return False
        if records is not None:
            if context.now_ms < self._full_disk.until_ms:
                self.fail("the disk is full", None)
                return False
            try:
                self._append_and_replay(machine, result.records, records, context.now_ms, encoded)
            except KafkaError:
                return False
        self._apply_effects(result)
        return True

    def _serialize(self, records: list[CoordinatorRecord], max_bytes: int = 0) -> list[SerializedRecord]:
        is_control = type(records[0].key) is ControlRecordTypeSchema
        serialize = serialize_control if is_control else self._serde.serialize
        serialized = [record.serialized or serialize(record) for record in records]
        check_size(serialized, size_bound_bytes(serialized), max_bytes or self._max_batch_bytes)
        return serialized

    def _append_and_replay(
        self,
        machine: M,
        records: list[CoordinatorRecord],
        serialized: list[SerializedRecord],
        now_ms: int,
        encoded: EncodedRecords | None = None,
    ) -> None:
        """From here on the result has happened."""
        if encoded is None:
            self._append(serialized, stamp_of(records), now_ms)
        else:
            batch = PackedBatch(self.next_offset, now_ms)
            batch.add(encoded.body, encoded.count)
            batch.add(encode_records(serialized, batch.count), len(serialized))
            self._buffer.add_batch(batch)
            self._batch_began(now_ms)
            self._appended(batch.count)
        try:
            if encoded is not None:
                encoded.replay()
            for record in records:
                machine.replay(record)
        except Exception as error:
            self.fail("replaying a result failed", error)
            raise KafkaError(Errors.NOT_COORDINATOR) from error

    def _apply_effects(self, result: CoordinatorResult[T]) -> None:
        """Arms timers, starts tasks and answers earlier requests, after the result's records were replayed."""
        timers = self.timers
        for effect in result.timers:
            if type(effect) is Schedule:
                timers.schedule(effect.key, effect.deadline_ms)
            else:
                timers.cancel(effect.key)
        for task in result.tasks:
            if task.when_durable and self.next_offset != self.durable_offset:
                self._deferred_tasks.append((self.next_offset, task))
            else:
                self._start(task)
        for completion in result.completions:
            reply = self._pending.pop(completion.token, None)
            if reply is None:
                continue
            reply.value = completion.response
            if self.next_offset == self.durable_offset:
                self._outbox.replies.append(reply)
            else:
                self._deferred.add(self.next_offset, reply)

    def _start(self, task: Task) -> None:
        if task.key not in self._running_tasks:
            self._running_tasks[task.key] = task
            self._outbox.tasks.append((self.shard_id, task))

    # The log.

    def _append(self, records: list[SerializedRecord], stamp: BatchStamp | None, now_ms: int) -> None:
        if self._buffer.add(records, stamp, self.next_offset, now_ms):
            self._batch_began(now_ms)
        self._appended(len(records))

    def _appended(self, count: int) -> None:
        self.next_offset += count
        self._statistics.records_appended += count

    def _batch_began(self, now_ms: int) -> None:
        """The first batch of a write may linger, for more results to join it. When a second one begins, it is full."""
        if len(self._buffer) == 1:
            if self._linger_ms > 0:
                self.timers.schedule(_LINGER, now_ms + self._linger_ms)
            else:
                self._offer_write()
        elif self.timers.deadline_ms(_LINGER) is not None:
            self.timers.cancel(_LINGER)
            self._offer_write()

    def _offer_write(self) -> None:
        """What was collected may be written: now, or when the write ends that is under way."""
        if self._in_flight is None:
            self._outbox.writable.append(self.shard_id)

    def take_append(self) -> Append | None:
        """Everything that was collected, as one write; None where there is nothing, or a write is under way."""
        buffer = self._buffer
        if not buffer or self._in_flight is not None:
            return None
        self._statistics.batches_appended += len(buffer)
        append = Append(self.shard_id, buffer.base_offset, self.next_offset, buffer.take())
        self._statistics.bytes_appended += len(append.data)
        self._in_flight = append
        return append

    def written(self, append: Append) -> None:
        """The append that was under way is durable: its replies may leave, and what came meanwhile is written next."""
        offset = self.end_append(append)
        self._full_disk.refusal_ms = 0
        self.grown_bytes += len(append.data)
        if self.state is not ShardState.ACTIVE:
            self._offer_load()
            return
        self.durable_offset = offset
        self._deferred.release(offset, self._outbox.replies)
        while self._deferred_tasks and self._deferred_tasks[0][0] <= offset:
            self._start(self._deferred_tasks.popleft()[1])
        if self._buffer and self.timers.deadline_ms(_LINGER) is None:
            self._outbox.writable.append(self.shard_id)

    def unknown(self, append: Append, error: OSError, now_ms: int) -> None:
        """Nothing is known about the append that was under way: the shard has to be loaded again."""
        self.end_append(append)
        self._full_disk.note(error, now_ms)
        if self.state is ShardState.ACTIVE:
            self.fail(f"writing to its log failed: {error}", None)
        else:
            self._offer_load()

    def end_append(self, append: Append) -> int:
        """The append is no longer under way, however it ended. Returns its end."""
        assert self._in_flight is append, f"shard {self.shard_id}: this append is not under way"
        self._in_flight = None
        return append.next_offset

    def _offer_load(self) -> None:
        if self.state is ShardState.FAILED:
            self._outbox.failed.append(self.shard_id)

    def expire_replies(self, now_ms: int, timeout_ms: int) -> None:
        """Refuses who has waited for the log longer than the timeout. What they asked for may still happen; Kafka
        gives its clients the same error.
        """
        waiters = self._deferred.overdue(self.next_offset, now_ms, now_ms - timeout_ms)
        self._outbox.replies += (Refusal(waiter, KafkaError(Errors.COORDINATOR_NOT_AVAILABLE)) for waiter in waiters)
