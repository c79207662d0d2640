# SPDX-License-Identifier: Apache-2.0
"""The handlers of groups: differences between versions, responses without the coordinator, and merged responses."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kcoord.coordinator.group.consumer.assignment import ComputedTarget, TargetInput, compute
from kcoord.server.shards import group_service
from kcoord.storage.memory_file_system import MemoryFileSystem, no_fault
from kcoord_protocol.errors import Errors
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    DeleteGroupsRequest,
    FindCoordinatorRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    ListGroupsRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
)
from kcoord_protocol.uuid import ZERO_UUID

from . import harness as harness_module
from .harness import SHARDS, Harness, image_of, topic_id

INVALID_REQUEST_TEXT = (
    "This most likely occurs because of a request being malformed by the client library or the message was sent to an "
    "incompatible broker. See the broker logs for more details."
)


UNKNOWN_ID = b"\x77" * 16


def join(group_id: str, member_id: str = "m1", topic: str = "t3") -> ConsumerGroupHeartbeatRequest:
    return ConsumerGroupHeartbeatRequest(
        group_id=group_id,
        member_id=member_id,
        member_epoch=0,
        rebalance_timeout_ms=60000,
        subscribed_topic_names=[topic],
        topic_partitions=[],
    )


def commit(group_id: str, *topics: tuple[str | bytes, dict[int, int]], epoch: int = -1) -> OffsetCommitRequest:
    request = OffsetCommitRequest(group_id=group_id, generation_id_or_member_epoch=epoch)
    for topic, offsets in topics:
        partitions = [
            OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=index, committed_offset=offset)
            for index, offset in offsets.items()
        ]
        named = {"name": topic} if isinstance(topic, str) else {"topic_id": topic}
        request.topics.append(OffsetCommitRequest.OffsetCommitRequestTopic(partitions=partitions, **named))
    return request


def errors_of(response: Any, *, by_id: bool = False) -> dict[object, dict[int, int]]:
    return {
        (topic.topic_id if by_id else topic.name): {p.partition_index: p.error_code for p in topic.partitions}
        for topic in response.topics
    }


async def test_the_messages_of_find_coordinator_are_kafkas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observed in Kafka 4.3.1 and 4.4.0. There is no partition of a transaction coordinator."""
    monkeypatch.setattr(harness_module, "TOPICS", {GROUP_METADATA_TOPIC: SHARDS, TRANSACTION_STATE_TOPIC: 0})
    harness = Harness()
    for key_type, error, text in (
        (0, Errors.NONE, "NONE"),
        (1, Errors.COORDINATOR_NOT_AVAILABLE, "The coordinator is not available."),
        (5, Errors.INVALID_REQUEST, INVALID_REQUEST_TEXT),
    ):
        old = await harness.call(FindCoordinatorRequest(key_type=key_type, key="x"), 3)
        assert (old.error_code, old.error_message) == (error, text)
        new = await harness.call(FindCoordinatorRequest(key_type=key_type, coordinator_keys=["x"]), 6)
        text = INVALID_REQUEST_TEXT if key_type == 5 else ""
        assert [(result.error_code, result.error_message) for result in new.coordinators] == [(error, text)]


async def test_a_commit_is_fetched_back_in_every_version() -> None:
    broker = await Harness().open()
    assert errors_of(await broker.call(commit("g", ("t3", {0: 5, 2: 7})), 2)) == {"t3": {0: 0, 2: 0}}
    for version in range(1, 8):
        request = OffsetFetchRequest(group_id="g")
        request.topics = [OffsetFetchRequest.OffsetFetchRequestTopic(name="t3", partition_indexes=[0, 1, 2])]
        (topic,) = (await broker.call(request, version)).topics
        assert [p.committed_offset for p in topic.partitions] == [5, -1, 7]
    for version in range(8, 11):
        request = OffsetFetchRequest(groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id="g", topics=None)])
        (group,) = (await broker.call(request, version)).groups
        (topic,) = group.topics
        assert (topic.topic_id if version == 10 else topic.name) == (topic_id("t3") if version == 10 else "t3")
        assert {p.partition_index: p.committed_offset for p in topic.partitions} == {0: 5, 2: 7}


