# SPDX-License-Identifier: Apache-2.0
"""The responses to the members of a classic group, which are made after the operation that completes a phase."""

from __future__ import annotations

from collections.abc import Iterable

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.member import ClassicMember
from kcoord.coordinator.group.classic.rebalance import Rebalance
from kcoord.coordinator.group.group import GroupState
from kcoord.runtime.result import Completion
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import JoinGroupResponse, SyncGroupResponse

MEMBERS = ("a", "b", "c")


def joining_group() -> ClassicGroup:
    group = ClassicGroup("g")
    group.protocol_type = "consumer"
    for name in MEMBERS:
        protocols = [("range", name.encode()), ("sticky", b"")]
        group.add(
            ClassicMember(name, f"i{name}", "client", "/host", 60_000, 10_000, protocols, join_token=f"join {name}")
        )
    group.transition_to(GroupState.PREPARING_REBALANCE, 0)
    return group


def rebalance_of(group: ClassicGroup) -> Rebalance:
    return Rebalance(BrokerConfig.from_properties({}), group, 1_000)


def change(group: ClassicGroup) -> None:
    """Changes everything in the group that a response shows."""
    group.remove("c")
    group.set_protocols(group.members["b"], [("sticky", b"new")])
    group.members["b"].instance_id = None
    group.leader = "b"
    group.protocol, group.protocol_type = "sticky", "connect"
    group.generation += 1


def by_token(completions: Iterable[Completion]) -> dict[object, object]:
    return {completion.token: completion.response for completion in completions}


def test_the_responses_of_a_join_phase_show_the_group_as_it_was() -> None:
    group = joining_group()
    rebalance = rebalance_of(group)
    rebalance.complete_join()
    (completions,) = rebalance.result.bulk_completions
    change(group)
    joined = [
        JoinGroupResponse.JoinGroupResponseMember(member_id=name, group_instance_id=f"i{name}", metadata=name.encode())
        for name in MEMBERS
    ]
    assert by_token(completions) == {
        f"join {name}": JoinGroupResponse(
            generation_id=1,
            protocol_type="consumer",
            protocol_name="range",
            leader="a",
            member_id=name,
            members=joined if name == "a" else [],
        )
        for name in MEMBERS
    }
    assert rebalance.result.completions == []


def test_the_responses_of_a_sync_phase_show_the_group_as_it_was() -> None:
    group = joining_group()
    rebalance_of(group).complete_join()
    for name in MEMBERS:
        group.members[name].sync_token = f"sync {name}"
    rebalance = rebalance_of(group)
    rebalance.complete_generation({"a": b"1", "b": b"2"})
    (completions,) = rebalance.result.bulk_completions
    change(group)
    assert by_token(completions) == {
        f"sync {name}": SyncGroupResponse(protocol_type="consumer", protocol_name="range", assignment=assignment)
        for name, assignment in (("a", b"1"), ("b", b"2"), ("c", b""))
    }


def test_only_waiting_requests_are_answered_when_a_sync_phase_is_aborted() -> None:
    group = joining_group()
    rebalance_of(group).complete_join()
    group.members["b"].sync_token = "sync b"
    rebalance = rebalance_of(group)
    rebalance.prepare()
    (completions,) = rebalance.result.bulk_completions
    change(group)
    assert by_token(completions) == {"sync b": SyncGroupResponse(error_code=Errors.REBALANCE_IN_PROGRESS)}
