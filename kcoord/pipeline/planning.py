# SPDX-License-Identifier: Apache-2.0
"""Lists the log partitions that a read needs, and cuts them into ranges of about equal size for the tasks of a job.

Of folders it reads file names, sizes and indexes, and batches only to check how groups are routed. The ranges are
limits in log offsets: they stay valid if the broker rolls or cleans segments before a task reads them.
`wire.planning` does the same with the answers of brokers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kcoord.pipeline.decode import Decoder
from kcoord.pipeline.keys import KeyTable
from kcoord.pipeline.log_files import Folder, LogFolder, cluster_id_at, folders_at
from kcoord.pipeline.log_reader import END_OF_LOG, read_pieces
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.range_reader import LogPlace, LogRange
from kcoord.pipeline.routing import chosen_partitions
from kcoord.pipeline.transactions import Resolution
from kcoord.runtime.serde import partition_for

_SAMPLE_BYTES = 1 << 16


def list_logs(options: SourceOptions) -> list[LogPlace]:
    """Returns the logs that a read needs, in order. Raises NoLogError if there are none."""
    if options.properties:
        from kcoord.pipeline.wire.planning import broker_partitions, with_sizes

        return [*with_sizes(broker_partitions(options))]
    return [*list_folders(options)]


def cluster_id_of(options: SourceOptions) -> str | None:
    """Returns the id of the cluster whose logs the options name, None if it is unknown."""
    if not options.properties:
        return cluster_id_at(options.paths)
    from kcoord.pipeline.wire.client import client_of

    return client_of(options.properties).cluster_id()


def list_folders(options: SourceOptions) -> list[Folder]:
    """Returns the folders that a read needs, in order. Raises NoLogError if there are none."""
    folders = folders_at(options.paths, options.topic)
    return prune(folders, options.groups, options.log_partitions, options.offsets_topic_partitions)


def log_ranges(
    place: LogPlace, split_bytes: int, start: int = 0, end: int = END_OF_LOG, horizon: int = END_OF_LOG
) -> list[tuple[LogRange, int]]:
    """Returns ranges that cover [start, end), with their sizes in bytes."""
    if isinstance(place, Folder):
        return _folder_ranges(place, split_bytes, start, end, horizon)
    from kcoord.pipeline.wire.planning import broker_ranges

    return broker_ranges(place, split_bytes, start, end, horizon)


def _folder_ranges(folder: Folder, split_bytes: int, start: int, end: int, horizon: int) -> list[tuple[LogRange, int]]:
    """Cuts at segment boundaries, and segments larger than `split_bytes` at entries of their indexes."""
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
    """Groups adjacent ranges into packs of at most `split_bytes`. A larger range is a pack of its own."""
    packs: list[list[LogRange]] = []
    room = 0
    for log_range, size in ranges:
        if not packs or size > room:
            packs.append([])
            room = split_bytes
        packs[-1].append(log_range)
        room -= size
    return packs


def prune(
    folders: Sequence[Folder], groups: Collection[str] | None, log_partitions: Collection[int] | None, count: int | None
) -> list[Folder]:
    """Returns the folders of the given log partitions that can hold the groups. None means all.

    `count` is the number of partitions of the topic. If it is None, the number of folders is used if it is consistent
    with their records; otherwise `groups` excludes no folder.
    """
    if groups is not None and count is None:
        count = _partition_count(folders)
    chosen = chosen_partitions((folder.log_partition for folder in folders), groups, log_partitions, count)
    return [folder for folder in folders if folder.log_partition in chosen]


def _partition_count(folders: Sequence[Folder]) -> int | None:
    """Returns the number of partitions of the topic.

    Returns None if the folders are not all of the topic, as on one of several brokers or log directories.
    """
    count = len(folders)
    if [folder.log_partition for folder in folders] != list(range(count)):
        return None
    return count if all(_is_routed(folder, count) for folder in folders) else None


def _is_routed(folder: Folder, count: int) -> bool:
    """True if the first groups in a log partition hash to it in a topic of `count` partitions."""
    keys = KeyTable()
    decoder = Decoder(folder.log_partition, keys)
    for piece in read_pieces(LogFolder(folder), 0, END_OF_LOG, checksums="none", block_bytes=_SAMPLE_BYTES):
        decoder.decode(piece.data, piece.batches, Resolution.without(len(piece.batches)))
        groups = {key.group for key in keys.keys if key.group is not None and key.error is None}
        if groups:
            return all(partition_for(group, count) == folder.log_partition for group in groups)
    return True
