# SPDX-License-Identifier: Apache-2.0
"""The properties of the published TLA+ model of KIP-848, with their names. A broken one raises ViolationError.

The model has no client-side assignors: `computing_properties` has what holds for them.
"""

from __future__ import annotations

from typing import Final

from kcoord.coordinator.group.consumer.group import MemberState
from kcoord.simulation.model_check.actions import CURRENT
from kcoord.simulation.model_check.coordinator import metadata_hash_of
from kcoord.simulation.model_check.model import GROUP_RECORDS, Log, Partitions, State, Status, Step, member_id
from kcoord.simulation.trace import ViolationError

_TARGET: Final = "ConsumerGroupTargetAssignmentMemberKey"
_METADATA: Final = "ConsumerGroupMemberMetadataKey"
_STATES: Final = frozenset(int(state) for state in MemberState) - {int(MemberState.UNKNOWN)}


class MemberView:
    """A member as the log has it."""

    __slots__ = ("assigned", "epoch", "pending", "state", "target")

    def __init__(self, log: Log, name: str) -> None:
        entry = log.get((CURRENT, name))
        self.epoch = self.state = 0
        self.assigned: dict[int, int] = {}
        self.pending: dict[int, int] = {}
        if entry is not None:
            epoch, _, state, assigned, pending, _ = entry.canon
            assert isinstance(epoch, int) and isinstance(state, int)
            assert isinstance(assigned, tuple) and isinstance(pending, tuple)
            self.epoch, self.state, self.assigned, self.pending = epoch - 3, state, dict(assigned), dict(pending)
        target = log.get((_TARGET, name))
        partitions = target.canon[0] if target is not None else ()
        assert isinstance(partitions, tuple)
        self.target: Partitions = frozenset(partitions)


def epochs_of(log: Log) -> tuple[int, int]:
    """Returns group epoch and assignment epoch; 0 if there is no record."""
    group, target = (entry.canon[0] if (entry := log.get((kind, ""))) else 0 for kind in GROUP_RECORDS)
    assert isinstance(group, int) and isinstance(target, int)
    return group, target


def members_of(state: State) -> dict[int, MemberView]:
    """Returns the members by the number of their client."""
    return {
        number: MemberView(state.log, member_id(number))
        for number in range(len(state.clients))
        if (_METADATA, member_id(number)) in state.log
    }


def check_state(state: State) -> None:
    """Checks the properties that hold in every state."""
    group_epoch, assignment_epoch = epochs_of(state.log)
    members = members_of(state)
    _check_types(state, members, group_epoch, assignment_epoch)
    _check_target(state, members, group_epoch, assignment_epoch)
    _check_clients(state)
    _check_partition_epochs(members, group_epoch)
    _check_member_epochs(members, assignment_epoch)


def _check_types(state: State, members: dict[int, MemberView], group_epoch: int, assignment_epoch: int) -> None:
    """TypeOK: values are in their ranges, and member epoch <= group epoch, assignment epoch <= group epoch."""
    if not assignment_epoch <= group_epoch:
        raise ViolationError("TypeOK", f"assignment epoch {assignment_epoch} is beyond group epoch {group_epoch}")
    for number, member in members.items():
        if member.state not in _STATES or not 0 <= member.epoch <= group_epoch:
            raise ViolationError("TypeOK", f"member {number} is in state {member.state} at epoch {member.epoch}")
        if not member.assigned.keys().isdisjoint(member.pending):
            raise ViolationError("TypeOK", f"member {number} has {member.assigned} and revokes {member.pending}")
        if bool(member.pending) != (member.state == MemberState.UNREVOKED_PARTITIONS):
            raise ViolationError("TypeOK", f"member {number} in state {member.state} revokes {member.pending}")
    for number, client in enumerate(state.clients):
        if client.status is not Status.IN and (client.owned or client.epoch):
            raise ViolationError("TypeOK", f"client {number} is {client.status.name} and still {client}")


def _check_target(state: State, members: dict[int, MemberView], group_epoch: int, assignment_epoch: int) -> None:
    """LegalTargetAssignment: every partition is in the target of exactly one member, unless a new target is due."""
    seen: set[int] = set()
    for member in members.values():
        if not seen.isdisjoint(member.target):
            text = f"partitions in two targets: {sorted(seen & member.target)}"
            raise ViolationError("LegalTargetAssignment", text)
        seen |= member.target
    stale_targets = [name for kind, name in state.log if kind == _TARGET and (_METADATA, name) not in state.log]
    if stale_targets:
        raise ViolationError("LegalTargetAssignment", f"targets of {stale_targets}, which are not members")
    is_up_to_date = members and group_epoch == assignment_epoch
    if is_up_to_date and not seen <= set(range(state.partitions)):
        raise ViolationError("LegalTargetAssignment", f"{sorted(seen)} of {state.partitions} partitions")
    if is_up_to_date and len(seen) < state.partitions and not _grown(state):
        raise ViolationError("LegalTargetAssignment", f"only {sorted(seen)} of {state.partitions} are assigned")


