# SPDX-License-Identifier: Apache-2.0
"""The committed offsets that follow from a partition of the upstream, by an implementation of its own.

It is independent of the code under test. A record counts from its commit on, and the counting record at the highest
offset is the committed one. A tombstone deletes everything before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from struct import unpack
from typing import TypeAlias

from kcoord.runtime.serde import CoordinatorSerde
from kcoord.simulation.upstream.partition import ModelPartition, entries_of
from kcoord_protocol.control_records import ControlRecordType, decode_control_key
from kcoord_protocol.messages import OffsetCommitKey, OffsetCommitValue
from kcoord_protocol.record_batch import BatchHeader, decode_records

CommitKey: TypeAlias = tuple[str, str]
"""Group and topic."""
_SERDE = CoordinatorSerde()
_NOBODY = (-1, -1)


@lru_cache(maxsize=1 << 14)
def commits_of(batch: bytes) -> list[tuple[int, CommitKey, int | None]]:
    """Returns the offset, the key and the committed offset of each offset record in a batch; None for tombstones."""
    commits: list[tuple[int, CommitKey, int | None]] = []
    for offset, key, value in entries_of(batch):
        record = _SERDE.deserialize(key, value)
        if record is not None and isinstance(record.key, OffsetCommitKey):
            committed = record.value.offset if isinstance(record.value, OffsetCommitValue) else None
            commits.append((offset, (record.key.group, record.key.topic), committed))
    return commits


@lru_cache(maxsize=1 << 14)
def writer_of(batch: bytes) -> tuple[tuple[int, int], int]:
    """Returns the claim of the writer of a transactional batch, and the offset up to which it had read."""
    value = dict(decode_records(batch)[0].headers)["kcoord.writer"]
    producer_id, epoch, read_offset = unpack(">qhq", value or b"")
    return (producer_id, epoch), read_offset


class Meaning:
    """What the batches of a partition mean to a reader: committed offsets, and pending ones by producer.

    `knows_claims`: void batches do not count, as for kcoord; otherwise as for other readers.
    """

    def __init__(self, batches: Iterable[tuple[BatchHeader, bytes]] = (), *, knows_claims: bool) -> None:
        self.committed: dict[CommitKey, tuple[int, int]] = {}
        """Key -> offset of the record, committed offset."""
        self.pending: dict[int, dict[CommitKey, tuple[int, int]]] = {}
        self._knows_claims = knows_claims
        self._owner = _NOBODY
        self._markers: dict[int, int] = {}
        """The offset of the last marker of each producer."""
        for header, data in batches:
            self.take(header, data)

    @classmethod
    def of(cls, partition: ModelPartition, *, knows_claims: bool) -> Meaning:
        """Returns the meaning of all that is below the high watermark."""
        below = (batch for batch in partition.batches if batch[0].next_offset <= partition.high_watermark)
        return cls(below, knows_claims=knows_claims)

    def take(self, header: BatchHeader, data: bytes) -> None:
        """Adds the next batch."""
        producer_id = header.producer_id
        if header.is_control:
            ended = self.pending.pop(producer_id, {})
            self._markers[producer_id] = header.base_offset
            if decode_control_key(entries_of(data)[0][1]) is ControlRecordType.COMMIT:
                for key, place in ended.items():
                    self.committed[key] = max(place, self.committed.get(key, place))
            return
        if not header.is_transactional:
            self._owner = producer_id, header.producer_epoch
        elif self._knows_claims and self._is_void(header, data):
            return
        for offset, key, committed in commits_of(data):
            if committed is None:
                self.committed.pop(key, None)
                for offsets in self.pending.values():
                    offsets.pop(key, None)
            elif header.is_transactional:
                self.pending.setdefault(producer_id, {})[key] = offset, committed
            else:
                self.committed[key] = offset, committed

    def _is_void(self, header: BatchHeader, data: bytes) -> bool:
        claim, read_offset = writer_of(data)
        return claim != self._owner or self._markers.get(header.producer_id, -1) >= read_offset

    def offsets(self) -> dict[CommitKey, int]:
        return {key: offset for key, (_, offset) in self.committed.items()}

    def unstable(self) -> set[CommitKey]:
        return {key for offsets in self.pending.values() for key in offsets}
