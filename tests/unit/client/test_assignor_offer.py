# SPDX-License-Identifier: Apache-2.0
"""The offer of a member: what heartbeats have, and that every request for a new assignment makes a new group epoch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kcoord.client.assignors import Metadata, OfferedAssignor
from kcoord.client.consumer.assignor_offer import AssignorOffer, Offered
from kcoord.client.consumer.membership import Membership
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest
from tests.unit.client.test_membership import answer

ClientAssignor = ConsumerGroupHeartbeatRequest.ClientAssignor
NETWORK = KafkaError(Errors.NETWORK_EXCEPTION)


def offered(data: bytes = b"", *, reason: int = 0) -> Offered:
    return (OfferedAssignor("a", -1, 3, reason, Metadata(2, data)), OfferedAssignor("b", 0, 0, reason, Metadata(0)))


def fields(data: bytes = b"", *, reason: int = 0) -> list[ClientAssignor]:
    return [
        ClientAssignor(
            name="a", minimum_version=-1, maximum_version=3, reason=reason, metadata_version=2, metadata_bytes=data
        ),
        ClientAssignor(
            name="b", minimum_version=0, maximum_version=0, reason=reason, metadata_version=0, metadata_bytes=b""
        ),
    ]


def member_with(offer: AssignorOffer) -> Membership:
    member = Membership("g", "m", offer=offer)
    offer.update(offered())
    member.subscribe({"t"}, None)
    return member


class TestHeartbeats:
    def test_a_member_without_assignors_never_sends_the_field(self) -> None:
        member = Membership("g", "m")
        member.subscribe({"t"}, None)
        assert member.make_heartbeat().client_assignors is None

    def test_a_join_has_the_offer_and_the_next_heartbeat_has_not(self) -> None:
        member = member_with(AssignorOffer())
        assert member.make_heartbeat().client_assignors == fields()
        member.on_response(answer(1), 0)
        assert member.heartbeat_due_ms() == 5000
        assert member.make_heartbeat().client_assignors is None

    def test_a_heartbeat_after_an_error_repeats_the_offer(self) -> None:
        member = member_with(AssignorOffer())
        member.make_heartbeat()
        member.on_response(answer(1), 0)
        member.make_heartbeat()
        member.on_failure(NETWORK, 10, 100)
        assert member.make_heartbeat().client_assignors == fields()

    def test_a_change_is_sent_at_once(self) -> None:
        offer = AssignorOffer()
        member = member_with(offer)
        member.make_heartbeat()
        offer.update(offered(b"new"))
        member.on_response(answer(1), 0)
        assert member.heartbeat_due_ms() == 0
        assert member.make_heartbeat().client_assignors == fields(b"new")
        member.on_response(answer(1), 10)
        offer.update(offered(b"new"))
        assert member.heartbeat_due_ms() == 5010

    def test_a_member_that_leaves_offers_nothing(self) -> None:
        member = member_with(AssignorOffer())
        member.make_heartbeat()
        member.on_response(answer(1), 0)
        member.leave()
        assert member.make_heartbeat().client_assignors is None

    def test_a_request_for_an_assignment_sends_the_reason_once(self) -> None:
        offer = AssignorOffer()
        member = member_with(offer)
        member.make_heartbeat()
        member.on_response(answer(1), 0)
        offer.request_reassignment(5)
        assert member.heartbeat_due_ms() == 0
        assert member.make_heartbeat().client_assignors == fields(reason=5)
        member.on_response(answer(1), 0)
        assert member.heartbeat_due_ms() == 5000
        assert member.make_heartbeat().client_assignors is None

    def test_the_next_change_has_reason_0(self) -> None:
        offer = AssignorOffer()
        member = member_with(offer)
        offer.request_reassignment(5)
        member.make_heartbeat()
        member.on_response(answer(1), 0)
        offer.update(offered(b"new"))
        assert member.make_heartbeat().client_assignors == fields(b"new")

    def test_a_second_request_sends_0_and_then_the_reason(self) -> None:
        offer = AssignorOffer()
        member = member_with(offer)
        member.make_heartbeat()
        member.on_response(answer(1), 0)
        sent = []
        for _ in range(2):
            offer.request_reassignment(5)
            while member.heartbeat_due_ms() == 0:
                sent.append(member.make_heartbeat().client_assignors)
                member.on_response(answer(1), 0)
        assert sent == [fields(reason=5), fields(reason=0), fields(reason=5)]


class ModelGroup:
    """The rule of the group epoch: it grows if a member joins or changes its offer, unless a reason goes back to 0."""

    def __init__(self) -> None:
        self.epoch = 0
        self.offer: list[ClientAssignor] | None = None

    def on_heartbeat(self, request: ConsumerGroupHeartbeatRequest) -> None:
        new = request.client_assignors
        if self.offer is None:
            assert new is not None
            self.epoch += 1
        elif new is not None:
            for old_assignor, assignor in zip(self.offer, new, strict=True):
                if assignor.metadata_bytes != old_assignor.metadata_bytes or (
                    assignor.reason not in (0, old_assignor.reason)
                ):
                    self.epoch += 1
                    break
        if new is not None:
            self.offer = new


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("request"), st.integers(1, 2)),
            st.tuples(st.just("update"), st.integers(0, 2)),
            st.tuples(st.sampled_from(["heartbeat", "heartbeat", "request lost", "response lost"]), st.just(0)),
        ),
        max_size=40,
    )
)
def test_every_request_makes_a_new_epoch(events: list[tuple[str, int]]) -> None:
    """The last request or change is followed by a new epoch, whatever gets lost."""
    offer, group = AssignorOffer(), ModelGroup()
    member = member_with(offer)
    epoch_before: int | None = None
    data = b""

    def heartbeat(lost: str = "") -> None:
        request = member.make_heartbeat()
        if lost != "request lost":
            group.on_heartbeat(request)
        if lost:
            member.on_failure(NETWORK, 0, 0)
        else:
            member.on_response(answer(1), 0)

    heartbeat()
    for event, number in events:
        if event == "request":
            epoch_before = group.epoch
            offer.request_reassignment(number)
        elif event == "update":
            data = bytes([number])
            offer.update(offered(data))
        else:
            heartbeat(lost="" if event == "heartbeat" else event)
    for _ in range(4):
        heartbeat()
    if epoch_before is not None:
        assert group.epoch > epoch_before
    assert group.offer is not None and group.offer[0].metadata_bytes == data
    settled = group.epoch
    heartbeat()
    assert group.epoch == settled and member.heartbeat_due_ms() == 5000
