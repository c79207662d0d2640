# SPDX-License-Identifier: Apache-2.0
"""What the responses of all APIs tell about rights: refusals with their texts, and authorized operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kcoord_protocol.api_keys import ApiKey, response_class
from kcoord_protocol.errors import Errors
from kcoord_protocol.message import Struct
from tests.integration.wire import ConnectionClosed, WireClient
from tests.unit.server.authorization_examples import EXAMPLES

REFUSALS = {error.value for error in Errors if error.name.endswith("AUTHORIZATION_FAILED")}
LOGINS = {ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE}
"""They change the connection. tests/integration/clients/test_sasl.py has them."""
NO_ANSWER = ("no answer",)

Row = tuple[object, ...]


def ask_all(connect: Callable[[], WireClient], left_out: frozenset[ApiKey] = frozenset()) -> dict[str, list[Row]]:
    """Sends all examples over one connection. Returns what the responses tell about rights, by request.

    If the broker closes the connection or does not answer in time, the next request has a new connection.
    """
    told: dict[str, list[Row]] = {}
    client = connect()
    for key, examples in EXAMPLES.items():
        if key in LOGINS or key in left_out:
            continue
        for number, (request, version) in enumerate(examples):
            try:
                response = client.call(request, version, response_class(key))
                told[f"{key.name} {number}"] = list(rights_in(response))
            except (ConnectionClosed, OSError):
                told[f"{key.name} {number}"] = [NO_ANSWER]
                client.socket.close()
                client = connect()
    client.socket.close()
    return told


def rights_in(message: Struct, path: str = "") -> Iterator[Row]:
    """Yields the refusals of a response with their texts, and the authorized operations."""
    values = {name: getattr(message, name) for name in message.__slots__}
    for name, value in values.items():
        here = f"{path}.{name}"
        if name.endswith("error_code"):
            if value in REFUSALS:
                yield here, Errors(value).name, values.get("error_message")
        elif name.endswith("authorized_operations"):
            yield here, value
        elif isinstance(value, list):
            for number, part in enumerate(value):
                if isinstance(part, Struct):
                    yield from rights_in(part, f"{here}[{number}]")
