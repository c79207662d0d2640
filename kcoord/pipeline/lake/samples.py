# SPDX-License-Identifier: Apache-2.0
"""silver.ends, silver.brokers and silver.descriptions: samples of what the brokers of a cluster say.

The offsets log does not have the ends of partitions, so there is no lag without samples of `ends`. It does not have the
brokers either, nor what the coordinators say about their groups. Every sample adds rows with one timestamp. A part for
which the client has no rights is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

import pyarrow as pa

from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import ConfigResource, ConfigResourceType, OffsetSpec
from kcoord.client.types import TopicPartition
from kcoord.pipeline.lake.ingest import MAX_TIMESTAMP_MS
from kcoord.pipeline.lake.jobs import SAMPLED_TOPICS
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES
from kcoord_protocol.batch_header import crc32c
from kcoord_protocol.errors import KafkaError

RETENTION: Final = "offsets.retention.minutes"


class End(NamedTuple):
    """One partition in a sample. `created_timestamp` is None if the broker does not report it (KIP-1327)."""

    topic: str
    topic_id: str
    partition: int
    start_offset: int
    end_offset: int
    created_timestamp: datetime | None


class SampledBroker(NamedTuple):
    """One broker in a sample."""

    broker_id: int
    host: str
    port: int
    rack: str | None
    is_controller: bool


class Description(NamedTuple):
    """A group as its coordinator described it."""

    group: str
    kind: str
    state: str
    epoch: int | None
    assignor: str
    members: int
    coordinator: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What the brokers said at a moment (UTC)."""

    moment: datetime
    ends: Sequence[End]
    cluster_id: str | None = None
    brokers: Sequence[SampledBroker] = ()
    descriptions: Sequence[Description] = ()


async def take_sample(admin: AdminClient, *, with_groups: bool = True) -> Sample:
    """Asks the brokers. Describing all groups costs the coordinators more than the rest, so it may be left out."""
    moment = datetime.now(UTC)
    ends = await ask_ends(admin)
    cluster = await admin.describe_cluster()
    controller = None if cluster.controller is None else cluster.controller.node_id
    brokers = [
        SampledBroker(node.node_id, node.host, node.port, node.rack, node.node_id == controller)
        for node in cluster.nodes
    ]
    return Sample(moment, ends, cluster.cluster_id, brokers, await _describe_groups(admin) if with_groups else [])


async def ask_ends(admin: AdminClient) -> list[End]:
    """Queries the partitions of all topics that are not internal. Returns them in order of topic and partition.

    Omits partitions for which the broker returns an error.
    """
    names = [listing.name for listing in await admin.list_topics()]
    described = await admin.describe_topics(names)
    infos = {}
    for name in described:
        try:
            description = described[name]
        except KafkaError:
            continue  # the topic has been deleted meanwhile
        for info in description.partitions:
            infos[TopicPartition(name, info.partition)] = (description.topic_id_text, info.creation_time_ms)
    first = await admin.list_offsets({place: OffsetSpec.earliest() for place in infos})
    last = await admin.list_offsets({place: OffsetSpec.latest() for place in infos})
    rows = []
    for place, (topic_id, created_ms) in sorted(infos.items()):
        try:
            start, end = first[place].offset, last[place].offset
        except KafkaError:
            continue  # the partition has no leader, or has been deleted meanwhile
        created = None if created_ms is None else datetime.fromtimestamp(created_ms / 1000, UTC)
        rows.append(End(place.topic, topic_id, place.partition, start, end, created))
    return rows


async def retention_minutes(admin: AdminClient) -> int | None:
    """Returns `offsets.retention.minutes` of the brokers, None if the client may not see it."""
    cluster = await admin.describe_cluster()
    for node in cluster.nodes:
        resource = ConfigResource(ConfigResourceType.BROKER, str(node.node_id))
        configs = (await admin.describe_configs([resource])).values.get(resource)
        entry = None if configs is None else configs.get(RETENTION)
        if entry is not None and entry.value is not None:
            return int(entry.value)
    return None


async def _describe_groups(admin: AdminClient) -> list[Description]:
    """Describes all groups that the client may see, but those of other kinds, such as share groups."""
    listed = await admin.list_consumer_groups()
    described = await admin.describe_consumer_groups([listing.group_id for listing in listed])
    return [
        Description(
            group.group_id,
            group.group_type.lower(),
            group.state,
            group.group_epoch,
            group.assignor,
            len(group.members),
            group.coordinator.node_id,
        )
        for group in described.values.values()
    ]


def add_sample(lake: Lake, sample: Sample) -> None:
    """Adds the rows of a sample to its tables."""
    _add(lake, "ends", [row._asdict() for row in sample.ends], sample.moment)
    _add(lake, "brokers", [row._asdict() for row in sample.brokers], sample.moment)
    _add(lake, "descriptions", [row._asdict() for row in sample.descriptions], sample.moment)


def _add(lake: Lake, name: str, rows: Sequence[Mapping[str, object]], moment: datetime) -> None:
    if not rows:
        return
    common = {"timestamp": moment, "date": moment.date()}
    schema = TABLES[name].arrow_schema
    lake.append(name, pa.Table.from_pylist([{**row, **common} for row in rows], schema=schema))
    note = lake.note(name) or TableNote()
    newest = max(note.progress.get(MAX_TIMESTAMP_MS, 0), int(moment.timestamp() * 1000))
    topics = sorted({(str(row["topic"]), str(row["topic_id"])) for row in rows if "topic" in row})
    made_from = {SAMPLED_TOPICS: f"{crc32c(repr(topics).encode()):08x}"} if topics else {}
    lake.set_note(name, TableNote(note.version + 1, made_from, {MAX_TIMESTAMP_MS: newest}))
