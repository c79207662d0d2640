# SPDX-License-Identifier: Apache-2.0
"""One connection to one broker.

Theory of operation. Requests are pipelined: `call` writes its request at once and waits for the response. A broker
responds in the order of the requests, so the queue of unanswered requests has the order of the responses. The
correlation ids are checked against it.

A connection is opened by `open_connection`: TCP or TLS, then ApiVersions, then SASL, then it is usable. It ends with
its first failure: a response that is malformed, unexpected or late, a lost connection, or `close`. A late response ends
it, because all later responses wait for it. A failure fails all unanswered requests, and every later request,
with DisconnectException. The request that timed out fails with TimeoutException. The caller cannot know whether the
broker executed such a request.

If the caller of a request is cancelled, its place in the queue stays, and its response is dropped.

A SASL session may have an end (`connections.max.reauth.ms` of the broker, or the end of a token). The first request
after 85 to 95 % of its life then waits until the client has authenticated again, on the same connection (KIP-368).
The requests that follow wait behind it, so they keep their order. If the re-authentication fails, the connection ends.
The next attempt opens another one, whose authentication raises the error.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeVar, cast

from kcoord.client.api_versions import ApiVersions, Kip1327Revision
from kcoord.client.errors import DisconnectException, TimeoutException
from kcoord.client.results import error_of
from kcoord.client.security import Security
from kcoord.client.tasks import spawn
from kcoord.client.tls_failures import handshake_failure
from kcoord.client.version import SOFTWARE_NAME, SOFTWARE_VERSION
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import DecodeError, EncodeError, Errors, FramingError, KafkaError, UnsupportedVersionError
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.message import Message
from kcoord_protocol.messages import ApiVersionsRequest, ApiVersionsResponse, SaslAuthenticateResponse

Response = TypeVar("Response", bound=Message)

_MAX_CORRELATION_ID: Final = 0x7FFF_FFFF
_RENEWAL_SHARE: Final = 0.85
_RENEWAL_JITTER: Final = 0.1
"""Kafka's clients authenticate again at a random time between 85 and 95 % of a session."""
_SHORTEST_RENEWAL_MS: Final = 1000
"""Brokers accept a re-authentication at most once a second."""


@dataclass(slots=True)
class _Waiting:
    """A request that waits for its response."""

    correlation_id: int
    api_key: int
    version: int
    answer: asyncio.Future[bytes]


@dataclass(slots=True)
class ExpectedBroker:
    """The broker and the cluster that the client expects at an address."""

    cluster_id: str
    node_id: int


