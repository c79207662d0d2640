# SPDX-License-Identifier: Apache-2.0
"""Broker CPU per record of Produce and Fetch, with the requests that Kafka's own producer and consumer send.

A Produce request has one batch of 16 kB for each of 6 partitions, from an idempotent producer, and five of them are in
flight. A Fetch request asks for all partitions, up to 1 MiB of each. Nothing is synced. The smallest of several rounds
counts.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from random import Random

from bench.report import Report
from bench.wire import Broker, Connection
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.batch_header import stamp_producer
from kcoord_protocol.compiled import IS_COMPILED
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    FetchRequest,
    FetchResponse,
    ProduceRequest,
    ProduceResponse,
)
from kcoord_protocol.record_batch import Record, encode_batch, iter_headers

SIZES = (100, 1_000)
BATCH_BYTES = 16_000
PARTITIONS = 6
REQUESTS = 300
"""Number of Produce requests of a round, 29 MB."""
IN_FLIGHT = 5
ROUNDS = 5
PRODUCE_VERSION = 12
FETCH_VERSION = 12
PRODUCER_ID = 4_711
_NOW_MS = int(time.time() * 1000)


def main(report: Report) -> None:
    table = report.table("data", "form", "requests", "record bytes", "CPU us per record", "ms per MB", "records per s")
    forms = {"compiled": "kcoord", "pure": "bench.pure"} if IS_COMPILED else {"pure": "kcoord"}
    settings = ("kcoord.log.flush.policy=os", "log.retention.bytes=100000000")
    for form, module in forms.items():
        with tempfile.TemporaryDirectory() as folder, Broker(Path(folder), *settings, module=module) as broker:
            for size in SIZES:
                for name, (cpu_us, seconds) in measure(broker, size).items():
                    table.row(form, name, size, cpu_us, cpu_us * 1000 / size, round(1 / seconds))


def measure(broker: Broker, size: int, rounds: int = ROUNDS) -> dict[str, tuple[float, float]]:
    """Returns the smallest CPU time in us and the shortest time in s per record, of Produce and of Fetch."""
    smallest = {name: (float("inf"), float("inf")) for name in ("Produce", "Fetch")}
    batch = Batch(size)
    count = REQUESTS * PARTITIONS * batch.count
    for number in range(rounds):
        topic = f"data-{size}-{number}"
        connection = Connection(broker.port)
        create_topic(connection, topic)
        frames = [batch.request(topic, sequence) for sequence in range(REQUESTS)]
        for name in smallest:
            cpu, wall = broker.cpu_seconds(), time.perf_counter()
            if name == "Produce":
                produce(connection, frames)
            else:
                fetch(connection, topic, count)
            cpu, wall = (broker.cpu_seconds() - cpu) * 1e6 / count, (time.perf_counter() - wall) / count
            smallest[name] = min(smallest[name][0], cpu), min(smallest[name][1], wall)
        connection.close()
    return smallest


class Batch:
    """A batch of records of `size` random bytes, which fills BATCH_BYTES."""

    def __init__(self, size: int) -> None:
        random = Random(size)
        self.count = BATCH_BYTES // (size + 8)
        self._batch = encode_batch(
            [Record(None, random.randbytes(size), timestamp_ms=_NOW_MS + n // 16) for n in range(self.count)]
        )

    def request(self, topic: str, number: int) -> bytes:
        """Returns the frame of request `number`, which continues the sequence of the one before."""
        batch = stamp_producer(self._batch, PRODUCER_ID, 0, number * self.count)
        partitions = [ProduceRequest.PartitionProduceData(index=index, records=batch) for index in range(PARTITIONS)]
        topics = [ProduceRequest.TopicProduceData(name=topic, partition_data=partitions)]
        request = ProduceRequest(acks=-1, timeout_ms=10_000, topic_data=topics)
        return encode_request(ApiKey.PRODUCE, PRODUCE_VERSION, number, "bench", request.encode(PRODUCE_VERSION))


def create_topic(connection: Connection, topic: str) -> None:
    creatable = CreateTopicsRequest.CreatableTopic(name=topic, num_partitions=PARTITIONS, replication_factor=1)
    request = CreateTopicsRequest(topics=[creatable], timeout_ms=10_000)
    response = connection.call(ApiKey.CREATE_TOPICS, 5, request, CreateTopicsResponse)
    assert response.topics[0].error_code == Errors.NONE, response


def produce(connection: Connection, frames: list[bytes]) -> None:
    answered = 0
    for sent, frame in enumerate(frames, 1):
        connection.send(frame)
        if sent - answered == IN_FLIGHT or sent == len(frames):
            for _ in range(sent - answered if sent == len(frames) else 1):
                response = connection.receive()
                answered += 1
                _, body = decode_response_header(response, ApiKey.PRODUCE, PRODUCE_VERSION)
                produced = ProduceResponse.decode(response[body:], PRODUCE_VERSION)
                assert not any(part.error_code for part in produced.responses[0].partition_responses), produced


def fetch(connection: Connection, topic: str, count: int) -> None:
    """Fetches `count` records, all of the topic."""
    offsets = [0] * PARTITIONS
    while sum(offsets) < count:
        partitions = [
            FetchRequest.FetchPartition(partition=index, fetch_offset=offset, partition_max_bytes=1 << 20)
            for index, offset in enumerate(offsets)
        ]
        request = FetchRequest(
            max_wait_ms=500,
            min_bytes=1,
            max_bytes=50 << 20,
            topics=[FetchRequest.FetchTopic(topic=topic, partitions=partitions)],
        )
        response = connection.call(ApiKey.FETCH, FETCH_VERSION, request, FetchResponse)
        for part in response.responses[0].partitions:
            assert part.error_code == Errors.NONE, part
            batches = list(iter_headers(part.records or b""))
            if batches:
                offsets[part.partition_index] = batches[-1][1].next_offset
