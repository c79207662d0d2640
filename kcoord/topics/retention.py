# SPDX-License-Identifier: Apache-2.0
"""Deletes old segments: below the start offset always; by time and size if cleanup.policy contains `delete`."""

from __future__ import annotations

from kcoord.storage.log import Log
from kcoord.storage.segment import Segment

UNLIMITED = -1


def expired_by_time(segment: Segment, retention_ms: int, now_ms: int) -> bool:
    """Returns whether the newest record of the segment is older than `retention_ms`.

    In a segment without timestamps, the age of the segment decides.
    """
    if retention_ms == UNLIMITED:
        return False
    largest = segment.largest_timestamp
    newest_ms = segment.created_ms if largest is None else largest.timestamp
    return now_ms - newest_ms > retention_ms


def delete_expired(log: Log, *, retention_ms: int, retention_bytes: int, now_ms: int) -> int:
    """Deletes the oldest segments by time, then by size, and those below the start offset; returns their number."""
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
    """Deletes the segments below the start offset; returns their number. Used for compacted topics."""
    return log.delete_old_segments(lambda _: False, now_ms)
