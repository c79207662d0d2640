# SPDX-License-Identifier: Apache-2.0
"""What an application may want to do when partitions come and go."""

from __future__ import annotations

from collections.abc import Awaitable

from kcoord.client.types import TopicPartition

Partitions = frozenset[TopicPartition]


class ConsumerRebalanceListener:
    """Override what is of interest; a method may be `async`. They run within `poll`, `unsubscribe` and `close`, so that
    no record is being handed out meanwhile.
    """

    def on_partitions_assigned(self, partitions: Partitions) -> Awaitable[None] | None:
        """These have come, and can be sought in; nothing has been fetched from them."""
        return None

    def on_partitions_revoked(self, partitions: Partitions) -> Awaitable[None] | None:
        """These are about to go; their offsets can still be committed."""
        return None

    def on_partitions_lost(self, partitions: Partitions) -> Awaitable[None] | None:
        """These are gone already, and others may read them: a commit would be refused."""
        return self.on_partitions_revoked(partitions)
