# SPDX-License-Identifier: Apache-2.0
"""Commits through two instances in front of three brokers of Apache Kafka, beside those brokers' own coordinators.

Each of 32 connections commits ten offsets of a group of its own, at the group's coordinator. First each connection
sends a commit when the last one was answered, then all of them together send at a fixed rate. A third way is a kcoord
without an upstream, with an fsync for each write. The rounds of all ways alternate, and the best of each figure counts.
CPU is that of the servers: of kcoord, and of the three brokers of Kafka.
"""

from __future__ import annotations

import selectors
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.gateway import percentile
from bench.report import Report
from bench.requests import commit, create_topics
from bench.wire import Broker, Connection, cpu_seconds
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import FindCoordinatorRequest, FindCoordinatorResponse, OffsetCommitResponse
from tests.support.kafka_cluster import KafkaCluster
from tests.support.kafka_jars import KafkaJars

BROKERS = 3
INSTANCES = 2
CONNECTIONS = 32
OFFSETS = 10
VARIANTS = 16
VERSION = 9
ROUNDS = 5
SECONDS = 3.0
WARM_UP_SECONDS = 10.0
"""A JVM compiles what runs often."""
RATE = 500
KAFKA_OPTIONS = "-Xms512m -Xmx512m"
START_SECONDS = 60.0


@dataclass
class Way:
    """A coordinator of groups, and the processes that work for its commits."""

    port: int
    kcoord: Sequence[int] = ()
    kafka: Sequence[int] = ()
    committers: list[Committer] = field(default_factory=list)

    def cpu(self) -> tuple[float, float]:
        """Returns the CPU seconds of kcoord and of Kafka so far."""
        return sum(map(cpu_seconds, self.kcoord)), sum(map(cpu_seconds, self.kafka))


@dataclass
class Outcome:
    """What one round has measured: commits per s, their latencies, and CPU per commit of kcoord and of Kafka."""

    rate: float
    times_ms: list[float]
    kcoord_us: float
    kafka_us: float


class Committer:
    """A connection to the coordinator of one group."""

    def __init__(self, bootstrap: int, group_id: str) -> None:
        self._connection = Connection(coordinator_of(bootstrap, group_id))
        self._frames = [
            encode_request(ApiKey.OFFSET_COMMIT, VERSION, 1, "bench", commit(group_id, "", -1, OFFSETS, number))
            for number in range(VARIANTS)
        ]
        self._due: deque[float] = deque()
        self._sent = 0
        self._until_accepted()

    def _until_accepted(self) -> None:
        """Commits until there is no error: the coordinator may still load, or not know a new topic yet."""
        deadline = time.monotonic() + START_SECONDS
        while errors := self._commit():
            assert time.monotonic() < deadline, errors
            time.sleep(0.1)

    def _commit(self) -> set[int]:
        """Sends one commit. Returns the error codes of the response."""
        self._connection.send(self._frames[0])
        self._accepted = self._connection.receive()
        _, position = decode_response_header(self._accepted, ApiKey.OFFSET_COMMIT, VERSION)
        response = OffsetCommitResponse.decode(self._accepted[position:], VERSION)
        return {
            partition.error_code for topic in response.topics for partition in topic.partitions if partition.error_code
        }

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, due: float) -> None:
        self._due.append(due)
        self._connection.send(self._frames[self._sent % VARIANTS])
        self._sent += 1

    def receive(self) -> float:
        """Receives one response. Returns its latency in ms."""
        frame = self._connection.receive()
        elapsed_ms = (time.perf_counter() - self._due.popleft()) * 1000
        assert frame == self._accepted, frame
        return elapsed_ms

    @property
    def waits(self) -> bool:
        return bool(self._due)

    def close(self) -> None:
        self._connection.close()


def coordinator_of(bootstrap: int, group_id: str) -> int:
    """Returns the port of a group's coordinator, as soon as there is one."""
    connection = Connection(bootstrap)
    request = FindCoordinatorRequest(coordinator_keys=[group_id])
    deadline = time.monotonic() + START_SECONDS
    while True:
        (coordinator,) = connection.call(ApiKey.FIND_COORDINATOR, 4, request, FindCoordinatorResponse).coordinators
        if coordinator.error_code == Errors.NONE:
            connection.close()
            return coordinator.port
        assert time.monotonic() < deadline, coordinator
        time.sleep(0.05)


