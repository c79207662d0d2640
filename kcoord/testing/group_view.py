# SPDX-License-Identifier: Apache-2.0
"""A group as a test sees it, as data that goes through JSON and back. A group that does not exist is Dead and empty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kcoord.client import ConsumerGroupDescription, MemberDescription, TopicPartition

DEAD: Final = "Dead"

Assignment = dict[str, list[int]]
"""Topic -> partitions in order."""


@dataclass(slots=True, frozen=True)
class Member:
    """A member. Epoch and target are None in classic groups."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    epoch: int | None
    assignment: Assignment
    target_assignment: Assignment | None


@dataclass(slots=True, frozen=True)
class Group:
    """A group. What only the consumer protocol has is None for classic groups."""

    group_id: str
    type: str = ""
    state: str = DEAD
    protocol_type: str = ""
    assignor: str = ""
    epoch: int | None = None
    target_epoch: int | None = None
    creation_time_ms: int | None = None
    members: list[Member] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        if self.state == DEAD and not self.members:
            return f"group {self.group_id} is Dead, or does not exist"
        owned = "; ".join(f"{one.client_id or one.member_id} has {_text(one.assignment)}" for one in self.members)
        return f"group {self.group_id} is {self.state} with {len(self.members)} members{': ' if owned else ''}{owned}"


def _text(assignment: Assignment) -> str:
    return (
        " ".join(f"{topic}:{','.join(map(str, partitions))}" for topic, partitions in assignment.items()) or "nothing"
    )


def group_from_json(document: Mapping[str, Any]) -> Group:
    return Group(**{**document, "members": [Member(**one) for one in document["members"]]})


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
        [_member(one) for one in sorted(description.members, key=lambda one: one.member_id)],
    )


def _member(one: MemberDescription) -> Member:
    target = one.target_assignment
    return Member(
        one.member_id,
        one.group_instance_id,
        one.client_id,
        one.host,
        one.member_epoch,
        by_topic(one.assignment),
        None if target is None else by_topic(target),
    )


def by_topic(partitions: Iterable[TopicPartition]) -> Assignment:
    topics: Assignment = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    return topics
