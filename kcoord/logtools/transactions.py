# SPDX-License-Identifier: Apache-2.0
"""Resolves the transactions in a log of offset commits: returns the records that count.

The rule is that of the coordinator's replay, `kcoord.coordinator.group.offsets.transactional_offsets`, applied to the
raw records of a log:

* A commit outside of a transaction counts at once, and so does every tombstone.
* A commit in a transaction is pending until the marker of its producer. COMMIT makes it count, ABORT drops it.
* If a later commit of the same key counts, the earlier pending one is dropped, whatever the order of the markers.
* A tombstone drops the pending commits of its key.
* At the end of the log, pending commits of a prepared producer count, and all other pending commits do not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from kcoord.coordinator.group.offsets.transactional_offsets import OffsetKey, PendingOffsets
from kcoord.runtime.result import Producer
from kcoord_protocol.control_records import ControlRecordType, decode_control_key
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.messages import OffsetCommitKey
from kcoord_protocol.record_batch import Record, decode_header, decode_records

OFFSET_COMMIT_TYPES: Final = (b"\x00\x00", b"\x00\x01")
"""The first bytes of offset commit keys: those of old Kafka releases, and the present ones."""


@dataclass(slots=True)
class TransactionCounts:
    """The number of offsets in transactions, by the outcome of the transaction.

    Offsets that a later record replaced or deleted before the marker are not counted.
    """

    committed: int = 0
    aborted: int = 0
    pending: int = 0


class TransactionResolver:
    """Takes the batches of one partition in order, and yields the records in the order in which they count.

    A record keeps its offset. A record of a transaction gets the timestamp of the marker, if that is later. `prepared`
    has the producers in state PrepareCommit: their transactions are committed although the marker may be missing.
    """

    def __init__(self, prepared: Collection[int] = ()) -> None:
        self.counts = TransactionCounts()
        self._prepared = prepared
        self._pending: PendingOffsets[Record] = PendingOffsets()

    def feed(self, batch: bytes) -> Iterator[Record]:
        header = decode_header(batch)
        producer = Producer(header.producer_id, header.producer_epoch) if header.is_transactional else None
        for record in decode_records(batch):
            if not header.is_control:
                if self._counts_at_once(record, producer):
                    yield record
                continue
            kind = decode_control_key(record.key)
            if kind in (ControlRecordType.COMMIT, ControlRecordType.ABORT):
                is_commit = kind is ControlRecordType.COMMIT
                yield from self._end(header.producer_id, record.timestamp_ms, is_commit=is_commit)

    def finish(self) -> Iterator[Record]:
        """Ends the log: yields the records of prepared transactions and counts the rest as pending."""
        for producer_id in sorted(self._pending.open):
            if producer_id in self._prepared:
                yield from self._end(producer_id, -1, is_commit=True)
        self.counts.pending += sum(map(self._pending.count_of, self._pending.open))
        self._pending = PendingOffsets()

    def _counts_at_once(self, record: Record, producer: Producer | None) -> bool:
        if producer is None and not self._pending:
            return True
        key = _offset_key(record.key)
        return key is None or self._pending.note(key, record if record.value is not None else None, producer)

    def _end(self, producer_id: int, timestamp_ms: int, *, is_commit: bool) -> Iterator[Record]:
        count = self._pending.count_of(producer_id)
        if is_commit:
            self.counts.committed += count
        else:
            self.counts.aborted += count
        for _, record in self._pending.end(producer_id, committed=is_commit):
            yield replace(record, timestamp_ms=max(record.timestamp_ms, timestamp_ms))


def _offset_key(key: bytes | None) -> OffsetKey | None:
    """Returns the decoded key of an offset commit, or None. The reader of the records reports a malformed key."""
    if key is None or not key.startswith(OFFSET_COMMIT_TYPES):
        return None
    try:
        decoded = OffsetCommitKey.decode(key[2:], 0)
    except DecodeError:
        return None
    return OffsetKey(decoded.group, decoded.topic, decoded.partition)
