# SPDX-License-Identifier: Apache-2.0
"""A broker process in front of an upstream, from its configuration to its end.

Theory of operation. The steps of a start are those of `kcoord.server.process`, with these differences:

* Before step 1, kcoord connects to the upstream, and creates or checks the topic with the log of the groups
  (`kcoord.upstream.group_log`). The data folder belongs to the upstream's cluster: its cluster id is that cluster's,
  and a folder of another cluster is refused.
* Step 3 registers kcoord's broker only. The brokers of the upstream are in the image, too, as fenced brokers
  (`kcoord.metadata.upstream`).
* Before the listeners accept connections in step 5, `__consumer_offsets` is created if it does not exist; kcoord leads
  all its partitions. Then the groups are loaded, since the creation time of a new partition has to be later than
  theirs. Then the image is made like the upstream, and each broker of the upstream gets its port.

Groups are imported from the upstream's own coordinator by `kcoord.upstream.group_imports`. A task deletes import
records that are not needed any more once an hour.

While the process runs, a task looks at the upstream every `kcoord.upstream.metadata.max.age.ms`; requests that change
topics cause a look at once. A port that was opened stays open: while its broker is out of service, Metadata leaves the
broker out, and connections to the port are closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import uvloop

from kcoord.config import BrokerConfig, Listener
from kcoord.config.broker_settings import UPSTREAM_KEY
from kcoord.config.upstream import UPSTREAM_PORTS, parse_upstream_ports
from kcoord.metadata.upstream import join
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.auto_create import ensure_internal_topic
from kcoord.server.broker import Broker
from kcoord.server.composition import compose
from kcoord.server.disk.data_folder import DataFolder, candidate_identity
from kcoord.server.environment import Environment
from kcoord.server.errors import StartError
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.listener import SocketListener
from kcoord.server.process import BrokerProcess, ReadyLine
from kcoord.server.replies import internal_operation_context
from kcoord.server.shards.metadata_service import LocalMetadataService
from kcoord.server.shards.shard_service import Clock
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.log_dir import LogDir
from kcoord.upstream.cluster import UpstreamCluster
from kcoord.upstream.gateway import Gateway
from kcoord.upstream.group_imports import GroupImports
from kcoord.upstream.group_log import UpstreamGroupLog
from kcoord.upstream.groups import FETCH_MS, committed_offsets
from kcoord.upstream.listener import UpstreamListener
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC

IMPORT_ON_DEMAND: Final = "on-demand"
FORGET_SECONDS: Final = 3_600.0
"""How often import records of departed groups are compared with the upstream."""

_logger = logging.getLogger(__name__)


def run(config: BrokerConfig, on_ready: Callable[[ReadyLine], None]) -> None:
    """Runs a broker in front of its upstream until a signal ends it. Raises StartError if it cannot start."""
    uvloop.run(run_process(config, on_ready))


async def run_process(config: BrokerConfig, on_ready: Callable[[ReadyLine], None]) -> None:
    """Connects to the upstream, opens the data folder, and serves until a signal."""
    upstream = UpstreamCluster(config)
    group_log = UpstreamGroupLog(config, upstream.settings)
    try:
        await upstream.connect()
        await group_log.connect()
        clock = Clock()
        environment = Environment(asyncio.get_running_loop(), clock.now_ms, clock_gain_ms=clock.gain_ms, owns_heap=True)
        folder = open_folder(config, environment, upstream.cluster_id)
        try:
            process = UpstreamProcess(
                compose(config, environment, folder, new_group_log=group_log.new_log), environment, folder, upstream
            )
        except BaseException:
            folder.close(environment.now_ms(), clean=True)
            raise
        await process.run(on_ready)
    finally:
        await group_log.close()
        await upstream.close()


def open_folder(config: BrokerConfig, environment: Environment, cluster_id: str) -> DataFolder:
    """Opens the data folder for the groups of a cluster. Raises StartError if it has those of another cluster."""
    candidate = candidate_identity(config, environment.uuids)
    return DataFolder(
        config,
        environment.now_ms(),
        log_dir=lambda: LogDir.open(RealFileSystem(), config.data_folders[0], candidate, cluster_id=cluster_id),
        uuids=environment.uuids,
    )


class UpstreamProcess(BrokerProcess):
    """A broker with kcoord's own port and one port for each broker of the upstream; the module describes it."""

    def __init__(self, broker: Broker, environment: Environment, folder: DataFolder, upstream: UpstreamCluster) -> None:
        self._imports = GroupImports(
            broker,
            partial(
                committed_offsets,
                upstream.connections,
                min(FETCH_MS, broker.config.kcoord_upstream_request_timeout_ms),
            ),
            on_demand=broker.config.kcoord_upstream_import == IMPORT_ON_DEMAND,
        )
        self._gateway = Gateway(broker, upstream, self._imports)
        self._upstream = upstream
        self._ports = parse_upstream_ports(broker.config.kcoord_upstream_ports)
        self._refused: dict[int, str] = {}
        self._is_accepting = False

        def new_listener(address: Listener, broker: Broker, limits: ConnectionLimits) -> SocketListener:
            self._limits = limits
            return UpstreamListener(address, broker, limits, self._gateway)

        super().__init__(broker, environment, folder, new_listener)

    async def _join_cluster(self) -> None:
        broker = self.broker
        assert isinstance(broker.metadata, LocalMetadataService)
        self._gateway.main = next(iter(broker.endpoints.values()))
        credentials = self._bootstrap_credentials()
        (registration,) = self._registrations()
        context = internal_operation_context(broker.now_ms())
        try:
            await broker.metadata.call(
                lambda machine, context, request: join(machine.image, broker.config, request, credentials),
                registration,
                context,
            )
        except KafkaError as error:
            raise StartError(f"the metadata log cannot be written: {error}") from None

    async def _open_listeners(self) -> None:
        if GROUP_METADATA_TOPIC not in self.broker.image.topics:
            # The first image with brokers of the upstream comes later, so kcoord leads all partitions.
            await ensure_internal_topic(self.broker, self._own_context(), GROUP_METADATA_TOPIC)
        self._check_partitions()
        await self.broker.groups.loaded()
        self._gateway.on_brokers = self._open_ports
        await self._gateway.look()
        if self._refused:
            raise StartError(next(iter(self._refused.values())))
        if not self._gateway.addresses:
            raise StartError(f"{UPSTREAM_KEY}: no broker of the upstream answers ApiVersions")
        self._is_accepting = True
        for listener in self.listeners:
            await listener.start_accepting()
        self.broker.spawn(self._keep_looking())
        self.broker.spawn(self._keep_forgetting())

    def _check_partitions(self) -> None:
        """Raises StartError if the folder and the upstream disagree about the partition of a group."""
        count, expected = self.broker.groups.shards.count, self.broker.config.offsets_topic_num_partitions
        if count != expected:
            raise StartError(
                f"the data folder has {count} partitions of {GROUP_METADATA_TOPIC}, but offsets.topic.num.partitions "
                f"is {expected}. Groups are in the upstream: remove the data folder"
            )

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self.broker.config.kcoord_upstream_metadata_max_age_ms / 1000)
            await self._gateway.look()

    async def _keep_forgetting(self) -> None:
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            await self._imports.forget()

    async def _open_ports(self) -> None:
        """Opens a port for each broker of the upstream that has none. A failure is logged once for each broker."""
        for node_id in sorted(self._upstream.nodes):
            if node_id in self._gateway.addresses or node_id not in self._upstream.versions:
                continue
            problem = await self._open_port(node_id)
            if problem is None:
                self._refused.pop(node_id, None)
            elif self._refused.get(node_id) != problem:
                self._refused[node_id] = problem
                _logger.error("Clients cannot use broker %d of the upstream: %s", node_id, problem)

    async def _open_port(self, node_id: int) -> str | None:
        """Opens the port of a broker. Returns why that is not possible, or None."""
        broker, main = self.broker, self._gateway.main
        if node_id == broker.node_id:
            return f"node.id={node_id} is the id of a broker of the upstream; set node.id to an id that no broker has"
        port = self._ports.port_of(node_id)
        shown = f"{UPSTREAM_PORTS}={','.join(broker.config.kcoord_upstream_ports)}"
        if port is None:
            return f"{shown}: there is no port for broker {node_id}; add {node_id}:PORT"
        if port and port in {taken for _, taken in self._gateway.addresses.values()}:
            return f"{shown}: broker {node_id} has the same port {port} as another one; add {node_id}:PORT"
        address = replace(self.broker.config.open_listeners[0], port=port)
        listener = UpstreamListener(address, broker, self._limits, self._gateway, node_id)
        try:
            bound = await listener.bind()
        except OSError as error:
            return f"{shown}: cannot listen on {address} for broker {node_id}: {error.strerror or error}"
        self.listeners.append(listener)
        if self._is_accepting:
            await listener.start_accepting()
        self._gateway.addresses[node_id] = main.host, bound
        _logger.info("Broker %d of the upstream is at %s:%d", node_id, main.host, bound)
        return None

    def _own_context(self) -> RequestContext:
        """Returns the context of a request of kcoord itself."""
        return RequestContext(
            ApiKey.CREATE_TOPICS,
            0,
            0,
            self._upstream.client_id,
            socket.gethostname(),
            self._gateway.main.name,
            "",
            self.broker.now_ms(),
            rights=None,
        )
