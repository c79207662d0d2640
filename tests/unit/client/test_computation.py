# SPDX-License-Identifier: Apache-2.0
"""A member that computes the assignment of its group: the steps, and random lives with a model of the coordinator.

The lives have lost requests and responses, late results, failing assignors, coordinators that move, deadlines, and
changes of the group while a member computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.client.assignors import AssignmentSpec
from kcoord.client.consumer.computation import ASSIGNOR_FAILED, Computation, ComputationPhase
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupInstallAssignmentRequest

T = TypeVar("T")

WAITED_FOR = (
    Errors.STALE_MEMBER_EPOCH,
    Errors.NOT_COORDINATOR,
    Errors.COORDINATOR_NOT_AVAILABLE,
    Errors.COORDINATOR_LOAD_IN_PROGRESS,
    Errors.NETWORK_EXCEPTION,
    Errors.REQUEST_TIMED_OUT,
    Errors.UNKNOWN_SERVER_ERROR,
)


def spec(epoch: int = 7) -> AssignmentSpec:
    return AssignmentSpec("g", epoch, {}, {})


def fail(computation: Computation, error: Errors) -> None:
    """Reports an error of the step of the present phase."""
    computation.on_error(computation.number, KafkaError(error))


def failures_of(computation: Computation) -> list[Errors]:
    errors = []
    while (error := computation.take_failure()) is not None:
        errors.append(error.error)
    return errors


def install(epoch: int = 7, error: int = 0) -> ConsumerGroupInstallAssignmentRequest:
    return ConsumerGroupInstallAssignmentRequest(group_id="g", group_epoch=epoch, error=error)


def phase_of(computation: Computation) -> ComputationPhase:
    """Returns the phase. A call keeps mypy from treating the phase as a constant."""
    return computation.phase


def at(phase: ComputationPhase) -> Computation:
    """Returns a computation in a phase that has a step."""
    computation = Computation()
    computation.on_heartbeat(True)
    if phase is not ComputationPhase.PREPARE:
        computation.on_prepared(computation.number, "a", spec())
    if phase is ComputationPhase.INSTALL:
        computation.on_assigned(computation.number, install())
    assert phase_of(computation) is phase
    return computation


STEPS = (ComputationPhase.PREPARE, ComputationPhase.ASSIGN, ComputationPhase.INSTALL)
REQUESTS = (ComputationPhase.PREPARE, ComputationPhase.INSTALL)


class TestSteps:
    def test_a_computation_from_the_flag_to_the_installed_result(self) -> None:
        computation = Computation()
        computation.on_heartbeat(False)
        assert phase_of(computation) is ComputationPhase.IDLE
        computation.on_heartbeat(True)
        assert phase_of(computation) is ComputationPhase.PREPARE
        computation.on_prepared(computation.number, "a", spec())
        assert phase_of(computation) is ComputationPhase.ASSIGN
        assert (computation.assignor_name, computation.spec) == ("a", spec())
        computation.on_assigned(computation.number, install())
        assert phase_of(computation) is ComputationPhase.INSTALL
        assert computation.request == install()
        computation.on_installed(computation.number)
        assert phase_of(computation) is ComputationPhase.IDLE
        assert computation.spec is None and computation.request is None

    @pytest.mark.parametrize("phase", STEPS)
    def test_the_flag_changes_nothing_while_a_step_runs(self, phase: ComputationPhase) -> None:
        computation = at(phase)
        number = computation.number
        computation.on_heartbeat(True)
        assert (phase_of(computation), computation.number) == (phase, number)

    @pytest.mark.parametrize("phase", STEPS)
    def test_a_missing_flag_ends_the_computation_and_late_outcomes_mean_nothing(self, phase: ComputationPhase) -> None:
        computation = at(phase)
        number = computation.number
        computation.on_heartbeat(False)
        assert phase_of(computation) is ComputationPhase.IDLE
        computation.on_prepared(number, "a", spec())
        computation.on_assigned(number, install())
        computation.on_installed(number)
        computation.on_error(number, KafkaError(Errors.UNKNOWN_MEMBER_ID))
        assert phase_of(computation) is ComputationPhase.IDLE
        assert failures_of(computation) == []

    def test_the_result_of_an_abandoned_computation_is_not_the_result_of_the_next(self) -> None:
        computation = at(ComputationPhase.ASSIGN)
        late = computation.number
        computation.on_heartbeat(False)
        computation.on_heartbeat(True)
        computation.on_prepared(computation.number, "a", spec(8))
        computation.on_assigned(late, install(7))
        assert phase_of(computation) is ComputationPhase.ASSIGN
        computation.on_assigned(computation.number, install(8))
        assert computation.request == install(8)


class TestErrors:
    @pytest.mark.parametrize("error", WAITED_FOR)
    @pytest.mark.parametrize("phase", REQUESTS)
    def test_the_step_is_repeated_after_the_next_heartbeat(self, phase: ComputationPhase, error: Errors) -> None:
        computation = at(phase)
        request = computation.request
        fail(computation, error)
        assert phase_of(computation) is ComputationPhase.WAIT
        computation.on_heartbeat(True)
        assert phase_of(computation) is phase
        assert computation.request is request
        assert failures_of(computation) == []

    @pytest.mark.parametrize("phase", REQUESTS)
    def test_a_member_that_waits_gives_up_without_the_flag(self, phase: ComputationPhase) -> None:
        computation = at(phase)
        fail(computation, Errors.NOT_COORDINATOR)
        computation.on_heartbeat(False)
        assert phase_of(computation) is ComputationPhase.IDLE
        computation.on_heartbeat(True)
        assert phase_of(computation) is ComputationPhase.PREPARE
        assert failures_of(computation) == []

    @pytest.mark.parametrize("error", [Errors.UNKNOWN_MEMBER_ID, Errors.GROUP_ID_NOT_FOUND])
    @pytest.mark.parametrize("phase", REQUESTS)
    def test_the_coordinator_no_longer_waits(self, phase: ComputationPhase, error: Errors) -> None:
        computation = at(phase)
        fail(computation, error)
        assert phase_of(computation) is ComputationPhase.IDLE
        assert failures_of(computation) == []

    @pytest.mark.parametrize("error", [Errors.GROUP_AUTHORIZATION_FAILED, Errors.INVALID_REQUEST])
    @pytest.mark.parametrize("phase", REQUESTS)
    def test_other_errors_are_raised(self, phase: ComputationPhase, error: Errors) -> None:
        computation = at(phase)
        fail(computation, error)
        assert phase_of(computation) is ComputationPhase.IDLE
        assert failures_of(computation) == [error]


class TestInvalidAssignments:
    """INVALID_ASSIGNMENT is the assignor's fault only if the coordinator then asks another member."""

    def rejected(self) -> Computation:
        computation = at(ComputationPhase.INSTALL)
        fail(computation, Errors.INVALID_ASSIGNMENT)
        assert phase_of(computation) is ComputationPhase.PREPARE
        assert computation.request is None
        assert failures_of(computation) == []
        return computation

    @pytest.mark.parametrize("error", [Errors.UNKNOWN_MEMBER_ID, Errors.GROUP_ID_NOT_FOUND])
    def test_the_coordinator_refuses_the_next_prepare(self, error: Errors) -> None:
        computation = self.rejected()
        fail(computation, error)
        assert phase_of(computation) is ComputationPhase.IDLE
        assert failures_of(computation) == [Errors.INVALID_ASSIGNMENT]

    def test_the_next_heartbeat_has_no_flag(self) -> None:
        computation = self.rejected()
        computation.on_heartbeat(False)
        assert phase_of(computation) is ComputationPhase.IDLE
        assert failures_of(computation) == [Errors.INVALID_ASSIGNMENT]

    def test_the_next_heartbeat_overtakes_the_response(self) -> None:
        computation = at(ComputationPhase.INSTALL)
        number = computation.number
        computation.on_heartbeat(False)
        computation.on_error(number, KafkaError(Errors.INVALID_ASSIGNMENT))
        assert failures_of(computation) == [Errors.INVALID_ASSIGNMENT]

    def test_a_coordinator_that_knew_no_prepare_asks_the_member_still(self) -> None:
        computation = self.rejected()
        computation.on_heartbeat(True)
        computation.on_prepared(computation.number, "a", spec(8))
        computation.on_heartbeat(False)
        assert failures_of(computation) == []

    def test_a_coordinator_that_moves_leaves_it_open(self) -> None:
        computation = self.rejected()
        fail(computation, Errors.NOT_COORDINATOR)
        computation.on_heartbeat(False)
        assert failures_of(computation) == []

    def test_a_new_epoch_of_the_member_does_not_hide_it(self) -> None:
        computation = self.rejected()
        fail(computation, Errors.STALE_MEMBER_EPOCH)
        computation.on_heartbeat(False)
        assert failures_of(computation) == [Errors.INVALID_ASSIGNMENT]

    def test_a_member_that_leaves_its_group_does_not_raise_it(self) -> None:
        computation = self.rejected()
        computation.abandon()
        assert failures_of(computation) == []


