# SPDX-License-Identifier: Apache-2.0
"""How costs grow with the state of a broker: with members, groups, offsets, partitions, topics and connections.

Each dimension is measured at three sizes, each ten times the one before, on a new broker. A row has the broker's CPU
time of an operation that touches one item, or the memory of an item. The last column is the exponent of the growth from
the smallest to the largest size: 0 for a cost that does not grow, 1 for a linear one.

`BENCH_GROWTH` names the dimensions to run, separated by blanks.
"""

from __future__ import annotations

import itertools
import math
import os
import resource
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeAlias

from bench.report import Report
from bench.requests import SETTINGS, commit, create_topics, fetch, join
from bench.wire import Broker, Connection
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    MetadataRequest,
    OffsetCommitRequest,
)

ROUNDS: Final = 3
REPEATS: Final = 200
CHANGES: Final = 10
"""Number of repetitions of operations that change the metadata."""
IN_FLIGHT: Final = 50
QUIET_CORES: Final = 0.03

Operation: TypeAlias = Callable[[], object]
Operations: TypeAlias = dict[str, tuple[int, Operation]]
"""Number of repetitions and the operation, by name."""


class Subject:
    """A broker, and a connection to it. Numbers of new topics come from `numbers`."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.connection = Connection(broker.port)
        self.connection.find_coordinator("g")
        self.numbers = itertools.count()
        self.others: list[Connection] = []

    def ask(self, key: ApiKey, version: int, body: bytes) -> Operation:
        """Returns an operation that sends a request and receives the response."""
        frame = encode_request(key, version, 0, "bench", body)

        def operation() -> None:
            self.connection.send(frame)
            self.connection.skip(1)

        return operation

    def send_all(self, key: ApiKey, version: int, bodies: Iterable[bytes]) -> None:
        frames = (encode_request(key, version, 0, "bench", body) for body in bodies)
        while volley := list(itertools.islice(frames, IN_FLIGHT)):
            self.connection.send(b"".join(volley))
            self.connection.skip(len(volley))

    def create_topic(self) -> None:
        create_topics(self.connection, {f"new-{next(self.numbers)}": 1})

    def cpu_us(self, repeats: int, operation: Operation) -> float:
        return min(self._cpu_us(repeats, operation) for _ in range(ROUNDS))

    def _cpu_us(self, repeats: int, operation: Operation) -> float:
        cpu = self.broker.cpu_seconds()
        for _ in range(repeats):
            operation()
        return (self.broker.cpu_seconds() - cpu) * 1e6 / repeats

    def close(self) -> None:
        for connection in (self.connection, *self.others):
            connection.close()


def main(report: Report) -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    chosen = os.environ.get("BENCH_GROWTH", " ".join(DIMENSIONS)).split()
    for name in chosen:
        sizes, fill = DIMENSIONS[name]
        costs: dict[str, list[float]] = {}
        for size in sizes:
            for what, cost in _measure(size, fill).items():
                costs.setdefault(what, []).append(cost)
        table = report.table(f"growth with {name}", "cost", *(f"{size:,} {name}" for size in sizes), "exponent")
        for what, values in costs.items():
            table.row(what, *values, exponent(values[0], values[-1], sizes[-1] / sizes[0]))


def exponent(first: float, last: float, factor: float) -> float:
    """Returns the exponent of a power law through both costs; costs below 1 us or 1 byte count as 1."""
    return math.log(max(last, 1.0) / max(first, 1.0)) / math.log(factor)


def _measure(size: int, fill: Callable[[Subject, int], Operations]) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Broker(
            Path(folder),
            "kcoord.log.flush.policy=os",
            "group.consumer.max.size=100000",
            "max.connections.per.ip=20000",
            *SETTINGS,
        ) as broker,
    ):
        subject = Subject(broker)
        create_topics(subject.connection, {"t": 10})
        before = broker.resident_mb()
        operations = fill(subject, size)
        broker.settle(QUIET_CORES)
        costs = {f"{what}, CPU us": subject.cpu_us(*operation) for what, operation in operations.items()}
        costs["memory of one, bytes"] = (broker.resident_mb() - before) * 1e6 / size
        subject.close()
        return costs


def _common(subject: Subject, group_id: str, member_id: str, epoch: int) -> Operations:
    """Returns operations of one member, and a change of the metadata that concerns nobody."""
    heartbeat = ConsumerGroupHeartbeatRequest(group_id=group_id, member_id=member_id, member_epoch=epoch)
    metadata = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="t")], allow_auto_topic_creation=False)
    return {
        "ConsumerGroupHeartbeat": (
            REPEATS,
            subject.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, heartbeat.encode(1)),
        ),
        "OffsetCommit, 10 partitions": (
            REPEATS,
            subject.ask(ApiKey.OFFSET_COMMIT, 9, commit(group_id, member_id, epoch, 10, 1_000)),
        ),
        "OffsetFetch, 10 partitions": (
            REPEATS,
            subject.ask(ApiKey.OFFSET_FETCH, 9, fetch(group_id, {"t": 10}).encode(9)),
        ),
        "Metadata of one topic": (REPEATS, subject.ask(ApiKey.METADATA, 13, metadata.encode(13))),
        "CreateTopics, one partition": (CHANGES, subject.create_topic),
    }


def _members(subject: Subject, size: int) -> Operations:
    """Members of one group."""

    def join_request(number: int) -> bytes:
        return ConsumerGroupHeartbeatRequest(
            group_id="large",
            member_id=f"member-{number:06d}",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=["t"],
            topic_partitions=[],
        ).encode(1)

    subject.send_all(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, (join_request(number) for number in range(size)))
    epoch = join(subject.connection, "alone")

    def join_and_leave() -> None:
        number = size + next(subject.numbers)
        leave = ConsumerGroupHeartbeatRequest(group_id="large", member_id=f"member-{number:06d}", member_epoch=-1)
        subject.send_all(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, [join_request(number), leave.encode(1)])

    return {**_common(subject, "alone", "m", epoch), "a member joins the group and leaves": (REPEATS, join_and_leave)}


def _groups(subject: Subject, size: int) -> Operations:
    """Consumer groups with one member."""
    requests = (
        ConsumerGroupHeartbeatRequest(
            group_id=f"group-{number:06d}",
            member_id="m",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=["t"],
            topic_partitions=[],
        ).encode(1)
        for number in range(size)
    )
    subject.send_all(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, requests)
    return _common(subject, "alone", "m", join(subject.connection, "alone"))


def _offsets(subject: Subject, size: int) -> Operations:
    """Committed offsets in groups of 1,000 offsets."""
    create_topics(subject.connection, {"wide": 1_000})
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=index, committed_offset=1)
        for index in range(1_000)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="wide", partitions=partitions)
    requests = (
        OffsetCommitRequest(group_id=f"g-{number}", generation_id_or_member_epoch=-1, topics=[topic]).encode(8)
        for number in range(size // 1_000)
    )
    subject.send_all(ApiKey.OFFSET_COMMIT, 8, requests)
    return _common(subject, "alone", "m", join(subject.connection, "alone"))


def _partitions(subject: Subject, size: int) -> Operations:
    """Partitions of ten topics."""
    for number in range(10):
        create_topics(subject.connection, {f"topic-{number}": size // 10})
    return _common(subject, "alone", "m", join(subject.connection, "alone"))


def _topics(subject: Subject, size: int) -> Operations:
    """Topics of one partition."""
    for start in range(0, size, 1_000):
        create_topics(subject.connection, {f"topic-{number:06d}": 1 for number in range(start, start + 1_000)})
    return _common(subject, "alone", "m", join(subject.connection, "alone"))


def _connections(subject: Subject, size: int) -> Operations:
    """Connections that have sent one request."""
    frame = encode_request(ApiKey.METADATA, 13, 0, "bench", MetadataRequest(topics=[]).encode(13))

    def connect() -> Connection:
        connection = Connection(subject.broker.port)
        connection.send(frame)
        connection.skip(1)
        return connection

    subject.others = [connect() for _ in range(size)]
    return {
        **_common(subject, "alone", "m", join(subject.connection, "alone")),
        "a connection opens and closes": (REPEATS, lambda: connect().close()),
    }


DIMENSIONS: Final[dict[str, tuple[tuple[int, int, int], Callable[[Subject, int], Operations]]]] = {
    "members": ((100, 1_000, 10_000), _members),
    "groups": ((1_000, 10_000, 100_000), _groups),
    "offsets": ((10_000, 100_000, 1_000_000), _offsets),
    "partitions": ((1_000, 10_000, 100_000), _partitions),
    "topics": ((1_000, 10_000, 100_000), _topics),
    "connections": ((100, 1_000, 10_000), _connections),
}
