# SPDX-License-Identifier: Apache-2.0
"""What a transaction shard asks its shell to do, and the timers it arms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kcoord.coordinator.transaction.metadata import Partitions
from kcoord.runtime.result import Producer, TimerKey, TimerKind


class TransactionTimer(TimerKind):
    """Timers and tasks of transaction coordinator shards."""

    TIMEOUT = "transaction-timeout"
    MARKERS = "transaction-markers"
    EXPIRATION = "transactional-id-expiration"


EXPIRATION_KEY: Final = TimerKey(TransactionTimer.EXPIRATION)

FIRST_RETRY_MS: Final = 100
LONGEST_RETRY_MS: Final = 5_000


def timeout_key(transactional_id: str) -> TimerKey:
    """When the transaction under way has taken too long."""
    return TimerKey(TransactionTimer.TIMEOUT, transactional_id)


def markers_key(transactional_id: str) -> TimerKey:
    """The work of writing markers, and the time at which it is tried again."""
    return TimerKey(TransactionTimer.MARKERS, transactional_id)


@dataclass(slots=True)
class WriteMarkers:
    """Tell every partition how a transaction ended. Its value is None once all of them know durably, or an exception.

    An `attempt` after the first may meet partitions that know already, and so may the first one after a restart, which
    therefore has the number 1.
    """

    transactional_id: str
    producer: Producer
    committed: bool
    coordinator_epoch: int
    transaction_version: int
    partitions: Partitions
    attempt: int = 0

    @property
    def retry_delay_ms(self) -> int:
        """How long to wait after this attempt has failed."""
        return min(FIRST_RETRY_MS << min(self.attempt, 10), LONGEST_RETRY_MS)
