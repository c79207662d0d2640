# SPDX-License-Identifier: Apache-2.0
"""Observes the requests of a test broker."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from kcoord.testing.faults import Faults, RequestFault, Selector
from kcoord.testing.observed import NAMES_OF_APIS, Observation, facts_of

if TYPE_CHECKING:
    from kcoord.server.api.api_table import RequestContext
    from kcoord_protocol.message import Message

CONTROL_CLIENT_ID: Final = "kcoord-control"
MOST_OBSERVATIONS: Final = 10_000
"""Older requests are dropped from the history; the counts include them."""


class Monitor:
    """Keeps a history and counts of all requests, and selects the fault that applies to a request.

    Requests of the control have their own client id. They are not observed, and no fault applies to them.
    """

    def __init__(self) -> None:
        self.faults = Faults()
        self._history: deque[Observation] = deque(maxlen=MOST_OBSERVATIONS)
        self._counts: Counter[str] = Counter()
        self._number = 0
        self._hanging: dict[int, list[Callable[[], None]]] = {}

    def observe(self, context: RequestContext, request: Message) -> RequestFault | None:
        """Records a request and returns the fault that applies to it, or None."""
        facts = facts_of(context.api_key, context.api_version, context.client_id, request)
        fault = self.faults.meet(facts)
        self._number += 1
        self._counts[NAMES_OF_APIS[context.api_key]] += 1
        self._history.append(
            Observation(
                self._number,
                context.now_ms,
                context.correlation_id,
                facts,
                request,
                None if fault is None else fault.number,
            )
        )
        return fault

    def hang(self, fault: RequestFault, end: Callable[[], None]) -> None:
        """Registers a connection that hangs because of the fault. `end` is called when the fault is removed."""
        if fault in self.faults.all():
            self._hanging.setdefault(fault.number, []).append(end)
        else:
            # It was removed during its delay.
            end()

    def remove_fault(self, number: int) -> RequestFault:
        """Removes the fault and closes its hanging connections, so that clients reconnect."""
        fault = self.faults.remove(number)
        self._end_hanging(number)
        return fault

    def clear_faults(self) -> None:
        self.faults.clear()
        for number in list(self._hanging):
            self._end_hanging(number)

    def _end_hanging(self, number: int) -> None:
        for end in self._hanging.pop(number, ()):
            end()

    def requests(self, selector: Selector) -> Iterable[Observation]:
        """Returns the matching requests, oldest first."""
        return (observation for observation in self._history if selector.matches(observation.facts))

    def counts(self) -> dict[str, int]:
        """Returns the number of requests by API name."""
        return dict(sorted(self._counts.items()))

    def forget(self) -> None:
        """Empties the history and the counts."""
        self._history.clear()
        self._counts.clear()
