# SPDX-License-Identifier: Apache-2.0
"""A request path without sockets answers exactly as a connection to a broker does.

The tests hold one dialogue with three brokers over logs in memory. It uses the APIs of groups, offsets, transactions,
metadata and records. One broker is reached through a socket, the others through a bare RequestPath, with and without
fast paths, with frames split anywhere. The brokers have the same clock and the same sequence of identifiers, so every
byte of every response has to be equal.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from kcoord.config import BrokerConfig
from kcoord.server.api.api_table import Api, ApiTable, CloseConnection
from kcoord.server.composition import compose
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.environment import Environment, RandomUuids
from kcoord.server.net.muting import Mute
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import (
    FRAMES_PER_TURN,
    LARGE_REQUEST_BYTES,
    LONGEST_TURN_MS,
    MANY_REQUESTS,
    MAX_IN_FLIGHT_REQUESTS,
    MAX_READY_BYTES,
    RequestPath,
)
from kcoord.server.process import BrokerProcess
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord_protocol.api_keys import ApiKey, response_class
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    ApiVersionsRequest,
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DescribeGroupsRequest,
    DescribeTopicPartitionsRequest,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EndTxnRequest,
    FetchRequest,
    FetchResponse,
    FindCoordinatorRequest,
    HeartbeatRequest,
    InitProducerIdRequest,
    InitProducerIdResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    ListGroupsRequest,
    ListGroupsResponse,
    ListOffsetsRequest,
    Message,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    ProduceRequest,
    SyncGroupRequest,
    TxnOffsetCommitRequest,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from kcoord_protocol.record_batch import Record, encode_batch

R = TypeVar("R", bound=Message)

NOW_NS = 1_700_000_000 * 10**9
TOPIC = "t"
SETTINGS = {
    "listeners": "PLAINTEXT://127.0.0.1:0",
    "advertised.listeners": "PLAINTEXT://broker:9092",
    "log.dirs": "data",
    "kcoord.log.flush.policy": "os",
    "log.cleaner.enable": "false",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.assignment.interval.ms": "0",
    "broker.id": "1",
}


class Process(BrokerProcess):
    answer_seconds = 0.0


@asynccontextmanager
async def running_broker() -> AsyncIterator[Process]:
    """Runs a broker with files in memory, a clock that stands still, and identifiers that are always the same."""
    config = BrokerConfig.from_properties(SETTINGS)
    uuids = RandomUuids(Random(0).randbytes)
    environment = Environment(asyncio.get_running_loop(), lambda: NOW_NS // 1_000_000, uuids=uuids)
    folder = DataFolder(config, environment.now_ms(), MemoryFileSystem(), uuids=environment.uuids)
    process = Process(compose(config, environment, folder), environment, folder)
    await process.start()
    try:
        yield process
    finally:
        await process.stop()


class Driver(ABC):
    """One connection to a broker. `transcript` has every recorded response."""

    def __init__(self) -> None:
        self.transcript: list[bytes] = []
        self.reader = FrameReader(1 << 26)
        self.correlation_id = 0

    @abstractmethod
    async def exchange(self, data: bytes) -> bytes:
        """Sends bytes, and returns some bytes of responses."""

    async def frames(self, data: bytes, count: int) -> list[bytes]:
        """Sends `data` and waits for `count` responses."""
        received: list[bytes] = []
        async with asyncio.timeout(10):
            while len(received) < count:
                received += self.reader.feed(await self.exchange(data))
                data = b""
        return received

    def encode(self, request: Message, version: int) -> bytes:
        self.correlation_id += 1
        return encode_request(ApiKey(request.api_key), version, self.correlation_id, "client", request.encode(version))

    async def call(self, request: Message, version: int, answer: type[R] | None = None, *, recorded: bool = True) -> R:
        (frame,) = await self.frames(self.encode(request, version), 1)
        if recorded:
            self.transcript.append(frame)
        response = response_class(request.api_key)
        assert answer is None or answer is response
        start = decode_response_header(frame, ApiKey(request.api_key), version)[1]
        return response.decode(frame[start:], version)  # type: ignore[return-value]

    async def pipeline(self, requests: Iterable[tuple[Message, int]]) -> None:
        """Sends several requests at once and records their responses."""
        frames = [self.encode(request, version) for request, version in requests]
        self.transcript += await self.frames(b"".join(frames), len(frames))


class PathDriver(Driver):
    """Drives a bare RequestPath, as a simulation does. Frames are split at random."""

    def __init__(self, settings: PathSettings, seed: int) -> None:
        super().__init__()
        self.answered = asyncio.Event()
        self.path = RequestPath(settings, self.answered.set, "127.0.0.1", 4711)
        self.random = Random(seed)

    async def exchange(self, data: bytes) -> bytes:
        while data:
            size = self.random.choice((1, 2, 3, 5, 8, 50, len(data)))
            self.path.receive(data[:size])
            data = data[size:]
            if self.path.needs_turn and self.random.random() < 0.5:
                self.path.unmute(Mute.NEXT_TURN)
                self.path.process()
        while not (output := self.path.take_output()):
            assert self.path.close_reason is None, self.path.close_reason
            await self.answered.wait()
            self.answered.clear()
        if self.path.needs_turn:
            self.path.unmute(Mute.NEXT_TURN)
            self.path.process()
        self.path.process()
        return output


class SocketDriver(Driver):
    """Drives a connection over TCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._streams = reader, writer

    @classmethod
    async def connect(cls, process: Process) -> SocketDriver:
        return cls(*await asyncio.open_connection("127.0.0.1", process.bound_listeners["PLAINTEXT"].port))

    async def exchange(self, data: bytes) -> bytes:
        reader, writer = self._streams
        if data:
            writer.write(data)
        received = await reader.read(1 << 16)
        assert received, "the broker closed the connection"
        return received

    def close(self) -> None:
        self._streams[1].close()


