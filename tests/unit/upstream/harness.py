# SPDX-License-Identifier: Apache-2.0
"""A SplicedPath between a scripted client and a scripted broker of the upstream, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import cast

from kcoord.client.connection import Connection
from kcoord.client.types import Node
from kcoord.config import BrokerConfig, Listener
from kcoord.coordinator.group.imports import ImportedOffset
from kcoord.metadata.shared import SharedMetadata
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.shard_map import Instance, ShardMap, encode_metadata
from kcoord.runtime.upstream_membership import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from kcoord.security.login_states import LoginStates
from kcoord.security.relayed_login import RelayedLogin
from kcoord.server.api.served_versions import SERVED_VERSIONS
from kcoord.server.broker import Broker
from kcoord.server.composition import compose, local_metadata
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.environment import Environment, RandomUuids
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.process import BrokerProcess
from kcoord.server.shards.shard_service import Clock
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.upstream.cluster import BrokerVersions, UpstreamCluster
from kcoord.upstream.gateway import Gateway
from kcoord.upstream.group_imports import GroupImports
from kcoord.upstream.group_requests import GroupRequests, Joined
from kcoord.upstream.instance_group import InstanceGroup, log_clock
from kcoord.upstream.instance_metadata import InstanceMetadata
from kcoord.upstream.link import UpstreamLink
from kcoord.upstream.ownership import Ownership
from kcoord.upstream.requests import PartitionRequests
from kcoord.upstream.shard_log import UpstreamShardLog
from kcoord.upstream.shared_log import SharedLog
from kcoord.upstream.splice import SplicedPath
from kcoord_protocol.api_keys import request_class
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.framing import FrameReader, encode_request
from kcoord_protocol.messages import Message

NODE_ID = 1
SETTINGS = {
    "listeners": "PLAINTEXT://127.0.0.1:0",
    "log.dirs": "data",
    "node.id": "100",
    "kcoord.log.flush.policy": "os",
    "log.cleaner.enable": "false",
    "offsets.topic.num.partitions": "1",
    "kcoord.request.max.bytes": "100000",
    "socket.request.max.bytes": "1000000",
}


class Process(BrokerProcess):
    answer_seconds = 0.0


class FakeTransport(asyncio.Transport):
    """Records what is written, and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_paused = False
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closed
        self.written += data

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


class FakeConnection:
    """A connection that is ready to be handed over."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.link: UpstreamLink | None = None

    def hand_over(self, protocol: UpstreamLink) -> FakeTransport:
        self.link = protocol
        return self.transport


class FakeUpstream:
    """The upstream's brokers. `opened` has the connections in the order in which links asked for them."""

    cluster_id = "upstream"
    client_id = "kcoord-100"

    def __init__(self) -> None:
        versions = {int(key): request_class(key).valid_versions for key in SERVED_VERSIONS}
        self.versions = {
            NODE_ID: BrokerVersions(versions, {"transaction.version": (0, 2)}, {"transaction.version": 2}, 7)
        }
        self.nodes: Mapping[int, Node] = {NODE_ID: Node(NODE_ID, "upstream", 9092)}
        self.nameless: set[str] = set()
        self.opened: list[FakeConnection] = []
        self.asked: list[int] = []
        self.logged_in: list[bool] = []
        """Whether kcoord logs the connections in, in the same order."""
        self.failure: KafkaError | None = None
        self.gate = asyncio.Event()
        """Connections are opened, and offsets of groups are fetched, while it is set."""
        self.gate.set()
        self.groups: dict[str, Sequence[ImportedOffset] | KafkaError] = {}
        """The committed offsets of groups, or why they cannot be known."""
        self.fetched: list[str] = []
        """The groups whose offsets were asked for."""

    async def open_connection(self, node_id: int, *, logs_in: bool) -> Connection:
        self.asked.append(node_id)
        self.logged_in.append(logs_in)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.opened.append(FakeConnection())
        return cast("Connection", self.opened[-1])

    async def committed_offsets(self, group_id: str) -> Sequence[ImportedOffset]:
        self.fetched.append(group_id)
        await self.gate.wait()
        outcome = self.groups.get(group_id, ())
        if isinstance(outcome, KafkaError):
            raise outcome
        return outcome


