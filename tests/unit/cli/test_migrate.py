# SPDX-License-Identifier: Apache-2.0
"""`kcoord migrate --check`: the coordinator's rules, applied to descriptions."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from kcoord.cli.migrate import CLIENT_ASSIGNORS, MAX_SIZE, POLICY, NewAssignor, judge, judge_converted
from kcoord.client.admin.model import ConsumerGroupDescription, MemberDescription
from kcoord.client.assignors import Metadata, OfferedAssignor
from kcoord.client.types import Node
from kcoord_protocol.messages import ConsumerProtocolAssignment, ConsumerProtocolSubscription, DescribeGroupsResponse

SETTINGS = {POLICY: "bidirectional", MAX_SIZE: "2"}
SUBSCRIPTION = b"\x00\x00" + ConsumerProtocolSubscription(topics=["t"]).encode(0)
ASSIGNMENT = b"\x00\x00" + ConsumerProtocolAssignment().encode(0)
ENABLED = SETTINGS | {CLIENT_ASSIGNORS: "true"}
WITH_USER_DATA = b"\x00\x00" + ConsumerProtocolSubscription(topics=["t"], user_data=b"x").encode(0)
CUSTOM = b"\x00\x00" + ConsumerProtocolAssignment(user_data=b"x").encode(0)


def member(
    assignment: bytes = ASSIGNMENT, subscription: bytes = SUBSCRIPTION
) -> DescribeGroupsResponse.DescribedGroupMember:
    return DescribeGroupsResponse.DescribedGroupMember(
        member_id="m", client_id="c", client_host="/h", member_metadata=subscription, member_assignment=assignment
    )


def group(
    *members: DescribeGroupsResponse.DescribedGroupMember, state: str = "Stable", protocol_type: str = "consumer"
) -> DescribeGroupsResponse.DescribedGroup:
    return DescribeGroupsResponse.DescribedGroup(
        group_id="g", group_state=state, protocol_type=protocol_type, protocol_data="range", members=list(members)
    )


def test_a_group_that_can_be_converted() -> None:
    assert judge(group(member(), member(b"")), "Stable", SETTINGS).can_convert
    assert judge(group(state="Empty"), "Empty", {POLICY: "disabled"}).can_convert


def test_groups_that_do_not_exist_or_were_converted() -> None:
    assert not judge(group(state="Dead"), None, SETTINGS).can_convert
    assert judge(group(state="Dead"), "Stable", SETTINGS).can_convert


@pytest.mark.parametrize(
    ("described", "settings", "reason"),
    [
        (group(member()), SETTINGS | {POLICY: "downgrade"}, "group.consumer.migration.policy=downgrade"),
        (group(member(), protocol_type="connect"), SETTINGS, "'connect', not 'consumer'"),
        (group(member(), member(), member()), SETTINGS, "3 members, but group.consumer.max.size=2"),
        (group(member(CUSTOM)), SETTINGS, "custom assignor"),
        (group(member(b"\x00")), SETTINGS, "the assignment of member m (c on /h) cannot be read"),
        (group(member(subscription=b"")), SETTINGS, "the subscription of member m (c on /h) cannot be read"),
    ],
)
def test_obstacles(described: DescribeGroupsResponse.DescribedGroup, settings: dict[str, str], reason: str) -> None:
    answer = judge(described, "Stable", settings)
    assert not answer.can_convert
    assert reason in answer.reasons[0]


@pytest.mark.parametrize(
    ("assignor", "settings", "reason"),
    [
        ("range:0-2", ENABLED, "the MinimumVersion of that client assignor is 0, not -1"),
        ("other:-1-2", ENABLED, "ClientAssignors has no assignor of that name"),
        ("range:-1-2", SETTINGS, "kcoord.client.assignors.enable is not true"),
        ("range:-1-2", ENABLED, None),
    ],
)
@pytest.mark.parametrize("custom", [member(CUSTOM), member(subscription=WITH_USER_DATA)])
def test_a_client_side_assignor_that_would_convert_a_group_with_user_data(
    custom: DescribeGroupsResponse.DescribedGroupMember, assignor: str, settings: dict[str, str], reason: str | None
) -> None:
    answer = judge(group(member(), custom), "Stable", settings, NewAssignor.parse(assignor))
    assert answer.can_convert is (reason is None)
    if reason is not None:
        assert reason in answer.reasons[0]


def test_the_assignor_of_a_group_that_rebalances_is_not_known() -> None:
    rebalancing = group(member(subscription=b""), state="PreparingRebalance")
    rebalancing.protocol_data = ""
    answer = judge(rebalancing, "PreparingRebalance", ENABLED, NewAssignor.parse("range:-1-0"))
    assert answer.reasons == [
        "it is in the state PreparingRebalance, in which the broker does not tell its assignor; try again"
    ]


@pytest.mark.parametrize("text", ["x", "x:1", ":0-1", "x:2-1", "x:-2-1", "x:-1--1", "x:a-b"])
def test_assignors_are_a_name_and_a_range_of_versions(text: str) -> None:
    assert NewAssignor.parse("my:own:-1-3") == ("my:own", -1, 3)
    with pytest.raises(ArgumentTypeError, match="NAME:MIN-MAX"):
        NewAssignor.parse(text)


@pytest.mark.parametrize(
    ("assignor", "can_join", "text"),
    [
        ("x:0-1", False, "member new (c on /h) reads only versions 2 to 3 of x"),
        ("x:3-4", True, "it already uses the consumer protocol"),
        ("y:0-1", True, "member new (c on /h) does not offer y, so the group would not use it"),
    ],
)
def test_a_consumer_that_joins_a_group_with_client_side_assignors(assignor: str, can_join: bool, text: str) -> None:
    offered = OfferedAssignor("x", 2, 3, 0, Metadata(2))
    members = [
        MemberDescription("new", None, "c", "/h", frozenset(), upgraded=True, client_assignors=(offered,)),
        MemberDescription("old", None, "c", "/h", frozenset(), upgraded=False),
    ]
    description = ConsumerGroupDescription(
        "g", "consumer", "Stable", "consumer", "x", members, Node(1, "h", 1), is_assigned_by_member=True
    )
    answer = judge_converted(description, ENABLED, NewAssignor.parse(assignor))
    assert (answer.can_convert, answer.reasons[-1]) == (can_join, text)
    assert not judge_converted(description, SETTINGS, NewAssignor.parse("x:3-4")).can_convert
