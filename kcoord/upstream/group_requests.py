# SPDX-License-Identifier: Apache-2.0
"""Sends the requests of an instance to the coordinator of the instances' group in the upstream.

JoinGroup and SyncGroup may wait for other members, and a Kafka broker handles one request of a connection at a time. So
heartbeats have a connection of their own.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final, TypeAlias, TypeVar

from kcoord.client.cluster import COORDINATOR_MOVED, Cluster, CoordinatorType, Purpose
from kcoord.client.config import CommonConfig
from kcoord.client.results import error_of
from kcoord.client.types import Node
from kcoord.runtime.upstream_membership import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from kcoord.upstream.rights import naming_right
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    Message,
    SyncGroupRequest,
    SyncGroupResponse,
)

PROTOCOL_TYPE: Final = "kcoord"
PROTOCOL: Final = "sticky"
"""The only assignor. Another name would be a rebalance that instances of this release cannot take part in."""
JOIN_MARGIN_MS: Final = 10_000
"""The upstream delays the first rebalance of an empty group (group.initial.rebalance.delay.ms)."""
_ATTEMPTS_PER_SESSION: Final = 3
_LONGEST_RECONNECT_MS: Final = 200
_FIRST_JOIN_WITH_INSTANCE_ID: Final = 5
_FIRST_WITH_INSTANCE_ID: Final = 3

Response = TypeVar("Response", JoinGroupResponse, SyncGroupResponse, HeartbeatResponse, LeaveGroupResponse)
Joined: TypeAlias = tuple[str, int, dict[str, bytes] | None]
"""Member id, generation, and for the leader the metadata of all members."""


class GroupRequests:
    """Requests of one member. A request is sent once, and fails with KafkaError.

    A request that is not answered within a third of the session fails. So two attempts fit in before the lease ends.
    """

    def __init__(self, settings: CommonConfig, group_id: str, node_id: int, session_timeout_ms: int) -> None:
        self._attempt_ms = session_timeout_ms // _ATTEMPTS_PER_SESSION
        # A lookup has to fail before the attempt that it is part of. Only then is its connection given up.
        lookup_ms = self._attempt_ms // 2
        self._cluster = Cluster(
            replace(
                settings,
                request_timeout_ms=lookup_ms,
                socket_connection_setup_timeout_ms=lookup_ms,
                reconnect_backoff_max_ms=_LONGEST_RECONNECT_MS,
            )
        )
        self._group_id = group_id
        self._instance_id = str(node_id)
        self._session_timeout_ms = session_timeout_ms

    async def start(self) -> None:
        """Finds the brokers of the upstream, so that the coordinator is found if `bootstrap.servers` are down."""
        await self._cluster.start(self._cluster.deadline())
        self._cluster.keep_metadata_fresh()

    async def close(self) -> None:
        await self._cluster.close()

    async def join(self, request: JoinGroup) -> Joined:
        message = JoinGroupRequest(
            group_id=self._group_id,
            session_timeout_ms=self._session_timeout_ms,
            rebalance_timeout_ms=self._session_timeout_ms,
            member_id=request.member_id,
            group_instance_id=self._instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name=PROTOCOL, metadata=request.metadata)],
        )
        timeout_ms = self._session_timeout_ms + JOIN_MARGIN_MS
        answer = await self._call(
            Purpose.FETCHES, message, JoinGroupResponse, _FIRST_JOIN_WITH_INSTANCE_ID, timeout_ms=timeout_ms
        )
        is_leader = answer.leader == answer.member_id and not answer.skip_assignment
        members = {member.member_id: member.metadata for member in answer.members}
        return answer.member_id, answer.generation_id, members if is_leader and members else None

    async def sync(self, request: SyncGroup) -> bytes:
        message = SyncGroupRequest(
            group_id=self._group_id,
            generation_id=request.generation,
            member_id=request.member_id,
            group_instance_id=self._instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=PROTOCOL,
            assignments=[
                SyncGroupRequest.SyncGroupRequestAssignment(member_id=member_id, assignment=assignment)
                for member_id, assignment in request.assignments.items()
            ],
        )
        answer = await self._call(Purpose.FETCHES, message, SyncGroupResponse, _FIRST_WITH_INSTANCE_ID)
        return answer.assignment

    async def beat(self, request: Heartbeat) -> bool:
        """Returns whether the group rebalances."""
        message = HeartbeatRequest(
            group_id=self._group_id,
            generation_id=request.generation,
            member_id=request.member_id,
            group_instance_id=self._instance_id,
        )
        try:
            await self._call(Purpose.COORDINATOR, message, HeartbeatResponse, _FIRST_WITH_INSTANCE_ID)
        except KafkaError as error:
            if error.error is Errors.REBALANCE_IN_PROGRESS:
                return True
            raise
        return False

    async def leave(self, request: LeaveGroup) -> None:
        message = LeaveGroupRequest(
            group_id=self._group_id,
            members=[
                LeaveGroupRequest.MemberIdentity(member_id=request.member_id, group_instance_id=self._instance_id)
            ],
        )
        await self._call(Purpose.COORDINATOR, message, LeaveGroupResponse, _FIRST_WITH_INSTANCE_ID)

    async def _call(
        self,
        purpose: Purpose,
        message: Message,
        response: type[Response],
        lowest: int,
        *,
        timeout_ms: int | None = None,
    ) -> Response:
        kind = CoordinatorType.GROUP
        timeout_ms = self._attempt_ms if timeout_ms is None else timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                node = (await self._cluster.find_coordinators(kind, [self._group_id]))[self._group_id]
                if not isinstance(node, Node):
                    raise naming_right(node, "Read", f"group {self._group_id}")
                connection = await self._cluster.connection(node.node_id, purpose)
                try:
                    answer = await connection.call(message, response, lowest=lowest, timeout_ms=timeout_ms)
                except asyncio.CancelledError:
                    # The response may come after minutes, and the next request would have to wait for it.
                    connection.end("the request was given up")
                    raise
            error = error_of(answer.error_code)
            if error is not Errors.NONE:
                raise naming_right(KafkaError(error), "Read", f"group {self._group_id}")
        except TimeoutError:
            self._cluster.forget_coordinator(kind, self._group_id)
            raise KafkaError(Errors.REQUEST_TIMED_OUT, f"no answer within {timeout_ms} ms") from None
        except KafkaError as error:
            if error.error.retriable or error.error in COORDINATOR_MOVED:
                self._cluster.forget_coordinator(kind, self._group_id)
            raise
        return answer