# --- random lives -----------------------------------------------------------------------------------------------------

DEADLINE_MS: Final = 300_000
PAUSE_MS: Final = 100_000
"""Longer than a member takes to notice that it is not asked any more."""


class _Refusal(Exception):
    def __init__(self, error: Errors) -> None:
        self.error = error


@dataclass
class ModelCoordinator:
    """The coordinator's rules about one group: whom it asks, and what it accepts.

    `chosen`, `snapshot` and `failed` are lost if the coordinator moves.
    """

    group_epoch: int = 2
    assignment_epoch: int = 1
    chosen: str | None = None
    deadline_ms: int = 0
    snapshot: int | None = None
    failed: set[str] = field(default_factory=set)
    installed_by: str | None = None
    installs: list[int] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    """Members whose Install of a present snapshot was invalid."""
    suspects: set[str] = field(default_factory=set)
    """Members whose Install had no present snapshot, until the response to their next Prepare arrives."""
    misjudged: list[str] = field(default_factory=list)
    """Suspects who lost the computation meanwhile: the coordinator moved, or their time was over."""

    def heartbeat(self, member_id: str, now_ms: int) -> tuple[bool, int]:
        """Returns the flag and the member's epoch."""
        if self.chosen is not None and now_ms >= self.deadline_ms:
            self.failed.add(self.chosen)
            self._drop()
        if self.assignment_epoch == self.group_epoch:
            self._drop()
        elif self.chosen is None and member_id not in self.failed:
            self.chosen, self.deadline_ms, self.snapshot = member_id, now_ms + DEADLINE_MS, None
        return self.chosen == member_id, self.assignment_epoch

    def prepare(self, member_id: str, epoch: int) -> int:
        self._check(member_id, epoch)
        self.snapshot = self.group_epoch
        return self.snapshot

    def install(self, member_id: str, epoch: int, request: ConsumerGroupInstallAssignmentRequest, valid: bool) -> None:
        if epoch != self.assignment_epoch:
            raise _Refusal(Errors.STALE_MEMBER_EPOCH)
        if self.chosen != member_id and self.installed_by == member_id and request.group_epoch == self.assignment_epoch:
            return
        self._check(member_id, epoch)
        if request.group_epoch != self.snapshot:
            self.suspects.add(member_id)
            raise _Refusal(Errors.INVALID_ASSIGNMENT)
        if request.error == ASSIGNOR_FAILED or not valid:
            self.failed.add(member_id)
            self._drop()
            if request.error != ASSIGNOR_FAILED:
                self.rejected.append(member_id)
                raise _Refusal(Errors.INVALID_ASSIGNMENT)
            return
        self.assignment_epoch = request.group_epoch
        self.installs.append(request.group_epoch)
        self.installed_by = member_id
        self.failed.clear()
        self._drop()

    def move(self) -> None:
        """Another broker becomes the coordinator. It has the records only."""
        self.failed.clear()
        self._drop()

    def pause(self) -> None:
        """All members failed, and the pause is over."""
        self.failed.clear()

    def _drop(self) -> None:
        if self.chosen in self.suspects:
            self.suspects.remove(self.chosen)
            self.misjudged.append(self.chosen)
        self.chosen = self.snapshot = None

    def _check(self, member_id: str, epoch: int) -> None:
        if epoch != self.assignment_epoch:
            raise _Refusal(Errors.STALE_MEMBER_EPOCH)
        if self.chosen != member_id:
            raise _Refusal(Errors.UNKNOWN_MEMBER_ID)


