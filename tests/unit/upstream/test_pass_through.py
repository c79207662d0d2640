# SPDX-License-Identifier: Apache-2.0
"""Clients that log in at the upstream: their logins are passed on, and their requests follow on the same connection."""

from __future__ import annotations

import asyncio

import pytest

from kcoord_protocol.api_keys import response_class
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.framing import decode_request_header, decode_response_header, encode_response
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    FetchRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tests.unit.upstream.harness import NODE_ID, Dialogue, Stage, response, stage

FETCH = FetchRequest(max_wait_ms=1, min_bytes=1)
FETCH_VERSION = 12
HANDSHAKE = SaslHandshakeRequest(mechanism="PLAIN")
TOKEN = SaslAuthenticateRequest(auth_bytes=b"\0alice\0secret")
ACCEPTED = SaslAuthenticateResponse(session_lifetime_ms=0)


class Upstream:
    """Reads what a client's link has passed on, and answers it."""

    def __init__(self, client: Dialogue) -> None:
        self.client = client
        self._read = 0

    def requests(self) -> list[bytes]:
        """Returns the frames that have arrived since the last call."""
        data = self.client.passed_on[self._read :]
        self._read += len(data)
        frames = []
        while data:
            length = int.from_bytes(data[:4])
            frames.append(data[4 : 4 + length])
            data = data[4 + length :]
        return frames

    async def answer(self, answer: Message) -> Message:
        """Answers the only new request, which has to be of the API of `answer`. Returns the request."""
        (frame,) = self.requests()
        header, position = decode_request_header(frame)
        assert header.request_api_key == answer.api_key
        version = header.request_api_version
        body = answer.encode(version)
        self.client.link.data_received(encode_response(header.correlation_id, answer.api_key, version, body))
        await self.client.settle()
        request = SaslHandshakeRequest if isinstance(answer, SaslHandshakeResponse) else SaslAuthenticateRequest
        return request.decode(frame[position:], version)


async def log_in(client: Dialogue, accepted: SaslAuthenticateResponse = ACCEPTED) -> Upstream:
    """Logs alice in with PLAIN."""
    upstream = Upstream(client)
    await client.send(client.frame(HANDSHAKE, 1))
    assert await upstream.answer(SaslHandshakeResponse(mechanisms=["PLAIN"])) == HANDSHAKE
    await client.send(client.frame(TOKEN, 2))
    assert await upstream.answer(accepted) == TOKEN
    return upstream


def answers(client: Dialogue, *kinds: tuple[type[Message], int]) -> list[Message]:
    """Decodes the last frames that the client has received."""
    decoded = []
    for frame, (kind, version) in zip(client.received[-len(kinds) :], kinds, strict=True):
        _, position = decode_response_header(frame, kind.api_key, version)
        assert kind is response_class(kind.api_key)
        decoded.append(kind.decode(frame[position:], version))
    return decoded


@pytest.mark.parametrize("node_id", [NODE_ID, None])
async def test_the_link_is_logged_in_as_the_client(node_id: int | None) -> None:
    async with stage() as on_stage:
        client = on_stage.connect_to_log_in(node_id)
        await client.send(client.frame(ApiVersionsRequest(client_software_name="a", client_software_version="1"), 3))
        assert on_stage.upstream.asked == []
        upstream = await log_in(client)
        assert on_stage.upstream.logged_in == [False], "kcoord does not log in for the client"
        assert client.path.client.principal == "User:alice"
        shaken, accepted = answers(client, (SaslHandshakeResponse, 1), (SaslAuthenticateResponse, 2))
        assert (shaken, accepted) == (SaslHandshakeResponse(mechanisms=["PLAIN"]), ACCEPTED)
        await client.send(client.frame(FETCH, FETCH_VERSION))
        (frame,) = upstream.requests()
        assert frame[:2] == FETCH.api_key.to_bytes(2)
        assert on_stage.upstream.asked == [NODE_ID], "it is the same link"


@pytest.mark.parametrize("request_", [FETCH, MetadataRequest(topics=[]), HeartbeatRequest(group_id="g", member_id="m")])
async def test_nothing_is_served_before_the_login(request_: Message) -> None:
    async with stage() as on_stage:
        client = on_stage.connect_to_log_in(None)
        await client.send(client.frame(request_, 4))
        assert client.path.close_reason is not None
        assert on_stage.upstream.asked == []
        assert client.received == []


async def test_requests_wait_until_the_upstream_has_accepted_the_client() -> None:
    async with stage() as on_stage:
        client, heartbeat = on_stage.connect_to_log_in(), HeartbeatRequest(group_id="g", member_id="m")
        upstream = Upstream(client)
        await client.send(client.frame(HANDSHAKE, 1))
        await upstream.answer(SaslHandshakeResponse(mechanisms=["PLAIN"]))
        await client.send(client.frame(TOKEN, 2) + client.frame(heartbeat, 4) + client.frame(FETCH, FETCH_VERSION))
        assert client.is_muted()
        assert len(client.received) == 1
        await upstream.answer(ACCEPTED)
        await client.settle()
        (frame,) = upstream.requests()
        assert frame[:2] == FETCH.api_key.to_bytes(2)
        _, answer = answers(client, (SaslAuthenticateResponse, 2), (HeartbeatResponse, 4))
        assert isinstance(answer, HeartbeatResponse)
        assert answer.error_code == Errors.NOT_COORDINATOR


