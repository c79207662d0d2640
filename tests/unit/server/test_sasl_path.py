# SPDX-License-Identifier: Apache-2.0
"""SASL on the path of a connection: what is served before, during and after a login, for every cut of the bytes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.config import BrokerConfig
from kcoord.security.plain import PlainUsers
from kcoord.security.sasl import SaslAuthenticator, SaslSettings
from kcoord.security.scram import Decoys
from kcoord.server.api.api_table import ANONYMOUS, Api, ApiTable, RequestContext
from kcoord.server.net.connection import Connections, KafkaConnection
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.framing import FrameReader, encode_request
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
)
from tests.unit.server.test_connection import FakeTransport

VERSIONS = encode_request(ApiKey.API_VERSIONS, 0, 1, "c", ApiVersionsRequest().encode(0))
SHAKE = encode_request(ApiKey.SASL_HANDSHAKE, 1, 2, "c", SaslHandshakeRequest(mechanism="PLAIN").encode(1))
LIST = encode_request(ApiKey.LIST_GROUPS, 3, 4, "c", ListGroupsRequest().encode(3))


def token(data: bytes) -> bytes:
    body = SaslAuthenticateRequest(auth_bytes=data).encode(2)
    return encode_request(ApiKey.SASL_AUTHENTICATE, 2, 3, "c", body)


RIGHT, WRONG = token(b"\0alice\0right"), token(b"\0alice\0wrong")
SETTINGS = SaslSettings(
    ("PLAIN", "SCRAM-SHA-256"),
    PlainUsers({"alice": "right"}),
    lambda *_: None,
    {},
    200,
    100,
    lambda: "nonce",
    Decoys(b"key", {}),
)


class Listener:
    """The settings of a listener with SASL, and an API that notes the principals of its requests."""

    def __init__(self, settings: SaslSettings = SETTINGS) -> None:
        self.now_ms = 0
        self.principals: list[str] = []
        table = ApiTable(
            [
                Api(ApiKey.LIST_GROUPS, range(3, 6), self._list, self._fail),
                Api(ApiKey.API_VERSIONS, range(0, 1), self._versions, self._fail),
            ]
        )
        broker = SimpleNamespace(
            apis=table, groups=None, authorizer=None, audit=None, request_quota=None, now_ms=lambda: self.now_ms
        )
        self.settings = PathSettings(cast("Any", broker), "USERS", 1000, 500, False, None)
        self.settings.new_login = lambda: SaslAuthenticator(lambda: settings)

    def _list(self, broker: object, context: RequestContext, request: object) -> ListGroupsResponse:
        self.principals.append(context.client.principal)
        return ListGroupsResponse()

    def _versions(self, broker: object, context: RequestContext, request: object) -> ApiVersionsResponse:
        assert context.client.principal == ANONYMOUS
        context.client.identify("", "", context.client.form)
        return ApiVersionsResponse()

    def _fail(self, request: object, error: KafkaError, version: int) -> ListGroupsResponse:
        return ListGroupsResponse(error_code=error.error)

    def path(self) -> RequestPath:
        return RequestPath(self.settings, lambda: None, "192.0.2.7", 4711)


def ids(data: bytes) -> list[int]:
    """Returns the correlation ids of responses."""
    return [int.from_bytes(frame[:4], "big") for frame in FrameReader(10_000).feed(data)]


@given(st.lists(st.integers(0, len(VERSIONS + SHAKE + RIGHT + LIST) - 1)))
def test_every_cut_of_the_bytes_gives_the_same_responses(cuts: list[int]) -> None:
    listener = Listener()
    data, path, output = VERSIONS + SHAKE + RIGHT + LIST, listener.path(), b""
    places = [0, *sorted(set(cuts)), len(data)]
    for begin, end in pairwise(places):
        path.receive(data[begin:end])
        output += path.take_output()
    assert (ids(output), listener.principals, path.close_reason) == ([1, 2, 3, 4], ["User:alice"], None)
    assert path.client.principal == "User:alice"


@pytest.mark.parametrize("order", list(permutations((VERSIONS, SHAKE, RIGHT, LIST))), ids=range(24))
def test_no_other_order_of_frames_is_served(order: tuple[bytes, ...]) -> None:
    listener = Listener()
    path = listener.path()
    path.receive(b"".join(order))
    is_right = order.index(SHAKE) + 1 == order.index(RIGHT) and order.index(RIGHT) < order.index(LIST)
    # ApiVersions is served before the handshake and after the login.
    if is_right:
        assert (path.close_reason, listener.principals) == (None, ["User:alice"])
    else:
        assert path.close_reason is not None and listener.principals == []
        # ApiVersions right after the handshake is refused with a response.
        refused = [1] if order[:2] == (SHAKE, VERSIONS) else []
        assert path.is_stopped and ids(path.take_farewell()) == refused


def test_a_failed_login_is_answered_by_the_farewell_and_stops_the_path() -> None:
    listener = Listener()
    path = listener.path()
    path.receive(SHAKE + WRONG + RIGHT + LIST)
    assert path.is_stopped and path.is_muted
    assert (
        path.close_reason == "the authentication with PLAIN failed: Authentication failed: Invalid username or password"
    )
    assert (path.close_delay_ms, ids(path.take_output())) == (100, [2])
    farewell = path.take_farewell()
    assert ids(farewell) == [3] and b"Invalid username or password" in farewell
    assert path.take_farewell() == b""
    assert (listener.principals, path.client.principal) == ([], ANONYMOUS)


def test_logins_are_counted_by_their_outcome() -> None:
    listener = Listener(replace(SETTINGS, max_reauth_ms={"PLAIN": 10_000}))
    lasting, failing = listener.path(), listener.path()
    lasting.receive(SHAKE + RIGHT)
    failing.receive(SHAKE + WRONG)
    assert listener.settings.logins == {"successful_authentication": 1, "failed_authentication": 1}
    lasting.receive(SHAKE + RIGHT)
    listener.now_ms = 5000
    lasting.receive(SHAKE + WRONG)
    renewals = {"successful_reauthentication": 1, "failed_reauthentication": 1}
    assert listener.settings.logins == {"successful_authentication": 1, "failed_authentication": 1, **renewals}
    # A session that ends is no login.
    ending = listener.path()
    ending.receive(SHAKE + RIGHT)
    listener.now_ms = 20_000
    ending.receive(LIST)
    assert ending.close_reason is not None and "expired" in ending.close_reason
    assert listener.settings.logins == {"successful_authentication": 2, "failed_authentication": 1, **renewals}


def test_the_limit_of_a_frame_grows_with_the_login() -> None:
    path = Listener().path()
    path.receive((201).to_bytes(4, "big"))
    assert path.close_reason is not None and "201 bytes" in path.close_reason
    path = Listener().path()
    path.receive(SHAKE + RIGHT)
    path.receive((500).to_bytes(4, "big") + LIST[4:8])
    assert path.close_reason is None
    path = Listener().path()
    path.receive(SHAKE + RIGHT)
    path.receive((501).to_bytes(4, "big") + LIST[4:8])
    assert path.close_reason is not None


def test_a_client_without_a_session_limit_meets_no_authentication_any_more() -> None:
    path = Listener().path()
    path.receive(SHAKE + RIGHT)
    assert path._enter == path._process_frame
    limited = Listener(replace(SETTINGS, max_reauth_ms={"PLAIN": 10})).path()
    limited.receive(SHAKE + RIGHT)
    assert limited._enter != limited._process_frame


def test_a_session_ends_and_can_be_renewed() -> None:
    listener = Listener(replace(SETTINGS, max_reauth_ms={"PLAIN": 1000}))
    path = listener.path()
    path.receive(SHAKE + RIGHT + LIST)
    listener.now_ms = 1001
    path.receive(SHAKE)
    path.receive(RIGHT + LIST)
    assert (path.close_reason, listener.principals, ids(path.take_output())) == (
        None,
        ["User:alice"] * 2,
        [2, 3, 4] * 2,
    )
    listener.now_ms = 2002
    path.receive(LIST)
    assert path.close_reason == "the session has expired, see connections.max.reauth.ms"
    assert (len(listener.principals), path.close_delay_ms, path.take_output()) == (2, 0, b"")


def test_requests_during_a_renewal_are_not_served() -> None:
    listener = Listener(replace(SETTINGS, max_reauth_ms={"PLAIN": 1000}))
    path = listener.path()
    path.receive(SHAKE + RIGHT + SHAKE + LIST)
    assert path.close_reason is not None and listener.principals == []


# --- the connection ---------------------------------------------------------------------------------------------------


class Owner(Connections):
    """The connections of a listener, which keep their reports."""

    def __init__(self, listener: Listener) -> None:
        limits = ConnectionLimits(BrokerConfig.from_properties({}))
        super().__init__(
            limits, partial(RequestPath, listener.settings), max_unread_bytes=1000, login_timeout_seconds=30
        )
        self.reports: list[str] = []

    def report(self, text: str) -> None:
        self.reports.append(text)


def connect(settings: SaslSettings) -> tuple[Owner, KafkaConnection, FakeTransport]:
    owner, transport = Owner(Listener(settings)), FakeTransport()
    connection = owner.open()
    connection.connection_made(transport)
    return owner, connection, transport


async def test_a_client_has_to_log_in_within_a_time() -> None:
    loop = asyncio.get_running_loop()
    with mock.patch.object(loop, "call_later", wraps=loop.call_later) as call_later:
        owner, _, transport = connect(SETTINGS)
        connected = [connect(SETTINGS) for _ in range(3)]
    (seconds, end, *arguments) = call_later.call_args_list[0].args
    assert seconds == 30
    end(*arguments)
    assert transport.aborted
    assert owner.reports == ["192.0.2.7:4711: closing, the client has not logged in after 30 s"]
    # The time does not matter to a client that has logged in, that is being refused, or that is gone.
    connected[0][1].data_received(SHAKE + RIGHT)
    connected[1][1].data_received(SHAKE + WRONG)
    connected[2][1].connection_lost(None)
    for call, (other_owner, _, other_transport) in zip(call_later.call_args_list[1:], connected, strict=True):
        reports = len(other_owner.reports)
        call.args[1](*call.args[2:])
        assert not other_transport.aborted and len(other_owner.reports) == reports


async def test_the_timer_of_a_login_does_not_keep_a_lost_connection() -> None:
    with mock.patch.object(asyncio.get_running_loop(), "call_later") as call_later:
        _, connection, _ = connect(SETTINGS)
    connection.connection_lost(None)
    call_later.return_value.cancel.assert_called_once_with()


async def test_a_failed_login_closes_after_the_delay() -> None:
    owner, connection, transport = connect(SETTINGS)
    with mock.patch.object(asyncio.get_running_loop(), "call_later") as call_later:
        connection.data_received(SHAKE + WRONG)
    call_later.assert_called_once_with(0.1, connection.close)
    await asyncio.sleep(0)
    assert (ids(b"".join(transport.writes)), transport.closed, transport.reading) == ([2], False, False)
    assert owner.reports == [
        "192.0.2.7:4711: closing, the authentication with PLAIN failed: "
        "Authentication failed: Invalid username or password"
    ]
    connection.data_received(RIGHT + LIST)
    connection.close()
    assert (ids(b"".join(transport.writes)), transport.closed) == ([2, 3], True)


async def test_without_a_delay_the_connection_closes_at_once() -> None:
    _, connection, transport = connect(replace(SETTINGS, failure_delay_ms=0))
    connection.data_received(SHAKE + WRONG)
    assert (ids(b"".join(transport.writes)), transport.closed) == ([2, 3], True)


async def test_a_client_that_leaves_during_the_delay_does_not_get_the_last_response() -> None:
    owner, connection, transport = connect(SETTINGS)
    with mock.patch.object(asyncio.get_running_loop(), "call_later"):
        connection.data_received(SHAKE + WRONG)
    connection.connection_lost(None)
    connection.close()
    assert (len(owner), ids(b"".join(transport.writes))) == (0, [2])
