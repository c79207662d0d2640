# SPDX-License-Identifier: Apache-2.0
"""The properties of computations by members. A broken one raises ViolationError.

They know only what clients were given and sent, the log, and which member the coordinator asks.
"""

from __future__ import annotations

from kcoord.coordinator.group.consumer.assignment import TargetInput
from kcoord.coordinator.group.consumer.client_assignors import AskedMember
from kcoord.simulation.model_check.computing import assigned_partitions
from kcoord.simulation.model_check.model import (
    TOPIC_ID,
    Install,
    ModelAssignor,
    ModelOutcome,
    State,
    Status,
    Step,
    assigned_by,
    member_id,
)
from kcoord.simulation.model_check.properties import epochs_of, members_of
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.errors import Errors

_INSTALLS = frozenset({"begin-install", "begin-install-again", "end-install", "end-install-again"})
_ENDS = _INSTALLS | {"deadline", "failover"}
"""The steps that may end a computation whose member can still compute."""


def may_converge(state: State) -> bool:
    """True if an assignor of a running client is good, or the coordinator computes because a client has none."""
    if not state.assignors:
        return True
    running = [
        assignor for assignor, client in zip(state.assignors, state.clients, strict=True) if client.status is Status.IN
    ]
    return not running or any(assignor is not ModelAssignor.BAD for assignor in running)


def check_computation(before: State, step: Step) -> None:
    """Checks a step of a group with client-side assignors."""
    state = step.state
    asked = _asked(state)
    members = members_of(state)
    if asked is not None:
        number = int(asked.member_id[1:])
        if number not in members or state.assignors[number] is ModelAssignor.NONE:
            raise ViolationError("ComputingMember", f"client {number} is asked, members are {sorted(members)}")
    _check_one_computation(before, step)
    if step.action == "prepare":
        _check_snapshot(before, step)
    if step.action in _INSTALLS:
        _check_install(before, step)


def _asked(state: State) -> AskedMember | None:
    live = state.computation.live
    return None if live is None else live.asked


def _check_one_computation(before: State, step: Step) -> None:
    """OneComputation: no other member is asked while a member can compute, unless its time is over or it has failed."""
    former, asked = _asked(before), _asked(step.state)
    if former is None or step.action in _ENDS or (asked is not None and asked.member_id == former.member_id):
        return
    members = members_of(step.state)
    is_superseded = any(step.state.assignors[number] is ModelAssignor.NONE for number in members)
    if int(former.member_id[1:]) in members and not is_superseded:
        raise ViolationError("OneComputation", f"{step.action} ends the computation of {former.member_id}")


def _check_snapshot(before: State, step: Step) -> None:
    """PreparedSnapshot: the asked member gets the group as it is, and nobody else gets it."""
    prepared, asked = step.state.duties[step.client].prepared, _asked(before)
    if prepared is None:
        return
    if asked is None or asked.member_id != member_id(step.client):
        raise ViolationError("PreparedSnapshot", f"client {step.client} got {prepared}, asked is {asked}")
    members = members_of(before)
    is_member = tuple(number in members for number in range(len(before.clients)))
    if prepared != (epochs_of(before.log)[0], before.partitions, is_member):
        raise ViolationError("PreparedSnapshot", f"client {step.client} got {prepared} of {epochs_of(before.log)}")


def _check_install(before: State, step: Step) -> None:
    """ValidInstall: a valid assignment of the asked member is installed. Any other is refused and writes nothing."""
    number, state, duty = step.client, step.state, before.duties[step.client]
    is_written = state.log is not before.log
    check = duty.check if step.action.startswith("end") else None
    install = duty.install if check is None else check.install
    assert install is not None
    asked = _asked(before)
    is_asked = asked is not None and asked.member_id == member_id(number)
    if step.error:
        if is_written:
            raise ViolationError("ValidInstall", f"{install} of client {number} is refused and written")
        snapshot = check.work.snapshot if check is not None else asked and asked.snapshot
        if step.error is Errors.INVALID_ASSIGNMENT and is_asked and _is_valid(install, snapshot):
            raise ViolationError("ValidInstall", f"{install} of client {number} is valid and refused")
        return
    is_repeated = (assigned_by(before.log), epochs_of(before.log)[1]) == (
        member_id(number),
        install.prepared.group_epoch,
    )
    if not is_written:
        if not is_repeated and (check is not None or not is_asked):
            raise ViolationError("ValidInstall", f"{install} of client {number} is accepted, asked is {asked}")
        return
    if check is None or not is_asked or check.work.asked is not asked or install.outcome is not ModelOutcome.VALID:
        raise ViolationError("ValidInstall", f"{install} of client {number} is installed, asked is {asked}")
    _check_targets(before, state, number, install)


def _is_valid(install: Install, snapshot: object) -> bool:
    """True if the assignment is valid for the coordinator's snapshot, which may be newer than that of the client."""
    prepared = install.prepared
    return (
        install.outcome is ModelOutcome.VALID
        and isinstance(snapshot, TargetInput)
        and snapshot.group_epoch == prepared.group_epoch
        and snapshot.partition_counts[TOPIC_ID] == prepared.partitions
    )


def _check_targets(before: State, after: State, number: int, install: Install) -> None:
    """ValidInstall: the targets of all members that are still there are those that the client has computed."""
    prepared, members = install.prepared, members_of(after)
    if (epochs_of(after.log)[1], assigned_by(after.log)) != (prepared.group_epoch, member_id(number)):
        raise ViolationError("ValidInstall", f"{install} of client {number} is installed as {epochs_of(after.log)}")
    assigned = assigned_partitions(prepared, number)
    former = members_of(before)
    for other, member in members.items():
        expected = assigned[other] if prepared.members[other] else former[other].target
        if member.target != expected:
            raise ViolationError("ValidInstall", f"client {other} has the target {member.target}, not {expected}")
