# SPDX-License-Identifier: Apache-2.0
"""Sends 10,000,000 commits to 10,000 keys, and measures the size of the data folder and the latency of heartbeats.

The size is that during the commits, and that afterwards, compared with the size of the live records. The heartbeats
are those of another group.
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import time
from pathlib import Path

from bench.report import Report
from bench.wire import Broker, Connection
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
)
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, decode_entries, iter_headers

COMMITS = 10_000_000
GROUPS = 100
PARTITIONS = 100
IN_FLIGHT = 8
SETTLE_SECONDS = 600.0
QUIET_SECONDS = 30.0
"""Twice log.cleaner.backoff.ms. A folder that has not changed during this time is clean."""
HEARTBEAT_SECONDS = 0.02
OFFSETS_TOPIC = "__consumer_offsets"


def main(report: Report) -> None:
    commits = int(os.environ.get("BENCH_COMMITS", COMMITS))
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder), "kcoord.log.flush.policy=os") as broker:
        data = Path(folder)
        latencies: list[float] = []
        stop = threading.Event()
        heart = threading.Thread(target=beat, args=(broker.port, stop, latencies))
        heart.start()
        began = time.perf_counter()
        largest = commit(broker.port, commits, data)
        seconds = time.perf_counter() - began
        stop.set()
        heart.join()
        size = settle(data)
        table = report.table(
            "compaction",
            *("commits", "keys", "s", "broker CPU s", "written MB", "largest MB", "at the end MB", "live MB"),
            *("heartbeats p50 ms", "p99 ms", "longest ms"),
        )
        latencies.sort()
        table.row(
            *(commits, GROUPS * PARTITIONS, seconds, broker.cpu_seconds(), commits * record_bytes(data) / 1e6),
            *(largest / 1e6, size / 1e6, live_bytes(data) / 1e6),
            *(1000 * latencies[len(latencies) * share // 100] for share in (50, 99)),
            latencies[-1] * 1000,
        )


def commit(port: int, commits: int, data: Path) -> int:
    """Sends the commits. Returns the largest size of the folder that it has seen."""
    connection = Connection(port)
    topic = CreateTopicsRequest.CreatableTopic(name="events", num_partitions=PARTITIONS, replication_factor=1)
    connection.call(ApiKey.CREATE_TOPICS, 7, CreateTopicsRequest(topics=[topic]), CreateTopicsResponse)
    connection.find_coordinator("g")
    frames = [bytearray(_request(number)) for number in range(GROUPS)]
    largest = sent = received = 0
    requests = commits // PARTITIONS
    while received < requests:
        while sent < requests and sent - received < IN_FLIGHT:
            frame = frames[sent % GROUPS]
            struct.pack_into(">i", frame, 8, sent)
            connection.send(bytes(frame))
            sent += 1
        answer = connection.receive()
        received += 1
        if received % 2000 == 0 or received < GROUPS:
            _, body = decode_response_header(answer, ApiKey.OFFSET_COMMIT, 8)
            response = OffsetCommitResponse.decode(answer[body:], 8)
            assert response.topics[0].partitions[0].error_code == Errors.NONE
            largest = max(largest, folder_bytes(data))
    connection.close()
    return largest


def _request(number: int) -> bytes:
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(
            partition_index=partition, committed_offset=number, committed_metadata=""
        )
        for partition in range(PARTITIONS)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="events", partitions=partitions)
    request = OffsetCommitRequest(
        group_id=f"group-{number:04d}", generation_id_or_member_epoch=-1, member_id="", topics=[topic]
    )
    return encode_request(ApiKey.OFFSET_COMMIT, 8, 0, "bench", request.encode(8))


def beat(port: int, stop: threading.Event, latencies: list[float]) -> None:
    connection = Connection(port)
    connection.find_coordinator("heart")
    request = ConsumerGroupHeartbeatRequest(
        group_id="heart", member_id="m", rebalance_timeout_ms=60000, subscribed_topic_names=["t"], topic_partitions=[]
    )
    while not stop.wait(HEARTBEAT_SECONDS):
        began = time.perf_counter()
        answer = connection.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request, ConsumerGroupHeartbeatResponse)
        latencies.append(time.perf_counter() - began)
        if answer.error_code == Errors.NONE and request.member_epoch == 0:
            request = ConsumerGroupHeartbeatRequest(
                group_id="heart", member_id="m", member_epoch=answer.member_epoch, rebalance_timeout_ms=-1
            )
    connection.close()


def settle(data: Path) -> int:
    """Waits until the cleaner has nothing more to do, at most SETTLE_SECONDS. Returns the size of the folder."""
    deadline = time.monotonic() + SETTLE_SECONDS
    size, since = folder_bytes(data), time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < QUIET_SECONDS:
        time.sleep(0.5)
        if folder_bytes(data) != size:
            size, since = folder_bytes(data), time.monotonic()
    return size


def folder_bytes(data: Path) -> int:
    """Returns the size of all files of the partitions of the internal topic."""
    total = 0
    for path in data.glob(f"{OFFSETS_TOPIC}-*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def record_bytes(data: Path) -> float:
    """Returns the size of a commit in the log before cleaning, with its share of the batch header."""
    last = [batches(path)[-1] for path in sorted(data.glob(f"{OFFSETS_TOPIC}-*")) if batches(path)]
    return sum(map(len, last)) / sum(len(decode_entries(batch)) for batch in last)


def live_bytes(data: Path) -> int:
    """Returns the size of the last record of each key, if each batch has the records of one commit request."""
    total = 0
    for path in data.glob(f"{OFFSETS_TOPIC}-*"):
        live: dict[bytes, int] = {}
        for batch in batches(path):
            for _, key, value in decode_entries(batch):
                assert key is not None
                live[key] = len(key) + len(value or b"") + 10
        total += sum(live.values()) + BATCH_OVERHEAD_BYTES * (len(live) // PARTITIONS)
    return total


def batches(folder: Path) -> list[bytes]:
    """Returns the batches of a log. Reads the files only, since the broker has the log open."""
    encoded = []
    for path in sorted(folder.glob("*.log")):
        content = path.read_bytes()
        encoded += [content[at : at + header.size_bytes] for at, header in iter_headers(content)]
    return encoded
