# SPDX-License-Identifier: Apache-2.0
"""silver.ends, brokers, topics and descriptions: samples of what the brokers of a cluster say.

The offsets log does not have the ends of partitions, so there is no lag without samples of `ends`. It does not have the
brokers either, nor what the coordinators say about their groups. Every sample adds rows with one timestamp. A part for
which the client has no rights is empty.

`topics` has rows only for changes. That a topic is not listed does not mean that it is gone: the client may have lost
the right to see it. So a sample asks for the ids of the topics that earlier samples listed (`seen_topics`). A topic
is deleted if no topic has its id. A broker that lags behind may not know a new topic yet, so the brokers must say so
for _DELETED_AFTER_MS.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

import pyarrow as pa

from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import ConfigResource, ConfigResourceType, OffsetSpec, TopicListing
from kcoord.client.types import TopicPartition
from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.ingest import MAX_TIMESTAMP_MS, copied_topic_id
from kcoord.pipeline.lake.jobs import SAMPLED_TOPICS
from kcoord.pipeline.lake.settings import ExpiryPolicy
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES
from kcoord_protocol.batch_header import crc32c
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.uuid import ZERO_UUID, uuid_from_string, uuid_to_string

RETENTION: Final = "offsets.retention.minutes"
_POLICY: Final = "kcoord.offsets.expiration.policy"
_UPSTREAM: Final = "kcoord.upstream.bootstrap.servers"
"""Only kcoord in front of a cluster has a value of it."""
_DELETED_AFTER_MS: Final = 60_000


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
class Topics:
    """The topics in a sample. `listed` has the name of each topic id.

    `unlisted` has the errors of the ids that earlier samples listed and this one does not: UNKNOWN_TOPIC_ID,
    TOPIC_AUTHORIZATION_FAILED, or an error that may pass.
    """

    listed: Mapping[str, str]
    unlisted: Mapping[str, Errors] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the brokers said at a moment (UTC). `topics` is None if they were not asked for them."""

    moment: datetime
    ends: Sequence[End]
    cluster_id: str | None = None
    brokers: Sequence[SampledBroker] = ()
    descriptions: Sequence[Description] = ()
    topics: Topics | None = None


async def bind(lake: Lake, admin: AdminClient) -> None:
    """Binds the lake to the cluster of the brokers.

    If the lake does not have the id of its cluster yet, the id of the topic that it has copied shows which cluster it
    is, as in `ingest`. Raises LakeError if it is another cluster.
    """
    cluster_id = (await admin.describe_cluster()).cluster_id
    lake.choose(cluster_id)
    topic_id = None if lake.cluster_id is not None else copied_topic_id(lake)
    if topic_id is not None:
        errors = (await admin.describe_topic_ids([uuid_from_string(topic_id)])).errors
        if any(error.error is Errors.UNKNOWN_TOPIC_ID for error in errors.values()):
            own = "its cluster" if lake.cluster is None else f"the cluster {lake.cluster}"
            hint = "begin another lake" if lake.cluster is None else "choose another name (--cluster)"
            raise LakeError(
                f"lake {lake.uri}: {own} was copied from a topic with the id {topic_id}, which the cluster "
                f"{cluster_id} does not have: {hint}"
            )
    lake.bind(cluster_id)


async def take_sample(admin: AdminClient, *, seen: Iterable[str] = (), with_groups: bool = True) -> Sample:
    """Asks the brokers. `seen` has the ids of the topics that earlier samples listed (`seen_topics`).

    Describing all groups costs the coordinators more than the rest, so it may be left out.
    """
    moment = datetime.now(UTC)
    listings = await admin.list_topics(include_internal=True)
    topics = await _ask_topics(admin, listings, seen)
    ends = await ask_ends(admin, [listing.name for listing in listings if not listing.is_internal])
    cluster = await admin.describe_cluster()
    controller = None if cluster.controller is None else cluster.controller.node_id
    brokers = [
        SampledBroker(node.node_id, node.host, node.port, node.rack, node.node_id == controller)
        for node in cluster.nodes
    ]
    descriptions = await _describe_groups(admin) if with_groups else []
    return Sample(moment, ends, cluster.cluster_id, brokers, descriptions, topics)


