# SPDX-License-Identifier: Apache-2.0
"""Finds the batches in a block of a log, checks them, and reads their header fields as columns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from struct import Struct
from typing import Final, Self, TypeAlias

import numpy as np

from kcoord.pipeline.buffers import Bytes, Flags, Gather, Ints
from kcoord_protocol.batch_header import (
    BATCH_OVERHEAD_BYTES,
    CONTROL_BIT,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    TRANSACTIONAL_BIT,
    crc32c,
    verify_crc,
)
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import decode_entries, possible_batches

Walk: TypeAlias = Callable[[Bytes, int, int], tuple[Ints, int]]
_LENGTH: Final = Struct(">i")
_LENGTH_AND_MAGIC: Final = Struct(">i4xB")
_LENGTH_AT: Final = 8
_MAGIC_AT: Final = 16
_COMPRESSION_BITS: Final = 0x07
_CRC_AT: Final = 17
_CHECKED_AT: Final = 21
_LAST_DELTA_AT: Final = 23


@dataclass(slots=True)
class Batches:
    """One row per batch.

    `position` and `size_bytes` locate the batch in the scanned buffer; the rest are header fields.
    """

    position: Ints
    size_bytes: Ints
    base_offset: Ints
    leader_epoch: Ints
    attributes: Ints
    last_offset: Ints
    base_timestamp: Ints
    max_timestamp: Ints
    producer_id: Ints
    producer_epoch: Ints
    base_sequence: Ints
    count: Ints

    @classmethod
    def read(cls, gather: Gather, position: Ints) -> Self:
        """Reads the headers of the batches that begin at `position`."""
        base_offset = gather.int64(position)
        return cls(
            position,
            gather.int32(position + _LENGTH_AT) + LOG_OVERHEAD_BYTES,
            base_offset,
            gather.int32(position + 12),
            gather.int16(position + 21),
            base_offset + gather.int32(position + 23),
            gather.int64(position + 27),
            gather.int64(position + 35),
            gather.int64(position + 43),
            gather.int16(position + 51),
            gather.int32(position + 53),
            gather.int32(position + 57),
        )

    def __len__(self) -> int:
        return len(self.position)

    def rows(self, chosen: Flags | Ints | slice) -> Self:
        return type(self)(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @property
    def is_control(self) -> Flags:
        return (self.attributes & CONTROL_BIT).astype(np.bool_)

    @property
    def is_transactional(self) -> Flags:
        return (self.attributes & TRANSACTIONAL_BIT).astype(np.bool_)

    @property
    def codec(self) -> Ints:
        return self.attributes & _COMPRESSION_BITS


def walk(data: Bytes, position: int, end: int) -> tuple[Ints, int]:
    """Returns the positions of the whole batches in `data[position:end]`, and the position after the last batch.

    Does the same as `walk_batches` of the protocol in half the time, since it reads two fields only. That time is an
    eighth of decoding batches of three records. `scan` checks the other fields of all batches at once.
    """
    view = data.data
    unpack = _LENGTH_AND_MAGIC.unpack_from
    positions: list[int] = []
    append = positions.append
    while end - position >= BATCH_OVERHEAD_BYTES:
        length, magic = unpack(view, position + _LENGTH_AT)
        following = position + length + LOG_OVERHEAD_BYTES
        if magic != MAGIC or length < BATCH_OVERHEAD_BYTES - LOG_OVERHEAD_BYTES or following > end:
            break
        append(position)
        position = following
    return np.array(positions, np.int64), position


@dataclass(slots=True)
class Scan:
    """The result of `scan`.

    `positions` has the sound batches. `end` is the position after the last sound batch. `error` describes what is
    wrong at `end`; it is "" if nothing follows, or if the buffer ends inside the next batch.
    """

    positions: Ints
    end: int
    error: str = ""


def scan(data: Bytes, end: int, walk: Walk, *, verify: bool) -> Scan:
    """Finds the sound batches in `data[:end]`, up to the first bad one. With `verify` it checks the checksums too."""
    positions, stop = walk(data, 0, end)
    view = data.data
    gather = Gather(data)
    impossible = np.flatnonzero((gather.int64(positions) < 0) | (gather.int32(positions + _LAST_DELTA_AT) < 0))
    if len(impossible):
        stop = int(positions[impossible[0]])
        positions = positions[: impossible[0]]
    if verify:
        wrong = np.flatnonzero(_checksums(view, positions, stop) != gather.int32(positions + _CRC_AT))
        if len(wrong):
            position = int(positions[wrong[0]])
            return Scan(positions[: wrong[0]], position, "the checksum of the batch does not match its content")
    if len(impossible):
        return Scan(positions, stop, "the offsets of the batch are negative")
    if end - stop < BATCH_OVERHEAD_BYTES:
        return Scan(positions, stop)
    return Scan(positions, stop, _what_is_wrong(view, stop))


def _checksums(view: memoryview, positions: Ints, stop: int) -> Ints:
    """Computes the checksums, as int32, of adjacent batches; the last batch ends at `stop`."""
    starts = positions.tolist()
    ends = [*starts[1:], stop]
    checksums = [crc32c(view[start + _CHECKED_AT : end]) for start, end in zip(starts, ends, strict=False)]
    return np.array(checksums, np.uint32).view(np.int32).astype(np.int64)


def _what_is_wrong(view: memoryview, position: int) -> str:
    if not any(view[position : position + BATCH_OVERHEAD_BYTES]):
        return "the header of the batch is all zeros"
    magic = view[position + _MAGIC_AT]
    if magic != MAGIC:
        return f"not a record batch of format 2: the magic byte is {magic}"
    is_long_enough = _LENGTH.unpack_from(view, position + _LENGTH_AT)[0] >= BATCH_OVERHEAD_BYTES - LOG_OVERHEAD_BYTES
    return "" if is_long_enough else "the length field of the batch is smaller than a batch header"


def find_batch(data: Bytes, position: int, end: int, offset: int) -> int | None:
    """Returns the first position at or after `position` of a sound batch whose base offset is at least `offset`."""
    content = data[:end].tobytes()
    return next((at for at, _, _ in possible_batches(content, position, end, offset) if verify_crc(content, at)), None)


def control_type(data: Bytes, batches: Batches, row: int) -> int:
    """Returns the type in the first record of a control batch, or -1 if the record cannot be read."""
    position = int(batches.position[row])
    batch = data[position : position + int(batches.size_bytes[row])].tobytes()
    with suppress(CorruptBatchError):
        for _, key, _ in decode_entries(batch):
            return -1 if key is None or len(key) < 4 else int.from_bytes(key[2:4], "big", signed=True)
    return -1
