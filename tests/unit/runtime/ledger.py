# SPDX-License-Identifier: Apache-2.0
"""A small state machine and a disk that the tests complete by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import TypeVar

from kcoord.runtime.result import (
    PENDING,
    Completion,
    CoordinatorRecord,
    CoordinatorResult,
    OperationContext,
    Producer,
    Provisional,
    Schedule,
    Task,
    TimerKey,
    TimerKind,
    new_end_transaction_marker,
)
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_log import Append
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import PackedState, SnapshotPart
from kcoord.runtime.waiting import DeferredReply, Ready
from kcoord_protocol.compression import Compression
from kcoord_protocol.control_records import ControlRecordType
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ControlRecordTypeSchema, Message, OffsetCommitKey, OffsetCommitValue
from kcoord_protocol.record_batch import BatchHeader, iter_headers

SHARD = 3

T = TypeVar("T")


def entry(name: str, value: int, padding: int = 0) -> CoordinatorRecord:
    """A record that sets `name` to `value`."""
    key = OffsetCommitKey(group="g", topic=name, partition=0)
    return CoordinatorRecord(key, OffsetCommitValue(offset=value, metadata="x" * padding, commit_timestamp=0), 3)


class LedgerTimer(TimerKind):
    LOADED = "loaded"
    WORK = "work"
    AGAIN = "again"


class Ledger:
    """Numbers by name. `balance` is rebuilt from the log; everything else is recorded for the tests."""

    def __init__(self) -> None:
        self.balance: dict[str, int] = {}
        self.fired: list[tuple[int, TimerKey]] = []
        self.completed: list[tuple[Task, object]] = []
        self.fail_replay = False
        self.pending: dict[Producer, dict[str, int]] = {}
        """The numbers that open transactions have set. They are rebuilt from the log, too."""
        self.provisional: dict[int, tuple[Producer, dict[str, int]]] = {}
        """The numbers about which the log has not decided, by ticket."""
        self.on_timer: Callable[[], CoordinatorResult[None]] = lambda: CoordinatorResult(None)
        self.on_task: Callable[[], CoordinatorResult[None]] = lambda: CoordinatorResult(None)
        self.loaded_at_ms = -1

    def replay(self, record: CoordinatorRecord) -> None:
        assert not self.fail_replay
        if isinstance(record.key, ControlRecordTypeSchema):
            assert record.producer is not None
            put = self.pending.pop(record.producer, {})
            self.balance.update(put if record.key.type == ControlRecordType.COMMIT else {})
            return
        assert isinstance(record.key, OffsetCommitKey)
        if record.ticket:
            assert record.producer is not None and isinstance(record.value, OffsetCommitValue)
            put = self.provisional.setdefault(record.ticket, (record.producer, {}))[1]
            put[record.key.topic] = record.value.offset
            return
        if record.producer is not None:
            assert isinstance(record.value, OffsetCommitValue)
            self.pending.setdefault(record.producer, {})[record.key.topic] = record.value.offset
            return
        if record.value is None:
            self.balance.pop(record.key.topic, None)
        else:
            assert isinstance(record.value, OffsetCommitValue)
            self.balance[record.key.topic] = record.value.offset

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        self.loaded_at_ms = context.now_ms
        return CoordinatorResult(None, timers=[Schedule(TimerKey(LedgerTimer.LOADED), context.now_ms + 100)])

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        self.fired.append((context.now_ms, key))
        return self.on_timer()

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        self.completed.append((task, value))
        return self.on_task()

    # Operations.

    def put(self, context: OperationContext, name: str, value: int, padding: int = 0) -> CoordinatorResult[str]:
        return CoordinatorResult(f"{name}={value}", [entry(name, value, padding)])

    def put_in_transaction(
        self, context: OperationContext, producer: Producer, name: str, value: int
    ) -> CoordinatorResult[str]:
        record = entry(name, value)
        record.producer = producer
        return CoordinatorResult(f"{name}={value}", [record])

    def put_provisionally(
        self, context: OperationContext, producer: Producer, name: str, value: int
    ) -> CoordinatorResult[str]:
        result = self.put_in_transaction(context, producer, name, value)
        result.records[0].ticket = value
        result.provisional = Provisional("tx", value)
        return result

    def decide(self, ticket: int, *, accepted: bool) -> None:
        producer, put = self.provisional.pop(ticket)
        if accepted:
            self.pending.setdefault(producer, {}).update(put)

    def rewrite(self, context: OperationContext, keys: Iterable[Message]) -> CoordinatorResult[None]:
        names = [key.topic for key in keys if isinstance(key, OffsetCommitKey)]
        return CoordinatorResult(None, [entry(name, self.balance.get(name, 0)) for name in names])

    def end(self, context: OperationContext, producer: Producer, committed: bool) -> CoordinatorResult[str]:
        return CoordinatorResult("ended", [new_end_transaction_marker(producer, 3, committed=committed)])

    def put_and_start(self, context: OperationContext, name: str, when_durable: bool) -> CoordinatorResult[str]:
        task = Task(TimerKey(LedgerTimer.WORK, name), name, when_durable)
        return CoordinatorResult(name, [entry(name, 1)], tasks=[task])

    def get(self, context: OperationContext, name: str) -> CoordinatorResult[int | None]:
        return CoordinatorResult(self.balance.get(name))

    def refuse(self, context: OperationContext) -> CoordinatorResult[str]:
        raise KafkaError(Errors.INVALID_REQUEST, str(sorted(self.balance)))

    def wait(self, context: OperationContext) -> CoordinatorResult[object]:
        return CoordinatorResult(PENDING)

    def complete(self, context: OperationContext, token: object, response: str) -> CoordinatorResult[str]:
        return CoordinatorResult("completed", completions=[Completion(token, response)])


class SavedLedger(Ledger):
    """A ledger with snapshots: half of its numbers are records, the others are packed."""

    def snapshot(self) -> Iterator[SnapshotPart] | None:
        return None if self.pending or self.provisional else self._parts()

    def _parts(self) -> Iterator[SnapshotPart]:
        for number, name in enumerate(sorted(self.balance)):
            if number % 2:
                yield PackedState(4, f"{name}={self.balance[name]}".encode())
            else:
                yield entry(name, self.balance[name])

    def restore(self, part: PackedState) -> bool:
        if part.kind != 4:
            return False
        name, value = part.data.decode().split("=")
        self.balance[name] = int(value)
        return True


class Wait(Enum):
    """The response is deferred."""

    WAIT = "WAIT"


WAIT = Wait.WAIT


class Bench:
    """A runtime with one shard, and the bytes that it has written."""

    def __init__(
        self, max_batch_bytes: int = 1_048_588, compression: Compression = Compression.NONE, linger_ms: int = 0
    ) -> None:
        self.made: list[Ledger] = []
        self.runtime = ShardSet(
            self._make,
            CoordinatorSerde(),
            max_batch_bytes=max_batch_bytes,
            compression=compression,
            linger_ms=linger_ms,
        )
        self.disk = b""
        self.now_ms = 1_000
        self._tokens = 0
        self.in_flight: list[Append] = []
        self.answers: list[tuple[int, object]] = []

    def _make(self, shard_id: int) -> Ledger:
        self.made.append(Ledger())
        return self.made[-1]

    @property
    def ledger(self) -> Ledger:
        return self.made[-1]

    def load(self) -> None:
        self.runtime.load(SHARD, self.batches(), self.now_ms, 0)

    def batches(self) -> Iterator[tuple[BatchHeader, bytes]]:
        for position, header in iter_headers(self.disk):
            yield header, self.disk[position : position + header.size_bytes]

    def run(self, operation: Callable[..., CoordinatorResult[T]], *arguments: object) -> T | Wait:
        """Runs a method of Ledger. The token is the number of the call."""
        self._tokens += 1
        token = self._tokens
        outcome = self.runtime.run(
            SHARD,
            lambda ledger, context, _: operation(ledger, context, *arguments),
            None,
            OperationContext(self.now_ms, token=token),
        )
        if not isinstance(outcome, DeferredReply):
            return outcome
        outcome.deliver = lambda value: self.answers.append((token, value))
        return WAIT

    def poll(self) -> Ready:
        ready = self.runtime.poll(self.now_ms)
        self.in_flight = ready.appends or self.in_flight
        return ready

    def written(self, ready: Ready) -> list[tuple[object, object]]:
        """Lets the appends of `ready` succeed. Returns the replies that follow."""
        for append in ready.appends:
            self.disk += append.data
            self.runtime.written(append)
        return self.replies(self.poll())

    def fail_write(self, error: OSError) -> None:
        """Ends the append in flight with an unknown outcome."""
        (append,) = self.in_flight
        self.runtime.unknown(append, error, self.now_ms)

    def replies(self, ready: Ready) -> list[tuple[object, object]]:
        """Returns the tokens and values of the replies; for an error, its code."""
        for waiter in ready.replies:
            waiter.settle()
        answers, self.answers = self.answers, []
        return [(token, value.error if isinstance(value, KafkaError) else value) for token, value in answers]
