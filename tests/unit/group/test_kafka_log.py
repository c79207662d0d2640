# SPDX-License-Identifier: Apache-2.0
"""Real logs of Kafka 4.3.1, with aborted transactions, give the offsets that Kafka's own tool described.

The sample is outside the repository; if it is absent, these tests are skipped, and pytest's summary has the reason.
"""

from __future__ import annotations

import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import CoordinatorSerde, partition_for
from kcoord.runtime.shard_set import ShardSet
from kcoord_protocol.messages import OffsetFetchRequest
from kcoord_protocol.record_batch import BatchHeader, iter_headers
from tests.support.shared import shared

PARTITIONS = 8
DESCRIBED = re.compile(r"^(\S+)\s+(\S+)\s+(\d+)\s+(\d+|-)\s+(\d+|-)\s+(-?\d+|-)\s")

Offsets = dict[tuple[str, str, int], int]


@pytest.fixture(scope="module")
def described() -> Offsets:
    """Returns committed offsets by group, topic and partition."""
    offsets: Offsets = {}
    for line in shared("spark-sample", "describe-offsets.txt").read_text().splitlines():
        match = DESCRIBED.match(line)
        if match and match[4] != "-":
            offsets[match[1], match[2], int(match[3])] = int(match[4])
    return offsets


@pytest.fixture(scope="module")
def logs() -> dict[int, bytes]:
    """Returns the joined segments of each partition."""
    segments: dict[int, dict[str, bytes]] = defaultdict(dict)
    with tarfile.open(shared("spark-sample", "consumer_offsets.tar.xz")) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.name.endswith(".log") else None
            if stream is not None:
                folder, name = member.name.split("/")[-2:]
                segments[int(folder.rpartition("-")[2])][name] = stream.read()
    return {number: b"".join(data for _, data in sorted(files.items())) for number, files in segments.items()}


def batches(data: bytes) -> Iterator[tuple[BatchHeader, bytes]]:
    for position, header in iter_headers(data):
        yield header, data[position : position + header.size_bytes]


@pytest.fixture(scope="module")
def shards(logs: dict[int, bytes]) -> dict[int, GroupCoordinatorShard]:
    config = BrokerConfig.from_properties({})
    runtime = ShardSet(lambda _: GroupCoordinatorShard(config, MetadataImage.empty()), CoordinatorSerde())
    machines = {}
    for number in range(PARTITIONS):
        runtime.load(number, batches(logs.get(number, b"")), 1_000)
        machine = runtime.machine(number)
        assert machine is not None
        machines[number] = machine
    return machines


def committed(shards: dict[int, GroupCoordinatorShard], groups: set[str]) -> Offsets:
    offsets: Offsets = {}
    for group in groups:
        request = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None)
        shard = shards[partition_for(group, PARTITIONS)]
        answer = shard.fetch_offsets(OperationContext(0), request, True).response
        for topic in answer.topics:
            for partition in topic.partitions:
                assert partition.error_code == 0
                offsets[group, topic.name, partition.partition_index] = partition.committed_offset
    return offsets


def test_offsets_are_those_that_kafka_described(shards: dict[int, GroupCoordinatorShard], described: Offsets) -> None:
    groups = {group for group, _, _ in described}
    assert len(described) == 68
    assert "etl-tx" in groups
    assert committed(shards, groups) == described
