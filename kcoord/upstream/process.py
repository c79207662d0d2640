# SPDX-License-Identifier: Apache-2.0
"""A broker process in front of an upstream, from its configuration to its end.

Theory of operation. The steps of a start are those of `kcoord.server.process`, with these differences:

* Before step 1, kcoord connects to the upstream, creates or checks its topics there, and reads the log that all
  instances share (`kcoord.upstream.shared_log`). The data folder belongs to the upstream's cluster: its cluster id is
  that cluster's, and a folder of another cluster is refused.
* Step 3 registers kcoord's broker only. The brokers of the upstream are in the image, too, as fenced brokers
  (`kcoord.metadata.upstream`). `__consumer_offsets` is not in the image: `kcoord.upstream.ownership` says which shards
  of the group coordinator are owned here.
* Before the listeners accept connections in step 5, the image is made like the upstream, and each broker of the
  upstream gets its port. After that, the instance joins the group of the instances.
* Step 6 also waits for the first assignment, at most `ASSIGNED_SECONDS`. After step 1 of a shutdown, the instance
  leaves the group.

If the instances' group has no place for this process any more, for example because another one has joined with the same
node id, the process ends with an error.

Groups are imported from the upstream's own coordinator by `kcoord.upstream.group_imports`. A task deletes import
records that are not needed any more once an hour.

While the process runs, a task looks at the upstream every `kcoord.upstream.metadata.max.age.ms`; requests that change
topics cause a look at once. A port that was opened stays open: while its broker is out of service, Metadata leaves the
broker out, and connections to the port are closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import uvloop

from kcoord.config import BrokerConfig, Listener
from kcoord.config.broker_settings import UPSTREAM_KEY
from kcoord.config.upstream import UPSTREAM_PORTS, UPSTREAM_PREFIX, parse_upstream_ports
from kcoord.metadata.upstream import join
from kcoord.server.broker import Broker
from kcoord.server.composition import compose, local_metadata
from kcoord.server.disk.data_folder import DataFolder, candidate_identity
from kcoord.server.environment import Environment
from kcoord.server.errors import StartError
from kcoord.server.heap import keep_freed_memory
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.listener import SocketListener
from kcoord.server.process import BrokerProcess, ReadyLine, process_environment
from kcoord.server.replies import internal_operation_context
from kcoord.server.shards.metadata_service import LocalMetadataService
from kcoord.server.time_slice import shorten_time_slice
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.log_dir import LogDir
from kcoord.upstream.acls import UpstreamAcls
from kcoord.upstream.cluster import UpstreamCluster
from kcoord.upstream.gateway import Gateway
from kcoord.upstream.group_imports import GroupImports
from kcoord.upstream.group_log import UpstreamGroupLog
from kcoord.upstream.group_requests import GroupRequests
from kcoord.upstream.groups import FETCH_MS, committed_offsets
from kcoord.upstream.instance_group import InstanceGroup
from kcoord.upstream.instance_metadata import InstanceMetadata
from kcoord.upstream.listener import UpstreamListener
from kcoord.upstream.ownership import Ownership
from kcoord.upstream.shared_log import SharedLog
from kcoord_protocol.errors import Errors, KafkaError

ASSIGNED_SECONDS: Final = 20.0
"""The longest time that the ready line waits for the first assignment. The upstream delays the first rebalance of a
group by 3 s, and it waits for instances that have ended until their session is over.
"""

IMPORT_ON_DEMAND: Final = "on-demand"
REFRESH_PASS_SECONDS: Final = 0.1
REFRESH_PASSES: Final = 30
"""The least number of times that quiet connections are looked for."""
REFRESHED_PER_PASS: Final = 20
"""The most connections that are closed at the same time, because their clients connect again and log in."""
FORGET_SECONDS: Final = 3_600.0
"""How often import records of departed groups are compared with the upstream."""

_logger = logging.getLogger(__name__)


def run(config: BrokerConfig, on_ready: Callable[[ReadyLine], None]) -> None:
    """Runs a broker in front of its upstream until a signal ends it. Raises StartError if it cannot start."""
    keep_freed_memory()
    shorten_time_slice()
    uvloop.run(run_process(config, on_ready))


async def run_process(config: BrokerConfig, on_ready: Callable[[ReadyLine], None]) -> None:
    """Connects to the upstream, opens the data folder, and serves until a signal."""
    upstream = UpstreamCluster(config)
    requests = GroupRequests(
        upstream.settings,
        config.kcoord_upstream_group_id,
        config.node_id,
        config.kcoord_upstream_session_timeout_ms,
    )
    group = InstanceGroup(config, requests)
    group_log = UpstreamGroupLog(config, upstream.settings, group)
    shared = SharedLog(config, upstream.settings)
    try:
        await upstream.connect()
        await group_log.connect()
        await shared.connect()
        await requests.start()
        environment = process_environment()
        folder = open_folder(config, environment, upstream.cluster_id)
        try:
            new_service = partial(InstanceMetadata, shared)
            broker = compose(
                config,
                environment,
                folder,
                new_metadata=lambda broker, times: local_metadata(folder, broker, times, new_service),
                new_group_log=group_log.new_log,
            )
            ownership = Ownership(broker, group, group_log.log, shared)
            process = UpstreamProcess(broker, environment, folder, upstream, ownership)
        except BaseException:
            folder.close(environment.now_ms(), clean=True)
            raise
        await process.run(on_ready)
    finally:
        await group.close()
        await group_log.close()
        await shared.close()
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

    def __init__(
        self,
        broker: Broker,
        environment: Environment,
        folder: DataFolder,
        upstream: UpstreamCluster,
        ownership: Ownership,
    ) -> None:
        self._imports = GroupImports(
            broker,
            partial(
                committed_offsets,
                upstream.connections,
                min(FETCH_MS, broker.config.kcoord_upstream_request_timeout_ms),
            ),
            on_demand=broker.config.kcoord_upstream_import == IMPORT_ON_DEMAND,
        )
        assert isinstance(broker.metadata, InstanceMetadata)
        self._metadata = broker.metadata
        self._acls = UpstreamAcls(broker, upstream.connections) if broker.config.passes_logins else None
        self._gateway = Gateway(broker, upstream, ownership, self._imports, self._metadata, self._acls)
        self._upstream = upstream
        self._ownership = ownership
        self._ports = parse_upstream_ports(broker.config.kcoord_upstream_ports)
        self._refused: dict[int, str] = {}
        self._is_accepting = False

        def new_listener(address: Listener, broker: Broker, limits: ConnectionLimits) -> SocketListener:
            self._limits = limits
            return UpstreamListener(address, broker, limits, self._gateway)

        super().__init__(broker, environment, folder, new_listener)

        ownership.on_company = lambda: broker.spawn(self._refresh_clients())

    async def _refresh_clients(self) -> None:
        """Closes each connection of a client once, when it is quiet, so that clients ask for metadata.

        This instance was alone, so its clients know only its address. Many do not return to their bootstrap addresses,
        so they could not go on if this instance was lost now. Clients ask for metadata if a broker closes a connection.
        A connection that is never quiet stays open.
        """
        waiting = [connection for listener in self.listeners for connection in listener.connections]
        _logger.info("Closing %d connections once, so that their clients learn of the other instances", len(waiting))
        passes = REFRESH_PASSES + len(waiting) // REFRESHED_PER_PASS
        for _ in range(passes):
            quiet = [connection for connection in waiting if connection.is_quiet][:REFRESHED_PER_PASS]
            for connection in quiet:
                connection.close()
                waiting.remove(connection)
            if not waiting:
                return
            await asyncio.sleep(REFRESH_PASS_SECONDS)

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
        if self._acls is not None:
            await self._acls.start()
            self.broker.spawn(self._acls.keep())
        await self._metadata.follow_shared()
        shared = self._metadata.shared
        shared.on_change = self._gateway.shared_changed
        self.broker.spawn(shared.follow())
        self._gateway.on_brokers = self._open_ports
        await self._gateway.look()
        if self._refused:
            raise StartError(next(iter(self._refused.values())))
        if not self._gateway.ports:
            raise StartError(f"{UPSTREAM_KEY}: no broker of the upstream answers ApiVersions")
        self._ownership.follow()
        self._is_accepting = True
        for listener in self.listeners:
            await listener.start_accepting()
        self.broker.spawn(self._keep_looking())
        self.broker.spawn(self._keep_forgetting())
        self._ownership.join(self._gateway.instance())
        await self._until_assigned()

    async def _until_assigned(self) -> None:
        """Waits for the first assignment. Raises StartError if the group of the instances rejects this one."""
        await self._until_stop_or(self._ownership.assigned, ASSIGNED_SECONDS)
        if not self._ownership.assigned.done():
            _logger.warning("The upstream has not assigned shards to this instance yet")

    async def until_signal(self) -> None:
        """Returns when a stop is requested. Raises StartError if this process can be a member no longer."""
        await self._until_stop_or()

    async def _until_stop_or(self, future: asyncio.Future[None] | None = None, seconds: float | None = None) -> None:
        """Waits until a stop is requested or the future is done. Raises StartError if this process is rejected."""
        failed = self._ownership.failed
        stop = self._loop.create_task(self._stop_requested.wait())
        waiting: list[asyncio.Future[None] | asyncio.Future[KafkaError] | asyncio.Task[bool]] = [failed, stop]
        if future is not None:
            waiting.append(future)
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if failed.done():
            raise StartError(self._rejection(failed.result()))

    def _rejection(self, error: KafkaError) -> str:
        config = self.broker.config
        text = f"{UPSTREAM_PREFIX}group.id={config.kcoord_upstream_group_id}: this instance cannot be a member: {error}"
        if error.error is Errors.FENCED_INSTANCE_ID:
            text += f" Another process has joined with node.id={config.node_id}; each instance needs its own node.id"
        elif error.error is Errors.INVALID_SESSION_TIMEOUT:
            text += (
                f" {UPSTREAM_PREFIX}session.timeout.ms={config.kcoord_upstream_session_timeout_ms} has to be between "
                "group.min.session.timeout.ms and group.max.session.timeout.ms of the upstream"
            )
        return text

    async def _leave_cluster(self) -> None:
        await self._ownership.leave()

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
            if node_id in self._gateway.ports or node_id not in self._upstream.versions:
                continue
            problem = await self._open_port(node_id)
            if problem is None:
                self._refused.pop(node_id, None)
            elif self._refused.get(node_id) != problem:
                self._refused[node_id] = problem
                _logger.error("Clients cannot use broker %d of the upstream: %s", node_id, problem)
        if self._is_accepting:
            self._ownership.join(self._gateway.instance())

    async def _open_port(self, node_id: int) -> str | None:
        """Opens the port of a broker. Returns why that is not possible, or None."""
        broker, main = self.broker, self._gateway.main
        if node_id == broker.node_id:
            return f"node.id={node_id} is the id of a broker of the upstream; set node.id to an id that no broker has"
        port = self._ports.port_of(node_id)
        shown = f"{UPSTREAM_PORTS}={','.join(broker.config.kcoord_upstream_ports)}"
        if port is None:
            return f"{shown}: there is no port for broker {node_id}; add {node_id}:PORT"
        if port and port in self._gateway.ports.values():
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
        self._gateway.ports[node_id] = bound
        _logger.info("Broker %d of the upstream is at %s:%d", node_id, main.host, bound)
        return None
