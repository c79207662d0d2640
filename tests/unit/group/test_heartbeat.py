# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupHeartbeat of the pure core: epochs, assignments and records, with the facts recorded from Kafka
4.3.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.group import GroupTimer
from kcoord.metadata.image import BrokerImage
from kcoord.runtime.result import TimerKey
from kcoord_protocol.errors import Errors, KafkaError
from tests.unit.group.group_context import GroupContext

A, B, C = "member-a", "member-b", "member-c"


@pytest.fixture
def context() -> GroupContext:
    return GroupContext({"t3": 3, "t6": 6})


@contextmanager
def refused(error: Errors) -> Iterator[None]:
    """The block is refused with this error and a text."""
    with pytest.raises(KafkaError) as caught:
        yield
    assert caught.value.error == error
    assert caught.value.message


def test_first_member_gets_everything_at_epoch_two(context: GroupContext) -> None:
    response = context.join("g", A, ["t6"])
    assert (response.member_epoch, response.heartbeat_interval_ms) == (2, 5000)
    assert context.assigned(response) == {"t6": [0, 1, 2, 3, 4, 5]}
    assert [type(record.key).__name__ for record in context.records] == [
        "ConsumerGroupMemberMetadataKey",
        "ConsumerGroupMetadataKey",
        "ConsumerGroupTargetAssignmentMemberKey",
        "ConsumerGroupTargetAssignmentMetadataKey",
        "ConsumerGroupCurrentMemberAssignmentKey",
    ]
    assert context.describe("g").group_state == "Stable"


@pytest.mark.parametrize(
    ("names", "regex", "epoch"), [([], None, 1), (None, "", 1), (["no such topic!"], None, 2), (["t3", "t3"], None, 2)]
)
def test_first_epoch_counts_the_first_subscription(
    context: GroupContext, names: list[str] | None, regex: str | None, epoch: int
) -> None:
    assert context.join("g", A, names, regex=regex, assignor=None).member_epoch == epoch


