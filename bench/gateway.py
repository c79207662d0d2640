# SPDX-License-Identifier: Apache-2.0
"""What kcoord in front of a cluster costs: CPU per MB of produced and fetched data, beside a bare uvloop relay.

The upstream is another kcoord. The same frames go through the relay and through the gateway, in rounds that alternate;
the smallest of each counts. The second table has latencies at a fixed rate, also without anything in between. They
depend on other load on the machine far more than the first table.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from random import Random

from bench.report import Report
from bench.wire import Broker, Connection, Server
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    FetchRequest,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
)
from kcoord_protocol.record_batch import encode_batch_from_parts

PRODUCE_VERSION = 9
FETCH_VERSION = 12
ROUNDS = 5
MEGABYTES = 32
IN_FLIGHT = 5
SIZES = (1_000, 16_000, 100_000, 900_000)
PRODUCED, FETCHED = "p", "f"
RATE_SECONDS = 2.0
RATE_SIZE = 16_000
RATES = (200, 1_000)


def main(report: Report) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        quiet = ("kcoord.log.flush.policy=os", "log.cleaner.enable=false")
        with Broker(folder / "upstream", *quiet, "log.retention.bytes=200000000") as upstream:
            bootstrap = f"kcoord.upstream.bootstrap.servers=127.0.0.1:{upstream.port}"
            ports = ("kcoord.upstream.ports=0", "offsets.topic.num.partitions=1")
            with (
                Broker(folder / "gateway", *quiet, bootstrap, *ports) as gateway,
                Server(["bench.relay", str(upstream.port)]) as relay,
            ):
                ways = {"gateway": (gateway, broker_port(gateway.port, upstream)), "relay": (relay, relay.port)}
                create_topics(upstream.port)
                cpu_per_megabyte(report, ways)
                latencies(report, {"direct": upstream.port} | {name: port for name, (_, port) in ways.items()})


def broker_port(port: int, upstream: Server) -> int:
    """Returns the port that stands for the only broker of the upstream."""
    connection = Connection(port)
    response = connection.call(ApiKey.METADATA, 12, MetadataRequest(topics=[]), MetadataResponse)
    connection.close()
    return next(broker.port for broker in response.brokers if broker.node_id == response.controller_id)


def create_topics(port: int) -> None:
    connection = Connection(port)
    topics = [
        CreateTopicsRequest.CreatableTopic(name=f"{kind}{size}", num_partitions=1, replication_factor=1)
        for kind in (PRODUCED, FETCHED)
        for size in SIZES
    ]
    request = CreateTopicsRequest(topics=topics, timeout_ms=10_000)
    assert not any(
        topic.error_code for topic in connection.call(ApiKey.CREATE_TOPICS, 7, request, CreateTopicsResponse).topics
    )
    connection.close()


def produce_frame(size: int, kind: str = PRODUCED) -> bytes:
    """Returns a Produce request with one record of `size` bytes."""
    records = encode_batch_from_parts([(None, Random(size).randbytes(size))], 1_700_000_000_000)
    partition = ProduceRequest.PartitionProduceData(index=0, records=records)
    topic = ProduceRequest.TopicProduceData(name=f"{kind}{size}", partition_data=[partition])
    request = ProduceRequest(acks=1, timeout_ms=10_000, topic_data=[topic])
    return encode_request(ApiKey.PRODUCE, PRODUCE_VERSION, 1, "bench", request.encode(PRODUCE_VERSION))


def fetch_frame(size: int, max_bytes: int) -> bytes:
    """Returns a Fetch request for the first records of a topic."""
    partition = FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=max_bytes)
    topic = FetchRequest.FetchTopic(topic=f"{FETCHED}{size}", partitions=[partition])
    request = FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=max_bytes, topics=[topic])
    return encode_request(ApiKey.FETCH, FETCH_VERSION, 1, "bench", request.encode(FETCH_VERSION))


def pump(port: int, frame: bytes, count: int) -> int:
    """Sends a frame `count` times, at most IN_FLIGHT unanswered. Returns the number of bytes of the responses."""
    connection = Connection(port)
    received = sent = answered = 0
    while answered < count:
        while sent < count and sent - answered < IN_FLIGHT:
            connection.send(frame)
            sent += 1
        received += len(connection.receive())
        answered += 1
    connection.close()
    return received


def cpu_per_megabyte(report: Report, ways: dict[str, tuple[Server, int]]) -> None:
    table = report.table(
        "CPU of data that is passed on", "requests", "bytes of a frame", "relay ms per MB", "gateway ms per MB", "ratio"
    )
    for size in SIZES:
        frame = produce_frame(size)
        count = min(max(MEGABYTES * 1_000_000 // len(frame), 20), 10_000)
        best = smallest(ways, frame, count)
        table.row("Produce", len(frame), best["relay"], best["gateway"], best["gateway"] / best["relay"])
    for size in SIZES:
        pump(ways["relay"][1], produce_frame(size, FETCHED), 1)
        frame = fetch_frame(size, 1_000_000)
        answer = pump(ways["relay"][1], frame, 1)
        count = min(max(MEGABYTES * 1_000_000 // answer, 20), 10_000)
        best = smallest(ways, frame, count)
        table.row("Fetch", answer, best["relay"], best["gateway"], best["gateway"] / best["relay"])


def smallest(ways: dict[str, tuple[Server, int]], frame: bytes, count: int) -> dict[str, float]:
    """Returns the smallest CPU time of a round in ms per MB, for each way."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, (server, port) in ways.items():
            before = server.cpu_seconds()
            passed_bytes = count * len(frame) + pump(port, frame, count)
            best[name] = min(best[name], (server.cpu_seconds() - before) * 1e9 / passed_bytes)
    return best


def latencies(report: Report, ports: dict[str, int]) -> None:
    table = report.table(
        f"Produce of {RATE_SIZE // 1000} kB at a fixed rate", "requests per s", "way", "done per s", "p50 ms", "p99 ms"
    )
    for rate in RATES:
        rounds = [
            {name: at_rate(port, produce_frame(RATE_SIZE), rate) for name, port in ports.items()} for _ in range(ROUNDS)
        ]
        for name in ports:
            results = [one_round[name] for one_round in rounds]
            best_p50, best_p99 = (min(percentile(times, share) for _, times in results) for share in (0.5, 0.99))
            table.row(rate, name, round(max(done for done, _ in results)), best_p50, best_p99)


def at_rate(port: int, frame: bytes, rate: int) -> tuple[float, list[float]]:
    """Sends at a fixed rate, whatever the responses do. Returns responses per s, and latencies in ms."""
    connection = Connection(port)
    count = int(rate * RATE_SECONDS)
    due: deque[float] = deque()
    times: list[float] = []

    def receive() -> None:
        for _ in range(count):
            connection.receive()
            times.append((time.perf_counter() - due.popleft()) * 1000)

    receiver = threading.Thread(target=receive)
    start = time.perf_counter() + 0.01
    receiver.start()
    for number in range(count):
        at = start + number / rate
        time.sleep(max(at - time.perf_counter(), 0))
        due.append(at)
        connection.send(frame)
    receiver.join()
    seconds = time.perf_counter() - start
    connection.close()
    return count / seconds, times


def percentile(times: Iterable[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
