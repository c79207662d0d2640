# SPDX-License-Identifier: Apache-2.0
"""A broker for tests, with all operations that a test may use.

All calls block. In a coroutine, call them through `asyncio.to_thread`.

A call that fails raises ControlError, whose text names the wrong field. A wait that times out raises WaitTimeout, which
is also a TimeoutError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self, cast, get_args
from urllib.parse import quote

from kcoord.testing.control_client import BASE64_PREFIX, acl_to_json, from_text, to_text
from kcoord.testing.errors import ControlError
from kcoord.testing.group_view import Group, group_from_json
from kcoord.testing.security import BrokerSecurity, Mechanism, Tls, secure
from kcoord.testing.transports import LoopThread, ProcessTransport, ThreadTransport, Transport
from kcoord_protocol.acls import Acl

Mode = Literal["in-process", "process"]
Payload = str | bytes | None

WAIT_SECONDS: Final = 10.0


@dataclass(slots=True, frozen=True)
class Record:
    """A record to produce. If partition or timestamp is None, the producer chooses it."""

    value: Payload
    key: Payload = None
    partition: int | None = None
    timestamp_ms: int | None = None
    headers: Mapping[str, Payload] | None = None


@dataclass(slots=True, frozen=True)
class StoredRecord:
    """A record that is stored in a topic."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes | None]


