# SPDX-License-Identifier: Apache-2.0
"""Broker CPU per request: steady heartbeats and commits of ten partitions, many requests in flight."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.wire import Broker, Connection
from protocol.api_keys import ApiKey
from protocol.headers import encode_request
from protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    Message,
    OffsetCommitRequest,
)

CONNECTIONS = 8
IN_FLIGHT = 16
ROUNDS = 250
PARTITIONS = 10


def main() -> None:
    print("| request | flush policy | CPU us | requests per s |\n|---|---|---|---|")
    for policy in ("fsync", "os"):
        setting = f"kcoord.log.flush.policy={policy}"
        with tempfile.TemporaryDirectory() as folder, Broker(Path(folder), setting) as broker:
            connections = [Connection(broker.port) for _ in range(CONNECTIONS)]
            create_topic(connections[0])
            epochs = [join(connection, number) for number, connection in enumerate(connections)]
            heartbeats: list[Message] = [
                ConsumerGroupHeartbeatRequest(group_id=f"g{number}", member_id="m", member_epoch=epoch)
                for number, epoch in enumerate(epochs)
            ]
            commits: list[Message] = [commit(number, epoch) for number, epoch in enumerate(epochs)]
            report("heartbeat", policy, broker, connections, ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, heartbeats)
            report("commit of 10", policy, broker, connections, ApiKey.OFFSET_COMMIT, 9, commits)
            for connection in connections:
                connection.close()


def create_topic(connection: Connection) -> None:
    topic = CreateTopicsRequest.CreatableTopic(name="t", num_partitions=PARTITIONS, replication_factor=1)
    answer = connection.call(ApiKey.CREATE_TOPICS, 7, CreateTopicsRequest(topics=[topic]), CreateTopicsResponse)
    assert answer.topics[0].error_code == 0, answer


def join(connection: Connection, number: int) -> int:
    connection.find_coordinator(f"g{number}")
    request = ConsumerGroupHeartbeatRequest(
        group_id=f"g{number}",
        member_id="m",
        rebalance_timeout_ms=60000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )
    answer = connection.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request, ConsumerGroupHeartbeatResponse)
    assert answer.error_code == 0, answer
    return answer.member_epoch


def commit(number: int, epoch: int) -> OffsetCommitRequest:
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=partition, committed_offset=7)
        for partition in range(PARTITIONS)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=partitions)
    return OffsetCommitRequest(
        group_id=f"g{number}", generation_id_or_member_epoch=epoch, member_id="m", topics=[topic]
    )


def report(
    name: str,
    policy: str,
    broker: Broker,
    connections: list[Connection],
    api_key: ApiKey,
    version: int,
    requests: list[Message],
) -> None:
    bodies = [request.encode(version) for request in requests]
    volleys = [
        b"".join(encode_request(api_key, version, number, "bench", body) for number in range(IN_FLIGHT))
        for body in bodies
    ]
    exchange(connections, volleys, ROUNDS // 10)
    began, cpu = time.perf_counter(), broker.cpu_seconds()
    exchange(connections, volleys, ROUNDS)
    took, cpu = time.perf_counter() - began, broker.cpu_seconds() - cpu
    count = ROUNDS * IN_FLIGHT * len(connections)
    print(f"| {name} | {policy} | {cpu / count * 1e6:.1f} | {count / took:.0f} |", flush=True)


def exchange(connections: list[Connection], volleys: list[bytes], rounds: int) -> None:
    for _ in range(rounds):
        for connection, volley in zip(connections, volleys, strict=True):
            connection.send(volley)
        for connection in connections:
            for _ in range(IN_FLIGHT):
                connection.receive()
