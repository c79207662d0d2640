# SPDX-License-Identifier: Apache-2.0
"""Log files as rows, for people and for programs: one row per record, index entry, or producer of a snapshot.

A dump continues after damage if more batches follow, and reports the position of the damage as a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kcoord.logtools.decode import Json, LogKind, RecordDescriber, headers_json, kind_of
from kcoord.logtools.folders import NoLogsError, partition_at, partitions_at
from kcoord.logtools.index_entries import offset_entries, time_entries
from kcoord.storage.file_system import FileSystem, join, parent, read_file
from kcoord.storage.recovery import base_offset_of
from kcoord.storage.scan import BatchFrame, Damage, DamageKind, find_batch, walk
from kcoord.storage.segment import LOG_SUFFIX
from kcoord.storage.segment_indexes import INDEX_SUFFIX, TIME_INDEX_SUFFIX
from kcoord.topics.producer_files import (
    SNAPSHOT_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
    InvalidSnapshotError,
    damage_of_index,
    decode_aborted,
    decode_snapshot,
)
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.record_batch import BatchHeader, decode_header, iter_records

METADATA_SNAPSHOT_SUFFIX = ".checkpoint"
SUFFIXES = (
    LOG_SUFFIX,
    METADATA_SNAPSHOT_SUFFIX,
    INDEX_SUFFIX,
    TIME_INDEX_SUFFIX,
    SNAPSHOT_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
)


@dataclass(slots=True)
class Selection:
    """Selects records by offset (both bounds inclusive). `kind` overrides the kind given by the folder's name."""

    from_offset: int = 0
    to_offset: int = 2**63 - 1
    kind: LogKind | None = None


def files_at(fs: FileSystem, path: str, partitions: frozenset[str]) -> list[str]:
    """Returns the files to dump at `path`.

    That is `path` itself if it is a file, or the log files of a partition folder. For a data folder it is the log
    files of its partitions, limited to the names in `partitions` unless that is empty. Raises NoLogsError if one
    of these does not exist, or if the file is of another kind.
    """
    if path.endswith(SUFFIXES) and _is_file(fs, path):
        return [path]
    partition = partition_at(path)
    try:
        names = fs.list_dir(path)
    except NotADirectoryError:
        raise NoLogsError(f"{path}: no log file, whose name ends with {', '.join(SUFFIXES)}") from None
    if partition is not None and any(_is_dumped(name) for name in names):
        return [join(path, name) for name in names if _is_dumped(name)]
    folders = partitions_at(fs, path)
    missing = partitions.difference(folder.name for folder in folders)
    if missing:
        raise NoLogsError(f"{path}: there is no partition folder {', '.join(sorted(missing))}")
    chosen = [folder.path for folder in folders if not partitions or folder.name in partitions]
    return [join(folder, name) for folder in chosen for name in fs.list_dir(folder) if _is_dumped(name)]


def _is_file(fs: FileSystem, path: str) -> bool:
    return fs.exists(path) and path.rpartition("/")[2] in fs.list_dir(parent(path))


def _is_dumped(name: str) -> bool:
    """Whether the dump of a folder includes the file. Indexes and producer snapshots are dumped only by file name."""
    return name.endswith(METADATA_SNAPSHOT_SUFFIX) or base_offset_of(name) is not None


def dump_file(fs: FileSystem, path: str, selection: Selection) -> Iterator[Json]:
    """Yields the rows of one file."""
    name = path.rpartition("/")[2]
    if name.endswith((LOG_SUFFIX, METADATA_SNAPSHOT_SUFFIX)):
        partition = partition_at(parent(path))
        kind = selection.kind or (kind_of(partition.topic) if partition is not None else LogKind.DATA)
        return _records(fs, path, partition.name if partition is not None else None, kind, selection)
    return _side_file(fs, path, name)


def _records(fs: FileSystem, path: str, partition: str | None, kind: LogKind, selection: Selection) -> Iterator[Json]:
    describer = RecordDescriber(kind)
    for item in frames_and_damage(fs, path):
        if isinstance(item, Damage):
            place: Json = {"file": path, "partition": partition, "position": item.position, "offset": item.offset}
            yield {**place, "damage": str(item)}
        elif item.last_offset >= selection.from_offset and item.base_offset <= selection.to_offset:
            yield from _batch_rows(path, partition, describer, item, selection)


