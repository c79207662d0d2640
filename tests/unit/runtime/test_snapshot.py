# SPDX-License-Identifier: Apache-2.0
"""Loading from a snapshot and the log after it, and snapshots that are taken while the machine runs operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.loader import LoadError
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import RECORDS, Chunk, PackedState, make_chunks
from kcoord.runtime.waiting import ShardState
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, OffsetCommitRequest, OffsetDeleteRequest
from kcoord_protocol.record_batch import BatchHeader, iter_headers
from tests.unit.group.images import image_of
from tests.unit.runtime.ledger import SHARD, Bench, Ledger, SavedLedger

SERDE = CoordinatorSerde()


class SavedBench(Bench):
    def _make(self, shard_id: int) -> Ledger:
        self.made.append(SavedLedger())
        return self.made[-1]


def chunks_of(bench: Bench) -> list[Chunk]:
    slices = bench.runtime.snapshots.slices(SHARD)
    assert slices is not None
    return [chunk for slice_ in slices for chunk in slice_]


def reloaded(bench: Bench, offset: int, chunks: list[Chunk]) -> Ledger:
    batches = ((header, data) for header, data in bench.batches() if header.next_offset > offset)
    bench.runtime.close_shard(SHARD)
    bench.runtime.load(SHARD, batches, bench.now_ms, 0, chunks)
    return bench.ledger


def test_a_snapshot_and_the_log_after_it_give_the_state() -> None:
    bench = SavedBench()
    bench.load()
    for number in range(300):
        bench.run(Ledger.put, f"n{number}", number)
    bench.written(bench.poll())
    chunks, offset = chunks_of(bench), bench.runtime.offsets(SHARD)[1]
    assert {chunk.kind for chunk in chunks} == {RECORDS, 4}
    for number in range(250, 350):
        bench.run(Ledger.put, f"n{number}", -number)
    bench.written(bench.poll())
    expected = dict(bench.ledger.balance)
    assert reloaded(bench, offset, chunks).balance == expected
    assert bench.runtime.offsets(SHARD) == (400, 400)


def test_a_machine_without_snapshots_has_none() -> None:
    bench = Bench()
    bench.load()
    assert bench.runtime.snapshots.slices(SHARD) is None


@pytest.mark.parametrize(
    ("chunk", "message"),
    [(Chunk(9, b""), "unknown kind 9"), (Chunk(4, b"nonsense"), "cannot be used")],
    ids=["unknown", "malformed"],
)
def test_a_malformed_snapshot_fails_the_load(chunk: Chunk, message: str) -> None:
    bench = SavedBench()
    bench.load()
    with pytest.raises(LoadError, match=message):
        reloaded(bench, 0, [chunk])
    assert bench.runtime.state(SHARD) is ShardState.FAILED
    bench.load()
    assert bench.runtime.state(SHARD) is ShardState.ACTIVE


def test_slices_are_small() -> None:
    parts = iter([PackedState(4, b"x")] * 1000)
    sizes = [len(chunks) for chunks in make_chunks(parts, SERDE)]
    assert max(sizes) <= 100
    assert sum(sizes) == 1000


def test_a_shard_that_is_failed_from_outside_can_be_loaded_again() -> None:
    bench = Bench()
    bench.load()
    bench.runtime.fail_shard(SHARD, "its log is damaged")
    assert bench.runtime.state(SHARD) is ShardState.FAILED
    assert bench.poll().closes == [SHARD]
    bench.runtime.fail_shard(SHARD, "once more")
    assert bench.poll().closes == ()
    bench.load()
    assert bench.runtime.state(SHARD) is ShardState.ACTIVE


# -- group shards ------------------------------------------------------------------------------------------------------


class GroupBench:
    """A runtime with one group shard over a log in memory."""

    def __init__(self) -> None:
        self.config = BrokerConfig.from_properties({"group.consumer.assignment.interval.ms": "0"})
        self.image = image_of({"t": 8}, epoch=1)
        self.runtime = self.new_runtime()
        self.runtime.load(SHARD, (), 0)
        self.disk = b""
        self.tokens = 0

    def new_runtime(self) -> ShardSet[GroupCoordinatorShard]:
        return ShardSet(lambda _: GroupCoordinatorShard(self.config, self.image), SERDE)

    def run(
        self, operation: Callable[[GroupCoordinatorShard, OperationContext], CoordinatorResult[Any]], version: int = 9
    ) -> None:
        self.tokens += 1
        context = OperationContext(self.tokens, api_version=version, token=self.tokens, candidate_id=f"id{self.tokens}")
        try:
            self.runtime.run(SHARD, lambda shard, context, _: operation(shard, context), None, context)
        except KafkaError:
            return
        for append in self.runtime.poll(self.tokens).appends:
            self.disk += append.data
            self.runtime.written(append)

    def batches(self, offset: int) -> Iterator[tuple[BatchHeader, bytes]]:
        for position, header in iter_headers(self.disk):
            if header.next_offset > offset:
                yield header, self.disk[position : position + header.size_bytes]

    def do(self, step: int) -> None:
        """Changes groups, members, assignments or offsets. The step selects the operation."""
        group_id, member_id = f"g{step % 5}", f"m{step % 3}"
        match step % 7:
            case 0 | 1 | 2:
                self.run(lambda shard, context: shard.commit_offset(context, _commit(group_id, step)))
            case 3 | 4:
                join = ConsumerGroupHeartbeatRequest(
                    group_id=group_id,
                    member_id=member_id,
                    member_epoch=0,
                    rebalance_timeout_ms=1000,
                    subscribed_topic_names=["t"],
                    topic_partitions=[],
                )
                self.run(lambda shard, context: shard.consumer_group_heartbeat(context, join), 1)
            case 5:
                leave = ConsumerGroupHeartbeatRequest(group_id=group_id, member_id=member_id, member_epoch=-1)
                self.run(lambda shard, context: shard.consumer_group_heartbeat(context, leave), 1)
            case _ if step % 2:
                self.run(lambda shard, context: shard.delete_groups(context, [group_id]))
            case _:
                topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(
                    name="t",
                    partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=step % 8)],
                )
                request = OffsetDeleteRequest(group_id=group_id, topics=[topic])
                self.run(lambda shard, context: shard.delete_offsets(context, request))


def _commit(group_id: str, step: int) -> OffsetCommitRequest:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(
        partition_index=step % 8, committed_offset=step, committed_metadata="note" if step % 3 == 0 else ""
    )
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=[partition])
    return OffsetCommitRequest(group_id=group_id, generation_id_or_member_epoch=-1, topics=[topic])


@pytest.mark.parametrize("begin", range(0, 40, 3))
def test_a_snapshot_taken_during_changes_and_the_log_from_its_start_give_the_state(begin: int) -> None:
    bench = GroupBench()
    for step in range(begin):
        bench.do(step)
    machine = bench.runtime.machine(SHARD)
    assert machine is not None
    parts = machine.snapshot()
    assert parts is not None
    offset = bench.runtime.offsets(SHARD)[1]
    chunks: list[Chunk] = []
    for step, part in enumerate(parts, begin):
        chunks += (chunk for slice_ in make_chunks(iter([part]), SERDE) for chunk in slice_)
        bench.do(step * 5 + 3)
    for step in range(20):
        bench.do(step)
    runtime = bench.new_runtime()
    runtime.load(SHARD, bench.batches(offset), 0, 0, chunks)
    loaded, live = runtime.machine(SHARD), bench.runtime.machine(SHARD)
    assert loaded is not None
    assert live is not None
    assert loaded.hard_state() == live.hard_state()


def test_an_empty_image_is_enough_to_load() -> None:
    runtime = ShardSet(lambda _: GroupCoordinatorShard(BrokerConfig.from_properties({}), MetadataImage.empty()), SERDE)
    runtime.load(SHARD, (), 0)
    assert list(runtime.snapshots.slices(SHARD) or ()) == [[]]
