# SPDX-License-Identifier: Apache-2.0
"""A spliced path keeps the order of responses, the backpressure of both sides and its bounds, whatever is cut where."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from kcoord.server.api.api_table import Client, RequestContext
from kcoord.server.api.auto_create import ensure_internal_topic
from kcoord.server.net.muting import Mute
from kcoord.server.net.request_path import MAX_IN_FLIGHT_REQUESTS
from kcoord.upstream.produce_acks import produce_acks
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request, encode_response
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    FetchRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    ListGroupsRequest,
    ListGroupsResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
)
from tests.unit.upstream.harness import NODE_ID, Stage, response, stage

FETCH = FetchRequest(max_wait_ms=1, min_bytes=1)
FETCH_VERSION = 12
JOIN = JoinGroupRequest(
    group_id="g",
    session_timeout_ms=10_000,
    rebalance_timeout_ms=10_000,
    protocol_type="consumer",
    protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="range")],
)
VERSIONS = ApiVersionsRequest(client_software_name="a", client_software_version="1")


def produce(acks: int, size: int = 10) -> ProduceRequest:
    partition = ProduceRequest.PartitionProduceData(index=0, records=bytes(size))
    topic = ProduceRequest.TopicProduceData(name="t", partition_data=[partition])
    return ProduceRequest(acks=acks, timeout_ms=1, topic_data=[topic])


def correlation_ids(frames: list[bytes]) -> list[int]:
    return [int.from_bytes(frame[:4]) for frame in frames]


@pytest.mark.parametrize("seed", range(20))
async def test_responses_leave_in_the_order_of_requests_wherever_bytes_are_cut(seed: int) -> None:
    random = Random(seed)
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        requests: list[bytes] = []
        forwarded: list[bytes] = []
        responses: list[bytes] = []
        for number in range(1, 40):
            kind = random.choice(["fetch", "versions", "produce", "unacknowledged"])
            if kind == "versions":
                requests.append(dialogue.frame(VERSIONS, 3))
                continue
            request: Message = FETCH if kind == "fetch" else produce(0 if kind == "unacknowledged" else -1, number * 50)
            requests.append(dialogue.frame(request, FETCH_VERSION if kind == "fetch" else 9))
            forwarded.append(requests[-1])
            if kind != "unacknowledged":
                responses.append(response(number, random.choice([0, 3, 5000])))
        to_send, to_answer = b"".join(requests), b"".join(responses)
        answers = 0
        while to_send or to_answer:
            cut = random.randint(1, 400)
            dialogue.path.receive(to_send[:cut])
            to_send = to_send[cut:]
            await dialogue.settle()
            if on_stage.upstream.opened:
                # The upstream answers what it has received whole.
                whole = sum(1 for frame in _acknowledged(dialogue.transport.written))
                ready = b"".join(responses[:whole])[answers:]
                cut = random.randint(1, 4000)
                dialogue.link.data_received(ready[:cut])
                answers += len(ready[:cut])
                to_answer = b"".join(responses)[answers:]
                await dialogue.settle()
        assert dialogue.transport.written == b"".join(forwarded)
        expected = [frame[4:] for frame in responses]
        received = dialogue.received
        assert [frame for frame in received if frame in expected] == expected
        unanswered = {number for number, frame in enumerate(requests, 1) if _is_unacknowledged(frame)}
        assert correlation_ids(received) == [number for number in range(1, 40) if number not in unanswered]
        assert not dialogue.path.in_flight


def _is_unacknowledged(frame: bytes) -> bool:
    return frame[5] == ApiKey.PRODUCE and (produce_acks(frame, 12, frame[7]) or (1, 0))[0] == 0


def _acknowledged(data: bytes) -> list[bytes]:
    return [frame for frame in FrameReader(1 << 26).feed(data) if not _is_unacknowledged(bytes(4) + frame)]


async def test_bytes_of_a_large_frame_are_passed_on_before_its_end() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        frame = dialogue.frame(produce(-1, 600_000), 9)
        await dialogue.send(frame[:1000])
        assert dialogue.transport.written == frame[:1000]
        await dialogue.send(frame[1000:500_000])
        assert dialogue.transport.written == frame[:500_000]
        assert dialogue.path.has_unfinished_frame
        await dialogue.send(frame[500_000:])
        assert dialogue.transport.written == frame
        answer = response(1, 500_000)
        dialogue.link.data_received(answer[:300_000])
        assert dialogue.client.written == answer[:300_000]
        dialogue.link.data_received(answer[300_000:])
        assert dialogue.client.written == answer


async def test_a_response_waits_for_an_earlier_one_of_kcoord() -> None:
    """A JoinGroup waits for the initial delay of its group. The Fetch behind it is answered at once."""
    async with stage(group_initial_rebalance_delay_ms="300") as on_stage:
        await _load_groups(on_stage)
        dialogue = on_stage.connect(None)
        await dialogue.send(dialogue.frame(JOIN, 2) + dialogue.frame(FETCH, FETCH_VERSION))
        assert dialogue.client.written == b""
        answer = response(2, 100_000)
        dialogue.link.data_received(answer[:50_000])
        assert dialogue.is_upstream_paused()
        assert dialogue.is_muted()
        dialogue.link.data_received(answer[50_000:])
        assert dialogue.client.written == b""
        announced = dialogue.announced
        while dialogue.announced == announced:
            await asyncio.sleep(0.01)
        dialogue.flush()
        assert correlation_ids(dialogue.received) == [1, 2]
        assert dialogue.client.written.endswith(answer)
        assert not dialogue.is_upstream_paused()
        assert not dialogue.is_muted()


async def test_responses_to_be_rewritten_wait_at_the_upstream_for_an_earlier_one_of_kcoord() -> None:
    """Without that, a client could make kcoord keep many large ones behind a JoinGroup."""
    async with stage(group_initial_rebalance_delay_ms="300") as on_stage:
        await _load_groups(on_stage)
        dialogue = on_stage.connect(None)
        metadata = [dialogue.frame(MetadataRequest(topics=[]), 12) for _ in range(3)]
        await dialogue.send(dialogue.frame(JOIN, 2) + b"".join(metadata))
        answer = MetadataResponse(cluster_id="c" * 1_000).encode(12)
        dialogue.link.data_received(encode_response(1, ApiKey.METADATA, 12, answer))
        assert dialogue.is_upstream_paused()
        assert dialogue.is_muted()
        dialogue.link.data_received(b"".join(encode_response(number, ApiKey.METADATA, 12, answer) for number in (2, 3)))
        announced = dialogue.announced
        while dialogue.announced == announced:
            await asyncio.sleep(0.01)
        await dialogue.settle()
        assert correlation_ids(dialogue.received) == [4, 1, 2, 3]
        assert not dialogue.is_upstream_paused()
        assert not dialogue.is_muted()


async def _load_groups(on_stage: Stage) -> None:
    broker = on_stage.broker
    client = Client(broker.apis.form, "PLAINTEXT", principal="")
    context = RequestContext(ApiKey.CREATE_TOPICS, 0, 0, "", client, broker.now_ms(), rights=None)
    await ensure_internal_topic(broker, context, "__consumer_offsets")
    await broker.groups.loaded()


async def test_a_client_is_not_read_while_the_upstream_takes_no_bytes() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        await dialogue.send(dialogue.frame(FETCH, FETCH_VERSION))
        assert not dialogue.is_muted()
        dialogue.link.pause_writing()
        assert dialogue.is_muted()
        second = dialogue.frame(FETCH, FETCH_VERSION)
        sent = len(dialogue.transport.written)
        dialogue.path.receive(second)
        assert len(dialogue.transport.written) == sent
        announced = dialogue.announced
        dialogue.link.resume_writing()
        assert dialogue.announced > announced
        assert not dialogue.is_muted()
        dialogue.flush()
        assert dialogue.transport.written[sent:] == second


async def test_the_upstream_is_not_read_while_the_client_takes_no_bytes() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        await dialogue.send(dialogue.frame(FETCH, FETCH_VERSION))
        dialogue.path.mute(Mute.SLOW_READER)
        assert dialogue.is_upstream_paused()
        dialogue.path.unmute(Mute.SLOW_READER)
        assert not dialogue.is_upstream_paused()


async def test_requests_wait_until_the_link_is_open() -> None:
    async with stage() as on_stage:
        on_stage.upstream.gate.clear()
        dialogue = on_stage.connect()
        frames = [dialogue.frame(FETCH, FETCH_VERSION) for _ in range(3)]
        dialogue.path.mute(Mute.SLOW_READER)
        dialogue.path.unmute(Mute.SLOW_READER)
        await dialogue.send(b"".join(frames))
        assert dialogue.is_muted()
        on_stage.upstream.gate.set()
        await dialogue.settle()
        assert dialogue.transport.written == b"".join(frames)
        assert not dialogue.is_muted()
        assert on_stage.upstream.asked == [NODE_ID]


async def test_too_many_unanswered_requests_mute_the_path() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        frames = [dialogue.frame(FETCH, FETCH_VERSION) for _ in range(MAX_IN_FLIGHT_REQUESTS + 5)]
        await dialogue.send(b"".join(frames))
        assert dialogue.transport.written == b"".join(frames[:MAX_IN_FLIGHT_REQUESTS])
        assert dialogue.is_muted()
        for number in range(1, 11):
            dialogue.link.data_received(response(number, 5))
        await dialogue.settle()
        assert dialogue.transport.written == b"".join(frames)
        assert not dialogue.is_muted()


async def test_a_client_that_closes_has_sent_its_whole_requests() -> None:
    async with stage() as on_stage:
        on_stage.upstream.gate.clear()
        dialogue = on_stage.connect()
        frame = dialogue.frame(produce(0), 9)
        await dialogue.send(frame)
        dialogue.path.close()
        on_stage.upstream.gate.set()
        await dialogue.settle()
        assert dialogue.transport.written == frame
        assert dialogue.transport.is_closed


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\0\x0f\x42\x41\0\x01\0\x0c\0\0\0\x01", "request of 1000001 bytes, allowed are 1000000"),
        (b"\0\x01\x86\xa1\0\x03\0\x0c\0\0\0\x01", "request of 100001 bytes, allowed are 100000"),
        (b"\xff\xff\xff\xff\0\x01\0\x0c\0\0\0\x01", "request of -1 bytes, allowed are 1000000"),
        (b"\0\0\0\x0c\0\x1c\0\x05\0\0\0\x01\xff\xff\0\0", "TXN_OFFSET_COMMIT v5 is not served"),
        (b"\0\0\0\x0c\0\x00\0\x0a\0\0\0\x01\xff\xff\0\0", "PRODUCE v10 is not served"),
        (b"\0\0\0\x0e\0\x00\0\x09\0\0\0\x01\xff\xff\0\x20aa", "malformed PRODUCE v9 request: its end is before acks"),
        (b"\0\0\xff\xff\0\x00\0\x09\0\0\0\x01\xff\xff" + b"\xff" * 5, "PRODUCE v9 request: varint is longer than 5"),
        (b"GET / HTTP/1.1\r\n\r\n", "request of 1195725856 bytes"),
    ],
)
async def test_bytes_that_are_no_served_request_close_the_connection(frame: bytes, reason: str) -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        await dialogue.send(frame)
        assert dialogue.path.close_reason is not None
        assert reason in dialogue.path.close_reason
        assert not on_stage.upstream.opened
        assert dialogue.is_muted()


async def test_a_frame_of_the_largest_size_is_passed_on() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        await dialogue.send(b"\0\x0f\x42\x40\0\x01\0\x0c\0\0\0\x01")
        assert dialogue.path.close_reason is None
        assert len(dialogue.transport.written) == 12


async def test_an_upstream_that_cannot_be_reached_closes_the_client() -> None:
    async with stage() as on_stage:
        on_stage.upstream.failure = KafkaError(Errors.NETWORK_EXCEPTION, "no connection to upstream:9092")
        dialogue = on_stage.connect()
        await dialogue.send(dialogue.frame(FETCH, FETCH_VERSION))
        reason = "broker 1 of the upstream cannot be reached: no connection to upstream:9092"
        assert dialogue.path.close_reason == reason


async def test_an_upstream_that_breaks_off_closes_a_client_that_waits() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        await dialogue.send(dialogue.frame(FETCH, FETCH_VERSION))
        dialogue.link.data_received(response(1, 100)[:50])
        dialogue.link.connection_lost(None)
        assert dialogue.path.close_reason is None
        assert dialogue.client.is_closed
    async with stage() as on_stage:
        dialogue = on_stage.connect(None)
        await dialogue.send(dialogue.frame(FETCH, FETCH_VERSION))
        dialogue.link.connection_lost(ConnectionResetError("reset"))
        assert dialogue.path.close_reason == "the upstream closed the connection: reset"


async def test_a_link_of_kcoords_own_port_that_breaks_off_in_a_response_is_not_replaced() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect(None)
        await dialogue.send(dialogue.frame(FETCH, FETCH_VERSION))
        dialogue.link.data_received(response(1, 100)[:50])
        dialogue.link.connection_lost(None)
        assert dialogue.client.is_closed


async def test_an_idle_link_of_kcoords_own_port_is_replaced() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect(None)
        await dialogue.send(dialogue.frame(FETCH, FETCH_VERSION))
        dialogue.link.data_received(response(1, 5))
        dialogue.link.connection_lost(None)
        assert not dialogue.client.is_closed
        await dialogue.send(dialogue.frame(FETCH, FETCH_VERSION))
        assert len(on_stage.upstream.opened) == 2
        dialogue.link.data_received(response(2, 5))
        assert dialogue.client.written == response(1, 5) + response(2, 5)
        assert dialogue.path.close_reason is None


async def test_an_idle_link_of_a_brokers_port_ends_its_client() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        await dialogue.send(dialogue.frame(FETCH, FETCH_VERSION))
        dialogue.link.data_received(response(1, 5))
        dialogue.link.connection_lost(None)
        assert dialogue.client.is_closed
        assert dialogue.path.close_reason is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (response(1, 5) + response(9, 0), "a response of 4 bytes that no request waits for"),
        (bytes(4), "a response of 0 bytes that no request waits for"),
    ],
)
async def test_bytes_of_the_upstream_that_are_no_response_close_the_connection(data: bytes, reason: str) -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        await dialogue.send(dialogue.frame(FETCH, FETCH_VERSION))
        dialogue.link.data_received(data)
        assert dialogue.path.close_reason == f"the upstream sent {reason}"


async def test_a_malformed_response_that_has_to_be_rewritten_closes_the_connection() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        await dialogue.send(dialogue.frame(MetadataRequest(topics=[]), 12))
        dialogue.link.data_received(response(1, 3))
        assert dialogue.path.close_reason is not None
        assert dialogue.path.close_reason.startswith("the upstream sent a malformed response to METADATA v12: ")


async def test_groups_are_not_coordinated_on_the_port_of_a_broker() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        await dialogue.send(dialogue.frame(HeartbeatRequest(group_id="g"), 4) + dialogue.frame(ListGroupsRequest(), 3))
        heartbeat, listing = dialogue.received
        assert _decoded(heartbeat, ApiKey.HEARTBEAT, 4, HeartbeatResponse).error_code == Errors.NOT_COORDINATOR
        assert _decoded(listing, ApiKey.LIST_GROUPS, 3, ListGroupsResponse) == ListGroupsResponse()
        assert not on_stage.upstream.opened


def _decoded(frame: bytes, key: ApiKey, version: int, kind: type[Message]) -> Any:
    _, position = decode_response_header(frame, key, version)
    return kind.decode(frame[position:], version)


@pytest.mark.parametrize("version", range(3, 10))
def test_acks_are_read_as_the_codec_reads_them(version: int) -> None:
    """Of each prefix of a request, the result is either unknown or the right one, and of the whole it is known."""
    for client_id in ("", "client", "c" * 300, None):
        for transactional_id in (None, "", "t" * 200):
            for acks in (-1, 0, 1):
                request = produce(acks, 3)
                if version >= 3:
                    request.transactional_id = transactional_id
                frame = encode_request(ApiKey.PRODUCE, version, 1, client_id, request.encode(version))
                results = {produce_acks(frame[:end], 12, version) for end in range(12, len(frame))}
                (acks_and_end,) = results - {None}
                assert acks_and_end is not None and acks_and_end[0] == acks
                assert frame[acks_and_end[1] - 2 : acks_and_end[1]] == acks.to_bytes(2, signed=True)


def test_acks_of_old_versions_follow_the_client_id() -> None:
    start = b"\0\0\0\x0c" + b"\0\0\0\x02" + b"\0\0\0\x01" + b"\0\x01c"
    assert produce_acks(start + b"\xff\xff", 12, 2) == (-1, len(start) + 2)
    assert produce_acks(start + b"\xff", 12, 2) is None


def test_acks_are_found_behind_unknown_tags_of_the_header() -> None:
    body = produce(0).encode(9)
    start = b"\0\0\0\0" + b"\0\0\0\x09" + b"\0\0\0\x01" + b"\0\x01c"
    tags = b"\x02" + b"\x07\x03abc" + b"\x88\x01\x81\x01" + bytes(129)
    acks = produce_acks(start + tags + body, 12, 9)
    assert acks is not None
    assert acks[0] == 0
