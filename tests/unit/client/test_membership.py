# SPDX-License-Identifier: Apache-2.0
"""The state machine of a member.

Examples follow the rules of KIP-848. A property test runs members against the real coordinator core, with lost requests
and responses.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from kcoord.client.consumer.member_state import IN_GROUP, MembershipState, Partitions, StepKind
from kcoord.client.consumer.membership import LEAVE_EPOCH, LEAVE_STATIC_EPOCH, Membership
from kcoord.client.types import TopicIdPartition
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatNewPartitionsResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from tests.unit.group.group_context import GroupContext

TOPIC = bytes(range(16))
RETRY_MS = 100
NETWORK = KafkaError(Errors.NETWORK_EXCEPTION)


def partitions(*numbers: int, topic: bytes = TOPIC) -> Partitions:
    return frozenset(TopicIdPartition(topic, number) for number in numbers)


def answer(
    epoch: int,
    *,
    assigned: Iterable[int] | None = None,
    creation_time_ms: int = -1,
    error: Errors = Errors.NONE,
) -> ConsumerGroupHeartbeatResponse:
    assignment = None
    if assigned is not None:
        topic = ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=TOPIC, partitions=list(assigned))
        assignment = ConsumerGroupHeartbeatResponse.Assignment(topic_partitions=[topic] if topic.partitions else [])
    return ConsumerGroupHeartbeatResponse(
        error_code=error,
        member_epoch=epoch,
        heartbeat_interval_ms=5000,
        group_creation_time_ms=creation_time_ms,
        assignment=assignment,
    )


def owned_in(request: ConsumerGroupHeartbeatRequest) -> set[int] | None:
    if request.topic_partitions is None:
        return None
    return {partition for topic in request.topic_partitions for partition in topic.partitions}


def state_of(member: Membership) -> MembershipState:
    """Returns the state. A call keeps mypy from treating the state as a constant."""
    return member.state


def finish_steps(member: Membership, known_topics: Iterable[bytes] = (TOPIC,)) -> list[tuple[StepKind, set[int]]]:
    done = []
    while (step := member.next_step(set(known_topics))) is not None:
        done.append((step.kind, {partition.partition for partition in step.partitions}))
        member.step_done(step)
    return done


def joined(assigned: Iterable[int] = (0, 1), *, instance_id: str | None = None) -> Membership:
    member = Membership("g", "m", instance_id=instance_id, rebalance_timeout_ms=60_000)
    member.subscribe({"t"}, None)
    member.make_heartbeat()
    member.on_response(answer(1, assigned=assigned), 0)
    finish_steps(member)
    member.make_heartbeat()
    member.on_response(answer(1), 0)
    assert state_of(member) is MembershipState.STABLE
    return member


class TestClaims:
    """Heartbeats that list the owned partitions and have no response yet.

    The coordinator may assign all other partitions to other members, so the member must not take them. The exhaustive
    check of `kcoord.simulation.model_check` found this case.
    """

    def test_no_partition_is_taken_while_a_heartbeat_without_it_is_unanswered(self) -> None:
        member = Membership("g", "m", rebalance_timeout_ms=60_000)
        member.subscribe({"t"}, None)
        member.make_heartbeat()
        member.on_response(answer(2, assigned=[0, 1]), 0)
        member.make_heartbeat()
        member.on_failure(NETWORK, 10, RETRY_MS)
        assert owned_in(member.make_heartbeat()) == set()
        assert member.next_step({TOPIC}) is None
        member.on_failure(NETWORK, 20, RETRY_MS)
        assert member.next_step({TOPIC}) is None
        member.make_heartbeat()
        member.on_response(answer(3, assigned=[0]), 30)
        assert finish_steps(member) == [(StepKind.ASSIGN, {0})]

    def test_partitions_being_taken_are_sent_as_owned(self) -> None:
        member = Membership("g", "m", rebalance_timeout_ms=60_000)
        member.subscribe({"t"}, None)
        member.make_heartbeat()
        member.on_response(answer(2, assigned=[0, 1]), 0)
        step = member.next_step({TOPIC})
        assert step is not None
        member.make_heartbeat()
        member.on_failure(NETWORK, 10, RETRY_MS)
        assert owned_in(member.make_heartbeat()) == {0, 1}


class TestJoin:
    def test_a_join_has_all_fields_and_no_partitions(self) -> None:
        member = Membership("g", "m", rack_id="r", server_assignor="range", rebalance_timeout_ms=60_000)
        assert member.heartbeat_due_ms() is None
        member.subscribe({"b", "a"}, None)
        assert state_of(member) is MembershipState.JOINING
        assert member.heartbeat_due_ms() == 0
        assert member.make_heartbeat() == ConsumerGroupHeartbeatRequest(
            group_id="g",
            member_id="m",
            member_epoch=0,
            rack_id="r",
            server_assignor="range",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=["a", "b"],
            topic_partitions=[],
        )
        assert member.heartbeat_due_ms() is None

    def test_the_creation_time_of_version_1_is_a_tagged_field(self) -> None:
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        member.make_heartbeat()
        answered = answer(3)
        answered.unknown_tagged_fields = ((11000, bytes.fromhex("0000018bcfe56800")),)
        member.on_response(ConsumerGroupHeartbeatResponse.decode(answered.encode(1), 1), 20)
        assert member.group_creation_time_ms == 1_700_000_000_000
        assert member.new_partitions is None

    def test_new_partitions_of_the_later_revision(self) -> None:
        """The bytes are written by hand from the KIP: the fields of v1, and tagged field 0 in the second topic."""
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        topics = (
            "03"  # two topics
            + "41" * 16 + "02" + "00000000" + "00"
            + "42" * 16 + "03" + "00000000" + "00000007" + "01" + "00" + "05" + "02" + "00000007"
        )  # fmt: skip
        for assignment in ("01" + topics + "00", "ff"):
            member.make_heartbeat()
            body = "00000000" + "0000" + "00" + "026d" + "00000003" + "00001388" + assignment + "00"
            response = ConsumerGroupHeartbeatNewPartitionsResponse.decode(bytes.fromhex(body), 2)
            assert response.encode(2).hex() == body
            member.on_response(response, 20)
            # The second response has no assignment, so nothing changes.
            assert member.new_partitions == partitions(7, topic=b"B" * 16)
            assert member.group_creation_time_ms == -1
        assert len(member.target) == 3

    def test_assigns_and_then_acknowledges(self) -> None:
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        member.make_heartbeat()
        member.on_response(answer(3, assigned=[0, 1], creation_time_ms=77), 20)
        assert state_of(member) is MembershipState.RECONCILING
        assert (member.member_epoch, member.group_creation_time_ms) == (3, 77)
        assert member.heartbeat_due_ms() == 5020
        step = member.next_step({TOPIC})
        assert step is not None and step == (StepKind.ASSIGN, partitions(0, 1))
        assert member.next_step({TOPIC}) is None
        assert member.owned == frozenset()
        member.step_done(step)
        assert state_of(member) is MembershipState.ACKNOWLEDGING
        assert member.heartbeat_due_ms() == 0
        request = member.make_heartbeat()
        assert (request.member_epoch, owned_in(request), request.subscribed_topic_names) == (3, {0, 1}, None)
        member.on_response(answer(3), 40)
        assert state_of(member) is MembershipState.STABLE
        assert member.heartbeat_due_ms() == 5040
        assert owned_in(member.make_heartbeat()) is None

    def test_an_empty_assignment_is_stable_at_once(self) -> None:
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        member.make_heartbeat()
        member.on_response(answer(1, assigned=[]), 0)
        assert state_of(member) is MembershipState.STABLE
        assert member.next_step({TOPIC}) is None

    def test_a_topic_without_a_name_waits(self) -> None:
        member = Membership("g", "m")
        member.subscribe(set(), "t.*")
        assert member.make_heartbeat().subscribed_topic_regex == "t.*"
        member.on_response(answer(1, assigned=[0]), 0)
        assert member.unresolved_topics({}) == {TOPIC}
        assert member.next_step(set()) is None
        assert state_of(member) is MembershipState.RECONCILING
        assert finish_steps(member) == [(StepKind.ASSIGN, {0})]

    def test_a_failed_join_is_repeated_in_full_after_the_backoff(self) -> None:
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        first = member.make_heartbeat()
        member.on_failure(NETWORK, 50, RETRY_MS)
        assert member.heartbeat_due_ms() == 150
        assert member.make_heartbeat() == first

    def test_a_fatal_error_of_a_join(self) -> None:
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        member.make_heartbeat()
        member.on_response(answer(0, error=Errors.UNRELEASED_INSTANCE_ID), 0)
        assert state_of(member) is MembershipState.FATAL
        assert member.fatal_error is not None and member.fatal_error.error is Errors.UNRELEASED_INSTANCE_ID
        assert member.heartbeat_due_ms() is None
        member.leave()
        assert member.is_unsubscribed
        member.subscribe({"t"}, None)
        assert member.fatal_error is None

    def test_a_dynamic_member_without_a_pattern_sends_none(self) -> None:
        for instance_id, expected in ((None, None), ("i", "")):
            member = Membership("g", "m", instance_id=instance_id)
            member.subscribe({"t"}, None)
            assert member.make_heartbeat().subscribed_topic_regex == expected


class TestReconciliation:
    def test_revokes_before_it_acknowledges_and_before_it_assigns(self) -> None:
        member = joined([0, 1])
        member.make_heartbeat()
        member.on_response(answer(2, assigned=[1, 2]), 0)
        revoke = member.next_step({TOPIC})
        assert revoke is not None and revoke == (StepKind.REVOKE, partitions(0))
        assert member.heartbeat_due_ms() == 5000  # the revocation is not acknowledged while it is under way
        member.step_done(revoke)
        assign = member.next_step({TOPIC})
        assert assign is not None and assign == (StepKind.ASSIGN, partitions(2))
        member.step_done(assign)
        assert owned_in(member.make_heartbeat()) == {1, 2}

    def test_a_revocation_is_acknowledged_although_a_new_topic_has_no_name_yet(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        other = ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=b"o" * 16, partitions=[0])
        response = answer(2, assigned=[])
        assert response.assignment is not None
        response.assignment.topic_partitions.append(other)
        member.on_response(response, 0)
        assert finish_steps(member) == [(StepKind.REVOKE, {0})]
        assert state_of(member) is MembershipState.RECONCILING
        assert member.heartbeat_due_ms() == 0
        assert owned_in(member.make_heartbeat()) == set()

    def test_heartbeats_continue_during_a_step(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.on_response(answer(2, assigned=[]), 100)
        assert member.next_step({TOPIC}) is not None
        assert member.heartbeat_due_ms() == 5100
        assert owned_in(member.make_heartbeat()) is None

    def test_a_target_that_changes_during_a_step(self) -> None:
        member = joined([0, 1])
        member.make_heartbeat()
        member.on_response(answer(2, assigned=[1]), 0)
        step = member.next_step({TOPIC})
        assert step is not None
        member.make_heartbeat()
        member.on_response(answer(3, assigned=[0, 1]), 0)
        member.step_done(step)
        assert finish_steps(member) == [(StepKind.ASSIGN, {0})]
        assert member.owned == partitions(0, 1)

    def test_a_target_is_acknowledged_if_a_partition_was_assigned_and_revoked(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.on_response(answer(2, assigned=[0, 1]), 0)
        assert member.heartbeat_due_ms() == 5000
        assert owned_in(member.make_heartbeat()) is None
        member.on_response(answer(2, assigned=[0]), 10)
        assert state_of(member) is MembershipState.ACKNOWLEDGING
        assert member.heartbeat_due_ms() == 0
        assert owned_in(member.make_heartbeat()) == {0}
        member.on_response(answer(3), 20)
        assert (member.state, member.heartbeat_due_ms()) == (MembershipState.STABLE, 5020)

    def test_after_a_lost_response_the_next_heartbeat_is_full(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.on_failure(NETWORK, 0, RETRY_MS)
        request = member.make_heartbeat()
        assert (owned_in(request), request.subscribed_topic_names, request.rebalance_timeout_ms) == ({0}, ["t"], 60_000)
        assert request.member_epoch == 1

    def test_a_new_subscription_is_sent_at_once(self) -> None:
        member = joined([0])
        assert member.heartbeat_due_ms() == 5000
        member.subscribe({"t", "u"}, None)
        assert member.heartbeat_due_ms() == 0
        request = member.make_heartbeat()
        assert (request.subscribed_topic_names, owned_in(request)) == (["t", "u"], None)
        member.on_response(answer(2), 0)
        member.subscribe(set(), "x")
        request = member.make_heartbeat()
        assert (request.subscribed_topic_names, request.subscribed_topic_regex) == ([], "x")
        member.on_response(answer(3), 0)
        member.subscribe({"t"}, None)
        request = member.make_heartbeat()
        assert (request.subscribed_topic_names, request.subscribed_topic_regex) == (["t"], "")


class TestFencing:
    @pytest.mark.parametrize("error", [Errors.FENCED_MEMBER_EPOCH, Errors.UNKNOWN_MEMBER_ID, Errors.GROUP_ID_NOT_FOUND])
    def test_a_fenced_member_loses_its_partitions_and_joins_with_the_same_id(self, error: Errors) -> None:
        member = joined([0, 1])
        member.make_heartbeat()
        member.on_response(answer(0, error=error), 1000, RETRY_MS)
        assert state_of(member) is MembershipState.FENCED
        assert not member.may_commit
        assert member.heartbeat_due_ms() is None
        assert finish_steps(member) == [(StepKind.LOSE, {0, 1})]
        assert state_of(member) is MembershipState.JOINING
        assert member.heartbeat_due_ms() == 1000 + RETRY_MS
        request = member.make_heartbeat()
        assert (request.member_id, request.member_epoch, owned_in(request)) == ("m", 0, set())

    def test_a_member_is_fenced_during_a_step(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.on_response(answer(2, assigned=[0, 1]), 0)
        step = member.next_step({TOPIC})
        assert step is not None
        member.make_heartbeat()
        member.on_response(answer(0, error=Errors.FENCED_MEMBER_EPOCH), 0)
        assert member.next_step({TOPIC}) is None
        member.step_done(step)
        assert finish_steps(member) == [(StepKind.LOSE, {0, 1})]
        assert state_of(member) is MembershipState.JOINING

    @pytest.mark.parametrize("error", [Errors.UNKNOWN_MEMBER_ID, Errors.FENCED_MEMBER_EPOCH])
    def test_a_join_that_is_fenced_is_repeated(self, error: Errors) -> None:
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        member.make_heartbeat()
        member.on_response(answer(0, error=error), 0, RETRY_MS)
        assert (member.state, member.heartbeat_due_ms()) == (MembershipState.JOINING, RETRY_MS)

    @pytest.mark.parametrize(
        "error",
        [
            Errors.FENCED_INSTANCE_ID,
            Errors.GROUP_AUTHORIZATION_FAILED,
            Errors.GROUP_MAX_SIZE_REACHED,
            Errors.INVALID_REGULAR_EXPRESSION,
            Errors.INVALID_REQUEST,
            Errors.UNSUPPORTED_ASSIGNOR,
            Errors.UNSUPPORTED_VERSION,
        ],
    )
    def test_fatal_errors(self, error: Errors) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.on_response(answer(0, error=error), 0)
        assert state_of(member) is MembershipState.FATAL
        assert finish_steps(member) == [(StepKind.LOSE, {0})]

    def test_an_unauthorized_topic_is_reported_once_and_the_member_stays(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.on_response(answer(0, error=Errors.TOPIC_AUTHORIZATION_FAILED), 0, RETRY_MS)
        reported = member.take_reported()
        assert reported is not None and reported.error is Errors.TOPIC_AUTHORIZATION_FAILED
        assert member.take_reported() is None
        assert member.is_in_group
        assert member.heartbeat_due_ms() == 5000

    def test_an_unknown_error_code_is_fatal(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        response = answer(0)
        response.error_code = 9999
        member.on_response(response, 0)
        assert state_of(member) is MembershipState.FATAL

    def test_a_member_without_partitions_joins_again_at_once(self) -> None:
        member = joined([])
        member.make_heartbeat()
        member.on_response(answer(0, error=Errors.FENCED_MEMBER_EPOCH), 0)
        assert state_of(member) is MembershipState.JOINING

    @pytest.mark.parametrize("way", ["fenced", "not polled", "left", "refused"])
    def test_a_new_membership_keeps_no_state_of_the_last_one(self, way: str) -> None:
        """The first heartbeat and the reaction to its response are those of a new member."""
        member = joined([0])
        first = Membership("g", "m", rebalance_timeout_ms=60_000)
        first.subscribe({"t"}, None)
        member.make_heartbeat()
        member.on_response(answer(2, assigned=[0, 1]), 100)  # an assignment that is never acknowledged
        member.make_heartbeat()
        if way == "fenced":
            member.on_response(answer(0, error=Errors.FENCED_MEMBER_EPOCH), 200)
            finish_steps(member)
        elif way == "refused":
            member.on_response(answer(0, error=Errors.INVALID_REQUEST), 200)
            member.leave()
            finish_steps(member)
            member.subscribe({"t"}, None)
        else:
            member.on_response(answer(2), 150)
            if way == "left":
                member.leave()
                finish_steps(member)
            else:
                member.poll_expired(200)
            member.make_heartbeat()
            member.on_response(answer(-1), 200)
            if way == "left":
                member.subscribe({"t"}, None)
            else:
                finish_steps(member)
                member.polled()
        assert state_of(member) is MembershipState.JOINING
        assert not member.may_commit
        assert (member.heartbeat_due_ms() or 0) <= 200
        assert member.make_heartbeat() == first.make_heartbeat()
        member.on_response(answer(7, assigned=[]), 300)
        assert (member.state, member.heartbeat_due_ms()) == (MembershipState.STABLE, 5300)

    def test_a_fatal_error_while_leaving_changes_nothing(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.leave()
        member.on_response(answer(0, error=Errors.INVALID_REQUEST), 0)
        assert state_of(member) is MembershipState.PREPARE_LEAVING
        assert member.fatal_error is None

    def test_a_fatal_error_of_a_stale_member(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.poll_expired(100)
        member.on_response(answer(0, error=Errors.INVALID_REQUEST), 100)
        assert state_of(member) is MembershipState.FATAL
        assert member.fatal_error is not None
        assert member.heartbeat_due_ms() is None


class TestLeave:
    def test_the_epoch_of_a_late_response_is_used_for_the_last_commit(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.leave()
        member.on_response(answer(5), 0)
        assert (member.member_epoch, member.may_commit) == (5, True)

    def test_a_member_that_has_not_joined_cannot_commit(self) -> None:
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        assert not member.may_commit
        member.make_heartbeat()
        assert not member.may_commit

    @pytest.mark.parametrize(
        ("instance_id", "static_stays", "epoch"),
        [(None, True, LEAVE_EPOCH), ("i", True, LEAVE_STATIC_EPOCH), ("i", False, LEAVE_EPOCH)],
    )
    def test_leave_revokes_and_sends_the_leave_epoch(
        self, instance_id: str | None, static_stays: bool, epoch: int
    ) -> None:
        member = joined([0, 1], instance_id=instance_id)
        member.leave(static_stays=static_stays)
        assert state_of(member) is MembershipState.PREPARE_LEAVING
        assert member.may_commit
        assert member.heartbeat_due_ms() == 5000
        assert finish_steps(member) == [(StepKind.REVOKE, {0, 1})]
        assert state_of(member) is MembershipState.LEAVING
        assert member.heartbeat_due_ms() == 0
        request = member.make_heartbeat()
        assert (request.member_epoch, request.instance_id) == (epoch, instance_id)
        member.on_failure(NETWORK, 0, RETRY_MS)
        assert member.is_unsubscribed
        member.subscribe({"t"}, None)
        assert member.make_heartbeat().member_epoch == 0

    def test_leave_before_the_first_heartbeat(self) -> None:
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        member.leave()
        assert member.is_unsubscribed

    def test_leave_while_joining(self) -> None:
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        member.make_heartbeat()
        member.leave()
        assert state_of(member) is MembershipState.LEAVING
        member.on_response(answer(1, assigned=[0]), 0)
        assert state_of(member) is MembershipState.LEAVING
        assert member.make_heartbeat().member_epoch == LEAVE_EPOCH

    def test_a_leaving_member_is_fenced(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.leave()
        member.on_response(answer(0, error=Errors.UNKNOWN_MEMBER_ID), 0)
        assert member.heartbeat_due_ms() is None
        assert finish_steps(member) == [(StepKind.LOSE, {0})]
        assert member.is_unsubscribed


class TestPollInterval:
    @pytest.mark.parametrize(("instance_id", "epoch"), [(None, LEAVE_EPOCH), ("i", LEAVE_STATIC_EPOCH)])
    def test_a_member_leaves_without_polls_and_joins_at_the_next_poll(
        self, instance_id: str | None, epoch: int
    ) -> None:
        member = joined([0], instance_id=instance_id)
        member.poll_expired(100)
        assert state_of(member) is MembershipState.STALE
        assert not member.may_commit
        assert member.make_heartbeat().member_epoch == epoch
        member.on_response(answer(epoch), 100)
        member.polled()
        assert state_of(member) is MembershipState.STALE
        assert finish_steps(member) == [(StepKind.LOSE, {0})]
        member.polled()
        assert state_of(member) is MembershipState.JOINING

    def test_a_response_after_the_poll_interval(self) -> None:
        member = joined([0])
        member.make_heartbeat()
        member.poll_expired(100)
        member.on_response(answer(5, assigned=[0, 1]), 110)
        assert state_of(member) is MembershipState.STALE
        assert member.make_heartbeat().member_epoch == LEAVE_EPOCH


class MembersAndCoordinator(RuleBasedStateMachine):
    """Several members of one group. Requests and responses may be lost, and the coordinator may restart."""

    members = Bundle("members")

    @initialize()
    def start(self) -> None:
        self.context = GroupContext({"a": 3, "b": 2})
        self.all: list[Membership] = []

    @rule(target=members, is_static=st.booleans(), both=st.booleans())
    @precondition(lambda self: len(self.all) < 4)
    def add(self, is_static: bool, both: bool) -> Membership:
        number = len(self.all)
        member = Membership("g", f"m{number}", instance_id=f"i{number}" if is_static else None)
        member.subscribe({"a", "b"} if both else {"a"}, None)
        self.all.append(member)
        return member

    @rule(member=members, loss=st.sampled_from(["", "", "", "request", "answer"]))
    def heartbeat(self, member: Membership, loss: str) -> None:
        if member.heartbeat_due_ms() is None:
            return
        request = member.make_heartbeat()
        assert request.member_epoch != 0 or request.topic_partitions == []
        now_ms = self.context.now_ms
        if loss == "request":
            member.on_failure(NETWORK, now_ms, RETRY_MS)
            return
        response = self._ask(request)
        if loss == "answer":
            member.on_failure(NETWORK, now_ms, RETRY_MS)
        else:
            member.on_response(response, now_ms, RETRY_MS)

    def _ask(self, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
        try:
            return self.context.run(
                lambda context: self.context.shard.consumer_group_heartbeat(context, request), api_version=1
            )
        except KafkaError as error:
            return ConsumerGroupHeartbeatResponse(error_code=error.error)

    @rule(member=members)
    def do_step(self, member: Membership) -> None:
        owned, target = member.owned, member.target
        step = member.next_step(self.context.image.topics_by_id.keys())
        if step is None:
            return
        if step.kind is StepKind.ASSIGN:
            assert step.partitions <= target - owned
        else:
            assert step.partitions <= owned
        member.step_done(step)

    @rule(member=members)
    def leave(self, member: Membership) -> None:
        member.leave()

    @rule(member=members, both=st.booleans())
    def subscribe(self, member: Membership, both: bool) -> None:
        if member.is_in_group or member.is_unsubscribed:
            member.subscribe({"a", "b"} if both else {"a"}, None)

    @rule(member=members)
    def poll_expires(self, member: Membership) -> None:
        member.poll_expired(self.context.now_ms)

    @rule(member=members)
    def poll(self, member: Membership) -> None:
        member.polled()

    @rule()
    def restart(self) -> None:
        self.context.restart()

    @rule(count=st.integers(1, 6))
    def grow(self, count: int) -> None:
        self.context.update_metadata(self.context.topics | {"a": max(count, self.context.topics["a"])})

    @invariant()
    def nobody_shares_a_partition(self) -> None:
        """No two members own a partition. Stale and fenced members do not count: they process no more records."""
        holding = [member for member in self.all if member.state not in (MembershipState.STALE, MembershipState.FENCED)]
        held = [partition for member in holding for partition in member.owned]
        assert len(held) == len(set(held))

    @invariant()
    def a_settled_member_owns_its_target(self) -> None:
        for member in self.all:
            if member.state in (MembershipState.STABLE, MembershipState.ACKNOWLEDGING):
                assert member.owned == member.target
            if member.state in (MembershipState.UNSUBSCRIBED, MembershipState.JOINING, MembershipState.LEAVING):
                assert not member.owned

    def teardown(self) -> None:
        """Without faults the group converges: stable members own all partitions of the subscribed topics."""
        if not hasattr(self, "all"):
            return
        for _ in range(16):
            # In the end the sessions of members that left without a heartbeat have expired.
            self.context.sleep(5000)
            for member in self.all:
                self.poll(member)
                self.heartbeat(member, "")
                for _ in range(3):
                    self.do_step(member)
                self.nobody_shares_a_partition()
        joined = [member for member in self.all if member.state in IN_GROUP]
        assert all(member.state is MembershipState.STABLE for member in joined), [member.state for member in joined]
        owned = {partition for member in joined for partition in member.owned}
        topics = {name for member in joined for name in member.subscribed_names}
        expected = {
            TopicIdPartition(self.context.topic_id(name), partition)
            for name in topics
            for partition in range(self.context.topics[name])
        }
        assert owned == expected


MembersAndCoordinator.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMembersAndCoordinator = MembersAndCoordinator.TestCase
