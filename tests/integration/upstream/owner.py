# SPDX-License-Identifier: Apache-2.0
"""An instance that keeps numbers by name in a topic of an upstream: a shard set with its log, driver and pump.

`python -m tests.integration.upstream.owner ADDRESS TOPIC FIRST` puts numbers from FIRST on, and prints each one that is
acknowledged, until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Self

from kcoord.client.cluster import Cluster
from kcoord.client.config import CommonConfig
from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.waiting import DeferredReply, ShardState
from kcoord.server.shards.shard_service import Pump, ShardDriver
from kcoord.upstream.requests import PartitionRequests
from kcoord.upstream.shard_log import UpstreamShardLog
from kcoord_protocol.errors import KafkaError
from tests.unit.runtime.ledger import Ledger

TICK_SECONDS = 0.02
SERVED_SECONDS = 60.0
FOREIGN_ID_WAIT_MS = 300


class Owner:
    """Claims all partitions of a topic. Use it with `async with`."""

    def __init__(self, address: str, topic: str, *, partitions: int = 2, write_timeout_ms: int = 3_000) -> None:
        self._address = address
        self._topic = topic
        self._partitions = partitions
        self._write_timeout_ms = write_timeout_ms
        self.has_lease = True
        """Whether this instance may act as the owner of shards."""
        self.shards: ShardSet[Ledger] = ShardSet(
            lambda _: Ledger(),
            CoordinatorSerde(),
            name="ledgers",
            first_reload_ms=50,
            longest_reload_ms=200,
            loads_at_a_time=10,
            takes_snapshots=False,
        )

    @staticmethod
    def now_ms() -> int:
        return int(time.monotonic() * 1000)

    async def __aenter__(self) -> Self:
        self._cluster = Cluster(
            CommonConfig(
                bootstrap_servers=self._address,
                client_id="upstream-owner",
                request_timeout_ms=2_000,
                retry_backoff_ms=20,
                reconnect_backoff_max_ms=200,
            )
        )
        await self._cluster.start(self._cluster.deadline(20_000))
        self._requests = PartitionRequests(self._cluster, self._topic, attempt_timeout_ms=1_000)
        loop = asyncio.get_running_loop()
        pump = self._pump = Pump(loop, self.now_ms, None)
        self.log = UpstreamShardLog(
            self.shards,
            self._requests,
            cluster_id=self._topic,
            owner="test",
            write_timeout_ms=self._write_timeout_ms,
            foreign_id_wait_ms=FOREIGN_ID_WAIT_MS,
            wake=pump.wake,
            now_ms=self.now_ms,
            may_act=lambda: self.has_lease,
            on_fenced=lambda _: None,
        )
        self._driver = ShardDriver(self.shards, self.log, pump.wake)
        pump.add(self._driver)
        self.shards.open_shards(self._partitions, range(self._partitions), (), self.now_ms())
        pump.wake()
        self._ticker = loop.create_task(self._tick())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._ticker.cancel()
        self.log.stop()
        await self._requests.stop()
        await self._cluster.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.log.tick(self.now_ms())
            self._pump.wake()

    async def served(self, seconds: float = SERVED_SECONDS) -> None:
        """Waits until all shards are active."""
        async with asyncio.timeout(seconds):
            while any(self.state(shard_id) is not ShardState.ACTIVE for shard_id in range(self._partitions)):
                await asyncio.sleep(TICK_SECONDS)

    def state(self, shard_id: int = 0) -> ShardState:
        return self.shards.state(shard_id)

    def claim(self) -> None:
        """Claims the shards that other owners have taken."""
        self.shards.claim(range(self._partitions))
        self._pump.wake()

    async def put(self, name: str, value: int, shard_id: int = 0) -> str:
        """Sets a number. Raises KafkaError if the upstream does not acknowledge it."""
        reply = self.shards.run(
            shard_id, lambda ledger, context, _: ledger.put(context, name, value), None, OperationContext(self.now_ms())
        )
        self._pump.wake()
        assert isinstance(reply, DeferredReply), "the response to a write has left before the write was durable"
        answer: str = await self._driver.future_of(reply)
        return answer

    def balance(self, shard_id: int = 0) -> dict[str, int]:
        """Returns all numbers of an active shard."""
        machine = self.shards.machine(shard_id)
        assert machine is not None, f"the shard is {self.state(shard_id)}"
        return machine.balance


async def _put_for_ever(address: str, topic: str, value: int) -> None:
    async with Owner(address, topic, partitions=1) as owner:
        await owner.served()
        while True:
            value += 1
            try:
                await owner.put("a", value)
            except KafkaError:
                await owner.served()
                continue
            print(value, flush=True)


if __name__ == "__main__":
    asyncio.run(_put_for_ever(sys.argv[1], sys.argv[2], int(sys.argv[3])))
