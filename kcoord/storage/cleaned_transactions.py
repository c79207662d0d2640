# SPDX-License-Identifier: Apache-2.0
"""Transactions during cleaning (KIP-98).

Cleaning removes the data of aborted transactions. It removes a marker when its transaction has no data left in the log
and the marker's delete horizon has passed. The log itself is the only source: it has the marker of every transaction
that is not open.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from kcoord.storage.record_filter import iter_raw
from kcoord_protocol.batch_header import BatchHeader
from kcoord_protocol.control_records import ControlRecordType, decode_control_key
from kcoord_protocol.record_batch import records_of


def marker_type(header: BatchHeader, batch: bytes) -> ControlRecordType | None:
    """Returns the type of a control batch, or None if the batch is empty or its type is unknown."""
    for record in iter_raw(records_of(batch, 0, header), header.records_count):
        return decode_control_key(record.key)
    return None


class AbortedTransactions:
    """The offset ranges of the aborted transactions of a log."""

    __slots__ = ("_by_producer", "first_open_offset")

    def __init__(self, batches: Iterator[tuple[BatchHeader, bytes]]) -> None:
        """Reads `batches`: the transactional batches and the control batches of the log, in order.

        A batch without a producer, which Kafka accepts, opens no transaction.
        """
        self._by_producer: dict[int, list[tuple[int, int]]] = {}
        opened: dict[int, int] = {}
        for header, batch in batches:
            producer_id = header.producer_id
            if not header.is_control:
                if producer_id >= 0:
                    opened.setdefault(producer_id, header.base_offset)
                continue
            kind = marker_type(header, batch)
            if kind in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
                first_offset = opened.pop(producer_id, header.base_offset)
                if kind is ControlRecordType.ABORT:
                    self._by_producer.setdefault(producer_id, []).append((header.last_offset, first_offset))
        self.first_open_offset = min(opened.values(), default=None)
        """The first offset of the oldest open transaction; None if no transaction is open."""

    def holds(self, header: BatchHeader) -> bool:
        """True if this data batch is part of an aborted transaction."""
        if not header.is_transactional:
            return False
        ranges = self._by_producer.get(header.producer_id)
        if ranges is None:
            return False
        number = bisect_left(ranges, (header.base_offset,))
        return number < len(ranges) and ranges[number][1] <= header.base_offset


class TransactionsOfPass:
    """Decides in one pass over a log, from its first batch, which transactional batches cleaning may drop."""

    __slots__ = ("_aborted", "_seen_aborted", "_seen_committed", "removed_aborts")

    def __init__(self, aborted: AbortedTransactions) -> None:
        self._aborted = aborted
        self._seen_committed: set[int] = set()
        self._seen_aborted: set[int] = set()
        self.removed_aborts: set[int] = set()
        """The offsets of the abort markers that were dropped."""

    def may_discard(self, header: BatchHeader, batch: bytes) -> bool:
        """True if the batch has aborted data, or is the marker of a transaction without data in the log."""
        if header.is_control:
            return self._is_marker_without_data(header, batch)
        if not header.is_transactional:
            return False
        if self._aborted.holds(header):
            self._seen_aborted.add(header.producer_id)
            return True
        self._seen_committed.add(header.producer_id)
        return False

    def _is_marker_without_data(self, header: BatchHeader, batch: bytes) -> bool:
        if not header.records_count:
            return True
        match marker_type(header, batch):
            case ControlRecordType.COMMIT:
                seen = self._seen_committed
            case ControlRecordType.ABORT:
                seen = self._seen_aborted
            case _:
                return False
        has_data = header.producer_id in seen
        seen.discard(header.producer_id)
        return not has_data

    def note_removed(self, header: BatchHeader, batch: bytes) -> None:
        """Notes that a control batch was dropped."""
        if marker_type(header, batch) is ControlRecordType.ABORT:
            self.removed_aborts.add(header.last_offset)
