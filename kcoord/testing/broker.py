# SPDX-License-Identifier: Apache-2.0
"""A broker for tests, and everything that a test may do to it. All calls block; from a coroutine use
`asyncio.to_thread`.

Whatever cannot be done is a ControlError that names the field; a wait that takes too long is a WaitTimeout, which is a
TimeoutError as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self, cast
from urllib.parse import quote

from kcoord.testing.control_client import BASE64_PREFIX, from_text, to_text
from kcoord.testing.errors import ControlError
from kcoord.testing.group_view import Group, group_from_json
from kcoord.testing.transports import LoopThread, ProcessTransport, ThreadTransport, Transport

Mode = Literal["in-process", "process"]
Payload = str | bytes | None

WAIT_SECONDS: Final = 10.0


@dataclass(slots=True, frozen=True)
class Record:
    """A record to produce; None leaves partition and time to the producer."""

    value: Payload
    key: Payload = None
    partition: int | None = None
    timestamp_ms: int | None = None
    headers: Mapping[str, Payload] | None = None


@dataclass(slots=True, frozen=True)
class StoredRecord:
    """A record of a topic."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes | None]


@dataclass(slots=True, frozen=True)
class Request:
    """A request that the broker received. `body` is the request in Kafka's JSON form; `fault` the number of the fault
    that it met.
    """

    number: int
    time_ms: int
    api: str
    version: int
    client_id: str
    correlation_id: int
    groups: list[str]
    members: list[str]
    epochs: list[int]
    fault: int | None
    body: dict[str, Any]


