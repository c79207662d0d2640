# SPDX-License-Identifier: Apache-2.0
"""Walks the batches of a log file and says exactly where and why the walk cannot go on.

Only this module knows what damage looks like; whether damage is a torn tail or corruption is decided in recovery.py.
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
_SMALLEST_LEGACY_LENGTH = 14  # neither key nor value
_WRONG_CRC = "the CRC of the batch does not match its content"


class BatchFrame(NamedTuple):
    """Where a batch lies, and the header fields that storage works with. `data[at:at + size_bytes]` is the batch."""

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
        return self.data[self.at : self.at + self.size_bytes]


class DamageKind(Enum):
    """What the walk met instead of the next batch."""

    INCOMPLETE = "incomplete"
    """The file ends inside a batch."""
    GARBAGE = "garbage"
    """Bytes that are no batch, or a batch whose CRC does not match."""
    MISPLACED = "misplaced"
    """A sound batch whose offsets do not continue the log."""
    FOREIGN = "foreign"
    """A sound message of a format before record batches v2."""


class Damage(Exception):
    """The walk stopped at `position`, where a batch with at least `offset` was due."""

    def __init__(self, kind: DamageKind, position: int, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.position = position
        self.offset = offset
        self.reason = reason


def walk(file: File, position: int, end: int, offset: int, *, verify: bool = True) -> Iterator[BatchFrame]:
    """The batches in [position, end), the first of which has a base offset of at least `offset`; raises Damage.

    `verify` also checks each CRC.
    """
    wanted = CHUNK_BYTES
    while position < end:
        chunk = file.read_at(position, min(wanted, end - position))
        at = 0
        try:
            for at, fields in walk_batches(chunk, verify=verify):
                base, length, epoch, _, _, _, last_delta, _, max_timestamp, _, _, _, _ = fields
                if base < offset:
                    raise _misplaced(chunk, at, position + at, offset, base)
                size = length + LOG_OVERHEAD_BYTES
                last = base + last_delta
                # Half the time of the class's own constructor: a recovery makes one for each batch.
                yield tuple.__new__(BatchFrame, (position + at, size, base, last, max_timestamp, epoch, chunk, at))
                offset = last + 1
                at += size
        except CorruptBatchError as error:
            raise _garbage(file, chunk, error.position, position + error.position, end, offset) from None
        wanted = CHUNK_BYTES if at else _bytes_of_next_batch(file, chunk, position, end, offset)
        position += at


def _bytes_of_next_batch(file: File, chunk: bytes, position: int, end: int, offset: int) -> int:
    """How much must be read for one whole batch, where `chunk` holds only the first part of it."""
    rest = min(end, file.size()) - position  # somebody may have cut the file since it was opened
    if len(chunk) >= BATCH_OVERHEAD_BYTES:
        size = int(HEADER.unpack_from(chunk)[1]) + LOG_OVERHEAD_BYTES
        if size <= rest:
            return size
        reason = f"the batch says that it has {size} bytes, the file has {rest} more"
    elif not any(chunk):
        raise Damage(DamageKind.GARBAGE, position, offset, "the file goes on with zeros")
    else:
        reason = f"the file ends {rest} bytes into a batch header"
    raise Damage(DamageKind.INCOMPLETE, position, offset, reason)


def _garbage(file: File, chunk: bytes, at: int, position: int, end: int, offset: int) -> Damage:
    """What is wrong with the batch at `at`, which the walker refused."""
    base, length, _, magic, _, _, last_delta, *_ = HEADER.unpack_from(chunk, at)
    if not any(chunk[at : at + BATCH_OVERHEAD_BYTES]):
        return Damage(DamageKind.GARBAGE, position, offset, "the file goes on with zeros")
    if magic in (0, 1) and _is_legacy_message(file, position, end, length):
        reason = f"a message in the old format (magic {magic}), which is not supported"
        return Damage(DamageKind.FOREIGN, position, offset, reason)
    if magic != MAGIC:
        return Damage(DamageKind.GARBAGE, position, offset, f"no record batch: magic is {magic} instead of 2")
    if length >= SMALLEST_BATCH_LENGTH and base >= 0 and last_delta >= 0:
        return Damage(DamageKind.GARBAGE, position, offset, _WRONG_CRC)
    return Damage(DamageKind.GARBAGE, position, offset, f"impossible batch header: base offset {base}, length {length}")


def _is_legacy_message(file: File, position: int, end: int, length: int) -> bool:
    """Whether a message of magic 0 or 1 lies here: its CRC-32 covers everything after the CRC itself."""
    if not _SMALLEST_LEGACY_LENGTH <= length <= end - position - LOG_OVERHEAD_BYTES:
        return False
    data = file.read_at(position, LOG_OVERHEAD_BYTES + length)
    crc = int.from_bytes(data[_LEGACY_CRC_POSITION:_LEGACY_CRC_END], "big")
    return zlib.crc32(data[_LEGACY_CRC_END:]) == crc


def _misplaced(chunk: bytes, at: int, position: int, offset: int, base: int) -> Damage:
    if not verify_crc(chunk, at):
        return Damage(DamageKind.GARBAGE, position, offset, _WRONG_CRC)
    reason = f"the batch begins with offset {base}, but the log is at {offset} already: offsets overlap or go back"
    return Damage(DamageKind.MISPLACED, position, offset, reason)


def find_batch(file: File, position: int, end: int, offset: int) -> tuple[int, int] | None:
    """Position and base offset of the first sound batch at or behind both `position` and `offset`."""
    while end - position >= BATCH_OVERHEAD_BYTES:
        window = file.read_at(position, min(CHUNK_BYTES, end - position))
        for at, size, base in possible_batches(window, 0, end - position, offset):
            if verify_crc(file.read_at(position + at, size)):
                return position + at, base
        position += len(window) - BATCH_OVERHEAD_BYTES + 1
    return None


ADVICE = "restore the file from a backup, or cut the log there and lose what follows with `kcoord log repair`"


def corrupt(path: str, damage: Damage, reason: str | None = None) -> CorruptLogError:
    """The refusal of a log, in the words of the operator."""
    return CorruptLogError(path, damage.position, damage.offset, reason or damage.reason, ADVICE)
