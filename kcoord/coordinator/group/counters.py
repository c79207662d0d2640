# SPDX-License-Identifier: Apache-2.0
"""Counters of groups and offsets, named after KIP-496's meters and Kafka's group coordinator metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class GroupCounters:
    """Counts live records as they are replayed; loading a log changes no counter.

    Shards may share one object, so that the sums never decrease if a shard is loaded again.
    """

    offset_commits: int = 0
    """Committed partitions, not requests, as in Kafka. Commits in a transaction count when they are written."""
    offset_expirations: int = 0
    """Offsets that KIP-211 removed."""
    offset_deletions: int = 0
    """Offsets that OffsetDelete removed. As in Kafka, those deleted with their group or topic do not count."""
    consumer_group_rebalances: int = 0
    """Group epochs of consumer groups."""
    classic_rebalances_completed: int = 0
    """Generations of classic groups that received their assignments."""
    consumer_rebalances_completed: int = 0
    """Group epochs that all members of a consumer group have reached."""
    assignor_failures: Counter[str] = field(default_factory=Counter)
    """Assignor -> target assignments that an assignor of one's own did not compute."""
    client_computations: Counter[str] = field(default_factory=Counter)
    """Outcome -> computations of a target by a member (`consumer.client_computation`)."""
    client_assignor_fallbacks: int = 0
    """Targets that a server-side assignor computes because all able members have failed to."""
    client_computation_ms: int = 0
    """The sum of the times from asking a member until it has installed its target."""
    imports: Counter[str] = field(default_factory=Counter)
    """Groups that came from another coordinator (`imported`), their `offsets`, and `failed` attempts."""
