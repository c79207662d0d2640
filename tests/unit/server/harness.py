# SPDX-License-Identifier: Apache-2.0
"""A broker without sockets: real group shards over logs in memory, and a metadata image that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kcoord.config import BrokerConfig, Listener, SecurityProtocol
from kcoord.metadata.image import ImageBuilder, MetadataImage
from kcoord.runtime.result import CoordinatorRecord, OperationContext
from kcoord.server.api.api_table import Client, RequestContext
from kcoord.server.broker import Broker
from kcoord.server.composition import compose
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.disk.shard_logs import LocalShardLog
from kcoord.server.environment import Environment
from kcoord.storage.memory_file_system import MemoryFileSystem, keep_everything
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import FeatureLevelRecord, Message, PartitionRecord, TopicRecord

T = TypeVar("T")

SHARDS = 4
TOMBSTONES_KEPT_MS = 60_000
TOPICS = {"t1": 1, "t3": 3}


def topic_id(name: str) -> bytes:
    return name.encode().ljust(16, b"\x01")


def image_of(topics: dict[str, int], group_version: int = 1) -> MetadataImage:
    records: list[Message] = [FeatureLevelRecord(name="group.version", feature_level=group_version)]
    for name, count in topics.items():
        records.append(TopicRecord(name=name, topic_id=topic_id(name)))
        records += [
            PartitionRecord(partition_id=index, topic_id=topic_id(name), replicas=[1], isr=[1], leader=1)
            for index in range(count)
        ]
    return ImageBuilder.of(CoordinatorRecord(None, record) for record in records)


class Metadata:
    """A metadata service whose image the test sets."""

    end_offset = 0

    def __init__(self, image: MetadataImage) -> None:
        self.image = image
        self.publishers: list[Callable[[MetadataImage], None]] = []

    def call(self, operation: object, request: Message, context: OperationContext) -> asyncio.Future[Any]:
        raise AssertionError("nothing changes the metadata here")

    def close(self) -> None:
        """Does nothing."""


class Harness:
    """Sends requests through their handlers (`call`). The test opens the group shards (`open`)."""

    def __init__(self, *, file_system: MemoryFileSystem | None = None, **settings: str) -> None:
        self.file_system = file_system or MemoryFileSystem()
        properties = {
            "log.dirs": "data",
            "group.consumer.assignment.interval.ms": "0",
            "kcoord.log.flush.policy": "os",
            "log.cleaner.delete.retention.ms": str(TOMBSTONES_KEPT_MS),
            "offsets.topic.num.partitions": str(SHARDS),
        }
        properties.update({key.replace("_", "."): value for key, value in settings.items()})
        self.config = BrokerConfig.from_properties(properties)
        self.now = 1_700_000_000_000
        self.image = image_of(TOPICS)
        environment = Environment(asyncio.get_running_loop(), lambda: self.now)
        self.folder = DataFolder(self.config, self.now, self.file_system)
        self.broker: Broker = compose(
            self.config, environment, self.folder, new_metadata=lambda broker, times: Metadata(self.image)
        )
        self.broker.endpoints["PLAINTEXT"] = Listener("PLAINTEXT", "broker", 9092, SecurityProtocol.PLAINTEXT)
        self.groups = self.broker.groups
        self.worker = self.broker.pump
        self.wake = self.broker.pump.wake
        self.now_ms = self.broker.now_ms
        self.runtime = self.groups.shards
        assert isinstance(self.groups.log, LocalShardLog)
        self.log = self.groups.log
        self.logs = self.log.logs

    def restarted(self) -> Harness:
        """Kills this process, and returns another process on its files."""
        self.file_system.crash(keep_everything)
        return Harness(file_system=self.file_system)

    async def open(self) -> Harness:
        """Owns all shards and loads them."""
        self.open_shards()
        await self.groups.loaded()
        return self

    def open_shards(self) -> list[int]:
        """Owns all shards. Returns those that have to be loaded."""
        empty = {shard_id for shard_id in range(SHARDS) if self.log.is_empty(shard_id)}
        self.wake()
        return self.runtime.open_shards(SHARDS, range(SHARDS), empty, self.now)

    async def pass_time(self, milliseconds: int) -> None:
        """Moves the clock, and runs the timers that are due then."""
        self.now += milliseconds
        self.worker.on_clock_moved()
        await asyncio.sleep(0.001)

    def context(self, api_key: ApiKey, version: int) -> RequestContext:
        client = Client(self.broker.apis.form, "PLAINTEXT", "192.0.2.1")
        return RequestContext(api_key, version, 1, "client", client, self.now, rights=None)

    def send(self, request: Message, version: int) -> object:
        """Returns the response or its future, as a connection gets it."""
        api = self.broker.apis.apis[request.api_key]
        handle, error_response = api.functions()
        # Encodes and decodes the request, so that the handler sees only the fields of this version.
        received = type(request).decode(request.encode(version), version)
        try:
            return handle(self.broker, self.context(api.key, version), received)
        except KafkaError as error:
            return error_response(received, error, version)

    async def call(self, request: Message, version: int) -> Any:
        answer = self.send(request, version)
        if asyncio.isfuture(answer):
            try:
                answer = await asyncio.wait_for(answer, 5)
            except KafkaError as error:
                answer = self.broker.apis.apis[request.api_key].functions()[1](request, error, version)
        message = cast("Message", answer)
        return type(message).decode(message.encode(version), version)
