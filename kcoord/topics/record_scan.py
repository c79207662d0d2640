# SPDX-License-Identifier: Apache-2.0
"""Checks the uncompressed records of a batch that a producer sent: framing, keys, offset deltas and timestamps.

Every length must fit its record exactly, since consumers trust it. CorruptBatchError names the place that does not.
Nearly all batches are accepted by `kcoord_protocol.record_check` before. The others are read here, to name their
faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kcoord_protocol.batch_header import NO_TIMESTAMP
from kcoord_protocol.errors import Errors
from kcoord_protocol.primitives import decode_uvarint
from kcoord_protocol.record_walk import walk_records


@dataclass(slots=True)
class ScanRules:
    """The rules that each record must follow."""

    needs_key: bool
    checks_timestamps: bool
    earliest_ms: int
    latest_ms: int
    refused: str | None = None
    """Why the timestamp of every record is rejected, None if each record is looked at."""


class RecordsCheck(NamedTuple):
    """The largest timestamp, and (index, error, reason) of each rejected record."""

    max_timestamp: int
    errors: list[tuple[int, Errors, str]]


def scan_records(data: bytes, count: int, base_timestamp: int, rules: ScanRules) -> RecordsCheck:
    """Checks `count` records that must fill `data`."""
    errors: list[tuple[int, Errors, str]] = []
    max_timestamp = NO_TIMESTAMP
    earliest, latest, refused = rules.earliest_ms if rules.checks_timestamps else None, rules.latest_ms, rules.refused
    needs_key = rules.needs_key
    expected_delta = 0  # zigzag-encoded
    for _, later, offset_delta, key_at, _, _, _ in walk_records(data, count, check_deltas=False, lenient=True):
        timestamp = base_timestamp + (later >> 1 ^ -(later & 1))
        if timestamp > max_timestamp:
            max_timestamp = timestamp
        if offset_delta != expected_delta:
            index = expected_delta >> 1
            errors.append((index, Errors.INVALID_RECORD, f"The offset delta of record {index} is not {index}."))
        if needs_key and key_at < 0:
            reason = f"Record {expected_delta >> 1} has no key, which a compacted topic requires."
            errors.append((expected_delta >> 1, Errors.INVALID_RECORD, reason))
        elif refused is not None:
            errors.append((expected_delta >> 1, Errors.INVALID_TIMESTAMP, refused))
        elif earliest is not None and not earliest <= timestamp <= latest and timestamp != NO_TIMESTAMP:
            reason = f"Timestamp {timestamp} of record {expected_delta >> 1} is not within [{earliest}, {latest}]."
            errors.append((expected_delta >> 1, Errors.INVALID_TIMESTAMP, reason))
        expected_delta += 2
    return RecordsCheck(max_timestamp, errors)


def largest_record_bytes(data: bytes, count: int) -> int:
    """Returns the size of the largest record without its length prefix, in bytes.

    `scan_records` must have accepted the `count` records in `data` before.
    """
    largest = start = 0
    for end, *_ in walk_records(data, count, lenient=True):
        largest = max(largest, decode_uvarint(data, start)[0] >> 1)
        start = end
    return largest