def joining(member: str, epoch: int = 0) -> ConsumerGroupHeartbeatRequest:
    return ConsumerGroupHeartbeatRequest(
        group_id="consumer",
        member_id=member,
        member_epoch=epoch,
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=[TOPIC],
        topic_partitions=[],
    )


def steady(member: str, epoch: int) -> ConsumerGroupHeartbeatRequest:
    return ConsumerGroupHeartbeatRequest(group_id="consumer", member_id=member, member_epoch=epoch)


def commit(group: str, offset: int, member: str = "", epoch: int = -1, metadata: str = "") -> OffsetCommitRequest:
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(
            partition_index=index, committed_offset=offset + index, committed_metadata=metadata
        )
        for index in range(3)
    ]
    return OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=epoch,
        member_id=member,
        topics=[OffsetCommitRequest.OffsetCommitRequestTopic(name=TOPIC, partitions=partitions)],
    )


def fetch_offsets(*groups: str, require_stable: bool = False) -> OffsetFetchRequest:
    return OffsetFetchRequest(
        groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None) for group in groups],
        require_stable=require_stable,
    )


def produce(
    producer: tuple[int, int] = (-1, -1), transactional_id: str | None = None, acks: int = -1
) -> ProduceRequest:
    records = [Record(timestamp_ms=NOW_NS // 10**6, key=b"k", value=bytes(100)) for _ in range(3)]
    sequence = 0 if producer[0] >= 0 else -1
    batch = encode_batch(
        records,
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=sequence,
        is_transactional=transactional_id is not None,
    )
    data = ProduceRequest.TopicProduceData(
        name=TOPIC, partition_data=[ProduceRequest.PartitionProduceData(index=0, records=batch)]
    )
    return ProduceRequest(transactional_id=transactional_id, acks=acks, timeout_ms=1000, topic_data=[data])


def fetch(topic_id: bytes, max_wait_ms: int = 0, isolation_level: int = 1) -> FetchRequest:
    partition = FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        isolation_level=isolation_level,
        session_epoch=-1,
        topics=[FetchRequest.FetchTopic(topic_id=topic_id, partitions=[partition])],
    )


async def warm_up(driver: Driver) -> None:
    """Waits until the coordinators have loaded, whose topics the first FindCoordinator creates. Records nothing."""
    for key_type, key in ((0, "consumer"), (1, "tx")):
        request = FindCoordinatorRequest(key_type=key_type, coordinator_keys=[key])
        await driver.call(request, 6, recorded=False)
    async with asyncio.timeout(10):
        for group in ("consumer", "classic", "simple"):
            while True:
                fetched = await driver.call(fetch_offsets(group), 9, OffsetFetchResponse, recorded=False)
                if not fetched.groups[0].error_code:
                    break
                await asyncio.sleep(0.001)
        while await transaction_error(driver) != Errors.TRANSACTIONAL_ID_NOT_FOUND:
            await asyncio.sleep(0.001)
    driver.correlation_id = 100


async def transaction_error(driver: Driver) -> int:
    request = DescribeTransactionsRequest(transactional_ids=["tx"])
    described = await driver.call(request, 0, DescribeTransactionsResponse, recorded=False)
    return described.transaction_states[0].error_code


async def hold_dialogue(driver: Driver) -> None:
    naming = ApiVersionsRequest(client_software_name="software", client_software_version="1.0")
    await driver.call(naming, 4)
    topic = CreateTopicsRequest.CreatableTopic(name=TOPIC, num_partitions=3, replication_factor=1)
    created = await driver.call(CreateTopicsRequest(topics=[topic], timeout_ms=1000), 7, CreateTopicsResponse)
    topic_id = created.topics[0].topic_id
    await warm_up(driver)
    await speak_of_groups(driver)
    await speak_of_records(driver, topic_id)
    await speak_of_everything_at_once(driver, topic_id)


async def speak_of_groups(driver: Driver) -> None:
    joined = await driver.call(joining("m1"), 1, ConsumerGroupHeartbeatResponse)
    assert joined.member_epoch > 0
    for _ in range(3):
        await driver.call(steady("m1", joined.member_epoch), 1)
    for offset in (1, 2, 2, 70):
        await driver.call(commit("consumer", offset, "m1", joined.member_epoch), 9)
        await driver.call(fetch_offsets("consumer"), 9)
    await driver.call(commit("consumer", 5, "m1", joined.member_epoch + 1), 9)  # fenced
    await driver.call(commit("simple", 3, metadata="text"), 8)
    await driver.call(fetch_offsets("simple", "consumer"), 9)
    await driver.call(joining("m2"), 0)
    await driver.call(steady("m1", joined.member_epoch), 1)
    await driver.call(ConsumerGroupDescribeRequest(group_ids=["consumer", "none"]), 1)
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"\0\0\0\0\0\1\0\1t\0\0\0\0")
    join = JoinGroupRequest(
        group_id="classic",
        session_timeout_ms=30_000,
        rebalance_timeout_ms=30_000,
        protocol_type="consumer",
        protocols=[protocol],
    )
    required = await driver.call(join, 5, JoinGroupResponse)
    join.member_id = required.member_id
    leading = await driver.call(join, 5, JoinGroupResponse)
    assert leading.error_code == 0
    member: dict[str, Any] = {
        "group_id": "classic",
        "generation_id": leading.generation_id,
        "member_id": leading.member_id,
    }
    assignment = SyncGroupRequest.SyncGroupRequestAssignment(member_id=leading.member_id, assignment=b"\0\0")
    await driver.call(SyncGroupRequest(**member, assignments=[assignment]), 3)
    for _ in range(3):
        await driver.call(HeartbeatRequest(**member), 4)
    await driver.call(DescribeGroupsRequest(groups=["classic", "consumer"]), 5)
    await driver.call(LeaveGroupRequest(group_id="classic", member_id=leading.member_id), 2)
    await driver.call(ListGroupsRequest(), 5)
    deleted = OffsetDeleteRequest.OffsetDeleteRequestTopic(
        name=TOPIC, partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=1)]
    )
    await driver.call(OffsetDeleteRequest(group_id="simple", topics=[deleted]), 0)


