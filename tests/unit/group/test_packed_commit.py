# SPDX-License-Identifier: Apache-2.0
"""The fast path of commits writes the bytes, and brings about the state, of the general way."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.packed_commit import CommitPlan
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.result import OperationContext
from kcoord.coordinator.runtime.runtime import CoordinatorRuntime
from kcoord.coordinator.runtime.serde import CoordinatorSerde
from kcoord.server.commit_memo import find_cells
from protocol.messages import OffsetCommitRequest
from protocol.record_batch import decode_header, encode_batch_from_parts
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


def commit(shard: GroupCoordinatorShard, request: OffsetCommitRequest, now_ms: int, base_offset: int) -> bytes:
    """A commit by the general way, and the batch that it gives."""
    result = shard.commit_offset(OperationContext(now_ms, 9), request)
    for record in result.records:
        shard.replay(record)
    pairs = [SERDE.serialize(record) for record in result.records]
    return encode_batch_from_parts(pairs, base_offset=base_offset, timestamp_ms=now_ms)


def new_shard() -> GroupCoordinatorShard:
    return GroupCoordinatorShard(CONFIG, IMAGE)


@settings(max_examples=60, deadline=None)
@given(SHAPES, VERSIONS, st.lists(st.tuples(OFFSETS, EPOCHS, st.integers(0, 2**53)), min_size=1, max_size=4))
def test_bytes_and_state_are_those_of_the_general_way(
    shape: Shape, version: int, commits: list[tuple[int, int, int]]
) -> None:
    fast, slow = new_shard(), new_shard()
    first = commit(fast, shape.request(0, 0), 1, 0)
    commit(slow, shape.request(0, 0), 1, 0)
    sent = shape.request(7, 7)
    known = OffsetCommitRequest.decode(sent.encode(version), version)
    plan = CommitPlan(known, version)
    written = [(decode_header(first), first)]
    base_offset = plan.count
    for offset, leader_epoch, now_ms in commits:
        request = shape.request(offset, leader_epoch)
        body = request.encode(version)
        cells = [body[at : at + 12] for at in find_cells(known, version, 0)]
        assert fast.commit_packed(plan, cells, now_ms)
        data = plan.encode_batch(base_offset)
        plan.replay()
        assert data == commit(slow, request, now_ms, base_offset)
        written.append((decode_header(data), data))
        base_offset += plan.count
    assert fast.hard_state() == slow.hard_state()
    runtime = CoordinatorRuntime(lambda _: new_shard(), SERDE)
    runtime.load(0, written, 0)
    rebuilt = runtime.machine(0)
    assert rebuilt is not None
    assert rebuilt.hard_state() == fast.hard_state()


@settings(max_examples=100, deadline=None)
@given(SHAPES, VERSIONS, st.sampled_from(["", "member"]), st.sampled_from([None, "instance"]), st.binary(max_size=300))
def test_cells_are_the_offsets_and_leader_epochs_alone(
    shape: Shape, version: int, member: str, instance: str | None, noise: bytes
) -> None:
    request = shape.request(5, 3)
    request.member_id, request.group_instance_id = member, instance if version >= 7 else None
    body = bytearray(request.encode(version))
    cells = find_cells(request, version, 0)
    assert len(cells) == sum(map(len, shape.topics.values()))
    for number, at in enumerate(cells):
        body[at : at + 12] = (noise[number : number + 12] + bytes(12))[:12]
    changed = OffsetCommitRequest.decode(bytes(body), version)
    for topic in changed.topics:
        for partition in topic.partitions:
            partition.committed_offset, partition.committed_leader_epoch = 5 + partition.partition_index, 3
    assert changed.encode(version) == request.encode(version)


def refused(shard: GroupCoordinatorShard, request: OffsetCommitRequest, version: int = 9) -> bool:
    plan = CommitPlan(request, version)
    return not shard.commit_packed(plan, [bytes(12)] * plan.count, 2)


def test_what_is_not_an_ordinary_update_goes_the_general_way() -> None:
    shard = new_shard()
    request = Shape("g", {"t": [0, 1]}).request(1, 1)
    assert refused(shard, request), "there is no group"
    commit(shard, Shape("g", {"t": [0]}).request(1, 1), 1, 0)
    assert refused(shard, request), "a partition has no offset yet"
    commit(shard, request, 1, 0)
    assert not refused(shard, request)
    assert refused(shard, Shape("g", {"t": [0], "gone": [0]}).request(1, 1)), "a topic that is not known"
    assert refused(shard, Shape("g", {"t": [0, 200]}).request(1, 1)), "a partition that the topic has not"
    request.generation_id_or_member_epoch = 3
    assert refused(shard, request), "a member of another generation"


def test_what_no_plan_can_hold() -> None:
    request = Shape("g", {"t": [0, 1]}).request(1, 1)
    assert CommitPlan.is_possible(request, 9)
    assert not CommitPlan.is_possible(request, 5), "requests without leader epochs, or with a retention time"
    request.topics[0].partitions[1].partition_index = 0
    assert not CommitPlan.is_possible(request, 9), "a partition twice"
    request = Shape("g", {"t": [0]}).request(1, 1)
    request.topics[0].partitions[0].committed_metadata = "text"
    assert not CommitPlan.is_possible(request, 9), "metadata"
    assert not CommitPlan.is_possible(OffsetCommitRequest(group_id="g"), 9), "nothing"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SHAPES, OFFSETS, st.booleans()), min_size=2, max_size=6))
def test_rows_move_under_a_plan(commits: list[tuple[Shape, int, bool]]) -> None:
    """Other commits insert rows between those that a plan has found."""
    fast, slow = new_shard(), new_shard()
    plans: list[tuple[Shape, CommitPlan]] = []
    for shape, offset, again in commits:
        request = shape.request(offset % 2**62, 0)
        for shard in (fast, slow):
            commit(shard, request, 1, 0)
        plans.append((shape, CommitPlan(request, 9)))
        for known, plan in plans if again else plans[:1]:
            repeated = known.request(offset % 2**61, 1)
            body = repeated.encode(9)
            done = fast.commit_packed(plan, [body[at : at + 12] for at in find_cells(repeated, 9, 0)], 2)
            assume(done)
            plan.replay()
            commit(slow, repeated, 2, 0)
    assert fast.hard_state() == slow.hard_state()