def main(report: Report) -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        kafka = KafkaCluster(KafkaJars(), folder / "kafka", BROKERS, java_options=KAFKA_OPTIONS)
        stack.callback(kafka.stop)
        alone = stack.enter_context(Broker(folder / "alone"))
        instances = [
            stack.enter_context(
                Broker(
                    folder / f"instance{number}",
                    f"kcoord.upstream.bootstrap.servers={kafka.address}",
                    "kcoord.upstream.ports=0",
                    f"node.id={1_000_000 + number}",
                )
            )
            for number in range(INSTANCES)
        ]
        ways = {
            "Kafka's coordinators": Way(kafka.ports[0], kafka=kafka.pids),
            "kcoord in front of Kafka": Way(instances[0].port, [server.pid for server in instances], kafka.pids),
            "kcoord alone": Way(alone.port, [alone.pid]),
        }
        for port in (kafka.ports[0], alone.port):
            connection = Connection(port)
            create_topics(connection, {"t": OFFSETS})
            connection.close()
        for way in ways.values():
            way.committers = [Committer(way.port, f"g{number}") for number in range(CONNECTIONS)]
            for committer in way.committers:
                stack.callback(committer.close)
        measure(report, "as fast as they are answered", ways, saturate)
        measure(report, f"at {RATE} per s", ways, at_rate)


def measure(
    report: Report,
    name: str,
    ways: Mapping[str, Way],
    load: Callable[[Sequence[Committer], float], tuple[float, list[float]]],
) -> None:
    table = report.table(
        f"OffsetCommit, {OFFSETS} offsets, {CONNECTIONS} connections, {name}",
        *("coordinator", "commits per s", "p50 ms", "p99 ms", "CPU us of kcoord", "CPU us of Kafka"),
    )
    for way in ways.values():
        load(way.committers, WARM_UP_SECONDS)
    rounds = [{way_name: measured(way, load) for way_name, way in ways.items()} for _ in range(ROUNDS)]
    for way_name in ways:
        outcomes = [one_round[way_name] for one_round in rounds]
        table.row(
            way_name,
            round(max(outcome.rate for outcome in outcomes)),
            *(min(percentile(outcome.times_ms, share) for outcome in outcomes) for share in (0.5, 0.99)),
            min(outcome.kcoord_us for outcome in outcomes),
            min(outcome.kafka_us for outcome in outcomes),
        )


def measured(way: Way, load: Callable[[Sequence[Committer], float], tuple[float, list[float]]]) -> Outcome:
    before = way.cpu()
    seconds, times_ms = load(way.committers, SECONDS)
    kcoord, kafka = ((after - begun) * 1e6 / len(times_ms) for begun, after in zip(before, way.cpu(), strict=True))
    return Outcome(len(times_ms) / seconds, times_ms, kcoord, kafka)


def saturate(committers: Sequence[Committer], seconds: float) -> tuple[float, list[float]]:
    """Keeps one commit of each connection under way. Returns the seconds that it took, and the latencies."""
    times_ms: list[float] = []
    with selectors.DefaultSelector() as selector:
        for committer in committers:
            selector.register(committer, selectors.EVENT_READ, committer)
        begun = time.perf_counter()
        for committer in committers:
            committer.send(begun)
        while any(committer.waits for committer in committers):
            for key, _ in selector.select():
                times_ms.append(key.data.receive())
                now = time.perf_counter()
                if now < begun + seconds:
                    key.data.send(now)
    return time.perf_counter() - begun, times_ms


def at_rate(committers: Sequence[Committer], seconds: float) -> tuple[float, list[float]]:
    """Sends at a fixed rate, whatever the responses do. Latencies count from the time at which a commit was due."""
    times_ms: list[float] = []
    count = int(RATE * seconds)
    with selectors.DefaultSelector() as selector:
        for committer in committers:
            selector.register(committer, selectors.EVENT_READ, committer)
        begun = time.perf_counter()
        sent = 0
        while len(times_ms) < count:
            now = time.perf_counter()
            while sent < count and begun + sent / RATE <= now:
                committers[sent % len(committers)].send(begun + sent / RATE)
                sent += 1
            pause = begun + sent / RATE - time.perf_counter() if sent < count else 1.0
            for key, _ in selector.select(max(pause, 0)):
                times_ms.append(key.data.receive())
    return time.perf_counter() - begun, times_ms
