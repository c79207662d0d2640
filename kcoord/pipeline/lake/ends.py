# SPDX-License-Identifier: Apache-2.0
"""silver.ends: where partitions begin and end, asked of a broker. The offsets log does not know; without samples there
is no lag. Every run adds one sample.
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
    """One partition in a sample; `created_timestamp` is None where the broker does not know it (KIP-1327)."""

    topic: str
    topic_id: str
    partition: int
    start_offset: int
    end_offset: int
    created_timestamp: datetime | None


async def ask(admin: AdminClient) -> list[End]:
    """All partitions that answer, of all topics that are not internal; by topic and partition."""
    names = [listing.name for listing in await admin.list_topics()]
    described = await admin.describe_topics(names)
    infos = {}
    for name in described:
        try:
            description = described[name]
        except KafkaError:
            continue  # deleted meanwhile
        for info in description.partitions:
            infos[TopicPartition(name, info.partition)] = (description.topic_id_text, info.creation_time_ms)
    first = await admin.list_offsets({each: OffsetSpec.earliest() for each in infos})
    last = await admin.list_offsets({each: OffsetSpec.latest() for each in infos})
    rows = []
    for place, (topic_id, created_ms) in sorted(infos.items()):
        try:
            start, end = first[place].offset, last[place].offset
        except KafkaError:
            continue  # without a leader, or deleted meanwhile
        created = None if created_ms is None else datetime.fromtimestamp(created_ms / 1000, UTC)
        rows.append(End(place.topic, topic_id, place.partition, start, end, created))
    return rows


def add_sample(lake: Lake, ends: list[End], moment: datetime) -> None:
    """Keeps what was asked at the moment (UTC)."""
    rows = [
        (each.topic, each.topic_id, each.partition, moment, each.start_offset, each.end_offset, created, moment.date())
        for each in ends
        for created in [each.created_timestamp]
    ]
    lake.append("ends", lake.spark.createDataFrame(rows, TABLES["ends"].schema).coalesce(1))
    note = lake.note("ends") or TableNote()
    newest = max(note.progress.get(MAX_TIMESTAMP_MS, 0), int(moment.timestamp() * 1000))
    lake.set_note("ends", TableNote(note.version + 1, {}, {MAX_TIMESTAMP_MS: newest}))
