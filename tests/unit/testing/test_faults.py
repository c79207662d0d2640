# SPDX-License-Identifier: Apache-2.0
"""The requests that a fault applies to, how often it applies, and the errors for invalid rules."""

from __future__ import annotations

import pytest

from kcoord.testing.arguments import Arguments
from kcoord.testing.errors import ControlError
from kcoord.testing.faults import FaultOutcome, Faults, RequestFault, fault_from
from kcoord.testing.observed import RequestFacts, facts_of
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    DeleteGroupsRequest,
    FindCoordinatorRequest,
    HeartbeatRequest,
    LeaveGroupRequest,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
)


def facts(api: ApiKey = ApiKey.OFFSET_COMMIT, group: str = "g", member: str = "m", epoch: int = 3) -> RequestFacts:
    return RequestFacts(api, 9, "client", frozenset({group}), frozenset({member}), frozenset({epoch}))


def fault(**fields: object) -> RequestFault:
    return fault_from(Arguments({"error": "NOT_COORDINATOR", **fields}))


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({}, True),
        ({"api": "OffsetCommit"}, True),
        ({"api": "OFFSET_COMMIT"}, True),
        ({"api": "OffsetFetch"}, False),
        ({"group": "g"}, True),
        ({"group": "h"}, False),
        ({"member": "m"}, True),
        ({"member": "g"}, False),
        ({"epoch": 3}, True),
        ({"epoch": 0}, False),
        ({"client_id": "client"}, True),
        ({"client_id": "other"}, False),
        ({"api": "OffsetCommit", "group": "g", "member": "m", "epoch": 3}, True),
        ({"api": "OffsetCommit", "group": "g", "member": "m", "epoch": 4}, False),
    ],
)
def test_a_request_must_match_all_given_fields(fields: dict[str, object], matches: bool) -> None:
    assert fault(**fields).selector.matches(facts()) is matches


def test_requests_pass_before_skip_and_after_times() -> None:
    faults = Faults()
    rule = faults.add(fault(skip=2, times=2))
    met = [faults.meet(facts()) is rule for _ in range(6)]
    assert met == [False, False, True, True, False, False]
    assert (rule.matched, rule.hits) == (4, 2)


def test_the_first_rule_decides_until_it_is_used_up() -> None:
    faults = Faults()
    first, second = faults.add(fault()), faults.add(fault(times=0))
    assert [faults.meet(facts()) for _ in range(3)] == [first, second, second]
    faults.remove(second.number)
    assert faults.meet(facts()) is None
    assert faults.all() == [first]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "a fault needs error, delay_ms, drop or close"),
        ({"error": "NO_SUCH"}, "error: unknown error 'NO_SUCH'"),
        ({"error": 5}, "error must be a string"),
        ({"drop": True, "close": True}, "only one of error, drop and close"),
        ({"drop": 1}, "drop must be true or false"),
        ({"drop": True, "api": "Commit"}, "api: unknown API 'Commit'"),
        ({"drop": True, "times": -1}, "times must not be negative"),
        ({"drop": True, "epoch": "x"}, "epoch must be an integer"),
        ({"delay_ms": -5}, "delay_ms must not be negative"),
        ({"delay_ms": True}, "delay_ms must be an integer"),
        ({"drop": True, "grop": "g"}, "unknown fields: grop"),
    ],
)
def test_an_invalid_rule_is_an_error_that_names_the_field(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ControlError, match=named):
        fault_from(Arguments(fields))


def test_outcomes() -> None:
    assert fault_from(Arguments({"delay_ms": 5})).outcome is FaultOutcome.ANSWER
    assert fault_from(Arguments({"drop": True})).outcome is FaultOutcome.DROP
    assert fault_from(Arguments({"close": True})).outcome is FaultOutcome.CLOSE
    coded = fault_from(Arguments({"error": "25"}))
    assert (coded.outcome, coded.error) == (FaultOutcome.ERROR, Errors.UNKNOWN_MEMBER_ID)


GROUP = OffsetFetchRequest.OffsetFetchRequestGroup


@pytest.mark.parametrize(
    ("api", "request_", "groups", "members", "epochs"),
    [
        (
            ApiKey.CONSUMER_GROUP_HEARTBEAT,
            ConsumerGroupHeartbeatRequest(group_id="g", member_id="m", instance_id="i", member_epoch=4),
            {"g"},
            {"m", "i"},
            {4},
        ),
        (ApiKey.HEARTBEAT, HeartbeatRequest(group_id="g", member_id="m", generation_id=2), {"g"}, {"m"}, {2}),
        (
            ApiKey.OFFSET_COMMIT,
            OffsetCommitRequest(group_id="g", member_id="m", generation_id_or_member_epoch=7),
            {"g"},
            {"m"},
            {7},
        ),
        (
            ApiKey.OFFSET_FETCH,
            OffsetFetchRequest(groups=[GROUP(group_id="a", member_id="m", member_epoch=1), GROUP(group_id="b")]),
            {"a", "b"},
            {"m"},
            {1, -1},
        ),
        (
            ApiKey.LEAVE_GROUP,
            LeaveGroupRequest(group_id="g", members=[LeaveGroupRequest.MemberIdentity(member_id="m")]),
            {"g"},
            {"m"},
            set(),
        ),
        (ApiKey.FIND_COORDINATOR, FindCoordinatorRequest(coordinator_keys=["a", "b"]), {"a", "b"}, set(), set()),
        (ApiKey.FIND_COORDINATOR, FindCoordinatorRequest(key="t", key_type=1), set(), set(), set()),
        (ApiKey.DELETE_GROUPS, DeleteGroupsRequest(groups_names=["a"]), {"a"}, set(), set()),
        (ApiKey.METADATA, MetadataRequest(), set(), set(), set()),
    ],
    ids=lambda value: value.message_name if isinstance(value, Message) else "",
)
def test_the_groups_members_and_epochs_of_a_request(
    api: ApiKey, request_: Message, groups: set[str], members: set[str], epochs: set[int]
) -> None:
    request_facts = facts_of(api, 0, "c", request_)
    assert (set(request_facts.groups), set(request_facts.members), set(request_facts.epochs)) == (
        groups,
        members,
        epochs,
    )
