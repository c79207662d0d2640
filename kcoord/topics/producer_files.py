# SPDX-License-Identifier: Apache-2.0
"""The byte formats of producer snapshots and transaction indexes, as Kafka writes them.

`<offset>.snapshot` has the producer state at an offset. `<base offset>.txnindex` has the aborted transactions.

A snapshot holds only the last batch of a producer. After a restart, a duplicate of an older batch therefore fails with
OUT_OF_ORDER_SEQUENCE_NUMBER instead of being recognised.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kcoord.storage.recovery import Check, go_on
from kcoord.topics.producer_state import AbortedTransaction, CachedBatch, ProducerEntry
from kcoord_protocol.batch_header import crc32c

SNAPSHOT_SUFFIX: Final = ".snapshot"
TRANSACTION_INDEX_SUFFIX: Final = ".txnindex"

_SNAPSHOT_VERSION = 1
_SNAPSHOT_HEADER = struct.Struct(">hI")
_COUNT = struct.Struct(">i")
_SNAPSHOT_ENTRY = struct.Struct(">qhiqiqiq")
_ROWS_PER_CHECK = 1_000
_INDEX_VERSION = 0
_INDEX_ENTRY = struct.Struct(">hqqqq")


class InvalidSnapshotError(ValueError):
    """The bytes are not a valid producer snapshot. The state can be read from the log instead."""


def file_name(offset: int, suffix: str) -> str:
    """Returns Kafka's name of a file that belongs to an offset."""
    return f"{offset:020d}{suffix}"


def encode_snapshot(
    entries: Sequence[ProducerEntry],
    changed: Mapping[int, ProducerEntry] = MappingProxyType({}),
    check: Check = go_on,
) -> bytes:
    """Returns the snapshot of these producers. Those in `changed` (by id) are written as they are there.

    The event loop may change the producers meanwhile, if it copies each to `changed` before (`ProducerState.changed`).
    """
    rows = [_COUNT.pack(len(entries))]
    for number, entry in enumerate(entries):
        if number % _ROWS_PER_CHECK == 0:
            check(0)
        # In this order: if the producer changes while its row is made, the copy is there afterwards.
        row = _row_of(entry)
        before = changed.get(entry.producer_id)
        rows.append(row if before is None else _row_of(before))
    body = b"".join(rows)
    return _SNAPSHOT_HEADER.pack(_SNAPSHOT_VERSION, crc32c(body)) + body


def _row_of(entry: ProducerEntry) -> bytes:
    batch = next(reversed(entry.batches), None) or CachedBatch(-1, -1, 0, entry.last_timestamp_ms)
    first_offset = entry.current_transaction_first_offset
    return _SNAPSHOT_ENTRY.pack(
        entry.producer_id,
        entry.producer_epoch,
        batch.last_sequence,
        batch.last_offset,
        batch.offset_delta,
        entry.last_timestamp_ms,
        entry.coordinator_epoch,
        -1 if first_offset is None else first_offset,
    )


def decode_snapshot(data: bytes) -> list[ProducerEntry]:
    header_bytes = _SNAPSHOT_HEADER.size
    if len(data) < header_bytes + _COUNT.size:
        raise InvalidSnapshotError(f"{len(data)} bytes are fewer than its header")
    version, crc = _SNAPSHOT_HEADER.unpack_from(data)
    if version != _SNAPSHOT_VERSION:
        raise InvalidSnapshotError(f"version {version} is not {_SNAPSHOT_VERSION}")
    if crc32c(data[header_bytes:]) != crc:
        raise InvalidSnapshotError("the checksum does not match")
    (count,) = _COUNT.unpack_from(data, header_bytes)
    position = header_bytes + _COUNT.size
    if len(data) != position + count * _SNAPSHOT_ENTRY.size:
        raise InvalidSnapshotError(f"{count} entries do not fill {len(data)} bytes")
    return [_entry_of(*row) for row in _SNAPSHOT_ENTRY.iter_unpack(data[position:])]


def _entry_of(
    producer_id: int,
    epoch: int,
    last_sequence: int,
    last_offset: int,
    offset_delta: int,
    timestamp_ms: int,
    coordinator_epoch: int,
    first_offset: int,
) -> ProducerEntry:
    batches = [CachedBatch(last_sequence, last_offset, offset_delta, timestamp_ms)] if last_offset >= 0 else []
    return ProducerEntry(
        producer_id, epoch, coordinator_epoch, timestamp_ms, first_offset if first_offset >= 0 else None, batches
    )


def encode_aborted(transaction: AbortedTransaction) -> bytes:
    return _INDEX_ENTRY.pack(_INDEX_VERSION, *transaction)


def decode_aborted(data: bytes) -> list[AbortedTransaction]:
    """Returns the entries of an index file, up to a torn last entry or an entry of an unknown version."""
    whole = len(data) - len(data) % _INDEX_ENTRY.size
    transactions = []
    for version, producer_id, first_offset, last_offset, stable in _INDEX_ENTRY.iter_unpack(data[:whole]):
        if version != _INDEX_VERSION:
            break
        transactions.append(AbortedTransaction(producer_id, first_offset, last_offset, stable))
    return transactions


def damage_of_index(data: bytes) -> str | None:
    """Returns where an index file is damaged; None if `decode_aborted` returns all entries of the file."""
    end = len(decode_aborted(data)) * _INDEX_ENTRY.size
    return None if end == len(data) else f"position {end}: no whole entry of version {_INDEX_VERSION}"
