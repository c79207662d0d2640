# SPDX-License-Identifier: Apache-2.0
"""Breadth-first search over all states: it checks the properties in each, and reports the steps to a violation.

EventuallyConverges is decided on the explored graph: from every state, fair steps must lead to a state in which
coordinator and clients agree. States at the bound, whose steps were not explored, count as converging. A sample of all
states is followed by fair steps beyond the bound.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kcoord.simulation.model_check.actions import steps
from kcoord.simulation.model_check.computing_properties import check_computation, may_converge
from kcoord.simulation.model_check.coordinator import restore
from kcoord.simulation.model_check.fingerprint import fingerprint
from kcoord.simulation.model_check.model import Budget, CheckedClient, Duty, ModelAssignor, State, Step
from kcoord.simulation.model_check.properties import check_state, check_step, has_converged
from kcoord.simulation.trace import ViolationError

_SAMPLE_EVERY = 500
_LONGEST_FAIR_RUN = 400
_PROGRESS_EVERY = 2_000
_TIMERS = frozenset({"expire", "expire-rebalance", "deadline", "pause-over"})


@dataclass(frozen=True, slots=True)
class Configuration:
    """The size of a search. It ends at `max_states`; a smaller graph is explored completely.

    `assignors` are the client-side assignors of the clients; without any, the coordinator computes.
    """

    clients: int = 3
    partitions: int = 2
    budget: Budget = field(default_factory=lambda: Budget(4, 1, 1, 1, 1, 0))
    max_states: int = 1_000_000
    symmetric: bool = True
    assignors: tuple[ModelAssignor, ...] = ()

    def __str__(self) -> str:
        budget = " ".join(f"{name}={count}" for name, count in self.budget._asdict().items() if count)
        assignors = "".join(f", assignor {assignor.name.lower()}" for assignor in self.assignors)
        size = f"{self.clients} clients{assignors}, {self.partitions} partitions"
        return f"{size}, {budget}, at most {self.max_states} states"


@dataclass(slots=True)
class Report:
    """The result of a search. `violation` and `trace` are empty if every property holds."""

    configuration: Configuration
    states: int = 0
    transitions: int = 0
    expanded: int = 0
    depth: int = 0
    converged: int = 0
    followed: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    violation: str = ""
    broken: str = ""
    trace: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True if the whole graph was explored."""
        return self.expanded == self.states


