# SPDX-License-Identifier: Apache-2.0
"""The state of the whole system as a value."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.errors import Errors

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
    """A response under way. `assignment` is None if the response has none."""

    error: Errors
    epoch: int
    assignment: Partitions | None


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


class Budget(NamedTuple):
    """How often each event may still happen."""

    joins: int
    leaves: int
    crashes: int
    losses: int
    expiries: int
    growths: int


class Entry(NamedTuple):
    """The last record of a key. `canon` is its content as nested tuples, without the member's id."""

    record: CoordinatorRecord
    canon: tuple[object, ...]


Log: TypeAlias = Mapping[tuple[str, str], Entry]
"""The compacted log: the last record by record type and member id. The coordinator's state is what it replays to."""


class State(NamedTuple):
    """The coordinator's log, the clients with their messages under way, and how often each event may still happen."""

    log: Log
    clients: tuple[CheckedClient, ...]
    partitions: int
    budget: Budget


def member_id(client: int) -> str:
    return f"m{client}"


def fingerprint(state: State, *, symmetric: bool) -> int:
    """Returns a 64-bit hash of the state. With `symmetric`, states that differ only by member ids have the same."""
    log = state.log
    members = []
    for number, client in enumerate(state.clients):
        name = member_id(number)
        entries = tuple(entry.canon if (entry := log.get((kind, name))) else () for kind in MEMBER_RECORDS)
        members.append((hash(client), hash(entries)))
    if symmetric:
        members.sort()
    shared = tuple(entry.canon if (entry := log.get((kind, ""))) else () for kind in GROUP_RECORDS)
    return hash((tuple(members), shared, state.partitions, state.budget))


GROUP_RECORDS = ("ConsumerGroupMetadataKey", "ConsumerGroupTargetAssignmentMetadataKey")
MEMBER_RECORDS = (
    "ConsumerGroupMemberMetadataKey",
    "ConsumerGroupTargetAssignmentMemberKey",
    "ConsumerGroupCurrentMemberAssignmentKey",
)
