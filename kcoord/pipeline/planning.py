# SPDX-License-Identifier: Apache-2.0
"""Which log partitions a read needs, and how they are cut into ranges of about equal size for the tasks of a job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kcoord.pipeline.decode import Decoder
from kcoord.pipeline.keys import KeyTable
from kcoord.pipeline.log_files import Folder, LogFolder
from kcoord.pipeline.log_reader import END_OF_LOG, read_pieces
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.transactions import Resolution
from kcoord.runtime.shard_set import partition_for

_SAMPLE_BYTES = 1 << 16


def log_ranges(
    folder: Folder, split_bytes: int, start: int = 0, end: int = END_OF_LOG, horizon: int = END_OF_LOG
) -> list[tuple[LogRange, int]]:
    """Ranges that cover [start, end), with their sizes in bytes; large segments are cut at entries of their indexes."""
    log = LogFolder(folder)
    cuts: list[tuple[int, int]] = []
    total = 0
    for segment in log.segments():
        cuts.append((segment.base_offset, total))
        if segment.size_bytes > split_bytes:
            cuts += [(last_offset + 1, total + position) for last_offset, position in log.index(segment)]
        total += segment.size_bytes
    ranges: list[tuple[LogRange, int]] = []
    begun = max((at for offset, at in cuts if offset <= start), default=0)
    for offset, at in cuts:
        if start < offset < end and at - begun >= split_bytes:
            ranges.append((LogRange(folder, start, offset, horizon), at - begun))
            start, begun = offset, at
    stop = min((at for offset, at in cuts if offset >= end), default=total)
    if stop > begun or end != END_OF_LOG:
        ranges.append((LogRange(folder, start, end, horizon), max(stop - begun, 1)))
    return ranges


def pack(ranges: Iterable[tuple[LogRange, int]], split_bytes: int) -> list[list[LogRange]]:
    """Small ranges together, in order, as long as they are no more than `split_bytes`."""
    packs: list[list[LogRange]] = []
    room = 0
    for each, size in ranges:
        if not packs or size > room:
            packs.append([])
            room = split_bytes
        packs[-1].append(each)
        room -= size
    return packs


def prune(
    folders: Sequence[Folder], groups: Collection[str] | None, log_partitions: Collection[int] | None, count: int | None
) -> list[Folder]:
    """The log partitions that can hold the groups. `count` is the topic's number of partitions; without it the folders
    tell, if their records agree.
    """
    found = [each for each in folders if log_partitions is None or each.log_partition in log_partitions]
    if groups is None:
        return found
    if count is None:
        count = _partition_count(folders)
    if count is None:
        return found
    wanted = {partition_for(group, count) for group in groups}
    return [each for each in found if each.log_partition in wanted]


def _partition_count(folders: Sequence[Folder]) -> int | None:
    """None where the folders are not all of the topic, as on one of several brokers or log directories."""
    count = len(folders)
    if [each.log_partition for each in folders] != list(range(count)):
        return None
    return count if all(_is_routed(each, count) for each in folders) else None


def _is_routed(folder: Folder, count: int) -> bool:
    """Whether the first groups in a log partition belong there among so many."""
    keys = KeyTable()
    decoder = Decoder(folder.log_partition, keys)
    for piece in read_pieces(LogFolder(folder), 0, END_OF_LOG, checksums="none", block_bytes=_SAMPLE_BYTES):
        decoder.decode(piece.data, piece.batches, Resolution.without(len(piece.batches)))
        groups = {key.group for key in keys.keys if key.group is not None and key.error is None}
        if groups:
            return all(partition_for(group, count) == folder.log_partition for group in groups)
    return True
