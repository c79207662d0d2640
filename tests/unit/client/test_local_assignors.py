# SPDX-License-Identifier: Apache-2.0
"""Consumers with local assignors: settings, computations and assignments, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import EntryPoint
from typing import TypeVar, Unpack

import pytest

from kcoord.client import (
    AssignmentMemberSpec,
    AssignmentSpec,
    AssignmentTopicMetadata,
    AssignorException,
    AssignorMetadata,
    ConfigException,
    Consumer,
    ConsumerConfig,
    ConsumerRebalanceListener,
    Errors,
    GroupAssignment,
    IllegalStateException,
    KafkaError,
    LagAssignor,
    MemberAssignment,
    Metadata,
    OffsetAndMetadata,
    PartitionAssignor,
    TopicPartition,
    UnsupportedVersionException,
)
from kcoord.client.config import ConsumerOptions
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)
from tests.unit.client.fake_broker import Answer
from tests.unit.client.records_broker import ONE, TOPIC, TOPIC_ID, ZERO, RecordsBroker
from tests.unit.client.test_group_member import poll_until
from tests.unit.client.virtual_loop import now_ms, quiet

pytestmark = pytest.mark.usefixtures("no_surprise")

T = TypeVar("T")
HEARTBEAT = ApiKey.CONSUMER_GROUP_HEARTBEAT
PREPARE = ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT
INSTALL = ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT
PENDING_ID = b"P" * 16


class Plain(PartitionAssignor):
    """Gives everything to the first member. Its other methods do what the interface does by default."""

    name = "plain"

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        first = min(spec.members)
        partitions = [
            TopicPartition(topic, partition)
            for topic, metadata in spec.topics.items()
            for partition in range(metadata.num_partitions)
        ]
        return GroupAssignment({first: MemberAssignment(partitions)})


class Scripted(Plain):
    """An assignor that records its calls."""

    name = "scripted"
    minimum_version = -1
    maximum_version = 4

    def __init__(self) -> None:
        self.offer = AssignorMetadata(Metadata(3, b"mine"))
        self.settings: Mapping[str, object] = {}
        self.specs: list[AssignmentSpec] = []
        self.results: list[object] = []
        """The next results: a GroupAssignment or an exception. By default that of Plain."""
        self.assignments: list[tuple[int, MemberAssignment, int]] = []
        self.failure: Exception | None = None

    def configure(self, settings: Mapping[str, object]) -> None:
        self.settings = settings

    def metadata(self) -> AssignorMetadata:
        if self.failure is not None:
            raise self.failure
        return self.offer

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        self.specs.append(spec)
        result = self.results.pop(0) if self.results else super().assign(spec)
        if isinstance(result, Exception):
            raise result
        return result  # type: ignore[return-value]

    def on_assignment(self, error: int, assignment: MemberAssignment, group_epoch: int) -> None:
        self.assignments.append((error, assignment, group_epoch))


class AskingBroker(RecordsBroker):
    """A broker that asks its member to compute while `asks` is true, and takes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers |= {HEARTBEAT: self._ask, PREPARE: self._prepare, INSTALL: self._install}
        self.asks = False
        self.repeats = False
        """Whether each response has the assignment."""
        self.error = 0
        self.assignor_name = ""
        self.metadata = Metadata(-1)
        self.pending: list[tuple[bytes, int]] = []
        self.prepared = ConsumerGroupPrepareAssignmentResponse(
            group_epoch=7,
            assignor_name="scripted",
            members=[
                ConsumerGroupPrepareAssignmentResponse.Member(
                    member_id="member",
                    member_epoch=1,
                    instance_id="i",
                    rack_id="r",
                    subscribed_topic_ids=[TOPIC_ID],
                    assignor=ConsumerGroupPrepareAssignmentResponse.Assignor(
                        reason=2, metadata_version=3, metadata_bytes=b"mine"
                    ),
                    topic_partitions=[
                        ConsumerGroupPrepareAssignmentResponse.TopicPartitions(topic_id=TOPIC_ID, partitions=[1]),
                        ConsumerGroupPrepareAssignmentResponse.TopicPartitions(
                            topic_id=b"deleted" * 2 + b"..", partitions=[5]
                        ),
                    ],
                ),
                ConsumerGroupPrepareAssignmentResponse.Member(
                    member_id="other",
                    member_epoch=1,
                    assignor=ConsumerGroupPrepareAssignmentResponse.Assignor(metadata_version=-1),
                ),
            ],
            topics=[
                ConsumerGroupPrepareAssignmentResponse.TopicMetadata(
                    topic_id=TOPIC_ID,
                    topic_name=TOPIC,
                    num_partitions=2,
                    partitions=[
                        ConsumerGroupPrepareAssignmentResponse.PartitionMetadata(racks=["r", "s"]),
                        ConsumerGroupPrepareAssignmentResponse.PartitionMetadata(racks=[]),
                    ],
                )
            ],
        )

    def prepares(self) -> list[ConsumerGroupPrepareAssignmentRequest]:
        return self.requests_of(PREPARE)  # type: ignore[return-value]

    def installs(self) -> list[ConsumerGroupInstallAssignmentRequest]:
        return self.requests_of(INSTALL)  # type: ignore[return-value]

    def _ask(self, request: Message, version: int) -> Answer:
        epoch = self.member_epoch
        if self.repeats:
            self._told = None
        response = self._heartbeat(request, version)
        assert isinstance(response, ConsumerGroupHeartbeatResponse)
        if self.repeats:
            response.member_epoch = self.member_epoch = epoch
        if not response.error_code and response.member_epoch > 0:
            response.should_compute_assignment = self.asks
        if response.assignment is not None:
            response.assignment.error = self.error
            response.assignment.assignor_name = self.assignor_name
            response.assignment.metadata_version, response.assignment.metadata_bytes = self.metadata
            response.assignment.pending_topic_partitions = [
                ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=topic_id, partitions=[partition])
                for topic_id, partition in self.pending
            ]
        return response

    def _prepare(self, request: Message, version: int) -> Answer:
        error = self._next_error(PREPARE)
        if error:
            return ConsumerGroupPrepareAssignmentResponse(error_code=error)
        return self.prepared

    def _install(self, request: Message, version: int) -> Answer:
        error = self._next_error(INSTALL)
        if not error:
            self.asks = False
        return ConsumerGroupInstallAssignmentResponse(error_code=error, error_message="by script" if error else None)

    def offers(self) -> list[list[ConsumerGroupHeartbeatRequest.ClientAssignor] | None]:
        return [heartbeat.client_assignors for heartbeat in self.heartbeats()]


