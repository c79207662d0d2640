# SPDX-License-Identifier: Apache-2.0
"""The control of a test broker: JSON in, JSON out, whoever carries it (a thread of the same process, or HTTP).

Runs in the event loop of the broker. What a client can do, it does as a client, under CONTROL_CLIENT_ID.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from kcoord.config import ConfigError
from kcoord.testing.arguments import Arguments
from kcoord.testing.control_client import ControlClient
from kcoord.testing.errors import ControlError, WaitTimeout
from kcoord.testing.faults import Selector, fault_from
from kcoord.testing.group_control import WAIT_MS, GroupControl, until
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.testing.host import BrokerHost

_NOT_FOUND: Final = (Errors.GROUP_ID_NOT_FOUND, Errors.UNKNOWN_MEMBER_ID, Errors.UNKNOWN_TOPIC_OR_PARTITION)

Query = Mapping[str, str]


class BrokerController:
    """`handle` answers one request. Paths, methods and fields are those of docs/testing.md."""

    def __init__(self, host: BrokerHost) -> None:
        self._host = host
        self._client = ControlClient()
        groups = GroupControl(host, self._connected)
        self._routes: list[tuple[str, re.Pattern[str], Callable[..., Awaitable[object]]]] = [
            ("GET", _path("/"), self._status),
            ("POST", _path("/restart"), self._restart),
            ("POST", _path("/reset"), self._reset),
            ("POST", _path("/clock/advance"), self._advance_clock),
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
        """The answer, a value for JSON; `path` is percent-encoded, as in a URL. ControlError where the request is wrong
        or cannot be done.
        """
        allowed = []
        for known_method, pattern, function in self._routes:
            found = pattern.fullmatch(path)
            if found is None:
                continue
            if known_method != method:
                allowed.append(known_method)
                continue
            named = [unquote(part) for part in found.groups()]
            return await _run(function(*named, Arguments({**query} if method == "GET" else body)))
        if allowed:
            raise ControlError(f"{path} takes {' and '.join(allowed)}, not {method}", 405)
        raise ControlError(f"there is no {path}", 404)

    async def close(self) -> None:
        await self._client.close()

    async def _connected(self) -> ControlClient:
        await self._client.connect(self._host.bootstrap_servers)
        return self._client

    # The broker.

    async def _status(self, arguments: Arguments) -> object:
        arguments.end()
        process = self._host.process
        return {
            "bootstrap_servers": self._host.bootstrap_servers,
            "listeners": {name: str(one).partition("://")[2] for name, one in process.bound.items()},
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
        await self._host.process.advance_clock(milliseconds)
        return {"now_ms": self._host.process.clock.now_ms(), "ahead_ms": self._host.process.clock.ahead_ms}

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
        """At once, or when so many requests have met it."""
        hits, timeout_ms = arguments.number("hits", 0), arguments.number("timeout_ms", WAIT_MS)
        arguments.end()
        fault = self._host.monitor.faults.get(_fault_number(number))
        if not await until(lambda: fault.hits >= hits, timeout_ms):
            raise WaitTimeout(f"waited {timeout_ms} ms for {hits} requests to meet fault {number}, {fault.hits} did")
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
    if not text.isdigit():
        raise ControlError(f"a fault has a number, not {text!r}", 404)
    return int(text)


async def _run(answer: Awaitable[object]) -> object:
    try:
        return await answer
    except KafkaError as error:
        raise ControlError(str(error), 404 if error.error in _NOT_FOUND else 400) from None
    except (ConfigError, ValueError) as error:
        raise ControlError(str(error)) from None
