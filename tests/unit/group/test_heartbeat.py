# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupHeartbeat, in addition to `tests/transcripts/consumer`.

These tests count tasks, change the log, or use an image that no request creates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer.assignment import metadata_hash
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.group import GroupTimer
from kcoord.coordinator.group.regex import ResolvedRegexes
from kcoord.metadata.image import BrokerImage
from kcoord.runtime.result import TimerKey
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupTargetAssignmentMemberKey
from tests.unit.group.group_context import GroupContext

A, B, C = "member-a", "member-b", "member-c"


@pytest.fixture
def context() -> GroupContext:
    return GroupContext({"t3": 3, "t6": 6})


def test_group_configs_take_effect_at_the_next_heartbeat_and_stay_in_bounds() -> None:
    context = GroupContext({"t3": 3}, {"group.consumer.min.session.timeout.ms": "10000"})
    context.join("g", A, ["t3"])
    context.group_configs["g"] = {"consumer.session.timeout.ms": "1", "consumer.heartbeat.interval.ms": "6000"}
    context.update_metadata(context.topics)
    assert context.heartbeat("g", A, 2).heartbeat_interval_ms == 6000
    assert context.sleep(9_999) == []
    assert context.sleep(1) == [TimerKey(GroupTimer.SESSION, "g", A)]


class TestRegex:
    def test_refresh_interval(self, context: GroupContext) -> None:
        context.join("g", A, regex="t.*", assignor=None)
        context.run_tasks()
        context.heartbeat("g", A, 1, owned={})
        for _ in range(20):
            assert context.tasks == []
            context.sleep(30_000)
            context.heartbeat("g", A, 2)
        assert len(context.tasks) == 1

    def test_offsets_of_matched_topics_cannot_be_deleted(self, context: GroupContext) -> None:
        context.join("g", A, regex="t3")
        assert not context.shard._groups["g"].is_subscribed_to("t3")
        context.run_tasks()
        assert context.shard._groups["g"].is_subscribed_to("t3")

    def test_the_metadata_hash_does_not_count_topics_that_match_no_more(self, context: GroupContext) -> None:
        """A topic that exists matches no more if the member may not describe it any longer."""
        context.join("g", A, ["t6"], regex="t.*")
        (task,) = context.tasks
        context.run_tasks()
        resolved = ResolvedRegexes(context.image.epoch, {"t.*": frozenset({"t6"})})
        context.run(partial(context.shard.complete_task, task=task, value=resolved))
        group = context.shard.group("g")
        assert isinstance(group, ConsumerGroup)
        assert group.metadata_hash == metadata_hash(context.image, {"t6"})


def test_a_group_with_a_hash_of_an_earlier_version_gets_one_more_epoch(context: GroupContext) -> None:
    """Logs and snapshots of earlier versions have another digest of the same topics."""
    context.join("g", A, ["t6"])
    group = context.shard.group("g")
    assert isinstance(group, ConsumerGroup)
    context.log.append(records.new_group_epoch_record("g", 2, 12345, group.creation_time_ms, None))
    context.restart()
    owned = {"t6": [0, 1, 2, 3, 4, 5]}
    assert [context.heartbeat("g", A, epoch, owned=owned).member_epoch for epoch in (2, 3, 3)] == [3, 3, 3]
    context.restart()
    assert context.heartbeat("g", A, 3, owned=owned).member_epoch == 3


def test_a_change_of_the_replicas_racks_bumps_the_group_epoch(context: GroupContext) -> None:
    """KIP-1101: an assignor may place partitions by rack."""
    context.join("g", A, ["t6"])
    owned = {"t6": [0, 1, 2, 3, 4, 5]}

    def heartbeat_with(rack: str, epoch: int) -> int:
        broker = BrokerImage(1, 0, bytes(16), [], rack, False, [])
        context.image = replace(context.image, epoch=context.image.epoch + 1, brokers={1: broker})
        context.run(lambda ctx: context.shard.on_metadata_update(ctx, context.image))
        return context.heartbeat("g", A, epoch, owned=owned).member_epoch

    assert heartbeat_with("r1", 2) == 3
    assert heartbeat_with("r1", 3) == 3
    assert heartbeat_with("r2", 3) == 4


def test_creation_time_is_recorded_once(context: GroupContext) -> None:
    created_ms = context.now_ms
    assert context.join("g", A, ["t6"]).group_creation_time_ms == created_ms
    context.sleep(5)
    context.join("g", B, ["t6"])
    context.restart()
    assert context.heartbeat("g", B, 3).group_creation_time_ms == created_ms
    context.now_ms = created_ms - 1000
    assert context.join("later", A, ["t6"]).group_creation_time_ms == created_ms


def test_only_a_member_with_an_older_epoch_gets_its_missed_assignment_again(context: GroupContext) -> None:
    """The response to a heartbeat with a new subscription was lost."""
    context.join("g", A, ["t6"])
    six, all_of_both = {"t6": [0, 1, 2, 3, 4, 5]}, {"t3": [0, 1, 2], "t6": [0, 1, 2, 3, 4, 5]}
    assert context.heartbeat("g", A, 2, names=["t3", "t6"], owned=six).member_epoch == 3
    assert context.assigned(context.heartbeat("g", A, 2, owned=six)) == all_of_both
    assert context.assigned(context.heartbeat("g", A, 2, owned=all_of_both)) is None
    assert context.assigned(context.heartbeat("g", A, 3, owned=six)) is None


def test_a_topic_that_is_listed_twice_as_owned_is_not_revoked(context: GroupContext) -> None:
    """Apache Kafka reads all entries of the list, too. Else the other member would get a partition that A still has."""
    context.join("g", A, ["t3"])
    context.join("g", B, ["t3"])
    revoking = context.assigned(context.heartbeat("g", A, 2, owned={"t3": [0, 1, 2]}))
    assert revoking == {"t3": [0, 1]}
    request = ConsumerGroupHeartbeatRequest(
        group_id="g",
        member_id=A,
        member_epoch=2,
        topic_partitions=[
            ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=context.topic_id("t3"), partitions=partitions)
            for partitions in ([2], [0, 1])
        ],
    )
    assert context.run(lambda ctx: context.shard.consumer_group_heartbeat(ctx, request)).member_epoch == 2
    assert context.assigned(context.heartbeat("g", B, 3, owned={})) is None


def test_a_member_whose_target_stays_gets_no_new_record_of_it(context: GroupContext) -> None:
    """`range` makes another object of the target, which equals the old one."""
    context.join("g", A, ["t3"], assignor="range")
    context.join("g", B, ["t3"], assignor="range")
    before = len(context.log)
    context.heartbeat("g", B, 3, names=["t3", "t6"], owned={})
    keys = [record.key for record in context.log[before:]]
    assert [key.member_id for key in keys if isinstance(key, ConsumerGroupTargetAssignmentMemberKey)] == [B]