@dataclass
class ModelMember:
    """A member that drives a real `Computation`. A step takes any time, in which other things happen."""

    member_id: str
    outcome: str
    """What its assignor does: good, invalid or failing."""
    computation: Computation = field(default_factory=Computation)
    epoch: int = 1
    running: Callable[[], None] | None = None
    """The end of the step that runs."""
    raised: list[Errors] = field(default_factory=list)

    def poll(self) -> list[Errors]:
        """Returns all errors that the application got up to now."""
        self.raised += failures_of(self.computation)
        return self.raised


class Life:
    """One random life of a group. `faults` are the chances of each fault per step."""

    def __init__(self, seed: int, outcomes: list[str]) -> None:
        self.chance = random.Random(seed)
        self.coordinator = ModelCoordinator()
        self.members = [ModelMember(f"m{number}", outcome) for number, outcome in enumerate(outcomes)]
        self.now_ms = 0
        self.resume_ms = 0
        self.faults = 0.3

    def happens(self, share: float = 1.0) -> bool:
        return self.chance.random() < self.faults * share

    def turn(self) -> None:
        """Something happens: a heartbeat, the begin or the end of a step, or a change of the group."""
        self.now_ms += self.chance.choice([10, 100, 5_000])
        if self.happens(0.2):
            self.coordinator.group_epoch += 1
        if self.happens(0.2):
            self.coordinator.move()
        if self.coordinator.failed < {member.member_id for member in self.members}:
            self.resume_ms = self.now_ms + PAUSE_MS
        elif self.now_ms >= self.resume_ms:
            self.coordinator.pause()
        member = self.chance.choice(self.members)
        if member.running is not None and self.chance.random() < 0.6:
            end, member.running = member.running, None
            end()
        elif self.chance.random() < 0.6:
            self.heartbeat(member)
        elif member.running is None:
            self.begin(member)

    def heartbeat(self, member: ModelMember) -> None:
        if self.happens():
            return
        flag, epoch = self.coordinator.heartbeat(member.member_id, self.now_ms)
        if not self.happens():
            member.epoch = epoch
            member.computation.on_heartbeat(flag)

    def begin(self, member: ModelMember) -> None:
        """Begins the step of the member's phase, if it has one. The request arrives now, its outcome later."""
        computation = member.computation
        number = computation.number
        match computation.phase:
            case ComputationPhase.PREPARE:
                member.running = self.send(
                    member,
                    number,
                    lambda: self.coordinator.prepare(member.member_id, member.epoch),
                    lambda epoch: self.prepared(member, number, epoch),
                )
            case ComputationPhase.ASSIGN:
                assert computation.spec is not None
                error = ASSIGNOR_FAILED if member.outcome == "failing" else 0
                request = install(computation.spec.group_epoch, error)
                member.running = lambda: computation.on_assigned(number, request)
            case ComputationPhase.INSTALL:
                assert computation.request is not None
                sent = computation.request
                valid = member.outcome != "invalid"
                member.running = self.send(
                    member,
                    number,
                    lambda: self.coordinator.install(member.member_id, member.epoch, sent, valid),
                    lambda _: computation.on_installed(number),
                )

    def prepared(self, member: ModelMember, number: int, epoch: int) -> None:
        self.coordinator.suspects.discard(member.member_id)
        member.computation.on_prepared(number, "a", spec(epoch))

    def send(
        self, member: ModelMember, number: int, call: Callable[[], T], done: Callable[[T], None]
    ) -> Callable[[], None]:
        """Carries out a request, unless it is lost. Returns what its response does, which may be lost, too."""
        error = None
        if self.happens():
            error = self.chance.choice(WAITED_FOR[1:])
        else:
            try:
                value = call()
            except _Refusal as refusal:
                error = refusal.error
            if self.happens():
                error = Errors.NETWORK_EXCEPTION

        def end() -> None:
            if error is None:
                done(value)
            else:
                member.computation.on_error(number, KafkaError(error))

        return end


