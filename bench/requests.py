# SPDX-License-Identifier: Apache-2.0
"""Broker CPU per request of each API, beside an echo of the same frames in the same minute.

The rounds of broker and echo alternate, and the smallest of each counts: other work on the machine only ever adds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.classic import ASSIGNMENT
from bench.report import Report
from bench.wire import Broker, Connection, Echo, Server
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerProtocolSubscription,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DescribeTopicPartitionsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    Message,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    SyncGroupRequest,
    SyncGroupResponse,
)

CONNECTIONS = 32
IN_FLIGHT = 8
ROUNDS = 5
SECONDS_PER_ROUND = 1.0
VARIANTS = 16
"""Commits raise their offsets, as real ones do: so many different ones are sent in turn."""

SETTINGS = (
    "group.initial.rebalance.delay.ms=0",
    "group.max.session.timeout.ms=1800000",
    # Members that only commit must not be fenced meanwhile.
    "group.consumer.max.session.timeout.ms=1800000",
    "group.consumer.session.timeout.ms=1800000",
)


@dataclass(slots=True)
class Load:
    """Requests of one kind: `bodies[c]` are sent in turn over connection c, `in_flight` at a time."""

    name: str
    api_key: ApiKey
    version: int
    bodies: list[list[bytes]]
    in_flight: int = IN_FLIGHT


def main(report: Report) -> None:
    for policy in ("os", "fsync"):
        table = report.table(
            f"requests, kcoord.log.flush.policy={policy}",
            "request",
            "connections x in flight",
            "CPU us",
            "echo CPU us",
            "ratio",
            "requests per s",
        )
        settings = (f"kcoord.log.flush.policy={policy}", *SETTINGS)
        with tempfile.TemporaryDirectory() as folder, Echo() as echo, Broker(Path(folder), *settings) as broker:
            for load in loads(broker, only_writes=policy == "fsync"):
                broker_us, echo_us, rate = compare(broker, echo, load)
                shape = f"{len(load.bodies)} x {load.in_flight}"
                table.row(load.name, shape, broker_us, echo_us, broker_us / echo_us, round(rate))


def loads(broker: Broker, *, only_writes: bool = False, wide: bool = True) -> list[Load]:
    """Prepares topics, members and offsets, and returns all kinds of requests."""
    connection = Connection(broker.port, broker.tls)
    connection.find_coordinator("g0")
    topics = [f"topic-{number:02d}" for number in range(10)]
    create_topics(connection, {**dict.fromkeys(topics, 30), "t": 10})
    epochs = [join(connection, f"g{number}") for number in range(CONNECTIONS)]
    member_commits = [
        [commit(f"g{number}", "m", epoch, 10, 1000 * number + n) for n in range(VARIANTS)]
        for number, epoch in enumerate(epochs)
    ]
    simple_commits = [
        [commit(f"simple-{number}", "", -1, 1, 1000 * number + n) for n in range(VARIANTS)]
        for number in range(CONNECTIONS)
    ]
    writes = [
        Load("OffsetCommit, 10 partitions", ApiKey.OFFSET_COMMIT, 9, member_commits),
        Load("OffsetCommit, 1 partition, simple group", ApiKey.OFFSET_COMMIT, 9, simple_commits),
    ]
    if only_writes:
        connection.close()
        return writes
    heartbeats: list[Message] = [
        ConsumerGroupHeartbeatRequest(group_id=f"g{number}", member_id="m", member_epoch=epoch)
        for number, epoch in enumerate(epochs)
    ]
    classic = [join_classic(connection, f"c{number}") for number in range(CONNECTIONS)]
    fetches: list[Message] = [fetch(f"g{number}", {"t": 10}) for number in range(CONNECTIONS)]
    all_fetches = fetches_of_all(connection) if wide else []
    names = [MetadataRequest.MetadataRequestTopic(name=name) for name in topics]
    metadata = MetadataRequest(topics=names, allow_auto_topic_creation=False)
    described = DescribeTopicPartitionsRequest(
        topics=[DescribeTopicPartitionsRequest.TopicRequest(name=name) for name in topics]
    )
    connection.close()
    return [
        _load("ConsumerGroupHeartbeat, steady", ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, heartbeats),
        _load("ConsumerGroupHeartbeat, steady", ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, heartbeats, 1),
        _load("Heartbeat", ApiKey.HEARTBEAT, 4, classic),
        *writes,
        _load("OffsetFetch, 10 partitions", ApiKey.OFFSET_FETCH, 9, fetches),
        _load("Metadata v13, 10 topics x 30 partitions", ApiKey.METADATA, 13, [metadata] * 8, 2),
        _load("DescribeTopicPartitions, likewise", ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, [described] * 8, 2),
        *(
            [_load("OffsetFetch, all 5,000 partitions of a group", ApiKey.OFFSET_FETCH, 9, all_fetches, 1)]
            if wide
            else []
        ),
    ]


def _load(name: str, key: ApiKey, version: int, requests: Sequence[Message], in_flight: int = IN_FLIGHT) -> Load:
    return Load(name, key, version, [[request.encode(version)] for request in requests], in_flight)


def create_topics(connection: Connection, counts: dict[str, int]) -> None:
    topics = [
        CreateTopicsRequest.CreatableTopic(name=name, num_partitions=count, replication_factor=1)
        for name, count in counts.items()
    ]
    answer = connection.call(ApiKey.CREATE_TOPICS, 7, CreateTopicsRequest(topics=topics), CreateTopicsResponse)
    assert not any(topic.error_code for topic in answer.topics), answer


def join(connection: Connection, group_id: str, member_id: str = "m", topic: str = "t") -> int:
    """The member's epoch."""
    request = ConsumerGroupHeartbeatRequest(
        group_id=group_id,
        member_id=member_id,
        rebalance_timeout_ms=60000,
        subscribed_topic_names=[topic],
        topic_partitions=[],
    )
    answer = connection.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request, ConsumerGroupHeartbeatResponse)
    assert answer.error_code == 0, answer
    return answer.member_epoch


