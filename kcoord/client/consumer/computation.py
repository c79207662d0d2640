# SPDX-License-Identifier: Apache-2.0
"""The steps of a member that the coordinator asks to compute the group's assignment (KIP-848), as a pure state machine.

Theory of operation. `LocalAssignors` calls all methods in one event loop. It reports each response to a heartbeat with
`on_heartbeat`, carries out the step of the present phase in a task of its own, and reports the outcome. Heartbeats
never wait for a step.

Phases, and where they lead:

- IDLE: the coordinator does not ask. A heartbeat's response with ShouldComputeAssignment leads to PREPARE.
- PREPARE: ConsumerGroupPrepareAssignment is to be sent. Its response leads to ASSIGN.
- ASSIGN: the assignor is to run. Its result, or its failure, leads to INSTALL.
- INSTALL: ConsumerGroupInstallAssignment is to be sent. Success leads to IDLE.
- WAIT: PREPARE or INSTALL failed, and may succeed after the next heartbeat's response, which has the present epoch or
  comes from another coordinator. That response leads back to the phase; a computed result is kept.

Rules:

- The flag is in every response until the assignment is installed. A response without it leads to IDLE from each phase:
  the coordinator does not wait for this member any more.
- Each phase that the machine enters has a number. An outcome with an old number is dropped, so a step that was
  abandoned while it ran changes nothing.
- INVALID_ASSIGNMENT has two causes. Either the assignor's result is wrong, and the coordinator asks another member. Or
  the coordinator knows no Prepare, because it changed or chose the member a second time; then it still asks this
  member. So the member begins again with PREPARE. The error counts as the assignor's fault only if the coordinator does
  not ask this member any more.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from kcoord.client.assignors import AssignmentSpec
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupInstallAssignmentRequest

ASSIGNOR_FAILED: Final = -1
"""The error of an Install whose member could not compute an assignment."""

_WAITED_FOR: Final = frozenset(
    {
        Errors.STALE_MEMBER_EPOCH,
        Errors.NOT_COORDINATOR,
        Errors.COORDINATOR_NOT_AVAILABLE,
        Errors.COORDINATOR_LOAD_IN_PROGRESS,
        Errors.NETWORK_EXCEPTION,
        Errors.REQUEST_TIMED_OUT,
        Errors.THROTTLING_QUOTA_EXCEEDED,
        # A fault of the broker is not one of the assignor. The coordinator's deadline limits how often it is retried.
        Errors.UNKNOWN_SERVER_ERROR,
    }
)
_NOT_ASKED: Final = frozenset({Errors.UNKNOWN_MEMBER_ID, Errors.GROUP_ID_NOT_FOUND})


class ComputationPhase(Enum):
    """The phase of a computation."""

    IDLE = "idle"
    PREPARE = "prepare"
    ASSIGN = "assign"
    INSTALL = "install"
    WAIT = "wait"


class Computation:
    """The computation of one member, if there is one."""

    def __init__(self) -> None:
        self.phase = ComputationPhase.IDLE
        self.number = 0
        """The number of the present phase. Outcomes of its step must have it."""
        self.assignor_name = ""
        self.spec: AssignmentSpec | None = None
        self.request: ConsumerGroupInstallAssignmentRequest | None = None
        """The request with the assignor's result, or with the error ASSIGNOR_FAILED if the assignor failed."""
        self._resumed_phase = ComputationPhase.PREPARE
        self._suspicion: KafkaError | None = None
        """INVALID_ASSIGNMENT, while it is open whose fault it is."""
        self._abandoned_install = -1
        """The number of an Install whose response may arrive after a heartbeat's response without the flag."""
        self._failures: list[KafkaError] = []

    def take_failure(self) -> KafkaError | None:
        """Returns an error that `poll` has to raise."""
        return self._failures.pop(0) if self._failures else None

    def on_heartbeat(self, should_compute: bool) -> None:
        """Handles the flag of a heartbeat's response."""
        if not should_compute:
            self._refuse()
        elif self.phase is ComputationPhase.IDLE:
            self._enter(ComputationPhase.PREPARE)
        elif self.phase is ComputationPhase.WAIT:
            self._enter(self._resumed_phase)

    def abandon(self) -> None:
        """Gives the computation up, for example because the member leaves the group."""
        if self.phase is not ComputationPhase.IDLE:
            self.spec = self.request = self._suspicion = None
            self._enter(ComputationPhase.IDLE)

    def on_prepared(self, number: int, assignor_name: str, spec: AssignmentSpec) -> None:
        """Takes the state of the group, from the response to Prepare."""
        if number == self.number:
            assert self.phase is ComputationPhase.PREPARE
            self.assignor_name, self.spec, self._suspicion = assignor_name, spec, None
            self._enter(ComputationPhase.ASSIGN)

    def on_assigned(self, number: int, request: ConsumerGroupInstallAssignmentRequest) -> None:
        """Takes the request that installs the result of the assignor, or reports its failure."""
        if number == self.number:
            assert self.phase is ComputationPhase.ASSIGN
            self.request = request
            self._enter(ComputationPhase.INSTALL)

    def on_installed(self, number: int) -> None:
        """Ends the computation after a successful Install."""
        if number == self.number:
            assert self.phase is ComputationPhase.INSTALL
            self.abandon()

    def on_error(self, number: int, error: KafkaError) -> None:
        """Handles the error of Prepare or Install."""
        if number == self._abandoned_install and error.error is Errors.INVALID_ASSIGNMENT:
            self._failures.append(error)
        if number != self.number:
            return
        assert self.phase in (ComputationPhase.PREPARE, ComputationPhase.INSTALL)
        if error.error in _WAITED_FOR:
            self._resumed_phase = self.phase
            if error.error is not Errors.STALE_MEMBER_EPOCH:
                self._suspicion = None
            self._enter(ComputationPhase.WAIT)
        elif error.error is Errors.INVALID_ASSIGNMENT and self.phase is ComputationPhase.INSTALL:
            self.spec = self.request = None
            self._suspicion = error
            self._enter(ComputationPhase.PREPARE)
        elif error.error in _NOT_ASKED:
            self._refuse()
        else:
            self._failures.append(error)
            self.abandon()

    def _refuse(self) -> None:
        """Ends the computation, because the coordinator does not ask this member any more."""
        if self._suspicion is not None:
            self._failures.append(self._suspicion)
        if self.phase is ComputationPhase.INSTALL:
            self._abandoned_install = self.number
        self.abandon()

    def _enter(self, phase: ComputationPhase) -> None:
        self.phase = phase
        self.number += 1
