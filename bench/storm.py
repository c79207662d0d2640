# SPDX-License-Identifier: Apache-2.0
"""A join storm: all members of one group join at once.

The members send heartbeats without a pause until every partition has an owner. The assignment interval is 0. Then one
more member joins.
"""

from __future__ import annotations

import selectors
import tempfile
import time
from pathlib import Path

from bench.report import Report
from bench.requests import create_topics
from bench.wire import Broker, Connection
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

SIZES = (100, 500, 1000)
PARTITIONS = 1000
CONNECTIONS = 100
LIMIT_SECONDS = 60.0
SETTINGS = (
    "kcoord.log.flush.policy=os",
    "group.consumer.assignment.interval.ms=0",
    "group.consumer.min.assignment.interval.ms=0",
)
KEY, VERSION = ApiKey.CONSUMER_GROUP_HEARTBEAT, 1

Owned = dict[bytes, list[int]]


class Member:
    """A member that owns its assigned partitions at once."""

    def __init__(self, group_id: str, number: int) -> None:
        self.group_id = group_id
        self.member_id = f"member-{number:05d}"
        self.epoch = 0
        self.owned: Owned = {}
        self._reported: Owned | None = {}

    def request(self, correlation_id: int) -> bytes:
        """Returns the next heartbeat.

        A joining member sends all fields. Later heartbeats have the owned partitions only if these have changed.
        """
        joins = self.epoch == 0
        topics = None
        if joins or self._reported != self.owned:
            topics = [
                ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic_id, partitions=partitions)
                for topic_id, partitions in self.owned.items()
            ]
            self._reported = self.owned
        request = ConsumerGroupHeartbeatRequest(
            group_id=self.group_id,
            member_id=self.member_id,
            member_epoch=self.epoch,
            rebalance_timeout_ms=300_000 if joins else -1,
            subscribed_topic_names=["storm"] if joins else None,
            topic_partitions=topics,
        )
        return encode_request(KEY, VERSION, correlation_id, "bench", request.encode(VERSION))

    def take(self, answer: ConsumerGroupHeartbeatResponse) -> None:
        assert answer.error_code == 0, answer
        self.epoch = answer.member_epoch
        if answer.assignment is not None:
            self.owned = {topic.topic_id: topic.partitions for topic in answer.assignment.topic_partitions}


def main(report: Report) -> None:
    table = report.table(
        f"join storm, {PARTITIONS:,} partitions",
        *("members", "converged s", "CPU s", "heartbeats", "one more s", "its CPU s", "its heartbeats"),
    )
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder), *SETTINGS) as broker:
        connection = Connection(broker.port)
        connection.find_coordinator("g")
        create_topics(connection, {"storm": PARTITIONS})
        for size in SIZES:
            connections = [Connection(broker.port) for _ in range(min(CONNECTIONS, size))]
            members = [Member(f"storm-{size}", number) for number in range(size)]
            first = drive(broker, connections, members)
            members.append(Member(f"storm-{size}", size))
            second = drive(broker, connections, members, after_epoch=members[0].epoch)
            table.row(size, *first, *second)
            for member_connection in connections:
                member_connection.close()
        connection.close()


def drive(
    broker: Broker, connections: list[Connection], members: list[Member], *, after_epoch: int = 0
) -> tuple[float, float, int]:
    """Runs until the group has converged. Returns seconds, the broker's CPU seconds, and the number of heartbeats."""
    began, cpu, count = time.perf_counter(), broker.cpu_seconds(), 0
    waiting: dict[int, list[Member]] = {connection.fileno(): [] for connection in connections}
    selector = selectors.DefaultSelector()
    for connection in connections:
        selector.register(connection, selectors.EVENT_READ, connection)
    for number, member in enumerate(members):
        connection = connections[number % len(connections)]
        connection.send(member.request(number))
        waiting[connection.fileno()].append(member)
    while True:
        for key, _ in selector.select(LIMIT_SECONDS):
            connection = key.data
            queue = waiting[connection.fileno()]
            requests = []
            for _ in range(len(queue)):
                member = queue.pop(0)
                frame = connection.receive()
                _, body = decode_response_header(frame, KEY, VERSION)
                member.take(ConsumerGroupHeartbeatResponse.decode(frame[body:], VERSION))
                requests.append(member.request(count))
                queue.append(member)
                count += 1
            if has_converged(members, after_epoch):
                took = time.perf_counter() - began
                cpu = broker.cpu_seconds() - cpu
                finish(connections, waiting, connection)
                selector.close()
                return took, cpu, count
            connection.send(b"".join(requests))
        assert time.perf_counter() - began < LIMIT_SECONDS, f"the group has not converged in {LIMIT_SECONDS} s"


def finish(connections: list[Connection], waiting: dict[int, list[Member]], done: Connection) -> None:
    """Receives the responses that are still pending."""
    for connection in connections:
        if connection is not done:
            for member in waiting[connection.fileno()]:
                frame = connection.receive()
                _, body = decode_response_header(frame, KEY, VERSION)
                member.take(ConsumerGroupHeartbeatResponse.decode(frame[body:], VERSION))


def has_converged(members: list[Member], after_epoch: int) -> bool:
    """True if all members have the same epoch, later than `after_epoch`, and every partition has one owner."""
    epoch = members[-1].epoch
    if epoch < max(len(members), after_epoch + 1) or any(member.epoch != epoch for member in members):
        return False
    owned = [partition for member in members for partitions in member.owned.values() for partition in partitions]
    return len(owned) == PARTITIONS == len(set(owned))
