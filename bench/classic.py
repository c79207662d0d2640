# SPDX-License-Identifier: Apache-2.0
"""Broker CPU of one classic group with many members, each with a connection of its own.

All members join, all send heartbeats, and then all rejoin because one more member joins.
"""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

from bench.report import Report
from bench.wire import Broker, Connection
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import (
    ConsumerProtocolSubscription,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    Message,
    SyncGroupRequest,
    SyncGroupResponse,
)

SIZES = (250, 500, 1000, 2000)
GROUP = "storm"
ASSIGNMENT = b"\x00\x00" + bytes(8)
"""An assignment without partitions, which is enough for the measurement."""
HEARTBEATS = 10
SETTINGS = ("group.initial.rebalance.delay.ms=1000", "group.max.session.timeout.ms=1800000")


class Member:
    """One member with its connection. The `send` and `receive` methods are separate, so all members wait at once."""

    def __init__(self, port: int) -> None:
        self.connection = Connection(port)
        self.member_id = ""
        self.generation = -1
        self.group_members: list[str] = []
        """The member ids of the group, which only the leader gets."""

    def send_join(self, subscription: bytes) -> None:
        protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=subscription)
        request = JoinGroupRequest(
            group_id=GROUP,
            session_timeout_ms=600_000,
            rebalance_timeout_ms=600_000,
            member_id=self.member_id,
            protocol_type="consumer",
            protocols=[protocol],
        )
        self._send(ApiKey.JOIN_GROUP, 9, request)

    def receive_join(self) -> Errors:
        response = JoinGroupResponse.decode(self._receive(ApiKey.JOIN_GROUP, 9), 9)
        self.member_id = response.member_id
        self.generation = response.generation_id
        self.group_members = [member.member_id for member in response.members]
        return Errors(response.error_code)

    def send_sync(self) -> None:
        assignments = [
            SyncGroupRequest.SyncGroupRequestAssignment(member_id=member_id, assignment=ASSIGNMENT)
            for member_id in self.group_members
        ]
        request = SyncGroupRequest(
            group_id=GROUP,
            generation_id=self.generation,
            member_id=self.member_id,
            protocol_type="consumer",
            protocol_name="range",
            assignments=assignments,
        )
        self._send(ApiKey.SYNC_GROUP, 5, request)

    def receive_sync(self) -> Errors:
        return Errors(SyncGroupResponse.decode(self._receive(ApiKey.SYNC_GROUP, 5), 5).error_code)

    def send_heartbeat(self) -> None:
        request = HeartbeatRequest(group_id=GROUP, generation_id=self.generation, member_id=self.member_id)
        self._send(ApiKey.HEARTBEAT, 4, request)

    def receive_heartbeat(self) -> Errors:
        return Errors(HeartbeatResponse.decode(self._receive(ApiKey.HEARTBEAT, 4), 4).error_code)

    def _send(self, api_key: ApiKey, version: int, request: Message) -> None:
        self.connection.send(encode_request(api_key, version, 1, "bench", request.encode(version)))

    def _receive(self, api_key: ApiKey, version: int) -> bytes:
        frame = self.connection.receive()
        return frame[decode_response_header(frame, api_key, version)[1] :]


def main(report: Report) -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    table = report.table("classic groups", "members", "join, CPU s", "join again, CPU s", "heartbeat, CPU us")
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder, Broker(Path(folder), *SETTINGS) as broker:
            table.row(size, *measure(broker, size))


def measure(broker: Broker, size: int) -> tuple[float, float, float]:
    first = Connection(broker.port)
    first.find_coordinator(GROUP)
    subscription = b"\x00\x03" + ConsumerProtocolSubscription(topics=["t"]).encode(3)
    members = [Member(broker.port) for _ in range(size)]
    cpu = broker.cpu_seconds()
    join_all(members, subscription, Errors.MEMBER_ID_REQUIRED)
    join_all(members, subscription, Errors.NONE)
    sync_all(members)
    joined = broker.cpu_seconds() - cpu
    heartbeats = steady(broker, members)
    late = Member(broker.port)
    late.send_join(subscription)
    assert late.receive_join() is Errors.MEMBER_ID_REQUIRED
    late.send_join(subscription)
    all_members = [*members, late]
    cpu = broker.cpu_seconds()
    beat(members, (Errors.NONE, Errors.REBALANCE_IN_PROGRESS))
    for member in members:
        member.send_join(subscription)
    for member in all_members:
        assert member.receive_join() is Errors.NONE
    sync_all(all_members)
    again = broker.cpu_seconds() - cpu
    for connection in (first, *(member.connection for member in all_members)):
        connection.close()
    return joined, again, heartbeats * 1e6


def join_all(members: list[Member], subscription: bytes, expected: Errors) -> None:
    for member in members:
        member.send_join(subscription)
    for member in members:
        assert member.receive_join() is expected


def sync_all(members: list[Member]) -> None:
    """Sends SyncGroup for all members, for the leader last: the other members have to wait for its assignments."""
    for member in sorted(members, key=lambda member: len(member.group_members)):
        member.send_sync()
    for member in members:
        assert member.receive_sync() is Errors.NONE


def beat(members: list[Member], expected: tuple[Errors, ...]) -> None:
    for member in members:
        member.send_heartbeat()
    for member in members:
        assert member.receive_heartbeat() in expected


def steady(broker: Broker, members: list[Member]) -> float:
    """Returns the CPU seconds per heartbeat."""
    cpu = broker.cpu_seconds()
    for _ in range(HEARTBEATS):
        beat(members, (Errors.NONE,))
    return (broker.cpu_seconds() - cpu) / HEARTBEATS / len(members)
