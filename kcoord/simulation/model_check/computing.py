# SPDX-License-Identifier: Apache-2.0
"""The steps of clients with client-side assignors, and of the coordinator that asks them to compute.

A client is asked by the response to a heartbeat. It sends PrepareAssignment, and then InstallAssignment. It obeys
KIP-848: it computes nothing without being asked, and gives up if a response does not ask it any more. Its requests may
arrive late or twice, also after it has left.

PrepareAssignment and its response are one step, since nothing happens at the coordinator in between. The check of an
InstallAssignment is a task, so its begin and its end are two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kcoord.coordinator.group.group import GroupTimer
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import TimerKey
from kcoord.simulation.model_check import coordinator
from kcoord.simulation.model_check.model import (
    GROUP_ID,
    NOTHING,
    AcceptedInstall,
    Duty,
    Install,
    ModelAssignor,
    ModelComputation,
    ModelOutcome,
    Partitions,
    Prepared,
    State,
    Status,
    Step,
    spent,
)
from kcoord_protocol.errors import Errors


def steps(state: State, shard: GroupCoordinatorShard) -> Iterator[Step]:
    """Yields the steps of all computations. `shard` is the state machine of the state's log."""
    for number, duty in enumerate(state.duties):
        if duty.is_asked:
            yield from _own_steps(state, shard, number, duty)
        if duty.check is not None:
            yield from _end_install(state, shard, number, duty, duty.check)
        elif duty.install is not None:
            yield from _begin_install(state, shard, number, duty, duty.install)
    yield from _coordinator_steps(state, shard)


def with_duty(before: State, step: Step) -> Step:
    """Returns a step of a heartbeat with what it means for the duty of its client.

    The response asks the client, or does not ask it any more. A client outside the group computes nothing.
    """
    number = step.client
    if number < 0:
        return step
    duty, response = before.duties[number], before.clients[number].response
    if step.state.clients[number].epoch == 0:
        duty = duty._replace(is_asked=False, prepared=None)
    elif step.action == "receive" and response is not None:
        duty = duty._replace(is_asked=response.is_asked, prepared=duty.prepared if response.is_asked else None)
    return step._replace(state=_with_duty(step.state, number, duty))


def _with_duty(state: State, number: int, duty: Duty, **changes: object) -> State:
    duties = (*state.duties[:number], duty, *state.duties[number + 1 :])
    return state._replace(duties=duties, **changes)  # type: ignore[arg-type]


def assigned_partitions(prepared: Prepared, number: int) -> list[Partitions]:
    """Returns what the assignor of a client gives to each client: one partition after the other, first to itself."""
    members = [number, *(n for n, is_member in enumerate(prepared.members) if is_member and n != number)]
    shares = {n: frozenset(range(place, prepared.partitions, len(members))) for place, n in enumerate(members)}
    return [shares.get(n, NOTHING) for n in range(len(prepared.members))]


def _own_steps(state: State, shard: GroupCoordinatorShard, number: int, duty: Duty) -> Iterator[Step]:
    if duty.prepared is None:
        prepared, after = coordinator.prepare(shard, number, state)
        changed = after.duties[number]._replace(is_asked=prepared is not None, prepared=prepared)
        yield Step("prepare", number, True, _with_duty(after, number, changed))
        return
    if state.budget.losses:
        # The request was sent twice, and the second one arrives now. The client ignores the response.
        _, after = coordinator.prepare(shard, number, state)
        yield Step("prepare-again", number, False, after._replace(budget=spent(state.budget, "losses")))
    if duty.install is not None or duty.check is not None:
        return
    is_good, budget = state.assignors[number] is ModelAssignor.GOOD, state.budget
    for outcome in ModelOutcome:
        # A bad assignor may always fail. That is not fair, because it may also compute nothing.
        is_fair, is_free = is_good and outcome is ModelOutcome.VALID, is_good == (outcome is ModelOutcome.VALID)
        if not is_free and not (is_good and budget.failures):
            continue
        install = Install(state.clients[number].epoch, duty.prepared, outcome)
        rest = budget if is_free else spent(budget, "failures")
        after = _with_duty(state, number, duty._replace(install=install), budget=rest)
        yield Step(f"install-{outcome.name.lower()}", number, is_fair, after)


def _begin_install(
    state: State, shard: GroupCoordinatorShard, number: int, duty: Duty, install: Install
) -> Iterator[Step]:
    assigned: Sequence[Partitions] = ()
    if install.outcome is not ModelOutcome.FAILED:
        assigned = assigned_partitions(install.prepared, number)
    if install.outcome is ModelOutcome.INVALID:
        assigned = [partitions - {0} for partitions in assigned]
    check, changes = coordinator.begin_install(shard, number, install, assigned, state)
    error = Errors.NONE if isinstance(check, AcceptedInstall) else check
    begun = duty._replace(check=check) if isinstance(check, AcceptedInstall) else _answered(duty, install, error)
    after = _with_duty(state, number, begun._replace(install=None), **changes)
    yield Step("begin-install", number, True, after, error)
    if state.budget.losses:
        # The request was sent twice, and the second one arrives later.
        again = _with_duty(state, number, begun, budget=spent(state.budget, "losses"), **changes)
        yield Step("begin-install-again", number, False, again, error)


def _end_install(
    state: State, shard: GroupCoordinatorShard, number: int, duty: Duty, check: AcceptedInstall
) -> Iterator[Step]:
    error, changes = coordinator.end_install(shard, check, state)
    ended = _answered(duty, check.install, error)
    after = _with_duty(state, number, ended._replace(check=None), **changes)
    yield Step("end-install", number, True, after, error)
    if state.budget.losses:
        # The request was sent twice, and the second one had arrived before.
        again = _with_duty(state, number, ended, budget=spent(state.budget, "losses"), **changes)
        yield Step("end-install-again", number, False, again, error)


def _answered(duty: Duty, install: Install, error: Errors) -> Duty:
    """Returns the duty after a response to InstallAssignment.

    With an epoch that is too old, the client tries again after the next response to a heartbeat.
    """
    if duty.prepared != install.prepared:
        return duty
    return duty._replace(is_asked=False, prepared=duty.prepared if error is Errors.STALE_MEMBER_EPOCH else None)


def _coordinator_steps(state: State, shard: GroupCoordinatorShard) -> Iterator[Step]:
    live, has_deadline = state.computation
    if live is not None and live.asked is not None and has_deadline:
        number, key = int(live.asked.member_id[1:]), TimerKey(GroupTimer.CLIENT_ASSIGNOR, GROUP_ID)
        is_fair = state.clients[number].status is not Status.IN or state.assignors[number] is not ModelAssignor.GOOD
        if is_fair or state.budget.failures:
            changes = coordinator.fire_timer(shard, key, state, live.asked.deadline_ms)
            budget = state.budget if is_fair else spent(state.budget, "failures")
            yield Step("deadline", number, is_fair, state._replace(budget=budget, **changes))  # type: ignore[arg-type]
    if live is not None and live.not_before_ms:
        after = state._replace(computation=ModelComputation(replace(live, not_before_ms=0), has_deadline))
        yield Step("pause-over", -1, True, after)
    if state.budget.failovers:
        # The tasks are lost, too. Clients with a request at the coordinator try again after the next response.
        duties = tuple(
            duty if duty.check is None else duty._replace(is_asked=False, check=None) for duty in state.duties
        )
        budget = spent(state.budget, "failovers")
        yield Step("failover", -1, False, state._replace(duties=duties, computation=ModelComputation(), budget=budget))
