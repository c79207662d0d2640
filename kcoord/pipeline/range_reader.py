# SPDX-License-Identifier: Apache-2.0
"""The records of a range of a log partition, transactions resolved: what one task of a job reads.

A transaction whose marker lies behind the range is followed there, as far as `horizon`; nothing behind that is looked
at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kcoord.pipeline.buffers import Ints
from kcoord.pipeline.chunk import RecordChunk
from kcoord.pipeline.decode import Decoder
from kcoord.pipeline.kernels import NUMPY, Kernels
from kcoord.pipeline.keys import KeyTable
from kcoord.pipeline.log_files import BatchPlace, Folder, LogFolder
from kcoord.pipeline.log_reader import END_OF_LOG, Checksums, DamagedBytes, Piece, read_pieces
from kcoord.pipeline.transactions import COMMITTED, NEVER, Resolution, Resolver, superseded


@dataclass(frozen=True, slots=True)
class LogRange:
    """Offsets [start, end) of a log partition. Plain data: it goes to the workers."""

    folder: Folder
    start: int = 0
    end: int = END_OF_LOG
    horizon: int = END_OF_LOG
    hint: BatchPlace | None = None


@dataclass(slots=True)
class Part:
    """Records of a range, and what is damaged beside them."""

    chunk: RecordChunk
    damages: list[DamagedBytes]


def read_range(wanted: LogRange, keys: KeyTable, checksums: Checksums, kernels: Kernels = NUMPY) -> Iterator[Part]:
    """In order. A range with transactions is held in memory as a whole, one without is not."""
    log = LogFolder(wanted.folder)
    decoder = Decoder(wanted.folder.log_partition, keys, kernels)
    held: list[tuple[Piece, Resolution]] = []
    resolver = Resolver()
    for piece in read_pieces(log, wanted.start, wanted.end, checksums=checksums, hint=wanted.hint, walk=kernels.walk):
        resolution = resolver.add(piece.batches, piece.control_types)
        if held or resolution.outcome.any():
            held.append((piece, resolution))
        else:
            yield _part(decoder, piece, resolution, wanted)
    if not held:
        return
    _look_ahead(log, resolver, wanted, checksums)
    parts = [_part(decoder, piece, resolution, wanted) for piece, resolution in held]
    _find_superseded(log, decoder, parts, wanted, checksums)
    yield from parts


def _look_ahead(log: LogFolder, resolver: Resolver, wanted: LogRange, checksums: Checksums) -> None:
    if not resolver.has_open():
        return
    for piece in read_pieces(log, wanted.end, wanted.horizon, checksums=checksums):
        resolver.look_ahead(piece.batches, piece.control_types)
        if not resolver.has_open():
            return


def _part(decoder: Decoder, piece: Piece, resolution: Resolution, wanted: LogRange) -> Part:
    chunk, errors = decoder.decode(piece.data, piece.batches, resolution)
    damages = piece.damages + [_bad_batch(piece, row, reason) for row, reason in errors.items()]
    offsets = chunk.records.offset
    if len(offsets) and (offsets[0] < piece.start or offsets[-1] >= wanted.end):
        chunk = chunk.rows((offsets >= piece.start) & (offsets < wanted.end))
    return Part(chunk, damages)


def _bad_batch(piece: Piece, row: int, reason: str) -> DamagedBytes:
    batches = piece.batches
    start = int(batches.position[row])
    content = piece.data[start : start + int(batches.size_bytes[row])].tobytes()
    return DamagedBytes(int(batches.base_offset[row]), content, reason)


@dataclass(slots=True)
class _Rivals:
    """What decides which commits of a key stay: a row per record."""

    key: Ints
    offset: Ints
    effective: Ints
    outcome: Ints

    @classmethod
    def of(cls, chunk: RecordChunk) -> _Rivals:
        outcome = chunk.resolution.outcome[chunk.records.batch]
        key = np.where(chunk.is_offset, chunk.keys.places, -1)
        return cls(key, chunk.records.offset, chunk.effective, outcome)


def _find_superseded(
    log: LogFolder, decoder: Decoder, parts: list[Part], wanted: LogRange, checksums: Checksums
) -> None:
    """Marks the committed records that lost; records behind the range take part up to the last marker that counts."""
    rivals = [_Rivals.of(part.chunk) for part in parts]
    own = sum(len(each.key) for each in rivals)
    committed = [each.effective[(each.outcome == COMMITTED) & (each.effective != NEVER)] for each in rivals]
    last_marker = max((int(each.max()) for each in committed if len(each)), default=-1)
    if last_marker < 0:
        return
    if last_marker >= wanted.end:
        rivals += _behind(log, decoder, wanted.end, last_marker, checksums)
    lost = superseded(*(np.concatenate([getattr(each, name) for each in rivals]) for name in _Rivals.__slots__))[:own]
    at = 0
    for part in parts:
        part.chunk.lost = lost[at : at + len(part.chunk)]
        at += len(part.chunk)


def _behind(log: LogFolder, decoder: Decoder, start: int, marker: int, checksums: Checksums) -> Iterator[_Rivals]:
    """Records between the range and a marker. Transactions that are still open at the marker do not count there."""
    resolver = Resolver()
    found = []
    for piece in read_pieces(log, start, marker + 1, checksums=checksums):
        found.append((piece, resolver.add(piece.batches, piece.control_types)))
    for piece, resolution in found:
        yield _Rivals.of(decoder.decode(piece.data, piece.batches, resolution)[0])
