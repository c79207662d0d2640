# SPDX-License-Identifier: Apache-2.0
"""The log of the group coordinator in the upstream, with connections of its own."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Final

from kcoord.client.admin.client import AdminClient
from kcoord.client.cluster import Cluster
from kcoord.client.config import AdminConfig
from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.upstream_reader import TOMBSTONES_KEPT_MS
from kcoord.server.broker import Broker
from kcoord.server.errors import StartError
from kcoord.storage.file_system import RealFileSystem
from kcoord.upstream.instance_group import InstanceGroup, log_clock
from kcoord.upstream.own_topics import OFFSETS_TOPIC, prepare_topic
from kcoord.upstream.requests import PartitionRequests
from kcoord.upstream.shard_log import UpstreamShardLog
from kcoord.upstream.standby_files import StandbyFiles
from kcoord_protocol.errors import KafkaError

ATTEMPTS: Final = 3
"""How often an append is tried within the write timeout, if no broker answers."""


class UpstreamGroupLog:
    """Makes the log of the groups: `connect`, `new_log`, and `close` at the end. `settings`: those of connections."""

    log: UpstreamShardLog
    """The log that `new_log` has made."""

    def __init__(self, config: BrokerConfig, settings: AdminConfig, group: InstanceGroup) -> None:
        self._config = config
        self._group = group
        self._tombstones_kept_ms = TOMBSTONES_KEPT_MS
        self._write_timeout_ms = config.kcoord_upstream_write_timeout_ms
        attempt_ms = self._write_timeout_ms // ATTEMPTS
        self._settings = settings
        self._cluster = Cluster(
            replace(settings, request_timeout_ms=attempt_ms, socket_connection_setup_timeout_ms=attempt_ms)
        )
        self._requests = PartitionRequests(self._cluster, OFFSETS_TOPIC, attempt_timeout_ms=attempt_ms)

    async def connect(self) -> None:
        """Creates or checks the topic. Raises StartError if it cannot be used."""
        try:
            async with AdminClient(self._settings) as admin:
                self._tombstones_kept_ms = await prepare_topic(
                    admin,
                    OFFSETS_TOPIC,
                    self._config.offsets_topic_num_partitions,
                    self._config.offsets_topic_segment_bytes,
                )
            await self._cluster.start(self._cluster.deadline())
            await self._requests.look_up_leaders()
        except KafkaError as error:
            raise StartError(f"the upstream cannot be reached: {error}") from None

    def new_log(self, shards: ShardSet[GroupCoordinatorShard], broker: Broker) -> UpstreamShardLog:
        """Returns the log of a broker's groups."""
        self.log = UpstreamShardLog(
            shards,
            self._requests,
            cluster_id=broker.cluster_id,
            owner=f"{socket.gethostname()}, node.id={broker.node_id}",
            write_timeout_ms=self._write_timeout_ms,
            # An owner whose lease has ended appends nothing, and it repeats an append within the write timeout only.
            foreign_id_wait_ms=self._config.kcoord_upstream_session_timeout_ms + self._write_timeout_ms,
            wake=broker.pump.wake,
            now_ms=broker.now_ms,
            log_ms=log_clock(),
            may_act=self._group.holds_lease,
            on_fenced=self._group.fenced,
            files=StandbyFiles(RealFileSystem(), self._config.data_folders[0], self._requests.topic_id),
            tombstones_kept_ms=self._tombstones_kept_ms,
        )
        return self.log

    async def close(self) -> None:
        """Ends all requests and closes the connections."""
        await self._requests.stop()
        await self._cluster.close()