class Dialogue:
    """One client connection. `node_id` is the broker that its port stands for, None for kcoord's own port."""

    def __init__(
        self,
        broker: Broker,
        gateway: Gateway,
        node_id: int | None,
        new_login: Callable[[], LoginStates] | None = None,
    ) -> None:
        self.upstream = cast("FakeUpstream", gateway.upstream)
        self.client = FakeTransport()
        self.announced = 0
        """Number of times that the path asked its driver to continue."""
        self.path = SplicedPath(PathSettings.of(broker, "PLAINTEXT", new_login), gateway, node_id, self._on_response)
        self.path.attach(self.client)
        self._correlation_id = 0
        self._opened_before = len(self.upstream.opened)

    def _on_response(self) -> None:
        self.announced += 1

    def frame(self, request: Message, version: int) -> bytes:
        self._correlation_id += 1
        return encode_request(request.api_key, version, self._correlation_id, "client", request.encode(version))

    def flush(self) -> None:
        """Does what the driver does after an announcement."""
        self.client.write(self.path.take_output())
        self.path.process()
        self.client.write(self.path.take_output())

    async def settle(self) -> None:
        """Lets tasks run, and flushes."""
        for _ in range(10):
            await asyncio.sleep(0)
            self.flush()

    async def send(self, data: bytes) -> None:
        self.path.receive(data)
        await self.settle()

    @property
    def link(self) -> UpstreamLink:
        link = self.upstream.opened[-1].link
        assert link is not None
        return link

    @property
    def transport(self) -> FakeTransport:
        """The transport of the link."""
        return self.upstream.opened[-1].transport

    @property
    def passed_on(self) -> bytes:
        """The bytes that the upstream has got, empty if there is no link."""
        return self.transport.written if len(self.upstream.opened) > self._opened_before else b""

    def is_muted(self) -> bool:
        return self.path.is_muted

    def is_upstream_paused(self) -> bool:
        """Returns whether the responses of the upstream are not read."""
        return self.transport.is_paused

    @property
    def received(self) -> list[bytes]:
        """The frames that the client has received."""
        return FrameReader(1 << 26).feed(self.client.written)


class ScriptedGroup:
    """The group of the instances in the upstream. The instance under test is its leader, and `others` are members."""

    def __init__(self) -> None:
        self.others: list[Instance] = []
        self.last: ShardMap | None = None
        self.generation = 0
        self.error: KafkaError | None = None
        """The answer to all requests."""
        self.rebalances = False
        self.has_left = False

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    async def join(self, request: JoinGroup) -> Joined:
        self._check()
        self.generation += 1
        self.rebalances = False
        members = {f"other-{other.node_id}": encode_metadata(other, 1, self.last, 1) for other in self.others}
        return "member", self.generation, {"member": request.metadata, **members}

    async def sync(self, request: SyncGroup) -> bytes:
        self._check()
        return request.assignments["member"]

    async def beat(self, request: Heartbeat) -> bool:
        self._check()
        return self.rebalances

    async def leave(self, request: LeaveGroup) -> None:
        self.has_left = True

    async def close(self) -> None:
        pass


class MemorySharedLog:
    """The log that all instances share, with this one only."""

    on_instance: Callable[[int], None]

    def __init__(self) -> None:
        self.state = SharedMetadata()
        self.announced: list[int] = []

    async def append(self, records: Sequence[CoordinatorRecord]) -> None:
        await asyncio.sleep(0)
        for record in records:
            self.state.replay(record)

    async def announce(self, node_id: int) -> None:
        self.announced.append(node_id)


