# SPDX-License-Identifier: Apache-2.0
"""One shard: a state machine, the offsets of its log, and everything that waits for that log.

Theory of operation
-------------------
The state in memory is ahead of the log, and responses wait for the log. An operation passes these steps in one call:

1. The operation reads the state and returns a CoordinatorResult. An error of Kafka rejects the request.
2. The records are serialized and their size is checked. An error here also rejects the request, and nothing has
   changed yet.
3. The records get the next offsets and join the last batch of the write buffer, or begin a batch. A batch never has a
   part of a result, because recovery keeps or drops whole batches. Only results that are not atomic are divided.
4. The state machine replays the records. From here on, later operations see the result.
5. The effects are applied: timers are armed, tasks are started, and earlier requests get their responses.
6. The response leaves at once if the log has everything in the state. Otherwise it waits for the offset that was next
   when it was made, because the operation may have read records up to there. Reads and errors wait too.

The write buffer is written as one append, and a shard has at most one append in flight. Records that arrive meanwhile
are collected for the next append, so the log has the batches in the order of their offsets. When an append is
`written`, the durable offset moves to its end, and the waiting responses leave in order.

A shard fails after a write with an unknown outcome, a failed replay, and an AssertionError in an operation. Then the
state machine, the buffer, timers and tasks are dropped, and every waiting request gets NOT_COORDINATOR. The shard is
loaded from its log again (`kcoord.runtime.shard_loads`), but not before the append in flight has ended. A crash of the
process has the same effect: whatever was not written is lost, and no response to it has left.

If the disk was full, the loaded shard is read-only for a while. Heartbeats and reads work, and results with records are
refused.

A log in an upstream may refuse the records of a transaction (`Provisional`). They have a batch of their own, and are
provisional from step 4 on. When the log has decided about the batch (`decided`), the machine keeps or drops them, and
the response leaves. Markers of transactions are in such a log already when they are replayed (`ended`).
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

from kcoord.runtime.result import (
    MAX_GROUP_BYTES,
    PENDING,
    Cancel,
    Completion,
    CoordinatorRecord,
    CoordinatorResult,
    EncodedRecords,
    HasProvisionalRecords,
    MemberTimers,
    OperationContext,
    PackedRecords,
    Producer,
    Provisional,
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
    runs_of,
    serialize_control,
    stamp_of,
)
from kcoord.runtime.shard_log import Append, ProvisionalBatch
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


class _Undecided(NamedTuple):
    """A batch that the log may refuse, and the reply to its request."""

    batch: ProvisionalBatch
    producer: Producer
    ticket: int
    next_offset: int
    reply: DeferredReply


class ShardContext(Generic[M]):
    """One shard. `machine` is set if and only if the shard is ACTIVE. The module docstring has the order of steps."""

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
        "_provisional",
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
        self._provisional: dict[int, _Undecided] = {}
        """The batches about which the log has not decided, by base offset."""
        self._running_tasks: dict[TimerKey, Task] = {}
        self._buffer = WriteBuffer(max_batch_bytes, compression)
        self.next_offset = 0
        """The offset of the next record. The state in memory has all records before it."""
        self.durable_offset = 0
        """The log has all records before this offset."""
        self.grown_bytes = 0
        """The bytes that were written to the log since the last snapshot."""
        self._in_flight: Append | None = None
        self._full_disk = FullDisk()

    # State.

    @property
    def is_behind(self) -> bool:
        """True if the state has records that are not durable yet."""
        return self.next_offset != self.durable_offset

    @property
    def running_tasks(self) -> int:
        """The number of background tasks that run or wait to be started."""
        return len(self._running_tasks)

    @property
    def is_writing(self) -> bool:
        """True if an append is in flight."""
        return self._in_flight is not None

    def is_read_only(self, now_ms: int) -> bool:
        """True if a write found the disk full a short time ago. Results with records are refused for a while."""
        return now_ms < self._full_disk.until_ms

    def move_to(self, state: ShardState) -> None:
        assert state in NEXT_STATES[self.state], (
            f"R-1: shard {self.shard_id} cannot go from {self.state.value} to {state.value}"
        )
        self.state = state

    def begin_load(self) -> None:
        assert not self.is_writing, f"R-2: shard {self.shard_id} is loaded while an append of it is in flight"
        self.move_to(ShardState.LOADING)

    def activate(self, machine: M, next_offset: int, now_ms: int) -> bool:
        """Makes the shard ACTIVE with a machine that has replayed its log up to the end, `next_offset`.

        The machine's timers and tasks start. Returns False if `on_loaded` failed; the shard is FAILED then.
        """
        assert not self._buffer.batches, (
            f"R-16: shard {self.shard_id} becomes active with {len(self._buffer.batches)} unwritten batches"
        )
        self.move_to(ShardState.ACTIVE)
        self.machine = machine
        self.next_offset = self.durable_offset = next_offset
        if self._run_internal(machine.on_loaded, OperationContext(now_ms)):
            return True
        if self.machine is not None:
            self._stop(ShardState.FAILED)
        # The caller schedules the next load after a delay. Loading at once would only fail again.
        self._outbox.failed = [shard_id for shard_id in self._outbox.failed if shard_id != self.shard_id]
        return False

    @property
    def _max_group_bytes(self) -> int:
        return max(MAX_GROUP_BYTES, self._max_batch_bytes)

    def unavailable(self) -> KafkaError:
        """Returns the error for requests while the shard is not ACTIVE."""
        if self.state in (ShardState.INITIAL, ShardState.LOADING):
            return KafkaError(Errors.COORDINATOR_LOAD_IN_PROGRESS)
        return KafkaError(Errors.NOT_COORDINATOR)

    def fail(self, reason: str, error: BaseException | None) -> None:
        """Drops the state in memory. The shard is loaded again as soon as no append is in flight."""
        _logger.error("Shard %d failed and is loaded again from its log: %s", self.shard_id, reason, exc_info=error)
        self._stop(ShardState.FAILED)
        if not self.is_writing:
            self._offer_load()

    def broken(self, error: AssertionError) -> None:
        """Fails the shard after an assertion of an invariant failed. Logs the error if the shard is not ACTIVE."""
        self._statistics.invariants_broken += 1
        if self.machine is not None:
            self.fail("an invariant is broken", error)
        else:
            _logger.error("An invariant of shard %d is broken: %s", self.shard_id, error, exc_info=error)

    def close(self) -> None:
        """Fails all waiting requests. An append in flight continues, but its outcome no longer matters."""
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
        self._provisional.clear()
        self._outbox.replies += (Refusal(waiter, KafkaError(Errors.NOT_COORDINATOR)) for waiter in waiters)

    # Operations.

    def run(
        self,
        operation: Callable[[M, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> T | DeferredReply:
        """Runs an operation, which may also be one that only reads.

        If all records in the state are durable, returns the operation's response or raises its KafkaError. Otherwise
        returns a DeferredReply, which a later `Ready` contains. A PENDING result is answered by a Completion with
        `context.token`.
        """
        machine = self.machine
        if machine is None:
            raise self.unavailable()
        try:
            try:
                result = operation(machine, context, request)
                max_bytes = self._max_group_bytes if result.is_of_group else 0
                if not result.is_atomic:
                    max_bytes = sys.maxsize
                records = self._serialize(result.records, max_bytes) if result.records else None
            except KafkaError as error:
                return self._answer_error(error)
            except AssertionError:
                raise
            except Exception:
                self._statistics.operations_failed += 1
                _logger.exception("An operation on shard %d failed", self.shard_id)
                return self._answer_error(KafkaError(Errors.UNKNOWN_SERVER_ERROR))
            if records is not None:
                if context.now_ms < self._full_disk.until_ms:
                    return self._refuse_write(is_refusable=result.is_refusable)
                whole = [slice(None)]
                for run in whole if result.is_atomic else runs_of(records, self._max_batch_bytes):
                    self._append_and_replay(machine, result.records[run], records[run], context.now_ms, result.encoded)
            response = result.response
            if response is PENDING:
                reply = self._add_pending(context.token)
                self._apply_effects(result)
                return reply
            self._apply_effects(result)
            if self.next_offset == self.durable_offset:
                return response
            reply = DeferredReply(response)
            if result.provisional is not None:
                self._add_provisional(result.records, result.provisional, reply)
            self._deferred.add(self.next_offset, reply)
            return reply
        except AssertionError as error:
            self.broken(error)
            raise KafkaError(Errors.NOT_COORDINATOR) from error

    def _add_provisional(
        self, records: list[CoordinatorRecord], provisional: Provisional, reply: DeferredReply
    ) -> None:
        """Notes that the log may refuse the records of the last result."""
        producer = records[0].producer
        assert producer is not None, f"R-17: provisional records of shard {self.shard_id} are in no transaction"
        self._provisional[self.next_offset - len(records)] = _Undecided(
            ProvisionalBatch(provisional.transactional_id), producer, provisional.ticket, self.next_offset, reply
        )

    def _add_pending(self, token: Hashable) -> DeferredReply:
        """Returns the reply of a request that a later Completion answers."""
        assert token not in self._pending, f"R-14: two requests of shard {self.shard_id} wait with the token {token!r}"
        reply = self._pending[token] = DeferredReply(PENDING)
        return reply

    def append_packed(self, packed: PackedRecords, waiter: Waiter) -> bool:
        """Appends and replays a packed result, which was computed from the machine's present state.

        `waiter` is settled when the result is durable, or fails with the shard. Returns False, without any change, if
        the shard is not ACTIVE or the result does not fit into a batch.
        """
        if self.machine is None:
            return False
        try:
            has_begun = self._buffer.pack(packed, self.next_offset)
            if has_begun is None:
                return False
            if has_begun:
                self._batch_began(packed.timestamp_ms)
            self._appended(packed.count)
            self._deferred.add(self.next_offset, waiter)
        except AssertionError as error:
            self.broken(error)
            return False
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
        """True if a response that was read from the state has to wait. `waiter` is settled when it may leave."""
        if self.next_offset == self.durable_offset:
            return False
        try:
            self._deferred.add(self.next_offset, waiter)
        except AssertionError as error:
            self.broken(error)
            self._outbox.replies.append(Refusal(waiter, KafkaError(Errors.NOT_COORDINATOR)))
        return True

    def _answer_error(self, error: KafkaError) -> DeferredReply:
        """Raises the error, or defers it: it may depend on records that are not durable yet, like any response."""
        if self.next_offset == self.durable_offset:
            raise error
        reply = DeferredReply(error)
        self._deferred.add(self.next_offset, reply)
        return reply

    def _refuse_write(self, *, is_refusable: bool) -> DeferredReply:
        """Rejects a result while the disk is full. If the result cannot be dropped, the shard fails."""
        error = KafkaError(Errors.NOT_COORDINATOR)
        if is_refusable:
            return self._answer_error(error)
        self.fail("the disk is full", None)
        raise error

    def fire(self, key: TimerKey, now_ms: int) -> None:
        """Runs the operation of a timer that is due. If the operation fails, the timer is armed again."""
        machine = self.machine
        assert machine is not None, f"R-3: a timer of shard {self.shard_id} fires while it is {self.state.value}: {key}"
        self.timers.fired(key)
        if key is _LINGER:
            self._offer_write()
            return
        context = OperationContext(now_ms)
        done = self._run_internal(lambda context: machine.fire_timer(context, key), context)
        if not done and self.machine is not None and self.timers.deadline_ms(key) is None:
            self.timers.schedule(key, now_ms + _TIMER_RETRY_MS)

    def complete_task(self, task: Task, value: object, context: OperationContext) -> None:
        """Passes the outcome of a task to the machine, unless the shard was loaded again since the task started."""
        machine = self.machine
        if machine is None or self._running_tasks.get(task.key) is not task:
            return
        del self._running_tasks[task.key]
        self._run_internal(lambda context: machine.complete_task(context, task, value), context)

    def _run_internal(
        self, operation: Callable[[OperationContext], CoordinatorResult[None]], context: OperationContext
    ) -> bool:
        """Runs an operation of the runtime itself, without a waiting request. Returns False if it failed."""
        machine = self.machine
        assert machine is not None
        try:
            result = operation(context)
            encoded = result.encoded
            max_bytes = self._max_group_bytes - (0 if encoded is None else len(encoded.body))
            records = self._serialize(result.records, max_bytes) if result.records else None
        except AssertionError as error:
            self.broken(error)
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
        serialized = [serialize(record) for record in records]
        check_size(records, serialized, max_bytes or self._max_batch_bytes)
        return serialized

    def _append_and_replay(
        self,
        machine: M,
        records: list[CoordinatorRecord],
        serialized: list[SerializedRecord],
        now_ms: int,
        encoded: EncodedRecords | None = None,
    ) -> None:
        """Gives the records their offsets and replays them. Raises KafkaError if that failed the shard."""
        try:
            if encoded is None:
                self._append(serialized, stamp_of(records), now_ms)
            else:
                batch = PackedBatch(self.next_offset, now_ms)
                batch.add(encoded.body, encoded.count)
                batch.add(encode_records(serialized, batch.count), len(serialized))
                self._buffer.add_batch(batch)
                self._batch_began(now_ms)
                self._appended(batch.count)
            if encoded is not None:
                encoded.replay()
            for record in records:
                machine.replay(record)
        except Exception as error:
            if isinstance(error, AssertionError):
                self.broken(error)
            else:
                self.fail("replaying a result failed", error)
            raise KafkaError(Errors.NOT_COORDINATOR) from error

    def _apply_effects(self, result: CoordinatorResult[T]) -> None:
        """Arms timers, starts tasks and answers earlier requests. The result's records were replayed before."""
        timers = self.timers
        for effect in result.timers:
            if type(effect) is Schedule:
                timers.schedule(effect.key, effect.deadline_ms)
            elif type(effect) is Cancel:
                timers.cancel(effect.key)
            elif type(effect) is MemberTimers:
                for member_id, deadline_ms in effect.deadlines_ms.items():
                    timers.schedule(TimerKey(effect.kind, effect.group_id, member_id), deadline_ms)
        for task in result.tasks:
            if task.when_durable and self.next_offset != self.durable_offset:
                self._deferred_tasks.append((self.next_offset, task))
            else:
                self._start(task)
        self._complete(result.completions)
        for completions in result.bulk_completions:
            self._outbox.completing.append((self.shard_id, completions))

    def _complete(self, completions: Iterable[Completion]) -> None:
        for completion in completions:
            reply = self._pending.pop(completion.token, None)
            if reply is None:
                continue
            reply.value = completion.response
            if self.next_offset == self.durable_offset:
                self._outbox.replies.append(reply)
            else:
                self._deferred.add(self.next_offset, reply)

    def complete_some(self, completions: Iterator[Completion], limit: int) -> int:
        """Answers up to `limit` requests. Returns the number of completions: less than `limit` if no more are left.

        They may wait for later records than those of their operation. If the shard has failed since the operation, it
        has answered the requests.
        """
        if self.machine is None:
            return 0
        try:
            taken = list(islice(completions, limit))
            self._complete(taken)
        except AssertionError as error:
            self.broken(error)
            return 0
        except Exception as error:
            self.fail("completing requests failed", error)
            return 0
        return len(taken)

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
        """Offers the buffer for writing. The first batch may linger until more results join it or it is full.

        A second batch begins when the first is full, or a result needs a batch of its own. Then lingering ends.
        """
        if len(self._buffer.batches) == 1:
            if self._linger_ms > 0:
                self.timers.schedule(_LINGER, now_ms + self._linger_ms)
            else:
                self._offer_write()
        elif self.timers.deadline_ms(_LINGER) is not None:
            self.timers.cancel(_LINGER)
            self._offer_write()

    def _offer_write(self) -> None:
        """Makes the next `poll` write the buffer. If an append is in flight, `written` does this later."""
        if self._in_flight is None:
            self._outbox.writable.append(self.shard_id)

    def take_append(self) -> Append | None:
        """Returns the whole buffer as one append. Returns None if the buffer is empty or an append is in flight."""
        buffer = self._buffer
        if not buffer.batches or self._in_flight is not None:
            return None
        try:
            assert buffer.base_offset == self.durable_offset and buffer.next_offset == self.next_offset, (
                f"R-5: shard {self.shard_id} appends the offsets {buffer.base_offset} to {buffer.next_offset}, "
                f"but {self.durable_offset} to {self.next_offset} are not durable"
            )
        except AssertionError as error:
            self.broken(error)
            return None
        self._statistics.batches_appended += len(buffer.batches)
        append = Append(self.shard_id, buffer.base_offset, self.next_offset, buffer.take())
        if self._provisional:
            append.provisional = {offset: batch.batch for offset, batch in self._provisional.items()}
        self._statistics.bytes_appended += len(append.data)
        self._in_flight = append
        return append

    def written(self, append: Append) -> None:
        """Releases the responses that waited for this append, and offers the records of the meantime for writing."""
        offset = self.end_append(append)
        self._full_disk.refusal_ms = 0
        self.grown_bytes += len(append.data)
        if self.state is not ShardState.ACTIVE:
            self._offer_load()
            return
        assert self.durable_offset <= offset <= self.next_offset, (
            f"R-6: the durable offset of shard {self.shard_id} moves from {self.durable_offset} to {offset}, "
            f"and the next offset is {self.next_offset}"
        )
        self.durable_offset = offset
        self._deferred.release(offset, self._outbox.replies)
        while self._deferred_tasks and self._deferred_tasks[0][0] <= offset:
            self._start(self._deferred_tasks.popleft()[1])
        if self._buffer.batches and self.timers.deadline_ms(_LINGER) is None:
            self._outbox.writable.append(self.shard_id)

    def decided(self, append: Append, offset: int, error: KafkaError | None) -> None:
        """The log has the provisional batch at this offset of an append, or has refused it with an error.

        All batches of the append before it are in the log, or were refused, too.
        """
        machine: object = self.machine
        if machine is None:
            return
        assert self._in_flight is append and offset in self._provisional, (
            f"R-18: the log of shard {self.shard_id} decides about offset {offset}, which is not provisional"
        )
        assert isinstance(machine, HasProvisionalRecords)
        undecided = self._provisional.pop(offset)
        machine.decide(undecided.ticket, accepted=error is None)
        if error is not None:
            undecided.reply.value = error
        self.durable_offset = undecided.next_offset
        self._deferred.release(self.durable_offset, self._outbox.replies)

    def ended(self, marker: CoordinatorRecord) -> None:
        """Replays the marker of a transaction, which another coordinator has written to the log.

        Batches of the producer that wait for an append were sent in this transaction, or before. They are too late.
        """
        machine = self.machine
        if machine is None:
            return
        for undecided in self._provisional.values():
            if marker.producer is not None and undecided.producer.producer_id == marker.producer.producer_id:
                undecided.batch.is_stale = True
        try:
            machine.replay(marker)
        except Exception as error:
            self.fail("replaying a marker failed", error)

    def rewrite(self, keys: Collection[bytes], now_ms: int) -> None:
        """Writes the present values of these keys again."""
        machine: object = self.machine
        if machine is not None:
            assert isinstance(machine, HasProvisionalRecords)
            rewrite = machine.rewrite
            records = [self._serde.deserialize(key, None) for key in sorted(keys)]
            decoded = [record.key for record in records if record is not None and record.key is not None]
            self._run_internal(lambda context: rewrite(context, decoded), OperationContext(now_ms))

    def unknown(self, append: Append, error: OSError, now_ms: int) -> None:
        """Fails the shard, because the log may have the append in flight or not. Reading the log decides."""
        self.end_append(append)
        self._full_disk.note(error, now_ms)
        if self.state is ShardState.ACTIVE:
            self.fail(f"writing to its log failed: {error}", None)
        else:
            self._offer_load()

    def end_append(self, append: Append) -> int:
        """Marks the append as ended, with whatever outcome. Returns its end offset."""
        assert self._in_flight is append, f"R-4: {append} of shard {self.shard_id} has ended, but is not in flight"
        self._in_flight = None
        return append.next_offset

    def _offer_load(self) -> None:
        if self.state is ShardState.FAILED:
            self._outbox.failed.append(self.shard_id)

    def expire_replies(self, now_ms: int, timeout_ms: int) -> None:
        """Fails the requests that have waited for the log longer than the timeout.

        Their records may still become durable. Kafka returns the same error in this case.
        """
        waiters = self._deferred.overdue(self.next_offset, now_ms, now_ms - timeout_ms)
        self._outbox.replies += (Refusal(waiter, KafkaError(Errors.COORDINATOR_NOT_AVAILABLE)) for waiter in waiters)
