# SPDX-License-Identifier: Apache-2.0
"""The control of a test broker: it executes the requests of tests, with JSON in and out.

Who calls whom, and in which thread:

    test thread                    thread of the event loop
    KcoordBroker -> Transport ---> BrokerController -> BrokerHost -> InstrumentedProcess (the broker)
                                       |                                     |
                                       +-> ControlClient --- TCP ----------->+ -> Monitor -> Faults

* A transport blocks the calling thread until the controller has answered. It is a thread of the same process
  (`ThreadTransport`) or HTTP to another process (`ProcessTransport`, `http_control`).
* The controller, the broker and the monitor run in one event loop, so they need no locks. Control requests of several
  threads interleave at every `await`.
* For everything that a client can do, the controller is a client of its broker (`ControlClient`), under the client id
  CONTROL_CLIENT_ID. What no client can do, it does on the objects of the broker: move the clock, inject faults, set a
  target assignment, expire a session.

`restart` keeps the files, the faults, the history, the ports, and the distance by which the clock is ahead. `reset`
keeps only the settings and the ports, and with `like_new` neither. Both close all connections.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from kcoord.config import ConfigError
from kcoord.server.errors import StartError
from kcoord.testing.arguments import Arguments
from kcoord.testing.control_client import ControlClient
from kcoord.testing.errors import ControlError, WaitTimeout
from kcoord.testing.faults import Selector, fault_from
from kcoord.testing.group_control import WAIT_MS, GroupControl, until
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.testing.host import BrokerHost

_NOT_FOUND: Final = (Errors.GROUP_ID_NOT_FOUND, Errors.UNKNOWN_MEMBER_ID, Errors.UNKNOWN_TOPIC_OR_PARTITION)

MOST_MS: Final = 3_155_760_000_000
"""A clock that is set much further ahead shows times that do not fit into records."""

Query = Mapping[str, str]


class BrokerController:
    """Executes control requests. docs/testing.md lists paths, methods and fields."""

    def __init__(self, host: BrokerHost) -> None:
        self._host = host
        self._client = ControlClient()
        groups = GroupControl(host, self._connected)
        self._routes: list[tuple[str, re.Pattern[str], Callable[..., Awaitable[object]]]] = [
            ("GET", _path("/"), self._status),
            ("POST", _path("/restart"), self._restart),
            ("POST", _path("/reset"), self._reset),
            ("POST", _path("/clock/advance"), self._advance_clock),
            ("POST", _path("/acls"), self._create_acls),
            ("DELETE", _path("/acls"), self._delete_acls),
            ("POST", _path("/topics"), self._create_topic),
            ("POST", _path("/topics/{topic}/partitions"), self._add_partitions),
            ("DELETE", _path("/topics/{topic}"), self._delete_topic),
            ("POST", _path("/topics/{topic}/records"), self._produce),
            ("GET", _path("/topics/{topic}/records"), self._records),
            ("GET", _path("/groups/{group}"), groups.group),
            ("GET", _path("/groups/{group}/offsets"), groups.committed),
            ("PUT", _path("/groups/{group}/offsets"), groups.commit),
            ("PUT", _path("/groups/{group}/target"), groups.override_target),
            ("POST", _path("/groups/{group}/members/{member}/expire"), groups.expire_session),
            ("POST", _path("/faults"), self._add_fault),
            ("GET", _path("/faults"), self._faults),
            ("GET", _path("/faults/{fault}"), self._fault),
            ("DELETE", _path("/faults/{fault}"), self._remove_fault),
            ("DELETE", _path("/faults"), self._clear_faults),
            ("GET", _path("/requests"), self._requests),
            ("DELETE", _path("/requests"), self._forget_requests),
        ]

    async def handle(self, method: str, path: str, query: Query, body: object) -> object:
        """Executes one request and returns the response, a value for JSON.

        `path` is percent-encoded, as in a URL. Raises ControlError if the request is malformed or fails.
        """
        allowed = []
        for route_method, pattern, function in self._routes:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            if route_method != method:
                allowed.append(route_method)
                continue
            parts = [unquote(part) for part in match.groups()]
            return await _run(function(*parts, Arguments({**query} if method == "GET" else body)))
        if allowed:
            raise ControlError(f"{path} supports {' and '.join(allowed)}, not {method}", 405)
        raise ControlError(f"unknown path {path}", 404)

    async def close(self) -> None:
        await self._client.close()

    async def _connected(self) -> ControlClient:
        await self._client.connect(self._host.control_servers)
        return self._client

    # The broker.

    async def _status(self, arguments: Arguments) -> object:
        arguments.end()
        process = self._host.process
        return {
            "bootstrap_servers": self._host.bootstrap_servers,
            "listeners": {
                name: str(listener).partition("://")[2] for name, listener in process.bound_listeners.items()
            },
            "cluster_id": process.broker.cluster_id,
            "now_ms": process.clock.now_ms(),
            "ahead_ms": process.clock.ahead_ms,
            "requests": self._host.monitor.counts(),
        }

    async def _restart(self, arguments: Arguments) -> object:
        arguments.end()
        await self._client.close()
        await self._host.restart()
        return await self._status(Arguments(None))

    async def _reset(self, arguments: Arguments) -> object:
        settings, like_new = arguments.texts("config"), arguments.flag("like_new")
        arguments.end()
        await self._client.close()
        await self._host.reset(settings, like_new=like_new)
        return await self._status(Arguments(None))

    async def _advance_clock(self, arguments: Arguments) -> object:
        milliseconds = arguments.count("ms")
        arguments.end()
        if milliseconds > MOST_MS:
            raise ControlError(f"ms must be at most {MOST_MS}, which is 100 years, not {milliseconds}")
        await self._host.process.advance_clock(milliseconds)
        return {"now_ms": self._host.process.clock.now_ms(), "ahead_ms": self._host.process.clock.ahead_ms}

    # ACLs.

    async def _create_acls(self, arguments: Arguments) -> object:
        acls = arguments.items("acls")
        arguments.end()
        await (await self._connected()).create_acls(acls)
        return {"acls": acls}

    async def _delete_acls(self, arguments: Arguments) -> object:
        acls = arguments.items("acls")
        arguments.end()
        await (await self._connected()).delete_acls(acls)
        return {"acls": acls}

    # Topics and records.

    async def _create_topic(self, arguments: Arguments) -> object:
        name, partitions = arguments.text("name"), arguments.integer("partitions", 1)
        configs = arguments.texts("configs")
        arguments.end()
        await (await self._connected()).create_topic(name, partitions, configs)
        return {"name": name, "partitions": partitions}

    async def _add_partitions(self, topic: str, arguments: Arguments) -> object:
        total = arguments.integer("total")
        arguments.end()
        await (await self._connected()).add_partitions(topic, total)
        return {"name": topic, "partitions": total}

    async def _delete_topic(self, topic: str, arguments: Arguments) -> object:
        arguments.end()
        await (await self._connected()).delete_topic(topic)
        return {"name": topic}

    async def _produce(self, topic: str, arguments: Arguments) -> object:
        records = arguments.items("records")
        arguments.end()
        return await (await self._connected()).produce(topic, records)

    async def _records(self, topic: str, arguments: Arguments) -> object:
        arguments.end()
        return await (await self._connected()).records(topic)

    # Faults and the history of requests.

    async def _add_fault(self, arguments: Arguments) -> object:
        return self._host.monitor.faults.add(fault_from(arguments)).to_json()

    async def _faults(self, arguments: Arguments) -> object:
        arguments.end()
        return [fault.to_json() for fault in self._host.monitor.faults.all()]

    async def _fault(self, number: str, arguments: Arguments) -> object:
        """Returns the fault, after it was applied to at least `hits` requests."""
        hits, timeout_ms = arguments.number("hits", 0), arguments.number("timeout_ms", WAIT_MS)
        arguments.end()
        fault = self._host.monitor.faults.get(_fault_number(number))
        if not await until(lambda: fault.hits >= hits, timeout_ms):
            raise WaitTimeout(f"waited {timeout_ms} ms for {hits} hits of fault {number}, but it has {fault.hits}")
        return fault.to_json()

    async def _remove_fault(self, number: str, arguments: Arguments) -> object:
        arguments.end()
        return self._host.monitor.remove_fault(_fault_number(number)).to_json()

    async def _clear_faults(self, arguments: Arguments) -> object:
        arguments.end()
        self._host.monitor.clear_faults()
        return []

    async def _requests(self, arguments: Arguments) -> object:
        selector = Selector.taken_from(arguments)
        arguments.end()
        return [seen.to_json() for seen in self._host.monitor.requests(selector)]

    async def _forget_requests(self, arguments: Arguments) -> object:
        arguments.end()
        self._host.monitor.forget()
        return []


def _path(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+\}", "([^/]+)", template))


def _fault_number(text: str) -> int:
    if not text.isdecimal():
        raise ControlError(f"the number of a fault must be an integer, not {text!r}", 404)
    return int(text)


async def _run(answer: Awaitable[object]) -> object:
    try:
        return await answer
    except KafkaError as error:
        raise ControlError(str(error), 404 if error.error in _NOT_FOUND else 400) from None
    except (ConfigError, StartError, ValueError) as error:
        raise ControlError(str(error)) from None