class Stage:
    """A broker in front of a scripted upstream, and its client connections. `begin` is called first."""

    def __init__(self, broker: Broker, shared: MemorySharedLog, *, imports_on_demand: bool) -> None:
        self.broker = broker
        self.shared = shared
        self.upstream = FakeUpstream()
        self.group_of_all = ScriptedGroup()
        self.group = InstanceGroup(broker.config, cast("GroupRequests", self.group_of_all))
        self.log = UpstreamShardLog(
            broker.groups.shards,
            cast("PartitionRequests", None),
            cluster_id="",
            owner="",
            write_timeout_ms=1,
            foreign_id_wait_ms=1,
            wake=broker.pump.wake,
            now_ms=broker.now_ms,
            log_ms=log_clock(),
            may_act=self.group.holds_lease,
            on_fenced=self.group.fenced,
            files=None,
            tombstones_kept_ms=1,
        )
        """Not the log of the shards, which are in the data folder. It has no claims to revoke."""
        assert isinstance(broker.metadata, InstanceMetadata)
        self.ownership = Ownership(broker, self.group, self.log, broker.metadata.shared)
        self.imports = GroupImports(broker, self.upstream.committed_offsets, on_demand=imports_on_demand)
        self.gateway = Gateway(
            broker, cast("UpstreamCluster", self.upstream), self.ownership, self.imports, broker.metadata
        )
        self.gateway.main = Listener("PLAINTEXT", "gateway", 9092, broker.config.open_listeners[0].security_protocol)
        self.gateway.ports[NODE_ID] = 9101

    async def begin(self) -> None:
        self.ownership.join(self.gateway.instance())
        await self.ownership.assigned
        await self.broker.groups.loaded()

    async def rebalance(self, *instances: Instance, last: ShardMap | None = None) -> None:
        """Makes these instances the other members of the group, and waits until this one has the new map.

        `last`: their last map.
        """
        group = self.group_of_all
        group.others, group.last, group.rebalances = list(instances), last, True
        generation = group.generation + 1
        while self.group.shard_map is None or self.group.shard_map.generation != generation:
            self.group.hurry()
            await asyncio.sleep(0)

    def connect(self, node_id: int | None = NODE_ID) -> Dialogue:
        return Dialogue(self.broker, self.gateway, node_id)

    def connect_to_log_in(self, node_id: int | None = NODE_ID) -> Dialogue:
        """Returns a connection of a client that logs in at the upstream."""
        self.gateway.passes_logins = True
        return Dialogue(self.broker, self.gateway, node_id, lambda: RelayedLogin(1_000, 50, "sub"))


@asynccontextmanager
async def stage(*, imports_on_demand: bool = True, **settings: str) -> AsyncIterator[Stage]:
    own = {key.replace("_", "."): value for key, value in settings.items()}
    config = BrokerConfig.from_properties({**SETTINGS, **own})
    environment = Environment(asyncio.get_running_loop(), Clock().now_ms, uuids=RandomUuids(Random(0).randbytes))
    folder = DataFolder(config, environment.now_ms(), MemoryFileSystem(), uuids=environment.uuids)
    shared = MemorySharedLog()
    new_service = partial(InstanceMetadata, cast("SharedLog", shared))
    broker = compose(
        config,
        environment,
        folder,
        new_metadata=lambda broker, times: local_metadata(folder, broker, times, new_service),
    )
    process = Process(broker, environment, folder)
    await process.start()
    stage = Stage(broker, shared, imports_on_demand=imports_on_demand)
    try:
        await stage.begin()
        yield stage
    finally:
        await stage.group.close()
        await process.stop()


def response(correlation_id: int, size: int) -> bytes:
    """Returns a framed response whose body nobody decodes."""
    return (4 + size).to_bytes(4) + correlation_id.to_bytes(4) + Random(correlation_id).randbytes(size)
