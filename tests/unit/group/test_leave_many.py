# SPDX-License-Identifier: Apache-2.0
"""A LeaveGroup that removes all members of a large consumer group, as an administrator does."""

from __future__ import annotations

import pytest

from kcoord.coordinator.group.consumer.group import ConsumerGroupMember
from kcoord.runtime.result import OperationContext
from kcoord_protocol.messages import LeaveGroupRequest
from tests.unit.group.group_context import GroupContext

COUNT = 40


def test_the_work_does_not_grow_with_the_square_of_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    context = GroupContext({"t3": 3})
    member_ids = [f"m{number}" for number in range(COUNT)]
    for member_id in member_ids:
        context.join("g", member_id, ["t3"])
    request = LeaveGroupRequest(
        group_id="g", members=[LeaveGroupRequest.MemberIdentity(member_id=member_id) for member_id in member_ids * 2]
    )
    comparisons = 0
    equals = ConsumerGroupMember.__eq__

    def counting(member: ConsumerGroupMember, other: object) -> bool:
        nonlocal comparisons
        comparisons += 1
        return equals(member, other)

    with monkeypatch.context() as patch:
        patch.setattr(ConsumerGroupMember, "__eq__", counting)
        result = context.shard.leave_group(OperationContext(context.now_ms, 5), request)
    assert [member.error_code for member in result.response.members] == [0] * 2 * COUNT
    assert comparisons <= COUNT
