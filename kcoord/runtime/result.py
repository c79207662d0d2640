# SPDX-License-Identifier: Apache-2.0
"""The contract between a replicated state machine and its runtime: contexts, results, records, timers and tasks.

An operation reads the state and returns a CoordinatorResult. Only `StateMachine.replay` of the result's records changes
the state that the log has to rebuild. Effects (timers, background tasks, completions of earlier requests) are plain
data, so that they can be compared, printed and replayed. `kcoord.runtime.shard_set` describes the order of all this.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from kcoord_protocol.control_records import ControlRecordType
from kcoord_protocol.messages import ControlRecordTypeSchema, EndTxnMarker, Message

T = TypeVar("T")

DescribableTopics: TypeAlias = Callable[[Iterable[str]], set[str]]
"""Returns those of the topics that a client may describe. It is called in a thread."""

MAX_BATCH_BYTES: Final = 1_048_588
"""The maximum size of a result's records in the log: Kafka's default of `message.max.bytes`."""

MAX_GROUP_BYTES: Final = 64 * 1024 * 1024
"""The maximum size of a result that depends on a whole group or on all partitions, or of a timer, task or load."""

NO_CREATION_LIMIT: Final = 2**63 - 1
"""A new group may have any creation time."""


class Producer(NamedTuple):
    """Id and epoch of a transactional producer, as in the header of a record batch."""

    producer_id: int
    producer_epoch: int


@dataclass(slots=True)
class CoordinatorRecord:
    """One record of a state machine's log.

    If `value` is None, the record is a tombstone. `key` is None only in the metadata log. `value` is written in version
    `value_version`. `reason` is the reason for a tombstone, and `principal` is the client that asked for it; both are
    stored in record headers. Replay uses the reason for metrics only, and the principal not at all. A record with a
    `producer` is part of that producer's transaction and counts once the transaction is committed. The transaction's
    marker has the same producer.
    """

    key: Message | None
    value: Message | None
    value_version: int = 0
    producer: Producer | None = None
    reason: str = ""
    principal: str = ""
    ticket: int = 0
    """The ticket of a provisional record (`Provisional`), otherwise 0."""

    @property
    def is_control(self) -> bool:
        """True if the record is written as a control record."""
        return type(self.key) is ControlRecordTypeSchema


def new_end_transaction_marker(producer: Producer, coordinator_epoch: int, *, committed: bool) -> CoordinatorRecord:
    """Returns the control record that ends the producer's transaction in one log. Its result has no other record."""
    control_type = ControlRecordType.COMMIT if committed else ControlRecordType.ABORT
    key = ControlRecordTypeSchema(type=control_type)
    return CoordinatorRecord(key, EndTxnMarker(coordinator_epoch=coordinator_epoch), 0, producer)


class TimerKind(StrEnum):
    """The kinds of timers and tasks of one state machine. Every state machine has its own subclass.

    Members are strings, because Python hashes a string without calling Python code.
    """


class TimerKey(NamedTuple):
    """Names one timer or task of a state machine. Arming a timer again replaces its deadline."""

    kind: TimerKind
    group_id: str = ""
    member_id: str = ""


@dataclass(slots=True)
class Schedule:
    """Arms or re-arms the timer `key`. It fires as `StateMachine.fire_timer` at or after `deadline_ms`."""

    key: TimerKey
    deadline_ms: int


@dataclass(slots=True)
class Cancel:
    """Disarms the timer `key`, if it is armed."""

    key: TimerKey


@dataclass(slots=True)
class MemberTimers:
    """Arms or re-arms a timer for each of many members of a group, like a Schedule for each, and costs less."""

    kind: TimerKind
    group_id: str
    deadlines_ms: dict[str, int]
    """The deadlines by member id."""


TimerEffect: TypeAlias = Schedule | Cancel | MemberTimers


@dataclass(slots=True)
class Task:
    """Background work outside the state machine. Its outcome is passed to `StateMachine.complete_task`.

    A task is dropped if another task with its key is running. With `when_durable` it starts only when the records of
    its result are durable.
    """

    key: TimerKey
    work: object
    when_durable: bool = False


@dataclass(slots=True)
class Completion:
    """The response to an earlier request whose result was PENDING. `token` is the token of that request's context."""

    token: Hashable
    response: object


