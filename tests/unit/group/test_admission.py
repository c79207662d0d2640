# SPDX-License-Identifier: Apache-2.0
"""Limits on new groups and members: what is there already stays usable."""

from __future__ import annotations

import pytest

from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import JoinGroupRequest
from tests.unit.group.group_context import GroupContext

MEMBER = "member"


@pytest.fixture
def context() -> GroupContext:
    configs = {"kcoord.partition.max.groups": "2", "kcoord.max.id.bytes": "20"}
    return GroupContext({"t": 1}, configs)


def join_classic(context: GroupContext, group: str, instance_id: str | None = None) -> Errors:
    request = JoinGroupRequest(
        group_id=group,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        group_instance_id=instance_id,
        protocol_type="consumer",
        protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="range")],
    )
    try:
        response = context.run(lambda ctx: context.shard.join_group(ctx, request))
    except KafkaError as error:
        return error.error
    return Errors(response.error_code)


def refusal(context: GroupContext, group: str, member: str = MEMBER) -> Errors:
    with pytest.raises(KafkaError) as caught:
        context.join(group, member, ["t"])
    return caught.value.error


def test_no_operation_makes_one_group_too_many(context: GroupContext) -> None:
    context.join("first", MEMBER, ["t"])
    context.commit("second", {"t": {0: 1}})
    assert refusal(context, "third") == Errors.POLICY_VIOLATION
    assert join_classic(context, "third") == Errors.POLICY_VIOLATION
    with pytest.raises(KafkaError, match=r"kcoord\.partition\.max\.groups=2"):
        context.commit("third", {"t": {0: 1}})
    context.join("first", "other", ["t"])
    context.commit("second", {"t": {0: 2}})
    context.run(lambda ctx: context.shard.delete_groups(ctx, ["second"]))
    context.join("third", MEMBER, ["t"])


@pytest.mark.parametrize("long_id", ["x" * 21, "\u65e5" * 7])
def test_long_ids(context: GroupContext, long_id: str) -> None:
    assert refusal(context, long_id) == Errors.INVALID_GROUP_ID
    assert join_classic(context, long_id) == Errors.INVALID_GROUP_ID
    assert refusal(context, "g", long_id) == Errors.INVALID_REQUEST
    assert join_classic(context, "g", instance_id=long_id) == Errors.INVALID_REQUEST
    context.join("\u65e5" * 6, "y" * 20, ["t"])
