# SPDX-License-Identifier: Apache-2.0
"""Hostile input of every kind against a running broker, a test per number of the list (H-1 to H-24).

After each test, another connection is served normally, and the log has no traceback. Proxied clusters (H-23) are left
out. The broker does not serve them: their requests are unknown APIs (H-4). SASL (H-12) is in
tests/integration/clients/test_sasl.py.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.compression import Compression, compress
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    ProduceRequest,
    ProduceResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)
from kcoord_protocol.record_batch import Record, encode_batch
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

from .conftest import SERVER
from .wire import ConnectionClosed, WireClient

MakeServer = Callable[..., KcoordProcess]
CLOSED = (ConnectionClosed, ConnectionResetError, BrokenPipeError)
MOST_RESIDENT_KIB = 400 * 1024


def prepare(server: KcoordProcess) -> None:
    """Creates the topic `t`, and waits until the group coordinator serves groups."""
    with WireClient(server.port, 60) as client:
        topic = CreateTopicsRequest.CreatableTopic(name="t", num_partitions=2, replication_factor=1)
        client.call(CreateTopicsRequest(topics=[topic], timeout_ms=5000), 7, CreateTopicsResponse)

        def is_there() -> bool:
            request = FindCoordinatorRequest(coordinator_keys=["g"])
            client.call(request, 4, FindCoordinatorResponse)
            return not commit_error(client, commit_request("g", 1))

        wait_until(is_there, "the group coordinator serves groups")


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    server = KcoordProcess(tmp_path_factory.mktemp("hostile"), SERVER).start()
    prepare(server)
    yield server
    server.kill()


@pytest.fixture
def broker(shared_server: KcoordProcess) -> Iterator[KcoordProcess]:
    yield shared_server
    serves(shared_server)
    assert "Traceback" not in shared_server.log
    assert peak_kib(shared_server) < MOST_RESIDENT_KIB


def serves(server: KcoordProcess) -> None:
    with WireClient(server.port, 60) as client:
        assert client.call(ListGroupsRequest(), 5, ListGroupsResponse).error_code == 0


def peak_kib(server: KcoordProcess) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def is_closed_after(server: KcoordProcess, data: bytes) -> bool:
    with WireClient(server.port, 60) as client:
        try:
            client.socket.sendall(data)
            client.receive_frame()
        except CLOSED:
            return True
    return False


def is_refused(server: KcoordProcess, data: bytes, reason: str) -> bool:
    """Returns whether the connection is closed and the log has the reason.

    The broker limits its log lines per second, so this tries several times.
    """
    begin = len(server.log)
    for _ in range(20):
        assert is_closed_after(server, data)
        if reason in server.log[begin:]:
            return True
        time.sleep(0.1)
    return False


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def commit_request(group: str, partitions: int, metadata: str = "") -> OffsetCommitRequest:
    of_one = OffsetCommitRequest.OffsetCommitRequestPartition
    rows = [of_one(partition_index=n % 2, committed_offset=1, committed_metadata=metadata) for n in range(partitions)]
    return OffsetCommitRequest(
        group_id=group, topics=[OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=rows)]
    )


def commit_error(client: WireClient, request: OffsetCommitRequest) -> Errors:
    answer = client.call(request, 9, OffsetCommitResponse)
    return Errors(answer.topics[0].partitions[0].error_code)


def join_classic(
    client: WireClient,
    group: str = "classic",
    instance_id: str | None = None,
    metadata: bytes = b"",
    protocols: int = 1,
) -> Errors:
    of_one = JoinGroupRequest.JoinGroupRequestProtocol
    request = JoinGroupRequest(
        group_id=group,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        group_instance_id=instance_id,
        protocol_type="consumer",
        protocols=[of_one(name=f"p{number}", metadata=metadata) for number in range(protocols)],
    )
    return Errors(client.call(request, 5, JoinGroupResponse).error_code)


def sync_classic(client: WireClient, group: str, assignment: bytes) -> Errors:
    """Joins as the only member and sends an assignment; returns the error."""
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")
    join = JoinGroupRequest(
        group_id=group,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        member_id="",
        group_instance_id="i",
        protocol_type="consumer",
        protocols=[protocol],
    )
    joined = client.call(join, 5, JoinGroupResponse)
    given = SyncGroupRequest.SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment)
    sync = SyncGroupRequest(
        group_id=group,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        group_instance_id="i",
        assignments=[given],
    )
    return Errors(client.call(sync, 3, SyncGroupResponse).error_code)


@pytest.mark.parametrize("size", [-1, -(2**31), 104857601, 2**31 - 1])
def test_h_01_frame_sizes_below_zero_and_above_the_limit(broker: KcoordProcess, size: int) -> None:
    assert is_refused(broker, struct.pack(">i", size), f"frame of {size} bytes, allowed are 0 to 104857600")


def test_h_01_large_requests_without_records(broker: KcoordProcess) -> None:
    """The announced length is enough: the client need not send the bytes, and the broker does not keep them."""
    assert is_refused(
        broker,
        struct.pack(">ihh", 4 * 1024 * 1024 + 1, ApiKey.OFFSET_COMMIT, 9),
        "request of 4194305 bytes with api key 8, allowed are 4194304",
    )


def test_h_02_a_frame_that_never_ends(make_server: MakeServer) -> None:
    server = make_server(connections_max_idle_ms="500").start()
    with WireClient(server.port, 60) as slow:
        slow.socket.sendall(struct.pack(">ihh", 1000, ApiKey.LIST_GROUPS, 5))

        def is_closed() -> bool:
            try:
                slow.socket.sendall(b"x")  # never idle, never done
            except OSError:
                return True
            return False

        wait_until(is_closed, "the slow connection is closed")
    serves(server)


@pytest.mark.parametrize(
    ("data", "guess"),
    [
        (bytes.fromhex("1603010200010001fc0303") + bytes(64), "looks like a TLS handshake"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "looks like HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "looks like HTTP"),
    ],
)
def test_h_03_other_protocols_on_the_port(broker: KcoordProcess, data: bytes, guess: str) -> None:
    assert is_refused(broker, data, guess)


@pytest.mark.parametrize(("key", "version"), [(17, 2), (36, 3), (999, 0), (-1, 0), (8, 99), (8, -1), (68, 3)])
def test_h_04_unknown_apis_and_versions(broker: KcoordProcess, key: int, version: int) -> None:
    assert is_refused(broker, framed(struct.pack(">hhih", key, version, 1, -1)), "is not served")


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xff\xff\xff\x07",  # an array of 2^31 - 2 elements
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a varint of ten bytes
        b"\x00",  # null where null is not allowed
        b"\x05ab",  # a string beyond the end
        b"\x81\x80\x04" + b"x" * 70000,  # a string longer than strings may be
    ],
)
def test_h_05_impossible_lengths(broker: KcoordProcess, body: bytes) -> None:
    assert is_refused(
        broker, encode_request(ApiKey.OFFSET_COMMIT, 9, 1, None, body), "malformed OFFSET_COMMIT v9 request"
    )


def test_h_05_a_bomb_of_small_elements(broker: KcoordProcess) -> None:
    """The request has the densest array that is possible: 1,390,000 topics of three bytes each."""
    count = 1_390_000
    body = bytes.fromhex("02678000000001000000") + b"\x80\xac\x9f\x01"
    bomb = encode_request(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, 1, None, _uvarint(count + 1) + b"\x02t\x00" * count)
    assert len(bomb) < 4 << 20
    assert is_closed_after(broker, bomb)
    assert is_closed_after(broker, encode_request(ApiKey.OFFSET_COMMIT, 9, 1, None, body))


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def test_h_06_floods_of_tagged_fields(broker: KcoordProcess) -> None:
    def request(tags: bytes) -> bytes:
        return encode_request(ApiKey.LIST_GROUPS, 5, 1, None, b"\x01\x01" + tags)

    known_tags = b"\x03" + b"\x0a\x01x" + b"\x0b\x00" + b"\xff\x7f\x02yz"
    assert not is_closed_after(broker, request(known_tags))
    assert is_closed_after(broker, request(b"\x02" + b"\x0a\x01x" * 2))
    many = b"".join(_uvarint(tag) + b"\x00" for tag in range(10_001))
    assert is_refused(broker, request(_uvarint(10_001) + many), "10001 tagged fields, allowed are 10000")


def test_h_07_bytes_after_the_end_of_a_request(broker: KcoordProcess) -> None:
    """Kafka ignores bytes after the end of a request."""
    assert not is_closed_after(broker, encode_request(ApiKey.LIST_GROUPS, 5, 1, None, b"\x01\x01\x00" + b"more"))


def test_h_08_invalid_names(broker: KcoordProcess) -> None:
    assert is_refused(broker, encode_request(ApiKey.OFFSET_COMMIT, 9, 1, None, b"\x03\xc3\x28"), "invalid UTF-8")
    names = ["a/b", "x" * 250, "", "..", "é", "\x00"]
    with WireClient(broker.port, 60) as client:
        topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
        answer = client.call(MetadataRequest(topics=topics), 12, MetadataResponse)
        assert {topic.error_code for topic in answer.topics} == {Errors.INVALID_TOPIC_EXCEPTION}
        creatable = [CreateTopicsRequest.CreatableTopic(name=n, num_partitions=1, replication_factor=1) for n in names]
        created = client.call(CreateTopicsRequest(topics=creatable), 7, CreateTopicsResponse)
        assert {topic.error_code for topic in created.topics} == {Errors.INVALID_TOPIC_EXCEPTION}


def test_h_09_a_hundred_thousand_requests_without_reading(broker: KcoordProcess) -> None:
    """Only this connection is muted. A client that reads in the end gets every response, in order."""
    count = 100_000
    body = ListGroupsRequest().encode(5)
    with WireClient(broker.port, 60) as greedy:
        stream = b"".join(encode_request(ApiKey.LIST_GROUPS, 5, number, None, body) for number in range(count))
        sender = threading.Thread(target=greedy.socket.sendall, args=(stream,), daemon=True)
        sender.start()
        for _ in range(5):
            serves(broker)
        for number in range(count):
            assert greedy.receive_frame()[:4] == number.to_bytes(4, "big")
        sender.join(20)


def test_h_10_a_slow_reader(make_server: MakeServer) -> None:
    """The client reads none of its responses, which have 300 KB each."""
    server = make_server(num_partitions="1").start()
    with WireClient(server.port, 60) as client:
        topic = CreateTopicsRequest.CreatableTopic(name="wide", num_partitions=3000, replication_factor=1)
        made = client.call(CreateTopicsRequest(topics=[topic], timeout_ms=60_000), 7, CreateTopicsResponse)
        assert not made.topics[0].error_code
        before_kib = peak_kib(server)
        client.socket.settimeout(2)
        request = encode_request(ApiKey.METADATA, 12, 1, None, MetadataRequest(topics=None).encode(12))
        with pytest.raises(TimeoutError):
            client.socket.sendall(request * 400_000)
    serves(server)
    assert peak_kib(server) - before_kib < 50 * 1024


def test_h_11_floods_of_connections(make_server: MakeServer) -> None:
    server = make_server(
        max_connections="10",
        max_connection_creation_rate="5",
        quota_window_num="2",
        quota_window_size_seconds="1",
    ).start()
    with WireClient(server.port, 60) as client:
        opened = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(30)]
        wait_until(lambda: "max.connections=10 reached" in server.log, "the log names rejected connections")
        for connection in opened:
            connection.close()
        assert client.call(ListGroupsRequest(), 5, ListGroupsResponse).error_code == 0
    wait_until(lambda: _is_admitted(server), "a new connection is accepted again")
    started = time.monotonic()
    for _ in range(12):
        serves(server)
    assert time.monotonic() - started > 1.0, (
        "at most ten connections are accepted in two seconds, and the other connections wait"
    )


def test_h_11_more_connections_than_open_files(make_server: MakeServer) -> None:
    """The broker can still open logs, so it serves the clients that are connected."""
    server = make_server()
    server.files = (300, 300)
    server.start()
    new_topic = CreateTopicsRequest.CreatableTopic(name="t", num_partitions=1, replication_factor=1)
    with WireClient(server.port, 60) as client, ExitStack() as sockets:
        for _ in range(400):
            sockets.enter_context(socket.create_connection(("127.0.0.1", server.port), 5))
        wait_until(lambda: "300 open files (ulimit -n)" in server.log, "the log names rejected connections")
        created = client.call(CreateTopicsRequest(topics=[new_topic], timeout_ms=5000), 7, CreateTopicsResponse)
        assert [topic.error_code for topic in created.topics] == [0]
        assert produce_error(client, encode_batch([Record(value=b"v", timestamp_ms=1000)])) == 0


def _is_admitted(server: KcoordProcess) -> bool:
    try:
        serves(server)
    except CLOSED:
        return False
    return True


def test_h_13_bombs_in_join_group(broker: KcoordProcess) -> None:
    with WireClient(broker.port, 60) as client:
        assert join_classic(client, instance_id="i", protocols=10_000) == 0
        assert join_classic(client, "large", instance_id="i", metadata=bytes(3 << 20)) == 0
        assert sync_classic(client, "refused", bytes(3 << 20)) == Errors.UNKNOWN_SERVER_ERROR
        assert sync_classic(client, "taken", bytes(1 << 19)) == 0
    assert is_closed_after(broker, struct.pack(">ihh", 10 << 20, ApiKey.JOIN_GROUP, 5))


def test_h_14_commits_that_are_too_large(broker: KcoordProcess) -> None:
    with WireClient(broker.port, 60) as client:
        assert commit_error(client, commit_request("g", 1, "x" * 4097)) == Errors.OFFSET_METADATA_TOO_LARGE
        assert commit_error(client, commit_request("g", 100_000)) == Errors.INVALID_COMMIT_OFFSET_SIZE
        assert commit_error(client, commit_request("g", 2)) == 0
    assert is_closed_after(broker, struct.pack(">ihh", 30_000_000, ApiKey.OFFSET_COMMIT, 9))


def test_h_15_ids_that_are_too_long(broker: KcoordProcess) -> None:
    with WireClient(broker.port, 60) as client:
        for group, error in (("", Errors.INVALID_GROUP_ID), ("x" * 32_000, Errors.INVALID_GROUP_ID)):
            assert join_classic(client, group) == error
        assert join_classic(client, instance_id="x" * 32_000) == Errors.INVALID_REQUEST
        assert commit_error(client, commit_request("x" * 5000, 1)) == Errors.INVALID_GROUP_ID
        assert commit_error(client, commit_request("\u65e5\x00\U0001f600", 1)) == 0


@pytest.mark.parametrize(
    "regex", ["(" * 1000 + "a" + ")" * 1000, "(((a{1000}){1000}){1000})", "\\C", "[", "x*" * 10_000]
)
def test_h_16_expensive_regular_expressions(broker: KcoordProcess, regex: str) -> None:
    request = ConsumerGroupHeartbeatRequest(
        group_id="regex",
        member_id="m",
        rebalance_timeout_ms=10_000,
        subscribed_topic_regex=regex,
        topic_partitions=[],
    )
    with WireClient(broker.port, 60) as client:
        answer = client.call(request, 1, ConsumerGroupHeartbeatResponse)
        assert answer.error_code in (0, Errors.INVALID_REGULAR_EXPRESSION)


def test_h_17_floods_of_groups(make_server: MakeServer) -> None:
    server = make_server(kcoord_partition_max_groups="50", kcoord_log_flush_policy="os").start()
    prepare(server)
    with WireClient(server.port, 60) as client:
        errors = [commit_error(client, commit_request(f"g-{number}", 1)) for number in range(1000)]
        assert set(errors) == {Errors.NONE, Errors.POLICY_VIOLATION}
        assert errors.count(Errors.NONE) == 199  # and `g`, which was there before
        assert commit_error(client, commit_request("g-0", 1)) == 0


def produce_error(client: WireClient, batch: bytes) -> Errors:
    partition = ProduceRequest.PartitionProduceData(index=0, records=batch)
    topics = [ProduceRequest.TopicProduceData(name="t", partition_data=[partition])]
    request = ProduceRequest(acks=-1, timeout_ms=5000, topic_data=topics)
    answer = client.call(request, 9, ProduceResponse)
    return Errors(answer.responses[0].partition_responses[0].error_code)


def test_h_18_batches_with_wrong_lengths_and_counts(broker: KcoordProcess) -> None:
    good = encode_batch([Record(value=b"v" * 100, timestamp_ms=1000)])
    damaged = bytearray(good)
    damaged[-3] ^= 1
    with WireClient(broker.port, 60) as client:
        assert produce_error(client, bytes(damaged)) == Errors.CORRUPT_MESSAGE
        lying = _resealed(good, 57, struct.pack(">i", 1_000_000))
        assert produce_error(client, lying) == Errors.INVALID_RECORD
        assert produce_error(client, good[:16] + b"\x01" + good[17:]) == Errors.INVALID_RECORD
        assert produce_error(client, good) == 0


@pytest.mark.parametrize(
    ("codec", "error"),
    [
        (Compression.GZIP, Errors.INVALID_RECORD),
        (Compression.SNAPPY, Errors.MESSAGE_TOO_LARGE),
        (Compression.LZ4, Errors.MESSAGE_TOO_LARGE),
        (Compression.ZSTD, Errors.INVALID_RECORD),
    ],
)
def test_h_18_decompression_bombs(broker: KcoordProcess, codec: Compression, error: Errors) -> None:
    """Hundreds of megabytes of zeros, in as few bytes as the codec needs. The errors are those of Kafka 4.3.1."""
    bomb = compress(codec, bytes(300 << 20))
    header = encode_batch([Record(value=b"", timestamp_ms=1000)])[:61]
    batch = _resealed(header + bomb, 21, struct.pack(">h", int(codec)))
    batch = batch[:8] + struct.pack(">i", len(batch) - 12) + batch[12:]
    with WireClient(broker.port, 60) as client:
        assert produce_error(client, batch) == error


def _resealed(batch: bytes, at: int, piece: bytes) -> bytes:
    """Returns the batch with `piece` at a position after its CRC, and with a matching CRC."""
    import crc32c

    changed = batch[:at] + piece + batch[at + len(piece) :]
    return changed[:17] + struct.pack(">I", crc32c.crc32c(changed[21:])) + changed[21:]


def test_h_19_20_floods_of_one_client_do_not_starve_others(broker: KcoordProcess) -> None:
    body = MetadataRequest(topics=None).encode(12)
    beat = ConsumerGroupHeartbeatRequest(group_id="none", member_id="m", member_epoch=5).encode(1)
    flood = encode_request(ApiKey.METADATA, 12, 1, None, body) + encode_request(
        ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, 2, None, beat
    )
    count = 20_000
    with WireClient(broker.port, 60) as greedy:
        threading.Thread(target=greedy.socket.sendall, args=(flood * count,), daemon=True).start()
        for _ in range(2 * count // 100):
            greedy.receive_frame()
        for _ in range(5):
            serves(broker)
        # The flood ends here. Otherwise the loop below would read the whole flood.
        greedy.socket.shutdown(socket.SHUT_WR)
        answers = 0
        try:
            while True:
                greedy.receive_frame()
                answers += 1
        except CLOSED:
            pass
        assert answers < 2 * count, "other clients were served before the flood was over"


def test_h_21_forged_cursors(broker: KcoordProcess) -> None:
    of_one = DescribeTopicPartitionsRequest.TopicRequest
    for cursor_topic, index, limit in (("t", 2**31 - 1, 2**31 - 1), ("zzz", 0, 1), ("t", -5, 2000), ("", 1, 0)):
        cursor = DescribeTopicPartitionsRequest.Cursor(topic_name=cursor_topic, partition_index=index)
        request = DescribeTopicPartitionsRequest(
            topics=[of_one(name="t")], response_partition_limit=limit, cursor=cursor
        )
        with WireClient(broker.port, 60) as client:
            try:
                answer = client.call(request, 0, DescribeTopicPartitionsResponse)
            except CLOSED:
                pytest.fail(f"no answer to {request}")
            assert sum(len(topic.partitions) for topic in answer.topics) <= 2


MOST_METADATA_BYTES, MOST_GROUP_METADATA_BYTES = 1000, 2500
LONG_NAME = "x" * 0x7FFF
Install = ConsumerGroupInstallAssignmentRequest
Offered = ConsumerGroupHeartbeatRequest.ClientAssignor


@pytest.fixture(scope="module")
def shared_assignor_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    settings = {
        "kcoord.client.assignors.enable": "true",
        "kcoord.client.assignor.metadata.max.bytes": str(MOST_METADATA_BYTES),
        "kcoord.client.assignor.group.metadata.max.bytes": str(MOST_GROUP_METADATA_BYTES),
    }
    server = KcoordProcess(tmp_path_factory.mktemp("assignors"), {**SERVER, **settings}).start()
    prepare(server)
    with WireClient(server.port, 60) as client:
        topic = CreateTopicsRequest.CreatableTopic(name="other", num_partitions=1, replication_factor=1)
        client.call(CreateTopicsRequest(topics=[topic], timeout_ms=5000), 7, CreateTopicsResponse)
    yield server
    server.kill()


@pytest.fixture
def assignor_broker(shared_assignor_server: KcoordProcess) -> Iterator[KcoordProcess]:
    """A broker with client-side assignors. Members of two other groups send heartbeats and notice nothing.

    One of these groups has a server-side assignor. The other waits for a member that computes.
    """
    server, is_over = shared_assignor_server, threading.Event()

    def live(group: str, assignors: list[Offered] | None) -> set[Errors]:
        errors: set[Errors] = set()
        with WireClient(server.port, 60) as client:
            epoch = offer(client, group, assignors).member_epoch
            while not errors or not is_over.wait(0.05):
                beat = ConsumerGroupHeartbeatRequest(group_id=group, member_id="A", member_epoch=epoch)
                errors.add(Errors(client.call(beat, 1, ConsumerGroupHeartbeatResponse).error_code))
        return errors

    with ThreadPoolExecutor() as threads:
        lives = [threads.submit(live, "calm", None), threads.submit(live, "calm-asked", [offered()])]
        yield server
        is_over.set()
        for life in lives:
            assert life.result() == {Errors.NONE}
    serves(server)
    assert "Traceback" not in server.log
    assert peak_kib(server) < MOST_RESIDENT_KIB


def offered(name: str = "x", lowest: int = 0, highest: int = 1, version: int = 1, size: int = 0) -> Offered:
    return Offered(
        name=name,
        minimum_version=lowest,
        maximum_version=highest,
        metadata_version=version,
        metadata_bytes=bytes(size),
    )


def offer(
    client: WireClient, group: str, assignors: list[Offered] | None, member: str = "A"
) -> ConsumerGroupHeartbeatResponse:
    """Joins with client-side assignors."""
    request = ConsumerGroupHeartbeatRequest(
        group_id=group,
        member_id=member,
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
        client_assignors=assignors,
    )
    return client.call(request, 1, ConsumerGroupHeartbeatResponse)


def describe(client: WireClient, group: str) -> ConsumerGroupDescribeResponse.DescribedGroup:
    return client.call(ConsumerGroupDescribeRequest(group_ids=[group]), 1, ConsumerGroupDescribeResponse).groups[0]


@pytest.mark.parametrize(
    ("assignors", "error", "text"),
    [
        ([offered(f"a{number}") for number in range(17)], Errors.INVALID_REQUEST, "17 assignors"),
        ([offered("")], Errors.INVALID_REQUEST, "can't be empty"),
        ([offered(" \t")], Errors.INVALID_REQUEST, "can't be empty"),
        ([offered(), offered()], Errors.INVALID_REQUEST, "the assignor x twice"),
        ([offered(LONG_NAME), offered(LONG_NAME)], Errors.INVALID_REQUEST, "the assignor xxx"),
        ([offered(LONG_NAME, 5, 3)], Errors.INVALID_REQUEST, "5 to 3"),
        ([offered(lowest=-2)], Errors.INVALID_REQUEST, "-2 to 1"),
        ([offered(lowest=-1, highest=-1, version=-1)], Errors.INVALID_REQUEST, "-1 to -1"),
        ([offered(version=2)], Errors.INVALID_REQUEST, "MetadataVersion 2"),
        ([offered("a", size=MOST_METADATA_BYTES), offered("b", size=1)], Errors.INVALID_REQUEST, "1001 bytes"),
    ],
)
def test_h_22_invalid_offers(
    assignor_broker: KcoordProcess, assignors: list[Offered], error: Errors, text: str
) -> None:
    with WireClient(assignor_broker.port, 60) as client:
        refused = offer(client, "offers", assignors)
        assert refused.error_code == error
        assert text in (refused.error_message or "")
        assert describe(client, "offers").error_code == Errors.GROUP_ID_NOT_FOUND


def test_h_22_the_metadata_of_a_group(assignor_broker: KcoordProcess) -> None:
    with WireClient(assignor_broker.port, 60) as client:
        largest = [offered(size=MOST_METADATA_BYTES)]
        errors = [Errors(offer(client, "large", largest, f"m{number}").error_code) for number in range(10)]
        assert errors == [Errors.NONE] * 2 + [Errors.POLICY_VIOLATION] * 8
        assert len(describe(client, "large").members) == 2


def test_h_22_requests_of_members_that_are_not_asked(assignor_broker: KcoordProcess) -> None:
    with WireClient(assignor_broker.port, 60) as client:
        offer(client, "unasked", [offered()])
        epoch = offer(client, "unasked", [offered()], "B").member_epoch
        before = describe(client, "unasked")
        for member, member_epoch, error in (
            ("B", epoch, Errors.UNKNOWN_MEMBER_ID),
            ("nobody", epoch, Errors.UNKNOWN_MEMBER_ID),
            (LONG_NAME, epoch, Errors.UNKNOWN_MEMBER_ID),
            ("B", epoch + 1, Errors.STALE_MEMBER_EPOCH),
            ("B", -1, Errors.INVALID_REQUEST),
            ("", epoch, Errors.INVALID_REQUEST),
        ):
            prepare_request = ConsumerGroupPrepareAssignmentRequest(
                group_id="unasked", member_id=member, member_epoch=member_epoch
            )
            answer = client.call(prepare_request, 0, ConsumerGroupPrepareAssignmentResponse)
            assert answer.error_code == error
            for failure in (0, -1, 1):
                request = Install(
                    group_id="unasked", member_id=member, member_epoch=member_epoch, group_epoch=2, error=failure
                )
                assert client.call(request, 0, ConsumerGroupInstallAssignmentResponse).error_code == error
        assert describe(client, "unasked") == before
        for group in ("no-group", LONG_NAME):
            request = Install(group_id=group, member_id="A", member_epoch=1)
            answer_of_group = client.call(request, 0, ConsumerGroupInstallAssignmentResponse)
            assert answer_of_group.error_code in (Errors.GROUP_ID_NOT_FOUND, Errors.INVALID_GROUP_ID)


def all_partitions(topic_id: bytes) -> list[Install.TopicPartitions]:
    return [Install.TopicPartitions(topic_id=topic_id, partitions=[0, 1])]


@pytest.mark.parametrize(
    ("members", "text"),
    [
        pytest.param(
            lambda t, _: (
                [Install.Member(member_id="A", partitions=all_partitions(t), metadata_version=1)]
                + [Install.Member(member_id=f"m{number}", metadata_version=1) for number in range(150_000)]
            ),
            "m0 is not in the group",
            id="150,000 members",
        ),
        pytest.param(
            lambda t, _: [Install.Member(member_id="A", partitions=all_partitions(t) * 100_000, metadata_version=1)],
            "two owners",
            id="a topic 100,000 times",
        ),
        pytest.param(
            lambda t, _: [Install.Member(member_id=LONG_NAME, partitions=all_partitions(t))] * 2,
            "member xxx",
            id="long names",
        ),
        pytest.param(
            lambda t, other: [
                Install.Member(
                    member_id="A", partitions=all_partitions(t) + all_partitions(other)[:1], metadata_version=1
                )
            ],
            "does not subscribe",
            id="topics of another group",
        ),
        pytest.param(
            lambda t, _: [
                Install.Member(
                    member_id="A",
                    partitions=[Install.TopicPartitions(topic_id=t, partitions=[0, 1, 2**31 - 1, -(2**31)])],
                    metadata_version=1,
                )
            ],
            "has no partition 2147483647",
            id="partitions that do not exist",
        ),
        pytest.param(
            lambda t, _: [
                Install.Member(
                    member_id="A",
                    partitions=all_partitions(t),
                    metadata_version=1,
                    metadata_bytes=bytes(MOST_METADATA_BYTES + 1),
                )
            ],
            "1001 bytes",
            id="too much metadata",
        ),
    ],
)
def test_h_22_hostile_results(
    assignor_broker: KcoordProcess,
    members: Callable[[bytes, bytes], list[Install.Member]],
    text: str,
    request: pytest.FixtureRequest,
) -> None:
    """The member was asked. Its result is refused, nothing is installed, and it stays in the group."""
    group = request.node.callspec.id
    with WireClient(assignor_broker.port, 60) as client:
        joined = offer(client, group, [offered()])
        assert joined.should_compute_assignment
        topic_ids = {
            topic.name: topic.topic_id
            for topic in client.call(MetadataRequest(topics=None), 12, MetadataResponse).topics
        }
        prepare_request = ConsumerGroupPrepareAssignmentRequest(
            group_id=group, member_id="A", member_epoch=joined.member_epoch
        )
        prepared = client.call(prepare_request, 0, ConsumerGroupPrepareAssignmentResponse)
        assert prepared.error_code == 0
        before = describe(client, group)
        install = Install(
            group_id=group,
            member_id="A",
            member_epoch=joined.member_epoch,
            group_epoch=prepared.group_epoch,
            members=members(topic_ids["t"], topic_ids["other"]),
        )
        refused = client.call(install, 0, ConsumerGroupInstallAssignmentResponse)
        assert refused.error_code == Errors.INVALID_ASSIGNMENT
        assert text in (refused.error_message or "")
        after = describe(client, group)
        assert after.failed_computations == 1
        assert (after.group_epoch, after.assignment_epoch) == (before.group_epoch, before.assignment_epoch)
        assert after.members == before.members


def test_h_24_hostile_folders_to_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kafka" / "__consumer_offsets-0"
    folder.mkdir(parents=True)
    size = struct.pack(">qi", 0, 2**31 - 1)
    (folder / f"{0:020}.log").write_bytes(size + zlib.compress(bytes(5000)) * 50)
    target = tmp_path / "data"
    assert main(["log", "import", str(tmp_path / "kafka"), "--into", str(target)]) == 0
    printed = capsys.readouterr()
    assert "__consumer_offsets-0: the torn end was left out: not a record batch" in printed.out + printed.err