async def test_a_login_that_the_upstream_refuses_ends_the_connection() -> None:
    refused = SaslAuthenticateResponse(error_code=Errors.SASL_AUTHENTICATION_FAILED, error_message="Wrong password")
    async with stage() as on_stage:
        client = on_stage.connect_to_log_in()
        await log_in(client, refused)
        assert client.path.close_reason == "the authentication with PLAIN was refused"
        assert client.path.client.principal != "User:alice"
        client.client.write(client.path.take_farewell())
        (answer,) = answers(client, (SaslAuthenticateResponse, 2))
        assert answer == refused
        await client.send(client.frame(FETCH, FETCH_VERSION))
        assert Upstream(client).requests()[2:] == []


@pytest.mark.parametrize("node_id", [NODE_ID, None])
@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_link_that_is_lost_during_the_login_ends_the_connection(node_id: int | None, is_answered: bool) -> None:
    async with stage() as on_stage:
        client = on_stage.connect_to_log_in(node_id)
        await client.send(client.frame(HANDSHAKE, 1))
        if is_answered:
            await Upstream(client).answer(SaslHandshakeResponse(mechanisms=["PLAIN"]))
        client.link.connection_lost(None)
        assert client.path.close_reason == "the upstream closed the connection"


async def test_an_upstream_that_cannot_be_reached_is_no_failed_login() -> None:
    async with stage() as on_stage:
        on_stage.upstream.failure = KafkaError(Errors.NETWORK_EXCEPTION, "no connection")
        client = on_stage.connect_to_log_in()
        await client.send(client.frame(HANDSHAKE, 1))
        assert client.path.close_reason == "broker 1 of the upstream cannot be reached: no connection"
        assert client.received == []


async def test_a_link_that_is_lost_later_is_not_replaced() -> None:
    """Requests of groups need no link. The next request that does has lost its login."""
    async with stage() as on_stage:
        client = on_stage.connect_to_log_in(None)
        await log_in(client)
        client.link.connection_lost(None)
        await client.settle()
        assert not client.path.is_stopped
        await client.send(client.frame(HeartbeatRequest(group_id="g", member_id="m"), 4))
        (answer,) = answers(client, (HeartbeatResponse, 4))
        assert isinstance(answer, HeartbeatResponse)
        for request in (FETCH, MetadataRequest(topics=[])):
            await client.send(client.frame(request, 12))
        assert client.path.close_reason == "the upstream has closed the connection in which the client was logged in"
        assert on_stage.upstream.asked == [NODE_ID]


async def reauthenticated(on_stage: Stage, client: Dialogue) -> Upstream:
    """Logs in for 10 minutes, and begins a re-authentication while a Fetch and a Metadata are in flight."""
    upstream = await log_in(client, SaslAuthenticateResponse(session_lifetime_ms=600_000))
    await client.send(client.frame(FETCH, FETCH_VERSION))
    await client.send(client.frame(MetadataRequest(topics=[]), 12))
    await client.send(client.frame(HANDSHAKE, 1) + client.frame(TOKEN, 2) + client.frame(FETCH, FETCH_VERSION))
    return upstream


async def test_reauthentication_keeps_the_order_of_requests_and_responses() -> None:
    async with stage() as on_stage:
        client = on_stage.connect_to_log_in()
        upstream = await reauthenticated(on_stage, client)
        fetch, metadata, handshake = upstream.requests()
        assert [frame[:2] for frame in (fetch, metadata, handshake)] == [
            request.api_key.to_bytes(2) for request in (FETCH, MetadataRequest(), HANDSHAKE)
        ]
        before = len(client.received)
        client.link.data_received(response(int.from_bytes(fetch[4:8]), 20))
        body = MetadataResponse(brokers=[], topics=[]).encode(12)
        client.link.data_received(encode_response(int.from_bytes(metadata[4:8]), MetadataResponse.api_key, 12, body))
        answer = SaslHandshakeResponse(mechanisms=["PLAIN"]).encode(1)
        client.link.data_received(encode_response(0, SaslHandshakeResponse.api_key, 1, answer))
        await client.settle()
        assert len(client.received) == before + 3
        await upstream.answer(SaslAuthenticateResponse(session_lifetime_ms=600_000))
        await client.settle()
        (frame,) = upstream.requests()
        assert frame[:2] == FETCH.api_key.to_bytes(2)
        ids = [int.from_bytes(frame[:4]) for frame in client.received]
        assert ids == sorted(ids)
        assert client.path.client.principal == "User:alice"
        assert on_stage.upstream.asked == [NODE_ID]


async def test_logins_are_counted() -> None:
    async with stage() as on_stage:
        client = on_stage.connect_to_log_in()
        await log_in(client)
        assert client.path._settings.logins == {"successful_authentication": 1}
        refused = on_stage.connect_to_log_in()
        refused._opened_before = len(on_stage.upstream.opened)
        await log_in(refused, SaslAuthenticateResponse(error_code=Errors.SASL_AUTHENTICATION_FAILED))
        assert refused.path._settings.logins == {"failed_authentication": 1}


async def test_a_client_that_goes_away_during_the_login_leaves_nothing_behind() -> None:
    async with stage() as on_stage:
        client = on_stage.connect_to_log_in()
        await client.send(client.frame(HANDSHAKE, 1))
        link = client.link
        client.path.close()
        assert client.transport.is_closed
        body = SaslHandshakeResponse(mechanisms=["PLAIN"]).encode(1)
        link.data_received(encode_response(0, SaslHandshakeResponse.api_key, 1, body))
        await asyncio.sleep(0)
        assert client.received == []