async def test_unknown_topics_and_partitions_of_a_commit_fail_and_known_ones_are_committed() -> None:
    broker = await Harness().open()
    answer = await broker.call(commit("g", ("t3", {0: 5, 9: 1, -1: 1}), ("nope", {0: 1}), ("t1", {0: 3})), 9)
    assert errors_of(answer) == {"t3": {9: 3, -1: 3, 0: 0}, "nope": {0: 3}, "t1": {0: 0}}
    answer = await broker.call(commit("g", (topic_id("t3"), {0: 6}), (UNKNOWN_ID, {0: 1}), (ZERO_UUID, {0: 1})), 10)
    assert errors_of(answer, by_id=True) == {topic_id("t3"): {0: 0}, UNKNOWN_ID: {0: 100}, ZERO_UUID: {0: 100}}


async def test_if_the_coordinator_fails_unknown_topics_keep_their_error() -> None:
    broker = await Harness().open()
    answer = await broker.call(commit("nobody", ("t3", {0: 5}), ("nope", {0: 1}), epoch=3), 9)
    assert errors_of(answer) == {"nope": {0: 3}, "t3": {0: Errors.GROUP_ID_NOT_FOUND}}


async def test_a_commit_without_a_known_partition_does_not_reach_the_coordinator() -> None:
    broker = await Harness().open()
    assert errors_of(await broker.call(commit("nobody", ("nope", {0: 1}), epoch=3), 9)) == {"nope": {0: 3}}
    assert (await broker.call(commit("nobody", epoch=3), 9)).topics == []


async def test_unknown_topic_ids_of_a_fetch_follow_the_known_topics() -> None:
    broker = await Harness().open()
    await broker.call(commit("g", ("t3", {0: 5})), 9)
    topics = [
        OffsetFetchRequest.OffsetFetchRequestTopics(topic_id=uuid, partition_indexes=[0])
        for uuid in (UNKNOWN_ID, topic_id("t3"))
    ]
    request = OffsetFetchRequest(groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id="g", topics=topics)])
    (group,) = (await broker.call(request, 10)).groups
    results = [
        (topic.topic_id, topic.partitions[0].committed_offset, topic.partitions[0].error_code) for topic in group.topics
    ]
    assert results == [(topic_id("t3"), 5, 0), (UNKNOWN_ID, -1, 100)]


async def test_each_group_of_a_fetch_has_its_own_error() -> None:
    broker = await Harness().open()
    await broker.call(join("member"), 1)
    await broker.call(commit("simple", ("t1", {0: 1})), 9)
    groups = [
        OffsetFetchRequest.OffsetFetchRequestGroup(group_id="member", member_id="m1", member_epoch=99, topics=None),
        OffsetFetchRequest.OffsetFetchRequestGroup(group_id="simple", topics=None),
    ]
    answer = await broker.call(OffsetFetchRequest(groups=groups), 9)
    assert [(group.group_id, group.error_code, len(group.topics)) for group in answer.groups] == [
        ("member", Errors.STALE_MEMBER_EPOCH, 0),
        ("simple", 0, 1),
    ]


async def test_in_the_oldest_offset_fetch_version_every_partition_has_the_error() -> None:
    broker = Harness()
    topics = [OffsetFetchRequest.OffsetFetchRequestTopic(name="t3", partition_indexes=[0, 1])]
    old = await broker.call(OffsetFetchRequest(group_id="g", topics=topics), 1)
    assert [(p.committed_offset, p.error_code) for p in old.topics[0].partitions] == [(-1, 16), (-1, 16)]
    newer = await broker.call(OffsetFetchRequest(group_id="g", topics=topics), 2)
    assert (newer.error_code, newer.topics) == (16, [])


async def test_before_the_internal_topic_exists_requests_get_not_coordinator() -> None:
    broker = Harness()
    assert (await broker.call(join("g"), 1)).error_code == Errors.NOT_COORDINATOR
    assert errors_of(await broker.call(commit("g", ("t3", {0: 5})), 9)) == {"t3": {0: Errors.NOT_COORDINATOR}}
    listed = await broker.call(ListGroupsRequest(), 5)
    assert (listed.error_code, listed.groups) == (0, [])
    deleted = await broker.call(DeleteGroupsRequest(groups_names=["a", "b"]), 2)
    assert [result.error_code for result in deleted.results] == [16, 16]