class Search:
    """One search. Calls `on_progress` with the number of states every `_PROGRESS_EVERY` states."""

    def __init__(self, configuration: Configuration, on_progress: Callable[[int], None] = lambda states: None) -> None:
        self._configuration = configuration
        self._on_progress = on_progress
        self._numbers: dict[int, int] = {}
        self._parents: list[tuple[int, str]] = []
        self._fair_edges: tuple[array[int], array[int]] = array("I"), array("I")
        self._converged: set[int] = set()
        self._queue: deque[tuple[int, int, State]] = deque()
        self._report = Report(configuration)

    def run(self) -> Report:
        configuration, report = self._configuration, self._report
        clients = (CheckedClient(),) * configuration.clients
        duties = (Duty(),) * len(configuration.assignors)
        initial = State({}, clients, configuration.partitions, configuration.budget, configuration.assignors, duties)
        self._number_of(initial, -1, "", 0)
        try:
            while self._queue and report.states < configuration.max_states:
                self._expand(*self._queue.popleft())
            self._check_liveness()
        except ViolationError as error:
            report.broken, report.violation = error.invariant, str(error)
        return report

    def _number_of(self, state: State, parent: int, action: str, depth: int) -> int:
        """Returns the number of a state. Checks a new state and appends it to the queue."""
        key = fingerprint(state, symmetric=self._configuration.symmetric)
        existing_number = self._numbers.get(key)
        if existing_number is not None:
            return existing_number
        number = self._numbers[key] = len(self._parents)
        self._parents.append((parent, action))
        report = self._report
        report.states += 1
        report.depth = max(report.depth, depth)
        self._guard(parent, action, lambda: check_state(state))
        if has_converged(state):
            report.converged += 1
            self._converged.add(number)
        elif not may_converge(state):
            self._converged.add(number)
        self._queue.append((number, depth, state))
        if not report.states % _PROGRESS_EVERY:
            self._on_progress(report.states)
        return number

    def _expand(self, number: int, depth: int, state: State) -> None:
        report = self._report
        report.expanded += 1
        shard = restore(state)
        for step in steps(state, shard):
            report.transitions += 1
            report.actions[step.action] += 1
            name = f"{step.action} {step.client}"
            self._guard(number, name, lambda step=step: self._check_step(state, step))  # type: ignore[misc]
            following = self._number_of(step.state, number, name, depth + 1)
            if step.is_fair:
                self._fair_edges[0].append(number)
                self._fair_edges[1].append(following)
        if not number % _SAMPLE_EVERY:
            self._guard(number, "", lambda: self._follow(state))

    def _check_step(self, state: State, step: Step) -> None:
        check_step(state, step)
        if state.duties:
            check_computation(state, step)

    def _guard(self, parent: int, action: str, check: Callable[[], None]) -> None:
        """Runs a check. If it fails, the report gets the steps that lead there."""
        try:
            check()
        except ViolationError:
            self._report.trace = [*self._way_to(parent), action]
            raise

    def _way_to(self, number: int) -> list[str]:
        way = []
        while number > 0:
            number, action = self._parents[number]
            way.append(action)
        return way[::-1]

    # EventuallyConverges.

    def _follow(self, state: State) -> None:
        """Follows fair steps from a state, client by client, until coordinator and clients agree."""
        self._report.followed += 1
        shard = restore(state)
        check_same_as_live(state)
        last = -1
        for _ in range(_LONGEST_FAIR_RUN):
            if has_converged(state) or not may_converge(state):
                return
            fair = [step for step in steps(state, shard) if step.is_fair]
            if not fair:
                break
            step = _pick(fair, last)
            last = step.client if step.action == "send" else last
            state = step.state
            check_state(state)
            shard = restore(state)
        raise ViolationError("EventuallyConverges", f"no convergence within {_LONGEST_FAIR_RUN} fair steps: {state}")

    def _check_liveness(self) -> None:
        """Checks that from each explored state fair steps lead to convergence or to an unexplored state."""
        report = self._report
        unexplored = {number for number, _, _ in self._queue}
        reached = self._backwards(self._converged | unexplored)
        cut_off = next((number for number in range(report.states) if not reached[number]), None)
        if cut_off is not None:
            report.trace = self._way_to(cut_off)
            raise ViolationError("EventuallyConverges", "no fair steps lead from this state to convergence")

    def _backwards(self, goals: set[int]) -> bytearray:
        """Returns by state number whether fair steps lead to one of the goals.

        Sorts the edges by target first (counting sort), so that each edge is visited once.
        """
        sources, targets = self._fair_edges
        first = array("I", bytes(4 * (self._report.states + 2)))
        for target in targets:
            first[target + 1] += 1
        for index in range(1, len(first)):
            first[index] += first[index - 1]
        place = array("I", first)
        incoming = array("I", bytes(4 * len(sources)))
        for source, target in zip(sources, targets, strict=True):
            incoming[place[target]] = source
            place[target] += 1
        reached = bytearray(self._report.states)
        stack = list(goals)
        for number in stack:
            reached[number] = 1
        while stack:
            number = stack.pop()
            for source in incoming[first[number] : first[number + 1]]:
                if not reached[source]:
                    reached[source] = 1
                    stack.append(source)
        return reached


def _pick(fair: list[Step], last: int) -> Step:
    """Returns the next fair step: no heartbeat or timer if possible, then timers, then heartbeats client by client."""
    soon = [step for step in fair if step.action != "send" and step.action not in _TIMERS]
    later = [step for step in fair if step.action in _TIMERS]
    sends = sorted(
        (step for step in fair if step.action == "send"), key=lambda step: (step.client <= last, step.client)
    )
    return (soon or later or sends)[0]


def check_same_as_live(state: State) -> None:
    """I-17 for a compacted log: its state does not depend on the order of the last records of different keys."""
    forward = restore(state).hard_state()
    backward = restore(state._replace(log=dict(reversed(list(state.log.items()))))).hard_state()
    if forward != backward:
        raise ViolationError("I-17 live state is the log's state", f"\n  {forward}\n  {backward}")
