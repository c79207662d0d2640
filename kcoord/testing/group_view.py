# SPDX-License-Identifier: Apache-2.0
"""A group as tests see it: plain data that converts to JSON and back. A missing group is Dead and empty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kcoord.client import ConsumerGroupDescription, MemberDescription, TopicPartition

DEAD: Final = "Dead"

Assignment = dict[str, list[int]]
"""Topic -> partitions in ascending order."""


@dataclass(slots=True, frozen=True)
class Member:
    """A member of a group. `epoch` and `target_assignment` are None in classic groups."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    epoch: int | None
    assignment: Assignment
    target_assignment: Assignment | None


@dataclass(slots=True, frozen=True)
class Group:
    """A group. `epoch`, `target_epoch` and `creation_time_ms` are None for classic groups.

    `computing_member` is the id of the member that computes the next target assignment with a client-side assignor.
    """

    group_id: str
    type: str = ""
    state: str = DEAD
    protocol_type: str = ""
    assignor: str = ""
    epoch: int | None = None
    target_epoch: int | None = None
    creation_time_ms: int | None = None
    computing_member: str | None = None
    members: list[Member] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Returns the group as the control's JSON shows it."""
        return asdict(self)

    def __str__(self) -> str:
        if self.state == DEAD and not self.members:
            return f"group {self.group_id} is Dead, or does not exist"
        owned = "; ".join(
            f"{member.client_id or member.member_id} has {_text(member.assignment)}" for member in self.members
        )
        return f"group {self.group_id} is {self.state} with {len(self.members)} members{': ' if owned else ''}{owned}"


def _text(assignment: Assignment) -> str:
    return (
        " ".join(f"{topic}:{','.join(map(str, partitions))}" for topic, partitions in assignment.items()) or "nothing"
    )


def group_from_json(document: Mapping[str, Any]) -> Group:
    return Group(**{**document, "members": [Member(**member) for member in document["members"]]})


def group_from_description(description: ConsumerGroupDescription) -> Group:
    return Group(
        description.group_id,
        description.group_type,
        description.state,
        description.protocol_type,
        description.assignor,
        description.group_epoch,
        description.target_assignment_epoch,
        description.group_creation_time_ms,
        description.computing_member_id,
        [_member(member) for member in sorted(description.members, key=lambda member: member.member_id)],
    )


def _member(member: MemberDescription) -> Member:
    target = member.target_assignment
    return Member(
        member.member_id,
        member.group_instance_id,
        member.client_id,
        member.host,
        member.member_epoch,
        by_topic(member.assignment),
        None if target is None else by_topic(target),
    )


def by_topic(partitions: Iterable[TopicPartition]) -> Assignment:
    topics: Assignment = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    return topics
