# SPDX-License-Identifier: Apache-2.0
"""A TopicStore on a file system in memory, with a metadata image that tests change step by step."""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.config import BrokerConfig
from kcoord.metadata.image import TOPIC_RESOURCE, MetadataImage, PartitionImage, TopicImage
from kcoord.runtime.result import Producer
from kcoord.storage.log import Log
from kcoord.storage.log_dir import Identity, LogDir
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.topics.partition import AppendResult, Verified
from kcoord.topics.store import TopicStore
from kcoord.topics.validation import single_batch
from kcoord_protocol.batch_header import decode_header
from kcoord_protocol.compression import Compression
from kcoord_protocol.record_batch import Record, encode_batch

NODE_ID = 1
NOW_MS = 1_700_000_000_000
TOPIC = "orders"


def topic_id_of(name: str, generation: int = 0) -> bytes:
    return (name.encode() + bytes(16))[:15] + bytes([generation])


def image_of(
    topics: Mapping[str, int],
    *,
    configs: Mapping[str, Mapping[str, str]] | None = None,
    leader_epoch: int = 0,
    generation: int = 0,
    leader: int = NODE_ID,
    replicas: tuple[int, ...] = (NODE_ID,),
) -> MetadataImage:
    """Returns an image of `topics`, which maps names to numbers of partitions."""
    images = {
        name: TopicImage(
            name,
            topic_id_of(name, generation),
            [PartitionImage(index, leader, leader_epoch, 0, list(replicas), [NODE_ID]) for index in range(count)],
        )
        for name, count in topics.items()
    }
    image = MetadataImage.empty()
    image.topics = images
    image.topics_by_id = {topic.id: topic for topic in images.values()}
    image.configs = {(TOPIC_RESOURCE, name): dict(values) for name, values in (configs or {}).items()}
    return image


def batch_of(
    *values: str,
    keys: bool = True,
    timestamp_ms: int = NOW_MS,
    compression: Compression = Compression.NONE,
    producer: tuple[int, int, int] = (-1, -1, -1),
    is_transactional: bool = False,
) -> bytes:
    """Returns a batch as a producer sends it; record i has the timestamp `timestamp_ms` + i."""
    records = [
        Record(value.encode() if keys else None, value.encode(), timestamp_ms=timestamp_ms + position)
        for position, value in enumerate(values)
    ]
    producer_id, producer_epoch, base_sequence = producer
    return encode_batch(
        records,
        compression=compression,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        is_transactional=is_transactional,
    )


class Cluster:
    """The topic data of one broker, which tests can stop and start again."""

    def __init__(
        self, image: MetadataImage | None = None, properties: Mapping[str, str] | None = None, *, start: bool = True
    ) -> None:
        self.fs = MemoryFileSystem()
        self.config = BrokerConfig.from_properties({"node.id": str(NODE_ID), **(properties or {})})
        self.image = image if image is not None else image_of({TOPIC: 1})
        self.internal_logs: dict[tuple[str, int], Log] = {}
        self.now_ms = NOW_MS
        if start:
            self.start()

    def start(self) -> None:
        identity = Identity("cluster", NODE_ID, "directory")
        self.log_dir = LogDir.open(self.fs, "data", identity)
        self.store = TopicStore(
            self.fs, self.log_dir, self.config, internal_log=lambda topic, index: self.internal_logs.get((topic, index))
        )
        self.store.on_metadata_update(self.image, self.now_ms)
        self.settle_folders()

    def stop(self) -> None:
        self.store.close(self.now_ms)
        self.log_dir.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def crash(self) -> None:
        """Starts again without closing anything. Every write is kept."""
        self.fs.crash(lambda kind, path, pending: pending)
        self.start()

    def update(self, image: MetadataImage) -> None:
        self.image = image
        self.store.on_metadata_update(image, self.now_ms)
        self.settle_folders()

    def settle_folders(self) -> None:
        """Makes and renames all folders, as the shell does in several turns of its event loop."""
        while self.store.settle_folders(10):
            pass

    def append(
        self,
        batch: bytes,
        topic: str = TOPIC,
        partition: int = 0,
        *,
        requires_all: bool = True,
        api_version: int = 13,
        verified: bool = False,
    ) -> AppendResult:
        """Appends a batch. `verified`: the transaction coordinator has agreed to it."""
        ticket = None
        if verified:
            header = decode_header(batch)
            producer = Producer(header.producer_id, header.producer_epoch)
            ticket = self.store.start_verification(topic, partition, producer, self.now_ms)
        return self.store.append(
            topic,
            partition,
            single_batch(batch, api_version),
            requires_all=requires_all,
            now_ms=self.now_ms,
            verified=Verified(ticket, True) if ticket is not None else None,
        )

    def tick(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        self.store.tick(self.now_ms)

    def files(self, topic: str = TOPIC, partition: int = 0) -> list[str]:
        return self.fs.list_dir(self.log_dir.partition_path(topic, partition))
