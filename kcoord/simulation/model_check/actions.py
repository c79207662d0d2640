# SPDX-License-Identifier: Apache-2.0
"""The steps from a state: steps of a client, of the coordinator, and faults.

A client obeys KIP-848: it revokes partitions before it takes new ones, and gives up all of them if it is fenced and
before the coordinator can remove it for a timeout.
"""

from __future__ import annotations

from collections.abc import Iterator

from kcoord.coordinator.group.consumer.group import MemberState
from kcoord.coordinator.group.group import rebalance_timer, session_timer
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.simulation.model_check import computing, coordinator
from kcoord.simulation.model_check.coordinator import Changes
from kcoord.simulation.model_check.model import (
    GROUP_ID,
    NOTHING,
    CheckedClient,
    ModelRequest,
    Response,
    State,
    Status,
    Step,
    member_id,
    spent,
)
from kcoord_protocol.errors import Errors

CURRENT = "ConsumerGroupCurrentMemberAssignmentKey"


def steps(state: State, shard: GroupCoordinatorShard) -> Iterator[Step]:
    """Yields all steps from a state. `shard` is the state machine of the state's log."""
    if not state.duties:
        yield from _steps(state, shard)
        return
    for step in _steps(state, shard):
        yield computing.with_duty(state, step)
    yield from computing.steps(state, shard)


def _steps(state: State, shard: GroupCoordinatorShard) -> Iterator[Step]:
    for number, client in enumerate(state.clients):
        yield from _own_steps(state, number, client)
        yield from _coordinator_steps(state, shard, number, client)
        yield from _faults(state, number, client)
    if state.budget.growths:
        budget = state.budget._replace(growths=state.budget.growths - 1)
        yield Step("grow", -1, False, state._replace(partitions=state.partitions + 1, budget=budget))


def with_client(state: State, number: int, client: CheckedClient, **changes: object) -> State:
    clients = (*state.clients[:number], client, *state.clients[number + 1 :])
    return state._replace(clients=clients, **changes)  # type: ignore[arg-type]


# Steps of a client.


def _own_steps(state: State, number: int, client: CheckedClient) -> Iterator[Step]:
    budget = state.budget
    if client.status is Status.OUT and budget.joins and client.late is None:
        joined = CheckedClient(Status.IN)
        yield Step("join", number, False, with_client(state, number, joined, budget=spent(budget, "joins")))
    if client.status is not Status.IN:
        return
    if client.is_quiet:
        yield Step("send", number, True, with_client(state, number, _sending(client)))
    if client.response is not None:
        yield Step("receive", number, True, with_client(state, number, _received(client, client.response)))
    if client.owned != client.target and not _contradicts(client):
        taken = client._replace(owned=client.target, has_news=True)
        yield Step("reconcile", number, True, with_client(state, number, taken))
    if client.epoch > 0 and budget.leaves and client.request is None:
        gone = CheckedClient(Status.OUT, late=ModelRequest(-1, False, None))
        yield Step("leave", number, False, with_client(state, number, gone, budget=spent(budget, "leaves")))


def _contradicts(client: CheckedClient) -> bool:
    """True if the client's last unanswered heartbeat does not name all partitions of its target.

    The coordinator may believe that heartbeat and assign the others to another member. The client therefore takes
    nothing before the response (docs/simulation.md).
    """
    return client.claimed is not None and not client.target <= client.claimed


def _sending(client: CheckedClient) -> CheckedClient:
    owned = client.owned if client.is_full or client.has_news else None
    request = ModelRequest(client.epoch, client.is_full, owned)
    claimed = client.claimed if owned is None else owned
    return client._replace(request=request, is_full=False, has_news=False, claimed=claimed)


def _received(client: CheckedClient, response: Response) -> CheckedClient:
    if response.error in (Errors.FENCED_MEMBER_EPOCH, Errors.UNKNOWN_MEMBER_ID, Errors.GROUP_ID_NOT_FOUND):
        return CheckedClient(Status.IN, late=client.late)
    assert response.error is Errors.NONE, f"a client that obeys KIP-848 got {response.error.name}"
    target = client.target if response.assignment is None else response.assignment
    # The coordinator may have assigned a partition and revoked it before the client took it.
    has_news = client.has_news or target == client.owned != client.target
    return client._replace(epoch=response.epoch, target=target, has_news=has_news, response=None, claimed=None)


# Steps of the coordinator.


def _coordinator_steps(
    state: State, shard: GroupCoordinatorShard, number: int, client: CheckedClient
) -> Iterator[Step]:
    if client.request is not None:
        response, changes = coordinator.heartbeat(shard, number, client.request, state)
        # A request that is older than a processed one does not arrive any more: see the limits in docs/simulation.md.
        answered = client._replace(request=None, response=response, late=None)
        yield Step("process", number, True, with_client(state, number, answered, **changes))
    if client.late is not None:
        _, changes = coordinator.heartbeat(shard, number, client.late, state)
        yield Step("process-late", number, True, with_client(state, number, client._replace(late=None), **changes))
    name = member_id(number)
    entry = state.log.get((CURRENT, name))
    if entry is None:
        return
    is_gone = client.status is not Status.IN
    if is_gone or state.budget.expiries:
        changes = coordinator.fire_timer(shard, session_timer(GROUP_ID, name), state)
        yield _expiry("expire", state, number, changes, is_gone)
    if entry.canon[2] == MemberState.UNREVOKED_PARTITIONS and (is_gone or state.budget.expiries):
        changes = coordinator.fire_timer(shard, rebalance_timer(GROUP_ID, name), state)
        yield _expiry("expire-rebalance", state, number, changes, is_gone)


def _expiry(action: str, state: State, number: int, changes: Changes, is_gone: bool) -> Step:
    """Returns the expiry of a timer. By the same clock, a running client has given up everything before."""
    client = state.clients[number]
    if is_gone:
        return Step(action, number, True, state._replace(**changes))  # type: ignore[arg-type]
    budget = spent(state.budget, "expiries")
    expired = with_client(state, number, _gave_up(client), budget=budget, **changes)
    return Step(action, number, False, expired)


def _gave_up(client: CheckedClient) -> CheckedClient:
    """Returns the client without partitions and on a new connection. Its last request may still arrive."""
    late = client.request if client.late is None else client.late
    return client._replace(
        owned=NOTHING,
        target=NOTHING,
        is_full=True,
        has_news=False,
        claimed=None,
        request=None,
        response=None,
        late=late,
    )


# Faults.


def _faults(state: State, number: int, client: CheckedClient) -> Iterator[Step]:
    budget = state.budget
    if client.status is not Status.IN:
        return
    if budget.crashes:
        crashed = CheckedClient(Status.CRASHED, late=client.request if client.late is None else client.late)
        yield Step("crash", number, False, with_client(state, number, crashed, budget=spent(budget, "crashes")))
    if not budget.losses:
        return
    rest = spent(budget, "losses")
    again = client._replace(is_full=True, request=None, response=None)
    if client.response is not None:
        yield Step("lose-response", number, False, with_client(state, number, again, budget=rest))
    if client.request is not None:
        yield Step("lose-request", number, False, with_client(state, number, again, budget=rest))
        if client.late is None:
            delayed = again._replace(late=client.request)
            yield Step("delay-request", number, False, with_client(state, number, delayed, budget=rest))
