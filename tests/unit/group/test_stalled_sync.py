# SPDX-License-Identifier: Apache-2.0
"""Members of classic groups whose session timeout passes while their SyncGroup waits for the leader."""

from __future__ import annotations

from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import SyncGroupResponse
from tests.unit.group.classic_members import ClassicConsumer, answered
from tests.unit.group.group_context import GroupContext

DELAY = {"group.initial.rebalance.delay.ms": "0"}


def test_a_member_whose_sync_fails_has_its_whole_session_timeout_again() -> None:
    """A member is not removed while its SyncGroup waits. Afterwards it needs a timer, or it would never be removed."""
    context = GroupContext({"t6": 6}, DELAY)
    leader, follower = (ClassicConsumer(context, "g", name, ["t6"], instance=name) for name in ("i1", "i2"))
    follower.session_timeout_ms, leader.session_timeout_ms = 10_000, 30_000
    joins = [leader.join(), follower.join()]
    context.sleep(0)
    for member, join in zip((leader, follower), joins, strict=True):
        member.on_joined(join)
    waiting = follower.sync()
    context.sleep(20_000)
    leader.leave()
    failed = answered(waiting)
    assert isinstance(failed, SyncGroupResponse)
    assert failed.error_code == Errors.REBALANCE_IN_PROGRESS
    context.sleep(9_999)
    assert member_ids(context) == [follower.member_id]
    context.sleep(1)
    assert member_ids(context) == []


def member_ids(context: GroupContext) -> list[str]:
    group = context.run(lambda ctx: context.shard.describe_groups(ctx, ["g"]), 6)[0].complete()
    return [member.member_id for member in group.members]