@dataclass(slots=True, frozen=True)
class Request:
    """A request that the broker received.

    `body` is the request in Kafka's JSON form. `fault` is the number of the fault that was applied, or None.
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
    """A fault that is active until it is used up or removed. As a context manager it is removed at the end."""

    def __init__(self, broker: KcoordBroker, number: int) -> None:
        self._broker = broker
        self.number = number

    @property
    def hits(self) -> int:
        """The number of requests that the fault was applied to."""
        return cast("int", self._state()["hits"])

    def wait(self, hits: int = 1, timeout: float = WAIT_SECONDS) -> None:
        """Waits until the fault was applied to `hits` requests. Raises WaitTimeout after `timeout` seconds."""
        self._broker.call("GET", f"/faults/{self.number}", {"hits": str(hits), "timeout_ms": _ms(timeout)})

    def remove(self) -> None:
        """Removes the fault. Raises ControlError with status 404 if it is already removed."""
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
            # The test has cleared all faults, or reset the broker.
            if error.status != 404:
                raise


class KcoordBroker:
    """A running broker. `start_broker` and the fixture `kcoord_broker` create it."""

    def __init__(self, transport: Transport, security: BrokerSecurity) -> None:
        self._transport = transport
        self.is_stopped = False
        self.security = security
        """The settings of the clients' listener. `client_properties` and its siblings make a client's out of them."""
        status = cast("dict[str, Any]", self.call("GET", "/"))
        self.bootstrap_servers: str = status["bootstrap_servers"]
        self.add_acls(security.acls or ())

    @property
    def listeners(self) -> dict[str, str]:
        """Listener name -> `host:port` that is bound, which may differ from the advertised address."""
        return cast("dict[str, dict[str, str]]", self.call("GET", "/"))["listeners"]

    @property
    def host(self) -> str:
        """The host of `bootstrap_servers`."""
        return self.bootstrap_servers.rpartition(":")[0]

    @property
    def port(self) -> int:
        """The port of `bootstrap_servers`."""
        return int(self.bootstrap_servers.rpartition(":")[2])

    def client_properties(self, user: str | None = None, mechanism: Mechanism = "PLAIN") -> dict[str, str]:
        """Returns what kcoord.client, Java's clients and Kafka's tools need to connect, as properties.

        `user` is one of the broker's users, None for the first one. With `tls="mutual"` the name in the certificate of
        the client is that of the user; without users it may be any name.
        """
        return {"bootstrap.servers": self.bootstrap_servers, **self.security.kafka_properties(user, mechanism)}

    def confluent_properties(self, user: str | None = None, mechanism: Mechanism = "PLAIN") -> dict[str, str]:
        """Returns the same for confluent-kafka and other clients that use librdkafka."""
        return {"bootstrap.servers": self.bootstrap_servers, **self.security.librdkafka_properties(user, mechanism)}

    def python_arguments(self, user: str | None = None, mechanism: Mechanism = "PLAIN") -> dict[str, object]:
        """Returns the same for kafka-python and aiokafka, as keyword arguments."""
        return {"bootstrap_servers": self.bootstrap_servers, **self.security.python_arguments(user, mechanism)}

    @property
    def control_url(self) -> str | None:
        """The URL of the broker's control; None for a broker in this process."""
        return self._transport.control_url

    def call(self, method: str, path: str, query: Mapping[str, str] | None = None, body: object = None) -> object:
        """Sends a request to the control (docs/testing.md lists them) and returns the decoded JSON of the response."""
        if self.is_stopped:
            raise ControlError("the broker was stopped", 503)
        return self._transport.call(method, path, query or {}, body)

    def stop(self) -> None:
        """Stops the broker and deletes its data. A test may call it; the fixture then has nothing left to stop."""
        if not self.is_stopped:
            self.is_stopped = True
            self._close()

    def _close(self) -> None:
        self._transport.close()

    def restart(self) -> None:
        """Stops the broker cleanly and starts it with the same address and data."""
        self.call("POST", "/restart")

    def reset(self, config: Mapping[str, str] | None = None, *, like_new: bool = False) -> None:
        """Deletes all data and restarts the broker at the same address. Its users and first ACLs are there again.

        `config` is added to the settings. With `like_new` the broker has only these settings, and a new port.
        """
        body = {"config": dict(config or {}), "like_new": like_new}
        status = cast("dict[str, Any]", self.call("POST", "/reset", body=body))
        self.bootstrap_servers = status["bootstrap_servers"]
        self.add_acls(self.security.acls or ())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # ACLs.

    def add_acls(self, acls: Iterable[Acl]) -> None:
        """Creates ACLs, which hold for the next request of every client. The broker must have an authorizer."""
        self._change_acls("POST", acls)

    def remove_acls(self, acls: Iterable[Acl]) -> None:
        """Deletes ACLs. An ACL that does not exist is passed over."""
        self._change_acls("DELETE", acls)

    def _change_acls(self, method: str, acls: Iterable[Acl]) -> None:
        documents = [acl_to_json(acl) for acl in acls]
        if documents:
            self.call(method, "/acls", body={"acls": documents})

    # Topics and records.

    def create_topic(self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> None:
        """Creates a topic with `partitions` partitions and the given topic configs."""
        self.call("POST", "/topics", body={"name": name, "partitions": partitions, "configs": dict(configs or {})})

    def add_partitions(self, name: str, total: int) -> None:
        """Increases the partition count of the topic to `total`."""
        self.call("POST", f"/topics/{quote(name)}/partitions", body={"total": total})

    def delete_topic(self, name: str) -> None:
        """Deletes a topic and its records."""
        self.call("DELETE", f"/topics/{quote(name)}")

    def produce(self, topic: str, records: Iterable[Payload | Record]) -> list[tuple[int, int]]:
        """Produces values or records, and returns partition and offset of each, in order."""
        whole_records = (record if isinstance(record, Record) else Record(record) for record in records)
        body = {"records": [_record_to_json(record) for record in whole_records]}
        places = cast("list[dict[str, int]]", self.call("POST", f"/topics/{quote(topic)}/records", body=body))
        return [(place["partition"], place["offset"]) for place in places]

    def records(self, topic: str) -> list[StoredRecord]:
        """Returns all records of a topic, by partition and offset."""
        documents = cast("list[dict[str, Any]]", self.call("GET", f"/topics/{quote(topic)}/records"))
        return [_stored_record(document) for document in documents]

    # Groups.

    def group(self, group_id: str) -> Group:
        """Returns the group as it is now; Dead and empty if it does not exist."""
        return self._group(group_id, {})

    def wait_for_group(
        self, group_id: str, *, state: str | None = None, members: int | None = None, timeout: float = WAIT_SECONDS
    ) -> Group:
        """Waits until the group has the state and the number of members, and returns it.

        Raises WaitTimeout after `timeout` seconds.
        """
        query = {"timeout_ms": _ms(timeout)}
        if state is not None:
            query["state"] = state
        if members is not None:
            query["members"] = str(members)
        return self._group(group_id, query)

    def _group(self, group_id: str, query: Mapping[str, str]) -> Group:
        return group_from_json(cast("dict[str, Any]", self.call("GET", f"/groups/{quote(group_id, '')}", query)))

    def committed(self, group_id: str) -> dict[str, dict[int, int]]:
        """Returns topic -> partition -> committed offset."""
        offsets = cast("dict[str, dict[str, int]]", self.call("GET", f"/groups/{quote(group_id, '')}/offsets"))
        return {
            topic: {int(partition): offset for partition, offset in partitions.items()}
            for topic, partitions in offsets.items()
        }

    def commit(self, group_id: str, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """Commits offsets (topic -> partition -> offset) for a group without members."""
        document = {
            topic: {str(partition): offset for partition, offset in partitions.items()}
            for topic, partitions in offsets.items()
        }
        self.call("PUT", f"/groups/{quote(group_id, '')}/offsets", body={"offsets": document})

    def override_target_assignment(self, group_id: str, members: Mapping[str, Mapping[str, Sequence[int]]]) -> int:
        """Sets the target assignment of members and returns the new group epoch.

        `members` maps a member id, instance id or client id to topic -> partitions. Other members lose these partitions
        and keep the rest. The assignor computes a new target after the next change of the group's members,
        subscriptions or topics.
        """
        document = {
            name: {topic: list(partitions) for topic, partitions in assignment.items()}
            for name, assignment in members.items()
        }
        target = f"/groups/{quote(group_id, '')}/target"
        answer = cast("dict[str, int]", self.call("PUT", target, body={"members": document}))
        return answer["epoch"]

    def expire_session(self, group_id: str, member: str) -> None:
        """Expires the session of a member now. `member` is a member id, instance id or client id."""
        self.call("POST", f"/groups/{quote(group_id, '')}/members/{quote(member, '')}/expire")

    # The clock.

    @property
    def now_ms(self) -> int:
        """The broker's clock, in ms since the epoch."""
        return cast("dict[str, int]", self.call("GET", "/"))["now_ms"]

    def advance_clock(self, seconds: float) -> int:
        """Advances the broker's clock and returns the new time in ms. Session timeouts and retention elapse.

        Live members send no heartbeat in between, so they expire too if `seconds` exceeds the session timeout. To
        expire one member, use `expire_session`.
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
        """Makes matching requests fail.

        A request matches if it has all given values: an API such as "OffsetCommit", a group, a member id or instance
        id, a member epoch or generation, a client id.

        The outcome is one of these: the response has a Kafka error (`error`, `message`), the connection hangs without a
        response until the fault is removed (`drop`), or the connection is closed (`close`). `delay` in seconds comes
        before the outcome, or alone delays the response. With `after_handling` the broker first handles the request,
        and only the response is affected.

        The first `skip` matching requests pass, then the fault is applied `times` times; None means without a limit.
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
        """Removes all faults."""
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
        """Returns the matching requests of clients, oldest first. The broker keeps the last 10,000 requests."""
        selector = {"api": api, "group": group, "member": member, "epoch": epoch, "client_id": client_id}
        query = {key: str(value) for key, value in selector.items() if value is not None}
        documents = cast("list[dict[str, Any]]", self.call("GET", "/requests", query))
        return [Request(**document) for document in documents]

    def clear_requests(self) -> None:
        """Forgets the requests that `requests` would return."""
        self.call("DELETE", "/requests")


def start_broker(
    config: Mapping[str, str] | None = None,
    mode: Mode = "in-process",
    *,
    tls: Tls = False,
    users: Mapping[str, str] | None = None,
    acls: Iterable[Acl] | None = None,
) -> KcoordBroker:
    """Starts a broker on a free port, in a thread of this process or in its own process. Use it in a `with`.

    `config` has broker settings by Kafka's config keys. They override `kcoord.testing.host.DEFAULTS`. With `tls`,
    clients connect with TLS, and with `tls="mutual"` they need a certificate. With `users`, which maps names to
    passwords, they log in with SASL. With `acls`, even if there are none, clients may do only what ACLs allow.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be {' or '.join(get_args(Mode))}, not {mode!r}")
    security = secure(config or {}, tls=tls, users=users, acls=acls)
    settings = {**(config or {}), **security.settings}
    if mode == "process":
        return KcoordBroker(ProcessTransport(settings), security)
    thread = LoopThread()
    try:
        return _BrokerWithThread(ThreadTransport(thread, settings), security, thread)
    except BaseException:
        thread.close()
        raise


class _BrokerWithThread(KcoordBroker):
    """A broker that does not share its thread."""

    def __init__(self, transport: Transport, security: BrokerSecurity, thread: LoopThread) -> None:
        super().__init__(transport, security)
        self._thread = thread

    def _close(self) -> None:
        try:
            super()._close()
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


def _stored_record(document: Mapping[str, Any]) -> StoredRecord:
    return StoredRecord(
        document["partition"],
        document["offset"],
        document["timestamp_ms"],
        from_text(document["key"]),
        from_text(document["value"]),
        {name: from_text(value) for name, value in document["headers"].items()},
    )
