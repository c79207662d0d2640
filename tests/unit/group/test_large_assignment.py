# SPDX-License-Identifier: Apache-2.0
"""A member that gets all of 100,000 partitions: one batch above Kafka's limit, and no work for each partition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.logtools.verify import FolderCheck
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import MAX_BATCH_BYTES, OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.waiting import DeferredReply
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.log import Log
from kcoord.storage.segment import LogConfig
from kcoord_protocol.batch_header import BatchHeader
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse
from kcoord_protocol.record_batch import iter_headers, rewrite_header
from tests.storage.cleaning import clean
from tests.support.calls import count_calls
from tests.unit.group.images import image_of

TOPICS = [f"topic-{number}" for number in range(10)]
NOW_MS = 1_000_000


@cache
def image_with(partitions_per_topic: int) -> MetadataImage:
    return image_of(dict.fromkeys(TOPICS, partitions_per_topic), epoch=1)


class LoneMember:
    """A shard whose only group has one member, and the bytes of its log."""

    def __init__(self, partitions_per_topic: int) -> None:
        self._image = image_with(partitions_per_topic)
        self.shards = self._loaded(())
        self.log = b""

    def _loaded(self, batches: Iterable[tuple[BatchHeader, bytes]]) -> ShardSet[GroupCoordinatorShard]:
        config = BrokerConfig.from_properties({})
        shards = ShardSet(lambda _: GroupCoordinatorShard(config, self._image), CoordinatorSerde())
        shards.load(0, iter(batches), NOW_MS, 0)
        return shards

    def join(self) -> ConsumerGroupHeartbeatResponse:
        request = ConsumerGroupHeartbeatRequest(
            group_id="g",
            member_id="m",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=TOPICS,
            topic_partitions=[],
        )
        context = OperationContext(NOW_MS, 1, client_id="c", client_host="/127.0.0.1", token=1)
        reply = self.shards.run(0, GroupCoordinatorShard.consumer_group_heartbeat, request, context)
        [append] = self.shards.poll(NOW_MS).appends
        self.log += append.data
        self.shards.written(append)
        assert isinstance(reply, DeferredReply)
        response = reply.value
        assert isinstance(response, ConsumerGroupHeartbeatResponse)
        return response

    def restarted(self, batches: Iterable[tuple[BatchHeader, bytes]] | None = None) -> ShardSet[GroupCoordinatorShard]:
        """Returns the shards that are loaded from these batches, or from the log."""
        return self._loaded(self.batches() if batches is None else batches)

    def batches(self) -> Iterator[tuple[BatchHeader, bytes]]:
        for position, header in iter_headers(self.log):
            yield header, self.log[position : position + header.size_bytes]


def state(shards: ShardSet[GroupCoordinatorShard]) -> object:
    machine = shards.machine(0)
    assert machine is not None
    return machine.hard_state()


def test_a_first_join_may_get_100_000_partitions() -> None:
    member = LoneMember(10_000)
    response = member.join()
    assert response.assignment is not None
    assert [len(topic.partitions) for topic in response.assignment.topic_partitions] == [10_000] * 10
    [(_, header)] = iter_headers(member.log)
    assert header.size_bytes > MAX_BATCH_BYTES
    assert state(member.restarted()) == state(member.shards)


def test_a_large_assignment_survives_compaction_and_verification(tmp_path: Path) -> None:
    member = LoneMember(10_000)
    member.join()
    files, folder = RealFileSystem(), tmp_path / "__consumer_offsets-0"
    log = Log.open(files, str(folder), LogConfig(segment_bytes=MAX_BATCH_BYTES), NOW_MS)
    for _, batch in member.batches():
        # Compaction removes the first copy.
        for _ in range(2):
            copy = bytearray(batch)
            rewrite_header(copy, base_offset=log.end_offset)
            log.append(copy, now_ms=NOW_MS)
    log.roll(NOW_MS)
    size_bytes = log.size_bytes
    clean(log, files)
    assert log.size_bytes < size_bytes * 0.6
    assert state(member.restarted(log.batches(0))) == state(member.shards)
    log.close()
    assert list(FolderCheck(files, str(folder)).run()) == []


@pytest.mark.parametrize("step", ["join", "restart"])
def test_calls_do_not_grow_with_the_partitions(step: str) -> None:
    counts = []
    for partitions_per_topic in (100, 2_000):
        member = LoneMember(partitions_per_topic)
        # Codecs are made, and modules imported, on first use.
        LoneMember(partitions_per_topic).join()
        if step == "join":
            counts.append(count_calls(member.join))
        else:
            member.join()
            member.restarted()
            counts.append(count_calls(member.restarted))
    small, large = counts
    # The sizes of lists in the batch have longer varints.
    assert large < small * 1.1, counts
