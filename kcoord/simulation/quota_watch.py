# SPDX-License-Identifier: Apache-2.0
"""Checks that no client gets more than its quota over a long run (S-6).

`states` are the quotas in the order of their changes, as those of ACLs in `acl_oracle`. A span is a time in which one
process has served the sender (`throttled`), and its quota was the same for certain. In a span, the sender may use

* its quota for the time of the span. The rate is measured over 11 windows and counts at least ten of them, so a tenth
  more is possible;
* one burst: a client that was idle may use what its quota allows in the time of all windows;
* one request for each of its connections, because the request that raises the rate above the quota is still served.

A response with a throttle time mutes its connection: no later request of the connection is answered before (KIP-219).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kcoord.simulation.options import SUPER_USER
from kcoord.simulation.principals import SENDER, principal_of
from kcoord.simulation.process import SimulatedProcess
from kcoord.simulation.rights_checks import errors_in
from kcoord.simulation.trace import Trace, ViolationError
from kcoord_protocol.messages import AlterClientQuotasRequest, FetchResponse, Message, ProduceResponse

QUOTA: Final = "S-6 no client gets more than its quota"
PRODUCE_KEY: Final = "producer_byte_rate"
FETCH_KEY: Final = "consumer_byte_rate"
_WINDOWS: Final = 11
_MEASURED: Final = 1.1
_ROUNDING_MS: Final = 1

Entity: TypeAlias = "frozenset[tuple[str, str | None]]"
Quotas: TypeAlias = Mapping[tuple[Entity, str], float]


def limit_of(quotas: Quotas, key: str, user: str, client_id: str) -> tuple[int, float] | None:
    """Returns the most specific quota of a client and its place in Kafka's order, None if the client has none."""
    users: list[tuple[str, str | None] | None] = [("user", user), ("user", None), None]
    clients: list[tuple[str, str | None] | None] = [("client-id", client_id), ("client-id", None), None]
    for place, (user_part, client_part) in enumerate((user, client) for user in users for client in clients):
        value = quotas.get((frozenset(part for part in (user_part, client_part) if part is not None), key))
        if value is not None:
            return place, value
    return None


@dataclass(slots=True)
class AskedQuota:
    """A request of the sender or of the operator of the quotas. `change` is the state that a change leads to."""

    connection: object
    process: SimulatedProcess
    client_id: str
    request: Message
    version: int
    arrived_ms: int
    change: int | None = None


@dataclass(slots=True)
class _Span:
    """A time with one process and one quota. `state` is the first state of the quotas that it covers."""

    process: SimulatedProcess
    state: int
    limit: tuple[int, float]
    began_ms: int
    used: int = 0
    largest: int = 0
    connections: set[object] = field(default_factory=set)


class QuotaWatch:
    """The quotas of one run, and what the sender has used of them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._states: list[Quotas] = [{}]
        self._acknowledged = 0
        self._spans: dict[str, _Span] = {}
        self._muted_until_ms: dict[object, int] = {}
        """The end of the throttle time by connection, on the clock of the process."""

    def ask(
        self, connection: object, process: SimulatedProcess, client_id: str, request: Message, version: int
    ) -> AskedQuota | None:
        """Takes a request that has arrived. Returns None if it has nothing to do with quotas."""
        principal = principal_of(client_id)
        asked = AskedQuota(connection, process, client_id, request, version, process.broker.now_ms())
        if isinstance(request, AlterClientQuotasRequest) and principal == SUPER_USER:
            asked.change = self._begin(request)
            return asked
        return asked if principal == f"User:{SENDER}" else None

    def _begin(self, request: AlterClientQuotasRequest) -> int:
        """Returns the number of the state that a change leads to."""
        quotas = dict(self._states[-1])
        for entry in request.entries:
            entity = frozenset((part.entity_type, part.entity_name) for part in entry.entity)
            for operation in entry.ops:
                if operation.remove:
                    quotas.pop((entity, operation.key), None)
                else:
                    quotas[entity, operation.key] = operation.value
        if quotas != self._states[-1]:
            self._states.append(quotas)
        return len(self._states) - 1

    def answered(self, asked: AskedQuota, response: Message) -> None:
        """Takes a response that leaves."""
        if asked.change is not None:
            if not any(errors_in(response)):
                self._acknowledged = max(self._acknowledged, asked.change)
            return
        assert isinstance(response, ProduceResponse | FetchResponse)
        throttle_ms, now_ms = response.throttle_time_ms, asked.process.broker.now_ms()
        muted_until_ms = self._muted_until_ms.get(asked.connection, 0)
        if now_ms + _ROUNDING_MS < muted_until_ms:
            raise ViolationError(QUOTA, f"{asked.client_id} was answered {muted_until_ms - now_ms} ms too early")
        if throttle_ms:
            self._trace.add("throttled", f"{asked.client_id} {throttle_ms}")
            # A request that arrived while the connection was muted is processed, and mutes it again, after that.
            self._muted_until_ms[asked.connection] = max(muted_until_ms, asked.arrived_ms) + throttle_ms
        if isinstance(response, ProduceResponse):
            self._use(PRODUCE_KEY, asked, len(asked.request.encode(asked.version)), now_ms)
        else:
            # A throttled response has no records and does not count.
            self._use(FETCH_KEY, asked, 0 if throttle_ms else len(response.encode(asked.version)), now_ms)

    def _use(self, key: str, asked: AskedQuota, size: int, now_ms: int) -> None:
        span = self._spans.get(key)
        if span is None or not self._continues(span, asked, key):
            self._begin_span(asked, key, now_ms)
            return
        span.used += size
        span.largest = max(span.largest, size)
        span.connections.add(asked.connection)
        span_ms, limit = now_ms - span.began_ms, span.limit[1]
        allowed = limit * (_MEASURED * span_ms / 1000 + _WINDOWS) + span.largest * (len(span.connections) + 1)
        if span.used > allowed:
            text = f"{span.used} bytes in {span_ms} ms; {limit:.0f} bytes per second allow {allowed:.0f}"
            raise ViolationError(QUOTA, f"{asked.client_id} used of its {key} {text}")

    def _limits(self, state: int, key: str, client_id: str) -> set[tuple[int, float] | None]:
        """Returns the quotas of the sender that were possible since a state."""
        return {limit_of(quotas, key, SENDER, client_id) for quotas in self._states[state:]}

    def _continues(self, span: _Span, asked: AskedQuota, key: str) -> bool:
        return span.process is asked.process and self._limits(span.state, key, asked.client_id) == {span.limit}

    def _begin_span(self, asked: AskedQuota, key: str, now_ms: int) -> None:
        """Begins a span if there is one quota that holds for certain. The response at hand is not counted."""
        self._spans.pop(key, None)
        limits = self._limits(self._acknowledged, key, asked.client_id)
        limit = next(iter(limits))
        if len(limits) == 1 and limit is not None:
            self._spans[key] = _Span(asked.process, self._acknowledged, limit, now_ms)
