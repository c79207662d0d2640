# SPDX-License-Identifier: Apache-2.0
"""The digest of topics, compared with values of Kafka 4.3.1's own class (TopicHashes.java), and when it is computed."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from kcoord.coordinator.group.consumer import assignment
from kcoord.metadata.image import ImageBuilder, MetadataImage, PartitionImage, TopicImage
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.messages import PartitionChangeRecord, PartitionRecord, RegisterBrokerRecord, TopicRecord

RECORDED = Path(__file__).parent / "kafka_topic_hashes.json"
VECTORS = json.loads(RECORDED.read_text(encoding="utf-8"))
TOPIC_ID = b"t" * 16


def topic_of(name: str, topic_id: str, racks: Sequence[Sequence[str]]) -> tuple[TopicImage, dict[int, str]]:
    """Returns a topic with every replica on a different broker, and the racks of these brokers."""
    racks_by_broker: dict[int, str] = {}
    partitions = []
    for number, of_partition in enumerate(racks):
        replicas = list(range(len(racks_by_broker), len(racks_by_broker) + len(of_partition)))
        racks_by_broker.update(zip(replicas, of_partition, strict=True))
        partitions.append(PartitionImage(number, 0, 0, 0, replicas, replicas))
    return TopicImage(name, bytes.fromhex(topic_id), partitions), racks_by_broker


@pytest.mark.parametrize("vector", VECTORS["topics"], ids=lambda vector: f"{vector['name'][:8]}-{len(vector['racks'])}")
def test_a_topic_has_the_hash_that_kafka_computes(vector: dict[str, object]) -> None:
    topic, racks = topic_of(vector["name"], vector["id"], vector["racks"])  # type: ignore[arg-type]
    assert assignment.topic_hash(topic, racks) == vector["hash"]


@pytest.mark.parametrize("vector", VECTORS["groups"], ids=lambda vector: f"{len(vector['topics'])}")
def test_topics_together_have_the_hash_that_kafka_computes(
    vector: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = vector["topics"]
    assert isinstance(hashes, dict)
    topics = {name: TopicImage(name, name.encode().ljust(16), []) for name in hashes}
    image = MetadataImage(1, topics, {}, {}, {}, {}, 0, -1)
    monkeypatch.setattr(assignment, "topic_hash", lambda topic, racks: hashes[topic.name])
    assert assignment.metadata_hash(image, [*hashes, "unknown"]) == vector["hash"]


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 65_535, 65_536, 65_537, 65_793, 131_073])
def test_the_hash_without_racks_has_the_numbers_of_all_partitions(count: int) -> None:
    topic = TopicImage("", bytes(16), [PartitionImage(0, 1, 0, 0, [1], [1])] * count)
    data = struct.pack(f"<x16xii{count}i", 0, count, *range(count))
    digest = xxhash.xxh3_64_intdigest(data)
    assert assignment.topic_hash(topic, {}) % (1 << 64) == digest


def made(count: int) -> MetadataImage:
    """Returns an image with one topic of `count` partitions on two brokers; only one broker has a rack."""
    records: list[object] = [
        RegisterBrokerRecord(broker_id=1, rack="r1"),
        RegisterBrokerRecord(broker_id=2),
        TopicRecord(name="t", topic_id=TOPIC_ID),
    ]
    records += [partition(number) for number in range(count)]
    return ImageBuilder.of(CoordinatorRecord(None, value) for value in records)  # type: ignore[arg-type]


def partition(number: int) -> PartitionRecord:
    return PartitionRecord(topic_id=TOPIC_ID, partition_id=number, replicas=[1, 2], isr=[1, 2], leader=1)


def after(image: MetadataImage, change: object) -> MetadataImage:
    builder = ImageBuilder(image)
    builder.replay(CoordinatorRecord(None, change))  # type: ignore[arg-type]
    return builder.build()


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        (PartitionChangeRecord(topic_id=TOPIC_ID, partition_id=1, leader=2, isr=[2]), False),
        (PartitionChangeRecord(topic_id=TOPIC_ID, partition_id=1, replicas=[2], isr=[2]), True),
        (partition(3), True),
        (RegisterBrokerRecord(broker_id=2, rack="r2"), True),
        (RegisterBrokerRecord(broker_id=1, rack="other"), True),
        (RegisterBrokerRecord(broker_id=3), False),
        (TopicRecord(name="another", topic_id=b"a" * 16), False),
    ],
    ids=["leader", "replicas", "grown", "first-rack", "other-rack", "broker", "another-topic"],
)
def test_the_hash_depends_only_on_replicas_racks_and_the_number_of_partitions(change: object, is_other: bool) -> None:
    image = made(3)
    before = assignment.metadata_hash(image, ["t"])
    changed = after(image, change)
    now = assignment.metadata_hash(changed, ["t"])
    assert (now != before) == is_other
    assert assignment.metadata_hash(image, ["t"]) == before
    fresh = TopicImage("t", TOPIC_ID, changed.topics["t"].partitions)
    assert assignment.metadata_hash(replace(changed, topics={"t": fresh}), ["t"]) == now


def test_the_hash_of_a_large_topic_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats need the hash, so a change of a leader must not cost another pass over all partitions."""
    image = made(20_000)
    hashed_bytes: list[int] = []

    def digest(data: bytes) -> int:
        hashed_bytes.append(len(data))
        return xxhash.xxh3_64_intdigest(data)

    monkeypatch.setattr(assignment, "xxh3_64_intdigest", digest)
    before = assignment.metadata_hash(image, ["t"])
    assert max(hashed_bytes) > 200_000
    hashed_bytes.clear()
    moved = after(image, PartitionChangeRecord(topic_id=TOPIC_ID, partition_id=7, leader=2))
    assert assignment.metadata_hash(moved, ["t"]) == assignment.metadata_hash(image, ["t"]) == before
    assert hashed_bytes == [8, 8]
