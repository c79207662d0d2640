# SPDX-License-Identifier: Apache-2.0
"""Finds the committed offsets that a group had at a given time, and plans the commits that restore them.

The source is the log of `__consumer_offsets`. Records that compaction has removed cannot be restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from kcoord.logtools.folders import FolderReader, NoLogsError, is_metadata_topic, partitions_in
from kcoord.logtools.metadata_source import read_metadata
from kcoord.logtools.transactions import OFFSET_COMMIT_TYPES, TransactionResolver
from kcoord.runtime.serde import PRINCIPAL_HEADER, REASON_HEADER, CoordinatorSerde, partition_for
from kcoord.storage.file_system import FileSystem
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.messages import OffsetCommitKey, OffsetCommitValue
from kcoord_protocol.record_batch import Record, decode_header, decode_records
from kcoord_protocol.uuid import ZERO_UUID

PartitionKey: TypeAlias = tuple[str, int]


@dataclass(slots=True)
class PastOffset:
    """A committed offset with the timestamp of its record."""

    offset: int
    leader_epoch: int
    metadata: str
    topic_id: bytes
    written_ms: int


@dataclass(slots=True)
class DeletedOffset:
    """The time at which an offset was deleted, and the reason and the principal if the tombstone has them."""

    written_ms: int
    why: str = ""
    principal: str = ""


@dataclass(slots=True)
class PastOffsets:
    """The offsets of a group at a given time, the deletions after that time, and the offsets that are lost."""

    offsets: dict[PartitionKey, PastOffset] = field(default_factory=dict)
    deletions: dict[PartitionKey, DeletedOffset] = field(default_factory=dict)
    lost: set[PartitionKey] = field(default_factory=set)
    """Offsets that were deleted after the given time, but whose commits compaction has removed."""


def offsets_at(batches: Iterable[bytes], group_id: str, time_ms: int) -> PastOffsets:
    """Returns the offsets of a group at `time_ms`.

    `batches` are all batches of the group's partition of `__consumer_offsets`, in order.
    """
    past = PastOffsets()
    serde = CoordinatorSerde(("OffsetCommit",))
    prefix = group_id.encode()
    begin = tuple(number + len(prefix).to_bytes(2, "big") + prefix for number in OFFSET_COMMIT_TYPES)
    resolver = TransactionResolver()
    seen: set[PartitionKey] = set()
    for batch in batches:
        if decode_header(batch).is_transactional:
            # An offset that was deleted while its transaction was open is not lost.
            seen.update(key for key, _, _ in _of_group(serde, begin, decode_records(batch)))
        for key, value, record in _of_group(serde, begin, resolver.feed(batch)):
            _note(past, seen, key, value, record, time_ms)
    return past


def _of_group(
    serde: CoordinatorSerde, begin: tuple[bytes, ...], records: Iterable[Record]
) -> Iterator[tuple[PartitionKey, OffsetCommitValue | None, Record]]:
    """Yields the offset records whose keys begin with `begin`: partition, value (None for a tombstone) and record."""
    for record in records:
        if record.key is None or not record.key.startswith(begin):
            continue
        decoded = serde.deserialize(record.key, record.value)
        if decoded is not None and isinstance(decoded.key, OffsetCommitKey):
            value = decoded.value if isinstance(decoded.value, OffsetCommitValue) else None
            yield (decoded.key.topic, decoded.key.partition), value, record


def batches_in_folder(fs: FileSystem, path: str, group_id: str) -> Iterator[bytes]:
    """Yields the batches of a group's partition in a data folder.

    The metadata log has the number of partitions. Without it, the partition folder with the highest number counts, so
    all folders must be there.
    """
    partitions = partitions_in(fs, path)
    count = 0
    for partition in partitions:
        if partition.topic == GROUP_METADATA_TOPIC:
            count = max(count, partition.number + 1)
    for partition in partitions:
        if is_metadata_topic(partition.topic):
            topic = read_metadata(fs, partition.path).image.topics.get(GROUP_METADATA_TOPIC)
            count = len(topic.partitions) if topic is not None else count
    if not count:
        raise NoLogsError(f"{path}: there is no folder of {GROUP_METADATA_TOPIC}")
    home = partition_for(group_id, count)
    for partition in partitions:
        if partition.topic == GROUP_METADATA_TOPIC and partition.number == home:
            for frame in FolderReader(fs, partition.path).batches():
                yield frame.batch


def _note(
    past: PastOffsets,
    seen: set[PartitionKey],
    key: PartitionKey,
    value: OffsetCommitValue | None,
    record: Record,
    time_ms: int,
) -> None:
    is_later = record.timestamp_ms > time_ms
    if value is None:
        if is_later and key not in seen:
            past.lost.add(key)
        elif is_later:
            past.deletions[key] = _deletion(record)
        else:
            past.offsets.pop(key, None)
    elif is_later:
        past.deletions.pop(key, None)
    else:
        past.offsets[key] = PastOffset(
            value.offset, value.leader_epoch, value.metadata, value.topic_id, record.timestamp_ms
        )
    seen.add(key)


def _deletion(record: Record) -> DeletedOffset:
    headers = {name: value.decode(errors="replace") for name, value in record.headers if value is not None}
    return DeletedOffset(record.timestamp_ms, headers.get(REASON_HEADER, ""), headers.get(PRINCIPAL_HEADER, ""))


class RestoreAction(Enum):
    """The action of a restore for one partition. The value is the text that is printed."""

    RESTORE = "restore"
    CHANGE = "change"
    SAME = "as it is"
    NEWER = "leave: newer than that time"
    TOPIC_GONE = "skip: there is no such topic or partition"
    TOPIC_MADE_AGAIN = "skip: the topic was made again since"
    LOST = "skip: compaction has removed it"


COMMITTING: Final = frozenset({RestoreAction.RESTORE, RestoreAction.CHANGE})


@dataclass(slots=True)
class RestoreRow:
    """One partition: its offset at the given time, its offset now, and the action."""

    topic: str
    partition: int
    then: PastOffset | None
    now: int | None
    action: RestoreAction
    deletion: DeletedOffset | None = None


@dataclass(slots=True)
class KnownTopic:
    """A topic that exists in the broker now."""

    id: bytes
    partitions: int


def plan_restore(
    past: PastOffsets, present: Mapping[PartitionKey, int], topics: Mapping[str, KnownTopic]
) -> list[RestoreRow]:
    """Returns a row per partition. `present` has the offsets of the group now.

    A restore deletes nothing: offsets of partitions without an offset at the given time stay.
    """
    rows = []
    for key in sorted({*past.offsets, *past.lost, *present}):
        then, now = past.offsets.get(key), present.get(key)
        action = _action(key, then, now, topics.get(key[0]), is_lost=key in past.lost)
        rows.append(RestoreRow(*key, then, now, action, past.deletions.get(key) if now is None else None))
    return rows


def _action(
    key: PartitionKey, then: PastOffset | None, now: int | None, topic: KnownTopic | None, *, is_lost: bool
) -> RestoreAction:
    if then is None:
        return RestoreAction.LOST if is_lost and now is None else RestoreAction.NEWER
    if topic is None or key[1] >= topic.partitions:
        return RestoreAction.TOPIC_GONE
    if ZERO_UUID not in (then.topic_id, topic.id) and then.topic_id != topic.id:
        return RestoreAction.TOPIC_MADE_AGAIN
    if now is None:
        return RestoreAction.RESTORE
    return RestoreAction.SAME if now == then.offset else RestoreAction.CHANGE
