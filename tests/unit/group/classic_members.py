# SPDX-License-Identifier: Apache-2.0
"""Model clients of the classic protocol: each joins, syncs and heartbeats as real consumers do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from kcoord.coordinator.group.classic import consumer_protocol
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    ConsumerProtocolSubscription,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)
from tests.unit.group.group_context import GroupContext, Waiting

T = TypeVar("T")


def answered(reply: T | Waiting) -> T:
    """Returns the response, which must have arrived."""
    answer = reply.answer if isinstance(reply, Waiting) else reply
    assert answer is not None, "still waiting"
    return cast(T, answer)


def subscription(
    topics: Iterable[str], owned: dict[str, list[int]] | None = None, version: int = 3, user_data: bytes = b""
) -> bytes:
    message = ConsumerProtocolSubscription(
        topics=list(topics),
        user_data=user_data or None,
        owned_partitions=[
            ConsumerProtocolSubscription.TopicPartition(topic=topic, partitions=partitions)
            for topic, partitions in (owned or {}).items()
        ],
    )
    return version.to_bytes(2, "big") + message.encode(version)


class ClassicConsumer:
    """One consumer with a client-side assignor; a cooperative one lists its partitions when it joins."""

    def __init__(
        self,
        context: GroupContext,
        group: str,
        name: str,
        topics: Iterable[str],
        *,
        instance: str | None = None,
        cooperative: bool = False,
        version: int = 9,
    ) -> None:
        self.context = context
        self.group = group
        self.name = name
        self.topics = list(topics)
        self.instance = instance
        self.cooperative = cooperative
        self.version = version
        self.member_id = ""
        self.generation = -1
        self.owned: dict[str, list[int]] = {}
        self.joined: JoinGroupResponse | None = None
        self.protocol_type = "consumer"
        self.protocols = ["cooperative-sticky" if cooperative else "range"]
        self.metadata: bytes | None = None
        """The metadata to send instead of the subscription to `topics`."""
        self.user_data = b""
        """The user data of its subscription."""
        self.given = b""
        """The user data of its assignment."""
        self.rebalance_timeout_ms = 60_000
        self.session_timeout_ms = 10_000

    def join(self) -> JoinGroupResponse | Waiting:
        """Sends JoinGroup, and again with the member id if the response requires that."""
        reply = self.join_once()
        if isinstance(reply, JoinGroupResponse) and reply.error_code == 79:
            self.member_id = reply.member_id
            reply = self.join_once()
        return reply

    def join_once(self) -> JoinGroupResponse | Waiting:
        metadata = self.metadata
        if metadata is None:
            metadata = subscription(self.topics, self.owned if self.cooperative else None, user_data=self.user_data)
        request = JoinGroupRequest(
            group_id=self.group,
            session_timeout_ms=self.session_timeout_ms,
            rebalance_timeout_ms=self.rebalance_timeout_ms,
            member_id=self.member_id,
            group_instance_id=self.instance,
            protocol_type=self.protocol_type,
            protocols=[
                JoinGroupRequest.JoinGroupRequestProtocol(name=name, metadata=metadata) for name in self.protocols
            ],
        )
        reply = self.context.run(
            lambda context: self.context.shard.join_group(context, request), self.version, f"c-{self.name}"
        )
        return cast("JoinGroupResponse | Waiting", reply)

    def on_joined(self, reply: JoinGroupResponse | Waiting) -> JoinGroupResponse:
        """Keeps the response: the member id, the generation, and the members if it is the leader."""
        response = answered(reply)
        assert response.error_code == 0, response
        self.member_id, self.generation, self.joined = response.member_id, response.generation_id, response
        return response

    @property
    def leads(self) -> bool:
        return self.joined is not None and self.joined.leader == self.member_id

    def sync(
        self, assignment: dict[str, dict[str, list[int]]] | None = None, user_data: bytes = b""
    ) -> SyncGroupResponse | Waiting:
        """Sends SyncGroup; the leader passes the assignment by member id, and user data for all of them."""
        request = SyncGroupRequest(
            group_id=self.group,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self.instance,
            assignments=[
                SyncGroupRequest.SyncGroupRequestAssignment(
                    member_id=member_id, assignment=consumer_protocol.write_assignment(topics, 3, user_data)
                )
                for member_id, topics in (assignment or {}).items()
            ],
        )
        reply = self.context.run(lambda context: self.context.shard.sync_group(context, request), 5)
        return cast("SyncGroupResponse | Waiting", reply)

    def on_synced(self, reply: SyncGroupResponse | Waiting) -> dict[str, list[int]]:
        response = answered(reply)
        assert response.error_code == 0, response
        assignment = consumer_protocol.read_assignment(response.assignment)
        assert assignment is not None
        self.owned = {topic.topic: topic.partitions for topic in assignment.assigned_partitions}
        self.given = assignment.user_data or b""
        return self.owned

    def heartbeat(self) -> int:
        request = HeartbeatRequest(
            group_id=self.group,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self.instance,
        )
        try:
            return int(self.context.run(lambda context: self.context.shard.heartbeat(context, request), 4).error_code)
        except KafkaError as error:
            return error.error

    def leave(self) -> list[int]:
        request = LeaveGroupRequest(
            group_id=self.group,
            members=[LeaveGroupRequest.MemberIdentity(member_id=self.member_id, group_instance_id=self.instance)],
        )
        response = self.context.run(lambda context: self.context.shard.leave_group(context, request), 5)
        assert isinstance(response, LeaveGroupResponse)
        return [member.error_code for member in response.members]


def settle(
    context: GroupContext, members: list[ClassicConsumer], counts: dict[str, int], user_data: bytes = b""
) -> None:
    """Lets all members join, new ones first, and sync. The leader assigns the partitions of each topic in turn.

    It gives `user_data` to each member.
    """
    replies = [(member, member.join()) for member in sorted(members, key=lambda member: member.member_id != "")]
    context.sleep(0)
    for member, reply in replies:
        member.on_joined(reply)
    plan: dict[str, dict[str, list[int]]] = {member.member_id: {} for member in members}
    for topic, count in counts.items():
        takers = [member for member in members if topic in member.topics]
        for partition in range(count):
            plan[takers[partition % len(takers)].member_id].setdefault(topic, []).append(partition)
    waiting = [(member, member.sync(plan if member.leads else None, user_data)) for member in members]
    for member, synced in waiting:
        member.on_synced(synced)
