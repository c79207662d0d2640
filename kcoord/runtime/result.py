# SPDX-License-Identifier: Apache-2.0
"""What an operation on a replicated state machine takes and gives: the contract between the pure core and its runtime.

An operation reads state and returns a CoordinatorResult; `replay` of the result's records is the only thing that
changes hard state. Effects (timers, background tasks, completions of earlier requests) are plain data, so that they
can be compared, printed and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from kcoord_protocol.control_records import ControlRecordType
from kcoord_protocol.messages import ControlRecordTypeSchema, EndTxnMarker, Message

T = TypeVar("T")

MAX_BATCH_BYTES: Final = 1_048_588
"""The most that the records of a result may take in the log: Kafka's default of `message.max.bytes`."""


NO_CREATION_LIMIT: Final = 2**63 - 1


class Producer(NamedTuple):
    """A transactional producer, as record batches name it."""

    producer_id: int
    producer_epoch: int


@dataclass(slots=True)
class CoordinatorRecord:
    """One record of a state machine's log; `value` None is a tombstone, `key` None is usual in the metadata log alone.

    `value_version` is the version in which `value` is written. `reason` says, in a record header, why a tombstone was
    written; replay uses it for metrics only. A record with a `producer` is part of that producer's
    transaction: it counts once the transaction's marker, itself such a record, says that it was committed.
    """

    key: Message | None
    value: Message | None
    value_version: int = 0
    producer: Producer | None = None
    reason: str = ""
    serialized: tuple[bytes | None, bytes | None] | None = field(default=None, compare=False, repr=False)
    """Key and value in bytes, where a background task has made them already."""

    @property
    def is_control(self) -> bool:
        """Whether it is written as a control record."""
        return type(self.key) is ControlRecordTypeSchema


def new_end_transaction_marker(producer: Producer, coordinator_epoch: int, *, committed: bool) -> CoordinatorRecord:
    """The control record that ends the producer's transaction in one log; it is the only record of its result."""
    control_type = ControlRecordType.COMMIT if committed else ControlRecordType.ABORT
    key = ControlRecordTypeSchema(type=control_type)
    return CoordinatorRecord(key, EndTxnMarker(coordinator_epoch=coordinator_epoch), 0, producer)


class TimerKind(StrEnum):
    """The kinds of timers and tasks of one state machine: each lists its own in a subclass.

    Members are strings, so that keys with them are hashed without a call of Python.
    """


class TimerKey(NamedTuple):
    """Names one timer of a state machine. Arming the same key again replaces its deadline."""

    kind: TimerKind
    group_id: str = ""
    member_id: str = ""


@dataclass(slots=True)
class Schedule:
    """Arm (or re-arm) the timer `key`; it fires as `StateMachine.fire_timer` at or after `deadline_ms`."""

    key: TimerKey
    deadline_ms: int


@dataclass(slots=True)
class Cancel:
    """Disarm the timer `key`; nothing happens where it is not armed."""

    key: TimerKey


@dataclass(slots=True)
class Task:
    """Background work outside the state machine. Its value comes back as `StateMachine.complete_task`.

    A task with the key of a running one is not started again. `when_durable` holds it back until the records of its
    result are on disk.
    """

    key: TimerKey
    work: object
    when_durable: bool = False


@dataclass(slots=True)
class Completion:
    """Answers an earlier request whose own result was PENDING; `token` is the `OperationContext.token` of that
    request.
    """

    token: Hashable
    response: object


class Pending:
    """The response of an operation whose answer a later result's Completion will give."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "PENDING"


PENDING: Final = Pending()


@dataclass(slots=True)
class OperationContext:
    """Everything an operation needs besides state and request: the shell's clock, identifiers and facts about the
    caller.
    """

    now_ms: int
    api_version: int = 0
    client_id: str = ""
    client_host: str = ""
    candidate_id: str = ""
    """A fresh random identifier (22 characters of URL-safe base64) that an operation may use, for example as a
    member id.
    """
    token: Hashable = None
    """What a Completion of this request must name; unique among the requests under way."""
    creation_limit_ms: int = NO_CREATION_LIMIT
    """The latest creation time that a new group may have (KIP-1327, `group.creation_limits`)."""


@dataclass(slots=True)
class EncodedRecords:
    """Records of a task's outcome, already in the form of the log. `replay` changes the state machine just as the
    replay of each of them would.
    """

    count: int
    body: bytes
    """As `kcoord_protocol.record_batch.encode_records` makes it."""
    replay: Callable[[], None]


@dataclass(slots=True)
class CoordinatorResult(Generic[T]):
    """Records to append atomically, the response, and effects, all as data. Either all records are part of the same
    transaction or none is part of any.
    """

    response: T
    records: list[CoordinatorRecord] = field(default_factory=list)
    timers: list[Schedule | Cancel] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    encoded: EncodedRecords | None = None
    """Records that come before `records`, in the same batch; only the end of a task gives such, never without others.
    """
    is_refusable: bool = False
    """Whether the result can be dropped where its records cannot be written: nothing but their replay, and the effects
    above, would have changed the state. Operations on classic groups do more than that.
    """


class PackedRecords(Protocol):
    """The records and timers of a common result in the bytes of the log: a runtime appends them without looking inside.

    The same contract as with CoordinatorRecord: `encode_records` gives what the result stands for, and `replay` changes
    the state machine just as its replay would. `count` is the number of records.
    """

    @property
    def count(self) -> int: ...

    @property
    def timestamp_ms(self) -> int: ...

    @property
    def timer(self) -> Schedule | None: ...

    def encode_records(self, first_delta: int) -> bytes:
        """For a batch that has so many records already."""
        ...

    def replay(self) -> None: ...


class StateMachine(Protocol):
    """What the runtime drives. `replay` decides nothing and never fails on what compaction removed."""

    def replay(self, record: CoordinatorRecord) -> None: ...

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        """Called once after all records were replayed: arms the timers and starts the tasks of the state that was
        found.
        """

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        """A timer reached its deadline (and is disarmed now)."""

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        """A task ended with `value`, or failed with an exception as `value`."""
