# SPDX-License-Identifier: Apache-2.0
"""Reads the records of a range of a log partition, with transactions resolved. A task of a job reads some ranges.

Theory of operation. A range [start, end) gives the same rows as it would as part of one read of the whole log. For
that, two things outside of the range matter:

* The marker of a transaction may follow the range. `_look_ahead` reads batches after the range until no transaction of
  the range is open, or up to `horizon`. A transaction without a marker before `horizon` stays open.
* A later record of the same key may supersede a committed record (`transactions.superseded`). `_find_superseded` reads
  the records up to the last commit marker of the range.

What precedes the range does not matter, since markers and superseding records follow the records that they affect.
Blocks before the first transactional batch are yielded at once. From there on the whole range is held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kcoord.pipeline.batch_table import Walk, walk
from kcoord.pipeline.buffers import Ints
from kcoord.pipeline.chunk import RecordChunk
from kcoord.pipeline.decode import Decoder
from kcoord.pipeline.kernels import NUMPY, Kernels
from kcoord.pipeline.keys import KeyTable
from kcoord.pipeline.log_files import BatchPlace, Folder, LogFolder
from kcoord.pipeline.log_reader import END_OF_LOG, Checksums, DamagedBytes, Piece, read_pieces
from kcoord.pipeline.transactions import COMMITTED, NEVER, Resolution, Resolver, superseded
from kcoord.pipeline.wire.place import BrokerPartition

if TYPE_CHECKING:
    from kcoord.pipeline.wire.log import BrokerLog

LogPlace: TypeAlias = Folder | BrokerPartition
"""Where a log is: in a folder, or in a cluster."""
_Log: TypeAlias = "LogFolder | BrokerLog"


@dataclass(frozen=True, slots=True)
class LogRange:
    """Offsets [start, end) of a log partition. Spark pickles it and sends it to the workers."""

    log: LogPlace
    start: int = 0
    end: int = END_OF_LOG
    horizon: int = END_OF_LOG
    hint: BatchPlace | None = None


@dataclass(slots=True)
class Part:
    """The records of one block of a range, and the damage found there."""

    chunk: RecordChunk
    damages: list[DamagedBytes]


def read_range(log_range: LogRange, keys: KeyTable, checksums: Checksums, kernels: Kernels = NUMPY) -> Iterator[Part]:
    """Yields the records of a range, in the order of the log.

    Holds everything from the first block with a transactional batch in memory, up to the end of the range.
    """
    log = _open(log_range.log)
    decoder = Decoder(log_range.log.log_partition, keys, kernels)
    held: list[tuple[Piece, Resolution]] = []
    resolver = Resolver()
    start, end, hint = log_range.start, log_range.end, log_range.hint
    for piece in _pieces(log, start, end, checksums, hint, kernels.walk):
        resolution = resolver.add(piece.batches, piece.control_types)
        if held or resolution.outcome.any():
            held.append((piece, resolution))
        else:
            yield _part(decoder, piece, resolution, log_range)
    if not held:
        return
    _look_ahead(log, resolver, log_range, checksums)
    parts = [_part(decoder, piece, resolution, log_range) for piece, resolution in held]
    _find_superseded(log, decoder, parts, log_range, checksums)
    yield from parts


def _open(place: LogPlace) -> _Log:
    if isinstance(place, Folder):
        return LogFolder(place)
    from kcoord.pipeline.wire.log import BrokerLog

    return BrokerLog(place)


def _pieces(
    log: _Log, start: int, end: int, checksums: Checksums, hint: BatchPlace | None = None, walk: Walk = walk
) -> Iterator[Piece]:
    """Yields the batches with offsets in [start, end)."""
    if isinstance(log, LogFolder):
        return read_pieces(log, start, end, checksums=checksums, hint=hint, walk=walk)
    return log.pieces(start, end, verify=checksums == "all", walk=walk)


def _look_ahead(log: _Log, resolver: Resolver, log_range: LogRange, checksums: Checksums) -> None:
    if not resolver.has_open():
        return
    for piece in _pieces(log, log_range.end, log_range.horizon, checksums):
        resolver.look_ahead(piece.batches, piece.control_types)
        if not resolver.has_open():
            return


def _part(decoder: Decoder, piece: Piece, resolution: Resolution, log_range: LogRange) -> Part:
    chunk, errors = decoder.decode(piece.data, piece.batches, resolution)
    damages = piece.damages + [_bad_batch(piece, row, reason) for row, reason in errors.items()]
    offsets = chunk.records.offset
    if len(offsets) and (offsets[0] < piece.start or offsets[-1] >= log_range.end):
        chunk = chunk.rows((offsets >= piece.start) & (offsets < log_range.end))
    return Part(chunk, damages)


def _bad_batch(piece: Piece, row: int, reason: str) -> DamagedBytes:
    batches = piece.batches
    start = int(batches.position[row])
    content = piece.data[start : start + int(batches.size_bytes[row])].tobytes()
    return DamagedBytes(int(batches.base_offset[row]), content, reason)


@dataclass(slots=True)
class _Rivals:
    """One row per record, with the facts that decide which commits of a key are superseded.

    The key is -1 for other records.
    """

    key: Ints
    offset: Ints
    effective: Ints
    outcome: Ints

    @classmethod
    def of(cls, chunk: RecordChunk) -> _Rivals:
        outcome = chunk.resolution.outcome[chunk.records.batch]
        key = np.where(chunk.is_offset, chunk.keys.places, -1)
        return cls(key, chunk.records.offset, chunk.effective, outcome)


def _find_superseded(log: _Log, decoder: Decoder, parts: list[Part], log_range: LogRange, checksums: Checksums) -> None:
    """Marks the superseded records of committed transactions.

    Also considers records after the range, up to the last marker that commits records of the range.
    """
    rivals = [_Rivals.of(part.chunk) for part in parts]
    own = sum(len(rows.key) for rows in rivals)
    committed = [rows.effective[(rows.outcome == COMMITTED) & (rows.effective != NEVER)] for rows in rivals]
    last_marker = max((int(markers.max()) for markers in committed if len(markers)), default=-1)
    if last_marker < 0:
        return
    if last_marker >= log_range.end:
        rivals += _behind(log, decoder, log_range.end, last_marker, checksums)
    lost = superseded(*(np.concatenate([getattr(rows, name) for rows in rivals]) for name in _Rivals.__slots__))[:own]
    at = 0
    for part in parts:
        part.chunk.lost = lost[at : at + len(part.chunk)]
        at += len(part.chunk)


def _behind(log: _Log, decoder: Decoder, start: int, marker: int, checksums: Checksums) -> Iterator[_Rivals]:
    """Yields the records from `start` up to a marker. Transactions that are still open at the marker do not count."""
    resolver = Resolver()
    pieces = []
    for piece in _pieces(log, start, marker + 1, checksums):
        pieces.append((piece, resolver.add(piece.batches, piece.control_types)))
    for piece, resolution in pieces:
        yield _Rivals.of(decoder.decode(piece.data, piece.batches, resolution)[0])