async def test_while_a_shard_is_loading_requests_get_coordinator_load_in_progress() -> None:
    broker = Harness()
    await broker.open()
    await broker.call(commit("g", ("t3", {0: 5})), 9)
    again = broker.restarted()
    to_load = again.open_shards()
    assert to_load == [again.groups.shard_of("g")]
    assert (await again.call(ListGroupsRequest(), 5)).error_code == Errors.COORDINATOR_LOAD_IN_PROGRESS
    assert (await again.call(join("g"), 1)).error_code == Errors.COORDINATOR_LOAD_IN_PROGRESS
    heartbeat = HeartbeatRequest(group_id="g", generation_id=1, member_id="m")
    assert (await again.call(heartbeat, 4)).error_code == Errors.NONE
    await again.groups.loaded()
    assert [group.group_id for group in (await again.call(ListGroupsRequest(), 5)).groups] == ["g"]


async def test_groups_of_all_shards_are_listed_filtered_described_and_deleted_in_request_order() -> None:
    broker = await Harness().open()
    names = [f"g{number}" for number in range(8)]
    assert len({broker.groups.shard_of(name) for name in names}) > 1
    for name in names:
        assert (await broker.call(join(name), 1)).error_code == 0
    await broker.call(commit("simple", ("t1", {0: 1})), 9)
    listed = await broker.call(ListGroupsRequest(types_filter=["consumer"]), 5)
    assert sorted(group.group_id for group in listed.groups) == names
    order = ["nope", *reversed(names)]
    described = await broker.call(ConsumerGroupDescribeRequest(group_ids=order, include_authorized_operations=True), 1)
    assert [group.group_id for group in described.groups] == order
    assert [group.error_code for group in described.groups] == [69] + [0] * 8
    again = await broker.call(ConsumerGroupDescribeRequest(group_ids=[order[1], order[0], order[1]]), 1)
    assert [group.group_id for group in again.groups] == [order[1], order[0], order[1]], (
        "each id as often as the request names it"
    )
    assert [group.authorized_operations for group in described.groups] == [-(2**31)] + [3400] * 8
    deleted = await broker.call(DeleteGroupsRequest(groups_names=["simple", "g1", "nope", "simple", ""]), 2)
    assert [(result.group_id, result.error_code) for result in deleted.results] == [
        ("simple", 0),
        ("g1", Errors.NON_EMPTY_GROUP),
        ("nope", 69),
        ("", 69),
    ]


async def test_offset_delete_merges_the_results_of_the_image_and_the_coordinator() -> None:
    broker = await Harness().open()
    await broker.call(join("g"), 1)
    topics = [
        OffsetDeleteRequest.OffsetDeleteRequestTopic(
            name=name,
            partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=index) for index in indexes],
        )
        for name, indexes in (("t3", [0, 99]), ("t1", [0]), ("nope", [0]), ("unnamed", []))
    ]
    answer = await broker.call(OffsetDeleteRequest(group_id="g", topics=topics), 0)
    # Kafka 4.3.1 echoes a topic without partitions if the topic does not exist.
    assert errors_of(answer) == {"t3": {99: 3, 0: 86}, "t1": {0: 0}, "nope": {0: 3}, "unnamed": {}}
    existing = OffsetDeleteRequest.OffsetDeleteRequestTopic(name="t1", partitions=[])
    assert (await broker.call(OffsetDeleteRequest(group_id="g", topics=[existing]), 0)).topics == []
    for subset in (topics[2:3], topics[1:2], []):
        nameless = await broker.call(OffsetDeleteRequest(group_id="", topics=subset), 0)
        assert (nameless.error_code, nameless.topics) == (Errors.INVALID_GROUP_ID, [])


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_a_member_without_an_id_gets_one_in_v0_only(version: int) -> None:
    broker = await Harness().open()
    answer = await broker.call(join("g", member_id=""), version)
    if version == 0:
        assert answer.error_code == 0
        assert len(answer.member_id) == 22
    else:
        assert answer.error_code == Errors.INVALID_REQUEST


