# SPDX-License-Identifier: Apache-2.0
"""The callbacks of an application for assigned and revoked partitions."""

from __future__ import annotations

from collections.abc import Awaitable

from kcoord.client.types import TopicPartition

Partitions = frozenset[TopicPartition]


class ConsumerRebalanceListener:
    """Callbacks for assigned, revoked and lost partitions. Override the methods you need; they may be `async`.

    They run within `poll`, `unsubscribe` and `close`, so `poll` returns no record before they end.
    If the caller of `poll` is cancelled, so is a method that is running, and the partitions count as handled.
    """

    def on_partitions_assigned(self, partitions: Partitions) -> Awaitable[None] | None:
        """Called after partitions were assigned. It may seek; other positions are looked up after it, as in Java."""
        return None

    def on_partitions_revoked(self, partitions: Partitions) -> Awaitable[None] | None:
        """Called before partitions are revoked. It may still commit their offsets."""
        return None

    def on_partitions_lost(self, partitions: Partitions) -> Awaitable[None] | None:
        """Called after partitions were lost. Other members may own them, and the coordinator would reject a commit.

        By default calls `on_partitions_revoked`.
        """
        return self.on_partitions_revoked(partitions)
