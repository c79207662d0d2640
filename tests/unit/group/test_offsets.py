# SPDX-License-Identifier: Apache-2.0
"""Committed offsets, DeleteGroups and ListGroups of the pure core, with the facts recorded from Kafka 4.3.1."""

from __future__ import annotations

import pytest

from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetDeleteRequest
from tests.unit.group.group_context import GroupContext

A = "member-a"


@pytest.fixture
def context() -> GroupContext:
    return GroupContext({"t3": 3, "t6": 6})


def error_of(context: GroupContext, **commit: object) -> Errors:
    with pytest.raises(KafkaError) as caught:
        context.commit("g", {"t3": {0: 10}}, **commit)  # type: ignore[arg-type]
    return caught.value.error


def delete(context: GroupContext, group: str, topics: dict[str, list[int]]) -> dict[tuple[str, int], int]:
    request = OffsetDeleteRequest(
        group_id=group,
        topics=[
            OffsetDeleteRequest.OffsetDeleteRequestTopic(
                name=name,
                partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=p) for p in partitions],
            )
            for name, partitions in topics.items()
        ],
    )
    response = context.run(lambda ctx: context.shard.delete_offsets(ctx, request))
    return {(t.name, p.partition_index): p.error_code for t in response.topics for p in t.partitions}


def test_member_commits_with_its_epoch_and_version_nine(context: GroupContext) -> None:
    context.join("g", A, ["t3"])
    for epoch in (-1, 0, 1, 2, 3):
        assert error_of(context, member=A, epoch=epoch, api_version=8) == Errors.UNSUPPORTED_VERSION
    for epoch in (-1, 0, 1, 3):
        assert error_of(context, member=A, epoch=epoch) == Errors.STALE_MEMBER_EPOCH
    for member, epoch in (("x", 1), ("", 1), ("", -1), ("x", -1)):
        assert error_of(context, member=member, epoch=epoch) == Errors.UNKNOWN_MEMBER_ID
    assert context.commit("g", {"t3": {0: 10}}, member=A, epoch=2) == {("t3", 0): 0}
    assert context.fetch("g") == {("t3", 0): (10, "")}
    context.heartbeat("g", A, -1)
    assert context.commit("g", {"t3": {0: 11}}) == {("t3", 0): 0}
    assert error_of(context, epoch=3) == Errors.UNKNOWN_MEMBER_ID


