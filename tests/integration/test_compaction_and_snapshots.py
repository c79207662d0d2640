# SPDX-License-Identifier: Apache-2.0
"""A broker process whose logs are cleaned while it serves clients, and that restarts with and without snapshots."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    FetchRequest,
    FetchResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    ProduceRequest,
    ProduceResponse,
)
from kcoord_protocol.record_batch import Record, decode_entries, decode_records, encode_batch, iter_headers
from tests.integration.conftest import MakeServer
from tests.integration.wire import WireClient
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

SNAPSHOT = "shard-state.kcoord"
PARTITIONS = 100
GROUPS = [f"group-{number}" for number in range(4)]


def client_of(server: KcoordProcess) -> WireClient:
    client = WireClient(server.port)
    request = FindCoordinatorRequest(coordinator_keys=["g"])

    def is_there() -> bool:
        answer = client.call(request, 4, FindCoordinatorResponse)
        return answer.coordinators[0].error_code == Errors.NONE

    wait_until(is_there, "a coordinator")
    return client


def create_topic(client: WireClient, name: str, partitions: int, **configs: str) -> None:
    topic = CreateTopicsRequest.CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
    topic.configs = [
        CreateTopicsRequest.CreatableTopicConfig(name=key.replace("_", "."), value=value)
        for key, value in configs.items()
    ]
    answer = client.call(CreateTopicsRequest(topics=[topic]), 7, CreateTopicsResponse)
    assert answer.topics[0].error_code == Errors.NONE, answer


def commit(client: WireClient, group_id: str, offset: int) -> None:
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=index, committed_offset=offset + index)
        for index in range(PARTITIONS)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=partitions)
    request = OffsetCommitRequest(group_id=group_id, generation_id_or_member_epoch=-1, topics=[topic])
    answer = client.call(request, 8, OffsetCommitResponse)
    assert {partition.error_code for partition in answer.topics[0].partitions} == {Errors.NONE}


def committed(client: WireClient, group_id: str) -> dict[int, int]:
    asked = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=None)
    groups: list[OffsetFetchResponse.OffsetFetchResponseGroup] = []

    def is_answered() -> bool:
        groups[:] = client.call(OffsetFetchRequest(groups=[asked]), 8, OffsetFetchResponse).groups
        return groups[0].error_code == Errors.NONE

    wait_until(is_answered, f"the offsets of {group_id}")
    return {p.partition_index: p.committed_offset for topic in groups[0].topics for p in topic.partitions}


def expected(offset: int) -> dict[int, int]:
    return {index: offset + index for index in range(PARTITIONS)}


def snapshots(server: KcoordProcess) -> list[Path]:
    return sorted(server.data.glob(f"__consumer_offsets-*/{SNAPSHOT}"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "kept": lambda path: None,
    "deleted": Path.unlink,
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-10]),
}


def test_snapshots_of_an_orderly_stop_are_used_but_never_needed(make_server: MakeServer) -> None:
    """With damaged or missing snapshots, the same offsets are served, also after kill -9 (D-10)."""
    server = make_server(log_cleaner_enable="false").start()
    with client_of(server) as client:
        create_topic(client, "t", PARTITIONS)
        for offset in range(10):
            for group_id in GROUPS:
                commit(client, group_id, offset)
    last = 9
    for name, damage in DAMAGE.items():
        server.stop()
        assert snapshots(server)
        for path in snapshots(server):
            damage(path)
        server.start()
        with client_of(server) as client:
            assert [committed(client, group_id) for group_id in GROUPS] == [expected(last)] * len(GROUPS), name
            last += 10
            for group_id in GROUPS:
                commit(client, group_id, last)
        server.restart(signal.SIGKILL)
        with client_of(server) as client:
            assert [committed(client, group_id) for group_id in GROUPS] == [expected(last)] * len(GROUPS), name
            for group_id in GROUPS:
                commit(client, group_id, last)
    assert "the whole log is read instead" in server.log


def test_cleaning_keeps_the_folder_small(make_server: MakeServer) -> None:
    """60,000 commits to 400 keys end up in less than three times the bytes of their last records."""
    server = make_server(log_cleaner_backoff_ms="100", kcoord_log_flush_policy="os").start()
    with client_of(server) as client:
        create_topic(client, "t", PARTITIONS)
        for offset in range(150):
            for group_id in GROUPS:
                commit(client, group_id, offset)
        wait_until(lambda: folder_bytes(server) < 3 * live_bytes(server), "cleaned logs", 20)
        assert [committed(client, group_id) for group_id in GROUPS] == [expected(149)] * len(GROUPS)
    assert (server.data / "cleaner-offset-checkpoint").read_text().startswith("0\n")
    for how in (signal.SIGKILL, signal.SIGTERM):
        server.restart(how)
        with client_of(server) as client:
            assert [committed(client, group_id) for group_id in GROUPS] == [expected(149)] * len(GROUPS)


def folder_bytes(server: KcoordProcess) -> int:
    total = 0
    for path in server.data.glob("__consumer_offsets-*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def live_bytes(server: KcoordProcess) -> int:
    """Returns the bytes of the last record of each key, in batches of one commit each."""
    live: dict[bytes, int] = {}
    for path in sorted(server.data.glob("__consumer_offsets-*/*.log")):
        data = path.read_bytes() if path.exists() else b""
        for position, _ in iter_headers(data):
            for _, key, value in decode_entries(data, position):
                assert key is not None
                live[key] = len(key) + len(value or b"") + 10
    return sum(live.values()) + 61 * (len(live) // PARTITIONS)


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_topic_keeps_the_last_value_of_each_key(make_server: MakeServer, policy: str) -> None:
    server = make_server(log_cleaner_backoff_ms="50").start()
    with client_of(server) as client:
        create_topic(
            client, "t", 1, cleanup_policy=policy, segment_ms="1", min_cleanable_dirty_ratio="0.01", retention_ms="-1"
        )
        for number in range(20):
            produce(client, number, [(f"k{number % 3}".encode(), str(number).encode()), (b"gone", b"x")])
        produce(client, 20, [(b"gone", None)])
        produce(client, 21, [(b"end", b"1")])
        wait_until(lambda: len(fetch(client)) == 5, "a cleaned topic")
        assert fetch(client) == [(34, b"17"), (36, b"18"), (38, b"19"), (40, None), (41, b"1")]
    for how in (signal.SIGKILL, signal.SIGTERM):
        server.restart(how)
        with client_of(server) as client:
            assert fetch(client) == [(34, b"17"), (36, b"18"), (38, b"19"), (40, None), (41, b"1")]


def produce(client: WireClient, number: int, pairs: list[tuple[bytes, bytes | None]]) -> None:
    base_ms = 1_700_000_000_000 + number * 1000
    batch = encode_batch([Record(key, value, timestamp_ms=base_ms) for key, value in pairs])
    data = ProduceRequest.TopicProduceData(
        name="t", partition_data=[ProduceRequest.PartitionProduceData(index=0, records=batch)]
    )
    request = ProduceRequest(acks=-1, timeout_ms=5000, topic_data=[data])
    answer = client.call(request, 9, ProduceResponse)
    assert answer.responses[0].partition_responses[0].error_code == Errors.NONE, answer


def fetch(client: WireClient) -> list[tuple[int, bytes | None]]:
    """Fetches all records of the topic; returns their offsets and values."""
    records: list[tuple[int, bytes | None]] = []
    offset = 0
    while True:
        partition = FetchRequest.FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=1 << 20)
        topic = FetchRequest.FetchTopic(topic="t", partitions=[partition])
        request = FetchRequest(max_wait_ms=0, min_bytes=0, topics=[topic])
        (answer,) = client.call(request, 11, FetchResponse).responses[0].partitions
        assert answer.error_code == Errors.NONE, answer
        data = answer.records or b""
        headers = list(iter_headers(data))
        if not headers:
            return records
        records += [(record.offset, record.value) for at, _ in headers for record in decode_records(data, at)]
        offset = headers[-1][1].next_offset
