# SPDX-License-Identifier: Apache-2.0
"""What cleaning has to know of transactions (KIP-98): data of aborted ones goes, and a marker goes once nothing of its
transaction is left and its delete horizon has passed.

It is all read from the log: every transaction has its marker in there, or it is still open.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from kcoord.storage.record_filter import iter_raw
from kcoord_protocol.batch_header import BatchHeader
from kcoord_protocol.control_records import ControlRecordType, decode_control_key
from kcoord_protocol.record_batch import records_of


def marker_type(header: BatchHeader, batch: bytes) -> ControlRecordType | None:
    """What a control batch says; None for an empty one, and for a type that is not known."""
    for record in iter_raw(records_of(batch, 0, header), header.records_count):
        return decode_control_key(record.key)
    return None


class AbortedTransactions:
    """Where the aborted transactions of a log lie."""

    __slots__ = ("_by_producer", "first_open_offset")

    def __init__(self, batches: Iterator[tuple[BatchHeader, bytes]]) -> None:
        """`batches` are the transactional and control batches of the log, in order."""
        self._by_producer: dict[int, list[tuple[int, int]]] = {}
        opened: dict[int, int] = {}
        for header, batch in batches:
            producer_id = header.producer_id
            if not header.is_control:
                opened.setdefault(producer_id, header.base_offset)
                continue
            kind = marker_type(header, batch)
            if kind in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
                first_offset = opened.pop(producer_id, header.base_offset)
                if kind is ControlRecordType.ABORT:
                    self._by_producer.setdefault(producer_id, []).append((header.last_offset, first_offset))
        self.first_open_offset = min(opened.values(), default=None)
        """Where the oldest transaction begins whose marker is not there yet."""

    def holds(self, header: BatchHeader) -> bool:
        """Whether this data batch is part of an aborted transaction."""
        if not header.is_transactional:
            return False
        ranges = self._by_producer.get(header.producer_id)
        if ranges is None:
            return False
        number = bisect_left(ranges, (header.base_offset,))
        return number < len(ranges) and ranges[number][1] <= header.base_offset


class TransactionsOfPass:
    """Follows one pass over a log from its first batch on, and says what may be dropped."""

    __slots__ = ("_aborted", "_seen_aborted", "_seen_committed", "removed_aborts")

    def __init__(self, aborted: AbortedTransactions) -> None:
        self._aborted = aborted
        self._seen_committed: set[int] = set()
        self._seen_aborted: set[int] = set()
        self.removed_aborts: set[int] = set()
        """The offsets of abort markers that were dropped."""

    def may_discard(self, header: BatchHeader, batch: bytes) -> bool:
        """Whether the batch is of no use, as far as transactions go: aborted data, or a marker of nothing."""
        if header.is_control:
            return self._is_marker_of_nothing(header, batch)
        if not header.is_transactional:
            return False
        if self._aborted.holds(header):
            self._seen_aborted.add(header.producer_id)
            return True
        self._seen_committed.add(header.producer_id)
        return False

    def _is_marker_of_nothing(self, header: BatchHeader, batch: bytes) -> bool:
        if not header.records_count:
            return True
        match marker_type(header, batch):
            case ControlRecordType.COMMIT:
                seen = self._seen_committed
            case ControlRecordType.ABORT:
                seen = self._seen_aborted
            case _:
                return False
        is_of_nothing = header.producer_id not in seen
        seen.discard(header.producer_id)
        return is_of_nothing

    def note_removed(self, header: BatchHeader, batch: bytes) -> None:
        """A control batch was dropped."""
        if marker_type(header, batch) is ControlRecordType.ABORT:
            self.removed_aborts.add(header.last_offset)