def frames_and_damage(fs: FileSystem, path: str) -> Iterator[BatchFrame | Damage]:
    """Yields every whole batch of a file, and the damage between them, in the order of their positions."""
    file = fs.open_read(path)
    try:
        size = file.size()
        position = 0
        offset = 0
        while position < size:
            try:
                for frame in walk(file, position, size, offset):
                    yield frame
                    position, offset = frame.position + frame.size_bytes, frame.last_offset + 1
                return
            except Damage as damage:
                yield damage
                # A batch whose offsets do not fit is intact, so it is yielded too.
                start = damage.position if damage.kind is DamageKind.MISPLACED else damage.position + 1
                following = find_batch(file, start, size, 0)
                if following is None:
                    return
                position, offset = following
    finally:
        file.close()


def _batch_rows(
    path: str, partition: str | None, describer: RecordDescriber, frame: BatchFrame, selection: Selection
) -> Iterator[Json]:
    batch = frame.batch
    header = decode_header(batch)
    common = _batch_fields(path, partition, frame.position, header)
    try:
        for number, record in enumerate(iter_records(batch)):
            if not selection.from_offset <= record.offset <= selection.to_offset:
                continue
            key, value = describer.describe(record, is_control=header.is_control)
            yield {
                **common,
                "offset": record.offset,
                "timestamp": record.timestamp_ms,
                "sequence": header.base_sequence + number if header.base_sequence >= 0 else -1,
                "headers": headers_json(record.headers),
                "key": key,
                "value": value,
            }
    except DecodeError as error:
        yield {**common, "offset": header.base_offset, "damage": str(error)}


def _batch_fields(path: str, partition: str | None, position: int, header: BatchHeader) -> Json:
    fields: Json = {"file": path, "partition": partition, "position": position}
    fields["leaderEpoch"] = header.partition_leader_epoch
    fields["producerId"] = header.producer_id
    fields["producerEpoch"] = header.producer_epoch
    fields["isTransactional"] = header.is_transactional
    fields["isControl"] = header.is_control
    fields["compression"] = header.compression.name.lower()
    return fields


def _side_file(fs: FileSystem, path: str, name: str) -> Iterator[Json]:
    data = read_file(fs, path)
    try:
        for row in _side_rows(name, data):
            yield {"file": path, **row}
        damage = damage_of_index(data) if name.endswith(TRANSACTION_INDEX_SUFFIX) else None
        if damage is not None:
            yield {"file": path, "damage": damage}
    except InvalidSnapshotError as error:
        yield {"file": path, "damage": str(error)}


def _side_rows(name: str, data: bytes) -> Iterable[Json]:
    base_offset = int(name.partition(".")[0]) if name.partition(".")[0].isdigit() else 0
    if name.endswith(TIME_INDEX_SUFFIX):
        return [{"timestamp": timestamp, "offset": offset} for timestamp, offset in time_entries(base_offset, data)]
    if name.endswith(INDEX_SUFFIX):
        return [{"offset": offset, "position": position} for offset, position in offset_entries(base_offset, data)]
    if name.endswith(SNAPSHOT_SUFFIX):
        return [
            {
                "producerId": entry.producer_id,
                "producerEpoch": entry.producer_epoch,
                "coordinatorEpoch": entry.coordinator_epoch,
                "currentTxnFirstOffset": entry.current_transaction_first_offset,
                "lastTimestamp": entry.last_timestamp_ms,
                "lastSequence": entry.batches[-1].last_sequence if entry.batches else -1,
                "lastOffset": entry.batches[-1].last_offset if entry.batches else -1,
            }
            for entry in decode_snapshot(data)
        ]
    return [
        {
            "producerId": aborted.producer_id,
            "firstOffset": aborted.first_offset,
            "lastOffset": aborted.last_offset,
            "lastStableOffset": aborted.last_stable_offset,
        }
        for aborted in decode_aborted(data)
    ]
