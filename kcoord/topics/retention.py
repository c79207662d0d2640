# SPDX-License-Identifier: Apache-2.0
"""Which old segments a partition gives up: below its start offset always; by time and size where cleanup.policy has
`delete`.
"""

from __future__ import annotations

from kcoord.storage.log import Log
from kcoord.storage.segment import Segment

UNLIMITED = -1


def expired_by_time(segment: Segment, retention_ms: int, now_ms: int) -> bool:
    """Whether the newest record of the segment is too old. Without any timestamp the age of the segment decides."""
    if retention_ms == UNLIMITED:
        return False
    largest = segment.largest_timestamp
    newest_ms = segment.created_ms if largest is None else largest.timestamp
    return now_ms - newest_ms > retention_ms


def delete_expired(log: Log, *, retention_ms: int, retention_bytes: int, now_ms: int) -> int:
    """Deletes the oldest segments by time, then by size, and always what lies below the start offset; how many went."""
    deleted = log.delete_old_segments(lambda segment: expired_by_time(segment, retention_ms, now_ms), now_ms)
    if retention_bytes < 0:
        return deleted
    excess_bytes = log.size_bytes - retention_bytes

    def is_excess(segment: Segment) -> bool:
        nonlocal excess_bytes
        if excess_bytes < segment.size_bytes:
            return False
        excess_bytes -= segment.size_bytes
        return True

    return deleted + log.delete_old_segments(is_excess, now_ms)


def delete_below_start(log: Log, now_ms: int) -> int:
    """Deletes only what lies below the start offset: all that a compacted topic gives up here."""
    return log.delete_old_segments(lambda _: False, now_ms)
