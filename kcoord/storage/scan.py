# SPDX-License-Identifier: Apache-2.0
"""Walks the batches of a log file, and describes damage by its position, offset and kind.

This module only recognizes damage. `recovery` decides whether it is a torn end or corruption.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from kcoord.storage.errors import CorruptLogError
from kcoord.storage.file_system import File
from kcoord_protocol.batch_header import (
    BATCH_OVERHEAD_BYTES,
    HEADER,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    SMALLEST_BATCH_LENGTH,
    verify_crc,
)
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import possible_batches, walk_batches

CHUNK_BYTES = 1 << 20
_LEGACY_CRC_POSITION = 12
_LEGACY_CRC_END = 16
_SMALLEST_LEGACY_LENGTH = 14
"""The length of a message without key and value."""
_WRONG_CRC = "the CRC of the batch does not match its content"
_ZEROS = "the file continues with zeros"


class BatchFrame(NamedTuple):
    """The position of a batch and some of its header fields. `data[at:at + size_bytes]` is the batch."""

    position: int
    size_bytes: int
    base_offset: int
    last_offset: int
    max_timestamp: int
    leader_epoch: int
    data: bytes
    at: int

    @property
    def batch(self) -> bytes:
        """The bytes of the batch."""
        return self.data[self.at : self.at + self.size_bytes]


class DamageKind(Enum):
    """The kinds of damage that the walk can find in the place of the next batch."""

    INCOMPLETE = "incomplete"
    """The file ends inside a batch."""
    GARBAGE = "garbage"
    """Bytes that are not a batch, or a batch whose CRC does not match."""
    MISPLACED = "misplaced"
    """A sound batch whose offsets do not continue the log."""
    FOREIGN = "foreign"
    """A sound message of a format before record batches v2."""


class Damage(Exception):
    """The walk stopped at `position`, where it expected a batch with a base offset of at least `offset`."""

    def __init__(self, kind: DamageKind, position: int, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.position = position
        self.offset = offset
        self.reason = reason


def walk(file: File, position: int, end: int, offset: int, *, verify: bool = True) -> Iterator[BatchFrame]:
    """Yields the batches from `position` to `end`. Their offsets have to rise, from at least `offset`.

    `verify` also checks every CRC. Raises Damage at the first batch that fails a check.
    """
    chunk_bytes = CHUNK_BYTES
    while position < end:
        chunk = file.read_at(position, min(chunk_bytes, end - position))
        at = 0
        try:
            for at, fields in walk_batches(chunk, verify=verify):
                base, length, epoch, _, _, _, last_delta, _, max_timestamp, _, _, _, _ = fields
                if base < offset:
                    raise _misplaced(chunk, at, position + at, offset, base)
                size = length + LOG_OVERHEAD_BYTES
                last = base + last_delta
                # Takes half the time of the constructor of the class. A recovery makes a tuple for every batch.
                yield tuple.__new__(BatchFrame, (position + at, size, base, last, max_timestamp, epoch, chunk, at))
                offset = last + 1
                at += size
        except CorruptBatchError as error:
            raise _garbage(file, chunk, error.position, position + error.position, end, offset) from None
        chunk_bytes = CHUNK_BYTES if at else _bytes_of_next_batch(file, chunk, position, end, offset)
        position += at


def _bytes_of_next_batch(file: File, chunk: bytes, position: int, end: int, offset: int) -> int:
    """Returns the size of the next batch, if `chunk` has only its first part. Raises Damage if the file ends in it."""
    # Another program may have truncated the file since it was opened.
    rest = min(end, file.size()) - position
    if len(chunk) >= BATCH_OVERHEAD_BYTES:
        size = int(HEADER.unpack_from(chunk)[1]) + LOG_OVERHEAD_BYTES
        if size <= rest:
            return size
        reason = f"the batch has a length of {size} bytes, but the file has only {rest} more"
    elif not any(chunk):
        raise Damage(DamageKind.GARBAGE, position, offset, _ZEROS)
    else:
        reason = f"the file ends {rest} bytes into a batch header"
    raise Damage(DamageKind.INCOMPLETE, position, offset, reason)


def _garbage(file: File, chunk: bytes, at: int, position: int, end: int, offset: int) -> Damage:
    """Returns the damage of the batch at `at`, which the walker rejected."""
    base, length, _, magic, _, _, last_delta, *_ = HEADER.unpack_from(chunk, at)
    if not any(chunk[at : at + BATCH_OVERHEAD_BYTES]):
        return Damage(DamageKind.GARBAGE, position, offset, _ZEROS)
    if magic in (0, 1) and _is_legacy_message(file, position, end, length):
        reason = f"a message in the old format (magic {magic}), which is not supported"
        return Damage(DamageKind.FOREIGN, position, offset, reason)
    if magic != MAGIC:
        return Damage(DamageKind.GARBAGE, position, offset, f"not a record batch: magic is {magic} instead of 2")
    if length >= SMALLEST_BATCH_LENGTH and base >= 0 and last_delta >= 0:
        return Damage(DamageKind.GARBAGE, position, offset, _WRONG_CRC)
    return Damage(DamageKind.GARBAGE, position, offset, f"impossible batch header: base offset {base}, length {length}")


def _is_legacy_message(file: File, position: int, end: int, length: int) -> bool:
    """True if the file has a message of magic 0 or 1 here. Its CRC-32 covers everything after the CRC field."""
    if not _SMALLEST_LEGACY_LENGTH <= length <= end - position - LOG_OVERHEAD_BYTES:
        return False
    data = file.read_at(position, LOG_OVERHEAD_BYTES + length)
    crc = int.from_bytes(data[_LEGACY_CRC_POSITION:_LEGACY_CRC_END], "big")
    return zlib.crc32(data[_LEGACY_CRC_END:]) == crc


def _misplaced(chunk: bytes, at: int, position: int, offset: int, base: int) -> Damage:
    if not verify_crc(chunk, at):
        return Damage(DamageKind.GARBAGE, position, offset, _WRONG_CRC)
    reason = f"the batch begins with offset {base}, but the log is already at {offset}: offsets overlap or fall"
    return Damage(DamageKind.MISPLACED, position, offset, reason)


def find_batch(file: File, position: int, end: int, offset: int) -> tuple[int, int] | None:
    """Returns position and base offset of the first sound batch at or after both `position` and `offset`, or None."""
    while end - position >= BATCH_OVERHEAD_BYTES:
        window = file.read_at(position, min(CHUNK_BYTES, end - position))
        for at, size, base in possible_batches(window, 0, end - position, offset):
            if verify_crc(file.read_at(position + at, size)):
                return position + at, base
        position += len(window) - BATCH_OVERHEAD_BYTES + 1
    return None


ADVICE = "restore the file from a backup, or truncate the log there and lose all later records with `kcoord log repair`"


def corrupt(path: str, damage: Damage, reason: str | None = None) -> CorruptLogError:
    """Returns the error for a damaged log, with advice for the operator."""
    return CorruptLogError(path, damage.position, damage.offset, reason or damage.reason, ADVICE)