class InjectedFault:
    """A fault in force, until it is used up or removed. As a context manager it is removed at the end."""

    def __init__(self, broker: KcoordBroker, number: int) -> None:
        self._broker = broker
        self.number = number

    @property
    def hits(self) -> int:
        """How many requests met it."""
        return cast("int", self._state()["hits"])

    def wait(self, hits: int = 1, timeout: float = WAIT_SECONDS) -> None:
        """Waits until so many requests met it."""
        self._broker.call("GET", f"/faults/{self.number}", {"hits": str(hits), "timeout_ms": _ms(timeout)})

    def remove(self) -> None:
        self._broker.call("DELETE", f"/faults/{self.number}")

    def _state(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self._broker.call("GET", f"/faults/{self.number}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.remove()
        except ControlError as error:
            # The test has cleared all faults, or begun anew.
            if error.status != 404:
                raise


class KcoordBroker:
    """A running broker. `start_broker` and the fixture `kcoord_broker` make one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        status = cast("dict[str, Any]", self.call("GET", "/"))
        self.bootstrap_servers: str = status["bootstrap_servers"]

    @property
    def listeners(self) -> dict[str, str]:
        """Listener name -> `host:port` that is listened on, which may differ from what clients are told."""
        return cast("dict[str, dict[str, str]]", self.call("GET", "/"))["listeners"]

    @property
    def host(self) -> str:
        return self.bootstrap_servers.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.bootstrap_servers.rpartition(":")[2])

    @property
    def control_url(self) -> str | None:
        """Where its control listens; None for a broker in this process."""
        return self._transport.control_url

    def call(self, method: str, path: str, query: Mapping[str, str] | None = None, body: object = None) -> object:
        """A request to the control, as docs/testing.md lists them; returns the JSON of the answer."""
        return self._transport.call(method, path, query or {}, body)

    def stop(self) -> None:
        self._transport.close()

    def restart(self) -> None:
        """An orderly stop and a start: same address, same data."""
        self.call("POST", "/restart")

    def reset(self, config: Mapping[str, str] | None = None, *, like_new: bool = False) -> None:
        """A broker that knows nothing, at the same address; `config` changes settings from now on. One that is like new
        has only these settings, and another port.
        """
        body = {"config": dict(config or {}), "like_new": like_new}
        status = cast("dict[str, Any]", self.call("POST", "/reset", body=body))
        self.bootstrap_servers = status["bootstrap_servers"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # Topics and records.

    def create_topic(self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> None:
        self.call("POST", "/topics", body={"name": name, "partitions": partitions, "configs": dict(configs or {})})

    def add_partitions(self, name: str, total: int) -> None:
        """Lets the topic grow to `total` partitions."""
        self.call("POST", f"/topics/{quote(name)}/partitions", body={"total": total})

    def delete_topic(self, name: str) -> None:
        self.call("DELETE", f"/topics/{quote(name)}")

    def produce(self, topic: str, records: Iterable[Payload | Record]) -> list[tuple[int, int]]:
        """Stores records, values or whole ones; returns partition and offset of each."""
        body = {"records": [_record_to_json(one if isinstance(one, Record) else Record(one)) for one in records]}
        places = cast("list[dict[str, int]]", self.call("POST", f"/topics/{quote(topic)}/records", body=body))
        return [(place["partition"], place["offset"]) for place in places]

    def records(self, topic: str) -> list[StoredRecord]:
        """All records of a topic, by partition and offset."""
        found = cast("list[dict[str, Any]]", self.call("GET", f"/topics/{quote(topic)}/records"))
        return [_stored_record(one) for one in found]

    # Groups.

    def group(self, group_id: str) -> Group:
        """The group as it is; Dead and empty if it does not exist."""
        return self._group(group_id, {})

    def wait_for_group(
        self, group_id: str, *, state: str | None = None, members: int | None = None, timeout: float = WAIT_SECONDS
    ) -> Group:
        """Waits until the group is in the state and has that many members; returns it."""
        wanted = {"timeout_ms": _ms(timeout)}
        if state is not None:
            wanted["state"] = state
        if members is not None:
            wanted["members"] = str(members)
        return self._group(group_id, wanted)

    def _group(self, group_id: str, query: Mapping[str, str]) -> Group:
        return group_from_json(cast("dict[str, Any]", self.call("GET", f"/groups/{quote(group_id, '')}", query)))

    def committed(self, group_id: str) -> dict[str, dict[int, int]]:
        """Topic -> partition -> committed offset."""
        offsets = cast("dict[str, dict[str, int]]", self.call("GET", f"/groups/{quote(group_id, '')}/offsets"))
        return {topic: {int(one): offset for one, offset in found.items()} for topic, found in offsets.items()}

    def commit(self, group_id: str, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """Commits offsets for a group without members: topic -> partition -> offset."""
        body = {"offsets": {topic: {str(one): at for one, at in found.items()} for topic, found in offsets.items()}}
        self.call("PUT", f"/groups/{quote(group_id, '')}/offsets", body=body)

    def override_target_assignment(self, group_id: str, members: Mapping[str, Mapping[str, Sequence[int]]]) -> int:
        """Gives members their target assignment: member id, instance id or client id -> topic -> partitions.

        Members that are not named lose these partitions and keep the others. Returns the new group epoch. The next
        change of the group's members, subscriptions or topics lets the assignor decide again.
        """
        body = {"members": {name: {topic: list(ids) for topic, ids in one.items()} for name, one in members.items()}}
        answer = cast("dict[str, int]", self.call("PUT", f"/groups/{quote(group_id, '')}/target", body=body))
        return answer["epoch"]

    def expire_session(self, group_id: str, member: str) -> None:
        """Lets the session of one member end now: member id, instance id or client id."""
        self.call("POST", f"/groups/{quote(group_id, '')}/members/{quote(member, '')}/expire")

    # The clock.

    @property
    def now_ms(self) -> int:
        """The broker's clock."""
        return cast("dict[str, int]", self.call("GET", "/"))["now_ms"]

    def advance_clock(self, seconds: float) -> int:
        """Moves the broker's clock: sessions, retention and expiry come due. Members that are alive had no chance to
        send a heartbeat meanwhile, so beyond the session timeout they are gone, too; see `expire_session`. Returns the
        new time in ms.
        """
        answer = cast("dict[str, int]", self.call("POST", "/clock/advance", body={"ms": round(seconds * 1000)}))
        return answer["now_ms"]

    # Faults and the history of requests.

    def inject_fault(
        self,
        api: str | None = None,
        *,
        group: str | None = None,
        member: str | None = None,
        epoch: int | None = None,
        client_id: str | None = None,
        error: str | None = None,
        message: str | None = None,
        delay: float = 0.0,
        drop: bool = False,
        close: bool = False,
        after_handling: bool = False,
        skip: int = 0,
        times: int | None = 1,
    ) -> InjectedFault:
        """Lets requests fail that match everything that is given: an API such as "OffsetCommit", a group, a member id
        or instance id, a member epoch or generation, a client id.

        They are answered with an error of Kafka's, are delayed by so many seconds, get no answer (drop: the connection
        hangs until the fault is removed), or lose their connection (close). With `after_handling` the broker does what
        was asked, and only the answer suffers. The first `skip` matches go through, then `times` meet the fault; None:
        all that come.
        """
        body = {
            "api": api,
            "group": group,
            "member": member,
            "epoch": epoch,
            "client_id": client_id,
            "error": error,
            "message": message,
            "delay_ms": round(delay * 1000),
            "drop": drop,
            "close": close,
            "after_handling": after_handling,
            "skip": skip,
            "times": 0 if times is None else times,
        }
        answer = cast("dict[str, int]", self.call("POST", "/faults", body=body))
        return InjectedFault(self, answer["number"])

    def clear_faults(self) -> None:
        self.call("DELETE", "/faults")

    def requests(
        self,
        api: str | None = None,
        *,
        group: str | None = None,
        member: str | None = None,
        epoch: int | None = None,
        client_id: str | None = None,
    ) -> list[Request]:
        """What clients have asked, oldest first; the last 10,000 requests are kept."""
        wanted = {"api": api, "group": group, "member": member, "epoch": epoch, "client_id": client_id}
        query = {key: str(value) for key, value in wanted.items() if value is not None}
        return [Request(**one) for one in cast("list[dict[str, Any]]", self.call("GET", "/requests", query))]

    def clear_requests(self) -> None:
        self.call("DELETE", "/requests")


def start_broker(config: Mapping[str, str] | None = None, mode: Mode = "in-process") -> KcoordBroker:
    """Starts a broker on a free port, in a thread of this process or in a process of its own. Use it in a `with`.

    `config` are Kafka's settings of brokers, on top of those of `kcoord.testing.host.DEFAULTS`.
    """
    if mode == "process":
        return KcoordBroker(ProcessTransport(config or {}))
    thread = LoopThread()
    try:
        return _BrokerWithThread(ThreadTransport(thread, config or {}), thread)
    except BaseException:
        thread.close()
        raise


class _BrokerWithThread(KcoordBroker):
    """A broker that has its thread for itself."""

    def __init__(self, transport: Transport, thread: LoopThread) -> None:
        super().__init__(transport)
        self._thread = thread

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self._thread.close()


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))


def _payload(data: Payload) -> str | None:
    if isinstance(data, str) and data.startswith(BASE64_PREFIX):
        data = data.encode()
    return to_text(data) if isinstance(data, bytes) else data


def _record_to_json(record: Record) -> dict[str, object]:
    return {
        "value": _payload(record.value),
        "key": _payload(record.key),
        "partition": record.partition,
        "timestamp_ms": record.timestamp_ms,
        "headers": {name: _payload(value) or "" for name, value in (record.headers or {}).items()},
    }


def _stored_record(found: Mapping[str, Any]) -> StoredRecord:
    return StoredRecord(
        found["partition"],
        found["offset"],
        found["timestamp_ms"],
        from_text(found["key"]),
        from_text(found["value"]),
        {name: from_text(value) for name, value in found["headers"].items()},
    )
