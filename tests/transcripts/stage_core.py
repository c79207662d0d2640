# SPDX-License-Identifier: Apache-2.0
"""The core stage: request path and handlers over one pure shard of each coordinator, without runtime, log or disk.

`GroupContext` replays the records of each operation. It also rebuilds a second shard from the whole log and a third
shard from a snapshot, and compares the three shards. So each transcript is a test of recovery, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, cast

from kcoord.coordinator.group.group import GroupTimer
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.transaction.work import WriteMarkers
from kcoord.metadata.features import GROUP_VERSION, TRANSACTION_VERSION
from kcoord.metadata.image import MetadataImage, PartitionImage, TopicImage
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext, Producer, TimerKey
from kcoord.server.api.api_table import build_api_table
from kcoord.server.broker import Broker
from kcoord.server.environment import Environment
from kcoord.server.net.path_settings import PathSettings
from kcoord_protocol.errors import KafkaError
from tests.transcripts.core_transactions import CoreTopics, CoreTransactions
from tests.transcripts.path_client import MOST_BYTES, PathClient
from tests.transcripts.stage import TOPIC_MS, Sent, Stage, config_of
from tests.unit.group.group_context import GroupContext, Waiting

START_MS: Final = 1_700_000_000_000
_SHARD: Final = 0


class CoreGroups:
    """Serves `Broker.groups` with one shard, in which an operation ends when it returns."""

    shard_ids = (_SHARD,)

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._futures: dict[int, asyncio.Future[Any]] = {}

    @property
    def group_count(self) -> int:
        return self._context.shard.group_count

    def shard_of(self, group_id: str) -> int:
        return _SHARD

    def call(self, key: str, operation: Any, request: Any, context: OperationContext) -> Any:
        return self.call_shard(_SHARD, operation, request, context)

    def call_shard(
        self,
        shard_id: int,
        operation: Callable[[GroupCoordinatorShard, OperationContext, Any], CoordinatorResult[Any]],
        request: Any,
        context: OperationContext,
    ) -> Any:
        reply = self._context.run_in(context, lambda context: operation(self._context.shard, context, request))
        if not isinstance(reply, Waiting):
            return reply
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._futures[reply.token] = future
        return future

    def deliver(self) -> None:
        """Completes the futures of requests that a later operation or a timer has answered."""
        for token in [token for token in self._futures if token in self._context.answers]:
            answer, future = self._context.answers[token], self._futures.pop(token)
            if isinstance(answer, KafkaError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def start_verification(self, shard_id: int, producer: Producer) -> int | None:
        return self._context.shard.start_verification(producer)

    def finish_verification(self, shard_id: int, producer: Producer, ticket: int) -> None:
        self._context.shard.finish_verification(producer, ticket)


class CoreStage(Stage):
    """One pure shard of each coordinator behind request paths."""

    name = "core"
    start_ms = START_MS

    async def open(self, settings: dict[str, str]) -> None:
        config = config_of(settings)
        self._context = GroupContext(config=config)
        self._context.now_ms = START_MS
        self._context.restart()
        self._groups = CoreGroups(self._context)
        self._environment = Environment(asyncio.get_running_loop(), lambda: self._context.now_ms)
        self._broker = Broker(config, self._environment, "cluster")
        self._broker.apis = build_api_table(config)
        self._broker.image = self._image()
        self._broker.groups = cast("Any", self._groups)
        self._broker.topics = cast("Any", CoreTopics())
        self._transactions = CoreTransactions(config, START_MS, self._end_in_groups)
        self._broker.transactions = cast("Any", self._transactions)
        self._settings = PathSettings(self._broker, "PLAINTEXT", MOST_BYTES, MOST_BYTES, False, None)
        self._clients: dict[str, PathClient] = {}
        self._shown = self._shown_transactions = 0

    def _image(self) -> MetadataImage:
        image = self._context.image
        topic = TopicImage("__consumer_offsets", bytes(15) + b"1", [PartitionImage(_SHARD, 1, 0, 0, [1], [1])])
        return replace(
            image,
            features={GROUP_VERSION: 1, TRANSACTION_VERSION: 2},
            topics={**image.topics, topic.name: topic},
        )

    def _end_in_groups(self, work: WriteMarkers) -> None:
        self._context.run(
            lambda context: self._context.shard.end_transaction(
                context, work.producer, work.coordinator_epoch, committed=work.committed
            )
        )

    async def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._environment.cancel_tasks()

    async def send(self, sent: Sent) -> None:
        name = sent.request.client
        if name not in self._clients:
            self._clients[name] = PathClient(self._settings, name)
        self._clients[name].send(sent)

    async def settle(self) -> None:
        """Fires timers without a delay, and runs background tasks and tasks of handlers."""
        for _ in range(5):
            self._context.sleep(0)
            self._context.run_tasks()
            self._transactions.write_markers()
            self._groups.deliver()
            await asyncio.sleep(0)
            for client in self._clients.values():
                client.read()

    async def set_topic(self, name: str, partitions: int) -> bytes:
        self._set_topics(self._context.topics | {name: partitions})
        await self.sleep(TOPIC_MS)
        return self._context.topic_id(name)

    async def delete_topic(self, name: str) -> None:
        self._set_topics({topic: count for topic, count in self._context.topics.items() if topic != name})

    async def set_group_config(self, group: str, configs: dict[str, str | None]) -> None:
        present = self._context.group_configs.setdefault(group, {})
        for key, value in configs.items():
            present.pop(key, None)
            if value is not None:
                present[key] = value
        self._set_topics(self._context.topics)

    def _set_topics(self, topics: dict[str, int]) -> None:
        self._context.update_metadata(topics)
        self._broker.image = self._image()

    async def sleep(self, milliseconds: int) -> list[str]:
        end_ms = self._context.now_ms + milliseconds
        fired: list[TimerKey] = []
        while (deadline_ms := self._transactions.next_deadline_ms()) is not None and deadline_ms <= end_ms:
            fired += self._go_to(deadline_ms)
        fired += self._go_to(end_ms)
        return [" ".join(part for part in key if part) for key in fired if key.kind != GroupTimer.OFFSETS_EXPIRATION]

    def _go_to(self, now_ms: int) -> list[TimerKey]:
        fired = self._context.sleep(now_ms - self._context.now_ms)
        self._transactions.go_to(now_ms)
        self._transactions.write_markers()
        return fired

    async def restart(self) -> None:
        self._context.restart()
        self._transactions.restart()

    async def take_records(self) -> list[CoordinatorRecord]:
        records = self._context.log[self._shown :] + self._transactions.log[self._shown_transactions :]
        self._shown, self._shown_transactions = len(self._context.log), len(self._transactions.log)
        return records
