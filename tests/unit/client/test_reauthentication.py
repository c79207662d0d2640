# SPDX-License-Identifier: Apache-2.0
"""A client authenticates again on the same connection before its SASL session ends (KIP-368)."""

from __future__ import annotations

import asyncio
import ssl
from itertools import pairwise

import pytest

from kcoord.client.connection import Connection
from kcoord.client.errors import DisconnectException
from kcoord.client.security import RequestSender
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tests.unit.client.fake_broker import Answer, FakeBroker
from tests.unit.client.test_connection import connect
from tests.unit.client.virtual_loop import now_ms

LIFE_MS = 10_000
RENEWAL_MS = 9_000


class Login:
    """A login of one message. `delay_ms` passes before its second message."""

    delay_ms = 0

    def ssl_context(self) -> ssl.SSLContext | None:
        return None

    async def authenticate(self, sender: RequestSender) -> None:
        await sender.call(SaslHandshakeRequest(mechanism="PLAIN"), SaslHandshakeResponse)
        await asyncio.sleep(self.delay_ms / 1000)
        answer = await sender.call(SaslAuthenticateRequest(auth_bytes=b"x"), SaslAuthenticateResponse)
        if answer.error_code:
            raise KafkaError(Errors(answer.error_code), "by script")


class Broker(FakeBroker):
    """Gives sessions an end. Fails the test if a request comes within an authentication."""

    def __init__(self, *, session_ms: int = LIFE_MS) -> None:
        super().__init__(
            {
                ApiKey.SASL_HANDSHAKE: self._begin,
                ApiKey.SASL_AUTHENTICATE: self._end,
                ApiKey.HEARTBEAT: self._beat,
                ApiKey.PRODUCE: lambda *_: None,
            }
        )
        self.session_ms = session_ms
        self.error = Errors.NONE
        self._is_authenticating = False

    def _begin(self, request: Message, version: int) -> Answer:
        self._is_authenticating = True
        return SaslHandshakeResponse()

    def _end(self, request: Message, version: int) -> Answer:
        self._is_authenticating = False
        return SaslAuthenticateResponse(error_code=self.error, session_lifetime_ms=self.session_ms)

    def _beat(self, request: Message, version: int) -> Answer:
        assert not self._is_authenticating
        return HeartbeatResponse()


@pytest.fixture(autouse=True)
def middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.5)


async def beat(connection: Connection, generation: int = 0) -> None:
    await connection.call(HeartbeatRequest(generation_id=generation), HeartbeatResponse)


async def test_a_session_is_renewed_by_the_first_request_after_90_percent() -> None:
    async with Broker() as broker:
        connection = await connect(broker, security=Login())
        begun = now_ms()
        while now_ms() < begun + 4 * LIFE_MS:
            await beat(connection)
            await asyncio.sleep(0.5)
        first, *later = broker.arrivals_of(ApiKey.SASL_AUTHENTICATE)
        assert [time_ms - first for time_ms in later] == pytest.approx([RENEWAL_MS * n for n in range(1, 5)], abs=600)
        assert len(broker.connections) == 1
        # An idle connection needs no session. The next request begins one.
        await asyncio.sleep(100)
        assert len(broker.arrivals_of(ApiKey.SASL_AUTHENTICATE)) == 5
        await beat(connection)
        assert len(broker.arrivals_of(ApiKey.SASL_AUTHENTICATE)) == 6
        await connection.close()


async def test_a_session_without_an_end_is_not_renewed() -> None:
    async with Broker(session_ms=0) as broker:
        connection = await connect(broker, security=Login())
        await asyncio.sleep(1000)
        await beat(connection)
        assert len(broker.arrivals_of(ApiKey.SASL_AUTHENTICATE)) == 1
        await connection.close()


async def test_requests_wait_for_the_renewal_and_keep_their_order() -> None:
    async with Broker() as broker:
        login = Login()
        connection = await connect(broker, security=login)
        await asyncio.sleep(LIFE_MS / 1000)
        login.delay_ms = 700
        before = len(broker.requests)
        calls = [asyncio.create_task(beat(connection, number)) for number in range(5)]
        calls.append(asyncio.create_task(connection.send_unanswered(ProduceRequest(acks=0, timeout_ms=1))))
        calls.append(asyncio.create_task(beat(connection, 5)))
        await asyncio.gather(*calls)
        keys = [key for key, _, _ in broker.requests[before:]]
        assert keys[:2] == [ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE]
        assert keys[2:] == [ApiKey.HEARTBEAT] * 5 + [ApiKey.PRODUCE, ApiKey.HEARTBEAT]
        beats = [request for _, _, request in broker.requests if isinstance(request, HeartbeatRequest)]
        assert [request.generation_id for request in beats] == list(range(6))
        await connection.close()


async def test_a_caller_that_gives_up_does_not_stop_the_renewal() -> None:
    async with Broker() as broker:
        login = Login()
        connection = await connect(broker, security=login)
        await asyncio.sleep(LIFE_MS / 1000)
        login.delay_ms = 700
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(beat(connection), 0.1)
        await beat(connection)
        assert len(broker.arrivals_of(ApiKey.SASL_HANDSHAKE)) == 2
        assert sum(isinstance(request, HeartbeatRequest) for _, _, request in broker.requests) == 1
        await connection.close()


async def test_a_failed_renewal_ends_the_connection() -> None:
    async with Broker() as broker:
        connection = await connect(broker, security=Login())
        await asyncio.sleep(LIFE_MS / 1000)
        broker.error = Errors.SASL_AUTHENTICATION_FAILED
        with pytest.raises(DisconnectException, match=r"the re-authentication failed: SASL_AUTHENTICATION_FAILED"):
            await beat(connection)
        assert connection.is_closed
        # The next connection raises the error of the broker itself.
        with pytest.raises(KafkaError, match="SASL_AUTHENTICATION_FAILED: by script"):
            await connect(broker, security=Login())


async def test_brokers_accept_a_renewal_once_a_second() -> None:
    async with Broker(session_ms=1050) as broker:
        connection = await connect(broker, security=Login())
        for _ in range(300):
            await connection.call(MetadataRequest(topics=[]), MetadataResponse)
            await asyncio.sleep(0.01)
        times = broker.arrivals_of(ApiKey.SASL_HANDSHAKE)
        assert len(times) == 3
        assert all(later - earlier >= 1000 for earlier, later in pairwise(times))
        await connection.close()
