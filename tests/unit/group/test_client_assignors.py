# SPDX-License-Identifier: Apache-2.0
"""Client-side assignors of KIP-848: offers, the choice of assignor and member, PrepareAssignment, InstallAssignment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import pytest

from kcoord.coordinator.group.consumer.client_assignors import (
    ClientAssignor,
    Offer,
    OfferKind,
    asks_for_an_assignment,
    check_client_assignors,
    check_joining,
    select,
)
from kcoord.coordinator.group.consumer.group import ConsumerGroup, FailedComputations, offer_of
from kcoord.coordinator.group.group import GroupTimer
from kcoord.runtime.result import TimerKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)
from tests.unit.group.group_context import GroupContext, Waiting

Targets = dict[str, dict[str, list[int]]]

ENABLED = {"kcoord.client.assignors.enable": "true"}
TIMEOUT_MS = 10_000


def offered(
    name: str = "x", lowest: int = 0, highest: int = 1, version: int = 1, *, reason: int = 0, metadata: bytes = b""
) -> ClientAssignor:
    return ClientAssignor(name, lowest, highest, reason, version, metadata)


def offer(*assignors: ClientAssignor, kind: OfferKind = OfferKind.PRESENT) -> Offer:
    return Offer(kind, tuple((a.name, a.minimum_version, a.maximum_version, a.metadata_version) for a in assignors))


def selected(*offers: Offer | None) -> str | None:
    selection = select(Counter(offers))
    return None if selection is None else selection.name


# The choice of the assignor.


def test_members_vote_for_their_first_assignor_that_all_others_have() -> None:
    x, y, z = offered("x"), offered("y"), offered("z")
    assert selected(offer(x, y), offer(y, x), offer(y, x)) == "y"
    assert selected(offer(x, y), offer(y, x)) == "x"
    assert selected(offer(z, x), offer(z, y, x)) == "z"
    assert selected(offer(z, y), offer(x, y)) == "y"


def test_the_broker_computes_if_no_assignor_is_common_to_all_members() -> None:
    assert selected() is None
    assert selected(None) is None
    assert selected(offer(offered("x")), None) is None
    assert selected(offer(offered("x")), offer(offered("y"))) is None
    assert selected(offer(offered("x", 0, 1, 0)), offer(offered("x", 2, 3, 2))) is None


def test_only_members_that_read_all_metadata_can_compute() -> None:
    old, new = offer(offered(version=1)), offer(offered("x", 0, 2, 2))
    selection = select(Counter([old, old, new]))
    assert selection is not None
    assert (selection.lowest, selection.highest, selection.able) == (1, 2, 1)
    assert selection.can_compute(new)
    assert not selection.can_compute(old)
    # A range that nobody covers.
    assert selected(offer(offered("x", 0, 1, 0)), offer(offered("x", 1, 2, 2))) is None


def test_classic_members_and_members_that_are_away_do_not_compute() -> None:
    classic = Offer(OfferKind.CLASSIC, (("x", -1, -1, -1),))
    reader = offer(offered("x", -1, 2, 2))
    selection = select(Counter([classic, reader]))
    assert selection is not None
    assert selection.able == 1
    assert not selection.can_compute(classic)
    assert selected(classic, offer(offered("x", 0, 2, 2))) is None
    assert selected(classic) is None
    away = offer(offered("x", 0, 2, 2), kind=OfferKind.AWAY)
    selection = select(Counter([away, offer(offered("x", 0, 2, 1))]))
    assert selection is not None
    assert selection.able == 1
    assert selected(away) is None


def test_a_member_whose_versions_fit_nobody_is_refused() -> None:
    group = Counter[Offer | None]([offer(offered("x", 0, 1, 1))])
    with pytest.raises(KafkaError) as refused:
        check_joining(group, offer(offered("x", 2, 3, 2)))
    assert refused.value.error is Errors.UNSUPPORTED_ASSIGNOR
    check_joining(group, offer(offered("y", 2, 3, 2)))
    check_joining(group, offer(offered("x", 1, 3, 2)))
    check_joining(Counter([None]), offer(offered("x", 2, 3, 2)))


@pytest.mark.parametrize(
    ("assignors", "text"),
    [
        ([offered(" ")], "Name"),
        ([offered("x"), offered("x")], "twice"),
        ([offered("x", -2, 1)], "-2 to 1"),
        ([offered("x", -1, -1, -1)], "-1 to -1"),
        ([offered("x", 2, 1)], "2 to 1"),
        ([offered("x", 0, 1, 2)], "MetadataVersion 2"),
        ([offered("x", 0, 1, -1)], "MetadataVersion -1"),
        ([offered(f"x{i}") for i in range(17)], "17 assignors"),
        ([offered("x", metadata=b"12345"), offered("y", metadata=b"123456")], "11 bytes"),
    ],
)
def test_invalid_assignors_are_refused(assignors: Sequence[ClientAssignor], text: str) -> None:
    with pytest.raises(KafkaError, match=text) as refused:
        check_client_assignors(assignors, 10)
    assert refused.value.error is Errors.INVALID_REQUEST


def test_the_smallest_and_largest_assignors_are_accepted() -> None:
    check_client_assignors([offered("x", -1, 0, -1), offered("y", 0, 0, 0, metadata=b"1234567890")], 10)
    check_client_assignors([offered(f"x{i}") for i in range(16)], 0)


def test_which_changes_ask_for_an_assignment() -> None:
    before = (offered(metadata=b"1"),)
    asks = (offered(metadata=b"1", reason=4),)
    assert not asks_for_an_assignment(before, (offered(metadata=b"1"),))
    assert asks_for_an_assignment(before, asks)
    assert not asks_for_an_assignment(asks, asks)
    assert not asks_for_an_assignment(asks, before)
    for after in (
        (),
        (offered(metadata=b"2"),),
        (offered("x", 0, 1, 0, metadata=b"1"),),
        (offered("x", 0, 2, metadata=b"1"),),
        (offered("x", -1, 1, metadata=b"1"),),
        (*before, offered("y")),
    ):
        assert asks_for_an_assignment(before, after)
    assert asks_for_an_assignment((offered("x"), offered("y")), (offered("y"), offered("x")))


# The coordinator.


class ClientContext(GroupContext):
    """A shard with client-side assignors and topic t, and what members do to compute a target."""

    def __init__(self, partitions: int = 4, configs: dict[str, str] | None = None) -> None:
        super().__init__({"t": partitions}, ENABLED | (configs or {}))

    @property
    def group(self) -> ConsumerGroup:
        group = self.shard.group("g")
        assert isinstance(group, ConsumerGroup)
        return group

    def enter(
        self, member: str, *assignors: ClientAssignor, instance: str | None = None
    ) -> ConsumerGroupHeartbeatResponse:
        return self.join(
            "g", member, ["t"], assignor=None, client_assignors=assignors, instance=instance,
            rebalance_timeout_ms=TIMEOUT_MS,
        )  # fmt: skip

    def beat(self, member: str, assignors: Sequence[ClientAssignor] | None = None) -> ConsumerGroupHeartbeatResponse:
        """Sends a heartbeat in which the member owns what it has."""
        present = self.group.members[member]
        owned = {self.image.topics_by_id[t].name: sorted(partitions) for t, partitions in present.assigned.items()}
        return self.heartbeat("g", member, present.member_epoch, owned=owned, client_assignors=assignors)

    def answer(self, waiting: object) -> object:
        """Runs the tasks and returns the response that a request waits for."""
        assert isinstance(waiting, Waiting)
        self.run_tasks()
        return waiting.answer

    def prepare(self, member: str, epoch: int | None = None) -> ConsumerGroupPrepareAssignmentResponse:
        request = ConsumerGroupPrepareAssignmentRequest(
            group_id="g", member_id=member, member_epoch=self._epoch(member) if epoch is None else epoch
        )
        response = self.answer(self.run(lambda context: self.shard.prepare_assignment(context, request), 0))
        assert isinstance(response, ConsumerGroupPrepareAssignmentResponse)
        return response

    def install(
        self,
        member: str,
        group_epoch: int,
        targets: Targets,
        *,
        error: int = 0,
        version: int = 1,
        metadata: bytes = b"",
        epoch: int | None = None,
    ) -> ConsumerGroupInstallAssignmentResponse:
        request = self.install_request(member, group_epoch, targets, error, version, metadata, epoch)
        response: object = self.run(lambda context: self.shard.install_assignment(context, request), 0)
        if isinstance(response, Waiting):
            response = self.answer(response)
        assert isinstance(response, ConsumerGroupInstallAssignmentResponse)
        return response

    def install_request(
        self, member: str, group_epoch: int, targets: Targets, error: int, version: int, metadata: bytes,
        epoch: int | None,
    ) -> ConsumerGroupInstallAssignmentRequest:  # fmt: skip
        request = ConsumerGroupInstallAssignmentRequest
        return request(
            group_id="g",
            member_id=member,
            member_epoch=self._epoch(member) if epoch is None else epoch,
            group_epoch=group_epoch,
            error=error,
            members=[
                request.Member(
                    member_id=member_id,
                    partitions=[
                        request.TopicPartitions(topic_id=self.topic_id(topic), partitions=partitions)
                        for topic, partitions in topics.items()
                    ],
                    metadata_version=version,
                    metadata_bytes=metadata,
                )
                for member_id, topics in targets.items()
            ],
        )

    def compute(self, member: str, targets: Targets, **more: int | bytes) -> None:
        """Prepares and installs, as a member does that was asked."""
        prepared = self.prepare(member)
        assert self.install(member, prepared.group_epoch, targets, **more).error_code == 0  # type: ignore[arg-type]

    def targets(self) -> Targets:
        return {
            member_id: {self.image.topics_by_id[t].name: sorted(partitions) for t, partitions in target.items()}
            for member_id, target in self.group.target_assignment.items()
        }

    def _epoch(self, member: str) -> int:
        present = self.group.members.get(member)
        return 0 if present is None else present.member_epoch


def with_two_members(configs: dict[str, str] | None = None) -> ClientContext:
    """A and B offer x; A has computed a target, and nobody is asked."""
    context = ClientContext(configs=configs)
    context.enter("A", offered())
    context.compute("A", {"A": {"t": [0, 1, 2, 3]}})
    context.beat("A")
    context.enter("B", offered())
    assert context.beat("A").should_compute_assignment
    context.compute("A", {"A": {"t": [0, 1]}, "B": {"t": [2, 3]}})
    for member in ("A", "A", "B", "A"):
        context.beat(member)
    return context


def test_the_first_member_computes_its_own_assignment() -> None:
    context = ClientContext()
    joined = context.enter("A", offered(metadata=b"in"))
    assert (joined.error_code, joined.member_epoch, joined.should_compute_assignment) == (0, 1, True)
    assert context.assigned(joined) == {}
    assert (context.group.group_epoch, context.group.assignment_epoch) == (2, 1)
    prepared = context.prepare("A")
    assert (prepared.error_code, prepared.group_epoch, prepared.assignor_name) == (0, 2, "x")
    (member,) = prepared.members
    assert (member.member_id, member.member_epoch, member.subscribed_topic_ids) == ("A", 1, [context.topic_id("t")])
    assert (member.assignor.metadata_version, member.assignor.metadata_bytes) == (1, b"in")
    (topic,) = prepared.topics
    assert (topic.topic_name, topic.num_partitions) == ("t", 4)
    assert context.shard.count_computations() == 1
    context.sleep(30)
    assert context.install("A", 2, {"A": {"t": [3, 1, 0, 2]}}, version=0, metadata=b"out").error_code == 0
    assert (context.shard.count_computations(), context.shard.counters.client_computation_ms) == (0, 30)
    answer = context.beat("A")
    assert (answer.member_epoch, answer.should_compute_assignment) == (2, False)
    assert answer.assignment is not None
    assert context.assigned(answer) == {"t": [0, 1, 2, 3]}
    assert (answer.assignment.metadata_version, answer.assignment.metadata_bytes) == (0, b"out")
    assert answer.assignment.assignor_name == "x"
    assert context.shard.counters.client_computations == Counter({"installed": 1})
    described = context.describe("g")
    assert (described.assignor_name, described.assignor_side, described.computing_member_id) == ("x", 1, "")
    assert described.members[0].assignment.metadata_bytes == b"out"
    assert described.members[0].client_assignors[0].metadata_bytes == b"in"
    context.restart()
    assert context.describe("g") == described


def test_the_assignor_of_an_assignment_has_a_name_if_the_target_is_the_present_one() -> None:
    context = with_two_members()
    context.enter("C", offered())
    assert context.beat("B").should_compute_assignment
    context.compute("B", {"A": {"t": [0, 1]}, "B": {"t": [2]}, "C": {"t": [3]}})
    behind = context.beat("B")
    assert behind.assignment is not None
    assert (behind.member_epoch < context.group.assignment_epoch, behind.assignment.assignor_name) == (True, "")
    moved = context.beat("B")
    assert moved.assignment is not None
    assert (moved.member_epoch, moved.assignment.assignor_name) == (context.group.assignment_epoch, "x")
    # D cannot compute with x, so the broker computes in D's first heartbeat.
    joined = context.enter("D", offered("y"))
    assert joined.assignment is not None
    assert (joined.member_epoch, joined.assignment.assignor_name) == (context.group.assignment_epoch, "")
    back = context.beat("A")
    assert back.assignment is None or back.assignment.assignor_name == ""


def test_without_the_key_nothing_of_it_happens() -> None:
    context = GroupContext({"t": 4})
    joined = context.join("g", "A", ["t"], assignor=None, client_assignors=[offered()])
    assert (joined.member_epoch, joined.should_compute_assignment) == (2, False)
    assert context.assigned(joined) == {"t": [0, 1, 2, 3]}
    assert not context.describe("g").members[0].client_assignors


def test_members_that_have_offers_in_the_log_lose_them_if_the_key_is_switched_off() -> None:
    context = with_two_members()
    context.config.kcoord_client_assignors_enable = False
    context.update_metadata({"t": 5})
    answer = context.beat("A")
    assert not answer.should_compute_assignment
    assert context.group.members["A"].client_assignors == ()
    assert context.group.assignment_epoch == context.group.group_epoch


def test_descriptions_without_the_key_have_nothing_of_what_the_log_has() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    context.compute("A", {"A": {"t": [0, 1, 2, 3, 4]}}, error=3, metadata=b"m")
    context.beat("A")
    context.config.kcoord_client_assignors_enable = False
    context.restart()
    described = context.describe("g")
    assert (described.assignor_name, described.assignor_side) == ("uniform", 0)
    none = ConsumerGroupDescribeResponse.Assignment()
    for member in described.members:
        assert not member.client_assignors
        for assignment in (member.assignment, member.target_assignment):
            shown = (assignment.error, assignment.metadata_version, assignment.metadata_bytes)
            assert shown == (none.error, none.metadata_version, none.metadata_bytes)


def test_the_asked_member_is_told_until_it_has_installed_and_others_are_not() -> None:
    context = with_two_members()
    context.update_metadata({"t": 6})
    assert context.beat("B").should_compute_assignment
    assert not context.beat("A").should_compute_assignment
    assert context.beat("B").should_compute_assignment
    described = context.describe("g")
    assert (described.computing_member_id, described.computing_until_ms) == ("B", context.now_ms + TIMEOUT_MS)
    context.compute("B", {"A": {"t": [0, 1, 4]}, "B": {"t": [2, 3, 5]}})
    assert not context.beat("B").should_compute_assignment


def test_members_with_the_same_subscription_share_its_topics_in_the_prepared_group() -> None:
    """A list for each member would be ten million ids for 10,000 members and 1,000 topics."""
    context = with_two_members()
    context.enter("C", offered())
    assert context.beat("A").should_compute_assignment
    first, second, third = context.prepare("A").members
    assert first.subscribed_topic_ids == [context.topic_id("t")]
    assert first.subscribed_topic_ids is second.subscribed_topic_ids is third.subscribed_topic_ids


def test_a_member_that_joins_is_asked_only_if_no_other_can_compute() -> None:
    context = with_two_members()
    assert not context.enter("C", offered()).should_compute_assignment
    assert context.beat("A").should_compute_assignment
    context = ClientContext()
    context.enter("A", offered(version=1))
    context.compute("A", {"A": {"t": [0, 1, 2, 3]}})
    # A does not read version 2.
    assert context.enter("B", offered("x", 0, 2, 2)).should_compute_assignment


@pytest.mark.parametrize(
    ("targets", "version", "metadata", "text"),
    [
        ({"A": {"t": [0, 1, 2]}}, 1, b"", "t-3 has no owner"),
        ({"A": {"t": [0, 1, 2, 3, 3]}}, 1, b"", "t-3 has two owners"),
        ({"A": {"t": [0, 1, 2, 3]}, "B": {"t": [1]}}, 1, b"", "t-1 has two owners, A and B"),
        ({"A": {"t": [0, 1, 2, 3, 4]}}, 1, b"", "no partition 4"),
        ({"A": {"t": [-1, 0, 1, 2, 3]}}, 1, b"", "no partition -1"),
        ({"A": {"t": [0, 1, 2, 3], "u": [0]}}, 1, b"", "does not subscribe"),
        ({"Z": {"t": [0, 1, 2, 3]}}, 1, b"", "member Z is not in the group"),
        ({"A": {"t": [0, 1, 2, 3]}}, 2, b"", "versions 0 to 1, not 2"),
        ({"A": {"t": [0, 1, 2, 3]}}, 1, b"123456", "6 bytes"),
        ({}, 1, b"", "t-0 has no owner"),
    ],
)
def test_an_invalid_assignment_changes_nothing_and_the_next_member_is_asked(
    targets: Targets, version: int, metadata: bytes, text: str
) -> None:
    context = with_two_members({"kcoord.client.assignor.metadata.max.bytes": "5"})
    context.update_metadata({"t": 4, "u": 1})
    context.enter("C", offered())
    assert context.beat("A").should_compute_assignment
    prepared, before = context.prepare("A"), context.shard.hard_state()
    refused = context.install("A", prepared.group_epoch, targets, version=version, metadata=metadata)
    assert refused.error_code == Errors.INVALID_ASSIGNMENT
    assert text in (refused.error_message or "")
    assert context.shard.hard_state() == before
    assert not context.beat("A").should_compute_assignment
    assert context.beat("B").should_compute_assignment
    described = context.describe("g")
    assert described.failed_computations == 1
    assert text in described.assignor_error


def test_a_member_that_is_there_twice_is_invalid() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    prepared = context.prepare("A")
    request = context.install_request("A", prepared.group_epoch, {"A": {"t": [0, 1, 2, 3, 4]}}, 0, 1, b"", None)
    request.members += request.members
    answer = context.answer(context.run(lambda ctx: context.shard.install_assignment(ctx, request), 0))
    assert isinstance(answer, ConsumerGroupInstallAssignmentResponse)
    assert answer.error_code == Errors.INVALID_ASSIGNMENT
    assert answer.error_message == "The assignment is invalid: member A has two assignments."


def test_the_work_for_a_topic_that_is_there_many_times_is_linear() -> None:
    """A request of 4 MB can repeat a topic 180,000 times."""
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    prepared = context.prepare("A")
    request = context.install_request("A", prepared.group_epoch, {"A": {"t": []}}, 0, 1, b"", None)
    topic = request.members[0].partitions[0]
    request.members[0].partitions = [type(topic)(topic_id=topic.topic_id, partitions=[0])] * 100_000
    start_seconds = time.process_time()
    answer = context.answer(context.run(lambda ctx: context.shard.install_assignment(ctx, request), 0))
    took_seconds = time.process_time() - start_seconds
    assert isinstance(answer, ConsumerGroupInstallAssignmentResponse)
    assert answer.error_code == Errors.INVALID_ASSIGNMENT
    assert took_seconds < 2


def test_a_long_id_in_an_invalid_assignment_fits_into_all_responses() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    prepared = context.prepare("A")
    refused = context.install("A", prepared.group_epoch, {"x" * 0x7FFF: {}})
    assert refused.error_code == Errors.INVALID_ASSIGNMENT
    assert "member xxx" in (refused.error_message or "")
    assert refused.encode(0)
    described = context.describe("g")
    assert "member xxx" in described.assignor_error
    assert ConsumerGroupDescribeResponse(groups=[described]).encode(1)


def test_requests_that_do_not_fit_are_refused_in_this_order() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")

    def error_of(request: ConsumerGroupPrepareAssignmentRequest) -> Errors:
        with pytest.raises(KafkaError) as refused:
            context.run(lambda ctx: context.shard.prepare_assignment(ctx, request), 0)
        return refused.value.error

    def prepare(group: str = "g", member: str = "A", epoch: int = 0) -> ConsumerGroupPrepareAssignmentRequest:
        return ConsumerGroupPrepareAssignmentRequest(group_id=group, member_id=member, member_epoch=epoch)

    assert error_of(prepare(group="")) is Errors.INVALID_REQUEST
    assert error_of(prepare(member="")) is Errors.INVALID_REQUEST
    assert error_of(prepare(group="h", epoch=-1)) is Errors.INVALID_REQUEST
    assert error_of(prepare(group="h", member="Z")) is Errors.GROUP_ID_NOT_FOUND
    assert error_of(prepare(member="Z")) is Errors.UNKNOWN_MEMBER_ID
    assert error_of(prepare(member="B", epoch=99)) is Errors.STALE_MEMBER_EPOCH
    assert error_of(prepare(member="B", epoch=context.group.members["B"].member_epoch)) is Errors.UNKNOWN_MEMBER_ID


def test_a_member_that_cannot_use_the_assignor_chosen_meanwhile_gets_no_snapshot() -> None:
    context = ClientContext()
    context.enter("A", offered("y"), offered("x"))
    context.compute("A", {"A": {"t": [0, 1, 2, 3]}})
    context.beat("A")
    context.enter("Z", offered("x"))
    assert context.beat("A").should_compute_assignment
    context.enter("B", offered("y", 0, 2, 2), offered("x"))
    # All members have y now, but A does not read the metadata of B.
    context.heartbeat("g", "Z", -1)
    with pytest.raises(KafkaError) as refused:
        context.prepare("A")
    assert refused.value.error is Errors.UNKNOWN_MEMBER_ID
    assert context.shard.counters.client_computations["gone"] == 1
    assert not context.beat("A").should_compute_assignment
    assert context.beat("B").should_compute_assignment
    assert context.prepare("B").assignor_name == "y"


def test_an_assignment_without_its_prepared_epoch_is_invalid_and_the_computation_goes_on() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    epoch = context.group.group_epoch
    targets = {"A": {"t": [0, 1, 2, 3, 4]}}
    for prepares in (False, True):
        if prepares:
            context.prepare("A")
        with pytest.raises(KafkaError) as refused:
            context.install("A", epoch - prepares, targets)
        assert refused.value.error is Errors.INVALID_ASSIGNMENT
    assert context.install("A", epoch, targets).error_code == 0
    assert context.targets() == {"A": {"t": [0, 1, 2, 3, 4]}, "B": {}}


def test_an_install_that_is_sent_twice_succeeds_twice_and_writes_once() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    targets, epoch = {"A": {"t": [0, 1, 2, 3, 4]}}, context.prepare("A").group_epoch
    request = context.install_request("A", epoch, targets, 0, 1, b"", None)
    # The second request arrives while the first is checked, and the third after it.
    waiting = [context.run(lambda ctx: context.shard.install_assignment(ctx, request), 0) for _ in range(2)]
    context.run_tasks()
    for request_that_waits in waiting:
        answer = context.answer(request_that_waits)
        assert isinstance(answer, ConsumerGroupInstallAssignmentResponse)
        assert answer.error_code == 0
    length = len(context.log)
    assert context.install("A", epoch, targets).error_code == 0
    assert len(context.log) == length
    assert context.shard.counters.client_computations["installed"] == 3


def test_a_group_that_moves_on_during_the_computation_gets_the_target_and_asks_again() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    prepared = context.prepare("A")
    context.enter("C", offered())
    context.heartbeat("g", "B", -1)
    assert context.install("A", prepared.group_epoch, {"A": {"t": [0, 1]}, "B": {"t": [2, 3, 4]}}).error_code == 0
    assert context.group.assignment_epoch == prepared.group_epoch < context.group.group_epoch
    # B has left, and its partitions stay free until the next target.
    assert context.targets() == {"A": {"t": [0, 1]}}
    assert context.beat("A").should_compute_assignment
    context.compute("A", {"A": {"t": [0, 1]}, "C": {"t": [2, 3, 4]}})
    assert context.group.assignment_epoch == context.group.group_epoch


def test_a_static_successor_inherits_the_target_that_its_predecessor_gets() -> None:
    context = ClientContext()
    context.enter("A", offered())
    context.compute("A", {"A": {"t": [0, 1, 2, 3]}})
    context.enter("S1", offered(), instance="s")
    context.beat("A")
    prepared = context.prepare("A")
    context.heartbeat("g", "S1", -2, instance="s")
    context.enter("S2", offered(), instance="s")
    context.install("A", prepared.group_epoch, {"A": {"t": [0, 1]}, "S1": {"t": [2, 3]}}, metadata=b"m")
    assert context.targets() == {"A": {"t": [0, 1]}, "S2": {"t": [2, 3]}}
    assert context.group.target_metadata["S2"].data == b"m"


def test_an_error_of_the_assignor_keeps_the_targets_and_reaches_every_member() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    epoch = context.prepare("A").group_epoch
    before = context.targets()
    assert context.install("A", epoch, {}, error=7).error_code == 0
    assert context.targets() == before
    assert context.group.assignment_epoch == epoch
    for member in ("A", "B"):
        answer = context.beat(member)
        assert not answer.should_compute_assignment
        assert answer.assignment is not None
        assert (answer.assignment.error, answer.assignment.metadata_version) == (7, -1)
    assert context.shard.counters.client_computations["error"] == 1
    # The next target has no error any more.
    context.update_metadata({"t": 6})
    assert context.beat("B").should_compute_assignment
    context.compute("B", {"A": {"t": [0, 1, 4]}, "B": {"t": [2, 3, 5]}})
    answer = context.beat("A")
    assert answer.assignment is not None
    assert answer.assignment.error == 0


def test_a_member_that_fails_is_not_asked_again_in_the_round_and_rounds_are_further_and_further_apart() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    pauses = []
    for _ in range(7):
        assert context.beat("A").should_compute_assignment
        context.install("A", context.prepare("A").group_epoch, {}, error=-1)
        assert not context.beat("A").should_compute_assignment
        assert context.beat("B").should_compute_assignment
        # B says nothing, and its time passes.
        for _ in range(10):
            context.sleep(TIMEOUT_MS // 10)
            context.beat("A")
            context.heartbeat("g", "B", context.group.members["B"].member_epoch)
        began_ms = context.now_ms
        while not context.beat("A").should_compute_assignment:
            context.heartbeat("g", "B", context.group.members["B"].member_epoch)
            context.sleep(1_000)
            assert context.now_ms < began_ms + 100_000
        pauses.append(context.now_ms - began_ms)
        assert context.group.client_computation is not None
        context.group.client_computation.asked = None
    assert pauses == [2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
    assert context.shard.counters.client_computations["failed"] == 7
    assert context.shard.counters.client_computations["timeout"] == 7
    assert context.group.members.keys() == {"A", "B"}


def test_the_number_of_failures_has_a_limit_that_fits_into_descriptions() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    context.group.failed_computations = FailedComputations("x", 1_000, "", 0)
    context.install("A", context.prepare("A").group_epoch, {}, error=-1)
    assert context.describe("g").failed_computations == 1_000


def test_the_late_install_of_a_member_is_refused_and_it_stays_in_the_group() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    prepared = context.prepare("A")
    assert TimerKey(GroupTimer.CLIENT_ASSIGNOR, "g") in context.sleep(TIMEOUT_MS)
    with pytest.raises(KafkaError) as refused:
        context.install("A", prepared.group_epoch, {"A": {"t": [0, 1, 2, 3, 4]}})
    assert refused.value.error is Errors.UNKNOWN_MEMBER_ID
    assert "A" in context.group.members


@pytest.mark.parametrize("how", ["leaves", "is away", "is silent", "lacks the assignor", "reads too little"])
def test_a_computation_ends_with_what_its_member_can_no_longer_do(how: str) -> None:
    context = with_two_members({"group.consumer.session.timeout.ms": "45000"})
    context.enter("S", offered(), instance="s")
    context.beat("A")
    context.compute("A", {"A": {"t": [0, 1, 2, 3]}})
    context.update_metadata({"t": 5})
    context.heartbeat("g", "S", context.group.members["S"].member_epoch, instance="s", owned={})
    assert context.group.client_computation is not None
    asked = context.group.client_computation.asked
    assert asked is not None
    assert asked.member_id == "S"
    epoch, prepared = context.group.members["S"].member_epoch, context.prepare("S")
    if how == "leaves":
        context.heartbeat("g", "S", -1, instance="s")
    elif how == "is away":
        context.heartbeat("g", "S", -2, instance="s")
    elif how == "is silent":
        asked.deadline_ms += 10**9
        for _ in range(9):
            context.sleep(5_000)
            context.beat("A")
            context.beat("B")
        assert "S" not in context.group.members
    elif how == "lacks the assignor":
        beat_of_s(context, [offered("y"), offered("x")])
        beat_of_s(context, [offered("y")])
    else:
        context.beat("A", [offered("x", 0, 2, 2)])
    assert context.beat("A").should_compute_assignment or how in ("lacks the assignor", "is silent")
    if "S" in context.group.members:
        with pytest.raises(KafkaError) as refused:
            context.install("S", prepared.group_epoch, {"A": {"t": [0, 1, 2, 3, 4]}}, epoch=epoch)
        assert refused.value.error in (Errors.UNKNOWN_MEMBER_ID, Errors.STALE_MEMBER_EPOCH)
    assert (
        context.shard.counters.client_computations["gone"] + context.shard.counters.client_computations["superseded"]
        == 1
    )


def test_a_member_that_leaves_and_returns_has_to_be_asked_again() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    assert context.beat("A").should_compute_assignment
    prepared = context.prepare("A")
    context.heartbeat("g", "A", -1)
    # B can compute, so A is not asked when it joins.
    assert not context.enter("A", offered()).should_compute_assignment
    with pytest.raises(KafkaError) as refused:
        context.install("A", prepared.group_epoch, {"A": {"t": [0, 1, 2, 3, 4]}})
    assert refused.value.error is Errors.UNKNOWN_MEMBER_ID
    assert context.beat("B").should_compute_assignment
    assert context.shard.counters.client_computations["gone"] == 1


def test_a_member_that_failed_does_not_count_if_it_can_no_longer_compute() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    assert context.beat("A").should_compute_assignment
    context.install("A", context.prepare("A").group_epoch, {}, error=-1)
    context.beat("A", [offered("x", 0, 0, 0)])
    assert context.beat("B").should_compute_assignment, "it has not failed, and is the only one that can compute"


def test_a_member_that_returns_has_not_failed() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    context.sleep(TIMEOUT_MS)
    context.heartbeat("g", "A", -1)
    context.enter("A", offered())
    assert context.beat("A").should_compute_assignment


@pytest.mark.parametrize("release", ["4.3", "4.4"])
def test_an_empty_group_forgets_pauses_and_counts_the_computation_of_its_last_member(release: str) -> None:
    context = ClientContext(configs={"kcoord.release": release})
    context.restart()  # Only a loaded shard counts what it replays.
    assert context.enter("A", offered()).should_compute_assignment
    for _ in range(2):
        while not context.beat("A").should_compute_assignment:
            context.sleep(1_000)
        context.install("A", context.prepare("A").group_epoch, {}, error=-1)
    assert not context.beat("A").should_compute_assignment
    context.sleep(4_000)
    assert context.beat("A").should_compute_assignment
    context.install("A", context.prepare("A").group_epoch, {}, error=-1)
    context.beat("A")
    context.heartbeat("g", "A", -1)
    assert context.enter("B", offered()).should_compute_assignment
    context.heartbeat("g", "B", -1)
    context.enter("C", offered())
    assert context.shard.counters.client_computations == {"failed": 3, "gone": 1}


def test_a_member_that_missed_the_response_with_a_new_epoch_gets_its_metadata() -> None:
    context = with_two_members()
    epoch = context.group.assignment_epoch
    context.update_metadata({"t": 5})
    context.beat("A")
    context.compute("A", {"A": {"t": [0, 1, 4]}, "B": {"t": [2, 3]}}, metadata=b"new")
    for _ in range(2):
        answer = context.heartbeat("g", "B", epoch, owned={"t": [2, 3]})
        assert answer.member_epoch == epoch + 1
        assert answer.assignment is not None
        assert answer.assignment.metadata_bytes == b"new"


def beat_of_s(context: ClientContext, assignors: Sequence[ClientAssignor]) -> None:
    epoch = context.group.members["S"].member_epoch
    context.heartbeat("g", "S", epoch, instance="s", client_assignors=assignors)


def test_a_member_without_the_assignor_moves_the_group_to_the_broker_at_once() -> None:
    context = with_two_members()
    context.update_metadata({"t": 6})
    context.beat("A")
    prepared = context.prepare("A")
    joined = context.join("g", "C", ["t"], assignor="range")
    assert joined.error_code == 0
    assert context.group.assignment_epoch == context.group.group_epoch
    assert context.targets() == {"A": {"t": [0, 1]}, "B": {"t": [2, 3]}, "C": {"t": [4, 5]}}
    assert not context.group.target_metadata
    with pytest.raises(KafkaError):
        context.install("A", prepared.group_epoch, {"A": {"t": [0, 1, 2, 3, 4, 5]}})
    assert context.describe("g").assignor_side == 0
    # When it has left, the group returns to its client-side assignor.
    context.heartbeat("g", "C", -1)
    assert context.beat("A").should_compute_assignment


def test_with_the_fallback_the_broker_computes_after_a_round_and_says_so() -> None:
    context = with_two_members()
    context.group_configs = {"g": {"kcoord.client.assignor.fallback": "server"}}
    context.update_metadata({"t": 6})
    for member in ("A", "B"):
        assert context.beat(member).should_compute_assignment
        context.install(member, context.prepare(member).group_epoch, {}, error=-1)
    answer = context.beat("A")
    assert answer.assignment is not None
    assert answer.assignment.error == -2
    assert context.group.assignment_epoch == context.group.group_epoch
    assert sorted(p for topics in context.targets().values() for p in topics["t"]) == [0, 1, 2, 3, 4, 5]
    assert context.shard.counters.client_assignor_fallbacks == 1
    context.update_metadata({"t": 7})
    assert context.beat("B").should_compute_assignment
    assert context.describe("g").failed_computations == 0


def test_after_a_failover_a_member_is_asked_again() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    prepared = context.prepare("A")
    context.restart()
    with pytest.raises(KafkaError) as refused:
        context.install("A", prepared.group_epoch, {"A": {"t": [0, 1, 2, 3, 4]}})
    assert refused.value.error is Errors.UNKNOWN_MEMBER_ID
    assert context.beat("B").should_compute_assignment


def test_a_null_list_keeps_the_assignors_and_a_server_assignor_replaces_them() -> None:
    context = with_two_members()
    epoch = context.group.group_epoch
    context.beat("A")
    assert context.group.group_epoch == epoch
    context.beat("A", [offered(reason=3)])
    assert context.group.group_epoch == epoch + 1
    context.beat("A", [offered()])
    assert context.group.group_epoch == epoch + 1
    present = context.group.members["A"]
    context.heartbeat("g", "A", present.member_epoch, assignor="uniform")
    assert assignors_of(context, "A") == ("uniform", ())
    context.beat("A", [offered()])
    assert assignors_of(context, "A") == (None, (offered(),))
    with pytest.raises(KafkaError, match="both"):
        context.heartbeat("g", "A", present.member_epoch, assignor="uniform", client_assignors=[offered()])
    # A process that restarts without assignors has none.
    context.join("g", "A", ["t"], assignor=None)
    assert assignors_of(context, "A") == (None, ())


def assignors_of(context: ClientContext, member: str) -> tuple[str | None, tuple[ClientAssignor, ...]]:
    present = context.group.members[member]
    return present.server_assignor, present.client_assignors


def test_the_metadata_of_a_group_has_a_limit() -> None:
    context = with_two_members({"kcoord.client.assignor.group.metadata.max.bytes": "10"})
    context.beat("A", [offered(metadata=b"123456")])
    with pytest.raises(KafkaError) as refused:
        context.beat("B", [offered(metadata=b"12345")])
    assert refused.value.error is Errors.POLICY_VIOLATION
    context.beat("B", [offered(metadata=b"1234")])
    assert context.group.client_assignor_bytes == 10
    context.heartbeat("g", "A", -1)
    assert context.group.client_assignor_bytes == 4


def test_the_counts_of_offers_follow_the_members() -> None:
    context = with_two_members()
    context.enter("S", offered("y"), instance="s")
    context.heartbeat("g", "S", -2, instance="s")
    context.join("g", "C", ["t"], assignor=None)
    context.heartbeat("g", "B", -1)
    assert context.group.offers() == Counter(offer_of(member) for member in context.group.members.values())


def test_partitions_that_a_member_has_to_wait_for_are_pending() -> None:
    context = with_two_members()
    context.update_metadata({"t": 5})
    context.beat("A")
    context.compute("A", {"A": {"t": [2, 3]}, "B": {"t": [0, 1, 4]}}, metadata=b"m")
    answer = context.beat("B")
    # B revokes first, and so keeps its epoch and its metadata.
    assert context.assigned(answer) == {}
    assert answer.assignment is not None
    assert answer.assignment.metadata_bytes == b""
    assert pending(context, answer) == {"t": [0, 1, 4]}
    answer = context.beat("B")
    assert answer.member_epoch == context.group.group_epoch
    assert context.assigned(answer) == {"t": [4]}
    assert pending(context, answer) == {"t": [0, 1]}
    assert answer.assignment is not None
    assert answer.assignment.metadata_bytes == b"m"
    assert context.beat("B").assignment is None
    context.beat("A")
    context.beat("A")
    answer = context.beat("B")
    assert context.assigned(answer) == {"t": [0, 1, 4]}
    assert pending(context, answer) == {}


def pending(context: ClientContext, answer: ConsumerGroupHeartbeatResponse) -> dict[str, list[int]]:
    assert answer.assignment is not None
    return {
        context.image.topics_by_id[topic.topic_id].name: topic.partitions
        for topic in answer.assignment.pending_topic_partitions
    }
