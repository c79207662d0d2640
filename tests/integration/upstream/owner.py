# SPDX-License-Identifier: Apache-2.0
"""An instance that keeps numbers by name in a topic of an upstream: a shard set with its log, driver and pump.

`python -m tests.integration.upstream.owner ADDRESS TOPIC FIRST` puts numbers from FIRST on, and prints each one that is
acknowledged, until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from kcoord.client.cluster import Cluster
from kcoord.client.config import CommonConfig
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.upstream_reader import TOMBSTONES_KEPT_MS
from kcoord.runtime.waiting import DeferredReply, ShardState
from kcoord.server.shards.shard_service import Pump, ShardDriver
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.upstream.requests import FETCH_BYTES, PartitionRequests, PendingBatch
from kcoord.upstream.shard_log import UpstreamShardLog
from kcoord.upstream.standby_files import StandbyFiles
from kcoord_protocol.errors import KafkaError
from tests.unit.runtime.ledger import SavedLedger, entry

TICK_SECONDS = 0.02
SERVED_SECONDS = 60.0
FOREIGN_ID_WAIT_MS = 300
DATA = "/data"
LARGE_RECORD_BYTES = 30_000
LARGE_BATCH_BYTES = 2 * FETCH_BYTES


class Owner:
    """Claims all partitions of a topic. Use it with `async with`.

    `is_standby`: follows them only, until `own`. `disk`: where its copies are, in the folder `DATA`; None to keep none.
    """

    def __init__(
        self,
        address: str,
        topic: str,
        *,
        partitions: int = 2,
        write_timeout_ms: int = 3_000,
        is_standby: bool = False,
        disk: MemoryFileSystem | None = None,
    ) -> None:
        self.is_killed = False
        """True if this instance ends without its last snapshots."""
        self.suspended_ms = 0
        """For how long the machine of this instance was suspended."""
        self._is_standby = is_standby
        self._disk = disk
        self._address = address
        self._topic = topic
        self._partitions = partitions
        self._write_timeout_ms = write_timeout_ms
        self.has_lease = True
        """Whether this instance may act as the owner of shards."""
        self.shards: ShardSet[SavedLedger] = ShardSet(
            lambda _: SavedLedger(),
            CoordinatorSerde(),
            name="ledgers",
            first_reload_ms=50,
            longest_reload_ms=200,
            loads_at_a_time=10,
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
        await self._requests.look_up_leaders()
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
            log_ms=lambda: self.now_ms() + self.suspended_ms,
            may_act=lambda: self.has_lease,
            on_fenced=lambda _: None,
            files=None if self._disk is None else StandbyFiles(self._disk, DATA, self._requests.topic_id),
            tombstones_kept_ms=TOMBSTONES_KEPT_MS,
        )
        self._driver = ShardDriver(self.shards, self.log, pump.wake)
        pump.add(self._driver)
        if self._is_standby:
            self.log.standbys.begin(range(self._partitions))
        else:
            self.own()
        self._ticker = loop.create_task(self._tick())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._ticker.cancel()
        self.shards.close()
        self.log.stop()
        if not self.is_killed:
            self.log.finish(self.shards.snapshots.last(self.now_ms()))
        await self._requests.stop()
        await self._cluster.close()

    def own(self) -> None:
        """Claims all partitions."""
        self.shards.open_shards(self._partitions, range(self._partitions), (), self.now_ms())
        self._pump.wake()

    def give_up(self) -> None:
        """Gives up all partitions, because another instance owns them."""
        self.shards.own(())
        self._pump.wake()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.log.tick(self.now_ms())
            self.shards.take_snapshots(self.now_ms())
            self._pump.wake()

    async def served(self, seconds: float = SERVED_SECONDS) -> None:
        """Waits until all shards are active, and their settled records are written.

        A fault that a test injects before that could hit a settled record instead of the test's own append.
        """
        async with asyncio.timeout(seconds):
            while not all(self._is_settled(shard_id) for shard_id in range(self._partitions)):
                await asyncio.sleep(TICK_SECONDS)

    def _is_settled(self, shard_id: int) -> bool:
        log = self.log.logs.get(shard_id)
        is_active = self.state(shard_id) is ShardState.ACTIVE
        return is_active and log is not None and log.reader.settled_id == log.claimed_id[0]

    def state(self, shard_id: int = 0) -> ShardState:
        return self.shards.state(shard_id)

    async def follows(self, expected: Mapping[str, int], shard_id: int = 0) -> None:
        """Waits until a standby has read its log to the end, and has these numbers."""
        standby = None
        for _ in range(int(SERVED_SECONDS / TICK_SECONDS)):
            standby = self.shards.standbys.get(shard_id)
            if standby is not None and standby.lag == 0 and standby.loader.machine.balance == expected:
                return
            await asyncio.sleep(TICK_SECONDS)
        assert standby is not None, f"there is no standby; the shard is {self.state(shard_id)}"
        assert (standby.lag, standby.loader.machine.balance) == (0, expected)

    async def snapshot(self, shard_id: int = 0) -> None:
        """Writes a snapshot of an owned shard, or of a standby."""
        async with asyncio.timeout(SERVED_SECONDS):
            while not self.shards.take_snapshot(shard_id, self.now_ms()):
                await asyncio.sleep(TICK_SECONDS)
            self._pump.wake()
            while self.shards.snapshots.is_taking:
                await asyncio.sleep(TICK_SECONDS)

    @property
    def loaded(self) -> int:
        """The number of records that were replayed from the log, and from snapshots as records."""
        return self.shards.statistics.records_loaded

    async def lost(self) -> None:
        """Waits until another owner has all shards, as far as this one knows."""
        async with asyncio.timeout(SERVED_SECONDS):
            while self.shards.active_shards():
                await asyncio.sleep(TICK_SECONDS)

    def claim(self) -> None:
        """Claims the shards that other owners have taken."""
        self.shards.claim(range(self._partitions))
        self._pump.wake()

    def end_the_lease_at_the_next_answer(self) -> asyncio.Event:
        """Lets the lease end right before the answer to the next append arrives. Returns the event of its arrival."""
        answered = asyncio.Event()
        produce = self._requests.produce

        def produce_one(batch: PendingBatch) -> None:
            def done(answer: int | KafkaError) -> None:
                self.has_lease = False
                batch.done(answer)
                answered.set()

            self._requests.produce = produce  # type: ignore[method-assign]
            produce(replace(batch, done=done))

        self._requests.produce = produce_one  # type: ignore[method-assign]
        return answered

    async def put_large(self, name: str, value: int, shard_id: int = 0) -> None:
        """Sets a number by one batch of LARGE_BATCH_BYTES."""
        records = [entry(name, value, LARGE_RECORD_BYTES)] * (LARGE_BATCH_BYTES // LARGE_RECORD_BYTES)
        reply = self.shards.run(
            shard_id, lambda *_: CoordinatorResult(None, records), None, OperationContext(self.now_ms())
        )
        self._pump.wake()
        assert isinstance(reply, DeferredReply)
        await self._driver.future_of(reply)

    async def put(self, name: str, value: int, shard_id: int = 0) -> str:
        """Sets a number. Raises KafkaError if the upstream does not acknowledge it."""
        reply = self.shards.run(
            shard_id,
            lambda ledger, context, _: ledger.put(context, name, value),
            None,
            OperationContext(self.now_ms()),
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
