# SPDX-License-Identifier: Apache-2.0
"""Chooses the log partitions that can hold the groups of a read."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kcoord.runtime.serde import partition_for


def chosen_partitions(
    numbers: Iterable[int], groups: Collection[str] | None, log_partitions: Collection[int] | None, count: int | None
) -> list[int]:
    """Returns the numbers among `log_partitions` to which a group hashes in a topic of `count` partitions, in order.

    None as `groups` or `log_partitions` means all. If `count` is None, `groups` excludes no partition.
    """
    routed = None if groups is None or count is None else {partition_for(group, count) for group in groups}
    return sorted(
        number
        for number in numbers
        if (log_partitions is None or number in log_partitions) and (routed is None or number in routed)
    )


def is_excluded(number: int, groups: Collection[str] | None, log_partitions: Collection[int] | None) -> bool:
    """Returns whether a read may leave out a log partition because of its options."""
    return groups is not None or (log_partitions is not None and number not in log_partitions)