def test_steady_heartbeat_has_no_records_and_no_assignment(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    response = context.heartbeat("g", A, 2)
    assert (response.member_epoch, response.assignment, context.records) == (2, None, [])


def test_a_member_whose_join_arrived_again_is_told_what_that_one_brought(context: GroupContext) -> None:
    """Found by the exhaustive check: a join was sent twice, and the first one arrives after the second was answered."""
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    context.heartbeat("g", A, 2)
    owned = {"t6": [0, 1, 2]}
    context.heartbeat("g", A, 2, owned=owned)
    context.heartbeat("g", B, -1)
    context.join("g", A, ["t6"])
    told = context.heartbeat("g", A, 3, owned=owned)
    assert (told.member_epoch, context.assigned(told)) == (4, {"t6": [0, 1, 2, 3, 4, 5]})


def test_second_member_waits_until_the_first_has_revoked(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    joined = context.join("g", B, ["t6"])
    assert (joined.member_epoch, context.assigned(joined)) == (3, {})
    told = context.heartbeat("g", A, 2)
    kept = context.assigned(told)
    assert told.member_epoch == 2
    assert kept is not None
    assert len(kept["t6"]) == 3
    assert context.heartbeat("g", B, 3).assignment is None
    acknowledged = context.heartbeat("g", A, 2, owned=kept)
    assert (acknowledged.member_epoch, acknowledged.assignment) == (3, None)
    given = context.assigned(context.heartbeat("g", B, 3))
    assert given is not None
    assert sorted(given["t6"] + kept["t6"]) == [0, 1, 2, 3, 4, 5]
    assert context.describe("g").group_state == "Stable"


def test_a_member_that_has_to_revoke_more_stays_at_its_epoch(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    kept = context.assigned(context.heartbeat("g", A, 2))
    context.join("g", C, ["t6"])
    told = context.heartbeat("g", A, 2, owned=kept)
    less = context.assigned(told)
    assert less is not None
    assert (told.member_epoch, len(less["t6"])) == (2, 2)
    assert context.heartbeat("g", A, 2, owned=less).member_epoch == 4


def test_what_a_member_has_revoked_it_can_get_back_at_once(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    assert context.assigned(context.heartbeat("g", A, 2, names=["t3"])) == {}
    assert context.heartbeat("g", A, 2, names=["t3", "t6"]).assignment is None
    told = context.heartbeat("g", A, 2, owned={})
    assert told.member_epoch == 4
    assert context.assigned(told) == {"t3": [0, 1, 2], "t6": [0, 1, 2, 3, 4, 5]}
    assert context.heartbeat("g", A, 4).assignment is None


def test_epoch_rules(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    kept = context.assigned(context.heartbeat("g", A, 2))
    for epoch, owned in ((3, None), (100, None), (1, None), (1, {})):
        with refused(Errors.FENCED_MEMBER_EPOCH):
            context.heartbeat("g", A, epoch, owned=owned)
    assert context.heartbeat("g", A, 2, owned=kept).member_epoch == 3
    lost_answer = context.heartbeat("g", A, 2, owned=kept)
    assert (lost_answer.member_epoch, lost_answer.assignment) == (3, None)
    with refused(Errors.FENCED_MEMBER_EPOCH):
        context.heartbeat("g", A, 2)
    with refused(Errors.FENCED_MEMBER_EPOCH):
        context.heartbeat("g", A, 2, owned={"t6": [0, 1, 2, 3, 4, 5]})
    with refused(Errors.UNKNOWN_MEMBER_ID):
        context.heartbeat("g", "nobody", 1)
    with refused(Errors.INVALID_REQUEST):
        context.heartbeat("g", A, -3)
    assert context.describe("g").group_epoch == 3


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"member": ""}, Errors.INVALID_REQUEST),
        ({"member": " "}, Errors.INVALID_REQUEST),
        ({"group": " "}, Errors.INVALID_REQUEST),
        ({"group": "\x00 \x1f"}, Errors.INVALID_REQUEST),
        ({"instance": ""}, Errors.INVALID_REQUEST),
        ({"rack": " "}, Errors.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -1}, Errors.INVALID_REQUEST),
        ({"rebalance_timeout_ms": 0}, Errors.INVALID_REQUEST),
        ({"rebalance_timeout_ms": -2}, Errors.INVALID_REQUEST),
        ({"owned": None}, Errors.INVALID_REQUEST),
        ({"owned": {"t3": [0]}}, Errors.INVALID_REQUEST),
        ({"names": None}, Errors.INVALID_REQUEST),
        ({"assignor": "nope"}, Errors.UNSUPPORTED_ASSIGNOR),
        ({"assignor": ""}, Errors.UNSUPPORTED_ASSIGNOR),
        ({"assignor": "nope", "rebalance_timeout_ms": -1}, Errors.INVALID_REQUEST),
        ({"assignor": "nope", "names": None, "regex": "("}, Errors.UNSUPPORTED_ASSIGNOR),
        ({"names": None, "regex": "(a)\\1"}, Errors.INVALID_REGULAR_EXPRESSION),
    ],
)
def test_invalid_joins(context: GroupContext, change: dict[str, object], error: Errors) -> None:
    arguments: dict[str, object] = {"group": "g", "member": A, "names": ["t3"]} | change
    with refused(error):
        context.join(**arguments)  # type: ignore[arg-type]
    assert not context.log


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rebalance_timeout_ms": -1}, "RebalanceTimeoutMs must be provided in first request"),
        ({"owned": {"t3": [0]}}, "TopicPartitions must be empty when (re-)joining."),
        ({"names": None}, "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining."),
        ({"assignor": "nope"}, "ServerAssignor nope is not supported. Supported assignors: uniform, range."),
        ({"names": None, "regex": "["}, "SubscribedTopicRegex `[` is not a valid regular expression: missing "),
        (
            {"member": B, "instance": "i"},
            f"Static member {B} with instance id i cannot join the group because the instance id is owned by {A} "
            "member.",
        ),
    ],
)
def test_refused_joins_in_kafkas_words(context: GroupContext, change: dict[str, object], text: str) -> None:
    context.join("g", A, ["t3"], instance="i")
    arguments: dict[str, object] = {"group": "g", "member": "C", "names": ["t3"]} | change
    with pytest.raises(KafkaError, match=re.escape(text)):
        context.join(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("member", "epoch", "instance", "text"),
    [
        (A, -3, None, "MemberEpoch is invalid."),
        (A, -2, None, "InstanceId can't be null."),
        ("C", 1, None, "Member C is not a member of group g."),
        (A, 1, "j", "Instance id j is unknown."),
        (
            A,
            9,
            None,
            "The consumer group member has a greater member epoch (9) than the one known by the group coordinator (2). "
            "The member must abandon all its partitions and rejoin.",
        ),
    ],
)
def test_refused_heartbeats_in_kafkas_words(
    context: GroupContext, member: str, epoch: int, instance: str | None, text: str
) -> None:
    context.join("g", A, ["t3"])
    with pytest.raises(KafkaError, match=re.escape(text)):
        context.heartbeat("g", member, epoch, instance=instance)


