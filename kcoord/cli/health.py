# SPDX-License-Identifier: Apache-2.0
"""`kcoord health`: exits with 0 if the broker responds and its group coordinator is active, else with 1 and the reason.

It is small and blocking, since containers run it every few seconds. Only if --command-config asks for TLS or SASL it
loads and uses the connection of `kcoord.client`.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from kcoord.cli.old_forms import add_old_positional
from kcoord.cli.options import seconds
from kcoord_protocol.api_keys import ApiKey, response_class
from kcoord_protocol.errors import DecodeError, Errors, FramingError, KafkaError
from kcoord_protocol.framing import FrameReader

if TYPE_CHECKING:
    from kcoord.client.security import Security
    from kcoord_protocol.message import Message

DEFAULT_ADDRESS = "127.0.0.1:9092"
_MAX_RESPONSE_BYTES = 64 * 1024 * 1024
_RECEIVE_BYTES = 65536
_LENGTH_BYTES = 4
_CORRELATION_ID_BYTES = 4
_LARGEST_PORT = 65535
_CLIENT_ID: Final = "kcoord-health"


class Unhealthy(Exception):
    """The broker is not healthy. The text has the reason."""


class HealthConnection:
    """One connection, one request at a time. It uses v0 of each API, whose headers have no tagged fields."""

    def __init__(self, host: str, port: int, timeout_seconds: float) -> None:
        self._socket = socket.create_connection((host, port), timeout_seconds)
        self._frames = FrameReader(_MAX_RESPONSE_BYTES)
        self._correlation_id = 0

    def __enter__(self) -> HealthConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, request: Message) -> Message:
        """Sends `request` as v0 and returns the response."""
        self._correlation_id += 1
        client_id = _CLIENT_ID.encode()
        head = request.api_key.to_bytes(2, "big") + bytes(2) + self._correlation_id.to_bytes(4, "big")
        frame = head + len(client_id).to_bytes(2, "big") + client_id + request.encode(0)
        self._socket.sendall(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
        response = self._receive()
        if int.from_bytes(response[:_CORRELATION_ID_BYTES], "big") != self._correlation_id:
            raise Unhealthy(f"{ApiKey(request.api_key).name}: the response belongs to another request")
        return response_class(request.api_key).decode(response[_CORRELATION_ID_BYTES:], 0)

    def _receive(self) -> bytes:
        while True:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise Unhealthy("the connection was closed")
            frames = self._frames.feed(data)
            if frames:
                return frames[0]


class Health(NamedTuple):
    """The numbers of APIs and groups of a healthy broker."""

    apis: int
    groups: int


Conversation: TypeAlias = "Generator[Message, Message, Health]"
"""Yields each request, all of v0, and gets its response. Raises Unhealthy if a response has an error."""


def conversation() -> Conversation:
    """Returns the requests of a check."""
    from kcoord_protocol.messages import (
        ApiVersionsRequest,
        ApiVersionsResponse,
        FindCoordinatorRequest,
        FindCoordinatorResponse,
        ListGroupsRequest,
        ListGroupsResponse,
    )

    versions = yield ApiVersionsRequest()
    assert isinstance(versions, ApiVersionsResponse)
    _require(ApiKey.API_VERSIONS, versions.error_code)
    coordinator = yield FindCoordinatorRequest(key=_CLIENT_ID)
    assert isinstance(coordinator, FindCoordinatorResponse)
    _require(ApiKey.FIND_COORDINATOR, coordinator.error_code)
    groups = yield ListGroupsRequest()
    assert isinstance(groups, ListGroupsResponse)
    _require(ApiKey.LIST_GROUPS, groups.error_code)
    return Health(len(versions.api_keys), len(groups.groups))


def _require(api_key: ApiKey, error_code: int) -> None:
    if error_code:
        raise Unhealthy(f"{api_key.name}: {Errors(error_code).name}")


def check(host: str, port: int, timeout_seconds: float) -> Health:
    """Checks a broker over a plain connection. Raises Unhealthy if a response has an error."""
    requests = conversation()
    with HealthConnection(host, port, timeout_seconds) as client:
        request = next(requests)
        while True:
            try:
                request = requests.send(client.call(request))
            except StopIteration as end:
                health: Health = end.value
                return health


async def check_secured(host: str, port: int, timeout_seconds: float, security: Security) -> Health:
    """Does what `check` does over a connection with TLS or SASL. Raises KafkaError too."""
    from kcoord.client.connection import open_connection

    timeout_ms = int(timeout_seconds * 1000)
    connection = await open_connection(
        host,
        port,
        client_id=_CLIENT_ID,
        request_timeout_ms=timeout_ms,
        connect_timeout_ms=timeout_ms,
        max_frame_bytes=_MAX_RESPONSE_BYTES,
        security=security,
    )
    requests = conversation()
    try:
        request = next(requests)
        while True:
            response = await connection.call_version(request, response_class(request.api_key), 0)
            try:
                request = requests.send(response)
            except StopIteration as end:
                health: Health = end.value
                return health
    finally:
        await connection.close()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord health", description=__doc__)
    parser.add_argument(
        "--bootstrap-server",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"brokers to check, separated by commas (default {DEFAULT_ADDRESS})",
    )
    add_old_positional(parser, "--bootstrap-server", "HOST:PORT")
    parser.add_argument(
        "--command-config", type=Path, metavar="FILE", help="a properties file with TLS and SASL settings"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--timeout",
        type=seconds(may_be_0=False),
        default=5.0,
        metavar="SECONDS",
        help="timeout of each request (default 5)",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    addresses = [address.strip() for address in options.bootstrap_server.split(",")]
    for address in addresses:
        port = address.rpartition(":")[2]
        if not (port.isascii() and port.isdecimal() and int(port) <= _LARGEST_PORT):
            parser.error(f"{address} is not HOST:PORT")
    try:
        security = None if options.command_config is None else _security_of(options.command_config)
    except (OSError, ValueError) as error:
        print(f"kcoord health: {error}", file=sys.stderr)
        return 1
    # Checks all brokers, since every broker has to be healthy.
    return max([_check_and_print(address, security, options) for address in addresses])


def _security_of(file: Path) -> Security | None:
    """Returns the security that a properties file asks for. Raises ValueError if it is not usable."""
    from kcoord.client.security_properties import security_of
    from kcoord.config.properties import parse_properties, read_text

    return security_of(parse_properties(read_text(file)))


def _check_and_print(address: str, security: Security | None, options: argparse.Namespace) -> int:
    """Checks one broker and prints the outcome; returns the exit code."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    health, reason = None, None
    try:
        if security is None:
            health = check(host, int(port), options.timeout)
        else:
            import asyncio

            health = asyncio.run(check_secured(host, int(port), options.timeout, security))
    except (Unhealthy, OSError, DecodeError, FramingError, KafkaError) as error:
        reason = str(error)
        print(f"{address} is not healthy: {error}", file=sys.stderr)
    if options.json:
        import json

        numbers = {"apis": None, "groups": None} if health is None else health._asdict()
        print(json.dumps({"address": address, "healthy": health is not None, **numbers, "reason": reason}))
    elif health is not None:
        print(f"{address} serves {health.apis} APIs and {health.groups} groups")
    return 0 if health is not None else 1
