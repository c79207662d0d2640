# SPDX-License-Identifier: Apache-2.0
"""The responses to the members of a classic group, which are made after the operation that completes a phase."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.member import ClassicMember
from kcoord.coordinator.group.classic.rebalance import Rebalance, least_size_bytes, size_bytes
from kcoord.coordinator.group.group import GroupState
from kcoord.runtime.result import MAX_BATCH_BYTES, Completion
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


def test_members_with_equal_protocols_share_them() -> None:
    group = ClassicGroup("g")
    for name in MEMBERS:
        group.add(ClassicMember(name, None, "client", "/host", 60_000, 10_000, [("range", b"x")]))
    group.set_protocols(group.members["a"], [("range", b"y")])
    group.set_protocols(group.members["b"], [("range", b"y")])
    shared = [group.members[name].protocols for name in MEMBERS]
    assert shared == [[("range", b"y")], [("range", b"y")], [("range", b"x")]]
    assert shared[0] is shared[1]
    loaded = ClassicGroup("g")
    group.protocol = "range"
    group.set_protocols(group.members["c"], [("range", b"y")])
    loaded.apply(group.to_value(0, {}))
    assert len({id(member.protocols) for member in loaded.members.values()}) == 1


def test_the_record_of_a_generation_adds_only_members_that_are_not_present(monkeypatch: pytest.MonkeyPatch) -> None:
    group = joining_group()
    added: list[tuple[str, str]] = []
    rebalance_of(group).complete_join()
    add = ClassicGroup.add

    def add_and_note(group: ClassicGroup, member: ClassicMember) -> None:
        added.append((group.group_id, member.member_id))
        add(group, member)

    monkeypatch.setattr(ClassicGroup, "add", add_and_note)
    value = group.to_value(0, {"b": b"2"})
    group.apply(value)
    assert added == []
    loaded = ClassicGroup("loaded")
    loaded.apply(value)
    assert added == [("loaded", name) for name in MEMBERS]
    for replayed in (group, loaded):
        assert [member.assignment for member in replayed.members.values()] == [b"", b"2", b""]
        assert replayed.static_members == {f"i{name}": name for name in MEMBERS}
        assert replayed.leader == "a"
        assert replayed.candidate_protocols() >= {"range"}
    value.members.pop(0)
    group.apply(value)
    assert (list(group.members), group.static_members) == (["b", "c"], {"ib": "b", "ic": "c"})
    assert [name for _, name in added[3:]] == ["b", "c"]


def test_the_names_of_earlier_protocols_are_forgotten() -> None:
    group = ClassicGroup("g")
    group.protocol_type = "consumer"
    group.transition_to(GroupState.PREPARING_REBALANCE, 0)
    member = ClassicMember("a", None, "client", "/host", 60_000, 10_000, [])
    group.add(member)
    for name in ("first", "second"):
        group.set_protocols(member, [(name, b"data")])
        group.begin_next_generation(0)
        group.apply(group.to_value(0, {}))
        group.transition_to(GroupState.PREPARING_REBALANCE, 0)
    assert group._supported == {"second": 1}
    group.remove("a")
    assert group._newest_protocols == []


def test_the_lower_bound_of_the_size_of_a_group_counts_ids_and_data_of_its_members() -> None:
    group = joining_group()
    rebalance_of(group).complete_join()
    group.add(ClassicMember("ü", None, "client", "/host", 60_000, 10_000, [("range", b"four")]))
    assignments = {"a": b"1", "ü": b"123", "unknown": b"123456"}
    value = group.to_value(0, assignments)
    names = "consumerrangea" + 4 * "client" + 4 * "/host" + "iaibic"
    assert least_size_bytes(group, assignments) == size_bytes(value) - len(names) - len("ü".encode()) + 1


def test_no_record_is_made_for_a_group_that_is_surely_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    group = joining_group()
    rebalance_of(group).complete_join()
    group.members["b"].sync_token = "sync b"
    monkeypatch.delattr(ClassicGroup, "to_value")
    rebalance = rebalance_of(group)
    rebalance.complete_generation({"a": bytes(MAX_BATCH_BYTES)})
    completions = chain(*rebalance.result.bulk_completions)
    assert by_token(completions) == {"sync b": SyncGroupResponse(error_code=Errors.UNKNOWN_SERVER_ERROR)}
    assert (group.state, rebalance.result.records) == (GroupState.PREPARING_REBALANCE, [])
