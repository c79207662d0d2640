# SPDX-License-Identifier: Apache-2.0
"""The order of creation times, checked by Hypothesis. The clocks of workers and controller differ in time and speed.

Messages are delayed. Workers and the controller restart. A partition is new to exactly those groups whose coordinator
did not know it at their creation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kcoord.coordinator.group.creation_limits import CreationLimits
from kcoord.metadata.creation_order import CreationOrder
from kcoord.runtime.result import NO_CREATION_LIMIT

MOST_AHEAD = 8
"""A worker's clock runs fast by at most an eighth."""


COUNT = 3
"""The number of workers."""


@dataclass(eq=False)
class Worker:
    """A worker. `log` has the messages of the controller that it has not read yet.

    `partitions` are the creation times of the partitions that it knows, `latest_ms` that of its latest group.
    """

    number: int
    now_ms: int
    partitions: dict[int, int]
    limits: CreationLimits = field(default_factory=CreationLimits)
    latest_ms: int = -1
    log: deque[tuple[str, int, int]] = field(default_factory=deque)
    answers: deque[tuple[int, int]] = field(default_factory=deque)

    def newest_ms(self) -> int:
        return max(self.now_ms, self.latest_ms, *self.partitions.values(), -1)

    def create_group(self) -> int:
        limited_ms = min(self.now_ms, self.limits.limit_ms)
        self.latest_ms = max(limited_ms, self.latest_ms, *self.partitions.values(), -1)
        return self.latest_ms

    def read(self) -> None:
        kind, number, time_ms = self.log.popleft()
        if kind == "ask":
            newest_ms = self.newest_ms()
            self.limits.hold(number, newest_ms)
            self.answers.append((number, newest_ms))
        elif kind == "limit":
            self.limits.hold(number, time_ms)
        elif kind == "partition":
            self.partitions[number] = time_ms
        else:
            self.limits.release(number)


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # A new cluster has no groups, so no worker has anything to report.
        self.order: CreationOrder[Worker] = CreationOrder()
        self.now_ms = 1_000
        self.heard_ms = 0
        self.workers: list[Worker] = []
        self.cut_off: list[Worker] = []
        """Workers that serve clients and have not connected to the restarted controller yet."""
        self.latest_ms = dict.fromkeys(range(COUNT), -1)
        """The creation time of the latest group, by the number of a worker that has ended."""
        self.partitions: dict[int, int] = {}
        self.operations = 0
        """Tickets of all lives of the controller: numbers of partitions."""
        self.asking: dict[int, int] = {}
        self.stamped: deque[tuple[int, int, int]] = deque()
        self.groups: list[tuple[int, frozenset[int]]] = []

    @precondition(lambda self: self.latest_ms)
    @rule(clock_ms=st.integers(0, 5_000))
    def join(self, clock_ms: int) -> None:
        """A worker starts. It knows all durable partitions and its earlier groups before it serves clients."""
        number = min(self.latest_ms)
        worker = Worker(number, clock_ms, dict(self.partitions), latest_ms=self.latest_ms.pop(number))
        self._connect(worker)

    @precondition(lambda self: self.cut_off)
    @rule()
    def connect_again(self) -> None:
        """A worker connects to the restarted controller and reads the log to its end."""
        worker = self.cut_off.pop()
        stale_tickets = worker.limits.tickets
        self._connect(worker)
        for ticket in stale_tickets - set(self._tickets_in(worker)):
            worker.limits.release(ticket)

    def _connect(self, worker: Worker) -> None:
        self.workers.append(worker)
        limits = self.order.join(worker, worker.number, worker.newest_ms(), self.heard_ms)
        for ticket, limit_ms in limits.items():
            if limit_ms is not None:
                worker.limits.hold(ticket, limit_ms)
            else:
                worker.log.append(("ask", ticket, -1))
        worker.partitions = dict(self.partitions)

    def _tickets_in(self, worker: Worker) -> Iterator[int]:
        yield from (ticket for _, ticket, _ in self.stamped)
        yield from (ticket for _, ticket, _ in worker.log)

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 2))
    def die(self, index: int) -> None:
        worker = self.workers.pop(index % len(self.workers))
        self.order.lose(worker, self.heard_ms)
        self.latest_ms[worker.number] = worker.latest_ms

    @precondition(lambda self: self.cut_off)
    @rule()
    def die_before_it_connects_again(self) -> None:
        worker = self.cut_off.pop()
        self.latest_ms[worker.number] = worker.latest_ms

    @rule()
    def restart_controller(self) -> None:
        """Operations in flight end without partitions, and workers lose the messages that they have not read."""
        self.order = CreationOrder(range(COUNT))
        self.asking.clear()
        self.stamped.clear()
        for worker in self.workers:
            worker.log.clear()
            worker.answers.clear()
        self.cut_off += self.workers
        self.workers.clear()

    @rule(elapsed_ms=st.integers(1, 400), rates=st.lists(st.integers(0, MOST_AHEAD), min_size=3, max_size=3))
    def pass_time(self, elapsed_ms: int, rates: list[int]) -> None:
        self.heard_ms += elapsed_ms
        self.now_ms += elapsed_ms
        for worker, rate in zip((*self.workers, *self.cut_off), rates, strict=False):
            worker.now_ms += elapsed_ms + elapsed_ms * rate // (MOST_AHEAD * MOST_AHEAD)

    @rule()
    def set_controllers_clock_back(self) -> None:
        """This can happen, for example, when the controller restarts."""
        self.now_ms = max(self.now_ms - 700, 0)

    @precondition(lambda self: self.workers or self.cut_off)
    @rule(index=st.integers(0, 2))
    def create_group(self, index: int) -> None:
        workers = [*self.workers, *self.cut_off]
        worker = workers[index % len(workers)]
        self.groups.append((worker.create_group(), frozenset(worker.partitions)))
        for number, time_ms in self.partitions.items():
            self._check(number, time_ms, self.groups[-1:])

    def _check(self, number: int, time_ms: int, groups: list[tuple[int, frozenset[int]]]) -> None:
        for group_ms, known_partitions in groups:
            assert (time_ms > group_ms) == (number not in known_partitions)

    @rule()
    def begin(self) -> None:
        ticket = self.order.begin()
        self.operations += 1
        self.asking[ticket] = self.operations
        for worker in self.order.waiting(ticket):
            worker.log.append(("ask", ticket, -1))

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 2), count=st.integers(1, 5))
    def read(self, index: int, count: int) -> None:
        worker = self.workers[index % len(self.workers)]
        for _ in range(min(count, len(worker.log))):
            worker.read()

    @precondition(lambda self: self.workers)
    @rule(index=st.integers(0, 2))
    def hear(self, index: int) -> None:
        worker = self.workers[index % len(self.workers)]
        while worker.answers:
            ticket, newest_ms = worker.answers.popleft()
            self.order.answer(worker, ticket, newest_ms, self.heard_ms)

    @rule()
    def stamp(self) -> None:
        for ticket in [ticket for ticket in self.asking if not self.order.is_waiting(ticket)]:
            newest_ms = max([time_ms for _, _, time_ms in self.stamped] + [*self.partitions.values(), -1])
            time_ms = self.order.stamp(ticket, self.now_ms, newest_ms, self.heard_ms)
            assert time_ms > newest_ms
            self.stamped.append((self.asking.pop(ticket), ticket, time_ms))

    @precondition(lambda self: self.stamped)
    @rule(fails=st.booleans())
    def publish(self, fails: bool) -> None:
        """Publishes in the order of the log. An operation may still fail here."""
        number, ticket, time_ms = self.stamped.popleft()
        if not fails:
            self._check(number, time_ms, self.groups)
            self.partitions[number] = time_ms
        self.order.end(ticket)
        for worker in self.workers:
            if not fails:
                worker.log.append(("partition", number, time_ms))
            worker.log.append(("release", ticket, -1))

    def teardown(self) -> None:
        while self.cut_off:
            self.connect_again()
        while self.latest_ms:
            self.join(0)
        # Every worker answers at least one operation.
        self.begin()
        while self.asking or self.stamped:
            for worker in self.workers:
                while worker.log:
                    worker.read()
                self.hear(self.workers.index(worker))
            self.stamp()
            while self.stamped:
                self.publish(fails=False)
        for worker in self.workers:
            while worker.log:
                worker.read()
            assert worker.limits.limit_ms == NO_CREATION_LIMIT


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_after_a_restart_an_operation_waits_for_the_answers_of_all_expected_workers() -> None:
    order: CreationOrder[str] = CreationOrder(expected=[1, 2])
    ticket = order.begin()
    assert order.is_waiting(ticket)
    assert order.join("a", 1, 5_000, heard_ms=0) == {ticket: None}
    order.answer("a", ticket, 5_000, heard_ms=0)
    assert order.is_waiting(ticket)
    # A worker that ends before its answer has perhaps not loaded its groups, so the order still expects it.
    order.join("b", 2, 100, heard_ms=0)
    order.lose("b", heard_ms=0)
    assert order.is_waiting(ticket)
    order.join("c", 2, 200, heard_ms=0)
    order.answer("c", ticket, 9_000, heard_ms=0)
    assert not order.is_waiting(ticket)
    assert order.stamp(ticket, 1_000, -1, heard_ms=0) == 9_001