async def speak_of_records(driver: Driver, topic_id: bytes) -> None:
    await driver.call(produce(), 9)
    await driver.call(fetch(topic_id), 16)
    initialized = await driver.call(
        InitProducerIdRequest(transactional_id="tx", transaction_timeout_ms=60_000), 4, InitProducerIdResponse
    )
    producer = initialized.producer_id, initialized.producer_epoch
    ids: dict[str, Any] = {"transactional_id": "tx", "producer_id": producer[0], "producer_epoch": producer[1]}
    topics = [AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=TOPIC, partitions=[0])]
    await driver.call(
        AddPartitionsToTxnRequest(
            v3_and_below_transactional_id="tx",
            v3_and_below_producer_id=producer[0],
            v3_and_below_producer_epoch=producer[1],
            v3_and_below_topics=topics,
        ),
        3,
    )
    await driver.call(produce(producer, "tx"), 9)
    await driver.call(fetch(topic_id), 16)
    await driver.call(AddOffsetsToTxnRequest(**ids, group_id="simple"), 3)
    offsets = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
        name=TOPIC,
        partitions=[TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(partition_index=2, committed_offset=9)],
    )
    await driver.call(TxnOffsetCommitRequest(**ids, group_id="simple", topics=[offsets]), 3)
    await driver.call(fetch_offsets("simple", require_stable=True), 9)
    await driver.call(EndTxnRequest(**ids, committed=True), 3)
    async with asyncio.timeout(10):
        while not await is_completed(driver):
            await asyncio.sleep(0.001)
    driver.correlation_id = 1000
    await driver.call(fetch_offsets("simple", require_stable=True), 9)
    fetched = await driver.call(fetch(topic_id), 16, FetchResponse)
    assert fetched.responses[0].partitions[0].last_stable_offset == 7
    partition = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=-1)
    await driver.call(
        ListOffsetsRequest(topics=[ListOffsetsRequest.ListOffsetsTopic(name=TOPIC, partitions=[partition])]), 7
    )
    for _ in range(3):
        await driver.call(MetadataRequest(topics=None), 12)
        await driver.call(
            DescribeTopicPartitionsRequest(topics=[DescribeTopicPartitionsRequest.TopicRequest(name=TOPIC)]), 0
        )


