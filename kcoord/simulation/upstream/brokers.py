# SPDX-License-Identifier: Apache-2.0
"""The brokers of the upstream as a model: what they answer to the requests of instances.

Theory of operation
-------------------
The upstream has `BROKERS` brokers and one topic, that of the groups' logs. Each partition has a leader. One broker has
both coordinators: that of the instances' group, and that of the transactional ids. `handle` gets a request and a
callable for its answer, which is called now or later, or never.

* A Produce is answered when the replicas have its batches. A batch is replicated some time after its append.
* A Fetch is answered at once if a partition has batches, and else at the end of its waiting time at the latest.
* An election (`elect`) takes a while. The new leader has what was below the high watermark. All requests that wait at
  the old one fail.

Faults: elections, also unclean ones; too few in-sync replicas; a coordinator that moves or is not available; forgotten
transactional ids; compaction; a topic that is deleted and created again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeAlias

from kcoord.runtime.upstream_membership import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.trace import Trace
from kcoord.simulation.upstream.instances_group import InstancesGroup
from kcoord.simulation.upstream.options import UpstreamOptions
from kcoord.simulation.upstream.partition import TransactionalIds
from kcoord.simulation.upstream.transactions import TransactionalPartition, UpstreamTransactions
from kcoord.upstream.own_topics import OFFSETS_TOPIC
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FetchRequest,
    FetchResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
    ProduceResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)
from kcoord_protocol.record_batch import decode_header

BROKERS: Final = (1, 2, 3)
CLUSTER_ID: Final = "upstream"
NOBODY: Final = -1
_SERVED: Final = (
    *(ApiKey.API_VERSIONS, ApiKey.METADATA, ApiKey.FIND_COORDINATOR, ApiKey.INIT_PRODUCER_ID, ApiKey.PRODUCE),
    *(ApiKey.FETCH, ApiKey.LIST_OFFSETS, ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT, ApiKey.LEAVE_GROUP),
)
_MOST_BATCHES: Final = 4
"""Most batches of a partition in the response to one Fetch."""

Respond: TypeAlias = Callable[[Message], None]


def host_of(broker_id: int) -> str:
    return f"upstream-{broker_id}"


@dataclass(eq=False)
class _Produced:
    """A Produce request whose batches are not all replicated yet. `waits` has the ends of these batches."""

    response: ProduceResponse
    respond: Respond
    waits: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Poll:
    """A Fetch request that waits for batches."""

    broker_id: int
    request: FetchRequest
    respond: Respond
    is_answered: bool = False


class UpstreamBrokers:
    """All brokers of the upstream. The module docstring describes what they do."""

    def __init__(self, clock: VirtualClock, random: Random, options: UpstreamOptions, trace: Trace) -> None:
        self.faults_on = True
        self._clock = clock
        self._random = random
        self._options = options
        self._trace = trace
        self.topic_id = bytes([1]) * 16
        self.transactions = UpstreamTransactions()
        self.partition_of: dict[int, int] = {}
        """The partition of the offsets that a client commits in its transactions, by producer id."""
        self.producer_ids = TransactionalIds()
        self.group = InstancesGroup(options.session_timeout_ms)
        self.partitions = [TransactionalPartition(random, self.transactions) for _ in range(options.shards)]
        self.leaders = [random.choice(BROKERS) for _ in range(options.shards)]
        self.coordinator = random.choice(BROKERS)
        self._produced: list[_Produced] = []
        self._polls: list[_Poll] = []
        self.lost_records = 0
        """How often the upstream has lost what it had acknowledged."""
        clock.after(1, self._tick)

    # Requests.

    def handle(self, broker_id: int, node_id: int, request: Message, respond: Respond) -> None:
        """Handles a request of an instance at one broker."""
        match request:
            case ApiVersionsRequest():
                respond(self._versions())
            case MetadataRequest():
                respond(self._metadata())
            case FindCoordinatorRequest():
                respond(self._find_coordinator(request))
            case InitProducerIdRequest():
                respond(self._init_producer_id(broker_id, request))
            case ProduceRequest():
                self._produce(broker_id, request, respond)
            case FetchRequest():
                self._fetch(broker_id, request, respond)
            case ListOffsetsRequest():
                respond(self._list_offsets(broker_id, request))
            case JoinGroupRequest() | SyncGroupRequest() | HeartbeatRequest() | LeaveGroupRequest():
                self._ask_group(broker_id, node_id, request, respond)
            case _:
                raise AssertionError(f"the upstream does not serve {request}")

    @staticmethod
    def _versions() -> ApiVersionsResponse:
        ranges = {api_key: request_class(api_key).valid_versions for api_key in _SERVED}
        return ApiVersionsResponse(
            api_keys=[
                ApiVersionsResponse.ApiVersion(
                    api_key=api_key, min_version=versions.start, max_version=versions.stop - 1
                )
                for api_key, versions in ranges.items()
            ]
        )

    def _metadata(self) -> MetadataResponse:
        partitions = [
            MetadataResponse.MetadataResponsePartition(
                error_code=Errors.NONE if leader != NOBODY else Errors.LEADER_NOT_AVAILABLE,
                partition_index=index,
                leader_id=leader,
                leader_epoch=self.partitions[index].leader_epoch,
                replica_nodes=list(BROKERS),
                isr_nodes=list(BROKERS),
            )
            for index, leader in enumerate(self.leaders)
        ]
        topic = MetadataResponse.MetadataResponseTopic(
            name=OFFSETS_TOPIC, topic_id=self.topic_id, partitions=partitions
        )
        brokers = [
            MetadataResponse.MetadataResponseBroker(node_id=broker_id, host=host_of(broker_id), port=9092)
            for broker_id in BROKERS
        ]
        return MetadataResponse(brokers=brokers, cluster_id=CLUSTER_ID, controller_id=BROKERS[0], topics=[topic])

    def _find_coordinator(self, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
        is_there = self.coordinator != NOBODY
        return FindCoordinatorResponse(
            coordinators=[
                FindCoordinatorResponse.Coordinator(
                    key=key,
                    node_id=self.coordinator,
                    host=host_of(self.coordinator) if is_there else "",
                    port=9092 if is_there else -1,
                    error_code=Errors.NONE if is_there else Errors.COORDINATOR_NOT_AVAILABLE,
                )
                for key in request.coordinator_keys
            ]
        )

    def _init_producer_id(self, broker_id: int, request: InitProducerIdRequest) -> InitProducerIdResponse:
        if broker_id != self.coordinator:
            return InitProducerIdResponse(error_code=Errors.NOT_COORDINATOR, producer_id=-1, producer_epoch=-1)
        assert request.transactional_id is not None
        producer_id, epoch = self.producer_ids.init(request.transactional_id)
        self._trace.add("init-producer-id", f"{request.transactional_id} {producer_id} {epoch}")
        return InitProducerIdResponse(producer_id=producer_id, producer_epoch=epoch)

    # Batches.

    def _produce(self, broker_id: int, request: ProduceRequest, respond: Respond) -> None:
        (topic,) = request.topic_data
        answers = []
        produced = _Produced(ProduceResponse(), respond)
        for data in topic.partition_data:
            index, records = data.index, bytes(data.records or b"")
            answer = ProduceResponse.PartitionProduceResponse(index=index, base_offset=-1)
            answers.append(answer)
            if self.leaders[index] != broker_id:
                answer.error_code = Errors.NOT_LEADER_OR_FOLLOWER
                continue
            partition = self.partitions[index]
            before = partition.end_offset
            try:
                answer.base_offset = partition.append(records)
            except KafkaError as error:
                answer.error_code = error.error
                self._trace.add("refused-batch", f"{index} {error.error.name}")
                continue
            is_repeated = partition.end_offset == before
            self._trace.add("repeated-batch" if is_repeated else "batch", f"{index} {answer.base_offset}")
            end = answer.base_offset + decode_header(records).last_offset_delta + 1
            if end > partition.high_watermark:
                produced.waits[index] = end
            if not is_repeated:
                self._clock.after(self._delay(self._options.replication_ms), lambda index=index: self._replicate(index))  # type: ignore[misc]
        produced.response.responses = [
            ProduceResponse.TopicProduceResponse(name=topic.name, partition_responses=answers)
        ]
        if produced.waits:
            self._produced.append(produced)
        else:
            respond(produced.response)

    def _replicate(self, index: int) -> None:
        partition = self.partitions[index]
        if partition.has_too_few_replicas:
            return
        partition.replicate()
        for produced in self._produced[:]:
            if produced.waits.get(index, partition.high_watermark + 1) <= partition.high_watermark:
                self._end_wait(produced, index)
        self._answer_polls()

    def _end_wait(self, produced: _Produced, index: int, error: Errors = Errors.NONE) -> None:
        del produced.waits[index]
        if error:
            (answer,) = (
                answer for answer in produced.response.responses[0].partition_responses if answer.index == index
            )
            answer.error_code, answer.base_offset = error, -1
        if not produced.waits:
            self._produced.remove(produced)
            produced.respond(produced.response)

    def _fetch(self, broker_id: int, request: FetchRequest, respond: Respond) -> None:
        poll = _Poll(broker_id, request, respond)
        if not self._answer_poll(poll, is_over=request.max_wait_ms == 0):
            self._polls.append(poll)
            self._clock.after(request.max_wait_ms, lambda: self._end_poll(poll))

    def _answer_polls(self) -> None:
        self._polls = [poll for poll in self._polls if not self._answer_poll(poll, is_over=False)]

    def _end_poll(self, poll: _Poll) -> None:
        self._answer_poll(poll, is_over=True)

    def _answer_poll(self, poll: _Poll, *, is_over: bool) -> bool:
        """Answers a Fetch if there is something to tell, or if its time is over. Returns whether it is answered."""
        if poll.is_answered:
            return True
        (topic,) = poll.request.topics
        answers = [self._fetched(poll.broker_id, topic, asked) for asked in topic.partitions]
        if not is_over and not any(answer.error_code or answer.records for answer in answers):
            return False
        poll.is_answered = True
        poll.respond(
            FetchResponse(
                responses=[
                    FetchResponse.FetchableTopicResponse(topic=topic.topic, topic_id=topic.topic_id, partitions=answers)
                ]
            )
        )
        return True

    def _fetched(
        self, broker_id: int, topic: FetchRequest.FetchTopic, asked: FetchRequest.FetchPartition
    ) -> FetchResponse.PartitionData:
        partition = self.partitions[asked.partition]
        answer = FetchResponse.PartitionData(
            partition_index=asked.partition, high_watermark=partition.high_watermark, records=b""
        )
        if topic.topic_id != self.topic_id:
            answer.error_code = Errors.UNKNOWN_TOPIC_ID
        elif self.leaders[asked.partition] != broker_id:
            answer.error_code = Errors.NOT_LEADER_OR_FOLLOWER
        else:
            try:
                answer.records = partition.fetch(asked.fetch_offset, self._random.randint(1, _MOST_BATCHES))
            except KafkaError as error:
                answer.error_code = error.error
        return answer

    def _list_offsets(self, broker_id: int, request: ListOffsetsRequest) -> ListOffsetsResponse:
        (topic,) = request.topics
        answers = []
        for asked in topic.partitions:
            partition = self.partitions[asked.partition_index]
            answer = ListOffsetsResponse.ListOffsetsPartitionResponse(
                partition_index=asked.partition_index, offset=partition.start_offset
            )
            if self.leaders[asked.partition_index] != broker_id:
                answer.error_code, answer.offset = Errors.NOT_LEADER_OR_FOLLOWER, -1
            answers.append(answer)
        return ListOffsetsResponse(
            topics=[ListOffsetsResponse.ListOffsetsTopicResponse(name=topic.name, partitions=answers)]
        )

    # The group of the instances.

    def _ask_group(
        self,
        broker_id: int,
        node_id: int,
        request: JoinGroupRequest | SyncGroupRequest | HeartbeatRequest | LeaveGroupRequest,
        respond: Respond,
    ) -> None:
        now_ms = self._clock.now_ms

        def answer(value: object) -> None:
            respond(_group_response(request, value, self.group.leader))

        if broker_id != self.coordinator:
            answer(KafkaError(Errors.NOT_COORDINATOR))
            return
        match request:
            case JoinGroupRequest():
                (protocol,) = request.protocols
                joining = JoinGroup(request.member_id, bytes(protocol.metadata), now_ms)
                self.group.handle(node_id, joining, answer, now_ms)
            case SyncGroupRequest():
                assignments = {entry.member_id: bytes(entry.assignment) for entry in request.assignments}
                syncing = SyncGroup(request.member_id, request.generation_id, assignments, now_ms)
                self.group.handle(node_id, syncing, answer, now_ms)
            case HeartbeatRequest():
                self.group.handle(node_id, Heartbeat(request.member_id, request.generation_id, now_ms), answer, now_ms)
            case LeaveGroupRequest():
                (member,) = request.members
                self.group.handle(node_id, LeaveGroup(member.member_id), answer, now_ms)

    def _tick(self) -> None:
        self.group.tick(self._clock.now_ms)
        for partition in self.partitions:
            partition.pass_time(self._clock.now_ms)
        self._clock.after(50, self._tick)

    # Transactions, for the clients that run them.

    def write_marker(self) -> None:
        """Writes the oldest marker of a transaction."""
        if not self.transactions.markers:
            return
        producer_id, _ = self.transactions.markers[0]
        index = self.partition_of[producer_id]
        if self.partitions[index].has_too_few_replicas or self.leaders[index] == NOBODY:
            return
        self.transactions.write_marker(self.partitions[index])
        self._trace.add("marker", f"{producer_id}")
        self._replicate(index)

    # Faults.

    def elect(self, random: Random) -> None:
        """Elects another leader of a partition, which takes a while."""
        index = random.randrange(len(self.partitions))
        self._trace.add("election", str(index))
        self.partitions[index].change_leader()
        self._depose(index, random)

    def lose_tail(self, random: Random) -> None:
        """Elects a leader that lacks some batches below the high watermark (unclean.leader.election.enable)."""
        index = random.randrange(len(self.partitions))
        partition = self.partitions[index]
        below = [header for header, _ in partition.batches[-4:] if header.next_offset <= partition.high_watermark]
        if below:
            self.lost_records += 1
            self._trace.add("unclean-election", str(index))
            partition.truncate(random.choice(below).base_offset)
            self._depose(index, random)

    def delete_topic(self, random: Random) -> None:
        """Deletes the topic, and creates it again with the same name."""
        self.lost_records += 1
        self._trace.add("topic-deleted")
        self.topic_id = bytes([self.topic_id[0] + 1]) * 16
        for index in range(len(self.partitions)):
            self.partitions[index] = TransactionalPartition(self._random, self.transactions)
            self._depose(index, random)

    def _depose(self, index: int, random: Random) -> None:
        self.leaders[index] = NOBODY
        for produced in self._produced[:]:
            if index in produced.waits:
                self._end_wait(produced, index, Errors.NOT_LEADER_OR_FOLLOWER)
        self._answer_polls()
        leader = random.choice(BROKERS)

        def lead() -> None:
            self.leaders[index] = leader

        self._clock.after(random.randint(1, 1_500) if self.faults_on else 1, lead)

    def lose_replicas(self, random: Random) -> None:
        """Leaves a partition with too few in-sync replicas for a while."""
        index = random.randrange(len(self.partitions))
        self._trace.add("too-few-replicas", str(index))
        partition = self.partitions[index]
        partition.has_too_few_replicas = True

        def return_() -> None:
            if self.partitions[index] is partition:
                partition.has_too_few_replicas = False
                self._replicate(index)

        self._clock.after(random.choice((300, 3_000, 20_000)), return_)

    def move_coordinator(self, random: Random) -> None:
        """Moves both coordinators to another broker, after a while without one. Waiting requests get no answer."""
        self._trace.add("coordinator-moves")
        self.coordinator = NOBODY
        coordinator = random.choice(BROKERS)

        def lead() -> None:
            self.coordinator = coordinator

        self._clock.after(random.choice((20, 500, 4_000)), lead)

    def forget_ids(self, random: Random) -> None:
        """Forgets the transactional ids of the shards, or brings their epochs near their end."""
        if random.random() < 0.5:
            self.expire_ids()
            return
        self._trace.add("epochs-near-their-end")
        ids = self.producer_ids.ids
        for name, (producer_id, epoch) in ids.items():
            ids[name] = producer_id, max(epoch, random.choice((29_999, 32_760)))

    def expire_ids(self) -> None:
        """Forgets the transactional ids of the shards, so that the next claims have other producer ids."""
        self._trace.add("ids-forgotten")
        self.producer_ids.ids.clear()

    def compact(self, random: Random) -> None:
        self._trace.add("compact")
        self.partitions[random.randrange(len(self.partitions))].compact(
            self._clock.now_ms, self._options.tombstones_kept_ms
        )

    def heal(self) -> None:
        """Ends all faults."""
        self.faults_on = False
        for index, partition in enumerate(self.partitions):
            partition.has_too_few_replicas = False
            self._replicate(index)

    def _delay(self, longest_ms: int) -> int:
        return self._random.randint(1, longest_ms if self.faults_on else 1)


def _group_response(request: Message, value: object, leader: str) -> Message:
    """Returns the response for what the group has answered."""
    code = value.error if isinstance(value, KafkaError) else Errors.NONE
    match request:
        case JoinGroupRequest():
            if not isinstance(value, tuple):
                return JoinGroupResponse(error_code=code)
            member_id, generation, metadata = value
            return JoinGroupResponse(
                member_id=member_id,
                generation_id=generation,
                leader=leader if metadata is None else member_id,
                skip_assignment=metadata is None,
                protocol_name="sticky",
                members=[
                    JoinGroupResponse.JoinGroupResponseMember(member_id=other, metadata=data)
                    for other, data in (metadata or {}).items()
                ],
            )
        case SyncGroupRequest():
            return SyncGroupResponse(error_code=code, assignment=value if isinstance(value, bytes) else b"")
        case HeartbeatRequest():
            return HeartbeatResponse(error_code=Errors.REBALANCE_IN_PROGRESS if value is True else code)
        case _:
            return LeaveGroupResponse(error_code=code)
