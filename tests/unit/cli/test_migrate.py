# SPDX-License-Identifier: Apache-2.0
"""`kcoord migrate --check`: the coordinator's rules, applied to descriptions."""

from __future__ import annotations

import pytest

from kcoord.cli.migrate import MAX_SIZE, POLICY, judge
from kcoord_protocol.messages import ConsumerProtocolAssignment, ConsumerProtocolSubscription, DescribeGroupsResponse

SETTINGS = {POLICY: "bidirectional", MAX_SIZE: "2"}
SUBSCRIPTION = b"\x00\x00" + ConsumerProtocolSubscription(topics=["t"]).encode(0)
ASSIGNMENT = b"\x00\x00" + ConsumerProtocolAssignment().encode(0)
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
