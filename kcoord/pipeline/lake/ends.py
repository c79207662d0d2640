# SPDX-License-Identifier: Apache-2.0
"""silver.ends: samples of the start and end offsets of partitions, queried from a broker.

The offsets log does not have them, so there is no lag without samples. Every run adds one sample.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import OffsetSpec
from kcoord.client.types import TopicPartition
from kcoord.pipeline.lake.ingest import MAX_TIMESTAMP_MS
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES
from kcoord_protocol.errors import KafkaError


class End(NamedTuple):
    """One partition in a sample. `created_timestamp` is None if the broker does not report it (KIP-1327)."""

    topic: str
    topic_id: str
    partition: int
    start_offset: int
    end_offset: int
    created_timestamp: datetime | None


async def ask(admin: AdminClient) -> list[End]:
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


def add_sample(lake: Lake, ends: list[End], moment: datetime) -> None:
    """Adds a sample that was taken at the moment (UTC)."""
    rows = [
        (end.topic, end.topic_id, end.partition, moment, end.start_offset, end.end_offset, created, moment.date())
        for end in ends
        for created in [end.created_timestamp]
    ]
    lake.append("ends", lake.spark.createDataFrame(rows, TABLES["ends"].schema).coalesce(1))
    note = lake.note("ends") or TableNote()
    newest = max(note.progress.get(MAX_TIMESTAMP_MS, 0), int(moment.timestamp() * 1000))
    lake.set_note("ends", TableNote(note.version + 1, {}, {MAX_TIMESTAMP_MS: newest}))
