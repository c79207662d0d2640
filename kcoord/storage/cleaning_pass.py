# SPDX-License-Identifier: Apache-2.0
"""Filters the batches of one pass of the cleaner, in the order of the log. This module has no files, only bytes."""

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
    """The batch of an active producer that must stay in the log: its last data batch, or else its last marker."""

    last_data_offset: int | None
    producer_epoch: int


@dataclass(slots=True)
class Cleaned:
    """The result of a pass. The log is clean up to `next_dirty_offset` (exclusive)."""

    next_dirty_offset: int = 0
    records_read: int = 0
    records_kept: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    segments_before: int = 0
    segments_after: int = 0
    removed_aborts: set[int] = field(default_factory=set)
    """The last offsets of aborted transactions whose marker was removed. The log has no trace of them any more."""


class Pass:
    """Decides for every batch of one pass, in the order of the log, which records stay."""

    __slots__ = (
        "_delete_retention_ms",
        "_last_records",
        "_now_ms",
        "_offsets",
        "_producers",
        "_transactions",
        "result",
    )

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
        self._last_records = 0
        """The number of records that have the last offset of their key, and were kept or are expired tombstones."""
        self.result = result

    def check_last_records(self) -> None:
        """Checks, after all batches were filtered, that the last record of every key was seen and treated as such."""
        assert self._last_records == len(self._offsets), (
            f"S-8: the last records of {len(self._offsets)} keys have to stay, but {self._last_records} were kept"
        )

    def filtered(self, header: BatchHeader, batch: bytes) -> bytes | None:
        """Returns the batch without superseded records: the same object if all stay, None if the batch is dropped."""
        self.result.records_read += header.records_count
        is_useless = self._transactions.may_discard(header, batch)
        horizon_ms = header.delete_horizon_ms
        has_passed = horizon_ms is not None and horizon_ms <= self._now_ms
        is_discarded = is_useless and (not header.is_control or has_passed)
        if is_discarded and header.is_control:
            self._transactions.note_removed(header, batch)
        if is_discarded or not header.records_count:
            return self._without_records(header, batch)
        return self._with_records(header, batch, is_marker_without_data=is_useless, has_passed=has_passed)

    def _without_records(self, header: BatchHeader, batch: bytes) -> bytes | None:
        if not self._is_last_of_producer(header):
            return None
        return empty_batch(header) if header.records_count else batch

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        """True if this is the last batch of an active producer, which keeps its sequence number and epoch (KIP-98)."""
        last = self._producers.get(header.producer_id)
        if last is None:
            return False
        if last.last_data_offset is not None:
            return last.last_data_offset == header.last_offset
        return header.is_control and header.producer_epoch == last.producer_epoch

    def _with_records(
        self, header: BatchHeader, batch: bytes, *, is_marker_without_data: bool, has_passed: bool
    ) -> bytes | None:
        data = records_of(batch, 0, header)
        if header.is_control:
            kept = [record[:2] for record in iter_raw(data, header.records_count)]
            has_tombstones = is_marker_without_data
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
        """Returns the records that stay, and whether any of them is a tombstone."""
        base_offset = header.base_offset
        if header.last_offset <= self._offsets.latest_offset:
            runs = read_runs(data, header.records_count)
            if runs is not None:
                return self._survivors_of_runs(base_offset, runs, has_passed=has_passed)
        last_offset_of = self._offsets.get
        latest_offset = self._offsets.latest_offset
        kept: list[Span] = []
        has_tombstones = False
        last_records = 0
        start = following = 0
        for end, _, delta, key_at, key_end, value_at, _ in walk_records(
            data, header.records_count, check_headers=False, lenient=True
        ):
            start, following = following, end
            offset = base_offset + (delta >> 1)
            is_tombstone = value_at == -1
            if offset <= latest_offset:
                if key_at == -1 or offset < (last_offset := last_offset_of(data[key_at:key_end])):
                    continue
                last_records += offset == last_offset
                if is_tombstone and has_passed:
                    continue
            has_tombstones = has_tombstones or is_tombstone
            kept.append((start, end))
        self._last_records += last_records
        return kept, has_tombstones

    def _survivors_of_runs(self, base_offset: int, runs: list[Run], *, has_passed: bool) -> tuple[list[Span], bool]:
        kept: list[Span] = []
        has_tombstones = False
        for run in runs:
            newest = self._offsets.last_offsets(run.keys)
            spans = [
                run.span(number)
                for number, (delta, last) in enumerate(zip(run.offset_deltas, newest, strict=True))
                if base_offset + delta >= last
            ]
            # The keys that are not in the map have their last record elsewhere.
            self._last_records += len(spans) - newest.count(-1)
            if not run.has_values and has_passed:
                continue
            has_tombstones = has_tombstones or (bool(spans) and not run.has_values)
            kept += spans
        return kept, has_tombstones
