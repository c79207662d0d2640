# SPDX-License-Identifier: Apache-2.0
"""Walks the uncompressed records of a batch without making objects of them: framing, keys and timestamps.

Every length must fit its record exactly, since a consumer will trust them; ValueError says what does not. Numbers stay
zigzag-encoded where only their sign or half matters, and most of them have one or two bytes, which are read in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kcoord_protocol.batch_header import NO_TIMESTAMP
from kcoord_protocol.errors import Errors
from kcoord_protocol.primitives import decode_uvarint, decode_uvarlong


@dataclass(slots=True)
class ScanRules:
    """What is asked of each record."""

    needs_key: bool
    checks_timestamps: bool
    earliest_ms: int
    latest_ms: int
    type_is_wrong: bool
    """The batch claims log append time, which only a broker may set."""


class Scan(NamedTuple):
    """The largest timestamp, and (index, error, reason) of each refused record."""

    max_timestamp: int
    errors: list[tuple[int, Errors, str]]


def scan_records(data: bytes, count: int, base_timestamp: int, rules: ScanRules) -> Scan:
    """Walks `count` records that must fill `data`."""
    errors: list[tuple[int, Errors, str]] = []
    max_timestamp = NO_TIMESTAMP
    # A timestamp outside these needs a second look; most need only two comparisons.
    earliest = rules.earliest_ms if rules.checks_timestamps else None
    latest = rules.latest_ms
    suspicious = rules.type_is_wrong
    needs_key = rules.needs_key
    position = 0
    try:
        for index in range(count):
            size = data[position]
            position += 1
            if size & 0x80:
                if (high := data[position]) < 0x80:
                    size = size & 0x7F | high << 7
                    position += 1
                else:
                    size, position = decode_uvarint(data, position - 1)
            end = position + (size >> 1)
            delta = data[position + 1]  # after the record's attributes, which have no meaning
            position += 2
            if delta & 0x80:
                delta, position = decode_uvarlong(data, position - 1)
            timestamp = base_timestamp + (delta >> 1 ^ -(delta & 1))
            offset_delta = data[position]
            position += 1
            if offset_delta & 0x80:
                offset_delta, position = decode_uvarint(data, position - 1)
            key_size = data[position]
            position += 1
            if key_size & 0x80:
                key_size, position = decode_uvarint(data, position - 1)
            if not key_size & 1:
                position += key_size >> 1
            value_size = data[position]
            position += 1
            if value_size & 0x80:
                if (high := data[position]) < 0x80:
                    value_size = value_size & 0x7F | high << 7
                    position += 1
                else:
                    value_size, position = decode_uvarint(data, position - 1)
            if not value_size & 1:
                position += value_size >> 1
            if data[position]:
                position = _skip_headers(data, position, end, index)
            else:
                position += 1
            if position != end or size & 1:
                raise ValueError(f"the fields of record {index} do not fill its length")
            if timestamp > max_timestamp:
                max_timestamp = timestamp
            if offset_delta != index << 1:
                errors.append((index, Errors.INVALID_RECORD, f"The offset delta of record {index} is not {index}."))
            if needs_key and key_size & 1:
                errors.append((index, Errors.INVALID_RECORD, "A compacted topic takes no message without a key."))
            elif earliest is not None and (suspicious or not earliest <= timestamp <= latest):
                _check_timestamp(index, timestamp, rules, errors)
    except IndexError:
        raise ValueError(f"the batch ends within its records; {count} were announced") from None
    if position != len(data):
        raise ValueError(f"{len(data) - position} bytes follow the announced {count} records")
    return Scan(max_timestamp, errors)


def largest_record_bytes(data: bytes, count: int) -> int:
    """The size of the largest of `count` records that `scan_records` found sound, without its length prefix."""
    largest = position = 0
    for _ in range(count):
        size, position = decode_uvarint(data, position)
        largest = max(largest, size >> 1)
        position += size >> 1
    return largest


def _skip_headers(data: bytes, position: int, end: int, index: int) -> int:
    count, position = decode_uvarint(data, position)
    # A header has at least two bytes.
    if count & 1 or count > end - position:
        raise ValueError(f"record {index} announces an impossible number of headers")
    for _ in range(count >> 1):
        size, position = decode_uvarint(data, position)
        if size & 1:
            raise ValueError(f"record {index} has a header without a key")
        size, position = decode_uvarint(data, position + (size >> 1))
        if not size & 1:
            position += size >> 1
    return position


def _check_timestamp(index: int, timestamp: int, rules: ScanRules, errors: list[tuple[int, Errors, str]]) -> None:
    if timestamp != NO_TIMESTAMP and not rules.earliest_ms <= timestamp <= rules.latest_ms:
        bounds = f"[{rules.earliest_ms}, {rules.latest_ms}]"
        reason = f"Timestamp {timestamp} of record {index} is not within {bounds}."
        errors.append((index, Errors.INVALID_TIMESTAMP, reason))
    elif rules.type_is_wrong:
        reason = f"Record {index} claims log append time, which only a broker sets."
        errors.append((index, Errors.INVALID_TIMESTAMP, reason))
