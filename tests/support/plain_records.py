# SPDX-License-Identifier: Apache-2.0
"""A reader of records in plain arithmetic, with which the walker and the checks of records are compared."""

from __future__ import annotations


class Refused(Exception):
    """The plain reader does not accept the bytes."""


class Cursor:
    """Reads the numbers of a record one after the other, with plain arithmetic."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self, bits: int) -> int:
        value: int = 0
        for count in range((bits + 6) // 7):
            if self.at >= len(self.data):
                raise Refused
            byte = self.data[self.at]
            self.at += 1
            value += (byte % 128) << 7 * count
            if byte < 128:
                if value >= 2**bits:
                    raise Refused
                return value // 2 if value % 2 == 0 else -(value + 1) // 2
        raise Refused

    def piece(self, *, lenient: bool, nullable: bool = True) -> tuple[int, int]:
        size = self.number(32)
        if size < 0:
            if nullable and (size == -1 or lenient):
                return -1, -1
            raise Refused
        start = self.at
        self.at += size
        if self.at > len(self.data):
            raise Refused
        return start, self.at


def plain_records(
    data: bytes, count: int, *, last: int | None, check_headers: bool, check_deltas: bool = True, lenient: bool
) -> list[tuple[object, ...]]:
    """Returns (end, timestamp delta, offset delta, key, bounds of the value, start of the headers) of each record."""
    cursor = Cursor(data)
    records: list[tuple[object, ...]] = []
    previous = -1
    for _ in range(count):
        size = cursor.number(32)
        end = cursor.at + size
        if size < 0 or end > len(data):
            raise Refused
        record = Cursor(data[:end])
        record.at = cursor.at + 1
        later, delta = record.number(64), record.number(32)
        if delta < 0 and (last is not None or check_deltas):
            raise Refused
        key = record.piece(lenient=lenient)
        value = record.piece(lenient=lenient)
        headers_at = record.at
        if headers_at >= end or (data[headers_at] == 0) != (headers_at + 1 == end):
            raise Refused
        if check_headers:
            names = record.number(32)
            if names < 0:
                raise Refused
            for _ in range(names):
                record.piece(lenient=lenient, nullable=False)
                record.piece(lenient=lenient)
            if record.at != end:
                raise Refused
        if last is not None and (delta <= previous or delta > last):
            raise Refused
        previous = delta
        records.append((end, later, delta, data[key[0] : key[1]] if key[0] >= 0 else None, value, headers_at))
        cursor.at = end
    if cursor.at != len(data):
        raise Refused
    return records


def unzigzag(number: int) -> int:
    return number // 2 if number % 2 == 0 else -(number + 1) // 2
