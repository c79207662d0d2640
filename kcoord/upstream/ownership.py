# SPDX-License-Identifier: Apache-2.0
"""The shards that this instance owns, as the instances' group assigns them.

Theory of operation. `InstanceGroup` reports outcomes, and `Ownership` applies them to the shards of the group
coordinator. All code runs in the event loop.

* A new map: shards that are new here are claimed and loaded, all at the same time. Others close, and clients get
  NOT_COORDINATOR. The new owner does not wait for that: its claim fences the old one.
* A new map with other instances, after one with this instance alone: `on_company` is called.
* The lease is over: all shards close at once, also those with an append in flight. Nothing is acknowledged any more.
  The log of each shard is revoked, so that a later claim does not have to wait for an answer of the upstream.
* The map has a higher record version than the log that all instances share: the version is appended there, so that
  owners may write such records. If the log has one that this release cannot read, the process ends.
* The group has no place for this process: `failed` is set, and the process ends.

An orderly stop has these steps (`leave`): connections read no further requests; appends in flight are finished; shards
close; the instance leaves the group. It announces that in the log that all instances share, and also when it joins. So
the others do not wait for their next heartbeat.

What other parts of the process ask: the instances, the coordinator of a group, the port that stands for a broker of the
upstream. All instances answer alike, because all have the same map.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kcoord.metadata.shared import new_record_version_record
from kcoord.metrics.measures import Histogram
from kcoord.runtime.shard_map import NO_GENERATION, Instance
from kcoord.runtime.upstream_membership import Assigned, Failed, LeaseOver, Outcome, Reclaim
from kcoord.server.broker import Broker, until
from kcoord.upstream.instance_group import InstanceGroup
from kcoord.upstream.shard_log import UpstreamShardLog
from kcoord.upstream.shared_log import SharedLog
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    # The metrics library takes a tenth of a second to import. An instance without metrics does not import it.
    from kcoord.metrics.exposition import InstanceFigures

DRAIN_SECONDS: Final = 1.0
"""The longest time that an orderly stop waits for appends in flight, before it gives the shards up."""

_logger = logging.getLogger(__name__)


class Ownership:
    """The shards of this instance; the module describes it. `log` is the log of the shards."""

    def __init__(self, broker: Broker, group: InstanceGroup, log: UpstreamShardLog, shared: SharedLog) -> None:
        self._broker = broker
        self._shared = shared
        self._group = group
        self._log = log
        self._own: Sequence[int] = ()
        self._instance: Instance | None = None
        """This instance as it was announced last; None before `join`."""
        loop = asyncio.get_running_loop()
        self.assigned: asyncio.Future[None] = loop.create_future()
        """Done when the first assignment is here."""
        self.failed: asyncio.Future[KafkaError] = loop.create_future()
        """Done when this process cannot be a member of the group, or not any more."""
        self.takeovers = Histogram()
        """The times from an assignment until all shards that it added are served."""
        self.lost_leases = 0
        self.on_company: Callable[[], object] = lambda: None
        """Called when this instance was the only live one, and no longer is."""
        self._is_alone = False
        group.on_outcome = self._apply
        broker.why_not_ready = self.why_not_ready
        broker.instance_figures = self.figures
        shared.on_instance = self._announced
        broker.groups.release_observers.append(self._own_shards)

    # Queries.

    def check(self) -> None:
        """Closes the shards if the lease is over. Called before each request of a client."""
        self._group.check()

    def coordinator(self, shard_id: int) -> Instance | None:
        """Returns the owner of a shard; None if there is none, or if this instance does not know it for sure."""
        shard_map = self._group.shard_map
        return shard_map.owner(shard_id) if shard_map is not None and self._group.holds_lease() else None

    def instances(self) -> Sequence[Instance]:
        """Returns the live instances by ascending node id, as far as this instance knows."""
        shard_map = self._group.shard_map
        instances = {} if shard_map is None else dict(shard_map.instances)
        if self._instance is not None:
            instances[self._instance.node_id] = self._instance
        return [instances[node_id] for node_id in sorted(instances)]

    def address_of_broker(self, broker_id: int) -> tuple[str, int] | None:
        """Returns host and port that stand for a broker of the upstream; None if no instance has a port for it."""
        shard_map = self._group.shard_map
        address = None if shard_map is None else shard_map.address_of_broker(broker_id)
        instance = self._instance
        if address is None and instance is not None and broker_id in instance.broker_ports:
            return instance.host, instance.broker_ports[broker_id]
        return address

    def why_not_ready(self) -> str | None:
        """Returns why this instance serves no groups, or cannot replace others yet; None if it can do both."""
        if self._group.shard_map is None:
            return "the upstream has not assigned shards to this instance yet"
        if not self._group.holds_lease():
            return "the upstream does not confirm this instance; it owns no shards"
        return self._log.standbys.why_behind()

    def figures(self) -> InstanceFigures:
        """Returns the figures for metrics."""
        from kcoord.metrics.exposition import InstanceFigures, Timing

        shard_map = self._group.shard_map
        return InstanceFigures(
            generation=NO_GENERATION if shard_map is None else shard_map.generation,
            instances=0 if shard_map is None else len(shard_map.instances),
            shards=len(self._own),
            lease_ms=self._group.lease_left_ms(),
            lost_leases=self.lost_leases,
            fenced_writes=self._log.fenced_writes,
            takeovers=Timing.of(self.takeovers),
            produces=Timing.of(self._log.produces),
            standbys=self._log.standbys.figures(),
        )

    # Membership.

    def follow(self) -> None:
        """Follows the logs of all shards from now on, so that a takeover reads little."""
        self._log.standbys.begin(range(self._broker.groups.shards.count))

    def join(self, instance: Instance) -> None:
        """Joins the group, or announces other addresses of this instance."""
        if instance != self._instance:
            self._instance = instance
            self._group.join(instance)
            self._broker.spawn(self._shared.announce(instance.node_id))

    async def leave(self) -> None:
        """Gives up all shards when their appends are finished, and leaves the group."""
        self._log.standbys.stop()
        shards = self._broker.groups.shards
        await until(
            asyncio.get_running_loop(), lambda: shards.is_idle() or not self._group.holds_lease(), DRAIN_SECONDS
        )
        self._own = ()
        self._own_shards()
        await self._group.leave()
        await self._shared.announce(self._broker.node_id)

    def _announced(self, node_id: int) -> None:
        """Looks for a rebalance at once, because an instance joins or has left."""
        if node_id != self._broker.node_id:
            self._group.hurry()

    # Outcomes.

    def _apply(self, outcome: Outcome) -> None:
        match outcome:
            case Assigned() if (reason := self._shared.state.why_unreadable()) is not None:
                self._apply(Failed(KafkaError(Errors.UNSUPPORTED_VERSION, reason)))
            case Assigned(shard_map, shard_ids):
                names = ", ".join(map(str, shard_map.instances))
                _logger.info(
                    "Generation %d of the group %s: instances %s; this one owns %d of %d shards",
                    *(shard_map.generation, self._group.id, names, len(shard_ids), len(shard_map.owners)),
                )
                self._own = shard_ids
                self._own_shards()
                was_alone, self._is_alone = self._is_alone, len(shard_map.instances) == 1
                if was_alone and not self._is_alone:
                    self.on_company()
                if not self.assigned.done():
                    self.assigned.set_result(None)
                if shard_map.record_version > self._shared.state.record_version:
                    self._broker.spawn(self._raise_record_version(shard_map.record_version))
            case Reclaim(shard_ids):
                _logger.warning("Shards %s are claimed again: they are still those of this instance", shard_ids)
                self._broker.groups.own(self._own)
            case LeaseOver(reason):
                _logger.error(
                    "This instance owns no shards any more, and acknowledges nothing: %s. It joins the group %s again",
                    *(reason, self._group.id),
                )
                self.lost_leases += 1
                self._own = ()
                self._own_shards()
                self._log.revoke("the lease of this instance is over")
            case Failed(error):
                self._own = ()
                self._own_shards()
                self._log.revoke("this instance is not in the group any more")
                # The process is ending. Until then there may be further failures.
                if not self.failed.done():
                    self.failed.set_result(error)

    async def _raise_record_version(self, record_version: int) -> None:
        """Lets all owners write records of a version, because every instance reads it."""
        try:
            await self._shared.append([new_record_version_record(record_version)])
        except KafkaError as error:
            _logger.warning("Owners keep writing records of version %d: %s", self._shared.state.record_version, error)
        else:
            _logger.info("Owners write records of version %d from now on", record_version)

    def _own_shards(self) -> None:
        """Owns the shards of the map. Called again when the log of a shard was released, which had to end first."""
        gained = self._broker.groups.own(self._own)
        if gained:
            self._broker.spawn(self._load(gained))

    async def _load(self, gained: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._broker.await_group_load(gained)
        shards = self._broker.groups.shards
        if all(shards.machine(shard_id) is not None for shard_id in gained):
            self.takeovers.add((loop.time() - began) * 1000)