def test_an_expected_worker_delays_only_the_operations_before_the_first_stamp_without_it() -> None:
    order: CreationOrder[str] = CreationOrder(expected=[1])
    first, second = order.begin(), order.begin()
    assert order.is_waiting(first) and order.is_waiting(second)
    assert order.stamp(first, 1_000, -1, heard_ms=0) == 1_000
    assert not order.is_waiting(second)
    assert not order.is_waiting(order.begin())


def test_the_latest_possible_time_is_assumed_for_a_worker_that_does_not_answer() -> None:
    order: CreationOrder[str] = CreationOrder()
    order.join("a", 1, 5_000, heard_ms=0)
    order.join("b", 2, 100, heard_ms=0)
    ticket = order.begin()
    order.answer("b", ticket, 130, heard_ms=10)
    assert set(order.waiting(ticket)) == {"a"}
    # While the controller's clock advances by 800 ms, the worker's clock advances by at most 900 ms.
    assert order.stamp(ticket, 1_000, -1, heard_ms=800) == 5_902
    order.end(ticket)
    order.answer("a", ticket, 5_850, heard_ms=810)
    order.lose("a", heard_ms=820)
    ticket = order.begin()
    assert set(order.waiting(ticket)) == {"b"}
    order.answer("b", ticket, 200, heard_ms=830)
    assert order.stamp(ticket, 1_000, -1, heard_ms=830) == 5_850 + 10 + 1 + 1 + 1
