# SPDX-License-Identifier: Apache-2.0
"""What the shards of one runtime have for the outside: replies, tasks, appends for their logs, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from kcoord.runtime.deferred_replies import Reply, Waiter
from kcoord.runtime.result import Task


@dataclass(slots=True)
class Append:
    """Whole batches with final offsets, `base_offset` up to before `next_offset`, for the log of one shard."""

    shard_id: int
    base_offset: int
    next_offset: int
    data: bytes


@dataclass(slots=True)
class Statistics:
    """What the shards of one runtime did, for metrics."""

    records_appended: int = 0
    batches_appended: int = 0
    bytes_appended: int = 0
    appends_failed: int = 0
    operations_failed: int = 0
    timers_fired: int = 0
    records_loaded: int = 0
    records_skipped: int = 0


@dataclass(slots=True)
class Outbox:
    """What the shards of one runtime have for the next `poll`."""

    replies: list[Reply] = field(default_factory=list)
    waiters: list[Waiter] = field(default_factory=list)
    tasks: list[tuple[int, Task]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    writable: list[int] = field(default_factory=list)