def test_older_epoch_is_good_for_partitions_owned_since(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", "member-b", ["t6"])
    kept = context.assigned(context.heartbeat("g", A, 2))
    assert kept is not None
    context.heartbeat("g", A, 2, owned=kept)
    stays, left = kept["t6"][0], next(p for p in range(6) if p not in kept["t6"])
    assert context.commit("g", {"t6": {stays: 5}}, member=A, epoch=2) == {("t6", stays): 0}
    with pytest.raises(KafkaError) as caught:
        context.commit("g", {"t6": {left: 5}}, member=A, epoch=2)
    assert caught.value.error == Errors.STALE_MEMBER_EPOCH


def test_unknown_group(context: GroupContext) -> None:
    assert error_of(context, epoch=0) == Errors.GROUP_ID_NOT_FOUND
    assert error_of(context, epoch=0, api_version=8) == Errors.ILLEGAL_GENERATION
    assert context.commit("", {"t3": {0: -5}}, member="any") == {("t3", 0): 0}
    assert context.fetch("") == {("t3", 0): (-5, "")}


def test_too_much_metadata_fails_its_partition_alone(context: GroupContext) -> None:
    assert context.commit("g", {"t3": {0: 1}}, metadata="é" * 2048) == {("t3", 0): 0}
    assert context.commit("g", {"t3": {0: 2}}, metadata="é" * 2048 + "x") == {
        ("t3", 0): Errors.OFFSET_METADATA_TOO_LARGE
    }
    assert context.fetch("g")["t3", 0][0] == 1


def test_record_version_is_the_lowest_that_holds_everything(context: GroupContext) -> None:
    context.commit("g", {"t3": {0: 1}}, retention_time_ms=1000, api_version=2)
    assert (context.records[0].value_version, context.records[0].value.expire_timestamp) == (1, context.now_ms + 1000)  # type: ignore[union-attr]
    context.commit("g", {"t3": {0: 1}})
    assert context.records[0].value_version == 4
    context.commit("g", {"unknown": {0: 1}})
    assert context.records[0].value_version == 3


def test_fetch_checks_the_member_that_is_named(context: GroupContext) -> None:
    context.join("g", A, ["t3"])
    context.commit("g", {"t3": {0: 1}}, member=A, epoch=2)
    assert context.fetch("g", {"t3": [0, 2], "nope": [7]}, member=A, epoch=2) == {
        ("t3", 0): (1, ""),
        ("t3", 2): (-1, ""),
        ("nope", 7): (-1, ""),
    }
    for member, epoch, error in (
        ("", 2, Errors.UNKNOWN_MEMBER_ID),
        ("x", -1, Errors.UNKNOWN_MEMBER_ID),
        (A, 1, Errors.STALE_MEMBER_EPOCH),
        (A, -1, Errors.STALE_MEMBER_EPOCH),
    ):
        with pytest.raises(KafkaError) as caught:
            context.fetch("g", {"t3": [0]}, member=member, epoch=epoch)
        assert caught.value.error == error
    assert context.fetch("nogroup", {"t3": [0]}, member="x", epoch=3) == {("t3", 0): (-1, "")}


def test_offsets_of_a_topic_made_again_are_gone(context: GroupContext) -> None:
    context.commit("g", {"t3": {0: 1}}, topic_ids=True, api_version=10)
    context.update_metadata({"t6": 6})
    context.update_metadata({"t6": 6, "t3": 3})
    assert context.fetch("g") == {}


def test_delete_offsets(context: GroupContext) -> None:
    context.join("g", A, ["t3"])
    context.commit("g", {"t3": {0: 1}, "t6": {0: 3, 5: 4}}, member=A, epoch=2)
    assert delete(context, "g", {"t3": [0], "t6": [0, 1, 99]}) == {
        ("t3", 0): Errors.GROUP_SUBSCRIBED_TO_TOPIC,
        ("t6", 0): 0,
        ("t6", 1): 0,
        ("t6", 99): Errors.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert context.fetch("g") == {("t3", 0): (1, ""), ("t6", 5): (4, "")}
    context.heartbeat("g", A, -1)
    assert delete(context, "g", {"t3": [0]}) == {("t3", 0): 0}
    for group, error in (("nogroup", Errors.GROUP_ID_NOT_FOUND), ("", Errors.INVALID_GROUP_ID)):
        with pytest.raises(KafkaError) as caught:
            delete(context, group, {"t3": [0]})
        assert caught.value.error == error


def test_delete_groups(context: GroupContext) -> None:
    context.join("live", A, ["t3"])
    context.commit("simple", {"t3": {0: 1}})
    context.join("empty", A, regex="t.*", assignor=None)
    context.run_tasks()
    context.commit("empty", {"t3": {0: 1}}, member=A, epoch=1)
    context.heartbeat("empty", A, -1)
    results = context.run(
        lambda ctx: context.shard.delete_groups(ctx, ["simple", "live", "simple", "nogroup", "", "empty"])
    )
    assert [(result.group_id, result.error_code) for result in results] == [
        ("simple", 0),
        ("live", Errors.NON_EMPTY_GROUP),
        ("nogroup", Errors.GROUP_ID_NOT_FOUND),
        ("", Errors.GROUP_ID_NOT_FOUND),
        ("empty", 0),
    ]
    assert list(context.shard.hard_state()["groups"]) == ["live"]  # type: ignore[call-overload]
    assert context.shard.hard_state()["offsets"] == {}
    assert context.join("empty", A, ["t3"]).member_epoch == 2


def test_list_groups_filters(context: GroupContext) -> None:
    context.join("g0", A, ["t3"])
    context.commit("gs", {"t3": {0: 1}})

    def listed(states: list[str], types: list[str]) -> list[tuple[str, str, str, str]]:
        groups = context.run(lambda ctx: context.shard.list_groups(ctx, states, types))
        return [(g.group_id, g.protocol_type, g.group_state, g.group_type.lower()) for g in groups]

    consumer, simple = ("g0", "consumer", "Stable", "consumer"), ("gs", "", "Empty", "classic")
    assert listed([], []) == [simple, consumer]
    assert listed(["stable", "bogus"], []) == [consumer]
    assert listed([], ["Classic"]) == [simple]
    assert listed(["Empty"], ["consumer"]) == []
    assert listed([""], []) == listed([], ["bogus"]) == []


def test_simple_group_becomes_a_consumer_group(context: GroupContext) -> None:
    context.commit("g", {"t3": {0: 7}})
    assert context.join("g", A, ["t3"]).member_epoch == 2
    assert context.fetch("g") == {("t3", 0): (7, "")}
    groups = context.run(lambda ctx: context.shard.list_groups(ctx, [], []))
    assert [group.group_type.lower() for group in groups] == ["consumer"]