class Pending:
    """The response of an operation that is answered later, by a Completion in another result."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "PENDING"


PENDING: Final = Pending()


@dataclass(slots=True)
class OperationContext:
    """What an operation needs besides state and request: the time, identifiers, and facts about the client."""

    now_ms: int
    api_version: int = 0
    client_id: str = ""
    client_host: str = ""
    principal: str = ""
    """The principal of the client; empty if the broker itself needs the operation."""
    candidate_id: str = ""
    """A fresh random identifier (22 characters of URL-safe base64) that an operation may use, for example as member id.
    """
    token: Hashable = None
    """Identifies this request in a Completion. Unique among the requests in flight."""
    creation_limit_ms: int = NO_CREATION_LIMIT
    """The latest creation time that a new group may have (KIP-1327, `group.creation_limits`)."""
    describable: DescribableTopics | None = field(default=None, compare=False, repr=False)
    """The topics that a regular expression of the client may match; None if it may match all topics."""
    count_partitions: Callable[[int], None] | None = field(default=None, compare=False, repr=False)
    """Counts the partitions of a topic that is changed against the quota of the client; None if it has no quota.

    Raises KafkaError if the quota forbids the change.
    """


class Provisional(NamedTuple):
    """Says that the log may refuse the records of a result, which are part of a transaction, without any harm.

    All records have the ticket. Replay makes them provisional. The log then decides about them, and the machine keeps
    or drops them (`HasProvisionalRecords.decide`).
    """

    transactional_id: str
    ticket: int


@dataclass(slots=True)
class EncodedRecords:
    """Records that a thread has already encoded for the log."""

    count: int
    """The number of records."""
    body: bytes
    """The records as `kcoord_protocol.record_batch.encode_records` encodes them."""
    replay: Callable[[], None]
    """Changes the state machine exactly as replaying the records one by one does."""


@dataclass(slots=True)
class CoordinatorResult(Generic[T]):
    """The response of an operation, the records to append, and effects, all as data.

    The records are appended atomically unless `is_atomic` is False.

    Either all records are part of the same transaction, or no record is part of a transaction.
    """

    response: T
    records: list[CoordinatorRecord] = field(default_factory=list)
    timers: list[TimerEffect] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    bulk_completions: list[Iterator[Completion]] = field(default_factory=list)
    """Completions for all members of a group, which are made a few at a time in several turns of the event loop.

    Other operations run between these turns. So an iterator must not read any state that can change.
    """
    encoded: EncodedRecords | None = None
    """Records that precede `records` in the same batch. The result is atomic and `records` is not empty then."""
    provisional: Provisional | None = None
    is_refusable: bool = False
    """True if the result can be dropped when its records cannot be written, because only replay and the effects above
    change the state. Operations on classic groups also change the state directly, so they are not refusable.
    """
    is_of_group: bool = False
    """True if the size of the records depends on a whole group, so that they may have up to MAX_GROUP_BYTES.

    They are one batch even if the targets of all members of a large group change, one member gets all partitions, or
    the group is converted. Kafka's limit applies to results whose size depends on the request alone.
    """
    is_atomic: bool = True
    """False if the records may be in several batches, so that a crash may lose the last ones. They are not limited in
    number. They have no producer.
    """


class PackedRecords(Protocol):
    """The records and the timer of a frequent kind of result, encoded for the log. The runtime never decodes them.

    The contract of CoordinatorRecord holds: `encode_records` returns the bytes of the records, and `replay` changes the
    state machine exactly as replaying them one by one does.
    """

    @property
    def count(self) -> int:
        """The number of records."""
        ...

    @property
    def timestamp_ms(self) -> int: ...

    @property
    def timer(self) -> Schedule | None: ...

    def encode_records(self, first_delta: int) -> bytes:
        """Encodes the records for a batch that already has `first_delta` records."""
        ...

    def replay(self) -> None: ...


class StateMachine(Protocol):
    """The state behind the log of one shard. The runtime calls it, and calls are never concurrent.

    `replay` applies a record without checking or deciding anything. It accepts logs from which compaction has removed
    any superseded records.
    """

    def replay(self, record: CoordinatorRecord) -> None: ...

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        """Arms the timers and starts the tasks of the loaded state. Called once, after all records were replayed."""

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        """Handles a timer that has reached its deadline. The timer is already disarmed."""

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        """Handles the end of a task. `value` is its result, or the exception with which it failed."""


@runtime_checkable
class HasProvisionalRecords(Protocol):
    """A state machine whose log may be in the upstream, and which has records in transactions."""

    def decide(self, ticket: int, *, accepted: bool) -> None:
        """Makes the provisional records with the ticket part of their transaction, or drops them."""

    def rewrite(self, context: OperationContext, keys: Iterable[Message]) -> CoordinatorResult[None]:
        """Returns records with the present values of these keys.

        Leaves out keys with records of an open transaction. It is called again when a transaction has ended.
        """