@pytest.fixture(autouse=True)
def thread_ms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Makes the threads of assignors take virtual time. Returns a function that sets the time."""
    seconds = 0.0

    async def to_thread(function: Callable[..., T], *args: object) -> T:
        await asyncio.sleep(seconds)
        return function(*args)

    def set_ms(milliseconds: float) -> None:
        nonlocal seconds
        seconds = milliseconds / 1000

    monkeypatch.setattr("asyncio.to_thread", to_thread)
    yield set_ms


@asynccontextmanager
async def consumer_of(
    broker: RecordsBroker, *assignors: PartitionAssignor, **options: Unpack[ConsumerOptions]
) -> AsyncIterator[Consumer]:
    settings: ConsumerOptions = {
        "bootstrap_servers": broker.address,
        "group_id": "g",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "group_local_assignors": assignors,
        **options,
    }
    async with Consumer(**settings) as consumer:
        yield consumer


@asynccontextmanager
async def member_of(
    broker: RecordsBroker,
    *assignors: PartitionAssignor,
    listener: ConsumerRebalanceListener | None = None,
    **options: Unpack[ConsumerOptions],
) -> AsyncIterator[Consumer]:
    """Yields a member with the partitions of the broker."""
    broker.assigned = [0, 1]
    async with broker, consumer_of(broker, *assignors, **options) as consumer:
        consumer.subscribe([TOPIC], listener=listener)
        await poll_until(consumer, lambda: len(consumer.assignment) == len(broker.assigned or ()))
        yield consumer


class TestOffers:
    async def test_a_join_offers_the_assignors_in_order(self) -> None:
        broker = AskingBroker()
        async with member_of(broker, Scripted(), Plain()):
            await quiet()
            scripted, plain = broker.offers()[0] or []
            assert (scripted.name, scripted.minimum_version, scripted.maximum_version) == ("scripted", -1, 4)
            assert (scripted.reason, scripted.metadata_version, scripted.metadata_bytes) == (0, 3, b"mine")
            assert (plain.name, plain.minimum_version, plain.maximum_version) == ("plain", 0, 0)
            assert (plain.reason, plain.metadata_version, plain.metadata_bytes) == (0, 0, b"")
            assert len(broker.offers()) > 2 and not any(broker.offers()[1:])

    async def test_metadata_is_updated_on_demand(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        async with member_of(broker, assignor) as consumer:
            await consumer.poll(0)
            assignor.offer = AssignorMetadata(Metadata(4, b"new"), reason=9)
            await quiet()
            assert not any(broker.offers()[1:])
            before = now_ms()
            consumer.update_assignor_metadata()
            await quiet(0.01)
            assert broker.arrivals_of(HEARTBEAT)[-1] == before
            (sent,) = broker.offers()[-1] or []
            assert (sent.reason, sent.metadata_version, sent.metadata_bytes) == (9, 4, b"new")

    async def test_a_request_for_a_new_assignment(self) -> None:
        broker = AskingBroker()
        async with member_of(broker, Scripted(), Plain()) as consumer:
            await consumer.poll(0)
            consumer.request_reassignment(3)
            await quiet()
            assert [[sent.reason for sent in offer] for offer in broker.offers() if offer] == [[0, 0], [3, 3]]
            consumer.request_reassignment()
            await quiet()
            assert [[sent.reason for sent in offer] for offer in broker.offers() if offer][2:] == [[0, 0], [1, 1]]

    async def test_a_member_that_was_fenced_asks_for_new_metadata(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        async with member_of(broker, assignor) as consumer:
            assignor.offer = AssignorMetadata(Metadata(4, b"after the loss"))
            broker.errors[HEARTBEAT] = [Errors.FENCED_MEMBER_EPOCH]
            await consumer.poll(3000)
            assert [offer[0].metadata_bytes for offer in broker.offers() if offer] == [b"mine", b"after the loss"]
            # The member owns its partitions again, and its assignor learns of them a second time.
            assert [epoch for _, _, epoch in assignor.assignments] == [1, 2]

    @pytest.mark.parametrize("reason", [0, -1, 128])
    async def test_reasons_out_of_range(self, reason: int) -> None:
        async with member_of(AskingBroker(), Scripted()) as consumer:
            with pytest.raises(ValueError, match=f"reason: {reason} must be 1 to 127"):
                consumer.request_reassignment(reason)

    async def test_calls_without_local_assignors_or_membership(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker) as consumer:
            with pytest.raises(IllegalStateException, match="group_local_assignors is needed"):
                consumer.request_reassignment()
        async with AskingBroker() as broker, consumer_of(broker, Scripted()) as consumer:
            with pytest.raises(IllegalStateException, match="not a member"):
                consumer.update_assignor_metadata()

    @pytest.mark.parametrize(
        ("offer", "text"),
        [
            (AssignorMetadata(Metadata(5)), "has version 5; the versions of the assignor are -1 to 4"),
            (AssignorMetadata(Metadata(3), 128), "has reason 128; reasons are 0 to 127"),
            (b"bytes", "returned b'bytes', no AssignorMetadata"),
            (AssignorMetadata(Metadata(3, "text")), "returned .*, no AssignorMetadata of numbers and bytes"),  # type: ignore[arg-type]
            (AssignorMetadata(Metadata(3.0)), "returned .*, no AssignorMetadata of numbers and bytes"),  # type: ignore[arg-type]
            (AssignorMetadata(Metadata(3), 1.0), "returned .*, no AssignorMetadata of numbers and bytes"),  # type: ignore[arg-type]
            (AssignorMetadata(3), "returned .*, no AssignorMetadata of numbers and bytes"),  # type: ignore[arg-type]
        ],
    )
    async def test_invalid_metadata_is_raised_by_subscribe(self, offer: AssignorMetadata, text: str) -> None:
        assignor = Scripted()
        assignor.offer = offer
        async with AskingBroker() as broker, consumer_of(broker, assignor) as consumer:
            with pytest.raises(AssignorException, match=f"assignor scripted {text}"):
                consumer.subscribe([TOPIC])
            await quiet()
            assert broker.heartbeats() == []

    async def test_metadata_that_fails_is_raised_by_subscribe(self) -> None:
        assignor = Scripted()
        assignor.failure = RuntimeError("no disk")
        async with AskingBroker() as broker, consumer_of(broker, assignor) as consumer:
            with pytest.raises(AssignorException, match="no disk") as raised:
                consumer.subscribe([TOPIC])
            assert raised.value.__cause__ is assignor.failure


class TestBrokers:
    async def test_a_broker_without_the_requests_is_refused_by_subscribe(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, Plain()) as consumer:
            with pytest.raises(UnsupportedVersionException, match=r"CONSUMER_GROUP_PREPARE_ASSIGNMENT and CONSUMER"):
                consumer.subscribe([TOPIC])
            await quiet()
            assert broker.heartbeats() == []


class TestComputations:
    async def test_a_member_computes_and_installs(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        async with member_of(broker, assignor):
            broker.asks = True
            await quiet()
            (prepare,) = broker.prepares()
            assert (prepare.group_id, prepare.member_id, prepare.member_epoch) == ("g", "member", 1)
            assert assignor.specs == [
                AssignmentSpec(
                    "g",
                    7,
                    {
                        "member": AssignmentMemberSpec(
                            "i", "r", frozenset({TOPIC}), 2, Metadata(3, b"mine"), frozenset({ONE})
                        ),
                        "other": AssignmentMemberSpec(None, None, frozenset(), 0, Metadata(-1), frozenset()),
                    },
                    {TOPIC: AssignmentTopicMetadata(TOPIC_ID, 2, (frozenset({"r", "s"}), frozenset()))},
                )
            ]
            assert broker.installs() == [
                ConsumerGroupInstallAssignmentRequest(
                    group_id="g",
                    member_id="member",
                    member_epoch=1,
                    group_epoch=7,
                    members=[
                        ConsumerGroupInstallAssignmentRequest.Member(
                            member_id="member",
                            partitions=[
                                ConsumerGroupInstallAssignmentRequest.TopicPartitions(
                                    topic_id=TOPIC_ID, partitions=[0, 1]
                                )
                            ],
                            metadata_version=3,
                        )
                    ],
                )
            ]

    async def test_metadata_and_error_of_a_result(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        members = {
            "other": MemberAssignment(metadata=Metadata(-1, b"user data")),
            "member": MemberAssignment([ONE, ZERO], Metadata(4, b"new")),
        }
        assignor.results = [GroupAssignment(members, error=127)]
        async with member_of(broker, assignor):
            broker.asks = True
            await quiet()
            (install,) = broker.installs()
            assert install.error == 127
            assert [
                (member.member_id, member.metadata_version, member.metadata_bytes) for member in install.members
            ] == [
                ("member", 4, b"new"),
                ("other", -1, b"user data"),
            ]

    async def test_heartbeats_do_not_wait_for_the_assignor(self, thread_ms: Callable[[float], None]) -> None:
        thread_ms(10_500)
        broker, assignor = AskingBroker(), Scripted()
        async with member_of(broker, assignor):
            broker.asks = True
            await quiet(12)
            (prepared,) = broker.arrivals_of(PREPARE)
            (installed,) = broker.arrivals_of(INSTALL)
            assert installed - prepared == pytest.approx(10_500)
            assert len([time for time in broker.arrivals_of(HEARTBEAT) if prepared < time < installed]) >= 10
            assert len(assignor.specs) == 1

    async def test_a_result_that_comes_too_late_is_dropped(self, thread_ms: Callable[[float], None]) -> None:
        thread_ms(5_000)
        broker, assignor = AskingBroker(), Scripted()
        async with member_of(broker, assignor) as consumer:
            broker.asks = True
            await quiet(1.5)
            assert len(broker.prepares()) == 1
            broker.asks = False
            await quiet(2)
            broker.asks = True
            thread_ms(10)
            await quiet(3)
            # The second computation begins when the thread of the first one has ended.
            assert len(broker.prepares()) == 2 and len(assignor.specs) == 2
            assert len(broker.installs()) == 1
            assert await consumer.poll(0) == []

    @pytest.mark.parametrize(
        "error", [Errors.STALE_MEMBER_EPOCH, Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS]
    )
    async def test_errors_that_pass(self, error: Errors) -> None:
        broker, assignor = AskingBroker(), Scripted()
        broker.errors = {PREPARE: [error], INSTALL: [error]}
        async with member_of(broker, assignor) as consumer:
            broker.asks = True
            await quiet()
            assert (len(broker.prepares()), len(assignor.specs), len(broker.installs())) == (2, 1, 2)
            assert broker.installs()[0] == broker.installs()[1]
            for times in (broker.arrivals_of(PREPARE), broker.arrivals_of(INSTALL)):
                assert any(times[0] < time <= times[1] for time in broker.arrivals_of(HEARTBEAT))
            assert await consumer.poll(0) == []

    async def test_a_lost_connection(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        takes = broker.handlers[INSTALL]

        def hang_up(request: Message, version: int) -> Answer:
            broker.handlers[INSTALL] = takes
            broker.hang_up()
            return None

        broker.handlers[INSTALL] = hang_up
        async with member_of(broker, assignor) as consumer:
            broker.asks = True
            await quiet()
            assert (len(broker.prepares()), len(assignor.specs), len(broker.installs())) == (1, 1, 2)
            assert not broker.asks
            assert await consumer.poll(0) == []

    @pytest.mark.parametrize("error", [Errors.UNKNOWN_MEMBER_ID, Errors.GROUP_ID_NOT_FOUND])
    async def test_a_coordinator_that_does_not_wait(self, error: Errors) -> None:
        broker, assignor = AskingBroker(), Scripted()
        broker.errors = {INSTALL: [error]}
        async with member_of(broker, assignor) as consumer:
            broker.asks = True
            await consumer.poll(1200)
            broker.asks = False
            await quiet()
            assert len(broker.installs()) == 1
            assert consumer.assignment == {ZERO, ONE}
            assert await consumer.poll(0) == []

    async def test_an_invalid_assignment_is_raised_once(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        broker.errors = {INSTALL: [Errors.INVALID_ASSIGNMENT], PREPARE: [Errors.NONE, Errors.UNKNOWN_MEMBER_ID]}
        async with member_of(broker, assignor) as consumer:
            broker.asks = True
            with pytest.raises(KafkaError, match="by script") as raised:
                await consumer.poll(1500)
            assert raised.value.error is Errors.INVALID_ASSIGNMENT
            broker.asks = False
            await consumer.poll(3000)
            assert consumer.assignment == {ZERO, ONE}

    async def test_a_failing_assignor_lets_another_member_try(self, caplog: pytest.LogCaptureFixture) -> None:
        broker, assignor = AskingBroker(), Scripted()
        failure = ZeroDivisionError("no weight")
        assignor.results = [failure]
        async with member_of(broker, assignor) as consumer:
            broker.asks = True
            with pytest.raises(AssignorException, match=r"the assignor scripted failed: .*no weight") as raised:
                await consumer.poll(1500)
            assert raised.value.__cause__ is failure
            await quiet(1)
            (install,) = broker.installs()
            assert (install.error, install.members, install.group_epoch) == (-1, [], 7)
            await consumer.poll(3000)
            assert consumer.assignment == {ZERO, ONE}
        assert "the assignor scripted failed" in caplog.text

    @pytest.mark.parametrize(
        ("result", "text"),
        [
            ({}, "returned dict, no GroupAssignment"),
            (GroupAssignment(error=128), "error 128; errors are 0 to 127"),
            (GroupAssignment(error=-1), "error -1; errors are 0 to 127"),
            (GroupAssignment({"nobody": MemberAssignment()}), "'nobody', which is not in the group"),
            (GroupAssignment({"member": MemberAssignment([TopicPartition("u", 0)])}), "'u', which is not in the spec"),
            (GroupAssignment({"member": MemberAssignment((), Metadata(1 << 15))}), "failed"),
            (GroupAssignment({"member": MemberAssignment((), Metadata(1, "text"))}), "failed"),  # type: ignore[arg-type]
            (GroupAssignment({"member": MemberAssignment([TopicPartition(TOPIC, 1 << 31)])}), "failed"),
        ],
    )
    async def test_results_that_no_request_can_have(self, result: object, text: str) -> None:
        broker, assignor = AskingBroker(), Scripted()
        assignor.results = [result]
        async with member_of(broker, assignor) as consumer:
            broker.asks = True
            with pytest.raises(AssignorException, match=text):
                await consumer.poll(1500)
            await quiet(1)
            assert [install.error for install in broker.installs()] == [-1]

    async def test_a_partition_that_is_assigned_twice_is_left_to_the_coordinator(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        assignor.results = [GroupAssignment({"member": MemberAssignment([ZERO, ZERO])})]
        async with member_of(broker, assignor):
            broker.asks = True
            await quiet()
            (install,) = broker.installs()
            assert install.members[0].partitions[0].partitions == [0, 0]

    async def test_an_assignor_that_the_member_does_not_have(self) -> None:
        broker = AskingBroker()
        broker.prepared.assignor_name = "unheard of"
        async with member_of(broker, Scripted()) as consumer:
            broker.asks = True
            with pytest.raises(AssignorException, match=r"unheard of failed: it is not one of group_local_assignors"):
                await consumer.poll(1500)
            await quiet(1)
            assert [install.error for install in broker.installs()] == [-1]

    async def test_a_consumer_closes_while_it_computes(self, thread_ms: Callable[[float], None]) -> None:
        thread_ms(60_000)
        broker = AskingBroker()
        async with member_of(broker, Scripted()):
            broker.asks = True
            await quiet(2)
            assert len(broker.prepares()) == 1
        assert broker.installs() == []
        assert not broker.has_member()


class Order(ConsumerRebalanceListener):
    """A listener and an assignor write into one list."""

    def __init__(self, assignor: Scripted) -> None:
        self.events: list[object] = []
        assignor.assignments = self.events  # type: ignore[assignment]

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self.events.append(partitions)


class TestAssignments:
    async def test_the_assignor_learns_the_target_before_the_listener(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        broker.error, broker.metadata, broker.pending = 9, Metadata(4, b"yours"), [(PENDING_ID, 3)]
        broker.add_topic("pending", PENDING_ID, [-1] * 4)
        listener = Order(assignor)
        async with member_of(broker, assignor, listener=listener) as consumer:
            await consumer.poll(3000)
            target = frozenset({ZERO, ONE, TopicPartition("pending", 3)})
            assert listener.events == [
                (9, MemberAssignment(target, Metadata(4, b"yours")), 1),
                frozenset({ZERO, ONE}),
            ]
            assert consumer.assignment == {ZERO, ONE}
            owned = [heartbeat.topic_partitions for heartbeat in broker.heartbeats() if heartbeat.topic_partitions]
            assert [topic.topic_id for topics in owned for topic in topics] == [TOPIC_ID]

    async def test_an_assignment_without_metadata(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        async with member_of(broker, assignor):
            assert assignor.assignments == [(0, MemberAssignment(frozenset({ZERO, ONE}), None), 1)]

    @pytest.mark.parametrize(
        ("name", "first", "second"),
        [
            ("scripted", [Metadata(4, b"yours")], []),
            ("second", [], [Metadata(4, b"yours")]),
            ("", [None], [None]),
        ],
    )
    async def test_one_of_several_assignors_has_computed(
        self, name: str, first: list[Metadata | None], second: list[Metadata | None]
    ) -> None:
        broker, assignors = AskingBroker(), [Scripted(), Scripted()]
        assignors[1].name = "second"
        broker.assignor_name, broker.metadata = name, Metadata(4, b"yours")
        async with member_of(broker, *assignors):
            learned = [[assignment.metadata for _, assignment, _ in assignor.assignments] for assignor in assignors]
            assert learned == [first, second]

    async def test_once_per_epoch(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        async with member_of(broker, assignor) as consumer:
            broker._told = None  # the next response has an assignment, in a new epoch
            await poll_until(consumer, lambda: len(assignor.assignments) == 2)
            broker.repeats = True
            before = len(broker.heartbeats())
            await poll_until(consumer, lambda: len(broker.heartbeats()) > before + 3)
            assert [epoch for _, _, epoch in assignor.assignments] == [1, 2]

    async def test_a_topic_without_a_known_name_delays_the_assignment(self) -> None:
        broker, assignor = AskingBroker(), Scripted()
        broker.assigned, broker.pending = [0], [(PENDING_ID, 0)]
        async with broker, consumer_of(broker, assignor) as consumer:
            consumer.subscribe([TOPIC])
            await consumer.poll(3000)
            assert assignor.assignments == [] and not consumer.assignment
            broker.add_topic("pending", PENDING_ID, [-1])
            await poll_until(consumer, lambda: consumer.assignment == {ZERO})
            assert [epoch for _, _, epoch in assignor.assignments] == [1]

    async def test_an_exception_of_the_assignor_is_raised_and_the_assignment_goes_on(self) -> None:
        class Raising(Scripted):
            def on_assignment(self, error: int, assignment: MemberAssignment, group_epoch: int) -> None:
                super().on_assignment(error, assignment, group_epoch)
                raise RuntimeError("not mine")

        broker, assignor = AskingBroker(), Raising()
        broker.assigned = [0]
        async with broker, consumer_of(broker, assignor) as consumer:
            consumer.subscribe([TOPIC])
            with pytest.raises(RuntimeError, match="not mine"):
                await consumer.poll(3000)
            await poll_until(consumer, lambda: consumer.assignment == {ZERO})
            assert len(assignor.assignments) == 1


class TestLagAssignor:
    def spec(self) -> AssignmentSpec:
        members = {
            member_id: AssignmentMemberSpec(None, None, frozenset({TOPIC}), 0, Metadata(0), frozenset())
            for member_id in ("a", "b")
        }
        return AssignmentSpec("g", 7, members, {TOPIC: AssignmentTopicMetadata(TOPIC_ID, 4)})

    async def measured(self, broker: RecordsBroker, **options: int) -> dict[TopicPartition, int]:
        """Reads the lags in the event loop of the test; `assign` would begin a loop of its own."""
        assignor = LagAssignor(**options)
        assignor.configure(ConsumerConfig(bootstrap_servers=broker.address).settings())
        return await assignor._measure("g", list(broker.logs))

    async def test_lags_are_from_the_broker(self) -> None:
        async with RecordsBroker(4) as broker:
            for partition in broker.logs:
                broker.append(partition, *map(str, range(10)))
            two, three = TopicPartition(TOPIC, 2), TopicPartition(TOPIC, 3)
            broker.logs[three].start = 6
            broker.committed = {ZERO: OffsetAndMetadata(4), ONE: OffsetAndMetadata(10), three: OffsetAndMetadata(2)}
            assert await self.measured(broker) == {ZERO: 6, ONE: 0, two: 10, three: 4}

    def test_without_offsets_all_partitions_have_the_same_cost(self, caplog: pytest.LogCaptureFixture) -> None:
        assignor = LagAssignor(timeout_ms=50)
        assignor.configure(ConsumerConfig(bootstrap_servers="127.0.0.1:1").settings())
        assigned = assignor.assign(self.spec()).members
        assert {member_id: len(assignment.target_partitions) for member_id, assignment in assigned.items()} == {
            "a": 2,
            "b": 2,
        }
        assert "group g: lags cannot be read" in caplog.text


class TestEnforceRebalance:
    async def test_it_has_no_effect_but_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        broker = AskingBroker()
        async with member_of(broker, Scripted()) as consumer:
            await consumer.poll(100)
            before = len(broker.heartbeats())
            consumer.enforce_rebalance("I feel like it")
            await quiet(0.5)
            assert len(broker.heartbeats()) == before
        assert "enforce_rebalance has no effect with the consumer protocol (KIP-848)" in caplog.text
        assert "I feel like it" in caplog.text


class TestSettings:
    def consumer(self, *assignors: object, **options: object) -> Consumer:
        return Consumer(
            bootstrap_servers="localhost:9092",
            group_local_assignors=assignors[0] if len(assignors) == 1 else assignors,  # type: ignore[arg-type]
            **options,  # type: ignore[arg-type]
        )

    def test_the_assignor_gets_the_settings_of_the_consumer(self) -> None:
        assignor = Scripted()
        self.consumer([assignor], group_id="g", client_rack="r")
        assert assignor.settings["client_rack"] == "r"
        assert assignor.settings["bootstrap_servers"] == "localhost:9092"

    def test_text_from_properties(self) -> None:
        config = ConsumerConfig.from_properties(
            {
                "bootstrap.servers": "localhost:9092",
                "group.local.assignors": f"{__name__}:Plain, kcoord.client.assignors.lag:LagAssignor",
            }
        )
        assert config.group_local_assignors == f"{__name__}:Plain, kcoord.client.assignors.lag:LagAssignor"
        Consumer(config)

    def test_both_kinds_of_assignors(self) -> None:
        with pytest.raises(ConfigException, match=r"group_local_assignors: .* group_remote_assignor .*'range'"):
            self.consumer([Plain()], group_remote_assignor="range")

    def test_the_later_revision_of_kip_1327(self) -> None:
        with pytest.raises(ConfigException, match=r"group_local_assignors: .*kip_1327_revision new-partitions"):
            self.consumer([Plain()], kip_1327_revision="new-partitions")

    @pytest.mark.parametrize(
        ("assignors", "text"),
        [
            ("no.such.module:Class", "cannot be loaded: ModuleNotFoundError"),
            ("kcoord.client:NoSuchClass", "cannot be loaded: AttributeError"),
            (
                "nothing",
                "'nothing' is neither package.module:Class nor an entry point of the group kcoord.client_assig",
            ),
            ("kcoord.client:Consumer", "'kcoord.client:Consumer' is not a subclass of kcoord.client.PartitionAssignor"),
            ([42], "42 is not a subclass of kcoord.client.PartitionAssignor"),
            ([Plain, Plain()], "two assignors have the name 'plain'"),
            ([PartitionAssignor], "cannot be created without arguments"),
        ],
    )
    def test_what_is_not_an_assignor(self, assignors: object, text: str) -> None:
        with pytest.raises(ConfigException, match=text):
            self.consumer(assignors)

    @pytest.mark.parametrize(
        ("name", "lowest", "highest"), [(" ", 0, 0), ("a", -2, 0), ("a", -1, -1), ("a", 2, 1), ("a", 0, 1 << 15)]
    )
    def test_invalid_names_and_versions(self, name: str, lowest: int, highest: int) -> None:
        kind = type("Odd", (Plain,), {"name": name, "minimum_version": lowest, "maximum_version": highest})
        with pytest.raises(ConfigException, match=r"has the (name|versions) .*must"):
            self.consumer([kind])

    def test_entry_points(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def entry_points(*, group: str, name: str) -> list[EntryPoint]:
            assert group == "kcoord.client_assignors"
            return [EntryPoint(name, f"{__name__}:Plain", group)] if name == "mine" else []

        monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
        self.consumer("mine")
        with pytest.raises(ConfigException, match="'yours' is neither"):
            self.consumer("yours")
