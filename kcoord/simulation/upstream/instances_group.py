# SPDX-License-Identifier: Apache-2.0
"""A classic group of an upstream as a model: the coordinator of Apache Kafka, reduced to static members.

Requests are those of `kcoord.runtime.upstream_membership`. Answers are passed to callables, now or later: an exception,
or what the request returns. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from kcoord.runtime.upstream_membership import Heartbeat, JoinGroup, LeaveGroup, Request
from kcoord_protocol.errors import Errors, KafkaError

GroupAnswer: TypeAlias = Callable[[object], None]


@dataclass
class InstanceMember:
    """A member as the group has it. `answer` is that of its parked JoinGroup or SyncGroup."""

    member_id: str
    metadata: bytes
    deadline_ms: float
    has_joined: bool = False
    answer: GroupAnswer | None = None


class InstancesGroup:
    """The coordinator's side. The module docstring describes the answers."""

    def __init__(self, session_timeout_ms: int) -> None:
        self._session_timeout_ms = session_timeout_ms
        self.members: dict[int, InstanceMember] = {}
        self.generation = 0
        self.state = "Empty"
        self.leader = ""
        self.assignments: dict[str, bytes] = {}
        self._numbers = count()

    def handle(self, node_id: int, request: Request, answer: GroupAnswer, now_ms: int) -> None:
        member = self.members.get(node_id)
        if isinstance(request, JoinGroup):
            self._join(node_id, request, answer, now_ms)
            return
        if member is None:
            answer(KafkaError(Errors.UNKNOWN_MEMBER_ID))
        elif member.member_id != request.member_id:
            answer(KafkaError(Errors.FENCED_INSTANCE_ID))
        elif isinstance(request, LeaveGroup):
            self._remove(node_id)
            answer(None)
        elif request.generation != self.generation:
            answer(KafkaError(Errors.ILLEGAL_GENERATION))
        elif isinstance(request, Heartbeat):
            member.deadline_ms = now_ms + self._session_timeout_ms
            answer(self.state == "Preparing")
        elif self.state == "Preparing":
            answer(KafkaError(Errors.REBALANCE_IN_PROGRESS))
        else:
            member.deadline_ms = now_ms + self._session_timeout_ms
            member.answer = answer
            if request.assignments:
                self.assignments = dict(request.assignments)
                self.state = "Stable"
            self._answer_syncs(now_ms)

    def _join(self, node_id: int, request: JoinGroup, answer: GroupAnswer, now_ms: int) -> None:
        member = self.members.get(node_id)
        if request.member_id and (member is None or member.member_id != request.member_id):
            answer(KafkaError(Errors.UNKNOWN_MEMBER_ID if member is None else Errors.FENCED_INSTANCE_ID))
            return
        is_replaced = member is not None and not request.member_id
        if member is None or is_replaced:
            if member is not None and member.answer is not None:
                member.answer(KafkaError(Errors.FENCED_INSTANCE_ID))
            old = self.members.get(node_id)
            member = InstanceMember(f"{node_id}-{next(self._numbers)}", request.metadata, 0)
            self.members[node_id] = member
            if old is not None:
                self.leader = member.member_id if self.leader == old.member_id else self.leader
                self.assignments[member.member_id] = self.assignments.pop(old.member_id, b"")
        is_changed = member.metadata != request.metadata
        member.metadata = request.metadata
        member.deadline_ms = now_ms + self._session_timeout_ms
        if self.state == "Stable" and (is_replaced or (not is_changed and member.member_id != self.leader)):
            answer((member.member_id, self.generation, None))
            return
        member.answer, member.has_joined = answer, True
        if self.state != "Preparing":
            self._rebalance()
            member.answer, member.has_joined = answer, True
        self._complete(now_ms)

    def _rebalance(self) -> None:
        self.state = "Preparing"
        for member in self.members.values():
            if member.answer is not None and not member.has_joined:
                member.answer(KafkaError(Errors.REBALANCE_IN_PROGRESS))
                member.answer = None

    def _complete(self, now_ms: int) -> None:
        if self.state != "Preparing" or not all(member.has_joined for member in self.members.values()):
            return
        self.generation += 1
        self.state = "Completing" if self.members else "Empty"
        ids = [member.member_id for member in self.members.values()]
        self.leader = self.leader if self.leader in ids else next(iter(ids), "")
        metadata = {member.member_id: member.metadata for member in self.members.values()}
        for member in self.members.values():
            answer, member.answer, member.has_joined = member.answer, None, False
            member.deadline_ms = now_ms + self._session_timeout_ms
            assert answer is not None
            answer((member.member_id, self.generation, metadata if member.member_id == self.leader else None))

    def _answer_syncs(self, now_ms: int) -> None:
        if self.state != "Stable":
            return
        for member in self.members.values():
            if member.answer is not None:
                answer, member.answer = member.answer, None
                member.deadline_ms = now_ms + self._session_timeout_ms
                answer(self.assignments.get(member.member_id, b""))

    def _remove(self, node_id: int) -> None:
        del self.members[node_id]
        if self.state != "Preparing":
            self._rebalance()
        if not self.members:
            self.state = "Empty"

    def tick(self, now_ms: int) -> None:
        for node_id, member in list(self.members.items()):
            if now_ms >= member.deadline_ms and member.answer is None:
                self._remove(node_id)
        self._complete(now_ms)