async def is_completed(driver: Driver) -> bool:
    request = DescribeTransactionsRequest(transactional_ids=["tx"])
    described = await driver.call(request, 0, DescribeTransactionsResponse, recorded=False)
    return described.transaction_states[0].transaction_state == "CompleteCommit"


async def speak_of_everything_at_once(driver: Driver, topic_id: bytes) -> None:
    """Sends requests that are answered at once, and requests that wait.

    Their responses have to come in order. A Produce request with acks=0 has no response.
    """
    again = [(commit("simple", number), 9) for number in range(MAX_IN_FLIGHT_REQUESTS + FRAMES_PER_TURN)]
    await driver.pipeline(again)
    requests: list[tuple[Message, int]] = [
        (MetadataRequest(topics=None), 12),
        (commit("simple", 5), 9),
        (fetch_offsets("simple"), 9),
        (steady("m1", 2), 1),
        (commit("consumer", 6, "m1", 2), 9),
        (produce(), 9),
        (fetch(topic_id, max_wait_ms=20), 16),
        (joining("m3"), 1),
        (fetch_offsets("consumer"), 9),
        (steady("m1", 2), 1),
    ]
    frames = [driver.encode(request, version) for request, version in requests]
    silent = driver.encode(produce(acks=0), 9)
    unknown = encode_request(ApiKey.API_VERSIONS, 99, 7777, "client", b"")
    data = b"".join((*frames[:5], silent, *frames[5:], unknown, *frames[:3]))
    driver.transcript += await driver.frames(data, len(frames) + 1 + 3)


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    """The responses that a client gets through a socket."""

    async def listen() -> list[bytes]:
        async with running_broker() as process:
            driver = await SocketDriver.connect(process)
            await hold_dialogue(driver)
            driver.close()
            return driver.transcript

    return asyncio.run(listen())


@pytest.mark.parametrize("has_fast_paths", [True, False])
@pytest.mark.parametrize("seed", range(3))
async def test_a_path_answers_as_a_connection_does(expected: list[bytes], has_fast_paths: bool, seed: int) -> None:
    async with running_broker() as process:
        settings = PathSettings.of(process.broker, "PLAINTEXT")
        assert settings.has_fast_paths and settings.metadata_responses is not None
        if not has_fast_paths:
            settings = replace(settings, has_fast_paths=False, metadata_responses=None)
        driver = PathDriver(settings, seed)
        await hold_dialogue(driver)
        assert len(driver.transcript) == len(expected)
        for number, (frame, expected_frame) in enumerate(zip(driver.transcript, expected, strict=True)):
            assert frame == expected_frame, number


# --- what a driver can rely on ----------------------------------------------------------------------------------------