class Connection(asyncio.Protocol):
    """A connection that `open_connection` made. `call` sends a request and returns its response."""

    def __init__(
        self,
        address: str,
        client_id: str,
        request_timeout_ms: int,
        max_frame_bytes: int,
        software_name: str = SOFTWARE_NAME,
        revision: Kip1327Revision = "creation-time",
    ) -> None:
        self.address = address
        self._software_name = software_name
        self._revision: Kip1327Revision = revision
        self.versions = ApiVersions({})
        self._client_id = client_id
        self._request_timeout_ms = request_timeout_ms
        self._reader = FrameReader(max_frame_bytes)
        self._waiting: deque[_Waiting] = deque()
        self._transport: asyncio.Transport | None = None
        self._correlation_id = 0
        self._failure: DisconnectException | TimeoutException | None = None
        self.lost_by: Exception | None = None
        """The error with which the transport lost the connection."""
        self._writable = asyncio.Event()
        self._closed = asyncio.Event()
        self._session: _Session | None = None
        """None if the client has no SASL session, or one without an end."""

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except FramingError as error:
            self._fail(DisconnectException(f"{self.address} sent an invalid frame: {error}"))
            return
        for frame in frames:
            self._take(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost_by = exc
        self._fail(DisconnectException(f"{self.address} closed the connection{f': {exc}' if exc else ''}"))
        self._closed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # Called by the client.

    @property
    def is_closed(self) -> bool:
        return self._failure is not None

    @property
    def in_flight(self) -> int:
        """The number of requests that wait for a response."""
        return len(self._waiting)

    async def call(
        self,
        request: Message,
        response: type[Response],
        *,
        lowest: int = 0,
        highest: int | None = None,
        timeout_ms: int | None = None,
    ) -> Response:
        """Sends a request in the highest common version within `lowest` and `highest`. Returns the response.

        Raises UnsupportedVersionException if there is no such version.
        """
        version = self.versions.choose(type(request), lowest, highest)
        return await self.call_version(request, response, version, timeout_ms=timeout_ms)

    async def call_version(
        self, request: Message, response: type[Response], version: int, *, timeout_ms: int | None = None
    ) -> Response:
        """Sends a request in exactly this version. Returns the response."""
        body = _encode(request, version)
        await self.ready()
        return await self._exchange(request, response, version, body, timeout_ms)

    async def _exchange(
        self, request: Message, response: type[Response], version: int, body: bytes, timeout_ms: int | None = None
    ) -> Response:
        waiting = self._send(request.api_key, version, body)
        frame = await self._receive(waiting, timeout_ms or self._request_timeout_ms, request.message_name)
        try:
            _, position = decode_response_header(frame, waiting.api_key, version)
            return response.decode(frame[position:], version)
        except DecodeError as error:
            raise self._malformed(response.message_name, error) from error

    def _malformed(self, name: str, error: DecodeError) -> DisconnectException:
        """Ends the connection because of a malformed response. Returns the error for the caller of the request."""
        failure = DisconnectException(f"{self.address} sent a malformed {name}: {error}")
        self._fail(failure)
        return failure

    async def ready(self) -> None:
        """Returns when a request can be sent at once, for callers that decide right before it whether to send it.

        Ends the connection if the broker reads too little for that within the request timeout. A request without a
        response has no other limit.
        """
        await self._wait_until_writable()
        if self._session is not None:
            await self._session.wait_for_turn()

    async def _wait_until_writable(self) -> None:
        if self._writable.is_set():
            return
        try:
            async with asyncio.timeout(self._request_timeout_ms / 1000):
                await self._writable.wait()
        except TimeoutError:
            error = TimeoutException(f"{self.address} did not read requests for {self._request_timeout_ms} ms")
            self._fail(error)
            raise error from None

    async def call_in_login(self, request: Message, response: type[Response]) -> Response:
        """Sends a request of the authentication, which no other request may delay. Returns the response."""
        version = self.versions.choose(type(request))
        body = _encode(request, version)
        await self._wait_until_writable()
        return await self._exchange(request, response, version, body)

    async def authenticate(self, security: Security) -> None:
        """Authenticates the client, and from now on again before each end of its session."""
        session = _Session(self, security)
        await session.authenticate()
        if session.has_end:
            self._session = session

    async def send_unanswered(self, request: Message, *, highest: int | None = None) -> None:
        """Sends a request that has no response: a Produce with acks=0."""
        version = self.versions.choose(type(request), 0, highest)
        body = _encode(request, version)
        await self.ready()
        self._write(request.api_key, version, body)

    async def negotiate(self, expected: ExpectedBroker | None = None) -> None:
        """Sends ApiVersions and keeps the versions that the broker offers.

        If the broker does not have the version of the request, it returns the versions that it has (KIP-511), and the
        client sends the request again. Raises REBOOTSTRAP_REQUIRED if the broker has version 5 and is not the
        `expected` one (KIP-1242).
        """
        request = ApiVersionsRequest(client_software_name=self._software_name, client_software_version=SOFTWARE_VERSION)
        if expected is not None:
            request.cluster_id, request.node_id = expected.cluster_id, expected.node_id
        version = ApiVersionsRequest.valid_versions.stop - 1
        while True:
            answer = await self._ask_versions(request, version)
            if answer.error_code != Errors.UNSUPPORTED_VERSION:
                break
            if version == 0:
                break
            offered = next((api.max_version for api in answer.api_keys if api.api_key == ApiKey.API_VERSIONS), 0)
            version = min(offered, version - 1)
        if answer.error_code:
            raise KafkaError(error_of(answer.error_code), f"{self.address} rejected ApiVersions")
        self.versions = ApiVersions.from_response(answer, self._revision)

    async def _ask_versions(self, request: ApiVersionsRequest, version: int) -> ApiVersionsResponse:
        """Sends one ApiVersions request. A response with UNSUPPORTED_VERSION is always in version 0."""
        await self._wait_until_writable()
        waiting = self._send(ApiKey.API_VERSIONS, version, request.encode(version))
        frame = await self._receive(waiting, self._request_timeout_ms, request.message_name)
        body = frame[4:]
        error = int.from_bytes(body[:2], "big", signed=True)
        try:
            return ApiVersionsResponse.decode(body, 0 if error == Errors.UNSUPPORTED_VERSION else version)
        except DecodeError as malformed:
            raise self._malformed(ApiVersionsResponse.message_name, malformed) from malformed

    def end(self, reason: str) -> None:
        """Ends the connection because of a failure. Requests in flight fail with DisconnectException."""
        self._fail(DisconnectException(f"{self.address}: {reason}"))

    async def close(self) -> None:
        """Closes the connection. Requests in flight fail with DisconnectException."""
        self._fail(DisconnectException(f"the connection to {self.address} was closed"))
        await self._closed.wait()

    def hand_over(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        """Gives the open connection to another protocol, and returns its transport. No request may be in flight.

        This object is closed then. Raises DisconnectException if the connection is closed already.
        """
        if self._failure is not None:
            raise DisconnectException(self._failure.message)
        assert self._transport is not None and not self._waiting
        self._failure = DisconnectException(f"the connection to {self.address} has another owner")
        self._closed.set()
        self._transport.set_protocol(protocol)
        return self._transport

    def _send(self, api_key: int, version: int, body: bytes) -> _Waiting:
        correlation_id = self._write(api_key, version, body)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(correlation_id, api_key, version, answer)
        self._waiting.append(waiting)
        return waiting

    def _write(self, api_key: int, version: int, body: bytes) -> int:
        if self._failure is not None:
            raise DisconnectException(self._failure.message)
        assert self._transport is not None
        correlation_id = self._correlation_id
        self._correlation_id = (correlation_id + 1) & _MAX_CORRELATION_ID
        self._transport.write(encode_request(api_key, version, correlation_id, self._client_id, body))
        return correlation_id

    async def _receive(self, waiting: _Waiting, timeout_ms: int, what: str) -> bytes:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await waiting.answer
        except TimeoutError:
            error = TimeoutException(f"{self.address} did not answer {what} within {timeout_ms} ms")
            self._fail(error)
            raise error from None

    def _take(self, frame: bytes) -> None:
        """Hands a response to its request. The caller of the request may have been cancelled since."""
        if not self._waiting:
            self._fail(DisconnectException(f"{self.address} sent a response to no request"))
            return
        waiting = self._waiting.popleft()
        correlation_id = int.from_bytes(frame[:4], "big", signed=True)
        if len(frame) < 4 or correlation_id != waiting.correlation_id:
            self._waiting.appendleft(waiting)
            self._fail(
                DisconnectException(
                    f"{self.address} sent {len(frame)} bytes as the response to request {correlation_id}, the next "
                    f"response is to request {waiting.correlation_id}"
                )
            )
        elif not waiting.answer.done():
            waiting.answer.set_result(frame)

    def _fail(self, error: DisconnectException | TimeoutException) -> None:
        """Ends the connection and fails all waiting requests. Only the first failure counts."""
        if self._failure is not None:
            return
        self._failure = error
        self._writable.set()
        while self._waiting:
            answer = self._waiting.popleft().answer
            if not answer.done():
                answer.set_exception(DisconnectException(error.message))
        assert self._transport is not None
        self._transport.abort()


def _encode(request: Message, version: int) -> bytes:
    """Returns the body of a request. Raises KafkaError if a value does not fit, as if the broker had rejected it."""
    try:
        return request.encode(version)
    except EncodeError as error:
        code = Errors.UNSUPPORTED_VERSION if isinstance(error, UnsupportedVersionError) else Errors.INVALID_REQUEST
        raise KafkaError(code, f"{request.message_name}: {error}") from error


class _Session:
    """The SASL session of a connection, which has to be renewed before its end. It is the sender of its requests."""

    def __init__(self, connection: Connection, security: Security) -> None:
        self._connection = connection
        self._security = security
        self._lifetime_ms = 0
        self._renew_at: float | None = None
        """The time of the event loop at which the session should be renewed, None if it has no end."""
        self._renewal: asyncio.Task[None] | None = None
        self._turns = asyncio.Lock()

    @property
    def has_end(self) -> bool:
        return self._renew_at is not None

    async def call(self, request: Message, response: type[Response]) -> Response:
        answer = await self._connection.call_in_login(request, response)
        if isinstance(answer, SaslAuthenticateResponse):
            self._lifetime_ms = answer.session_lifetime_ms
        return answer

    async def authenticate(self) -> None:
        """Begins or renews the session."""
        self._lifetime_ms = 0
        await self._security.authenticate(self)
        lifetime_ms = self._lifetime_ms
        share = _RENEWAL_SHARE + _RENEWAL_JITTER * random.random()
        wait_ms = max(lifetime_ms * share, min(lifetime_ms, _SHORTEST_RENEWAL_MS))
        self._renew_at = asyncio.get_running_loop().time() + wait_ms / 1000 if lifetime_ms > 0 else None

    async def wait_for_turn(self) -> None:
        """Returns when the next request may be sent, in the order of the calls. Renews the session if that is due.

        If the caller is cancelled, the renewal continues, because half an authentication would end the connection.
        """
        # An asyncio.Lock is fair: a later caller never passes one that waits.
        async with self._turns:
            is_due = self._renew_at is not None and asyncio.get_running_loop().time() >= self._renew_at
            if is_due and self._renewal is None:
                self._renewal = spawn(self._renew(), "kcoord re-authentication")
            if self._renewal is not None:
                await asyncio.shield(self._renewal)

    async def _renew(self) -> None:
        try:
            await self.authenticate()
        except Exception as error:
            self._connection.end(f"the re-authentication failed: {error}")
        finally:
            self._renewal = None


async def open_connection(
    host: str,
    port: int,
    *,
    client_id: str,
    request_timeout_ms: int,
    connect_timeout_ms: int,
    max_frame_bytes: int,
    security: Security | None = None,
    software_name: str = SOFTWARE_NAME,
    revision: Kip1327Revision = "creation-time",
    expected: ExpectedBroker | None = None,
) -> Connection:
    """Opens a connection, negotiates the versions and authenticates.

    `connect_timeout_ms` bounds the connection setup with TLS; `request_timeout_ms` bounds each request after it.
    Raises KafkaError: SslAuthenticationException if the TLS handshake fails.
    """
    address = f"{host}:{port}"
    loop = asyncio.get_running_loop()
    context: ssl.SSLContext | None = security.ssl_context() if security is not None else None
    try:
        async with asyncio.timeout(connect_timeout_ms / 1000):
            _, connection = await loop.create_connection(
                lambda: Connection(address, client_id, request_timeout_ms, max_frame_bytes, software_name, revision),
                host,
                port,
                ssl=context,
            )
    except TimeoutError:
        raise TimeoutException(f"no connection to {address} within {connect_timeout_ms} ms") from None
    except (OSError, OverflowError, UnicodeError) as error:
        # The last two are the errors of a port and of a name of a host that cannot exist.
        rejection = handshake_failure(address, error)
        if rejection is not None:
            raise rejection from error
        raise DisconnectException(f"no connection to {address}: {str(error) or type(error).__name__}") from error
    try:
        try:
            await connection.negotiate(expected)
        except DisconnectException as error:
            raise handshake_failure(address, connection.lost_by) or error from None
        if security is not None:
            await connection.authenticate(security)
    except BaseException:
        await connection.close()
        raise
    return connection
