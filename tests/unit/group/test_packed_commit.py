# SPDX-License-Identifier: Apache-2.0
"""The fast path of commits gives the same bytes and the same state as the general path."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffsets
from kcoord.coordinator.group.offsets.packed_commit import CommitPlan
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import CoordinatorSerde, PackedBatch, SerializedRecord
from kcoord.runtime.shard_set import ShardSet
from kcoord.server.api.handlers.offset_commit import error_response
from kcoord.server.fast.offset_commit import CommitFrame, read_commit
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, OffsetCommitRequest
from kcoord_protocol.record_batch import decode_header, encode_batch_from_parts
from tests.unit.server.harness import image_of, topic_id

Topic = OffsetCommitRequest.OffsetCommitRequestTopic
Partition = OffsetCommitRequest.OffsetCommitRequestPartition

SERDE = CoordinatorSerde()
CONFIG = BrokerConfig.from_properties({})
IMAGE = image_of({"t": 200, "a-longer-topic": 200, "ü": 3})
VERSIONS = st.integers(6, 10)
OFFSETS = st.integers(-(2**63), 2**63 - 1)
EPOCHS = st.integers(-1, 2**31 - 1)
PARTITION_SETS = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, unique=True),
    st.lists(st.integers(0, 199), min_size=1, max_size=90, unique=True),
)


@dataclass
class Shape:
    group_id: str
    topics: dict[str, list[int]]

    def request(self, offset: int, leader_epoch: int) -> OffsetCommitRequest:
        return OffsetCommitRequest(
            group_id=self.group_id,
            topics=[
                Topic(
                    name=name,
                    topic_id=topic_id(name),
                    partitions=[
                        Partition(
                            partition_index=partition,
                            committed_offset=(offset + partition) % 2**63,
                            committed_leader_epoch=leader_epoch,
                            committed_metadata="",
                        )
                        for partition in partitions
                    ],
                )
                for name, partitions in self.topics.items()
            ],
        )


SHAPES = st.builds(
    Shape,
    st.sampled_from(["g", "größe", "g" * 300]),
    st.dictionaries(st.sampled_from(["t", "a-longer-topic"]), PARTITION_SETS, min_size=1),
)


def records_of(shard: GroupCoordinatorShard, request: OffsetCommitRequest, now_ms: int) -> list[SerializedRecord]:
    """Commits by the general path; returns the records."""
    result = shard.commit_offset(OperationContext(now_ms, 9), request)
    for record in result.records:
        shard.replay(record)
    return [SERDE.serialize(record) for record in result.records]


def commit(shard: GroupCoordinatorShard, request: OffsetCommitRequest, now_ms: int, base_offset: int) -> bytes:
    return encode_batch_from_parts(records_of(shard, request, now_ms), base_offset=base_offset, timestamp_ms=now_ms)


def batch_of(plan: CommitPlan, base_offset: int) -> bytes:
    batch = PackedBatch(base_offset, plan.timestamp_ms)
    batch.add(plan.encode_records(0), plan.count)
    return batch.encode()


def new_shard() -> GroupCoordinatorShard:
    return GroupCoordinatorShard(CONFIG, IMAGE)


def read(request: OffsetCommitRequest, version: int = 9) -> CommitFrame:
    frame = read_commit(request.encode(version), 0, version)
    assert frame is not None
    return frame


def topics_of(frame: CommitFrame) -> list[tuple[str, bytes, list[int]]]:
    return [(topic.name, topic.topic_id, topic.partitions) for topic in frame.shape.topics]


def cells_of(request: OffsetCommitRequest, version: int = 9) -> list[bytes]:
    body = request.encode(version)
    return [body[at : at + 12] for at in read(request, version).cells_at]


@settings(max_examples=60, deadline=None)
@given(
    SHAPES, VERSIONS, st.lists(st.tuples(OFFSETS, EPOCHS, st.integers(0, 2**53)), min_size=1, max_size=4), st.booleans()
)
def test_bytes_and_state_are_those_of_the_general_path(
    shape: Shape, version: int, commits: list[tuple[int, int, int]], has_rows: bool
) -> None:
    fast, slow = new_shard(), new_shard()
    before = shape if has_rows else Shape(shape.group_id, {"t": [100]})
    first = commit(fast, before.request(0, 0), 1, 0)
    commit(slow, before.request(0, 0), 1, 0)
    plan = CommitPlan(read(shape.request(7, 7), version).shape, version)
    written = [(decode_header(first), first)]
    base_offset = decode_header(first).next_offset
    for offset, leader_epoch, now_ms in commits:
        request = shape.request(offset, leader_epoch)
        assert fast.commit_packed(plan, cells_of(request, version), now_ms)
        data = batch_of(plan, base_offset)
        plan.replay()
        assert data == commit(slow, request, now_ms, base_offset)
        written.append((decode_header(data), data))
        base_offset += plan.count
    assert fast.hard_state() == slow.hard_state()
    runtime = ShardSet(lambda _: new_shard(), SERDE)
    runtime.load(0, written, 0)
    rebuilt = runtime.machine(0)
    assert rebuilt is not None
    assert rebuilt.hard_state() == fast.hard_state()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SHAPES, OFFSETS, st.integers(0, 2**53)), min_size=2, max_size=5))
def test_commits_share_a_batch_as_results_of_the_general_path_do(commits: list[tuple[Shape, int, int]]) -> None:
    fast, slow = new_shard(), new_shard()
    batch = PackedBatch(7, commits[0][2])
    pairs: list[SerializedRecord] = []
    for shape, offset, now_ms in commits:
        before = records_of(fast, shape.request(0, 0), 1)
        assert before == records_of(slow, shape.request(0, 0), 1)
        request = shape.request(offset, 3)
        plan = CommitPlan(read(request).shape, 9)
        assert fast.commit_packed(plan, cells_of(request), now_ms)
        batch.add(plan.encode_records(batch.count), plan.count)
        plan.replay()
        pairs += records_of(slow, request, now_ms)
    assert batch.encode() == encode_batch_from_parts(pairs, base_offset=7, timestamp_ms=commits[0][2])
    assert batch.size_bytes == len(batch.encode())
    assert fast.hard_state() == slow.hard_state()


@settings(max_examples=100, deadline=None)
@given(SHAPES, VERSIONS, st.sampled_from(["", "member"]), st.sampled_from([None, "instance"]), st.binary(max_size=300))
def test_a_frame_is_read_as_the_decoder_reads_it(
    shape: Shape, version: int, member: str, instance: str | None, noise: bytes
) -> None:
    request = shape.request(5, 3)
    request.generation_id_or_member_epoch = 8
    request.member_id, request.group_instance_id = member, instance if version >= 7 else None
    frame = read(request, version)
    decoded = OffsetCommitRequest.decode(request.encode(version), version)
    assert frame.shape.group_id == decoded.group_id
    assert frame.shape.generation_or_epoch == decoded.generation_id_or_member_epoch
    assert (frame.shape.member_id, frame.shape.instance_id) == (decoded.member_id, decoded.group_instance_id)
    assert topics_of(frame) == [
        (topic.name, topic.topic_id, [partition.partition_index for partition in topic.partitions])
        for topic in decoded.topics
    ]
    assert frame.answer == error_response(decoded, KafkaError(Errors.NONE), version).encode(version)
    body = bytearray(request.encode(version))
    for number, at in enumerate(frame.cells_at):
        body[at : at + 12] = (noise[number : number + 12] + bytes(12))[:12]
    changed = OffsetCommitRequest.decode(bytes(body), version)
    for topic in changed.topics:
        for partition in topic.partitions:
            partition.committed_offset, partition.committed_leader_epoch = 5 + partition.partition_index, 3
    assert changed.encode(version) == request.encode(version), "cells are only offsets and leader epochs"


@settings(max_examples=200, deadline=None)
@given(SHAPES, VERSIONS, st.data())
def test_a_damaged_frame_is_read_as_the_decoder_reads_it_or_not_at_all(
    shape: Shape, version: int, data: st.DataObject
) -> None:
    body = bytearray(shape.request(5, 3).encode(version))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    frame = bytes(body[: data.draw(st.sampled_from([len(body), len(body) - 1]))])
    commit_frame = read_commit(frame, 0, version)
    if commit_frame is None:
        return
    decoded = OffsetCommitRequest.decode(frame, version)
    assert topics_of(commit_frame) == [
        (topic.name, topic.topic_id, [partition.partition_index for partition in topic.partitions])
        for topic in decoded.topics
    ]
    assert not any(partition.committed_metadata for topic in decoded.topics for partition in topic.partitions)
    assert commit_frame.answer == error_response(decoded, KafkaError(Errors.NONE), version).encode(version)


def refused(shard: GroupCoordinatorShard, request: OffsetCommitRequest, version: int = 9) -> bool:
    plan = CommitPlan(read(request, version).shape, version)
    return not shard.commit_packed(plan, [bytes(12)] * plan.count, 2)


def test_a_commit_that_may_fail_takes_the_general_path() -> None:
    shard = new_shard()
    request = Shape("g", {"t": [0, 1]}).request(1, 1)
    assert refused(shard, request), "the group does not exist"
    commit(shard, Shape("g", {"t": [0]}).request(1, 1), 1, 0)
    assert not refused(shard, request)
    assert refused(shard, Shape("g", {"t": [0], "gone": [0]}).request(1, 1)), "a topic does not exist"
    assert refused(shard, Shape("g", {"t": [0, 200]}).request(1, 1)), "a partition does not exist"
    request.generation_id_or_member_epoch = 3
    assert refused(shard, request), "the generation is another"
    request.generation_id_or_member_epoch = -1
    request.topics[0].partitions[0].committed_metadata = "text"
    commit(shard, request, 1, 0)
    request.topics[0].partitions[0].committed_metadata = ""
    assert refused(shard, request), "a committed offset has metadata"


def is_readable(request: OffsetCommitRequest, version: int = 9) -> bool:
    return read_commit(request.encode(version), 0, version) is not None


def test_rare_requests_are_left_to_the_decoder() -> None:
    request = Shape("g", {"t": [0, 1]}).request(1, 1)
    assert is_readable(request)
    assert not is_readable(request, 5), "requests without leader epochs, or with a retention time"
    request.topics[0].partitions[1].partition_index = 0
    assert not is_readable(request), "a partition twice"
    request = Shape("g", {"t": [0]}).request(1, 1)
    request.topics *= 2
    assert not is_readable(request), "a topic twice"
    request = Shape("g", {"t": [0]}).request(1, 1)
    request.topics[0].partitions[0].committed_metadata = "text"
    assert not is_readable(request), "metadata"
    assert not is_readable(OffsetCommitRequest(group_id="g")), "nothing"
    assert not is_readable(Shape("g", {"t": []}).request(1, 1)), "no partitions"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SHAPES, OFFSETS, st.booleans()), min_size=2, max_size=6))
def test_rows_move_under_a_plan(commits: list[tuple[Shape, int, bool]]) -> None:
    """Other commits insert rows between the rows that a plan has found."""
    fast, slow = new_shard(), new_shard()
    plans: list[tuple[Shape, CommitPlan]] = []
    for shape, offset, again in commits:
        request = shape.request(offset % 2**62, 0)
        for shard in (fast, slow):
            commit(shard, request, 1, 0)
        plans.append((shape, CommitPlan(read(request).shape, 9)))
        for planned, plan in plans if again else plans[:1]:
            repeated = planned.request(offset % 2**61, 1)
            assert fast.commit_packed(plan, cells_of(repeated), 2)
            plan.replay()
            commit(slow, repeated, 2, 0)
    assert fast.hard_state() == slow.hard_state()


def test_a_plan_does_not_outlive_its_group() -> None:
    """A group may be deleted and created again with the same id, and reach the same version."""
    request = Shape("g", {"t": [0]}).request(1, -1)
    deleted, recreated = new_shard(), new_shard()
    commit(deleted, request, 1_000, 0)
    group = deleted.group("g")
    joined = recreated.consumer_group_heartbeat(
        OperationContext(1_000, 1),
        ConsumerGroupHeartbeatRequest(
            group_id="g",
            member_id="member",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=["t"],
            topic_partitions=[],
        ),
    )
    for record in joined.records:
        recreated.replay(record)
    group_with_member = recreated.group("g")
    assert group is not None and group_with_member is not None
    group_with_member.version = group.version
    plan = CommitPlan(read(request).shape, 9)

    assert plan.prepare({"g": group}, CommittedOffsets(), IMAGE, cells_of(request), 2_000)
    assert not plan.prepare({"g": group_with_member}, CommittedOffsets(), IMAGE, cells_of(request), 2_000)
