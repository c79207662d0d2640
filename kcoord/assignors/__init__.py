# SPDX-License-Identifier: Apache-2.0
"""Assignors of one's own: the interface of a class that `group.consumer.assignors` names.

The setting takes `package.module:Class`, or the name of an entry point of the group `kcoord.assignors`. Members select
the assignor by its `name`, as they select `uniform` (KIP-848 "Assignor Selection"). The class has no arguments and runs
in a process of its own, so it may take long and may use any library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Assignment: TypeAlias = Mapping[str, Mapping[str, Iterable[int]]]
"""Member id -> topic name -> partitions. A member that is missing gets nothing."""


@dataclass(slots=True, frozen=True)
class Member:
    """A member of the group."""

    instance_id: str | None = None
    """`group.instance.id`; None for a dynamic member."""
    rack_id: str | None = None
    """`client.rack`; None if the member has none."""
    topics: frozenset[str] = frozenset()
    """The existing topics to which the member subscribes, by name or by regular expression."""
    assigned: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The present target assignment: topic name -> partitions."""
    metadata: Mapping[str, bytes] = field(default_factory=dict)
    """The metadata that the member gives to assignors: to the client-side assignors that it has, by name, or as user
    data to those of the classic protocol. Only names with metadata.
    """


@dataclass(slots=True, frozen=True)
class Topic:
    """A topic to which at least one member subscribes."""

    partition_count: int
    racks: Sequence[frozenset[str]] = ()
    """The racks of the replicas, by partition."""


class ServerAssignor(ABC):
    """Computes target assignments of consumer groups.

    It should be a pure function: equal members and topics, in any order, give equal assignments. The broker asks again
    after a restart and after each change of the group, and every difference moves partitions.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which members select the assignor (`group.remote.assignor`)."""

    @abstractmethod
    def assign(self, members: Mapping[str, Member], topics: Mapping[str, Topic]) -> Assignment:
        """Assigns each partition of each topic to exactly one subscriber of the topic.

        The broker keeps the group's present target if the result is anything else, if this method raises an exception,
        or if it takes longer than `kcoord.assignor.timeout.ms`. Then the broker asks again later.
        """


__all__ = ["Assignment", "Member", "ServerAssignor", "Topic"]
