# SPDX-License-Identifier: Apache-2.0
"""A state of the whole system as a value: what the coordinator's log holds, what each client believes, what is on its
way between them, and how often each thing may still happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.errors import Errors

Partitions: TypeAlias = frozenset[int]
"""Partitions of the one topic there is."""
NOTHING: Partitions = frozenset()

GROUP_ID = "g"
TOPIC = "t"
TOPIC_ID = bytes(range(1, 17))


class Status(IntEnum):
    """The life of a client: OUT until it joins, and again after it has left; a crash is for ever."""

    OUT = 0
    IN = 1
    CRASHED = 2


class ModelRequest(NamedTuple):
    """A heartbeat on its way. `owned` is None where the client does not say; `full` repeats the whole subscription."""

    epoch: int
    full: bool
    owned: Partitions | None


class Response(NamedTuple):
    """An answer on its way; `assignment` is None where the coordinator does not say."""

    error: Errors
    epoch: int
    assignment: Partitions | None


class CheckedClient(NamedTuple):
    """One incarnation of a member. `late` is a request that it no longer waits for, but which may still arrive."""

    status: Status = Status.OUT
    epoch: int = 0
    owned: Partitions = NOTHING
    target: Partitions = NOTHING
    is_full: bool = True
    has_news: bool = False
    claimed: Partitions | None = None
    """What it has said it owns, until a good answer comes."""
    request: ModelRequest | None = None
    response: Response | None = None
    late: ModelRequest | None = None

    @property
    def is_quiet(self) -> bool:
        return self.request is None and self.response is None


class Budget(NamedTuple):
    """How often each thing may still happen."""

    joins: int
    leaves: int
    crashes: int
    losses: int
    expiries: int
    growths: int


class Entry(NamedTuple):
    """The last record of a key; `canon` are its contents as nested tuples without the member's id."""

    record: CoordinatorRecord
    canon: tuple[object, ...]


Log: TypeAlias = Mapping[tuple[str, str], Entry]
"""The compacted log: (record type, member id) -> the last record. The coordinator's state is what it replays to."""


class State(NamedTuple):
    """See the module's text."""

    log: Log
    clients: tuple[CheckedClient, ...]
    partitions: int
    budget: Budget


def member_id(client: int) -> str:
    return f"m{client}"


def fingerprint(state: State, *, symmetric: bool) -> int:
    """A 64-bit hash of the state. With `symmetric`, clients that differ by their ids alone are the same."""
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