class Bare:
    """A path whose APIs are ListGroups, InstallAssignment and UpdateFeatures, answered by `handle`."""

    def __init__(self, handle: Callable[[], object] = ListGroupsResponse, max_request_bytes: int = 1000) -> None:
        def handler(broker: object, context: object, request: Message) -> object:
            self.handled += 1
            self.requests.append(request)
            return handle()

        def error_response(request: Message, error: KafkaError, version: int) -> Message:
            return ListGroupsResponse(error_code=error.error)

        apis = ApiTable(
            [
                Api(ApiKey.LIST_GROUPS, range(3, 6), handler, error_response),
                Api(ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT, range(1), handler, error_response),
                Api(ApiKey.UPDATE_FEATURES, range(1, 2), handler, error_response),
            ]
        )
        broker = cast(
            "Any",
            SimpleNamespace(
                apis=apis,
                groups=None,
                now_ms=self._now_ms,
                topics=SimpleNamespace(topic_name=None),
                authorizer=None,
                request_quota=None,
                audit=None,
                made_in_thread=self._made_in_thread,
            ),
        )
        self.made: list[Message] = []
        self.now_ms = self.clock_reads = 0
        self.handled = self.answered = 0
        self.requests: list[Message] = []
        self.path = RequestPath(
            PathSettings(broker, "PLAINTEXT", max_request_bytes, max_request_bytes, False, None), self._on_response
        )

    def _on_response(self) -> None:
        self.answered += 1

    def _now_ms(self) -> int:
        self.clock_reads += 1
        return self.now_ms

    async def _made_in_thread(self, make: Callable[[], Message], version: int) -> Message:
        self.made.append(make())
        return self.made[-1]

    def receive(self, *correlation_ids: int) -> None:
        frames = [encode_request(ApiKey.LIST_GROUPS, 3, number, "c", b"\0") for number in correlation_ids]
        assert self.path.receive(b"".join(frames)) == len(frames)

    def take(self) -> list[int]:
        frames = FrameReader(1 << 30).feed(self.path.take_output())
        return [int.from_bytes(frame[:4], "big") for frame in frames]


def test_a_paused_path_keeps_requests_until_the_pause_ends() -> None:
    bare = Bare()
    bare.path.mute(Mute.SLOW_READER)
    bare.receive(1, 2)
    assert bare.path.is_muted
    assert (bare.handled, bare.answered, bare.path.queued, bare.take()) == (0, 0, 2, [])
    bare.path.unmute(Mute.SLOW_READER)
    bare.path.process()
    assert (bare.handled, bare.path.queued, bare.take()) == (2, 0, [1, 2])


def test_a_throttled_path_answers_at_once_and_keeps_later_requests() -> None:
    def handle() -> object:
        bare.path.client.throttle(700)
        return ListGroupsResponse()

    bare = Bare(handle)
    bare.receive(1, 2)
    assert bare.path.is_muted
    assert (bare.handled, bare.answered, bare.path.queued, bare.take()) == (1, 0, 1, [1])
    assert (bare.path.take_throttle_ms(), bare.path.take_throttle_ms()) == (700, 0)
    bare.receive(3)
    assert (bare.handled, bare.path.is_muted, bare.take()) == (1, True, [])
    bare.path.unmute(Mute.THROTTLED)
    bare.path.process()
    assert (bare.handled, bare.path.is_muted, bare.take()) == (2, True, [2])
    bare.path.mute(Mute.SLOW_READER)
    bare.path.unmute(Mute.THROTTLED)
    assert bare.path.is_muted


async def test_a_request_can_hold_those_that_follow() -> None:
    answer: asyncio.Future[ListGroupsResponse] = asyncio.get_running_loop().create_future()

    def handle() -> object:
        if bare.handled > 1:
            return ListGroupsResponse()
        bare.path.client.keeps_order = True
        return answer

    bare = Bare(handle)
    bare.receive(1, 2)
    assert (bare.handled, bare.path.is_muted, bare.path.queued, bare.take()) == (1, True, 1, [])
    bare.path.client.throttle(700)
    bare.path.unmute(Mute.THROTTLED)
    assert (bare.take(), bare.path.is_muted) == ([], True), "a throttle that ends does not end the hold"
    bare.path.client.throttle(700)
    answer.set_result(ListGroupsResponse())
    await asyncio.sleep(0)
    assert (bare.answered, bare.take(), bare.path.is_muted) == (1, [1], True), "nor the other way round"
    bare.path.unmute(Mute.THROTTLED)
    bare.path.process()
    assert (bare.handled, bare.take(), bare.path.is_muted) == (2, [2], False)


