# SPDX-License-Identifier: Apache-2.0
"""Sees every request of a test broker: keeps a history, counts, and says which one meets a fault.

The broker's own control asks under a client id of its own, which is neither seen nor disturbed.
"""

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
"""Older ones are forgotten; the counts go on."""


class Monitor:
    """See the module's text."""

    def __init__(self) -> None:
        self.faults = Faults()
        self._history: deque[Observation] = deque(maxlen=MOST_OBSERVATIONS)
        self._counts: Counter[str] = Counter()
        self._number = 0
        self._hanging: dict[int, list[Callable[[], None]]] = {}

    def observe(self, context: RequestContext, request: Message) -> RequestFault | None:
        """Takes note of a request; returns the fault that it meets."""
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
        """A connection hangs by the fault; `end` is called when the fault is removed."""
        self._hanging.setdefault(fault.number, []).append(end)

    def remove_fault(self, number: int) -> RequestFault:
        """What hangs by the fault ends: its clients may connect again."""
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
        """What matches, oldest first."""
        return (seen for seen in self._history if selector.matches(seen.facts))

    def counts(self) -> dict[str, int]:
        """Requests by API."""
        return dict(sorted(self._counts.items()))

    def forget(self) -> None:
        """Empties the history and the counts."""
        self._history.clear()
        self._counts.clear()
