# SPDX-License-Identifier: Apache-2.0
"""A broker with an authorizer and files in memory, and people who ask it through request paths."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from kcoord.config import BrokerConfig
from kcoord.config.security import STANDARD_AUTHORIZER
from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.records import new_acl_record, new_remove_acl_record
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext
from kcoord.server.broker import Broker
from kcoord.server.composition import compose
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.environment import Environment, RandomUuids
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath
from kcoord.server.process import BrokerProcess
from kcoord.server.replies import internal_operation_context
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.api_keys import ApiKey, response_class
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    FindCoordinatorRequest,
    ListGroupsRequest,
    ListGroupsResponse,
    Message,
)

R = TypeVar("R", bound=Message)

ADMIN = "User:admin"
NOW_MS = 1_700_000_000_000
SETTINGS = {
    "listeners": "PLAINTEXT://127.0.0.1:0",
    "advertised.listeners": "PLAINTEXT://broker:9092",
    "log.dirs": "data",
    "kcoord.log.flush.policy": "os",
    "log.cleaner.enable": "false",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.assignment.interval.ms": "0",
    "broker.id": "1",
    "authorizer.class.name": STANDARD_AUTHORIZER,
    "super.users": ADMIN,
}


class Process(BrokerProcess):
    answer_seconds = 0.0


def allow(
    principal: str,
    operation: AclOperation,
    resource_type: ResourceType,
    name: str,
    *,
    pattern_type: PatternType = PatternType.LITERAL,
    permission_type: PermissionType = PermissionType.ALLOW,
) -> Acl:
    return Acl(resource_type, name, pattern_type, principal, "*", operation, permission_type)


class Person:
    """A principal with a connection of its own."""

    def __init__(self, broker: Broker, principal: str, settings: PathSettings | None = None) -> None:
        self.principal = principal
        self._answered = asyncio.Event()
        settings = settings or PathSettings.of(broker, "PLAINTEXT")
        self.path = RequestPath(settings, self._answered.set, "192.0.2.1", 4711)
        self.path.client.principal = principal
        self._reader = FrameReader(1 << 26)
        self._correlation_id = 0

    async def answer_bytes(self, request: Message, version: int) -> bytes:
        """Returns the body of the response."""
        self._correlation_id += 1
        key = ApiKey(request.api_key)
        self.path.receive(encode_request(key, version, self._correlation_id, "client", request.encode(version)))
        async with asyncio.timeout(10):
            while not (output := self.path.take_output()):
                assert self.path.close_reason is None, self.path.close_reason
                await self._answered.wait()
                self._answered.clear()
        (frame,) = self._reader.feed(output)
        return frame[decode_response_header(frame, key, version)[1] :]

    async def ask(self, request: Message, version: int, answer: type[R]) -> R:
        assert answer is response_class(request.api_key)
        return answer.decode(await self.answer_bytes(request, version), version)


@dataclass(slots=True)
class Clock:
    """A clock that a test moves. The CPU time moves by itself, by `cpu_step_ns` whenever it is read."""

    now_ms: int = NOW_MS
    cpu_step_ns: int = 0
    _cpu_ns: int = 0

    def cpu_ns(self) -> int:
        self._cpu_ns += self.cpu_step_ns
        return self._cpu_ns


class Cluster:
    """The broker. `ADMIN` is a super user."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self.broker = broker
        self.clock = clock
        self.admin = Person(broker, ADMIN)
        self._acls: dict[Acl, bytes] = {}
        self._ids = itertools.count(1)

    async def grant(self, *acls: Acl) -> None:
        """Adds ACLs; the next request meets them."""
        for acl in acls:
            self._acls[acl] = next(self._ids).to_bytes(16, "big")
        await self._write(new_acl_record(self._acls[acl], acl) for acl in acls)

    async def revoke(self, *acls: Acl) -> None:
        await self._write(new_remove_acl_record(self._acls[acl]) for acl in acls)

    async def _write(self, records: Iterable[CoordinatorRecord]) -> None:
        written = list(records)

        def write(
            machine: MetadataMachine, context: OperationContext, request: Message
        ) -> CoordinatorResult[ListGroupsResponse]:
            return CoordinatorResult(ListGroupsResponse(), written)

        await self.broker.metadata.call(write, ListGroupsRequest(), internal_operation_context(NOW_MS))

    async def set_quotas(self, user: str, **values: float | None) -> None:
        """Sets quotas of a user, and removes those that are None."""
        alter = AlterClientQuotasRequest
        change = alter.EntryData(
            entity=[alter.EntityData(entity_type="user", entity_name=user)],
            ops=[alter.OpData(key=key, value=value or 0.0, remove=value is None) for key, value in values.items()],
        )
        changed = await self.admin.ask(alter(entries=[change]), 1, AlterClientQuotasResponse)
        assert [entry.error_code for entry in changed.entries] == [0]

    async def create_topics(self, *names: str, partitions: int = 1) -> None:
        topics = [
            CreateTopicsRequest.CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
            for name in names
        ]
        request = CreateTopicsRequest(topics=topics, timeout_ms=1000)
        created = await self.admin.ask(request, 7, CreateTopicsResponse)
        assert [topic.error_code for topic in created.topics] == [0] * len(names)

    def topic_id(self, name: str) -> bytes:
        return self.broker.image.topics[name].id

    async def start_coordinators(self) -> None:
        """Creates the internal topics and waits until the coordinators serve."""
        for key_type in (0, 1):
            await self.admin.answer_bytes(FindCoordinatorRequest(key_type=key_type, coordinator_keys=["x"]), 6)
        await self.broker.groups.loaded()
        async with asyncio.timeout(10):
            while True:
                request = DescribeTransactionsRequest(transactional_ids=["x", "y", "z"])
                described = await self.admin.ask(request, 0, DescribeTransactionsResponse)
                codes = {state.error_code for state in described.transaction_states}
                if codes == {Errors.TRANSACTIONAL_ID_NOT_FOUND}:
                    return
                await asyncio.sleep(0)


@asynccontextmanager
async def running_cluster(**settings: str) -> AsyncIterator[Cluster]:
    """Runs a broker that allows nothing but what ACLs allow."""
    config = BrokerConfig.from_properties(SETTINGS | {key.replace("_", "."): value for key, value in settings.items()})
    uuids = RandomUuids(Random(0).randbytes)
    clock = Clock()
    environment = Environment(asyncio.get_running_loop(), lambda: clock.now_ms, cpu_ns=clock.cpu_ns, uuids=uuids)
    folder = DataFolder(config, NOW_MS, MemoryFileSystem(), uuids=environment.uuids)
    broker = compose(config, environment, folder)
    process = Process(broker, environment, folder)
    await process.start()
    try:
        cluster = Cluster(broker, clock)
        await cluster.start_coordinators()
        yield cluster
    finally:
        await process.stop()
