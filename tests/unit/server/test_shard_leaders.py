# SPDX-License-Identifier: Apache-2.0
"""Coordinator shards follow the leaders of their partitions.

A broker gives up a shard with its log, and loads a shard that it leads again.
"""

from __future__ import annotations

import asyncio

import pytest

from kcoord.metadata.image import PartitionImage, TopicImage
from kcoord.runtime.shard_log import Load
from kcoord.runtime.waiting import ShardState
from kcoord.storage.errors import PartitionHeldError
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import OffsetCommitRequest, OffsetFetchRequest

from .harness import SHARDS, Harness

ME, OTHER = 1, 2
GROUP = "g"


def topic(*led: int) -> TopicImage:
    """Returns the offsets topic. This broker leads the partitions `led`, another broker the rest."""
    partitions = [PartitionImage(index, ME if index in led else OTHER, 0, 0, [ME], [ME]) for index in range(SHARDS)]
    return TopicImage("__consumer_offsets", b"o" * 16, partitions)


class Moving(Harness):
    """A coordinator whose logs another broker may still hold."""

    def __init__(self, file_system: MemoryFileSystem) -> None:
        super().__init__(file_system=file_system)
        self.handed_over: list[list[int]] = []
        self.held: set[int] = set()
        self.logs._hand_over_logs = self.handed_over.append
        open_log = self.logs._open_log

        def open_unless_held(shard_id: int) -> Log:
            if shard_id in self.held:
                raise PartitionHeldError("another broker has it")
            return open_log(shard_id)

        self.logs._open_log = open_unless_held

    async def lead(self, *led: int) -> None:
        self.groups.follow(topic(*led), ME)
        await self.groups.loaded()

    async def commit(self, offset: int) -> int:
        partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
        topics = [OffsetCommitRequest.OffsetCommitRequestTopic(name="t1", partitions=[partition])]
        answer = await self.call(OffsetCommitRequest(group_id=GROUP, topics=topics), 8)
        return int(answer.topics[0].partitions[0].error_code)

    async def committed(self) -> tuple[int, int]:
        """Returns the error code and the committed offset."""
        group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=GROUP, topics=None)
        answer = (await self.call(OffsetFetchRequest(groups=[group]), 8)).groups[0]
        return answer.error_code, answer.topics[0].partitions[0].committed_offset if answer.topics else -1


async def until_handed_over(harness: Moving, count: int) -> None:
    async with asyncio.timeout(5):
        while len(harness.handed_over) < count:
            await asyncio.sleep(0.001)


async def test_a_shard_that_another_broker_leads_is_given_up_with_its_log() -> None:
    harness = Moving(MemoryFileSystem())
    mine = harness.groups.shard_of(GROUP)
    remaining = [shard for shard in range(SHARDS) if shard != mine]
    await harness.lead(*range(SHARDS))
    assert await harness.commit(7) == 0
    await harness.lead(*remaining)
    assert sorted(harness.groups.shard_ids) == remaining
    assert await harness.commit(8) == Errors.NOT_COORDINATOR
    assert (await harness.committed())[0] == Errors.NOT_COORDINATOR
    await until_handed_over(harness, 1)
    assert harness.handed_over == [[mine]]
    assert mine not in harness.logs.open_logs()
    await harness.lead(*range(SHARDS))
    assert await harness.committed() == (0, 7)
    assert await harness.commit(8) == 0


async def test_a_shard_is_loading_while_another_broker_holds_its_log() -> None:
    harness = Moving(MemoryFileSystem())
    mine = harness.groups.shard_of(GROUP)
    await harness.lead(*range(SHARDS))
    assert await harness.commit(7) == 0
    await harness.lead()
    await until_handed_over(harness, 1)
    harness.held.add(mine)
    await harness.lead(mine)
    assert (await harness.committed())[0] == Errors.COORDINATOR_LOAD_IN_PROGRESS
    harness.held.clear()
    async with asyncio.timeout(5):
        while (await harness.committed())[0]:
            await harness.pass_time(10)
    assert await harness.committed() == (0, 7)


async def test_a_shard_that_comes_back_at_once_waits_until_its_log_is_closed() -> None:
    harness = Moving(MemoryFileSystem())
    mine = harness.groups.shard_of(GROUP)
    await harness.lead(*range(SHARDS))
    assert await harness.commit(7) == 0
    harness.groups.follow(topic(), ME)
    assert harness.groups.follow(topic(*range(SHARDS)), ME) == [], "the logs are not closed yet"
    assert mine not in harness.groups.shard_ids
    await until_handed_over(harness, 1)
    await harness.lead(*range(SHARDS))
    assert await harness.committed() == (0, 7)


async def test_a_shard_that_is_lost_while_it_loads_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Moving(MemoryFileSystem())
    mine = harness.groups.shard_of(GROUP)
    await harness.lead(*range(SHARDS))
    assert await harness.commit(7) == 0
    await harness.lead()
    await until_handed_over(harness, 1)
    read, tries = harness.log.read, []

    def lost_meanwhile(load: Load) -> None:
        tries.append(load.shard_id)
        harness.groups.follow(topic(), ME)
        read(load)

    monkeypatch.setattr(harness.log, "read", lost_meanwhile)
    await harness.lead(mine)
    await until_handed_over(harness, 2)
    assert tries == [mine]
    assert harness.runtime.state(mine) is ShardState.CLOSED
