# SPDX-License-Identifier: Apache-2.0
"""What happened in a shard since it was loaded, by the names of Kafka's group coordinator metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GroupCounters:
    """Counted by replay; loading counts for nothing."""

    offset_commits: int = 0
    """Partitions, as in Kafka, not requests."""
    offset_deletions: int = 0
    """By request, by expiration, or with their topic or group."""
    consumer_group_rebalances: int = 0
    """Group epochs of consumer groups."""
    completed_rebalances: int = 0
    """Generations of classic groups that got their assignments."""
