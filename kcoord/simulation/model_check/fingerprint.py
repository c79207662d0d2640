# SPDX-License-Identifier: Apache-2.0
"""The fingerprint by which a state is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from kcoord.coordinator.group.consumer.assignment import TargetInput
from kcoord.simulation.model_check.model import (
    GROUP_RECORDS,
    MEMBER_RECORDS,
    NOTHING,
    TOPIC_ID,
    Duty,
    Install,
    Prepared,
    State,
    assigned_by,
    member_id,
)


def fingerprint(state: State, *, symmetric: bool) -> int:
    """Returns a 64-bit hash of the state. With `symmetric`, states that differ only by member ids have the same."""
    log = state.log
    members = []
    for number, client in enumerate(state.clients):
        name = member_id(number)
        entries = tuple(entry.canon if (entry := log.get((kind, name))) else () for kind in MEMBER_RECORDS)
        members.append((hash(client), hash(entries)))
    shared = tuple(entry.canon if (entry := log.get((kind, ""))) else () for kind in GROUP_RECORDS)
    if state.duties:
        return _with_duties(state, members, hash((shared, state.partitions, state.budget)), symmetric=symmetric)
    if symmetric:
        members.sort()
    return hash((tuple(members), shared, state.partitions, state.budget))


def _with_duties(state: State, members: Sequence[object], shared: int, *, symmetric: bool) -> int:
    """Returns the fingerprint of a group with client-side assignors.

    Duties and snapshots refer to several clients, so sorted members are not enough. Of all orders of the clients, the
    one with the smallest hash counts.
    """
    live, has_deadline = state.computation
    asked = live.asked if live is not None else None
    phase = live and (live.group_epoch, live.rounds > 0, live.not_before_ms > 0, asked is not None and has_deadline)
    owners = []
    for number, member in enumerate(members):
        name = member_id(number)
        is_asked, has_failed = asked is not None and asked.member_id == name, live is not None and name in live.failed
        owners.append(hash((member, state.assignors[number], is_asked, has_failed, assigned_by(state.log) == name)))

    def in_order(order: Sequence[int]) -> int:
        clients = []
        for number in order:
            duty = state.duties[number]
            check = duty.check
            checked = check and (
                _install(check.install, order),
                check.work.asked is asked,
                _snapshot(check.work.snapshot, order),
            )
            clients.append((owners[number], _duty(duty, order), checked))
        return hash((tuple(clients), phase, _snapshot(asked and asked.snapshot, order), shared))

    numbers = range(len(members))
    return min(map(in_order, permutations(numbers))) if symmetric else in_order(numbers)


def _duty(duty: Duty, order: Sequence[int]) -> object:
    return duty.is_asked, _prepared(duty.prepared, order), _install(duty.install, order)


def _prepared(prepared: Prepared | None, order: Sequence[int]) -> object:
    return prepared and prepared._replace(members=tuple(prepared.members[number] for number in order))


def _install(install: Install | None, order: Sequence[int]) -> object:
    return install and (install.epoch, _prepared(install.prepared, order), install.outcome)


def _snapshot(snapshot: object, order: Sequence[int]) -> object:
    """Returns what matters of the coordinator's snapshot: epoch, partitions, and the targets of its members."""
    if not isinstance(snapshot, TargetInput):
        return None
    targets = tuple(
        (snapshot.target_of(name).get(TOPIC_ID, NOTHING), snapshot.target_metadata.get(name))
        if name in snapshot.members
        else None
        for name in map(member_id, order)
    )
    return snapshot.group_epoch, snapshot.partition_counts.get(TOPIC_ID, 0), targets
