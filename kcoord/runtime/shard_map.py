# SPDX-License-Identifier: Apache-2.0
"""The instances in front of an upstream, and which of them owns each shard. Pure.

The instances are members of one group of the upstream. The leader of the group makes a `ShardMap` from the metadata of
all members (`plan`), and every member gets the same bytes as its assignment. So all instances name the same owner of a
group, and the same host and port for each broker of the upstream.

Two instances may have different releases. Records have a version: owners write the highest one that all instances read.
It never falls, because it is in the log. An instance that cannot read it owns nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kcoord_protocol.errors import DecodeError
from kcoord_protocol.messages import UpstreamAssignment, UpstreamMemberMetadata

RECORD_VERSION: Final = 1
"""The highest version of the records about groups in the upstream that this release reads. A release that writes a new
type of record, or a new version of one, raises it. It writes them only if `kcoord.metadata.shared` has the version.
"""
NOBODY: Final = -1
NO_GENERATION: Final = -1
_VERSION: Final = (0).to_bytes(2, "big")
"""The version before metadata and assignments. Fields that are added later are tagged, so older readers skip them."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance as clients see it. `broker_ports` has its ports by the node ids of the upstream's brokers."""

    node_id: int
    host: str
    port: int
    rack: str | None = None
    broker_ports: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardMap:
    """All instances, and the owner of each shard, in one generation of the group."""

    generation: int
    record_version: int
    """The version of the records that owners write."""
    instances: Mapping[int, Instance]
    """The live instances by ascending node id."""
    owners: Sequence[int]
    """The node id of the owner of each shard, or NOBODY."""

    def owner(self, shard_id: int) -> Instance | None:
        """Returns the owner of a shard, None if there is none."""
        return self.instances.get(self.owners[shard_id]) if shard_id < len(self.owners) else None

    def shards_of(self, node_id: int) -> list[int]:
        """Returns the shards of an instance, in ascending order."""
        return [shard_id for shard_id, owner in enumerate(self.owners) if owner == node_id]

    def address_of_broker(self, broker_id: int) -> tuple[str, int] | None:
        """Returns host and port of the instance that stands for a broker of the upstream, None if there is none.

        Every instance chooses the same one, by rendezvous hashing: if an instance comes or goes, only the brokers that
        it stands for move.
        """
        candidates = [instance for instance in self.instances.values() if broker_id in instance.broker_ports]
        if not candidates:
            return None
        chosen = max(candidates, key=lambda instance: _weight(broker_id, instance.node_id))
        return chosen.host, chosen.broker_ports[broker_id]


def _weight(broker_id: int, node_id: int) -> bytes:
    return blake2b(broker_id.to_bytes(4, "big") + node_id.to_bytes(4, "big"), digest_size=8).digest()


def encode_metadata(instance: Instance, record_version: int, last: ShardMap | None, attempt: int) -> bytes:
    """Returns the metadata with which an instance joins. `last` is the last map that it got."""
    metadata = UpstreamMemberMetadata(
        node_id=instance.node_id,
        host=instance.host,
        port=instance.port,
        rack=instance.rack,
        broker_ports=[
            UpstreamMemberMetadata.BrokerPort(broker_id=broker_id, port=port)
            for broker_id, port in sorted(instance.broker_ports.items())
        ],
        record_version=record_version,
        written_version=0 if last is None else last.record_version,
        generation=NO_GENERATION if last is None else last.generation,
        shards=[] if last is None else last.shards_of(instance.node_id),
        attempt=attempt,
    )
    return _VERSION + metadata.encode(0)


def _decode_metadata(data: bytes) -> UpstreamMemberMetadata:
    return UpstreamMemberMetadata.decode_prefix(data, len(_VERSION), 0)[0]


def _readable(metadata: Iterable[bytes]) -> dict[int, tuple[UpstreamMemberMetadata, bytes]]:
    members: dict[int, tuple[UpstreamMemberMetadata, bytes]] = {}
    for data in metadata:
        try:
            member = _decode_metadata(data)
        except DecodeError:
            # Not an instance of kcoord. It gets the assignment too, and owns nothing.
            continue
        members[member.node_id] = member, data
    return dict(sorted(members.items()))


def plan(generation: int, metadata: Iterable[bytes], count: int, last: ShardMap | None) -> bytes:
    """Returns the assignment that the leader gives to all members, from their metadata.

    `last` is the last map of the leader. It counts for shards that no member has owned since.
    """
    members = _readable(metadata)
    written = max((member.written_version for member, _ in members.values()), default=0)
    readable = min((member.record_version for member, _ in members.values()), default=0)
    record_version = max(written, readable)
    able = [node_id for node_id, (member, _) in members.items() if member.record_version >= record_version]
    previous: dict[int, int] = {}
    if last is not None:
        previous = dict(enumerate(last.owners))
    claims = sorted((member.generation, node_id) for node_id, (member, _) in members.items())
    for member_generation, node_id in claims:
        if last is None or member_generation >= last.generation:
            previous.update(dict.fromkeys(members[node_id][0].shards, node_id))
    assignment = UpstreamAssignment(
        generation=generation,
        record_version=record_version,
        members=[data for _, data in members.values()],
        owners=assign_shards(count, able, previous),
    )
    return _VERSION + assignment.encode(0)


def decode_map(data: bytes) -> ShardMap:
    """Returns the map of an assignment. Raises DecodeError."""
    assignment = UpstreamAssignment.decode_prefix(data, len(_VERSION), 0)[0]
    instances: dict[int, Instance] = {}
    for encoded in assignment.members:
        member = _decode_metadata(encoded)
        ports = {broker.broker_id: broker.port for broker in member.broker_ports}
        instances[member.node_id] = Instance(member.node_id, member.host, member.port, member.rack, ports)
    return ShardMap(assignment.generation, assignment.record_version, instances, assignment.owners)


def assign_shards(count: int, node_ids: Collection[int], previous: Mapping[int, int]) -> list[int]:
    """Returns the owner of each shard from 0 to `count` - 1; NOBODY for all if there are no nodes.

    The numbers of shards of two nodes differ by at most one. As many shards as possible keep their `previous` owner.
    The result depends on the arguments alone, and not on the order of `node_ids`.
    """
    owned: dict[int, list[int]] = {node_id: [] for node_id in sorted(node_ids)}
    if not owned:
        return [NOBODY] * count
    for shard_id in range(count):
        if previous.get(shard_id) in owned:
            owned[previous[shard_id]].append(shard_id)
    least, extra = divmod(count, len(owned))
    # Nodes that have the most shards get the larger quotas, so they keep the most.
    order = sorted(owned, key=lambda node_id: (-len(owned[node_id]), node_id))
    quotas = {node_id: least + (place < extra) for place, node_id in enumerate(order)}
    owners = [NOBODY] * count
    for node_id in order:
        for shard_id in owned[node_id][: quotas[node_id]]:
            owners[shard_id] = node_id
    vacancies = (node_id for node_id in order for _ in range(max(quotas[node_id] - len(owned[node_id]), 0)))
    return [next(vacancies) if owner == NOBODY else owner for owner in owners]
