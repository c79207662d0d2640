# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of members, and the pauses of the event loop of a broker with 1,000,000 offsets.

The broker measures the pauses itself (`kcoord_event_loop_own_lag_ms`). Meanwhile a client sends commits and fetches as
fast as it can, and the broker writes snapshots and cleans logs.
"""

from __future__ import annotations

import re
import signal
import socket
import tempfile
import time
import urllib.request
from pathlib import Path

from bench import recovery
from bench.report import Report
from bench.requests import create_topics, join
from bench.wire import Broker, Connection
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import OffsetCommitRequest, OffsetFetchRequest

MEMBERS = 10_000
MEMBERS_PER_GROUP = 20
LOAD_SECONDS = 20.0
IN_FLIGHT = 16


def main(report: Report) -> None:
    table = report.table("memory", "state", "RSS MB")
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder), "kcoord.log.flush.policy=os") as broker:
        connection = Connection(broker.port)
        connection.find_coordinator("g")
        create_topics(connection, {"t": 60})
        table.row("idle", broker.resident_mb())
        for number in range(MEMBERS):
            join(connection, f"group-{number // MEMBERS_PER_GROUP}", f"member-{number}")
        table.row(f"{MEMBERS:,} members in groups of {MEMBERS_PER_GROUP}", broker.resident_mb())
        connection.close()
    with tempfile.TemporaryDirectory() as folder:
        probes = recovery.fill(Path(folder))
        metrics = free_port()
        broker = Broker(Path(folder), f"kcoord.metrics.port={metrics}", "kcoord.log.flush.policy=os")
        recovery.served(broker, probes)
        table.row(f"{recovery.GROUPS * recovery.TOPICS * recovery.PARTITIONS:,} offsets, loaded", broker.resident_mb())
        before = lag(metrics)
        requests = load(broker.port)
        table.row("after commits and fetches of all groups", broker.resident_mb())
        pauses = report.table(
            f"pauses of the event loop with {recovery.GROUPS * recovery.TOPICS * recovery.PARTITIONS:,} offsets",
            *("when", "checks", "p99 ms below", "p99.9 ms below", "longest ms"),
        )
        pauses.row("start and load", *summary(before, {}))
        after = lag(metrics)
        pauses.row(f"{requests:,} commits and fetches in {LOAD_SECONDS:.0f} s", *summary(after, before))
        broker.end(signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def load(port: int) -> int:
    """Sends commits and fetches of ten partitions to all groups in turn. Returns the number of requests."""
    connection = Connection(port)
    frames = []
    for number in range(recovery.GROUPS):
        group, name = recovery.group_name(number), recovery.topic_name(number % recovery.TOPICS)
        partitions = [
            OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=index, committed_offset=2_000_000)
            for index in range(recovery.PARTITIONS)
        ]
        topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=name, partitions=partitions)
        commit = OffsetCommitRequest(group_id=group, generation_id_or_member_epoch=-1, topics=[topic])
        fetch_topic = OffsetFetchRequest.OffsetFetchRequestTopics(
            name=name, partition_indexes=list(range(recovery.PARTITIONS))
        )
        fetch_group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=[fetch_topic])
        fetch = OffsetFetchRequest(groups=[fetch_group], require_stable=False)
        frames.append(encode_request(ApiKey.OFFSET_COMMIT, 8, number, "bench", commit.encode(8)))
        frames.append(encode_request(ApiKey.OFFSET_FETCH, 8, number, "bench", fetch.encode(8)))
    deadline, sent = time.monotonic() + LOAD_SECONDS, 0
    while time.monotonic() < deadline:
        start = sent % len(frames)
        volley = frames[start : start + IN_FLIGHT]
        connection.send(b"".join(volley))
        connection.skip(len(volley))
        sent += len(volley)
    connection.close()
    return sent


Lag = dict[str, float]


def lag(port: int) -> Lag:
    """Returns bucket bound -> number of checks at or below it. "max" is the longest pause in ms."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        text = page.read().decode()
    buckets = re.finditer(r'^kcoord_event_loop_own_lag_ms_bucket\{le="([^"]+)"\} (\S+)', text, re.M)
    longest = re.search(r"^kcoord_event_loop_own_lag_max_ms (\S+)", text, re.M)
    assert longest is not None
    return {**{bucket[1]: float(bucket[2]) for bucket in buckets}, "max": float(longest[1])}


def summary(after: Lag, before: Lag) -> tuple[int, str, str, str]:
    """Returns the number of checks, the bucket bounds of p99 and p99.9, and the longest pause.

    If a pause before `before` was at least as long, only the bucket bound of the longest pause is known.
    """
    counts = {bound: after[bound] - before.get(bound, 0) for bound in after if bound != "max"}
    total = counts["+Inf"]
    bounds = [next(bound for bound, count in counts.items() if count >= total * share) for share in (0.99, 0.999, 1)]
    longest = f"{after['max']:.1f}" if after["max"] > before.get("max", 0) else f"below {bounds[2]}"
    return int(total), bounds[0], bounds[1], longest