def join_classic(connection: Connection, group_id: str) -> HeartbeatRequest:
    """Makes a group of one member; returns its heartbeat."""
    subscription = b"\x00\x01" + ConsumerProtocolSubscription(topics=["t"]).encode(1)
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=subscription)
    request = JoinGroupRequest(
        group_id=group_id,
        session_timeout_ms=600_000,
        rebalance_timeout_ms=600_000,
        protocol_type="consumer",
        protocols=[protocol],
    )
    joined = connection.call(ApiKey.JOIN_GROUP, 3, request, JoinGroupResponse)
    assert joined.error_code == 0, joined
    own = SyncGroupRequest.SyncGroupRequestAssignment(member_id=joined.member_id, assignment=ASSIGNMENT)
    sync = SyncGroupRequest(
        group_id=group_id, generation_id=joined.generation_id, member_id=joined.member_id, assignments=[own]
    )
    synced = connection.call(ApiKey.SYNC_GROUP, 2, sync, SyncGroupResponse)
    assert synced.error_code == 0, synced
    return HeartbeatRequest(group_id=group_id, generation_id=joined.generation_id, member_id=joined.member_id)


def commit(group_id: str, member_id: str, epoch: int, count: int, offset: int) -> bytes:
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset + partition)
        for partition in range(count)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=partitions)
    request = OffsetCommitRequest(
        group_id=group_id, generation_id_or_member_epoch=epoch, member_id=member_id, topics=[topic]
    )
    return request.encode(9)


def fetches_of_all(connection: Connection) -> list[Message]:
    """Of four groups with offsets in 50 topics of 100 partitions."""
    create_topics(connection, {f"wide-{number:02d}": 100 for number in range(50)})
    for number in range(4):
        commit_all(connection, f"wide-{number}")
    return [fetch(f"wide-{number}", None) for number in range(4)]


def commit_all(connection: Connection, group_id: str) -> None:
    """An offset for each of the 5,000 partitions of 50 topics."""
    for number in range(50):
        partitions = [
            OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=partition, committed_offset=partition)
            for partition in range(100)
        ]
        topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=f"wide-{number:02d}", partitions=partitions)
        request = OffsetCommitRequest(group_id=group_id, generation_id_or_member_epoch=-1, topics=[topic])
        answer = connection.call(ApiKey.OFFSET_COMMIT, 9, request, OffsetCommitResponse)
        assert not any(partition.error_code for partition in answer.topics[0].partitions), answer


def fetch(group_id: str, topics: dict[str, int] | None) -> OffsetFetchRequest:
    requested = None
    if topics is not None:
        requested = [
            OffsetFetchRequest.OffsetFetchRequestTopics(name=name, partition_indexes=list(range(count)))
            for name, count in topics.items()
        ]
    return OffsetFetchRequest(
        groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=requested)], require_stable=False
    )


def compare(
    broker: Server, echo: Server, load: Load, rounds: int = ROUNDS, seconds: float = SECONDS_PER_ROUND
) -> tuple[float, float, float]:
    """CPU microseconds per request of both, and the broker's requests per second."""
    driven, echoed = Driver(broker, load, seconds), Driver(echo, load, seconds)
    driven.warm_up()
    echoed.warm_up()
    results = [(driven.round(), echoed.round()) for _ in range(rounds)]
    driven.close()
    echoed.close()
    return (
        min(broker_us for (broker_us, _), _ in results),
        min(echo_us for _, (echo_us, _) in results),
        max(rate for (_, rate), _ in results),
    )


class Driver:
    """Sends one load to one server."""

    def __init__(self, server: Server, load: Load, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._in_flight = load.in_flight
        self._connections = [Connection(server.port, server.tls) for _ in load.bodies]
        self._volleys = [
            [self._volley(load, bodies, start) for start in range(0, len(bodies), load.in_flight)]
            for bodies in load.bodies
        ]
        self._exchanges = 0

    @staticmethod
    def _volley(load: Load, bodies: list[bytes], start: int) -> bytes:
        return b"".join(
            encode_request(load.api_key, load.version, number, "bench", bodies[(start + number) % len(bodies)])
            for number in range(load.in_flight)
        )

    def warm_up(self) -> None:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < self._seconds / 4 or count < 4:
            self._exchange()
            count += 1
        took = time.perf_counter() - began
        self._exchanges = max(int(self._seconds * count / took), 1)

    def round(self) -> tuple[float, float]:
        """CPU microseconds per request, and requests per second."""
        began, cpu = time.perf_counter(), self._server.cpu_seconds()
        for _ in range(self._exchanges):
            self._exchange()
        took, cpu = time.perf_counter() - began, self._server.cpu_seconds() - cpu
        count = self._exchanges * self._in_flight * len(self._connections)
        return cpu / count * 1e6, count / took

    def _exchange(self) -> None:
        for connection, volleys in zip(self._connections, self._volleys, strict=True):
            volleys.append(volleys.pop(0))
            connection.send(volleys[0])
        for connection in self._connections:
            connection.skip(self._in_flight)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