def test_requests_beyond_a_turn_wait_for_the_next_one() -> None:
    bare = Bare()
    bare.receive(*range(FRAMES_PER_TURN + 1))
    assert (bare.path.needs_turn, bare.path.is_muted) == (True, True)
    bare.path.process()
    assert bare.take() == list(range(FRAMES_PER_TURN))
    bare.path.unmute(Mute.NEXT_TURN)
    bare.path.process()
    assert (bare.path.needs_turn, bare.path.is_muted) == (False, False)
    assert bare.take() == [FRAMES_PER_TURN]


def test_a_turn_ends_when_its_requests_have_taken_long() -> None:
    """Each request takes a third of a turn. The last ones are too few for a turn of their own."""

    def handle() -> ListGroupsResponse:
        bare.now_ms += LONGEST_TURN_MS // 3
        return ListGroupsResponse()

    bare = Bare(handle)
    bare.receive(*range(6 + MANY_REQUESTS))
    answered = [bare.take()]
    while bare.path.needs_turn:
        assert bare.path.is_muted
        bare.path.process()
        assert bare.take() == [], "a muted path works on no request"
        bare.path.unmute(Mute.NEXT_TURN)
        bare.path.process()
        answered.append(bare.take())
    assert answered == [[0, 1, 2], [3, 4, 5], list(range(6, 6 + MANY_REQUESTS))]
    assert not bare.path.is_muted


def test_a_long_request_ends_no_turn_if_few_wait_for_it() -> None:
    def handle() -> ListGroupsResponse:
        bare.now_ms += 10 * LONGEST_TURN_MS
        return ListGroupsResponse()

    bare = Bare(handle)
    bare.receive(*range(MANY_REQUESTS))
    assert (bare.path.needs_turn, bare.path.is_muted, bare.take()) == (False, False, list(range(MANY_REQUESTS)))
    assert bare.clock_reads == 1, "only the beginning of the turn"


@pytest.mark.parametrize("turn_is_first", [False, True])
async def test_a_long_turn_ends_while_too_many_requests_are_in_flight(turn_is_first: bool) -> None:
    """The turn that the driver takes may come before the responses or after them."""
    futures: list[asyncio.Future[object]] = []

    def handle() -> asyncio.Future[object]:
        if len(futures) == MAX_IN_FLIGHT_REQUESTS - 1:  # the turn ends for two reasons
            bare.now_ms += LONGEST_TURN_MS
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    bare = Bare(handle)
    bare.receive(*range(MAX_IN_FLIGHT_REQUESTS + MANY_REQUESTS))
    assert (bare.handled, bare.path.is_muted) == (MAX_IN_FLIGHT_REQUESTS, True)
    if turn_is_first:
        bare.path.unmute(Mute.NEXT_TURN)
        bare.path.process()
        assert (bare.handled, bare.path.is_muted) == (MAX_IN_FLIGHT_REQUESTS, True)
    for future in futures:
        future.set_result(ListGroupsResponse())
    await asyncio.sleep(0)
    assert bare.take() == list(range(MAX_IN_FLIGHT_REQUESTS))
    if not turn_is_first:
        assert bare.path.needs_turn
        bare.path.unmute(Mute.NEXT_TURN)
    bare.path.process()
    assert (bare.handled, bare.path.is_muted) == (MAX_IN_FLIGHT_REQUESTS + MANY_REQUESTS, False)