@pytest.mark.parametrize(("version", "name"), [(3, ""), (6, ""), (7, None), (9, None)])
async def test_an_empty_protocol_name_of_a_join_is_null_in_versions_with_null(version: int, name: str | None) -> None:
    """As in Kafka 4.3.1 and 4.4.0. SyncGroup and DescribeGroups keep the empty name."""
    broker = await Harness(group_initial_rebalance_delay_ms="0").open()
    request = JoinGroupRequest(
        group_id="g",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="", metadata=b"")],
    )
    answer = await broker.call(request, version)
    if answer.error_code == Errors.MEMBER_ID_REQUIRED:
        request.member_id = answer.member_id
        answer = await broker.call(request, version)
    assert (answer.error_code, answer.generation_id, answer.protocol_name) == (0, 1, name)


async def test_a_failed_write_is_answered_and_the_shard_is_loaded_again() -> None:
    file_system = MemoryFileSystem()
    broker = await Harness(file_system=file_system).open()
    broker.runtime.first_reload_ms = 0
    await broker.call(commit("g", ("t3", {0: 5})), 9)
    broken = OSError(5, "Input/output error")
    file_system.fault = lambda operation: broken if operation.kind == "write" else None
    failed = await broker.call(commit("g", ("t3", {0: 6})), 9)
    assert errors_of(failed) == {"t3": {0: Errors.NOT_COORDINATOR}}
    file_system.fault = no_fault
    for _ in range(200):
        answer = errors_of(await broker.call(commit("g", ("t1", {0: 1})), 9))
        if answer == {"t1": {0: 0}}:
            break
        await asyncio.sleep(0.005)
    request = OffsetFetchRequest(groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id="g", topics=None)])
    (group,) = (await broker.call(request, 9)).groups
    assert {topic.name: topic.partitions[0].committed_offset for topic in group.topics} == {"t1": 1, "t3": 5}


async def test_without_the_consumer_protocol_its_apis_answer_unsupported_version() -> None:
    by_setting = await Harness(group_coordinator_rebalance_protocols="classic").open()
    by_feature = await Harness().open()
    by_feature.broker.image = image_of({"t3": 3}, group_version=0)
    for broker in (by_setting, by_feature):
        assert (await broker.call(join("g"), 1)).error_code == Errors.UNSUPPORTED_VERSION
        described = await broker.call(ConsumerGroupDescribeRequest(group_ids=["g"]), 1)
        assert [group.error_code for group in described.groups] == [Errors.UNSUPPORTED_VERSION]


async def test_heartbeats_do_not_wait_for_the_computation_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation is stopped in its thread. Heartbeats of its group and of another group are answered."""
    may_go_on, began = threading.Event(), threading.Event()

    def slow(work: TargetInput) -> ComputedTarget:
        began.set()
        assert may_go_on.wait(30)
        return compute(work)

    monkeypatch.setattr(group_service, "LONGEST_ON_LOOP_US", 0)
    monkeypatch.setattr(group_service, "compute", slow)
    broker = await Harness(kcoord_assignor_inline_ms="0").open()
    assert (await broker.call(join("g", member_id="a"), 1)).member_epoch == 2
    try:
        assert (await broker.call(join("g", member_id="b"), 1)).member_epoch == 2
        while not began.is_set():
            await asyncio.sleep(0)
        assert (await broker.call(join("other", member_id="a"), 1)).member_epoch == 2
        heartbeat = ConsumerGroupHeartbeatRequest(group_id="g", member_id="a", member_epoch=2)
        answer = await broker.call(heartbeat, 1)
        assert (answer.member_epoch, answer.assignment) == (2, None)
    finally:
        may_go_on.set()
    while (answer := await broker.call(heartbeat, 1)).assignment is None:
        await asyncio.sleep(0)
    (topic,) = answer.assignment.topic_partitions
    assert len(topic.partitions) == 2


async def test_groups_of_a_failed_shard_still_count_for_new_partitions() -> None:
    """KIP-1327: the clock was set back after the group was created, and then its shard failed."""
    harness = await Harness().open()
    request = ConsumerGroupHeartbeatRequest(
        group_id="g", member_id="m", rebalance_timeout_ms=1000, subscribed_topic_names=["t1"], topic_partitions=[]
    )
    created_ms = (await harness.call(request, 2)).group_creation_time_ms
    shard_id = harness.groups.shard_of("g")
    again = harness.restarted()
    again.now = created_ms - 60_000
    await again.open()
    again.runtime.fail_shard(shard_id, "by a test")
    assert again.runtime.machine(shard_id) is None
    assert again.groups.latest_creation_time_ms() == created_ms