@given(st.integers(0, 1 << 32), st.lists(st.sampled_from(["good", "good", "invalid", "failing"]), max_size=3))
@settings(max_examples=300)
def test_random_lives(seed: int, outcomes: list[str]) -> None:
    life = Life(seed, ["good", *outcomes])
    for _ in range(150):
        life.turn()
        installs = life.coordinator.installs
        assert installs == sorted(set(installs)), "an epoch was installed twice, or after a later one"
        for member in life.members:
            # Errors reach the application only if the assignor is to blame, each at most once.
            guilty = life.coordinator.rejected + life.coordinator.misjudged
            assert set(member.poll()) <= {Errors.INVALID_ASSIGNMENT}
            assert len(member.poll()) <= guilty.count(member.member_id)
    life.faults = 0
    for _ in range(2_000):
        life.turn()
        if life.coordinator.assignment_epoch == life.coordinator.group_epoch:
            break
    assert life.coordinator.assignment_epoch == life.coordinator.group_epoch, "no good member installed"
    for _ in range(100):
        life.turn()
    assert all(member.computation.phase is ComputationPhase.IDLE for member in life.members)


@given(st.integers(0, 1 << 32), st.lists(st.sampled_from(["good", "invalid", "failing"]), min_size=1, max_size=3))
def test_lives_without_faults_raise_each_rejected_result(seed: int, outcomes: list[str]) -> None:
    life = Life(seed, outcomes)
    life.faults = 0
    for _ in range(400):
        life.turn()
    for _ in range(100):
        # All members finish their steps, and the coordinator does not ask any more.
        life.coordinator.assignment_epoch = life.coordinator.group_epoch
        life.turn()
    for member in life.members:
        assert member.poll() == [Errors.INVALID_ASSIGNMENT] * life.coordinator.rejected.count(member.member_id)
