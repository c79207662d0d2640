# SPDX-License-Identifier: Apache-2.0
"""Large responses to Fetch: the kernel sends the records from the files of the log, or with TLS the broker in parts."""

from __future__ import annotations

import hashlib
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    FetchRequest,
    FetchResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    ProduceRequest,
    ProduceResponse,
)
from kcoord_protocol.record_batch import Record, encode_batch
from tests.integration.wire import ConnectionClosed, WireClient
from tests.support.certificates import Authority
from tests.support.kcoord_process import KcoordProcess
from tests.support.memory import resident_kib

TOPIC = "large"
PARTITIONS = 6
BATCHES = 60
BATCH_BYTES = 16_000
FETCH_VERSION = 12
PRODUCE_VERSION = 9
SLOW_READERS = 200


class Broker(KcoordProcess):
    """A broker with a plain and an encrypted listener, and a topic with a megabyte in each partition."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        keystore = authority.issue("broker", "127.0.0.1").write_pem(folder / "broker.pem")
        settings = {
            "listeners": "PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:0",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": keystore,
            "connections.max.idle.ms": "60000",
            "offsets.topic.num.partitions": "1",
        }
        super().__init__(folder, settings)
        self.context = ssl.create_default_context(cadata=authority.pem)

    def connect(self, *, tls: bool = False, receive_bytes: int | None = None) -> WireClient:
        connected = socket.socket()
        if receive_bytes is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connected.settimeout(60)
        connected.connect(("127.0.0.1", self.ports[tls]))
        if tls:
            connected = self.context.wrap_socket(connected, server_hostname="127.0.0.1")
        return WireClient(self.ports[tls], connected=connected)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    broker = Broker(tmp_path_factory.mktemp("broker"), Authority())
    broker.start()
    try:
        with broker.connect() as client:
            fill(client)
        yield broker
    finally:
        broker.stop(signal.SIGKILL)


@pytest.fixture(params=[False, True], ids=["PLAINTEXT", "SSL"])
def tls(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def batch_of(partition: int, number: int) -> bytes:
    value = hashlib.shake_128(f"{partition} {number}".encode()).digest(BATCH_BYTES)
    return encode_batch([Record(b"k", value, timestamp_ms=1_700_000_000_000)], base_offset=number)


def fill(client: WireClient) -> None:
    creatable = CreateTopicsRequest.CreatableTopic(name=TOPIC, num_partitions=PARTITIONS, replication_factor=1)
    created = client.call(CreateTopicsRequest(topics=[creatable], timeout_ms=10_000), 5, CreateTopicsResponse)
    assert created.topics[0].error_code == Errors.NONE
    for number in range(BATCHES):
        parts = [
            ProduceRequest.PartitionProduceData(index=index, records=bytes(8) + batch_of(index, number)[8:])
            for index in range(PARTITIONS)
        ]
        topics = [ProduceRequest.TopicProduceData(name=TOPIC, partition_data=parts)]
        produced = client.call(ProduceRequest(acks=-1, timeout_ms=10_000, topic_data=topics), 9, ProduceResponse)
        assert [part.error_code for part in produced.responses[0].partition_responses] == [Errors.NONE] * PARTITIONS


def fetch(offset: int = 0, *, max_bytes: int = 1 << 20, read_committed: bool = False) -> FetchRequest:
    parts = [
        FetchRequest.FetchPartition(partition=index, fetch_offset=offset, partition_max_bytes=max_bytes)
        for index in range(PARTITIONS)
    ]
    topics = [FetchRequest.FetchTopic(topic=TOPIC, partitions=parts)]
    return FetchRequest(
        max_wait_ms=500, min_bytes=1, max_bytes=50 << 20, isolation_level=int(read_committed), topics=topics
    )


def expected_response(first: int, last: int, *, read_committed: bool = False) -> FetchResponse:
    parts = [
        FetchResponse.PartitionData(
            partition_index=index,
            high_watermark=BATCHES,
            last_stable_offset=BATCHES,
            log_start_offset=0,
            aborted_transactions=[] if read_committed else None,
            records=b"".join(batch_of(index, number) for number in range(first, last)),
        )
        for index in range(PARTITIONS)
    ]
    return FetchResponse(responses=[FetchResponse.FetchableTopicResponse(topic=TOPIC, partitions=parts)])


@pytest.mark.parametrize("read_committed", [False, True])
@pytest.mark.parametrize(("first", "count"), [(0, BATCHES), (17, BATCHES), (3, 7), (3, 5), (BATCHES - 1, 1)])
def test_responses_are_byte_for_byte_those_of_the_codec(
    broker: Broker, tls: bool, first: int, count: int, read_committed: bool
) -> None:
    max_bytes = len(batch_of(0, 0)) * count
    with broker.connect(tls=tls) as client:
        client.send(fetch(first, max_bytes=max_bytes, read_committed=read_committed), FETCH_VERSION)
        frame = client.receive_frame()
    _, body = decode_response_header(frame, ApiKey.FETCH, FETCH_VERSION)
    expected = expected_response(first, min(first + count, BATCHES), read_committed=read_committed)
    assert frame[body:] == expected.encode(FETCH_VERSION)


def test_requests_behind_large_responses_are_answered_in_order(broker: Broker, tls: bool) -> None:
    frames = []
    for number in range(1, 13):
        request, version = (ListGroupsRequest(), 3) if number % 3 == 0 else (fetch(number), FETCH_VERSION)
        frames.append(encode_request(request.api_key, version, number, "wire", request.encode(version)))
    with broker.connect(tls=tls, receive_bytes=20_000) as client:
        client.socket.sendall(b"".join(frames))
        for number in range(1, 13):
            if number % 3 == 0:
                client.receive(number, ApiKey.LIST_GROUPS, 3, ListGroupsResponse)
                continue
            response = client.receive(number, ApiKey.FETCH, FETCH_VERSION, FetchResponse)
            assert response == expected_response(number, BATCHES)


def test_memory_is_bounded_while_many_clients_read_slowly(broker: Broker, tls: bool) -> None:
    readers = SLOW_READERS // 4 if tls else SLOW_READERS
    with ExitStack() as stack:
        client = stack.enter_context(broker.connect())
        before_kib = resident_kib(broker.pid)
        slow = [stack.enter_context(broker.connect(tls=tls, receive_bytes=20_000)) for _ in range(readers)]
        for reader in slow:
            for _ in range(3):
                reader.send(fetch(), FETCH_VERSION)
        for reader in slow:
            # The broker has begun the first response to this client, and still serves others.
            assert reader.socket.recv(1, 0 if tls else socket.MSG_PEEK)
            assert client.call(ListGroupsRequest(), 3, ListGroupsResponse).error_code == Errors.NONE
        # Each of the three responses has 6 MB. With TLS the parts that were read are in memory, and connections cost
        # some 25 kB.
        grown_kib = resident_kib(broker.pid) - before_kib
        assert grown_kib < 10_000 + readers * (400 if tls else 20)
        if not tls:
            for number in (1, 2, 3):
                response = slow[-1].receive(number, ApiKey.FETCH, FETCH_VERSION, FetchResponse)
                assert response == expected_response(0, BATCHES)


def test_a_client_that_reads_nothing_is_disconnected(tmp_path: Path, tls: bool) -> None:
    broker = Broker(tmp_path, Authority())
    broker.overrides |= {"connections.max.idle.ms": "500", "socket.send.buffer.bytes": "50000"}
    broker.start()
    try:
        with broker.connect() as client:
            fill(client)
        with ExitStack() as stack:
            idle, slow = [stack.enter_context(broker.connect(tls=tls, receive_bytes=20_000)) for _ in range(2)]
            idle.send(fetch(), FETCH_VERSION)
            slow.send(fetch(), FETCH_VERSION)
            size = len(expected_response(0, BATCHES).encode(FETCH_VERSION))
            deadline = time.monotonic() + 1.5
            taken = 0
            while time.monotonic() < deadline:
                taken += len(slow.socket.recv(20_000))
                time.sleep(0.02)
            assert taken < size
            # The client that reads slowly gets its whole response.
            while taken < size and (more := slow.socket.recv(1 << 20)):
                taken += len(more)
            assert taken >= size
            with pytest.raises((ConnectionError, ConnectionClosed, ssl.SSLError)):
                idle.receive_frame()
    finally:
        broker.kill()


def test_an_orderly_stop_finishes_responses(tmp_path: Path, tls: bool) -> None:
    broker = Broker(tmp_path, Authority()).start()
    try:
        with broker.connect() as client:
            fill(client)
        with broker.connect(tls=tls, receive_bytes=20_000) as reader:
            reader.send(fetch(), FETCH_VERSION)
            assert reader.socket.recv(4)
            stopping = threading.Thread(target=broker.stop)
            stopping.start()
            size = len(expected_response(0, BATCHES).encode(FETCH_VERSION)) + 5
            taken = 0
            while more := reader.socket.recv(1 << 20):
                taken += len(more)
            stopping.join()
            assert taken == size
    finally:
        broker.kill()
