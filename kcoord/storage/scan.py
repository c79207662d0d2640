# SPDX-License-Identifier: Apache-2.0
"""Walks the batches of a log file and says exactly where and why the walk cannot go on.

Only this module knows what damage looks like; whether damage is a torn tail or corruption is decided in recovery.py.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from kcoord.storage.errors import CorruptLogError
from kcoord.storage.file_system import File
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, crc32c, verify_crc

CHUNK_BYTES = 1 << 20
LENGTH_PREFIX_BYTES = 12
"""Base offset and length: what stands before the part of a batch that its length counts."""
SMALLEST_BATCH_LENGTH = BATCH_OVERHEAD_BYTES - LENGTH_PREFIX_BYTES
MAGIC_V2 = 2
_MAGIC_POSITION = 16
_LEGACY_CRC_POSITION = 12
_CHECKED_FROM = 21
"""Where the part of a batch begins that its CRC covers."""

FRAME = struct.Struct(">qiibIhiqq")
"""base offset, length, leader epoch, magic, CRC, attributes, last offset delta, base timestamp, max timestamp."""


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
        view = memoryview(chunk)
        at = 0
        while len(chunk) - at >= BATCH_OVERHEAD_BYTES:
            base, length, epoch, magic, crc, _, last_delta, _, max_timestamp = FRAME.unpack_from(chunk, at)
            size = length + LENGTH_PREFIX_BYTES
            if length < SMALLEST_BATCH_LENGTH or magic != MAGIC_V2 or base < 0 or last_delta < 0:
                raise _garbage(file, chunk, at, position + at, end, offset)
            if len(chunk) - at < size:
                break
            if verify and crc32c(view[at + _CHECKED_FROM : at + size]) != crc:
                raise Damage(
                    DamageKind.GARBAGE, position + at, offset, "the CRC of the batch does not match its content"
                )
            if base < offset:
                raise _misplaced(chunk, at, position + at, offset, base)
            yield BatchFrame(position + at, size, base, base + last_delta, max_timestamp, epoch, chunk, at)
            offset = base + last_delta + 1
            at += size
        wanted = CHUNK_BYTES if at else _bytes_of_next_batch(chunk, position, end, offset)
        position += at


def _bytes_of_next_batch(chunk: bytes, position: int, end: int, offset: int) -> int:
    """How much must be read for one whole batch, where `chunk` holds only the first part of it."""
    if len(chunk) >= BATCH_OVERHEAD_BYTES:
        size = FRAME.unpack_from(chunk)[1] + LENGTH_PREFIX_BYTES
        if position + size <= end and len(chunk) < size:
            return int(size)
        reason = f"the batch says that it has {size} bytes, the file has {end - position} more"
    elif not any(chunk):
        raise Damage(DamageKind.GARBAGE, position, offset, "the file goes on with zeros")
    else:
        reason = f"the file ends {end - position} bytes into a batch header"
    raise Damage(DamageKind.INCOMPLETE, position, offset, reason)


def _garbage(file: File, chunk: bytes, at: int, position: int, end: int, offset: int) -> Damage:
    base, length, _, magic, *_ = FRAME.unpack_from(chunk, at)
    if not any(chunk[at : at + BATCH_OVERHEAD_BYTES]):
        return Damage(DamageKind.GARBAGE, position, offset, "the file goes on with zeros")
    if magic in (0, 1) and _is_legacy_message(file, position, end, length):
        reason = f"a message in the old format (magic {magic}), which is not supported"
        return Damage(DamageKind.FOREIGN, position, offset, reason)
    if magic != MAGIC_V2:
        return Damage(DamageKind.GARBAGE, position, offset, f"no record batch: magic is {magic} instead of 2")
    return Damage(DamageKind.GARBAGE, position, offset, f"impossible batch header: base offset {base}, length {length}")


def _is_legacy_message(file: File, position: int, end: int, length: int) -> bool:
    """Whether a message of magic 0 or 1 lies here: its CRC-32 covers everything after the CRC itself."""
    if not _MAGIC_POSITION - LENGTH_PREFIX_BYTES < length <= end - position - LENGTH_PREFIX_BYTES:
        return False
    data = file.read_at(position, LENGTH_PREFIX_BYTES + length)
    crc = int.from_bytes(data[_LEGACY_CRC_POSITION:_MAGIC_POSITION], "big")
    return zlib.crc32(data[_MAGIC_POSITION:]) == crc


def _misplaced(chunk: bytes, at: int, position: int, offset: int, base: int) -> Damage:
    if not verify_crc(chunk, at):
        return Damage(DamageKind.GARBAGE, position, offset, "the CRC of the batch does not match its content")
    reason = f"the batch begins with offset {base}, but the log is at {offset} already: offsets overlap or go back"
    return Damage(DamageKind.MISPLACED, position, offset, reason)


def find_batch(file: File, position: int, end: int, offset: int) -> tuple[int, int] | None:
    """Position and base offset of the first sound batch at or behind both `position` and `offset`."""
    while end - position >= BATCH_OVERHEAD_BYTES:
        window = file.read_at(position, min(CHUNK_BYTES, end - position))
        last_start = len(window) - BATCH_OVERHEAD_BYTES
        magic_at = window.find(MAGIC_V2, _MAGIC_POSITION)
        while 0 <= magic_at <= last_start + _MAGIC_POSITION:
            at = magic_at - _MAGIC_POSITION
            if _is_sound(file, window, at, position, end, offset):
                return position + at, int(FRAME.unpack_from(window, at)[0])
            magic_at = window.find(MAGIC_V2, magic_at + 1)
        position += last_start + 1
    return None


def _is_sound(file: File, window: bytes, at: int, position: int, end: int, offset: int) -> bool:
    base, length, _, _, _, _, last_delta, _, _ = FRAME.unpack_from(window, at)
    size = length + LENGTH_PREFIX_BYTES
    if base < offset or last_delta < 0 or length < SMALLEST_BATCH_LENGTH or position + at + size > end:
        return False
    if at + size <= len(window):
        return verify_crc(window, at)
    return verify_crc(file.read_at(position + at, size), 0)


ADVICE = "restore the file from a backup, or cut the log there and lose what follows with `kcoord log repair`"


def corrupt(path: str, damage: Damage, reason: str | None = None) -> CorruptLogError:
    """The refusal of a log, in the words of the operator."""
    return CorruptLogError(path, damage.position, damage.offset, reason or damage.reason, ADVICE)
