# SPDX-License-Identifier: Apache-2.0
"""Breadth-first search over all states of `takeover`: the whole graph, with the steps to a violation.

EventuallyServed is decided on the graph. From every state in which the shard may still be claimed, steps without faults
and the claims that are left lead to a state in which an owner serves everything that the log has.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from kcoord.simulation.model_check.takeover import (
    NewLog,
    NewReader,
    TakeoverBudget,
    TakeoverState,
    TakeoverSteps,
    first_state,
    new_log,
    new_reader,
)
from kcoord.simulation.trace import ViolationError


@dataclass(slots=True)
class TakeoverReport:
    """The result of a search. `violation` and `trace` are empty if every property holds."""

    budget: TakeoverBudget
    states: int = 0
    transitions: int = 0
    depth: int = 0
    served: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    broken: str = ""
    violation: str = ""
    trace: list[str] = field(default_factory=list)


class TakeoverSearch:
    """One search of the whole graph."""

    def __init__(self, budget: TakeoverBudget, make_log: NewLog = new_log, make_reader: NewReader = new_reader) -> None:
        self._steps = TakeoverSteps(make_reader)
        self._first = first_state(budget, make_log, make_reader)
        self._numbers: dict[int, int] = {}
        self._parents: list[tuple[int, str]] = []
        self._sources: list[list[int]] = []
        """The states from which fair steps lead to each state."""
        self._goals: list[int] = []
        """States in which the shard is served, or may not be claimed any more."""
        self._report = TakeoverReport(budget)

    def run(self) -> TakeoverReport:
        report = self._report
        queue: deque[tuple[int, int, TakeoverState]] = deque(
            [(self._number_of(self._first, -1, "")[0], 0, self._first)]
        )
        try:
            while queue:
                number, depth, state = queue.popleft()
                report.depth = depth
                name = ""
                try:
                    for name, is_fair, after in self._steps.of(state):
                        report.transitions += 1
                        report.actions[name.rstrip(" 01")] += 1
                        following, is_new = self._number_of(after, number, name)
                        if is_fair or name.startswith("claim"):
                            self._sources[following].append(number)
                        if is_new:
                            queue.append((following, depth + 1, after))
                except ViolationError:
                    report.trace = [*self._way_to(number), f"a step after {name or 'the beginning'}"]
                    raise
            self._check_liveness()
        except ViolationError as error:
            report.broken, report.violation = error.invariant, str(error)
        return report

    def _number_of(self, state: TakeoverState, parent: int, name: str) -> tuple[int, bool]:
        """Returns the number of a state, and whether it is new."""
        key = state.key()
        number = self._numbers.get(key)
        if number is not None:
            return number, False
        number = self._numbers[key] = len(self._parents)
        self._parents.append((parent, name))
        self._sources.append([])
        self._report.states += 1
        is_served = state.is_served()
        self._report.served += is_served
        if is_served or not state.budget.claims:
            self._goals.append(number)
        return number, True

    def _way_to(self, number: int) -> list[str]:
        way = []
        while number > 0:
            number, name = self._parents[number]
            way.append(name)
        return way[::-1]

    def _check_liveness(self) -> None:
        reached = bytearray(len(self._parents))
        stack = list(self._goals)
        for number in stack:
            reached[number] = 1
        while stack:
            for source in self._sources[stack.pop()]:
                if not reached[source]:
                    reached[source] = 1
                    stack.append(source)
        cut_off = reached.find(0)
        if cut_off >= 0:
            self._report.trace = self._way_to(cut_off)
            raise ViolationError("EventuallyServed", "no fair steps lead from this state to a served shard")
