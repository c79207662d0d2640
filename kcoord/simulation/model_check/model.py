# SPDX-License-Identifier: Apache-2.0
"""The state of the whole system as a value."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from kcoord.coordinator.group.consumer.client_assignors import ClientComputation
from kcoord.coordinator.group.consumer.client_computation import InstallAssignment
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import ConsumerGroupTargetAssignmentMetadataValue

Partitions: TypeAlias = frozenset[int]
"""Partitions of the only topic."""
NOTHING: Partitions = frozenset()

GROUP_ID = "g"
TOPIC = "t"
TOPIC_ID = bytes(range(1, 17))


class Status(IntEnum):
    """The status of a client: OUT before it joins and after it has left. A crashed client never returns."""

    OUT = 0
    IN = 1
    CRASHED = 2


class ModelRequest(NamedTuple):
    """A heartbeat under way. `owned` is None if it does not name partitions; `full` repeats the subscription."""

    epoch: int
    full: bool
    owned: Partitions | None


class Response(NamedTuple):
    """A response under way. `assignment` is None if the response has none; `is_asked` if the client has to compute."""

    error: Errors
    epoch: int
    assignment: Partitions | None
    is_asked: bool = False


class CheckedClient(NamedTuple):
    """One incarnation of a member. `late` is a request whose response it ignores, and which may still arrive."""

    status: Status = Status.OUT
    epoch: int = 0
    owned: Partitions = NOTHING
    target: Partitions = NOTHING
    is_full: bool = True
    has_news: bool = False
    claimed: Partitions | None = None
    """The partitions that its last heartbeat named, until a successful response arrives."""
    request: ModelRequest | None = None
    response: Response | None = None
    late: ModelRequest | None = None

    @property
    def is_quiet(self) -> bool:
        return self.request is None and self.response is None


class ModelAssignor(IntEnum):
    """The client-side assignor of a client, if its group uses such assignors."""

    NONE = 0
    """The client has none, so that the coordinator computes while it is a member."""
    GOOD = 1
    BAD = 2
    """What it computes is never valid, and it may compute nothing."""


class ModelOutcome(IntEnum):
    """What an assignor has computed."""

    VALID = 0
    INVALID = 1
    FAILED = 2


class Prepared(NamedTuple):
    """The response to PrepareAssignment. `members` says for each client whether it was a member."""

    group_epoch: int
    partitions: int
    members: tuple[bool, ...]


class Install(NamedTuple):
    """An InstallAssignment under way, with the epoch of its member."""

    epoch: int
    prepared: Prepared
    outcome: ModelOutcome


class AcceptedInstall(NamedTuple):
    """An InstallAssignment that the coordinator has accepted. `work` is the task that checks it."""

    install: Install
    work: InstallAssignment


class Duty(NamedTuple):
    """What a client computes for its group.

    It is asked if the last response said so. With `prepared` but not asked it waits for the next response. Its requests
    stay under way if the client leaves.
    """

    is_asked: bool = False
    prepared: Prepared | None = None
    install: Install | None = None
    check: AcceptedInstall | None = None


class ModelComputation(NamedTuple):
    """The coordinator's soft state about client-side assignors.

    No step changes `live`, an object of the real state machine. `has_deadline` is True if its timer is armed.
    """

    live: ClientComputation | None = None
    has_deadline: bool = False


class Budget(NamedTuple):
    """How often each event may still happen. The last two need client-side assignors."""

    joins: int
    leaves: int
    crashes: int
    losses: int
    expiries: int
    growths: int
    failovers: int = 0
    failures: int = 0


class Entry(NamedTuple):
    """The last record of a key. `canon` is its content as nested tuples, without the member's id."""

    record: CoordinatorRecord
    canon: tuple[object, ...]


Log: TypeAlias = Mapping[tuple[str, str], Entry]
"""The compacted log: the last record by record type and member id. The coordinator's state is what it replays to."""


class State(NamedTuple):
    """The coordinator's log, the clients with their messages under way, and how often each event may still happen.

    If the group uses client-side assignors, `assignors` and `duties` have an entry for each client.
    """

    log: Log
    clients: tuple[CheckedClient, ...]
    partitions: int
    budget: Budget
    assignors: tuple[ModelAssignor, ...] = ()
    duties: tuple[Duty, ...] = ()
    computation: ModelComputation = ModelComputation()


class Step(NamedTuple):
    """A step: its action, the number of its client (-1 for none), and the state after it.

    A fair step spends no budget: it is no fault, join, leave or growth. Fair steps alone have to lead to convergence.
    `error` is that of the response to InstallAssignment.
    """

    action: str
    client: int
    is_fair: bool
    state: State
    error: Errors = Errors.NONE


def spent(budget: Budget, name: str) -> Budget:
    return budget._replace(**{name: getattr(budget, name) - 1})


def member_id(client: int) -> str:
    return f"m{client}"


def assigned_by(log: Log) -> str:
    """Returns the id of the member that has computed the target; empty if the coordinator did."""
    entry = log.get((GROUP_RECORDS[1], ""))
    value = entry.record.value if entry is not None else None
    return value.assigned_by if isinstance(value, ConsumerGroupTargetAssignmentMetadataValue) else ""


GROUP_RECORDS = ("ConsumerGroupMetadataKey", "ConsumerGroupTargetAssignmentMetadataKey")
MEMBER_RECORDS = (
    "ConsumerGroupMemberMetadataKey",
    "ConsumerGroupTargetAssignmentMemberKey",
    "ConsumerGroupCurrentMemberAssignmentKey",
)