async def _ask_topics(admin: AdminClient, listings: Iterable[TopicListing], seen: Iterable[str]) -> Topics:
    """Asks for the topics that were seen and are not listed. Topics of a cluster without topic ids are left out."""
    listed = {uuid_to_string(topic.topic_id): topic.name for topic in listings if topic.topic_id != ZERO_UUID}
    unlisted = sorted(uuid_from_string(topic_id) for topic_id in {*seen} - listed.keys())
    if not unlisted:
        return Topics(listed)
    errors = (await admin.describe_topic_ids(unlisted)).errors
    return Topics(listed, {uuid_to_string(topic_id): error.error for topic_id, error in errors.items()})


async def ask_ends(admin: AdminClient, names: Iterable[str]) -> list[End]:
    """Queries the partitions of these topics. Returns them in order of topic and partition.

    Omits partitions for which the broker returns an error.
    """
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


class Retention(NamedTuple):
    """When brokers let offsets expire."""

    minutes: int
    policy: ExpiryPolicy


async def retention(admin: AdminClient, topic: str) -> Retention | None:
    """Returns the retention of the brokers whose groups are in the topic, None if it is unknown.

    Kafka has no config for the policy. The instances of kcoord in front of a cluster are among its brokers. Their
    groups are in a topic of their own.
    """
    nodes = (await admin.describe_cluster()).nodes
    brokers = [ConfigResource(ConfigResourceType.BROKER, str(node.node_id)) for node in nodes]
    for configs in (
        await admin.describe_configs(dict.fromkeys(brokers, (RETENTION, _POLICY, _UPSTREAM)))
    ).values.values():
        values = {name: entry.value for name, entry in configs.items()}
        minutes, is_in_front = values.get(RETENTION), bool(values.get(_UPSTREAM))
        if minutes is not None and is_in_front == (topic != GROUP_METADATA_TOPIC):
            return Retention(int(minutes), ExpiryPolicy(values.get(_POLICY) or ExpiryPolicy.KAFKA))
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
    """Adds the rows of a sample to its tables. `ends` and `ingest` may do so at once, in turns.

    Raises LeaseError if another process adds a sample for a minute.
    """
    with lake.lease("samples").held():
        _add(lake, "ends", [row._asdict() for row in sample.ends], sample.moment)
        _add(lake, "brokers", [row._asdict() for row in sample.brokers], sample.moment)
        _add(lake, "descriptions", [row._asdict() for row in sample.descriptions], sample.moment)
        if sample.topics is not None:
            _add_topics(lake, sample.topics, sample.moment)


def seen_topics(lake: Lake) -> Collection[str]:
    """Returns the ids of the topics that the samples of a lake have listed, without those deleted or hidden since."""
    return (lake.note("topics") or TableNote()).made_from.keys()


def _add_topics(lake: Lake, topics: Topics, moment: datetime) -> None:
    """Adds rows for what has changed.

    In the note, `made_from` has the names of the topics that were seen, by id. `progress` has the times in ms since
    when the brokers do not know an id.
    """
    note = lake.note("topics") or TableNote()
    now_ms = int(moment.timestamp() * 1000)
    seen, unknown = {**note.made_from, **topics.listed}, dict[str, int]()
    rows = [(topic_id, moment, "listed") for topic_id in topics.listed if topic_id not in note.made_from]
    for topic_id, error in topics.unlisted.items():
        if topic_id not in seen:
            continue  # another process has added a sample without this topic meanwhile
        since_ms = note.progress.get(topic_id, now_ms)
        if error is Errors.TOPIC_AUTHORIZATION_FAILED:
            rows.append((topic_id, moment, "hidden"))
        elif error is Errors.UNKNOWN_TOPIC_ID and now_ms - since_ms >= _DELETED_AFTER_MS:
            rows.append((topic_id, datetime.fromtimestamp(since_ms / 1000, UTC), "deleted"))
        elif error is Errors.UNKNOWN_TOPIC_ID:
            unknown[topic_id] = since_ms
    if rows:
        values = [
            {"topic": seen[topic_id], "topic_id": topic_id, "timestamp": since, "state": state, "date": since.date()}
            for topic_id, since, state in rows
        ]
        lake.append("topics", pa.Table.from_pylist(values, schema=TABLES["topics"].arrow_schema))
    for topic_id, _, state in rows:
        if state != "listed":
            del seen[topic_id]
    if (seen, unknown) != (note.made_from, note.progress):
        lake.set_note("topics", TableNote(note.version + bool(rows), seen, unknown))


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
