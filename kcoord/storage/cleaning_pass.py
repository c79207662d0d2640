# SPDX-License-Identifier: Apache-2.0
"""What one pass of the cleaner makes of each batch, in the order of the log. No files here, only bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kcoord.storage.cleaned_transactions import TransactionsOfPass
from kcoord.storage.offset_map import OffsetMap
from kcoord.storage.record_filter import Run, Span, empty_batch, filter_batch, iter_raw, read_runs
from kcoord_protocol.batch_header import BatchHeader
from kcoord_protocol.record_batch import records_of
from kcoord_protocol.record_walk import walk_records


class LastOfProducer(NamedTuple):
    """What of an active producer must stay in the log: its last data batch, or else its last marker."""

    last_data_offset: int | None
    producer_epoch: int


@dataclass(slots=True)
class Cleaned:
    """How a pass went. The log is clean up to `next_dirty_offset`."""

    next_dirty_offset: int = 0
    records_read: int = 0
    records_kept: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    segments_before: int = 0
    segments_after: int = 0
    removed_aborts: set[int] = field(default_factory=set)
    """Last offsets of aborted transactions of which nothing is left, not even the marker."""


class Pass:
    """Decides about each batch of one pass, in the order of the log."""

    __slots__ = ("_delete_retention_ms", "_now_ms", "_offsets", "_producers", "_transactions", "result")

    def __init__(
        self,
        offsets: OffsetMap,
        transactions: TransactionsOfPass,
        producers: Mapping[int, LastOfProducer],
        now_ms: int,
        delete_retention_ms: int,
        result: Cleaned,
    ) -> None:
        self._offsets = offsets
        self._transactions = transactions
        self._producers = producers
        self._now_ms = now_ms
        self._delete_retention_ms = delete_retention_ms
        self.result = result

    def filtered(self, header: BatchHeader, batch: bytes) -> bytes | None:
        """The same object where nothing changes, None where nothing is left."""
        self.result.records_read += header.records_count
        is_useless = self._transactions.may_discard(header, batch)
        horizon_ms = header.delete_horizon_ms
        has_passed = horizon_ms is not None and horizon_ms <= self._now_ms
        is_discarded = is_useless and (not header.is_control or has_passed)
        if is_discarded and header.is_control:
            self._transactions.note_removed(header, batch)
        if is_discarded or not header.records_count:
            return self._without_records(header, batch)
        return self._with_records(header, batch, marker_of_nothing=is_useless, has_passed=has_passed)

    def _without_records(self, header: BatchHeader, batch: bytes) -> bytes | None:
        if not self._is_last_of_producer(header):
            return None
        return empty_batch(header) if header.records_count else batch

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        """KIP-98: the last batch of an active producer stays, for its sequence number and epoch."""
        last = self._producers.get(header.producer_id)
        if last is None:
            return False
        if last.last_data_offset is not None:
            return last.last_data_offset == header.last_offset
        return header.is_control and header.producer_epoch == last.producer_epoch

    def _with_records(
        self, header: BatchHeader, batch: bytes, *, marker_of_nothing: bool, has_passed: bool
    ) -> bytes | None:
        data = records_of(batch, 0, header)
        if header.is_control:
            kept, has_tombstones = [record[:2] for record in iter_raw(data, header.records_count)], marker_of_nothing
        else:
            kept, has_tombstones = self._survivors(header, data, has_passed=has_passed)
        self.result.records_kept += len(kept)
        if not kept:
            return self._without_records(header, batch)
        new_horizon_ms = None
        if has_tombstones and header.delete_horizon_ms is None:
            new_horizon_ms = self._now_ms + self._delete_retention_ms
        if len(kept) == header.records_count and new_horizon_ms is None:
            return batch
        return filter_batch(header, data, kept, new_horizon_ms)

    def _survivors(self, header: BatchHeader, data: bytes, *, has_passed: bool) -> tuple[list[Span], bool]:
        """The records that stay, and whether there are tombstones among them."""
        base_offset = header.base_offset
        if header.last_offset <= self._offsets.latest_offset:
            runs = read_runs(data, header.records_count)
            if runs is not None:
                return self._survivors_of_runs(base_offset, runs, has_passed=has_passed)
        last_offset_of = self._offsets.get
        latest_offset = self._offsets.latest_offset
        kept: list[Span] = []
        has_tombstones = False
        start = following = 0
        for end, _, delta, key_at, key_end, value_at, _ in walk_records(
            data, header.records_count, check_headers=False
        ):
            start, following = following, end
            offset = base_offset + (delta >> 1)
            is_tombstone = value_at == -1
            if offset <= latest_offset:
                if key_at == -1 or offset < last_offset_of(data[key_at:key_end]):
                    continue
                if is_tombstone and has_passed:
                    continue
            has_tombstones = has_tombstones or is_tombstone
            kept.append((start, end))
        return kept, has_tombstones

    def _survivors_of_runs(self, base_offset: int, runs: list[Run], *, has_passed: bool) -> tuple[list[Span], bool]:
        kept: list[Span] = []
        has_tombstones = False
        for run in runs:
            if not run.has_values and has_passed:
                continue
            newest = self._offsets.last_offsets(run.keys)
            found = [
                run.span(number)
                for number, (delta, last) in enumerate(zip(run.offset_deltas, newest, strict=True))
                if base_offset + delta >= last
            ]
            has_tombstones = has_tombstones or (bool(found) and not run.has_values)
            kept += found
        return kept, has_tombstones
