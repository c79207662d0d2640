# SPDX-License-Identifier: Apache-2.0
"""Latency of another group's heartbeats while a group of 10,000 members gets new targets over 100,000 partitions.

1. The members of the first group have the same subscription. They join before their topics exist.
2. The topics are created, so the targets of all members change at once.
3. More members join, one per assignment interval.
4. A second group with 50 random subscriptions joins, and then more members join in the same way.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from bench.compaction import beat
from bench.memory import free_port, lag, summary
from bench.report import Report
from bench.requests import create_topics
from bench.wire import Broker, Connection
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

MEMBERS = 10_000
TOPICS = 20
PARTITIONS_PER_TOPIC = 5_000
KINDS = 50
IN_FLIGHT = 20
TOPICS_PER_REQUEST = 2
QUIET_SECONDS = 5.0
INTERVAL_SECONDS = 1.1
"""A little longer than `group.consumer.assignment.interval.ms`."""
BEATS = 4
MORE_MEMBERS = 8


def main(report: Report) -> None:
    table = report.table(
        f"heartbeats of another group, {MEMBERS:,} members, {TOPICS * PARTITIONS_PER_TOPIC:,} partitions",
        *("while", "s", "broker CPU s", "p50 ms", "p99 ms", "longest ms"),
        *("own pauses p99 ms below", "p99.9 ms below", "longest ms "),
    )
    topics = [f"topic-{number:02d}" for number in range(TOPICS)]
    random = Random(1)
    by_lot = [sorted(random.sample(topics, TOPICS // 2)) for _ in range(KINDS)]
    metrics = free_port()
    settings = (
        *("kcoord.log.flush.policy=os", f"kcoord.metrics.port={metrics}"),
        *("group.consumer.session.timeout.ms=60000", "group.consumer.heartbeat.interval.ms=15000"),
    )
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder), *settings) as broker:

        def observe(what: str, work: Callable[[], None]) -> None:
            before = lag(metrics)
            row = observed(broker, work)
            table.row(what, *row, *summary(lag(metrics), before)[1:])

        connection = Connection(broker.port)
        observe("nothing else happens", lambda: time.sleep(QUIET_SECONDS))
        group = _BigGroup(connection, "one", topics, [topics])
        observe("all join", group.join_all)
        group.make_topics()
        observe("everybody gets another target", group.target_for_all)
        observe(f"{MORE_MEMBERS} more join, one by one", group.join_more)
        group = _BigGroup(connection, "by-lot", topics, by_lot)
        observe(f"all join, {KINDS} subscriptions", group.join_all)
        observe(f"{MORE_MEMBERS} more join, one by one", group.join_more)
        connection.close()


def observed(broker: Broker, work: Callable[[], None]) -> tuple[float, float, float, float, float]:
    """Runs the work. Returns its seconds, the broker's CPU seconds, and p50, p99 and maximum of heartbeats in ms."""
    latencies: list[float] = []
    stop = threading.Event()
    heart = threading.Thread(target=beat, args=(broker.port, stop, latencies))
    began, cpu = time.perf_counter(), broker.cpu_seconds()
    heart.start()
    work()
    took, cpu = time.perf_counter() - began, broker.cpu_seconds() - cpu
    while not latencies:
        time.sleep(0.01)
    stop.set()
    heart.join()
    latencies.sort()
    p50, p99 = (latencies[len(latencies) * share // 100] * 1000 for share in (50, 99))
    return took, cpu, p50, p99, latencies[-1] * 1000


class _BigGroup:
    def __init__(self, connection: Connection, name: str, topics: list[str], subscriptions: list[list[str]]) -> None:
        self._connection = connection
        self._name = name
        self._topics = topics
        self._subscriptions = subscriptions
        connection.find_coordinator(name)

    def join_all(self) -> None:
        for start in range(0, MEMBERS, IN_FLIGHT):
            frames = [self._frame(number) for number in range(start, start + IN_FLIGHT)]
            self._connection.send(b"".join(frames))
            self._connection.skip(IN_FLIGHT)

    def make_topics(self) -> None:
        """Creates a few topics per request. The heartbeats of `target_for_all` then cause the new target."""
        for start in range(0, TOPICS, TOPICS_PER_REQUEST):
            names = self._topics[start : start + TOPICS_PER_REQUEST]
            create_topics(self._connection, dict.fromkeys(names, PARTITIONS_PER_TOPIC))

    def target_for_all(self) -> None:
        for _ in range(BEATS):
            self._join(0)
            time.sleep(INTERVAL_SECONDS)

    def join_more(self) -> None:
        for number in range(MEMBERS, MEMBERS + MORE_MEMBERS):
            self._join(number)
            time.sleep(INTERVAL_SECONDS)

    def _join(self, number: int) -> None:
        answer = self._connection.call(
            ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, self._request(number), ConsumerGroupHeartbeatResponse
        )
        assert answer.error_code == 0, answer

    def _frame(self, number: int) -> bytes:
        return encode_request(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, number, "bench", self._request(number).encode(1))

    def _request(self, number: int) -> ConsumerGroupHeartbeatRequest:
        return ConsumerGroupHeartbeatRequest(
            group_id=self._name,
            member_id=f"member-{number:05d}",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=self._subscriptions[number % len(self._subscriptions)],
            topic_partitions=[],
        )