def _grown(state: State) -> bool:
    """True if the topic has partitions that the group has not seen yet: it looks at a heartbeat."""
    entry = state.log.get((GROUP_RECORDS[0], ""))
    return entry is not None and entry.canon[1] != metadata_hash_of(state.partitions)


def _check_clients(state: State) -> None:
    """NoDoubleClientAssignment: no two clients believe that they own the same partition."""
    seen: set[int] = set()
    for number, client in enumerate(state.clients):
        if not seen.isdisjoint(client.owned):
            text = f"client {number} and another own {sorted(seen & client.owned)}"
            raise ViolationError("NoDoubleClientAssignment", text)
        seen |= client.owned


def _check_partition_epochs(members: dict[int, MemberView], group_epoch: int) -> None:
    """ValidPartitionEpoch: a partition has at most one owner, since an epoch that is not above the group epoch."""
    seen: set[int] = set()
    for number, member in members.items():
        for partition, epoch in (*member.assigned.items(), *member.pending.items()):
            if partition in seen:
                raise ViolationError(
                    "ValidPartitionEpoch", f"member {number} and another one own partition {partition}"
                )
            if not 0 < epoch <= group_epoch:
                raise ViolationError("ValidPartitionEpoch", f"partition {partition} of {number} since epoch {epoch}")
            seen.add(partition)


def _check_member_epochs(members: dict[int, MemberView], assignment_epoch: int) -> None:
    """ValidMemberEpoch: a member at the target's epoch owns only partitions of its target."""
    for number, member in members.items():
        if member.epoch > assignment_epoch:
            raise ViolationError("ValidMemberEpoch", f"member {number} is at {member.epoch} of {assignment_epoch}")
        is_there = member.epoch == assignment_epoch and member.state != MemberState.UNREVOKED_PARTITIONS
        if is_there and not member.assigned.keys() <= member.target:
            text = f"member {number} is at epoch {member.epoch} with {sorted(member.assigned)}, not {member.target}"
            raise ViolationError("ValidMemberEpoch", text)


def check_step(before: State, step: Step) -> None:
    """MonotonicEpochs: epochs of the group, of members in the log, and of clients never decrease, except by a fence."""
    after = step.state
    if after.log is not before.log:
        for name, old, new in zip(("group", "assignment"), epochs_of(before.log), epochs_of(after.log), strict=True):
            if new < old:
                raise ViolationError("MonotonicEpochs", f"the {name} epoch went from {old} to {new}")
        members = members_of(after)
        for number, member in members_of(before).items():
            if number in members and members[number].epoch < member.epoch:
                text = f"member {number} went from epoch {member.epoch} to {members[number].epoch}"
                raise ViolationError("MonotonicEpochs", text)
    for number, (old_client, new_client) in enumerate(zip(before.clients, after.clients, strict=True)):
        if 0 < new_client.epoch < old_client.epoch:
            text = f"client {number} went from epoch {old_client.epoch} to {new_client.epoch}"
            raise ViolationError("MonotonicEpochs", text)


def has_converged(state: State) -> bool:
    """True if coordinator and clients agree, every partition has an owner, and every member has a running client.

    An empty group computes no target. Since Kafka 4.4 its assignment epoch still reaches its group epoch.
    """
    group_epoch, assignment_epoch = epochs_of(state.log)
    members = members_of(state)
    if group_epoch != assignment_epoch or (members and _grown(state)):
        return False
    if any(duty.install is not None or duty.check is not None for duty in state.duties):
        return False
    owned: set[int] = set()
    for number, client in enumerate(state.clients):
        if client.late is not None or (client.status is Status.IN) != (number in members):
            return False
        if client.status is not Status.IN:
            continue
        member = members[number]
        is_agreed = client.epoch == member.epoch == assignment_epoch and client.owned == member.assigned.keys()
        if not is_agreed or client.owned != member.target or not client.is_quiet:
            return False
        owned |= client.owned
    return not members or owned == set(range(state.partitions))
