# SPDX-License-Identifier: Apache-2.0
"""The start of a broker with 1,000,000 committed offsets in 10,000 groups.

Measures the start after kill -9 without and with snapshots, and after an orderly stop. The offsets are written into the
log folders directly, as one commit of 10 partitions per batch.
"""

from __future__ import annotations

import signal
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.report import Report, Table
from bench.wire import Broker, Connection
from kcoord.runtime.serde import partition_for
from kcoord.storage.checkpoints import read_offset_checkpoint
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.log import Log
from kcoord.storage.segment import LogConfig
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import OffsetFetchRequest, OffsetFetchResponse
from kcoord_protocol.record_batch import encode_batch_from_parts

GROUPS = 10_000
TOPICS = 10
PARTITIONS = 10
SHARDS = 50
ROUNDS = 5
TOPIC_ID = bytes(range(16))
SNAPSHOT = "shard-state.kcoord"
SNAPSHOT_SECONDS = 120.0
RECOVERY_POINTS = "recovery-point-offset-checkpoint"


def main(report: Report) -> None:
    table = report.table("recovery", "start", "first group ms", "all groups ms", "CPU ms", "RSS MB")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        probes = fill(data)
        measure(table, "kill -9, no snapshots", data, probes, [forget_snapshots, forget_clean_stop])
        run_for_a_while(data, probes)
        measure(table, "kill -9", data, probes, [forget_clean_stop])
        stop_cleanly(data, probes)
        measure(table, "orderly stop", data, probes, [], how=signal.SIGTERM)


def group_name(number: int) -> str:
    return f"consumer-group-{number:08d}"


def topic_name(number: int) -> str:
    return f"topic-{number:04d}-events"


def fill(data: Path) -> list[str]:
    """Writes the logs. Returns one group of each shard."""
    with Broker(data) as broker:
        connection = Connection(broker.port)
        connection.find_coordinator("g")
        connection.close()
    by_shard: dict[int, list[str]] = {}
    for number in range(GROUPS):
        by_shard.setdefault(partition_for(group_name(number), SHARDS), []).append(group_name(number))
    now_ms = int(time.time() * 1000)
    for shard_id, groups in by_shard.items():
        directory = data / f"__consumer_offsets-{shard_id}"
        log = Log.open(RealFileSystem(), str(directory), LogConfig(segment_bytes=100 << 20), now_ms)
        offset = 0
        for commit in commits(groups, now_ms):
            log.append(encode_batch_from_parts(commit, timestamp_ms=now_ms, base_offset=offset), now_ms=now_ms)
            offset += len(commit)
        log.flush()
        log.abandon()
    return [groups[-1] for groups in by_shard.values()]


def commits(groups: list[str], now_ms: int) -> Iterator[list[tuple[bytes | None, bytes | None]]]:
    value = struct.pack(">hqiBq", 4, 1_000_000, 3, 1, now_ms) + b"\x01\x00\x10" + TOPIC_ID
    for group in groups:
        for number in range(TOPICS):
            prefix = struct.pack(">hh", 1, len(group)) + group.encode()
            topic = topic_name(number).encode()
            prefix += struct.pack(">h", len(topic)) + topic
            yield [(prefix + struct.pack(">i", partition), value) for partition in range(PARTITIONS)]


def forget_snapshots(data: Path) -> None:
    for path in data.glob(f"*/{SNAPSHOT}"):
        path.unlink()


def forget_clean_stop(data: Path) -> None:
    (data / ".kafka_cleanshutdown").unlink(missing_ok=True)


def measure(
    table: Table,
    name: str,
    data: Path,
    probes: list[str],
    prepare: list[object],
    *,
    how: signal.Signals = signal.SIGKILL,
) -> None:
    rows = []
    for _ in range(ROUNDS):
        for step in prepare:
            step(data)  # type: ignore[operator]
        broker = Broker(data)
        first, last = served(broker, probes)
        rows.append((first * 1000, last * 1000, broker.cpu_seconds() * 1000, broker.resident_mb()))
        broker.end(how)
    table.row(name, *(statistics.median(column) for column in zip(*rows, strict=True)))


def served(broker: Broker, probes: list[str]) -> tuple[float, float]:
    """Fetches an offset of each of these groups. Returns the seconds from exec to the first and the last response."""
    connection = Connection(broker.port)
    topic = OffsetFetchRequest.OffsetFetchRequestTopics(name=topic_name(0), partition_indexes=[0])
    left, first = list(probes), 0.0
    while left:
        request = OffsetFetchRequest(
            groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id=left[0], topics=[topic])], require_stable=False
        )
        answer = connection.call(ApiKey.OFFSET_FETCH, 8, request, OffsetFetchResponse).groups[0]
        if answer.error_code == Errors.NONE:
            assert answer.topics[0].partitions[0].committed_offset == 1_000_000, answer
            first = first or time.perf_counter() - broker.started
            left.pop(0)
        else:
            left.append(left.pop(0))
            time.sleep(0.002)
    connection.close()
    return first, time.perf_counter() - broker.started


def run_for_a_while(data: Path, probes: list[str]) -> None:
    """Runs the broker until all shards have snapshots, and all logs have recovery points (written once a minute)."""
    broker = Broker(data)
    served(broker, probes)
    deadline = time.monotonic() + SNAPSHOT_SECONDS
    while len(list(data.glob(f"*/{SNAPSHOT}"))) < SHARDS or recovery_points(data) < SHARDS:
        assert time.monotonic() < deadline, "snapshots or recovery points are missing"
        time.sleep(0.2)
    broker.end(signal.SIGKILL)


def recovery_points(data: Path) -> int:
    """Returns the number of logs of the coordinator that have a recovery point."""
    points = read_offset_checkpoint(RealFileSystem(), str(data / RECOVERY_POINTS))
    return sum(topic == "__consumer_offsets" and offset > 0 for (topic, _), offset in points.items())


def stop_cleanly(data: Path, probes: list[str]) -> None:
    broker = Broker(data)
    served(broker, probes)
    broker.end(signal.SIGTERM)
