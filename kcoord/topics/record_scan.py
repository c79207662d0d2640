# SPDX-License-Identifier: Apache-2.0
"""Walks the uncompressed records of a batch without making objects of them: framing, keys and timestamps, about a
microsecond a record.

Every length must fit its record exactly, since a consumer will trust them; ValueError says what does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from protocol.batch_header import NO_TIMESTAMP
from protocol.errors import Errors


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


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A zigzag varint of up to ten bytes, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), position
        shift += 7
        if shift > 63:
            raise ValueError("a number has too many bytes")


def scan_records(data: bytes, count: int, base_timestamp: int, rules: ScanRules) -> Scan:
    """Walks `count` records that must fill `data`."""
    errors: list[tuple[int, Errors, str]] = []
    max_timestamp = NO_TIMESTAMP
    position = 0
    try:
        for index in range(count):
            length, position = _read_varint(data, position)
            end = position + length
            if length < 0 or end > len(data):
                raise ValueError(f"record {index} has length {length}, which does not fit the batch")
            timestamp_delta, position = _read_varint(data, position + 1)
            offset_delta, position = _read_varint(data, position)
            if offset_delta != index:
                errors.append(
                    (
                        index,
                        Errors.INVALID_RECORD,
                        f"Record {index} has offset delta {offset_delta}; offsets must be consecutive.",
                    )
                )
            key_length, position = _read_varint(data, position)
            _skip_value_and_headers(data, position + max(key_length, 0), end, index)
            position = end
            timestamp = base_timestamp + timestamp_delta
            max_timestamp = max(max_timestamp, timestamp)
            reason = _refusal(index, key_length < 0, timestamp, rules)
            if reason is not None:
                errors.append(reason)
    except IndexError:
        raise ValueError(f"the batch ends within its records; {count} were announced") from None
    if position != len(data):
        raise ValueError(f"{len(data) - position} bytes follow the announced {count} records")
    return Scan(max_timestamp, errors)


def _skip_value_and_headers(data: bytes, position: int, end: int, index: int) -> None:
    value_length, position = _read_varint(data, position)
    header_count, position = _read_varint(data, position + max(value_length, 0))
    if header_count < 0 or header_count > end - position:
        raise ValueError(f"record {index} announces {header_count} headers")
    for _ in range(header_count):
        key_length, position = _read_varint(data, position)
        if key_length < 0:
            raise ValueError(f"record {index} has a header without a key")
        value_length, position = _read_varint(data, position + key_length)
        position += max(value_length, 0)
    if position != end:
        raise ValueError(f"the fields of record {index} do not fill its length")


def _refusal(index: int, keyless: bool, timestamp: int, rules: ScanRules) -> tuple[int, Errors, str] | None:
    if keyless and rules.needs_key:
        return index, Errors.INVALID_RECORD, "A compacted topic takes no message without a key."
    if not rules.checks_timestamps:
        return None
    if timestamp != NO_TIMESTAMP and not rules.earliest_ms <= timestamp <= rules.latest_ms:
        return (
            index,
            Errors.INVALID_TIMESTAMP,
            f"Timestamp {timestamp} of record {index} is not within [{rules.earliest_ms}, {rules.latest_ms}].",
        )
    if rules.type_is_wrong:
        return index, Errors.INVALID_TIMESTAMP, f"Record {index} claims log append time; only a broker sets it."
    return None
