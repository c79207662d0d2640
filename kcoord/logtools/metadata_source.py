# SPDX-License-Identifier: Apache-2.0
"""Reads the metadata of a stopped broker (Kafka or kcoord): the newest snapshot, and the log after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kcoord.logtools.decode import ALL_METADATA_RECORDS
from kcoord.logtools.folders import FolderReader
from kcoord.metadata.image import ImageBuilder, MetadataImage
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import MetadataSerde
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import FileSystem, join
from kcoord.storage.scan import Damage, corrupt, walk
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.messages import (
    AbortTransactionRecord,
    BeginTransactionRecord,
    EndTransactionRecord,
    PartitionRecord,
)
from kcoord_protocol.record_batch import decode_header, decode_records

_SNAPSHOT = re.compile(r"[0-9]{20}-[0-9]{10}\.checkpoint")


@dataclass(slots=True)
class SourceMetadata:
    """The metadata image, with the number of records by type. `unknown` counts the types that kcoord does not know."""

    image: MetadataImage
    records: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)


def read_metadata(fs: FileSystem, folder: str) -> SourceMetadata:
    """Reads the folder `__cluster_metadata-0`."""
    serde = MetadataSerde(ALL_METADATA_RECORDS)
    source = SourceMetadata(MetadataImage.empty())
    records: list[CoordinatorRecord] = []
    from_offset = 0
    snapshots = sorted(name for name in fs.list_dir(folder) if _SNAPSHOT.fullmatch(name))
    if snapshots:
        from_offset = int(snapshots[-1][:20])
        records = list(_decode(_snapshot_batches(fs, join(folder, snapshots[-1])), serde, source))
        # Kafka's snapshots contain the partitions of a topic in any order.
        records.sort(key=_partition_order)
    reader = FolderReader(fs, folder)
    batches = (frame.batch for frame in reader.batches(from_offset) if frame.base_offset >= from_offset)
    records += _decode(batches, serde, source)
    source.image = ImageBuilder.of(_completed(records))
    return source


def _partition_order(record: CoordinatorRecord) -> int:
    return record.value.partition_id if isinstance(record.value, PartitionRecord) else -1


def _snapshot_batches(fs: FileSystem, path: str) -> Iterator[bytes]:
    file = fs.open_read(path)
    try:
        for frame in walk(file, 0, file.size(), 0):
            yield frame.batch
    except Damage as damage:
        raise corrupt(path, damage) from None
    finally:
        file.close()


def _decode(batches: Iterable[bytes], serde: MetadataSerde, source: SourceMetadata) -> Iterator[CoordinatorRecord]:
    for batch in batches:
        if decode_header(batch).is_control:
            continue
        for record in decode_records(batch):
            try:
                decoded = serde.deserialize(record.key, record.value)
            except DecodeError as error:
                raise StorageError(f"the metadata record at offset {record.offset} is malformed: {error}") from error
            if decoded is None or decoded.value is None:
                source.unknown[serde.describe(record.key, record.value)] += 1
                continue
            source.records[decoded.value.message_name] += 1
            yield decoded


def _completed(records: Iterable[CoordinatorRecord]) -> Iterator[CoordinatorRecord]:
    """Yields the records without those of metadata transactions that were aborted or never ended (KIP-868)."""
    open_records: list[CoordinatorRecord] | None = None
    for record in records:
        if isinstance(record.value, BeginTransactionRecord):
            open_records = []
        elif isinstance(record.value, AbortTransactionRecord):
            open_records = None
        elif isinstance(record.value, EndTransactionRecord):
            yield from open_records or ()
            open_records = None
        elif open_records is not None:
            open_records.append(record)
        else:
            yield record