def test_unknown_group(context: GroupContext) -> None:
    for epoch in (5, -1):
        with refused(Errors.GROUP_ID_NOT_FOUND):
            context.heartbeat("g", A, epoch)
    with refused(Errors.GROUP_ID_NOT_FOUND):
        context.heartbeat("g", A, -2, instance="i")


def test_version_zero_makes_the_member_id(context: GroupContext) -> None:
    response = context.join("g", "", ["t3"], api_version=0)
    assert len(response.member_id or "") == 22
    with refused(Errors.INVALID_REQUEST):
        context.heartbeat("g", "", 1, api_version=0)


def test_rejoin_at_epoch_zero_changes_nothing_and_repeats_the_assignment(context: GroupContext) -> None:
    first = context.join("g", A, ["t6"])
    again = context.join("g", A, ["t6"])
    assert context.records == []
    assert (again.member_epoch, context.assigned(again)) == (first.member_epoch, context.assigned(first))


def test_full_heartbeat_repeats_the_assignment(context: GroupContext) -> None:
    context.join("g", A, ["t3"])
    full = context.heartbeat("g", A, 2, names=["t3"], owned={"t3": [0, 1, 2]}, rebalance_timeout_ms=300_000)
    assert context.assigned(full) == {"t3": [0, 1, 2]}
    assert context.heartbeat("g", A, 2, names=["t3"], rebalance_timeout_ms=300_000).assignment is None


