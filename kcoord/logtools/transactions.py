# SPDX-License-Identifier: Apache-2.0
"""Resolves the transactions in a log of offset commits: an offset of a transaction counts from its commit marker on.

It follows Kafka 4.3.1: a transaction's offset loses against one for the same key that lies later in the log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from protocol.control_records import ControlRecordType, decode_control_key
from protocol.record_batch import Record, decode_header, decode_records


@dataclass(slots=True)
class TransactionCounts:
    """What became of the records that were written in transactions."""

    committed: int = 0
    aborted: int = 0
    pending: int = 0


class TransactionResolver:
    """Give it the batches of one partition in order; it gives the records that count, in the order in which they do.

    A record keeps its offset; its timestamp is that of the marker where a transaction wrote it. `prepared` are the
    producers whose transactions are decided as committed although the marker may be missing.
    """

    def __init__(self, prepared: Collection[int] = ()) -> None:
        self.counts = TransactionCounts()
        self._prepared = prepared
        self._pending: dict[int, dict[bytes | None, Record]] = {}

    def feed(self, batch: bytes) -> Iterator[Record]:
        header = decode_header(batch)
        records = decode_records(batch)
        if header.is_control:
            for record in records:
                kind = decode_control_key(record.key)
                if kind in (ControlRecordType.COMMIT, ControlRecordType.ABORT):
                    is_commit = kind is ControlRecordType.COMMIT
                    yield from self._end(header.producer_id, record.timestamp_ms, is_commit=is_commit)
        elif header.is_transactional:
            self._pending.setdefault(header.producer_id, {}).update((record.key, record) for record in records)
        else:
            for record in records:
                yield self._counted(record)

    def finish(self) -> Iterator[Record]:
        """The end of the log: prepared transactions are committed, the others never were."""
        for producer_id in sorted(self._pending):
            if producer_id in self._prepared:
                yield from self._end(producer_id, -1, is_commit=True)
        self.counts.pending += sum(map(len, self._pending.values()))
        self._pending.clear()

    def _end(self, producer_id: int, timestamp_ms: int, *, is_commit: bool) -> Iterator[Record]:
        ended = self._pending.pop(producer_id, {})
        if not is_commit:
            self.counts.aborted += len(ended)
            return
        self.counts.committed += len(ended)
        for record in ended.values():
            yield self._counted(replace(record, timestamp_ms=max(record.timestamp_ms, timestamp_ms)))

    def _counted(self, record: Record) -> Record:
        for others in self._pending.values():
            other = others.get(record.key)
            if other is not None and record.value is not None and other.offset < record.offset:
                del others[record.key]
        return record
