# SPDX-License-Identifier: Apache-2.0
"""Members that compute their group's assignment, against the real core of the coordinator.

As in `test_membership`, requests and responses may be lost, and the coordinator may restart. In addition assignors fail
or return invalid assignments, and anything may happen between the steps of a computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kcoord.client.assignors import (
    AssignmentSpec,
    GroupAssignment,
    MemberAssignment,
    Metadata,
    OfferedAssignor,
)
from kcoord.client.consumer.assignment_messages import install_request, spec_of
from kcoord.client.consumer.assignor_offer import AssignorOffer
from kcoord.client.consumer.computation import ASSIGNOR_FAILED, Computation, ComputationPhase
from kcoord.client.consumer.membership import Membership
from kcoord.client.types import TopicPartition
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupPrepareAssignmentRequest,
)
from tests.unit.client.test_membership import NETWORK, MembersAndCoordinator
from tests.unit.group.group_context import GroupContext, Waiting

T = TypeVar("T")

LOSSES = st.sampled_from(["", "", "", "request", "answer"])


def in_turn(spec: AssignmentSpec) -> GroupAssignment:
    """Gives the partitions of each topic to its subscribers in turn."""
    assigned: dict[str, list[TopicPartition]] = {member_id: [] for member_id in spec.members}
    for topic, metadata in spec.topics.items():
        subscribers = sorted(
            member_id for member_id in spec.members if topic in spec.members[member_id].subscribed_topics
        )
        for partition in range(metadata.num_partitions):
            assigned[subscribers[partition % len(subscribers)]].append(TopicPartition(topic, partition))
    return GroupAssignment({member_id: MemberAssignment(partitions) for member_id, partitions in assigned.items()})


class ComputingMembers(MembersAndCoordinator):
    @initialize()
    def start(self) -> None:
        self.context = GroupContext({"a": 3, "b": 2}, {"kcoord.client.assignors.enable": "true"})
        self.all: list[Membership] = []
        self.offers: dict[str, AssignorOffer] = {}
        self.computations: dict[str, Computation] = {}
        self.outcomes: dict[str, str] = {}
        """What the assignor of a member did in the computation that is to be installed."""
        self.responses: list[ConsumerGroupHeartbeatResponse] = []
        self.has_restarted = False

    @rule(target=MembersAndCoordinator.members, is_static=st.booleans(), both=st.booleans())
    @precondition(lambda self: len(self.all) < 4)
    def add(self, is_static: bool, both: bool) -> Membership:
        number = len(self.all)
        name = f"m{number}"
        self.offers[name], self.computations[name] = AssignorOffer(), Computation()
        self.offers[name].update((OfferedAssignor("in-turn", 0, 0, 0, Metadata(0)),))
        member = Membership("g", name, instance_id=f"i{number}" if is_static else None, offer=self.offers[name])
        member.subscribe({"a", "b"} if both else {"a"}, None)
        self.all.append(member)
        return member

    @rule(member=MembersAndCoordinator.members, loss=LOSSES)
    def heartbeat(self, member: Membership, loss: str) -> None:
        self.responses.clear()
        super().heartbeat(member, loss)
        computation = self.computations[member.member_id]
        if not member.is_in_group or member.member_epoch == 0:
            computation.abandon()
            return
        for response in self.responses:
            if not loss and not response.error_code:
                computation.on_heartbeat(response.should_compute_assignment)

    def _ask(self, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
        response = super()._ask(request)
        self.responses.append(response)
        return response

    @rule()
    def restart(self) -> None:
        self.has_restarted = True
        super().restart()

    @rule(member=MembersAndCoordinator.members, data=st.sampled_from([b"", b"x", b"y"]))
    def change_metadata(self, member: Membership, data: bytes) -> None:
        self.offers[member.member_id].update((OfferedAssignor("in-turn", 0, 0, 0, Metadata(0, data)),))

    @rule(member=MembersAndCoordinator.members, reason=st.integers(1, 2))
    def request_reassignment(self, member: Membership, reason: int) -> None:
        self.offers[member.member_id].request_reassignment(reason)

    @rule(
        member=MembersAndCoordinator.members,
        loss=LOSSES,
        outcome=st.sampled_from(["good", "good", "good", "invalid", "failing"]),
    )
    def compute(self, member: Membership, loss: str, outcome: str) -> None:
        """Carries out the step of the member's computation, if it has one."""
        computation = self.computations[member.member_id]
        number, spec, request = computation.number, computation.spec, computation.request
        match computation.phase:
            case ComputationPhase.PREPARE:
                prepare = ConsumerGroupPrepareAssignmentRequest(
                    group_id="g", member_id=member.member_id, member_epoch=member.member_epoch
                )
                response = self._call(
                    computation, loss, lambda context: self.context.shard.prepare_assignment(context, prepare)
                )
                if response is not None:
                    computation.on_prepared(number, response.assignor_name, spec_of("g", response))
            case ComputationPhase.ASSIGN:
                assert spec is not None and computation.assignor_name == "in-turn"
                result = GroupAssignment(error=ASSIGNOR_FAILED)
                if outcome != "failing":
                    result = in_turn(spec) if outcome == "good" else GroupAssignment()
                self.outcomes[member.member_id] = outcome
                computation.on_assigned(number, install_request(member.member_id, spec, result))
            case ComputationPhase.INSTALL:
                assert request is not None
                request.member_epoch = member.member_epoch
                if self._call(
                    computation, loss, lambda context: self.context.shard.install_assignment(context, request)
                ):
                    computation.on_installed(number)

    def _call(
        self, computation: Computation, loss: str, call: Callable[[OperationContext], CoordinatorResult[T]]
    ) -> T | None:
        """Sends a request. Returns its response; None if it is lost or has an error, which the member handles."""
        error: KafkaError | None = NETWORK if loss else None
        response: object = None
        if loss != "request":
            try:
                response = self.context.run(call, 0)
                if isinstance(response, Waiting):
                    self.context.run_tasks()
                    response = response.answer
                code = Errors(response.error_code)  # type: ignore[attr-defined]
                error = error or (KafkaError(code) if code else None)
            except KafkaError as refusal:
                error = error or refusal
        if error is None:
            return cast(T, response)
        computation.on_error(computation.number, error)
        return None

    @invariant()
    def only_wrong_results_are_blamed(self) -> None:
        for member_id, computation in self.computations.items():
            while (failure := computation.take_failure()) is not None:
                assert failure.error is Errors.INVALID_ASSIGNMENT
                # A second restart, before the member can prepare again, makes a good result look invalid.
                assert self.outcomes[member_id] == "invalid" or self.has_restarted

    def teardown(self) -> None:
        """Without faults a member computes, and the group has its result."""
        if not hasattr(self, "all"):
            return
        for _ in range(40):
            self.context.sleep(5000)
            for member in self.all:
                self.poll(member)
                self.heartbeat(member, "")
                for _ in range(3):
                    self.do_step(member)
                    self.compute(member, "", "good")
                self.nobody_shares_a_partition()
                self.only_wrong_results_are_blamed()
        super().teardown()
        joined = [member for member in self.all if member.is_in_group]
        group = self.context.shard.group("g") if joined else None
        if group is not None:
            assert isinstance(group, ConsumerGroup)
            assert (group.target_assignor, group.assignment_epoch) == ("in-turn", group.group_epoch)
            assert all(self.computations[member.member_id].phase is ComputationPhase.IDLE for member in joined)
            for name in {topic for member in joined for topic in member.subscribed_names}:
                readers = sorted(member.member_id for member in joined if name in member.subscribed_names)
                for member in joined:
                    numbers = {p.partition for p in member.owned if p.topic_id == self.context.topic_id(name)}
                    if member.member_id in readers:
                        place = readers.index(member.member_id)
                        assert numbers == set(range(place, self.context.topics[name], len(readers)))


ComputingMembers.TestCase.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestComputingMembers = ComputingMembers.TestCase
