# SPDX-License-Identifier: Apache-2.0
"""A broker without sockets and threads: real group shards over logs in memory, a metadata image made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

from kcoord.config import BrokerConfig, Listener, SecurityProtocol
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import ImageBuilder, MetadataImage
from kcoord.runtime.coordinator_runtime import CoordinatorRuntime
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.server.api.api_table import build_api_table
from kcoord.server.api.request_context import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.disk.data_folder import FLUSH_POLICY_FSYNC
from kcoord.server.disk.shard_logs import ShardLogs
from kcoord.server.shards.group_service import GroupService
from kcoord.server.workers.worker import Worker
from kcoord.storage.file_system import FileSystem, make_durable_dirs
from kcoord.storage.journal import JOURNAL_FILE, Journal
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.storage.segment import LogConfig
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import FeatureLevelRecord, Message, PartitionRecord, TopicRecord

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


class Harness:
    """`call` sends a request through its handler and returns the answer."""

    def __init__(self, *, file_system: FileSystem | None = None, **settings: str) -> None:
        self.file_system = file_system or MemoryFileSystem()
        properties = {"group.consumer.assignment.interval.ms": "0", "kcoord.log.flush.policy": "os"}
        properties.update({key.replace("_", "."): value for key, value in settings.items()})
        self.config = BrokerConfig.from_properties(properties)
        self.now = 1_700_000_000_000
        self.image = image_of(TOPICS)
        is_journaled = self.config.kcoord_log_flush_policy == FLUSH_POLICY_FSYNC
        self.worker = Worker(asyncio.get_running_loop(), self.now_ms, self._begin_journal() if is_journaled else None)
        self.runtime = CoordinatorRuntime(self._new_shard, CoordinatorSerde())
        logs = ShardLogs("__consumer_offsets", self._open_log, self._has_log, self.file_system)
        self.groups = GroupService(
            self.runtime,
            logs,
            self,
            configured_shards=SHARDS,
            background_threads=1,
            write_timeout_ms=self.config.offsets_commit_timeout_ms,
        )
        self.worker.add(self.groups.driver)
        self.broker = Broker(
            config=self.config,
            cluster_id="cluster",
            apis=build_api_table(self.config),
            image=self.image,
            topics=cast("Any", SimpleNamespace()),
            fetches=cast("Any", SimpleNamespace()),
            metadata=cast("Any", SimpleNamespace()),
            groups=self.groups,
            transactions=cast("Any", SimpleNamespace()),
            now_ms=self.now_ms,
        )
        self.broker.endpoints["PLAINTEXT"] = Listener("PLAINTEXT", "broker", 9092, SecurityProtocol.PLAINTEXT)

    def _new_shard(self, shard_id: int) -> GroupCoordinatorShard:
        return GroupCoordinatorShard(self.config, self.image, self.groups.counters)

    def _open_log(self, shard_id: int) -> Log:
        return Log.open(self.file_system, f"data/__consumer_offsets-{shard_id}", LogConfig(), self.now)

    def _begin_journal(self) -> Journal:
        make_durable_dirs(self.file_system, "data")
        return Journal(self.file_system, f"data/{JOURNAL_FILE}")

    def _has_log(self, shard_id: int) -> bool:
        return self.file_system.exists(f"data/__consumer_offsets-{shard_id}")

    def now_ms(self) -> int:
        return self.now

    def wake(self) -> None:
        self.worker.wake()

    def on_coordinator_append(self, shard_id: int, size_bytes: int) -> None:
        """No fetch waits for it here."""

    def tombstones_kept_ms(self) -> int:
        return TOMBSTONES_KEPT_MS

    def on_shards_given_up(self) -> None:
        """The topic stays here."""

    def spawn(self, coroutine: Coroutine[object, object, None]) -> object:
        return self.broker.spawn(coroutine)

    async def open(self) -> Harness:
        """Takes the shards over and loads them."""
        await self.groups.load(self.groups.open_shards(SHARDS))
        return self

    def context(self, api_key: ApiKey, version: int) -> RequestContext:
        return RequestContext(api_key, version, 1, "client", "/192.0.2.1", "PLAINTEXT", "User:ANONYMOUS", self.now)

    def send(self, request: Message, version: int) -> object:
        """The answer or its future, as a connection gets it."""
        api = self.broker.apis.apis[request.api_key]
        handle, error_response = api.functions()
        # Through the bytes: a handler never sees a field that its version does not have.
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