def large_response(size_bytes: int = MAX_READY_BYTES // 4) -> ListGroupsResponse:
    return ListGroupsResponse(groups=[ListGroupsResponse.ListedGroup(group_id="g" * (size_bytes // 32))] * 32)


def test_a_turn_ends_when_the_responses_that_wait_are_large() -> None:
    """A few bytes of requests may ask for gigabytes."""
    bare = Bare(large_response)
    bare.receive(*range(FRAMES_PER_TURN))
    answered: list[int] = []
    while bare.path.needs_turn:
        assert bare.path.is_muted
        output = bare.path.take_output()
        assert MAX_READY_BYTES <= len(output) < 1.3 * MAX_READY_BYTES
        answered += [int.from_bytes(frame[:4], "big") for frame in FrameReader(1 << 30).feed(output)]
        bare.path.unmute(Mute.NEXT_TURN)
        bare.path.process()
    assert len(answered) >= FRAMES_PER_TURN - 4
    assert answered + bare.take() == list(range(FRAMES_PER_TURN))
    assert not bare.path.is_muted


def test_responses_that_were_taken_do_not_end_a_turn() -> None:
    bare = Bare(partial(large_response, MAX_READY_BYTES // 16))
    for number in range(40):
        bare.receive(number)
        assert not bare.path.is_muted
        assert bare.take() == [number]


async def test_large_responses_that_wait_for_an_earlier_one_mute_the_path() -> None:
    first = asyncio.get_running_loop().create_future()
    bare = Bare(lambda: large_response() if bare.handled > 1 else first)
    bare.receive(*range(10))
    assert (bare.take(), bare.handled) == ([], 5)
    bare.path.unmute(Mute.NEXT_TURN)
    bare.path.process()
    assert (bare.handled, bare.path.is_muted, bare.path.needs_turn) == (5, True, False), "no turn would change that"
    first.set_result(ListGroupsResponse())
    await asyncio.sleep(0)
    assert (bare.answered, bare.take(), bare.path.is_muted) == (1, [0, 1, 2, 3, 4], False)
    bare.path.process()
    assert (bare.handled, bare.path.needs_turn, bare.take()) == (9, True, [5, 6, 7, 8])
    bare.path.unmute(Mute.NEXT_TURN)
    bare.path.process()
    assert (bare.take(), bare.path.is_muted) == ([9], False)


async def test_the_path_announces_late_responses_and_they_unmute_it() -> None:
    futures = [asyncio.get_running_loop().create_future() for _ in range(MAX_IN_FLIGHT_REQUESTS + 1)]
    left = iter(futures)
    bare = Bare(lambda: next(left))
    bare.receive(*range(MAX_IN_FLIGHT_REQUESTS + 1))
    assert bare.path.is_muted and not bare.path.needs_turn
    assert (bare.handled, bare.answered, bare.path.in_flight) == (MAX_IN_FLIGHT_REQUESTS, 0, MAX_IN_FLIGHT_REQUESTS + 1)
    futures[1].set_result(ListGroupsResponse())
    await asyncio.sleep(0)
    assert (bare.answered, bare.take(), bare.path.is_muted) == (1, [], True)
    futures[0].set_result(ListGroupsResponse())
    await asyncio.sleep(0)
    assert (bare.answered, bare.take(), bare.path.is_muted) == (2, [0, 1], False)
    bare.path.process()
    assert bare.handled == MAX_IN_FLIGHT_REQUESTS + 1


async def test_a_future_that_ends_with_close_connection_stops_the_path() -> None:
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    left = iter((first, second))
    bare = Bare(lambda: next(left))
    bare.receive(1, 2)
    second.set_result(CloseConnection("no acknowledgement is wanted"))
    await asyncio.sleep(0)
    assert bare.path.close_reason == "no acknowledgement is wanted"
    assert bare.path.is_stopped and bare.path.is_muted and bare.answered
    first.set_result(ListGroupsResponse())
    await asyncio.sleep(0)
    assert bare.take() == [1]


def large_install(group_id: str = "g") -> tuple[ConsumerGroupInstallAssignmentRequest, bytes]:
    """Returns a request that is decoded in a thread, and its frame."""
    request = ConsumerGroupInstallAssignmentRequest(
        group_id=group_id,
        members=[
            ConsumerGroupInstallAssignmentRequest.Member(member_id=f"member-{number}", metadata_bytes=bytes(100))
            for number in range(LARGE_REQUEST_BYTES // 100)
        ],
    )
    return request, encode_request(ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT, 0, 1, "c", request.encode(0))


async def until_answered(bare: Bare) -> None:
    async with asyncio.timeout(10):
        while not bare.answered and bare.path.close_reason is None:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_large_assignment_is_decoded_in_a_thread_and_requests_behind_it_do_not_wait(waits: bool) -> None:
    response = asyncio.get_running_loop().create_future()

    def handle() -> object:
        is_install = isinstance(bare.requests[-1], ConsumerGroupInstallAssignmentRequest)
        if not is_install:
            return ListGroupsResponse()
        return response if waits else ConsumerGroupInstallAssignmentResponse()

    bare = Bare(handle, 1 << 20)
    request, frame = large_install()
    bare.path.receive(frame)
    assert bare.handled == 0
    bare.receive(2)
    assert bare.handled == 1
    assert bare.take() == []
    response.set_result(ConsumerGroupInstallAssignmentResponse())
    await until_answered(bare)
    assert bare.requests[-1] == request
    assert bare.take() == [1, 2]


@pytest.mark.parametrize("waits", [False, True])
async def test_threads_decode_a_large_request_and_encode_its_response_and_requests_behind_it_wait(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    response, threads = UpdateFeaturesResponse(error_message=None), []
    decode = UpdateFeaturesRequest.decode_prefix

    def noted(data: bytes, offset: int, version: int) -> tuple[UpdateFeaturesRequest, int]:
        threads.append(threading.get_ident())
        return decode(data, offset, version)

    def handle() -> object:
        if not isinstance(bare.requests[-1], UpdateFeaturesRequest):
            return ListGroupsResponse()
        sizes.append(len(bare.requests[-1].feature_updates))
        return future if waits else response

    monkeypatch.setattr(UpdateFeaturesRequest, "decode_prefix", noted)
    future, sizes = asyncio.get_running_loop().create_future(), list[int]()
    bare = Bare(handle, 1 << 20)
    update = UpdateFeaturesRequest.FeatureUpdateKey(feature="f" * 100)
    request = UpdateFeaturesRequest(feature_updates=[update] * (LARGE_REQUEST_BYTES // 100))
    bare.path.receive(encode_request(ApiKey.UPDATE_FEATURES, 1, 1, "c", request.encode(1)))
    bare.receive(2)
    assert (bare.handled, bare.path.is_muted) == (0, True)
    future.set_result(response)
    await until_answered(bare)
    assert (sizes, bare.made, bare.handled, bare.path.is_muted) == (
        [len(request.feature_updates)],
        [response],
        1,
        False,
    )
    bare.path.process()
    assert bare.take() == [1, 2]
    assert len(threads) == 1 and threads[0] != threading.get_ident()


async def test_a_large_assignment_that_is_malformed_closes_the_connection() -> None:
    bare = Bare(max_request_bytes=1 << 20)
    _, frame = large_install()
    cut = frame[4:-50]
    bare.path.receive(len(cut).to_bytes(4, "big") + cut)
    await until_answered(bare)
    assert bare.handled == 0
    assert bare.path.close_reason is not None
    assert bare.path.close_reason.startswith("malformed CONSUMER_GROUP_INSTALL_ASSIGNMENT v0 request: members[")


async def test_a_client_that_goes_away_does_not_stop_the_installation_of_its_large_assignment() -> None:
    bare = Bare(ConsumerGroupInstallAssignmentResponse, 1 << 20)
    bare.path.receive(large_install()[1])
    bare.path.close()
    async with asyncio.timeout(10):
        while not bare.handled:
            await asyncio.sleep(0.001)
    assert (bare.answered, bare.take()) == (0, [])


async def test_a_closed_path_sends_nothing_and_ends_long_polls() -> None:
    future = asyncio.get_running_loop().create_future()
    left = iter((ListGroupsResponse(), future))
    bare = Bare(lambda: next(left))
    bare.receive(1, 2)
    bare.path.close()
    await asyncio.sleep(0)
    assert future.cancelled()
    assert (bare.answered, bare.take(), bare.path.in_flight) == (0, [], 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\0\0\x03\xe9", "frame of 1001 bytes"),
        (encode_request(ApiKey.LIST_GROUPS, 2, 1, "c", b""), "LIST_GROUPS v2 is not served"),
        (encode_request(ApiKey.LIST_GROUPS, 3, 1, "c", b""), "malformed LIST_GROUPS v3 request"),
    ],
)
def test_bytes_that_are_no_request_stop_the_path_after_the_responses_before_them(data: bytes, reason: str) -> None:
    bare = Bare()
    bare.path.receive(encode_request(ApiKey.LIST_GROUPS, 3, 7, "c", b"\0") + data)
    assert bare.path.close_reason is not None
    assert reason in bare.path.close_reason
    assert bare.path.is_stopped
    assert bare.take() == [7]