def test_resubscription_revokes_before_it_assigns(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    changed = context.heartbeat("g", A, 2, names=["t3"])
    assert (changed.member_epoch, context.assigned(changed)) == (2, {})
    moved = context.heartbeat("g", A, 2, owned={})
    assert (moved.member_epoch, context.assigned(moved)) == (3, {"t3": [0, 1, 2]})
    both = context.heartbeat("g", A, 3, names=["t6", "t3"])
    assert (both.member_epoch, context.assigned(both)) == (4, {"t3": [0, 1, 2], "t6": [0, 1, 2, 3, 4, 5]})
    assert context.heartbeat("g", A, 4, names=["t3", "t3", "t6"]).assignment is None
    assert context.describe("g").group_epoch == 4


def test_unsubscribed_topic_is_revoked_even_while_the_target_is_old() -> None:
    context = GroupContext({"t3": 3, "t6": 6}, {"group.consumer.assignment.interval.ms": "1000"})
    context.join("g", A, ["t3", "t6"])
    changed = context.heartbeat("g", A, 2, names=["t3"])
    assert (changed.member_epoch, context.assigned(changed)) == (2, {"t3": [0, 1, 2]})
    context.sleep(1000)
    settled = context.heartbeat("g", A, 2, owned={"t3": [0, 1, 2]})
    assert settled.member_epoch == 3
    assert context.describe("g").group_state == "Stable"


def test_assignment_interval_batches_joins() -> None:
    context = GroupContext({"t6": 6}, {"group.consumer.assignment.interval.ms": "1000"})
    context.join("g", A, ["t6"])
    early = context.join("g", B, ["t6"])
    assert (early.member_epoch, context.assigned(early)) == (2, {})
    assert context.describe("g").group_state == "Assigning"
    context.sleep(1000)
    late = context.heartbeat("g", B, 2)
    assert (late.member_epoch, late.assignment) == (3, None)


def test_rack_and_unchanged_assignor_are_recorded_without_an_epoch(context: GroupContext) -> None:
    context.join("g", A, ["t6"], assignor=None)
    assert context.heartbeat("g", A, 2, rack="r1").member_epoch == 2
    assert [type(record.key).__name__ for record in context.records] == ["ConsumerGroupMemberMetadataKey"]
    assert context.heartbeat("g", A, 2, assignor="uniform").member_epoch == 2
    described = context.describe("g")
    assert (described.members[0].rack_id, described.assignor_name, described.group_epoch) == ("r1", "uniform", 2)


def test_most_common_assignor_wins_and_ties_follow_the_config(context: GroupContext) -> None:
    context.join("g", A, ["t6"], assignor=None)
    assert context.describe("g").assignor_name == "uniform"
    context.join("g", B, ["t6"], assignor="range")
    assert context.describe("g").assignor_name == "range"
    context.join("g", C, ["t6"], assignor="uniform")
    assert context.describe("g").assignor_name == "uniform"


def test_assignors_may_be_configured_by_the_names_of_kafkas_classes() -> None:
    package = "org.apache.kafka.coordinator.group.assignor"
    names = f"{package}.RangeAssignor,{package}.UniformAssignor"
    context = GroupContext({"t6": 6}, {"group.consumer.assignors": names})
    assert context.config.group_consumer_assignors == names.split(",")
    context.join("g", A, ["t6"], assignor=None)
    assert context.describe("g").assignor_name == "range"
    context.join("g", A, ["t6"], assignor="uniform")
    assert context.describe("g").assignor_name == "uniform"
    with refused(Errors.UNSUPPORTED_ASSIGNOR):
        context.join("g", B, ["t6"], assignor=f"{package}.RangeAssignor")


def test_leave_hands_the_partitions_on(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    left = context.heartbeat("g", A, -1)
    assert (left.member_id, left.member_epoch, left.heartbeat_interval_ms) == (A, -1, 0)
    described = context.describe("g")
    assert (described.group_state, described.group_epoch, described.assignment_epoch) == ("Assigning", 4, 3)
    taken = context.heartbeat("g", B, 3)
    assert (taken.member_epoch, context.assigned(taken)) == (4, {"t6": [0, 1, 2, 3, 4, 5]})
    context.heartbeat("g", B, -1)
    described = context.describe("g")
    assert (described.group_state, described.group_epoch, described.assignment_epoch) == ("Empty", 5, 5)
    assert context.join("g", A, ["t6"]).member_epoch == 6


def test_session_timeout_removes_a_silent_member(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    context.sleep(30_000)
    context.heartbeat("g", A, 2)
    assert context.sleep(15_000) == [TimerKey(GroupTimer.SESSION, "g", B)]
    with refused(Errors.UNKNOWN_MEMBER_ID):
        context.heartbeat("g", B, 3)
    assert context.heartbeat("g", A, 2, owned={"t6": []}).member_epoch == 4


def test_rebalance_timeout_removes_a_member_that_does_not_revoke(context: GroupContext) -> None:
    context.join("g", A, ["t6"], rebalance_timeout_ms=10_000)
    context.join("g", B, ["t6"])
    context.heartbeat("g", A, 2)
    for _ in range(2):
        context.sleep(5_000 - 1)
        context.heartbeat("g", A, 2)
        context.heartbeat("g", B, 3)
    assert context.sleep(2) == [TimerKey(GroupTimer.REBALANCE, "g", A)]
    given = context.heartbeat("g", B, 3)
    assert context.assigned(given) == {"t6": [0, 1, 2, 3, 4, 5]}


def test_member_without_anything_to_revoke_is_not_removed_by_its_rebalance_timeout(context: GroupContext) -> None:
    context.join("g", A, ["t6"], rebalance_timeout_ms=700)
    assert context.sleep(1_500) == []


def test_acknowledged_revocation_disarms_the_rebalance_timeout(context: GroupContext) -> None:
    context.join("g", A, ["t6"], rebalance_timeout_ms=10_000)
    context.join("g", B, ["t6"])
    kept = context.assigned(context.heartbeat("g", A, 2))
    context.heartbeat("g", A, 2, owned=kept)
    assert all(key.kind != GroupTimer.REBALANCE for key in context.timers)


def test_group_is_full() -> None:
    context = GroupContext({"t3": 3}, {"group.consumer.max.size": "1"})
    context.join("g", A, ["t3"])
    with refused(Errors.GROUP_MAX_SIZE_REACHED):
        context.join("g", B, ["t3"])
    assert context.join("g", A, ["t3"]).member_epoch == 2


def test_a_full_group_keeps_the_place_of_a_static_member_that_left_for_a_while() -> None:
    context = GroupContext({"t4": 4}, {"group.consumer.max.size": "2"})
    context.join("g", A, ["t4"], instance="i1")
    context.join("g", B, ["t4"], instance="i2")
    context.heartbeat("g", A, -2, instance="i1")
    for instance in (None, "i3"):
        with refused(Errors.GROUP_MAX_SIZE_REACHED):
            context.join("g", C, ["t4"], instance=instance)
    assert context.join("g", C, ["t4"], instance="i1").error_code == 0
    assert {member.member_id for member in context.describe("g").members} == {B, C}
    with refused(Errors.UNRELEASED_INSTANCE_ID):
        context.join("g", A, ["t4"], instance="i2")


def test_group_configs_take_effect_at_the_next_heartbeat_and_stay_in_bounds() -> None:
    context = GroupContext({"t3": 3}, {"group.consumer.min.session.timeout.ms": "10000"})
    context.join("g", A, ["t3"])
    context.group_configs["g"] = {"consumer.session.timeout.ms": "1", "consumer.heartbeat.interval.ms": "6000"}
    context.update_metadata(context.topics)
    assert context.heartbeat("g", A, 2).heartbeat_interval_ms == 6000
    assert context.sleep(9_999) == []
    assert context.sleep(1) == [TimerKey(GroupTimer.SESSION, "g", A)]


class TestMetadata:
    def test_new_partitions_bump_the_epoch_at_the_next_heartbeat(self, context: GroupContext) -> None:
        context.join("g", A, ["t3"])
        context.update_metadata({"t3": 4, "t6": 6})
        assert context.describe("g").group_epoch == 2
        grown = context.heartbeat("g", A, 2)
        assert (grown.member_epoch, context.assigned(grown)) == (3, {"t3": [0, 1, 2, 3]})

    def test_other_topics_change_nothing(self, context: GroupContext) -> None:
        context.join("g", A, ["t3"])
        context.update_metadata({"t3": 3, "t6": 7, "t1": 1})
        assert context.heartbeat("g", A, 2).member_epoch == 2
        assert context.records == []

    def test_topic_created_later_is_assigned(self, context: GroupContext) -> None:
        context.join("g", A, ["later", "t3"])
        context.update_metadata({"t3": 3, "t6": 6, "later": 2})
        assert context.assigned(context.heartbeat("g", A, 2)) == {"t3": [0, 1, 2], "later": [0, 1]}

    def test_deleted_topic_is_revoked_and_its_offsets_go(self, context: GroupContext) -> None:
        context.join("g", A, ["t3", "t6"])
        context.commit("g", {"t3": {0: 1}, "t6": {0: 2}}, member=A, epoch=2)
        context.update_metadata({"t6": 6})
        assert context.fetch("g") == {("t6", 0): (2, "")}
        gone = context.heartbeat("g", A, 2)
        assert context.assigned(gone) == {"t6": [0, 1, 2, 3, 4, 5]}

    def test_change_while_down_is_seen_after_restart(self, context: GroupContext) -> None:
        context.join("g", A, ["t3"])
        context.update_metadata({"t3": 5, "t6": 6})
        context.restart()
        assert context.heartbeat("g", A, 2).member_epoch == 3


class TestStaticMembers:
    def test_leaves_and_returns_with_its_assignment(self, context: GroupContext) -> None:
        context.join("g", A, ["t6"], instance="i1")
        context.join("g", B, ["t6"], instance="i2")
        kept = context.assigned(context.heartbeat("g", A, 2))
        context.heartbeat("g", A, 2, owned=kept)
        context.heartbeat("g", B, 3)
        left = context.heartbeat("g", A, -2, instance="i1")
        assert (left.member_id, left.member_epoch, left.heartbeat_interval_ms) == (A, -2, 0)
        assert {m.member_id: m.member_epoch for m in context.describe("g").members} == {A: -2, B: 3}
        back = context.join("g", C, ["t6"], instance="i1")
        assert (back.member_epoch, context.assigned(back)) == (3, kept)
        assert context.describe("g").group_epoch == 3
        assert context.describe("g").group_state == "Stable"
        with refused(Errors.UNKNOWN_MEMBER_ID):
            context.heartbeat("g", A, 3)
        with refused(Errors.FENCED_INSTANCE_ID):
            context.heartbeat("g", A, 3, instance="i1")
        with refused(Errors.FENCED_INSTANCE_ID):
            context.heartbeat("g", A, -1, instance="i1")
        assert context.heartbeat("g", C, 3, instance="i1", owned=kept).member_epoch == 3

    def test_returns_with_the_same_member_id(self, context: GroupContext) -> None:
        context.join("g", A, ["t6"], instance="i1")
        context.heartbeat("g", A, -2, instance="i1")
        back = context.join("g", A, ["t6"], instance="i1")
        assert (back.member_epoch, context.assigned(back)) == (2, {"t6": [0, 1, 2, 3, 4, 5]})

    def test_returns_with_another_subscription(self, context: GroupContext) -> None:
        context.join("g", A, ["t6"], instance="i1")
        context.heartbeat("g", A, -2, instance="i1")
        back = context.join("g", B, ["t3"], instance="i1")
        assert (back.member_epoch, context.assigned(back)) == (3, {"t3": [0, 1, 2]})
        assert [m.member_id for m in context.describe("g").members] == [B]

    def test_is_removed_when_it_stays_away(self, context: GroupContext) -> None:
        context.join("g", A, ["t6"], instance="i1")
        context.heartbeat("g", A, -2, instance="i1")
        assert context.sleep(45_000) == [TimerKey(GroupTimer.SESSION, "g", A)]
        assert context.describe("g").group_state == "Empty"

    def test_instance_in_use(self, context: GroupContext) -> None:
        context.join("g", A, ["t6"], instance="i1")
        for member in (B, A):
            with refused(Errors.UNRELEASED_INSTANCE_ID):
                context.join("g", member, ["t6"], instance="i1")

    def test_who_is_in_and_takes_over_an_instance_leaves_nothing_behind(self, context: GroupContext) -> None:
        """Found by the simulation, seeds 94 and 353: the member was in the group already, for other topics."""
        context.join("g", A, ["t6"], instance="i1")
        context.heartbeat("g", B, 0, names=[], regex="t3", owned={}, rebalance_timeout_ms=300_000)
        context.run_tasks()
        context.heartbeat("g", A, -2, instance="i1")
        context.join("g", B, ["t6"], instance="i1")
        (member,) = context.describe("g").members
        assert (member.member_id, member.instance_id, member.subscribed_topic_regex) == (B, "i1", "")
        targets = member.target_assignment.topic_partitions
        assert {topic.topic_name: topic.partitions for topic in targets} == {"t6": [0, 1, 2, 3, 4, 5]}
        context.heartbeat("g", B, -1, instance="i1")
        assert context.describe("g").group_state == "Empty"
        assert not context.shard._groups["g"].resolved_regexes  # type: ignore[attr-defined]

    def test_who_is_in_and_takes_over_an_instance_gives_up_what_it_had(self, context: GroupContext) -> None:
        context.join("g", A, ["t6"], instance="i1")
        context.join("g", B, ["t6"])
        context.join("g", C, ["t6"])
        for _ in range(2):
            for member in (A, B, C):
                context.heartbeat("g", member, 0, names=["t6"], owned={}, rebalance_timeout_ms=300_000, instance=None)
        context.heartbeat("g", A, -2, instance="i1")
        context.join("g", B, ["t6"], instance="i1")
        group = context.describe("g")
        assert [member.member_id for member in group.members] == [C, B]
        target = [
            p for member in group.members for t in member.target_assignment.topic_partitions for p in t.partitions
        ]
        assert sorted(target) == [0, 1, 2, 3, 4, 5]
        assert not [key for key in context.timers if key.member_id == A]

    def test_temporary_leave_of_others(self, context: GroupContext) -> None:
        context.join("g", A, ["t6"])
        with refused(Errors.INVALID_REQUEST):
            context.heartbeat("g", A, -2)
        with refused(Errors.UNKNOWN_MEMBER_ID):
            context.heartbeat("g", A, -2, instance="i1")
        with refused(Errors.UNKNOWN_MEMBER_ID):
            context.heartbeat("g", A, 2, instance="i1")


class TestRegex:
    def test_resolution_bumps_the_epoch(self, context: GroupContext) -> None:
        joined = context.join("g", A, regex="t.*", assignor=None)
        assert (joined.member_epoch, context.assigned(joined)) == (1, {})
        context.run_tasks()
        resolved = context.heartbeat("g", A, 1, owned={})
        assert (resolved.member_epoch, context.assigned(resolved)) == (2, {"t3": [0, 1, 2], "t6": [0, 1, 2, 3, 4, 5]})

    @pytest.mark.parametrize(
        ("regex", "topics"), [("(?i)T3", {"t3"}), ("^t3$", {"t3"}), ("t", set()), ("t(3|6)", {"t3", "t6"})]
    )
    def test_whole_name_must_match(self, context: GroupContext, regex: str, topics: set[str]) -> None:
        context.join("g", A, regex=regex, assignor=None)
        context.run_tasks()
        response = context.heartbeat("g", A, 1, owned={})
        assert response.member_epoch == (2 if topics else 1)
        assert set(context.assigned(response) or {}) == topics

    def test_names_and_regex_are_a_union(self, context: GroupContext) -> None:
        context.join("g", A, ["t3"], regex="t6")
        context.run_tasks()
        response = context.heartbeat("g", A, 2)
        assert set(context.assigned(response) or {}) == {"t3", "t6"}

    def test_new_topic_is_found_after_a_metadata_change(self, context: GroupContext) -> None:
        context.join("g", A, regex="t.*", assignor=None)
        context.run_tasks()
        context.heartbeat("g", A, 1, owned={})
        assert context.heartbeat("g", A, 2).assignment is None
        assert context.tasks == []
        context.update_metadata({"t3": 3, "t6": 6, "t9": 1})
        context.heartbeat("g", A, 2)
        context.run_tasks()
        found = context.heartbeat("g", A, 2)
        assert (found.member_epoch, "t9" in (context.assigned(found) or {})) == (3, True)

    def test_refresh_interval(self, context: GroupContext) -> None:
        context.join("g", A, regex="t.*", assignor=None)
        context.run_tasks()
        context.heartbeat("g", A, 1, owned={})
        for _ in range(20):
            assert context.tasks == []
            context.sleep(30_000)
            context.heartbeat("g", A, 2)
        assert len(context.tasks) == 1

    def test_last_subscriber_takes_the_regex_along(self, context: GroupContext) -> None:
        context.join("g", A, regex="t.*", assignor=None)
        context.run_tasks()
        context.join("g", B, regex="t.*", assignor=None)
        context.heartbeat("g", A, -1)
        assert not any(type(record.key).__name__ == "ConsumerGroupRegularExpressionKey" for record in context.records)
        context.heartbeat("g", B, -1)
        assert any(type(record.key).__name__ == "ConsumerGroupRegularExpressionKey" for record in context.records)

    def test_change_from_regex_to_names(self, context: GroupContext) -> None:
        context.join("g", A, regex="t.*", assignor=None)
        context.run_tasks()
        context.heartbeat("g", A, 1, owned={})
        changed = context.heartbeat("g", A, 2, names=["t3"], regex="")
        assert context.assigned(changed) == {"t3": [0, 1, 2]}

    def test_offsets_of_matched_topics_cannot_be_deleted(self, context: GroupContext) -> None:
        context.join("g", A, regex="t3")
        assert not context.shard._groups["g"].is_subscribed_to("t3")
        context.run_tasks()
        assert context.shard._groups["g"].is_subscribed_to("t3")


def test_restart_gives_every_member_a_new_session(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"], instance="i")
    context.heartbeat("g", A, 2)
    context.sleep(40_000)
    context.restart()
    assert {key.kind for key in context.timers} == {
        GroupTimer.SESSION,
        GroupTimer.REBALANCE,
        GroupTimer.OFFSETS_EXPIRATION,
    }
    assert context.sleep(44_999) == []
    assert len(context.sleep(1)) == 2


def test_a_group_whose_hash_is_of_another_kind_gets_one_epoch_more(context: GroupContext) -> None:
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


def test_other_racks_of_the_replicas_are_a_new_group_epoch(context: GroupContext) -> None:
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
