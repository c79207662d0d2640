# SPDX-License-Identifier: Apache-2.0
"""What the heartbeats of another group notice while 10,000 members join one group, whose target assignment is computed
again each second. The members subscribe to different topics, which is the dearest case.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.compaction import beat
from bench.memory import free_port, lag, summary
from bench.report import Report
from bench.requests import create_topics
from bench.wire import Broker, Connection
from protocol.api_keys import ApiKey
from protocol.headers import encode_request
from protocol.messages import ConsumerGroupHeartbeatRequest

MEMBERS = 10_000
TOPICS = 10
PARTITIONS_PER_TOPIC = 300
IN_FLIGHT = 20
QUIET_SECONDS = 3.0


def main(report: Report) -> None:
    table = report.table(
        f"heartbeats of another group, {TOPICS * PARTITIONS_PER_TOPIC:,} partitions",
        *("while", "s", "broker CPU s", "p50 ms", "p99 ms", "longest ms"),
        *("own pauses p99 ms below", "p99.9 ms below", "longest ms "),
    )
    metrics = free_port()
    settings = ("kcoord.log.flush.policy=os", f"kcoord.metrics.port={metrics}")
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder), *settings) as broker:
        connection = Connection(broker.port)
        connection.find_coordinator("heart")
        topics = [f"topic-{number}" for number in range(TOPICS)]
        create_topics(connection, dict.fromkeys(topics, PARTITIONS_PER_TOPIC))
        for name, work in (
            ("nothing else happens", lambda: time.sleep(QUIET_SECONDS)),
            (f"{MEMBERS:,} members join", lambda: join_all(connection, topics)),
        ):
            before = lag(metrics)
            row = observed(broker, work)
            table.row(name, *row, *summary(lag(metrics), before)[1:])
        connection.close()


def observed(broker: Broker, work: Callable[[], None]) -> tuple[float, float, float, float, float]:
    """Seconds and broker CPU of the work, and percentiles of the heartbeats beside it, in ms."""
    latencies: list[float] = []
    stop = threading.Event()
    heart = threading.Thread(target=beat, args=(broker.port, stop, latencies))
    began, cpu = time.perf_counter(), broker.cpu_seconds()
    heart.start()
    work()
    took, cpu = time.perf_counter() - began, broker.cpu_seconds() - cpu
    stop.set()
    heart.join()
    latencies.sort()
    p50, p99 = (latencies[len(latencies) * share // 100] * 1000 for share in (50, 99))
    return took, cpu, p50, p99, latencies[-1] * 1000


def join_all(connection: Connection, topics: list[str]) -> None:
    for start in range(0, MEMBERS, IN_FLIGHT):
        connection.send(b"".join(_join(number, topics) for number in range(start, start + IN_FLIGHT)))
        connection.skip(IN_FLIGHT)


def _join(number: int, topics: list[str]) -> bytes:
    request = ConsumerGroupHeartbeatRequest(
        group_id="big",
        member_id=f"member-{number:05d}",
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=topics if number % 2 else topics[: TOPICS // 2],
        topic_partitions=[],
    )
    return encode_request(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, number, "bench", request.encode(1))
