# SPDX-License-Identifier: Apache-2.0
"""Lists the partitions of the topic in a cluster, and cuts them into ranges of offsets for the tasks of a job.

A broker tells offsets, and the size of a log if the client may DESCRIBE the cluster. So the size of a range is an
estimate: that of the log by its share of the offsets, or by the density at the ends of the range if that is greater.
The cleaned part of a log has fewer records than offsets. Each cut is at the beginning of a batch, which a small fetch
finds, so no batch is in two ranges.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from kcoord.pipeline.log_files import NoLogError
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.routing import chosen_partitions
from kcoord.pipeline.wire.client import EARLIEST, LATEST, client_of
from kcoord.pipeline.wire.log import BrokerLog
from kcoord.pipeline.wire.place import BrokerPartition

BYTES_PER_OFFSET: Final = 100
"""The assumed size of an offset's record if the broker tells no size: that of an offset commit in a batch of many."""
_DENSER: Final = 2
"""A range that is that many times denser at its end than assumed is made shorter."""
_MOST_RANGES: Final = 64
"""At most this many ranges are cut from a log of unknown size, since it may have many offsets and few records."""


def broker_partitions(options: SourceOptions) -> list[BrokerPartition]:
    """Returns the partitions that a read needs, with their offsets of now. Raises NoLogError if there is no topic."""
    client = client_of(options.properties)
    topic = client.topic(options.topic)
    if topic is None:
        raise NoLogError(f"topic: {options.topic} does not exist in the cluster")
    count = options.offsets_topic_partitions or len(topic.partitions)
    numbers = chosen_partitions(topic.partitions, options.groups, options.log_partitions, count)
    starts = client.offsets(options.topic, numbers, EARLIEST)
    ends = client.offsets(options.topic, numbers, LATEST)
    return [
        BrokerPartition(
            number,
            options.topic,
            topic.topic_id,
            options.properties,
            starts[number],
            ends[number],
            fail_on_data_loss=options.fails_on_data_loss,
        )
        for number in numbers
    ]


def check_rights(options: SourceOptions) -> None:
    """Raises BrokerError or NoLogError if the topic cannot be read: no broker answers, or the client has no right."""
    for place in broker_partitions(options)[:1]:
        BrokerLog(place).probe(place.start_offset)


def with_sizes(places: Collection[BrokerPartition]) -> list[BrokerPartition]:
    """Adds the sizes of the logs, as far as the brokers tell them."""
    if not places:
        return []
    first = next(iter(places))
    sizes = client_of(first.properties).sizes(first.topic, [place.log_partition for place in places])
    return [replace(place, size_bytes=sizes.get(place.log_partition)) for place in places]


def bytes_per_offset(place: BrokerPartition) -> float:
    offsets = place.end_offset - place.start_offset
    return BYTES_PER_OFFSET if place.size_bytes is None or not offsets else max(place.size_bytes, 1) / offsets


def bytes_between(place: BrokerPartition, start: int, end: int) -> int:
    """Estimates the size of a range that the log ends with, or of one in it that is as dense as its end."""
    size = int((end - start) * max(bytes_per_offset(place), BYTES_PER_OFFSET))
    return max(size if place.size_bytes is None else min(size, place.size_bytes), 1)


def range_within(
    place: BrokerPartition, begun: int, stop: int, budget_bytes: int, least_offsets: int = 1
) -> tuple[int, int]:
    """Returns the end of a batch that is about the budget behind `begun`, at most `stop`, and the estimated size.

    The log cleaner leaves few records per offset of the older part of a log, so the newer part is denser than the mean.
    If the log is denser at the begin or end of the range than assumed, the range is made shorter.
    """
    log = BrokerLog(place)
    density = bytes_per_offset(place)
    is_measured = place.size_bytes is not None and place.size_bytes > budget_bytes
    if is_measured and (first := log.probe(begun)) is not None:
        density = max(density, first.density)
    offsets = max(int(budget_bytes / density), least_offsets)
    while True:
        is_last = begun + offsets >= stop
        probe = log.probe(stop - 1 if is_last else begun + offsets) if is_measured or not is_last else None
        if is_measured and probe is not None and probe.density > _DENSER * density:
            density = probe.density
            offsets = max(int(budget_bytes / density), least_offsets)
            continue
        end = stop if is_last or probe is None else min(probe.base_offset, stop)
        if end > begun:
            return end, max(min(int((end - begun) * density), place.size_bytes or sys.maxsize), 1)
        offsets *= 2


def broker_ranges(
    place: BrokerPartition, split_bytes: int, start: int, end: int, horizon: int
) -> list[tuple[LogRange, int]]:
    """Returns ranges that cover [start, end) as far as the log has it, with their estimated sizes in bytes.

    0 as `start` means the start of the log.
    """
    begun, end = start or place.start_offset, min(end, place.end_offset)
    least_offsets = (end - begun) // _MOST_RANGES if place.size_bytes is None else 1
    ranges = []
    while begun < end:
        cut, size = range_within(place, begun, end, split_bytes, max(least_offsets, 1))
        ranges.append((LogRange(place, begun, cut, horizon), size))
        begun = cut
    return ranges
